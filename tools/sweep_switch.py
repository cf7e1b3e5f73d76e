#!/usr/bin/env python3
"""Switch models of many architectures between every pair of modes; hold each to a context that never switched.

    tools/sweep_switch.py [--json] [--all | -k NAME ...] [--jobs N] [--lib PATH]

A cell is one model, one layout of sequences (one; four in one buffer; four with a stream each) and one ordered pair of
modes. It checks: the state's bytes, the carried logits, positions, tokens and samplers are what they were; a round trip
leaves everything as it was; going on by one token and by several gives, bit for bit, what a fresh context in the target
mode gives that got the same state; a refused mode leaves a session that works and holds what it held.

passed    every check held
refused   by a rule or by the probe before anything was freed, with a working session after it; or `library-alone`: a
          control process that knows no switch showed that the library cannot run this model and layout at all
failed    anything else, a death of the process too

Exit code 0: nothing failed and something passed.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llama_native import Library, NativeError
from tools import make_dummies
from tools.sweep_cells import all_cells
from tools.sweep_children import run_child

CELLS = Path(__file__).with_name("sweep_cells.py")
#: Longest time that one model's cells may take [seconds]; a hang is a failure too.
MODEL_TIMEOUT_S = 900.0
CONTROL_TIMEOUT_S = 120.0

#: What each default model is there for.
DEFAULT: dict[str, str] = {
    "llama": "plain attention",
    "llama+gqa": "grouped KV heads",
    "llama+mqa": "a single KV head",
    "llama+6h3": "three KV heads on two devices",
    "qwen3+gqa": "K-norm",
    "qwen3+mqa": "K-norm with one KV head, which kills tensor mode",
    "gemma2": "sliding window in every second layer",
    "gemma3+mqa": "sliding window, K-norm and one KV head",
    "gpt-oss": "sliding window with attention sinks",
    "qwen2vl": "M-RoPE, whose cells hold 12 bytes more",
    "deepseek2": "MLA, keys only",
    "deepseek32": "MLA with an indexer",
    "mamba": "recurrent",
    "rwkv7": "recurrent, aborts in tensor mode",
    "jamba": "hybrid",
    "qwen35": "hybrid that runs in tensor mode",
    "lfm2": "hybrid with a sliding window",
    "llama+moe": "mixture of experts",
    "qwen3moe": "mixture of experts with K-norm",
    "bloom+8h": "ALiBi",
    "baichuan+8h": "ALiBi by the number of layers",
    "refact+8h": "ALiBi with one KV head",
    "bert": "encoder only",
    "t5": "encoder and decoder",
    "llada": "diffusion, no memory",
    "deepseek4": "a state with its own magic",
    "chameleon": "dies in tensor mode, not refused by the library",
}


@dataclass(slots=True)
class Tally:
    """What the cells of all models came to."""

    models: set[str] = field(default_factory=set)
    passed: int = 0
    refused: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)

    @property
    def n_cells(self) -> int:
        """Cells that came to something."""
        return self.passed + len(self.refused) + len(self.failed)

    def add(self, model: str, told: dict[str, Any]) -> None:
        """Count one cell."""
        self.models.add(model)
        if told["status"] == "passed":
            self.passed += 1
        elif told["status"] == "refused":
            self.refused.append({"model": model, "cell": told["cell"], "reasons": told["reasons"]})
        else:
            self.failed.append({"model": model, "cell": told["cell"], "why": told["why"]})

    def reasons(self) -> dict[str, dict[str, Any]]:
        """Gather the refusals by their code: how many cells, which models, and one text."""
        gathered: dict[str, dict[str, Any]] = {}
        for one in self.refused:
            for code, text in one["reasons"]:
                entry = gathered.setdefault(code, {"cells": 0, "models": [], "example": text})
                entry["cells"] += 1
                if one["model"] not in entry["models"]:
                    entry["models"].append(one["model"])
        return dict(sorted(gathered.items()))


class ModelSweep:
    """The cells of one model, tried in children that may die."""

    def __init__(self, name: str, path: Path, library: Path, verdicts: Path) -> None:
        self.name = name
        self.path = path
        self.library = library
        self.verdicts = verdicts
        self._controls: dict[tuple[str, str], str] = {}

    def cells(self, wanted: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Try cells.

        Args:
            wanted: their names.

        Yields:
            For each: cell, status (passed, refused, failed), and reasons or why.
        """
        waiting = list(wanted)
        while waiting:
            job = {**self._model(), "verdicts": str(self.verdicts), "cells": waiting}
            child = run_child(CELLS, job, MODEL_TIMEOUT_S)
            for one in child.told:
                waiting.remove(one["cell"])
                yield self._judged(one)
            if not waiting:
                return
            died = child.at["cell"] if child.at.get("cell") in waiting else waiting[0]
            waiting.remove(died)
            stage = child.at.get("stage", "starting")
            early = stage in {"opening", "filling"}
            why = f"{child.end or 'it ended early'} while {stage}"
            yield self._judged({"cell": died, "status": "not-opened" if early else "failed", "why": why})

    def _model(self) -> dict[str, str]:
        """What every child is told."""
        return {"library": str(self.library), "path": str(self.path)}

    def _judged(self, told: dict[str, Any]) -> dict[str, Any]:
        """Let a control process say whether a session that did not open is the library's own doing."""
        if told["status"] != "not-opened":
            return told
        layout, pair = told["cell"].split(":")
        origin = pair.split(">")[0]
        alone = self._control(origin, layout)
        if alone:
            text = f"the library alone cannot run this model in {origin} mode with layout {layout}: {alone}"
            return {"cell": told["cell"], "status": "refused", "reasons": [["library-alone", text]]}
        return {"cell": told["cell"], "status": "failed", "why": f"{told['why']} (the library alone can do it)"}

    def _control(self, place: str, layout: str) -> str:
        """Run the library alone; returns how it ended, or nothing when it went well."""
        key = (place, layout)
        if key not in self._controls:
            job = {**self._model(), "place": place, "layout": layout}
            self._controls[key] = run_child(CELLS, job, CONTROL_TIMEOUT_S).end
        return self._controls[key]


