"""Real reports about split modes that `verify` and `explain` have the answer to, each with that answer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splitctl.ipc.probes import Prober
from splitctl.ipc.verifying import Verification, Verifier
from splitctl.model.facts import read_facts
from splitctl.placement import Placement, SplitMode
from splitctl.planning.cost import Choice, ModeRates, Rates, Work, compare
from splitctl.probing import ProbeVerdict, Verdict, VerdictCache
from splitctl.probing.comparing import Tally, is_tie
from splitctl.probing.matrix import cells
from splitctl.switching import rules
from splitctl.switching.rules import BuildFacts, HostFacts, SessionFacts
from tests.ctl.model_facts import model_facts
from tests.stublib import build, needs_compiler, write_model

_BASE = Placement(devices=("STUB0", "STUB1"), n_ctx=256, n_threads=1)


def _env(faults: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("STUB_")}
    return clean | ({"STUB_FAULTS": faults} if faults else {})


def _found(
    folder: Path, mode: SplitMode, faults: str, cache: VerdictCache | None = None, deadline_s: float = 60.0
) -> list[dict[str, Any]]:
    model = write_model(folder / "tiny.gguf")
    some = cells(_BASE, [mode], [("f16", "f16")], [], [True])
    asked = Verification(model, read_facts(model), build(), (), some, "the quick brown fox " * 4, 32, 4, deadline_s)
    return Verifier(_env(faults), cache)(asked).cells


def _blocking(cache_type: str, mode: SplitMode, library: BuildFacts, probe: ProbeVerdict | None = None) -> list[str]:
    target = Placement(mode=mode, devices=("CPU", "CPU"), type_k=cache_type, type_v=cache_type)
    host, session = HostFacts({"CPU": "cpu"}), SessionFacts({})
    found = rules.check(None, target, model_facts(), library, host, session, probe)
    return [one.code for one in found if one.blocking]


@pytest.mark.parametrize(
    ("prompt", "generate", "best"),
    [
        (58300, 1000, Choice.LAYER_TO_TENSOR),
        (58300, 200, Choice.LAYER),
        (3000, 1000, Choice.TENSOR),
        (58300, 300, Choice.LAYER),
        (58300, 320, Choice.LAYER_TO_TENSOR),
    ],
)
def test_p1_a_switch_pays_in_a_band_only(prompt: int, generate: int, best: Choice) -> None:
    """P1: with the measured rates the switch is proposed inside the band and nowhere else."""
    rates = Rates(5.2, ModeRates(807.57, 14.80), ModeRates(507.92, 19.76))
    assert compare(rates, Work(prompt, generate)).best is best


def test_p3_a_quantized_cache_is_judged_by_build_and_the_try_wins() -> None:
    """P3: the table knows builds by number, an unknown one is to be tried, and what a try found wins."""
    old, new, unknown = (
        BuildFacts("xllamacpp 2026.9.11063"),
        BuildFacts("xllamacpp 2026.10.11549"),
        BuildFacts("other 1"),
    )
    assert _blocking("iq4_nl", SplitMode.TENSOR, old) == ["cache-type-in-tensor-mode"]
    assert _blocking("iq4_nl", SplitMode.LAYER, old) == []
    assert _blocking("q8_0", SplitMode.TENSOR, old) == []
    assert _blocking("iq4_nl", SplitMode.TENSOR, new) == []
    right = ProbeVerdict(Verdict.OK, numbers={"nmse": 0.017})
    assert _blocking("iq4_nl", SplitMode.TENSOR, unknown) == ["cache-type-in-tensor-mode"]
    assert _blocking("iq4_nl", SplitMode.TENSOR, unknown, right) == []
    wrong = ProbeVerdict(Verdict.WRONG, "NMSE 0.5 (limit 0.1)")
    assert _blocking("q8_0", SplitMode.TENSOR, new, wrong) == ["probe-wrong"]


@needs_compiler
@pytest.mark.stub
def test_p9_a_row_split_that_acts_as_layer_is_named(tmp_path: Path) -> None:
    """P9: a build that takes row mode and splits no buffer is reported as layer; one that returns is told."""
    _, row = _found(tmp_path, SplitMode.ROW, "")
    assert (row["mode"], row["effective"], row["verdict"]) == ("row", "layer", "ok")
    _, row = _found(tmp_path, SplitMode.ROW, "load:null:row")
    assert (row["loads"], row["end"]["by"]) == (False, "return")


@needs_compiler
@pytest.mark.stub
def test_p9_a_load_that_hangs_is_ended(tmp_path: Path) -> None:
    """P9: a load that never returns is killed at the deadline, and that is the finding."""
    _, tensor = _found(tmp_path, SplitMode.TENSOR, "load:hang:tensor", deadline_s=3.0)
    assert (tensor["loads"], tensor["verdict"], tensor["end"]["by"]) == (False, "dies", "deadline")


@needs_compiler
@pytest.mark.stub
def test_p10_logits_that_are_silently_wrong_are_refused_from_then_on(tmp_path: Path) -> None:
    """P10: a mode that computes constants loads and does not fail; its numbers give it away, and the rules know it."""
    cache = VerdictCache(tmp_path / "probes.json")
    layer, tensor = _found(tmp_path, SplitMode.TENSOR, "decode:const:tensor", cache)
    assert (layer["verdict"], tensor["verdict"], tensor["loads"]) == ("ok", "wrong", True)
    assert tensor["nmse"] > 0.02
    facts = read_facts(tmp_path / "tiny.gguf")
    known = Prober(build(), _env(""), cache).known(_BASE.changed(mode=SplitMode.TENSOR), facts)
    assert known is not None
    target = _BASE.changed(mode=SplitMode.TENSOR)
    host = HostFacts({"STUB0": "gpu", "STUB1": "gpu"})
    found = rules.check(None, target, facts, BuildFacts("xllamacpp 2026.10.11549"), host, SessionFacts({}), known)
    assert "probe-wrong" in [one.code for one in found if one.blocking]


def test_p10_a_fault_past_some_length_shows_in_the_worst_stretch() -> None:
    """P10: garbage that begins after hundreds of right tokens is found, however good the text is on the whole."""
    random, tally = np.random.default_rng(3), Tally()
    for index in range(600):
        row = random.standard_normal(200).astype(np.float32)
        tally.add(row if index < 580 else np.roll(row, 1), row)
    assert tally.worst_nmse > 1.0
    assert tally.nmse < 0.1


def test_p11_another_top_token_within_noise_is_a_tie() -> None:
    """P11: two candidates 1e-4 apart under noise of 1e-3 are a tie and no failure."""
    random = np.random.default_rng(11)
    theirs = random.standard_normal(1000).astype(np.float32)
    first, second = (int(one) for one in np.argsort(theirs)[::-1][:2])
    theirs[first] = theirs[second] + np.float32(1e-4)
    mine = theirs + np.float32(1e-3) * random.standard_normal(1000).astype(np.float32)
    mine[first], mine[second] = theirs[first] - np.float32(1e-3), theirs[second] + np.float32(1e-3)
    assert int(mine.argmax()) != int(theirs.argmax())
    assert is_tie(mine, theirs)
    tally = Tally()
    tally.add(mine, theirs)
    assert (tally.n_ties, tally.n_same_top) == (1, 0)
    assert tally.nmse < 1e-5


@needs_compiler
@pytest.mark.stub
def test_p13_a_decode_that_hangs_is_ended_and_remembered(tmp_path: Path) -> None:
    """P13: a collective that never returns costs the deadline once; from then on the placement is refused."""
    cache = VerdictCache(tmp_path / "probes.json")
    _, tensor = _found(tmp_path, SplitMode.TENSOR, "decode:hang:tensor@2", cache, deadline_s=3.0)
    assert (tensor["verdict"], tensor["end"]["by"]) == ("dies", "deadline")
    facts = read_facts(tmp_path / "tiny.gguf")
    known = Prober(build(), _env(""), cache).known(_BASE.changed(mode=SplitMode.TENSOR), facts)
    assert known is not None
    assert "it hangs" in known.why


def test_p14_the_opposite_direction_is_proposed_where_it_is_measured() -> None:
    """P14: where tensor mode reads 40 % faster and generates slower, tensor first and then layer is the answer."""
    rates = Rates(2.0, ModeRates(500.0, 30.0), ModeRates(700.0, 20.0))
    assert compare(rates, Work(50_000, 2_000)).best is Choice.TENSOR_TO_LAYER


@needs_compiler
@pytest.mark.stub
def test_p16_a_load_without_pipeline_parallelism_is_right_and_degraded(tmp_path: Path) -> None:
    """P16: the library's own retry with a smaller buffer is no failure, and is told."""
    layer, tensor = _found(tmp_path, SplitMode.TENSOR, "init:pipeline:layer")
    assert (layer["verdict"], layer["degraded"]) == ("ok", True)
    assert (tensor["verdict"], tensor["degraded"]) == ("ok", False)
