"""The schedule of a bench: as much as the time allows, and what is cut is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitctl.placement import Placement, SplitMode
from splitctl.planning.memory import DeviceFacts
from splitctl.planning.schedule import Look, Schedule, Wish, roomy, schedule, together, widths
from tests.ctl.model_facts import model_facts

_HOST = (DeviceFacts("CPU", "cpu", 64 << 30), DeviceFacts("host", "cpu", 64 << 30))
_WISH = Wish(2048, 8192, (1, 2, 4), (512, 1024, 2048), ("file", "pinned", "resident"))
_FAST = {SplitMode.LAYER: Look(1e-4, 0.01, 1.0, 0.5), SplitMode.TENSOR: Look(2e-4, 0.008, 1.0, 0.5)}
_SLOW = {mode: Look(0.02, 0.1, 3.0, 1.0) for mode in _FAST}


def _seconds(plan: Schedule, looks: dict[SplitMode, Look]) -> float:
    return plan.rounds_s(looks) + plan.switches_s(looks)


def test_with_time_enough_nothing_is_cut() -> None:
    """All of the wish is planned: up to a batch at once, deep ones, every size, way and number of sequences."""
    plan = schedule(_WISH, _FAST, 600.0)
    assert plan.cuts == ()
    assert (plan.chunk, plan.depths, plan.lengths) == (2048, (0, 2048, 4096), (32, 128, 512))
    assert (plan.n_ubatches, plan.n_seqs, plan.tiers) == (_WISH.n_ubatches, _WISH.n_seqs, _WISH.tiers)
    assert plan.held == (256, 4096)


def test_what_is_cut_is_said() -> None:
    """Where the time is short, each thing that is less is named with both numbers."""
    plan = schedule(_WISH, _SLOW, 300.0)
    assert _seconds(plan, _SLOW) <= 300.0
    assert f"most tokens at once: {plan.chunk}, not 2,048" in plan.cuts
    assert "-ub: 512, not 512/1,024/2,048" in plan.cuts
    assert plan.tiers[0] == "file"


def test_what_saves_nothing_is_not_cut() -> None:
    """Where placing a model takes the time, repetitions of switches go, and their ways and deep reads stay."""
    looks = {mode: Look(0.00025, 0.0145, 8.0, 4.6) for mode in (SplitMode.LAYER, SplitMode.TENSOR)}
    plan = schedule(replace(_WISH, room=20480), looks, 180.0)
    assert _seconds(plan, looks) <= 180.0
    assert (plan.switch_rounds, plan.tiers) == (1, _WISH.tiers)
    assert plan.depths[-1] >= 2048


def test_where_both_placements_stay_a_switch_places_nothing() -> None:
    """Switches with resident weights are not counted as if each of them loaded the model."""
    looks = {mode: replace(look, place_s=60.0) for mode, look in _FAST.items()}
    plan = schedule(replace(_WISH, n_ubatches=(512,)), looks, 1e6)
    seconds = {way: replace(plan, tiers=(way,)).switches_s(looks) for way in ("file", "resident")}
    assert seconds["resident"] < seconds["file"] / 4


def test_without_any_time_the_least_is_measured() -> None:
    """One read, one step, once, however long they take."""
    plan = schedule(_WISH, _SLOW, 0.0)
    assert (plan.chunk, plan.depths, plan.n_seqs, plan.rounds, plan.tiers) == (32, (0,), (1,), 1, ())


def test_switches_are_given_up_before_everything_else_is_small() -> None:
    """Where a switch takes longer than there is time, the time goes to the modes."""
    looks = {mode: replace(look, place_s=100.0, open_s=100.0) for mode, look in _FAST.items()}
    plan = schedule(replace(_WISH, n_ubatches=(512,)), looks, 60.0)
    assert plan.tiers == ()
    assert plan.chunk == 2048


def test_one_mode_alone_has_no_switches() -> None:
    """A switch has two ends: without one of them no time is kept for it."""
    looks = {SplitMode.LAYER: _FAST[SplitMode.LAYER]}
    assert schedule(_WISH, looks, 600.0).switches_s(looks) == 0.0


def test_sessions_that_are_opened_anew_take_their_time() -> None:
    """Where sessions do not fit at once, each round pays for opening them."""
    plan = schedule(_WISH, _FAST, 600.0)
    more = plan.rounds_s(_FAST, reopened=True) - plan.rounds_s(_FAST)
    assert more == pytest.approx(2 * 1.0 * (3 * plan.rounds - 2))


@given(
    st.integers(1, 4096), st.integers(512, 1 << 17), st.floats(1e-6, 1.0), st.floats(1e-4, 2.0), st.floats(0.0, 600.0)
)
def test_every_schedule_can_be_done(n_batch: int, room: int, token_s: float, step_s: float, left_s: float) -> None:
    """Whatever the numbers: depths ascend from 0, reads fit a batch, and all fits the context, and the time."""
    looks = {mode: Look(token_s, step_s, 1.0, 0.5) for mode in _FAST}
    plan = schedule(replace(_WISH, n_batch=n_batch, room=room), looks, left_s)
    assert plan.depths[0] == 0
    assert list(plan.depths) == sorted(set(plan.depths))
    assert 1 <= plan.chunk <= n_batch
    assert all(n < plan.chunk for n in plan.lengths)
    assert plan.depths[-1] + plan.chunk < room
    assert plan.held == tuple(sorted(set(plan.held)))
    assert 0 < plan.held[0] <= plan.held[-1] < room
    assert 1 in plan.n_seqs
    assert plan.rounds >= 1
    assert _seconds(plan, looks) <= left_s or plan.rounds == 1


def test_what_is_worth_trying() -> None:
    """Micro-batches double twice up to the batch, sequences double up to the most."""
    assert widths(Placement()) == (512, 1024, 2048)
    assert widths(Placement(n_batch=512)) == (512,)
    assert widths(Placement(n_batch=700, n_ubatch=512)) == (512, 700)
    assert [together(n) for n in (1, 2, 3, 8)] == [(1,), (1, 2), (1, 2, 3), (1, 2, 4, 8)]


def test_a_context_is_as_large_as_fits() -> None:
    """Without a context that is asked one is taken that every depth fits in, less where the memory is short."""
    facts = model_facts(n_ctx_train=32768)
    free = Placement(devices=("CPU", "CPU"))
    assert roomy(facts, free, _HOST, (SplitMode.LAYER, SplitMode.TENSOR)).n_ctx == 20480
    assert roomy(facts, free.changed(n_seq_max=2), _HOST, (SplitMode.LAYER, SplitMode.TENSOR)).n_ctx == 2 * 20480
    assert roomy(facts, free.changed(n_ctx=777), _HOST, (SplitMode.LAYER, SplitMode.TENSOR)).n_ctx == 777
    small = roomy(
        facts,
        free,
        tuple(DeviceFacts(one.name, one.kind, 200 << 20) for one in _HOST),
        (SplitMode.LAYER, SplitMode.TENSOR),
    )
    assert 512 <= small.n_ctx < 20480