def chosen_library(named: Path | None) -> Library:
    """Open the library that the children will use.

    Raises:
        NativeError: there is none that can be used.
    """
    return Library.open(named, env=os.environ)


def sweep(library: Library, paths: dict[str, Path], *, jobs: int, quiet: bool) -> Tally:
    """Try all cells of all models.

    Args:
        library: the library, opened here only to be named.
        paths: model name -> its file.
        jobs: models tried at the same time.
        quiet: say nothing but failures.

    Returns:
        The tally.
    """
    tally = Tally()
    cells = all_cells()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:

        def one(item: tuple[str, Path]) -> tuple[str, list[dict[str, Any]]]:
            name, path = item
            model = ModelSweep(name, path, library.path, Path(folder) / f"{name}-verdicts.json")
            return name, list(model.cells(cells))

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
    parser.add_argument("--all", action="store_true", help="every recipe, as long as it takes")
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
    folder = options.models or make_dummies.default_folder()
    made, unmade = {}, {}
    for name, path, reason in make_dummies.make_many(folder, names):
        if path is None:
            unmade[name] = reason
        else:
            made[name] = path
    tally = sweep(library, {name: made[name] for name in names if name in made}, jobs=options.jobs, quiet=options.quiet)
    result = {
        "library": library.version or library.build,
        "models": len(tally.models),
        "cells": tally.n_cells,
        "passed": tally.passed,
        "refused": len(tally.refused),
        "refused_by": tally.reasons(),
        "failed": len(tally.failed) + len(unmade),
        "failures": tally.failed,
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
    print(f"passed {result['passed']}, refused {result['refused']}, failed {result['failed']}")
    for code, entry in result["refused_by"].items():
        print(f"  {code}: {entry['cells']} cells of {len(entry['models'])} models, as: {entry['example']}")
    for one in result["failures"]:
        print(f"  FAILED {one['model']} {one['cell']}: {one['why']}")
    for name, why in result["not_made"].items():
        print(f"  NOT MADE {name}: {why}")


if __name__ == "__main__":
    sys.exit(main())
