"""An answer as it is generated: decoded text, piece by piece, and at the end what it took.

Main path: ``TextStream.step`` reads a batch of the prompt, or draws a token; iterating steps until there is text.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Self

from splitctl.ipc.stop_texts import Text, Usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitctl.carry.sampling import SamplerSpec
    from splitctl.engine.sampler import Constraints
    from splitctl.session.core import SessionCore
    from splitctl.session.decoder import Held

_MS = 1e3


@dataclass(frozen=True, slots=True)
class Fed:
    """What a sequence kept of what it held, and what it read.

    Attributes:
        n_kept: tokens that it held already.
        n_read: tokens that were read after them.
    """

    n_kept: int
    n_read: int


class TextStream:
    """The answer to a prompt: iterate over it for its text, which comes in pieces of whole characters.

    A stop text is not in the pieces, nor is what may begin one before that is known. The sequence holds the prompt and
    every token that was drawn, a stop text's too. Who stops iterating leaves it like that.

    Thread: any, one at a time. Lifetime: that of its session, and until other work changes its sequence.

    Attributes:
        prompt: the prompt's tokens.
        seq_id: the sequence.
        tokens: the answer's tokens so far.
        text: its text so far, as far as it is certain.
        usage: what it took; None before its end.
    """

    def __init__(
        self,
        session: SessionCore,
        prompt: Sequence[int],
        *,
        seq_id: int,
        n: int,
        sampler: SamplerSpec,
        n_draws: int,
        stop: Sequence[str],
        constraints: Constraints,
    ) -> None:
        """Use :meth:`Session.text` or :meth:`Session.chat`; nothing is read yet."""
        self.prompt = tuple(prompt)
        self.seq_id = seq_id
        self.tokens: list[int] = []
        self.text = ""
        self.usage: Usage | None = None
        self._session = session
        self._n = n
        self._sampler, self._n_draws, self._constraints = sampler, n_draws, constraints
        self._decoded = Text(stop)
        self._before: Held | None = None
        self._n_kept: int | None = None
        self._rest: tuple[int, ...] = ()
        self._is_over = False
        self._ms = {False: 0.0, True: 0.0}

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        while not self.is_over:
            if piece := self.step():
                return piece
        raise StopIteration

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes: it has ended, failed or been closed."""
        return self._is_over

    def read(self) -> str:
        """Give all the text that is left, at its end."""
        return "".join(self)

    def close(self) -> None:
        """End it here; the sequence keeps what it holds."""
        self._is_over = True

    def take_back(self) -> None:
        """End it, and let its sequence hold again what it held before, as far as the prompt began with that.

        With its logits and sampler, where the prompt began with all of it.
        """
        self._is_over = True
        if self._before is not None:
            self._session.take_back(self.seq_id, self._before)

    def step(self, *, n_most: int | None = None) -> str:
        """Do one decode of the answer's work: read a batch of the prompt, or draw a token.

        Args:
            n_most: most tokens of the prompt to read; None: a batch of the placement.

        Returns:
            The text that became certain by it; empty where none did, and after the end.

        Raises:
            ContextFull: there is no room for the prompt.
            ConfigInvalid: the grammar or the processors leave no token to draw.
            Exception: what a processor raised.
                After an error it is over, and the sequence holds what was read and drawn before.
        """
        if self._is_over:
            return ""
        started = perf_counter()
        is_generating = self._n_kept is not None and not self._rest
        try:
            piece = self._draw() if is_generating else self._read(n_most)
        except BaseException:
            self._is_over = True
            raise
        self._ms[is_generating] += (perf_counter() - started) * _MS
        if self.is_over:
            self._finish()
        self.text += piece
        return piece

    def _read(self, n_most: int | None) -> str:
        """Read a batch of the prompt; nothing where the sequence holds it already."""
        session = self._session
        if self._n_kept is None:
            session.refuse_without_room(self.prompt, self.seq_id)
            self._before = session.held(self.seq_id)
            filling = session.fill(self.seq_id, self.prompt)
            self._n_kept, self._rest = filling.n_kept, filling.rest
        if self._rest:
            self._rest = self._rest[session.read(self.seq_id, self._rest, n_most=n_most) :]
        if not self._rest:
            session.begin(self.seq_id, self._sampler, n_draws=self._n_draws, constraints=self._constraints)
            self._is_over = self._n == 0
        return ""

    def _draw(self) -> str:
        (token,) = self._session.step([self.seq_id]).values()
        if isinstance(token, Exception):
            raise token
        self._is_stopped = token.is_end
        if token.is_end:
            self._is_over = True
            return self._decoded.rest()
        self.tokens.append(token.id)
        piece = self._decoded.feed(token.piece)
        if self._decoded.is_stopped:
            self._is_stopped = self._is_over = True
        elif len(self.tokens) == self._n or self._session.is_full(self.seq_id):
            self._is_over = True
            piece += self._decoded.rest()
        return piece

    _is_stopped = False

    def _finish(self) -> None:
        self.usage = Usage(
            n_prompt=len(self.prompt),
            n_reused=self._n_kept or 0,
            n_generated=len(self.tokens),
            finish_reason="stop" if self._is_stopped else "length",
            prompt_ms=self._ms[False],
            generate_ms=self._ms[True],
        )
