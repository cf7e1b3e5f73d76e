"""Pinned memory, with a small driver in C that keeps count of what is registered and fails on request."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import cffi
import pytest

from llama_native import Device, DeviceKind, Library, Pin, link_gb_s, pin, pinnable, pinning
from tests.native.compiled import compile_library

_SOURCE = """
#include <stddef.h>
#include <string.h>
static const char *failing; static int code;
static void *starts[8]; static size_t sizes[8];
static int n_contexts, n_allocated, n_devices = 2;
static __thread void *current;
static int fails(const char *name) { return failing && !strcmp(failing, name) ? code : 0; }
#define FAIL() do { int failed = fails(__func__); if (failed) return failed; } while (0)
int cuInit(unsigned flags) { FAIL(); return 0; }
int cuDeviceGetCount(int *count) { FAIL(); *count = n_devices; return 0; }
int cuDeviceGet(int *device, int ordinal) { FAIL(); if (ordinal >= n_devices) return 101; *device = ordinal; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device)
{ FAIL(); n_contexts++; *context = (void *) (size_t) (0x100 + device); return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { n_contexts--; return 0; }
int cuCtxGetCurrent(void **context) { FAIL(); *context = current; return 0; }
int cuCtxSetCurrent(void *context) { FAIL(); current = context; return 0; }
static int find(void *start)
{ for (int i = 0; i < 8; i++) if (starts[i] == start) return i; return -1; }
int cuMemHostRegister_v2(void *start, size_t n_bytes, unsigned flags)
{
    FAIL();
    if (!current) return 201;
    if (flags != 1) return 1;
    if (find(start) >= 0) return 712;
    int i = find(0); starts[i] = start; sizes[i] = n_bytes;
    return 0;
}
int cuMemHostUnregister(void *start)
{ FAIL(); int i = find(start); if (i < 0) return 713; starts[i] = 0; sizes[i] = 0; return 0; }
int cuPointerGetAttribute(void *data, int attribute, unsigned long long pointer)
{ if (attribute != 2 || find((void *) pointer) < 0) return 1; *(unsigned *) data = 1; return 0; }
int cuMemAlloc_v2(unsigned long long *pointer, size_t n_bytes) { FAIL(); n_allocated++; *pointer = 64; return 0; }
int cuMemFree_v2(unsigned long long pointer) { n_allocated--; return 0; }
int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t n_bytes) { FAIL(); return 0; }
int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t n_bytes) { FAIL(); memset(to, 7, n_bytes); return 0; }
void play_fail(const char *name, int with) { failing = name; code = with; }
size_t play_registered(void) { size_t n = 0; for (int i = 0; i < 8; i++) n += sizes[i]; return n; }
int play_contexts(void) { return n_contexts; }
int play_allocated(void) { return n_allocated; }
void *play_current(void *next) { void *was = current; current = next; return was; }
void play_reset(void) { memset(starts, 0, sizeof starts); memset(sizes, 0, sizeof sizes); }
"""
_PLAY = """
void play_fail(const char *name, int with); size_t play_registered(void); int play_contexts(void);
int play_allocated(void); void *play_current(void *next); void play_reset(void);
"""
_SIZE = 1 << 20


class _Devices:
    """In place of a library: devices of a build for CUDA."""

    def devices(self, *, memory: bool = True) -> tuple[Device, ...]:
        assert not memory
        return tuple(
            Device(name, "", DeviceKind.GPU if backend == "CUDA" else DeviceKind.CPU, backend, 0, 0)
            for name, backend in (("CUDA0", "CUDA"), ("CUDA1", "CUDA"), ("CUDA2", "CUDA"), ("CPU", "CPU"))
        )


LIBRARY = cast("Library", _Devices())


class _Play:
    """The driver's other side: what it was told, and what it shall fail at."""

    def __init__(self, path: Path) -> None:
        self._ffi = cffi.FFI()
        self._ffi.cdef(_PLAY)
        self.lib = self._ffi.dlopen(str(path))
        self._names: list[Any] = []

    def fail(self, function: str, code: int) -> None:
        self._names.append(self._ffi.new("char[]", function.encode()))
        self.lib.play_fail(self._names[-1], code)

    @property
    def n_registered(self) -> int:
        return int(self.lib.play_registered())

    def current(self, context: int) -> int:
        """Set the thread's current context; returns the former one."""
        return int(self._ffi.cast("uintptr_t", self.lib.play_current(self._ffi.cast("void *", context))))


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Play]:
    """A driver of its own for each test, which this process takes for the system's."""
    path = compile_library(tmp_path, "libcuda", _SOURCE)
    driver = pinning.Driver(str(path))
    monkeypatch.setattr(pinning, "_opened", driver)
    yield _Play(path)
    driver.close()


