"""What depends on the build, on an older one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ctl.real_builds import Build, check_build

pytestmark = [pytest.mark.build, pytest.mark.model, pytest.mark.slow]

# Here the tensor mode dies of a processor as a device: what is tested is that the try in a child finds it.
BUILD = Build("xllamacpp-2026.8.10566", has_tensor_mode=False, marks="every_build", n_least=60)


@pytest.mark.usefixtures("smollm2")
def test_the_real_tests_pass(cache_dir: Path, tmp_path: Path) -> None:
    """Layouts, draws, restores with streams and what is refused are right on an older build."""
    check_build(BUILD, cache_dir, tmp_path)
