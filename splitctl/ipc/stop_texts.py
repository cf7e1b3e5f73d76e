"""An answer that comes in pieces, as text: whole characters, without stop texts; and what it took."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Usage:
    """What an answer took.

    Attributes:
        n_prompt: tokens of the prompt.
        n_reused: those of them that the sequence held already.
        n_generated: tokens of the answer; one that ended it is not counted.
        finish_reason: "stop": the model ended it, or a stop text came; "length": ``n`` tokens, or a full context.
        prompt_ms: time of reading the prompt, ms.
        generate_ms: time of drawing the answer, ms.
    """

    n_prompt: int
    n_reused: int
    n_generated: int
    finish_reason: Literal["stop", "length"]
    prompt_ms: float
    generate_ms: float


class StopTexts:
    """Finds stop texts in a stream of pieces, and holds back what may still become one."""

    def __init__(self, texts: Sequence[str]) -> None:
        """Take the texts, none of them empty."""
        self._needles = [text.encode("utf-8") for text in texts]
        self._held = b""
        self.hit = False

    def feed(self, piece: bytes) -> bytes:
        """Take the next piece; returns what surely belongs to the answer, on a hit what precedes the stop text."""
        if not self._needles:
            return piece
        self._held += piece
        ends = [at for needle in self._needles if (at := self._held.find(needle)) >= 0]
        if ends:
            self.hit = True
            out, self._held = self._held[: min(ends)], b""
            return out
        keep = max(self._overlap(needle) for needle in self._needles)
        at = len(self._held) - keep
        out, self._held = self._held[:at], self._held[at:]
        return out

    def rest(self) -> bytes:
        """Give what was held back, at the end of the stream; nothing after a hit."""
        out, self._held = self._held, b""
        return out

    def _overlap(self, needle: bytes) -> int:
        """Count the bytes at the end of what is held that begin a stop text."""
        most = min(len(needle) - 1, len(self._held))
        return next((n for n in range(most, 0, -1) if self._held.endswith(needle[:n])), 0)


class Text:
    """Turns pieces of an answer into text."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = StopTexts(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def is_stopped(self) -> bool:
        """Whether a stop text has come."""
        return self._stop.hit

    def feed(self, piece: bytes) -> str:
        """Take the bytes of a token, which may be part of a character; gives the text that is certain now.

        Bytes that can be no character are U+FFFD.
        """
        return self._decoder.decode(self._stop.feed(piece), final=self._stop.hit)

    def rest(self) -> str:
        """Give what was held back, at the end."""
        return self._decoder.decode(self._stop.rest(), final=True)
