"""What each way of a switch takes on devices and the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from splitctl.model.header import TensorInfo
from splitctl.placement import FlashAttn, Placement, SplitMode
from splitctl.planning.backends import CUDA
from splitctl.planning.fit_check import fits_beside
from splitctl.planning.fitting import lacking
from splitctl.planning.memory import DeviceFacts, plan_mode
from splitctl.planning.survey import CARRY_COPIES, Known, answer_switch, tiers_json
from splitctl.planning.tiers import TierPlan, left_by
from tests.ctl.model_facts import model_facts

_MIB = 1024 * 1024
_GIB = 1024 * _MIB
_COPY = 4 * 100 * _MIB
FACTS = model_facts(
    tensors=tuple(TensorInfo(f"blk.{n}.ffn_up.weight", (256, 102_400), 0, 100 * _MIB, 0) for n in range(4))
)
LAYER = Placement(
    mode=SplitMode.LAYER, devices=("CUDA0", "CUDA1"), tensor_split=(1.0, 1.0), n_ctx=4096, flash_attn=FlashAttn.ON
)
TENSOR = dataclasses.replace(LAYER, mode=SplitMode.TENSOR)


def _known(*, card: int = 8 * _GIB, host: int = 64 * _GIB, unit: str = "") -> Known:
    cards = (DeviceFacts(f"CUDA{n}", "gpu", card, unit=unit) for n in range(2))
    return Known(FACTS, (*cards, DeviceFacts("host", "cpu", host)))


def _tiers(known: Known) -> Mapping[str, TierPlan]:
    return {one.name: one for one in known.tiers(LAYER, TENSOR)}


def test_every_way_takes_what_it_takes() -> None:
    """One placement at a time from the file and the copy, both at once else; to the byte."""
    known = _known()
    layer, tensor, carry = known.plan(LAYER), known.plan(TENSOR), known.switch(LAYER, TENSOR).carry
    found = _tiers(known)
    assert list(found) == ["file", "pinned", "resident", "beside"]
    assert all(one.fits and not one.reason for one in found.values())
    one_at_a_time = [max(a.total, b.total) for a, b in zip(layer.shares, tensor.shares, strict=True)]
    both = [a.total + b.total for a, b in zip(layer.shares, tensor.shares, strict=True)]
    context = CUDA.fixed_bytes + CUDA.blas_kernel_bytes
    assert [share.total for share in found["file"].devices] == one_at_a_time
    assert [share.total for share in found["pinned"].devices] == one_at_a_time
    assert [share.total for share in found["beside"].devices] == both
    assert [share.total for share in found["resident"].devices] == [size - context for size in both]
    larger = max(layer.host.total, tensor.host.total)
    hosts = {name: one.host.total - carry for name, one in found.items()}
    assert hosts == {
        "file": larger,
        "pinned": larger + _COPY,
        "resident": layer.host.total + tensor.host.total,
        "beside": layer.host.total + tensor.host.total,
    }
    assert carry % CARRY_COPIES == 0


@pytest.mark.parametrize(("way", "fewer"), [("resident", "pinned"), ("beside", "resident")])
def test_a_way_that_does_not_fit_says_what_is_short(way: str, fewer: str) -> None:
    """A byte less than it takes, with both numbers; the ways that take less still fit."""
    wanted = {name: {need.pool: need.wanted for need in one.needs} for name, one in _tiers(_known()).items()}
    short = wanted[way]["CUDA0"] - 1
    found = _tiers(_known(card=short))
    assert found["file"].fits
    assert found[fewer].fits
    (need,) = lacking(found[way].needs)
    assert (need.pool, need.wanted, need.free) == ("CUDA0", short + 1, short)
    assert "CUDA0 would hold" in found[way].reason


def test_a_copy_leaves_the_host_as_much_free_again() -> None:
    """A byte less than the first placement and twice the copy, and there is none; both numbers are told."""
    enough = _known().plan(LAYER).host.total + 2 * _COPY
    assert _tiers(_known(host=enough))["pinned"].fits
    found = _tiers(_known(host=enough - 1))
    assert (found["file"].fits, found["pinned"].fits) == (True, False)
    assert found["pinned"].reason == (
        "the copy of the weights takes 400 MiB and as much shall stay free, and the host would have 800 MiB"
    )


@pytest.mark.parametrize("same_process", [True, False], ids=["resident", "beside"])
def test_a_running_session_is_told_what_the_plan_said(*, same_process: bool) -> None:
    """With the first placement there, the second fits in what is left to the byte of the plan for both."""
    plan = _tiers(_known())["resident" if same_process else "beside"]
    most = max(need.wanted for need in plan.needs[:-1])
    for spare in (0, -1):
        free = left_by(_known().plan(LAYER), _known(card=most + spare).devices)
        assert fits_beside(FACTS, LAYER, TENSOR, free, same_process=same_process).fits is (spare == 0)


def test_layers_beside_a_placement_go_where_it_leaves_room() -> None:
    """The library shares layers by what is free when it loads them: the second placement meets the first."""
    chosen = dataclasses.replace(LAYER, tensor_split=None)
    known = Known(FACTS, (DeviceFacts("CUDA0", "gpu", 2 * _GIB), DeviceFacts("CUDA1", "gpu", 2 * _GIB)))
    first = dataclasses.replace(TENSOR, tensor_split=(0.0, 1.0))
    (*_, beside) = known.tiers(first, chosen)
    held = known.plan(first)
    left = tuple(
        dataclasses.replace(device, free=(device.free or 0) - share.total)
        for device, share in zip(known.devices, held.shares, strict=True)
    )
    second = plan_mode(FACTS, chosen, left)
    assert [share.total for share in beside.devices] == [
        a.total + b.total for a, b in zip(held.shares, second.shares, strict=True)
    ]
    assert second.effective != known.plan(chosen).effective


def test_virtual_devices_hold_both_placements_together() -> None:
    """Both are one pool, with the memory of the one card behind them."""
    whole = sum(share.total for share in _tiers(_known(unit="p0"))["beside"].devices)
    half = -(-whole // 2)
    assert _tiers(_known(card=half, unit="p0"))["beside"].fits
    short = _tiers(_known(card=half - 1, unit="p0"))["beside"]
    assert [need.pool for need in lacking(short.needs)] == ["CUDA0 + CUDA1"]


def test_an_rpc_server_takes_no_second_worker() -> None:
    """Beside is barred by name, whatever fits; both placements of one worker are not."""
    names = ("RPC0[a:1]", "RPC0[b:1]")
    known = Known(
        FACTS, (*(DeviceFacts(name, "gpu", 64 * _GIB) for name in names), DeviceFacts("host", "cpu", 1 << 40))
    )
    places = (dataclasses.replace(one, devices=names) for one in (LAYER, TENSOR))
    found = {one.name: one for one in known.tiers(*places)}
    assert found["resident"].fits
    assert not found["beside"].fits
    assert "RPC server" in found["beside"].reason


def test_tiers_are_plain_values() -> None:
    """What --json prints: whether each fits, why not, and the bytes of every device and the host."""
    most = max(need.wanted for need in _tiers(_known())["beside"].needs[:-1])
    answer = answer_switch(_known(card=most - 1), LAYER, TENSOR)
    body = tiers_json(answer)
    assert list(body) == ["file", "pinned", "resident", "beside"]
    assert (body["file"]["fits"], body["file"]["reason"]) == (True, "")
    assert (body["beside"]["fits"], body["resident"]["fits"]) == (False, True)
    assert body["beside"]["reason"]
    for tier in body.values():
        assert tier["total"] == sum(share["total"] for share in tier["devices"])
        assert tier["host"]["device"] == "host"
    assert body["file"]["devices"] == [dataclasses.asdict(one) | {"total": one.total} for one in answer.plan.peaks]
