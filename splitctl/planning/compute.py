"""Compute buffers: from what the library reserved on paper, else from a formula that is meant to be too high.

A compute buffer grows with the context and the micro-batch on straight lines, with steps down where one tensor begins
to fit into the place of another. So between two sizes that were reserved a straight line is an estimate, and only a
size that was reserved itself is exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from splitctl.model.facts import ModelFacts
from splitctl.model.layers import layers_of
from splitctl.placement import FlashAttn, Placement, SplitMode
from splitctl.planning.cells import shape_of
from splitctl.planning.reservation import Reservation

_F32_BYTES = 4
_F16_BYTES = 2
#: A layer split over several devices computes several batches at once, each with inputs of its own.
#: Source: GGML_SCHED_MAX_COPIES in ggml-backend.cpp.
PIPELINE_COPIES = 4
#: Rows of activations that are alive at once, beside the widest one: the residual, the norm, and what is added.
_LIVE_ROWS = 6


@dataclass(frozen=True, slots=True)
class Compute:
    """The compute buffers of a context.

    Args:
        buffers: bytes by the library's name for the buffer; the formula calls them META, DEVICE and HOST.
        measured: whether the library said so; else the formula did.
        exchange_bytes: what every device of a tensor split needs to add up partial results, bytes.
    """

    buffers: Mapping[str, int]
    measured: bool
    exchange_bytes: int = 0


META, DEVICE, HOST_BUFFER = "Meta", "device", "host"


def compute_of(facts: ModelFacts, placement: Placement, n_devices: int, known: Sequence[Reservation]) -> Compute:
    """Tell the compute buffers of a placement: as reserved, on a line between two that were, or by the formula.

    Args:
        facts: the model.
        placement: the placement.
        n_devices: devices that it uses.
        known: what the library reserved for this mode, devices and types, at any sizes.
    """
    exchange = _exchange(facts, placement, n_devices)
    shape = shape_of(facts, placement)
    found = _between(known, shape.n_ctx, shape.n_ubatch)
    if found is not None:
        return Compute(found, measured=True, exchange_bytes=exchange)
    return Compute(_formula(facts, placement, n_devices), measured=False, exchange_bytes=exchange)


def is_reserved(facts: ModelFacts, placement: Placement, known: Sequence[Reservation]) -> bool:
    """Tell whether the library reserved just what a placement asks for: its buffers are no estimate then."""
    shape = shape_of(facts, placement)
    return any((one.n_ctx, one.n_ubatch) == (shape.n_ctx, shape.n_ubatch) for one in known)


def _between(known: Sequence[Reservation], n_ctx: int, n_ubatch: int) -> dict[str, int] | None:
    """Look sizes up; interpolate between the nearest around them, first over the context, then over the batch."""
    if not known:
        return None
    by_batch: dict[int, list[Reservation]] = {}
    for one in known:
        by_batch.setdefault(one.n_ubatch, []).append(one)
    rows = {batch: _over_context(of_batch, n_ctx) for batch, of_batch in by_batch.items()}
    usable = {batch: row for batch, row in rows.items() if row is not None}
    if n_ubatch in usable:
        return usable[n_ubatch]
    below = max((batch for batch in usable if batch < n_ubatch), default=None)
    above = min((batch for batch in usable if batch > n_ubatch), default=None)
    if above is None:
        return None
    if below is None:
        return usable[above]
    share = (n_ubatch - below) / (above - below)
    return _line(usable[below], usable[above], share)


def _over_context(known: Sequence[Reservation], n_ctx: int) -> dict[str, int] | None:
    """Interpolate over the context; None above the largest that was reserved."""
    exact = next((one for one in known if one.n_ctx == n_ctx), None)
    if exact is not None:
        return dict(exact.compute)
    above = min((one for one in known if one.n_ctx > n_ctx), key=lambda one: one.n_ctx, default=None)
    below = max((one for one in known if one.n_ctx < n_ctx), key=lambda one: one.n_ctx, default=None)
    if above is None:
        return None
    if below is None:
        return dict(above.compute)
    share = (n_ctx - below.n_ctx) / (above.n_ctx - below.n_ctx)
    return _line(below.compute, above.compute, share)


def _line(low: Mapping[str, int], high: Mapping[str, int], share: float) -> dict[str, int]:
    """Go a share of the way from one to the other, never below the straight line."""
    names = {*low, *high}
    return {
        name: math.ceil(low.get(name, 0) + (max(high.get(name, 0), low.get(name, 0)) - low.get(name, 0)) * share)
        for name in sorted(names)
    }


def _exchange(facts: ModelFacts, placement: Placement, n_devices: int) -> int:
    """Tell the buffers for adding partial results.  Source: max_tmp_size in ggml-backend-meta.cpp."""
    if placement.mode is not SplitMode.TENSOR or n_devices < 2:
        return 0
    steps = math.ceil(math.log2(n_devices))
    return steps * shape_of(facts, placement).n_ubatch * facts.n_embd * _F32_BYTES


def _formula(facts: ModelFacts, placement: Placement, n_devices: int) -> dict[str, int]:
    """Estimate the buffers of a build that cannot say them."""
    shape = shape_of(facts, placement)
    layers = layers_of(facts).each
    rows = shape.n_ubatch
    cells = shape.n_ctx if placement.kv_unified else shape.n_ctx_seq * placement.n_seq_max
    widest_head = max((layer.n_head * max(layer.n_embd_head_k, layer.n_embd_head_v) for layer in layers), default=0)
    widest_ff = max((layer.n_ff for layer in layers), default=0) * (2 if not facts.n_expert else 1)
    widest_ff = max(widest_ff, 3 * facts.number("expert_feed_forward_length") * facts.number("expert_used_count"))
    wide = max(widest_ff, 3 * widest_head, facts.n_embd) + _LIVE_ROWS * facts.n_embd
    logits = rows * facts.n_vocab * _F32_BYTES
    mask = rows * cells * (_F16_BYTES + _F32_BYTES)
    scores = 0
    if placement.flash_attn is FlashAttn.OFF:
        scores = rows * cells * max((layer.n_head for layer in layers), default=0) * _F32_BYTES
    inputs = mask + rows * facts.n_embd * _F32_BYTES
    busy = rows * wide * _F32_BYTES + max(logits, scores)
    if placement.mode is SplitMode.TENSOR:
        return {META: busy + inputs, HOST_BUFFER: inputs}
    copies = PIPELINE_COPIES if placement.mode is SplitMode.LAYER and n_devices > 1 else 1
    return {DEVICE: busy + copies * inputs, HOST_BUFFER: inputs}
