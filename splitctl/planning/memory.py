"""What every device would hold: weights, cache, compute buffers and the rest, under each mode and through a switch.

Laws:
    1. Pure: the same facts give the same plan; nothing is read, asked or tried here.
    2. A device is charged for what lies on it: the layers of its range, its slice of every tensor. Memory of several
       devices never adds up to a fit.
    3. Where the library said what it would take, its word stands; a formula in its place is marked as one.
    4. During a switch a device holds one mode at a time, so its peak is the larger of the two; what lives through the
       switch (the carry) lies on the host and is added to it there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from splitctl.model.facts import ModelFacts
from splitctl.model.layers import layers_of
from splitctl.model.slices import Cutter, shares_of_one
from splitctl.placement import FlashAttn, Placement, SplitMode
from splitctl.planning import backends as costs
from splitctl.planning import weights as weighing
from splitctl.planning.backends import CPU, Backend, backend_of
from splitctl.planning.cells import CacheTensor, cache_tensors, shape_of
from splitctl.planning.compute import DEVICE, HOST_BUFFER, META, Compute, compute_of
from splitctl.planning.reservation import Reservation
from splitctl.planning.weights import HOST, Piece

_F32_BYTES = 4
#: Beside its rows the state holds of each cell its position and its sequences.
_CELL_BYTES = 24


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device that there is.

    Args:
        name: the library's name for it.
        kind: cpu, gpu, igpu, accel or meta; empty where it is not known.
        free: memory that is free on it, bytes; None where it is not known.
        total: its memory, bytes; None where it is not known.
        address: of the server behind it, for RPC devices.
        unit: the real device behind it, where it is a virtual one; empty where it is real itself.
        by_nccl: whether NCCL adds up partial results with it.
    """

    name: str
    kind: str = ""
    free: int | None = None
    total: int | None = None
    address: str = ""
    unit: str = ""
    by_nccl: bool = False

    @property
    def real(self) -> str:
        """What has the memory: the real device behind a virtual one, else the device itself."""
        return self.unit or self.name


@dataclass(frozen=True, slots=True)
class Share:
    """What one device holds, or the host.

    Args:
        index: of the device in the placement; ``HOST`` for the host.
        device: its name; "host" for the host.
        weights: bytes of weights.
        cache: bytes of the cache.
        compute: bytes of compute buffers.
        exchange: bytes for adding up partial results.
        output: bytes of the buffer of logits.
        fixed: bytes that the backend takes for itself.
        carry: bytes of the carry, during a switch.
    """

    index: int
    device: str
    weights: int = 0
    cache: int = 0
    compute: int = 0
    exchange: int = 0
    output: int = 0
    fixed: int = 0
    carry: int = 0

    @property
    def total(self) -> int:
        """All of it, bytes."""
        return self.weights + self.cache + self.compute + self.exchange + self.output + self.fixed + self.carry


@dataclass(frozen=True, slots=True)
class ModePlan:
    """What one placement takes.

    Args:
        placement: it.
        shares: one a device, in the placement's order.
        host: what stays on the host.
        n_ctx: cells of the context as the library pads it, over all streams.
        measured: whether the library itself said the compute buffers; else a formula did.
        asked: the tensor split that is asked, as shares of one; empty where the mode has none.
        effective: the shares that the devices really get: of layers in layer mode, of what is cut in tensor mode.
        effective_cache: the same for the cache alone.
        cut: what tensor mode cuts, on each device, bytes of `Share.weights` and `Share.cache`; empty in other modes.
        layer_bytes: weights and cache of every layer, and of the output last, bytes; empty in tensor mode.
    """

    placement: Placement
    shares: tuple[Share, ...]
    host: Share
    n_ctx: int
    measured: bool
    asked: tuple[float, ...] = ()
    effective: tuple[float, ...] = ()
    effective_cache: tuple[float, ...] = ()
    cut: tuple[int, ...] = ()
    layer_bytes: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """Sum over all devices, without the host, bytes."""
        return sum(share.total for share in self.shares)


