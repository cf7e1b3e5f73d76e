"""What commands share that answer from measured numbers: the flags of a kept profile, the look for it, and rates."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from splitctl.cli.options import Command, library_option, placement_options, rpc_option
from splitctl.cli.prompts import read_up_to
from splitctl.model.facts import read_facts
from splitctl.placement import Placement
from splitctl.planning.cost import Rates, RatesInvalid, parse_rates

if TYPE_CHECKING:
    from splitctl.ipc.profiles import Found, KeptProfile

#: A longer file holds no rates [bytes].
_MAX_RATES_BYTES = 1024 * 1024

#: Fields of a placement that a profile does not depend on; `-np` says for how many sequences is asked.
_NOT_OF_THE_KEY = ("mode", "main_gpu", "n_ctx", "n_batch", "n_ubatch", "kv_unified")

#: What must not differ for the times of a profile to be of any use.
_OF_ANOTHER_MACHINE = frozenset({"model", "devices", "rpc"})


def profile_options(command: Command) -> Command:
    """Add `-m`, `--lib`, `--rpc` and the placement flags that a profile depends on, and `-np`.

    The command gets `model` (None where no flag and no variable names one), `library`, `rpc` and `placement`.
    """
    model = click.option(
        "-m", "--model", type=click.Path(path_type=Path), envvar="LLAMA_ARG_MODEL",
        help="The GGUF file; its profile is taken, as splitctl bench measured it.",
    )  # fmt: skip
    placed = functools.partial(placement_options, left_out=_NOT_OF_THE_KEY)
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
