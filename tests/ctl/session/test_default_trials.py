"""A library user's session tries placements in child processes too, unless it is told not to."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from llama_native import Library
from splitctl.errors import Refused
from splitctl.placement import SplitMode
from splitctl.session import Session
from tests.ctl import scenes
from tests.ctl.scenes import Scene
from tests.stublib import Stub, build, needs_compiler, run_child, write_model

pytestmark = [pytest.mark.stub, needs_compiler]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny.gguf")


def child_default(path: str, model: str) -> dict[str, Any]:
    """Open a session with no word about trials, switch it, and open another where it may not serve."""
    library = Library.open(path)
    stub = Stub(path)
    told: dict[str, Any] = {}
    with Session.open(model, Scene().placement(), library=library) as session:
        session.prefill(session.tokenize("the quick brown fox"))
        stub.reset()
        target = session.placement.changed(mode=SplitMode.TENSOR)
        first, second = session.switch(target), session.switch(target)
        told |= {"first": [first.status.value, first.reason], "second": [second.status.value, second.reason]}
        told["loads"] = stub.count("llama_model_load_from_file")
        scenes.generate(session, 1, 2)
    try:
        Session.open(model, target, library=library).close()
    except Refused as error:
        told["opened"] = [one.code for one in error.reasons]
    return told


def test_a_library_that_aborts_in_a_mode_does_not_take_its_user_along(model: Path, tmp_path: Path) -> None:
    """By default what dies is a child: the switch is refused for it, which is remembered, and the session serves on."""
    env = {"STUB_FAULTS": "decode:abort:tensor", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    seen = run_child(child_default, build(), model, **env).value()
    for outcome in ("first", "second"):
        status, reason = seen[outcome]
        assert (status, "tried in a child process" in reason, "SIGABRT" in reason) == ("refused", True, True)
    assert (seen["loads"], seen["opened"]) == (0, ["probe-dies"])
    assert (tmp_path / "cache" / "splitctl" / "probes.json").is_file()


def child_without(path: str, model: str) -> str:
    """Ask for no trials: the rules alone decide."""
    with Session.open(model, Scene().placement(), library=Library.open(path), prober=None) as session:
        session.prefill(session.tokenize("the quick brown fox"))
        session.switch(session.placement.changed(mode=SplitMode.TENSOR))
        scenes.generate(session, 1, 2)
        return session.placement.mode.value


def test_trials_can_be_left_out(model: Path) -> None:
    """Who asks for none gets none: the process dies of what the library does."""
    assert run_child(child_without, build(), model).value() == "tensor"
    assert run_child(child_without, build(), model, STUB_FAULTS="decode:abort:tensor").signal == "SIGABRT"


def child_no_processes(path: str, model: str, python: str) -> list[Any]:
    """No child process can be started: a switch that needs one is refused, and the session serves on."""
    with Session.open(model, Scene().placement(), library=Library.open(path)) as session:
        session.prefill(session.tokenize("the quick brown fox"))
        sys.executable = python
        outcome = session.switch(session.placement.changed(mode=SplitMode.TENSOR))
        scenes.generate(session, 1, 1)
        return [outcome.status.value, [reason.code for reason in outcome.reasons], session.placement.mode.value]


@pytest.mark.parametrize("python", ["", "/nowhere/python", "/usr/bin/false"])
def test_without_child_processes_nothing_is_risked(model: Path, tmp_path: Path, python: str) -> None:
    """An embedded interpreter has no program to start: what cannot be tried is refused, and --force still switches."""
    seen = run_child(child_no_processes, build(), model, python, XDG_CACHE_HOME=str(tmp_path)).value()
    assert seen == ["refused", ["probe-inconclusive"], "layer"]
    assert not (tmp_path / "splitctl").exists()
