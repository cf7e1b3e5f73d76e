"""The file of a carry: the safetensors library reads and writes it, with checks that the library leaves out.

The library checks the header, its offsets and its cover of the file, and takes tensors from where they lie in memory
(0.8 and later). It does not cap a header below 100 MB, tell a pipe from a file, sync, or keep a link; this module and
``durable`` do.

Law: no number in a file is used for an allocation before it has been checked against the size of the file.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.numpy import save, save_file

from splitctl.carry.durable import replacing
from splitctl.errors import CarryDamaged

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

MAX_HEADER_BYTES = 4 << 20
"""Most bytes of a header; a carry of 256 sequences needs about 0.3 MB."""

_SIZE_BYTES = 8
_DTYPES: Mapping[str, np.dtype[Any]] = {"U8": np.dtype("u1"), "I32": np.dtype("<i4"), "F32": np.dtype("<f4")}


def is_safetensors(data: memoryview) -> bool:
    """Tell whether bytes begin with the size of a JSON header; no state does (its first words make a larger number)."""
    n_header = int.from_bytes(data[:_SIZE_BYTES], "little")
    return len(data) > _SIZE_BYTES and n_header <= MAX_HEADER_BYTES and data[_SIZE_BYTES] == ord("{")


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """What a file says of a tensor.

    Args:
        dtype: type of an element, little-endian.
        shape: lengths of its axes, C order.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]


