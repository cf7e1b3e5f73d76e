"""Watches memory while something runs: of GPUs by the driver's own count, of processors by what stays resident.

Devices of a library are grouped by the memory that they really have: two virtual devices of one GPU (GGML_CUDA_DEVICES)
are one group, and so are processors that are named twice.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import psutil

from splitctl.placement import FlashAttn, Placement, SplitMode

#: Twenty looks a second.
PERIOD_S = 0.05
HOST = "host"
#: How the library marks a virtual device.  Source: ggml_cuda_device_description in ggml-cuda.cu.
_VIRTUAL = re.compile(r"\(dev p(\d+)/v\d+\)$")


class _Memory(ctypes.Structure):
    """Source: nvml.h, nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Driver:
    """The NVIDIA driver's management library.

    Thread: any. Lifetime: the process; while it is open the driver stays initialised.
    """

    def __init__(self) -> None:
        """Open it.

        Raises:
            OSError: there is none, or it finds no driver.
        """
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._check(self._library.nvmlInit_v2(), "nvmlInit_v2")

    def used(self, index: int) -> int:
        """What is in use on a GPU, by all processes, bytes; GPUs count in the order of their PCI address."""
        return int(self._memory(index).used)

    def free(self, index: int) -> int:
        """What is free on a GPU, bytes."""
        return int(self._memory(index).free)

    def _memory(self, index: int) -> _Memory:
        handle, memory = ctypes.c_void_p(), _Memory()
        self._check(self._library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)), "a GPU's handle")
        self._check(self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)), "a GPU's memory")
        return memory

    def version(self) -> str:
        """The driver's version."""
        text = ctypes.create_string_buffer(80)
        self._check(self._library.nvmlSystemGetDriverVersion(text, 80), "the driver's version")
        return text.value.decode()

    def name(self, index: int) -> str:
        """A GPU's name."""
        handle, text = ctypes.c_void_p(), ctypes.create_string_buffer(96)
        self._check(self._library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)), "a GPU's handle")
        self._check(self._library.nvmlDeviceGetName(handle, text, 96), "a GPU's name")
        return text.value.decode()

    def _check(self, code: int, what: str) -> None:
        if code:
            raise OSError(code, f"the driver's management library gives no {what}: error {code}")


@dataclass(frozen=True, slots=True)
class Setup:
    """What is measured on.

    Args:
        library: the libllama.
        devices: two devices, by the library's names.
        groups: the memory that each has, in the same order.
        driver: the GPUs' driver; None where all devices are processors.
        version: of the library.
    """

    library: Path
    devices: tuple[str, ...]
    groups: tuple[str, ...]
    driver: Driver | None
    version: str

    def place(self, mode: SplitMode, n_ctx: int, n_ubatch: int) -> Placement:
        """Make a placement."""
        return Placement(
            mode=mode, devices=self.devices, n_ctx=n_ctx, n_ubatch=n_ubatch, n_batch=max(2048, n_ubatch),
            flash_attn=FlashAttn.ON,
        )  # fmt: skip

    def session(self, model: Path, placement: Placement) -> dict[str, Any]:
        """What a child's job says of a session."""
        return {"model": str(model), "library": str(self.library), "placement": placement.to_json()}


def group_of(name: str, description: str, visible: Sequence[int]) -> str:
    """Name the memory that a device has.

    Args:
        name: the library's, such as CUDA1.
        description: the library's.
        visible: GPUs that the library sees, by the driver's index; empty: all.

    Returns:
        "gpu" and the driver's index, or "host".
    """
    virtual = _VIRTUAL.search(description)
    if not name.startswith("CUDA"):
        return HOST
    index = int(virtual[1]) if virtual else int(name.removeprefix("CUDA"))
    return f"gpu{visible[index] if index < len(visible) else index}"


def visible_gpus(env: Mapping[str, str]) -> tuple[int, ...]:
    """Read which GPUs a library will see; empty for all."""
    parts = [part.strip() for part in env.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return tuple(int(part) for part in parts if part.isdigit())


@dataclass(frozen=True, slots=True)
class Watched:
    """What was seen of a group while something ran.

    Args:
        before: bytes in use before it.
        peak: most bytes in use, at any look.
        looks: how often it was looked at.
        last: bytes in use at the last look, when it was over.
    """

    before: int
    peak: int
    looks: int
    last: int

    @property
    def taken(self) -> int:
        """What it took at most, bytes."""
        return self.peak - self.before


class Meter:
    """Looks at the memory of some groups again and again.

    Thread: the looks are made in one of its own, between `__enter__` and `__exit__`; `looked` is set after each.
    """

    def __init__(self, groups: Sequence[str], driver: Driver | None) -> None:
        """Watch these groups; without a driver "host" alone."""
        self._readers: dict[str, Callable[[], int]] = {}
        for group in dict.fromkeys(groups):
            if group == HOST:
                self._readers[group] = _resident_children
            elif driver is not None:
                self._readers[group] = partial(driver.used, int(group.removeprefix("gpu")))
        self.seen: dict[str, Watched] = {}
        self.looked = threading.Event()

    def __enter__(self) -> Self:
        self._ended = threading.Event()
        self.seen = {group: Watched(now, now, 1, now) for group, now in self._look().items()}
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._note()

    def _look(self) -> dict[str, int]:
        return {group: read() for group, read in self._readers.items()}

    def _watch(self) -> None:
        while not self._ended.wait(PERIOD_S):
            self._note()
            self.looked.set()

    def _note(self) -> None:
        for group, now in self._look().items():
            was = self.seen[group]
            self.seen[group] = Watched(was.before, max(was.peak, now), was.looks + 1, now)


def _resident_children() -> int:
    """Sum what the children of this process keep resident, bytes."""
    total = 0
    for child in psutil.Process(os.getpid()).children(recursive=True):
        try:
            total += child.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total
