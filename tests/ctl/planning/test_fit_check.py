"""What surely does not fit, given what a session will give back; and the sizes that a prompt is read with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from llama_native import Device, DeviceKind, Library
from splitctl.carry.sampling import SamplerSpec
from splitctl.errors import Refused
from splitctl.ipc.jobs import RunRequest
from splitctl.ipc.reserving import Reserved
from splitctl.model.facts import ModelFacts
from splitctl.model.header import TensorInfo
from splitctl.placement import FlashAttn, Placement, SplitMode
from splitctl.planning import fit_check
from splitctl.planning.backends import CUDA
from splitctl.planning.fit_check import Plans, definite_shortage, fits_beside, shortage
from splitctl.planning.fitting import Need
from splitctl.planning.memory import DeviceFacts, ModePlan, plan_mode
from splitctl.probing.free_memory import FreeMemoryCheck, device_facts
from splitctl.worker.opening import reading_placement, with_largest_chunk
from tests.ctl import scenes
from tests.ctl.model_facts import model_facts
from tests.ctl.scenes import Scene
from tests.stublib import Stub, build, needs_compiler, run_child, write_model

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


PLANS = Plans(FACTS, _machine(None, None))


@pytest.mark.parametrize(
    ("current", "free", "pools"),
    [
        (None, (250, 250), []),
        (None, (150, 1000), ["CUDA0"]),
        (LAYER, (0, 110), []),
        (None, (None, 250), []),
    ],
    ids=["room", "none-on-one", "given-back", "unknown"],
)
def test_what_a_session_gives_back_counts_as_free(
    current: Placement | None, free: tuple[int | None, ...], pools: list[str]
) -> None:
    """300 and 100 MiB by layers, 200 and 200 by slices; memory of one device is of no use to the other."""
    assert [need.pool for need in definite_shortage(PLANS, current, TENSOR, _machine(*free))] == pools


def test_compute_buffers_do_not_count() -> None:
    """By a formula they could refuse what fits; the session finds out by placing, and falls back."""
    large = dataclasses.replace(TENSOR, n_ctx=256, n_ubatch=4096, n_batch=4096)
    assert definite_shortage(PLANS, None, large, _machine(201, 201)) == ()


def test_shares_that_the_library_chooses_are_one_pool() -> None:
    """By free memory it puts more layers where there is more: only the sum can be lacking."""
    chosen = dataclasses.replace(LAYER, tensor_split=None)
    assert definite_shortage(PLANS, None, chosen, _machine(50, 400)) == ()
    (need,) = definite_shortage(PLANS, None, chosen, _machine(50, 300))
    assert (need.pool, need.free) == ("CUDA0 + CUDA1", 350 * _MIB)
    assert need.wanted >= 400 * _MIB


def test_a_device_has_no_more_than_its_total() -> None:
    """What is given back is an estimate that is too high; the device's size ends it."""
    small = dataclasses.replace(_machine(0, 0)[1], total=150 * _MIB)
    machine = (_machine(0)[0], small, DeviceFacts("host", "cpu", 0))
    assert [need.pool for need in definite_shortage(PLANS, LAYER, TENSOR, machine)] == ["CUDA1"]


def test_a_reason_has_both_numbers_and_the_way_out() -> None:
    """The text names the device, what it would hold, what it has, and what to do."""
    (reason,) = shortage(PLANS, None, TENSOR, _machine(150, 1000))
    assert reason.code == "does-not-fit"
    assert reason.text.startswith(
        "CUDA0 would hold at least 200 MiB of weights and cache in tensor mode and has 150 MiB"
    )
    assert "--force" in reason.text


@pytest.mark.parametrize("free", [(0, 0), (50, 350), (390, 10), (1000, 1000), (None, 100)])
@pytest.mark.parametrize(
    "target",
    [TENSOR, LAYER, dataclasses.replace(LAYER, tensor_split=None), dataclasses.replace(LAYER, n_gpu_layers=2)],
    ids=["tensor", "layer", "chosen", "partly"],
)
@pytest.mark.parametrize("current", [None, LAYER, dataclasses.replace(LAYER, tensor_split=None)])
def test_plans_that_are_kept_lack_what_fresh_ones_lack(
    current: Placement | None, target: Placement, free: tuple[int | None, ...]
) -> None:
    """What is free is no part of a plan: a plan made with the memory of the moment comes to the same."""
    machine = _machine(*free)
    fresh = mock.Mock(side_effect=lambda placement: plan_mode(FACTS, placement, machine))
    assert definite_shortage(PLANS, current, target, machine) == definite_shortage(fresh, current, target, machine)


