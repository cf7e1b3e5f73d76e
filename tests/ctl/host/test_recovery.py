"""What is tried after a loss, and what a switch comes to whose worker is gone: every stage, sealed or not, on trial."""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

import pytest

from splitctl.carry.seal import Seal
from splitctl.host.ledger import ReportWrong
from splitctl.host.recovery import Attempt, Loss, Recovery, attempts
from splitctl.host.switches import Switches, read_outcome
from splitctl.ipc.orders import Sealed, StageReached, Switched, Trial
from splitctl.outcome import Stage, SwitchOutcome, SwitchStatus
from splitctl.placement import Placement, SplitMode
from splitctl.switching.machine import FALLING_BACK

LAYER = Placement(mode=SplitMode.LAYER, n_ctx=64)
TENSOR = Placement(mode=SplitMode.TENSOR, n_ctx=64)
NONE = Placement(mode=SplitMode.NONE, n_ctx=64)
OLD = Seal(0, 10, "aa" * 16, 4096, 20, "bb" * 16, LAYER)
NEW = Seal(1, 11, "cc" * 16, 4096, 21, "dd" * 16, LAYER)

_FORWARD = (
    Stage.CHECKING,
    Stage.QUIESCING,
    Stage.SAVING,
    Stage.SEALING,
    Stage.FREEING,
    Stage.PLACING,
    Stage.BUILDING,
    Stage.RESTORING,
    Stage.PROVING,
)
_BACK = (*(stage for stage in Stage if stage in FALLING_BACK), Stage.RECOMPUTING, Stage.PARKING)
_SEALED = frozenset(_FORWARD[4:])


def _outcome(status: SwitchStatus, effective: Placement | None, **fields: Any) -> dict[str, Any]:
    went_well = status in {SwitchStatus.SWITCHED, SwitchStatus.UNCHANGED}
    outcome = SwitchOutcome(status, TENSOR, effective, "" if went_well else "why", **fields)
    return dict(outcome.to_json())


def _serving(placement: Placement = LAYER) -> Switches:
    switches = Switches(LAYER)
    switches.serve_in(placement)
    return switches


def _switching(stages: tuple[Stage, ...], switches: Switches | None = None) -> Switches:
    """A switch from layer to tensor that has come through the stages; its carry is sealed before it frees."""
    switches = switches or _serving()
    switches.begin(1, TENSOR, 0.0)
    for now, stage in enumerate(stages):
        if stage is Stage.FREEING:
            switches.sealed(Sealed(NEW))
        assert switches.reached(StageReached(1, stage.value), float(now)) is stage
    return switches


def _on_trial() -> Switches:
    switches = _switching(_FORWARD)
    switches.switched(Switched(1, _outcome(SwitchStatus.SWITCHED, TENSOR)), 9.0)
    return switches


def _loss(switches: Switches) -> Loss:
    return switches.lost(had_progress=True, was_idle=False, was_killed=False)


# ---- the attempts ----


@pytest.mark.parametrize(
    ("seal", "previous", "target"), list(product((None, OLD), (None, LAYER, TENSOR, NONE), (None, TENSOR)))
)
def test_home_comes_first_and_nothing_comes_twice(
    seal: Seal | None, previous: Placement | None, target: Placement | None
) -> None:
    """Home with its carry, home from tokens, where it was before unless it just died there, home without streams."""
    found = attempts(Loss(LAYER, seal, previous, target))
    wanted = [Attempt(LAYER, OLD)] if seal else []
    wanted.append(Attempt(LAYER))
    if previous not in {None, LAYER, target}:
        wanted.append(Attempt(previous or LAYER))
    assert found == (*wanted, Attempt(LAYER, drops_streams=True))


def test_each_attempt_is_made_once() -> None:
    """Attempts follow each other to the last; a carry that its arena lost is passed over; then there is none."""
    recovery = Recovery()
    recovery.lost(Loss(LAYER, OLD, NONE))
    assert recovery.next([OLD]) == Attempt(LAYER, OLD)
    assert recovery.next([]) == Attempt(LAYER)
    assert recovery.next([]) == Attempt(NONE)
    assert recovery.next([]) == Attempt(LAYER, drops_streams=True)
    assert recovery.next([]) is None
    recovery.lost(Loss(LAYER, OLD))
    assert recovery.next([NEW]) == Attempt(LAYER)


