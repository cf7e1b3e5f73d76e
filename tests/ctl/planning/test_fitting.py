"""What fits, the largest that still would, and the split that balances."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitctl.placement import FlashAttn, Placement, SplitMode
from splitctl.planning.cells import shape_of
from splitctl.planning.fitting import (
    Need,
    balanced_split,
    lacking,
    largest_chunk,
    largest_context,
)
from splitctl.planning.memory import DeviceFacts, ModePlan, Share, plan_mode
from splitctl.planning.reservation import Reservation
from splitctl.planning.survey import (
    Known,
    Size,
    answer_chunk,
    answer_mode,
    answer_switch,
    mode_json,
    searched,
    size_of,
    sized,
    sizes_of_chunks,
    sizes_of_search,
    switch_json,
)
from splitctl.planning.weights import HOST, layer_devices
from tests.ctl.model_facts import model_facts

_MIB = 1024 * 1024
PLAIN = Placement(mode=SplitMode.LAYER, devices=("CUDA0", "CUDA1"), n_ctx=2048, flash_attn=FlashAttn.ON)


def _linear(free: int, base: int, per_token: int, pool: str = "CUDA0") -> object:
    """Needs that grow with the context or the chunk."""
    return lambda tokens: (Need(pool, base + per_token * tokens, free),)


@given(free=st.integers(0, 1 << 40), base=st.integers(0, 1 << 34), per_token=st.integers(1, 1 << 20))
def test_the_largest_context_fits_and_the_next_one_does_not(free: int, base: int, per_token: int) -> None:
    """In steps of 256; or it is the limit."""
    needs = _linear(free, base, per_token)
    found, missing = largest_context(131_072, needs)  # type: ignore[arg-type]
    assert found % 256 == 0
    assert not found or not lacking(needs(found))  # type: ignore[operator]
    if found == 131_072:
        assert missing == ()
    else:
        assert missing == lacking(needs(found + 256)) != ()  # type: ignore[operator]


def test_unknown_memory_is_taken_to_fit() -> None:
    """Nothing can be said against it, and the text says so."""
    assert Need("CUDA0", 5, None).fits
    assert "unknown" in Need("CUDA0", 5, None).text


@pytest.mark.parametrize(
    ("limit", "room", "chunk"),
    [(2048, 4000, (2048, False)), (2048, 1100, (1024, False)), (2048, 256, (256, False)), (128, 500, (128, False)),
     (2048, 255, (255, True)), (2048, 0, (0, True)), (2000, 1999, (1792, False))],
)  # fmt: skip
def test_the_largest_chunk(limit: int, room: int, chunk: tuple[int, bool]) -> None:
    """Multiples of 256 or the limit itself; what is smaller than 256 is refused with its number."""
    found = largest_chunk(limit, _linear(room, 0, 1))  # type: ignore[arg-type]
    assert (found.n_ubatch, found.refused) == chunk
    assert (found.limited_by is None) is (room >= limit)


def test_every_device_has_to_lend() -> None:
    """One device's answer is not imposed on the others: the tightest one decides."""

    def needs(tokens: int) -> tuple[Need, ...]:
        return (Need("CUDA0", tokens, 4096), Need("CUDA1", tokens, 700))

    found = largest_chunk(4096, needs)
    assert found.n_ubatch == 512
    assert found.limited_by is not None
    assert found.limited_by.pool == "CUDA1"


def _plan(mode: SplitMode, shares: list[Share], **more: object) -> ModePlan:
    placement = dataclasses.replace(PLAIN, mode=mode, devices=tuple(share.device for share in shares))
    return ModePlan(placement, tuple(shares), Share(HOST, "host"), 2048, measured=True, **more)  # type: ignore[arg-type]


def test_slices_are_balanced_by_free_memory() -> None:
    """What is whole on every device stays; the rest leaves both equally full."""
    shares = [Share(n, f"CUDA{n}", weights=5000, compute=1000) for n in range(2)]
    machine = (DeviceFacts("CUDA0", "gpu", 12_000), DeviceFacts("CUDA1", "gpu", 6_000))
    first, second = balanced_split(_plan(SplitMode.TENSOR, shares, cut=(4000, 4000)), machine)
    full = [(2000 + share * 8000) / free for share, free in ((first, 12_000), (second, 6_000))]
    assert full[0] == pytest.approx(full[1], abs=0.001)
    assert first + second == pytest.approx(1.0, abs=0.001)


def test_a_device_without_room_gets_no_slice() -> None:
    """Its share is zero, never negative."""
    shares = [Share(n, f"CUDA{n}", weights=500, compute=1000) for n in range(2)]
    machine = (DeviceFacts("CUDA0", "gpu", 100_000), DeviceFacts("CUDA1", "gpu", 10))
    assert balanced_split(_plan(SplitMode.TENSOR, shares, cut=(500, 500)), machine) == (1.0, 0.0)


