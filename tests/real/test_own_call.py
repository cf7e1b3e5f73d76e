"""The library's own call on a build that has it: what a session becomes by it, and what happens where it cannot."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_native import CallFailed, Context
from splitctl import Busy, Proof, Session, SplitMode, Stage, SwitchStatus, Via
from splitctl.carry import file as carries
from splitctl.engine.engine import context_params
from splitctl.ipc.probes import Prober
from splitctl.model.facts import read_facts
from splitctl.outcome import Route, SwitchOptions, WeightsTier
from splitctl.worker.hosted import in_place, judgement
from tests.real.conftest import RPC, SEEDED, SMALL_PROMPT, Opener, base

pytestmark = [pytest.mark.every_build, pytest.mark.usefixtures("own_call")]


def _ids(session: Session, n: int) -> list[int]:
    return [token.id for token in session.generate(n=n, sampler=SEEDED)]


def _started(open_small: Opener, **named: Any) -> Session:
    session = open_small(base(flash="on", **named))
    session.prefill(SMALL_PROMPT)
    return session


@pytest.fixture
def straight(open_small: Opener) -> list[int]:
    """Eight tokens of a session that never switches."""
    return _ids(_started(open_small), 8)


def _other(session: Session) -> Any:
    return session.placement.changed(tensor_split=(1.0, 3.0))


@pytest.mark.parametrize("proof", list(Proof))
def test_the_outcome_says_what_the_call_took_and_hides(open_small: Opener, proof: Proof) -> None:
    """Of what the call does by itself it is one time; the rest is told as ever, and the trial confirms it."""
    session = _started(open_small)
    outcome = session.switch(_other(session), proof=proof, via=Route.NATIVE)
    assert (outcome.status, outcome.via, outcome.via_reason) == (SwitchStatus.SWITCHED, Via.NATIVE, "")
    ms = outcome.stages_ms
    assert (ms.freeing, ms.placing, ms.building, ms.restoring) == (None, None, None, None)
    assert None not in (ms.checking, ms.quiescing, ms.saving, ms.sealing, ms.switching_natively, ms.proving)
    assert (outcome.weights, outcome.weights_reason) == (WeightsTier.FILE, "")
    assert (outcome.weight_bytes, outcome.n_tokens) == (session.model.size_bytes, len(SMALL_PROMPT))
    rates = outcome.to_json()["stages_gb_s"]
    assert isinstance(rates, dict)
    assert (rates["placing"], rates["switching_natively"] is None) == (None, False)
    assert len(_ids(session, 2)) == 2
    assert session.last_switch is not None
    assert session.last_switch.confirmed


@pytest.mark.parametrize("n_seq_max", [1, 3])
def test_both_ways_give_the_same_session(
    open_small: Opener, other_mode: SplitMode, tmp_path: Path, n_seq_max: int
) -> None:
    """There and back by the call and by the sequence of calls: the same state, rows and tokens at every step."""
    held = []
    for via in (Route.NATIVE, Route.COMPOSED):
        session = _started(open_small, n_seq_max=n_seq_max)
        for seq_id in range(1, n_seq_max):
            session.prefill(SMALL_PROMPT[seq_id:], seq_id)
        told: list[Any] = []
        for mode in (other_mode, SplitMode.NONE, SplitMode.LAYER):
            outcome = session.switch(session.placement.changed(mode=mode), via=via)
            assert (outcome.status, outcome.via.value) == (SwitchStatus.SWITCHED, via.value), outcome.reason
            told.append([session.logits(seq_id).tobytes() for seq_id in range(n_seq_max)])
            told.append(_ids(session, 4))
            session.save(tmp_path / "carry")
            told.append(bytes(carries.read(tmp_path / "carry").carry.state))
        held.append(told)
    assert held[0] == held[1]


@pytest.mark.parametrize("change", [{"n_ctx": 512}, {"mode": SplitMode.NONE, "n_ubatch": 32}])
def test_what_the_call_cannot_change_is_refused_by_its_name(
    open_small: Opener, straight: list[int], change: dict[str, Any]
) -> None:
    """Asked for by name it is refused, with nothing touched; else the sequence of calls does it, and says why."""
    session = _started(open_small)
    first = _ids(session, 4)
    target = session.placement.changed(**change)
    outcome = session.switch(target, via=Route.NATIVE)
    assert (outcome.status, outcome.stages_ms.saving) == (SwitchStatus.REFUSED, None)
    assert [one.code for one in outcome.reasons] == ["native-refused"]
    assert outcome.reason.endswith("(--via composed)")
    assert first + _ids(session, 4) == straight
    outcome = session.switch(target, via=Route.IN_PLACE)
    assert (outcome.status, outcome.via) == (SwitchStatus.SWITCHED, Via.COMPOSED)
    assert "changes the mode and the tensor split alone" in outcome.via_reason


def test_where_the_library_declines_the_session_goes_on_as_it_was(open_small: Opener, straight: list[int]) -> None:
    """A second context on the model makes the call refuse: the reason is the library's, and nothing is lost."""
    session = _started(open_small)
    first = _ids(session, 4)
    with Context(session.model, context_params(base(), embeddings=False)):
        outcome = session.switch(_other(session), via=Route.NATIVE)
    assert (outcome.status, outcome.stage) == (SwitchStatus.FELL_BACK, Stage.SWITCHING_NATIVELY)
    assert (outcome.via, [one.code for one in outcome.reasons]) == (Via.NATIVE, ["native-declined"])
    assert "another context uses the model" in outcome.reason
    assert session.stage is Stage.SERVING
    assert first + _ids(session, 4) == straight
    assert session.switch(_other(session), via=Route.NATIVE).status is SwitchStatus.SWITCHED


