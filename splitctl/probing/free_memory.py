"""Asks the planner for a live session: reads the devices' free memory once, before anything is freed, if it matters."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from splitctl.host_memory import host_memory
from splitctl.planning.backends import unit_of
from splitctl.planning.fit_check import Beside, Plans, fits_beside, shortage
from splitctl.planning.fitting import HOST_POOL
from splitctl.planning.memory import DeviceFacts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from llama_native import Device, Library
    from splitctl.errors import Reason
    from splitctl.model.facts import ModelFacts
    from splitctl.placement import Placement

#: Backends that go on in the host's memory when a device is full, and the variable that asks for it.
_SPILLS = (
    ("CUDA", "GGML_CUDA_ENABLE_UNIFIED_MEMORY"),
    ("ROCm", "GGML_CUDA_ENABLE_UNIFIED_MEMORY"),
    ("Vulkan", "GGML_VK_ALLOW_SYSMEM_FALLBACK"),
    ("Vulkan", "GGML_VK_PREFER_HOST_MEMORY"),
)
#: Their devices share the host's memory, and their limit is a recommendation.
_SHARED = ("Metal", "MTL")
#: How the library marks a virtual device: several share the memory of one.
_VIRTUAL = "(dev p"


class FreeMemoryCheck:
    """Says before a switch what surely does not fit; the `planner` of a session's checks.

    Thread: the session's turn guards it.
    """

    def __init__(self, library: Library, facts: ModelFacts) -> None:
        self._library = library
        self._facts = facts
        # Read once: every call of the library waits for the decode of the moment.
        self._named = device_facts(library.devices(memory=False), library.env)
        self._full = tuple(dataclasses.replace(one, free=0 if one.kind == "gpu" else None) for one in self._named)
        self._plans = Plans(facts, self._named)

    def __call__(self, current: Placement, target: Placement) -> tuple[tuple[Reason, ...], bool]:
        """Return why a target surely does not fit, none where it may, and whether the devices were asked for it."""
        # The question is slow on some builds. Where the target fits with nothing free, no answer could refuse it.
        if not shortage(self._plans, current, target, self._full):
            return (), False
        return shortage(self._plans, current, target, device_facts(self._library.devices(), self._library.env)), True

    def beside(self, current: Placement, target: Placement, *, same_process: bool, host_bytes: int = 0) -> Beside:
        """Tell whether a target fits now while the current placement stays; asks the devices for their free memory.

        Args:
            current: where the session is.
            target: what is to be placed beside it.
            same_process: whether this process places it; else another one does.
            host_bytes: of host memory that are wanted too, for example for a carry.
        """
        devices = beside_facts(self._library)
        return fits_beside(self._facts, current, target, devices, same_process=same_process, host_bytes=host_bytes)


def beside_facts(library: Library) -> tuple[DeviceFacts, ...]:
    """Describe a library's devices and the host with all that is free now, whether or not it is a limit.

    What spills into the host's memory would make both placements slow, and virtual devices share what their real one
    has. Real CUDA devices are taken to add up partial results with NCCL, which takes most.
    """
    listed = {one.name: one for one in library.devices()}
    facts = (
        dataclasses.replace(
            one,
            free=listed[one.name].memory_free if one.total else None,
            unit=unit_of(listed[one.name].description),
            by_nccl=one.name.startswith("CUDA") and not unit_of(listed[one.name].description),
        )
        for one in device_facts(listed.values(), {})
    )
    return (*facts, DeviceFacts(HOST_POOL, "cpu", host_memory().available))


def device_facts(devices: Iterable[Device], env: Mapping[str, str]) -> tuple[DeviceFacts, ...]:
    """Describe devices to the planner; the free memory is unknown wherever it does not limit what can be placed.

    Args:
        devices: as the library lists them, with their memory.
        env: the environment that the library reads.

    Returns:
        Those that a placement without devices would use, and processors. The library takes integrated GPUs only where
        it has no other, and accelerators never.
    """
    listed = [(one, one.kind.name.lower() if one.kind else "") for one in devices]
    left_out = {"accel", "igpu"} if any(kind == "gpu" for _, kind in listed) else {"accel"}
    return tuple(
        DeviceFacts(
            name=one.name,
            kind=kind,
            free=one.memory_free if _is_a_limit(one, kind, env) else None,
            total=one.memory_total or None,
            address=one.description if one.name.startswith("RPC") else "",
        )
        for one, kind in listed
        if kind not in left_out
    )


def _is_a_limit(device: Device, kind: str, env: Mapping[str, str]) -> bool:
    """Tell whether an allocation fails where the free memory ends."""
    if kind != "gpu" or not device.memory_total or _VIRTUAL in device.description:
        return False
    return not device.name.startswith(_SHARED) and not any(
        device.name.startswith(name) and variable in env for name, variable in _SPILLS
    )