def test_a_loss_without_a_token_goes_on_to_the_next_attempt() -> None:
    """A worker that opens and dies over its work is not made again in the same way."""
    recovery = Recovery()
    recovery.lost(Loss(LAYER, OLD))
    assert recovery.next([OLD]) == Attempt(LAYER, OLD)
    recovery.lost(Loss(LAYER, OLD, had_progress=False))
    assert recovery.next([OLD]) == Attempt(LAYER)
    recovery.lost(Loss(LAYER, OLD, had_progress=True))
    assert recovery.next([OLD]) == Attempt(LAYER, OLD)


def test_a_worker_that_dies_idle_is_made_again_a_few_times() -> None:
    """Three idle deaths in a row begin anew, the fourth goes on to the next attempt; a token forgives them all."""
    recovery = Recovery()
    idle = Loss(LAYER, OLD, had_progress=False, was_idle=True)
    recovery.lost(dataclasses.replace(idle, had_progress=True))
    for _ in range(3):
        assert recovery.next([OLD]) == Attempt(LAYER, OLD)
        recovery.lost(idle)
    assert recovery.next([OLD]) == Attempt(LAYER, OLD)
    recovery.lost(idle)
    assert recovery.next([OLD]) == Attempt(LAYER)
    recovery.lost(dataclasses.replace(idle, had_progress=True))
    recovery.lost(idle)
    assert recovery.next([OLD]) == Attempt(LAYER, OLD)


def test_what_was_killed_from_outside_is_tried_again() -> None:
    """A kill says nothing about the attempt: three are forgiven, while it opens and while it serves, then none is."""
    recovery = Recovery()
    recovery.lost(Loss(LAYER))
    assert recovery.next([]) == Attempt(LAYER)
    for _ in range(2):
        recovery.failed(Attempt(LAYER), was_killed=True)
        assert recovery.next([]) == Attempt(LAYER)
    killed = Loss(LAYER, had_progress=False, was_killed=True)
    recovery.lost(killed)
    assert recovery.next([]) == Attempt(LAYER)
    recovery.failed(Attempt(LAYER), was_killed=True)
    assert recovery.next([]) == Attempt(LAYER, drops_streams=True)
    recovery.lost(dataclasses.replace(killed, had_progress=True))
    recovery.failed(Attempt(LAYER), was_killed=False)
    assert recovery.next([]) == Attempt(LAYER)


def test_a_loss_in_a_switch_begins_anew() -> None:
    """A switch brings its own carry and its own way back, whatever was tried before it."""
    recovery = Recovery()
    recovery.lost(Loss(LAYER, OLD))
    assert recovery.next([OLD, NEW]) == Attempt(LAYER, OLD)
    recovery.lost(Loss(LAYER, NEW, target=TENSOR, had_progress=False))
    assert recovery.next([OLD, NEW]) == Attempt(LAYER, NEW)


# ---- where the session belongs ----


@pytest.mark.parametrize("n", range(len(_FORWARD) + 1))
@pytest.mark.parametrize("has_older", [False, True])
def test_a_switch_is_left_for_where_it_came_from(n: int, has_older: bool) -> None:
    """In every stage home is the placement before; the carry is the switch's own, or the last one before it."""
    switches = _serving()
    if has_older:
        switches.sealed(Sealed(OLD))
    _switching(_FORWARD[:n], switches)
    is_sealed = bool(_SEALED & set(_FORWARD[:n]))
    wanted = NEW if is_sealed else OLD if has_older else None
    assert _loss(switches) == Loss(LAYER, wanted, None, TENSOR, had_progress=True)


@pytest.mark.parametrize("stage", _BACK)
def test_a_switch_that_was_falling_back_is_left_too(stage: Stage) -> None:
    """Home and carry are the same when the worker was on its way back, and where it failed is the stage before."""
    switches = _switching((*_FORWARD[:6], stage))
    assert _loss(switches) == Loss(LAYER, NEW, None, TENSOR, had_progress=True)
    (outcome,) = _recovered(switches, LAYER)
    assert (outcome["status"], outcome["stage"]) == ("fell_back", "placing")


