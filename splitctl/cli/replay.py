"""`splitctl replay`: whether switching would have paid for requests that came, by simulated time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from splitctl.cli.hosts import with_screen
from splitctl.cli.output import ExitCode, Screen
from splitctl.cli.policy_options import way_of
from splitctl.cli.profiled import find_profile, profile_json, profile_options, source_line
from splitctl.cli.prompts import read_up_to
from splitctl.ipc.jobs import Progress
from splitctl.outcome import WeightsTier
from splitctl.placement import Placement, SplitMode
from splitctl.planning.cost import TIMED, RatesInvalid, parse_rates
from splitctl.planning.learned import MODES, Costs, costs_of, costs_of_rates
from splitctl.planning.policy import Policy, Settings
from splitctl.planning.profile import ModeNotMeasured
from splitctl.planning.simulate import MAX_FOR_ORACLE, Comparison, compare
from splitctl.planning.traces import TraceInvalid, parse_trace

#: Longer files hold no trace, and no rates [bytes].
_MAX_TRACE_BYTES, _MAX_RATES_BYTES = 256 * 1024 * 1024, 1024 * 1024
_PLAIN = Settings()


@click.command()
@click.argument("trace", type=click.Path(path_type=Path, allow_dash=True))
@click.option(
    "--rates",
    "rates_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Rates in place of a profile, as explain takes them.",
)
@click.option("--way", type=click.Choice(TIMED), help="How a switch gets its weights; without: beside, if measured.")
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
@click.option(
    "--min-stay",
    "min_stay_s",
    type=click.FloatRange(min=0.0),
    default=_PLAIN.min_stay_s,
    show_default=True,
    metavar="S",
    help="Least seconds between two switches.",
)
@click.option(
    "--max-wait",
    "max_wait_s",
    type=click.FloatRange(min=0.0),
    default=_PLAIN.max_wait_s,
    show_default=True,
    metavar="S",
    help="Most seconds that a prompt is held for a switch.",
)
@click.option(
    "--max-pause",
    "max_pause_s",
    type=click.FloatRange(min=0.0),
    default=_PLAIN.max_pause_s,
    show_default=True,
    metavar="S",
    help="Longest pause of a switch, in seconds, while answers are generated.",
)
@profile_options
@with_screen
def replay(
    *,
    trace: Path,
    rates_file: Path | None,
    way: str | None,
    start: str,
    n_most: int,
    min_stay_s: float,
    max_wait_s: float,
    max_pause_s: float,
    model: Path | None,
    placement: Placement,
    library: Path | None,
    rpc: tuple[str, ...],
    screen: Screen,
) -> int:
    """Replay a trace of requests in simulated time, and say if switching by itself had paid."""
    settings = Settings(min_stay_s=min_stay_s, max_wait_s=max_wait_s, max_pause_s=max_pause_s)
    source: str | dict[str, Any] | None
    try:
        if rates_file is not None:
            costs, source = _rated(rates_file, way), str(rates_file)
        elif model is None:
            raise click.UsageError("name a model that splitctl bench has measured (-m), or a file of rates (--rates)")
        else:
            found = find_profile(model, placement, library, rpc)
            kept = found.kept or found.stale
            if kept is None:
                return screen.fail("NoProfile", found.why, ExitCode.FAILED)
            screen.line(f"warning: {found.why}" if found.kept is None else source_line(kept))
            costs = costs_of(kept.profile, way or way_of(kept.profile, WeightsTier.FILE))
            source = profile_json(found)
        requests = parse_trace(_read(trace, _MAX_TRACE_BYTES).decode("utf-8", "replace"))
    except OSError as error:
        message = f"{error.filename} cannot be read: {error.strerror or error}; name another file"
        return screen.fail(type(error).__name__, message, ExitCode.FAILED)
    except RatesInvalid as error:
        return screen.fail(type(error).__name__, f"{rates_file}: {error}", ExitCode.FAILED)
    except (TraceInvalid, ModeNotMeasured) as error:
        where = f"{trace}: " if isinstance(error, TraceInvalid) else ""
        return screen.fail(type(error).__name__, f"{where}{error}", ExitCode.FAILED)
    n_all = len(requests)
    if n_all > n_most:
        screen.line(f"the first {n_most:,} of {n_all:,} requests are replayed; --first says how many")
        requests = requests[:n_most]
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
        "courses": {one.name: one.to_json(compared.oracle) for one in compared.courses},
        "best_fixed": compared.best_fixed.name,
        "gain_s": compared.best_fixed.busy_s - compared.auto.busy_s,
        "sentence": compared.sentence,
    }
    if compared.oracle is None:
        screen.line(f"no oracle: it is asked for up to {MAX_FOR_ORACLE:,} requests")
    return screen.answer(body, _table(compared), compared.sentence)


def _rated(path: Path, way: str | None) -> Costs:
    rates = parse_rates(_read(path, _MAX_RATES_BYTES))
    return costs_of_rates(rates if way is None else rates.in_tier(way))


def _read(path: Path, limit: int) -> bytes:
    raw = read_up_to(str(path), limit)
    if len(raw) > limit:
        raise OSError(0, f"it is longer than {limit // 1024 // 1024} MiB", str(path))
    return raw


def _table(compared: Comparison) -> Table:
    table = Table()
    table.add_column("")
    for name in ("total [s]", "wait mean", "95 %", "max", "first token 95 %", "switches", "regret"):
        table.add_column(escape(name), justify="right")
    for one in compared.courses:
        told = one.to_json(compared.oracle)
        wait = told["wait_s"]
        regret = told["regret_s"]
        table.add_row(
            one.name,
            f"{one.busy_s:,.1f}",
            *(f"{wait[name]:,.1f}" for name in ("mean", "p95", "max")),
            f"{told['first_token_s']['p95']:,.1f}",
            f"{len(one.switched_at):,}",
            "-" if regret is None else f"{regret:,.1f}",
        )
    return table
