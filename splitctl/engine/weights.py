"""Which tier a switch takes the weights from: by what was asked, what fits, and what it costs later. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from splitctl.outcome import WeightsTier

#: How fast the weights come, where the session has not loaded them so yet [bytes/ms]. Measured with 8B q8_0 on two
#: H200: 1.2 s, 0.5 s.
_FILE_RATE, _PINNED_RATE = 7.0e6, 17.0e6


@dataclass(frozen=True, slots=True)
class Chosen:
    """Where a switch takes the weights from.

    Attributes:
        tier: file, pinned or resident.
        reason: why it is not the tier that was asked for, and of auto why it is this one; empty where it was asked for.
        back: where the way back takes them from, where the old placement is gone.
    """

    tier: WeightsTier = WeightsTier.FILE
    reason: str = ""
    back: WeightsTier = WeightsTier.FILE


@dataclass(frozen=True, slots=True)
class Seen:
    """What counts for the choice.

    Attributes:
        beside: why both placements do not fit at once; empty where they do.
        pinned: why the target cannot be made from the copy; empty where it can.
        back: why the placement that serves cannot; empty where it can.
        n_tokens: tokens that are known to be generated before the next switch.
        extra_ms: what each of them takes more after a pinned load, ms.
        saves_ms: what a pinned load takes less than one from the file, ms.
    """

    beside: str = ""
    pinned: str = ""
    back: str = ""
    n_tokens: int = 0
    extra_ms: float = 0.0
    saves_ms: float = 0.0

    @property
    def pays(self) -> bool:
        """Whether a pinned load saves more than the tokens that come after it cost."""
        return self.n_tokens * self.extra_ms < self.saves_ms


def saves_ms(n_bytes: int, load_ms: Mapping[WeightsTier, float]) -> float:
    """Say what a pinned load takes less than one from the file, ms.

    Args:
        n_bytes: the weights.
        load_ms: what the last load of each kind took, where there was one.
    """
    file_ms = load_ms.get(WeightsTier.FILE, n_bytes / _FILE_RATE)
    return file_ms - load_ms.get(WeightsTier.PINNED, n_bytes / _PINNED_RATE)


def choose(asked: WeightsTier, seen: Seen) -> Chosen:
    """Choose the tier of one switch.

    Args:
        asked: what the session was opened with.
        seen: what counts; of it only what belongs to the tier that was asked for, for auto all of it.
    """
    has_copy = asked in {WeightsTier.PINNED, WeightsTier.AUTO} and not seen.back
    back = WeightsTier.PINNED if has_copy else WeightsTier.FILE
    if asked is WeightsTier.FILE:
        return Chosen()
    if asked is WeightsTier.RESIDENT:
        return Chosen(WeightsTier.FILE, seen.beside) if seen.beside else Chosen(WeightsTier.RESIDENT)
    if asked is WeightsTier.PINNED:
        if seen.pinned:
            return Chosen(WeightsTier.FILE, seen.pinned, back)
        return Chosen(WeightsTier.PINNED, "", back)
    if not seen.beside:
        return Chosen(WeightsTier.RESIDENT, "both placements fit", back)
    if seen.pinned:
        return Chosen(WeightsTier.FILE, f"{seen.beside}; {seen.pinned}", back)
    costs = seen.n_tokens * seen.extra_ms
    told = f"a pinned load saves {seen.saves_ms:,.0f} ms, and {seen.n_tokens} tokens take {costs:,.0f} ms more after it"
    tier = WeightsTier.PINNED if seen.pays else WeightsTier.FILE
    return Chosen(tier, f"{seen.beside}; {told}", back)
