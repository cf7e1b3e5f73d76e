"""Devices: listing them with their memory, and turning names from a user into the library's handles."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from llama_native.errors import UnknownDevice

if TYPE_CHECKING:
    from collections.abc import Sequence

    import cffi


class DeviceKind(Enum):
    """What a device is. Source: ggml-backend.h, ggml_backend_dev_type."""

    CPU = 0
    GPU = 1
    IGPU = 2
    ACCEL = 3
    META = 4


@dataclass(frozen=True, slots=True)
class Device:
    """One device as the library names it; memory in bytes, read when the list was made (0: not asked)."""

    name: str
    description: str
    kind: DeviceKind | None
    backend: str
    memory_free: int
    memory_total: int


def text(ffi: cffi.FFI, pointer: Any) -> str:
    """Return a C string as text, "" for NULL; bytes that are not UTF-8 are replaced."""
    return ffi.string(pointer).decode("utf-8", "replace") if pointer else ""


def read_devices(ffi: cffi.FFI, lib: Any, *, memory: bool) -> tuple[Device, ...]:
    """List the library's devices in its own order, with their memory if asked for; the caller holds the lock."""
    found = []
    for device in _all(lib):
        free, total = ffi.new("size_t *"), ffi.new("size_t *")
        if memory:
            lib.ggml_backend_dev_memory(device, free, total)
        found.append(
            Device(
                name=text(ffi, lib.ggml_backend_dev_name(device)),
                description=text(ffi, lib.ggml_backend_dev_description(device)),
                kind=_kind(lib, device),
                backend=_backend_name(ffi, lib, device),
                memory_free=int(free[0]),
                memory_total=int(total[0]),
            )
        )
    return tuple(found)


def handles(ffi: cffi.FFI, lib: Any, names: Sequence[str]) -> list[Any]:
    """Turn device names into the library's handles; upper and lower case are the same.

    A name may come twice: the library then sees two devices (one processor as two, for example).

    Raises:
        UnknownDevice: naming the devices that there are.
    """
    by_name: dict[str, Any] = {}
    for device in _all(lib):
        by_name.setdefault(text(ffi, lib.ggml_backend_dev_name(device)).lower(), device)
    for name in names:
        if name.lower() not in by_name:
            raise UnknownDevice(name, tuple(text(ffi, lib.ggml_backend_dev_name(d)) for d in by_name.values()))
    return [by_name[name.lower()] for name in names]


def _all(lib: Any) -> list[Any]:
    return [lib.ggml_backend_dev_get(index) for index in range(lib.ggml_backend_dev_count())]


def _kind(lib: Any, device: Any) -> DeviceKind | None:
    try:
        return DeviceKind(lib.ggml_backend_dev_type(device))
    except (AttributeError, ValueError):
        return None


def _backend_name(ffi: cffi.FFI, lib: Any, device: Any) -> str:
    try:
        return text(ffi, lib.ggml_backend_reg_name(lib.ggml_backend_dev_backend_reg(device)))
    except AttributeError:
        return ""
