"""`splitctl plan`: what a placement and a switch would take on every device, before anything is loaded."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from splitctl.carry.durable import replacing
from splitctl.cli.hosts import with_screen
from splitctl.cli.options import (
    MODE,
    Parsed,
    library_option,
    model_option,
    placement_options,
    rpc_option,
    verbose_option,
)
from splitctl.cli.output import ExitCode, Screen, print_json
from splitctl.cli.plan_text import chunk_text, show
from splitctl.errors import Reason
from splitctl.ipc.jobs import RequestFailed
from splitctl.ipc.reserving import Reserver, devices_told
from splitctl.model.facts import ModelFacts, read_facts
from splitctl.placement import Placement, SplitMode
from splitctl.planning.fitting import HOST_POOL, MIN_CHUNK, Chunk
from splitctl.planning.memory import DeviceFacts
from splitctl.planning.reservation import Reservation
from splitctl.planning.survey import (
    Known,
    ModeAnswer,
    Size,
    SwitchAnswer,
    answer_chunk,
    answer_mode,
    answer_switch,
    mode_json,
    need_json,
    of_sizes,
    searched,
    sizes_of_chunks,
    sizes_of_search,
    switch_json,
    tiers_json,
    with_chunk,
)
from splitctl.switching import rules
from splitctl.switching.rules import BuildFacts, Diagnostic, HostFacts, SessionFacts

_GIB = 1024**3
#: Largest chunk that `--ubatch auto` asks about [tokens].
_MAX_CHUNK = 4096
_MODES = (SplitMode.NONE, SplitMode.LAYER, SplitMode.TENSOR)


def _free(text: str) -> Mapping[str, int]:
    """Read free memory of devices by name, bytes; "host" stands for the host."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().rpartition("=")
        try:
            gib = float(size)
        except ValueError:
            gib = -1.0
        if not name or not 0 <= gib < 1 << 20:
            raise ValueError(f"{part!r} is not DEVICE=GiB, such as CUDA0=11.5 or host=32")
        found[name] = int(gib * _GIB)
    return found


def _chunk(text: str) -> int:
    try:
        tokens = 0 if text == "auto" else int(text)
    except ValueError:
        tokens = -1
    if not 0 <= tokens < 1 << 31:
        raise ValueError(f"{text!r} is not a number of tokens or auto")
    return tokens


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """What the user asked, and what was gathered for it."""

    generate: Placement
    prompt: Placement
    known: Known
    build: BuildFacts
    unsaid: Mapping[SplitMode, str]

    @property
    def modes(self) -> tuple[SplitMode, ...]:
        """The modes that are answered for."""
        return tuple(dict.fromkeys((*_MODES, self.generate.mode, self.prompt.mode)))

    def refused(self, mode: SplitMode) -> tuple[Reason, ...]:
        """Why the rules refuse a mode."""
        return rules.refused(self.judged(mode))

    def judged(self, mode: SplitMode) -> tuple[Diagnostic, ...]:
        """What the rules say of a mode."""
        host = HostFacts({device.name: device.kind for device in self.known.devices if device.name != HOST_POOL})
        target = _in_mode(self.generate, mode)
        return rules.check(None, target, self.known.facts, self.build, host, SessionFacts(tokens={}))

    @property
    def switch(self) -> tuple[Placement, Placement] | None:
        """The switch that is asked, else the one from layer to tensor mode where both are allowed."""
        if self.prompt.mode is not self.generate.mode:
            return self.prompt, self.generate
        if self.refused(SplitMode.LAYER) or self.refused(SplitMode.TENSOR):
            return None
        return _in_mode(self.prompt, SplitMode.LAYER), _in_mode(self.generate, SplitMode.TENSOR)


@click.command()
@model_option
@click.option("-psm", "--prompt-split-mode", "prompt_mode", type=MODE, help="Split mode of the prompt.")
@click.option(
    "--free", type=Parsed("DEVICE=GiB,...", _free), default=None,
    help="Free memory to plan with, instead of what the library says; a device that is not here may be named too.",
)  # fmt: skip
@click.option(
    "--ubatch", "chunk", type=Parsed("[N|auto]", _chunk), default=None,
    help="Micro-batch of the prompt; auto finds the largest that every device can lend.",
)  # fmt: skip
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE.png",
    help="Also draw the bars into a file (the extra plot).",
)
@library_option
@rpc_option
@placement_options
@verbose_option
@with_screen
def plan(
    *,
    model: Path,
    placement: Placement,
    prompt_mode: SplitMode | None,
    free: Mapping[str, int] | None,
    chunk: int | None,
    plot: Path | None,
    library: Path | None,
    rpc: tuple[str, ...],
    screen: Screen,
) -> int:
    """Tell what every mode, and a switch, would take on each device, and the largest context that fits."""
    picture = None if plot is None else _picture()
    facts = read_facts(model)
    reserver = Reserver(model, library, os.environ, rpc)
    try:
        asked = _gather(facts, placement, prompt_mode, free or {}, chunk, reserver)
        found = answer_chunk(asked.known, asked.prompt, _MAX_CHUNK) if chunk == 0 else None
        if found is not None and not found.refused:
            asked = dataclasses.replace(asked, prompt=with_chunk(asked.prompt, found.n_ubatch))
        asked = _sure(asked, reserver)
    except RequestFailed as error:
        return screen.fail(error.name, str(error), ExitCode.FAILED)
    answers = [_answer(asked, mode) for mode in asked.modes]
    switch = answer_switch(asked.known, *asked.switch) if asked.switch is not None else None
    code = _code(asked, answers, switch if prompt_mode is not None else None, found)
    everything: list[ModeAnswer | SwitchAnswer] = [*answers, *([switch] if switch is not None else [])]
    if plot is not None and picture is not None:
        try:
            data = picture(f"{facts.name} -c {answers[0].plan.n_ctx}", everything, asked.known.devices)
            with replacing(plot, len(data)) as temporary:
                temporary.write_bytes(data)
        except OSError as error:
            message = f"the picture cannot be written to {plot}: {error.strerror or error}; name another file"
            return screen.fail(type(error).__name__, message, ExitCode.FAILED)
    screen.end_bars()
    if screen.as_json:
        print_json(_body(asked, answers, switch, found, code))
    else:
        show(Console(file=sys.stdout, highlight=False, soft_wrap=True), everything, asked.known.devices, found)
    return code


