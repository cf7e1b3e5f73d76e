"""A profile as tables, Markdown and CSV."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator
from dataclasses import fields

from rich.console import Console

from splitctl.cli.grids import Grid, stdout_width, table_of
from splitctl.outcome import StageTimes
from splitctl.planning.profile import MeasuredMode, Profile, Spread

_STAGES = tuple(one.name for one in fields(StageTimes))
#: Stages that take no time worth a column: the boundary, and the check, which runs beside the streams.
_SHOWN_STAGES = _STAGES[2:]

_CSV = (
    "kind", "mode", "n_ubatch", "n_tokens", "n_seq", "depth", "before", "after", "way", "first", "n", "median_s",
    "low_s", "high_s", "tokens_s", "total_s", "more_ms", *(f"{stage}_ms" for stage in _STAGES), "n_others",
)  # fmt: skip


def grids(profile: Profile) -> tuple[Grid, ...]:
    """Lay a profile out: prompts, generations, what serving adds, switches, and what is missing."""
    found = [
        Grid(
            "prompts",
            ("mode", "-ub", "tokens", "depth", "time", "from - to", "tokens/s"),
            tuple(
                (*_of(mode), f"{one.n_tokens:,}", f"{one.depth:,}", *_measured(one.n_tokens, one.seconds))
                for mode in profile.modes
                for one in mode.reads
            ),
            spare=("from - to", "-ub", "time"),
        ),
        Grid(
            "generation",
            ("mode", "-ub", "sequences", "depth", "a step", "from - to", "tokens/s"),
            tuple(
                (*_of(mode), f"{one.n_seq}", f"{one.depth:,}", *_measured(one.n_seq, one.seconds))
                for mode in profile.modes
                for one in mode.steps
            ),
            spare=("from - to", "-ub", "a step"),
        ),
        Grid(
            "beside what another sequence holds in one cache",
            ("mode", "-ub", "tokens", "others", "time", "without", "from - to"),
            tuple(
                (
                    *_of(mode), f"{one.n_tokens:,}" if one.n_tokens > 1 else "a step", f"{one.n_others:,}",
                    _shown(one.crowded.median), _shown(one.alone.median), _times(one.crowded)[1],
                )
                for mode in profile.modes
                for one in mode.crowds
            ),
            spare=("from - to", "-ub"),
        ),
        Grid(
            "what a host adds to a step",
            ("mode", "streams", "time", "from - to"),
            tuple((one.mode.value, f"{one.n_seq}", *_times(one.seconds)) for one in profile.served),
            spare=("from - to",),
        ),
        Grid(
            "switches (stages in ms)",
            ("switch", "weights", "first", "tokens", "pause", "total", "+ a token", *_SHOWN_STAGES),
            tuple(
                (
                    f"{one.before.value} -> {one.after.value}", one.way, "yes" if one.is_first else "",
                    f"{one.n_tokens:,}",
                    _shown(one.pause.median), _shown(one.total.median), f"{one.more_ms:.2f} ms",
                    *(_ms(getattr(one.stages_ms, stage)) for stage in _SHOWN_STAGES),
                )
                for one in profile.switches
            ),
            n_left=3,
            spare=(*_SHOWN_STAGES[::-1], "+ a token", "total", "first"),
        ),
        Grid(
            "not measured", ("what", "why"), tuple((one.what, one.why) for one in profile.left_out), n_left=2,
            folded="why",
        ),
    ]  # fmt: skip
    return tuple(one for one in found if one.rows)


def print_tables(profile: Profile) -> None:
    """Print all tables on stdout."""
    console, width = Console(file=sys.stdout, highlight=False, soft_wrap=True), stdout_width()
    for grid in grids(profile):
        console.print(table_of(grid, width))


def markdown_of(profile: Profile) -> str:
    """Give the tables in Markdown."""
    lines: list[str] = []
    for grid in grids(profile):
        marks = ["---" if number < grid.n_left else "---:" for number in range(len(grid.columns))]
        rows = [grid.columns, marks, *grid.rows]
        lines += [f"**{grid.title}**", "", *(f"| {' | '.join(map(_cell, row))} |" for row in rows), ""]
    return "\n".join(lines).rstrip("\n")


def csv_of(profile: Profile) -> str:
    """Give a line for each thing that was measured; seconds, tokens, and ms of the stages."""
    file = io.StringIO()
    writer = csv.DictWriter(file, _CSV, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(_records(profile))
    return file.getvalue()


def _records(profile: Profile) -> Iterator[dict[str, object]]:
    for mode in profile.modes:
        plain: dict[str, object] = {"mode": mode.mode.value, "n_ubatch": mode.n_ubatch}
        for read in mode.reads:
            yield {
                "kind": "prompt", **plain, "n_tokens": read.n_tokens, "n_seq": 1, "depth": read.depth,
                **_spread(read.seconds), "tokens_s": _per_s(read.n_tokens, read.seconds),
            }  # fmt: skip
        for step in mode.steps:
            yield {
                "kind": "step", **plain, "n_tokens": step.n_seq, "n_seq": step.n_seq, "depth": step.depth,
                **_spread(step.seconds), "tokens_s": _per_s(step.n_seq, step.seconds),
            }  # fmt: skip
        for crowd in mode.crowds:
            for n_others, spread in ((0, crowd.alone), (crowd.n_others, crowd.crowded)):
                yield {
                    "kind": "crowd", **plain, "n_tokens": crowd.n_tokens, "n_seq": 1, "n_others": n_others,
                    **_spread(spread), "tokens_s": _per_s(crowd.n_tokens, spread),
                }  # fmt: skip
    for served in profile.served:
        yield {"kind": "served", "mode": served.mode.value, "n_seq": served.n_seq, **_spread(served.seconds)}
    for one in profile.switches:
        stages = {f"{stage}_ms": getattr(one.stages_ms, stage) for stage in _STAGES}
        yield {
            "kind": "switch", "before": one.before.value, "after": one.after.value, "way": one.way,
            "first": int(one.is_first), "n_tokens": one.n_tokens, **_spread(one.pause), "total_s": one.total.median,
            "more_ms": one.more_ms, **{name: "" if ms is None else ms for name, ms in stages.items()},
        }  # fmt: skip


def _spread(one: Spread) -> dict[str, object]:
    return {"n": one.n, "median_s": one.median, "low_s": one.low, "high_s": one.high}


def _per_s(n: int, one: Spread) -> float | str:
    return n / one.median if one.median else ""


def _of(mode: MeasuredMode) -> tuple[str, str]:
    return mode.mode.value, f"{mode.n_ubatch:,}"


def _times(one: Spread) -> tuple[str, str]:
    return _shown(one.median), f"{_shown(one.low)} - {_shown(one.high)}" if one.n > 1 else ""


def _measured(n: int, one: Spread) -> tuple[str, ...]:
    return (*_times(one), f"{n / one.median:,.1f}" if one.median else "-")


def _shown(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 1.0 else f"{seconds:,.2f} s"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
