"""How V is stored, and the types of K and V: what is exact, what rounds, and what has to be told."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statecodec import (
    Columns,
    NotRepresentable,
    Rotation,
    TensorType,
    parse,
    transcode,
)
from statecodec.convert_values import turned
from tests.codec.cases import CASES
from tests.codec.goldens import golden
from tests.codec.images import nmse, numbers, reread, stream_of, written
from tests.codec.synthetic import Attention, cells, context

_NONE = Rotation(0, 0)
_64 = Rotation(64, 64)


@pytest.mark.parametrize("name", ["transposed", "transposed f32", "no v, flash off", "plain", "window", "four streams"])
def test_transposition_is_exact_and_taken_back(name: str) -> None:
    """V value by value or cell by cell: the same numbers, and the same bytes after the way back."""
    image = parse(CASES[name].data)
    was = stream_of(image).v_trans
    other = transcode.to_v_trans(image, v_trans=not was)
    assert written(transcode.to_v_trans(other, v_trans=was)) == CASES[name].data
    assert stream_of(reread(other)).v_trans is not was
    assert other.changes[-1].is_exact
    for before, after in zip(stream_of(image).values, stream_of(other).values, strict=True):
        assert np.array_equal(before.values(), after.values().T, equal_nan=True)


def test_a_section_that_is_as_wanted_keeps_its_bytes() -> None:
    """Of two caches only the one that differs is turned."""
    image = parse(context(Attention((cells(3),)), Attention((cells(3),), v_trans=1)))
    made = transcode.to_v_trans(image, v_trans=False)
    assert made.sections[0].streams[0] is image.sections[0].streams[0]  # type: ignore[union-attr]
    assert not stream_of(reread(made), 1).v_trans


def test_what_is_as_wanted_is_left_alone() -> None:
    """No change, no new image."""
    image = parse(CASES["plain"].data)
    assert transcode.to_v_trans(image, v_trans=False) is image
    assert transcode.to_streams(image, 1) is image
    assert transcode.cut_at_gap(image) is image
    assert transcode.as_blob(image) is image


def test_quantized_v_is_not_cut_into_values() -> None:
    """Transposed V holds single values, so quantized V must become plain first."""
    with pytest.raises(NotRepresentable, match="Convert V to f16 first"):
        transcode.to_v_trans(parse(CASES["quantized"].data), v_trans=True)


@given(st.integers(1, 80), st.integers(1, 80))
def test_turning_is_transposing(n_rows: int, n_columns: int) -> None:
    """Tiles leave nothing out at the edges."""
    array = np.arange(n_rows * n_columns, dtype=np.uint16).reshape(n_rows, n_columns)
    assert np.array_equal(turned(array), array.T)


def test_flash_off_and_on_of_a_real_build_agree() -> None:
    """V of the same prompt, flash attention off and on, is the same up to the order of sums."""
    off = transcode.to_v_trans(parse(golden("x11549-dense-flash-off")), v_trans=False)
    on = parse(golden("x11549-dense"))
    for mine, theirs in zip(stream_of(off).values, stream_of(on).values, strict=True):
        assert nmse(numbers(mine), numbers(theirs)) < 1e-5
    assert len(written(off)) == len(golden("x11549-dense"))


def test_a_rotated_quantized_cache_of_a_real_build_becomes_plain() -> None:
    """q8_0 rows, turned back, are the f16 rows of the same prompt; wrongly turned back they are nonsense."""
    plain, quantized = parse(golden("x11549-dense")), parse(golden("x11549-dense-q8"))
    made = transcode.to_types(quantized, type_k=TensorType.F16, type_v=TensorType.F16)
    assert stream_of(reread(made)).rotation == _NONE
    for side in ("keys", "values"):
        pairs = zip(getattr(stream_of(made), side), getattr(stream_of(plain), side), strict=True)
        assert max(nmse(numbers(mine), numbers(theirs)) for mine, theirs in pairs) < 1e-3
    old = parse(golden("l0336-dense-q8"))
    wrong = transcode.to_types(old, type_k=TensorType.F16, type_v=TensorType.F16, source_rotation=_NONE)
    assert nmse(numbers(stream_of(wrong).keys[0]), numbers(stream_of(plain).keys[0])) > 0.5
    right = transcode.to_types(old, type_k=TensorType.F16, type_v=TensorType.F16, source_rotation=_64)
    assert nmse(numbers(stream_of(right).keys[0]), numbers(stream_of(plain).keys[0])) < 1e-3


def test_a_plain_cache_becomes_the_quantized_one_of_a_real_build() -> None:
    """f16 rows, turned and quantized, are as near to the plain ones as the build's own q8_0 rows are."""
    plain, quantized = parse(golden("x11549-smollm2")), parse(golden("x11549-smollm2-q8"))
    made = transcode.to_types(plain, type_k=TensorType.Q8_0, type_v=TensorType.Q8_0, rotation=_64)
    assert len(written(made)) == len(golden("x11549-smollm2-q8"))
    assert stream_of(reread(made)).rotation == _64
    theirs = transcode.to_types(quantized, type_k=TensorType.F16, type_v=TensorType.F16)
    mine = transcode.to_types(made, type_k=TensorType.F16, type_v=TensorType.F16)
    for layer in (0, 15, 29):
        truth = numbers(stream_of(plain).keys[layer])
        assert nmse(numbers(stream_of(mine).keys[layer]), truth) < 1e-4
        own = nmse(numbers(stream_of(theirs).keys[layer]), truth)
        assert nmse(numbers(stream_of(mine).keys[layer]), truth) <= 2 * own + 1e-6


