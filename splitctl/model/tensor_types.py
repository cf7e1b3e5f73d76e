"""Types in a GGUF file, by their numbers, and of cache rows."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from splitctl.placement import KV_TYPES


class ValueType(IntEnum):
    """Types of metadata values, by their number in the file."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STR = 8
    ARRAY = 9
    U64 = 10
    I64 = 11
    F64 = 12


VALUE_FORMATS: Mapping[ValueType, str] = {
    ValueType.U8: "B",
    ValueType.I8: "b",
    ValueType.U16: "H",
    ValueType.I16: "h",
    ValueType.U32: "I",
    ValueType.I32: "i",
    ValueType.F32: "f",
    ValueType.BOOL: "?",
    ValueType.U64: "Q",
    ValueType.I64: "q",
    ValueType.F64: "d",
}

#: Number of a tensor type -> (name, values in a block, bytes of a block).  Source: ggml.c, type_traits.
TENSOR_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    9: ("q8_1", 32, 36),
    10: ("q2_k", 256, 84),
    11: ("q3_k", 256, 110),
    12: ("q4_k", 256, 144),
    13: ("q5_k", 256, 176),
    14: ("q6_k", 256, 210),
    15: ("q8_k", 256, 292),
    16: ("iq2_xxs", 256, 66),
    17: ("iq2_xs", 256, 74),
    18: ("iq3_xxs", 256, 98),
    19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18),
    21: ("iq3_s", 256, 110),
    22: ("iq2_s", 256, 82),
    23: ("iq4_xs", 256, 136),
    24: ("i8", 1, 1),
    25: ("i16", 1, 2),
    26: ("i32", 1, 4),
    27: ("i64", 1, 8),
    28: ("f64", 1, 8),
    29: ("iq1_m", 256, 56),
    30: ("bf16", 1, 2),
    34: ("tq1_0", 256, 54),
    35: ("tq2_0", 256, 66),
    39: ("mxfp4", 32, 17),
    40: ("nvfp4", 64, 36),
    41: ("q1_0", 128, 18),
}

#: Cache type -> (values in a block, bytes of a block).
CACHE_BLOCKS: Mapping[str, tuple[int, int]] = {
    name: (n_values, n_bytes) for name, n_values, n_bytes in TENSOR_TYPES.values() if name in KV_TYPES
}


def row_bytes(n_values: int, cache_type: str) -> int:
    """Size of a cache row, bytes, whole blocks.

    Raises:
        KeyError: no such cache type.
    """
    per_block, block_bytes = CACHE_BLOCKS[cache_type]
    return -(-n_values // per_block) * block_bytes
