"""The tensor types that a cache can hold, by the library's own numbers."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from statecodec.errors import NotRepresentable


class TensorType(enum.IntEnum):
    """The cache types of the library. Source: ggml.h, enum ggml_type."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    IQ4_NL = 20
    BF16 = 30


@dataclass(frozen=True, slots=True)
class TypeInfo:
    """How values of a type are stored.

    Args:
        block_values: values in one block (1: not quantized).
        block_bytes: bytes of one block.
    """

    block_values: int
    block_bytes: int

    @property
    def is_quantized(self) -> bool:
        """Whether several values share a scale, so that rows are the smallest exact unit."""
        return self.block_values > 1


TYPE_TABLE: dict[TensorType, TypeInfo] = {
    TensorType.F32: TypeInfo(1, 4),
    TensorType.F16: TypeInfo(1, 2),
    TensorType.BF16: TypeInfo(1, 2),
    TensorType.Q8_0: TypeInfo(32, 34),
    TensorType.Q4_0: TypeInfo(32, 18),
    TensorType.Q4_1: TypeInfo(32, 20),
    TensorType.Q5_0: TypeInfo(32, 22),
    TensorType.Q5_1: TypeInfo(32, 24),
    TensorType.IQ4_NL: TypeInfo(32, 18),
}
"""Source: ggml's block structs; row bytes of 64 values measured for each (256 128 128 68 36 40 44 48 36)."""

TYPES_BY_ID: dict[int, TensorType] = {int(kind): kind for kind in TensorType}


def row_bytes(kind: TensorType, n_values: int) -> int:
    """Bytes of a row of so many values.

    Raises:
        NotRepresentable: the row is not a whole number of blocks.
    """
    info = TYPE_TABLE[kind]
    if n_values % info.block_values:
        wanted = f"{kind.name} rows, which hold a multiple of {info.block_values} values"
        raise NotRepresentable("rows", f"{n_values} values", wanted, "Choose f16.")
    return n_values // info.block_values * info.block_bytes


def row_values(kind: TensorType, n_bytes: int) -> int:
    """Values in a row of so many bytes; the caller has checked that it is a whole number of blocks."""
    info = TYPE_TABLE[kind]
    return n_bytes // info.block_bytes * info.block_values
