"""Files of every form are opened by the codec alone, our own carry too, and cost no memory."""

from __future__ import annotations

import gc
import json
import os
import resource
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitctl.carry import file as carries
from statecodec import (
    ForeignFile,
    Form,
    Inconsistent,
    ModelFacts,
    StateFormatError,
    Truncated,
    UnknownVersion,
    carried,
    emit,
    load,
    parse,
)
from statecodec.carried import CARRY_FORMAT, CARRY_VERSION
from tests.codec.goldens import MANIFEST, golden
from tests.ctl.carry.test_carry import a_carry, a_sequence


def container(slots: dict[str, Any], data: bytes = b"", **metadata: str) -> bytes:
    """A safetensors file of a carry, or of what was made of one."""
    texts = {"format": CARRY_FORMAT, "version": CARRY_VERSION, **metadata}
    header = json.dumps({"__metadata__": texts, **slots}).encode()
    return struct.pack("<Q", len(header)) + header + data


def slot(first: int, last: int, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, Any]:
    """What a header says of one tensor."""
    return {"dtype": dtype, "shape": [last - first] if shape is None else shape, "data_offsets": [first, last]}


@pytest.fixture(scope="module")
def carry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A carry with a real state of a sequence of five tokens."""
    path = tmp_path_factory.mktemp("carry") / "carry.safetensors"
    carries.write(path, carries.seal(a_carry(a_sequence(0, n_tokens=5), state=golden("x11549-dense"))))
    return path


@pytest.mark.parametrize("name", [name for name in MANIFEST if MANIFEST[name]["flags"] < 0])
def test_a_file_of_every_form_is_loaded(name: str, tmp_path: Path) -> None:
    """Blobs, session and sequence files of every build read from a file as they do from memory."""
    path = tmp_path / "state"
    path.write_bytes(golden(name))
    assert b"".join(emit(load(path))) == golden(name)
    assert load(str(path)).layouts == parse(golden(name)).layouts


def test_a_carry_is_loaded(carry: Path) -> None:
    """The state in it is the image; its tokens and texts are at hand."""
    image = load(carry)
    assert (image.form, b"".join(emit(image))) == (Form.CONTEXT, golden("x11549-dense"))
    held = carried(carry.read_bytes())
    assert held is not None
    assert bytes(held.state) == golden("x11549-dense")
    tokens = held.tokens(0)
    assert tokens is not None
    assert (tokens.dtype, tokens.tolist()) == (np.dtype("<i4"), a_sequence(0, n_tokens=5).tokens.tolist())
    assert held.tokens(1) is None
    assert (held.metadata["format"], held.metadata["version"]) == (carries.FORMAT, carries.VERSION)
    assert set(held.tensors) == {"state", *(f"seq.0.{row}" for row in carries._ROWS)}
    assert carried(golden("x11549-dense")) is None


def test_a_carry_without_a_state_is_loaded(tmp_path: Path) -> None:
    """Of a model without a memory, and of a session whose tokens alone were saved, it is no bytes at all."""
    path = tmp_path / "carry.safetensors"
    carries.write(path, carries.seal(a_carry(a_sequence(0, n_tokens=5), state=b"")))
    for facts in (None, ModelFacts(sections=()), ModelFacts(sections=("attention",))):
        image = load(path, facts=facts)
        assert (image.sections, image.is_empty) == ((), True)


def test_a_loaded_file_is_mapped_as_long_as_its_image(carry: Path) -> None:
    """When the image goes, or an error is all that is left, the file is mapped no more, without a collection."""

    def is_mapped() -> bool:
        return str(carry) in Path("/proc/self/maps").read_text()

    gc.disable()
    try:
        image = load(carry)
        assert is_mapped()
        del image
        assert not is_mapped()
        kept = []
        try:
            load(carry, facts=ModelFacts(sections=("recurrent",)))
        except StateFormatError as error:
            kept.append(error)
        assert kept
        assert not is_mapped()
    finally:
        gc.enable()


def test_a_large_file_costs_no_memory(tmp_path: Path) -> None:
    """A file of 8 GiB is looked at in a few pages, its rows being holes."""
    path = tmp_path / "large"
    head = golden("x11549-dense")[:13]
    with path.open("wb") as file:
        n_cells, width = 1 << 14, 1 << 18
        file.write(head + struct.pack("<I", n_cells))
        table = np.zeros((n_cells, 3), dtype="<i4")
        table[:, 0], table[:, 1] = np.arange(n_cells), 1
        file.write(table.tobytes() + struct.pack("<IIII", 0, 1, 0, 0))
        for _ in range(2):
            file.write(struct.pack("<iQ", 1, width))
            file.seek(n_cells * width, 1)
        file.truncate()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert load(path).sequences()[0].n_cells == n_cells
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024


@pytest.mark.parametrize(
    ("data", "kind", "wanted"),
    [
        (b"", Truncated, "no bytes at all"),
        (b"Once upon a time", ForeignFile, "a text file"),
        (struct.pack("<Q", 2) + b"{}", ForeignFile, "a safetensors file of another kind"),
        (container({}, format="pt"), ForeignFile, "'pt'"),
        (container({}, version="2"), UnknownVersion, "a carry of version '2'"),
        (container({}), StateFormatError, "tensor 'state'"),
        (container({"state": slot(0, 4, "I32", [1])}, bytes(4)), StateFormatError, "tensor 'state'"),
        (container({"state": slot(0, 4, "U8", [2, 2])}, bytes(4)), StateFormatError, "tensor 'state'"),
        (container({"state": slot(0, 4)}, bytes(3)), Truncated, "tensor 'state'"),
        (container({"state": slot(0, 4)}, bytes(5)), Inconsistent, "end of the tensors"),
        (container({"state": slot(0, 4, shape=[3])}, bytes(4)), Inconsistent, "offsets"),
        (container({"state": slot(1, 4)}, bytes(4)), Inconsistent, "offsets"),
        (container({"state": slot(0, 4), "a": slot(2, 6)}, bytes(6)), Inconsistent, "offsets"),
        (container({"state": slot(0, 4), "a": slot(5, 6)}, bytes(6)), Inconsistent, "offsets"),
        (container({"state": slot(0, 1 << 62)}, bytes(4)), Truncated, "tensor 'state'"),
        (container({"state": slot(0, 0, "F32", [1 << 62, 1 << 62])}), Inconsistent, "offsets"),
        (container({"state": slot(0, 0, shape=[0, 1 << 62, 1 << 62])}), StateFormatError, "an array can have"),
        (container({"state": slot(0, 0, shape=[0, 1 << 70])}), StateFormatError, "an array can have"),
        (container({"state": slot(0, 4, "F64")}, bytes(4)), StateFormatError, "dtype of U8"),
        (container({"state": slot(0, 4, shape=[-4])}, bytes(4)), StateFormatError, "shape"),
        (container({"state": slot(0, 4, shape=[1] * 9)}, bytes(4)), StateFormatError, "shape"),
        (
            container({"state": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, b"1"),
            StateFormatError,
            "shape",
        ),
        (container({"state": {"dtype": "U8", "shape": [1]}}, b"1"), StateFormatError, "data_offsets"),
        (container({"state": [1, 2]}), StateFormatError, "tensor 'state'"),
        (struct.pack("<Q", 1 << 20) + b"{}", Truncated, "header"),
        (struct.pack("<Q", 3) + b"{,}", StateFormatError, "JSON"),
        (struct.pack("<Q", 4) + b"{\xff\xff}", StateFormatError, "JSON"),
        (struct.pack("<Q", 20) + b'{"__metadata__":[1]}', StateFormatError, "JSON"),
        (struct.pack("<Q", 26) + b'{"__metadata__":{"a":1.5}}', StateFormatError, "JSON"),
        (struct.pack("<Q", 60_005) + b'{"a":' + b"[" * 30_000 + b"]" * 30_000, StateFormatError, "JSON"),
    ],
)
def test_each_way_to_be_no_carry_has_its_error(
    data: bytes, kind: type[StateFormatError], wanted: str, tmp_path: Path
) -> None:
    """Files of other kinds are named; a carry whose header does not fit its bytes is refused by what does not fit."""
    path = tmp_path / "it"
    path.write_bytes(data)
    with pytest.raises(kind) as caught:
        load(path)
    assert wanted in str(caught.value)


def read(data: bytes) -> None:
    """What `load` does with the bytes of a file."""
    held = carried(data)
    parse(data if held is None else held.state)


def test_a_header_is_believed_in_nothing(carry: Path) -> None:
    """Every truncation of a carry is an error that takes no memory to speak of."""
    data = carry.read_bytes()
    tracemalloc.start()
    try:
        for end in (*range(0, 4000, 61), *range(4000, len(data), 997), len(data) - 1):
            with pytest.raises(StateFormatError):
                read(data[:end])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_header_is_an_error_of_the_one_kind(carry: Path, patches: list[tuple[int, int]]) -> None:
    """Bytes replaced in a header raise nothing else, or leave tensors that lie within the file."""
    data = bytearray(carry.read_bytes())
    for at, byte in patches:
        data[at] = byte
    try:
        held = carried(data)
    except StateFormatError:
        return
    assert held is None or sum(one.nbytes for one in held.tensors.values()) < len(data)


def test_what_cannot_be_opened_is_an_os_error(tmp_path: Path) -> None:
    """A missing file and a folder are told by the system's own errors."""
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "absent")
    with pytest.raises(IsADirectoryError):
        load(tmp_path)


def test_a_pipe_is_no_empty_file(tmp_path: Path) -> None:
    """It has no size, and nothing in it is looked at."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    fd = os.open(path, os.O_RDWR)
    try:
        with pytest.raises(OSError, match="seek"):
            load(path)
    finally:
        os.close(fd)
