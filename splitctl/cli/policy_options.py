"""Flags of `serve` that let it switch by itself, and where they find how fast the modes are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from splitctl.errors import SplitctlError
from splitctl.host.config import PolicyConfig
from splitctl.outcome import Via, WeightsTier
from splitctl.placement import Placement
from splitctl.planning.learned import MODES, Costs, costs_of, costs_of_rates, other_than
from splitctl.planning.policy import Settings

if TYPE_CHECKING:
    from splitctl.planning.profile import Profile

_PLAIN = Settings()


class NoNumbers(SplitctlError):
    """A host cannot switch by itself: nobody says how fast the modes are."""


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """What the command line says of the policy.

    Attributes:
        is_on: the host switches by itself.
        rates: the file of rates; None: the kept profile.
        bounds: those of `Settings` that are named, in seconds.
    """

    is_on: bool
    rates: Path | None
    bounds: Mapping[str, float]


def bounds_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command what a policy keeps to; it gets ``bounds``: fields of `Settings`, in seconds."""

    @click.option(
        "--min-stay",
        "min_stay_s",
        type=click.FloatRange(min=0.0),
        default=_PLAIN.min_stay_s,
        show_default=True,
        metavar="S",
        help="Least seconds between two switches; one by hand counts.",
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
    @functools.wraps(command)
    def wrapped(*, min_stay_s: float, max_wait_s: float, max_pause_s: float, **given: Any) -> Any:
        bounds = {"min_stay_s": min_stay_s, "max_wait_s": max_wait_s, "max_pause_s": max_pause_s}
        return command(bounds=bounds, **given)

    return wrapped


def policy_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the flags; it gets ``policy``: `PolicyOptions`."""

    @click.option(
        "--policy",
        "choice",
        type=click.Choice(["off", "auto"]),
        default="off",
        show_default=True,
        help="auto: switch to the mode that has the work done soonest, by what bench measured or --rates says.",
    )
    @click.option(
        "--rates",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Rates for --policy auto, as explain takes them; - is stdin.",
    )
    @bounds_options
    @functools.wraps(command)
    def wrapped(*, choice: str, rates: Path | None, bounds: Mapping[str, float], **given: Any) -> Any:
        if rates is not None and choice == "off":
            raise click.UsageError("--rates is for --policy auto; give both or neither")
        return command(policy=PolicyOptions(choice == "auto", rates, bounds), **given)

    return wrapped


def policy_config(
    options: PolicyOptions,
    model: Path,
    placement: Placement,
    library: Path | None,
    rpc: tuple[str, ...],
    weights: WeightsTier,
    log: Callable[[str], None],
) -> PolicyConfig:
    """Find how fast the modes are; `log` takes why a profile that is used does not hold any more.

    Raises:
        NoNumbers: nobody says it.
        ConfigInvalid: a bound is none.
        RatesInvalid: the file of rates has none.
        SplitctlError: the model's file or the library cannot be used.
        OSError: the file of rates cannot be read.
    """
    settings = Settings(**options.bounds)
    if not options.is_on:
        return PolicyConfig()
    if options.rates is not None:
        costs, source = _rated(options.rates, weights), f"rates of {options.rates}"
        return PolicyConfig(costs, source, settings)
    from splitctl.cli.profiled import find_profile, unknown_line  # noqa: PLC0415 - numpy, which --help does without
    from splitctl.ipc.profiles import day_of  # noqa: PLC0415 - as above

    found = find_profile(model, placement, library, rpc)
    kept = found.kept or found.stale
    if kept is None:
        raise NoNumbers(f"--policy auto cannot tell how fast the modes are: {found.why}; or give --rates FILE")
    if found.kept is None:
        log(f"policy: {found.why}; until then that profile is used")
    profile = kept.profile if placement.kv_unified else kept.profile.unshared()
    why = unknown_line(profile, is_shared=placement.kv_unified and placement.n_seq_max > 1, is_served=True)
    if why:
        log(f"policy: {why}")
    costs = costs_of(profile, way_of(profile, weights), on_processors=kept.on_processors)
    return PolicyConfig(costs, day_of(kept), settings)


def _rated(file: Path, weights: WeightsTier) -> Costs:
    from splitctl.cli.profiled import read_rates  # noqa: PLC0415 - as above

    rates = read_rates(file)
    known = [one for one in (Via.BESIDE.value, weights.value) if one in rates.tiers]
    return costs_of_rates(rates.in_tier(known[0]) if known else rates)


def way_of(profile: Profile, weights: WeightsTier) -> str:
    """Choose the way whose times count: beside where it was measured, as it goes there where it fits."""
    both = [set(profile.ways(mode, other_than(mode))) for mode in MODES]
    known = set.intersection(*both)
    tiers = (WeightsTier.RESIDENT, WeightsTier.PINNED) if weights is WeightsTier.AUTO else (weights,)
    wanted = [Via.BESIDE.value, *(tier.value for tier in tiers), WeightsTier.FILE.value]
    return next((one for one in wanted if one in known), WeightsTier.FILE.value)
