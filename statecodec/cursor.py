"""The only place where raw bytes are sliced: a position in a buffer that can never leave it.

Laws:
1. Every read is checked against what remains before anything is touched.
2. A count is multiplied with a size here and nowhere else, and the product is compared with what remains.
3. Nothing is copied: spans are read-only views on the caller's buffer.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from statecodec.errors import LimitExceeded, Truncated

if TYPE_CHECKING:
    # collections.abc.Buffer exists from Python 3.12 on; the type checker knows it under this name everywhere.
    from typing_extensions import Buffer

_U32 = struct.Struct("<I")
_I32 = struct.Struct("<i")
_U64 = struct.Struct("<Q")


def view(buffer: Buffer) -> memoryview:
    """Look at a caller's buffer as read-only bytes, without copying.

    Args:
        buffer: any C-contiguous object with the buffer protocol (bytes, bytearray, mmap, numpy array, cffi buffer).

    Returns:
        A one-dimensional read-only view of unsigned bytes.

    Lifetime:
        Keeps the caller's object alive; its bytes must not change while any view made from this one is in use.
    """
    return memoryview(buffer).cast("B").toreadonly()


class Cursor:
    """A position in a read-only buffer.

    Args:
        data: the whole buffer; see `view`.
        offset: where to start, in bytes.
        progress: parts that were understood on the way here; of failed readings the one with most of them is reported.

    Lifetime:
        Borrows the buffer.
    """

    __slots__ = ("_data", "offset", "progress")

    def __init__(self, data: memoryview, offset: int = 0, progress: int = 0) -> None:
        """Start at `offset`."""
        self._data = data
        self.offset = offset
        self.progress = progress

    def fork(self) -> Cursor:
        """Another cursor at the same place, so that an alternative can be tried and given up."""
        return Cursor(self._data, self.offset, self.progress)

    def until(self, end: int) -> Cursor:
        """Another cursor at the same place whose buffer ends at `end`, so that a record cannot leave its own bytes."""
        return Cursor(self._data[:end], self.offset, self.progress)

    @property
    def remaining(self) -> int:
        """Bytes left."""
        return len(self._data) - self.offset

    def require(self, n_bytes: int, field: str) -> None:
        """Refuse to go on unless so many bytes are left.

        Raises:
            Truncated: fewer bytes are left.
        """
        # Called for every field of every reading: not by way of `remaining`.
        if n_bytes > len(self._data) - self.offset:
            raise Truncated(self.offset, field, f"{self.remaining} bytes left", f"{n_bytes} bytes")

    def u32(self, field: str) -> int:
        """Read an unsigned 32-bit little-endian integer."""
        self.require(4, field)
        value: int = _U32.unpack_from(self._data, self.offset)[0]
        self.offset += 4
        return value

    def i32(self, field: str) -> int:
        """Read a signed 32-bit little-endian integer."""
        self.require(4, field)
        value: int = _I32.unpack_from(self._data, self.offset)[0]
        self.offset += 4
        return value

    def u64(self, field: str) -> int:
        """Read an unsigned 64-bit little-endian integer."""
        self.require(8, field)
        value: int = _U64.unpack_from(self._data, self.offset)[0]
        self.offset += 8
        return value

    def count(self, field: str, limit: int, item_bytes: int = 0) -> int:
        """Read a u32 that says how many of something follow.

        Args:
            field: what is counted.
            limit: the largest count that is accepted.
            item_bytes: the fewest bytes that each one takes.

        Raises:
            LimitExceeded: more than the limit.
            Truncated: more than could fit into the bytes that are left.
        """
        start = self.offset
        value = self.u32(field)
        if value > limit:
            raise LimitExceeded(start, field, value, f"at most {limit}")
        self.require(value * item_bytes, field)
        return value

    def span(self, n_bytes: int, field: str) -> memoryview:
        """Take the next bytes as they are.

        Returns:
            A read-only view, not a copy.
        """
        self.require(n_bytes, field)
        start = self.offset
        self.offset += n_bytes
        return self._data[start : self.offset]

    def records(self, dtype: np.dtype[Any], count: int, field: str) -> npt.NDArray[Any]:
        """Take the next `count` records of a fixed size.

        Returns:
            A read-only array of shape [count] on the caller's bytes (which need not be aligned).
        """
        return np.frombuffer(self.span(count * dtype.itemsize, field), dtype=dtype)

    def peek_records(self, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
        """Look at up to `count` of the next records without moving; fewer when fewer are left."""
        whole = min(count, self.remaining // dtype.itemsize)
        end = self.offset + whole * dtype.itemsize
        return np.frombuffer(self._data[self.offset : end], dtype=dtype)

    def skip(self, n_bytes: int, field: str) -> None:
        """Move on without looking."""
        self.require(n_bytes, field)
        self.offset += n_bytes