def test_a_plan_is_made_once_for_a_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    """There and back asks for two plans, however often; another context is another placement, and few are kept."""
    asked: list[Placement] = []

    def planned(facts: ModelFacts, placement: Placement, devices: Sequence[DeviceFacts]) -> ModePlan:
        asked.append(placement)
        return plan_mode(facts, placement, devices)

    monkeypatch.setattr(fit_check, "plan_mode", planned)
    plans = Plans(FACTS, _machine(1, 1))
    for _ in range(3):
        definite_shortage(plans, LAYER, TENSOR, _machine(0, 0))
        definite_shortage(plans, TENSOR, LAYER, _machine(500, 500))
    assert asked == [LAYER, TENSOR]
    others = [dataclasses.replace(LAYER, n_ctx=256 * n) for n in range(2, 10)]
    for one in (*others, LAYER):
        plans(one)
    assert asked == [LAYER, TENSOR, *others, LAYER]


def _beside(free: dict[str, int | None], *, same_process: bool = False, unit: str = "", host_bytes: int = 0) -> Any:
    cards = (DeviceFacts(name, "gpu", n_bytes, unit=unit) for name, n_bytes in free.items() if name != "host")
    machine = (*cards, DeviceFacts("host", "cpu", free.get("host", 1 << 40)))
    return fits_beside(FACTS, LAYER, TENSOR, machine, same_process=same_process, host_bytes=host_bytes)


def test_a_placement_beside_another_needs_all_that_it_takes() -> None:
    """Weights, cache, buffers and what backends take, a device at a time, and on the host; to the byte."""
    plan = plan_mode(FACTS, TENSOR, _machine(0, 0))
    room: dict[str, int | None] = {share.device: share.total for share in plan.shares} | {"host": plan.host.total}
    assert _beside(room).fits
    assert _beside(room).reason == ""
    for name, n_bytes in room.items():
        found = _beside(room | {name: (n_bytes or 0) - 1})
        assert not found.fits
        assert [need.pool for need in found.needs if not need.fits] == [name]
    assert not _beside(room, host_bytes=1).fits


def test_a_placement_beside_another_in_one_process_shares_its_context() -> None:
    """Each device has the backend's context and kernels already; another process makes them once more."""
    plan = plan_mode(FACTS, TENSOR, _machine(0, 0))
    once = CUDA.fixed_bytes + CUDA.blas_kernel_bytes
    room: dict[str, int | None] = {share.device: share.total - once for share in plan.shares}
    assert _beside(room, same_process=True).fits
    assert not _beside(room).fits
    assert not _beside(room | {"CUDA1": (room["CUDA1"] or 0) - 1}, same_process=True).fits


def test_virtual_devices_are_one_pool_beside_another_placement() -> None:
    """Each says its part of what is free on the real one, and one may have what the other leaves."""
    whole = plan_mode(FACTS, TENSOR, tuple(DeviceFacts(f"CUDA{n}", "gpu", 1, unit="p0") for n in range(2))).total
    assert _beside({"CUDA0": whole - 5, "CUDA1": 5}, unit="p0").fits
    (short, host) = _beside({"CUDA0": whole - 6, "CUDA1": 5}, unit="p0").needs
    assert short == Need("CUDA0 + CUDA1", whole, whole - 1)
    assert host.fits


def test_a_reason_against_beside_has_both_numbers_of_every_pool() -> None:
    """What is not known does not fit either: going without it costs time alone."""
    found = _beside({"CUDA0": 50 * _MIB, "CUDA1": None})
    assert not found.fits
    wanted = found.needs[0].wanted / _MIB
    assert found.reason == (
        f"tensor mode does not fit beside what serves: for it CUDA0 would hold {wanted:,.0f} MiB and has 50 MiB free; "
        f"CUDA1 would hold {wanted:,.0f} MiB and has an unknown amount free"
    )


def test_a_library_is_asked_what_is_free_beside_a_placement() -> None:
    """Virtual devices and those that spill too, with the host's memory as the machine has it."""
    parts = [Device(f"CUDA{n}", f"card (dev p0/v{n})", DeviceKind.GPU, "CUDA", 2 << 30, 9 << 30) for n in range(2)]
    library = mock.Mock(env={"GGML_CUDA_ENABLE_UNIFIED_MEMORY": "1"})
    library.devices.return_value = [*parts, Device("CPU", "processor", DeviceKind.CPU, "CPU", 5, 9)]
    found = FreeMemoryCheck(library, FACTS).beside(LAYER, TENSOR, same_process=True)
    assert found.fits
    assert [(need.pool, need.free) for need in found.needs[:-1]] == [("CUDA0 + CUDA1", 4 << 30)]
    assert found.needs[-1].free is not None
    library.devices.return_value[0] = dataclasses.replace(parts[0], memory_free=0, memory_total=0)
    assert "unknown" in FreeMemoryCheck(library, FACTS).beside(LAYER, TENSOR, same_process=True).reason


