"""A stream as its client has it: what happens to it, in order, and text that is whole characters without a stop text.

Laws:
    1. Begun comes once and before any Delta; every token of the answer is one Delta, numbered from 0 without a gap;
       Done comes last and always.
    2. The texts of all Deltas, joined, are the answer: what may still become a stop text, or is half a character, is
       held back until that is known.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from splitctl.ipc.jobs import Fault
from splitctl.ipc.stop_texts import StopTexts


class Why(Enum):
    """Why a stream ended."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    CONTEXT = "context"
    ERROR = "error"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Begun:
    """The stream is on a sequence, and its prompt is being read.

    Attributes:
        n_prompt: tokens of the prompt.
        n_reused: those of them that the sequence held already.
    """

    n_prompt: int
    n_reused: int


@dataclass(frozen=True, slots=True)
class Delta:
    """One token of the answer, and the text that is certain by now; or, at the end, text that was held back.

    Attributes:
        text: may be empty, and may be that of earlier tokens.
        token: its id; None for text alone.
        index: the token's number, from 0; of text alone that of the last token.
    """

    text: str
    token: int | None
    index: int


@dataclass(frozen=True, slots=True)
class Paused:
    """No token comes for a while.

    Attributes:
        why: for a person.
    """

    why: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """Tokens come again."""


@dataclass(frozen=True, slots=True)
class Done:
    """The stream is over.

    Attributes:
        why: why.
        n_prompt: tokens of the prompt.
        n_reused: those of them that the sequence held already.
        n_predicted: tokens of the answer.
        prompt_ms: time spent reading the prompt, ms.
        generate_ms: time of the decodes that served it, ms.
        message: what went wrong, for a person; empty where nothing did.
        fault: whose fault it was; None where nothing went wrong, or nobody knows.
    """

    why: Why
    n_prompt: int = 0
    n_reused: int = 0
    n_predicted: int = 0
    prompt_ms: float = 0.0
    generate_ms: float = 0.0
    message: str = ""
    fault: Fault | None = None


StreamEvent = Begun | Delta | Paused | Resumed | Done


class Text:
    """Turns pieces of an answer into text."""

    def __init__(self, stop: Sequence[str]) -> None:
        """Take the texts that end it."""
        self._stop = StopTexts(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def is_stopped(self) -> bool:
        """Whether a stop text has come."""
        return self._stop.hit

    def feed(self, piece: bytes) -> str:
        """Take the bytes of a token.

        Args:
            piece: may be part of a character.

        Returns:
            What is certain now; bytes that can be no character are U+FFFD.
        """
        return self._decoder.decode(self._stop.feed(piece), final=self._stop.hit)

    def rest(self) -> str:
        """Give what was held back, at the end."""
        return self._decoder.decode(self._stop.rest(), final=True)


class Stream:
    """A client's end of a stream: iterate over it for its events.

    Thread: the supervisor's loop. Lifetime: until Done was taken; a client that goes away earlier cancels.
    """

    def __init__(self, number: int, stop: Sequence[str], on_cancel: Callable[[int], None]) -> None:
        """Begin one.

        Args:
            number: its number.
            stop: texts that end it.
            on_cancel: told its number when the client cancels.
        """
        self.number = number
        self._text = Text(stop)
        self._on_cancel = on_cancel
        self._events: asyncio.Queue[StreamEvent] = asyncio.Queue()
        self._n_told = 0
        self._has_begun = False
        self._is_paused = False
        self._is_done = False
        self._is_read = False

    def __aiter__(self) -> Stream:
        """Return itself."""
        return self

    async def __anext__(self) -> StreamEvent:
        """Wait for the next event."""
        if self._is_read:
            raise StopAsyncIteration
        event = await self._events.get()
        self._is_read = isinstance(event, Done)
        return event

    @property
    def is_done(self) -> bool:
        """Whether its last event is there."""
        return self._is_done

    def cancel(self) -> None:
        """End the stream; Done follows at once. One that is over stays as it is."""
        if not self._is_done:
            self._on_cancel(self.number)

    # ---- for the supervisor ----

    def begin(self, n_prompt: int, n_reused: int) -> None:
        """Say that the prompt is being read; a second time says nothing."""
        if not self._has_begun:
            self._has_begun = True
            self._events.put_nowait(Begun(n_prompt, n_reused))

    def deliver(self, token: int, piece: bytes) -> bool:
        """Pass a token on.

        Returns:
            Whether a stop text has ended the answer.
        """
        self.resume()
        self._events.put_nowait(Delta(self._text.feed(piece), token, self._n_told))
        self._n_told += 1
        return self._text.is_stopped

    def pause(self, why: str) -> None:
        """Say that no token comes for a while; of several reasons the first is told."""
        if self._has_begun and not self._is_paused:
            self._is_paused = True
            self._events.put_nowait(Paused(why))

    def resume(self) -> None:
        """Say that tokens come again."""
        if self._is_paused:
            self._is_paused = False
            self._events.put_nowait(Resumed())

    def end(self, done: Done) -> None:
        """Give the last event, after the text that was held back."""
        if self._is_done:
            return
        self._is_done = True
        rest = self._text.rest()
        if rest:
            self._events.put_nowait(Delta(rest, None, max(self._n_told - 1, 0)))
        self._events.put_nowait(done)
