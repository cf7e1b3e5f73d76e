"""`splitctl state inspect` on real states, on our own carry, and on files that are no states."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from splitctl.carry import file as carries
from statecodec import Form, parse
from tests.codec.goldens import MANIFEST, golden
from tests.codec.synthetic import Attention, Cell, cells, context, memory, sequence_file
from tests.ctl.carry.test_carry import a_carry, a_sequence
from tests.ctl.cli.states import said, told

#: The server's record: null token, version, three tokens, no media.
_PACKED = (-1, 1, 3, 5, 6, 7, 0)

# -- inspect --


@pytest.mark.parametrize("name", MANIFEST)
def test_every_real_state_is_described(name: str, kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Form, sequences and types are those that the manifest says; the text says as much as the object."""
    about = MANIFEST[name]
    path = kept(name)
    code, body, err = told(capfd, "inspect", path)
    (one,) = body["files"]
    assert (code, err) == (0, "")
    assert one["form"].startswith(about["form"].replace("_", " "))
    assert one["n_bytes"] == about["n_bytes"]
    assert sum(section["n_bytes"] for section in one["sections"]) <= about["n_bytes"]
    assert one["content"] == ("on device" if about["flags"] == 2 else "full")
    types = {side["type"] for part in one["sections"] if part["kind"] == "attention" for side in _sides(part)}
    wanted = {{0: "f32", 1: "f16", 8: "q8_0"}[about[side]] for side in ("type_k", "type_v")}
    assert types <= wanted
    code, lines, _ = said(capfd, "inspect", path)
    assert code == 0
    assert any(line.startswith("layout: ") and one["layouts"][0] in line for line in lines)
    assert sum(line.startswith("section ") for line in lines) == len(one["sections"])


def _sides(section: dict[str, Any]) -> list[dict[str, Any]]:
    return [side for layer in section["layers"] for side in layer.values() if side is not None]


