"""`splitctl completions`, and what a shell is told when somebody presses TAB: no library is loaded for that.

click answers the shells; values that are found at that moment (sessions, devices, models) come from here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from click.shell_completion import BashComplete, CompletionItem, FishComplete, ZshComplete, add_completion_class

from splitctl.cli.streams import COMPLETE
from splitctl.control.sockets import runtime_folder, sessions
from splitctl.errors import SplitctlError

_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
_DEVICE_NAME = re.compile(r"[A-Za-z]+\d*")
#: Letters that no shell takes for its own.
_PLAIN = re.compile(r"[\w./+@%-]+")


class _Bash(BashComplete):
    def get_completion_args(self) -> tuple[list[str], str]:
        """Leave out the "=" that bash makes a word of its own: `--to=ten` is three words there."""
        words, incomplete = super().get_completion_args()
        return [one for one in words if one != "="], incomplete


class _Fish(FishComplete):
    #: A value may have commas, as devices do.
    source_template = FishComplete.source_template.replace('string split ","', 'string split --max 1 ","')


_SHELLS = {"bash": _Bash, "zsh": ZshComplete, "fish": _Fish}


def know_shells() -> None:
    """Let click answer the shells by the classes from here."""
    for shell in _SHELLS.values():
        add_completion_class(shell)


@click.command()
@click.argument("shell", type=click.Choice(list(_SHELLS)))
@click.pass_context
def completions(context: click.Context, shell: str) -> None:
    """Print what a shell needs to complete commands, flags and their values.

    In ~/.bashrc: eval "$(splitctl completions bash)"

    In ~/.zshrc, after compinit: eval "$(splitctl completions zsh)"

    For fish: splitctl completions fish > ~/.config/fish/completions/splitctl.fish
    """
    root = context.find_root()
    click.echo(_SHELLS[shell](root.command, {}, str(root.info_name), COMPLETE).source())


def session_names(context: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Complete the name of a session that is served."""
    del context, param
    with suppress(SplitctlError, OSError):
        return _starting(incomplete, (one.name for one in sessions(runtime_folder(os.environ))))
    return []


def device_names(context: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Complete the last of a list of devices: the processor, GPUs that the driver names, and what was tried before."""
    del context, param
    before, comma, last = incomplete.rpartition(",")
    with suppress(SplitctlError, OSError):
        return _starting(last, sorted({"CPU", *_gpus(), *_tried()}), before + comma)
    return []


def _gpus() -> list[str]:
    return [f"CUDA{index}" for index, _ in enumerate(_NVIDIA_GPUS.iterdir())] if _NVIDIA_GPUS.is_dir() else []


def _tried() -> set[str]:
    from splitctl.ipc.probes import verdicts_file  # noqa: PLC0415 - a tenth of a second, for this flag alone
    from splitctl.probing.verdicts import VerdictCache  # noqa: PLC0415

    return {one for one in VerdictCache(verdicts_file()).devices() if _DEVICE_NAME.fullmatch(one)}


def _begins(name: str, start: str) -> bool:
    """Tell whether a file's name goes on from what was typed; hidden ones are asked for by their dot."""
    return name.startswith(start) and name.startswith(".") == start.startswith(".")


def _starting(incomplete: str, names: Iterable[str], before: str = "") -> list[CompletionItem[str]]:
    return [CompletionItem(before + one) for one in names if one.startswith(incomplete)]


class ModelFile(click.Path):
    """The path of a GGUF file."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[Any]]:
        """Offer the models of a folder; where it has other folders too, or odd names, the shell looks itself."""
        folder, start = os.path.split(incomplete)
        try:
            with os.scandir(folder or ".") as entries:
                met = [one for one in entries if _begins(one.name, start)]
        except OSError:
            met = []
        models = sorted(str(Path(folder, one.name)) for one in met if one.name.endswith(".gguf") and one.is_file())
        if models and all(map(_PLAIN.fullmatch, models)) and not any(one.is_dir() for one in met):
            return [CompletionItem(one) for one in models]
        return super().shell_complete(ctx, param, incomplete)
