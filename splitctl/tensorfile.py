"""Reads and writes the safetensors format, strictly and without a second copy of a large tensor.

The format: u64 header size, a JSON header (``__metadata__`` of strings; name -> dtype, shape, data_offsets), then the
tensors without a gap. Source: the safetensors format description, and its library as the oracle of our tests. The
library itself writes with the modes and names of its choice, and neither syncs nor refuses a link, so it only tests.

Law: no number of a file reaches an allocation before it has been held against the size of the file.
"""

from __future__ import annotations

import json
import math
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from splitctl.durable import replace_file
from splitctl.errors import CarryDamaged

if TYPE_CHECKING:
    import io
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

MAX_HEADER_BYTES = 4 << 20
"""Most bytes of a header; a carry of 256 sequences needs about 0.3 MB."""

MAX_DIMS = 2
"""Most axes of a tensor of ours."""

_SIZE_BYTES = 8
_ALIGNMENT = 8
_METADATA = "__metadata__"
_DTYPES: Mapping[str, np.dtype[Any]] = {"U8": np.dtype("u1"), "I32": np.dtype("<i4"), "F32": np.dtype("<f4")}
_NAMES: Mapping[np.dtype[Any], str] = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Where a tensor lies in a file.

    Args:
        name: its name.
        dtype: type of an element, little-endian.
        shape: lengths of its axes, C order.
        begin: offset of its first byte from the end of the header.
        end: offset behind its last byte.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int


def write_tensors(path: Path, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> None:
    """Write a file, whole or not at all.

    Args:
        path: where.
        tensors: name -> array, C order, of uint8, int32 or float32, in any order.
        metadata: what else is to be said, as texts.

    Raises:
        OSError: nothing was written; ``strerror`` says why.
        ValueError: the header would be larger than a reader accepts, or an array is of another type.
    """
    # Larger elements first, so that each tensor lies aligned to its element; then by name, so that equal content
    # gives equal files.
    ordered = sorted(tensors.items(), key=lambda one: (-one[1].dtype.itemsize, one[0]))
    header = _header(ordered, metadata)
    n_bytes = len(header) + sum(array.nbytes for _, array in ordered)
    replace_file(path, (header, *(view_of(array) for _, array in ordered)), n_bytes)


def view_of(array: NDArray[Any]) -> memoryview:
    """Give the bytes of an array without a copy.

    Args:
        array: C-contiguous; any other is copied.

    Returns:
        A flat view of its bytes. Lifetime: borrowed from the array.
    """
    # A memoryview with a zero among its axes cannot be cast.
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


def _header(ordered: list[tuple[str, NDArray[Any]]], metadata: Mapping[str, str]) -> bytes:
    document: dict[str, Any] = {_METADATA: dict(metadata)}
    at = 0
    for name, array in ordered:
        if array.dtype not in _NAMES:
            text = f"tensor {name} is {array.dtype}, wanted one of {', '.join(str(one) for one in _NAMES)}"
            raise ValueError(text)
        document[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    body = json.dumps(document, separators=(",", ":")).encode()
    body += b" " * (-len(body) % _ALIGNMENT)
    if len(body) > MAX_HEADER_BYTES:
        text = f"its header takes {len(body)} bytes, at most {MAX_HEADER_BYTES} can be read back"
        raise ValueError(text)
    return len(body).to_bytes(_SIZE_BYTES, "little") + body


class TensorFile:
    """An open file whose header has been read and checked in full.

    Lifetime: a context manager; the file is open until it is left. Thread: one at a time.
    """

    def __init__(self, path: Path) -> None:
        """Open a file and check its header against its size.

        Args:
            path: a regular file; a link to one is followed.

        Raises:
            CarryDamaged: it cannot be opened, or is not a sound file of this format.
        """
        self.path = path
        self._file: io.FileIO = self._open()
        try:
            self.metadata, self.slots, self._data_at = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read_into(self, slot: TensorSlot, target: memoryview) -> None:
        """Read a tensor's bytes.

        Args:
            slot: which, from ``slots``.
            target: writable, flat, of exactly ``end - begin`` bytes.

        Raises:
            CarryDamaged: the file became shorter, or the disk failed.
        """
        self._fill(self._data_at + slot.begin, target, f"tensor {slot.name}")

    def read(self, slot: TensorSlot) -> NDArray[Any]:
        """Read a tensor into an array of its own.

        Args:
            slot: which, from ``slots``.

        Returns:
            The array, of the slot's type and shape, C order.

        Raises:
            CarryDamaged: the file became shorter, or the disk failed.
        """
        array = np.empty(math.prod(slot.shape), slot.dtype)
        if array.size:
            self.read_into(slot, array.view(np.uint8).data)
        return array.reshape(slot.shape)

    def _open(self) -> io.FileIO:
        try:
            # Not blocking, so that a pipe with nobody behind it is refused like every other kind.
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise self._damaged(getattr(error, "strerror", None) or str(error)) from error
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            os.close(fd)
            raise self._damaged("it is not a regular file")
        self._n_bytes = about.st_size
        return open(fd, "rb", buffering=0)  # noqa: PTH123 (a descriptor, closed by __exit__)

    def _read_header(self) -> tuple[dict[str, str], tuple[TensorSlot, ...], int]:
        if self._n_bytes < _SIZE_BYTES:
            raise self._damaged(f"it has {self._n_bytes} bytes, wanted {_SIZE_BYTES} for the size of a header alone")
        size = bytearray(_SIZE_BYTES)
        self._fill(0, memoryview(size), "the size of the header")
        n_header = int.from_bytes(size, "little")
        if n_header > MAX_HEADER_BYTES:
            raise self._damaged(
                f"its header would take {n_header} bytes, at most {MAX_HEADER_BYTES} are read: not a safetensors file"
            )
        data_at = _SIZE_BYTES + n_header
        if data_at > self._n_bytes:
            raise self._damaged(f"its header takes {n_header} bytes, the file has {self._n_bytes} in all")
        body = bytearray(n_header)
        self._fill(_SIZE_BYTES, memoryview(body), "the header")
        try:
            metadata, slots = _parse(bytes(body), self._n_bytes - data_at)
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"its header is wrong: {error}") from error
        return metadata, slots, data_at

    def _fill(self, at: int, target: memoryview, what: str) -> None:
        got = 0
        try:
            self._file.seek(at)
            while got < target.nbytes:
                n = self._file.readinto(target[got:])
                if not n:
                    break
                got += n
        except OSError as error:
            raise self._damaged(f"{what} cannot be read: {error.strerror}") from error
        if got < target.nbytes:
            raise self._damaged(f"{what} ends after {got} of {target.nbytes} bytes: the file was cut short")

    def _damaged(self, why: str) -> CarryDamaged:
        return CarryDamaged(self.path, why)


def _parse(body: bytes, n_data: int) -> tuple[dict[str, str], tuple[TensorSlot, ...]]:
    """Check a header against the number of bytes behind it; every fault is a ValueError that says what it is."""
    document = json.loads(body.decode(), object_pairs_hook=_no_twice)
    if not isinstance(document, dict):
        text = f"it holds a {type(document).__name__}, wanted an object"
        raise ValueError(text)  # noqa: TRY004 (one class for every fault of the bytes)
    metadata = document.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(one, str) for one in metadata.values()):
        text = "its metadata is not an object of texts"
        raise ValueError(text)
    slots = sorted((_slot(name, about) for name, about in document.items()), key=lambda one: (one.begin, one.end))
    at = 0
    for slot in slots:
        if slot.begin != at:
            text = f"tensor {slot.name!r} begins at {slot.begin}, wanted {at}"
            raise ValueError(text)
        at = slot.end
    if at != n_data:
        text = f"its tensors take {at} bytes, the file has {n_data} behind the header"
        raise ValueError(text)
    return metadata, tuple(slots)


