"""Several threads with one session: each is served while another generates, and the vocabulary is there for all."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_native import ForkedProcess, Library
from splitctl import AsyncSession
from splitctl.placement import SplitMode
from tests.ctl import scenes
from tests.ctl.scenes import Scene
from tests.stublib import Stub, build, needs_compiler, run_child, write_model

pytestmark = [pytest.mark.stub, needs_compiler]

GUARD_S = 60.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny.gguf")


def child_tokenize(path: str, model: str, hangs: str) -> dict[str, Any]:
    library, stub = Library.open(path), Stub(path)
    session = scenes.start(library, model, Scene())
    wanted = session.tokenize("two words")
    stub.faults(hangs)

    def work() -> None:
        scenes.generate(session, 1, 2)
        session.switch(session.placement.changed(mode=SplitMode.TENSOR))

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    stub.wait_hanging()
    found: dict[str, Any] = {}

    def ask() -> None:
        found["tokens"] = session.tokenize("two words") == wanted
        found["piece"] = session.model.piece(wanted[-1]).decode()

    asker = threading.Thread(target=ask, daemon=True)
    asker.start()
    if hangs.startswith("decode"):
        asker.join(GUARD_S)
        found["at once"] = not asker.is_alive()
    stub.release()
    worker.join(GUARD_S)
    asker.join(GUARD_S)
    found["mode"] = session.placement.mode.value
    session.close()
    return {**found, "left": sorted(set(stub.live().values()))}


def test_text_is_tokenized_while_another_thread_decodes(model: Path) -> None:
    """No turn is waited for: a decode may take a minute, and the vocabulary does not change."""
    found = run_child(child_tokenize, build(), model, "decode:hang@1").value()
    assert found == {"at once": True, "tokens": True, "piece": "s", "mode": "tensor", "left": [0]}


def test_text_is_tokenized_by_the_next_model_where_a_switch_has_freed_the_last(model: Path) -> None:
    """Between two models there is no vocabulary: the call waits for the end of the switch."""
    found = run_child(child_tokenize, build(), model, "load:hang:tensor@1").value()
    assert found == {"tokens": True, "piece": "s", "mode": "tensor", "left": [0]}


def child_fair(path: str, model: str) -> list[int]:
    session = scenes.start(Library.open(path), model, Scene(n_seq=2))
    # A device that takes its time, so that the thread that generates has the turn for most of it.
    Stub(path).faults("pace:decode=2000")
    made: list[int] = []
    begun, ended = threading.Event(), threading.Event()

    def generate() -> None:
        while not ended.is_set() and len(made) < 400:
            session.advance((0,))
            made.append(0)
            begun.set()

    worker = threading.Thread(target=generate)
    worker.start()
    assert begun.wait(GUARD_S)
    waited = []
    for _ in range(4):
        before = len(made)
        session.advance((1,))
        waited.append(len(made) - before)
    ended.set()
    worker.join(GUARD_S)
    return waited


def test_a_thread_that_generates_without_a_pause_starves_nobody(model: Path) -> None:
    """Whoever asks waits for the token under way, and for one more at most."""
    waited = run_child(child_fair, build(), model).value()
    assert max(waited) <= 2


def child_generates_across(path: str, model: str) -> dict[str, Any]:
    library, stub = Library.open(path), Stub(path)
    session = scenes.start(library, model, Scene())
    tokens = session.generate()
    next(tokens)
    stub.faults("load:hang:tensor@1")
    switching = threading.Thread(target=lambda: session.switch(session.placement.changed(mode=SplitMode.TENSOR)))
    switching.start()
    stub.wait_hanging()
    found: dict[str, Any] = {}

    def go_on() -> None:
        try:
            found["next"] = next(tokens).pos
        except Exception as error:  # noqa: BLE001 - it goes into the report
            found["next"] = f"{type(error).__name__}: {error}"

    asker = threading.Thread(target=go_on)
    asker.start()
    stub.release()
    for thread in (switching, asker):
        thread.join(GUARD_S)
    return {**found, "n": len(session.tokens()), "mode": session.placement.mode.value}


def test_a_generation_without_a_limit_goes_on_after_a_switch_of_another_thread(model: Path) -> None:
    """Whether the context is full is asked with the turn: while a switch has none, there is nothing to ask."""
    found = run_child(child_generates_across, build(), model).value()
    assert found["mode"] == "tensor"
    assert found["next"] == found["n"] - 1


def child_fork(path: str, model: str) -> dict[str, Any]:
    session = scenes.start(Library.open(path), model, Scene())
    target = session.placement.changed(n_ctx=2048)
    served = AsyncSession(session)
    calls: dict[str, Callable[[], Any]] = {
        "check": lambda: session.check(target),
        "switch": lambda: session.switch(target),
        "prefill": lambda: session.prefill([1]),
        "tokenize": lambda: session.tokenize("x"),
        "save": lambda: session.save("x"),
        "close": session.close,
        "async run": lambda: asyncio.run(served.tokenize("x")),
        "async text": lambda: asyncio.run(served.text("x").read()),
        "async close": lambda: asyncio.run(served.close()),
    }
    found = {}
    for name, call in calls.items():
        # As other threads hold them at any time.
        with session._live.placing, session._live.turn._mutex, served._worker.lock:
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)  # its default ends the process
                try:
                    call()
                except ForkedProcess:
                    os._exit(3)
                os._exit(4)
            found[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    asyncio.run(served.close())
    return found


def test_a_fork_is_refused_whatever_it_asks_and_waits_for_nobody(model: Path) -> None:
    """The threads that held the session's locks do not exist in it."""
    found = run_child(child_fork, build(), model).value()
    assert set(found.values()) == {3}, found
