"""What work takes, corrected by what was served; how long answers get."""

from __future__ import annotations

from dataclasses import replace

import pytest

from splitctl.placement import SplitMode
from splitctl.planning.cost import ModeRates, Rates
from splitctl.planning.floor import Floor
from splitctl.planning.learned import Answers, Learned, costs_of, costs_of_rates
from splitctl.planning.profile import ModeNotMeasured
from tests.ctl.planning.profiles import MEASURED, constant, exactly, switch

_LAYER, _TENSOR = SplitMode.LAYER, SplitMode.TENSOR
_RATES = Rates(2.0, ModeRates(1000.0, 20.0), ModeRates(500.0, 40.0), after_switch_ms=0.5)
_BOTH = replace(MEASURED, switches=(switch(_LAYER, _TENSOR, 2.0), switch(_TENSOR, _LAYER, 3.0)))


def test_rates_are_costs() -> None:
    """A token takes one by its rate, for however many sequences at once, and a switch what the file says."""
    costs = costs_of_rates(_RATES)
    assert costs.read_s(_LAYER, 500, 9000) == 0.5
    assert costs.step_s(_TENSOR, 4, 9000.0) == 0.025
    assert costs.switch(_TENSOR, _LAYER, 9000) == (2.0, 0.5)


def test_a_profile_is_costs() -> None:
    """The seconds are the profile's, each mode and direction by its own; one without a switch back is refused."""
    costs = costs_of(_BOTH, "file")
    for mode in (_LAYER, _TENSOR):
        assert costs.read_s(mode, 700, 0) == _BOTH.of(mode).read_s(700, 0)
        assert costs.step_s(mode, 2, 0.0) == _BOTH.of(mode).step_s(2, 0.0)
    assert (costs.switch(_LAYER, _TENSOR, 0)[0], costs.switch(_TENSOR, _LAYER, 0)[0]) == (2.0, 3.0)
    with pytest.raises(ModeNotMeasured, match="a switch to layer"):
        costs_of(replace(_BOTH, switches=_BOTH.switches[:1]), "file")


def test_on_processors_a_switch_beside_costs_all_of_its_time() -> None:
    """A second worker loads on the streams' processors: beyond its pause it takes the rest; elsewhere it does not."""
    switches = tuple(
        replace(one, way=way, pause=exactly(0.1), total=exactly(3.0))
        for one in _BOTH.switches
        for way in ("beside", "file")
    )
    profile = replace(_BOTH, switches=switches)
    for way, on_processors, more in (("beside", True, 2.9), ("beside", False, 0.0), ("file", True, 0.0)):
        costs = Learned(costs_of(profile, way, on_processors=on_processors))
        assert costs.switch(_LAYER, _TENSOR, 0)[0] == 0.1
        assert costs.slowed_s(_LAYER) == pytest.approx(more)
        floor = Floor(costs, 4, 10.0, _LAYER)
        assert (floor.switch(), floor.at, floor.switched_at) == tuple(
            map(pytest.approx, (0.1 + more, 10.1 + more, 10.1 + more))
        )


def test_long_reads_are_those_of_the_profile() -> None:
    """Sums of chunks that are remembered come to what the profile adds up, at any depth, within a part in a hundred."""
    deep = constant(_LAYER, 800.0, 15.0)
    slower = tuple(replace(one, seconds=exactly(one.seconds.median * (1 + one.depth / 4096))) for one in deep.reads)
    profile = replace(_BOTH, modes=(replace(deep, reads=slower), _BOTH.modes[1]))
    costs = costs_of(profile, "file")
    for n, depth in ((1, 0), (511, 77), (512, 0), (5000, 0), (700, 3000), (30_000, 12_345)):
        assert costs.read_s(_LAYER, n, depth) == pytest.approx(profile.of(_LAYER).read_s(n, depth), rel=0.01)


