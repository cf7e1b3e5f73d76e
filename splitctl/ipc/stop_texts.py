"""An answer that comes in pieces, as text: whole characters, without stop texts."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


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
