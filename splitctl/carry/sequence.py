"""A sequence as it travels: its tokens, the logits of its last decode, and how its next token is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from splitctl.carry.sampling import SamplerSpec

MAX_DRAWS = 1 << 24
"""Most random draws of a sequence that travels: they are made again, one by one, in the process that it comes to."""


def no_tokens() -> NDArray[np.int32]:
    """Return an empty row of tokens: int32[0]."""
    return np.empty(0, np.int32)


def no_logits() -> NDArray[np.float32]:
    """Return logits of no row: float32[0, 0]."""
    return np.empty((0, 0), np.float32)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens with which both begin."""
    low, high = 0, min(len(one), len(other))
    # Comparing slices is done in C: a few of them are quicker than a loop over a long prompt.
    while low < high:
        middle = (low + high + 1) // 2
        if list(one[low:middle]) == list(other[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, slots=True, eq=False)
class SequenceCarry:
    """One sequence as it travels. Equality is identity; compare the arrays where equality of content is meant.

    Args:
        seq_id: its id in the context, from 0.
        tokens: int32[n], everything delivered to the model or drawn from it, oldest first.
        n_past: positions that the memory holds, from 0 to ``n_past - 1``: n, or n - 1 when the newest token has been
            drawn and not decoded. For an encoder-decoder these are the decoder's.
        logits: float32[n_outputs, n_vocab], C order: the rows of the last decode that belong to this sequence.
        output_ids: int32[n_outputs], for each row its place in the batch of that decode.
        sampler: how the next token is chosen.
        accepted: int32[k], tokens that the sampler accepted, oldest first (penalties look back at them).
        n_draws: random draws made since the seed was set.
        encoder_tokens: int32[m], what the encoder read; empty for a model without one.
        grammar: the grammar in GBNF that what is drawn follows; empty: none.
        n_ruled: how many of the accepted tokens, the newest ones, were drawn since it began.

    Lifetime: the arrays are borrowed; changing them breaks the seal.
    """

    seq_id: int
    tokens: NDArray[np.int32]
    n_past: int
    logits: NDArray[np.float32]
    output_ids: NDArray[np.int32]
    sampler: SamplerSpec
    accepted: NDArray[np.int32]
    n_draws: int
    encoder_tokens: NDArray[np.int32]
    grammar: str = ""
    n_ruled: int = 0

    def problems(self) -> tuple[str, ...]:
        """Return what contradicts itself, one phrase each; empty when the sequence is sound."""
        n_tokens = self.tokens.size
        rows = (
            ("seq_id is negative", self.seq_id < 0),
            ("n_draws is negative", self.n_draws < 0),
            (f"n_draws is {self.n_draws}, wanted {MAX_DRAWS} at most", self.n_draws > MAX_DRAWS),
            (
                f"{n_tokens} tokens want {n_tokens} or {n_tokens - 1} positions, n_past is {self.n_past}",
                self.n_past not in {n_tokens, n_tokens - 1},
            ),
            ("n_past is negative", self.n_past < 0),
            (
                f"{self.n_ruled} of {self.accepted.size} accepted tokens follow a grammar",
                not 0 <= self.n_ruled <= self.accepted.size,
            ),
            *(
                (f"{name} is {array.dtype}{list(array.shape)}, wanted {wanted.__name__} of {n_dims} axes", True)
                for name, array, wanted, n_dims in (
                    ("tokens", self.tokens, np.int32, 1),
                    ("logits", self.logits, np.float32, 2),
                    ("output_ids", self.output_ids, np.int32, 1),
                    ("accepted", self.accepted, np.int32, 1),
                    ("encoder_tokens", self.encoder_tokens, np.int32, 1),
                )
                if array.dtype != wanted or array.ndim != n_dims
            ),
            (
                f"{self.output_ids.size} output ids for {len(self.logits)} rows of logits",
                self.output_ids.shape[:1] != self.logits.shape[:1],
            ),
            ("a token is negative", any(array.size and array.min() < 0 for array in self._token_rows())),
            ("an output id is negative", bool(self.output_ids.size) and self.output_ids.min() < 0),
        )
        return tuple(text for text, is_wrong in rows if is_wrong)

    def _token_rows(self) -> tuple[NDArray[np.int32], ...]:
        return self.tokens, self.accepted, self.encoder_tokens
