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


def native(cache_dir: Path) -> Path:
    """Give a build of the same sources whose tensor mode works on processors."""
    folder = cache_dir / "builds" / "native-0.3.36" / "lib"
    if not folder.is_dir():
        pytest.skip("no native build: run ci/builds --native")
    return folder


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
    found = run(cache_dir, 2, way, smollm2, "3,1")
    check(found)
    # One that cannot be freed is as it was, whatever it had freed.
    assert way == "keep" or (found["failed"], found["after"]) == ("no end", True)


@pytest.mark.build
@pytest.mark.model
def test_what_was_adopted_comes_back_from_tensor_mode(cache_dir: Path, smollm2: Path) -> None:
    """With a build of the same sources whose tensor mode works on processors."""
    check(run(cache_dir, 1, "keep", smollm2, "tensor", library=native(cache_dir)))


@pytest.mark.build
@pytest.mark.model
@pytest.mark.slow
@pytest.mark.deep
@pytest.mark.parametrize(("way", "target"), [("keep", "3,1"), ("free", "3,1"), ("keep", "tensor"), ("free", "tensor")])
def test_fifty_adoptions_leave_the_memory_flat(cache_dir: Path, smollm2: Path, way: str, target: str) -> None:
    """After the first ten less than 20 kB are kept each time; no descriptor or thread is left."""
    found = run(cache_dir, 50, way, smollm2, target, library=native(cache_dir) if target == "tensor" else None)
    check(found)
    lent, handles = found["heap"], found["handles"]
    rss = [round(one / 1e6, 1) for one in found["rss"]]
    print(f"after 10 and 50: lent {lent[9]:,} and {lent[-1]:,}, resident {rss[9]} and {rss[-1]} MB, {handles[-1]}")
    assert lent[-1] - lent[9] < 40 * 20_000
    assert max(rss[25:]) < 1.1 * max(rss[:25])
    assert handles[-1] == handles[9]


def test_anything_else_is_not_adopted() -> None:
    """And the error says what is wanted."""
    with pytest.raises(ConfigInvalid, match="a running llama_cpp"):
        Llama.adopt(object())
    with pytest.raises(ConfigInvalid, match=r"Llama\.adopt made"):
        Llama.__new__(Llama).release()
