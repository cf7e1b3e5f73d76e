"""A plan as a picture of bars, drawn with Pillow (the extra `plot`)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from splitctl.cli.plan_text import PARTS, mib, room_of, rows, sizes, title_of
from splitctl.planning.memory import DeviceFacts
from splitctl.planning.survey import ModeAnswer, SwitchAnswer

#: Red, green, blue.
Color = tuple[int, int, int]

_PAPER: Color = (255, 255, 255)
_INK: Color = (40, 40, 40)
_COLORS: dict[str, Color] = {
    "weights": (66, 133, 196),
    "cache": (98, 166, 92),
    "compute": (230, 178, 64),
    "other": (178, 102, 170),
    "carry": (200, 92, 84),
    "free": (225, 225, 225),
}
#: Lengths in pixels.
_LEFT, _BAR, _ROW, _TOP = 260, 560, 44, 56
_RIGHT = 230
_FONT = 14


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar.

    Args:
        label: beside it.
        parts: (color, share of the whole width) from the left.
        note: behind it.
    """

    label: str
    parts: tuple[tuple[Color, float], ...]
    note: str


def bars_png(title: str, legend: Sequence[tuple[Color, str]], bars: Sequence[Bar]) -> bytes:
    """Draw bars from top to bottom below a title and a legend; returns a PNG file."""
    image = Image.new("RGB", (_LEFT + _BAR + _RIGHT, _TOP + 30 + _ROW * len(bars)), _PAPER)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(_FONT)
    draw.text((10, 10), title, _INK, font)
    at = 10
    for color, words in legend:
        draw.rectangle((at, 34, at + 13, 47), color)
        draw.text((at + 20, 32), words, _INK, font)
        at += 40 + round(draw.textlength(words, font))
    for number, bar in enumerate(bars):
        top = _TOP + 10 + number * _ROW
        draw.text((10, top + 6), bar.label, _INK, font)
        done = 0.0
        for color, share in bar.parts:
            start, end = round(_BAR * done), round(_BAR * min(done + share, 1.0))
            if end > start:
                draw.rectangle((_LEFT + start, top, _LEFT + end - 1, top + _ROW - 17), color)
            done += share
        draw.text((_LEFT + _BAR + 10, top + 6), bar.note, _INK, font)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def picture(title: str, answers: Sequence[ModeAnswer | SwitchAnswer], devices: Sequence[DeviceFacts]) -> bytes:
    """Draw a plan as a PNG file: modes and the switch, and what is free on devices."""
    shares = [(answer, label, share) for answer in answers for label, share in rows(answer)]
    whole = max((share.total for _, _, share in shares), default=1)
    bars = []
    for answer, label, share in shares:
        room = room_of(share, devices)
        scale = whole if room is None else min(max(whole, room), 4 * whole)
        parts = [(_COLORS[name], n_bytes / scale) for n_bytes, (name, *_) in zip(sizes(share), PARTS, strict=True)]
        used = sum(part for _, part in parts)
        if room is not None:
            parts.append((_COLORS["free"], max(min(room / scale, 1.0) - used, 0.0)))
        bars.append(Bar(f"{title_of(answer)}: {label}", tuple(parts), mib(share.total)))
    return bars_png(title, [(color, name) for name, color in _COLORS.items()], bars)
