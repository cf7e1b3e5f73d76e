from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statecodec import NotRepresentable, TensorType
from statecodec.quants import error_bound, from_floats, rotated, to_floats
from statecodec.tensor_types import row_bytes

_WRITABLE = [kind for kind in TensorType if kind is not TensorType.IQ4_NL]
_QUANTIZED = [TensorType.Q8_0, TensorType.Q4_0, TensorType.Q4_1, TensorType.Q5_0, TensorType.Q5_1]


def normal(n_rows: int, n_values: int, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((n_rows, n_values)) * scale).astype(np.float32)


@pytest.mark.parametrize("kind", _QUANTIZED)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 700.0])
def test_quantizing_gives_the_oracles_bytes(kind: TensorType, scale: float) -> None:
    """Rows are byte for byte what the gguf package makes of the same numbers."""
    quants = pytest.importorskip("gguf.quants")
    values = normal(200, 128, scale=scale)
    values[3] = 0
    values[4, :32] = 0
    values[5] = 2.5
    expected = quants.quantize(values, quants.GGMLQuantizationType(int(kind)))
    assert np.array_equal(from_floats(kind, values), expected)


@pytest.mark.parametrize("kind", [*_QUANTIZED, TensorType.IQ4_NL, TensorType.BF16, TensorType.F16])
def test_reading_gives_the_oracles_numbers(kind: TensorType) -> None:
    """Random blocks are read as the gguf package reads them."""
    quants = pytest.importorskip("gguf.quants")
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 256, (50, row_bytes(kind, 96)), dtype=np.uint8)
    if kind not in {TensorType.BF16, TensorType.F16}:
        # Scales that are numbers: the exponent's top bit is cleared.
        rows[:, 1 :: row_bytes(kind, 32)] &= 0x3F
        if kind in {TensorType.Q4_1, TensorType.Q5_1}:
            rows[:, 3 :: row_bytes(kind, 32)] &= 0x3F
    else:
        rows[:, 1::2] &= 0x3F
    expected = quants.dequantize(rows, quants.GGMLQuantizationType(int(kind)))
    assert np.array_equal(to_floats(kind, rows), expected)


@pytest.mark.parametrize("kind", _WRITABLE)
def test_what_was_stored_is_stored_the_same_again(kind: TensorType) -> None:
    """Reading rows and writing them again gives the rows, for plain types and q8_0's own numbers."""
    rows = from_floats(kind, normal(20, 64))
    if kind in {TensorType.F32, TensorType.F16, TensorType.BF16}:
        assert np.array_equal(from_floats(kind, to_floats(kind, rows)), rows)
    assert to_floats(kind, rows).shape == (20, 64)


@pytest.mark.parametrize("kind", _WRITABLE)
@pytest.mark.parametrize("seed", range(5))
def test_the_error_stays_in_its_bound(kind: TensorType, seed: int) -> None:
    """No stored value is further from its number than the bound says, also in lopsided blocks."""
    values = normal(300, 64, seed)
    values[:100] = np.abs(values[:100])
    values[100:150] *= np.linspace(0, 1, 64, dtype=np.float32)
    rows = from_floats(kind, values)
    assert np.abs(to_floats(kind, rows) - values).max() <= error_bound(kind, rows) * (1 + 1e-6)


def test_the_bound_of_nothing_is_zero() -> None:
    """No rows, no error; plain 32-bit rows neither."""
    assert error_bound(TensorType.Q8_0, np.empty((0, 34), np.uint8)) == 0
    assert error_bound(TensorType.F32, from_floats(TensorType.F32, normal(2, 4))) == 0


def test_bf16_rounds_to_even_and_keeps_what_is_no_number() -> None:
    """Ties go to the even neighbour; a not-a-number does not become an infinity."""
    bits = np.array([[0x3F808000, 0x3F818000, 0x7F800001, 0x7F800000]], dtype=np.uint32)
    stored = from_floats(TensorType.BF16, bits.view(np.float32)).view("<u2")[0]
    assert stored.tolist() == [0x3F80, 0x3F82, 0x7FC0, 0x7F80]


def test_values_beyond_a_half_become_infinite() -> None:
    """A half cannot hold 70000; nothing warns, the bound says it."""
    assert np.isinf(to_floats(TensorType.F16, from_floats(TensorType.F16, np.full((1, 2), 7e4, np.float32)))).all()


def test_iq4_nl_is_only_read() -> None:
    """The types without a writer say what to choose instead."""
    with pytest.raises(NotRepresentable, match="q8_0"):
        from_floats(TensorType.IQ4_NL, normal(1, 32))


def test_rows_are_whole_blocks() -> None:
    """A row of 40 values has no q8_0 form."""
    with pytest.raises(NotRepresentable, match="multiple of 32"):
        from_floats(TensorType.Q8_0, normal(1, 40))
    with pytest.raises(NotRepresentable, match="blocks of 64"):
        rotated(normal(1, 96), 64)


@pytest.mark.parametrize("block", [64, 128, 256, 512])
def test_the_rotation_is_its_own_inverse(block: int) -> None:
    """Twice gives the values back, and products of two rotated rows are those of the rows."""
    values = normal(10, 1024)
    once = rotated(values, block)
    assert np.allclose(rotated(once, block), values, atol=1e-5)
    assert np.allclose(once @ once.T, values @ values.T, rtol=1e-4, atol=1e-2)
    assert not np.allclose(once @ values.T, values @ values.T, rtol=1e-1)


def test_no_rotation_is_nothing() -> None:
    """A block of 0 leaves the very array."""
    values = normal(2, 8)
    assert rotated(values, 0) is values


@given(st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_large_and_small_slices_agree(n_rows: int, seed: int) -> None:
    """Converting rows one by one or all at once gives the same bytes."""
    values = normal(n_rows, 64, seed)
    for kind in _QUANTIZED:
        whole = from_floats(kind, values)
        assert np.array_equal(whole, np.concatenate([from_floats(kind, row[None]) for row in values]))
        assert np.array_equal(to_floats(kind, whole), np.concatenate([to_floats(kind, row[None]) for row in whole]))
