"""The library's own switch, on the build of `ci/builds --native`: a short run of tools.check_native."""

from __future__ import annotations

import pytest

from tools.check_native import native_library, run_parts, tiny_model
from tools.places import default_folder, small_model

pytestmark = pytest.mark.skipif(not native_library().is_file(), reason="no native build: ci/builds --native")


@pytest.mark.parametrize("part", ["refusals", "kept", "leaks", "allocations"])
def test_what_fails_in_the_librarys_own_switch_loses_nothing(part: str) -> None:
    """Refusals touch nothing, pointers stay, nothing leaks, and a failed allocation leaves the old mode serving."""
    if not any(default_folder().glob("llama-[0-9a-f]*.gguf")) or not small_model().is_file():
        pytest.skip("no models: tools.make_dummies llama, ci/model smollm2")
    rows = list(run_parts([part], native_library(), small_model(), tiny_model(), step=1500, n_switches=20))
    assert rows
    assert [row for row in rows if row["status"] != "held"] == []
