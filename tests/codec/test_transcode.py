from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statecodec import (
    AttentionSection,
    Columns,
    Form,
    KvStream,
    ModelFacts,
    NotRepresentable,
    RecurrentSection,
    Rotation,
    Rows,
    StateImage,
    TensorType,
    emit,
    parse,
    transcode,
    validate,
)
from statecodec.convert_values import turned
from statecodec.quants import to_floats
from tests.codec.cases import CASES
from tests.codec.goldens import MANIFEST, golden
from tests.codec.synthetic import Attention, Cell, Recurrent, cells, context, memory, sequence, sequence_file

_NONE = Rotation(0, 0)
_64 = Rotation(64, 64)


def written(image: StateImage) -> bytes:
    return b"".join(emit(image))


def reread(image: StateImage, facts: ModelFacts | None = None) -> StateImage:
    """A changed image is sound, and its bytes read as what it says it is."""
    validate(image)
    again = parse(written(image), facts=facts)
    assert again.sequences() == image.sequences()
    assert [section.kind for section in again.sections] == [section.kind for section in image.sections]
    return again


def stream_of(image: StateImage, number: int = 0) -> KvStream:
    section = image.sections[number]
    assert isinstance(section, AttentionSection)
    return next(section.filled())[1]


def nmse(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(((found - wanted) ** 2).sum() / (wanted**2).sum())


def numbers(layer: Rows | Columns) -> np.ndarray:
    assert isinstance(layer, Rows)
    return to_floats(layer.kind, layer.raw())


# ---- how V is stored


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


# ---- the types of K and V


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


# ---- streams


@pytest.mark.parametrize("build", ["x11549", "l0336", "x10566", "x8929", "x0214"])
def test_unified_and_one_stream_each_of_a_real_build(build: str) -> None:
    """A unified state in streams has the shape of the build's own, and comes back byte for byte."""
    unified, streams = golden(f"{build}-dense-unified4"), golden(f"{build}-dense-streams4")
    made = transcode.to_streams(parse(unified), 4)
    assert len(written(made)) == len(streams)
    assert reread(made).sequences() == parse(streams).sequences()
    assert written(transcode.to_streams(made, 1)) == unified
    assert written(transcode.to_streams(transcode.to_streams(parse(streams), 1), 4)) == streams
    assert made.changes[-1].is_exact


@pytest.mark.parametrize(
    "name", ["four unified", "shared cells", "four streams", "an empty stream", "no cells in streams"]
)
def test_streams_keep_what_each_sequence_holds(name: str) -> None:
    """Whatever the cells share, each sequence has its own positions afterwards."""
    image = parse(CASES[name].data)
    for n_stream in (4, 1):
        assert reread(transcode.to_streams(image, n_stream)).sequences() == image.sequences()


def test_a_sequence_needs_a_stream() -> None:
    """Sequence 3 does not fit into two streams."""
    with pytest.raises(NotRepresentable, match="sequence 3"):
        transcode.to_streams(parse(CASES["four unified"].data), 2)


def test_a_sequence_blob_changes_streams_too() -> None:
    """A sequence of a streams context stands in its own block, and alone when unified."""
    streams = golden("x11549-dense-streams4-sequence")
    alone = transcode.to_streams(parse(streams), 1)
    assert len(written(alone)) == len(streams) - 12
    assert written(transcode.to_streams(alone, 4)) == streams


def test_opaque_sections_only_change_their_form() -> None:
    """A memory that is not understood can be put into a file and taken out again."""
    image = parse(CASES["opaque"].data)
    filed = transcode.as_file(image, [1, 2])
    assert written(transcode.as_blob(parse(written(filed)))) == CASES["opaque"].data


def test_transposed_and_hybrid_states_change_streams() -> None:
    """Columns are gathered like rows, recurrent parts stay."""
    held = context(Attention((tuple(Cell(p, (s,)) for p in range(2) for s in range(2)),), v_trans=1))
    image = parse(held)
    made = transcode.to_streams(image, 2)
    assert reread(made).sequences() == {0: (2, 0, 1), 1: (2, 0, 1)}
    found = stream_of(made).values[0].values()
    assert np.array_equal(found, stream_of(image).values[0].values()[:, ::2], equal_nan=True)
    joined = transcode.to_streams(made, 1)
    assert stream_of(joined).values[0].values().shape == (12, 4)
    hybrid = parse(CASES["hybrid"].data)
    assert transcode.to_streams(hybrid, 4).sections[1] is hybrid.sections[1]


# ---- versions


@pytest.mark.parametrize("name", [n for n, told in MANIFEST.items() if told["flags"] < 1 and "q8" not in n])
@pytest.mark.parametrize("version", [9, 10, 11])
def test_every_real_state_can_be_another_version(name: str, version: int) -> None:
    """Plain states of every build become every version; the bytes read as it, and come back where nothing was lost."""
    data = golden(name)
    image = parse(data)
    try:
        made = transcode.to_version(image, version, rotation=_NONE)
    except NotRepresentable:
        assert "history" in name
        return
    again = reread(made)
    assert version in again.versions
    own = min(image.versions)
    lost = [warning for change in made.changes for warning in change.warnings]
    old = {layout.name for layout in image.layouts}.isdisjoint({"v9", "v10", "v11"})
    if not lost and not old and (made.source_seq_id is None) == (image.source_seq_id is None):
        assert written(transcode.to_version(made, own, rotation=_NONE)) == data


def test_a_model_without_extra_record_changes_one_word() -> None:
    """Version 2 to 3 of a dense model's sequence file is one word at offset 4."""
    data = golden("x10566-dense-sequence-file")
    made = written(transcode.to_version(parse(data), 10))
    assert made == data[:4] + b"\x03" + data[5:]


def test_the_extra_record_grows_by_the_token_list() -> None:
    """8 bytes become 12 with each cell's token; the file grows by 4 bytes a cell, and shrinks again."""
    tokens = tuple(range(100, 110))
    data = sequence_file(memory(Attention((cells(10, ext_words=2),))), 2, tokens)
    made = transcode.to_version(parse(data), 10)
    assert len(written(made)) == len(data) + 40
    ext = stream_of(reread(made)).cells.ext
    assert ext is not None
    assert ext["token"].tolist() == list(tokens)
    assert not made.changes[-1].warnings
    back = transcode.to_version(made, 9)
    assert written(back) == data
    assert back.changes[-1].warnings == ("the cells' tokens are not kept",)


@pytest.mark.parametrize("tokens", [(1, 2), ()])
def test_an_unknown_token_is_the_null_token_and_a_warning(tokens: tuple[int, ...]) -> None:
    """Where the list does not reach every cell, no cell is guessed at."""
    data = sequence_file(memory(Attention((cells(3, ext_words=2),))), 2, tokens)
    made = transcode.to_version(parse(data), 10)
    ext = stream_of(made).cells.ext
    assert ext is not None
    assert ext["token"].tolist() == [-1, -1, -1]
    assert "tokens of 3 cells are unknown" in made.changes[-1].warnings[0]


def test_a_blob_has_no_token_list() -> None:
    """Context blobs of M-RoPE models grow with null tokens."""
    made = transcode.to_version(parse(golden("x10566-mrope")), 11)
    assert reread(made).versions == {11}
    assert made.changes[-1].warnings


def test_rotation_must_be_known_to_be_written() -> None:
    """Version 11 says how rows are turned, so it has to be stated for quantized rows of older versions."""
    old = parse(golden("l0336-dense-q8"))
    with pytest.raises(NotRepresentable, match="unknown rotation"):
        transcode.to_version(old, 11)
    made = transcode.to_version(old, 11, rotation=_64)
    assert stream_of(reread(made)).rotation == _64
    back = transcode.to_version(made, 10)
    assert written(back) == golden("l0336-dense-q8")
    assert "does not say" in back.changes[-1].warnings[0].replace("which\nthis", "which this")
    several = transcode.to_version(parse(golden("l0336-mla-indexer")), 11, rotation=[_NONE, Rotation(128, 0)])
    assert stream_of(reread(several), 1).rotation == Rotation(128, 0)


def test_outputs_of_2025_are_left_behind() -> None:
    """Newer versions hold no logits, which is said."""
    made = transcode.to_version(parse(golden("x0120-dense")), 11)
    assert made.outputs is None
    assert "decode the last token again" in made.changes[-1].warnings[0]
    assert reread(made).versions == {11}


def test_cells_without_ids_get_one() -> None:
    """Sequence blobs of early 2025 name no sequence; later ones do, and carry a prefix."""
    made = transcode.to_version(parse(golden("x010-dense-sequence")), 11)
    assert written(made)[:8] == b"\xd8\x3c\x14\xaf\0\0\0\0"
    assert stream_of(reread(made)).cells.n_seq_id.tolist() == [1, 1]


def test_second_histories_need_version_10() -> None:
    """A recurrent layer's second history has no place in version 9."""
    with pytest.raises(NotRepresentable, match="second histories"):
        transcode.to_version(parse(CASES["history"].data), 9)


def test_a_version_that_nobody_wrote_is_refused() -> None:
    """The known versions are named."""
    with pytest.raises(NotRepresentable, match=r"versions \[9, 10, 11\]"):
        transcode.to_version(parse(CASES["plain"].data), 12)


# ---- sequences


@pytest.mark.parametrize("build", ["x11549", "l0336"])
def test_a_sequence_taken_out_is_the_builds_own(build: str) -> None:
    """Taking a sequence out of a context gives the bytes that the library writes for it."""
    made = transcode.extract(parse(golden(f"{build}-dense-streams4")), 2)
    assert written(made) == golden(f"{build}-dense-streams4-sequence")
    assert written(transcode.extract(parse(golden(f"{build}-dense")), 0)) == golden(f"{build}-dense-sequence")
    mrope = transcode.extract(parse(golden(f"{build}-mrope")), 0)
    assert written(mrope) == golden(f"{build}-mrope-sequence")
    recurrent = transcode.extract(parse(golden(f"{build}-recurrent")), 0)
    assert written(recurrent) == golden(f"{build}-recurrent-sequence")


@pytest.mark.parametrize("name", ["four unified", "four streams", "shared cells", "recurrent, four", "hybrid"])
def test_sequences_taken_out_and_put_together(name: str) -> None:
    """All sequences of a context, put together again, hold what they held."""
    image = parse(CASES[name].data)
    parts = {seq_id: transcode.extract(image, seq_id) for seq_id in image.sequences()}
    for seq_id, part in parts.items():
        assert part.sequences() == {seq_id: image.sequences()[seq_id]}
    for n_stream in (1, 4):
        merged = transcode.merge(parts, architecture="llama", n_stream=n_stream)
        assert reread(merged).sequences() == image.sequences()
    if name != "shared cells":
        n_stream = 4 if name == "four streams" else 1
        assert written(transcode.merge(parts, architecture="llama", n_stream=n_stream)) == CASES[name].data


def test_a_sequence_can_get_another_id() -> None:
    """The new id is in the prefix, in the cells and in the place of the block."""
    made = transcode.extract(parse(CASES["four streams"].data), 1, as_id=3)
    assert reread(made).sequences() == {3: (2, 0, 1)}
    section = made.sections[0]
    assert isinstance(section, AttentionSection)
    assert [stream is None for stream in section.streams] == [True, True, True, False]
    assert stream_of(made).cells.seq_ids.tolist() == [3, 3]


@pytest.mark.parametrize(
    "change",
    [
        lambda: transcode.extract(parse(CASES["plain"].data), 5),
        lambda: transcode.extract(parse(CASES["sequence"].data), 2),
        lambda: transcode.extract(parse(CASES["four streams"].data), 1, as_id=9),
        lambda: transcode.merge({}, architecture="llama"),
        lambda: transcode.merge({0: parse(CASES["plain"].data)}, architecture="llama"),
        lambda: transcode.merge({5: parse(CASES["sequence"].data)}, architecture="llama", n_stream=2),
        lambda: transcode.merge(
            {0: parse(CASES["sequence"].data), 1: parse(CASES["sequence rotated"].data)}, architecture="llama"
        ),
        lambda: transcode.merge(
            {0: parse(CASES["sequence"].data), 1: parse(CASES["sequence hybrid"].data)}, architecture="llama"
        ),
        lambda: transcode.merge(
            {
                0: parse(CASES["sequence"].data),
                1: parse(sequence(Attention((cells(3),), keys=((1, 4), (1, 8))))),
            },
            architecture="llama",
        ),
        lambda: transcode.merge(
            {
                0: parse(sequence(Recurrent((Cell(4, ()),)))),
                1: parse(sequence(Recurrent((Cell(4, ()),), r=(0, 28)))),
            },
            architecture="mamba",
        ),
        lambda: transcode.renumber(parse(CASES["four unified"].data), {0: 1}),
        lambda: transcode.renumber(parse(CASES["four unified"].data), {0: 300}),
        lambda: transcode.renumber(parse(CASES["four streams"].data), {0: 4}),
        lambda: transcode.renumber(parse(CASES["an empty stream"].data), {0: 9}),
        lambda: transcode.keep_first(parse(CASES["hybrid"].data), 2),
        lambda: transcode.to_v_trans(parse(CASES["opaque"].data), v_trans=True),
        lambda: transcode.to_streams(parse(CASES["sequence on device"].data), 4),
        lambda: transcode.as_file(parse(CASES["sequence on device"].data), [1]),
        lambda: transcode.as_file(parse(CASES["session file 9"].data), [1]),
        lambda: transcode.carve_layers(parse(CASES["plain"].data), 1, 3),
        lambda: transcode.carve_layers(parse(CASES["plain"].data), 1, 1),
        lambda: transcode.join_layers([]),
        lambda: transcode.join_layers([parse(CASES["plain"].data), parse(CASES["four unified"].data)]),
        lambda: transcode.cut_at_gap(parse(context(Attention(((Cell(0), Cell(4)),)), Recurrent((Cell(4),))))),
    ],
)
def test_what_cannot_be_is_refused_with_advice(change: Callable[[], object]) -> None:
    """Every change that a state does not allow says what it found and what to do."""
    with pytest.raises(NotRepresentable) as caught:
        change()
    assert caught.value.action.endswith(".")


def test_partial_states_are_not_changed() -> None:
    """The half of a memory is of no use elsewhere."""
    image = parse(golden("x11549-window-partial"), facts=ModelFacts(sections=("attention", "attention")))
    with pytest.raises(NotRepresentable, match="partial"):
        transcode.to_version(image, 10)


def test_sequences_are_renumbered() -> None:
    """Ids change in cells, streams and prefixes; shared cells stay ascending."""
    streams = transcode.renumber(parse(CASES["four streams"].data), {0: 3, 3: 0})
    assert reread(streams).sequences() == {0: (4, 0, 3), 1: (2, 0, 1), 2: (3, 0, 2), 3: (1, 0, 0)}
    shared = transcode.renumber(parse(CASES["shared cells"].data), {0: 9})
    assert reread(shared).sequences() == {1: (3, 0, 2), 2: (2, 0, 1), 9: (3, 0, 2)}
    single = transcode.renumber(parse(CASES["sequence of streams"].data), {1: 2})
    assert reread(single).sequences() == {2: (3, 0, 2)}
    bare = transcode.renumber(parse(CASES["sequence without prefix"].data), {0: 7})
    assert bare.source_seq_id is None
    recurrent = transcode.renumber(parse(CASES["recurrent, four"].data), {0: 8})
    assert list(reread(recurrent).sequences()) == [1, 2, 3, 8]


def test_old_contexts_give_sequences_that_name_themselves() -> None:
    """A context of 2025 gives a bare sequence blob of the layout whose cells have ids."""
    made = transcode.extract(parse(golden("x0120-dense")), 0)
    assert written(made) == golden("x0120-dense-sequence")
    assert {layout.name for layout in made.layouts} == {"v9-outputs-2025-06"}
    with pytest.raises(NotRepresentable, match="Convert versions first"):
        transcode.merge({0: made}, architecture="llama")


def test_empty_streams_stay_empty() -> None:
    """Sections without cells of a sequence are carried along."""
    image = parse(context(Attention((cells(2), (), ())), Attention(((), (), ()))))
    alone = transcode.extract(image, 0)
    assert reread(alone).sequences() == {0: (2, 0, 1)}
    merged = transcode.merge({0: alone, 2: transcode.extract(image, 0)}, architecture="llama", n_stream=3)
    assert reread(merged).sequences() == {0: (2, 0, 1), 2: (2, 0, 1)}
    assert written(transcode.merge({0: alone}, architecture="llama", n_stream=3)) == written(image)


# ---- the first tokens


@pytest.mark.parametrize("n_tokens", [0, 1, 2, 3, 10])
@pytest.mark.parametrize(
    "name", ["plain", "transposed", "four streams", "indexer", "shared cells", "ext 12", "sequence"]
)
def test_the_first_tokens_are_kept(name: str, n_tokens: int) -> None:
    """Of each sequence the positions below the end stay, in every section."""
    image = parse(CASES[name].data)
    made = transcode.keep_first(image, n_tokens)
    for seq_id, span in image.sequences().items():
        wanted = [p for p in range(span.pos_min, span.pos_max + 1) if p < n_tokens]
        found = made.sequences().get(seq_id)
        assert (found is None) == (not wanted)
        if found is not None:
            assert found.pos_max == wanted[-1]
    if made.sequences():
        reread(made)


def test_shared_cells_are_kept_for_those_that_reach_them() -> None:
    """A cell at a position that one of its sequences has lost belongs to the other alone."""
    held = (Cell(0, (0, 1)), Cell(2, (0, 1)), Cell(1, (0,)))
    made = transcode.cut_at_gap(parse(context(Attention((held, ())))))
    assert reread(made).sequences() == {0: (3, 0, 2), 1: (1, 0, 0)}
    assert stream_of(made).cells.n_seq_id.tolist() == [2, 1, 1]


def test_old_sequences_are_cut_too() -> None:
    """Blobs without streams or ids keep their form, even when nothing stays."""
    for name in ("sequence without ids", "sequence without streams"):
        image = parse(CASES[name].data)
        assert reread(transcode.keep_first(image, 2)).sequences() == {0: (2, 0, 1)}
        assert len(written(transcode.keep_first(image, 0))) == 4 + 8 + 4 * 12


def test_what_stands_before_a_gap_is_kept() -> None:
    """Each sequence is cut where its first position is missing, and says so."""
    held = (*(Cell(p, (0,)) for p in (0, 1, 2, 5, 6)), *(Cell(p, (1,)) for p in (0, 1)), Cell(7, (0, 1)))
    image = parse(context(Attention((held,)), Attention((held[:3] + held[4:],))))
    made = transcode.cut_at_gap(image)
    assert reread(made).sequences() == {0: (3, 0, 2), 1: (2, 0, 1)}
    assert made.changes[-1].warnings == (
        "sequence 0 ends before position 3 now",
        "sequence 1 ends before position 2 now",
    )
    lone = parse(sequence(Attention(((Cell(0), Cell(1), Cell(3)),))))
    assert transcode.cut_at_gap(lone).sequences() == {0: (2, 0, 1)}
    encoder = parse(CASES["encoder"].data)
    assert transcode.cut_at_gap(encoder) is encoder


def test_a_window_that_has_forgotten_cannot_be_taken_back() -> None:
    """Cells before the window's first are not in it: refused where none is left, told where some may be missing."""
    image = parse(CASES["window"].data)
    for n_tokens in (1, 3):
        with pytest.raises(NotRepresentable, match="begins at position 3"):
            transcode.keep_first(image, n_tokens)
    made = transcode.keep_first(image, 5)
    assert [section.n_cells for section in made.sections] == [5, 2]
    (warning,) = made.changes[-1].warnings
    assert "begins at position 3" in warning
    assert "windows of 2 tokens or less" in warning
    assert not transcode.keep_first(image, 6).changes[-1].warnings
    assert transcode.keep_first(image, 0).sequences() == {}


def test_a_files_tokens_end_where_its_cells_do() -> None:
    """A reader takes one for the other; a packed list is packed again, and one with media is not cut."""
    body = memory(Attention((cells(3),)))
    plain = reread(transcode.keep_first(parse(sequence_file(body, 3, (7, 8, 9))), 2))
    assert (plain.tokens.text.tolist(), plain.tokens.packed_version) == ([7, 8], None)  # type: ignore[union-attr]
    gap = memory(Attention(((Cell(0), Cell(1), Cell(3)),)))
    assert transcode.cut_at_gap(parse(sequence_file(gap, 3, (7, 8, 9, 10)))).tokens.text.tolist() == [7, 8]  # type: ignore[union-attr]
    packed = sequence_file(body, 3, (-1, 1, 3, 7, 8, 9, 0))
    made = reread(transcode.keep_first(parse(packed), 2))
    assert (made.tokens.words.tolist(), made.tokens.packed_version) == ([-1, 1, 2, 7, 8, 0], 1)  # type: ignore[union-attr]
    assert written(transcode.keep_first(parse(packed), 3)) == packed
    media = sequence_file(body, 3, (-1, 1, 3, 7, -1, -1, 1, 1, 4, 99))
    with pytest.raises(NotRepresentable, match="1 media"):
        transcode.keep_first(parse(media), 2)
    assert transcode.keep_first(transcode.as_blob(parse(media)), 2).sequences() == {0: (2, 0, 1)}


# ---- forms and layers


def test_files_and_blobs_become_each_other() -> None:
    """A file's blob is the blob that the same build writes, and a file made of it is the file."""
    for build in ("x11549", "l0336", "x10566"):
        whole = golden(f"{build}-dense-session-file")
        assert written(transcode.as_blob(parse(whole))) == golden(f"{build}-dense")
        one = golden(f"{build}-dense-sequence-file")
        tokens = parse(one).tokens
        assert tokens is not None
        if build != "x10566":
            assert written(transcode.as_blob(parse(one))) == golden(f"{build}-dense-sequence")
            assert written(transcode.as_file(parse(golden(f"{build}-dense-sequence")), tokens.words)) == one
            assert written(transcode.as_file(parse(golden(f"{build}-dense")), tokens.words)) == whole
        assert transcode.as_blob(parse(one)).form is Form.SEQUENCE


@pytest.mark.parametrize("name", ["plain", "transposed", "window", "hybrid", "four streams", "no v", "an empty stream"])
def test_layers_carved_out_are_joined_again(name: str) -> None:
    """Ranges of layers of one state, put together, are its bytes."""
    image = parse(CASES[name].data)
    parts = [transcode.carve_layers(image, 0, 1), transcode.carve_layers(image, 1, 2)]
    assert written(transcode.join_layers(parts)) == CASES[name].data
    for part in parts:
        reread(part)
        for section in part.sections:
            if isinstance(section, RecurrentSection):
                assert section.n_layers == 1


def test_a_range_without_attention_layers_is_legal() -> None:
    """A device may hold only layers of one part of the memory."""
    image = parse(CASES["hybrid window"].data)
    part = transcode.carve_layers(image, 1, 2)
    assert [section.n_layers for section in part.sections if section.kind.value != "opaque"] == [0, 1, 1]
    reread(part)


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