@given(st.lists(st.integers(1, 50), min_size=2, max_size=9), st.lists(st.integers(20, 200), min_size=2, max_size=3))
def test_layers_are_balanced_as_well_as_any_cut_can(layers: list[int], free: list[int]) -> None:
    """No other way to cut the run of layers leaves the fullest device less full."""
    shares = [Share(n, f"D{n}") for n in range(len(free))]
    machine = tuple(DeviceFacts(f"D{n}", "gpu", size) for n, size in enumerate(free))
    counts = [int(one) for one in balanced_split(_plan(SplitMode.LAYER, shares, layer_bytes=tuple(layers)), machine)]
    assert sum(counts) == len(layers)

    def fullest(sizes: list[int]) -> float:
        at, worst = 0, 0.0
        for size, room in zip(sizes, free, strict=True):
            worst = max(worst, sum(layers[at : at + size]) / room)
            at += size
        return worst

    ways = itertools.product(range(len(layers) + 1), repeat=len(free) - 1)
    best = min(fullest([*way, len(layers) - sum(way)]) for way in ways if sum(way) <= len(layers))
    assert fullest(counts) == pytest.approx(best, rel=1e-6)


@given(st.lists(st.integers(0, 20), min_size=2, max_size=4).filter(any))
def test_a_balanced_split_is_what_the_library_makes_of_it(counts: list[int]) -> None:
    """Shares that are counts of layers come out as these counts, C floats and all."""
    places = layer_devices(sum(counts) - 1, [float(count) for count in counts])
    assert [places.count(device) for device in range(len(counts))] == counts


def test_one_device_needs_no_split() -> None:
    """Nor does a machine whose memory is not known."""
    one = _plan(SplitMode.LAYER, [Share(0, "CUDA0")], layer_bytes=(1, 1))
    assert balanced_split(one, (DeviceFacts("CUDA0", "gpu", 5),)) == ()
    two = _plan(SplitMode.LAYER, [Share(n, f"CUDA{n}") for n in range(2)], layer_bytes=(1, 1))
    assert balanced_split(two, ()) == ()


def _known(free: int, host: int = 1 << 40) -> Known:
    machine = (
        DeviceFacts("CUDA0", "gpu", free),
        DeviceFacts("CUDA1", "gpu", free),
        DeviceFacts("host", "cpu", host),
    )
    sizes = [(n_ctx, batch) for n_ctx in (256, 262_144) for batch in (1, 256, 4096)]
    known = {
        mode: [
            Reservation(n_ctx, 4096, batch, {name: batch * 1000 + n_ctx * 10, "CUDA_Host": 1000}, None)
            for n_ctx, batch in sizes
            for name in names
        ]
        for mode, names in ((SplitMode.TENSOR, ("Meta()",)), (SplitMode.LAYER, ("CUDA0",)))
    }
    return Known(model_facts(n_ctx_train=262_144), machine, known, known)


def test_a_context_that_fits_in_each_mode_can_fail_the_switch() -> None:
    """The carry lies on the host beside the rest, and the largest that survives is smaller."""
    known = _known(free=1100 * _MIB, host=400 * _MIB)
    tensor = dataclasses.replace(PLAIN, mode=SplitMode.TENSOR)
    alone = [answer_mode(known, one).largest.n_ctx for one in (PLAIN, tensor)]
    switch = answer_switch(known, PLAIN, tensor)
    assert 0 < switch.largest.n_ctx < min(alone)
    assert [need.pool for need in switch.largest.lacking] == ["host"]
    asked = [dataclasses.replace(one, n_ctx=min(alone)) for one in (PLAIN, tensor)]
    assert all(answer_mode(known, one).fits for one in asked)
    assert not answer_switch(known, *asked).fits


@pytest.mark.parametrize("n_ctx", [0, 2048, 1 << 20])
def test_the_model_limits_the_context_whatever_is_asked(n_ctx: int) -> None:
    """Nothing lacks then."""
    largest = answer_mode(_known(free=1 << 45), dataclasses.replace(PLAIN, n_ctx=n_ctx)).largest
    assert (largest.n_ctx, largest.lacking) == (262_144, ())


def test_a_limit_that_is_no_multiple_of_a_step_can_be_reached() -> None:
    """The library pads it; and a model for less than a step, or than a step of many streams, has a context too."""
    for limit, n_seq in ((2000, 1), (100, 1), (2048, 16)):
        known = Known(model_facts(n_ctx_train=limit), (DeviceFacts("CUDA0", "gpu", 1 << 45),))
        assert known.largest(dataclasses.replace(PLAIN, n_seq_max=n_seq)).n_ctx == limit


def _library(known: Known, placements: Mapping[SplitMode, Placement]) -> Callable[..., Sequence[Reservation]]:
    """Answer a dry run as libllama does: steep at the end, and with a step down where the mask takes another place."""

    def ask(mode: SplitMode, sizes: Sequence[Size]) -> Sequence[Reservation]:
        said = []
        for size in sizes:
            shape = shape_of(known.facts, sized(placements[mode], size))
            mask, logits = 4 * shape.n_ctx * shape.n_ubatch, 96 * _MIB
            n_bytes = (mask if mask >= logits else mask + logits) + 1000 * shape.n_ubatch
            name = "Meta()" if mode is SplitMode.TENSOR else "CUDA0"
            said.append(Reservation(shape.n_ctx, shape.n_batch, shape.n_ubatch, {name: n_bytes}, None))
        return said

    return ask


