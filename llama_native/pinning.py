"""Host memory that devices copy from and into by DMA, pinned through the CUDA driver: copies run at the link's speed.

The driver is asked and not the runtime, because builds bring a runtime of their own, some of them linked in. What is
registered with the flag PORTABLE counts in every context of the process, so the library's own copies gain by it.

Laws:
    1. Memory is registered as one piece: a copy that ends outside of the piece in which it begins ends the process.
    2. It is unregistered before it is unmapped; a driver takes an address for registered until then.
    3. A thread's current context is what it was, after every call here.
    4. A forked child calls no driver.

Source: the CUDA driver API (cuda.h): names, numbers and types.
"""

from __future__ import annotations

import atexit
import mmap
import os
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any

import cffi

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from llama_native.library import Library

_NAME = "libcuda.so.1"
_BACKEND = "CUDA"
"""Name of the backend whose devices gain; builds for ROCm and MUSA have other names and other drivers."""
_PORTABLE = 1
_MEMORY_TYPE = 2
_LINK_BYTES = 64 << 20
_LINK_ROUNDS = 3
_ERRORS = {
    1: "it does not take this memory",
    2: "not enough memory; free some, or take a smaller context",
    100: "no device; see CUDA_VISIBLE_DEVICES",
    304: "the system refused; see ulimit -l",
    712: "it is registered already",
    713: "it is not registered",
    801: "this system cannot pin memory",
}
_CDEF = """
int cuInit(unsigned flags);
int cuDeviceGetCount(int *count);
int cuDeviceGet(int *device, int ordinal);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuDevicePrimaryCtxRelease_v2(int device);
int cuCtxGetCurrent(void **context);
int cuCtxSetCurrent(void *context);
int cuMemHostRegister_v2(void *start, size_t n_bytes, unsigned flags);
int cuMemHostUnregister(void *start);
int cuPointerGetAttribute(void *data, int attribute, unsigned long long pointer);
int cuMemAlloc_v2(unsigned long long *pointer, size_t n_bytes);
int cuMemFree_v2(unsigned long long pointer);
int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t n_bytes);
int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t n_bytes);
"""


class _Failed(Exception):
    """A call of the driver that did not do it; its text says which and why."""


class Driver:
    """The CUDA driver of this process, with the primary contexts that were needed. Thread: any."""

    def __init__(self, name: str) -> None:
        """Open it.

        Raises:
            OSError: there is none, or it is older than its functions here.
        """
        self.pid = os.getpid()
        self.ffi = cffi.FFI()
        self.ffi.cdef(_CDEF)
        self._lib = self.ffi.dlopen(name)
        self._lock = threading.Lock()
        self._contexts: dict[int, Any] = {}
        self._is_ready = False

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that opened the driver."""
        return os.getpid() != self.pid

    def do(self, function: str, *arguments: Any) -> None:
        """Call a function of the driver; raises _Failed where it is missing, or does not return 0."""
        try:
            call = getattr(self._lib, function)
        except AttributeError:
            raise _Failed(f"the driver has no {function}; install a newer one") from None
        if code := int(call(*arguments)):
            raise _Failed(f"{function} failed with {code} ({_ERRORS.get(code, 'see cuda.h')})")

    @contextmanager
    def inside(self, ordinal: int) -> Iterator[cffi.FFI]:
        """Make a device's primary context current on this thread for a block; yields the FFI of the driver."""
        with self._lock:
            context = self._context(ordinal)
        former = self.ffi.new("void **")
        self.do("cuCtxGetCurrent", former)
        self.do("cuCtxSetCurrent", context)
        try:
            yield self.ffi
        finally:
            with suppress(_Failed):
                self.do("cuCtxSetCurrent", former[0])

    def _context(self, ordinal: int) -> Any:
        if not self._is_ready:
            self.do("cuInit", 0)
            self._is_ready = True
        count, device, context = self.ffi.new("int *"), self.ffi.new("int *"), self.ffi.new("void **")
        self.do("cuDeviceGetCount", count)
        # Virtual devices of the library share the real ones in turn.
        self.do("cuDeviceGet", device, ordinal % max(count[0], 1))
        if device[0] not in self._contexts:
            self.do("cuDevicePrimaryCtxRetain", context, device[0])
            if not self._contexts:
                atexit.register(self.close)
            self._contexts[device[0]] = context[0]
        return self._contexts[device[0]]

    def close(self) -> None:
        """Give the primary contexts back; the driver frees them when nobody has them any more."""
        with self._lock:
            devices, self._contexts = tuple(self._contexts), {}
        for device in () if self.forked else devices:
            with suppress(_Failed):
                self.do("cuDevicePrimaryCtxRelease_v2", device)


