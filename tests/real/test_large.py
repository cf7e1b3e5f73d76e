"""Models of `tools.make_large`, the tiny ones: what they stand for loads, and switches."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llama_native import Library
from splitctl import SamplerSpec, Session, SplitMode
from splitctl.model.facts import read_facts
from tests.real.conftest import base
from tools.make_large import SHAPES, make_large

PROMPT = list(range(300, 340))


def test_a_mixture_of_experts_loads_and_switches(library: Library, other_mode: SplitMode, tmp_path: Path) -> None:
    """It has the experts of its shape, gives nearly the same logits in both modes, and goes on after a switch."""
    path, shape = make_large(tmp_path, "tiny-moe"), SHAPES["tiny-moe"]
    facts = read_facts(path)
    assert (facts.architecture, facts.n_layer, facts.n_embd) == ("qwen3moe", shape.n_layer, shape.n_embd)
    experts = [one for one in facts.tensors if "_exps" in one.name]
    assert {one.dims[-1] for one in experts} == {shape.n_expert}
    logits = {}
    for mode in (SplitMode.LAYER, other_mode):
        with Session.open(path, base(mode=mode, flash="on"), library=library, prober=None) as session:
            session.prefill(PROMPT)
            logits[mode] = session.logits()[-1]
            if mode is SplitMode.LAYER:
                assert session.switch(session.placement.changed(mode=other_mode)).status.value == "switched"
                moved = [token.id for token in session.generate(n=8, sampler=SamplerSpec(temp=0.0))]
    one, other = logits[SplitMode.LAYER], logits[other_mode]
    assert np.std(one) > 0
    assert np.mean((one - other) ** 2) < 1e-2 * np.var(one)
    assert len(moved) == 8
