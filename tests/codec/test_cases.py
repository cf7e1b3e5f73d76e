"""Reports of real people about states, each with its right answer; the names are those of the list of cases."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest

from statecodec import (
    AttentionSection,
    BadField,
    Content,
    FindingCode,
    Inconsistent,
    LimitExceeded,
    ModelFacts,
    NotRepresentable,
    Rotation,
    StateFormatError,
    StateImage,
    TensorType,
    TrailingBytes,
    Truncated,
    UnknownVersion,
    emit,
    findings,
    parse,
    rotated,
    transcode,
)
from statecodec.transcode import Fit, VForm, v_fit, v_form
from tests.codec.cases import CASES
from tests.codec.goldens import golden
from tests.codec.synthetic import Attention, Cell, cells, context, memory, name, outputs, sequence, sequence_file


def test_s1_rows_and_tokens_of_a_file() -> None:
    """Three tokens with three rows: the last row goes before token c is read again at position 2."""
    image = parse(sequence_file(memory(Attention((cells(3),))), 3, (11, 12, 13)))
    assert not [f for f in findings(image) if f.code is FindingCode.TOKENS_DISAGREE]
    replayable = transcode.keep_first(image, 2)
    assert replayable.sequences()[0].pos_max == 1


def test_s2_one_version_word_two_layouts() -> None:
    """Both blobs are of version 9; what they hold tells them apart, and damage is named."""
    with_outputs = name("llama") + outputs((0,), 5) + memory(Attention((cells(3),)))
    without = context(Attention((cells(3),)))
    assert {layout.name for layout in parse(with_outputs).layouts} == {"v9-outputs"}
    assert "v9" in {layout.name for layout in parse(without).layouts}
    with pytest.raises(Truncated, match="section 0 stream 0 layer 1 V"):
        parse(with_outputs[:-1])
    with pytest.raises(TrailingBytes, match="1 bytes more"):
        parse(with_outputs + b"\0")


def test_s3_snapshots_of_mrope_models_grow_by_4_bytes_a_cell() -> None:
    """Version 2 to 3: one word for plain models, 40 bytes for 10 cells with extra record, and back."""
    plain = sequence_file(memory(Attention((cells(10),))), 2)
    made = b"".join(emit(transcode.to_version(parse(plain), 10)))
    assert (made[:4], made[8:]) == (plain[:4], plain[8:])
    mrope = sequence_file(memory(Attention((cells(10, ext_words=2),))), 2, tuple(range(10)))
    grown = transcode.to_version(parse(mrope), 10)
    assert len(b"".join(emit(grown))) == len(mrope) + 40
    assert b"".join(emit(transcode.to_version(grown, 9))) == mrope
    assert _tokens_of_cells(grown) == list(range(10))
    assert not grown.changes[-1].warnings
    # Without a token for each position it is not known.
    short = sequence_file(memory(Attention((cells(10, ext_words=2),))), 2, tuple(range(9)))
    unknown = transcode.to_version(parse(short), 10)
    assert _tokens_of_cells(unknown) == [-1] * 10
    assert "unknown" in unknown.changes[-1].warnings[0]


def _tokens_of_cells(image: StateImage) -> list[int]:
    (cache,) = image.sections
    assert isinstance(cache, AttentionSection)
    ((_, stream),) = cache.filled()
    assert stream.cells.ext is not None
    found: list[int] = stream.cells.ext["token"].tolist()
    return found


@pytest.mark.parametrize(
    ("tokens", "packed", "text"), [((1, 2, 3), None, [1, 2, 3]), ((-1, 1, 3, 5, 6, 7, 0), 1, [5, 6, 7])]
)
def test_s4_a_token_list_that_is_none(tokens: tuple[int, ...], packed: int | None, text: list[int]) -> None:
    """A list that begins with the null token is the server's record; its text tokens are found inside."""
    found = parse(sequence_file(memory(Attention((cells(3),))), 3, tokens)).tokens
    assert found is not None
    assert (found.packed_version, found.text.tolist()) == (packed, text)


def test_s4_a_packed_list_may_be_longer_than_the_context() -> None:
    """Media entries are told beside the text, and make the list longer than the context has cells."""
    words = (-1, 1, 3, 5, -1, 7, 1, 1, 400, *range(100))
    found = parse(sequence_file(memory(Attention((cells(3),))), 3, words), facts=ModelFacts(n_ctx=3)).tokens
    assert found is not None
    assert found.text.tolist() == [5, -1, 7]
    assert [(one.start, len(one.data)) for one in found.media] == [(1, 400)]


def test_s5_files_of_forks() -> None:
    """A known number before another payload, an unknown number, and the other byte order are each named."""
    with pytest.raises(UnknownVersion, match="fork"):
        parse(sequence_file(memory(Attention((cells(3),), rotation=(0, 0))), 3))
    with pytest.raises(UnknownVersion, match="found 5"):
        parse(sequence_file(memory(Attention((cells(3),))), 5))
    # A payload that no layout has is told where it stops making sense.
    with pytest.raises(StateFormatError):
        parse(sequence_file(b"\7" * 64, 3))
    with pytest.raises(UnknownVersion, match="byte order"):
        parse(b"ggsq" + sequence_file(b"", 3)[4:])


