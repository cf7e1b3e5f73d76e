"""Values of cache rows as numbers and back, for every cache type, and the rotation that quantized rows are stored in.

Blocks are those of ggml (Source: ggml-common.h, ggml-quants.c): 32 values share a half-precision scale, and in the
"_1" types a half-precision minimum. Quantizing gives the very bytes of ggml's reference functions; iq4_nl is read only.
Work goes in slices that stay in the processor's cache, so a conversion needs little memory beside its result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from statecodec.errors import NotRepresentable
from statecodec.tensor_types import TYPE_TABLE, TensorType, row_bytes

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_SLICE_BLOCKS = 4096
_PRODUCT = 1 << 19
_BLOCK = 32

_BLOCK_DTYPES: dict[TensorType, np.dtype[Any]] = {
    TensorType.Q8_0: np.dtype([("d", "<f2"), ("q", "i1", (32,))]),
    TensorType.Q4_0: np.dtype([("d", "<f2"), ("q", "u1", (16,))]),
    TensorType.Q4_1: np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", (16,))]),
    TensorType.Q5_0: np.dtype([("d", "<f2"), ("h", "<u4"), ("q", "u1", (16,))]),
    TensorType.Q5_1: np.dtype([("d", "<f2"), ("m", "<f2"), ("h", "<u4"), ("q", "u1", (16,))]),
    TensorType.IQ4_NL: np.dtype([("d", "<f2"), ("q", "u1", (16,))]),
}
_IQ4_NL_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)
_BITS = np.arange(_BLOCK, dtype=np.uint32)


def to_floats(kind: TensorType, rows: Bytes) -> Floats:
    """Rows as numbers.

    Args:
        kind: their type.
        rows: uint8, shape [n_rows, row_bytes].

    Returns:
        float32, shape [n_rows, n_values]; exact for every type.
    """
    flat = np.ascontiguousarray(rows).reshape(-1)
    out = np.empty(flat.size // TYPE_TABLE[kind].block_bytes * TYPE_TABLE[kind].block_values, dtype=np.float32)
    if kind is TensorType.F32:
        out[:] = flat.view("<f4")
    elif kind is TensorType.F16:
        out[:] = flat.view("<f2")
    elif kind is TensorType.BF16:
        np.left_shift(flat.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        blocks, values = flat.view(_BLOCK_DTYPES[kind]), out.reshape(-1, _BLOCK)
        for start in range(0, len(blocks), _SLICE_BLOCKS):
            _READERS[kind](blocks[start : start + _SLICE_BLOCKS], values[start : start + _SLICE_BLOCKS])
    return out.reshape(len(rows), -1)


def from_floats(kind: TensorType, values: Floats) -> Bytes:
    """Numbers as rows, rounded as ggml's reference functions round.

    Args:
        kind: the wanted type.
        values: float32, shape [n_rows, n_values].

    Returns:
        uint8, shape [n_rows, row_bytes].

    Raises:
        NotRepresentable: the type is only read, or a row is not a whole number of its blocks.
    """
    if kind is TensorType.IQ4_NL:
        raise NotRepresentable("values", "numbers", "iq4_nl rows, which are only read", "Choose q4_0 or q8_0.")
    out = np.empty(len(values) * row_bytes(kind, values.shape[1]), dtype=np.uint8)
    flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
    if kind is TensorType.F32:
        out.view("<f4")[:] = flat
    elif kind is TensorType.F16:
        with np.errstate(over="ignore"):
            out.view("<f2")[:] = flat
    elif kind is TensorType.BF16:
        _write_bf16(flat, out.view("<u2"))
    else:
        blocks, groups = out.view(_BLOCK_DTYPES[kind]), flat.reshape(-1, _BLOCK)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            for start in range(0, len(blocks), _SLICE_BLOCKS):
                _WRITERS[kind](groups[start : start + _SLICE_BLOCKS], blocks[start : start + _SLICE_BLOCKS])
    return out.reshape(len(values), -1)


def error_bound(kind: TensorType, rows: Bytes) -> float:
    """The most by which a stored value of these rows can differ from the number that it was made from.

    Args:
        kind: their type; q8_0, q4_0, q4_1, q5_0, q5_1, f16, bf16 or f32.
        rows: uint8, shape [n_rows, row_bytes].

    Returns:
        An absolute bound over all rows, on values as stored (that is, rotated where the rows are).
    """
    flat = np.ascontiguousarray(rows).reshape(-1)
    if not flat.size or kind is TensorType.F32:
        return 0.0
    if kind in _BLOCK_DTYPES:
        blocks = flat.view(_BLOCK_DTYPES[kind])
        steps = np.abs(blocks["d"].astype(np.float32))
        # Half a step by rounding; the scale itself is rounded to a half, and the end of a lopsided range is cut by one.
        return float(steps.max()) * _STEPS[kind]
    # Without their sign bit, halves are ordered like the integers of the same bits.
    largest = np.array([int((flat.view("<u2") & 0x7FFF).max())], dtype="<u2")
    precision = 2.0**-11 if kind is TensorType.F16 else 2.0**-8
    return float(to_floats(kind, largest.view(np.uint8).reshape(1, 2))[0, 0]) * precision


def rotated(values: Floats, block: int) -> Floats:
    """Values times the orthonormal Hadamard matrix, block by block; doing it twice gives the values back.

    Args:
        values: float32, shape [n_rows, n_values].
        block: values in a block, a power of two; 0: nothing is done.

    Returns:
        float32, same shape.

    Raises:
        NotRepresentable: rows are not a whole number of blocks.
    """
    if not block:
        return values
    if values.shape[1] % block:
        raise NotRepresentable("rows", f"{values.shape[1]} values", f"blocks of {block}", "State another rotation.")
    groups = values.reshape(-1, block)
    out = np.empty_like(groups)
    matrix = _hadamard(block)
    # Small products: large ones would start the threads of numpy's linear algebra and wait for them.
    step = max(1, _PRODUCT // (block * block))
    for start in range(0, len(groups), step):
        np.matmul(groups[start : start + step], matrix, out=out[start : start + step])
    return out.reshape(values.shape)


@functools.cache
def _hadamard(size: int) -> Floats:
    """The symmetric orthonormal matrix of Sylvester's construction. Source: llama-kv-cache.cpp, ggml_gen_hadamard."""
    matrix = np.ones((1, 1), dtype=np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix / np.float32(np.sqrt(np.float32(size)))).astype(np.float32)


