"""What commands share that answer from measured numbers: the flags of a kept profile, the look for it, and rates."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from splitctl.cli.completions import ModelFile
from splitctl.cli.options import Command, library_option, named, placement_options, rpc_option
from splitctl.cli.prompts import read_up_to
from splitctl.model.facts import read_facts
from splitctl.placement import Placement
from splitctl.planning.cost import Rates, RatesInvalid, parse_rates

if TYPE_CHECKING:
    from splitctl.ipc.profiles import Found, KeptProfile
    from splitctl.planning.profile import Profile

#: A longer file holds no rates [bytes].
_MAX_RATES_BYTES = 1024 * 1024

#: Fields of a placement that nothing here depends on.
_LEFT_OUT = ("mode", "main_gpu")

#: What must not differ for the times of a profile to be of any use.
_OF_ANOTHER_MACHINE = frozenset({"model", "devices", "rpc"})


def profile_options(command: Command) -> Command:
    """Add `-m`, `--lib`, `--rpc` and the placement flags, but for the mode.

    `-np` says for how many sequences is asked, `-c` what they have room for, `-ub` which measured size counts.
    The command gets `model` (None where no flag and no variable names one), `library`, `rpc` and `placement`.
    """
    model = click.option(
        "-m", "--model", type=ModelFile(), envvar="LLAMA_ARG_MODEL",
        help="The GGUF file; its profile is taken, as splitctl bench measured it.",
    )  # fmt: skip
    placed = functools.partial(placement_options, left_out=_LEFT_OUT)
    return model(placed(library_option(rpc_option(command))))


def find_profile(model: Path, placement: Placement, library: Path | None, rpc: tuple[str, ...]) -> Found:
    """Look for the profile of a model as it would lie; the library is asked for its devices, and loads nothing.

    A stale profile is given only if it is of these weights on these devices: another build or driver, other threads or
    cache types are near enough to be of use, with a warning.

    Raises:
        SplitctlError: the model's file or the library cannot be used.
    """
    from splitctl.ipc.profiles import Found, ProfileKey, look_up  # noqa: PLC0415 - numpy, which --help does without
    from splitctl.ipc.reserving import Reserver  # noqa: PLC0415 - as above

    facts = read_facts(model)
    told = Reserver(model, library, os.environ, rpc)(placement).library
    names = tuple(one["name"] for one in told["devices"])
    found = look_up(Path(told["path"]), facts, placement, names, rpc)
    if found.stale is None:
        return found
    differs = ProfileKey.of(Path(told["path"]), facts, placement, names, rpc).differs(found.stale.key)
    return found if _OF_ANOTHER_MACHINE.isdisjoint(differs) else Found(None, found.why)


def measured_with(profile: Profile, placement: Placement) -> Profile:
    """Give what was measured with the `-ub` that a user names; without one all of it, of which the fastest counts.

    What sequences cost each other in one cache for all counts for such a cache alone.

    Raises:
        BadParameter: that size was not measured.
    """
    n = min(placement.n_ubatch, placement.n_batch)
    profile = profile if placement.kv_unified else profile.unshared()
    if not named(["n_ubatch"]):
        return profile
    found = tuple(one for one in profile.modes if one.n_ubatch == n)
    if not found:
        sizes = " or ".join(str(one) for one in sorted({one.n_ubatch for one in profile.modes}))
        message = f"{n} was not measured; wanted: {sizes}, or measure it: splitctl bench --ubatch {n}"
        raise click.BadParameter(message, param_hint="-ub")
    return dataclasses.replace(profile, modes=found)


def no_room(placement: Placement, n_tokens: int, n_together: int = 1) -> str:
    """Say why a context has no room for sequences of so many tokens each; empty where it has, or none is named.

    Args:
        placement: the context.
        n_tokens: of the prompt and the answer of one sequence.
        n_together: sequences that are there at once.
    """
    room, wanted = placement.n_ctx // placement.n_streams, n_tokens
    if placement.kv_unified:
        wanted *= n_together
    if not placement.n_ctx or wanted <= room:
        return ""
    of = f", {placement.n_ctx:,} for {placement.n_streams} sequences" if placement.n_streams > 1 else ""
    least = wanted * placement.n_streams
    return f"{wanted:,} tokens of prompt and answer, and the context holds {room:,}{of}; raise -c to {least}"


def unknown_line(profile: Profile, *, is_shared: bool, is_served: bool) -> str:
    """Say which costs of serving a profile does not know, and so count as nothing; empty where it knows all.

    Args:
        profile: the measurements.
        is_shared: several sequences lie in one cache.
        is_served: a host serves them.
    """
    unknown = [
        *(
            ["what sequences in one cache cost each other"]
            if is_shared and not any(one.crowds for one in profile.modes)
            else []
        ),
        *(["what a host adds to a step"] if is_served and not profile.served else []),
    ]
    text = " and ".join(unknown)
    return f"{text} was not measured and counts as nothing; measure it: splitctl bench" if text else ""


def profile_json(found: Found) -> dict[str, Any] | None:
    """Describe the profile that was found, one that does not hold any more too; None without one.

    made_at (seconds since 1970), stale, why (what has changed; empty where it holds), build, driver, devices, model.
    """
    kept = found.kept or found.stale
    if kept is None:
        return None
    return {
        "made_at": kept.made_at,
        "stale": found.kept is None,
        "why": found.why,
        "build": kept.library_version,
        "driver": kept.driver,
        "devices": list(kept.key.devices),
        "model": kept.model_name,
    }


def source_line(kept: KeptProfile) -> str:
    """Say in one line what a profile is of, and from when."""
    from splitctl.ipc.profiles import day_of  # noqa: PLC0415 - as above

    devices = ",".join(kept.key.devices) or "the library's devices"
    return f"measured {day_of(kept)}: {kept.model_name} on {devices}; {kept.driver or 'no driver'}"


def read_rates(path: Path) -> Rates:
    """Read a file of rates, or stdin for `-`.

    Raises:
        RatesInvalid: it holds none.
        OSError: it cannot be read.
    """
    raw = read_up_to(str(path), _MAX_RATES_BYTES)
    if len(raw) > _MAX_RATES_BYTES:
        raise RatesInvalid("the file", f"over {_MAX_RATES_BYTES} bytes", "a file of rates")
    return parse_rates(raw)
