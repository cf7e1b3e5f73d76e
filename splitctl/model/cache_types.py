"""Types of cache rows: how many bytes a row of values takes."""

from __future__ import annotations

from collections.abc import Mapping

#: Cache type -> (values in a block, bytes of a block).  Source: ggml.c, type_traits.
CACHE_BLOCKS: Mapping[str, tuple[int, int]] = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q8_0": (32, 34),
    "q4_0": (32, 18),
    "q4_1": (32, 20),
    "iq4_nl": (32, 18),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
}


def row_bytes(n_values: int, cache_type: str) -> int:
    """Size of a cache row.

    Args:
        n_values: values of the row.
        cache_type: one of ``CACHE_BLOCKS``.

    Returns:
        Bytes, whole blocks.

    Raises:
        KeyError: no such cache type.
    """
    per_block, block_bytes = CACHE_BLOCKS[cache_type]
    return -(-n_values // per_block) * block_bytes
