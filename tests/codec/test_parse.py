from __future__ import annotations

import struct
from collections.abc import Iterable

import pytest

from statecodec import (
    DEFAULT_LIMITS,
    Ambiguous,
    AttentionSection,
    BadField,
    CacheFacts,
    Content,
    ForeignFile,
    Form,
    Inconsistent,
    LimitExceeded,
    Limits,
    ModelFacts,
    RecurrentFacts,
    StateFormatError,
    StateImage,
    TensorType,
    TrailingBytes,
    Truncated,
    UnknownVersion,
    emit,
    parse,
    salvage,
)
from statecodec.cursor import Cursor, view
from statecodec.envelope import read_outputs
from statecodec.parse import describe
from tests.codec.cases import CASES, Case, cuts
from tests.codec.model import parts_of
from tests.codec.synthetic import (
    LATE,
    Attention,
    Cell,
    Recurrent,
    cells,
    context,
    memory,
    name,
    rows,
    sequence,
    sequence_file,
    session_file,
)

_CASES = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def written(image: StateImage) -> bytes:
    return b"".join(emit(image))


@_CASES
def test_bytes_become_the_object(case: Case) -> None:
    """The reader finds the form, the layouts, the sections and the sequences of every case of the table."""
    image = parse(case.data)
    assert image.form is case.form
    assert image.content is case.content
    assert " ".join(sorted(layout.name for layout in image.layouts)) == case.layouts
    assert "".join(section.kind.value[0] for section in image.sections) == case.kinds
    assert {seq_id: tuple(span) for seq_id, span in image.sequences().items()} == case.spans
    assert image.n_bytes == len(case.data)


@_CASES
def test_the_object_becomes_the_same_bytes(case: Case) -> None:
    """The writer gives back exactly what was read."""
    assert written(parse(case.data)) == case.data


@_CASES
def test_every_truncation_is_an_error_or_keeps_its_bytes(case: Case) -> None:
    """A cut state is refused, unless what is left is a whole smaller state, which is then written back as it is."""
    refused_or_kept(case.data, cuts(parse(case.data), case.data))


@pytest.mark.deep
@_CASES
def test_truncations_inside_rows_are_errors_or_keep_their_bytes(case: Case) -> None:
    """The same at every byte of every row."""
    refused_or_kept(case.data, range(len(case.data)))


def refused_or_kept(data: bytes, ends: Iterable[int]) -> None:
    whole = memoryview(data)
    for end in ends:
        try:
            image = parse(whole[:end])
        except StateFormatError:
            continue
        assert written(image) == whole[:end]


@_CASES
def test_every_truncation_is_an_error_when_the_model_is_known(case: Case) -> None:
    """With the sections and V of the model known, no cut state passes."""
    image = parse(case.data)
    if any(section.kind.value == "opaque" for section in image.sections):
        return
    facts = ModelFacts(parts=parts_of(image), versions=image.versions)
    assert written(parse(case.data, facts=facts)) == case.data
    # Of a model without a memory no bytes at all are a state too.
    whole = memoryview(case.data)
    for end in {*cuts(image, case.data)[0 if image.sections else 1 :: 3], len(case.data) - 1}:
        with pytest.raises(StateFormatError):
            parse(whole[:end], facts=facts)


@_CASES
@pytest.mark.parametrize("junk", [b"\0", b"\xff", b"\x01\0\0\0", b"junk" * 5], ids=["zero", "ff", "one", "text"])
def test_junk_behind_is_an_error(case: Case, junk: bytes) -> None:
    """Bytes behind a state are refused and called trailing; an opaque one and a name alone cannot know better."""
    image = parse(case.data)
    if image.is_opaque:
        assert written(parse(case.data + junk)) == case.data + junk
        return
    with pytest.raises(StateFormatError) as caught:
        parse(case.data + junk)
    last = image.sections[-1] if image.sections else None
    if isinstance(last, AttentionSection) and any(stream.values for _, stream in last.filled()):
        assert isinstance(caught.value, TrailingBytes)
        assert caught.value.offset == len(case.data)


def test_readings_that_mean_the_same_are_one_image() -> None:
    """A model without extra record writes the same bytes at 9 and 10: one image, two versions."""
    image = parse(CASES["plain"].data)
    assert image.versions == {9, 10}
    assert image.sequence_versions == {2, 3}
    assert len(image.writers) == 2


