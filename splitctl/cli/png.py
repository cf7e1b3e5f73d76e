"""Writes a picture of bars as a PNG, with the standard library alone.

Source: the PNG specification (W3C): signature, IHDR, PLTE, IDAT, IEND; one palette index a pixel, filter 0.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

#: Glyphs of 5 x 7 pixels, a byte a column, lowest bit on top.
_GLYPHS = {
    "A": "7e1111117e", "B": "7f49494936", "C": "3e41414122", "D": "7f4141221c", "E": "7f49494941", "F": "7f09090901",
    "G": "3e4149497a", "H": "7f0808087f", "I": "00417f4100", "J": "2040413f01", "K": "7f08142241", "L": "7f40404040",
    "M": "7f020c027f", "N": "7f0408107f", "O": "3e4141413e", "P": "7f09090906", "Q": "3e4151215e", "R": "7f09192946",
    "S": "4649494931", "T": "01017f0101", "U": "3f4040403f", "V": "1f2040201f", "W": "3f4038403f", "X": "6314081463",
    "Y": "0708700807", "Z": "6151494543", "0": "3e5149453e", "1": "00427f4000", "2": "4261514946", "3": "2141454b31",
    "4": "1814127f10", "5": "2745454539", "6": "3c4a494930", "7": "0171090503", "8": "3649494936", "9": "064949291e",
    ".": "0060600000", "-": "0808080808", ":": "0036360000", "/": "2010080402", "(": "001c224100", ")": "0041221c00",
    ",": "0050300000", "%": "2313086462", "[": "007f414100", "]": "0041417f00", "+": "08083e0808", ">": "4122140800",
    "_": "4040404040", "=": "1414141414",
}  # fmt: skip
_SCALE = 2
_CHAR = 6 * _SCALE

#: Red, green, blue of each palette entry; the first is the paper, the second the ink.
PALETTE = (
    (255, 255, 255),
    (40, 40, 40),
    (66, 133, 196),
    (98, 166, 92),
    (230, 178, 64),
    (178, 102, 170),
    (200, 92, 84),
    (225, 225, 225),
)
PAPER, INK = 0, 1
_LEFT, _BAR, _ROW, _TOP = 260, 560, 44, 56
_RIGHT = 230


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar.

    Args:
        label: beside it.
        parts: (palette entry, share of the whole width) from the left.
        note: behind it.
    """

    label: str
    parts: tuple[tuple[int, float], ...]
    note: str


class _Canvas:
    """Palette indices, a byte a pixel."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._rows = [bytearray(width) for _ in range(height)]

    def fill(self, left: int, top: int, width: int, height: int, color: int) -> None:
        """Paint a rectangle, cut at the edges."""
        left, right = max(left, 0), min(left + width, self.width)
        for row in self._rows[max(top, 0) : min(top + height, self.height)]:
            row[left:right] = bytes([color]) * max(right - left, 0)

    def text(self, left: int, top: int, words: str) -> None:
        """Write words in capitals; a character without a glyph is left blank."""
        for number, char in enumerate(words.upper()):
            for column, bits in enumerate(bytes.fromhex(_GLYPHS.get(char, ""))):
                for line in range(7):
                    if bits >> line & 1:
                        at = left + number * _CHAR + column * _SCALE
                        self.fill(at, top + line * _SCALE, _SCALE, _SCALE, INK)

    def png(self) -> bytes:
        """Give the file."""
        body = zlib.compress(b"".join(b"\0" + bytes(row) for row in self._rows), 9)
        header = struct.pack(">IIBBBBB", self.width, self.height, 8, 3, 0, 0, 0)
        palette = b"".join(bytes(one) for one in PALETTE)
        chunks = ((b"IHDR", header), (b"PLTE", palette), (b"IDAT", body), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    """Wrap one chunk: length, kind, data, checksum."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bars_png(title: str, legend: Sequence[tuple[int, str]], bars: Sequence[Bar]) -> bytes:
    """Draw bars.

    Args:
        title: on top.
        legend: palette entries and what they stand for.
        bars: from top to bottom.

    Returns:
        The bytes of a PNG file.
    """
    canvas = _Canvas(_LEFT + _BAR + _RIGHT, _TOP + 30 + _ROW * len(bars))
    canvas.text(10, 10, title)
    at = 10
    for color, words in legend:
        canvas.fill(at, 34, 14, 14, color)
        canvas.text(at + 20, 34, words)
        at += 20 + _CHAR * (len(words) + 2)
    for number, bar in enumerate(bars):
        top = _TOP + 10 + number * _ROW
        canvas.text(10, top + 8, bar.label)
        done = 0.0
        for color, share in bar.parts:
            start, end = round(_BAR * done), round(_BAR * min(done + share, 1.0))
            canvas.fill(_LEFT + start, top, end - start, _ROW - 16, color)
            done += share
        canvas.text(_LEFT + _BAR + 10, top + 8, bar.note)
    return canvas.png()
