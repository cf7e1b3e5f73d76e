"""A session as another program's part: which library it takes, and what becomes of one that is dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llama_native import LibraryNotFound
from splitctl import Session
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