class Pin:
    """Pinned memory.

    Lifetime: until :meth:`release`, which must not come while a device copies; one that is dropped is released. The
    memory stays mapped until then. Thread: any, one at a time.
    """

    def __init__(self, driver: Driver, ordinal: int, buffer: Buffer) -> None:
        """Use :func:`pin`."""
        self._driver = driver
        self._ordinal = ordinal
        self._view: Any = None
        with driver.inside(ordinal) as ffi:
            view = ffi.from_buffer("uint8_t[]", buffer, require_writable=True)
            try:
                driver.do("cuMemHostRegister_v2", view, len(view), _PORTABLE)
            except _Failed:
                ffi.release(view)
                raise
        self._view = view
        self.n_bytes = len(view)

    @property
    def is_held(self) -> bool:
        """Whether the driver knows of it: a build that resets a device undoes what was pinned."""
        if self._view is None or self._driver.forked:
            return False
        try:
            with self._driver.inside(self._ordinal) as ffi:
                address = int(ffi.cast("uintptr_t", self._view))
                self._driver.do("cuPointerGetAttribute", ffi.new("unsigned *"), _MEMORY_TYPE, address)
        except _Failed:
            return False
        return True

    def release(self) -> None:
        """Unregister it and let the memory go; a second call does nothing."""
        view, self._view = self._view, None
        if view is None:
            return
        if not self._driver.forked:
            with suppress(_Failed), self._driver.inside(self._ordinal):
                self._driver.do("cuMemHostUnregister", view)
        self._driver.ffi.release(view)

    def __del__(self) -> None:
        if getattr(self, "_view", None) is not None:
            self.release()


_opening = threading.Lock()
_opened: Driver | str | None = None


def pin(library: Library, devices: Sequence[str], buffer: Buffer) -> Pin | str:
    """Pin memory for the devices of a placement.

    Args:
        library: the open library.
        devices: their names; none: all that the library has.
        buffer: writable memory, all of which is pinned; touched before, or this touches it. Mappings of files cannot
            be pinned; memory files (memfd) can.

    Returns:
        The pin, or in one sentence why there is none: "" where no device would gain by it.
    """
    ordinals = pinnable(library, devices)
    if not ordinals:
        return ""
    driver = _driver()
    if isinstance(driver, str):
        return driver
    try:
        return Pin(driver, next(iter(ordinals.values())), buffer)
    except _Failed as error:
        return f"memory could not be pinned: {error}"


def pinnable(library: Library, devices: Sequence[str]) -> dict[str, int]:
    """Say which devices gain by pinned memory, and the driver's number of each.

    Args:
        library: the open library.
        devices: names in any case; none: all that the library has.
    """
    wanted = {name.lower() for name in devices}
    return {
        one.name: int(one.name.removeprefix(_BACKEND))
        for one in library.devices(memory=False)
        if one.backend == _BACKEND
        and one.name.removeprefix(_BACKEND).isdecimal()
        and (not wanted or one.name.lower() in wanted)
    }


def link_gb_s(library: Library, device: str) -> dict[str, float] | None:
    """Measure what the link between pinned host memory and a device allows; takes about 0.1 s.

    Args:
        library: the open library.
        device: the device's name.

    Returns:
        "to" and "from" the device, GB/s (1e9 bytes), the median of three copies of 64 MiB each; None where the device
        does not gain by pinned memory, or it could not be measured.
    """
    ordinals = pinnable(library, (device,))
    driver = _driver() if ordinals else ""
    if isinstance(driver, str):
        return None
    (ordinal,) = ordinals.values()
    with mmap.mmap(-1, _LINK_BYTES) as block:
        try:
            memory = Pin(driver, ordinal, block)
        except _Failed:
            return None
        try:
            return _measured(driver, ordinal, block)
        except _Failed:
            return None
        finally:
            memory.release()


def _measured(driver: Driver, ordinal: int, block: mmap.mmap) -> dict[str, float]:
    with driver.inside(ordinal) as ffi, ffi.from_buffer("uint8_t[]", block) as host:
        pointer = ffi.new("unsigned long long *")
        driver.do("cuMemAlloc_v2", pointer, _LINK_BYTES)
        try:
            to = _rate(lambda: driver.do("cuMemcpyHtoD_v2", pointer[0], host, _LINK_BYTES))
            back = _rate(lambda: driver.do("cuMemcpyDtoH_v2", host, pointer[0], _LINK_BYTES))
        finally:
            driver.do("cuMemFree_v2", pointer[0])
    return {"to": to, "from": back}


def _rate(copy: Callable[[], None]) -> float:
    times = []
    for _ in range(_LINK_ROUNDS):
        started = perf_counter()
        copy()
        times.append(perf_counter() - started)
    return round(_LINK_BYTES / statistics.median(times) / 1e9, 1)


def _driver() -> Driver | str:
    """Open the driver once; the reason where there is none, or this process is a fork."""
    global _opened  # noqa: PLW0603 - the driver is the process's, so is this
    with _opening:
        if _opened is None:
            try:
                _opened = Driver(_NAME)
            except OSError as error:
                why = str(error).partition(".  ")[0]  # cffi adds where it looked
                _opened = f"memory could not be pinned: there is no CUDA driver ({why}); install it"
        if isinstance(_opened, Driver) and _opened.forked:
            return "memory could not be pinned: this process is a fork of the one that opened the CUDA driver"
        return _opened
