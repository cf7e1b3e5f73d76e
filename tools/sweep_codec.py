#!/usr/bin/env python3
"""Take states of many architectures out of the real library; read them, write them again and give them back.

    tools/sweep_codec.py [--json] [--all | -k NAME ...] [--jobs N] [--lib PATH]

A cell is one model, one layout of sequences (one; four in one buffer; four with a stream each), one pair of cache
types, flash attention on or off, and one form: the state of all sequences, or the states of each. It checks: the bytes
are read to the last one with nothing known, with what the model's file says, with what a session knows, and as a
session reads for the second time, and mean the same each time; they hold the tokens, sequences and types that were put
in; what is written again are the same bytes; the library takes them into a fresh context and gives the same bytes back;
all cells of a model have sections of the same shape. A memory with a magic of its own (DSV4) is opaque, carried whole.

passed    every check held
refused   the library alone does not make this context, does not decode in it, or does not take its own state again
failed    anything else, a death of the process while the codec reads too

Exit code 0: nothing failed and something passed.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llama_native import NativeError
from tools import make_dummies
from tools.sweep_children import run_child
from tools.sweep_codec_cells import all_cells
from tools.sweep_switch import DEFAULT, chosen_library

CELLS = Path(__file__).with_name("sweep_codec_cells.py")
#: Longest time that one model's cells may take [seconds]; a hang is a failure too.
MODEL_TIMEOUT_S = 600.0
_N_FAILURES_SHOWN = 20

#: What the library says, as a reason to count by; the first that is found.
REASONS: tuple[tuple[str, str], ...] = (
    ("quantized-v-without-flash-attention", r"(quantized V cache|V cache quantization) requires flash"),
    ("block-does-not-divide-head", r"block size \d+ does not divide"),
    ("unequal-cache-types", r"does not support different K .* and V .* cache types"),
)


@dataclass(slots=True)
class Tally:
    """What the cells of all models came to."""

    models: set[str] = field(default_factory=set)
    passed: int = 0
    states: int = 0
    refused: dict[str, dict[str, Any]] = field(default_factory=dict)
    n_refused: int = 0
    ambiguous: dict[str, int] = field(default_factory=dict)
    memories: dict[str, set[str]] = field(default_factory=dict)
    failed: list[dict[str, Any]] = field(default_factory=list)

    @property
    def n_cells(self) -> int:
        """Cells that came to something."""
        return self.passed + self.n_refused + len(self.failed)

    def add(self, model: str, told: dict[str, Any]) -> None:
        """Count one cell."""
        self.models.add(model)
        if told["status"] == "passed":
            self.passed += 1
            self.states += told["n_states"]
            for known in told["ambiguous"]:
                self.ambiguous[known] = self.ambiguous.get(known, 0) + 1
            self.memories.setdefault(memory_of(told["reading"]), set()).add(model)
        elif told["status"] == "refused":
            self.n_refused += 1
            entry = self.refused.setdefault(told["code"], {"cells": 0, "models": [], "example": told["text"]})
            entry["cells"] += 1
            if model not in entry["models"]:
                entry["models"].append(model)
        else:
            self.failed.append({"model": model, "cell": told["cell"], "why": told["why"]})


def memory_of(reading: Sequence[Sequence[Any]]) -> str:
    """Name a memory by its sections."""
    parts = []
    for kind, layers, has_v, ext_bytes in reading:
        if kind == "opaque":
            parts.append(f"opaque {layers}")
        elif kind == "attention":
            parts.append(
                "attention" + (f" ext {ext_bytes}" if ext_bytes else "") + ("" if has_v or not layers else " K")
            )
        else:
            parts.append(f"{kind}{' with history' if has_v else ''}")
    return " + ".join(parts) or "no memory"


def reason_of(code: str, text: str) -> str:
    """Give a refusal the code that it is counted by: what the library says, where that is known."""
    return next((name for name, pattern in REASONS if re.search(pattern, text)), code)


def cells_of(path: Path, library: Path, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Try cells of one model in children that may die.

    Args:
        path: the model.
        library: the libllama.
        wanted: names of the cells.

    Yields:
        For each: cell, status, and what belongs to it.
    """
    waiting = list(wanted)
    shape: list[Any] | None = None
    while waiting:
        job = {"library": str(library), "path": str(path), "cells": waiting}
        child = run_child(CELLS, job, MODEL_TIMEOUT_S)
        for told in child.told:
            waiting.remove(told["cell"])
            if told["status"] == "passed":
                shape = shape or told["reading"]
                yield told if told["reading"] == shape else differs(told, shape)
            elif told["status"] == "refused":
                yield {**told, "code": reason_of(told["code"], told["text"])}
            else:
                yield told
        if waiting:
            yield from lost(waiting, child.at, child.end or "it ended early")


def differs(told: dict[str, Any], shape: Sequence[Any]) -> dict[str, Any]:
    """Say that a cell's state has other sections than the model's first."""
    why = f"it reads as {memory_of(told['reading'])} ({told['reading']}), other cells as {shape}"
    return {"cell": told["cell"], "status": "failed", "why": why}


