"""The safetensors reader and writer: one case for each way to be wrong, and the library as the oracle."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from splitctl import tensorfile
from splitctl.errors import CarryDamaged
from splitctl.tensorfile import TensorFile, view_of, write_tensors

ONE = {"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}


def n_open() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def put(path: Path, document: object, data: bytes = b"ab", *, n_header: int | None = None) -> Path:
    """Write a file of this header, as it is."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    path.write_bytes((len(body) if n_header is None else n_header).to_bytes(8, "little") + body + data)
    return path


def entry(**changes: object) -> dict[str, object]:
    return {"a": {**ONE["a"], **changes}}


def test_a_sound_file_is_read(tmp_path: Path) -> None:
    """The smallest one, with metadata and without."""
    with TensorFile(put(tmp_path / "f", {"__metadata__": {"k": "v"}, **ONE})) as file:
        assert file.metadata == {"k": "v"}
        assert file.read(file.slots[0]).tolist() == [97, 98]
    with TensorFile(put(tmp_path / "f", ONE)) as file:
        assert file.metadata == {}


WRONG: dict[str, tuple[object, bytes, str]] = {
    "not JSON": (b"{", b"", "header is wrong"),
    "not text": (b"\xff\xff", b"", "header is wrong"),
    "nested": (b"[" * 200_000, b"", "header is wrong"),
    "a long number": (b'{"a":' + b"9" * 10_000 + b"}", b"", "header is wrong"),
    "a list": ([], b"", "holds a list"),
    "twice": (b'{"a":{},"a":{}}', b"", "names something twice"),
    "metadata of numbers": ({"__metadata__": {"k": 1}}, b"", "not an object of texts"),
    "metadata a list": ({"__metadata__": []}, b"", "not an object of texts"),
    "an entry no object": ({"a": 1}, b"", "has no dtype, shape and data_offsets"),
    "a field short": ({"a": {"dtype": "U8", "shape": []}}, b"", "has no dtype, shape and data_offsets"),
    "a field more": (entry(x=1), b"ab", "or more than these"),
    "another type": (entry(dtype="F8_E4M3"), b"ab", "type 'F8_E4M3', wanted one of U8, I32, F32"),
    "a type that is no text": (entry(dtype=[]), b"ab", "is of type"),
    "three axes": (entry(shape=[1, 1, 2]), b"ab", "3 axes"),
    "three offsets": (entry(data_offsets=[0, 1, 2]), b"ab", "3 offsets"),
    "a shape that is no list": (entry(shape=2), b"ab", "no list where numbers are wanted"),
    "a negative axis": (entry(shape=[-2]), b"ab", "-2 where a count is wanted"),
    "a broken axis": (entry(shape=[2.0]), b"ab", "2.0 where a count"),
    "a true axis": (entry(shape=[True]), b"ab", "True where a count"),
    "an axis of 2**63": (entry(shape=[1 << 63]), b"ab", "where a count"),
    "axes that overflow": (entry(shape=[1 << 62, 1 << 62]), b"ab", "its shape wants"),
    "larger than its bytes": (entry(shape=[3]), b"ab", "takes 2 bytes, its shape wants 3"),
    "backwards": (entry(data_offsets=[2, 0]), b"ab", "takes -2 bytes"),
    "a gap": (entry(data_offsets=[1, 3]), b"abc", "begins at 1, wanted 0"),
    "an overlap": ({**ONE, "b": ONE["a"]}, b"ab", "begins at 0, wanted 2"),
    "data missing": (ONE, b"a", "take 2 bytes, the file has 1"),
    "data behind": (ONE, b"abc", "take 2 bytes, the file has 3"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_header_is_damaged(tmp_path: Path, name: str) -> None:
    """One case for each fault; the message says what was found and what was wanted, in some hundred characters."""
    document, data, said = WRONG[name]
    path = put(tmp_path / "f", document, data)
    before = n_open()
    with pytest.raises(CarryDamaged, match=said) as caught:
        TensorFile(path)
    assert len(str(caught.value)) < 600
    assert n_open() == before


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it has 0 bytes, wanted 8"),
        (b"1234567", "it has 7 bytes, wanted 8"),
        (b"GGUF\x03\0\0\0" + bytes(100), "not a safetensors file"),
        (b"\xff" * 20, "18446744073709551615 bytes, at most 4194304"),
        ((30).to_bytes(8, "little") + b"{}", "header takes 30 bytes, the file has 10"),
    ],
)
def test_a_foreign_or_short_file_is_damaged(tmp_path: Path, content: bytes, said: str) -> None:
    """The size of the header is held against the cap and the file before anything is read."""
    path = tmp_path / "f"
    path.write_bytes(content)
    with pytest.raises(CarryDamaged, match=said):
        TensorFile(path)


