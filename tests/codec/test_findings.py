from __future__ import annotations

import pytest

from statecodec import FindingCode, findings, parse
from tests.codec.cases import CASES
from tests.codec.goldens import MANIFEST, golden
from tests.codec.synthetic import (
    Attention,
    Cell,
    Recurrent,
    cells,
    context,
    memory,
    sequence,
    sequence_file,
    session_file,
)


def codes(data: bytes) -> list[tuple[FindingCode, int | None]]:
    return [(finding.code, finding.seq_id) for finding in findings(parse(data))]


@pytest.mark.parametrize("name", [n for n in MANIFEST if "q8" not in n and "partial" not in n])
def test_real_states_give_nothing_to_say(name: str) -> None:
    """States as builds write them after a prompt have no gaps, and their parts agree."""
    assert codes(golden(name)) == []


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (context(Attention(((Cell(0), Cell(3), Cell(5)),))), [(FindingCode.GAP, 0)]),
        (context(Attention((cells(3, first=2),))), [(FindingCode.STARTS_LATE, 0)]),
        (context(Attention(((Cell(1), Cell(0)),))), [(FindingCode.OUT_OF_ORDER, 0)]),
        (CASES["media share a position"].data, [(FindingCode.MEDIA, 0)]),
        (
            context(Attention((cells(6),)), Attention((cells(3),))),
            [
                (FindingCode.WINDOW_NOT_NEWEST, 0),
                (FindingCode.SECTIONS_DISAGREE, 0),
            ],
        ),
        (CASES["window"].data, []),
        (context(Attention((cells(5),)), Recurrent((Cell(3),))), [(FindingCode.SECTIONS_DISAGREE, 0)]),
        (CASES["quantized"].data, [(FindingCode.ROTATION_UNKNOWN, None)]),
        (CASES["encoder"].data, []),
        (CASES["opaque"].data, []),
        (CASES["no cells"].data, []),
        (sequence(Attention(((Cell(0), Cell(2)),)), seq_id=4), [(FindingCode.GAP, 4)]),
        (CASES["sequence without ids"].data, []),
    ],
)
def test_what_is_worth_knowing_is_said(data: bytes, expected: list[tuple[FindingCode, int | None]]) -> None:
    """Each kind of finding, about the sequence that it belongs to."""
    assert codes(data) == expected


@pytest.mark.parametrize(("n_tokens", "agrees"), [(2, False), (3, True), (4, True), (5, False)])
def test_tokens_and_rows_of_a_file_are_compared(n_tokens: int, agrees: bool) -> None:
    """A file has as many tokens as rows, or one more that is to be read again."""
    data = sequence_file(memory(Attention((cells(3),))), 3, tuple(range(n_tokens)))
    assert codes(data) == ([] if agrees else [(FindingCode.TOKENS_DISAGREE, 0)])


def test_tokens_that_nothing_is_held_of_are_told() -> None:
    """A file lists tokens and its memory has no cell; without tokens, or without a memory, that is as it should be."""
    empty = Attention(((),))
    told = [(FindingCode.TOKENS_DISAGREE, None)]
    assert codes(sequence_file(memory(empty), 3)) == codes(session_file(context(empty), 11)) == told
    assert codes(sequence_file(memory(empty), 3, ())) == codes(session_file(context(empty), 11, ())) == []
    assert codes(sequence_file(b"", 3, ())) == []


def test_findings_are_sentences() -> None:
    """The text says what it is about."""
    (found,) = findings(parse(CASES["quantized"].data))
    assert "rotated" in found.text
