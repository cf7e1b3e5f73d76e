"""The file of a carry: one case for each way to be wrong, whether the library finds it or we do."""

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
from hypothesis.extra import numpy as numpy_arrays

from splitctl.carry import tensorfile
from splitctl.carry.tensorfile import TensorFile, view_of, write_tensors
from splitctl.errors import CarryDamaged

ONE = {"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}


ROW = {"a": np.zeros(2, np.uint8)}


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
        assert file.read("a").tolist() == [97, 98]
    with TensorFile(put(tmp_path / "f", ONE)) as file:
        assert file.metadata == {}


WRONG: dict[str, tuple[object, bytes, str]] = {
    "not JSON": (b"{", b"", "library says: .*invalid JSON"),
    "not text": (b"\xff\xff", b"", "library says: .*invalid UTF-8"),
    "nested": (b"[" * 200_000, b"", "invalid JSON"),
    "nested in an entry": (b'{"a":' + b"[" * 200_000, b"", "invalid JSON"),
    "a long number": (b'{"a":' + b"9" * 10_000 + b"}", b"", "invalid JSON"),
    "a list": ([], b"", "invalid type: sequence"),
    "twice": (b'{"a":{},"a":{}}', b"", "missing field"),
    "metadata of numbers": ({"__metadata__": {"k": 1}}, b"", "expected a string"),
    "metadata a list": ({"__metadata__": []}, b"", "expected a map"),
    "an entry no object": ({"a": 1}, b"", "invalid type: integer"),
    "a field short": ({"a": {"dtype": "U8", "shape": []}}, b"", "missing field"),
    "another type": (entry(dtype="F8_E4M3"), b"ab", "tensor 'a' is F8_E4M3, wanted one of U8, I32, F32"),
    "a type that nobody knows": (entry(dtype="x" * 10_000), b"ab", "unknown variant `xxx"),
    "a type that is no text": (entry(dtype=[]), b"ab", "invalid type: sequence"),
    "three offsets": (entry(data_offsets=[0, 1, 2]), b"ab", "invalid length 3"),
    "a shape that is no list": (entry(shape=2), b"ab", "expected a sequence"),
    "a negative axis": (entry(shape=[-2]), b"ab", "invalid value: integer `-2`"),
    "a broken axis": (entry(shape=[2.0]), b"ab", "floating point `2.0`"),
    "a true axis": (entry(shape=[True]), b"ab", "boolean `true`"),
    "an axis of 2**63": (entry(shape=[1 << 63]), b"ab", "overflow"),
    "axes that overflow": (entry(shape=[1 << 62, 1 << 62]), b"ab", "overflow"),
    "larger than its bytes": (entry(shape=[3]), b"ab", "invalid shape, data type, or offset"),
    "backwards": (entry(data_offsets=[2, 0]), b"ab", "invalid offset for tensor `a`"),
    "a gap": (entry(data_offsets=[1, 3]), b"abc", "invalid offset for tensor `a`"),
    "an overlap": ({**ONE, "b": ONE["a"]}, b"ab", "invalid offset for tensor `[ab]`"),
    "data missing": (ONE, b"a", "file not fully covered"),
    "data behind": (ONE, b"abc", "file not fully covered"),
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
        (Path("a\0b"), "null"),
    ):
        with pytest.raises(CarryDamaged, match=said):
            TensorFile(path)


def test_a_file_that_becomes_shorter_under_the_reader_is_damaged(tmp_path: Path) -> None:
    """What was promised at opening is not there any more: said with the tensor's name, no signal, no garbage."""
    path = tmp_path / "f"
    write_tensors(path, {"a": np.arange(1000, dtype=np.int32)}, {})
    with TensorFile(path) as file:
        os.truncate(path, path.stat().st_size - 10)
        with pytest.raises(CarryDamaged, match="Could not read tensor a from file"):
            file.read("a")


def test_axes_that_no_array_has_are_damaged(tmp_path: Path) -> None:
    """Nothing of 2**40 rows, and a hundred axes of one: sound for the library, refused where they become an array."""
    for shape in ([1 << 40, 0, 1 << 40], [1] * 100):
        n_bytes = int(0 not in shape)
        path = put(tmp_path / "f", {"a": {"dtype": "U8", "shape": shape, "data_offsets": [0, n_bytes]}}, bytes(n_bytes))
        with TensorFile(path) as file, pytest.raises(CarryDamaged):
            file.read("a")


ARRAY = st.one_of(
    *(
        numpy_arrays.arrays(dtype, numpy_arrays.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=5))
        for dtype in (np.uint8, np.int32, np.float32)
    )
)


@given(
    tensors=st.dictionaries(
        st.text(max_size=5).filter(lambda name: name != "__metadata__"), ARRAY, min_size=1, max_size=5
    ),
    metadata=st.dictionaries(st.text(), st.text()),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, np.ndarray[Any, Any]], metadata: dict[str, str]
) -> None:
    """Any names, shapes with zeros, any bits of a float: equal from disk and from bytes, aligned to their elements."""
    path = tmp_path_factory.mktemp("t") / "f"
    write_tensors(path, tensors, metadata)
    whole = path.read_bytes()
    theirs = safetensors.numpy.load(whole)
    data_at = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:data_at])
    with TensorFile(path) as file:
        assert file.metadata == metadata
        assert {name: (slot.dtype, slot.shape) for name, slot in file.slots.items()} == {
            name: (array.dtype, array.shape) for name, array in tensors.items()
        }
        for name, array in tensors.items():
            mine = file.read(name)
            assert (mine.dtype, mine.shape, mine.tobytes()) == (array.dtype, array.shape, array.tobytes())
            assert theirs[name].tobytes() == array.tobytes()
            assert (data_at + header[name]["data_offsets"][0]) % array.dtype.itemsize == 0


def test_what_the_writer_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header that the reader would not take; the old file stays and nothing is left beside it."""
    write_tensors(tmp_path / "f", ROW, {"k": "old"})
    monkeypatch.setattr(tensorfile, "MAX_HEADER_BYTES", 64)
    with pytest.raises(ValueError, match="at most 64"):
        write_tensors(tmp_path / "f", ROW, {"k": "x" * 64})
    assert [one.name for one in tmp_path.iterdir()] == ["f"]
    monkeypatch.undo()
    with TensorFile(tmp_path / "f") as file:
        assert file.metadata == {"k": "old"}


def test_an_array_that_is_no_row_is_written_in_c_order(tmp_path: Path) -> None:
    """Transposed, strided, backwards: copied; every other array is taken from where it lies."""
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    arrays = {"turned": array.T, "strided": array[:, ::2], "backwards": array[::-1], "sealed": array.copy()}
    arrays["sealed"].flags.writeable = False
    write_tensors(tmp_path / "f", arrays, {})
    with TensorFile(tmp_path / "f") as file:
        for name, written in arrays.items():
            np.testing.assert_array_equal(file.read(name), written)
    assert np.shares_memory(np.frombuffer(view_of(array), np.uint8), array)