def _picture() -> Callable[[str, Sequence[ModeAnswer | SwitchAnswer], Sequence[DeviceFacts]], bytes]:
    """Give what draws a plan, or say which extra is missing before anything is measured."""
    try:
        from splitctl.cli.plan_picture import picture  # noqa: PLC0415 - an extra, which other commands do without
    except ModuleNotFoundError as error:
        way = "pip install 'splitctl[plot]', or leave out --plot"
        raise click.UsageError(f"drawing needs the package {error.name}: {way}") from error
    return picture


def _gather(
    facts: ModelFacts,
    placement: Placement,
    prompt_mode: SplitMode | None,
    free: Mapping[str, int],
    chunk: int | None,
    reserver: Reserver,
) -> _Asked:
    """Ask the library for its devices and, mode by mode, for what it would take."""
    told = reserver(placement).library
    devices = devices_told(told, placement, free)
    prompt = dataclasses.replace(placement, mode=prompt_mode or placement.mode)
    if prompt_mode is not None and prompt_mode is not placement.mode:
        prompt = dataclasses.replace(prompt, tensor_split=None)
    if chunk:
        prompt = with_chunk(prompt, chunk)
    real = {device["name"] for device in told["devices"]}
    batches = [prompt.n_ubatch, *((1024, 2048, _MAX_CHUNK) if chunk == 0 else ())]
    reservations: dict[SplitMode, Sequence[Reservation]] = {}
    of_search: dict[SplitMode, Sequence[Reservation]] = {}
    unsaid: dict[SplitMode, str] = {}
    build = BuildFacts(told["version"], max_devices=told["max_devices"])
    asked = _Asked(placement, prompt, Known(facts, devices, reservations, of_search), build, unsaid)
    for mode in asked.modes:
        target = _in_mode(placement, mode)
        if not set(target.devices) <= real:
            unsaid[mode] = f"{', '.join(sorted(set(target.devices) - real))} is not here to be asked"
        elif asked.refused(mode):
            unsaid[mode] = "the mode is refused"
        else:
            begins = sizes_of_search(target, facts)
            answer = reserver(target, sorted({*sizes_of_chunks(target, facts, batches), *begins}))
            reservations[mode], unsaid[mode] = answer.reservations, answer.why
            of_search[mode] = of_sizes(answer.reservations, target, facts, begins)
    return asked


def _sure(asked: _Asked, reserver: Reserver) -> _Asked:
    """Ask the library too about the contexts around every largest one."""
    goals: list[tuple[Placement, ...]] = [(_in_mode(asked.generate, mode),) for mode in asked.modes]
    if asked.switch is not None:
        goals.append(asked.switch)

    def ask(mode: SplitMode, sizes: Sequence[Size]) -> Sequence[Reservation]:
        return reserver(_in_mode(asked.generate, mode), sizes).reservations

    return dataclasses.replace(asked, known=searched(asked.known, goals, ask))


def _in_mode(placement: Placement, mode: SplitMode) -> Placement:
    """Change the mode; a split belongs to its mode."""
    split = placement.tensor_split if mode is placement.mode else None
    return dataclasses.replace(placement, mode=mode, tensor_split=split)


def _answer(asked: _Asked, mode: SplitMode) -> ModeAnswer:
    diagnostics = asked.judged(mode)
    warnings = tuple(diagnostic.reason for diagnostic in diagnostics if not diagnostic.blocking)
    return dataclasses.replace(
        answer_mode(asked.known, _in_mode(asked.generate, mode)),
        refused=rules.refused(diagnostics),
        warnings=warnings,
        unsaid=asked.unsaid.get(mode, ""),
    )


def _code(asked: _Asked, answers: Sequence[ModeAnswer], switch: SwitchAnswer | None, chunk: Chunk | None) -> ExitCode:
    wanted = {asked.generate.mode, asked.prompt.mode}
    bad = any(answer.refused or not answer.fits for answer in answers if answer.plan.placement.mode in wanted)
    bad = bad or (switch is not None and not switch.fits) or (chunk is not None and chunk.refused)
    return ExitCode.REFUSED if bad else ExitCode.DONE


def _body(
    asked: _Asked, answers: Sequence[ModeAnswer], switch: SwitchAnswer | None, chunk: Chunk | None, code: ExitCode
) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": str(asked.known.facts.path),
        "architecture": asked.known.facts.architecture,
        "build": asked.build.version,
        "mode": asked.generate.mode.value,
        "prompt_mode": asked.prompt.mode.value,
        "machine": [dataclasses.asdict(device) for device in asked.known.devices],
        "modes": {answer.plan.placement.mode.value: mode_json(answer) for answer in answers},
        "switch": switch_json(switch) if switch is not None else None,
        "tiers": tiers_json(switch) if switch is not None else None,
        "ubatch": None,
        "exit_code": int(code),
    }
    if chunk is not None:
        body["ubatch"] = {
            "n_ubatch": chunk.n_ubatch,
            "least": MIN_CHUNK,
            "refused": chunk.refused,
            "limited_by": need_json(chunk.limited_by) if chunk.limited_by else None,
            "text": chunk_text(chunk),
        }
    return body