def test_a_session_on_trial_belongs_where_it_came_from() -> None:
    """Until its first decode a session in a new placement is at home in the old one, with the sealed original."""
    assert _loss(_on_trial()) == Loss(LAYER, NEW, LAYER, TENSOR, had_progress=True)


def test_after_its_trial_a_session_is_at_home_in_the_new_placement() -> None:
    """The carry made elsewhere is still its newest, and the placement before is where it may go back to."""
    switches = _on_trial()
    switches.tried(Trial(_outcome(SwitchStatus.SWITCHED, TENSOR, confirmed=True)))
    assert _loss(switches) == Loss(TENSOR, NEW, LAYER, None, had_progress=True)
    switches.unsealed(1)
    assert _loss(switches).seal is None


def test_a_trial_that_failed_in_the_worker_is_no_place_to_go_back_to() -> None:
    """After it fell back the session is at home in the old placement, and knows of no other."""
    switches = _on_trial()
    outcome = switches.tried(Trial(_outcome(SwitchStatus.FELL_BACK, LAYER, stage=Stage.TRIAL)))
    assert outcome["status"] == "fell_back"
    assert _loss(switches) == Loss(LAYER, NEW, None, None, had_progress=True)
    assert switches.summary() == {"count": 1, "ended": {"fell_back": 1}, "took": []}


def test_a_carry_that_was_sealed_before_a_switch_began_is_not_its_own() -> None:
    """What a save seals while a switch waits for its turn is the newest carry, and no step of the switch."""
    switches = _switching(())
    switches.sealed(Sealed(OLD))
    assert switches.under_way is not None
    assert switches.under_way.seal is None
    assert _loss(switches).seal == OLD


def test_a_trial_that_fails_in_the_worker_tells_its_stages() -> None:
    """The worker that goes back says where it is; lost on its way, the session belongs where it came from."""
    switches = _on_trial()
    for stage in (Stage.RELEASING, Stage.PLACING_OLD, Stage.BUILDING_OLD):
        assert switches.reached(StageReached(1, stage.value), 10.0) is stage
    assert (_loss(switches).home, _loss(switches).seal) == (LAYER, NEW)
    with pytest.raises(ReportWrong):
        switches.reached(StageReached(2, "releasing"), 10.0)


@pytest.mark.parametrize("n", range(len(_FORWARD) + 1))
def test_a_switch_that_interrupts_a_trial(n: int) -> None:
    """Until it has sealed its own carry the trial's original is the way back, and both have failed."""
    switches = _on_trial()
    switches.begin(2, NONE, 10.0)
    own = dataclasses.replace(NEW, arena=0, placement=TENSOR)
    for stage in _FORWARD[:n]:
        if stage is Stage.FREEING:
            switches.sealed(Sealed(own))
        switches.reached(StageReached(2, stage.value), 11.0)
    is_sealed = bool(_SEALED & set(_FORWARD[:n]))
    home, seal, target = (TENSOR, own, NONE) if is_sealed else (LAYER, NEW, TENSOR)
    assert _loss(switches) == Loss(home, seal, LAYER, target, had_progress=True)
    outcomes = _recovered(switches, home)
    assert [one["requested"] for one in outcomes] == (["none"] if is_sealed else ["tensor", "none"])
    assert {one["status"] for one in outcomes} == {"fell_back"}
    assert {one["effective"] for one in outcomes} == {home.mode.value}
    assert (switches.trial, switches.under_way) == (None, None)


@pytest.mark.parametrize("status", [SwitchStatus.REFUSED, SwitchStatus.UNCHANGED, SwitchStatus.CANCELLED])
def test_a_switch_that_touched_nothing_leaves_a_trial_as_it_is(status: SwitchStatus) -> None:
    """A refusal before anything was sealed keeps the way back of the trial that it interrupted."""
    switches = _on_trial()
    switches.begin(2, TENSOR, 10.0)
    switches.switched(Switched(2, _outcome(status, TENSOR)), 11.0)
    assert switches.trial is not None
    assert _loss(switches).home == LAYER


# ---- outcomes ----


def _recovered(switches: Switches, placement: Placement | None, *, recomputed: bool = False) -> list[dict[str, Any]]:
    return switches.recovered(placement, "it died", recomputed=recomputed, held=(2, 30), now=20.0, lost_at=15.0)


