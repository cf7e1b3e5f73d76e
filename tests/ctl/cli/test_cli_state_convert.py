"""`splitctl state convert`: what is written, how exact it is, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from statecodec import emit, parse, transcode
from tests.codec.goldens import golden
from tests.ctl.cli.states import said, told


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


@pytest.mark.parametrize("name", ["x11549-dense-session-file", "x11549-window", "x11549-dense-sequence-file"])
def test_a_sound_state_of_another_model_has_no_damaged_tail(
    name: str, smollm2: Path, kept: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is said that it is another model's, and not to read its tokens with this one."""
    path = kept(name)
    code, _, err = said(capfd, "convert", path, "-o", path.with_name("out"), "--drop-tail", "--model", smollm2)
    assert (code, err.count("\n"), path.with_name("out").exists()) == (1, 1, False)
    assert "belongs to another model" in err
    assert "--restore" not in err


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
