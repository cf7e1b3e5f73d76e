"""What a signal's handler, a listener or a callback raises while the library works comes out when the call is over."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_native import CallFailed, Context, ContextParams, Library, Model, ModelParams, state_get, state_size
from tests.stublib import Stub, build, needs_compiler, run_child, write_model
from tests.stublib.signals import catch, signalled_while_it_hangs

pytestmark = [pytest.mark.stub, needs_compiler]

CALLS = {"load": "load", "init": "init", "decode": "decode", "synchronize": "synchronize", "get_data": "get_data"}


def outcome_of(work: Callable[[], Any]) -> str:
    """The name of what it raised, or "" if nothing."""
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - its name goes into the report
        return type(error).__name__
    return ""


def child_in_c(path: str, model_path: str) -> dict[str, Any]:
    catch(signal.SIGUSR1)
    library, stub, found = Library.open(path), Stub(path), {}
    for call in CALLS:
        with signalled_while_it_hangs(stub, f"{call}:hang@1"):
            found[call] = outcome_of(lambda: _everything(library, model_path))
        found[f"{call} left"] = stub.live()
    found["then"] = outcome_of(lambda: _everything(library, model_path))
    return found


def _everything(library: Library, model_path: str) -> None:
    """Use the library from the load to the close."""
    with (
        Model.load(library, model_path, ModelParams()) as model,
        Context(model, ContextParams(n_ctx=64), abort=lambda: False) as context,
    ):
        context.decode([1, 2], [0, 1], [0, 0], [False, True])
        state_get(context, bytearray(state_size(context)))


def test_a_signal_while_c_runs_is_raised_after_the_call_and_nothing_is_leaked(tmp_path: Path) -> None:
    """The handler's exception comes out of each kind of call; what the call made is freed; the library works on."""
    found = run_child(child_in_c, build(), write_model(tmp_path / "tiny.gguf")).value()
    for call in CALLS:
        assert found[call] == "Alarm", call
        assert set(found[f"{call} left"].values()) == {0}, call
    assert found["then"] == ""


def child_in_callbacks(path: str, model_path: str) -> dict[str, Any]:
    catch(signal.SIGUSR1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    library, stub, found = Library.open(path), Stub(path), {}

    def once(number: int) -> Callable[..., bool]:
        """A callback that gets a signal the first time."""
        left = [number]

        def callback(*_: object) -> bool:
            if left:
                signal.raise_signal(left.pop())
            return True

        return callback

    for name, number in (("Alarm", signal.SIGUSR1), ("KeyboardInterrupt", signal.SIGINT)):
        stop = library.log.listen(once(number))
        # A file that is no model: the library says so in its log.
        found[f"log {name}"] = outcome_of(lambda: Model.load(library, os.devnull, ModelParams()))
        stop()
        progress = once(number)
        found[f"progress {name}"] = outcome_of(
            lambda to=progress: Model.load(library, model_path, ModelParams(), progress=to)
        )
        with Model.load(library, model_path, ModelParams()) as model:
            interrupt = once(number)
            with Context(model, ContextParams(n_ctx=64), abort=lambda to=interrupt: not to()) as context:
                found[f"abort {name}"] = outcome_of(lambda: context.decode([1, 2], [0, 1], [0, 0], [False, True]))
                found[f"after {name}"] = outcome_of(lambda: context.decode([3], [2], [0], [True]))
    found["left"] = stub.live()

    def wrong(*_: object) -> None:
        raise LookupError

    stop = library.log.listen(wrong)
    found["listener"] = outcome_of(lambda: Model.load(library, os.devnull, ModelParams()))
    stop()
    signal.signal(signal.SIGUSR1, lambda *_: None)
    with signalled_while_it_hangs(stub, "decode:hang@1"):
        found["quiet handler"] = outcome_of(lambda: _everything(library, model_path))
    found["missing"] = outcome_of(lambda: Model.load(library, os.devnull, ModelParams()))
    return found


def test_what_is_raised_in_a_callback_is_raised_after_the_call(tmp_path: Path) -> None:
    """In the log, while loading and between two nodes of a graph; a handler that raises nothing disturbs nothing."""
    child = run_child(child_in_callbacks, build(), write_model(tmp_path / "tiny.gguf"))
    found = child.value()
    for name in ("Alarm", "KeyboardInterrupt"):
        for place in ("log", "progress", "abort"):
            assert found[f"{place} {name}"] == name, place
        # The stub asks before it decodes, once: the batch was decoded to its end.
        assert found[f"after {name}"] == ""
    assert set(found["left"].values()) == {0}
    assert found["listener"] == "LookupError"
    assert found["quiet handler"] == ""
    assert found["missing"] == CallFailed.__name__
    assert "callback" not in child.stderr
