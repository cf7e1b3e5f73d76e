"""Take states of many architectures out of the real library; read them, write them again and give them back.

    python -m tools.sweep_codec [--json] [--all | -k NAME ...] [--jobs N] [--lib PATH]

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

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools import sweeping
from tools.children import run_child
from tools.sweep_codec_cells import all_cells

CELLS = "tools.sweep_codec_cells"
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
class Tally(sweeping.Tally):
    """What the cells of all models came to.

    Args:
        states: that were read, written and taken, in all cells that passed.
        ambiguous: by what was known: cells whose state read in several ways then.
        memories: by the sections of their states: models.
    """

    states: int = 0
    ambiguous: dict[str, int] = field(default_factory=dict)
    memories: dict[str, set[str]] = field(default_factory=dict)

    def add(self, model: str, told: Mapping[str, Any]) -> None:
        """Count one cell."""
        if told["status"] == "refused":
            told = {**told, "reasons": [(told["code"], told["text"])]}
        sweeping.Tally.add(self, model, told)
        if told["status"] == "passed":
            self.states += told["n_states"]
            for known in told["ambiguous"]:
                self.ambiguous[known] = self.ambiguous.get(known, 0) + 1
            self.memories.setdefault(memory_of(told["reading"]), set()).add(model)

    def result(self) -> dict[str, Any]:
        """Give the counts for the program's JSON object."""
        return sweeping.Tally.result(self) | {
            "states": self.states,
            "ambiguous": dict(sorted(self.ambiguous.items())),
            "memories": {memory: sorted(models) for memory, models in sorted(self.memories.items())},
            "failures": self.failed[:_N_FAILURES_SHOWN],
        }


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; see `sweeping.run`."""
    cells = all_cells()

    def cells_of_model(_name: str, path: Path, library: Path, _folder: Path) -> Iterator[dict[str, Any]]:
        return cells_of(path, library, cells)

    return sweeping.run(arguments, (__doc__ or "").partition("\n")[0], Tally(), cells_of_model, len(cells))


if __name__ == "__main__":
    sys.exit(main())
