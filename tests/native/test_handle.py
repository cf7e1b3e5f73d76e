"""C objects that are closed, dropped or left to a fork, while others use the library."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from llama_native import Context, ContextParams, Library, Model, ModelParams
from llama_native import library as module
from tests.interrupted import Interruption
from tests.stublib import Stub, build, needs_compiler, run_child, write_model

pytestmark = [pytest.mark.stub, needs_compiler]

GUARD_S = 60.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny.gguf")


class Announced(Library):
    """Tells that a thread asks for the lock."""

    asked = threading.Event()

    def calling(self) -> Any:
        """Tell, and ask."""
        self.asked.set()
        return super().calling()


def child_closed_in_a_decode(path: str, model_path: str) -> dict[str, Any]:
    library, found = Library.open(path), {}
    other = Model.load(library, model_path, ModelParams())
    closing = threading.Thread(target=other.close)
    asking = threading.Thread(target=lambda: found.update(tokens=other.tokenize("ab", add_special=False)))

    def abort() -> bool:
        library.__class__ = Announced
        Announced.asked.clear()
        closing.start()
        assert Announced.asked.wait(GUARD_S)
        asking.start()
        asking.join(GUARD_S / 12)
        found["answered"] = not asking.is_alive()
        return False

    with (
        Model.load(library, model_path, ModelParams()) as model,
        Context(model, ContextParams(n_ctx=64), abort=abort) as context,
    ):
        context.decode([1], [0], [0], [True])
    closing.join(GUARD_S)
    return {**found, "closed": other.closed}


def test_a_model_that_waits_to_be_closed_answers_meanwhile(model: Path) -> None:
    """It waits for another model's decode, whose callback asks for tokens: each would wait for the other."""
    found = run_child(child_closed_in_a_decode, build(), model).value()
    assert found == {"tokens": [97, 98], "answered": True, "closed": True}


def child_asked_in_a_fork(path: str, model_path: str) -> int:
    with Model.load(Library.open(path), model_path, ModelParams()) as model:
        inside, done = threading.Event(), threading.Event()

        def work() -> None:
            with model._asking():
                inside.set()
                done.wait(GUARD_S)

        thread = threading.Thread(target=work)
        thread.start()
        inside.wait(GUARD_S)
        pid = os.fork()
        if pid == 0:
            signal.alarm(10)  # its default ends the process
            try:
                model.tokenize("ab")
            except Exception as error:  # noqa: BLE001 - its name goes into the exit code
                os._exit(3 if type(error).__name__ == "ForkedProcess" else 4)
            os._exit(5)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        done.set()
        thread.join(GUARD_S)
        return code


def test_a_fork_is_refused_a_vocabulary_that_another_thread_is_asking(model: Path) -> None:
    """That thread does not exist in the fork, which would wait for it for ever."""
    assert run_child(child_asked_in_a_fork, build(), model).value() == 3


def child_dropped(path: str, model_path: str) -> dict[str, Any]:
    library, stub = Library.open(path), Stub(path)
    n, where = 0, "the start"
    model = Model.load(library, model_path, ModelParams())
    while where:
        n += 1
        context = Context(model, ContextParams(n_ctx=64))
        interruption = Interruption(n, module)
        with interruption.armed():
            library.bury(context.owned)
        where = interruption.where
        other = threading.Thread(target=library.devices, daemon=True)
        other.start()
        other.join(GUARD_S / 12)
        if other.is_alive():
            return {"held": where}
        del context
    model.close()
    return {"n": n, "left": sorted(set(stub.live().values()))}


def test_what_is_dropped_lets_go_of_the_library_wherever_it_is_interrupted(model: Path) -> None:
    """A collector runs at any time, and a signal's handler may raise in it: no later call may wait for ever."""
    found = run_child(child_dropped, build(), model).value()
    assert "held" not in found, found
    assert found["left"] == [0]
    assert found["n"] > 5


def child_ends(path: str, model_path: str, out: str) -> None:
    def after() -> None:
        # Registered before the library's own end, so it runs behind that.
        busy = library._owner
        context.close()
        thread.join(GUARD_S)
        Path(out).write_text(f"{busy} {context.closed} {thread.is_alive()}")

    atexit.register(after)
    module._EXIT_S = 2.0
    library, stub = Library.open(path), Stub(path)
    stub.faults("pace:decode=200000")
    model = Model.load(library, model_path, ModelParams())
    context = Context(model, ContextParams(n_ctx=64))
    begun = threading.Event()

    def work() -> None:
        while True:
            context.clear()
            begun.set()
            context.decode([1], [0], [0], [True])

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    begun.wait(GUARD_S)


def test_a_process_ends_when_no_other_thread_is_in_the_library(model: Path, tmp_path: Path) -> None:
    """A daemon thread's call ends first, and it makes no other; a program may close and join even later."""
    out = tmp_path / "out"
    child = run_child(child_ends, build(), model, out)
    assert (child.returncode, child.stderr) == (0, "")
    assert out.read_text() == "None True False"
