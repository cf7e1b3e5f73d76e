"""`splitctl explain`: whether a switch pays, by what `splitctl bench` measured, or by rates that are given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.table import Table

from splitctl.cli.grids import Grid, stdout_width, table_of
from splitctl.cli.hosts import with_screen
from splitctl.cli.output import ExitCode, Screen
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
from splitctl.errors import ConfigInvalid
from splitctl.outcome import WeightsTier
from splitctl.placement import Placement
from splitctl.planning.advice import advise
from splitctl.planning.cost import (
    MAX_SWITCH_S,
    MAX_TOKENS,
    TIMED,
    Choice,
    Comparison,
    RatesInvalid,
    Work,
    compare,
)
from splitctl.planning.profile import ModeNotMeasured

#: Parameters that make sense for a file of rates.
_WITH_RATES = {"rates_file", "prompt", "cached", "generate", "weights", "switch_s", "as_json"}

#: How many times as many tokens as were ever measured a prediction is made for without a word.
_FAR = 2

_TOKENS = click.IntRange(0, MAX_TOKENS)


@click.command()
@click.option(
    "--rates",
    "rates_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help='In place of a profile: {"switch_s": S, "modes": {"layer": {"prompt_tps": a, "generate_tps": b}, "tensor": '
    "{...}}}; - is stdin.",
)
@click.option("--prompt", type=_TOKENS, required=True, metavar="P", help="Tokens of the prompt.")
@click.option(
    "--cached", type=_TOKENS, default=0, show_default=True, metavar="C", help="Of them, those that the cache holds."
)
@click.option("--generate", type=_TOKENS, required=True, metavar="G", help="Tokens to generate.")
@click.option(
    "--weights",
    type=click.Choice(TIMED),
    help="Judge switches with weights from this tier, or beside in a served session, by their measured time.",
)
@click.option(
    "--switch-s",
    type=click.FloatRange(0.0, MAX_SWITCH_S),
    metavar="S",
    help="Seconds of a switch, in place of the measured ones.",
)
@profile_options
@with_screen
def explain(
    *,
    rates_file: Path | None,
    prompt: int,
    cached: int,
    generate: int,
    weights: str | None,
    switch_s: float | None,
    model: Path | None,
    placement: Placement,
    library: Path | None,
    rpc: tuple[str, ...],
    screen: Screen,
) -> int:
    """Say which mode, or which switch, does some work in the least time, and by how much."""
    try:
        work = Work(prompt, generate, cached)
    except ConfigInvalid as error:
        raise click.BadParameter(f"{error.value!r}; wanted: {error.wanted}", param_hint=f"--{error.field}") from error
    if rates_file is not None:
        _refuse_other_flags()
        return _by_rates(rates_file, work, weights, switch_s, screen)
    if model is None:
        raise click.UsageError("name a model that splitctl bench has measured (-m), or a file of rates (--rates)")
    why = no_room(placement, prompt + generate, placement.n_seq_max)
    if why:
        return screen.fail("ContextFull", why, ExitCode.REFUSED)
    found = find_profile(model, placement, library, rpc)
    kept = found.kept or found.stale
    if kept is None:
        return screen.fail("NoProfile", found.why, ExitCode.FAILED)
    try:
        measured = measured_with(kept.profile, placement)
        advice = advise(measured, work, n_seq=placement.n_seq_max, way=weights, switch_s=switch_s)
    except ModeNotMeasured as error:
        return screen.fail(type(error).__name__, str(error), ExitCode.FAILED)
    if found.stale is not None:
        screen.line(f"warning: {found.why}")
    is_shared = placement.kv_unified and placement.n_seq_max > 1
    if unknown := unknown_line(measured, is_shared=is_shared, is_served=False):
        screen.line(f"warning: {unknown}")
    if work.prompt + work.generate > _FAR * measured.reach:
        screen.line(f"warning: measured up to {measured.reach:,} tokens; beyond that the straight lines go on")
    body = advice.to_json() | {"sequences": placement.n_seq_max, "profile": profile_json(found)}
    tables = _tables(advice.comparison, body["tiers"]) if advice.comparison is not None else []
    return screen.answer(body, source_line(kept), *tables, advice.sentence)


def _refuse_other_flags() -> None:
    """Refuse flags that say which profile to take where a file of rates is taken."""
    context = click.get_current_context()
    for param in context.command.params:
        is_given = context.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE
        if is_given and param.name not in _WITH_RATES:
            raise click.UsageError(f"{param.opts[0]} is for a measured profile; leave it out, or --rates")


def _by_rates(path: Path, work: Work, weights: str | None, switch_s: float | None, screen: Screen) -> ExitCode:
    try:
        rates = read_rates(path)
        if weights is not None or switch_s is not None:
            rates = rates.in_tier(weights or WeightsTier.FILE.value, switch_s)
    except OSError as error:
        message = f"the file of rates {path} cannot be read: {error.strerror or error}; name another"
        return screen.fail(type(error).__name__, message, ExitCode.FAILED)
    except RatesInvalid as error:
        return screen.fail(type(error).__name__, f"{path}: {error}", ExitCode.FAILED)
    comparison = compare(rates, work)
    body = comparison.to_json()
    return screen.answer(body, *_tables(comparison, body["tiers"]), comparison.sentence)


def _tables(comparison: Comparison, tiers: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    return [_table(comparison), *([_tiers_table(tiers)] if len(tiers) > 1 else [])]


def _table(comparison: Comparison) -> Table:
    rows = []
    work, rates = comparison.work, comparison.rates
    for choice in Choice:
        mark = "*" if choice is comparison.best else " "
        reading = work.uncached / rates.of(choice.reads_in).prompt_tps
        generating = work.generate / rates.of(choice.generates_in).generate_tps
        switching = f"{rates.switch_time(choice):,.1f}" if choice.is_switch else "-"
        if choice.is_switch:
            generating += work.generate * rates.after_switch_ms / 1e3
        total = f"{comparison.seconds[choice]:,.1f}"
        rows.append((f"{mark} {choice.value}", f"{reading:,.1f}", switching, f"{generating:,.1f}", total))
    columns = ("choice", "prompt [s]", "switch [s]", "generate [s]", "total [s]")
    return table_of(Grid("", columns, tuple(rows), spare=columns[3:0:-1]), stdout_width())


def _tiers_table(tiers: Mapping[str, Mapping[str, Any]]) -> Table:
    """Lay out from how long a prompt and answer on a switch pays, by the tier of its weights."""
    rows = []
    for tier, one in tiers.items():
        even, seconds = one["break_even"], one["seconds"]
        rows.append(
            (
                tier,
                f"{one['switch_s']:,.2f}",
                f"{one['ms_per_token']:g}",
                *("never" if even[name] is None else f"{even[name]:,}" for name in ("prompt", "generate")),
                "-" if seconds is None else f"{seconds:,.1f}",
            )
        )
    columns = ("weights", "switch [s]", "a token [ms]", "prompt >", "answer >", "total [s]")
    return table_of(Grid("", columns, tuple(rows), spare=("a token [ms]", "total [s]")), stdout_width())