def lost(waiting: list[str], at: dict[str, Any], end: str) -> Iterator[dict[str, Any]]:
    """Judge the cells that a child took with it, and take them off the list: the library's doing before and after ours.

    Yields:
        For each: cell, status, and reason or why.
    """
    stage = at.get("stage", "starting")
    died = at["cell"] if at.get("cell") in waiting else waiting[0]
    if stage == "loading":
        gone, code = list(waiting), "no-model"
    elif stage == "taking":
        # Both forms come out of the same context.
        setting = died.rpartition(":")[0]
        gone, code = [cell for cell in waiting if cell.rpartition(":")[0] == setting], "died-before-the-state"
    else:
        gone, code = [died], "died-restoring" if stage == "restoring" else ""
    for cell in gone:
        waiting.remove(cell)
        if code:
            yield {"cell": cell, "status": "refused", "code": reason_of(code, end), "text": end}
        else:
            yield {"cell": cell, "status": "failed", "why": f"{end} while {stage}"}


def sweep(library: Path, paths: dict[str, Path], *, jobs: int, quiet: bool) -> Tally:
    """Try all cells of all models.

    Args:
        library: the libllama.
        paths: model name -> its file.
        jobs: models tried at the same time.
        quiet: say nothing but failures.

    Returns:
        The tally.
    """
    tally = Tally()
    cells = all_cells()

    def one(item: tuple[str, Path]) -> tuple[str, list[dict[str, Any]]]:
        name, path = item
        return name, list(cells_of(path, library, cells))

    with ThreadPoolExecutor(jobs) as pool:
        for index, (name, told) in enumerate(pool.map(one, paths.items()), 1):
            for words in told:
                tally.add(name, words)
                if words["status"] == "failed":
                    print(f"FAILED {name} {words['cell']}: {words['why']}", file=sys.stderr)
            if not quiet:
                counts = collections.Counter(words["status"] for words in told)
                found = " ".join(f"{counts[status]} {status}" for status in ("passed", "refused", "failed"))
                print(f"[{index}/{len(paths)}] {name}: {found}", file=sys.stderr)
    return tally


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program.

    Args:
        arguments: words of the command line; None: the process's own.

    Returns:
        Exit code: 0 when nothing failed and something passed, 1 otherwise, 2 for usage.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--all", action="store_true", help="every recipe; a few minutes")
    parser.add_argument("-k", "--only", action="append", metavar="NAME", help="this model; may be given again")
    parser.add_argument("--jobs", type=int, default=2, help="models at the same time (default: 2)")
    parser.add_argument("--lib", type=Path, help="the libllama (default: the first usable one)")
    parser.add_argument("--models", type=Path, help="folder of the dummy models (default: the user's cache)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    options = parser.parse_args(arguments)
    known = make_dummies.recipes()
    names = options.only or (list(known) if options.all else list(DEFAULT))
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"no recipe is called {unknown[0]!r}; tools/make_dummies.py --list names them all")
    try:
        library = chosen_library(options.lib)
    except NativeError as error:
        print(error, file=sys.stderr)
        return 1
    started = time.monotonic()
    made, unmade = {}, {}
    for name, path, reason in make_dummies.make_many(options.models or make_dummies.default_folder(), names):
        if path is None:
            unmade[name] = reason
        else:
            made[name] = path
    paths = {name: made[name] for name in names if name in made}
    tally = sweep(library.path, paths, jobs=options.jobs, quiet=options.quiet)
    result = {
        "library": library.version or library.build,
        "models": len(tally.models),
        "cells": tally.n_cells,
        "passed": tally.passed,
        "states": tally.states,
        "refused": tally.n_refused,
        "refused_by": dict(sorted(tally.refused.items())),
        "ambiguous": dict(sorted(tally.ambiguous.items())),
        "memories": {memory: sorted(models) for memory, models in sorted(tally.memories.items())},
        "failed": len(tally.failed) + len(unmade),
        "failures": tally.failed[:_N_FAILURES_SHOWN],
        "not_made": unmade,
        "seconds": round(time.monotonic() - started, 1),
    }
    if options.json:
        print(json.dumps(result))
    else:
        print_table(result)
    sound = tally.passed > 0 and tally.n_cells == len(made) * len(all_cells())
    return 0 if sound and not result["failed"] else 1


def print_table(result: dict[str, Any]) -> None:
    """Print the result for people."""
    print(f"{result['library']}: {result['models']} models, {result['cells']} cells in {result['seconds']} s")
    counts = f"passed {result['passed']} ({result['states']} states), refused {result['refused']}"
    print(f"{counts}, failed {result['failed']}")
    for code, entry in result["refused_by"].items():
        print(f"  {code}: {entry['cells']} cells of {len(entry['models'])} models, as: {entry['example']}")
    for known, n_cells in result["ambiguous"].items():
        print(f"  read in several ways where {known} is known: {n_cells} cells")
    for memory, models in result["memories"].items():
        print(f"  {memory}: {len(models)} models, as {models[0]}")
    for one in result["failures"]:
        print(f"  FAILED {one['model']} {one['cell']}: {one['why']}")
    for name, why in result["not_made"].items():
        print(f"  NOT MADE {name}: {why}")


if __name__ == "__main__":
    sys.exit(main())
