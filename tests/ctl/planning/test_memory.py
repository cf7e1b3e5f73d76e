"""Bytes a device: layer ranges, slices, what stays on the host, and a switch's peak."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from splitctl.model.facts import ModelFacts, read_facts
from splitctl.model.header import TensorInfo
from splitctl.placement import FlashAttn, Placement, SplitMode
from splitctl.planning.backends import CUDA, RPC, backend_of, unit_of
from splitctl.planning.compute import compute_of
from splitctl.planning.fitting import lacking, needs_of_mode, needs_of_switch
from splitctl.planning.memory import (
    DeviceFacts,
    ModePlan,
    Share,
    carry_bytes,
    layer_shares,
    plan_mode,
    plan_switch,
)
from splitctl.planning.reservation import Reservation
from splitctl.planning.weights import HOST, layer_devices
from tests.ctl.model_facts import model_facts

_MIB = 1024 * 1024
_GIB = 1024 * _MIB
_LAYER_BYTES, _EMBEDDING, _OUTPUT = 100 * _MIB, 40 * _MIB, 60 * _MIB
TWO_GPUS = (
    DeviceFacts("CUDA0", "gpu", 8 * _GIB),
    DeviceFacts("CUDA1", "gpu", 8 * _GIB),
    DeviceFacts("host", "cpu", 64 * _GIB),
)
LAYER = Placement(mode=SplitMode.LAYER, devices=("CUDA0", "CUDA1"), n_ctx=4096, flash_attn=FlashAttn.ON)
TENSOR = dataclasses.replace(LAYER, mode=SplitMode.TENSOR)


def _facts(*, tied: bool = False, **changes: object) -> ModelFacts:
    """Four layers of 100 MiB of one cut tensor each."""
    rows = _LAYER_BYTES // 4 // 256
    tensors = [TensorInfo("token_embd.weight", (256, _EMBEDDING // 1024), 0, _EMBEDDING, 0)]
    tensors += [TensorInfo(f"blk.{n}.ffn_up.weight", (256, rows), 0, _LAYER_BYTES, 0) for n in range(4)]
    if not tied:
        tensors.append(TensorInfo("output.weight", (256, _OUTPUT // 1024), 0, _OUTPUT, 0))
    return model_facts(tensors=tuple(tensors), **changes)


def _weights(plan: ModePlan) -> list[int]:
    return [share.weights // _MIB for share in plan.shares] + [plan.host.weights // _MIB]


@pytest.mark.parametrize(
    ("shares", "n_gpu_layers", "devices"),
    [
        ((1.0, 1.0), -1, (0, 0, 0, 1, 1)),
        ((3.0, 1.0), -1, (0, 0, 0, 0, 1)),
        ((0.0, 1.0), -1, (1, 1, 1, 1, 1)),
        ((1.0, 1.0), 0, (HOST,) * 5),
        ((1.0, 1.0), 3, (HOST, HOST, 0, 0, 1)),
        ((1.0, 1.0, 1.0), 99, (0, 0, 1, 1, 2)),
    ],
)
def test_layers_go_to_devices_by_their_shares(
    shares: tuple[float, ...], n_gpu_layers: int, devices: tuple[int, ...]
) -> None:
    """Of four layers and the output; the last ones go to devices when not all do."""
    assert layer_devices(4, shares, n_gpu_layers) == devices


def test_a_device_is_charged_for_its_range_alone() -> None:
    """Weights and cache of the layers of its range; the embedding stays on the host."""
    plan = plan_mode(_facts(), LAYER, TWO_GPUS)
    assert _weights(plan) == [300, 160, 40]
    per_layer = 4096 * 2 * 64 * 2 * 2
    assert [share.cache for share in plan.shares] == [3 * per_layer, per_layer]
    assert plan.total == sum(share.total for share in plan.shares)


def test_an_embedding_that_is_the_output_too_lies_there_twice() -> None:
    """On the host, and with the last layer."""
    assert _weights(plan_mode(_facts(tied=True), LAYER, TWO_GPUS)) == [300, 140, 40]
    assert _weights(plan_mode(_facts(tied=True), TENSOR, TWO_GPUS)) == [240, 240, 40]


def test_tensor_mode_gives_every_device_a_slice_of_every_tensor() -> None:
    """Half of each with even shares."""
    plan = plan_mode(_facts(), TENSOR, TWO_GPUS)
    assert _weights(plan) == [230, 230, 40]
    assert plan.shares[0].cache == plan.shares[1].cache == 4 * 4096 * 64 * 2 * 2
    assert (plan.asked, plan.effective) == ((0.5, 0.5), (0.5, 0.5))


def test_a_tensor_split_means_layers_in_one_mode_and_slices_in_the_other() -> None:
    """Asked and effective are told apart."""
    layer = plan_mode(_facts(), dataclasses.replace(LAYER, tensor_split=(3.0, 1.0)), TWO_GPUS)
    assert (layer.asked, layer.effective) == ((0.75, 0.25), (1.0, 0.0))
    tensor = plan_mode(_facts(), dataclasses.replace(TENSOR, tensor_split=(3.0, 1.0)), TWO_GPUS)
    assert tensor.asked == (0.75, 0.25)
    assert tensor.effective[0] == pytest.approx(0.75, abs=0.01)
    assert tensor.effective_cache == (0.75, 0.25)


def test_mode_none_uses_its_main_device() -> None:
    """And nothing of the others."""
    plan = plan_mode(_facts(), dataclasses.replace(LAYER, mode=SplitMode.NONE, main_gpu=1), TWO_GPUS)
    assert [(share.device, share.weights // _MIB) for share in plan.shares] == [("CUDA1", 460)]


def test_without_devices_everything_is_on_the_host() -> None:
    """A machine that has none, or -ngl 0."""
    alone = plan_mode(_facts(), dataclasses.replace(LAYER, devices=()), (DeviceFacts("CPU", "cpu", 1),))
    assert (alone.shares, alone.host.weights // _MIB > 0, alone.host.cache > 0) == ((), True, True)


def test_the_cache_may_stay_on_the_host() -> None:
    """-nkvo."""
    plan = plan_mode(_facts(), dataclasses.replace(LAYER, offload_kqv=False), TWO_GPUS)
    assert [share.cache for share in plan.shares] == [0, 0]
    assert plan.host.cache == 4 * 4096 * 2 * 64 * 2 * 2


def test_layers_are_shared_by_free_memory_unless_asked() -> None:
    """As the library does; evenly where it is not known."""
    machine = (DeviceFacts("A", "gpu", 3), DeviceFacts("B", "gpu", 1))
    assert layer_shares(LAYER, machine) == (3.0, 1.0)
    assert layer_shares(LAYER, (DeviceFacts("A"), DeviceFacts("B"))) == (1.0, 1.0)
    assert layer_shares(dataclasses.replace(LAYER, tensor_split=(0.2, 0.8)), machine) == (0.2, 0.8)


def test_backends_pad() -> None:
    """To their alignment, and CUDA the last row of a quantized tensor."""
    odd = TensorInfo("x", (576, 3), 8, 3 * 612, 0)
    assert backend_of("RPC0").allocated(odd, 3 * 612) == 1856
    assert CUDA.allocated(odd, 3 * 612) == -(-(1836 + 448 // 32 * 34) // 128) * 128
    assert CUDA.allocated(TensorInfo("y", (512, 1), 8, 544, 0), 544) == 640
    assert backend_of("CUDA0").fixed_bytes > RPC.fixed_bytes


def _quantized(kind: int = 8) -> ModelFacts:
    """One layer of q8_0 as wide as 4096 and 14336 values, or of another type."""
    dims = {"ffn_up": (4096, 14336), "ffn_down": (14336, 4096)}
    return model_facts(
        tensors=tuple(TensorInfo(f"blk.0.{name}.weight", size, kind, 1, 0) for name, size in dims.items())
    )


def test_a_pool_holds_the_widest_rows_of_a_micro_batch() -> None:
    """In blocks of 36 bytes for 32 values, or in half floats with the product; only CUDA has one."""
    parts = 132 * 128 * 128 * 4
    assert CUDA.pool_bytes(_quantized(), 512) == -(-(512 * 14336 * 36 // 32 + parts) // (2 * _MIB)) * 2 * _MIB
    assert CUDA.pool_bytes(_quantized(1), 512) == -(-(512 * 2 * (14336 + 4096) + parts) // (2 * _MIB)) * 2 * _MIB
    assert RPC.pool_bytes(_quantized(), 512) == 0


def test_a_blas_is_charged_where_products_are_left_to_it() -> None:
    """Floats among the weights, or attention without its own kernel; its kernels are there once a real device."""

    def own(kind: int, *, flash: bool = True, n_sharing: int = 1) -> int:
        pool = CUDA.pool_bytes(_quantized(kind), 512)
        return CUDA.own_bytes(_quantized(kind), 512, has_flash_attn=flash, n_sharing=n_sharing) - pool

    plain = CUDA.fixed_bytes + CUDA.device_bytes
    assert own(8) == plain
    assert own(1) == own(8, flash=False) == plain + CUDA.blas_bytes + CUDA.blas_kernel_bytes
    assert own(8, n_sharing=2) == CUDA.fixed_bytes // 2 + CUDA.device_bytes


def test_virtual_devices_share_the_cost_of_the_real_one() -> None:
    """Its context is there once, whatever they are called; real devices have one each."""
    names = ("NVIDIA H200 (dev p0/v0)", "NVIDIA H200 (dev p0/v1)")
    assert [unit_of(name) for name in (*names, "NVIDIA H200")] == ["p0", "p0", ""]
    virtual = tuple(DeviceFacts(f"CUDA{n}", "gpu", 8 * _GIB, unit=unit_of(name)) for n, name in enumerate(names))
    one, two = (plan_mode(_quantized(), LAYER, machine) for machine in (virtual, TWO_GPUS))
    assert two.total - one.total == CUDA.fixed_bytes
    assert one.shares[0].fixed == one.shares[1].fixed


def test_nccl_takes_more_than_a_build_without_it() -> None:
    """In tensor mode, on every device."""
    with_nccl = tuple(dataclasses.replace(device, by_nccl=True) for device in TWO_GPUS)
    some, more = (plan_mode(_facts(), TENSOR, machine) for machine in (TWO_GPUS, with_nccl))
    assert more.total - some.total == 2 * (CUDA.nccl_bytes - CUDA.reduce_bytes)
    assert plan_mode(_facts(), LAYER, with_nccl).total == plan_mode(_facts(), LAYER, TWO_GPUS).total


def _peaks(layer: tuple[int, int], tensor: tuple[int, int]) -> list[int]:
    def plan(mode: SplitMode, sizes: tuple[int, int]) -> ModePlan:
        shares = tuple(Share(n, f"CUDA{n}", weights=size * _MIB) for n, size in enumerate(sizes))
        return ModePlan(dataclasses.replace(LAYER, mode=mode), shares, Share(HOST, "host"), 4096, measured=True)

    switch = plan_switch(plan(SplitMode.LAYER, layer), plan(SplitMode.TENSOR, tensor), 1216 * _MIB)
    assert switch.host.total == 1216 * _MIB
    assert switch.total == sum(share.total for share in switch.peaks)
    return [share.total // _MIB for share in switch.peaks]


@pytest.mark.parametrize(
    ("layer", "tensor", "switched"),
    [
        ((5806, 6188), (6418, 6164), (6362, 6180)),
        ((10143, 11289), (10931, 10863), (10897, 11281)),
    ],
    ids=["case-b", "case-a"],
)
def test_a_switch_peaks_at_the_larger_mode_of_each_device(
    layer: tuple[int, int], tensor: tuple[int, int], switched: tuple[int, int]
) -> None:
    """Measured on two pairs of cards, MiB: never above the plan, and within 1 % of it."""
    for planned, measured in zip(_peaks(layer, tensor), switched, strict=True):
        assert 0 <= planned - measured <= 0.01 * planned


def test_memory_of_several_devices_never_adds_up() -> None:
    """Free 3 and 12 GiB do not hold 5 and 5, although 15 is more than 10 (P7)."""
    machine = (DeviceFacts("CUDA0", "gpu", 3 * _GIB), DeviceFacts("CUDA1", "gpu", 12 * _GIB))
    shares = tuple(Share(n, f"CUDA{n}", weights=5 * _GIB) for n in range(2))
    missing = lacking(needs_of_mode(ModePlan(TENSOR, shares, Share(HOST, "host"), 4096, measured=True), machine))
    assert [need.pool for need in missing] == ["CUDA0"]
    assert missing[0].text == "CUDA0 would hold 5,120 MiB and has 3,072 MiB free"


def test_a_device_that_is_named_twice_is_one_pool() -> None:
    """Both shares have to fit together, and processors live in the host's memory."""
    twice = tuple(Share(n, "CUDA0", weights=5 * _GIB) for n in range(2))
    machine = (DeviceFacts("CUDA0", "gpu", 8 * _GIB), DeviceFacts("CPU", "cpu", 9 * _GIB))
    plan = ModePlan(TENSOR, twice, Share(HOST, "host"), 4096, measured=True)
    assert [need.wanted // _GIB for need in needs_of_mode(plan, machine)] == [10, 0]
    processors = tuple(Share(n, "CPU", weights=5 * _GIB) for n in range(2))
    plan = ModePlan(TENSOR, processors, Share(HOST, "host"), 4096, measured=True)
    assert [(need.pool, need.wanted // _GIB, need.fits) for need in needs_of_mode(plan, machine)] == [
        ("host", 10, False)
    ]


def test_the_carry_is_charged_to_the_host_beside_the_larger_placement() -> None:
    """It lives through the switch."""
    before, after = plan_mode(_facts(), LAYER, TWO_GPUS), plan_mode(_facts(), TENSOR, TWO_GPUS)
    switch = plan_switch(before, after, 5 * _GIB)
    host = needs_of_switch(switch, TWO_GPUS)[-1]
    assert host.wanted == max(before.host.total, after.host.total) + 5 * _GIB


def test_the_carry_is_as_large_as_what_is_held() -> None:
    """A full context at most; a window holds no more than its cells."""
    facts = model_facts()
    full = carry_bytes(facts, LAYER)
    assert full >= 4 * 4096 * 2 * 64 * 2 * 2
    assert carry_bytes(facts, LAYER, 100) < full // 40 + 1
    windowed = model_facts(architecture="gemma2", metadata=(("attention.sliding_window", 256),))
    assert carry_bytes(windowed, LAYER) < full


def _reserved(n_ctx: int, n_ubatch: int, size: int) -> Reservation:
    return Reservation(n_ctx, 2048, n_ubatch, {"CUDA0": size, "CUDA_Host": size // 10}, None)


@pytest.mark.parametrize(
    ("n_ctx", "n_ubatch", "size"),
    [(1024, 512, 100), (9216, 512, 900), (5120, 512, 500), (256, 512, 50), (5120, 1024, 1000), (5120, 768, 750)],
)
def test_what_the_library_reserved_is_used_and_interpolated(n_ctx: int, n_ubatch: int, size: int) -> None:
    """At its own sizes, on lines between them, and the next larger one below them."""
    known = [
        _reserved(*one)
        for one in ((1024, 256, 50), (1024, 512, 100), (9216, 512, 900), (1024, 1024, 200), (9216, 1024, 1800))
    ]
    placement = dataclasses.replace(LAYER, n_ctx=n_ctx, n_ubatch=n_ubatch)
    found = compute_of(model_facts(), placement, 2, known)
    assert (found.measured, found.buffers["CUDA0"]) == (True, size)


def test_beyond_what_the_library_reserved_the_formula_answers() -> None:
    """A line beyond the last point could be too low."""
    beyond = dataclasses.replace(LAYER, n_ctx=20_480)
    assert not compute_of(model_facts(), beyond, 2, [_reserved(1024, 512, 100)]).measured


def test_buffers_are_charged_to_whom_they_belong() -> None:
    """A device by its name or its server's address, a Meta buffer to every device, pinned memory to the host."""
    rpc = (DeviceFacts("RPC0", "gpu", 1, None, "1.2.3.4:5"), DeviceFacts("RPC1", "gpu", 1, None, "1.2.3.4:6"))
    placement = dataclasses.replace(LAYER, devices=("RPC0", "RPC1"))
    known = [Reservation(4096, 2048, 512, {"RPC0[1.2.3.4:6]": 7, "RPC0[1.2.3.4:5]": 3, "CPU": 1}, None)]
    plan = plan_mode(_facts(), placement, rpc, known)
    assert [share.compute for share in plan.shares] + [plan.host.compute] == [3, 7, 1]
    known = [Reservation(4096, 2048, 512, {"Meta(CUDA0,CUDA1)": 9, "CUDA_Host": 2}, None)]
    plan = plan_mode(_facts(), TENSOR, TWO_GPUS, known)
    assert [share.compute for share in plan.shares] + [plan.host.compute] == [9, 9, 2]


def test_the_library_corrects_a_cache_that_is_not_understood() -> None:
    """What it said for this very context stands."""
    said = [Reservation(4096, 2048, 512, {"CUDA0": 1}, 3 * 4 * 4096 * 2 * 64 * 2 * 2)]
    plan = plan_mode(_facts(), LAYER, TWO_GPUS, said)
    assert sum(share.cache for share in plan.shares) == said[0].cache_bytes


@pytest.mark.parametrize(("mode", "reported"), [("none", 103.77), ("layer", 112.45), ("tensor", 101.52)])
def test_the_formula_is_not_too_low(smollm2: Path, mode: str, reported: float) -> None:
    """Against what 2026.10.11549 reported for SmolLM2, MiB; a layer split over two devices keeps four copies (P16)."""
    placement = Placement(
        mode=SplitMode(mode), devices=("CUDA0", "CUDA1"), n_ctx=1000, n_batch=1000, flash_attn=FlashAttn.ON
    )
    n_devices = 1 if mode == "none" else 2
    found = compute_of(read_facts(smollm2), placement, n_devices, ())
    largest = max(found.buffers.values()) / _MIB
    assert reported <= largest <= 1.6 * reported


def test_a_layer_split_keeps_copies_of_its_inputs() -> None:
    """Four with several devices, one with one (P16)."""
    long = dataclasses.replace(LAYER, n_ctx=65_536)
    facts = model_facts()
    one, two = (max(compute_of(facts, long, n, ()).buffers.values()) for n in (1, 2))
    mask = 512 * 65_536 * 2
    assert two - one >= 3 * mask


def test_smollm2_by_slices_and_by_layers(smollm2: Path) -> None:
    """The library's own lines of 2026.10.11549 and of RPC servers of llama-cpp-python 0.3.36, to 0.01 MiB."""
    facts = read_facts(smollm2)
    placement = Placement(mode=SplitMode.TENSOR, devices=("CPU", "CPU"), n_ctx=1000, flash_attn=FlashAttn.ON)
    tensor = plan_mode(facts, placement, ())
    assert max(share.weights for share in tensor.shares) / _MIB == pytest.approx(60.46, abs=0.0051)
    assert tensor.host.weights / _MIB == pytest.approx(28.69, abs=0.0051)
    assert [share.cache / _MIB for share in tensor.shares] == [11.25, 11.25]
    servers = dataclasses.replace(placement, mode=SplitMode.LAYER, devices=("RPC0", "RPC1"))
    layer = plan_mode(facts, servers, ())
    assert [share.weights / _MIB for share in layer.shares] == pytest.approx([33.82, 58.28], abs=0.0051)
    assert [share.cache / _MIB for share in layer.shares] == [12.0, 10.5]
    assert layer.host.weights / _MIB == pytest.approx(28.69, abs=0.0051)


def test_gemma_has_a_window_and_one_kv_head(gemma3_270m: Path) -> None:
    """The library's own lines: 235.16 MiB in one mapping, 18 of cache; 203.71 on the fullest of two slices."""
    facts = read_facts(gemma3_270m)
    placement = Placement(mode=SplitMode.LAYER, devices=("CPU", "CPU"), n_ctx=1000, flash_attn=FlashAttn.ON)
    layer = plan_mode(facts, placement, ())
    assert (layer.host.weights + sum(share.weights for share in layer.shares)) / _MIB == pytest.approx(
        235.16, abs=0.006
    )
    assert sum(share.cache for share in layer.shares) / _MIB == 18.0
    tensor = plan_mode(facts, dataclasses.replace(placement, mode=SplitMode.TENSOR), ())
    assert max(share.weights for share in tensor.shares) / _MIB == pytest.approx(203.71, abs=0.006)
