"""A signal whose handler raises, as Ctrl-C's does, while a session works: it comes out, and nothing is lost."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from llama_native import CallFailed, Library, SamplerChain
from splitctl.placement import SplitMode
from splitctl.session import Session
from tests.ctl import scenes
from tests.ctl.scenes import N_TOKENS, Scene
from tests.stublib import Stub, build, needs_compiler, run_child, write_model
from tests.stublib.signals import Alarm, catch, signalled_while_it_hangs

pytestmark = [pytest.mark.stub, needs_compiler]

SCENE = Scene(n_seq=2)
PROMPT = list(range(40, 90))
#: Files whose lines stand between two calls of the library.
GUARDED = (
    "session/decoder.py",
    "switching/switcher.py",
    "switching/effects.py",
    "switching/machine.py",
    "switching/transfer.py",
    "engine/live.py",
    "engine/engine.py",
    "engine/slot.py",
    "engine/sampler.py",
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny.gguf")


def ends(session: Session) -> list[list[int]]:
    """The tokens of every sequence of the scene, once each has drawn what the straight run has."""
    for seq_id in range(SCENE.n_seq):
        while len(session.tokens(seq_id)) < len(scenes.PROMPTS[seq_id]) + 1 + 2 * N_TOKENS:
            session.advance((seq_id,))
    return [session.tokens(seq_id) for seq_id in range(SCENE.n_seq)]


def child_step(path: str, model: str, faults: str) -> dict[str, Any]:
    catch(signal.SIGUSR1)
    library, stub = Library.open(path), Stub(path)
    wanted = scenes.straight(library, model, SCENE)
    session = scenes.start(library, model, SCENE)
    scenes.generate(session, SCENE.n_seq)
    before = [session.tokens(seq_id) for seq_id in range(SCENE.n_seq)]
    with signalled_while_it_hangs(stub, faults), pytest.raises(Alarm):
        session.advance((0, 1))
    after = [session.tokens(seq_id) for seq_id in range(SCENE.n_seq)]
    return {"undrawn": before == after, "same": ends(session) == wanted}


@pytest.mark.parametrize("memory", ["", " seq_rm:false"])
@pytest.mark.parametrize("call", ["decode", "synchronize"])
def test_a_step_that_is_interrupted_draws_nothing_and_loses_nothing(model: Path, call: str, memory: str) -> None:
    """Also where the memory cannot be cut: the decode is booked, and the same tokens come afterwards."""
    found = run_child(child_step, build(), model, f"{call}:hang@1{memory}").value()
    assert found == {"undrawn": True, "same": True}


def child_draw(path: str, model: str) -> dict[str, Any]:
    library = Library.open(path)
    wanted = scenes.straight(library, model, SCENE)
    session = scenes.start(library, model, SCENE)
    scenes.generate(session, SCENE.n_seq)
    before = [(session.tokens(seq_id), session.n_draws(seq_id)) for seq_id in range(SCENE.n_seq)]
    accept, calls = SamplerChain.accept, iter(range(100))

    def interrupted(self: SamplerChain, token: int) -> None:
        accept(self, token)
        if next(calls) == 1:  # the first sequence has drawn, and so has the second, which has not said so yet
            raise KeyboardInterrupt

    SamplerChain.accept = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        session.advance((0, 1))
    after = [(session.tokens(seq_id), session.n_draws(seq_id)) for seq_id in range(SCENE.n_seq)]
    return {"undrawn": before == after, "same": ends(session) == wanted}


def test_a_draw_that_is_interrupted_is_taken_back(model: Path) -> None:
    """No sequence of the step has a token that nobody got, and each sampler is where it was."""
    found = run_child(child_draw, build(), model).value()
    assert found == {"undrawn": True, "same": True}


def child_anywhere(path: str, model: str, work: str, stride: int) -> dict[str, Any]:
    """Send a signal at one line after the other of those that the work goes through, until it gets to its end."""
    catch(signal.SIGUSR1)
    library = Library.open(path)
    wanted = scenes.straight(library, model, SCENE)
    session = scenes.start(library, model, SCENE)
    at, n_lines, n_raised = 0, 0, 0

    def trace(frame: Any, event: str, _argument: object) -> Any:
        nonlocal n_lines
        if not frame.f_code.co_filename.endswith(GUARDED):
            return None
        n_lines += event == "line"
        if event == "line" and n_lines == at:
            signal.raise_signal(signal.SIGUSR1)
        return trace

    while n_lines >= at:
        at, n_lines = at + stride, 0
        sys.settrace(trace)
        try:
            if work == "step":
                session.advance((0, 1))
            else:
                is_home = session.placement.mode is SplitMode.LAYER
                session.switch(session.placement.changed(mode="tensor" if is_home else "layer"))
        except Alarm:
            n_raised += 1
        finally:
            sys.settrace(None)
    return {"raised": n_raised == at // stride - 1, "some": n_raised > 10, "same": ends(session) == wanted}


@pytest.mark.parametrize(("work", "stride"), [("step", 3), ("switch", 41)])
def test_a_signal_at_any_line_loses_nothing(model: Path, work: str, stride: int) -> None:
    """Between two calls of the library too: what the handler raised comes when the work is whole, each time."""
    found = run_child(child_anywhere, build(), model, work, stride).value()
    assert found == {"raised": True, "some": True, "same": True}


def child_prompt(path: str, model: str) -> dict[str, Any]:
    catch(signal.SIGUSR1)
    library, stub = Library.open(path), Stub(path)
    with scenes.start(library, model, Scene()) as session:
        session.prefill(PROMPT)
        scenes.generate(session, 1)
        wanted = session.tokens()
    session = scenes.start(library, model, Scene())
    with signalled_while_it_hangs(stub, "decode:hang@2"), pytest.raises(Alarm):
        session.prefill(PROMPT)
    n_read = len(session.tokens()) - len(session.tokenize(scenes.PROMPTS[0]))
    session.prefill(PROMPT[n_read:])
    scenes.generate(session, 1)
    return {"n_read": n_read, "same": session.tokens() == wanted}


def test_a_prompt_that_is_interrupted_keeps_what_was_read(model: Path) -> None:
    """The rest can be read after it, and the answer is the same."""
    found = run_child(child_prompt, build(), model).value()
    assert 0 < found["n_read"] < len(PROMPT)
    assert found["same"]


def child_switch(path: str, model: str, faults: str) -> dict[str, Any]:
    catch(signal.SIGUSR1)
    library, stub = Library.open(path), Stub(path)
    wanted = scenes.straight(library, model, SCENE)
    session = scenes.start(library, model, SCENE)
    scenes.generate(session, SCENE.n_seq)
    home = session.placement
    with signalled_while_it_hangs(stub, faults), pytest.raises(Alarm):
        session.switch(home.changed(mode=SplitMode.TENSOR))
    outcome = session.last_switch
    assert outcome is not None
    return {
        "status": outcome.status.value,
        "recomputed": outcome.recomputed,
        "at home": not session.placement.differs(home),
        "same": ends(session) == wanted,
    }


@pytest.mark.parametrize("call", ["get_data", "load", "init", "set_data"])
def test_a_switch_that_is_interrupted_in_c_comes_back(model: Path, call: str) -> None:
    """It is cancelled: the old placement serves on with the state as it was."""
    found = run_child(child_switch, build(), model, f"{call}:hang@1").value()
    assert found == {"status": "cancelled", "recomputed": False, "at home": True, "same": True}


@pytest.mark.parametrize("call", ["load", "init", "set_data"])
def test_an_interruption_of_a_fallback_waits_for_its_end(model: Path, call: str) -> None:
    """What brings the session back is not ended, so nothing has to be read again."""
    found = run_child(child_switch, build(), model, f"load:null:tensor {call}:hang:layer@1").value()
    assert found == {"status": "fell_back", "recomputed": False, "at home": True, "same": True}


def child_restore(path: str, model: str, folder: str, faults: str) -> dict[str, Any]:
    catch(signal.SIGUSR1)
    library, stub = Library.open(path), Stub(path)
    wanted = scenes.straight(library, model, SCENE)
    session = scenes.start(library, model, SCENE)
    session.save(f"{folder}/carry")
    scenes.generate(session, SCENE.n_seq)
    with signalled_while_it_hangs(stub, faults), pytest.raises(Alarm):
        session.restore(f"{folder}/carry")
    return {"stage": session.stage.value, "same": ends(session) == wanted}


@pytest.mark.parametrize(
    "faults", ["set_data:hang@1", "set_data:zero@1 init:hang@1", "set_data:zero@1 set_data:hang@2"]
)
def test_a_restore_that_is_interrupted_leaves_what_was_there(model: Path, tmp_path: Path, faults: str) -> None:
    """While the state goes in, and while what was there comes back."""
    found = run_child(child_restore, build(), model, tmp_path, faults).value()
    assert found == {"stage": "serving", "same": True}


def child_trial(path: str, model: str) -> dict[str, Any]:
    library = Library.open(path)
    session = scenes.start(library, model, Scene())
    session.switch(session.placement.changed(mode=SplitMode.TENSOR))
    live, run = session._live, session._live.run

    def ended(_batch: object) -> Any:
        # As a callback that raises between two nodes of a graph: the library ends the decode.
        library._hold(Alarm, Alarm())
        raise CallFailed("llama_decode", 2)

    live.run = ended  # type: ignore[method-assign]
    with pytest.raises(Alarm):
        session.prefill(PROMPT)
    live.run = run  # type: ignore[method-assign]
    unsettled = session.stage.value
    session.prefill(PROMPT)
    outcome = session.last_switch
    assert outcome is not None
    return {"then": unsettled, "status": outcome.status.value, "confirmed": outcome.confirmed}


def test_an_interrupted_trial_is_no_failed_one(model: Path) -> None:
    """The next decode is the trial then, and the session stays where it was switched to."""
    found = run_child(child_trial, build(), model).value()
    assert found == {"then": "trial", "status": "switched", "confirmed": True}