def test_the_change_says_how_exact_it_was() -> None:
    """Wider plain types are exact, all else has a bound that holds."""
    image = parse(CASES["plain"].data)
    wide = transcode.to_types(image, type_k=TensorType.F32, type_v=TensorType.F32)
    assert (wide.changes[-1].is_exact, wide.changes[-1].error_bound) == (True, 0)
    back = transcode.to_types(wide, type_k=TensorType.F16, type_v=TensorType.F16)
    assert written(back) == CASES["plain"].data
    assert back.changes[-1].error_bound > 0
    assert [change.what for change in back.changes] == ["K to f32 and V to f32", "K to f16 and V to f16"]


def test_one_side_alone_is_converted() -> None:
    """K to q8_0 leaves the very bytes of V."""
    image = parse(golden("x11549-dense-q8-f16"))
    made = transcode.to_types(image, type_k=TensorType.F16)
    assert stream_of(made).values[0].data == stream_of(image).values[0].data
    assert stream_of(made).rotation == _NONE
    assert stream_of(made).keys[0].kind is TensorType.F16


def test_an_unknown_rotation_is_refused() -> None:
    """Before version 11 nothing says how quantized rows, or an indexer's, are turned."""
    old = parse(golden("l0336-dense-q8"))
    with pytest.raises(NotRepresentable, match="unknown rotation"):
        transcode.to_types(old, type_k=TensorType.F16)
    with pytest.raises(NotRepresentable, match="unknown rotation"):
        transcode.to_types(parse(golden("l0336-mla-indexer")), type_k=TensorType.Q8_0, rotation=_64)


def test_quantizing_asks_for_the_rotation() -> None:
    """Whoever wants quantized rows says how the target turns them."""
    with pytest.raises(NotRepresentable, match="no stated rotation"):
        transcode.to_types(parse(golden("x11549-dense")), type_k=TensorType.Q8_0)


def test_each_section_can_have_its_own_rotation() -> None:
    """A main cache and its indexer are turned by different blocks."""
    image = parse(golden("x11549-mla-indexer"))
    assert stream_of(image, 1).rotation == Rotation(128, 0)
    made = transcode.to_types(image, type_k=TensorType.Q8_0, rotation=[Rotation(64, 0), Rotation(128, 0)])
    assert [stream_of(made, number).rotation for number in (0, 1)] == [Rotation(64, 0), Rotation(128, 0)]
    back = transcode.to_types(made, type_k=TensorType.F16, rotation=[_NONE, Rotation(128, 0)])
    for number in (0, 1):
        assert nmse(numbers(stream_of(back, number).keys[0]), numbers(stream_of(image, number).keys[0])) < 1e-4


def test_a_short_list_of_rotations_leaves_the_rest_unknown() -> None:
    """A section that was not told about is refused like an unknown one."""
    image = parse(golden("l0336-mla-indexer"))
    with pytest.raises(NotRepresentable, match="unknown rotation"):
        transcode.to_types(image, type_k=TensorType.F32, source_rotation=[_NONE])


def test_plain_rows_can_be_turned_alone() -> None:
    """Another rotation for the same type turns rows and is not exact."""
    image = parse(golden("x11549-dense"))
    made = transcode.to_types(image, rotation=_64)
    assert stream_of(made).rotation == _64
    assert not made.changes[-1].is_exact
    assert made.changes[-1].what == "rotation"
    back = transcode.to_types(made, rotation=_NONE)
    assert nmse(numbers(stream_of(back).values[1]), numbers(stream_of(image).values[1])) < 1e-6


def test_transposed_v_is_converted_value_by_value() -> None:
    """Plain types change in place, rotation included; quantized ones need V plain."""
    image = parse(golden("x11549-dense-flash-off"))
    wide = transcode.to_types(image, type_v=TensorType.F32)
    assert isinstance(stream_of(wide).values[0], Columns)
    assert np.array_equal(stream_of(wide).values[0].values(), stream_of(image).values[0].values().astype(np.float32))
    one = transcode.to_v_trans(transcode.to_types(image, rotation=Rotation(0, 64)), v_trans=False)
    other = transcode.to_types(transcode.to_v_trans(image, v_trans=False), rotation=Rotation(0, 64))
    assert np.array_equal(numbers(stream_of(one).values[0]), numbers(stream_of(other).values[0]))
    assert stream_of(transcode.to_types(image, type_k=TensorType.F32)).values[0].data == stream_of(image).values[0].data
    with pytest.raises(NotRepresentable, match="Make V plain first"):
        transcode.to_types(image, type_v=TensorType.Q8_0, rotation=_64)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((600, 1030), "<u2"), ((257, 513), "<f4"), ((3, 1), "<u2"), ((1, 900), "<f2")]
)
def test_turning_goes_tile_by_tile(shape: tuple[int, int], dtype: str) -> None:
    """More rows and columns than a tile holds, and widths that are not whole words."""
    array = (np.arange(shape[0] * shape[1]) % 30000).astype(dtype).reshape(shape)
    assert np.array_equal(turned(array), array.T)


def test_rows_are_converted_slice_by_slice() -> None:
    """A layer with more values than a slice holds becomes what its rows become one by one."""
    held = cells(3000)
    image = parse(context(Attention((held,), keys=((1, 256),), values=((1, 256),))))
    made = transcode.to_types(image, type_k=TensorType.F32)
    assert np.array_equal(numbers(stream_of(made).keys[0]), numbers(stream_of(image).keys[0]), equal_nan=True)


def test_rows_that_are_no_whole_blocks_stay_plain() -> None:
    """Rows of 40 values cannot be quantized."""
    image = parse(context(Attention((cells(2),), keys=((1, 80),), values=((1, 80),))))
    with pytest.raises(NotRepresentable, match="multiple of 32"):
        transcode.to_types(image, type_k=TensorType.Q8_0, rotation=_NONE)
