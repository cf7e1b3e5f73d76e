"""Asks a library what it would allocate, in a child, which may die of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from splitctl.errors import DeadlineExceeded, WorkerLost
from splitctl.host_memory import host_memory
from splitctl.ipc.jobs import Failure, Fault, RequestFailed, ReserveRequest
from splitctl.ipc.process import run_job
from splitctl.last_words import telling_line
from splitctl.placement import Placement
from splitctl.planning.backends import unit_of
from splitctl.planning.fitting import HOST_POOL
from splitctl.planning.memory import DeviceFacts
from splitctl.planning.reservation import Reservation

#: A dry run that says nothing for so long hangs [seconds]; it reads a header, and loads nothing.
DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Reserved:
    """What a dry run found.

    Attributes:
        reservations: what the library would take, one a size; empty where it cannot say.
        why: why there are none, or fewer than sizes; empty when there are all.
        library: path, version, max_devices, can_reserve, has_nccl and devices, as the child reports them.
    """

    reservations: tuple[Reservation, ...]
    why: str
    library: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reserver:
    """Plans buffers of one model with one library, each placement in a child of its own.

    Attributes:
        model: the GGUF.
        library: the library file, or None to look for one.
        env: the environment of the children.
        rpc: RPC servers whose devices are added, HOST:PORT each.
        deadline_s: longest silence of a child, seconds.
    """

    model: Path
    library: Path | None
    env: Mapping[str, str] = field(repr=False)
    rpc: tuple[str, ...] = ()
    deadline_s: float = DEADLINE_S

    def __call__(self, placement: Placement, sizes: Sequence[tuple[int, int, int]] = ()) -> Reserved:
        """Plan contexts of several sizes in one placement.

        Args:
            placement: the placement; the sizes of its context are replaced.
            sizes: context, batch and micro-batch of each, tokens; none: ask for the library alone.

        Raises:
            RequestFailed: no library can be used.
        """
        why = ""
        request = ReserveRequest(self.model, self.library, placement, tuple(sizes), self.rpc)
        end = run_job(request, env=self.env, deadline_s=self.deadline_s)
        library: Mapping[str, Any] = end.body.get("library", {})
        match end.error:
            case WorkerLost() as lost:
                why = f"the dry run {lost.how}: {telling_line(lost.log_tail) or 'it said nothing'}"
            case DeadlineExceeded() as lost:
                why = f"the dry run hangs: {lost}"
            case Failure() as failure if not library:
                raise RequestFailed(Fault.LIBRARY, failure.name, failure.message)
            case Failure(Fault.INTERNAL, name, message):
                why = f"{name}: {message}"
            case Failure() as failure:
                why = failure.message
        if not library:
            raise RequestFailed(Fault.LIBRARY, "WorkerLost", f"{why}; splitctl doctor shows the library")
        found = tuple(Reservation.from_json(one) for one in end.body["reservations"])
        if sizes and not library["can_reserve"]:
            why = f"{library['version']} cannot plan without loading"
        elif len(found) < len(sizes) and not why:
            why = f"the library refused {len(sizes) - len(found)} of {len(sizes)} sizes"
        return Reserved(found, why, library)


def devices_told(told: Mapping[str, Any], placement: Placement, free: Mapping[str, int]) -> tuple[DeviceFacts, ...]:
    """Put together the devices that are there and those that are only named.

    NCCL takes real devices alone.  Source: ggml_backend_cuda_comm_init_nccl in ggml-cuda.cu.

    Args:
        told: `Reserved.library`.
        placement: its devices are there, or named.
        free: bytes that are free on some by name, the host too, in place of what the library says.

    Returns:
        The devices, and the host last.
    """
    host = free.get(HOST_POOL, free.get("CPU", host_memory().available))
    found = [
        DeviceFacts(
            name=one["name"],
            kind=one["kind"],
            free=free.get(one["name"], host if one["kind"] == "cpu" else one["memory_free"]),
            total=one["memory_total"],
            address=one["description"] if one["name"].startswith("RPC") else "",
            unit=unit_of(one["description"]),
            by_nccl=told["has_nccl"] and one["backend"].startswith("CUDA") and not unit_of(one["description"]),
        )
        for one in told["devices"]
    ]
    names = {device.name for device in found}
    found += [DeviceFacts(name, "gpu", free[name]) for name in free if name not in names and name != HOST_POOL]
    found += [DeviceFacts(name) for name in dict.fromkeys(placement.devices) if name not in names and name not in free]
    return (*found, DeviceFacts(HOST_POOL, "cpu", host))
