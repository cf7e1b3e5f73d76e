"""The first tokens, and what stands before a gap."""

from __future__ import annotations

import pytest

from statecodec import (
    NotRepresentable,
    parse,
    transcode,
)
from tests.codec.cases import CASES
from tests.codec.images import reread, stream_of, written
from tests.codec.synthetic import Attention, Cell, cells, context, memory, sequence, sequence_file


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