def test_the_swallowed_section_is_given_back() -> None:
    """`n_stream 1, cell_count, pos 0` behind a section without V reads as a layer of f16 rows, and is not one."""
    indexer = Attention((cells(2),), keys=((1, 2), (1, 2)), values=())
    data = context(Attention((cells(2),), keys=((1, 2), (1, 2)), values=()), indexer)
    image = parse(data)
    assert [section.n_layers for section in image.sections] == [2, 2]
    assert written(image) == data


@pytest.mark.parametrize(
    ("facts", "field"),
    [
        (ModelFacts(architecture="qwen2"), "architecture name"),
        (ModelFacts(sections=("attention", "attention")), "section"),
        (ModelFacts(sections=("recurrent",)), ""),
        (ModelFacts(sections=()), "end of the state"),
        (ModelFacts(n_layer=1), "layers"),
        (ModelFacts(has_ext=True), ""),
        (ModelFacts(has_v=(False,)), ""),
        (ModelFacts(n_ctx=2), "cells"),
        (ModelFacts(n_stream=4), "n_stream"),
        (ModelFacts(versions=frozenset({11})), ""),
        (ModelFacts(v_trans=True), "v_trans"),
        (ModelFacts(type_k=TensorType.Q8_0), "K type"),
        (ModelFacts(type_v=TensorType.F32), "V type"),
        (ModelFacts(parts=(CacheFacts((4, 5), (6, 6)),)), "K layer 1 values of a row"),
        (ModelFacts(parts=(CacheFacts((4, 4), (6, 7)),)), "V layer 1 values of a row"),
        (ModelFacts(parts=(CacheFacts((4, 4, 4), (6, 6, 6)),)), "K layers"),
        (ModelFacts(parts=(CacheFacts((4, 4)),)), ""),
        (ModelFacts(parts=(CacheFacts((4, 4), (6, 6)), CacheFacts((4,), (6,)))), "section 1"),
        (ModelFacts(parts=(CacheFacts((4, 4), (6, 6)), RecurrentFacts(2, 6, 10))), "section 1"),
    ],
)
def test_facts_that_contradict_the_bytes_are_an_error(facts: ModelFacts, field: str) -> None:
    """Each fact is compared with what the state says."""
    data = CASES["plain"].data
    with pytest.raises(StateFormatError) as caught:
        parse(data, facts=facts)
    assert field in caught.value.field


def test_facts_that_agree_change_nothing() -> None:
    """All facts of the model and context together."""
    facts = ModelFacts(
        architecture="llama",
        parts=(CacheFacts((4, 4), (6, 6)),),
        n_layer=2,
        has_ext=False,
        n_seq_max=1,
        n_ctx=3,
        n_stream=1,
        versions=frozenset({10}),
        v_trans=False,
        type_k=TensorType.F16,
        type_v=TensorType.F16,
        n_vocab=5,
    )
    assert parse(CASES["plain"].data, facts=facts).versions == {10}


def test_sequence_ids_beyond_the_context_are_an_error() -> None:
    """A context of two sequences holds no sequence 3."""
    with pytest.raises(Inconsistent, match="sequence id"):
        parse(CASES["four unified"].data, facts=ModelFacts(n_seq_max=2))
    with pytest.raises(Inconsistent, match="sequence id"):
        parse(CASES["recurrent, four"].data, facts=ModelFacts(n_seq_max=2))


def test_logits_of_another_vocabulary_are_an_error() -> None:
    """The outputs of 2025 know the size of the vocabulary."""
    assert parse(CASES["outputs"].data, facts=ModelFacts(n_vocab=5)).outputs is not None
    with pytest.raises(Inconsistent, match="logits of each output"):
        parse(CASES["outputs"].data, facts=ModelFacts(n_vocab=6))


def test_recurrent_layers_beyond_the_model_are_an_error() -> None:
    """The section counts every layer of the model."""
    with pytest.raises(Inconsistent, match="n_layer"):
        parse(CASES["recurrent"].data, facts=ModelFacts(n_layer=1))


def test_versions_that_nobody_wrote_are_an_error() -> None:
    """Facts may ask for a version that has no layout."""
    with pytest.raises(UnknownVersion, match="9"):
        parse(CASES["plain"].data, facts=ModelFacts(versions=frozenset({12})))


