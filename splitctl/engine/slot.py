"""A live sequence of a session: its tokens, what the memory holds of them, its last logits and its sampler.

Law: the memory holds ``n_past`` positions, which is the number of tokens, or one less when the newest token has been
drawn and delivered but not decoded yet. Logits are the session's own copy, so they outlive every context.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from splitctl.carry.sampling import SamplerSpec
from splitctl.carry.sequence import SequenceCarry, no_logits, no_tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from splitctl.engine.sampler import Sampler


class Slot:
    """One sequence. Thread: the session's turn guards it."""

    def __init__(self, seq_id: int) -> None:
        self.seq_id = seq_id
        self.tokens = array("i")
        self.n_past = 0
        self.logits: NDArray[np.float32] = no_logits()
        self.output_ids: NDArray[np.int32] = no_tokens()
        self.encoder_tokens: NDArray[np.int32] = no_tokens()
        self.embedding: NDArray[np.float32] | None = None
        self.sampler: Sampler | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the sequence has neither tokens nor anything in the memory."""
        return not self.tokens and self.n_past == 0 and not self.encoder_tokens.size

    @property
    def has_logits(self) -> bool:
        """Whether a next token can be drawn without a decode."""
        return self.logits.size > 0 and self.n_past == len(self.tokens)

    @property
    def is_pending(self) -> bool:
        """Whether the newest token has been drawn and delivered, and not been decoded yet."""
        return self.n_past < len(self.tokens)

    def set_sampler(self, sampler: Sampler | None) -> None:
        """Draw with another sampler from now on; frees the one before."""
        old, self.sampler = self.sampler, sampler
        if old is not None:
            old.close()

    def take_rows(self, logits: NDArray[np.float32], output_ids: NDArray[np.int32]) -> None:
        """Keep the rows of a decode: float32[n_outputs, n_vocab] and int32[n_outputs]."""
        self.logits, self.output_ids = logits, output_ids

    def carry(self) -> SequenceCarry:
        """Return the sequence as it travels; the logits are shared, the rest copied."""
        sampler = self.sampler
        return SequenceCarry(
            seq_id=self.seq_id,
            tokens=np.array(self.tokens, np.int32),
            n_past=self.n_past,
            logits=self.logits,
            output_ids=self.output_ids,
            sampler=sampler.spec if sampler else SamplerSpec(),
            accepted=np.array(sampler.accepted if sampler else [], np.int32),
            n_draws=sampler.n_draws if sampler else 0,
            encoder_tokens=self.encoder_tokens,
            grammar=sampler.constraints.grammar if sampler else "",
            n_ruled=sampler.n_ruled if sampler and sampler.constraints.grammar else 0,
        )

    def clear(self) -> None:
        """Forget everything and free the sampler."""
        self.set_sampler(None)
        self.__init__(self.seq_id)  # type: ignore[misc]