def test_what_is_no_file_is_damaged(tmp_path: Path) -> None:
    """Missing, a folder, a pipe with nobody behind it, a device, a path that no path can be."""
    os.mkfifo(tmp_path / "pipe")
    for path, said in (
        (tmp_path / "nowhere", "No such file"),
        (tmp_path, "not a regular file"),
        (tmp_path / "pipe", "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (Path("a\0b"), "null byte"),
    ):
        with pytest.raises(CarryDamaged, match=said):
            TensorFile(path)


def test_a_file_that_becomes_shorter_under_the_reader_is_damaged(tmp_path: Path) -> None:
    """What was promised at opening is not there any more: said with both numbers, no signal, no garbage."""
    path = tmp_path / "f"
    write_tensors(path, {"a": np.arange(1000, dtype=np.int32)}, {})
    with TensorFile(path) as file:
        os.truncate(path, path.stat().st_size - 10)
        with pytest.raises(CarryDamaged, match="tensor a ends after 3990 of 4000 bytes"):
            file.read(file.slots[0])


def test_a_disk_that_fails_is_damaged(tmp_path: Path) -> None:
    """An error of the read itself is told in its words."""
    with TensorFile(put(tmp_path / "f", ONE)) as file:
        file._file.close()
        file._file = open("/proc/self/mem", "rb", buffering=0)  # noqa: PTH123, SIM115 (reading it at 0 is an EIO)
        with pytest.raises(CarryDamaged, match="cannot be read: Input/output error"):
            file.read(file.slots[0])


ARRAY = st.one_of(
    *(
        arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=5))
        for dtype in (np.uint8, np.int32, np.float32)
    )
)


@given(tensors=st.dictionaries(st.text(max_size=5), ARRAY, max_size=5), metadata=st.dictionaries(st.text(), st.text()))
def test_what_is_written_is_read_by_us_and_by_the_library(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, np.ndarray[Any, Any]], metadata: dict[str, str]
) -> None:
    """Any names, shapes with zeros, any bits of a float: equal in both readers, each tensor aligned to its element."""
    tensors.pop("__metadata__", None)
    path = tmp_path_factory.mktemp("t") / "f"
    write_tensors(path, tensors, metadata)
    theirs = safetensors.numpy.load(path.read_bytes())
    with TensorFile(path) as file:
        assert file.metadata == metadata
        assert {slot.name for slot in file.slots} == set(tensors)
        for slot in file.slots:
            array, mine = tensors[slot.name], file.read(slot)
            assert (mine.dtype, mine.shape, mine.tobytes()) == (array.dtype, array.shape, array.tobytes())
            assert theirs[slot.name].tobytes() == array.tobytes()
            assert (file._data_at + slot.begin) % slot.dtype.itemsize == 0


def test_what_the_writer_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A type that the reader does not know, and a header that it would not take; nothing is written."""
    with pytest.raises(ValueError, match="tensor a is int64, wanted one of uint8, int32, float32"):
        write_tensors(tmp_path / "f", {"a": np.zeros(2, np.int64)}, {})
    monkeypatch.setattr(tensorfile, "MAX_HEADER_BYTES", 64)
    with pytest.raises(ValueError, match="at most 64"):
        write_tensors(tmp_path / "f", {}, {"k": "x" * 64})
    assert list(tmp_path.iterdir()) == []


def test_a_strided_array_is_written_in_c_order(tmp_path: Path) -> None:
    """A transposed view is copied, every other array is looked at where it lies."""
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    write_tensors(tmp_path / "f", {"a": array.T}, {})
    with TensorFile(tmp_path / "f") as file:
        np.testing.assert_array_equal(file.read(file.slots[0]), array.T)
    assert np.shares_memory(np.frombuffer(view_of(array), np.uint8), array)