@pytest.mark.parametrize("stage", [Stage.SEALING, Stage.SWITCHING_NATIVELY, Stage.PROVING])
def test_a_cancel_around_the_call_ends_in_the_old_placement(
    open_small: Opener, straight: list[int], stage: Stage
) -> None:
    """Before the call nothing is touched; what comes during it or after it is undone."""
    flag = threading.Event()
    session = open_small(base(flash="on"), cancel=flag)
    session.prefill(SMALL_PROMPT)
    first, before = _ids(session, 4), session.placement

    def cancel(now: Stage, _share: float) -> None:
        if now is stage:
            flag.set()

    outcome = session.switch(_other(session), via=Route.NATIVE, progress=cancel)
    assert (outcome.status, outcome.via) == (SwitchStatus.CANCELLED, Via.NATIVE)
    assert (outcome.stages_ms.switching_natively is None) == (stage is Stage.SEALING)
    assert not session.placement.differs(before)
    flag.clear()
    assert first + _ids(session, 4) == straight


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
def test_what_is_raised_at_the_call_comes_out_after_the_session_serves_again(
    open_small: Opener, straight: list[int], error: BaseException
) -> None:
    """The exception is the caller's; the session is in its old placement and goes on with the right tokens."""
    session = _started(open_small)
    first, before = _ids(session, 4), session.placement

    def raising(now: Stage, _share: float) -> None:
        if now is Stage.SWITCHING_NATIVELY:
            raise error

    with pytest.raises(type(error)):
        session.switch(_other(session), via=Route.NATIVE, progress=raising)
    assert session.stage is Stage.SERVING
    assert not session.placement.differs(before)
    assert first + _ids(session, 4) == straight


