"""A session as another program's part: which library it takes, and what becomes of one that is dropped."""

from __future__ import annotations

import dataclasses
import gc
import warnings
from pathlib import Path
from typing import Any

import pytest

from llama_native import Library, LibraryNotFound, Model, ModelParams
from splitctl import Placement, SamplerSpec, Session
from tests.ctl import scenes
from tests.ctl.scenes import Scene
from tests.native.real import NEWEST, library_of
from tests.stublib import Stub, build, needs_compiler, run_child, write_model
from tools.make_dummies import make_many
from tools.places import default_folder

pytestmark = [pytest.mark.stub, needs_compiler]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny.gguf")


def child_by_variable(model: str) -> list[Any]:
    try:
        with Session.open(model, Scene().placement(), prober=None) as session:
            library = session._live.engine.library
            return [str(library.path), library.origin, "LLAMA_NATIVE_LIB" in library.env]
    except LibraryNotFound as error:
        return [str(error)]


def test_the_environment_names_the_library_of_a_program_that_embeds_a_session(model: Path, tmp_path: Path) -> None:
    """LLAMA_NATIVE_LIB counts as on the command line: no other library takes the place of a missing one."""
    taken = run_child(child_by_variable, model, LLAMA_NATIVE_LIB=str(build())).value()
    assert taken == [str(build()), "LLAMA_NATIVE_LIB", True]
    missing = str(tmp_path / "none.so")
    (said,) = run_child(child_by_variable, model, LLAMA_NATIVE_LIB=missing).value()
    assert f"{missing} (LLAMA_NATIVE_LIB): there is no such file" in said


def child_stops(path: str, model: str) -> dict[str, Any]:
    spec = SamplerSpec(temp=0.9, seed=7)
    with scenes.start(Library.open(path), model, Scene()) as session:
        tokens = [*session.generate(n=12, sampler=spec)]
        text = b"".join(token.piece for token in tokens)
    found: dict[str, Any] = {"text": text.decode(), "n": len(tokens)}
    # One that spans tokens, one that never comes whole, and one that the text ends in the middle of.
    for name, stop in (("found", text[5:8]), ("absent", b"\x7f\x7f"), ("begun", text[-2:] + b"\x7f")):
        with scenes.start(Library.open(path), model, Scene()) as session:
            cut = [*session.generate(n=12, sampler=dataclasses.replace(spec, stop=(stop.decode(),)))]
            found[name] = [b"".join(token.piece for token in cut).decode(), len(cut), [one.is_stop for one in cut]]
            found[f"{name} ids"] = [one.id for one in cut] == [one.id for one in tokens[: len(cut)]]
    return found


def test_stop_texts_of_a_sampler_end_the_generation(model: Path) -> None:
    """The pieces together are the text before the stop text, also where it spans tokens; what only begins one stays."""
    found = run_child(child_stops, build(), model).value()
    text, n = found["text"], found["n"]
    assert n == len(text) == 12
    assert found["found"] == [text[: text.index(text[5:8])], 8, [False] * 7 + [True]]
    for name in ("absent", "begun"):
        assert found[name] == [text, 12, [False] * 12]
    assert found["found ids"]
    assert found["begun ids"]


def child_drops(path: str, model: str) -> dict[str, Any]:
    library, stub = Library.open(path), Stub(path)
    found: dict[str, Any] = {}
    warnings.simplefilter("always")
    # Nothing is left to the collector, which comes late: a model may be larger than what is left of the memory.
    gc.disable()
    with warnings.catch_warnings(record=True) as caught:
        session = scenes.start(library, model, Scene())
        session.switch(session.placement.changed(mode="tensor"), progress=lambda *_: None)
        scenes.generate(session, 1)
        del session
        found["dropped"] = stub.live()
    found["warned"] = sorted({str(one.message).partition(" was")[0] for one in caught})
    found["category"] = {one.category.__name__ for one in caught} == {"ResourceWarning"}
    held = [scenes.start(library, model, Scene())]

    def drop(_share: float) -> bool:
        held.clear()
        return True

    with warnings.catch_warnings(record=True):
        # From inside a call of the library it cannot be freed there and then.
        Model.load(library, model, ModelParams(), progress=drop).close()
        library.devices(memory=False)
    found["dropped inside a call"] = stub.live()
    found["mistakes"] = stub.mistakes()
    return found


def test_a_session_that_is_dropped_frees_its_model_and_says_so(model: Path) -> None:
    """At once, the context before the model; where a call is under way, before the next one."""
    found = run_child(child_drops, build(), model).value()
    assert set(found["dropped"].values()) == {0}
    assert found["warned"] == ["a context", f"model {model}"]
    assert found["category"]
    assert set(found["dropped inside a call"].values()) == {0}
    assert found["mistakes"] == []


def child_collected(path: str, model: str) -> dict[str, Any]:
    library, stub = Library.open(path), Stub(path)
    orders = []
    for _ in range(20):
        session = scenes.start(library, model, Scene())
        session.itself = session  # type: ignore[attr-defined]
        del session
        stub.reset()
        gc.collect()
        orders.append([name for name in stub.names() if name in {"llama_free", "llama_model_free"}])
    return {"orders": orders, "left": stub.live(), "mistakes": stub.mistakes()}


def test_a_collector_frees_a_context_before_its_model(model: Path) -> None:
    """Whichever of the two it ends first."""
    found = run_child(child_collected, build(), model).value()
    assert found["orders"] == [["llama_free", "llama_model_free"]] * 20
    assert set(found["left"].values()) == {0}
    assert found["mistakes"] == []


_kept: list[Session] = []


def child_ends(path: str, model: str) -> str:
    placement = Placement(devices=("CPU", "CPU"), n_ctx=256, n_threads=1)
    session = Session.open(model, placement, library=Library.open(path), prober=None)
    session.prefill([5, 9, 2, 7])
    _kept.append(session)
    return session.stage.value


@pytest.mark.build
def test_a_session_that_is_still_open_at_the_end_of_the_program_is_no_crash() -> None:
    """On a real library: its threads and log outlive the interpreter's modules."""
    ((_, path, why),) = make_many(default_folder(), ["llama"])
    assert isinstance(path, Path), why
    child = run_child(child_ends, library_of(NEWEST), path)
    assert child.value() == "serving"
    assert "Exception ignored" not in child.stderr