@pytest.mark.parametrize(
    "data",
    [session_file(CASES["plain"].data, 12), sequence_file(b"", 5), session_file(CASES["plain"].data, 8)],
    ids=["session 12", "sequence 5", "session 8"],
)
def test_a_version_word_that_nobody_wrote_is_an_error(data: bytes) -> None:
    """A fork's number is named before anything else is read."""
    with pytest.raises(UnknownVersion, match="version word"):
        parse(data)


def test_a_word_and_a_layout_that_do_not_go_together_are_an_error() -> None:
    """A version 3 file whose payload is of another layout is a fork's file, or a patched one."""
    payload = memory(Attention((cells(3),), rotation=(0, 0)))
    with pytest.raises(UnknownVersion, match=r"3 before a payload of layout v11 \(a fork's file\?\)"):
        parse(sequence_file(payload, 3))


def test_a_word_before_an_unknown_payload_is_an_error() -> None:
    """A version 3 file whose payload is of no layout at all says how far the reading came."""
    with pytest.raises(StateFormatError):
        parse(sequence_file(b"\x01\0\0\0\x03\0\0\0" + b"\x07" * 50, 3))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"ggsn" + bytes(20), "other byte order"),
        (b"ggsq" + bytes(20), "other byte order"),
        (b"GGUF" + bytes(20), "a model file"),
        (b"lmgg" + bytes(20), "a model file of an old format"),
        (b"PK\3\4" + bytes(20), "a zip archive"),
        (b"\x7fELF" + bytes(20), "a program or library"),
        (b"# A heading\n", "a text file"),
        (b'{"state": []}', "a text file"),
        ("Grüße, 世界\n".encode() * 40, "a text file"),
        (("x" * 255 + "ü").encode(), "a text file"),
    ],
)
def test_other_files_are_called_by_their_name(data: bytes, text: str) -> None:
    """A magic of something else, and text, are recognised, and it is not said to read the tokens again."""
    with pytest.raises(ForeignFile, match=text) as caught:
        parse(data)
    assert "Name a file" in str(caught.value)


@pytest.mark.parametrize("data", [b"\x80abc" * 9, b"abc\0" * 9, b"\1\2\3\4" * 9, b"text" + bytes(9)])
def test_bytes_that_are_no_text_are_not_called_text(data: bytes) -> None:
    """Control characters, zeros, and bytes that are no UTF-8 make no text."""
    with pytest.raises(StateFormatError) as caught:
        parse(data)
    assert not isinstance(caught.value, ForeignFile)


def test_no_bytes_at_all_are_told() -> None:
    """An empty file is called that; where a model keeps no memory they are its state."""
    with pytest.raises(Truncated, match="no bytes at all"):
        parse(b"")
    with pytest.raises(Truncated, match="no bytes at all"):
        parse(b"", facts=ModelFacts(sections=("attention",)))
    image = parse(b"", facts=ModelFacts(parts=()))
    assert (image.sections, image.is_empty, written(image)) == ((), True, b"")


@pytest.mark.parametrize("tokens", [(1, 2, 3), (-1, 1, 3, 5, 6, 7, 0)])
def test_a_file_that_ends_behind_its_tokens_is_cut(tokens: tuple[int, ...]) -> None:
    """Its memory is missing, unless the model is known to keep none; a file without tokens may hold nothing."""
    alone = sequence_file(b"", 4, tokens), session_file(name("bert"), 11, tokens)
    for data in alone:
        with pytest.raises(Truncated, match="section 0"):
            parse(data)
        with pytest.raises(Truncated, match="section 0"):
            parse(data, facts=ModelFacts(sections=("attention",)))
        assert parse(data, facts=ModelFacts(sections=())).sections == ()
        assert salvage(data).has_all_tokens
    assert parse(sequence_file(b"", 4, ())).is_empty


def test_another_models_name_is_told_first() -> None:
    """What stands behind the name of another architecture is not what is wrong with a state."""
    opaque = context(struct.pack("<II", 0x34565344, 1) + bytes(40), architecture="deepseek4")
    for data, at in ((CASES["hybrid"].data, 4), (opaque, 4), (CASES["session file 10"].data, 28)):
        facts = ModelFacts(architecture="gemma2", sections=("attention", "attention"))
        with pytest.raises(Inconsistent, match="gemma2") as caught:
            parse(data, facts=facts)
        assert (caught.value.field, caught.value.offset) == ("architecture name", at)