@pytest.mark.parametrize("times", [0.2, 0.5, 3.0, 9.0])
def test_a_wrong_profile_becomes_what_is_served(times: float) -> None:
    """After a hundred observations that all say the same, the costs say it too, in that mode alone."""
    learned = Learned(costs_of_rates(_RATES))
    for _ in range(100):
        learned.observe_read(_LAYER, 1000, 0, times * 1.0)
        learned.observe_step(_LAYER, 3, 100, times * 0.05)
        learned.observe_switch(_LAYER, _TENSOR, 100, times * 2.0)
    assert learned.read_s(_LAYER, 2000, 0) == pytest.approx(times * 2.0, rel=0.02)
    assert learned.step_s(_LAYER, 2, 0) == pytest.approx(times * 0.05, rel=0.02)
    assert learned.switch(_LAYER, _TENSOR, 0) == (pytest.approx(times * 2.0, rel=0.02), 0.5)
    assert learned.read_s(_TENSOR, 1000, 0) == 2.0
    assert learned.switch(_TENSOR, _LAYER, 0)[0] == 2.0


@pytest.mark.parametrize("seconds", [1e-9, 1e9, 0.0, -1.0, float("nan"), float("inf")])
def test_one_outlier_does_not_matter(seconds: float) -> None:
    """A single time, however absurd, moves what is known by 3 % and a little at most."""
    learned = Learned(costs_of_rates(_RATES))
    for _ in range(20):
        learned.observe_step(_TENSOR, 1, 0, 0.025)
    learned.observe_step(_TENSOR, 1, 0, seconds)
    assert learned.step_s(_TENSOR, 1, 0) == pytest.approx(0.025, rel=0.031)


@pytest.mark.parametrize(("seconds", "bound"), [(1e-6, 0.1), (1e4, 10.0)])
def test_a_correction_has_bounds(seconds: float, bound: float) -> None:
    """Whatever is served for however long, it is a tenth or ten times of what was measured at most."""
    learned = Learned(costs_of_rates(_RATES))
    for _ in range(1000):
        learned.observe_read(_TENSOR, 500, 0, seconds)
    assert learned.read_s(_TENSOR, 500, 0) == pytest.approx(bound, rel=1e-6)


def test_what_was_not_served_takes_after_its_mode() -> None:
    """A size that was never served is corrected as its mode was, and one that was by its own."""
    learned = Learned(costs_of_rates(_RATES))
    for _ in range(200):
        learned.observe_read(_LAYER, 100, 0, 0.2)
    assert learned.read_s(_LAYER, 5000, 0) == pytest.approx(10.0, rel=0.01)
    for _ in range(200):
        learned.observe_read(_LAYER, 5000, 0, 5.0)
    assert learned.read_s(_LAYER, 5000, 0) == pytest.approx(5.0, rel=0.01)
    assert learned.read_s(_LAYER, 100, 0) == pytest.approx(0.2, rel=0.01)


def test_what_a_switch_adds_to_a_step_is_not_the_modes() -> None:
    """A step that took more because of the last switch teaches nothing about its mode."""
    learned = Learned(costs_of_rates(_RATES))
    for _ in range(50):
        learned.observe_step(_LAYER, 1, 0, 0.0505, more_ms=0.5)
    assert learned.step_s(_LAYER, 1, 0) == pytest.approx(0.05)


def test_an_answer_is_expected_as_long_as_others_were() -> None:
    """What is to come is the mean over the answers that got further, and within the limit; never less than a token."""
    answers = Answers()
    for _ in range(100):
        answers.ended(None, 300)
    assert answers.expected(None) == pytest.approx(300, rel=0.02)
    assert answers.expected(None, 200) == pytest.approx(100, rel=0.02)
    assert answers.expected(50) == 50
    assert answers.expected(50, 49) == 1
    assert answers.expected(10, 10) == 1


def test_answers_of_one_limit_count_among_themselves() -> None:
    """Clients that ask for 16 tokens say nothing of those that ask for 2,000, once there were some of these."""
    answers = Answers()
    for _ in range(60):
        answers.ended(16, 16)
        answers.ended(2000, 1500)
    assert answers.expected(2000) == pytest.approx(1500, rel=0.03)
    assert answers.expected(16) == pytest.approx(16)
    assert answers.expected(-1) == answers.expected(None)


def test_an_answer_longer_than_any_is_expected_to_go_on() -> None:
    """Where none got as far, half of what it has is still to come."""
    answers = Answers()
    assert answers.expected(None) == 64
    answers.ended(None, 100)
    assert answers.expected(None, 1000) == 500
