"""`splitctl bench`: measures a model on this machine in every mode, and keeps what it found."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from splitctl.carry.durable import replacing
from splitctl.cli.bench_text import csv_of, markdown_of, print_tables
from splitctl.cli.child import Interrupts
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
from splitctl.cli.output import EXIT_OF_FAULT, ExitCode, Screen
from splitctl.cli.profiled import find_profile, profile_json, source_line
from splitctl.host.timing import served_times
from splitctl.ipc.benching import Bencher, Benching, BenchReport
from splitctl.ipc.jobs import Progress
from splitctl.ipc.probes import DEADLINE_S
from splitctl.ipc.profiles import KeptProfile, ProfileKey, driver_text, keep, with_kept
from splitctl.ipc.reserving import Reserver, devices_told
from splitctl.model.facts import ModelFacts, read_facts
from splitctl.model.identity import statuses
from splitctl.outcome import WeightsTier, to_plain
from splitctl.placement import Placement, SplitMode
from splitctl.planning.plane import conclusion, plane_of
from splitctl.planning.profile import ModeNotMeasured, Profile
from splitctl.planning.schedule import roomy, together, widths

_BUDGET_S, _QUICK_S = 600.0, 60.0
_ROUNDS, _QUICK_ROUNDS = 5, 3
_PAIR = (SplitMode.LAYER, SplitMode.TENSOR)
_TIERS = (WeightsTier.FILE, WeightsTier.RESIDENT, WeightsTier.PINNED)

#: Draws a profile into a picture file of a kind: its data.
Draw = Callable[[Profile, int, str, str], bytes]


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or not all(1 <= one < 1 << 20 for one in sizes):
        raise ValueError(f"{text!r} is not a list of sizes, such as 512,1024")
    return tuple(dict.fromkeys(sizes))


@click.command()
@model_option
@click.option(
    "-sm",
    "--split-mode",
    "modes",
    type=MODE,
    multiple=True,
    help="A mode to measure; all that the rules allow if none is named.",
)
@click.option(
    "--ubatch",
    "n_ubatches",
    type=Parsed("N,...", _sizes),
    default=(),
    help="Sizes of micro-batches to try; otherwise -ub, and twice and four times as much, up to -b.",
)
@click.option(
    "--budget",
    "budget_s",
    type=click.FloatRange(min=1.0),
    metavar="SECONDS",
    help=f"How long it may take.  [default: {_BUDGET_S:g}; with --quick {_QUICK_S:g}]",
)
@click.option("--quick", is_flag=True, help="Layer and tensor mode alone, with one -ub, in a minute.")
@click.option("--md", "as_md", is_flag=True, help="Print tables in Markdown.")
@click.option("--csv", "as_csv", is_flag=True, help="Print a line for each thing that was measured, as CSV.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also draw which choice is best for which prompt and answer, as PNG, SVG or PDF (the extra plot).",
)
@click.option("--no-keep", is_flag=True, help="Do not keep the profile for explain, run and serve.")
@click.option("--show", is_flag=True, help="Print the profile that is kept, and measure nothing.")
@click.option(
    "--deadline",
    "deadline_s",
    type=click.FloatRange(min=0.1),
    default=DEADLINE_S,
    show_default=True,
    metavar="SECONDS",
    help="A child that is silent for longer counts as hung.",
)
@partial(placement_options, left_out=("mode",), serving=True)
@library_option
@rpc_option
@verbose_option
@with_screen
def bench(
    *,
    model: Path,
    modes: tuple[SplitMode, ...],
    n_ubatches: tuple[int, ...],
    budget_s: float | None,
    quick: bool,
    as_md: bool,
    as_csv: bool,
    plot: Path | None,
    no_keep: bool,
    show: bool,
    deadline_s: float,
    placement: Placement,
    library: Path | None,
    rpc: tuple[str, ...],
    screen: Screen,
) -> int:
    """Measure how fast a model reads, generates and switches here, in every mode, and keep it as a profile."""
    if as_md + as_csv + screen.as_json > 1:
        raise click.UsageError("--json, --md and --csv: one of them")
    measuring = {"-sm": modes, "--ubatch": n_ubatches, "--budget": budget_s, "--quick": quick, "--no-keep": no_keep}
    if show and (named := [flag for flag, given in measuring.items() if given]):
        raise click.UsageError(f"--show measures nothing and prints all that is kept; leave out {', '.join(named)}")
    told = _Telling(screen, _picture(plot) if plot is not None else None, plot, as_md=as_md, as_csv=as_csv)
    if show:
        return _show(model, placement, library, rpc, told)
    facts = read_facts(model)
    if facts.is_encoder_only or facts.is_diffusion or facts.gives_embeddings:
        raise click.BadParameter(f"{facts.name} generates nothing; wanted: a language model", param_hint="-m")
    about = Reserver(model, library, os.environ, rpc)(placement).library
    devices = devices_told(about, placement, {})
    wanted = tuple(dict.fromkeys(modes)) or (_PAIR if quick else (*_PAIR, SplitMode.NONE, SplitMode.ROW))
    # A batch holds its micro-batches.
    placement = dataclasses.replace(placement, n_batch=max(placement.n_batch, *n_ubatches, 1))
    n_ctx = _longest(facts, placement)
    placement = roomy(facts, placement, devices, wanted)
    what = Benching(
        model=model,
        facts=facts,
        library=Path(about["path"]),
        rpc=rpc,
        devices=devices,
        placement=placement,
        modes=wanted,
        n_ubatches=n_ubatches or (widths(placement)[:1] if quick else widths(placement)),
        n_seqs=together(placement.n_seq_max),
        tiers=_TIERS,
        budget_s=budget_s or (_QUICK_S if quick else _BUDGET_S),
        rounds=_QUICK_ROUNDS if quick else _ROUNDS,
        deadline_s=deadline_s,
    )
    report = _run(what, screen)
    if report.profile is None and report.failure is not None:
        return screen.fail(report.failure.name, report.failure.message, EXIT_OF_FAULT[report.failure.fault])
    kept = None
    if statuses(facts.files) != tuple(header.status for header in facts.headers):
        message = f"the files of {model} changed meanwhile, so nothing was kept; measure again"
        return screen.fail("FileChanged", message, ExitCode.FAILED)
    if report.profile is not None:
        placement = placement.changed(flash_attn=report.flash_attn)
        names = tuple(one["name"] for one in about["devices"])
        key = ProfileKey.of(Path(about["path"]), facts, placement, names, rpc)
        kept = KeptProfile(
            key, report.profile, time.time(), about["version"], driver_text(), model.absolute(), facts.name, _version(),
            report.cuts,
        )  # fmt: skip
    return _finish(kept, report, n_ctx, told, is_kept=not no_keep)


@dataclasses.dataclass(frozen=True, slots=True)
class _Telling:
    """In which forms an answer is wanted."""

    screen: Screen
    draw: Draw | None
    plot: Path | None
    as_md: bool
    as_csv: bool

    def __call__(self, kept: KeptProfile, n_ctx: int, body: dict[str, Any]) -> ExitCode:
        """Tell a profile, and draw it where that is wanted."""
        screen, profile = self.screen, kept.profile
        sentence = conclusion(profile, n_ctx)
        body = {
            "model": {"path": str(kept.model_path), "name": kept.model_name},
            "library": kept.library_version,
            "driver": kept.driver,
            "made_at": kept.made_at,
            "key": to_plain(kept.key),
            "profile": to_plain(profile),
            "cuts": list(kept.cuts),
            "sentence": sentence,
            **body,
        }
        code = self._drawn(kept, n_ctx)
        screen.end_bars()
        if screen.as_json:
            screen.answer({**body, "exit_code": int(code)})
            return code
        for one in kept.cuts:
            screen.line(f"cut for want of time: {one}")
        if self.as_csv:
            screen.answer({}, csv_of(profile).rstrip("\n"))
            screen.line(sentence)
        elif self.as_md:
            screen.answer({}, markdown_of(profile), "", f"{sentence}.")
        else:
            print_tables(profile)
            screen.answer({}, sentence)
        return code

    def _drawn(self, kept: KeptProfile, n_ctx: int) -> ExitCode:
        if self.draw is None or self.plot is None:
            return ExitCode.DONE
        try:
            plane_of(kept.profile, n_ctx, 2)
            title = f"{kept.model_name} on {','.join(kept.key.devices)}"
            data = self.draw(kept.profile, n_ctx, title, self.plot.suffix[1:].lower() or "png")
            with replacing(self.plot, len(data)) as temporary:
                temporary.write_bytes(data)
        except ModeNotMeasured as error:
            self.screen.line(f"the picture was not drawn into {self.plot}: {error.wanted}")
            return ExitCode.FAILED
        except (OSError, ValueError) as error:
            why = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            self.screen.line(f"the picture was not drawn into {self.plot}: {why}; --show --plot tries again")
            return ExitCode.FAILED
        return ExitCode.DONE


def _picture(path: Path) -> Draw:
    """Give what draws, or say what is missing before anything is measured."""
    try:
        from splitctl.cli.bench_picture import KINDS, picture  # noqa: PLC0415 - an extra, which others do without
    except ModuleNotFoundError as error:
        way = "pip install 'splitctl[plot]', or leave out --plot"
        raise click.UsageError(f"drawing needs the package {error.name}: {way}") from error
    if path.suffix[1:].lower() not in KINDS:
        raise click.BadParameter(f"{path.name!r} does not end in one of {', '.join(KINDS)}", param_hint="--plot")
    if not path.parent.is_dir():
        raise click.BadParameter(f"there is no folder {path.parent}; make it, or name another", param_hint="--plot")
    return picture


def _run(what: Benching, screen: Screen) -> BenchReport:
    """Measure and show how it goes; Ctrl-C ends the child under way."""

    def progress(event: Progress) -> None:
        if event.note or screen.console.is_terminal:
            screen.progress(event)

    with Interrupts() as interrupts:
        bencher = Bencher(
            os.environ, progress, screen.library_output, lambda: interrupts.count > 0, beside=served_times
        )
        return bencher(what)


def _finish(kept: KeptProfile | None, report: BenchReport, n_ctx: int, told: _Telling, *, is_kept: bool) -> ExitCode:
    """Tell what was found and keep it, unless it was stopped on the way."""
    screen, path, why, stays = told.screen, None, "", ""
    if report.is_cancelled:
        message = "cancelled; nothing was kept"
        measured = None if kept is None else to_plain(kept.profile)
        if kept is not None and not screen.as_json:
            print_tables(kept.profile)
        return screen.fail("Cancelled", message, ExitCode.CANCELLED, {"profile": measured})
    if kept is None:
        why = "; ".join(f"{one.what}: {one.why}" for one in report.left_out) or "nothing was said"
        return screen.fail("NothingMeasured", f"no mode could be measured: {why}", ExitCode.FAILED)
    if is_kept:
        try:
            whole, stays = with_kept(kept)
            path = keep(whole)
        except OSError as error:
            why, stays = f"{error.strerror or error} ({error.filename})", ""
        screen.end_bars()
        if why:
            screen.line(f"the profile was not kept: {why}")
        if stays:
            screen.line(f"kept beside it, because this bench has less: {stays}; to forget that, remove {path} first")
    body = {"kept": None if path is None else str(path), "kept_of_earlier": stays, "why_not_kept": why}
    code = told(kept, n_ctx, body | {"seconds": report.seconds})
    if path is not None and not screen.as_json:
        screen.line(f"kept in {path}")
    return code


def _show(model: Path, placement: Placement, library: Path | None, rpc: tuple[str, ...], told: _Telling) -> ExitCode:
    """Print what is kept of a model as it would lie, a stale profile with what has changed."""
    found = find_profile(model, placement, library, rpc)
    kept = found.kept or found.stale
    if kept is None:
        return told.screen.fail("NoProfile", found.why, ExitCode.FAILED)
    told.screen.line(source_line(kept))
    if found.why:
        told.screen.line(f"stale: {found.why}")
    n_ctx = _longest(read_facts(model), placement)
    return told(kept, n_ctx, {"kept_profile": profile_json(found)})


def _longest(facts: ModelFacts, placement: Placement) -> int:
    """Tell how many tokens a prompt and its answer may have together."""
    return placement.n_ctx // placement.n_streams or facts.n_ctx_train


def _version() -> str:
    try:
        return metadata.version("splitctl")
    except metadata.PackageNotFoundError:
        return "not installed"
