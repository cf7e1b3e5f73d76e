"""Put a hosted session through every fault: each stage of a switch x each way to fail, both ways, one and four streams.

    python -m tools.faults [--json] [--real] [--few] [-k TEXT] [--kind KIND] [--streams N] [--jobs 2] [--lib PATH]

Without more it plays the whole table on the stub library of the tests, which aborts, hangs and damages bytes on
request (it needs a C compiler). `--real` plays the part that needs no stub, killed and stopped workers, on a real
build and a real model.

cells           cells that were played
passed, failed  how many of them went well, and not; `failures` has the reasons
not_applicable  cells that make no sense, by reason: no library call is made there, nothing comes back, and the like

Exit code 0: nothing failed and something passed.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.stublib import COMPILER, build, write_model
from tools import greedy_gaps
from tools.fault_cells import (
    N_STREAMS,
    Cell,
    End,
    Kind,
    ahead_cells,
    beside_cells,
    cells,
    few_ahead_cells,
    few_beside_cells,
    few_cells,
    few_pinned_cells,
    few_real_beside_cells,
    few_real_cells,
    few_resident_cells,
    pinned_cells,
    real_beside_cells,
    real_cells,
    resident_cells,
)
from tools.fault_play import Played, Reference, Setup, play_cell, undisturbed
from tools.places import small_model, usable_library

#: A worker that is asked to do something and says nothing for so long counts as hung [seconds].
STUB_DEADLINE_S = 4.0
REAL_DEADLINE_S = 8.0
#: Microseconds that a decode of the stub takes, so that streams last longer than a switch waits for its turn.
_PACE_US = 4000
#: The same while a second worker starts, which takes a second or more.
_SLOW_PACE_US = 150_000

_STUB_PROMPTS = ("the quick brown fox", "jumps", "over the lazy dog again and again", "x")
_REAL_PROMPTS = ("Once upon a time there was a little girl", "The capital of France is", "In 1969 men", "Water boils")
_BOS = 256


@dataclass(slots=True)
class Tally:
    """What the cells came to.

    Args:
        passed: how many went well.
        failures: what did not hold, by cell.
        not_applicable: cells that make no sense, by reason.
    """

    passed: int = 0
    failures: dict[str, list[str]] = field(default_factory=dict)
    not_applicable: dict[str, list[str]] = field(default_factory=dict)

    def add(self, cell: Cell, played: Played) -> None:
        """Count a cell that was played."""
        if played.faults:
            self.failures[cell.name] = [*played.faults, *(f"the host said: {line}" for line in played.said)]
        else:
            self.passed += 1


def stub_setup(folder: Path) -> Setup:
    """Give the setup of the stub library."""
    prompts = tuple((_BOS, *text.encode()) for text in _STUB_PROMPTS)
    model = write_model(folder / "tiny.gguf")
    env = {"STUB_FAULTS": f"pace:decode={_PACE_US}"}
    slow = f"pace:decode={_SLOW_PACE_US}"
    return Setup(build(), model, ("STUB0", "STUB1"), prompts, 100, 1024, folder, STUB_DEADLINE_S, env, beside_pace=slow)


def real_setup(folder: Path, library: Path, model: Path, devices: tuple[str, str], n_beside: int) -> Setup:
    """Give the setup of a real library; streams draw ``n_beside`` tokens where a second worker starts meanwhile."""
    prompts = tuple(tuple(tokens) for tokens in greedy_gaps.tokenize(library, model, _REAL_PROMPTS))
    n_ctx = max(1024, len(prompts) * (n_beside + 64))
    return Setup(
        library, model, devices, prompts, 16, n_ctx, folder, REAL_DEADLINE_S, is_exact=False, n_beside=n_beside
    )


async def play_all(setup: Setup, table: Sequence[Cell], *, jobs: int, quiet: bool) -> Tally:
    """Play cells.

    Args:
        setup: where.
        table: cells; those that make no sense are counted by their reason.
        jobs: cells at the same time.
        quiet: say nothing but failures.

    Returns:
        The tally.
    """
    tally = Tally()
    wanted: dict[tuple[int, int, bool], Reference] = {}
    played = [cell for cell in table if not cell.why_not]
    for cell in table:
        if cell.why_not:
            tally.not_applicable.setdefault(cell.why_not, []).append(cell.name)
    for n_streams, n_idle, is_greedy in sorted({_reference_of(cell) for cell in played}):
        wanted[n_streams, n_idle, is_greedy] = await undisturbed(setup, n_streams, n_idle, is_greedy=is_greedy)
    turn = asyncio.Semaphore(jobs)
    to_judge: list[tuple[Cell, Played]] = []
    n_done = 0

    async def one(cell: Cell) -> None:
        nonlocal n_done
        async with turn:
            seen = await play_cell(setup.of(cell), cell, wanted[_reference_of(cell)] if setup.is_exact else None)
        n_done += 1
        if not quiet and not seen.faults:
            print(f"[{n_done}/{len(played)}] {cell.name}", file=sys.stderr)
        if setup.is_exact or seen.faults:
            count(cell, seen)
        else:
            to_judge.append((cell, seen))

    def count(cell: Cell, seen: Played) -> None:
        tally.add(cell, seen)
        for fault in tally.failures.get(cell.name, ()):
            print(f"FAILED {cell.name}: {fault}", file=sys.stderr)

    await asyncio.gather(*(one(cell) for cell in played))
    if to_judge:
        judge_texts(setup, [seen for _, seen in to_judge])
        for cell, seen in to_judge:
            count(cell, seen)
    return tally


def _reference_of(cell: Cell) -> tuple[int, int, bool]:
    """Which undisturbed session a cell is held to: streams, idle sequences, greedy samplers."""
    return cell.n_streams, cell.n_idle, cell.end is End.PARKED


def judge_texts(setup: Setup, several: Sequence[Played]) -> None:
    """Compare the texts of a real model with a fresh context: floats depend on who is in a batch, tokens hardly."""
    texts = [text for played in several for text in played.texts]
    gaps = iter(greedy_gaps.measure(setup.library, setup.model, texts, always_control=False))
    for played in several:
        for index, gap in enumerate(itertools.islice(gaps, len(played.texts))):
            played.need(gap.is_right, f"stream {index}: {gap.fault}")


def n_open() -> int:
    """Count the descriptors of this process."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def leftovers(n_fds: int) -> list[str]:
    """Say what is left of all the sessions in this process."""
    children = psutil.Process().children(recursive=True)
    told = [f"process {child.pid} is left: {child.name()}" for child in children]
    now = n_open()
    return told + ([f"{now} descriptors are open, {n_fds} were before"] if now > n_fds else [])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; its exit code is 0 when nothing failed and something passed, 1 otherwise, 2 for usage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--real", action="store_true", help="killed and stopped workers of a real library")
    parser.add_argument(
        "-k", dest="text", action="append", default=[], help="cells whose name has this text; all of them"
    )
    parser.add_argument("--kind", action="append", choices=[kind.value for kind in Kind], help="only this way to fail")
    parser.add_argument("--streams", type=int, choices=N_STREAMS, help="only with so many streams")
    parser.add_argument("--few", action="store_true", help="a short table, in which every stage and every kind comes")
    parser.add_argument("--jobs", type=int, default=2, help="cells at the same time (default: 2)")
    parser.add_argument("--lib", type=Path, help="the libllama of --real (default: the first usable one)")
    parser.add_argument("--model", type=Path, help="the GGUF of --real (default: SmolLM2 in the user's cache)")
    parser.add_argument("--device", default="CPU,CPU", help="the two devices of --real (default: CPU,CPU)")
    parser.add_argument(
        "--tokens",
        type=int,
        default=120,
        help="tokens of a stream of --real while a second worker starts, which takes seconds (default: 120)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")
    options = parser.parse_args(arguments)
    if options.few:
        real = few_real_cells() + few_real_beside_cells() + few_pinned_cells()
        table = real if options.real else few_cells() + few_beside_cells() + few_ahead_cells() + few_resident_cells()
    else:
        real = [*real_cells(), *real_beside_cells(), *pinned_cells()]
        table = real if options.real else cells() + beside_cells() + ahead_cells() + resident_cells()
    table = [cell for cell in table if all(text in cell.name for text in options.text)]
    if options.kind:
        table = [cell for cell in table if cell.kind.value in options.kind]
    if options.streams:
        table = [cell for cell in table if cell.n_streams == options.streams]
    if not table:
        parser.error("no cell has such a name; names are STAGE:KIND:START>TARGET:STREAMS")
    if COMPILER is None and not options.real:
        print("the stub library needs a C compiler on PATH as cc", file=sys.stderr)
        return 1
    started = time.monotonic()
    n_fds = n_open()
    with tempfile.TemporaryDirectory() as folder:
        if options.real:
            library, model = usable_library(options.lib), options.model or small_model()
            first, _, second = options.device.partition(",")
            setup = real_setup(Path(folder), library, model, (first, second or first), options.tokens)
        else:
            setup = stub_setup(Path(folder))
        tally = asyncio.run(play_all(setup, table, jobs=options.jobs, quiet=options.quiet))
    left = leftovers(n_fds)
    result: dict[str, Any] = {
        "library": str(setup.library),
        "cells": tally.passed + len(tally.failures),
        "passed": tally.passed,
        "failed": len(tally.failures) + len(left),
        "failures": tally.failures,
        "left_over": left,
        "not_applicable": tally.not_applicable,
        "n_not_applicable": sum(map(len, tally.not_applicable.values())),
        "by_end": dict(collections.Counter(cell.end.value for cell in table if not cell.why_not)),
        "seconds": round(time.monotonic() - started, 1),
    }
    if options.json:
        print(json.dumps(result))
    else:
        print_table(result)
    return 0 if tally.passed and not result["failed"] else 1


def print_table(result: dict[str, Any]) -> None:
    """Print the result for people."""
    print(f"{result['cells']} cells in {result['seconds']} s: passed {result['passed']}, failed {result['failed']}")
    for name, faults in result["failures"].items():
        print(f"  FAILED {name}: {'; '.join(faults)}")
    for why in result["left_over"]:
        print(f"  LEFT OVER {why}")
    print(f"{result['n_not_applicable']} cells make no sense:")
    for why, names in result["not_applicable"].items():
        print(f"  {why}: {len(names)}, as {names[0]}")


if __name__ == "__main__":
    sys.exit(main())
