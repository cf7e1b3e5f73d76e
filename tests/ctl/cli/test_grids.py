"""Tables on terminals of any width."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from splitctl.cli.bench_text import grids
from splitctl.cli.grids import Grid, table_of
from splitctl.planning.profile import LeftOut, Profile
from tests.ctl.planning.profiles import MEASURED

_NUMBERS = ("1,234,567.8", "99.1 ms", "-")
_GRID = Grid(
    "numbers",
    ("what", "long [s]", "empty", "more [ms]", "why"),
    tuple((f"row {number}", one, "", one[::-1], "a reason " * 9) for number, one in enumerate(_NUMBERS)),
    spare=("more [ms]",),
    folded="why",
)


def _shown(grid: Grid, width: int | None) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width or 80, soft_wrap=True).print(table_of(grid, width))
    return file.getvalue().splitlines()


@given(st.integers(10, 200))
def test_no_number_is_cut(width: int) -> None:
    """At any width what is shown is shown whole: each row has all of its numbers, or one column fewer for all."""
    lines = _shown(_GRID, width)
    for number, one in enumerate(_NUMBERS):
        (line,) = [line for line in lines if f"row {number}" in line]
        assert one in line
        assert (one[::-1] in line) is ("more [ms]" in "".join(lines)) or one == "-"
    assert "…" not in "".join(lines)


@pytest.mark.parametrize("width", [45, 60, 80, 100, 160])
def test_the_tables_of_a_bench_fit(width: int) -> None:
    """From 45 columns on no line is longer than the terminal, and modes, tokens and rates are there."""
    for grid in grids(Profile(MEASURED.modes, MEASURED.switches, (LeftOut("row", "it splits no buffer " * 8),))):
        lines = _shown(grid, width)
        assert max(map(len, lines)) <= width
        assert all(one in "".join(lines) for one in {"tokens", "tokens/s", "pause"} & {*grid.columns})


def test_what_says_nothing_goes_first() -> None:
    """Without room a table loses its frame, then its empty columns, and then those that can be spared."""
    plain, framed = _shown(_GRID, 58), _shown(_GRID, None)
    assert framed[1].startswith("┏")
    assert "empty" in framed[2]
    assert "more [ms]" in plain[1]
    assert "empty" not in plain[1]
    assert "more [ms]" not in _shown(_GRID, 45)[1]
