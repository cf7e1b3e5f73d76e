"""Tests of tests/real on the build that switches by itself, by its own call and by the sequence of calls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.ctl.real_builds import Build, check_build

pytestmark = [pytest.mark.build, pytest.mark.model, pytest.mark.slow]

_HOW = "ci/builds --native (no native build)"


BUILD = Build("native-0.3.36", "lib/libllama.so", how=_HOW)
#: Where a switch is made by the call, in a session and in a worker; the others are about what does not depend on it.
_FILES = ("test_own_call.py", "test_switch.py", "test_serving.py")


@pytest.mark.usefixtures("smollm2")
def test_what_depends_on_the_build_passes_by_its_own_call(cache_dir: Path, tmp_path: Path) -> None:
    """The library's own call does what a switch promises, and what it cannot do is done as ever."""
    check_build(replace(BUILD, marks="every_build", files=_FILES, n_least=30, via="native"), cache_dir, tmp_path)


@pytest.mark.deep
@pytest.mark.usefixtures("smollm2")
@pytest.mark.parametrize("via", ["native", "composed"])
def test_the_real_tests_pass_by_both_routes(via: str, cache_dir: Path, tmp_path: Path) -> None:
    """Every test of tests/real passes, whoever does the work of a switch."""
    check_build(replace(BUILD, n_least=200, via=via), cache_dir, tmp_path)