@pytest.mark.parametrize("trained", [2048, 8192, 131_072, 1 << 20, 10 << 20])
@pytest.mark.parametrize("free_mib", [150, 1200])
def test_the_largest_context_does_not_depend_on_the_one_that_is_asked(trained: int, free_mib: int) -> None:
    """It fits as a request of its own, and one step more does not, in each mode and through the switch."""
    devices = (DeviceFacts("CUDA0", "gpu", free_mib * _MIB), DeviceFacts("CUDA1", "gpu", free_mib * _MIB))
    host = DeviceFacts("host", "cpu", 2 * free_mib * _MIB)
    bare = Known(model_facts(n_ctx_train=trained), (*devices, host))
    modes = {mode: dataclasses.replace(PLAIN, mode=mode) for mode in (SplitMode.LAYER, SplitMode.TENSOR)}
    goals = [(modes[SplitMode.LAYER],), (modes[SplitMode.TENSOR],), tuple(modes.values())]
    ask = _library(bare, modes)

    def plan(n_ctx: int) -> tuple[Known, list[tuple[Placement, ...]]]:
        placed = [tuple(dataclasses.replace(one, n_ctx=n_ctx) for one in goal) for goal in goals]
        begins = {mode: ask(mode, sizes_of_search(one, bare.facts)) for mode, one in modes.items()}
        asked = {mode: ask(mode, [size_of(one, n_ctx or trained)]) for mode, one in modes.items()}
        return searched(dataclasses.replace(bare, reservations=asked, of_search=begins), placed, ask), placed

    answers = [[known.largest(*goal) for goal in placed] for known, placed in map(plan, (0, 8192, trained))]
    assert answers[0] == answers[1] == answers[2]
    for number, largest in enumerate(answers[0]):
        if largest.n_ctx:
            known, placed = plan(largest.n_ctx)
            assert not lacking(known.needs(*placed[number]))
        if largest.n_ctx < trained:
            known, placed = plan(largest.n_ctx + 256)
            assert lacking(known.needs(*placed[number])) == largest.lacking != ()


def test_sizes_that_the_library_refuses_end_the_search() -> None:
    """What it does not say is left to the estimate, and it is not asked twice."""
    known = _known(free=1100 * _MIB)
    asked: list[Size] = []

    def ask(_mode: SplitMode, sizes: Sequence[Size]) -> Sequence[Reservation]:
        asked.extend(sizes)
        return ()

    assert searched(known, [(PLAIN,)], ask).largest(PLAIN) == known.largest(PLAIN)
    assert len(set(asked)) == len(asked) > 0


def test_the_chunk_of_a_placement() -> None:
    """Refused below 256 tokens with what was found."""
    tensor = dataclasses.replace(PLAIN, mode=SplitMode.TENSOR)
    assert answer_chunk(_known(free=1 << 45), tensor, 4096).n_ubatch == 4096
    tight = answer_mode(_known(free=1 << 45), dataclasses.replace(tensor, n_ubatch=100)).plan.shares[0].total
    found = answer_chunk(_known(free=tight), tensor, 4096)
    assert (found.n_ubatch, found.refused) == (100, True)


def test_answers_are_plain_values() -> None:
    """What --json prints."""
    known = _known(free=1 << 45)
    tensor = dataclasses.replace(PLAIN, mode=SplitMode.TENSOR)
    mode, switch = mode_json(answer_mode(known, PLAIN)), switch_json(answer_switch(known, PLAIN, tensor))
    assert mode["total"] == sum(device["total"] for device in mode["devices"])
    assert switch["total"] == sum(device["total"] for device in switch["devices"])
    assert (switch["from"], switch["to"], mode["compute_by"]) == ("layer", "tensor", "library")


def test_a_dry_run_is_asked_for_sizes_that_enclose_all_others() -> None:
    """Every micro-batch that will be looked at; and contexts from the smallest to what the model was trained for."""
    placement = dataclasses.replace(PLAIN, n_ctx=5000)
    sizes = sizes_of_chunks(placement, model_facts(), [4096])
    assert {n_ctx for n_ctx, _, _ in sizes} == {5000}
    assert {n_ubatch for _, _, n_ubatch in sizes} == {1, 256, 512, 4096}
    assert all(n_batch >= n_ubatch for _, n_batch, n_ubatch in sizes)
    for asked in (placement, dataclasses.replace(placement, n_ctx=0)):
        sizes = sizes_of_search(asked, model_facts())
        assert sizes == tuple((n_ctx, 2048, 512) for n_ctx in (256, 1024, 4096))


def test_plans_are_pure() -> None:
    """The same facts give the same plan."""
    known = _known(free=1 << 30)
    assert plan_mode(known.facts, PLAIN, known.devices) == plan_mode(known.facts, PLAIN, known.devices)
