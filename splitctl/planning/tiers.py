"""What each way of a switch takes: where its weights come from, and whether a second worker takes over.

Laws:
    1. Pure: sums of two plans that were made before.
    2. A real device's context is there once in a process, and once more in a second one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from splitctl.outcome import Via, WeightsTier
from splitctl.planning.fitting import Need, lacking, needs_of, needs_of_mode, needs_of_switch
from splitctl.planning.memory import DeviceFacts, ModePlan, Share, SwitchPlan

FILE, PINNED, RESIDENT = WeightsTier.FILE.value, WeightsTier.PINNED.value, WeightsTier.RESIDENT.value
"""The tiers of weights."""

BESIDE = Via.BESIDE.value
"""A second worker that takes over."""

_RPC = "RPC"
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class TierPlan:
    """What one way of a switch takes.

    Args:
        name: file, pinned, resident or beside.
        devices: the most that every device holds at a time.
        host: the most that the host holds, with the carry; with the copy of the weights where there is one.
        needs: what is wanted of every pool of memory.
        barred: why it is not possible at all; empty where memory decides.
    """

    name: str
    devices: tuple[Share, ...]
    host: Share
    needs: tuple[Need, ...]
    barred: str = ""

    @property
    def fits(self) -> bool:
        """Whether it is possible and every pool has what is wanted of it."""
        return not self.barred and not lacking(self.needs)

    @property
    def reason(self) -> str:
        """Why it is not; empty where it fits."""
        return self.barred or "; ".join(need.text for need in lacking(self.needs))


def of_file(switch: SwitchPlan, devices: Sequence[DeviceFacts]) -> TierPlan:
    """Plan a switch that loads the file again: one placement at a time."""
    return TierPlan(FILE, switch.peaks, switch.host, needs_of_switch(switch, devices))


def of_pinned(switch: SwitchPlan, devices: Sequence[DeviceFacts], copy_bytes: int) -> TierPlan:
    """Plan a switch from a copy of the weights on the host, which stays there: one placement at a time beside it.

    The copy is made after the first placement, and only where it leaves the host as much free again.

    Args:
        switch: the same from the file.
        devices: those that there are.
        copy_bytes: of all tensors of the model.
    """
    host = dataclasses.replace(switch.host, weights=switch.host.weights + copy_bytes)
    needs = needs_of_switch(dataclasses.replace(switch, carry=switch.carry + copy_bytes), devices)
    first = needs_of_mode(switch.before, devices)[-1]
    left = None if first.free is None else first.free - first.wanted
    barred = ""
    if left is not None and left < 2 * copy_bytes:
        barred = (
            f"the copy of the weights takes {copy_bytes / _MIB:,.0f} MiB and as much shall stay free, and the host "
            f"would have {max(left, 0) / _MIB:,.0f} MiB"
        )
    return TierPlan(PINNED, switch.peaks, host, needs, barred)


def of_both(name: str, before: ModePlan, after: ModePlan, devices: Sequence[DeviceFacts], carry: int) -> TierPlan:
    """Plan a switch for which both placements are there.

    Args:
        name: of the way.
        before: the first placement.
        after: the second, planned beside the first: with what the first leaves free, and without what a process has of
            a device already.
        devices: those that there are, with what is free on them without either.
        carry: bytes of host memory for the carry, with a second copy where one is needed.
    """
    both = _summed((*before.shares, *after.shares))
    host = dataclasses.replace(_added(before.host, after.host), carry=carry)
    is_rpc = name == BESIDE and any(share.device.startswith(_RPC) for share in both)
    barred = "an RPC server serves one worker at a time" if is_rpc else ""
    return TierPlan(name, both, host, needs_of(both, host, devices), barred)


def left_by(plan: ModePlan, devices: Sequence[DeviceFacts]) -> tuple[DeviceFacts, ...]:
    """Tell what is free on devices while a placement is there, never less than nothing."""
    held = {share.device: share.total for share in _summed(plan.shares)}
    return tuple(
        one if one.free is None else dataclasses.replace(one, free=max(one.free - held.get(one.name, 0), 0))
        for one in devices
    )


def _summed(shares: Iterable[Share]) -> tuple[Share, ...]:
    """Add up what lies on the same device; the first index that it has stands for it."""
    sums: dict[str, Share] = {}
    for share in shares:
        known = sums.get(share.device)
        sums[share.device] = share if known is None else _added(known, share)
    return tuple(sums.values())


def _added(one: Share, more: Share) -> Share:
    sizes = (field.name for field in dataclasses.fields(Share) if field.name not in {"index", "device"})
    return dataclasses.replace(one, **{name: getattr(one, name) + getattr(more, name) for name in sizes})
