"""When a host switches by itself: situations, and what is decided and said about them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitctl.errors import ConfigInvalid
from splitctl.placement import SplitMode
from splitctl.planning.cost import ModeRates, Rates
from splitctl.planning.floor import Floor, Job
from splitctl.planning.learned import Learned, costs_of, costs_of_rates
from splitctl.planning.plans import Bounds, Plans
from splitctl.planning.policy import Active, Decision, Policy, Settings, Situation, Waiting
from tests.ctl.planning.profiles import MEASURED, exactly, switch

_LAYER, _TENSOR = SplitMode.LAYER, SplitMode.TENSOR
#: RTX 4070 and 3060, 27B: layer mode reads faster, tensor mode generates faster.
_RATES = Rates(3.0, ModeRates(800.0, 15.0), ModeRates(500.0, 20.0))
_COSTS = costs_of_rates(_RATES)


def _policy(rates: Rates = _RATES, **settings: float) -> Policy:
    return Policy(costs_of_rates(rates), Settings(**settings))


def _waiting(number: int, n_uncached: int, n_expected: float, waited_s: float = 0.0) -> Waiting:
    return Waiting(number, n_uncached, 0, n_expected, waited_s)


def _decided(policy: Policy, mode: SplitMode, *there: Waiting | Active, at: float = 100.0, n_seq: int = 4) -> Decision:
    waiting = tuple(one for one in there if isinstance(one, Waiting))
    active = tuple(one for one in there if isinstance(one, Active))
    return policy.decide(Situation(at, mode, waiting, active, n_seq))


# -- by what is known --------------------------------------------------------------------------------------------------


def test_it_reads_first_and_generates_after() -> None:
    """A long prompt with a long answer is read where that is fast, and generated where that is."""
    policy = _policy()
    first = _decided(policy, _TENSOR, _waiting(1, 30_000, 1000))
    assert first.mode is _LAYER
    assert first.sentence == "goes to layer: 1 prompt of 30,000 uncached tokens save 22.5 s, two switches cost 6.0 s"
    policy.switched(103.0, succeeded=True, seconds=3.0)
    reading = _decided(policy, _LAYER, Active(1, 20_000, 10_000, 1000), at=120.0)
    assert (reading.mode, reading.hold) == (_LAYER, frozenset())
    assert reading.sentence == "stays in layer: 1 prompt of 20,000 uncached tokens is read faster here"
    last = _decided(policy, _LAYER, Active(1, 0, 30_000, 1000), at=140.0)
    assert last.mode is _TENSOR
    assert last.sentence == "goes to tensor: 1 answer of 1,000 tokens to come save 16.7 s, a switch costs 3.0 s"


@pytest.mark.parametrize(
    ("mode", "one", "said"),
    [
        (_TENSOR, Waiting(1, 4000, 0, 500, 0.0), "stays in tensor: the prompt is 5,600 tokens short of paying"),
        (_LAYER, Active(1, 0, 4000, 200), "stays in layer: the answer is 52 tokens short of paying"),
        (_TENSOR, Active(1, 0, 4000, 200), "stays in tensor: 1 answer of 200 tokens to come is generated faster here"),
    ],
)
def test_it_stays_where_a_switch_does_not_pay(mode: SplitMode, one: Waiting | Active, said: str) -> None:
    """Short work stays where it is, and the sentence says how much is missing."""
    decision = _decided(_policy(), mode, one)
    assert (decision.mode, decision.hold, decision.sentence) == (mode, frozenset(), said)


def test_prompts_are_gathered() -> None:
    """While answers are generated long prompts are held, and short ones are not; then all are read together."""
    policy = _policy()
    busy = (Active(1, 0, 9000, 150), Active(2, 0, 9000, 150), Active(3, 0, 9000, 150))
    held = _decided(
        policy, _TENSOR, *busy, _waiting(4, 20_000, 400, 2.0), _waiting(5, 20_000, 400), _waiting(6, 50, 400)
    )
    assert (held.mode, held.hold) == (_TENSOR, frozenset({4, 5}))
    assert held.sentence.startswith("stays in tensor: holds 2 prompts of 40,000 uncached tokens for 18.0 s at most")
    assert held.look_again_s is not None
    assert held.look_again_s <= 18.0
    assert held.numbers["n_held"] == 2
    done = _decided(policy, _TENSOR, _waiting(4, 20_000, 400, 9.0), _waiting(5, 20_000, 400, 7.0), at=110.0)
    assert (done.mode, done.hold) == (_LAYER, frozenset())


def test_a_mode_that_is_better_in_everything_is_for_good() -> None:
    """Where one mode reads and generates faster, it is stayed in, and gone to once that pays."""
    rates = Rates(3.0, ModeRates(500.0, 15.0), ModeRates(600.0, 20.0))
    stays = _decided(_policy(rates), _TENSOR, _waiting(1, 90_000, 10), Active(2, 0, 90_000, 5))
    assert (stays.mode, stays.hold) == (_TENSOR, frozenset())
    assert stays.sentence == "stays in tensor: it is as fast as layer in everything"
    short = _decided(_policy(rates), _LAYER, Active(1, 0, 10, 60))
    assert short.sentence == "stays in layer: what is to be done is less than pays for a switch of 3.0 s to tensor"
    assert _decided(_policy(rates), _LAYER, Active(1, 0, 10, 2000)).mode is _TENSOR


# -- by what was served ------------------------------------------------------------------------------------------------


def test_a_long_run_of_small_work_in_the_wrong_mode_ends() -> None:
    """No single answer pays for a switch; many of them, one after the other, have it made, once."""
    policy, at, n_asked = _policy(), 0.0, 0
    mode = _LAYER
    for number in range(40):
        decision = _decided(policy, mode, Active(number, 0, 100, 100), at=at)
        if decision.mode is not mode:
            n_asked += 1
            mode, at = decision.mode, at + 3.0
            assert decision.sentence.startswith("goes to tensor: what was served took ")
            policy.switched(at, succeeded=True, seconds=3.0)
        step = _COSTS.step_s(mode, 1, 100)
        policy.observe_step(mode, 1, 100, step, 100)
        at += 100 * step
    assert (mode, n_asked) == (_TENSOR, 1)


def test_it_looks_again_before_regret_has_grown() -> None:
    """While an answer of unknown length goes on in the slower mode it asks to be asked again."""
    decision = _decided(_policy(), _LAYER, Active(1, 0, 100, 64))
    assert decision.mode is _LAYER
    assert decision.look_again_s == pytest.approx(1.4 * 3.0 / 0.25)


def test_while_nobody_is_there_a_switch_is_free() -> None:
    """After long prompts with short answers it waits for the next one in the mode that reads faster."""
    policy = _policy()
    for number in range(8):
        _decided(policy, _TENSOR, _waiting(number, 8000, 20), at=10.0 * number)
    decision = _decided(policy, _TENSOR, at=200.0)
    assert decision.mode is _LAYER
    assert decision.sentence.startswith("goes to layer: nobody is there, and a request like the last 8 takes ")
    assert _decided(policy, _LAYER, at=220.0).sentence == "stays in layer: nobody is there"


def test_the_policy_teaches_its_costs() -> None:
    """What it is told of served work reaches costs that learn."""
    learned = Learned(_COSTS)
    policy = Policy(learned)
    for _ in range(100):
        policy.observe_read(_LAYER, 1000, 0, 5.0)
        policy.observe_step(_TENSOR, 1, 0, 0.1)
    assert learned.read_s(_LAYER, 1000, 0) == pytest.approx(5.0, rel=0.02)
    assert learned.step_s(_TENSOR, 1, 0) == pytest.approx(0.1, rel=0.02)


# -- bounds ------------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 9000), st.integers(1, 900), st.floats(0.0, 30.0)), max_size=12),
    st.sampled_from([_LAYER, _TENSOR]),
)
def test_plans_that_are_followed_together_end_where_each_ends_alone(
    jobs: list[tuple[int, int, float]], mode: SplitMode
) -> None:
    """To go on together as long as they say the same changes nothing of any plan, to the last bit."""
    floor = Floor(_COSTS, 4, 100.0, mode)
    for number, (n_unread, n_left, waited) in enumerate(jobs):
        floor.come(Job(number, 100.0 - waited, n_unread, 0, n_left))
    plans = Plans(_COSTS, 4, Bounds(2.0, 20.0, 10.0))
    every = plans.all(floor)
    for plan, end in zip(every, plans.ends(floor, every), strict=True):
        alone = floor.copy()
        plans.follow(alone, plan)
        assert (end.at, end.mode, end.trail, end.is_empty) == (alone.at, alone.mode, alone.trail, alone.is_empty)
    assert len(floor.queue) == len(jobs)


def test_a_minimum_stay_is_kept() -> None:
    """Whatever is to be done, no switch is asked for so soon after one; afterwards it is."""
    policy = _policy(min_stay_s=30.0)
    policy.switched(100.0, succeeded=True, seconds=3.0)
    early = _decided(policy, _LAYER, Active(1, 0, 30_000, 5000), at=110.0)
    assert early.mode is _LAYER
    assert early.sentence == "stays in layer: the last switch was less than 30 s ago"
    assert early.look_again_s is not None
    assert early.look_again_s <= 20.0
    assert _decided(policy, _LAYER, Active(1, 0, 30_000, 5000), at=130.0).mode is _TENSOR


def test_a_failed_switch_backs_off_twice_as_long_each_time() -> None:
    """No switch is asked for within the backoff, which doubles up to its bound; one that succeeds ends that."""
    policy, at = _policy(backoff_s=10.0, max_backoff_s=35.0), 0.0
    work = Active(1, 0, 30_000, 5000)
    for seconds in (10.0, 20.0, 35.0, 35.0):
        policy.switched(at, succeeded=False, seconds=1.0)
        blocked = _decided(policy, _LAYER, work, at=at + seconds - 1.0)
        assert blocked.mode is _LAYER
        assert blocked.sentence == "stays in layer: the last switch failed, and none is tried for 1.0 s"
        assert blocked.numbers["backoff_s"] == pytest.approx(1.0)
        at += seconds
        assert _decided(policy, _LAYER, work, at=at).mode is _TENSOR
    policy.switched(at, succeeded=True, seconds=3.0)
    policy.switched(at, succeeded=False, seconds=1.0)
    assert _decided(policy, _LAYER, work, at=at + 10.0).mode is _TENSOR


def test_streams_are_not_paused_for_too_long() -> None:
    """A switch with a longer pause is made only while no stream generates."""
    policy = _policy(max_pause_s=2.0)
    decision = _decided(policy, _LAYER, Active(1, 0, 30_000, 5000))
    assert decision.mode is _LAYER
    assert decision.sentence == "stays in layer: a switch pauses streams for 3.0 s, and 2 s are allowed"
    assert _decided(policy, _TENSOR, _waiting(2, 90_000, 10)).mode is _LAYER


def test_a_pause_is_bounded_by_itself_and_a_switch_pays_for_what_it_slows() -> None:
    """What a switch takes beyond its pause has to be saved as well, and is no pause that streams are spared from."""
    decided = {}
    for total_s in (3.0, 15.0, 60.0):
        beside = tuple(
            replace(switch(a, b, 3.0), way="beside", total=exactly(total_s))
            for a, b in ((_LAYER, _TENSOR), (_TENSOR, _LAYER))
        )
        costs = costs_of(replace(MEASURED, switches=beside), "beside", on_processors=True)
        policy = Policy(costs, Settings(max_pause_s=4.0))
        decided[total_s] = _decided(policy, _LAYER, Active(1, 0, 4000, 2000))
    assert {total_s: one.mode for total_s, one in decided.items()} == {3.0: _TENSOR, 15.0: _TENSOR, 60.0: _LAYER}
    assert decided[15.0].sentence.endswith("a switch costs 15.0 s")
    assert decided[60.0].numbers["pause_s"] == 3.0


def test_nobody_is_held_for_too_long() -> None:
    """A prompt that has waited for the bound is not held, whatever it would save."""
    policy = _policy(max_wait_s=5.0)
    busy = tuple(Active(number, 0, 9000, 60) for number in range(3))
    assert 4 in _decided(policy, _TENSOR, *busy, _waiting(4, 20_000, 400, 1.0), _waiting(5, 20_000, 400)).hold
    decision = _decided(policy, _TENSOR, *busy, _waiting(4, 20_000, 400, 5.0), _waiting(5, 20_000, 400))
    assert decision.mode is _LAYER or 4 not in decision.hold


def test_a_mode_that_was_not_measured_is_left_alone() -> None:
    """In another mode than the two nothing is decided."""
    decision = _decided(_policy(), SplitMode.ROW, _waiting(1, 90_000, 900))
    assert (decision.mode, decision.hold, decision.look_again_s) == (SplitMode.ROW, frozenset(), None)


@pytest.mark.parametrize(
    ("name", "value"), [("min_stay_s", -1.0), ("max_wait_s", math.nan), ("max_pause_s", math.inf), ("backoff_s", 1e5)]
)
def test_settings_are_judged(name: str, value: float) -> None:
    """A bound that is none is refused by its name."""
    with pytest.raises(ConfigInvalid) as caught:
        replace(Settings(), **{name: value})
    assert caught.value.field == name
