"""Streams, and sequences taken out, put together and renumbered."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from statecodec import (
    AttentionSection,
    ModelFacts,
    NotRepresentable,
    parse,
    transcode,
)
from tests.codec.cases import CASES
from tests.codec.goldens import golden
from tests.codec.images import reread, stream_of, written
from tests.codec.synthetic import Attention, Cell, Recurrent, cells, context, sequence


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
