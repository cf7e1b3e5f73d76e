"""What comes in the middle of a switch or a decode, another thread or an exception; nothing is lost."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from llama_native import CallFailed
from splitctl import ConfigInvalid, FlashAttn, Placement, SamplerSpec, Session, Stage, SwitchStatus
from splitctl.outcome import Route
from tests.real.conftest import SMALL_PROMPT, Opener, base

SEEDED = SamplerSpec(temp=0.9, repeat_penalty=1.1, seed=7)


def _ids(session: Session, n: int, sampler: SamplerSpec | None = None) -> list[int]:
    return [token.id for token in session.generate(n=n, sampler=sampler)]


def _started(open_small: Opener, **named: Any) -> tuple[Session, list[int]]:
    session = open_small(**named)
    session.prefill(SMALL_PROMPT)
    return session, _ids(session, 4, SEEDED)


def _other(session: Session) -> Placement:
    return session.placement.changed(tensor_split=(1.0, 3.0))


@pytest.fixture
def straight(open_small: Opener) -> list[int]:
    """Eight tokens of a session that nothing happens to."""
    session = open_small()
    session.prefill(SMALL_PROMPT)
    return _ids(session, 8, SEEDED)


@pytest.mark.parametrize("stage", [Stage.SAVING, Stage.PLACING, Stage.BUILDING, Stage.RESTORING, Stage.PROVING])
@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
def test_what_a_progress_callback_raises_comes_out_after_the_session_serves_again(
    open_small: Opener, straight: list[int], stage: Stage, error: BaseException
) -> None:
    """The exception is the caller's; the session is in its old placement and goes on with the right tokens."""
    session, first = _started(open_small)
    before = session.placement

    def raising(now: Stage, _share: float) -> None:
        if now is stage:
            raise error

    with pytest.raises(type(error)):
        session.switch(_other(session), via=Route.COMPOSED, progress=raising)
    assert session.stage is Stage.SERVING
    assert not session.placement.differs(before)
    assert first + _ids(session, 4) == straight


def test_a_switch_that_comes_during_the_trial_of_another_waits_for_it(
    open_small: Opener, straight: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial's thread books its decode before the second switch moves the machine; both outcomes are true."""
    session, first = _started(open_small)
    home = session.placement
    assert session.switch(_other(session)).status is SwitchStatus.SWITCHED
    inside, go_on = threading.Event(), threading.Event()
    live = session._live
    run = live.run

    def slow(batch: Any) -> Any:
        inside.set()
        assert go_on.wait(60)
        return run(batch)

    monkeypatch.setattr(live, "run", slow)
    rest: list[int] = []
    outcomes: list[Any] = []
    generates = threading.Thread(target=lambda: rest.extend(_ids(session, 4)))
    switches = threading.Thread(target=lambda: outcomes.append(session.switch(home)))
    generates.start()
    assert inside.wait(60)
    switches.start()
    monkeypatch.setattr(live, "run", run)
    go_on.set()
    generates.join(60)
    switches.join(60)
    assert outcomes[0].status is SwitchStatus.SWITCHED
    assert outcomes[0].stages_ms.saving is not None
    assert not session.placement.differs(home)
    assert first + rest == straight


def test_a_prompt_that_fails_half_way_leaves_no_stale_logits(
    open_small: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read is booked, and nothing is drawn from the logits of before."""
    session, _ = _started(open_small)
    held = len(session.tokens())
    live = session._live
    run, calls = live.run, iter((True, True, False))

    def third_fails(batch: Any) -> Any:
        if next(calls):
            return run(batch)
        raise CallFailed("llama_decode", -3)

    monkeypatch.setattr(live, "run", third_fails)
    with pytest.raises(CallFailed):
        session.prefill([5] * 100)
    monkeypatch.undo()
    assert held < len(session.tokens()) < held + 100
    with pytest.raises(ConfigInvalid, match="prefill first"):
        session.advance((0,))
    assert session.switch(_other(session)).status is SwitchStatus.SWITCHED


def test_a_rewound_sampler_has_been_told_the_tokens_that_are_left(open_small: Opener) -> None:
    """Penalties look back at what is there, each token once; the draws go on."""
    session, _ = _started(open_small)
    sampler = session._live.slots[0].sampler
    assert sampler is not None
    n_draws = sampler.n_draws
    session.rewind(5)
    sampler = session._live.slots[0].sampler
    assert sampler is not None
    assert sampler.accepted == session.tokens()
    assert sampler.n_draws == n_draws


def test_a_switch_that_raises_the_number_of_sequences_gives_them(open_small: Opener) -> None:
    """New sequences can be used at once, and surplus empty ones go with a smaller number."""
    session, _ = _started(open_small, placement=base(kv_unified=True))
    assert session.switch(session.placement.changed(n_seq_max=3)).status is SwitchStatus.SWITCHED
    session.prefill(SMALL_PROMPT[:4], 2)
    session.remove_sequence(2)
    assert session.switch(session.placement.changed(n_seq_max=1)).status is SwitchStatus.SWITCHED
    with pytest.raises(ConfigInvalid, match="n_seq_max is 1"):
        session.prefill([5], 2)


def test_an_empty_carry_of_another_layout_empties_the_session_and_no_more(open_small: Opener, tmp_path: Path) -> None:
    """Restoring nothing into another layout works, and the session can be used on."""
    empty = open_small(base(flash_attn=FlashAttn.OFF))
    empty.save(tmp_path / "empty")
    session, _ = _started(open_small, placement=base(flash_attn=FlashAttn.ON))
    session.restore(tmp_path / "empty")
    assert session.tokens() == []
    session.prefill(SMALL_PROMPT)
    assert len(_ids(session, 2, SEEDED)) == 2


def test_a_group_with_an_empty_sequence_draws_for_nobody(open_small: Opener) -> None:
    """No token of the others is lost by the one that cannot go on."""
    session, _ = _started(open_small, placement=base(n_seq_max=2, kv_unified=True))
    before = session.tokens(0)
    with pytest.raises(ConfigInvalid, match="prefill first"):
        session.advance((0, 1))
    with pytest.raises(ConfigInvalid, match="each sequence once"):
        session.advance((0, 0))
    assert session.tokens(0) == before


def test_a_trial_that_fails_after_a_conversion_and_a_rewind_comes_back_converted(
    open_small: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a change during the trial sealed in the target's layout is rewritten for the old placement."""
    session, _ = _started(open_small, placement=base(flash_attn=FlashAttn.ON))
    home = session.placement
    assert session.switch(session.placement.changed(flash_attn=FlashAttn.OFF)).status is SwitchStatus.SWITCHED
    live = session._live
    run, fails = live.run, iter((True,))

    def first_fails(batch: Any) -> Any:
        if next(fails, False):
            raise CallFailed("llama_decode", -3)
        return run(batch)

    monkeypatch.setattr(live, "run", first_fails)
    session.rewind(6)
    assert session.last_switch is not None
    assert session.last_switch.status is SwitchStatus.FELL_BACK
    assert not session.last_switch.recomputed
    assert not session.placement.differs(home)
    assert len(session.tokens()) == 6
    assert session.switch(_other(session)).status is SwitchStatus.SWITCHED
