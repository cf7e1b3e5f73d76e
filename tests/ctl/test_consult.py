"""What surely does not fit, given what a session will give back."""

from __future__ import annotations

import dataclasses

import pytest

from splitctl.gguf_header import TensorInfo
from splitctl.placement import FlashAttn, Placement, SplitMode
from splitctl.planning.consult import surely_lacking
from splitctl.planning.memory import DeviceFacts
from tests.ctl.model_facts import model_facts

_MIB = 1024 * 1024
FACTS = model_facts(
    tensors=tuple(TensorInfo(f"blk.{n}.ffn_up.weight", (256, 102_400), 0, 100 * _MIB, 0) for n in range(4))
)
LAYER = Placement(
    mode=SplitMode.LAYER, devices=("CUDA0", "CUDA1"), tensor_split=(1.0, 1.0), n_ctx=256, flash_attn=FlashAttn.ON
)
TENSOR = dataclasses.replace(LAYER, mode=SplitMode.TENSOR, tensor_split=None)


def _machine(*free: int | None) -> tuple[DeviceFacts, ...]:
    cards = (DeviceFacts(f"CUDA{n}", "gpu", None if one is None else one * _MIB) for n, one in enumerate(free))
    return (*cards, DeviceFacts("host", "cpu", 0))


@pytest.mark.parametrize(
    ("current", "free", "pools"),
    [
        (None, (250, 250), []),
        (None, (150, 1000), ["CUDA0"]),
        (LAYER, (0, 90), ["CUDA1"]),
        (LAYER, (0, 110), []),
        (None, (None, 250), []),
    ],
    ids=["room", "none-on-one", "too-little-given-back", "given-back", "unknown"],
)
def test_what_a_session_gives_back_counts_as_free(
    current: Placement | None, free: tuple[int | None, ...], pools: list[str]
) -> None:
    """300 and 100 MiB by layers, 200 and 200 by slices; memory of one device is of no use to the other."""
    assert [need.pool for need in surely_lacking(FACTS, current, TENSOR, _machine(*free))] == pools


def test_compute_buffers_do_not_count() -> None:
    """By a formula they could refuse what fits; the session finds out by placing, and falls back."""
    large = dataclasses.replace(TENSOR, n_ctx=256, n_ubatch=4096, n_batch=4096)
    assert surely_lacking(FACTS, None, large, _machine(201, 201)) == ()
