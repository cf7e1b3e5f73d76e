"""`splitctl state validate`: what is sound, by itself and as a state of a model."""

from __future__ import annotations

import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from splitctl.carry import file as carries
from splitctl.carry.fingerprint import Identity
from splitctl.model.facts import ModelFacts, read_facts
from tests.codec.goldens import MANIFEST, golden
from tests.codec.synthetic import Attention, Recurrent, context, memory, sequence, sequence_file, session_file
from tests.ctl.carry.test_carry import FINGERPRINT, IDENTITY, a_carry, a_sequence
from tests.ctl.cli.states import header, said, told


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


def test_a_file_that_ends_behind_its_tokens_is_incomplete(
    smollm2: Path, tmp_path: Path, kept: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without its memory a session, sequence or slot file is no state, whether or not the model is known."""
    for name in ("x11549-dense-session-file", "x11549-dense-sequence-file"):
        data = golden(name)
        n_head = 12 + 4 * 5 + (9 if "session" in name else 0)
        path = kept("cut", data[:n_head])
        for more in ((), ("--model", smollm2), ("--model", header("llama-plain", tmp_path))):
            code, body, err = told(capfd, "validate", path, *more)
            assert (code, err.count("\n"), body["files"][0]["valid"]) == (1, 1, False)
            assert body["files"][0]["error"]["kind"] == "Truncated"
    # A model that keeps no memory has nothing to write behind the tokens.
    encoder = kept("encoder", session_file(context(architecture="bert"), 11))
    assert said(capfd, "validate", encoder)[0] == 1
    assert said(capfd, "validate", encoder, "--model", header("bert", tmp_path))[0] == 0


@pytest.mark.parametrize(("name", "wanted"), [("x11549-window-partial", "a part"), ("x11549-dense-device", "device")])
def test_a_part_of_a_memory_is_incomplete(
    name: str, wanted: str, tmp_path: Path, kept: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """A window alone, and cells whose rows stayed on the device, cannot be restored on their own."""
    model = header(MANIFEST[name]["model"], tmp_path)
    code, body, err = told(capfd, "validate", kept(name), "--model", model)
    assert (code, err.count("\n"), body["files"][0]["valid"]) == (1, 1, False)
    assert wanted in err


def test_a_memory_of_its_own_format_is_not_judged(
    smollm2: Path, tmp_path: Path, kept: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """What is not understood is neither sound nor invalid, cut or whole; of another model it is refused."""
    data = context(struct.pack("<II", 0x34565344, 1) + bytes(40), architecture="deepseek4")
    own = header("deepseek4", tmp_path)
    for path in (kept("opaque", data), kept("cut", data[:-7])):
        code, body, err = told(capfd, "validate", path, "--model", own)
        assert (code, err, body["files"][0]["valid"]) == (0, "", None)
        code, lines, _ = said(capfd, "validate", path)
        assert (code, "not judged" in lines[0], "sound" in lines[0]) == (0, True, False)
        code, _, err = said(capfd, "validate", path, "--model", smollm2)
        assert (code, "deepseek4" in err) == (1, True)
        out = path.with_name("out")
        code, _, err = said(capfd, "convert", path, "-o", out, "--drop-tail", "--model", own)
        assert (code, err.count("\n"), out.exists()) == (1, 1, False)
    plain = kept("plain", golden("x11549-dense-sequence"))
    assert said(capfd, "validate", plain, "--model", own)[0] == 1


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"Once upon a time\n", "a text file"),
        (b'{"messages": []}', "a text file"),
        (b"GGUF" + bytes(40), "a model file"),
        (b"PK\3\4" + bytes(40), "a zip archive"),
        (b"", "no bytes at all"),
        (struct.pack("<Q", 2) + b"{}", "a safetensors file of another kind"),
    ],
    ids=["text", "JSON", "model", "archive", "empty", "safetensors"],
)
@pytest.mark.parametrize("command", ["inspect", "validate", "convert", "diff"])
def test_what_is_no_state_is_named(
    command: str, data: bytes, wanted: str, kept: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every command says what the file is, with its path, in one line, and does not call it damaged."""
    path = kept("it", data)
    more = {"convert": ["-o", path.with_name("out"), "--first", "1"], "diff": [path]}.get(command, [])
    code, lines, err = said(capfd, command, path, *more)
    assert (code, lines, err.count("\n")) == (1, [], 1)
    assert f"{path}: " in err
    assert wanted in err
    assert "damaged" not in err


def test_a_bare_blob_is_told_from_a_file(kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """A blob lists no tokens, and is not made a file that would have to."""
    path = kept("x11549-dense")
    assert "tokens: none in this form: only a file or a carry lists them" in said(capfd, "inspect", path)[1]
    code, _, err = said(capfd, "convert", path, "-o", path.with_name("out"), "--form", "file")
    assert (code, err.count("\n")) == (1, 1)
    assert "a state without the tokens of one sequence cannot be held by a file" in err


_EMPTY = {
    "context": context(Attention(((),))),
    "context, streams": context(Attention(((),) * 4)),
    "context, window": context(Attention(((),)), Attention(((),))),
    "sequence": sequence(Attention(((),))),
    "slot file": sequence_file(memory(Attention(((),))), 4, ()),
    "slot file, hybrid": sequence_file(memory(Attention(((),)), Recurrent(())), 4, ()),
    "sequence, hybrid": sequence(Attention(((),)), Recurrent(())),
    "session file": session_file(context(Attention(((),))), 11, ()),
}


@pytest.mark.parametrize("name", _EMPTY)
def test_an_empty_state_is_empty_and_sound(name: str, kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """A saved context or slot that holds no token is called empty, not damaged, and can be converted and compared."""
    path = kept("empty", _EMPTY[name])
    code, lines, _ = said(capfd, "validate", path)
    assert (code, len(lines)) == (0, 1)
    assert ": sound: " in lines[0]
    assert ", empty, " in lines[0]
    code, body, _ = told(capfd, "inspect", path)
    assert (code, body["files"][0]["sequences"], body["files"][0]["findings"]) == (0, [], [])
    out = path.with_name("out")
    assert said(capfd, "convert", path, "-o", out, "--to-version", "10")[0] == 0
    assert said(capfd, "diff", path, out)[0] == 0


def test_tokens_that_an_empty_memory_does_not_hold_are_told(kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """A slot file that lists tokens and holds none of them says so."""
    path = kept("slot", sequence_file(memory(Attention(((),))), 4))
    code, lines, _ = said(capfd, "validate", path)
    assert (code, lines[1]) == (0, "  ! the file lists 3 tokens, the memory holds none of them")


def carry_of(path: Path, facts: ModelFacts, **changes: Any) -> Path:
    """A carry of a model, by what its file says."""
    identity = replace(IDENTITY, **{name: getattr(Identity.of(facts, (), 0), name) for name in _WHOSE})
    fingerprint = replace(FINGERPRINT, identity=identity)
    carries.write(path, carries.seal(a_carry(a_sequence(0, n_tokens=5), fingerprint=fingerprint, **changes)))
    return path


_WHOSE = ("header_xxh3_128", "header_bytes", "file_bytes", "architecture")


@pytest.mark.parametrize("model", ["bert", "llama-plain"])
def test_a_carry_without_a_state_is_sound(model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of a model without a memory, or of a session whose tokens alone could be parked: it is named, and not damaged."""
    path = header(model, tmp_path)
    carry = carry_of(tmp_path / "carry.safetensors", read_facts(path), state=b"")
    for more in ((), ("--model", path)):
        code, lines, err = said(capfd, "validate", carry, *more)
        assert (code, err, len(lines)) == (0, "", 2)
        assert ": sound: " in lines[0]
        assert lines[1] == "  ! it holds no state: restoring it reads its tokens again"
    code, lines, _ = said(capfd, "inspect", carry)
    assert (code, "memory: none: the tokens alone were saved" in lines) == (0, True)
    converts = ["convert", carry, "-o", tmp_path / "out"]
    for arguments in (converts, [*converts, "--form", "file"], ["diff", carry, carry]):
        code, _, err = said(capfd, *arguments)
        assert (code, err.count("\n"), (tmp_path / "out").exists()) == (1, 1, False)
        assert "it is a carry without a state; splitctl run --restore reads its tokens again" in err


def test_a_blob_that_ends_behind_its_name_is_incomplete(
    tmp_path: Path, kept: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where models of the architecture keep a memory, it is missing, even if no model is named."""
    code, _, err = said(capfd, "validate", kept("cut", golden("x11549-dense")[:9]))
    assert (code, err.count("\n"), "which models of llama keep" in err) == (1, 1, True)
    assert said(capfd, "validate", kept("x11549-encoder"))[0] == 0


def test_the_carry_of_another_model_is_told(smollm2: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It says whose it is, so a model with the same layers but another file is refused by name."""
    facts = read_facts(smollm2)
    path = carry_of(tmp_path / "carry.safetensors", facts, state=golden("x11549-smollm2"))
    assert said(capfd, "validate", path, "--model", smollm2)[0] == 0
    for other in ({"header_digest": "0" * 32}, {"file_bytes": facts.file_bytes + 1}, {"architecture": "qwen2"}):
        carry_of(path, replace(facts, **other), state=golden("x11549-smollm2"))
        for command, more in (("validate", ()), ("convert", ("-o", tmp_path / "out")), ("diff", (path,))):
            code, _, err = said(capfd, command, path, *more, "--model", smollm2)
            assert (code, err.count("\n"), "the carry of another model" in err) == (1, 1, True)
