"""A copy of a model's weights in host memory: whole and of the right files, or not used."""

from __future__ import annotations

import dataclasses
import os
import struct
import threading
from pathlib import Path

import pytest

from splitctl.engine import host_copy
from splitctl.engine.host_copy import HostCopy
from splitctl.host_memory import HostMemory
from splitctl.model.facts import read_facts
from splitctl.model.header import read_header
from splitctl.model.identity import FileIdentity
from tools.gguf_out import MetaKind, MetaValue, TensorSlot, write_gguf

EMBEDDING = TensorSlot("token_embd.weight", (8, 4), 0, 128)
NORM = TensorSlot("output_norm.weight", (8,), 0, 32)
META = (
    MetaValue("general.architecture", MetaKind.STR, "llama"),
    MetaValue("llama.block_count", MetaKind.U32, 1),
    MetaValue("llama.embedding_length", MetaKind.U32, 8),
    MetaValue("llama.attention.head_count", MetaKind.U32, 2),
    MetaValue("tokenizer.ggml.scores", MetaKind.F32, (0.5, 1.5)),
)


def _body(slot: TensorSlot, first: int) -> bytes:
    return bytes((first + index) % 256 for index in range(slot.n_bytes))


def _model(path: Path, first: int = 0) -> tuple[FileIdentity, ...]:
    write_gguf(path, META, (EMBEDDING, NORM), (_body(EMBEDDING, first), _body(NORM, first + 1)))
    return (FileIdentity.of(read_header(path)),)