@pytest.mark.parametrize(
    ("patch", "kind", "field"),
    [
        ((0, 0xFFFFFFFF), LimitExceeded, "architecture name length"),
        ((0, 0), BadField, "architecture name length"),
        ((9, 0), BadField, "n_stream"),
        ((9, 257), LimitExceeded, "n_stream"),
        ((13, 0xFFFFFFFF), LimitExceeded, "cell count"),
        ((13, 1 << 20), Truncated, "cell count"),
        ((17, 0xFFFFFFFF), BadField, "cell pos"),
        ((21, 0), BadField, "n_seq_id"),
        ((21, 257), BadField, "n_seq_id"),
        ((25, 0xFFFFFFFF), BadField, "cell seq_id"),
        ((53, 2), BadField, "v_trans"),
        ((57, 513), LimitExceeded, "n_layer"),
        ((61, 9), BadField, "type"),
        ((65, 7), Inconsistent, "row bytes"),
        ((65, 0), Inconsistent, "row bytes"),
        ((69, 1), LimitExceeded, "row bytes"),
    ],
)
def test_each_way_to_be_wrong_has_its_error(patch: tuple[int, int], kind: type[StateFormatError], field: str) -> None:
    """One damaged word of a plain state: the class, the field and the offset say which."""
    offset, word = patch
    data = bytearray(CASES["plain"].data)
    struct.pack_into("<I", data, offset, word)
    with pytest.raises(kind) as caught:
        parse(data)
    assert field in caught.value.field
    assert caught.value.offset <= offset + 4


def test_a_name_is_made_of_letters() -> None:
    """Bytes that no architecture's name has are refused."""
    with pytest.raises(BadField, match="architecture name"):
        parse(context(architecture="lla\nma"))


def test_layers_of_nothing_are_an_error() -> None:
    """Cells without a layer in any section are no state."""
    with pytest.raises(Inconsistent, match="layers of all sections"):
        parse(context(Attention((cells(2),), keys=(), values=())))


def test_a_position_is_held_once() -> None:
    """The same sequence at the same position twice is legal only with the extra record."""
    with pytest.raises(Inconsistent, match="sequence 0 at position 1 twice"):
        parse(context(Attention(((Cell(1), Cell(0), Cell(1)),))))


def test_a_sequence_has_one_recurrent_cell() -> None:
    """Two cells of a recurrent memory for one sequence are no state."""
    with pytest.raises(Inconsistent, match="sequence 0 in two cells"):
        parse(context(Recurrent((Cell(1), Cell(2)))))
    with pytest.raises(Inconsistent, match="one recurrent cell for one sequence"):
        parse(sequence(Recurrent((Cell(1, ()), Cell(2, ())))), facts=ModelFacts(sections=("recurrent",)))


def test_cells_out_of_order_are_fine() -> None:
    """Order in the cache is not order in the text."""
    held = (Cell(2), Cell(0), Cell(1))
    assert parse(context(Attention((held,)))).sequences()[0] == (3, 0, 2)


@pytest.mark.parametrize(
    "data",
    [context(Attention((cells(2),), keys=_keys, values=()))[:-4] for _keys in (((1, 8),), ((1, 8), (1, 8)))],
)
def test_a_cut_layer_is_truncated(data: bytes) -> None:
    """The bytes of a row that are missing are asked for."""
    with pytest.raises(Truncated):
        parse(data)


def test_streams_have_one_shape() -> None:
    """All streams of a section have the same layers."""
    one = Attention((cells(2),)).pack()[4:]
    two = Attention((cells(2, ids=(1,)),), keys=((1, 8), (1, 16))).pack()[4:]
    with pytest.raises(Inconsistent, match="stream 1 shape"):
        parse(name("llama") + struct.pack("<I", 2) + one + two)


@pytest.mark.parametrize(
    ("word", "kind", "field"),
    [(3, BadField, "rot_k"), (96, BadField, "rot_k"), (32, BadField, "rot_k")],
)
def test_rotation_is_a_block_size(word: int, kind: type[StateFormatError], field: str) -> None:
    """A rotation block is none or a power of two from 64 on."""
    data = context(Attention((cells(3),), keys=_DEEP, values=_DEEP, rotation=(word, 0)))
    with pytest.raises(kind) as caught:
        parse(data, facts=ModelFacts(versions=frozenset({11})))
    assert field in caught.value.field