@pytest.mark.parametrize(
    ("device", "env", "is_known"),
    [
        (Device("CUDA0", "card", DeviceKind.GPU, "CUDA", 5, 9), {}, True),
        (Device("CUDA0", "card", DeviceKind.GPU, "CUDA", 5, 9), {"GGML_CUDA_ENABLE_UNIFIED_MEMORY": "1"}, False),
        (Device("CUDA0", "card (dev p0/v1)", DeviceKind.GPU, "CUDA", 5, 9), {}, False),
        (Device("MTL0", "chip", DeviceKind.GPU, "MTL", 5, 9), {}, False),
        (Device("Vulkan0", "chip", DeviceKind.IGPU, "Vulkan", 5, 9), {}, False),
        (Device("CUDA0", "card", DeviceKind.GPU, "CUDA", 0, 0), {}, False),
        (Device("CPU", "processor", DeviceKind.CPU, "CPU", 5, 9), {}, False),
    ],
    ids=["card", "unified", "virtual", "metal", "integrated", "silent", "cpu"],
)
def test_free_memory_counts_where_it_is_a_limit(device: Device, env: dict[str, str], *, is_known: bool) -> None:
    """Devices that go on in the host's memory, or share another's, are never said to be full."""
    (known,) = device_facts([device], env)
    assert (known.free is not None) is is_known


def test_accelerators_and_second_rate_gpus_hold_no_layers() -> None:
    """A placement without devices uses the cards alone, as the library does."""
    listed = [
        Device("CUDA0", "card", DeviceKind.GPU, "CUDA", 5, 9),
        Device("Vulkan0", "chip", DeviceKind.IGPU, "Vulkan", 5, 9),
        Device("BLAS", "library", DeviceKind.ACCEL, "BLAS", 0, 0),
        Device("CPU", "processor", DeviceKind.CPU, "CPU", 5, 9),
    ]
    assert [one.name for one in device_facts(listed, {})] == ["CUDA0", "CPU"]
    assert [one.name for one in device_facts(listed[1:], {})] == ["Vulkan0", "CPU"]


def child_too_large(path: str, model: str) -> dict[str, Any]:
    library = Library.open(path)
    stub = Stub(path)
    with scenes.start(library, model, Scene()) as session:
        scenes.generate(session, 1)
        target = session.placement.changed(mode=SplitMode.TENSOR, n_ctx=1 << 24)
        stub.reset()
        refused = session.switch(target)
        touched = sorted(set(stub.names()))
        forced = session.switch(target, force=True)
        scenes.generate(session, 1)
        stub.reset()
        there = session.switch(session.placement.changed(mode=SplitMode.TENSOR))
        asked = [call.arguments["device"] for call in stub.calls() if call.name == "ggml_backend_dev_memory"]
        scenes.generate(session, 1)
        return {
            "touched": touched,
            "asked": asked,
            "outcomes": [[one.status.value, [r.code for r in one.reasons]] for one in (refused, forced, there)],
            "reason": refused.reason,
        }


@needs_compiler
@pytest.mark.stub
def test_a_session_refuses_what_surely_does_not_fit(tmp_path: Path) -> None:
    """Nothing but memory numbers is asked; --force meets the same and falls back; what fits goes, asking once."""
    seen = run_child(child_too_large, build(), str(write_model(tmp_path / "m.gguf"))).value()
    assert seen["touched"] == ["ggml_backend_dev_memory"]
    refused, forced, there = seen["outcomes"]
    assert refused == ["refused", ["does-not-fit", "does-not-fit"]]
    assert "STUB0 would hold at least 2,048 MiB" in seen["reason"]
    assert forced[0] == "fell_back"
    assert "does-not-fit" not in forced[1]
    assert there == ["switched", []]
    assert len(seen["asked"]) == len(set(seen["asked"]))