@dataclass(frozen=True, slots=True)
class SwitchPlan:
    """What a switch from one placement to another takes.

    Args:
        before: where it begins.
        after: where it ends.
        peaks: the most that every device holds at a time, in the order of the longer list of devices.
        host: the most that the host holds, with the carry.
        carry: size of the carry, bytes.
    """

    before: ModePlan
    after: ModePlan
    peaks: tuple[Share, ...]
    host: Share
    carry: int

    @property
    def total(self) -> int:
        """Sum of the peaks of all devices, without the host, bytes."""
        return sum(share.total for share in self.peaks)


def devices_of(placement: Placement, devices: Sequence[DeviceFacts]) -> tuple[DeviceFacts, ...]:
    """Name the devices that a placement uses, of those that there are.

    Returns:
        In the placement's order, a device twice where it is named twice; mode none has one. Empty when everything
        stays on the host.
    """
    by_name = {device.name: device for device in devices}
    if placement.devices:
        named = tuple(by_name.get(name, DeviceFacts(name)) for name in placement.devices)
    else:
        named = tuple(device for device in devices if device.kind != "cpu")
    if placement.mode is SplitMode.NONE:
        return named[placement.main_gpu : placement.main_gpu + 1]
    return named


def plan_mode(
    facts: ModelFacts,
    placement: Placement,
    devices: Sequence[DeviceFacts],
    known: Sequence[Reservation] = (),
    *,
    n_outputs: int | None = None,
    there: Collection[str] = (),
) -> ModePlan:
    """Plan one placement.

    Args:
        facts: the model.
        placement: mode, devices, sizes; row mode is planned as layer mode, which it acts as.
        devices: those that there are, with their free memory, which decides the default split of layers.
        known: what the library reserved for this placement at some sizes; empty for the formula.
        n_outputs: rows of logits that a decode asks for at most; None: one a sequence.
        there: real devices, by `DeviceFacts.real`, that the process works with already, for another placement; what it
            took for them once is not charged again.
    """
    used = devices_of(placement, devices)
    n_devices = len(used)
    backends: dict[int, Backend] = {n: backend_of(one.name, one.kind) for n, one in enumerate(used)}
    backends[HOST] = CPU
    tensors = cache_tensors(facts, placement)
    compute = compute_of(facts, placement, n_devices, known)
    if placement.mode is SplitMode.TENSOR and n_devices:
        layout = _by_tensor(facts, placement, n_devices, backends, tensors)
    else:
        layout = _by_layer(facts, placement, used, backends, tensors)
    layout = _corrected(layout, tensors, shape_of(facts, placement).n_ctx, known)
    buffers = _assigned(compute, used)
    rows = max(n_outputs or 0, placement.n_seq_max)
    width = facts.n_vocab + (facts.n_embd if facts.is_encoder_decoder else 0)
    fixed = _fixed(facts, placement, used, backends, there)
    shares = tuple(
        Share(
            index=number,
            device=device.name,
            weights=layout.weights[number],
            cache=layout.cache[number],
            compute=buffers[number],
            exchange=compute.exchange_bytes + (_reducing(device, backends[number]) if compute.exchange_bytes else 0),
            fixed=fixed[number],
        )
        for number, device in enumerate(used)
    )
    host = Share(
        index=HOST,
        device="host",
        weights=layout.weights[HOST],
        cache=layout.cache[HOST],
        compute=buffers[HOST],
        output=rows * width * _F32_BYTES,
        fixed=costs.HOST_FIXED_BYTES
        + costs.HOST_BYTES_PER_TOKEN * facts.n_vocab
        + (costs.HOST_BYTES_PER_SLICE * n_devices if placement.mode is SplitMode.TENSOR else 0),
    )
    return ModePlan(
        placement=placement,
        shares=shares,
        host=host,
        n_ctx=shape_of(facts, placement).n_ctx,
        measured=compute.measured,
        asked=_asked(placement, used),
        effective=layout.effective,
        effective_cache=shares_of_one([layout.cache[number] for number in range(n_devices)]),
        cut=layout.cut,
        layer_bytes=layout.layer_bytes,
    )