_DEEP = ((1, 8), (1, 8))


@pytest.mark.parametrize(
    ("values", "patch", "kind"),
    [
        (((8, 2),), (), Inconsistent),
        (((1, 0),), (), BadField),
        (((1, 3),), (4, 3), Inconsistent),
        (((1, 3),), (0, 99), BadField),
    ],
    ids=["quantized", "no values", "element size", "type"],
)
def test_transposed_values_are_plain_and_of_their_size(
    values: tuple[tuple[int, int], ...], patch: tuple[int, ...], kind: type[StateFormatError]
) -> None:
    """Transposed V holds single values of a plain type."""
    section = Attention((cells(1),), keys=((1, 8),), values=values, v_trans=1)
    data = bytearray(context(section))
    if patch:
        start = len(context(Attention((cells(1),), keys=((1, 8),), values=(), v_trans=1)))
        struct.pack_into("<I", data, start + patch[0], patch[1])
    with pytest.raises(kind):
        parse(data, facts=ModelFacts(sections=("attention",), has_v=(True,)))


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (context(Recurrent(LATE).pack()[:16] + struct.pack("<I", 1) + Recurrent(LATE).pack()[20:]), "s_trans"),
        (context(Recurrent(LATE, n_layer=0)), "n_layer"),
    ],
)
def test_a_recurrent_section_is_plain_and_has_layers(data: bytes, field: str) -> None:
    """No library writes S transposed, or a model without layers."""
    with pytest.raises(BadField) as caught:
        parse(data, facts=ModelFacts(sections=("recurrent",)))
    assert field in caught.value.field


def test_recurrent_layers_are_alike() -> None:
    """Layers whose rows differ in size are not one memory."""
    start = struct.pack("<I", 1) + LATE[0].pack() + struct.pack("<II", 0, 2)
    uneven = start + rows(0, 24, 1, 0) + rows(0, 28, 1, 1) + rows(0, 40, 1, 2) + rows(0, 40, 1, 3)
    with pytest.raises(StateFormatError):
        parse(context(uneven), facts=ModelFacts(sections=("recurrent",)))


def test_too_many_ways_to_read_are_given_up() -> None:
    """The number of alternatives is bounded."""
    with pytest.raises(LimitExceeded, match="too many ways to read"):
        parse(CASES["histories"].data, limits=Limits(n_steps=3))


def test_partial_is_seen_where_facts_name_the_sections() -> None:
    """The window's half alone is called partial when the model is known to have both."""
    data = sequence(Attention((cells(3, first=3),)))
    assert parse(data).content is Content.FULL
    assert parse(data, facts=ModelFacts(sections=("attention", "attention"))).content is Content.PARTIAL
    whole = sequence(Attention((cells(6),)), Attention((cells(3, first=3),)))
    assert parse(whole, facts=ModelFacts(sections=("attention", "attention"))).content is Content.FULL


def test_an_old_single_late_cell_is_a_recurrent_state() -> None:
    """Unstreamed attention with one late cell has the bytes of a recurrent state; at position 0 nobody can tell."""
    late = sequence(Recurrent((Cell(4, ()),)), seq_id=None)
    assert [section.kind.value for section in parse(late).sections] == ["recurrent"]
    first = sequence(Recurrent((Cell(0, ()),)), seq_id=None)
    with pytest.raises(Ambiguous, match=r"attention.*recurrent"):
        parse(first)
    for kind in ("attention", "recurrent"):
        assert parse(first, facts=ModelFacts(sections=(kind,))).sections[0].kind.value == kind


def test_outputs_are_arrays_on_the_buffer() -> None:
    """Output ids, logits and embeddings of 2025."""
    held = parse(CASES["outputs, embeddings, ext"].data).outputs
    assert held is not None
    assert held.ids.tolist() == [0, 2]
    assert held.logits.tolist() == [[0.0, 0.25, 0.5, 0.75], [1.0, 1.25, 1.5, 1.75]]
    assert held.embeddings.shape == (6,)
    assert not held.logits.flags.writeable


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (struct.pack("<I", 1 << 21), LimitExceeded),
        (struct.pack("<Iii", 2, 1, 1), BadField),
        (struct.pack("<Ii", 1, -1), BadField),
        (struct.pack("<IiQ", 1, 0, 1 << 61), Truncated),
        (struct.pack("<IiiQ3fQ", 2, 0, 1, 3, 0, 0, 0, 0), Inconsistent),
        (struct.pack("<IQ3fQ", 0, 3, 0, 0, 0, 0), Inconsistent),
    ],
    ids=["too many", "twice", "negative", "logits overflow", "uneven logits", "logits of nothing"],
)
def test_outputs_that_contradict_themselves_are_an_error(head: bytes, kind: type[StateFormatError]) -> None:
    """Counts of the outputs of 2025 are checked like all others."""
    with pytest.raises(kind):
        read_outputs(Cursor(view(head)), DEFAULT_LIMITS)
    with pytest.raises(StateFormatError):
        parse(name("llama") + head + Attention((cells(3),)).pack())


