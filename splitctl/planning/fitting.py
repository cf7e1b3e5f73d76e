"""What fits: placements and switches against free memory, and the largest that still would.

Laws:
    1. Pure: free memory was read once, before; nothing is asked here.
    2. Every pool of memory is judged alone. A device that is named twice is one pool, and so are the virtual devices of
       a real one, and the host and all devices that live in its memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from splitctl.placement import SplitMode
from splitctl.planning.backends import backend_of
from splitctl.planning.cells import PADDING
from splitctl.planning.memory import DeviceFacts, ModePlan, Share, SwitchPlan

#: A prompt is not worth a chunk smaller than this [tokens].
MIN_CHUNK = 256
HOST_POOL = "host"


@dataclass(frozen=True, slots=True)
class Need:
    """What is wanted of one pool of memory.

    Args:
        pool: a device's name, or "host".
        wanted: bytes.
        free: bytes; None where it is not known, and then it is taken to fit.
    """

    pool: str
    wanted: int
    free: int | None

    @property
    def fits(self) -> bool:
        """Whether it is there."""
        return self.free is None or self.wanted <= self.free

    @property
    def text(self) -> str:
        """Both numbers, for people."""
        have = "an unknown amount" if self.free is None else f"{self.free / (1 << 20):,.0f} MiB"
        return f"{self.pool} would hold {self.wanted / (1 << 20):,.0f} MiB and has {have} free"


@dataclass(frozen=True, slots=True)
class Chunk:
    """The largest prompt chunk that every device can lend.

    Args:
        n_ubatch: tokens; 0 when none is possible.
        limited_by: what the next larger one would lack; None when nothing but the limit stopped it.
        refused: whether it is too small to be worth it.
    """

    n_ubatch: int
    limited_by: Need | None
    refused: bool


def needs_of(shares: Iterable[Share], host: Share, devices: Sequence[DeviceFacts]) -> tuple[Need, ...]:
    """Sum what shares of devices and of the host want of every pool; one entry a pool, the host last."""
    known = {device.name: device for device in devices}
    wanted: dict[tuple[DeviceFacts, ...], int] = {}
    host_wanted = host.total
    for share in shares:
        device = known.get(share.device, DeviceFacts(share.device))
        if backend_of(device.name, device.kind).is_host:
            host_wanted += share.total
            continue
        # Each virtual device is said to have its part of the free memory of one, which all of them take from.
        pool = tuple(one for one in devices if one.unit and one.unit == device.unit) or (device,)
        wanted[pool] = wanted.get(pool, 0) + share.total
    pools = [Need(" + ".join(one.name for one in pool), n_bytes, _free(pool)) for pool, n_bytes in wanted.items()]
    own = known.get(HOST_POOL) or next((one for one in devices if backend_of(one.name, one.kind).is_host), None)
    return (*pools, Need(HOST_POOL, host_wanted, own.free if own is not None else None))


def _free(pool: Sequence[DeviceFacts]) -> int | None:
    known = [one.free for one in pool if one.free is not None]
    return sum(known) if len(known) == len(pool) else None


def needs_of_mode(plan: ModePlan, devices: Sequence[DeviceFacts]) -> tuple[Need, ...]:
    """Sum what one placement wants of every pool; see `needs_of`."""
    return needs_of(plan.shares, plan.host, devices)


def needs_of_switch(plan: SwitchPlan, devices: Sequence[DeviceFacts]) -> tuple[Need, ...]:
    """Sum what a switch wants of every pool at its worst moment.

    The larger placement, and on the host the carry too.
    """
    largest: dict[str, Need] = {}
    for mode in (plan.before, plan.after):
        for need in needs_of_mode(mode, devices):
            known = largest.get(need.pool)
            if known is None or need.wanted > known.wanted:
                largest[need.pool] = need
    host = largest.pop(HOST_POOL)
    return (*largest.values(), dataclasses.replace(host, wanted=host.wanted + plan.carry))


def lacking(needs: Iterable[Need]) -> tuple[Need, ...]:
    """Pick the needs that are not met."""
    return tuple(need for need in needs if not need.fits)


def largest_context(
    limit: int, needs: Callable[[int], tuple[Need, ...]], *, step: int = PADDING, marks: Sequence[int] = ()
) -> tuple[int, tuple[Need, ...]]:
    """Find the largest context whose needs are met.

    Args:
        limit: tokens at most, as a rule what the model was trained for.
        needs: of a context of so many tokens, all that has to be met (each mode, and the switch between them).
        step: contexts are multiples of this, or the limit.
        marks: contexts whose needs are exact, ascending; the others are looked at above the largest that fits alone.

    Returns:
        Tokens, 0 when not even one step fits; and what the next step lacks, empty when the limit stopped it.
    """
    if not lacking(needs(limit)):
        return limit, ()
    low, high = bracket(limit, needs, marks)
    low, high = low // step, -(-high // step)
    while high - low > 1:
        middle = (low + high) // 2
        if lacking(needs(middle * step)):
            high = middle
        else:
            low = middle
    return low * step, lacking(needs(min((low + 1) * step, limit)))


def bracket(limit: int, needs: Callable[[int], tuple[Need, ...]], marks: Sequence[int]) -> tuple[int, int]:
    """Give the largest mark that fits, 0 for none, and the next one, or the limit."""
    high = limit
    for mark in reversed(marks):
        if not lacking(needs(mark)):
            return mark, high
        high = mark
    return 0, high


def largest_chunk(limit: int, needs: Callable[[int], tuple[Need, ...]], *, step: int = MIN_CHUNK) -> Chunk:
    """Find the largest prompt chunk that every device can lend; refused when one cannot lend the least.

    Args:
        limit: tokens at most, the batch.
        needs: of the prompt's placement with chunks of so many tokens.
        step: chunks above the least one are multiples of this.
    """
    least = min(MIN_CHUNK, limit)
    if lacking(needs(least)):
        low, high = 0, least
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if lacking(needs(middle)) else (middle, high)
        return Chunk(low, lacking(needs(low + 1))[0], refused=True)
    best = least
    for tokens in (*range(step, limit, step), limit):
        if tokens <= best:
            continue
        missing = lacking(needs(tokens))
        if missing:
            return Chunk(best, missing[0], refused=False)
        best = tokens
    return Chunk(best, None, refused=False)


def balanced_split(plan: ModePlan, devices: Sequence[DeviceFacts]) -> tuple[float, ...]:
    """Find the tensor split that leaves every device equally full.

    Args:
        plan: of the placement with any split.
        devices: those that there are, with their free memory.

    Returns:
        Shares, one a device: layers in layer mode, parts of one in tensor mode; empty where there is nothing to share.
    """
    known = {device.name: device for device in devices}
    free = [known.get(share.device, DeviceFacts(share.device)).free or 0 for share in plan.shares]
    if len(free) < 2 or not all(free):
        return ()
    if plan.placement.mode is SplitMode.TENSOR:
        return _balanced_slices(plan, free)
    apart = [share.compute + share.exchange + share.fixed for share in plan.shares]
    return _balanced_layers(free, apart, plan.layer_bytes)


def _balanced_slices(plan: ModePlan, free: Sequence[int]) -> tuple[float, ...]:
    """Solve for equal fullness: what is whole on every device stays, the rest is shared."""
    cut = sum(plan.cut)
    apart = [share.total - part for share, part in zip(plan.shares, plan.cut, strict=True)]
    shares = [0.0] * len(free)
    members = set(range(len(free)))
    while members and cut:
        level = (cut + sum(apart[one] for one in members)) / sum(free[one] for one in members)
        shares = [(level * free[one] - apart[one]) / cut if one in members else 0.0 for one in range(len(free))]
        full = {one for one in members if shares[one] < 0}
        if not full:
            break
        members -= full
    total = sum(shares)
    return tuple(round(share / total, 4) for share in shares) if total else ()


def _balanced_layers(free: Sequence[int], apart: Sequence[int], layer_bytes: Sequence[int]) -> tuple[float, ...]:
    """Give each device a run of layers so that the fullest is as little full as can be."""

    def runs(level: float) -> list[int] | None:
        counts, at = [], 0
        for number, room in enumerate(free):
            left, count = level * room - apart[number], 0
            while at < len(layer_bytes) and layer_bytes[at] <= left:
                left -= layer_bytes[at]
                at += 1
                count += 1
            counts.append(count)
        return counts if at == len(layer_bytes) else None

    low, high = 0.0, 1.0
    while runs(high) is None:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if runs(middle) is None else (low, middle)
    return tuple(float(count) for count in runs(high) or ())
