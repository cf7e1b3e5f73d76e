"""Real reports about placing, reloading and freeing (rows P and R), each with the right answer; on the stub library."""

from __future__ import annotations

import gc
import threading
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from llama_native import CallFailed, Context, ContextParams, Library, Model, ModelParams, SplitMode
from splitctl.errors import AdapterInvalid, Busy
from splitctl.outcome import Proof
from splitctl.placement import Placement
from splitctl.session import Session
from tests.ctl import scenes
from tests.ctl.scenes import N_TOKENS, Scene
from tests.stublib import Stub, build, needs_compiler, run_child, write_model

pytestmark = [pytest.mark.stub, needs_compiler]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny.gguf")


def played(model: Path, *table: dict[str, Any]) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = run_child(scenes.play_all, build(), model, list(table)).value()
    return told


def opened(path: str, model: str, scene: Scene | None = None) -> tuple[Stub, Session]:
    """Open a session that has read its prompts, and forget the calls so far."""
    session = scenes.start(Library.open(path), model, scene or Scene())
    stub = Stub(path)
    stub.reset()
    return stub, session


# -- P18: split_mode is accepted and never passed on -------------------------------------------------------------------


def child_p18(path: str, model: str) -> list[dict[str, str]]:
    library = Library.open(path)
    stub = Stub(path)
    seen = []
    for mode in SplitMode:
        stub.reset()
        params = ModelParams(
            split_mode=mode, devices=("STUB1", "CPU"), tensor_split=(0.25, 0.75), main_gpu=1, n_gpu_layers=1
        )
        Model.load(library, model, params).close()
        seen.append(next(c.arguments for c in stub.calls() if c.name == "llama_model_load_from_file"))
    return seen


def test_p18_what_is_asked_reaches_the_library(model: Path) -> None:
    """For all four modes the struct that the library receives holds the mode, device list, split and main device."""
    for mode, got in zip(SplitMode, run_child(child_p18, build(), model).value(), strict=True):
        assert got["split_mode"] == str(mode.value)
        assert (got["main_gpu"], got["n_gpu_layers"]) == ("1", "1")
        assert (got["devices"], got["tensor_split"]) == ("STUB1,CPU", "0.25,0.75")


# -- R1, R2: memory questions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "faults", ["", "load:null:tensor", "init:null:tensor", "set_data:lie:tensor", "decode:nan:tensor"]
)
def test_r1_no_memory_question_between_free_and_load(model: Path, faults: str) -> None:
    """From the first free to the next context no device is asked for its memory, there and on the way back."""
    (seen,) = played(model, {"faults": faults})
    order = [n for n in scenes.names(seen["calls"]) if n in R1_CALLS]
    assert order[:4] == ["llama_free", "llama_model_free", "llama_model_load_from_file", *order[3:4]]
    for name, following in pairwise(order):
        assert not (name == "llama_model_free" and following == "ggml_backend_dev_memory")
        assert not (name == "llama_free" and following != "llama_model_free")


R1_CALLS = (
    "llama_free",
    "llama_model_free",
    "llama_model_load_from_file",
    "llama_init_from_model",
    "ggml_backend_dev_memory",
)


def test_r2_memory_is_asked_once_a_switch(model: Path) -> None:
    """A whole switch asks each device for its memory at most once."""
    (seen,) = played(model, {})
    asked = [call["arguments"]["device"] for call in seen["at_switch"] if call["name"] == "ggml_backend_dev_memory"]
    assert len(asked) == len(set(asked))


# -- R3: unloading never returns to zero -------------------------------------------------------------------------------


def child_r3(path: str, model: str) -> dict[str, Any]:
    library = Library.open(path)
    stub = Stub(path)
    stub.faults("model:weights=1000000")

    def used() -> list[int]:
        return [d.memory_total - d.memory_free for d in library.devices() if d.name.startswith("STUB")]

    baseline = used()
    session = scenes.start(library, model, Scene())
    serving = used()
    session.switch(session.placement.changed(mode=Scene(start="tensor").placement().mode))
    switched = used()
    for faults in ("load:null:layer@1", "init:null:layer", "decode:nan:layer"):
        stub.faults(faults)
        session.switch(session.placement.changed(mode=Scene().placement().mode))
        scenes.generate(session, 1, 1)
        stub.faults("clear model:weights=1000000")
    after = used()
    session.close()
    return {"baseline": baseline, "serving": serving, "switched": switched, "after": after, "closed": used()}


def test_r3_device_memory_returns_to_the_baseline(model: Path) -> None:
    """After switches, fallbacks and the close each device holds what it held before the session, to the byte."""
    seen = run_child(child_r3, build(), model).value()
    assert min(seen["serving"]) > 500_000
    assert seen["serving"] == seen["switched"] == seen["after"]
    assert seen["closed"] == seen["baseline"]


# -- R4: deleted, and the memory is still full -------------------------------------------------------------------------


def child_r4(path: str, model: str, adapter: str) -> dict[str, Any]:
    library = Library.open(path)
    stub = Stub(path)
    session = scenes.start(library, model, Scene(n_seq=2))
    stub.reset()
    session.close()
    order = [name for name in stub.names() if name.endswith("free")]
    session.close()
    seen: dict[str, Any] = {"order": order, "again": [n for n in stub.names() if n.endswith("free")] == order}
    for faults in ("load:null", "init:null", "adapter:null", "set_adapters:fail"):
        stub.faults(f"clear {faults}")
        try:
            Session.open(model, Scene().placement(), library=library, prober=None, adapters=[(adapter, 1.0)])
            seen[faults] = "opened"
        except (AdapterInvalid, CallFailed):
            seen[faults] = stub.live()
    stub.faults("clear")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        forgotten = Model.load(library, model, ModelParams())
        context = Context(forgotten, ContextParams(n_ctx=256))
        del context
        del forgotten
        gc.collect()
        seen["warned"] = sorted(str(one.message).split(";")[0].split(" ")[-1] for one in caught)
        seen["kind"] = sorted({one.category.__name__ for one in caught})
    return seen | {"mistakes": stub.mistakes()}