def packed(*words: int, tail: bytes = b"") -> bytes:
    """A sequence file with a packed token record; the tail fills whole words."""
    tail += bytes(-len(tail) % 4)
    array = struct.pack(f"<{len(words)}i", *words) + tail
    count = len(array) // 4
    return b"qsgg" + struct.pack("<II", 4, count) + array + memory(Attention((cells(3),), rotation=(0, 0)))


def test_packed_tokens_are_unpacked() -> None:
    """The server's record gives text tokens and media entries; the array itself stays as it was."""
    media = struct.pack("<I", 5) + b"media"
    data = packed(-1, 1, 4, 8, -1, -1, 9, 1, 1, tail=media)
    tokens = parse(data).tokens
    assert tokens is not None
    assert tokens.packed_version == 1
    assert tokens.text.tolist() == [8, -1, -1, 9]
    assert [(entry.start, bytes(entry.data)) for entry in tokens.media] == [(1, b"media")]
    assert written(parse(data)) == data


def test_plain_tokens_are_plain() -> None:
    """A token array that does not begin with the null token is just that."""
    tokens = parse(CASES["session file 10"].data).tokens
    assert tokens is not None
    assert (tokens.packed_version, tokens.text.tolist(), tokens.media) == (None, [1, 2, 3], ())


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (packed(-1, 2, 0, 0), UnknownVersion),
        (packed(-1, 1, 900, 0), Truncated),
        (packed(-1, 1, 1, 7), Truncated),
        (packed(-1, 1, 1, 7, 1, 1), Inconsistent),
        (packed(-1, 1, 2, 7, 8, 2, 1, 1, 0, 0), Inconsistent),
        (packed(-1, 1, 1, 7, 1, 0, 99), Truncated),
        (packed(-1, 1, 1, 7, 0, 0, 0), Inconsistent),
        (packed(-1, 1, 1, 7, 1, 0, tail=struct.pack("<I", 3) + b"abcx"), Inconsistent),
        (packed(-1, 1), Truncated),
    ],
    ids=["version", "count", "no media count", "place", "order", "media size", "words behind", "padding", "short"],
)
def test_damaged_packed_tokens_are_an_error(data: bytes, kind: type[StateFormatError]) -> None:
    """Every count of the packed record is checked inside the record."""
    with pytest.raises(kind):
        parse(data)


@pytest.mark.parametrize("seq_id", [-1, 256])
def test_a_source_id_that_cannot_be_is_an_error(seq_id: int) -> None:
    """The id in the prefix is one that a context can have."""
    with pytest.raises(BadField, match="source sequence id"):
        parse(sequence(seq_id=seq_id))


@pytest.mark.parametrize("n_bytes", [0, 1, 3, 4, 7])
def test_tiny_buffers_are_an_error(n_bytes: int) -> None:
    """Too few bytes for anything."""
    with pytest.raises(StateFormatError):
        parse(sequence()[:n_bytes])


def test_a_state_is_described_in_one_line() -> None:
    """The line tells layouts, sections and what is missing."""
    assert describe(parse(CASES["indexer"].data)) == (
        "context v10/v9: attention(ext 0, 2 layers, no V) + attention(ext 0, 1 layers, no V)"
    )
    assert describe(parse(CASES["encoder"].data)).endswith("no memory")
    assert "on device" in describe(parse(CASES["sequence on device"].data))
    assert "recurrent(2 layers)" in describe(parse(CASES["recurrent"].data))
    assert "opaque" in describe(parse(CASES["opaque"].data))
    assert Form.SESSION_FILE.value in describe(parse(CASES["session file 9"].data))
