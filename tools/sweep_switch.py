"""Switch models of many architectures between every pair of modes, and compare each with a context that never switched.

    python -m tools.sweep_switch [--json] [--all | -k NAME ...] [--jobs N] [--lib PATH] [--weights file|pinned|resident]
                                 [--via composed|native] [--devices NAME,NAME]

A cell is one model, one layout of sequences (one; four in one buffer; four with a stream each) and one ordered pair of
modes. It checks: the state's bytes, the carried logits, positions, tokens and samplers are what they were; a round trip
leaves everything as it was; going on by one token and by several gives, bit for bit, what a fresh context in the target
mode gives that got the same state; a refused mode leaves a session that works and holds what it held. With --via native
the library's own call does it, each cell goes there and back by the composed route too, and what one route refuses the
other must refuse.

passed    every check held
refused   by a rule or by the probe before anything was freed, with a working session after it; or `library-alone`: a
          control process that knows no switch showed that the library cannot run this model and layout at all; or
          `pinned-refused`: the model cannot be made from a copy of its weights, and every check held with the file
failed    anything else; died: those of them where the process died

Exit code 0: nothing failed and something passed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from splitctl.outcome import Route, WeightsTier
from tools import sweeping
from tools.check_native import native_library
from tools.children import run_child
from tools.sweep_cells import DEVICES_NAME, all_cells

CELLS = "tools.sweep_cells"
#: Longest time that one model's cells may take [seconds]; a hang is a failure too.
MODEL_TIMEOUT_S = 900.0
CONTROL_TIMEOUT_S = 120.0


class ModelSweep:
    """The cells of one model, tried in children that may die."""

    def __init__(
        self, path: Path, library: Path, verdicts: Path, weights: str = "file", via: str = Route.COMPOSED.value
    ) -> None:
        self.path = path
        self.weights = weights
        self.via = via
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
            how = {"verdicts": str(self.verdicts), "weights": self.weights, "via": self.via}
            job = {**self._model(), **how, "cells": waiting}
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
            yield self._judged({"cell": died, "status": "not-opened" if early else "failed", "why": why, "died": True})

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
        return {**told, "status": "failed", "why": f"{told['why']} (the library alone can do it)"}

    def _control(self, place: str, layout: str) -> str:
        """Run the library alone; returns how it ended, or nothing when it went well."""
        key = (place, layout)
        if key not in self._controls:
            job = {**self._model(), "place": place, "layout": layout}
            self._controls[key] = run_child(CELLS, job, CONTROL_TIMEOUT_S).end
        return self._controls[key]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; see `sweeping.run`."""
    cells = all_cells()
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument(
        "--weights",
        choices=[one.value for one in WeightsTier if one is not WeightsTier.AUTO],
        default=WeightsTier.FILE.value,
        help="where switches take the weights from (default: file)",
    )
    own.add_argument(
        "--via",
        choices=[Route.COMPOSED.value, Route.NATIVE.value],
        default=Route.COMPOSED.value,
        help="who switches: this program's sequence of calls, or the library's own call (default: composed)",
    )
    own.add_argument("--devices", default="CPU,CPU", help="names of the devices (default: CPU,CPU)")
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    asked, others = own.parse_known_args(arguments)
    if asked.via == Route.NATIVE.value and not any(word.startswith("--lib") for word in others):
        if not native_library().is_file():
            own.error(
                "there is no build that can switch by itself: make one with ci/builds --native, or name it (--lib)"
            )
        arguments = [*arguments, "--lib", str(native_library())]
    os.environ[DEVICES_NAME] = asked.devices

    def cells_of(name: str, path: Path, library: Path, folder: Path) -> Iterator[dict[str, Any]]:
        return ModelSweep(path, library, folder / f"{name}-verdicts.json", asked.weights, asked.via).cells(cells)

    about = (__doc__ or "").partition("\n")[0]
    return sweeping.run(arguments, about, sweeping.Tally(), cells_of, len(cells), (own,))


if __name__ == "__main__":
    sys.exit(main())
