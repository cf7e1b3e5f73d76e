"""A running llama_cpp.Llama is taken over, switched and given back, by a child that has the real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from splitctl.compat.llama_cpp import Llama
from splitctl.errors import ConfigInvalid

_ROOT = Path(__file__).parents[3]
_TIMEOUT_S = 300.0
"""A guard against a child that hangs; no test measures it."""


def run(cache_dir: Path, *arguments: object, library: Path | None = None) -> dict[str, Any]:
    """Run the child with llama-cpp-python, on its own library or another build of the same sources."""
    package = cache_dir / "builds" / "llama-cpp-python-0.3.36"
    if not package.is_dir():
        pytest.skip(f"{package.name} is not there: run ci/builds --llama-cpp-python")
    done = subprocess.run(
        [sys.executable, "-m", "tests.ctl.compat.adopted", *map(str, arguments)],
        cwd=_ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(_ROOT), str(package)]),
            **({} if library is None else {"LLAMA_CPP_LIB_PATH": str(library)}),
        },
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(found: dict[str, Any]) -> None:
    """Nothing was lost on the way there and back, and it refused calls meanwhile."""
    assert set(found["statuses"]) == {"switched"}
    assert (found["same_states"], found["is_it"]) == (True, True)
    assert (found["first"], found["same"]) == (True, True)
    assert (found["goes_on"], found["next"]) == (True, True)
    assert "call release()" in found["refusal"]


@pytest.mark.build
@pytest.mark.model
@pytest.mark.parametrize("way", ["keep", "free"])
def test_what_was_adopted_goes_on_as_if_it_had_never_been(cache_dir: Path, smollm2: Path, way: str) -> None:
    """The same 64 greedy tokens; its own build's tensor mode dies on processors, so the shares change."""
    check(run(cache_dir, 2, way, smollm2, "3,1"))


@pytest.mark.build
@pytest.mark.model
def test_what_was_adopted_comes_back_from_tensor_mode(cache_dir: Path, smollm2: Path) -> None:
    """With a build of the same sources whose tensor mode works on processors."""
    library = cache_dir / "builds" / "native-0.3.36" / "lib"
    if not library.is_dir():
        pytest.skip("native-0.3.36 is not there: run ci/builds --native")
    check(run(cache_dir, 1, "keep", smollm2, "tensor", library=library))


@pytest.mark.build
@pytest.mark.model
@pytest.mark.slow
@pytest.mark.deep
def test_fifty_adoptions_leave_the_memory_flat(cache_dir: Path, smollm2: Path) -> None:
    """Either way: after the first ten it grows no more."""
    for way in ("keep", "free"):
        found = run(cache_dir, 50, way, smollm2, "3,1")
        check(found)
        assert max(found["rss"][10:]) < 1.05 * max(found["rss"][:10])


def test_anything_else_is_not_adopted() -> None:
    """And the error says what is wanted."""
    with pytest.raises(ConfigInvalid, match="a running llama_cpp"):
        Llama.adopt(object())
    with pytest.raises(ConfigInvalid, match=r"Llama\.adopt made"):
        Llama.__new__(Llama).release()
