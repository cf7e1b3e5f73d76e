"""Tests of tests/real on the build that switches by itself, by its own call and by the sequence of calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ctl.real_builds import Build, check_build

pytestmark = [pytest.mark.build, pytest.mark.model, pytest.mark.slow]

_HOW = "ci/builds --native (no native build)"


def _build(via: str, marks: str, n_least: int) -> Build:
    return Build("native-0.3.36", "lib/libllama.so", marks=marks, n_least=n_least, via=via, how=_HOW)


@pytest.mark.usefixtures("smollm2")
def test_what_depends_on_the_build_passes_by_its_own_call(cache_dir: Path, tmp_path: Path) -> None:
    """The library's own call does what a switch promises, and what it cannot do is done as ever."""
    check_build(_build("native", "every_build", 70), cache_dir, tmp_path)


@pytest.mark.deep
@pytest.mark.usefixtures("smollm2")
@pytest.mark.parametrize("via", ["native", "composed"])
def test_the_real_tests_pass_by_both_routes(via: str, cache_dir: Path, tmp_path: Path) -> None:
    """Every test of tests/real passes, whoever does the work of a switch."""
    check_build(_build(via, "", 200), cache_dir, tmp_path)
