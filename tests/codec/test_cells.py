from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statecodec.cells import CellRule, min_cell_bytes, pack_cells, read_cells
from statecodec.cursor import Cursor, view
from statecodec.errors import BadField, LimitExceeded, StateFormatError, Truncated
from statecodec.limits import DEFAULT_LIMITS, Limits
from statecodec.views import Cells
from tests.codec.synthetic import Cell


def read(held: list[Cell], *, ext_bytes: int = 0, limits: Limits = DEFAULT_LIMITS) -> Cells:
    data = b"".join(cell.pack() for cell in held)
    cursor = Cursor(view(data))
    found = read_cells(cursor, len(held), CellRule(ext_bytes, 0, 256), limits, "section 0")
    assert cursor.remaining == 0
    return found


_ext_words = st.shared(st.sampled_from([0, 2, 3]), key="ext")
_cell = _ext_words.flatmap(
    lambda words: st.builds(
        Cell,
        st.integers(0, 2**31 - 1),
        st.sets(st.integers(0, 255), max_size=5).map(lambda ids: tuple(sorted(ids))),
        st.tuples(*([st.integers(0, 2**31 - 1)] * words)),
    )
)


@given(st.lists(_cell, max_size=40), _ext_words)
def test_cells_of_any_mixture_come_back(held: list[Cell], words: int) -> None:
    """Positions, ids and extra records are read as written, and packed to the same bytes."""
    found = read(held, ext_bytes=4 * words)
    assert found.pos.tolist() == [cell.pos for cell in held]
    assert found.n_seq_id.tolist() == [len(cell.ids) for cell in held]
    assert found.seq_ids.tolist() == [seq_id for cell in held for seq_id in cell.ids]
    assert found.ext_bytes == 4 * words
    if found.ext is not None:
        assert [tuple(record) for record in found.ext.tolist()] == [cell.ext for cell in held]
    assert pack_cells(found) == b"".join(cell.pack() for cell in held)


def test_equal_cells_are_not_copied() -> None:
    """A run over all cells is a view on the buffer."""
    data = b"".join(Cell(i, (0,)).pack() for i in range(1000))
    found = read_cells(Cursor(view(data)), 1000, CellRule(0, 1, 256), DEFAULT_LIMITS, "x")
    for part in (found.pos, found.n_seq_id, found.seq_ids):
        assert np.shares_memory(part, np.frombuffer(data, np.uint8))
        assert not part.flags.writeable


def test_long_runs_after_a_change_are_whole() -> None:
    """The window that looks for the next change grows until it finds it."""
    held = [Cell(0, (0, 1)), *(Cell(i, (0,)) for i in range(1, 3000)), Cell(3000, (0, 1))]
    found = read(held)
    assert len(found) == 3001
    assert not found.pos.flags.writeable


def test_runs_are_bounded() -> None:
    """Cells that differ one by one cannot make the walk long."""
    held = [Cell(i, (0,) if i % 2 else (0, 1)) for i in range(20)]
    assert len(read(held)) == 20
    with pytest.raises(LimitExceeded, match="at most 5"):
        read(held, limits=Limits(n_cell_runs=5))


@pytest.mark.parametrize(
    ("held", "ext_bytes", "offset", "field"),
    [
        # The library has room for 256 sequences, whatever else a sound-looking cell says.
        ([Cell(0, (255,)), Cell(1, (0, 256))], 0, 20, "cell seq_id"),
        ([Cell(0), Cell(-5)], 0, 12, "pos"),
        ([Cell(0), Cell(1, (0, 0))], 0, 20, "seq_id"),
        ([Cell(0), Cell(1, (2, 1))], 0, 20, "seq_id"),
        ([Cell(0), Cell(1, (-1,))], 0, 20, "seq_id"),
        ([Cell(0, (0,), (0, 0, -2))], 12, 16, "token"),
        ([Cell(0, (0,), (-1, 0, 0))], 12, 8, "x"),
        ([Cell(0, (0,), (0, -1))], 8, 12, "y"),
    ],
)
def test_a_cell_that_no_library_writes_is_an_error(held: list[Cell], ext_bytes: int, offset: int, field: str) -> None:
    """The message names the field and the very byte."""
    with pytest.raises(BadField) as caught:
        read(held, ext_bytes=ext_bytes)
    assert (caught.value.offset, field in caught.value.field) == (offset, True)


def test_a_rule_bounds_the_ids_of_a_cell() -> None:
    """Too many or too few sequences are refused before the cell is taken."""
    data = Cell(0, (0, 1)).pack()
    for rule in (CellRule(0, 1, 1), CellRule(0, 3, 256)):
        with pytest.raises(BadField, match="n_seq_id"):
            read_cells(Cursor(view(data)), 1, rule, DEFAULT_LIMITS, "x")


def test_cells_that_end_early_are_truncated() -> None:
    """A count that was possible by size is still checked against the cells themselves."""
    data = b"".join(Cell(i, (0, 1)).pack() for i in range(3))
    for end in range(len(data)):
        with pytest.raises(Truncated):
            read_cells(Cursor(view(data[:end])), 3, CellRule(0, 1, 256), DEFAULT_LIMITS, "x")


@given(st.binary(max_size=400), st.integers(0, 40), st.sampled_from([0, 8, 12]))
def test_any_bytes_are_cells_or_an_error(data: bytes, count: int, ext_bytes: int) -> None:
    """Whatever is read packs to the same bytes."""
    cursor = Cursor(view(data))
    try:
        found = read_cells(cursor, count, CellRule(ext_bytes, 0, 256), DEFAULT_LIMITS, "x")
    except StateFormatError:
        return
    assert pack_cells(found) == data[: cursor.offset]


def test_the_smallest_cell_is_known_before_any_is_read() -> None:
    """Position, count, extra record and the fewest ids."""
    assert min_cell_bytes(CellRule(12, 1, 9)) == 24
    assert min_cell_bytes(CellRule(0, 0, 0)) == struct.calcsize("<iI")
