"""Where a switch pays, over all prompts and answers, and the sentence that sums it up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from splitctl.placement import SplitMode
from splitctl.planning.advice import advise
from splitctl.planning.cost import Choice, Work
from splitctl.planning.plane import conclusion, plane_of
from splitctl.planning.profile import ModeNotMeasured, Profile
from tests.ctl.planning.profiles import MEASURED, constant, exactly, switch


def test_the_plane_holds_the_best_of_every_way() -> None:
    """Each point is what the fastest way of a switch makes of that work."""
    plane = plane_of(MEASURED, 32768, 5)
    assert len(plane.found) == len(plane.answers) == len(plane.prompts) == 5
    for generate, row in zip(plane.answers, plane.found, strict=True):
        for prompt, one in zip(plane.prompts, row, strict=True):
            ways = advise(MEASURED, Work(prompt, generate)).ways.values()
            assert one.work == Work(prompt, generate)
            assert one.seconds[one.best] == min(way.seconds[way.best] for way in ways)


def test_a_switch_that_pays_is_told_with_its_limits() -> None:
    """The sentence names the mode for each phase, the micro-batch, and from where on the switch pays."""
    said = conclusion(MEASURED, 32768)
    assert "layer mode reads fastest with -ub 512 (800 tokens/s), tensor mode generates fastest (20.0 tokens/s)" in said
    pays = plane_of(MEASURED, 32768).switches()
    assert {one.best for one in pays} == {Choice.LAYER_TO_TENSOR}
    assert "; the switch layer->tensor, with pinned weights, pays from about" in said
    assert f"pays from about {min(one.work.prompt for one in pays):,} tokens of prompt" in said


def test_a_mode_that_is_faster_in_everything_is_told() -> None:
    """Where no switch can pay at all the sentence says why."""
    modes = (constant(SplitMode.LAYER, 800.0, 25.0), constant(SplitMode.TENSOR, 500.0, 20.0))
    said = conclusion(replace(MEASURED, modes=modes), 32768)
    assert "layer mode reads fastest with -ub 512 (800 tokens/s) and generates fastest (25.0 tokens/s)" in said
    assert "no switch pays: layer mode is best for every prompt and answer within 32,768 tokens" in said


def test_a_mode_that_generates_fastest_for_a_while_is_told() -> None:
    """Where another mode is the faster one in a short context, the sentence names both with their depths."""
    layer, tensor = MEASURED.modes
    steep = replace(layer, steps=tuple(replace(one, seconds=exactly(0.04 + one.depth / 1e5)) for one in layer.steps))
    said = conclusion(replace(MEASURED, modes=(steep, tensor)), 32768)
    assert (
        "tensor mode generates fastest at depth 4,096 (20.0 tokens/s), layer mode at depth 0 (25.0 tokens/s); " in said
    )


def test_a_switch_that_would_pay_beyond_the_context_is_told() -> None:
    """A switch that takes too long for what a context holds never pays there; the sentence says from where it would."""
    slow = tuple(
        switch(a, b, 4000.0) for a, b in ((SplitMode.LAYER, SplitMode.TENSOR), (SplitMode.TENSOR, SplitMode.LAYER))
    )
    profile = replace(MEASURED, switches=slow)
    assert plane_of(profile, 4096).switches() == ()
    said = conclusion(profile, 4096)
    assert "no switch pays within 4,096 tokens: it takes 4,000.0 s, and saves less" in said
    assert "the switch layer->tensor pays from more than" in said


def test_without_switches_that_is_said() -> None:
    """A profile without switches has no plane, and its sentence says that nobody measured one."""
    profile = Profile(MEASURED.modes)
    with pytest.raises(ModeNotMeasured):
        plane_of(profile, 4096)
    said = conclusion(profile, 4096)
    assert said.endswith("; whether a switch pays was not measured: no switch between them was measured")
    one = replace(profile, modes=profile.modes[:1])
    assert "pays was not measured: tensor mode was not measured" in conclusion(one, 4096)