def _no_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        text = "it names something twice"
        raise ValueError(text)
    return document


def _slot(name: str, about: object) -> TensorSlot:
    if not isinstance(about, dict) or set(about) != {"dtype", "shape", "data_offsets"}:
        text = f"tensor {name!r} has no dtype, shape and data_offsets, or more than these"
        raise ValueError(text)
    shape, offsets = tuple(_counts(name, about["shape"])), tuple(_counts(name, about["data_offsets"]))
    dtype = _DTYPES.get(about["dtype"]) if isinstance(about["dtype"], str) else None
    if dtype is None:
        text = f"tensor {name!r} is of type {about['dtype']!r}, wanted one of {', '.join(_DTYPES)}"
        raise ValueError(text)
    if len(shape) > MAX_DIMS or len(offsets) != 2:
        text = f"tensor {name!r} has {len(shape)} axes and {len(offsets)} offsets, wanted at most {MAX_DIMS} and just 2"
        raise ValueError(text)
    n_wanted = math.prod(shape) * dtype.itemsize
    begin, end = offsets
    if end - begin != n_wanted:
        text = f"tensor {name!r} takes {end - begin} bytes, its shape wants {n_wanted}"
        raise ValueError(text)
    return TensorSlot(name, dtype, shape, begin, end)


def _counts(name: str, numbers: object) -> Iterator[int]:
    if not isinstance(numbers, list):
        text = f"tensor {name!r} has no list where numbers are wanted"
        raise ValueError(text)  # noqa: TRY004 (one class for every fault of the bytes)
    for number in numbers:
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 1 << 63:
            text = f"tensor {name!r} has {number!r} where a count is wanted"
            raise ValueError(text)
        yield number
