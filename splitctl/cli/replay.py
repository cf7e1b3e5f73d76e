"""`splitctl replay`: whether switching would have paid for requests that came, by simulated time."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any

import click
from rich.table import Table

from splitctl.cli.grids import Grid, stdout_width, table_of
from splitctl.cli.hosts import with_screen
from splitctl.cli.output import ExitCode, Screen
from splitctl.cli.policy_options import bounds_options, way_of
from splitctl.cli.profiled import (
    find_profile,
    measured_with,
    no_room,
    profile_json,
    profile_options,
    read_rates,
    source_line,
    unknown_line,
)
from splitctl.ipc.jobs import Progress
from splitctl.outcome import Via, WeightsTier
from splitctl.placement import Placement, SplitMode
from splitctl.planning.advice import MADE
from splitctl.planning.cost import TIMED, RatesInvalid
from splitctl.planning.learned import MODES, Costs, costs_of, costs_of_rates
from splitctl.planning.policy import Policy, Settings
from splitctl.planning.profile import ModeNotMeasured
from splitctl.planning.simulate import MAX_FOR_ORACLE, Comparison, compare
from splitctl.planning.traces import MAX_LINE, TraceInvalid, read_trace

#: A longer file holds no trace; no character takes more [bytes].
_MAX_TRACE_BYTES, _MAX_CHARACTER = 256 * 1024 * 1024, 4


@click.command()
@click.argument("trace", type=click.Path(path_type=Path, allow_dash=True))
@click.option(
    "--rates",
    "rates_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Rates in place of a profile, as explain takes them.",
)
@click.option(
    "--way", type=click.Choice(TIMED), help="How switches are made; without: beside if measured, else from the file."
)
@click.option(
    "--from",
    "start",
    type=click.Choice([mode.value for mode in MODES]),
    default=MODES[0].value,
    show_default=True,
    help="The mode that the policy begins in.",
)
@click.option(
    "--first",
    "n_most",
    type=click.IntRange(1),
    default=2000,
    show_default=True,
    metavar="N",
    help="Requests of the trace that are replayed, from its beginning.",
)
@bounds_options
@profile_options
@with_screen
def replay(
    *,
    trace: Path,
    rates_file: Path | None,
    way: str | None,
    start: str,
    n_most: int,
    bounds: Mapping[str, float],
    model: Path | None,
    placement: Placement,
    library: Path | None,
    rpc: tuple[str, ...],
    screen: Screen,
) -> int:
    """Replay a trace of requests in simulated time, and say if switching by itself had paid."""
    settings = Settings(**bounds)
    source: str | dict[str, Any] | None
    try:
        if rates_file is not None:
            way, costs = _rated(rates_file, way)
            source = str(rates_file)
        elif model is None:
            raise click.UsageError("name a model that splitctl bench has measured (-m), or a file of rates (--rates)")
        else:
            found = find_profile(model, placement, library, rpc)
            kept = found.kept or found.stale
            if kept is None:
                return screen.fail("NoProfile", found.why, ExitCode.FAILED)
            screen.line(f"warning: {found.why}" if found.kept is None else source_line(kept))
            measured = measured_with(kept.profile, placement)
            is_shared = placement.kv_unified and placement.n_seq_max > 1
            if unknown := unknown_line(measured, is_shared=is_shared, is_served=True):
                screen.line(f"warning: {unknown}")
            way = way or way_of(measured, WeightsTier.FILE)
            costs = costs_of(measured, way, on_processors=kept.on_processors)
            source = profile_json(found)
        with _opened(trace) as file:
            requests, n_all = read_trace(_lines(file, str(trace)), n_most)
    except OSError as error:
        message = f"{error.filename} cannot be read: {error.strerror or error}; name another file"
        return screen.fail(type(error).__name__, message, ExitCode.FAILED)
    except RatesInvalid as error:
        return screen.fail(type(error).__name__, f"{rates_file}: {error}", ExitCode.FAILED)
    except (TraceInvalid, ModeNotMeasured) as error:
        where = f"{trace}: " if isinstance(error, TraceInvalid) else ""
        return screen.fail(type(error).__name__, f"{where}{error}", ExitCode.FAILED)
    longest = max(requests, key=lambda one: one.prompt + one.generated)
    why = no_room(placement, longest.prompt + longest.generated)
    if why:
        return screen.fail("ContextFull", f"{trace}: the longest request is {why}", ExitCode.REFUSED)
    if n_all > n_most:
        screen.line(f"the first {n_most:,} of {n_all:,} requests are replayed; --first says how many")
    screen.line(f"switches are made {MADE[way]}; --way says how")
    policy = Policy(costs, settings)
    # The policy learns from what is served here: the true costs.
    compared = compare(
        requests,
        policy,
        costs,
        SplitMode(start),
        placement.n_seq_max,
        tick=lambda done: screen.progress(Progress("replaying", done)),
    )
    body = {
        "requests": len(requests),
        "requests_in_trace": n_all,
        "sequences": placement.n_seq_max,
        "source": source,
        "way": way,
        "courses": {one.name: one.to_json(compared.oracle) for one in compared.courses},
        "best_fixed": compared.best_fixed.name,
        "gain_s": compared.best_fixed.busy_s - compared.auto.busy_s,
        "sentence": compared.sentence,
    }
    if compared.oracle is None:
        screen.line(f"no oracle: it is asked for up to {MAX_FOR_ORACLE:,} requests")
    return screen.answer(body, _table(compared), compared.sentence)


def _rated(path: Path, way: str | None) -> tuple[str, Costs]:
    """Give the way that is replayed, without a word that of `serve`, and what it costs."""
    rates = read_rates(path)
    if way is None:
        way = Via.BESIDE.value if Via.BESIDE.value in rates.tiers else WeightsTier.FILE.value
    return way, costs_of_rates(rates.in_tier(way))


def _too_long(limit: int, file: str) -> OSError:
    return OSError(0, f"it is longer than {limit // 1024 // 1024} MiB", file)


def _opened(path: Path) -> AbstractContextManager[IO[bytes]]:
    return nullcontext(sys.stdin.buffer) if str(path) == "-" else path.open("rb")


def _lines(file: IO[bytes], name: str) -> Iterator[str]:
    """Give a trace's lines without their ends, no more of each than may be refused."""
    left = _MAX_TRACE_BYTES
    while raw := file.readline(_MAX_CHARACTER * (MAX_LINE + 1)):
        left -= len(raw)
        if left < 0:
            raise _too_long(_MAX_TRACE_BYTES, name)
        yield raw.removesuffix(b"\n").decode("utf-8", "replace")


def _table(compared: Comparison) -> Table:
    columns = ("", "total [s]", "wait mean", "95 %", "max", "first token 95 %", "switches", "regret")
    rows = []
    for one in compared.courses:
        told = one.to_json(compared.oracle)
        wait = told["wait_s"]
        regret = told["regret_s"]
        rows.append(
            (
                one.name,
                f"{one.busy_s:,.1f}",
                *(f"{wait[name]:,.1f}" for name in ("mean", "p95", "max")),
                f"{told['first_token_s']['p95']:,.1f}",
                f"{len(one.switched_at):,}",
                "-" if regret is None else f"{regret:,.1f}",
            )
        )
    spare = ("first token 95 %", "max", "95 %", "regret", "wait mean")
    return table_of(Grid("", columns, tuple(rows), spare=spare), stdout_width())