def _write_bf16(values: Floats, out: npt.NDArray[np.uint16]) -> None:
    bits = values.view(np.uint32)
    # To the nearest, ties to even; a not-a-number keeps a mantissa bit, or it would become an infinity.
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    out[:] = np.where(np.isnan(values), (bits >> 16).astype(np.uint16) | 64, rounded)


def _nibbles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The first half of a block's values stands in the low nibbles, the second in the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fifth_bits(high: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
    bits: npt.NDArray[np.uint8] = ((high[:, None] >> _BITS) & 1).astype(np.uint8)
    return bits * np.uint8(16)


def _scale(blocks: npt.NDArray[Any], name: str = "d") -> Floats:
    column: Floats = blocks[name].astype(np.float32)[:, None]
    return column


def _read_q8_0(blocks: npt.NDArray[Any], out: Floats) -> None:
    np.copyto(out, blocks["q"])
    np.multiply(out, _scale(blocks), out=out)


def _read_q4_0(blocks: npt.NDArray[Any], out: Floats) -> None:
    np.multiply(_nibbles(blocks["q"]).astype(np.float32) - 8, _scale(blocks), out=out)


def _read_q4_1(blocks: npt.NDArray[Any], out: Floats) -> None:
    np.multiply(_nibbles(blocks["q"]), _scale(blocks), out=out)
    out += _scale(blocks, "m")


def _read_q5_0(blocks: npt.NDArray[Any], out: Floats) -> None:
    levels = _nibbles(blocks["q"]) | _fifth_bits(blocks["h"])
    np.multiply(levels.astype(np.float32) - 16, _scale(blocks), out=out)


def _read_q5_1(blocks: npt.NDArray[Any], out: Floats) -> None:
    np.multiply(_nibbles(blocks["q"]) | _fifth_bits(blocks["h"]), _scale(blocks), out=out)
    out += _scale(blocks, "m")


