"""`splitctl state diff`: whether two states hold the same."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from tests.codec.goldens import golden
from tests.codec.synthetic import context
from tests.ctl.cli.states import said, told


def test_the_same_state_in_other_forms(kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """A context blob, its file, its sequence and other versions of it hold the same."""
    first = kept("x11549-dense")
    for name in ("x11549-dense-session-file", "x11549-dense-sequence", "x11549-dense-sequence-file"):
        code, body, _ = told(capfd, "diff", first, kept(name))
        assert (code, body["same"], body["differences"]) == (0, True, [])
        assert body["written_differently"]
    assert said(capfd, "diff", kept("x11549-recurrent"), kept("x11549-recurrent-sequence"))[0] == 0
    assert said(capfd, "diff", kept("x11549-dense-streams4"), kept("x11549-dense-unified4"))[0] == 0


def test_one_value_makes_a_difference(kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """A flipped bit in a row, a missing cell, other tokens and other models are found."""
    path = kept("x11549-dense")
    data = bytearray(golden("x11549-dense"))
    data[-1] ^= 1
    code, body, _ = told(capfd, "diff", path, kept("bit", bytes(data)))
    assert (code, body["sections"][0]["k"]["equal"], body["sections"][0]["v"]["equal"]) == (1, True, False)
    short = path.with_name("short")
    assert said(capfd, "convert", path, "-o", short, "--first", "3")[0] == 0
    code, lines, _ = said(capfd, "diff", path, short)
    assert (code, lines[0]) == (1, "different")
    assert "5 cells, 2 of its own (3, 4) | 3 cells, 0 of its own" in lines[1]
    assert said(capfd, "diff", path, kept("x11549-hybrid"))[0] == 1
    file = kept("x11549-dense-session-file")
    words = bytearray(file.read_bytes())
    words[12] ^= 1
    code, lines, _ = said(capfd, "diff", file, kept("words", bytes(words)))
    assert (code, "tokens: 5 tokens, at 0" in lines[1]) == (1, True)


def test_what_cannot_be_compared_row_by_row_differs(kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Layers of other widths, other logits, other sequences and other bytes of an opaque memory are differences."""
    opaque = [context(struct.pack("<II", 0x34565344, 1) + bytes([n]) * 40, architecture="deepseek4") for n in (1, 2)]
    outputs = bytearray(golden("x020-dense"))
    outputs[40] ^= 1
    for one, two, what in (
        (kept("x11549-smollm2"), kept("x11549-dense"), "section 0, sequence 0: K: 30 layers of [192] values"),
        (kept("x020-dense"), kept("logits", bytes(outputs)), "logits"),
        (kept("one", opaque[0]), kept("two", opaque[1]), "section 0: opaque bytes"),
        (kept("x11549-dense"), kept("x11549-dense-streams4"), "sequences: [0] | [0, 1, 2, 3]"),
    ):
        code, lines, _ = said(capfd, "diff", one, two)
        assert (code, lines[0]) == (1, "different")
        assert any(what in line for line in lines), lines
    assert said(capfd, "diff", kept("one", opaque[0]), kept("two", opaque[0]))[0] == 0


def test_rows_of_unknown_rotation_are_compared_as_they_are(kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Where nothing says how one side is rotated, the answer says so."""
    code, body, _ = told(capfd, "diff", kept("l0336-dense"), kept("l0336-dense-q8"))
    assert code == 1
    assert "compared as stored" in body["notes"][0]


def test_a_bad_file_is_no_difference(kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """The file that is unsound is named."""
    code, body, err = told(capfd, "diff", kept("x11549-dense"), kept("bad", b"nothing"))
    assert (code, err.count("\n")) == (1, 1)
    assert body["files"][0]["file"].endswith("bad")
