"""What a running session asks before it switches.

Does the target surely not fit, given what the session will give back? And does it fit beside what the session keeps?

Laws:
    1. Of the target only what is certain counts: weights and cache, which the header tells to the byte. Compute buffers
       by a formula would refuse what fits.
    2. Everything that the session has on a device counts as given back, compute buffers by their formula too: the error
       is on the side of trying.
    3. Where the library chooses the shares by free memory nobody knows them before, so all its devices are one pool.
    4. Beside another placement the error is on the other side: everything counts, compute buffers by their formula too,
       and what is not known does not fit. Going without it costs time alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from splitctl.errors import Reason
from splitctl.model.facts import ModelFacts
from splitctl.outcome import DOES_NOT_FIT
from splitctl.placement import Placement, SplitMode
from splitctl.planning.fitting import HOST_POOL, Need, needs_of_mode
from splitctl.planning.memory import DeviceFacts, ModePlan, Share, devices_of, plan_mode
from splitctl.planning.reservation import Reservation

#: Paddings of unknown backends are guessed: a shortage no larger than this is not certain [share].
_DOUBT = 0.01
_MIB = 1024 * 1024
_MOST_PLANS = 8


class Plans:
    """Plans of one model on its devices, each made once; the last few are kept.

    What is free makes no difference to them: it decides the shares of layers only where the library chooses those, and
    there all devices are one pool.
    """

    def __init__(self, facts: ModelFacts, devices: Sequence[DeviceFacts]) -> None:
        """Make none yet."""
        self._facts = facts
        self._devices = tuple(dataclasses.replace(one, free=None) for one in devices)
        self._made: dict[Placement, ModePlan] = {}

    def __call__(self, placement: Placement) -> ModePlan:
        """Give the plan of a placement."""
        found = self._made.get(placement)
        if found is None:
            if len(self._made) >= _MOST_PLANS:
                del self._made[next(iter(self._made))]
            found = self._made[placement] = plan_mode(self._facts, placement, self._devices)
        return found


def definite_shortage(
    plans: Plans, current: Placement | None, target: Placement, devices: Sequence[DeviceFacts]
) -> tuple[Need, ...]:
    """Find the devices that cannot hold the target, whatever its compute buffers take.

    Args:
        plans: of the model on these devices.
        current: where the session is; None for one that is opening.
        target: where it shall go.
        devices: with the memory that is free on each now, read once, before anything is freed.

    Returns:
        What is lacking; the free memory in it holds what the session gives back, and where the library chooses the
        shares one need stands for all devices ("CUDA0 + CUDA1"). The host is left out: its pages of a mapped file can
        be dropped, and the carry is judged by the rules.
    """
    rich = _with_given_back(plans, current, devices)
    plan = _certain(plans(target))
    needs = [need for need in needs_of_mode(plan, rich) if need.pool != HOST_POOL]
    if _is_chosen_by_library(target, devices) and len(needs) > 1:
        known = [need.free for need in needs if need.free is not None]
        free = sum(known) if len(known) == len(needs) else None
        needs = [Need(" + ".join(need.pool for need in needs), sum(need.wanted for need in needs), free)]
    return tuple(need for need in needs if need.free is not None and need.wanted * (1 - _DOUBT) > need.free)


def shortage(
    plans: Plans, current: Placement | None, target: Placement, devices: Sequence[DeviceFacts]
) -> tuple[Reason, ...]:
    """Say why a target surely does not fit, a reason a device; see `definite_shortage`."""
    return tuple(
        Reason(
            DOES_NOT_FIT,
            f"{need.pool} would hold at least {need.wanted / _MIB:,.0f} MiB of weights and cache in "
            f"{target.mode.value} mode and has {(need.free or 0) / _MIB:,.0f} MiB, with what the session gives back; "
            "take a smaller context (-c), another tensor split (-ts) or more devices, or try it with --force",
        )
        for need in definite_shortage(plans, current, target, devices)
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Beside:
    """Whether a placement fits while another one stays.

    Args:
        needs: what the second wants of every pool of memory beside the first, the host's last.
        target: the second.
    """

    needs: tuple[Need, ...]
    target: Placement

    @property
    def fits(self) -> bool:
        """Whether every pool is known to have it."""
        return not self._missing

    @property
    def reason(self) -> str:
        """Why it does not, with both numbers of every pool that is short, in one sentence; empty where it fits."""
        if self.fits:
            return ""
        needs = "; ".join(need.text for need in self._missing)
        return f"{self.target.mode.value} mode does not fit beside what serves: for it {needs}"

    @property
    def _missing(self) -> tuple[Need, ...]:
        return tuple(need for need in self.needs if need.free is None or not need.fits)


def fits_beside(
    facts: ModelFacts,
    current: Placement | None,
    target: Placement,
    devices: Sequence[DeviceFacts],
    *,
    same_process: bool,
    host_bytes: int = 0,
    known: Sequence[Reservation] = (),
) -> Beside:
    """Tell whether a target fits while the current placement stays as it is.

    Args:
        facts: the model.
        current: what serves; None: nothing, and the target is alone.
        target: what is to be placed beside it: weights, cache, buffers, and what backends take for themselves.
        devices: with the memory that is free on each now, while the current placement is there, and the host's (a
            device of kind cpu, or one named "host"). Virtual devices with their real one, whose memory they share.
        same_process: whether the process that holds the current placement places the target too; it has a context and
            kernels on the current one's devices already, which another process makes once more.
        host_bytes: of host memory that are wanted beside, for example for a carry.
        known: what the library reserved for the target; empty for the formula.
    """
    there = {one.real for one in devices_of(current, devices)} if same_process and current is not None else set()
    plan = plan_mode(facts, target, devices, known, there=there)
    host = dataclasses.replace(plan.host, carry=host_bytes)
    return Beside(needs_of_mode(dataclasses.replace(plan, host=host), devices), target)


def _with_given_back(
    plans: Plans, current: Placement | None, devices: Sequence[DeviceFacts]
) -> tuple[DeviceFacts, ...]:
    """Count as free on each device what the session has there, and never more than the device has in all."""
    if current is None:
        return tuple(devices)
    shares = plans(current).shares
    held: dict[str, int] = {}
    for share in shares:
        held[share.device] = held.get(share.device, 0) + share.total
    if _is_chosen_by_library(current, devices):
        # By what was free when it was placed, which is gone: any device may hold the most.
        held = dict.fromkeys(held, sum(held.values()))
    return tuple(
        one if one.free is None else dataclasses.replace(one, free=_up_to(one.free + held.get(one.name, 0), one.total))
        for one in devices
    )


def _up_to(n_bytes: int, total: int | None) -> int:
    return min(n_bytes, total) if total else n_bytes


def _is_chosen_by_library(placement: Placement, devices: Sequence[DeviceFacts]) -> bool:
    """Tell whether the library shares layers by the memory that it finds free."""
    if placement.mode not in {SplitMode.LAYER, SplitMode.ROW} or any(placement.tensor_split or ()):
        return False
    return len(devices_of(placement, devices)) > 1


def _certain(plan: ModePlan) -> ModePlan:
    """Keep of a plan what the header tells to the byte."""

    def bare(share: Share) -> Share:
        return Share(share.index, share.device, weights=share.weights, cache=share.cache)

    return dataclasses.replace(plan, shares=tuple(bare(share) for share in plan.shares), host=bare(plan.host))
