"""The sweep: what it counts, what it does not let pass, and that a death of the library stays in its child."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from splitctl.placement import SplitMode
from tests.tool import run_tool
from tools import sweep_codec, sweep_switch
from tools.check_native import native_library
from tools.children import last_words
from tools.make_dummies import recipes
from tools.sweep_cells import LAYOUTS, PAIRS, Mismatch, all_cells, distance, need_sound, placement_of, prompt
from tools.sweep_switch import ModelSweep
from tools.sweeping import DEFAULT, Tally


def test_every_pair_and_layout_is_a_cell() -> None:
    """Six ordered pairs of three modes and one pair of layer splits, in three layouts."""
    assert len(PAIRS) == len(set(PAIRS)) == 7
    assert len(all_cells()) == len(set(all_cells())) == 21
    assert {placement_of("tensor", layout).n_seq_max for layout in LAYOUTS} == {1, 4}
    assert placement_of("layer", "1").differs(placement_of("layer-1,3", "1")) == ["tensor_split"]
    assert placement_of("none", "4-unified").mode is SplitMode.NONE


def test_the_default_models_cover_what_they_must() -> None:
    """At least 16 recipes, all of which exist."""
    assert len(DEFAULT) >= 16
    assert not set(DEFAULT) - set(recipes())


def test_every_sequence_has_its_own_prompt() -> None:
    """Prompts differ, the first is longer than any window, and all tokens are in the vocabulary."""
    prompts = [tuple(prompt(seq_id, 128)) for seq_id in range(4)]
    assert len(set(prompts)) == 4
    assert len(prompts[0]) > 32
    assert all(0 <= token < 128 for tokens in prompts for token in tokens)


@pytest.mark.parametrize("row", [[0.0, 0.0], [3.0, 3.0], [], [1.0, float("nan")], [1.0, float("inf")]])
def test_a_row_that_agrees_with_anything_is_no_pass(row: list[float]) -> None:
    """Zero, constant, empty and infinite rows fail a cell."""
    with pytest.raises(Mismatch):
        need_sound(np.array(row, np.float32), "row")


def test_a_row_with_masked_tokens_is_sound() -> None:
    """Minus infinity masks a token, and is no fault."""
    need_sound(np.array([1.0, 2.0, -np.inf], np.float32), "row")


def test_distances_are_told() -> None:
    """A difference is told by its normalised error, or by the shapes."""
    one = np.array([1.0, 0.0], np.float32)
    assert distance(one, one) == "NMSE 0"
    assert "shapes" in distance(one, np.zeros(3, np.float32))


def test_the_tally_counts_each_cell_once() -> None:
    """Passed, refused and failed add up; refusals are gathered by their code."""
    tally = Tally()
    tally.add("a", {"cell": "1:none>layer", "status": "passed"})
    for cell in ("1:none>tensor", "1:layer>tensor"):
        tally.add("a", {"cell": cell, "status": "refused", "reasons": [["code", "text"], ["other", "more"]]})
    tally.add("b", {"cell": "1:none>layer", "status": "failed", "why": "died"})
    assert (tally.n_cells, tally.passed, tally.n_refused, len(tally.failed)) == (4, 1, 2, 1)
    assert tally.refused["code"] == {"cells": 2, "models": ["a"], "example": "text"}


def test_the_telling_line_is_picked() -> None:
    """An assertion is told before what the program said last."""
    assert last_words("a\nx.c:1: GGML_ASSERT(y) failed\nlast\n") == "x.c:1: GGML_ASSERT(y) failed"
    assert last_words("") == "it said nothing"


@pytest.mark.parametrize("main", [sweep_switch.main, sweep_codec.main])
def test_an_unknown_model_is_a_usage_error(main: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is no recipe ends with exit code 2."""
    with pytest.raises(SystemExit) as caught:
        main(["-k", "no-such-model"])
    assert caught.value.code == 2
    assert "--list" in capsys.readouterr().err


@pytest.mark.build
def test_real_cells_pass(library: Path, tmp_path: Path, model_of: Callable[[str], Path]) -> None:
    """A real library carries four streams of a hybrid into tensor mode and one sequence to another layer split."""
    cells = ["4-streams:layer>tensor", "1:layer>layer-1,3"]
    told = list(ModelSweep(model_of("qwen35"), library, tmp_path / "verdicts.json").cells(cells))
    assert [(one["cell"], one["status"]) for one in told] == [(cell, "passed") for cell in cells]


@pytest.mark.build
@pytest.mark.parametrize("weights", ["resident", "pinned"])
def test_real_cells_pass_in_every_tier(
    library: Path, tmp_path: Path, model_of: Callable[[str], Path], weights: str
) -> None:
    """Both placements kept, or a copy in host memory: every switch of a cell takes the weights there."""
    cells = ["4-unified:layer>tensor", "1:layer>layer-1,3"]
    sweep = ModelSweep(model_of("gemma3+gqa"), library, tmp_path / "verdicts.json", weights)
    assert [(one["cell"], one["status"]) for one in sweep.cells(cells)] == [(cell, "passed") for cell in cells]


@pytest.mark.build
@pytest.mark.parametrize(
    ("name", "weights", "cells"),
    [
        ("lfm2", "file", ["4-streams:layer>none"]),
        ("gemma3+gqa", "pinned", ["4-unified:tensor>none"]),
        ("t5", "file", ["1:layer>none", "1:layer>tensor"]),
    ],
)
def test_real_cells_pass_by_the_library_s_own_call(
    tmp_path: Path, model_of: Callable[[str], Path], name: str, weights: str, cells: list[str]
) -> None:
    """A hybrid, a sliding window and an encoder-decoder; what a rule refuses is refused by both routes."""
    if not native_library().is_file():
        pytest.skip("no native build: ci/builds --native")
    sweep = ModelSweep(model_of(name), native_library(), tmp_path / "verdicts.json", weights, "native")
    told = [(one["cell"], one["status"]) for one in sweep.cells(cells)]
    assert told == [(cell, "refused" if cell == "1:layer>tensor" else "passed") for cell in cells]


@pytest.mark.build
def test_a_death_is_contained_and_explained(library: Path, tmp_path: Path, model_of: Callable[[str], Path]) -> None:
    """A model that the library cannot run at all dies in its child, a control tells why, and the next cell goes on."""
    cells = ["4-streams:layer>none", "1:layer>none"]
    told = list(ModelSweep(model_of("t5"), library, tmp_path / "verdicts.json").cells(cells))
    assert [one["status"] for one in told] == ["refused", "passed"]
    code, text = told[0]["reasons"][0]
    assert code == "library-alone"
    assert "GGML_ASSERT" in text


@pytest.mark.build
def test_the_program_ends_with_one_json_object(library: Path) -> None:
    """One model's 21 cells: refused by rule in tensor mode, passed elsewhere, none failed."""
    env = dict(os.environ, LLAMA_NATIVE_LIB=str(library))
    done = run_tool("sweep_switch", "--json", "--quiet", "--lib", library, "-k", "bloom+8h", env=env)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["models"], result["cells"], result["passed"], result["failed"]) == (1, 21, 9, 0)
    assert result["refused_by"]["alibi-in-tensor-mode"]["cells"] == 12