def test_s6_a_corrupt_cell_count() -> None:
    """2^32 - 1 cells in 200 bytes are refused at the count, in less than a megabyte."""
    data = bytearray(sequence(Attention((cells(3),)))[:200])
    struct.pack_into("<I", data, 12, 0xFFFFFFFF)
    tracemalloc.start()
    with pytest.raises(LimitExceeded, match="cell count"):
        parse(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("data", [b"", b"\xd8\x3c\x14", b"\xd8\x3c\x14\xaf", b"\xd8\x3c\x14\xae" + bytes(4)])
def test_s7_what_made_the_library_throw(data: bytes) -> None:
    """Blobs of 0, 3, 4 and 8 bytes and a wrong magic never reach the library."""
    with pytest.raises(StateFormatError):
        parse(data)


def test_s10_half_a_state_is_not_moved() -> None:
    """A partial state, seen as one by its model, is refused by every change."""
    facts = ModelFacts(sections=("attention", "attention"))
    image = parse(golden("x11549-window-partial"), facts=facts)
    assert image.content is Content.PARTIAL
    with pytest.raises(NotRepresentable, match="partial"):
        transcode.to_streams(image, 4)


def test_s11_the_extra_record_is_never_read_as_ids() -> None:
    """Told the wrong choice, the reader fails; it never returns nonsense cells."""
    for words in (0, 2, 3):
        data = context(Attention((cells(4, first=5, ext_words=words),)))
        with pytest.raises(StateFormatError):
            parse(data, facts=ModelFacts(has_ext=not words))
    assert parse(CASES["media share a position"].data).sequences()[0].n_cells == 3
    with pytest.raises(StateFormatError, match="twice"):
        parse(context(Attention(((Cell(0), Cell(1), Cell(1)),))))


def test_s12_quantized_rows_are_silently_rotated() -> None:
    """Without a word about it the rotation is unknown, and no conversion guesses."""
    image = parse(golden("l0336-dense-q8"))
    assert [finding.code for finding in findings(image)] == [FindingCode.ROTATION_UNKNOWN]
    with pytest.raises(NotRepresentable, match="rotation"):
        transcode.to_types(image, type_k=TensorType.F16)
    with pytest.raises(NotRepresentable, match="rotation"):
        transcode.to_types(parse(golden("l0336-dense")), type_k=TensorType.Q8_0)
    transcode.to_types(parse(golden("l0336-dense")), type_k=TensorType.Q8_0, rotation=Rotation(64, 0))
    q, k = np.random.default_rng(12).standard_normal((2, 1, 64), dtype=np.float32)
    assert np.abs(rotated(rotated(k, 64), 64) - k).max() < 1e-6
    product = float(q[0] @ k[0])
    assert float(rotated(q, 64)[0] @ rotated(k, 64)[0]) == pytest.approx(product, abs=1e-4)
    assert float(q[0] @ rotated(k, 64)[0]) != pytest.approx(product, abs=1e-1)


def test_s13_three_forms_of_v() -> None:
    """Three are the same, two convertible, four refused; the header of transposed V is 4 + 4 + 4 bytes."""
    table = [v_fit(source, target) for source in VForm for target in VForm]
    assert [table.count(fit) for fit in (Fit.SAME, Fit.CONVERTIBLE, Fit.REFUSED)] == [3, 2, 4]
    forms = {"plain": VForm.PLAIN, "transposed": VForm.TRANSPOSED, "no v": VForm.ABSENT, "encoder": None}
    assert {case: v_form(parse(CASES[case].data)) for case in forms} == forms
    one = Attention((cells(3),), keys=((1, 8),), values=((1, 4),), v_trans=1)
    without = Attention((cells(3),), keys=((1, 8),), values=(), v_trans=1)
    assert len(context(one)) - len(context(without)) == 12 + 24


def test_s17_a_row_size_is_no_type() -> None:
    """q4_0 and iq4_nl rows are of one size; the type word tells, and must fit the size."""
    same = [context(Attention((cells(1),), keys=((kind, 36),), values=())) for kind in (2, 20)]
    facts = ModelFacts(type_k=TensorType.Q4_0)
    assert parse(same[0], facts=facts).sections
    with pytest.raises(StateFormatError, match="IQ4_NL"):
        parse(same[1], facts=facts)
    told = ModelFacts(has_v=(False,))
    with pytest.raises(BadField, match="type"):
        parse(context(Attention((cells(1),), keys=((9, 36),), values=())), facts=told)
    with pytest.raises(Inconsistent, match="multiple of 34"):
        parse(context(Attention((cells(1),), keys=((8, 36),), values=())), facts=told)


def test_s28_media_are_seen_in_the_cells() -> None:
    """Whether a chat holds media is decided by its cells, not by the model."""
    assert [f.code for f in findings(parse(CASES["media share a position"].data))] == [FindingCode.MEDIA]
    assert not findings(parse(CASES["ext 12"].data))
