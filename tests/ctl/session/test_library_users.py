"""A session as another program's part: which library it takes, and what becomes of one that is dropped."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from llama_native import Library, LibraryNotFound
from splitctl import SamplerSpec, Session
from tests.ctl import scenes
from tests.ctl.scenes import Scene
from tests.stublib import build, needs_compiler, run_child, write_model

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
