"""Devices and their memory, fresh where the system or a driver says it, and never another device's."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from splitctl.host_memory import host_memory
from splitctl.http.devices import Devices

_GIB = 1 << 30


class _Driver(types.ModuleType):
    """What nvidia-ml-py offers, over two chips."""

    class NVMLError(Exception):
        """As the driver's."""

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.chips = [("GPU-a", "NVIDIA H200", 100), ("GPU-b", "NVIDIA H200", 50)]
        self.has_driver = True

    def nvmlInit(self) -> None:  # noqa: N802 - the driver's name
        """Begin."""
        if not self.has_driver:
            raise self.NVMLError

    def nvmlDeviceGetHandleByIndex(self, index: int) -> tuple[str, str, int]:  # noqa: N802 - the driver's name
        """Give a chip by number."""
        if not 0 <= index < len(self.chips):
            raise self.NVMLError
        return self.chips[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> tuple[str, str, int]:  # noqa: N802 - the driver's name
        """Give a chip by name."""
        return next(one for one in self.chips if one[0] == uuid)

    def nvmlDeviceGetName(self, handle: tuple[str, str, int]) -> str:  # noqa: N802 - the driver's name
        """Say what it is."""
        return handle[1]

    def nvmlDeviceGetMemoryInfo(self, handle: tuple[str, str, int]) -> types.SimpleNamespace:  # noqa: N802
        """Say what is free."""
        return types.SimpleNamespace(free=handle[2] * _GIB, total=140 * _GIB)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> _Driver:
    """Install one."""
    made = _Driver()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


def _status(*names: str, **more: Any) -> dict[str, Any]:
    gpu = {"kind": "gpu", "description": "NVIDIA H200", "memory_free": 7, "memory_total": 139 * _GIB, **more}
    devices = [{"name": "CUDA0", **gpu}, {"name": "CUDA1", **gpu}, {"name": "CPU", "kind": "cpu", "memory_free": 1}]
    return {"model": {"devices": devices}, "placement": {"devices": list(names)}}


def test_a_processors_memory_is_the_systems() -> None:
    """It is that of now, once for every time that a placement names it."""
    first, second = Devices().read(_status("CPU", "CPU"))
    assert first["memory_total"] == second["memory_total"] == host_memory().total
    assert first["is_fresh"]


@pytest.mark.parametrize(
    ("visible", "free"),
    [
        (None, [100, 50]),
        ("1,0", [50, 100]),
        ("GPU-b, GPU-a", [50, 100]),
    ],
)
def test_a_driver_is_asked_for_the_same_chips(driver: _Driver, visible: str | None, free: list[int]) -> None:
    """Devices are found whichever way the workers number them."""
    found = Devices(visible).read(_status("CUDA0", "CUDA1"))
    assert [one["memory_free"] // _GIB for one in found] == free
    assert all(one["is_fresh"] for one in found)


@pytest.mark.parametrize(
    ("visible", "more"),
    [
        ("0", {}),
        ("MIG-x,MIG-y", {}),
        (None, {"description": "another"}),
        (None, {"memory_total": 70 * _GIB}),
    ],
)
def test_what_may_be_another_chip_is_not_told(driver: _Driver, visible: str | None, more: dict[str, Any]) -> None:
    """Where it is not sure which chip a device is, or a part of one, what the worker saw stands."""
    found = Devices(visible).read(_status("CUDA1", **more))
    assert (found[0]["memory_free"], found[0]["is_fresh"]) == (7, False)


def test_without_a_driver_what_the_worker_saw_stands(driver: _Driver) -> None:
    """A machine without NVIDIA's driver, and devices that nobody knows, are no error."""
    driver.has_driver = False
    found = Devices().read(_status("CUDA0", "Vulkan0"))
    assert [(one["memory_free"], one["is_fresh"]) for one in found] == [(7, False), (None, False)]
    assert Devices().read({"model": None, "placement": None}) == []
