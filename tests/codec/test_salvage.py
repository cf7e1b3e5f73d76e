"""Of a state whose end is damaged, what is whole is kept, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from statecodec import (
    Ambiguous,
    AttentionSection,
    CacheFacts,
    Columns,
    ModelFacts,
    RecurrentFacts,
    Salvage,
    StateFormatError,
    StateImage,
    TrailingBytes,
    Truncated,
    emit,
    parse,
    salvage,
    transcode,
)
from tests.codec.cases import CASES
from tests.codec.goldens import MANIFEST, golden, image_of
from tests.codec.model import facts_of
from tests.codec.synthetic import (
    FOUR_UNIFIED,
    SHARED,
    Attention,
    Cell,
    Recurrent,
    cells,
    context,
    memory,
    name,
    outputs,
    sequence,
    sequence_file,
    session_file,
)

_PLAIN = ModelFacts(sections=("attention",))
_WINDOW = ModelFacts(sections=("attention", "attention"))
_BYTES_OF_A_V_ROW = 12


def written(image: StateImage) -> bytes:
    return b"".join(emit(image))


def kept(data: bytes, facts: ModelFacts = _PLAIN) -> StateImage:
    """The image that is kept, which must read again."""
    found = salvage(data, facts=facts)
    assert found.image is not None, found.reason
    reads_again(found.image, facts)
    return found.image


def reads_again(image: StateImage, facts: ModelFacts) -> None:
    assert parse(written(image), facts=facts).sequences() == image.sequences()


def rows_of(image: StateImage) -> dict[tuple[int, int, int, int, int], list[bytes]]:
    """What every cell holds: (section, sequence, position, and x and y of its record) -> rows of all layers."""
    held = {}
    for number, section in enumerate(image.sections):
        assert isinstance(section, AttentionSection)
        for _, stream in section.filled():
            columns = [
                layer.values().T.tobytes() if isinstance(layer, Columns) else bytes(layer.data)
                for layer in (*stream.keys, *stream.values)
            ]
            for at, key in enumerate(_keys(stream.cells)):
                rows = [
                    one[at * len(one) // len(stream.cells) : (at + 1) * len(one) // len(stream.cells)]
                    for one in columns
                ]
                held[(number, *key)] = rows
    return held


def _keys(held: object) -> Iterator[tuple[int, int, int, int]]:
    first = 0
    for at, pos in enumerate(held.pos.tolist()):  # type: ignore[attr-defined]
        n_ids = int(held.n_seq_id[at])  # type: ignore[attr-defined]
        ids = held.seq_ids[first : first + n_ids].tolist()  # type: ignore[attr-defined]
        first += n_ids
        record = (0, 0) if held.ext is None else tuple(held.ext[at].tolist())[:2]  # type: ignore[attr-defined]
        yield (min(ids, default=0), pos, *record)


_SHORT = pytest.mark.parametrize("kind", [name for name in MANIFEST if len(golden(name)) < 1 << 16])


@_SHORT
def test_a_real_state_at_many_truncations(kind: str) -> None:
    """What is kept has the rows that it had, of every layer; each sequence has all that stands before its end."""
    size = len(golden(kind))
    # Near the end, where something is kept, in and at the ends of values, blocks and rows.
    near = {max(0, size - short) for short in (1, 2, 3, 4, 7, 12, 16, 20)}
    check_cuts(kind, near | set(range(0, size, max(1, size // 41))))


@pytest.mark.deep
@_SHORT
def test_a_real_state_at_more_truncations(kind: str) -> None:
    """The same at twice as many places, and at each of the last bytes."""
    size = len(golden(kind))
    check_cuts(kind, {*range(0, size, max(1, size // 40)), *range(max(0, size - 20), size)})


def check_cuts(kind: str, lengths: set[int]) -> None:
    data = memoryview(golden(kind))
    image = image_of(kind)
    facts = facts_of(image)
    is_attention = all(isinstance(section, AttentionSection) for section in image.sections)
    whole = rows_of(image) if is_attention else {}
    for n_bytes in sorted(lengths):
        found = salvage(data[:n_bytes], facts=facts)
        if found.image is None:
            assert found.reason
            continue
        if found.damage is None:
            # A shorter state that is sound: only one that stayed on the device, or one sequence's cells.
            assert written(found.image) == data[:n_bytes]
            continue
        rows = rows_of(found.image)
        assert rows
        spans = found.image.sequences()
        for key, layers in rows.items():
            assert layers == whole[key]
        for number, seq_id, pos, *rest in whole:
            if seq_id in spans and pos <= spans[seq_id].pos_max:
                assert (number, seq_id, pos, *rest) in rows
        reads_again(found.image, facts)


@pytest.mark.parametrize("kind", [name for name in MANIFEST if "device" not in name and "partial" not in name])
def test_bytes_behind_a_real_state_are_dropped(kind: str) -> None:
    """With what the model's file says, what stands behind the end is known for what it is."""
    data = golden(kind)
    found = salvage(data + b"behind it", facts=facts_of(image_of(kind)))
    assert found.image is not None, found.reason
    assert written(found.image) == data
    assert isinstance(found.damage, TrailingBytes)
    assert found.image.changes[-1].what == "9 bytes behind the end dropped"


def test_a_sound_state_is_left_alone() -> None:
    """Where nothing is damaged nothing changes, with or without facts."""
    for facts in (None, _PLAIN):
        found = salvage(CASES["session file 10"].data, facts=facts)
        assert found.image is not None
        assert (found.damage, found.reason, found.image.changes) == (None, "", ())
        assert found.tokens is found.image.tokens


def test_the_first_cells_are_whole_where_the_last_layer_is_cut() -> None:
    """Five bytes short in the last V: its last row goes, in every layer."""
    data = context(Attention((cells(3),)))
    image = kept(data[:-5])
    assert written(image) == written(transcode.keep_first(parse(data), 2))
    assert image.changes[-1].warnings == ("sequence 0 ends before position 2 now",)
    assert written(kept(data[: -2 * _BYTES_OF_A_V_ROW])) == written(transcode.keep_first(parse(data), 1))
    nothing = salvage(data[: -2 * _BYTES_OF_A_V_ROW - 1], facts=_PLAIN)
    assert nothing.image is None
    assert isinstance(nothing.damage, Truncated)
    assert "no cell" in nothing.reason


def test_transposed_v_is_lost_by_one_byte() -> None:
    """It holds one value of all cells after the other, so a cut takes values of all of them."""
    data = context(Attention((cells(3),), v_trans=1))
    assert salvage(data[:-1], facts=_PLAIN).image is None


def test_a_cache_without_v_has_to_be_told() -> None:
    """Where nothing stands behind the keys, only the model says whether values did."""
    data = context(Attention((cells(3),), values=()))
    assert salvage(data[:-1], facts=_PLAIN).image is None
    told = ModelFacts(sections=("attention",), has_v=(False,))
    assert kept(data[:-1], told).sequences() == {0: (2, 0, 1)}


def test_sequences_that_share_cells() -> None:
    """A lost cell ends every sequence that it belonged to, and the others go on."""
    data = context(Attention((SHARED,)))
    # The last two cells go: position 2 of sequence 1, and position 1 of sequence 2.
    image = kept(data[: -_BYTES_OF_A_V_ROW - 1])
    assert image.sequences() == {0: (3, 0, 2), 1: (2, 0, 1), 2: (1, 0, 0)}
    unified = kept(context(Attention((FOUR_UNIFIED,)))[:-1])
    assert unified.sequences() == {0: (1, 0, 0), 1: (2, 0, 1), 2: (3, 0, 2), 3: (3, 0, 2)}
    late = (Cell(2), Cell(0), Cell(1))
    assert salvage(context(Attention((late,)))[: -2 * _BYTES_OF_A_V_ROW], facts=_PLAIN).image is None


def test_streams_before_the_cut_are_whole() -> None:
    """Each sequence has a stream of its own: those before the one that is cut are kept, and its own first cells."""
    held = tuple(cells(n + 1, ids=(n,)) for n in range(4))
    data = context(Attention(held))
    image = kept(data[:-1])
    assert image.sequences() == {0: (1, 0, 0), 1: (2, 0, 1), 2: (3, 0, 2), 3: (3, 0, 2)}
    streams = len(context(Attention((*held[:2], (), ())))) - 8
    for n_bytes in (streams, streams + 3, streams + 50, len(context(Attention((*held[:3], ())))) - 40):
        image = kept(data[:n_bytes])
        assert image.sequences() == {0: (1, 0, 0), 1: (2, 0, 1)}
    assert kept(data[:streams]).changes[-1].warnings == ("what streams 2 to 3 held is missing",)
    assert written(kept(data[:streams])) == context(Attention((*held[:2], (), ())))


def test_a_sequence_of_a_streams_context_is_whole_before_empty_streams() -> None:
    """Counts of empty streams behind the only filled one are nothing lost."""
    data = sequence(Attention(((), cells(3, ids=(1,)), (), ())), seq_id=1)
    for n_bytes in (1, 4, 7):
        image = kept(data[:-n_bytes])
        assert written(image) == data
        assert image.changes[-1].warnings == ()
    assert salvage(data[:20], facts=_PLAIN).image is None


def test_a_window_goes_with_its_base() -> None:
    """A window that holds its whole sequence can be cut; one that has forgotten the start takes the sequence along."""
    whole = context(Attention((cells(6),)), Attention((cells(6),)))
    image = kept(whole[:-1], _WINDOW)
    assert [section.n_cells for section in image.sections] == [5, 5]
    forgot = context(Attention((cells(6),)), Attention((cells(3, first=3),)))
    assert salvage(forgot[:-1], facts=_WINDOW).image is None
    two = (*cells(6), *cells(2, ids=(1,)))
    windows = (*cells(2, ids=(1,)), *cells(3, first=3))
    image = kept(context(Attention((two,)), Attention((windows,)))[:-1], _WINDOW)
    assert image.sequences() == {1: (2, 0, 1)}
    assert image.changes[-1].warnings == ("sequence 0 is not whole and gone",)


def test_a_window_whose_stream_is_gone_takes_the_sequence_along() -> None:
    """Of streams that the window's section lacks, the base is dropped as well."""
    base = tuple(cells(3, ids=(n,)) for n in range(3))
    data = context(Attention(base), Attention(base))
    image = kept(data[:-90], _WINDOW)
    assert image.sequences() == {0: (3, 0, 2), 1: (3, 0, 2)}
    assert "sequence 2 is not whole and gone" in image.changes[-1].warnings
    unified = context(Attention((FOUR_UNIFIED,)), Attention((FOUR_UNIFIED,)))
    assert salvage(unified[:-200], facts=_WINDOW).image is None


def test_what_is_behind_is_not_seen_without_facts() -> None:
    """A window, or a recurrent part, may have stood behind what reads like a whole cache: the model has to be told."""
    base = memory(Attention((cells(6),)))
    data = context(Attention((cells(6),)), Attention((cells(6),)))
    for cut in (data[:-1], data[: len(name("llama") + base) + 5], data[:40]):
        found = salvage(cut)
        assert found.image is None
        assert "facts" in found.reason
    # What looks like the window alone is not a whole state with junk behind it.
    half = sequence(Attention((cells(6),))) + b"\1\0\0\0\6"
    assert salvage(half, facts=_WINDOW).image is None
    assert salvage(data[: len(name("llama") + base) + 5], facts=_WINDOW).image is None


def test_a_recurrent_memory_is_all_or_nothing() -> None:
    """It cannot be taken back to an earlier token, so a cut leaves nothing; bytes behind it can go."""
    data = CASES["hybrid"].data
    facts = ModelFacts(parts=(CacheFacts((4, 4), (6, 6)), RecurrentFacts(2, 6, 10)))
    assert salvage(data[:-1], facts=facts).image is None
    assert written(kept(data + b"\0", facts)) == data


def test_damage_that_is_no_cut_is_left_alone() -> None:
    """Where it begins cannot be told from the bytes."""
    data = bytearray(context(Attention((cells(3),))))
    data[-3 * _BYTES_OF_A_V_ROW - 12] ^= 0x40
    found = salvage(data, facts=_PLAIN)
    assert found.image is None
    assert "begins" in found.reason


def test_several_meanings_are_several_meanings() -> None:
    """Bytes that are sound in more than one way are not damaged, and the error says so."""
    with pytest.raises(Ambiguous):
        salvage(sequence(Recurrent((Cell(0, ()),)), seq_id=None))


def test_results_of_a_token_that_is_gone_go_too() -> None:
    """A state of 2025 keeps its logits only while the tokens that gave them are all there."""
    data = name("llama") + outputs((2,), 5) + memory(Attention((cells(3),)))
    image = kept(data[:-1])
    assert image.outputs is not None
    assert (image.outputs.ids.size, image.outputs.logits.shape) == (0, (0, 0))
    whole = kept(data + b"\0")
    assert whole.outputs is not None
    assert whole.outputs.ids.tolist() == [2]
    assert salvage(data[: len(name("llama")) + 12], facts=_PLAIN).image is None


@pytest.mark.parametrize("streamed", [True, False])
def test_a_files_tokens_are_kept_whatever_becomes_of_its_cells(streamed: bool) -> None:
    """The list is whole as long as the cut is behind it; of one that is cut itself the first tokens are there."""
    body = memory(Attention((cells(3),), streamed=streamed))
    data = session_file(name("llama") + outputs((), 0) + body, 9, (7, 8, 9))
    image = kept(data[:-1])
    assert image.tokens is not None
    assert image.tokens.text.tolist() == [7, 8]
    found = salvage(data[:-70], facts=_PLAIN)
    assert (found.image, _tokens(found)) == (None, [7, 8, 9])
    assert found.has_all_tokens
    assert _tokens(salvage(data[:-70])) == [7, 8, 9]
    assert salvage(data[:24]).has_all_tokens
    short = salvage(data[:21])
    assert (_tokens(short), short.has_all_tokens) == ([7, 8], False)
    none = salvage(data[:15])
    assert (none.tokens, none.has_all_tokens) == (None, False)
    assert salvage(data).has_all_tokens


def _tokens(found: Salvage) -> list[int] | None:
    return None if found.tokens is None else found.tokens.text.tolist()


def test_lists_that_are_none() -> None:
    """A packed list is all there or unknown; other versions, forms and counts have none."""
    packed = sequence_file(memory(Attention((cells(3),))), 3, (-1, 1, 3, 5, 6, 7, 0))
    assert _tokens(salvage(packed[:-70], facts=_PLAIN)) == [5, 6, 7]
    assert salvage(packed[:30]).tokens is None
    for data in (b"", b"nsgg", sequence_file(b"", 5), context(Attention((cells(3),)))[:-1]):
        assert salvage(data).tokens is None
    assert salvage(sequence_file(b"", 3)[:8] + b"\xff" * 8).tokens is None


def test_nothing_else_than_a_state_format_error_is_told() -> None:
    """Bytes that are no state at all leave nothing, and say what they are."""
    for data in (b"", b"GGUF" + bytes(20), b"\xff" * 40):
        found = salvage(data, facts=_PLAIN)
        assert (found.image, found.tokens) == (None, None)
        assert isinstance(found.damage, StateFormatError)