def _pinned(buffer: mmap.mmap, *devices: str) -> Pin:
    found = pin(LIBRARY, devices, buffer)
    assert isinstance(found, Pin), found
    return found


def test_memory_is_registered_as_one_piece_until_it_is_released(play: _Play) -> None:
    """The whole of it, once; and the thread's context is what it was before."""
    play.current(0x77)
    block = mmap.mmap(-1, _SIZE)
    found = _pinned(block, "CUDA0")
    assert (found.n_bytes, play.n_registered, found.is_held) == (_SIZE, _SIZE, True)
    with pytest.raises(BufferError):
        block.close()  # it stays mapped as long as the driver knows of it
    found.release()
    found.release()
    assert (play.n_registered, found.is_held, play.current(0)) == (0, False, 0x77)
    block.close()


def test_a_part_of_a_mapping_can_be_pinned(play: _Play) -> None:
    """An arena maps more than it holds."""
    block = mmap.mmap(-1, 2 * _SIZE)
    found = pin(LIBRARY, (), memoryview(block)[:_SIZE])
    assert isinstance(found, Pin)
    assert play.n_registered == _SIZE


@pytest.mark.parametrize(
    ("function", "code", "told"),
    [
        ("cuInit", 100, "no device"),
        ("cuDeviceGetCount", 3, "see cuda.h"),
        ("cuDeviceGet", 101, "see cuda.h"),
        ("cuDevicePrimaryCtxRetain", 2, "not enough memory"),
        ("cuCtxGetCurrent", 3, "see cuda.h"),
        ("cuCtxSetCurrent", 201, "see cuda.h"),
        ("cuMemHostRegister_v2", 304, "ulimit -l"),
        ("cuMemHostRegister_v2", 2, "free some"),
    ],
)
def test_what_fails_is_one_line_and_leaves_the_memory_alone(play: _Play, function: str, code: int, told: str) -> None:
    """Whichever call it was, its number is told and the memory can be used and unmapped."""
    play.fail(function, code)
    block = mmap.mmap(-1, _SIZE)
    why = pin(LIBRARY, ("CUDA1",), block)
    assert isinstance(why, str)
    assert why.startswith(f"memory could not be pinned: {function} failed with {code}")
    assert told in why
    assert "\n" not in why
    block.close()


def test_a_second_registration_is_refused_and_possible_after_a_release(play: _Play) -> None:
    """The driver takes an address for registered until it is told otherwise."""
    block = mmap.mmap(-1, _SIZE)
    first = _pinned(block)
    why = pin(LIBRARY, (), block)
    assert isinstance(why, str)
    assert "712 (it is registered already)" in why
    first.release()
    assert _pinned(block).is_held
    assert play.n_registered == 0


def test_a_pin_that_is_dropped_is_released(play: _Play) -> None:
    """A session that nobody closed leaves nothing registered."""
    block = mmap.mmap(-1, _SIZE)
    found = _pinned(block)
    assert play.n_registered == _SIZE
    del found
    gc.collect()
    assert play.n_registered == 0


