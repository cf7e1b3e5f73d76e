"""What a switch is checked for before the token boundary, what is looked at again there, and who goes on meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_native import Library
from splitctl.errors import Busy
from splitctl.model.facts import ModelFacts
from splitctl.outcome import Stage
from splitctl.placement import Placement, SplitMode
from splitctl.probing import ProbeVerdict, Verdict
from splitctl.session import Session
from tests.ctl import scenes
from tests.ctl.scenes import Scene
from tests.stublib import Stub, build, needs_compiler, run_child, write_model

pytestmark = [pytest.mark.stub, needs_compiler]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny.gguf")


class _Trial:
    """Stands in for a trial in a child process: calls the test while it runs, and ends well unless told otherwise."""

    def __init__(self, meanwhile: Callable[[], None], verdict: Verdict = Verdict.OK) -> None:
        self.meanwhile = meanwhile
        self.verdict = verdict
        self.n = 0

    def __call__(self, _path: Path, placement: Placement, _facts: ModelFacts) -> ProbeVerdict:
        if placement.mode is SplitMode.TENSOR:
            self.n += 1
            self.meanwhile()
        return ProbeVerdict(self.verdict, "it dies")

    def known(self, _placement: Placement, _facts: ModelFacts) -> ProbeVerdict | None:
        return None


def _in_thread(work: Callable[[], object]) -> None:
    """Do something on another thread, to its end."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _opened(path: str, model: str, **more: Any) -> tuple[Stub, Session, _Trial]:
    trial = _Trial(lambda: None)
    session = Session.open(model, Scene(**more).placement(), library=Library.open(path), prober=trial)
    session.prefill(session.tokenize("the quick brown fox"))
    return Stub(path), session, trial


def child_goes_on(path: str, model: str) -> dict[str, Any]:
    """Another thread generates, and asks for a switch of its own, while the trial runs."""
    stub, session, trial = _opened(path, model)
    seen: dict[str, Any] = {}
    target = session.placement.changed(mode=SplitMode.TENSOR)
    stages: list[str] = []

    def another() -> None:
        try:
            session.switch(target)
        except Busy as error:
            seen["busy"] = str(error)

    def meanwhile() -> None:
        seen["stage"] = session.stage.value
        _in_thread(lambda: scenes.generate(session, 1, 7))
        seen["drawn"] = len(session.tokens())
        _in_thread(another)

    n_prompt = len(session.tokens())
    trial.meanwhile = meanwhile
    outcome = session.switch(target, progress=lambda stage, _: stages.append(stage.value))
    told = seen | {
        "n": seen["drawn"] - n_prompt,
        "status": outcome.status.value,
        "stages": list(dict.fromkeys(stages))[:3],
        "n_tokens": outcome.n_tokens,
        "trials": trial.n,
        "mistakes": stub.mistakes(),
    }
    session.close()
    return told


def test_another_thread_generates_while_a_target_is_tried(model: Path) -> None:
    """The session serves all through the trial; a second switch is Busy; what was drawn meanwhile is carried too."""
    seen = run_child(child_goes_on, build(), model).value()
    assert (seen["n"], seen["stage"], seen["status"]) == (7, Stage.SERVING.value, "switched")
    assert "tensor" in seen["busy"]
    assert seen["stages"] == ["checking", "quiescing", "saving"]
    assert seen["n_tokens"] == seen["drawn"]
    assert (seen["trials"], seen["mistakes"]) == (1, [])


def child_fills(path: str, model: str) -> dict[str, Any]:
    """The context grows during the trial beyond what the target holds."""
    _stub, session, trial = _opened(path, model)
    target = session.placement.changed(mode=SplitMode.TENSOR, n_ctx=256)
    trial.meanwhile = lambda: _in_thread(lambda: scenes.generate(session, 1, 300))
    outcome = session.switch(target)
    told = {
        "status": outcome.status.value,
        "stage": outcome.stage.value if outcome.stage else None,
        "codes": [reason.code for reason in outcome.reasons],
        "mode": session.placement.mode.value,
        "trials": trial.n,
    }
    scenes.generate(session, 1, 1)
    session.close()
    return told


def test_what_changed_during_the_trial_is_seen_at_the_boundary(model: Path) -> None:
    """A target that was large enough when it was asked for, and is not any more, is refused with nothing touched."""
    seen = run_child(child_fills, build(), model).value()
    assert seen == {
        "status": "refused",
        "stage": "checking",
        "codes": ["context-too-small"],
        "mode": "layer",
        "trials": 1,
    }


def child_checked(path: str, model: str) -> list[Any]:
    """A check is made first and handed to the switch; another verdict refuses."""
    _stub, session, trial = _opened(path, model)
    target = session.placement.changed(mode=SplitMode.TENSOR)
    same = session.check(session.placement)
    found = session.check(target)
    outcome = session.switch(target, checked=found)
    told: list[Any] = [
        [len(same.reasons), len(found.reasons), trial.n],
        outcome.status.value,
        outcome.stages_ms.checking is not None and outcome.stages_ms.checking > 0.0,
    ]
    scenes.generate(session, 1, 1)
    trial.verdict = Verdict.DIES
    session.switch(session.placement.changed(mode=SplitMode.LAYER))
    bad = session.check(target)
    refused = session.switch(target, checked=bad)
    told += [trial.n, refused.status.value, session.placement.mode.value]
    session.close()
    return told


def test_a_check_can_be_made_first_and_is_not_made_twice(model: Path) -> None:
    """`Session.check` answers without touching anything, and `switch(checked=...)` tries nothing again."""
    seen = run_child(child_checked, build(), model).value()
    assert seen == [[0, 0, 1], "switched", True, 2, "refused", "layer"]