def _fixed(
    facts: ModelFacts,
    placement: Placement,
    devices: Sequence[DeviceFacts],
    backends: Mapping[int, Backend],
    there: Collection[str],
) -> list[int]:
    """Tell what backends take for themselves; those that share a real device share the cost of its context."""
    n_ubatch, has_flash = shape_of(facts, placement).n_ubatch, placement.flash_attn is not FlashAttn.OFF
    units = [device.real for device in devices]
    return [
        backends[number].own_bytes(
            facts, n_ubatch, has_flash_attn=has_flash, n_sharing=units.count(unit), is_there=unit in there
        )
        for number, unit in enumerate(units)
    ]


def _reducing(device: DeviceFacts, backend: Backend) -> int:
    """Tell what a device holds to add up partial results, beside the buffers for them."""
    return backend.nccl_bytes if device.by_nccl else backend.reduce_bytes


def plan_switch(before: ModePlan, after: ModePlan, carry: int) -> SwitchPlan:
    """Plan a switch: for every device the larger of two plans, for the host the larger and the carry.

    Args:
        before: the plan of the first placement.
        after: the plan of the second.
        carry: bytes of host memory that live through the switch: the saved state, and a copy where one is needed.
    """
    peaks: list[Share] = []
    for number in range(max(len(before.shares), len(after.shares))):
        here = [plan.shares[number] for plan in (before, after) if number < len(plan.shares)]
        peaks.append(max(here, key=lambda share: share.total))
    host = max(before.host, after.host, key=lambda share: share.total)
    return SwitchPlan(before, after, tuple(peaks), dataclasses.replace(host, carry=carry), carry)


