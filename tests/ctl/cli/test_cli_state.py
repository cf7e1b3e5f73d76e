"""`splitctl state` on real states, on damaged ones, and on files that are no states; in this process, as it runs."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import struct
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splitctl.carry import file as carries
from splitctl.cli.main import main
from splitctl.cli.state_facts import codec_facts, facts_of_rows, repair_facts
from splitctl.cli.state_file import StateUnreadable, opened
from splitctl.model.facts import read_facts
from statecodec import Form, emit, parse, transcode
from tests.codec.goldens import MANIFEST, golden
from tests.codec.synthetic import Attention, Cell, cells, context, memory, sequence_file
from tests.ctl.carry.test_carry import a_carry, a_sequence
from tests.ctl.model_facts import model_facts

#: The server's record: null token, version, three tokens, no media.
_PACKED = (-1, 1, 3, 5, 6, 7, 0)


@pytest.fixture
def kept(tmp_path: Path) -> Any:
    """Puts a golden into a file."""

    def put(name: str, data: bytes | None = None) -> Path:
        path = tmp_path / name
        path.write_bytes(golden(name) if data is None else data)
        return path

    return put


def told(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any, str]:
    """Status, the object of --json, and stderr."""
    code = main(["state", *map(str, arguments), "--json"])
    out, err = capfd.readouterr()
    return code, json.loads(out), err


def said(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str], str]:
    """Status, the lines for people, and stderr."""
    code = main(["state", *map(str, arguments)])
    out, err = capfd.readouterr()
    return code, out.splitlines(), err


# -- inspect -----------------------------------------------------------------------------------------------------------


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


# -- our own carry -----------------------------------------------------------------------------------------------------


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


# -- validate ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x11549-dense", "x0120-dense", "l0336-hybrid", "x11549-dense-sequence-file"])
def test_damage_is_told_with_its_place(name: str, kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """A state that was cut or has bytes behind it is refused with offset, field, found and expected, in one line."""
    for data in (golden(name)[:-3], golden(name) + b"\0"):
        code, body, err = told(capfd, "validate", kept("bad", data))
        error = body["files"][0]["error"]
        assert (code, body["exit_code"], err.count("\n")) == (1, 1, 1)
        assert set(error) == {"kind", "message", "offset", "field", "found", "expected"}
        assert 0 < error["offset"] <= len(data)
        assert str(error["offset"]) in err


def test_one_bad_file_among_good_ones(kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Every file is looked at, the status is that of the worst."""
    paths = [kept("x11549-dense"), kept("bad", b"GGUF" + bytes(40)), kept("empty", b""), kept("x0120-window")]
    code, body, err = told(capfd, "validate", *paths, paths[0].with_name("absent"))
    assert [one["valid"] for one in body["files"]] == [True, False, False, True, False]
    assert (code, err.count("\n")) == (1, 3)
    assert "a model file" in err


