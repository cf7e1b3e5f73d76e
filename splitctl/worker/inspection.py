"""What a library is and what it offers: the work behind `devices` and `doctor`."""

from __future__ import annotations

import mmap
import platform
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from llama_native import Device, DeviceKind, Library, discover
from llama_native.capabilities import CAPABILITIES
from splitctl.host_memory import host_memory
from splitctl.ipc.jobs import DoctorRequest, JobEvent, Partial, Progress, ReserveRequest
from splitctl.ipc.probes import verdicts_file
from splitctl.model.facts import read_facts
from splitctl.model.identity import model_digest
from splitctl.probing import VerdictCache, build_id, can_reserve, reserve
from splitctl.probing.verdicts import shape_of

_ENV_PREFIXES = ("GGML_", "LLAMA_", "CUDA_", "HIP_", "ROCR_", "NCCL_", "VK_", "GPU_DEVICE_ORDINAL", "OMP_")

#: Variables that change what a library computes or where it puts things, and what they do.
_ENV_EFFECTS: Mapping[str, str] = {
    "GGML_CUDA_DEVICES": "it splits real GPUs into virtual ones, which share their memory: sizes do not add up",
    "GGML_CUDA_ENABLE_UNIFIED_MEMORY": "a model that does not fit spills to host memory instead of failing",
    "LLAMA_ATTN_ROT_DISABLE": "quantized caches are stored unrotated and do not mix with those of other runs",
    "CUDA_LAUNCH_BLOCKING": "every kernel waits for the one before: slow",
}


def list_devices(library: Library) -> dict[str, Any]:
    """List the devices; keys library and devices."""
    return {"library": str(library.path), "devices": [device_body(one) for one in library.devices()]}


def examine(request: DoctorRequest, env: Mapping[str, str], emit: Callable[[JobEvent], None]) -> dict[str, Any]:
    """Say which library is used in an environment and why, and what it can do.

    What is known is emitted before the library is opened, in case that ends the process.

    Returns:
        Keys splitctl, python, system, candidates, environment, warnings, library, devices; with a model own_call, what
        earlier trials came to.

    Raises:
        NativeError: no library can be used.
        BadModelFile: the model is no GGUF.
    """
    body: dict[str, Any] = {
        "splitctl": _version(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "candidates": [
            {
                "path": str(one.path),
                "origin": one.origin,
                "usable": one.usable,
                "verdict": one.reason,
                "version": one.version,
            }
            for one in discover.candidates(env, explicit=request.library)
        ],
        "environment": {name: value for name, value in sorted(env.items()) if name.startswith(_ENV_PREFIXES)},
        "warnings": [
            _warning("environment", f"{name} is set: {effect}") for name, effect in _ENV_EFFECTS.items() if name in env
        ],
    }
    emit(Partial(dict(body)))
    library = Library.open(request.library, env=env)
    body["library"] = _library(library)
    emit(Partial(dict(body)))
    library.add_rpc_servers(request.rpc)
    devices = library.devices()
    body["devices"] = [device_body(one) for one in devices]
    body["warnings"] += _warnings(library, devices)
    if request.model is not None:
        body["own_call"] = _own_calls(library, request.model)
    return body


def _own_calls(library: Library, model: Path) -> list[dict[str, Any]]:
    """Say what is known of the library's own call for a model; nothing is tried."""
    if not library.has("native-switch"):
        return []
    facts = read_facts(model)
    cache = VerdictCache(verdicts_file())
    return list(cache.own_calls(build_id(library.path), shape_of(facts), lambda: model_digest(facts.files)))


def _version() -> str:
    """Give the version that is installed; a checkout on PYTHONPATH has none."""
    try:
        return metadata.version("splitctl")
    except metadata.PackageNotFoundError:
        return "not installed"


def reserve_buffers(request: ReserveRequest, library: Library, emit: Callable[[JobEvent], None]) -> dict[str, Any]:
    """Report the library and its devices, and what contexts would take; keys library and reservations.

    What is known is emitted before the library plans, in case that ends the process.

    Raises:
        NativeError: the library refuses the placement.
    """
    body: dict[str, Any] = {
        "library": {
            "path": str(library.path),
            "version": library.version,
            "max_devices": library.max_devices,
            "can_reserve": can_reserve(library),
            "has_nccl": _has_nccl(),
            "devices": [device_body(one) for one in library.devices()],
        },
        "reservations": [],
    }
    emit(Partial(dict(body)))
    if request.sizes and can_reserve(library):
        found = reserve(
            library, str(request.model), request.placement, request.sizes, on_stage=lambda stage: emit(Progress(stage))
        )
        body["reservations"] = [one.to_json() for one in found]
    return body


def _library(library: Library) -> dict[str, Any]:
    profile = library.profile
    return {
        "path": str(library.path),
        "origin": library.origin,
        "version": library.version,
        "build": library.build,
        "profile": profile.name,
        "capabilities": sorted(library.capabilities),
        "missing": sorted(set(CAPABILITIES) - set(library.capabilities)),
        "facts": {
            "layout_seen_in": list(profile.seen_in),
            "switches_by_itself": library.has("native-switch"),
            "most_devices": library.max_devices,
            "backends_from": list(library.backend_folders) or "linked in",
            "processor": library.system_info(),
        },
    }


def device_body(device: Device) -> dict[str, Any]:
    """Describe a device; sizes in bytes, null where the library does not say. A processor has the host's memory."""
    free, total = device.memory_free, device.memory_total
    if device.kind is DeviceKind.CPU:
        memory = host_memory()
        free, total = memory.available, memory.total
    return {
        "name": device.name,
        "description": device.description,
        "kind": device.kind.name.lower() if device.kind is not None else "unknown",
        "backend": device.backend,
        "memory_free": free if total else None,
        "memory_total": total or None,
    }


def _warning(code: str, text: str) -> dict[str, str]:
    return {"code": code, "text": text}


def _warnings(library: Library, devices: tuple[Device, ...]) -> Iterator[dict[str, str]]:
    if not library.profile.seen_in:
        text = "its struct layouts lie between those of two known builds: report it if anything goes wrong"
        yield _warning("layout-between", text)
    gpus = [one for one in devices if one.kind in {DeviceKind.GPU, DeviceKind.IGPU}]
    if not gpus:
        text = "this build offers no GPU: models run on the processor (name a device twice, CPU,CPU, to try a switch)"
        yield _warning("no-gpu", text)
    cuda = [one for one in gpus if one.backend.startswith(("CUDA", "ROCm"))]
    if len(cuda) > 1 and not _has_nccl():
        text = (
            f"{len(cuda)} GPUs and a build without NCCL: the devices of a tensor split exchange data without it, which "
            "is slower; use a build made with NCCL"
        )
        yield _warning("no-nccl", text)


def _has_nccl() -> bool:
    """Tell whether NCCL is in this process: as a library of its own, or linked into a backend."""
    with Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as maps:
        mapped = {parts[5].strip() for line in maps if len(parts := line.split(None, 5)) == 6}
    files = [Path(name) for name in mapped if name.startswith("/")]
    if any("nccl" in file.name for file in files):
        return True
    return any(_holds(file, b"ncclCommInit") for file in files if "ggml" in file.name or "llama" in file.name)


def _holds(file: Path, needle: bytes) -> bool:
    try:
        with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as view:
            return view.find(needle) >= 0
    except (OSError, ValueError):
        # It was replaced or removed after it was mapped.
        return False