def carry_bytes(facts: ModelFacts, placement: Placement, n_tokens: int | None = None) -> int:
    """Tell the size of the saved state of so many tokens (None: a full context), never too low; bytes."""
    shape = shape_of(facts, placement)
    most = shape.n_ctx if n_tokens is None else min(n_tokens, shape.n_ctx)
    total = 0
    for tensor in cache_tensors(facts, placement):
        held = tensor.n_rows if tensor.section in {"recurrent", "compressed"} else min(tensor.n_rows, most)
        total += tensor.row_bytes * held
    return total + most * _CELL_BYTES * 2


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where weights and cache lie, by place."""

    weights: Mapping[int, int]
    cache: Mapping[int, int]
    effective: tuple[float, ...]
    cut: tuple[int, ...] = ()
    layer_bytes: tuple[int, ...] = ()


def _by_layer(
    facts: ModelFacts,
    placement: Placement,
    devices: Sequence[DeviceFacts],
    backends: Mapping[int, Backend],
    tensors: Sequence[CacheTensor],
) -> _Layout:
    """Lay a model out by layers; without devices everything is on the host."""
    n_layers = len(layers_of(facts).each)
    shares = layer_shares(placement, devices)
    n_gpu_layers = placement.n_gpu_layers if devices else 0
    where = weighing.layer_devices(n_layers, shares or (1.0,), n_gpu_layers)
    pieces = tuple(weighing.pieces_by_layer(facts, where))
    cache = dict.fromkeys(backends, 0)
    for tensor in tensors:
        cache[where[tensor.layer] if placement.offload_kqv else HOST] += tensor.n_bytes
    counts = [sum(1 for one in where[:-1] if one == number) for number in range(len(devices))]
    each = [0] * (n_layers + 1)
    for piece in weighing.pieces_by_layer(facts, range(n_layers + 1)):
        if piece.place != HOST:
            each[piece.place] += piece.n_bytes
    for tensor in tensors:
        each[tensor.layer] += tensor.n_bytes if placement.offload_kqv else 0
    return _Layout(_weights(pieces, backends), cache, shares_of_one(counts), layer_bytes=tuple(each))


def _by_tensor(
    facts: ModelFacts,
    placement: Placement,
    n_devices: int,
    backends: Mapping[int, Backend],
    tensors: Sequence[CacheTensor],
) -> _Layout:
    cutter = Cutter(facts, n_devices, placement.tensor_split)
    pieces = tuple(weighing.pieces_by_tensor(facts, cutter, n_devices, placement.n_gpu_layers))
    host = weighing.mapped_bytes([piece for piece in pieces if piece.place == HOST])
    weights = {**weighing.weights_by_place(pieces, backends), HOST: host}
    cache = dict.fromkeys(backends, 0)
    sums, cut_cache = [0] * n_devices, [0] * n_devices
    for tensor in tensors:
        if not placement.offload_kqv:
            cache[HOST] += tensor.n_bytes
            continue
        cut = cutter.cut(tensor.name, (tensor.width,))
        for number in range(n_devices):
            part = tensor.n_bytes if cut.axis is None else tensor.bytes_of(cut.sizes[number])
            cache[number] += part
            cut_cache[number] += 0 if cut.axis is None else part
    for piece in pieces:
        if piece.place != HOST and cutter.cut(piece.tensor.name, piece.tensor.dims).axis is not None:
            sums[piece.place] += piece.n_bytes
    effective = shares_of_one(sums)
    return _Layout(weights, cache, effective, tuple(one + more for one, more in zip(sums, cut_cache, strict=True)))


def _weights(pieces: Sequence[Piece], backends: Mapping[int, Backend]) -> dict[int, int]:
    """Sum weights by place; what lies in one mapping of the file is there once, and the host answers for the gaps."""
    sums = weighing.weights_by_place([piece for piece in pieces if not backends[piece.place].maps_files], backends)
    mapped = [piece for piece in pieces if backends[piece.place].maps_files]
    left = weighing.mapped_bytes(mapped)
    for piece in mapped:
        if piece.place != HOST:
            size = min(piece.n_bytes, left)
            sums[piece.place] += size
            left -= size
    sums[HOST] += left
    return sums


def _corrected(layout: _Layout, tensors: Sequence[CacheTensor], n_ctx: int, known: Sequence[Reservation]) -> _Layout:
    """Scale the cache to what the library said, where it said it for this context and it is more than rounding off."""
    said = next((one.cache_bytes for one in known if one.cache_bytes is not None and one.n_ctx == n_ctx), None)
    planned = sum(tensor.n_bytes for tensor in tensors)
    if said is None or planned == 0 or abs(said - planned) <= planned // 100 + (1 << 15):
        return layout
    cache = {place: n_bytes * said // planned for place, n_bytes in layout.cache.items()}
    return dataclasses.replace(layout, cache=cache)


def layer_shares(placement: Placement, devices: Sequence[DeviceFacts]) -> tuple[float, ...]:
    """Tell the shares of layers, one a device: those that are asked, else by free memory as the library does."""
    asked = placement.tensor_split
    if asked is not None and any(asked):
        return tuple([*asked, *([0.0] * len(devices))][: len(devices)])
    free = [float(device.free or 0) for device in devices]
    return tuple(free) if all(free) else (1.0,) * len(devices)


def _asked(placement: Placement, devices: Sequence[DeviceFacts]) -> tuple[float, ...]:
    """Give the split that is asked, as shares of one."""
    if len(devices) < 2:
        return ()
    if placement.mode is SplitMode.TENSOR:
        asked = placement.tensor_split
        given = [*(asked or ()), *([0.0] * len(devices))][: len(devices)]
        return shares_of_one(given if any(given) else [1.0] * len(devices))
    return shares_of_one(layer_shares(placement, devices))


def _assigned(compute: Compute, devices: Sequence[DeviceFacts]) -> dict[int, int]:
    """Charge compute buffers to places: a Meta buffer to every device, the processor's and pinned ones to the host."""
    sums = dict.fromkeys([HOST, *range(len(devices))], 0)
    for name, n_bytes in compute.buffers.items():
        if name == META or name.startswith("Meta("):
            for number in range(len(devices)):
                sums[number] += n_bytes
            continue
        if name == DEVICE:
            places = [number for number, one in enumerate(devices) if one.kind != "cpu" and one.name != "CPU"]
            for number in places or [HOST]:
                sums[number] += n_bytes
            continue
        sums[_owner(name, devices)] += n_bytes
    return sums


def _owner(buffer: str, devices: Sequence[DeviceFacts]) -> int:
    """Find the device behind a buffer's name; the first of several that share it."""
    if buffer in {HOST_BUFFER, "CPU"} or buffer.endswith("_Host"):
        return HOST
    for number, device in enumerate(devices):
        if buffer == device.name or (device.address and device.address in buffer):
            return number
    return HOST