def test_s5_foreign_words_are_refused_by_name(kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """An unknown version word, and the magic in the other byte order, are told."""
    data = bytearray(golden("l0336-dense-sequence-file"))
    struct.pack_into("<I", data, 4, 5)
    turned = b"ggsq" + bytes(data[4:])
    for bad, wanted in ((bytes(data), "version word at byte 4: found 5"), (turned, "other byte order")):
        code, _, err = said(capfd, "validate", kept("foreign", bad))
        assert (code, err.count("\n")) == (1, 1)
        assert wanted in err


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "no rights"])
def test_what_is_no_file_is_told(kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A folder, a pipe without a writer and a device end in one line and do not wait."""
    path = tmp_path / "it"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/null")
    else:
        path.symlink_to(path)
    code, lines, err = said(capfd, "inspect", path)
    assert (code, lines, err.count("\n")) == (1, [], 1)


@pytest.mark.model
def test_a_model_decides_and_is_checked(smollm2: Path, kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """The state of a model validates against its file; that of another model and a file that is no model do not."""
    own, other = kept("x11549-smollm2-q8"), kept("x11549-dense")
    assert said(capfd, "validate", own, "--model", smollm2)[0] == 0
    code, body, _ = told(capfd, "validate", other, "--model", smollm2)
    assert code == 1
    assert body["files"][0]["error"]["field"] == "section 0 stream 0 values of K rows"
    assert "GGUF" in said(capfd, "validate", own, "--model", own)[2]
    facts = read_facts(smollm2)
    assert codec_facts(facts).architecture == "llama"
    assert facts_of_rows(facts, parse(golden("x11549-smollm2"))).n_embd_k == (192,) * 30


# -- convert -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "there", "back"),
    [
        ("x11549-dense", ["--to-version", "10"], ["--to-version", "11"]),
        ("x11549-dense-sequence-file", ["--to-version", "9"], ["--to-version", "11"]),
        ("x11549-dense", ["--flash-attn", "off"], ["--flash-attn", "on"]),
        ("x11549-dense-streams4", ["--streams", "unified"], ["--streams", "4"]),
        ("x11549-dense", ["--renumber", "0=3"], ["--renumber", "3=0"]),
        ("x11549-dense", ["--type-k", "f32", "--type-v", "f32"], ["--type-k", "f16", "--type-v", "f16"]),
        ("l0336-mrope", ["--to-version", "11"], ["--to-version", "10"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_what_is_exact_comes_back(
    name: str, there: list[str], back: list[str], kept: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """A change without loss and its opposite give the very bytes, and hold the same in between."""
    path = kept(name)
    middle, end = path.with_name("middle"), path.with_name("end")
    code, body, _ = told(capfd, "convert", path, "-o", middle, *there)
    assert code == 0
    assert body["n_bytes"] == middle.stat().st_size
    assert all(change["is_exact"] for change in body["changes"])
    if "renumber" not in there[0]:
        assert said(capfd, "diff", path, middle)[0] == 0
    assert said(capfd, "convert", middle, "-o", end, *back)[0] == 0
    assert end.read_bytes() == path.read_bytes()


def test_quantizing_says_its_error(kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Types that round report a bound; rotation that nobody knows is refused, and stated it is undone."""
    path = kept("x11549-dense")
    out = path.with_name("q8")
    arguments = ["convert", path, "-o", out, "--type-k", "q8_0", "--type-v", "q8_0"]
    assert said(capfd, *arguments)[0] == 1
    code, body, _ = told(capfd, *arguments, "--rotation", "64")
    assert code == 0
    assert 0 < body["changes"][-1]["error_bound"] < 0.1
    assert said(capfd, "diff", path, out)[0] == 1
    code, body, _ = told(capfd, "diff", path, out, "--nmse", "1e-3")
    assert (code, body["same"]) == (0, True)
    assert 0 < body["nmse"] < 1e-3

    old = kept("l0336-dense-q8")
    f16 = ["--type-k", "f16", "--type-v", "f16", "--to-version", "11"]
    code, _, err = said(capfd, "convert", old, "-o", out, "--force", *f16)
    assert (code, err.count("\n")) == (1, 1)
    assert "unknown rotation" in err
    assert said(capfd, "convert", old, "-o", out, "--force", *f16, "--source-rotation", "64,64")[0] == 0
    assert said(capfd, "diff", out, kept("l0336-dense"), "--nmse", "1e-3")[0] == 0


def test_a_rotation_that_is_only_stated_changes_no_row(kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """A version with words for the rotation takes --rotation for what the rows have."""
    path = kept("l0336-dense-q8")
    out = path.with_name("out")
    code, body, _ = told(capfd, "convert", path, "-o", out, "--to-version", "11", "--rotation", "64")
    assert (code, [change["what"] for change in body["changes"]]) == (0, ["version 11"])
    assert len(out.read_bytes()) == len(path.read_bytes()) + 8


def test_sequences_come_out_and_go_together(kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Four sequences taken out of a context and merged again are that context."""
    path = kept("x11549-dense-streams4")
    parts = [path.with_name(f"part{number}") for number in range(4)]
    for number, part in enumerate(parts):
        assert said(capfd, "convert", path, "-o", part, "--extract", number)[0] == 0
    whole = path.with_name("whole")
    merge = ["convert", *parts, "--merge", "-o", whole, "--streams", "4"]
    code, _, err = said(capfd, *merge)
    assert code == 1
    assert "--architecture" in err
    assert said(capfd, *merge, "--architecture", "llama")[0] == 0
    assert whole.read_bytes() == path.read_bytes()


def test_a_file_keeps_as_many_tokens_as_cells(kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """The first tokens of a session file are a session file of these tokens; its sequence is a sequence file."""
    path = kept("x11549-dense-session-file")
    short, alone = path.with_name("short"), path.with_name("alone")
    assert said(capfd, "convert", path, "-o", short, "--first", "2")[0] == 0
    image = parse(short.read_bytes())
    assert image.tokens is not None
    assert image.tokens.text.tolist() == parse(golden("x11549-dense-session-file")).tokens.text[:2].tolist()  # type: ignore[union-attr]
    assert said(capfd, "convert", path, "-o", alone, "--extract", "0", "--form", "file")[0] == 0
    assert alone.read_bytes() == golden("x11549-dense-sequence-file")
    blob = path.with_name("blob")
    assert said(capfd, "convert", path, "-o", blob, "--form", "blob")[0] == 0
    assert blob.read_bytes() == golden("x11549-dense")
    assert said(capfd, "convert", blob, "-o", path.with_name("no"), "--form", "file")[0] == 1


def test_a_damaged_tail_is_dropped(smollm2: Path, kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """What is whole of a state that was cut, or has bytes behind it, is written, and what went is said."""
    data = golden("x11549-smollm2")
    out = kept("cut", data[:-1]).with_name("out")
    arguments = ["convert", "--drop-tail", "--model", smollm2, "-o", out, "--force"]
    code, body, _ = told(capfd, *arguments, out.with_name("cut"))
    assert code == 0
    image, whole = parse(out.read_bytes()), parse(data)
    assert image.sequences()[0].pos_max == whole.sequences()[0].pos_max - 1
    assert out.read_bytes() == b"".join(emit(transcode.keep_first(whole, image.sequences()[0].pos_max + 1)))
    (change,) = body["changes"]
    assert change["what"] == "a damaged tail dropped"
    assert "ends before position" in change["warnings"][0]
    assert said(capfd, *arguments, kept("long", data + bytes(9)))[1][1] == "  9 bytes behind the end dropped: exact"
    assert out.read_bytes() == data
    assert said(capfd, *arguments, kept("sound", data))[1][1] == "  nothing had to be changed"
    other = kept("other", golden("x11549-window"))
    assert said(capfd, *arguments, other)[0] == 1
    assert out.read_bytes() == data


def test_where_nothing_is_whole_the_tokens_are_told(
    smollm2: Path, kept: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """A cut in the rows leaves no cell; the token list is whole and is given, and nothing is written."""
    data = golden("x11549-dense-session-file")
    tokens = parse(data).tokens
    assert tokens is not None
    out = kept("cut", data[: len(data) // 2]).with_name("out")
    for more, why in (([], "sections"), (["--model", smollm2], "no cell has its rows")):
        code, body, err = told(capfd, "convert", "--drop-tail", out.with_name("cut"), "-o", out, *more)
        assert (code, err.count("\n"), out.exists()) == (1, 1, False)
        assert why in err
        assert "splitctl run --restore" in err
        error = body["files"][0]["error"]
        assert (error["kind"], error["tokens"]) == ("NothingKept", tokens.text.tolist())
        assert error["offset"] > 0
    blob = kept("blob", golden("x11549-dense")[:-700])
    code, _, err = said(capfd, "convert", "--drop-tail", blob, "-o", out)
    assert (code, "Read the tokens again" in err) == (1, True)


def test_what_a_header_says_of_the_parts_of_a_memory(smollm2: Path) -> None:
    """One cache, a window beside it, a recurrent part; and nothing where builds or headers differ."""
    plain = read_facts(smollm2)

    def parts(**named: Any) -> tuple[str, ...] | None:
        return repair_facts(replace(plain, **named)).sections

    assert parts() == ("attention",)
    assert parts(n_swa=512) == ("attention", "attention")
    assert parts(is_mla=True) is None
    assert parts(n_embd_indexer=64) is None
    assert parts(architecture="bert") == ()
    hybrid = model_facts(architecture="qwen3next")
    assert hybrid.is_hybrid
    assert repair_facts(hybrid).sections == ("attention", "recurrent")
    assert repair_facts(replace(hybrid, n_swa=128)).sections is None


def test_nothing_is_written_over(kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """An output that is there stays, above all the input; --force replaces it, and a failure leaves it."""
    path = kept("x11549-dense")
    for out in (path, kept("other", b"precious")):
        before = out.read_bytes()
        code, _, err = said(capfd, "convert", path, "-o", out, "--to-version", "10")
        assert (code, err.count("\n")) == (2, 1)
        assert "--force" in err
        assert out.read_bytes() == before
    assert said(capfd, "convert", path, "-o", path, "--to-version", "9", "--force")[0] == 0
    assert parse(path.read_bytes()).versions == {9, 10}
    other = path.with_name("other")
    assert said(capfd, "convert", kept("x11549-recurrent"), "-o", other, "--force", "--first", "2")[0] == 1
    assert other.read_bytes() == b"precious"
    code, _, err = said(capfd, "convert", path, "-o", path.with_name("no") / "out", "--first", "2")
    assert (code, err.count("\n")) == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["convert", "FILE", "-o", "out"], "say what to change"),
        (["convert", "FILE"], "-o"),
        (["convert", "FILE", "FILE", "-o", "out", "--first", "1"], "--merge"),
        (["convert", "FILE", "-o", "out", "--merge", "--extract", "0"], "opposite"),
        (["convert", "FILE", "-o", "out", "--streams", "0"], "unified"),
        (["convert", "FILE", "-o", "out", "--rotation", "63"], "powers of two"),
        (["convert", "FILE", "-o", "out", "--renumber", "0"], "pairs of ids"),
        (["convert", "FILE", "-o", "out", "--to-version", "8"], "10"),
        (["inspect"], "FILE"),
        (["diff", "FILE"], "SECOND"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_usage(arguments: list[str], wanted: str, kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """A wrong flag is one line that says what is wanted, with status 2, and nothing is written."""
    path = kept("x11549-dense")
    out = path.with_name("out")
    words = [{"FILE": str(path), "out": str(out)}.get(word, word) for word in arguments]
    code, lines, err = said(capfd, *words)
    assert (code, lines, err.count("\n")) == (2, [], 1)
    assert wanted in err
    assert not out.exists()


def test_s10_half_a_state_is_not_converted(kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Rows that stayed on a device are told, and such a state is not changed."""
    path = kept("x11549-dense-device")
    _, lines, _ = said(capfd, "inspect", path)
    assert "form: sequence blob, on device" in lines
    code, _, err = said(capfd, "convert", path, "-o", path.with_name("out"), "--first", "2")
    assert (code, "on device" in err) == (1, True)


# -- diff --------------------------------------------------------------------------------------------------------------


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


# -- files of any size, and files that change --------------------------------------------------------------------------


def sparse(path: Path, n_cells: int, n_layers: int, width: int) -> int:
    """A context blob whose rows are holes; returns its size."""
    head = struct.pack("<I", 5) + b"llama" + struct.pack("<II", 1, n_cells)
    table = np.zeros((n_cells, 3), dtype="<i4")
    table[:, 0], table[:, 1] = np.arange(n_cells), 1
    with path.open("wb") as file:
        file.write(head + table.tobytes() + struct.pack("<IIII", 0, n_layers, 0, 0))
        for _ in range(2 * n_layers):
            file.write(struct.pack("<iQ", 1, width))
            file.seek(n_cells * width, os.SEEK_CUR)
        file.truncate()
        return file.tell()


_MEASURE = """
import resource, sys
from splitctl.cli.main import main
main(["state", "validate", sys.argv[2]])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
code = main(["state", sys.argv[3], sys.argv[1]])
print(code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("command", ["inspect", "validate"])
def test_a_large_file_takes_little_memory(command: str, tmp_path: Path, kept: Any) -> None:
    """Four GiB of rows are inspected and validated with less than 32 MiB more in memory."""
    path = tmp_path / "large"
    assert sparse(path, 16384, 64, 2048) > 4 << 30
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, path, kept("x11549-dense"), command],
        capture_output=True,
        text=True,
        check=True,
    )
    code, grown = done.stdout.split()[-2:]
    assert code == "0"
    assert int(grown) < 32 * 1024


def test_a_large_file_is_compared_in_slices(tmp_path: Path) -> None:
    """A quarter of a GiB on each side is compared in less memory than one of them; holes are pages of the file."""
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        sparse(path, 4096, 16, 2048)
    limit = resource.getrlimit(resource.RLIMIT_DATA)
    program = (
        "import resource, sys\nfrom splitctl.cli.main import main\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (384 << 20, 384 << 20))\n"
        "raise SystemExit(main(['state', 'diff', *sys.argv[1:]]))"
    )
    done = subprocess.run([sys.executable, "-c", program, *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert limit == resource.getrlimit(resource.RLIMIT_DATA)


def test_a_file_that_shrinks_is_told(kept: Any) -> None:
    """A file that became shorter, or was written to, while it was open is no answer."""
    path = kept("x11549-dense")

    def shrinking() -> None:
        with opened(path) as file:
            file.parsed()
            # Through a descriptor from before, as a writer that has it open all along would do it.
            os.ftruncate(writer, 1000)

    def growing() -> None:
        with opened(path):
            os.pwrite(writer, b"x", 5000)

    writer = os.open(path, os.O_RDWR)
    try:
        with pytest.raises(StateUnreadable, match="became shorter"):
            shrinking()
        with pytest.raises(StateUnreadable, match="written to"):
            growing()
    finally:
        os.close(writer)


def test_a_writer_waits_and_is_told_of(kept: Any) -> None:
    """Where the system grants a lease, a program that opens the file for writing stops us before it can cut it."""
    path = kept("x11549-dense")
    probe = os.open(path, os.O_RDONLY)
    try:
        fcntl.fcntl(probe, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        pytest.skip(f"this file system grants no lease: {error}")
    finally:
        os.close(probe)
    code = f"import os; os.truncate({str(path)!r}, 10)"
    children: list[subprocess.Popen[bytes]] = []

    def reading() -> None:
        with opened(path):
            children.append(subprocess.Popen([sys.executable, "-c", code]))
            children[0].wait()

    with pytest.raises(StateUnreadable, match="another program"):
        reading()
    assert children[0].wait() == 0
    assert path.stat().st_size == 10


def test_another_thread_may_open_files_too(kept: Any) -> None:
    """Signals arrive in the main thread alone; elsewhere a file is read without a lease."""
    path = kept("x11549-dense")
    seen: list[int] = []

    def look() -> None:
        with opened(path) as file:
            seen.append(file.parsed().n_bytes)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [len(golden("x11549-dense"))]
