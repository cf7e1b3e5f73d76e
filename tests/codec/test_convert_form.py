"""Versions, files and blobs, and layers carved out and joined."""

from __future__ import annotations

import pytest

from statecodec import (
    Form,
    NotRepresentable,
    RecurrentSection,
    Rotation,
    parse,
    transcode,
)
from tests.codec.cases import CASES
from tests.codec.goldens import MANIFEST, golden
from tests.codec.images import reread, stream_of, written
from tests.codec.synthetic import Attention, cells, memory, sequence_file

_NONE = Rotation(0, 0)
_64 = Rotation(64, 64)


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