def test_word_layout_and_producer_are_three_answers(kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Two files with version word 9 have two layouts; a blob has no word and a set of layouts (S2)."""
    files = [kept(f"{build}-dense-session-file") for build in ("x020", "x0214", "x11549")]
    _, body, _ = told(capfd, "inspect", *files, kept("x0214-dense"))
    answers = [(one["version_word"], one["layouts"]) for one in body["files"]]
    assert answers == [(9, ["v9-outputs"]), (9, ["v9"]), (11, ["v11"]), (None, ["v10", "v9"])]
    assert "2026.10" in body["files"][2]["producer_guess"][0]
    assert body["files"][0]["outputs"] == {"ids": [4], "n_logits_rows": 1, "n_vocab": 128, "n_embeddings": 0}


def test_s12_rotation_is_said_implied_or_unknown(kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """The newest layout says the blocks, plain rows have none, quantized rows of older layouts are unknown."""
    names = ("x11549-dense-q8-f16", "l0336-dense", "l0336-dense-q8", "l0336-mla")
    _, body, _ = told(capfd, "inspect", *map(kept, names))
    assert [one["sections"][0]["rotation"] for one in body["files"]] == [
        {"said": True, "k": 64, "v": 0},
        {"said": False, "k": 0, "v": 0},
        {"said": False, "k": None, "v": None},
        {"said": False, "k": None, "v": 0},
    ]
    _, lines, _ = said(capfd, "inspect", kept("l0336-dense-q8"))
    assert "  rotation: K unknown, V unknown (this layout does not say)" in lines


def test_s13_v_is_plain_transposed_or_absent(kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """The three states of V are told apart."""
    _, body, _ = told(capfd, "inspect", *map(kept, ("x11549-dense", "x11549-dense-flash-off", "x11549-mla")))
    assert [one["sections"][0]["v"] for one in body["files"]] == ["plain", "transposed", "absent"]


def test_s4_a_packed_token_list_is_told(kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """A list that begins with the null token is the server's record; a plain list is plain."""
    payload = memory(Attention((cells(3),)))
    packed = kept("packed", sequence_file(payload, version=3, tokens=_PACKED))
    plain = kept("plain", sequence_file(payload, version=3))
    _, body, _ = told(capfd, "inspect", packed, plain)
    assert [one["tokens"]["kind"] for one in body["files"]] == ["packed v1", "plain"]
    assert body["files"][0]["tokens"]["first"] == [5, 6, 7]


def test_s28_media_is_told_by_the_cells(kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Cells that share a position make it media, not the model's kind of position."""
    shared = (Cell(0, ext=(0, 0, 1)), Cell(1, ext=(1, 1, -1)), Cell(1, ext=(1, 2, -1)))
    image = kept("image", context(Attention((shared,), keys=((1, 8),), values=((1, 12),), rotation=(0, 0))))
    _, body, _ = told(capfd, "inspect", image, kept("x11549-mrope"))
    codes = [[finding["code"] for finding in one["findings"]] for one in body["files"]]
    assert ["media" in some for some in codes] == [True, False]
    _, lines, _ = said(capfd, "inspect", image)
    assert any(line.startswith("note: ") for line in lines)


def test_an_opaque_memory_is_named(kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """A memory with its own magic is named and not taken apart."""
    data = context(struct.pack("<II", 0x34565344, 1) + bytes(40), architecture="deepseek4")
    path = kept("opaque", data)
    _, body, _ = told(capfd, "inspect", path)
    assert body["files"][0]["sections"][0]["name"] == "DSV4"
    code, _, err = said(capfd, "convert", path, "-o", path.with_name("out"), "--to-version", "11")
    assert (code, err.count("\n")) == (1, 1)
    assert "format of its own" in err


def test_a_gap_and_late_cells_are_told(kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Positions that are missing inside a sequence are counted."""
    held = (Cell(0), Cell(1), Cell(4))
    path = kept("gap", context(Attention((held,), keys=((1, 8),), values=((1, 12),), rotation=(0, 0))))
    _, body, _ = told(capfd, "inspect", path)
    assert body["files"][0]["sections"][0]["sequences"][0]["n_missing"] == 2
    code, lines, _ = said(capfd, "validate", path)
    assert (code, len(lines)) == (0, 2)
    assert lines[1].startswith("  ! ")
    out = path.with_name("out")
    code, lines, _ = said(capfd, "convert", path, "-o", out, "--cut-at-gap")
    assert code == 0
    assert "  ! sequence 0 ends before position 2 now" in lines
    assert parse(out.read_bytes()).sequences()[0].pos_max == 1


def test_a_terminal_gets_a_table(kept: Any) -> None:
    """On a terminal facts stand in two columns; elsewhere one a line."""
    path = kept("x11549-dense")
    reader, writer = os.openpty()
    with os.fdopen(reader, "rb", buffering=0) as screen:
        done = subprocess.run(
            [Path(sys.executable).with_name("splitctl"), "state", "inspect", path],
            stdout=writer,
            stderr=subprocess.PIPE,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
            check=False,
        )
        os.close(writer)
        text = screen.read(20_000).decode()
    assert (done.returncode, done.stderr) == (0, b"")
    assert "version word" in text
    assert "version word:" not in text


# -- our own carry --


@pytest.fixture
def carried(tmp_path: Path) -> Path:
    """A carry whose state is a real one of a sequence of five tokens."""
    path = tmp_path / "carry.safetensors"
    sequence = a_sequence(0, n_tokens=5)
    carries.write(path, carries.seal(a_carry(sequence, state=golden("x11549-dense"))))
    return path


def test_a_carry_is_read_too(carried: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The state inside, its tokens and its build are told; its checksums are held against its bytes."""
    code, body, _ = told(capfd, "inspect", carried)
    (one,) = body["files"]
    assert code == 0
    assert (one["container"], one["form"], one["layouts"]) == ("splitctl carry", "context blob", ["v11"])
    assert one["carry"]["build"] == "b1"
    assert one["carry"]["sequences"][0]["n_tokens"] == 5
    assert said(capfd, "validate", carried)[0] == 0
    sound = carried.read_bytes()
    for before, after, named in (
        (golden("x11549-dense")[2000:2040], bytes(40), "state"),
        # Words beside the tensors have a checksum of their own.
        (rb"\"build\":\"b1\"", rb"\"build\":\"b2\"", "about"),
    ):
        assert sound.count(before) == 1
        carried.write_bytes(sound.replace(before, after))
        code, _, err = said(capfd, "validate", carried)
        assert (code, err.count("\n")) == (1, 1)
        assert f"not the checksum of: {named}" in err
        assert said(capfd, "inspect", carried)[0] == 0


def test_a_carry_without_checksums_is_none(carried: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Checksums that are no table of texts are told, and not looked up."""
    sound = carried.read_bytes()
    carried.write_bytes(sound.replace(b'"checksums"', b'"checksumz"'))
    code, _, err = said(capfd, "validate", carried)
    assert (code, err.count("\n")) == (1, 1)
    assert "no checksums" in err


def test_a_carry_becomes_a_session_file(carried: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its state is written as llama.cpp has it, with the tokens when a file is wanted."""
    blob, file = tmp_path / "blob", tmp_path / "file"
    assert said(capfd, "convert", carried, "-o", blob)[0] == 0
    assert blob.read_bytes() == golden("x11549-dense")
    assert said(capfd, "convert", carried, "-o", file, "--form", "file")[0] == 0
    image = parse(file.read_bytes())
    assert image.form is Form.SESSION_FILE
    assert image.tokens is not None
    assert len(image.tokens.text) == 5
    assert said(capfd, "diff", carried, file)[0] == 0


def test_other_safetensors_are_no_carry(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A safetensors file of somebody else, and one that is cut, are told for what they are."""
    header = b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    foreign = tmp_path / "foreign"
    foreign.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    code, _, err = said(capfd, "inspect", foreign)
    assert (code, err.count("\n")) == (1, 1)
    assert "safetensors file of another kind" in err
    foreign.write_bytes(foreign.read_bytes()[:-2])
    code, _, err = said(capfd, "inspect", foreign)
    assert (code, err.count("\n")) == (1, 1)
