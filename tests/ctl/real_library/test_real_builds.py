"""All tests of tests/real on the newest build."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ctl.real_builds import Build, check_build

pytestmark = [pytest.mark.build, pytest.mark.model, pytest.mark.slow]

BUILD = Build("xllamacpp-2026.10.11549")


@pytest.mark.usefixtures("smollm2")
def test_the_real_tests_pass(cache_dir: Path, tmp_path: Path) -> None:
    """Every test of tests/real passes on the newest build; one is for builds without a tensor mode."""
    check_build(BUILD, cache_dir, tmp_path)
