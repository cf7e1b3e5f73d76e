"""What a running session asks before it switches: does the target surely not fit, given what it will give back?

Laws:
    1. Only what is certain counts: weights and cache, which the header tells to the byte. Compute buffers by a formula
       would refuse what fits.
    2. The session's own weights and cache are given back before the target is placed, so they count as free.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from splitctl.facts import ModelFacts
from splitctl.placement import Placement
from splitctl.planning.fitting import HOST_POOL, Need, lacking, needs_of_mode
from splitctl.planning.memory import DeviceFacts, ModePlan, Share, plan_mode


def surely_lacking(
    facts: ModelFacts, current: Placement | None, target: Placement, machine: Sequence[DeviceFacts]
) -> tuple[Need, ...]:
    """Find the devices that cannot hold the target, whatever its compute buffers take.

    Args:
        facts: the model.
        current: where the session is; None for one that is opening.
        target: where it shall go.
        machine: the devices with the memory that is free on each now, read once, before anything is freed.

    Returns:
        What is lacking; the free memory in it holds what the session gives back. The host is left out: its pages of a
        mapped file can be dropped, and the carry is judged by the rules.
    """
    given_back = {} if current is None else _held(facts, current, machine)
    rich = tuple(
        dataclasses.replace(device, free=device.free + given_back.get(device.name, 0))
        if device.free is not None
        else device
        for device in machine
    )
    plan = _certain(plan_mode(facts, target, machine))
    return tuple(need for need in lacking(needs_of_mode(plan, rich)) if need.pool != HOST_POOL)


def _held(facts: ModelFacts, placement: Placement, machine: Sequence[DeviceFacts]) -> dict[str, int]:
    """Sum the weights and the cache that a placement has on each device."""
    held: dict[str, int] = {}
    for share in _certain(plan_mode(facts, placement, machine)).shares:
        held[share.device] = held.get(share.device, 0) + share.total
    return held


def _certain(plan: ModePlan) -> ModePlan:
    """Keep of a plan what the header tells to the byte."""

    def bare(share: Share) -> Share:
        return Share(share.index, share.device, weights=share.weights, cache=share.cache)

    return dataclasses.replace(plan, shares=tuple(bare(share) for share in plan.shares), host=bare(plan.host))