def test_a_reset_of_the_device_is_seen(play: _Play) -> None:
    """What the driver has forgotten is not called pinned, and its release is quiet."""
    block = mmap.mmap(-1, _SIZE)
    found = _pinned(block)
    play.lib.play_reset()
    assert not found.is_held
    found.release()
    block.close()


def test_only_devices_of_the_backend_gain() -> None:
    """Processors gain nothing, and then no driver is looked for."""
    assert pin(LIBRARY, ("CPU",), bytearray(4)) == ""
    assert list(pinnable(LIBRARY, ())) == ["CUDA0", "CUDA1", "CUDA2"]
    assert pinnable(LIBRARY, ("cuda1", "CPU")) == {"CUDA1": 1}


def test_a_system_without_a_driver_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its file's name stands in the reason, and it is looked for once."""
    monkeypatch.setattr(pinning, "_opened", None)
    monkeypatch.setattr(pinning, "_NAME", str(tmp_path / "libcuda.so.1"))
    why = pin(LIBRARY, ("CUDA0",), bytearray(4))
    assert isinstance(why, str)
    assert "there is no CUDA driver" in why
    assert "libcuda.so.1" in why
    assert "\n" not in why
    assert pin(LIBRARY, ("CUDA0",), bytearray(4)) is pinning._opened


def test_a_driver_that_lacks_a_function_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older driver is an error in words, not in the middle of a call."""
    path = compile_library(tmp_path, "libcuda", "int cuInit(unsigned flags) { return 0; }")
    monkeypatch.setattr(pinning, "_opened", pinning.Driver(str(path)))
    why = pin(LIBRARY, (), bytearray(4))
    assert isinstance(why, str)
    assert "no cuDeviceGetCount; install a newer one" in why


def test_virtual_devices_share_the_real_ones(play: _Play) -> None:
    """The third of three devices on two cards is the first card again: its context is there already."""
    first = _pinned(mmap.mmap(-1, _SIZE), "CUDA0")
    third = _pinned(mmap.mmap(-1, _SIZE), "CUDA2")
    assert play.lib.play_contexts() == 1
    second = _pinned(mmap.mmap(-1, _SIZE), "CUDA1")
    assert play.lib.play_contexts() == 2
    for one in (first, second, third):
        one.release()
    driver = pinning._opened
    assert isinstance(driver, pinning.Driver)
    driver.close()
    assert play.lib.play_contexts() == 0


def test_a_fork_calls_no_driver(play: _Play) -> None:
    """A child neither pins, nor releases what its parent has pinned."""
    found = _pinned(mmap.mmap(-1, _SIZE))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        found.release()
        why = pin(LIBRARY, (), mmap.mmap(-1, _SIZE))
        os.write(write, f"{play.n_registered} {why}".encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        told = pipe.read().decode()
    os.waitpid(child, 0)
    assert told.startswith(f"{_SIZE} memory could not be pinned: this process is a fork")
    assert found.is_held


def test_what_the_link_allows_is_measured_and_nothing_stays(play: _Play) -> None:
    """Both ways, in GB/s; memory of the device and pins are given back."""
    found = link_gb_s(LIBRARY, "CUDA0")
    assert found is not None
    assert set(found) == {"to", "from"}
    assert min(found.values()) > 0
    assert (play.n_registered, play.lib.play_allocated()) == (0, 0)


@pytest.mark.parametrize("function", ["cuInit", "cuMemHostRegister_v2", "cuMemAlloc_v2", "cuMemcpyDtoH_v2"])
def test_a_link_that_cannot_be_measured_is_none(play: _Play, function: str) -> None:
    """A full device is no fault of the session."""
    play.fail(function, 2)
    assert link_gb_s(LIBRARY, "CUDA0") is None
    assert (play.n_registered, play.lib.play_allocated()) == (0, 0)


def test_a_link_to_a_processor_is_none() -> None:
    """There is none."""
    assert link_gb_s(LIBRARY, "CPU") is None