def test_r4_everything_is_freed_once_and_in_order(model: Path, tmp_path: Path) -> None:
    """A close frees samplers, context, model, once each; a failed open leaves nothing; a forgotten handle warns."""
    adapter = write_model(tmp_path / "adapter.gguf", extra={"general.type": "adapter", "adapter.type": "lora"})
    seen = run_child(child_r4, build(), model, adapter).value()
    assert seen["order"] == [*["llama_sampler_free"] * (len(seen["order"]) - 2), "llama_free", "llama_model_free"]
    assert len(seen["order"]) > 2
    assert seen["again"]
    nothing = {"models": 0, "contexts": 0, "samplers": 0, "adapters": 0, "mistakes": 0}
    for faults in ("load:null", "init:null", "adapter:null", "set_adapters:fail"):
        assert seen[faults] == nothing, faults
    assert seen["kind"] == ["ResourceWarning"]
    assert len(seen["warned"]) == 2
    assert seen["mistakes"] == []


# -- R9: saving or freeing while a decode is running -------------------------------------------------------------------


def child_r9(path: str, model: str) -> dict[str, Any]:
    stub, session = opened(path, model)
    wanted = scenes.straight(session._live.engine.library, model, Scene())
    stub.reset()
    stub.faults("decode:hang@2")
    target = session.placement.changed(mode=Scene(start="tensor").placement().mode)
    outcomes: list[str] = []
    busy: list[str] = []
    quiescing = threading.Event()

    def generates() -> None:
        scenes.generate(session, 1, 2 * N_TOKENS)

    def switches() -> None:
        outcome = session.switch(target, timeout_s=None, progress=lambda _stage, _share: quiescing.set())
        outcomes.append(outcome.status.value)

    threads = [threading.Thread(target=generates), threading.Thread(target=switches)]
    threads[0].start()
    stub.wait_hanging()
    timed_out = session.switch(target, timeout_s=0.0)
    threads[1].start()
    quiescing.wait()
    during = [name for name in stub.names() if name.startswith("llama_state") or name.endswith("free")]
    try:
        session.switch(target)
    except Busy as error:
        busy.append(str(error))
    stub.release()
    for thread in threads:
        thread.join()
    told = {
        "timed_out": [timed_out.status.value, timed_out.reason],
        "outcomes": outcomes,
        "busy": busy,
        "during": during,
        "mode": session.placement.mode.value,
        "same": [session.tokens()] == wanted,
        "inside": stub.max_inside(),
        "mistakes": stub.mistakes(),
    }
    session.close()
    return told | {
        "loads": stub.count("llama_model_load_from_file") + 1,
        "frees": stub.count("llama_model_free"),
        "live": stub.live(),
    }


def test_r9_a_switch_waits_for_the_token_boundary(model: Path) -> None:
    """A switch during a decode waits, or gives up in time; a second one is Busy; every load has its free."""
    seen = run_child(child_r9, build(), model).value()
    assert seen["timed_out"][0] == "refused"
    assert "token boundary" in seen["timed_out"][1]
    assert seen["outcomes"] == ["switched"]
    assert len(seen["busy"]) == 1
    assert "tensor" in seen["busy"][0]
    assert seen["during"] == []
    assert seen["mode"] == "tensor"
    assert seen["same"]
    assert seen["inside"] == 1
    assert seen["mistakes"] == []
    assert seen["loads"] == seen["frees"]
    assert set(seen["live"].values()) == {0}


def child_r9_callback(path: str, model: str) -> list[str]:
    _stub, session = opened(path, model)
    told: list[str] = []
    target = session.placement.changed(mode=Scene(start="tensor").placement().mode)

    def progress(_stage: Any, _share: float) -> None:
        for call in (lambda: session.switch(target), lambda: scenes.generate(session, 1, 1), session.close):
            try:
                call()
                told.append("let in")
            except Busy:
                told.append("busy")

    session.switch(target, proof=Proof.POSITIONS, progress=progress)
    session.close()
    return sorted(set(told))


def test_r9_a_call_from_inside_a_callback_is_busy(model: Path) -> None:
    """A progress callback that calls back into the session gets Busy at every stage, and never a deadlock."""
    assert run_child(child_r9_callback, build(), model).value() == ["busy"]


def test_the_default_placement_of_the_stub_opens(model: Path) -> None:
    """A placement that leaves everything to the library is resolved to numbers."""
    seen = run_child(child_default, build(), model).value()
    assert seen == {"n_ctx": 2048, "flash_attn": "on", "devices": "default:STUB0,STUB1"}


def child_default(path: str, model: str) -> dict[str, Any]:
    library = Library.open(path)
    stub = Stub(path)
    stub.reset()
    with Session.open(model, Placement(), library=library, prober=None) as session:
        load = next(call for call in stub.calls() if call.name == "llama_model_load_from_file")
        placement = session.placement
        return {
            "n_ctx": placement.n_ctx,
            "flash_attn": placement.flash_attn.value,
            "devices": load.arguments["devices"],
        }