@pytest.mark.parametrize("stage", _FORWARD)
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("is_parked", [False, True])
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_switch_whose_worker_died_has_an_outcome(
    stage: Stage, recomputed: bool, is_parked: bool, is_cancelled: bool
) -> None:
    """It fell back, was cancelled or is parked; it says where it failed, why, and what was read again."""
    n = _FORWARD.index(stage)
    switches = _switching(_FORWARD[: n + 1])
    if is_cancelled and switches.under_way is not None:
        switches.under_way.is_cancelled = True
    (outcome,) = _recovered(switches, None if is_parked else LAYER, recomputed=recomputed)
    status = "parked" if is_parked else "cancelled" if is_cancelled else "fell_back"
    assert (outcome["status"], outcome["stage"], outcome["reason"]) == (status, stage.value, "it died")
    assert outcome["reasons"] == [{"code": "worker-lost", "text": "it died"}]
    assert (outcome["requested"], outcome["effective"]) == ("tensor", None if is_parked else "layer")
    assert (outcome["recomputed"], outcome["confirmed"], outcome["n_tokens"]) == (recomputed, False, 30)
    assert (outcome["total_ms"], outcome["fallback_ms"]) == (20_000.0, 5_000.0)
    assert outcome["state_bytes"] == (NEW.state_bytes if stage in _SEALED else None)
    assert outcome["stages_ms"]["checking"] == (1000.0 if n else 15_000.0)
    assert outcome.keys() == _outcome(SwitchStatus.SWITCHED, TENSOR).keys()
    assert switches.last is outcome
    assert switches.effective == LAYER


@pytest.mark.parametrize("after", [(), (Stage.PROVING,)])
def test_a_worker_that_died_of_the_librarys_own_call_says_whose_it_was(after: tuple[Stage, ...]) -> None:
    """In the call, or in the proof that follows it: the outcome names the call, as one that returns would."""
    way = (*_FORWARD[: _FORWARD.index(Stage.SEALING) + 1], Stage.SWITCHING_NATIVELY, *after)
    (outcome,) = _recovered(_switching(way), LAYER, recomputed=False)
    assert (outcome["status"], outcome["stage"], outcome["via"]) == ("fell_back", way[-1].value, "native")


@pytest.mark.parametrize("is_parked", [False, True])
def test_a_trial_that_took_its_worker_along_fell_back(is_parked: bool) -> None:
    """The outcome that said switched says fell back now, or parked, at the trial, and is confirmed by nobody."""
    switches = _on_trial()
    (outcome,) = _recovered(switches, None if is_parked else LAYER)
    assert outcome["status"] == ("parked" if is_parked else "fell_back")
    assert outcome["effective"] == (None if is_parked else "layer")
    assert (outcome["stage"], outcome["confirmed"], outcome["requested"]) == ("trial", False, "tensor")
    assert outcome["reason"] == "the first decode after the switch failed: it died"
    assert (outcome["reasons"][0]["code"], outcome["fallback_ms"]) == ("trial-failed", 5_000.0)
    assert outcome.keys() == _outcome(SwitchStatus.SWITCHED, TENSOR).keys()
    assert switches.summary()["ended"] == {outcome["status"]: 1}


def test_a_loss_without_a_switch_has_no_outcome() -> None:
    """A worker that dies while serving is recovered from, and nobody asked for that."""
    switches = _serving()
    assert _recovered(switches, LAYER) == []
    assert switches.last is None
    _recovered(switches, NONE)
    assert (switches.effective, switches.previous) == (NONE, LAYER)


def test_a_worker_that_parks_has_not_ended_the_switch() -> None:
    """Parked is an outcome only when no other worker serves the session: until then the switch stays under way."""
    switches = _switching(_FORWARD[:6])
    assert switches.switched(Switched(1, _outcome(SwitchStatus.PARKED, None)), 9.0)["status"] == "parked"
    assert _loss(switches) == Loss(LAYER, NEW, None, TENSOR, had_progress=True)
    assert _recovered(switches, LAYER)[0]["status"] == "fell_back"
    switches = _on_trial()
    assert switches.tried(Trial(_outcome(SwitchStatus.PARKED, None)))["status"] == "parked"
    assert _recovered(switches, LAYER)[0]["status"] == "fell_back"


