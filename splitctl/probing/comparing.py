"""Compares what two placements compute. Arithmetic on rows of logits, a row at a time: a vocabulary is large."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from splitctl.placement import FlashAttn, Placement

Logits = NDArray[np.float32]

#: Logits of a right placement differ by float order. Worst batch measured in right ones: NMSE 2.4e-3 (SmolLM2 Q4_1); in
#: wrong ones (ALiBi over two devices): 2e-2 to 0.8, and 2e-3 where the bias is weak, which only a rule can find.
NMSE_LIMIT = 0.02
NMSE_LIMIT_QUANTIZED = 0.1
#: A model that is far from itself in another order of the same floats may be so many times as far in another mode, but
#: never beyond the wider limit. Measured in right placements: 27B of random q8_0 weights on two H200 2.5e-2.
_TIMES_ITSELF = 4.0
UNQUANTIZED = frozenset({"f32", "f16", "bf16"})

#: What a child is doing while the reference is compared with itself: a death there says nothing of the reference.
CONTROL_STAGE = "comparing it with itself"

#: A reference's logits are kept in a file of this size at most [bytes].
MAX_KEPT_BYTES = 256 << 20

#: Larger values are masks, not logits.
_MASK = 1e30

#: Rows whose error is also judged by itself: a fault that begins late must not drown in what was right before it.
WINDOW_ROWS = 16

#: Two candidates closer than so many times the row's own noise are a tie, whichever of them wins.
TIE_SIGMAS = 4.0


def is_sound(row: Logits) -> bool:
    """Tell whether logits of any shape are numbers: a mask is minus infinity, and not all of them are masks."""
    return not (np.isnan(row).any() or np.isposinf(row).any()) and bool(np.isfinite(row).any())


def nmse_limit(type_k: str, type_v: str) -> float:
    """Give the normalised mean squared error beyond which a placement with these cache types is wrong."""
    return NMSE_LIMIT if {type_k, type_v} <= UNQUANTIZED else NMSE_LIMIT_QUANTIZED


def widened(limit: float, control: float) -> float:
    """Widen a limit where the reference differs from itself by `control` (NMSE) when floats are added in another order.

    The result is never beyond the wider of the two limits: what is that far off is wrong, or too noisy to be told.
    """
    return max(limit, min(_TIMES_ITSELF * control, NMSE_LIMIT_QUANTIZED))


def in_another_order(placement: Placement) -> Placement:
    """Give a placement that adds the same floats in another order: other kernels, where the cache's types allow it.

    Without flash attention where it was on, or left open, and with it where it was off.
    """
    if not {placement.type_k, placement.type_v} <= UNQUANTIZED:
        return placement
    other = FlashAttn.ON if placement.flash_attn is FlashAttn.OFF else FlashAttn.OFF
    return dataclasses.replace(placement, flash_attn=other)


def sums(mine: Logits, theirs: Logits) -> tuple[float, float]:
    """Add up the squared difference and the squared reference (float32 of one shape), in double precision.

    Masked entries do not count.
    """
    real = (np.abs(mine) < _MASK) & (np.abs(theirs) < _MASK)
    a, b = mine[real].astype(np.float64), theirs[real].astype(np.float64)
    return float(np.square(a - b).sum()), float(np.square(b).sum())


def nmse(mine: Logits, theirs: Logits) -> float:
    """Give the mean squared difference over the mean square of the reference (float32 of one shape).

    0 for equal; infinite where the reference is all zero.
    """
    return _ratio(*sums(mine, theirs))


def is_tie(mine: Logits, theirs: Logits) -> bool:
    """Tell whether another top token is noise and no fault; rows are float32[n_vocab].

    Returns:
        Whether the reference has the two candidates closer together than the noise of the whole row makes certain.
    """
    error, _ = sums(mine, theirs)
    noise = math.sqrt(error / theirs.size)
    gap = float(theirs.max()) - float(theirs[int(mine.argmax())])
    return gap <= TIE_SIGMAS * noise


def surprise(row: Logits, token: int) -> float:
    """Give the negative log likelihood of a token by its logits, float32[n_vocab]; natural units."""
    values = row.astype(np.float64)
    top = float(values.max())
    return top + math.log(float(np.exp(values - top).sum())) - float(values[token])


class Tally:
    """Adds up the comparison of a text's rows with the reference's."""

    def __init__(self) -> None:
        self.n_rows = 0
        self.n_same_top = 0
        self.n_ties = 0
        self.worst = 0.0
        self._error = self._power = 0.0
        self._window: list[tuple[float, float]] = []

    def add(self, mine: Logits, theirs: Logits) -> None:
        """Compare one row with the reference's, float32[n_vocab] each."""
        error, power = sums(mine, theirs)
        self._error += error
        self._power += power
        self._window = [*self._window[-(WINDOW_ROWS - 1) :], (error, power)]
        if len(self._window) == WINDOW_ROWS:
            self.worst = max(self.worst, _ratio(*(sum(column) for column in zip(*self._window, strict=True))))
        self.n_rows += 1
        if int(mine.argmax()) == int(theirs.argmax()):
            self.n_same_top += 1
        elif error <= NMSE_LIMIT * power and is_tie(mine, theirs):
            # In a row that is wrong as a whole the noise is no measure of anything.
            self.n_ties += 1

    @property
    def nmse(self) -> float:
        """The error over all rows."""
        return _ratio(self._error, self._power)

    @property
    def worst_nmse(self) -> float:
        """The error of the worst stretch of `WINDOW_ROWS` rows; of all, where there are fewer."""
        return max(self.worst, self.nmse) if self.n_rows < WINDOW_ROWS else self.worst

    @property
    def top1_agreement(self) -> float:
        """The share of rows with the same top token."""
        return self.n_same_top / self.n_rows if self.n_rows else math.nan

    def numbers(self, prefix: str = "") -> dict[str, float | int]:
        """Give nmse, nmse_worst, top1_agreement, top1_ties and rows, each name with a prefix."""
        return {
            f"{prefix}nmse": self.nmse,
            f"{prefix}nmse_worst": self.worst_nmse,
            f"{prefix}top1_agreement": self.top1_agreement,
            f"{prefix}top1_ties": self.n_ties,
            f"{prefix}rows": self.n_rows,
        }


def _ratio(error: float, power: float) -> float:
    if power > 0.0:
        return error / power
    return 0.0 if error == 0.0 else math.inf
