"""Traces in simulated time: a host by hand, and the laws of the policy and of the oracle on small random traces."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from splitctl.placement import SplitMode
from splitctl.planning.cost import ModeRates, Rates
from splitctl.planning.floor import Floor, Job
from splitctl.planning.learned import MODES, Costs, Learned, costs_of_rates
from splitctl.planning.policy import Decision, Policy, Settings, Situation
from splitctl.planning.simulate import Comparison, Course, compare, follow, stay
from splitctl.planning.traces import Request

_LAYER, _TENSOR = SplitMode.LAYER, SplitMode.TENSOR
_RATES = Rates(3.0, ModeRates(1000.0, 10.0), ModeRates(500.0, 20.0))
_COSTS = costs_of_rates(_RATES)


def test_one_request_by_hand() -> None:
    """A prompt is read, a token a step follows, and nothing else takes time."""
    course = stay([Request(5.0, 3000, 1000, 10)], _COSTS, _LAYER, 1)
    assert course == Course("layer", pytest.approx(3.0), (0.0,), (2.0,))


def test_requests_share_steps_and_wait_for_a_sequence() -> None:
    """Two sequences generate in one step; the third request waits until one of them ends."""
    course = stay([Request(0.0, 1, 0, 20), Request(0.0, 1, 0, 30), Request(0.0, 1, 0, 10)], _COSTS, _TENSOR, 2)
    # The second prompt is read in a turn with the first one's first step.
    assert course.waits_s == (0.0, 0.0, pytest.approx(1.004, abs=0.002))
    assert course.busy_s == pytest.approx(31 * 0.05 + 3 * 0.002, abs=0.003)


class _Served:
    """Costs with what a host adds to a step and what a pair of tokens takes, s; all else takes what rates say."""

    def __init__(self, served_s: float, read_s: float, step_s: float) -> None:
        self._of, self._pairs = served_s, (step_s, read_s)

    def served_s(self, mode: SplitMode, n_seq: int) -> float:
        assert mode in MODES
        return self._of * n_seq

    def others_s(self, mode: SplitMode, n_pairs: float, *, is_read: bool) -> float:
        assert mode in MODES
        return self._pairs[is_read] * n_pairs

    def __getattr__(self, name: str) -> Any:
        return getattr(_COSTS, name)


def test_what_a_host_and_other_sequences_add_is_added_exactly() -> None:
    """Each step takes what a host adds to so many streams, and each token all that others hold; one alone has none."""
    request = Request(0.0, 1000, 0, 10)
    alone = stay([request], _COSTS, _LAYER, 1).busy_s
    assert stay([request], _Served(0.5, 0.25, 0.125), _LAYER, 1).busy_s == pytest.approx(alone + 10 * 0.5)
    two = [request, replace(request, prompt=100, generated=20)]
    plain = stay(two, _COSTS, _LAYER, 2).busy_s
    # While the second prompt is read the first one makes its first token; then they make 9 together, and 11 are left.
    n_steps = 1 + 9 * 2 + 11
    assert stay(two, _Served(0.5, 0.0, 0.0), _LAYER, 2).busy_s == pytest.approx(plain + 0.5 * n_steps)
    # The second prompt is read beside 1,000 tokens and half of the one that is made meanwhile.
    assert stay(two, _Served(0.0, 0.25, 0.0), _LAYER, 2).busy_s == pytest.approx(plain + 0.25 * 100 * 1000.5)
    # That one passes over half of the prompt; of the 9, in the middle, each over 100 + 4.5 and 1,001 + 4.5 tokens.
    n_pairs = 50 + 9 * (104.5 + 1005.5)
    assert stay(two, _Served(0.0, 0.0, 0.125), _LAYER, 2).busy_s == pytest.approx(plain + 0.125 * n_pairs)


def test_the_policy_is_told_what_was_measured_alone() -> None:
    """What a host and other sequences add is not taken for a mode that is slower than measured."""
    costs = _Served(0.5, 0.25, 0.125)
    learned = Learned(costs)
    two = [Request(0.0, 1000, 0, 10), Request(0.0, 100, 0, 20)]
    follow(two, Policy(learned, Settings(max_pause_s=0.0)), costs, _LAYER, 2)
    for kind, size in (("read", False), ("read", True), ("step", 1), ("step", 2)):
        assert learned.factor(kind, _LAYER, size) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("rates", "request_", "stay_s"),
    [
        (Rates(1.0, ModeRates(1.0, 1.0), ModeRates(1000.0, 1e9)), Request(0.0, 1000, 0, 10**6), 604_800.0),
        (Rates(0.0, ModeRates(1e9, 1000.0), ModeRates(1e-6, 1e9)), Request(0.0, 10**6, 0, 10**6), 604_800.0),
        (Rates(1.0, ModeRates(1e-6, 1.0), ModeRates(1.0, 1e-6)), Request(0.0, 10**12, 0, 1), 2.0),
        (Rates(0.0, ModeRates(1e-6, 1e-6), ModeRates(1e-6, 2e-6)), Request(0.0, 10**12, 0, 10**12), 2.0),
    ],
    ids=["long stay", "one mode stands still", "long prompt", "both modes stand still"],
)
def test_work_of_years_is_decided_a_few_times(rates: Rates, request_: Request, stay_s: float) -> None:
    """A policy is not asked again and again while nothing may be done, nor where the clock cannot tell times apart."""
    requests = [replace(request_, arrival=at) for at in (0.0, 1.0, 2.0)]
    n_asked = itertools.count()

    class Counted(Policy):
        def decide(self, situation: Situation) -> Decision:
            assert next(n_asked) < 20_000
            return super().decide(situation)

    costs = costs_of_rates(rates)
    course = follow(requests, Counted(costs, Settings(min_stay_s=stay_s)), costs, _LAYER, 4)
    assert len(course.waits_s) == 3


def test_nobody_there_is_no_time() -> None:
    """Time between requests does not count."""
    requests = [Request(at, 500, 0, 10) for at in (0.0, 100.0, 900.0)]
    assert stay(requests, _COSTS, _TENSOR, 4).busy_s == pytest.approx(3 * 1.5)


def test_a_prompt_is_read_in_pieces_between_steps() -> None:
    """While another generates, a step follows every micro-batch of a prompt; equal turns are one addition."""
    floor = Floor(_COSTS, 2, 0.0, _LAYER)
    floor.come(Job(0, 0.0, 1, 0, 100))
    floor.run(math.inf)
    floor.come(Job(1, 0.0, 2048, 0, 5))
    floor.run(math.inf)
    assert floor.at == pytest.approx(0.001 + 2.048 + 4 * 0.1)
    assert [(job.n_unread, job.n_left) for job in floor.active] == [(0, 96), (0, 5)]


def test_it_stops_at_the_turn_that_reaches_a_time() -> None:
    """A run that is cut short ends with the turn under way, and goes on from there to the same end."""
    whole, cut = (Floor(_COSTS, 1, 0.0, _TENSOR) for _ in range(2))
    for floor in (whole, cut):
        floor.come(Job(0, 0.0, 1, 0, 100))
        floor.run(math.inf)
    whole.run(math.inf)
    cut.run(1.01)
    assert cut.at == pytest.approx(0.002 + 21 * 0.05)
    cut.run(math.inf)
    assert (cut.at, cut.empty_since) == (pytest.approx(whole.at), pytest.approx(whole.at))


def test_where_it_pays_it_is_used() -> None:
    """Long prompts with long answers, one after the other: the policy is close to the oracle, far below each mode."""
    requests = [Request(200.0 * number, 30_000, 0, 1000, 1000) for number in range(12)]
    found = compare(requests, Policy(_COSTS), _COSTS, _TENSOR, 4)
    assert found.oracle is not None
    assert found.best_fixed.busy_s > found.auto.busy_s * 1.3
    assert found.auto.busy_s == pytest.approx(found.oracle.busy_s, rel=0.02)
    assert found.sentence.startswith("it would have paid: 25 switches by --policy auto save ")


@pytest.mark.parametrize(
    ("auto_s", "said"),
    [
        (90.0, "it would have paid: 2 switches by --policy auto save 10.0 s of 100.0 s (10.0%) against layer mode"),
        (102.0, "it would not have paid: layer mode for good saves 2.0 s of 100.0 s (2.0%) against 2 switches by"),
        (100.1, "it would not have mattered: 2 switches by --policy auto and layer mode for good differ by 0.1 s"),
    ],
)
def test_one_sentence_says_whether_it_paid(auto_s: float, said: str) -> None:
    """It names the better mode, the switches, and the difference in both."""
    courses = [Course(mode.value, busy, (0.0,), (0.0,)) for mode, busy in zip(MODES, (100.0, 130.0), strict=True)]
    found = Comparison(tuple(courses), Course("auto", auto_s, (0.0,), (0.0,), (1.0, 9.0)), None)
    assert found.sentence.startswith(said)


# -- laws --------------------------------------------------------------------------------------------------------------


class _Watched(Policy):
    """A policy whose decisions are kept."""

    def __init__(self, costs: Costs, bounds: Settings) -> None:
        super().__init__(costs, bounds)
        self.seen: list[tuple[Situation, Decision]] = []

    def decide(self, situation: Situation) -> Decision:
        self.seen.append((situation, super().decide(situation)))
        return self.seen[-1][1]


_TPS = st.floats(100.0, 5000.0)
_ALL = st.builds(
    Rates,
    st.floats(0.05, 6.0),
    st.builds(ModeRates, _TPS, st.floats(5, 100)),
    st.builds(ModeRates, _TPS, st.floats(5, 100)),
)
_ONE = st.tuples(st.floats(0.0, 40.0), st.integers(0, 20_000), st.floats(0.0, 1.0), st.integers(0, 1500))


def _trace(drawn: Sequence[tuple[float, int, float, int]]) -> list[Request]:
    at = itertools.accumulate(one[0] for one in drawn)
    return [Request(t, n, int(n * cached), g) for t, (_, n, cached, g) in zip(at, drawn, strict=True)]


@settings(max_examples=40, deadline=None)
@given(
    rates=_ALL,
    drawn=st.lists(_ONE, min_size=1, max_size=12),
    start=st.sampled_from(MODES),
    n_seq=st.sampled_from([1, 2, 4]),
    bounds=st.builds(Settings, st.floats(0.0, 20.0), st.floats(0.0, 30.0), st.floats(0.0, 10.0)),
)
@example(
    # The first prompt's bound is over, and it waits for a sequence while the second one is held.
    rates=Rates(1.0, ModeRates(100.0, 6.0), ModeRates(981.0, 5.0)),
    drawn=[(0.0, 0, 0.0, 7), (0.0, 0, 0.0, 6), (0.0, 220, 0.0, 0), (1.0, 12, 0.0, 0)],
    start=SplitMode.LAYER,
    n_seq=2,
    bounds=Settings(0.0, 1.0, 1.0),
)
def test_the_laws_on_small_traces(
    rates: Rates, drawn: list[tuple[float, int, float, int]], start: SplitMode, n_seq: int, bounds: Settings
) -> None:
    """Whatever comes, the bounds are kept, the oracle is never worse, and what the policy can lose is bounded."""
    costs = costs_of_rates(rates)
    policy = _Watched(costs, bounds)
    found = compare(_trace(drawn), policy, costs, start, n_seq)
    switched = found.auto.switched_at
    assert all(b - a >= bounds.min_stay_s + rates.switch_s - 1e-6 for a, b in itertools.pairwise(switched))
    for situation, decision in policy.seen:
        held = [one for one in situation.waiting if one.number in decision.hold]
        assert all(one.waited_s < bounds.max_wait_s for one in held)
        if held:
            assert decision.look_again_s is not None
            assert decision.look_again_s <= bounds.max_wait_s - max(one.waited_s for one in held) + 1e-2
        if decision.mode is not situation.mode and any(not one.n_unread for one in situation.active):
            assert rates.switch_s <= bounds.max_pause_s
    assert found.oracle is not None
    assert all(found.oracle.busy_s <= one.busy_s for one in found.courses)
    assert all(len(one.waits_s) == len(drawn) and min(one.waits_s) >= 0.0 for one in found.courses)
    times = [pair for one in found.courses for pair in zip(one.waits_s, one.firsts_s, strict=True)]
    assert all(0.0 <= wait <= first for wait, first in times)
    # A switch costs its pause, and at most five by having been in the wrong mode before it.
    slowest = max(one.busy_s for one in found.fixed)
    assert found.auto.busy_s <= slowest + 6 * (len(switched) + 1) * rates.switch_s
