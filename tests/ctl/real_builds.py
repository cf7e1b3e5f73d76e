"""Runs the tests of tests/real on one real build, in a process of its own: one library a process."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.rpc_server import served

_ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 900.0
"""A guard against a build that hangs; no test measures it."""


@dataclass(frozen=True, slots=True)
class Build:
    """A build under test.

    Args:
        folder: its name in the cache's `builds`.
        library: the file in it.
        n_servers: RPC servers that give it its devices; 0: one processor, named twice.
        has_tensor_mode: whether its tensor mode works on these devices, so that no test of it may skip.
        marks: which tests are run, as pytest's `-m` takes it; "": all of them.
        files: the files of tests/real that are run; (): all of them.
        n_least: fewer tests that pass are a collection that went wrong.
        via: who does the work of switches that name no route; "": what the session takes.
        how: the program that makes the build.
    """

    folder: str
    library: str = "xllamacpp/xllamacpp.abi3.so"
    n_servers: int = 0
    has_tensor_mode: bool = True
    marks: str = ""
    files: tuple[str, ...] = ()
    n_least: int = 100
    via: str = ""
    how: str = "ci/builds"


_NEEDS_TENSOR = "tensor mode does not work"


def _counts(report: Path) -> tuple[int, dict[str, str]]:
    """Read a JUnit report: how many tests passed, and id -> reason of those that were skipped."""
    n_passed, skipped = 0, {}
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 - pytest wrote it a moment ago
        skip = case.find("skipped")
        if skip is not None:
            skipped[f"{case.get('classname')}::{case.get('name')}"] = str(skip.get("message"))
        elif case.find("failure") is None and case.find("error") is None:
            n_passed += 1
    return n_passed, skipped


def check_build(build: Build, cache_dir: Path, tmp_path: Path) -> None:
    """Hold a build to the tests: each passes, or skips for a reason that fits the build."""
    library = cache_dir / "builds" / build.folder / build.library
    if not library.is_file():
        pytest.skip(f"{build.folder} is not there: run {build.how}")
    report = tmp_path / "report.xml"
    with ExitStack() as stack:
        servers = [stack.enter_context(served(library))[0] for _ in range(build.n_servers)]
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", *(f"tests/real/{name}" for name in build.files or ("",))),
                *("-q", "--durations=10", f"--junitxml={report}"),
                *("-m", build.marks),
                *("-p", "no:cacheprovider", f"--basetemp={tmp_path / 'child'}"),
            ],
            cwd=_ROOT,
            # Its skips are judged here, not by the list of the whole run.
            env={
                **{name: value for name, value in os.environ.items() if name != "CI"},
                "SPLITCTL_TEST_LIBRARY": str(library),
                "SPLITCTL_TEST_RPC": ",".join(servers),
                **({"SPLITCTL_TEST_VIA": build.via} if build.via else {}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    print(done.stdout)
    assert done.returncode == 0
    n_passed, skipped = _counts(report)
    told = "\n".join(f"{node}: {reason}" for node, reason in skipped.items())
    print(f"{build.folder}: {n_passed} passed, {len(skipped)} skipped\n{told}")
    assert n_passed >= build.n_least, told
    without_tensor = [node for node, reason in skipped.items() if _NEEDS_TENSOR in reason]
    assert bool(without_tensor) is not build.has_tensor_mode, told
