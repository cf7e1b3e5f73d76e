"""Where a switch takes the weights from: both placements kept, or a copy in host memory; the answer is the file's."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splitctl import Placement, SamplerSpec, Session, SplitMode, Stage, SwitchStatus
from splitctl.carry import file as carries
from splitctl.outcome import WeightsTier
from tests.real.conftest import SEEDED, SMALL_PROMPT, Opener

GREEDY = SamplerSpec(temp=0.0)
OTHER_SHARES = {"tensor_split": (0.2, 0.8)}


def _ids(session: Session, n: int, sampler: SamplerSpec | None = None) -> list[int]:
    return [token.id for token in session.generate(n=n, sampler=sampler)]


def _state(session: Session, path: Path) -> tuple[bytes, bytes]:
    """What a session carries: its state's bytes and its logits' bytes."""
    session.save(path)
    carry = carries.read(path).carry
    return bytes(carry.state), carry.sequences[0].logits.tobytes()


def _switched(session: Session, target: Placement) -> WeightsTier | None:
    outcome = session.switch(target)
    assert outcome.status is SwitchStatus.SWITCHED, outcome.reason
    return outcome.weights


@pytest.mark.every_build
def test_ten_switches_between_kept_placements_give_what_ten_loads_give(
    open_small: Opener, other_mode: SplitMode, tmp_path: Path
) -> None:
    """There and back ten times with tokens between: state, logits and tokens are those of a session on the file."""
    kept, loaded = (open_small(weights=tier) for tier in (WeightsTier.RESIDENT, WeightsTier.FILE))
    for session in (kept, loaded):
        session.prefill(SMALL_PROMPT)
        _ids(session, 3, SEEDED)
    for turn in range(10):
        mode = other_mode if turn % 2 == 0 else SplitMode.LAYER
        assert _switched(kept, kept.placement.changed(mode=mode)) is WeightsTier.RESIDENT
        assert _switched(loaded, loaded.placement.changed(mode=mode)) is WeightsTier.FILE
        assert _ids(kept, 3) == _ids(loaded, 3)
        assert np.array_equal(kept.logits(), loaded.logits())
    assert _state(kept, tmp_path / "kept") == _state(loaded, tmp_path / "loaded")


def test_a_third_placement_takes_the_place_of_the_one_before(open_small: Opener) -> None:
    """Two are kept at most: the one that serves and the one before it."""
    session = open_small(weights=WeightsTier.RESIDENT)
    session.prefill(SMALL_PROMPT)
    first = session.placement
    for target in (first.changed(**OTHER_SHARES), first.changed(mode=SplitMode.NONE)):
        assert _switched(session, target) is WeightsTier.RESIDENT
    engine = session._live.engine
    assert engine.keeps(first.changed(**OTHER_SHARES))
    assert not engine.keeps(first)


def test_a_kept_model_gets_another_context_where_the_target_asks_for_one(open_small: Opener) -> None:
    """A context that grows is built on the kept model; its size is what was asked for."""
    session = open_small(weights=WeightsTier.RESIDENT)
    session.prefill(SMALL_PROMPT)
    first = session.placement
    assert _switched(session, first.changed(**OTHER_SHARES)) is WeightsTier.RESIDENT
    assert _switched(session, first.changed(n_ctx=1024)) is WeightsTier.RESIDENT
    assert session.placement.n_ctx == 1024
    assert len(_ids(session, 4, GREEDY)) == 4


def test_two_placements_that_do_not_fit_at_once_are_loaded_one_after_the_other(
    open_small: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The switch uses the file, and its outcome says what is short."""
    session = open_small(weights=WeightsTier.RESIDENT)
    session.prefill(SMALL_PROMPT)
    monkeypatch.setattr(session._checker._tiers, "_beside", lambda _now, _target: "CPU lacks 7 MiB")
    outcome = session.switch(session.placement.changed(**OTHER_SHARES))
    assert (outcome.status, outcome.weights) == (SwitchStatus.SWITCHED, WeightsTier.FILE)
    assert outcome.weights_reason == "CPU lacks 7 MiB"
    assert not session._live.engine._kept


@pytest.mark.parametrize("stage", [Stage.PLACING, Stage.BUILDING, Stage.RESTORING, Stage.PROVING])
def test_a_cancel_finds_the_old_placement_still_there(open_small: Opener, stage: Stage) -> None:
    """Nothing is loaded on the way back, and the session goes on as if nobody had asked."""
    flag = threading.Event()
    session, straight = open_small(weights=WeightsTier.RESIDENT, cancel=flag), open_small()
    for one in (session, straight):
        one.prefill(SMALL_PROMPT)
    old = session._live.model

    def cancel(at: Stage, _share: float) -> None:
        if at is stage:
            flag.set()

    outcome = session.switch(session.placement.changed(**OTHER_SHARES), progress=cancel)
    flag.clear()
    assert outcome.status is SwitchStatus.CANCELLED
    assert session._live.model is old
    assert _ids(session, 6, SEEDED) == _ids(straight, 6, SEEDED)


def test_rewinding_and_shifting_work_after_a_switch_to_a_kept_context(open_small: Opener) -> None:
    """A context that was emptied and given the state is cut and shifted as one that was loaded."""
    answers: list[Any] = []
    for tier in (WeightsTier.RESIDENT, WeightsTier.FILE):
        session = open_small(weights=tier)
        session.prefill(SMALL_PROMPT)
        first = session.placement
        _switched(session, first.changed(**OTHER_SHARES))
        _ids(session, 8, GREEDY)
        _switched(session, first)
        session.reserve(64)
        session.rewind(12)
        session.prefill([4, 5])
        session.shift(2, 3)
        answers.append((_ids(session, 4, GREEDY), session.logits().tobytes()))
    assert answers[0] == answers[1]


def test_closing_and_parking_free_what_is_kept(open_small: Opener) -> None:
    """Nothing stays loaded behind a session that is closed."""
    session = open_small(weights=WeightsTier.RESIDENT)
    session.prefill(SMALL_PROMPT)
    _switched(session, session.placement.changed(**OTHER_SHARES))
    models = [session._live.model, session._live.engine._kept[0].model]
    session.close()
    assert all(model.closed for model in models)
