"""`splitctl verify`: what a build really does with a model in every mode, tried in child processes."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from splitctl.cli.child import Interrupts
from splitctl.cli.grids import Grid, stdout_width, table_of
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
from splitctl.cli.output import EXIT_OF_FAULT, ExitCode, Screen, one_line
from splitctl.cli.prompts import read_prompt
from splitctl.ipc.jobs import Progress
from splitctl.ipc.probes import DEADLINE_S, verdicts_file
from splitctl.ipc.verifying import Verification, Verifier, VerifyReport
from splitctl.model.facts import ModelFacts, read_facts
from splitctl.outcome import mib, to_plain
from splitctl.placement import KV_TYPES, Placement, PlacementInvalid, SplitMode, parse_tensor_split
from splitctl.probing import VerdictCache
from splitctl.probing.comparing import nmse_limit, widened
from splitctl.probing.matrix import cells, sequences
from splitctl.probing.passage import PASSAGE
from splitctl.probing.verdicts import shape_of

#: Of these a user gives several, or they are tried both ways.
_LISTED = ("mode", "tensor_split", "type_k", "type_v", "offload_kqv", "n_seq_max", "kv_unified")

_COLUMNS = (
    "", "mode", "cache", "K/V", "split", "sequences", "result", "NMSE", "same top", "PPL", "text", "state", "resident",
    "buffers",
)  # fmt: skip
_SPARE = ("buffers", "resident", "text", "state", "PPL", "same top", "NMSE", "cache", "split")

_WHERE = {"both": (True, False), "devices": (True,), "host": (False,)}


def _cache_types(text: str) -> tuple[str, ...]:
    types = tuple(part.strip() for part in text.split(","))
    for one in types:
        if one not in KV_TYPES:
            raise ValueError(f"{one!r} is not one of {', '.join(KV_TYPES)}")
    return types


_CACHE_TYPES = Parsed("TYPE,...", _cache_types)


@click.command()
@model_option
@click.option("--text", "text_file", type=click.Path(), metavar="FILE", help="The text to read, instead of our own.")
@click.option("--tokens", type=click.IntRange(2, 65536), default=256, show_default=True, help="Most tokens of it.")
@click.option(
    "-n", "--predict", type=click.IntRange(1, 4096), default=16, show_default=True, help="Tokens generated after it."
)
@click.option(
    "-sm",
    "--split-mode",
    "modes",
    type=MODE,
    multiple=True,
    help="A mode to try; all if none is named.",
)
@click.option(
    "-ts", "--tensor-split", "splits", multiple=True, metavar="N0,N1,...",
    help="A split to try beside the library's own; may be given more than once.",
)  # fmt: skip
@click.option(
    "-ctk", "--cache-type-k", "types_k", type=_CACHE_TYPES, default=("f16",),
    help="Cache types of keys to try; f16 if none is named.",
)  # fmt: skip
@click.option(
    "-ctv", "--cache-type-v", "types_v", type=_CACHE_TYPES, default=(),
    help="Cache types of values, each with each of the keys'; without it the same as the keys'.",
)  # fmt: skip
@click.option(
    "--cache", "where", type=click.Choice(list(_WHERE)), default="both", show_default=True, help="Where the cache lies."
)
@click.option(
    "-np", "--parallel", "n_seq", type=click.IntRange(1, 64), default=2, show_default=True, metavar="N",
    help="Sequences that are tried at once as well, in one cache and with a stream each; 1 tries none.",
)  # fmt: skip
@click.option(
    "--deadline", type=click.FloatRange(min=0.1), default=DEADLINE_S, show_default=True, metavar="SECONDS",
    help="A child that is silent for longer counts as hung.",
)  # fmt: skip
@click.option("--no-remember", is_flag=True, help="Do not keep what was found for the checks of later switches.")
@partial(placement_options, left_out=_LISTED)
@library_option
@rpc_option
@verbose_option
@with_screen
def verify(
    *,
    model: Path,
    text_file: str | None,
    tokens: int,
    predict: int,
    modes: tuple[SplitMode, ...],
    splits: tuple[str, ...],
    types_k: tuple[str, ...],
    types_v: tuple[str, ...],
    where: str,
    n_seq: int,
    deadline: float,
    no_remember: bool,
    placement: Placement,
    library: Path | None,
    rpc: tuple[str, ...],
    screen: Screen,
) -> int:
    """Try a model in every mode, in child processes that may die, and compare what they compute."""
    pairs = [(k, v) for k in types_k for v in types_v] or [(k, k) for k in types_k]
    facts = _facts(model)
    asked = Verification(
        model=model,
        facts=facts,
        library=library,
        rpc=rpc,
        text=PASSAGE if text_file is None else read_prompt(None, text_file, needed=True),
        cells=cells(placement, modes or tuple(SplitMode), pairs, _splits(splits, placement), _WHERE[where], n_seq),
        n_tokens=tokens,
        n_generate=predict,
        deadline_s=deadline,
    )
    cache = None if no_remember else VerdictCache(verdicts_file())
    try:
        report = _run(asked, cache, screen)
    except OSError as error:
        why = error.strerror or str(error)
        message = f"nothing more could be tried: {why} ({error.filename or 'a child process'})"
        return screen.fail(type(error).__name__, message, ExitCode.FAILED)
    if report.failure is not None:
        failure = report.failure
        return screen.fail(failure.name, failure.message, EXIT_OF_FAULT[failure.fault])
    return _finish(asked, report, screen)


def _facts(model: Path) -> ModelFacts:
    facts = read_facts(model)
    if facts.is_encoder_only or facts.is_diffusion or facts.gives_embeddings:
        raise click.BadParameter(f"{facts.name} generates nothing; wanted: a language model", param_hint="-m")
    return facts


def _splits(texts: tuple[str, ...], placement: Placement) -> list[tuple[float, ...]]:
    found: list[tuple[float, ...]] = []
    for text in texts:
        try:
            split = parse_tensor_split(text)
            if split is not None:
                found.append(placement.changed(tensor_split=split).tensor_split or split)
        except PlacementInvalid as error:
            message = f"{error.value!r} is not possible; wanted: {error.wanted}"
            raise click.BadParameter(message, param_hint="-ts") from error
    return found


def _run(asked: Verification, cache: VerdictCache | None, screen: Screen) -> VerifyReport:
    """Try the cells and show how it goes; Ctrl-C ends the one under way."""

    def progress(event: Progress) -> None:
        if event.note or screen.console.is_terminal:
            screen.progress(event)

    def cell(found: dict[str, Any]) -> None:
        screen.line(f"  {_label(found)}: {one_line(_said(found))}")

    with Interrupts() as interrupts:
        verifier = Verifier(
            env=os.environ,
            cache=cache,
            on_progress=progress,
            on_cell=cell,
            on_output=screen.library_output,
            is_cancelled=lambda: interrupts.count > 0,
        )
        return verifier(asked)


def _finish(asked: Verification, report: VerifyReport, screen: Screen) -> ExitCode:
    """Show what was found, and choose the exit status: a cell that dies is a finding and no failure."""
    body = _body(asked, report)
    reference = report.cells[0] if report.cells else None
    # The bar leaves the terminal to the table.
    screen.end_bars()
    if report.cells and not screen.as_json:
        _show(body)
    if report.is_cancelled:
        message = f"cancelled after {len(report.cells)} of {len(asked.cells)} cells"
        return screen.fail("Cancelled", message, ExitCode.CANCELLED, body)
    if reference is None or reference["verdict"] != "ok":
        why = _said(reference) if reference else "it said nothing"
        message = f"{asked.cells[0].label()} is what the others are compared with, and it came to: {why}"
        return screen.fail("ReferenceFailed", message, ExitCode.FAILED, body)
    return screen.answer(body)


def _body(asked: Verification, report: VerifyReport) -> dict[str, Any]:
    facts = asked.facts
    return {
        "library": report.library or None,
        "model": {
            "path": str(facts.path),
            "name": facts.name,
            "architecture": facts.architecture,
            "n_layer": facts.n_layer,
            "n_head_kv": list(facts.n_head_kv),
            "weight_bytes": facts.weight_bytes,
        },
        "shape": shape_of(facts),
        "placement": to_plain(asked.cells[0].placement),
        "cells": report.cells,
        "n_cells": len(asked.cells),
        "remembered": report.remembered,
    }


def _label(found: dict[str, Any]) -> str:
    split = "" if found["tensor_split"] is None else ",".join(f"{one:g}" for one in found["tensor_split"]) + " split, "
    several = sequences(found["n_seq"], unified=found["kv_unified"])
    where = f"cache on the {found['cache']}{several and ', '}{several}"
    return f"{found['mode']}, {split}{found['type_k']}/{found['type_v']}, {where}"


def _said(found: dict[str, Any]) -> str:
    end = found["end"] or {}
    if end.get("assert"):
        return f"{found['verdict']}: {end['name']} while {end['stage']}, {end['assert']}"
    if end.get("by") == "signal":
        return f"{found['verdict']}: {end['name']} while {end['stage']}"
    words = found["verdict"] if not found["why"] else f"{found['verdict']}: {found['why']}"
    if found.get("effective") not in {None, found["mode"]}:
        words += f" (in effect: {found['effective']})"
    return f"{words} (without pipeline parallelism: its buffer did not fit)" if found.get("degraded") else words


def _show(body: dict[str, Any]) -> None:
    """Print the table, and below it what is said of cells that are not simply right."""
    library, model = body["library"] or {}, body["model"]
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    title = f"{model['name']} ({model['architecture']}) on {library.get('version')}"
    rows = tuple(_row(number, found) for number, found in enumerate(body["cells"], start=1))
    console.print(table_of(Grid(title, _COLUMNS, rows, n_left=7, spare=_SPARE), stdout_width()))
    console.print("* the others are compared with it: NMSE of the logits, how often the top token is the same")
    for found in body["cells"]:
        if found.get("nmse_control") is not None:
            console.print(_control(found), markup=False)
    for number, found in enumerate(body["cells"], start=1):
        said = _said(found)
        if said != found["verdict"]:
            console.print(f"{number}: {one_line(said)}", markup=False)


def _control(found: dict[str, Any]) -> str:
    """Say how far a reference is from itself, and which limit follows."""
    types = found["type_k"], found["type_v"]
    limit = widened(nmse_limit(*types), found["nmse_control"])
    own = f"{'/'.join(types)} differs from itself by {found['nmse_control']:.1e} when it adds in another order"
    return f"* {own}: the limit is {limit:.3g}"


def _row(number: int, found: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(number),
        found["mode"] + (" *" if found["reference"] else ""),
        found["cache"],
        f"{found['type_k']}/{found['type_v']}",
        "" if found["tensor_split"] is None else ",".join(f"{one:g}" for one in found["tensor_split"]),
        sequences(found["n_seq"], unified=found["kv_unified"]),
        found["verdict"],
        _number(found.get("nmse"), ".1e"),
        _top(found),
        _number(found.get("perplexity"), ".3f"),
        found.get("text_hash", "-"),
        _state(found),
        mib(found.get("rss_peak_bytes")),
        mib(found.get("buffer_bytes")),
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _top(found: dict[str, Any]) -> str:
    """Show how often the top token is the same; rows where it differs by noise alone are counted apart."""
    if found.get("top1_agreement") is None:
        return "-"
    ties = f" +{found['top1_ties']} ties" if found["top1_ties"] else ""
    return f"{found['top1_agreement']:.1%}{ties}"


def _state(found: dict[str, Any]) -> str:
    if found.get("state_bytes") is None:
        return "-"
    back = "same" if found.get("state_equal") else "not back"
    return f"{mib(found['state_bytes'])}, {back}"