def _split_model(folder: Path) -> tuple[FileIdentity, ...]:
    """Two parts with a tensor each."""
    paths = [folder / f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    for number, (path, slot) in enumerate(zip(paths, (EMBEDDING, NORM), strict=True)):
        split = (
            MetaValue("split.no", MetaKind.U16, number),
            MetaValue("split.count", MetaKind.U16, 2),
            MetaValue("split.tensors.count", MetaKind.I32, 2),
        )
        write_gguf(path, (*META, *split) if number == 0 else split, (slot,), (_body(slot, number),))
    return tuple(FileIdentity.of(read_header(path)) for path in paths)


def _held(copy: HostCopy, name: str) -> bytes:
    offset, n_bytes = copy.places[name]
    return bytes(memoryview(copy.weights.data)[offset : offset + n_bytes])


def test_a_copy_holds_every_tensor_and_is_the_file_itself(tmp_path: Path) -> None:
    """Its bytes are the file's; a tied output has the embedding's; the metadata lists it with that type."""
    files = _model(tmp_path / "m.gguf")
    copy = HostCopy()
    copy.start(files)
    assert copy.wait()
    raw = (tmp_path / "m.gguf").read_bytes()
    assert bytes(memoryview(copy.weights.data)[: len(raw)]) == raw
    assert _held(copy, "output_norm.weight") == _body(NORM, 1)
    assert _held(copy, "output.weight") == _body(EMBEDDING, 0)
    assert b"output.weight" in Path(copy.weights.metadata).read_bytes()
    assert copy.share == 1.0
    copy.close()
    assert copy.why == "the copy of the weights is closed"


def test_parts_are_joined_to_one_file(tmp_path: Path) -> None:
    """A split model's copy reads as a model of one part with all its tensors."""
    files = _split_model(tmp_path)
    copy = HostCopy()
    copy.start(files)
    assert copy.wait(), copy.why
    assert len(read_facts(copy.path).files) == 1
    path = files[0].path
    assert dataclasses.replace(copy.facts(path, files), tensors=()) == dataclasses.replace(
        read_facts(path), tensors=(), n_bytes_read=copy.facts(path, files).n_bytes_read
    )
    assert [one.name for one in copy.facts(path, files).tensors] == ["token_embd.weight", "output_norm.weight"]
    assert _held(copy, "token_embd.weight") == _body(EMBEDDING, 0)
    assert _held(copy, "output_norm.weight") == _body(NORM, 1)
    copy.close()


def test_what_one_process_filled_the_next_one_takes_when_the_file_is_gone(tmp_path: Path) -> None:
    """The memory file tells whose copy it is; a second one reads nothing of the model's file."""
    files = _model(tmp_path / "m.gguf")
    fd = os.memfd_create("copy")
    first = HostCopy(fd)
    first.start(files)
    assert first.wait()
    first.close()
    (tmp_path / "m.gguf").unlink()
    second = HostCopy(fd)
    assert second.is_of(files)
    second.start(files)
    assert second.wait(), second.why
    assert _held(second, "output_norm.weight") == _body(NORM, 1)
    second.close()
    os.close(fd)


def test_of_two_processes_one_fills_and_the_other_takes_it_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one is filling nobody else truncates; the second goes without until it is whole."""
    files, go_on = _model(tmp_path / "m.gguf"), threading.Event()
    read_all = host_copy._read_all

    def late(*arguments: object) -> None:
        go_on.wait()
        read_all(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(host_copy, "_read_all", late)
    fd = os.memfd_create("copy")
    first, second = HostCopy(fd), HostCopy(fd)
    first.start(files)
    second.start(files)
    assert second.why == "another process fills the copy of the weights"
    second.look_again()
    assert second.why
    go_on.set()
    assert first.wait()
    second.look_again()
    assert second.why == ""
    assert _held(second, "output_norm.weight") == _body(NORM, 1)
    first.close()
    second.close()
    os.close(fd)


def test_a_copy_of_other_bytes_is_filled_anew(tmp_path: Path) -> None:
    """What lies there of another model, or half of one, is never used."""
    fd = os.memfd_create("copy")
    other, files = _model(tmp_path / "other.gguf", 7), _model(tmp_path / "m.gguf")
    first = HostCopy(fd)
    first.start(other)
    assert first.wait()
    first.close()
    second = HostCopy(fd)
    assert not second.is_of(files)
    second.start(files)
    assert second.wait()
    assert _held(second, "output_norm.weight") == _body(NORM, 1)
    second.close()
    os.ftruncate(fd, os.fstat(fd).st_size - 100)
    assert not HostCopy(fd).is_of(files)
    os.close(fd)


def test_a_file_that_changed_meanwhile_gives_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is looked at before and after it was read; the reason names it."""
    path = tmp_path / "m.gguf"
    files = _model(path)
    read_all = host_copy._read_all

    def replaced(*arguments: object) -> None:
        read_all(*arguments)  # type: ignore[arg-type]
        _model(path, 9)

    monkeypatch.setattr(host_copy, "_read_all", replaced)
    copy = HostCopy()
    copy.start(files)
    assert not copy.wait()
    assert "other weights are in its place" in copy.why
    assert not copy.is_of(files)
    copy.close()


def test_a_host_without_twice_the_memory_gets_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason has both numbers."""
    monkeypatch.setattr(host_copy, "host_memory", lambda: HostMemory(1 << 20, 12_000))
    copy = HostCopy()
    copy.start(_model(tmp_path / "m.gguf"))
    assert not copy.wait()
    assert "it takes 0 MiB and as much shall stay free, the host has 0 MiB" in copy.why
    copy.close()


@pytest.mark.parametrize(("held", "reason"), [("no driver", "no driver"), ("", "")])
def test_it_is_pinned_when_it_is_filled(tmp_path: Path, held: str, reason: str) -> None:
    """The whole of it is given to what pins; why it cannot be is told, and the copy is used all the same."""
    seen: list[int] = []

    def pin(block: object) -> str:
        seen.append(len(block))  # type: ignore[arg-type]
        return held

    copy = HostCopy()
    copy.start(_model(tmp_path / "m.gguf"))
    copy.pin(pin)
    assert copy.wait()
    assert (seen, copy.pin_reason) == ([copy.n_bytes], reason)
    copy.close()


def test_a_pin_is_released_before_the_memory_goes(tmp_path: Path) -> None:
    """A driver must not keep what is unmapped."""
    released: list[bool] = []

    class Pin:
        """Notes its release."""

        def __init__(self, view: memoryview) -> None:
            self.view = view

        def release(self) -> None:
            """Let go."""
            self.view.release()
            released.append(True)

    copy = HostCopy()
    copy.start(_model(tmp_path / "m.gguf"))
    copy.pin(lambda block: Pin(memoryview(block)))
    assert copy.wait()
    copy.close()
    copy.close()
    assert released == [True]


def test_names_that_are_no_text_are_refused(tmp_path: Path) -> None:
    """A list of tensors that cannot be written again as it was read gives no copy."""
    path = tmp_path / "m.gguf"
    _model(path)
    raw = bytearray(path.read_bytes())
    at = raw.index(b"output_norm.weight")
    raw[at] = 0xFF
    path.write_bytes(raw)
    assert struct.unpack_from("<Q", raw, at - 8) == (18,)
    copy = HostCopy()
    copy.start((FileIdentity.of(read_header(path)),))
    assert not copy.wait()
    assert "names that are no text" in copy.why
    copy.close()
