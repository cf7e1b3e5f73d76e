"""What each device holds after a switch, read once and not between free and place (law 5 of the switch)."""

from __future__ import annotations

from llama_native import DeviceKind, Library
from splitctl.outcome import DevicePeak
from splitctl.placement import Placement


def device_peaks(library: Library, placement: Placement) -> tuple[DevicePeak, ...]:
    """Read the memory in use on every device of a placement (one that names none uses all of the library's).

    A processor has no memory of its own, and no number.
    """
    kinds = {device.name: device.kind for device in library.devices(memory=False)}
    names = placement.devices or tuple(kinds)
    if all(kinds.get(name) is DeviceKind.CPU for name in names):
        return tuple(DevicePeak(index, name, None) for index, name in enumerate(names))
    known = {device.name: device for device in library.devices()}
    return tuple(
        DevicePeak(
            index,
            name,
            known[name].memory_total - known[name].memory_free
            if name in known and known[name].kind is not DeviceKind.CPU and known[name].memory_total
            else None,
        )
        for index, name in enumerate(names)
    )