def test_who_calls_meanwhile_gets_busy_and_who_is_late_is_refused(open_small: Opener) -> None:
    """From a callback at the call, a switch and a decode are Busy; a boundary that is late is a refusal."""
    session = _started(open_small)
    seen = []

    def call_back(now: Stage, _share: float) -> None:
        if now is Stage.SWITCHING_NATIVELY:
            for call in (lambda: session.switch(_other(session)), lambda: session.prefill([5])):
                with pytest.raises(Busy):
                    call()
                seen.append(now)

    assert session.switch(_other(session), via=Route.NATIVE, progress=call_back).status is SwitchStatus.SWITCHED
    assert len(seen) == 2
    home = session.placement.changed(tensor_split=None)
    inside, go_on, late = threading.Event(), threading.Event(), []

    def stay() -> None:
        with session._live.turn.take("a test"):
            inside.set()
            assert go_on.wait(60)

    thread = threading.Thread(target=stay)
    thread.start()
    assert inside.wait(60)
    try:
        late.append(session.switch(home, via=Route.NATIVE, timeout_s=0.0))
    finally:
        go_on.set()
        thread.join(60)
    assert (late[0].status, [one.code for one in late[0].reasons]) == (SwitchStatus.REFUSED, ["busy"])
    assert session.switch(home, via=Route.NATIVE).status is SwitchStatus.SWITCHED


def test_a_trial_that_fails_after_the_call_comes_back_by_the_other_way(
    open_small: Opener, straight: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first decode fails: the old placement is made again by our calls, and the next switch is the library's."""
    session = _started(open_small)
    first, before, live = _ids(session, 4), session.placement, session._live
    assert session.switch(_other(session), via=Route.NATIVE).status is SwitchStatus.SWITCHED
    run, fails = live.run, iter((True,))

    def first_fails(batch: Any) -> Any:
        if next(fails, False):
            raise CallFailed("llama_decode", -3)
        return run(batch)

    monkeypatch.setattr(live, "run", first_fails)
    rest = _ids(session, 4)
    assert session.last_switch is not None
    assert (session.last_switch.status, session.last_switch.via) == (SwitchStatus.FELL_BACK, Via.NATIVE)
    assert not session.last_switch.recomputed
    assert not session.placement.differs(before)
    assert first + rest == straight
    assert session.switch(_other(session), via=Route.NATIVE).status is SwitchStatus.SWITCHED


def test_a_switch_on_trial_may_be_followed_by_another(open_small: Opener, straight: list[int]) -> None:
    """There and back with no decode between, by one way and the other: rows and tokens are those of before."""
    session = _started(open_small)
    first, held, before = _ids(session, 4), session.logits(), session.placement
    for there, back in ((Route.NATIVE, Route.COMPOSED), (Route.COMPOSED, Route.NATIVE), (Route.NATIVE, Route.NATIVE)):
        assert session.switch(_other(session), via=there).status is SwitchStatus.SWITCHED
        assert session.switch(before, via=back).status is SwitchStatus.SWITCHED
        assert np.array_equal(session.logits(), held)
    assert first + _ids(session, 4) == straight


@pytest.mark.skipif(bool(RPC), reason="a server that serves this process answers no child")
def test_the_trial_finds_the_build_right_and_the_switch_goes_by_it(
    prober: Prober, open_small: Opener, small_model: Path, other_mode: SplitMode
) -> None:
    """Nothing is known of the call until it would be taken; then it is tried, remembered, told and taken."""
    facts, session = read_facts(small_model), _started(open_small, n_seq_max=2)
    target = session.placement.changed(mode=other_mode)
    there = (session.placement, target, facts)
    assert prober.why_no_own_call(*there, known_only=True).endswith("has not been tried yet")
    tried = open_small(base(flash="on", n_seq_max=2), prober=prober)
    tried.prefill(SMALL_PROMPT)
    checked = in_place(tried, tried.check(target, SwitchOptions(via=Route.IN_PLACE)), None)
    assert (checked.via, checked.via_reason, checked.reasons) == (Via.NATIVE, "", ())
    assert prober.why_no_own_call(*there, known_only=True) == ""
    assert judgement(tried, 1, checked, None).via is Via.NATIVE
    outcome = tried.switch(target, via=Route.AUTO)
    assert (outcome.status, outcome.via, outcome.via_reason) == (SwitchStatus.SWITCHED, Via.NATIVE, "")