def write_tensors(path: Path, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> None:
    """Write a file, whole or not at all.

    Equal content gives equal bytes behind equal headers, but for the order of the metadata, which the library leaves to
    chance.

    Args:
        path: where.
        tensors: name -> array, one at least (without any the library writes a header that it cannot read); an array
            that is not C-contiguous is copied, every other is written from where it lies.
        metadata: what else is to be said, as texts.

    Raises:
        OSError: the file is not safely in its place; ``strerror``, or else the text, says why.
        ValueError: the header is larger than a reader accepts.
    """
    # The library takes an address and a length, so rows that do not lie one behind the other would be written wrong.
    whole = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    with replacing(path, sum(array.nbytes for array in whole.values())) as temporary:
        try:
            save_file(whole, temporary, dict(metadata))
        except SafetensorError as error:
            raise OSError(str(error)) from error
        _refuse_long_header(_header_bytes(temporary))


def _refuse_long_header(n_header: int) -> None:
    if n_header > MAX_HEADER_BYTES:
        raise ValueError(f"its header takes {n_header} bytes, at most {MAX_HEADER_BYTES} can be read back")


def pack_tensors(tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """Give the bytes of a file, for :class:`PackedTensors`, without writing one; takes what :func:`write_tensors` does.

    Raises:
        ValueError: the header is larger than a reader accepts.
    """
    packed = save({name: np.asarray(array, order="C") for name, array in tensors.items()}, dict(metadata))
    _refuse_long_header(int.from_bytes(packed[:_SIZE_BYTES], "little"))
    return packed


def view_of(array: NDArray[Any]) -> memoryview:
    """Give the bytes of an array as a flat view; only an array that is not C-contiguous is copied.

    Lifetime: borrowed from the array.
    """
    # A memoryview with a zero among its axes cannot be cast.
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


class TensorFile:
    """An open file whose header has been read and checked in full.

    Lifetime: a context manager; the file is open until it is left. Thread: one at a time; while a tensor is read no
    other thread of Python runs (about 2 s a GiB).
    """

    def __init__(self, path: Path) -> None:
        """Open a regular file, or a link to one, and check its header against its size.

        Raises:
            CarryDamaged: it cannot be opened, or is not a sound file of this format.
        """
        self.path = path
        self._file = _opened(path)
        try:
            self.metadata: Mapping[str, str] = self._file.metadata() or {}
            self.slots: Mapping[str, TensorSlot] = {name: self._slot(name) for name in self._file.keys()}  # noqa: SIM118
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.__exit__(None, None, None)

    def read(self, name: str) -> NDArray[Any]:
        """Read one of ``slots`` into an array of its own, of the slot's type and shape, C order; held in memory once.

        Raises:
            CarryDamaged: the file became shorter, or the disk failed.
        """
        try:
            array: NDArray[Any] = self._file.get_tensor(name)
        except (OSError, ValueError, SafetensorError) as error:
            raise _damaged(self.path, error) from error
        return array

    def _slot(self, name: str) -> TensorSlot:
        # The library's view of a tensor keeps the file open, so none outlives this call, or is held by its error.
        about = self._file.get_slice(name)
        said, shape = about.get_dtype(), tuple(about.get_shape())
        del about
        return TensorSlot(_dtype(self.path, name, said), shape)


class PackedTensors:
    """The bytes of a file in memory, read and checked in full."""

    def __init__(self, packed: bytes) -> None:
        """Read what :func:`pack_tensors` gave.

        Raises:
            CarryDamaged: they are not sound.
        """
        try:
            if (n_header := int.from_bytes(packed[:_SIZE_BYTES], "little")) > MAX_HEADER_BYTES:
                text = f"its header would take {n_header} bytes, at most {MAX_HEADER_BYTES} are read"
                raise CarryDamaged(None, text)
            found = dict(deserialize(packed))  # type: ignore[no-untyped-call]
            # The library has found the header sound; it just does not give the metadata out.
            self.metadata: Mapping[str, str] = json.loads(packed[_SIZE_BYTES : _SIZE_BYTES + n_header]).get(
                "__metadata__", {}
            )
        except (ValueError, SafetensorError) as error:
            raise _damaged(None, error) from error
        self._arrays: Mapping[str, NDArray[Any]] = {
            name: np.frombuffer(one["data"], _dtype(None, name, one["dtype"])).reshape(one["shape"])
            for name, one in found.items()
        }
        self.slots: Mapping[str, TensorSlot] = {
            name: TensorSlot(one.dtype, one.shape) for name, one in self._arrays.items()
        }

    def read(self, name: str) -> NDArray[Any]:
        """Give a tensor, an array of its own."""
        return self._arrays[name]


def _dtype(path: Path | None, name: str, said: str) -> np.dtype[Any]:
    if said not in _DTYPES:
        raise CarryDamaged(path, f"tensor {name!r:.60} is {said}, wanted one of {', '.join(_DTYPES)}")
    return _DTYPES[said]


def _header_bytes(path: Path) -> int:
    """Check a file's kind and the size of its header; returns that size.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no regular file, or shorter than its header.
    """
    # Not blocking, so that a pipe with nobody behind it is refused like every other kind.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError("it is not a regular file")
        if about.st_size < _SIZE_BYTES:
            raise ValueError(f"it has {about.st_size} bytes, wanted {_SIZE_BYTES} for the size of a header alone")
        n_header = int.from_bytes(os.read(fd, _SIZE_BYTES), "little")
    finally:
        os.close(fd)
    if n_header <= MAX_HEADER_BYTES and _SIZE_BYTES + n_header > about.st_size:
        raise ValueError(f"its header takes {n_header} bytes, the file has {about.st_size} in all")
    return n_header


def _opened(path: Path) -> Any:
    """Open a file with the library, whose methods have no types."""
    try:
        if (n_header := _header_bytes(path)) > MAX_HEADER_BYTES:
            most = f"at most {MAX_HEADER_BYTES} are read: not a safetensors file"
            raise CarryDamaged(path, f"its header would take {n_header} bytes, {most}")
        # Read and not mapped: a file that becomes shorter is then an error, and not a signal that ends us.
        return safe_open(path, "np", backend="pread")
    except (OSError, ValueError, SafetensorError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path | None, error: Exception) -> CarryDamaged:
    """Say what was found; the library's texts may quote the file at any length."""
    said = getattr(error, "strerror", None) or str(error)
    return CarryDamaged(path, f"{'the safetensors library says: ' * isinstance(error, SafetensorError)}{said:.300}")
