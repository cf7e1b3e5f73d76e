"""Devices and their memory, as they are now, without asking the library: the supervisor has none.

A processor's memory is the host's (`host_memory`). An NVIDIA device's is asked of its driver, where nvidia-ml-py is
installed. What the worker saw when it opened stands for the others.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any

from splitctl.host_memory import host_memory

_CUDA = re.compile(r"CUDA(\d+)")
#: The driver and the library count the same chips, but not quite the same usable bytes.
_SAME_SIZE = 0.9


class Devices:
    """Reads the devices of a session and their memory.

    Thread: the loop's.
    """

    def __init__(self, visible: str | None = None) -> None:
        """Look for the driver; `visible` is the workers' CUDA_VISIBLE_DEVICES, None where it is not set."""
        self._visible = None if visible is None else [one.strip() for one in visible.split(",")]
        self._driver = _driver()

    def read(self, status: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Give the devices of the placement in a session's status.

        Returns:
            For each name, description, kind, backend, memory_free and memory_total (bytes, null where nobody says), and
            is_fresh: whether the memory is that of now.
        """
        known = {one["name"]: one for one in (status.get("model") or {}).get("devices") or []}
        names = (status.get("placement") or {}).get("devices") or list(known)
        return [self._one(known.get(name, {"name": name})) for name in names]

    def _one(self, known: Mapping[str, Any]) -> dict[str, Any]:
        empty = {"description": "", "kind": "unknown", "backend": "", "memory_free": None, "memory_total": None}
        if known.get("kind") == "cpu":
            memory = host_memory()
            now = {"memory_free": memory.available, "memory_total": memory.total}
        else:
            now = self._of_driver(known)
        return {**empty, **known, **now, "is_fresh": bool(now)}

    def _of_driver(self, known: Mapping[str, Any]) -> dict[str, int]:
        """Ask the driver; empty where it may not be the same device."""
        found = _CUDA.fullmatch(str(known.get("name")))
        if found is None or self._driver is None:
            return {}
        driver = self._driver
        try:
            handle = self._handle(int(found[1]))
            name, memory = driver.nvmlDeviceGetName(handle), driver.nvmlDeviceGetMemoryInfo(handle)
        except (driver.NVMLError, IndexError, ValueError):
            return {}
        total = int(known.get("memory_total") or 0)
        is_same = name == known.get("description") and total >= _SAME_SIZE * memory.total
        return {"memory_free": int(memory.free), "memory_total": int(memory.total)} if is_same else {}

    def _handle(self, index: int) -> Any:
        """Give the driver's handle of the device with this number in the worker."""
        driver = self._driver
        if self._visible is None:
            return driver.nvmlDeviceGetHandleByIndex(index)
        wanted = self._visible[index]
        if wanted.startswith("GPU-"):
            return driver.nvmlDeviceGetHandleByUUID(wanted)
        return driver.nvmlDeviceGetHandleByIndex(int(wanted))


def _driver() -> Any:
    """Give the module that asks the driver; None without nvidia-ml-py, or without a driver."""
    try:
        nvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml
