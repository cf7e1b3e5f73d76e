"""What the sweeps share: models of many recipes, their cells tried in children, a tally, and one command line."""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llama_native import Library, NativeError
from tools import make_dummies
from tools.places import default_folder

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
    """What the cells of all models came to.

    Args:
        models: that have a cell.
        passed: cells in which every check held.
        n_refused: cells that were refused.
        refused: by code: how many cells, which models, and one text.
        failed: model, cell and why of each cell that failed.
        died: how many of those ended their process.
    """

    models: set[str] = field(default_factory=set)
    passed: int = 0
    n_refused: int = 0
    refused: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: list[dict[str, Any]] = field(default_factory=list)
    died: int = 0

    @property
    def n_cells(self) -> int:
        """Cells that came to something."""
        return self.passed + self.n_refused + len(self.failed)

    def add(self, model: str, told: Mapping[str, Any]) -> None:
        """Count one cell: its status (passed, refused, failed), its reasons or why, and whether its process died."""
        self.models.add(model)
        if told["status"] == "passed":
            self.passed += 1
        elif told["status"] == "refused":
            self.n_refused += 1
            for code, text in told["reasons"]:
                entry = self.refused.setdefault(code, {"cells": 0, "models": [], "example": text})
                entry["cells"] += 1
                if model not in entry["models"]:
                    entry["models"].append(model)
        else:
            self.failed.append({"model": model, "cell": told["cell"], "why": told["why"]})
            self.died += bool(told.get("died"))

    def result(self) -> dict[str, Any]:
        """Give the counts for the program's JSON object."""
        return {
            "models": len(self.models),
            "cells": self.n_cells,
            "passed": self.passed,
            "refused": self.n_refused,
            "refused_by": dict(sorted(self.refused.items())),
            "failed": len(self.failed),
            "died": self.died,
            "failures": self.failed,
        }


#: Tries all cells of a model in children: its name and file, the libllama, and a folder for what is kept meanwhile.
CellsOf = Callable[[str, Path, Path, Path], Iterator[dict[str, Any]]]


def run(
    arguments: Sequence[str] | None,
    about: str,
    tally: Tally,
    cells_of: CellsOf,
    n_cells: int,
    parents: Sequence[argparse.ArgumentParser] = (),
) -> int:
    """Run a sweep as a program.

    Args:
        arguments: words of the command line; None: the process's own.
        about: one sentence for its help.
        tally: an empty one.
        cells_of: tries the cells of a model.
        n_cells: how many a model has.
        parents: read further words of the command line.

    Returns:
        Exit code: 0 when nothing failed and something passed, 1 otherwise, 2 for usage.
    """
    options, names = _options(arguments, about, parents)
    try:
        library = Library.open(options.lib, env=os.environ)
    except NativeError as error:
        print(error, file=sys.stderr)
        return 1
    started = time.monotonic()
    made, unmade = {}, {}
    for name, path, reason in make_dummies.make_many(options.models, names):
        if path is None:
            unmade[name] = reason
        else:
            made[name] = path
    _try_all(tally, {name: made[name] for name in names if name in made}, library.path, cells_of, options)
    result = {"library": library.version or library.build, **tally.result()}
    result["failed"] += len(unmade)
    result |= {"not_made": unmade, "seconds": round(time.monotonic() - started, 1)}
    if options.json:
        print(json.dumps(result))
    else:
        _print_table(result)
    sound = tally.passed > 0 and tally.n_cells == len(made) * n_cells
    return 0 if sound and not result["failed"] else 1


def _options(
    arguments: Sequence[str] | None, about: str, parents: Sequence[argparse.ArgumentParser]
) -> tuple[argparse.Namespace, list[str]]:
    """Read the command line; give it, and the names of the recipes."""
    parser = argparse.ArgumentParser(description=about, parents=parents)
    parser.add_argument("--all", action="store_true", help="every recipe")
    parser.add_argument("-k", "--only", action="append", metavar="NAME", help="this model; may be given again")
    parser.add_argument("--jobs", type=int, default=2, help="models at the same time (default: 2)")
    parser.add_argument("--lib", type=Path, help="the libllama (default: the first usable one)")
    parser.add_argument(
        "--models",
        type=Path,
        default=default_folder(),
        help="folder of the dummy models (default: the user's cache)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    options = parser.parse_args(arguments)
    known = make_dummies.recipes()
    names = options.only or list(known if options.all else DEFAULT)
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"no recipe is called {unknown[0]!r}; python -m tools.make_dummies --list names them all")
    return options, names


def _try_all(
    tally: Tally, paths: Mapping[str, Path], library: Path, cells_of: CellsOf, options: argparse.Namespace
) -> None:
    """Try all cells of all models, several models at the same time, and say how each came out."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:

        def one(name: str) -> list[dict[str, Any]]:
            return list(cells_of(name, paths[name], library, Path(folder)))

        for index, (name, told) in enumerate(zip(paths, pool.map(one, paths), strict=True), 1):
            for words in told:
                tally.add(name, words)
                if words["status"] == "failed":
                    print(f"FAILED {name} {words['cell']}: {words['why']}", file=sys.stderr)
            if not options.quiet:
                counts = collections.Counter(words["status"] for words in told)
                found = " ".join(f"{counts[status]} {status}" for status in ("passed", "refused", "failed"))
                print(f"[{index}/{len(paths)}] {name}: {found}", file=sys.stderr)


def _print_table(result: Mapping[str, Any]) -> None:
    """Print the result for people; only the codec's has states and memories."""
    print(f"{result['library']}: {result['models']} models, {result['cells']} cells in {result['seconds']} s")
    states = f" ({result['states']} states)" if "states" in result else ""
    passed, refused, failed, died = (result[name] for name in ("passed", "refused", "failed", "died"))
    print(f"passed {passed}{states}, refused {refused}, failed {failed}, died {died}")
    for code, entry in result["refused_by"].items():
        print(f"  {code}: {entry['cells']} cells of {len(entry['models'])} models, as: {entry['example']}")
    for known, n_cells in result.get("ambiguous", {}).items():
        print(f"  read in several ways where {known} is known: {n_cells} cells")
    for memory, models in result.get("memories", {}).items():
        print(f"  {memory}: {len(models)} models, as {models[0]}")
    for one in result["failures"]:
        print(f"  FAILED {one['model']} {one['cell']}: {one['why']}")
    for name, why in result["not_made"].items():
        print(f"  NOT MADE {name}: {why}")
