"""The parts that an image is made of: cells, rows and columns, as read-only views on the caller's buffer.

Lifetime:
    Every `memoryview` and array here borrows the buffer that was parsed; see `image`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from statecodec.quants import to_floats
from statecodec.tensor_types import TYPE_TABLE, TensorType, row_values

_PLAIN_DTYPES: dict[TensorType, np.dtype[Any]] = {
    TensorType.F32: np.dtype("<f4"),
    TensorType.F16: np.dtype("<f2"),
    # numpy has no bfloat16: the raw halves, whose upper 16 bits of a float32 they are.
    TensorType.BF16: np.dtype("<u2"),
}


class Span(NamedTuple):
    """What one sequence holds.

    Args:
        n_cells: cells of the sequence.
        pos_min: its first position.
        pos_max: its last position.
    """

    n_cells: int
    pos_min: int
    pos_max: int


def distinct(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the different values of a one-dimensional array in ascending order.

    As numpy.unique, which imports numpy.ma for its first call: 60 ms, more than all else that reading a state takes.
    """
    ordered: npt.NDArray[Any] = np.sort(values)
    found: npt.NDArray[Any] = ordered[
        np.concatenate((np.ones(min(len(ordered), 1), bool), ordered[1:] != ordered[:-1]))
    ]
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """The cells of one stream.

    Args:
        offset: where the first cell starts, in bytes from the start of the buffer.
        pos: position of each cell; int32, shape [n_cells].
        n_seq_id: sequences of each cell; uint32, shape [n_cells].
        seq_ids: the sequence ids of all cells, one cell after the other; int32, shape [sum of n_seq_id].
        ext: extra record of each cell (fields x, y and, in 12-byte records, token), or None; shape [n_cells].
    """

    offset: int
    pos: npt.NDArray[np.int32]
    n_seq_id: npt.NDArray[np.uint32]
    seq_ids: npt.NDArray[np.int32]
    ext: npt.NDArray[Any] | None

    def __len__(self) -> int:
        """Number of cells."""
        return len(self.pos)

    @property
    def ext_bytes(self) -> int:
        """Bytes of each cell's extra record, 0 for none."""
        return 0 if self.ext is None else int(self.ext.dtype.itemsize)

    def pairs(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Every (sequence, position) that is held, as two int32 arrays of equal length."""
        if len(self.seq_ids) == len(self.pos) and bool(np.all(self.n_seq_id == 1)):
            return self.seq_ids, self.pos
        return self.seq_ids, np.repeat(self.pos, self.n_seq_id)

    def sequences(self) -> dict[int, Span]:
        """Cell count and first and last position of every sequence here, by ascending id."""
        ids, positions = self.pairs()
        spans: dict[int, Span] = {}
        for seq_id in distinct(ids).tolist():
            own = positions[ids == seq_id]
            spans[seq_id] = Span(len(own), int(own.min()), int(own.max()))
        return spans


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """One layer's K, plain V or recurrent rows: one row a cell.

    Args:
        offset: where the layer's header starts, in bytes from the start of the buffer.
        kind: type of the values.
        row_bytes: bytes of one row.
        data: all rows, one after the other.
    """

    offset: int
    kind: TensorType
    row_bytes: int
    data: memoryview

    @property
    def n_values(self) -> int:
        """Values in a row."""
        return row_values(self.kind, self.row_bytes)

    def raw(self) -> npt.NDArray[np.uint8]:
        """The rows as bytes; uint8, shape [n_cells, row_bytes], read-only. A row of 0 bytes gives shape [0, 0]."""
        flat = np.frombuffer(self.data, dtype=np.uint8)
        return flat.reshape(-1, self.row_bytes) if self.row_bytes else flat.reshape(0, 0)

    def floats(self) -> npt.NDArray[np.float32]:
        """The rows as numbers of 32 bits whatever their type, as stored (rotated where they are); a copy."""
        return to_floats(self.kind, self.raw()).reshape(-1, self.n_values)

    def values(self) -> npt.NDArray[Any]:
        """The rows as numbers; float32, float16, or uint16 for bfloat16 bits; shape [n_cells, n_values], read-only.

        Raises:
            TypeError: the type is quantized, so there are no plain values to look at.
        """
        if self.kind not in _PLAIN_DTYPES:
            message = f"{self.kind.name} rows are quantized: use raw() or floats()"
            raise TypeError(message)
        flat = np.frombuffer(self.data, dtype=_PLAIN_DTYPES[self.kind])
        return flat.reshape(-1, self.n_values) if self.row_bytes else flat.reshape(0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """One layer's transposed V: one row a value, one column a cell (flash attention off).

    Args:
        offset: where the layer's header starts, in bytes from the start of the buffer.
        kind: type of the values; never quantized.
        n_values: values that a cell has.
        data: value after value, each for all cells.
    """

    offset: int
    kind: TensorType
    n_values: int
    data: memoryview

    @property
    def element_bytes(self) -> int:
        """Bytes of one value."""
        return TYPE_TABLE[self.kind].block_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of all values of one cell."""
        return self.n_values * self.element_bytes

    def values(self) -> npt.NDArray[Any]:
        """The values; float32, float16, or uint16 for bfloat16 bits; shape [n_values, n_cells], read-only."""
        return np.frombuffer(self.data, dtype=_PLAIN_DTYPES[self.kind]).reshape(self.n_values, -1)


class Rotation(NamedTuple):
    """Hadamard blocks, in values, that stored rows were rotated with; 0 for rows that are not rotated."""

    k: int
    v: int


def merge_spans(parts: Iterable[dict[int, Span]], *, add: bool = True) -> dict[int, Span]:
    """Put the spans of several parts together.

    Args:
        parts: spans by sequence id.
        add: whether cell counts add up (streams of one section) or the largest counts (sections over the same tokens).
    """
    merged: dict[int, Span] = {}
    for part in parts:
        for seq_id, span in part.items():
            old = merged.get(seq_id)
            if old is None:
                merged[seq_id] = span
                continue
            n_cells = old.n_cells + span.n_cells if add else max(old.n_cells, span.n_cells)
            merged[seq_id] = Span(n_cells, min(old.pos_min, span.pos_min), max(old.pos_max, span.pos_max))
    return dict(sorted(merged.items()))
