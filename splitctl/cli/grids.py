"""Tables that fit a terminal: a narrow one gets fewer columns, and no number is ever cut."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from rich.box import HEAVY_HEAD, SIMPLE_HEAD, Box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

#: Of a text that may take several lines, what one has at least [columns].
_LEAST_TEXT = 20
#: Where no terminal says how wide it is, a text that may take several lines has so many [columns].
_WIDE_TEXT = 100


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of texts.

    Attributes:
        title: above it; empty: none.
        columns: their names.
        rows: a text for each column.
        n_left: the first so many columns are flush left.
        spare: columns that a narrow terminal does without; the first of them is the first to go.
        folded: the column whose texts may take several lines; empty: none.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    n_left: int = 1
    spare: tuple[str, ...] = ()
    folded: str = ""


def stdout_width() -> int | None:
    """Tell how many columns the terminal has that stdout is; None where it is none: there is room for everything."""
    return Console(file=sys.stdout).width if sys.stdout.isatty() else None


def table_of(grid: Grid, width: int | None) -> Table:
    """Lay a grid out for a terminal of so many columns; None: for any.

    First it goes without a frame, then without columns that say nothing, then without those that can be spared. What
    still does not fit is wider than the terminal. Print it with `soft_wrap`, which cuts nothing.
    """
    widths = {name: max(map(cell_len, (name, *cells))) for name, *cells in zip(grid.columns, *grid.rows, strict=True)}
    if grid.folded:
        widths[grid.folded] = min(widths[grid.folded], _LEAST_TEXT if width is not None else _WIDE_TEXT)
    shown, is_framed = list(grid.columns), True
    if width is not None and _needed(widths, shown, is_framed=True) > width:
        is_framed = False
        if _needed(widths, shown, is_framed=False) > width:
            shown = [name for name in shown if not _is_empty(grid, name)]
        for name in grid.spare:
            if name in shown and _needed(widths, shown, is_framed=False) > width:
                shown.remove(name)
    needed = _needed(widths, shown, is_framed=is_framed)
    box: Box = HEAVY_HEAD if is_framed else SIMPLE_HEAD
    table = Table(
        title=escape(grid.title) or None, title_justify="left", box=box, show_edge=is_framed, pad_edge=is_framed,
        collapse_padding=not is_framed,
    )  # fmt: skip
    if grid.folded not in shown or width is None or width < needed:
        table.width = needed
    for number, name in enumerate(grid.columns):
        if name in shown:
            justify = "left" if number < grid.n_left else "right"
            table.add_column(escape(name), justify=justify, no_wrap=name != grid.folded)  # type: ignore[arg-type]
    places = [number for number, name in enumerate(grid.columns) if name in shown]
    for row in grid.rows:
        table.add_row(*(escape(row[place]) for place in places))
    return table


def _needed(widths: dict[str, int], shown: list[str], *, is_framed: bool) -> int:
    """Say how wide a table of these columns is: a frame and a space around each, or two spaces between them."""
    n = sum(widths[name] for name in shown)
    return n + (3 * len(shown) + 1 if is_framed else 2 * (len(shown) - 1))


def _is_empty(grid: Grid, name: str) -> bool:
    """Tell whether a column says nothing in any row."""
    place = grid.columns.index(name)
    return all(row[place] in {"", "-"} for row in grid.rows)
