"""All tests of tests/real on a build whose devices are RPC servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ctl.real_builds import Build, check_build

pytestmark = [pytest.mark.build, pytest.mark.model, pytest.mark.slow]

BUILD = Build(
    "llama-cpp-python-0.3.36", "llama_cpp/lib/libllama.so", n_servers=2, n_least=80, how="ci/builds --llama-cpp-python"
)


@pytest.mark.usefixtures("smollm2")
def test_the_real_tests_pass(cache_dir: Path, tmp_path: Path) -> None:
    """Every test of tests/real passes on devices of other processes, or skips for a reason that fits them."""
    check_build(BUILD, cache_dir, tmp_path)