def _read_iq4_nl(blocks: npt.NDArray[Any], out: Floats) -> None:
    np.multiply(_IQ4_NL_VALUES[_nibbles(blocks["q"])], _scale(blocks), out=out)


def _inverse(scale: Floats) -> Floats:
    """1 / scale, and 0 where the scale is 0."""
    return np.where(scale == 0, np.float32(0), np.float32(1) / scale)


def _pack_nibbles(levels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    half = levels.shape[1] // 2
    low: npt.NDArray[np.uint8] = levels & np.uint8(15)
    return low[:, :half] | (low[:, half:] * np.uint8(16))


def _pack_fifth_bits(levels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    words: npt.NDArray[np.uint32] = np.bitwise_or.reduce((levels.astype(np.uint32) >> 4) << _BITS, axis=1)
    return words


def _write_q8_0(values: Floats, out: npt.NDArray[Any]) -> None:
    scale = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    scaled = values * _inverse(scale)
    # Half away from zero, as C's roundf does it.
    whole = np.floor(np.abs(scaled))
    whole += np.floor(2 * (np.abs(scaled) - whole))
    out["d"] = scale[:, 0]
    out["q"] = np.copysign(whole, scaled)


def _signed_extreme(values: Floats) -> Floats:
    """The value of largest magnitude in each block, with its sign; the first of several."""
    places = np.abs(values).argmax(axis=1)
    return np.take_along_axis(values, places[:, None], axis=1)


def _levels(values: Floats, scale: Floats, shift: float, top: int) -> npt.NDArray[np.uint8]:
    levels = np.clip(np.trunc(values * _inverse(scale) + np.float32(shift)), 0, top)
    whole: npt.NDArray[np.uint8] = levels.astype(np.uint8)
    return whole


def _write_q4_0(values: Floats, out: npt.NDArray[Any]) -> None:
    scale = _signed_extreme(values) / np.float32(-8)
    out["d"] = scale[:, 0]
    out["q"] = _pack_nibbles(_levels(values, scale, 8.5, 15))


def _write_q5_0(values: Floats, out: npt.NDArray[Any]) -> None:
    scale = _signed_extreme(values) / np.float32(-16)
    levels = _levels(values, scale, 16.5, 31)
    out["d"] = scale[:, 0]
    out["h"] = _pack_fifth_bits(levels)
    out["q"] = _pack_nibbles(levels)


def _write_q4_1(values: Floats, out: npt.NDArray[Any]) -> None:
    least = values.min(axis=1, keepdims=True)
    scale = (values.max(axis=1, keepdims=True) - least) / np.float32(15)
    out["d"], out["m"] = scale[:, 0], least[:, 0]
    out["q"] = _pack_nibbles(_levels(values - least, scale, 0.5, 15))


def _write_q5_1(values: Floats, out: npt.NDArray[Any]) -> None:
    least = values.min(axis=1, keepdims=True)
    scale = (values.max(axis=1, keepdims=True) - least) / np.float32(31)
    levels = _levels(values - least, scale, 0.5, 31)
    out["d"], out["m"] = scale[:, 0], least[:, 0]
    out["h"] = _pack_fifth_bits(levels)
    out["q"] = _pack_nibbles(levels)


_READERS: dict[TensorType, Callable[[npt.NDArray[Any], Floats], None]] = {
    TensorType.Q8_0: _read_q8_0,
    TensorType.Q4_0: _read_q4_0,
    TensorType.Q4_1: _read_q4_1,
    TensorType.Q5_0: _read_q5_0,
    TensorType.Q5_1: _read_q5_1,
    TensorType.IQ4_NL: _read_iq4_nl,
}
_WRITERS: dict[TensorType, Callable[[Floats, npt.NDArray[Any]], None]] = {
    TensorType.Q8_0: _write_q8_0,
    TensorType.Q4_0: _write_q4_0,
    TensorType.Q4_1: _write_q4_1,
    TensorType.Q5_0: _write_q5_0,
    TensorType.Q5_1: _write_q5_1,
}
_STEPS: dict[TensorType, float] = {
    TensorType.Q8_0: 0.57,
    TensorType.Q4_0: 1.01,
    TensorType.Q4_1: 0.52,
    TensorType.Q5_0: 1.01,
    TensorType.Q5_1: 0.53,
}
"""Error bound of a type in steps of its scale."""