def child_larger(path: str, model: str) -> dict[str, Any]:
    library, stub = Library.open(path), Stub(path)

    def asked() -> list[str]:
        return [str(call.arguments["device"]) for call in stub.calls() if call.name == "ggml_backend_dev_memory"]

    with scenes.start(library, model, Scene()) as session:
        scenes.generate(session, 1)
        larger = session.placement.changed(mode=SplitMode.TENSOR, n_ctx=1 << 24)
        stub.reset()
        checked = session.check(larger)
        while_checked = asked()
        stub.reset()
        grown = session.switch(larger)
        while_grown = asked()
        stub.reset()
        back = session.switch(larger.changed(mode=SplitMode.LAYER, n_ctx=256))
        return {
            "checked": [list(checked.reasons), while_checked],
            "grown": [grown.status.value, while_grown, [one.n_bytes for one in grown.peak_device_bytes]],
            "back": [back.status.value, asked(), [one.n_bytes for one in back.peak_device_bytes]],
        }


@needs_compiler
@pytest.mark.stub
def test_a_switch_asks_every_device_once(tmp_path: Path) -> None:
    """Before it where that matters, and then the memory after it is not told; else after it."""
    large = f"budget:STUB0={1 << 33} budget:STUB1={1 << 33}"
    seen = run_child(child_larger, build(), str(write_model(tmp_path / "m.gguf")), STUB_FAULTS=large).value()
    devices = seen["checked"][1]
    assert len(devices) == len(set(devices)) > 1
    assert seen["checked"] == [[], devices]
    assert seen["grown"] == ["switched", devices, [None, None]]
    status, asked, held = seen["back"]
    assert (status, asked) == ("switched", devices)
    assert all(n_bytes > 0 for n_bytes in held)


def child_no_room_for_the_carry(path: str, model: str) -> list[Any]:
    stub = Stub(path)
    with scenes.start(Library.open(path), model, Scene()) as session:
        target = session.placement.changed(mode=SplitMode.TENSOR)
        real = psutil.virtual_memory()
        with mock.patch("psutil.virtual_memory", return_value=real._replace(available=16)):
            stub.reset()
            refused = session.switch(target)
            touched = [name for name in stub.names() if name != "ggml_backend_dev_memory"]
            forced = session.switch(target, force=True)
        return [refused.status.value, [one.code for one in refused.reasons], touched, forced.status.value]


@needs_compiler
@pytest.mark.stub
def test_a_carry_that_the_host_cannot_hold_is_refused(tmp_path: Path) -> None:
    """MemAvailable is compared with the carry before anything is saved; --force goes on."""
    seen = run_child(child_no_room_for_the_carry, build(), str(write_model(tmp_path / "m.gguf"))).value()
    assert seen == ["refused", ["does-not-fit"], [], "switched"]


def _run(*, batch: int | None = None, ubatch: int | None = None, mode: SplitMode | None = None) -> RunRequest:
    placement = dataclasses.replace(LAYER, mode=SplitMode.TENSOR, n_ctx=8192, n_batch=512, n_ubatch=128)
    return RunRequest(
        Path("m"), None, "p", False, 1, placement, mode, SamplerSpec(),
        prompt_batch=batch, prompt_ubatch=ubatch,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("request_", "mode", "n_batch", "n_ubatch"),
    [
        (_run(), "tensor", 512, 128),
        (_run(batch=1024), "tensor", 1024, 128),
        (_run(batch=64), "tensor", 64, 64),
        (_run(ubatch=1024, mode=SplitMode.LAYER), "layer", 1024, 1024),
        (_run(batch=600, ubatch=1024), "tensor", 600, 600),
    ],
    ids=["same", "batch", "small-batch", "ubatch", "both"],
)
def test_the_prompt_has_sizes_of_its_own(request_: RunRequest, mode: str, n_batch: int, n_ubatch: int) -> None:
    """What is not named is the generation's; a batch that is named limits its micro-batch."""
    reading = reading_placement(request_)
    assert (reading.mode.value, reading.n_batch, reading.n_ubatch) == (mode, n_batch, n_ubatch)


def _silent(_placement: Placement, _sizes: Sequence[tuple[int, int, int]]) -> Reserved:
    return Reserved((), "it cannot", {})


def test_the_largest_chunk_is_what_every_device_can_lend() -> None:
    """With room it is the limit; on a tight device it is refused, with both numbers."""
    plenty = with_largest_chunk(_run(ubatch=0), FACTS, _machine(90_000, 90_000)[:2], _silent)
    assert (plenty.n_ubatch, plenty.n_batch) == (4096, 4096)
    some = with_largest_chunk(_run(ubatch=0, batch=700), FACTS, _machine(90_000, 90_000)[:2], _silent)
    assert (some.n_ubatch, some.n_batch) == (700, 700)
    with pytest.raises(Refused, match=r"chunk of 0 tokens is the most .* and 256 are wanted: CUDA1 would hold"):
        with_largest_chunk(_run(ubatch=0), FACTS, _machine(90_000, 300)[:2], _silent)
