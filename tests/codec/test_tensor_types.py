from __future__ import annotations

import pytest

from statecodec.tensor_types import TYPE_TABLE, TensorType, row_bytes, row_values


@pytest.mark.parametrize(
    ("kind", "n_bytes"),
    [
        (TensorType.F32, 256),
        (TensorType.F16, 128),
        (TensorType.BF16, 128),
        (TensorType.Q8_0, 68),
        (TensorType.Q4_0, 36),
        (TensorType.IQ4_NL, 36),
        (TensorType.Q4_1, 40),
        (TensorType.Q5_0, 44),
        (TensorType.Q5_1, 48),
    ],
)
def test_rows_of_64_values_have_the_measured_size(kind: TensorType, n_bytes: int) -> None:
    """Row sizes are those of the library, and go both ways."""
    assert row_bytes(kind, 64) == n_bytes
    assert row_values(kind, n_bytes) == 64


def test_a_row_is_whole_blocks() -> None:
    """A row that would end inside a block does not exist."""
    with pytest.raises(ValueError, match="33 values"):
        row_bytes(TensorType.Q8_0, 33)


def test_the_oracle_knows_the_same_sizes() -> None:
    """Block sizes agree with the gguf package, type by type."""
    constants = pytest.importorskip("gguf.constants")
    for kind, info in TYPE_TABLE.items():
        expected = constants.GGML_QUANT_SIZES[constants.GGMLQuantizationType(int(kind))]
        assert (info.block_values, info.block_bytes) == expected
