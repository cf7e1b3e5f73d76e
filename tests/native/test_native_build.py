"""The library's own switch, on the build of `ci/builds --native`: a short run of tools.check_native."""

from __future__ import annotations

from pathlib import Path

import pytest

from llama_native import Library
from splitctl.placement import FlashAttn, Placement, SplitMode
from splitctl.probing import try_placement
from tests.stublib import run_child
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


def _tries(library: str, model: str, n: int) -> list[str]:
    """Try tensor mode several times: later ones get memory that others have used. Runs in a child."""
    placement = Placement(
        mode=SplitMode.TENSOR, devices=("CPU", "CPU"), n_ctx=256, n_batch=64, n_ubatch=64, n_seq_max=4, kv_unified=True,
        flash_attn=FlashAttn.ON, n_threads=1, n_threads_batch=1,
    )  # fmt: skip
    opened = Library.open(library)
    return [try_placement(opened, model, placement).why for _ in range(n)]


@pytest.mark.model
def test_tensor_mode_gives_numbers_whatever_its_memory_held(smollm2: Path) -> None:
    """A device without a slice of a sum adds 0, also where its memory holds what is no number."""
    assert run_child(_tries, native_library(), smollm2, 4).value() == [""] * 4