def test_a_boundary_that_did_not_come_is_a_refusal() -> None:
    """A switch that was cancelled because it waited too long was refused, and says so."""
    switches = _switching(())
    assert switches.under_way is not None
    switches.under_way.is_late = switches.under_way.is_cancelled = True
    outcome = switches.switched(Switched(1, _outcome(SwitchStatus.CANCELLED, LAYER)), 9.0)
    assert (outcome["status"], outcome["stage"], outcome["reasons"][0]["code"]) == ("refused", "quiescing", "busy")


def test_what_switches_took_is_remembered() -> None:
    """The median of those that succeeded, in their direction alone, is what the next one is expected to take."""
    switches = _serving()
    for order, took in enumerate((1.0, 5.0, 2.0)):
        switches.begin(order, TENSOR, 0.0)
        switches.switched(Switched(order, _outcome(SwitchStatus.SWITCHED, TENSOR, confirmed=True)), took)
        switches.serve_in(LAYER)
    switches.begin(9, TENSOR, 0.0)
    switches.switched(Switched(9, _outcome(SwitchStatus.FELL_BACK, LAYER, stage=Stage.PLACING)), 99.0)
    assert switches.expected_s("layer", "tensor") == 2.0
    assert switches.expected_s("tensor", "layer") is None
    assert switches.summary() == {
        "count": 4,
        "ended": {"switched": 3, "fell_back": 1},
        "took": [{"from": "layer", "to": "tensor", "median_s": 2.0}],
    }


def test_every_switch_is_counted_once_and_no_count_goes_down() -> None:
    """More than are remembered, one whose trial fails, one lost on trial and one that a later switch makes final."""
    switches = _serving()
    for order in range(300):
        switches.begin(order, TENSOR, 0.0)
        switches.switched(Switched(order, _outcome(SwitchStatus.SWITCHED, TENSOR, confirmed=True)), 1.0)
    assert (switches.summary()["count"], switches.summary()["ended"]) == (300, {"switched": 300})

    def on_trial(order: int) -> None:
        switches.begin(order, TENSOR, 0.0)
        switches.switched(Switched(order, _outcome(SwitchStatus.SWITCHED, TENSOR)), 1.0)

    on_trial(300)
    assert (switches.summary()["count"], switches.summary()["ended"]) == (301, {"switched": 300})
    switches.tried(Trial(_outcome(SwitchStatus.FELL_BACK, LAYER, stage=Stage.TRIAL)))
    assert (switches.summary()["count"], switches.summary()["ended"]) == (301, {"switched": 300, "fell_back": 1})
    on_trial(301)
    on_trial(302)
    assert (switches.summary()["count"], switches.summary()["ended"]) == (303, {"switched": 301, "fell_back": 1})
    _recovered(switches, LAYER)
    assert (switches.summary()["count"], switches.summary()["ended"]) == (303, {"switched": 301, "fell_back": 2})


# ---- what cannot be ----


@pytest.mark.parametrize(
    "change",
    [
        {"status": "done"},
        {"status": None},
        {"effective_placement": {"mode": "sideways"}},
        {"effective_placement": 3},
        {"effective_placement": None},
        {"requested_placement": None},
        {"requested": ...},
        {"effective_placement": ...},
    ],
)
def test_an_outcome_that_is_none_is_refused(change: dict[str, Any]) -> None:
    """A worker whose outcome cannot be read, or contradicts itself, has lost count."""
    body = {**_outcome(SwitchStatus.SWITCHED, TENSOR), **change}
    with pytest.raises(ReportWrong):
        read_outcome({key: value for key, value in body.items() if value is not ...})


def test_reports_of_a_switch_that_is_not_there_are_refused() -> None:
    """Stages and outcomes belong to the switch under way; a stage has a known name."""
    switches = _serving()
    with pytest.raises(ReportWrong, match="not under way"):
        switches.reached(StageReached(1, "saving"), 0.0)
    switches.begin(1, TENSOR, 0.0)
    with pytest.raises(ReportWrong, match="not under way"):
        switches.switched(Switched(2, _outcome(SwitchStatus.SWITCHED, TENSOR)), 1.0)
    with pytest.raises(ReportWrong, match="sideways"):
        switches.reached(StageReached(1, "sideways"), 0.0)
    switches.not_taken(2)
    assert switches.under_way is not None
    switches.not_taken(1)
    assert switches.under_way is None
