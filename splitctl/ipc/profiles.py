"""What `bench` measured, kept between runs: one file for each thing that a time depends on.

Laws:
    1. A profile holds for its key alone: weights, build, devices, and how the model lies and computes there.
    2. A file is written whole beside its place and renamed; one that cannot be read counts as none, and says so.
    3. What is kept and does not hold any more is never given for what does: the answer names what has changed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import re
import shlex
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Self

from splitctl.engine.engine import resolve_threads
from splitctl.errors import BadModelFile, ConfigInvalid, FileChanged
from splitctl.ipc.wire import LATER, MessageInvalid, from_object, line_of, object_of, to_object
from splitctl.model.facts import ModelFacts
from splitctl.model.identity import model_digest
from splitctl.placement import FlashAttn, Placement
from splitctl.places import cache_folder
from splitctl.planning.merging import merged
from splitctl.planning.profile import Profile
from splitctl.probing.verdicts import build_id

#: No profile is of a later time: the end of the year 9998 [seconds since 1970].
_MAX_TIME = 253_370_764_800.0
#: A longer file is no profile [bytes].
_MAX_BYTES = 16 * 1024 * 1024

_NVIDIA = Path("/proc/driver/nvidia")
_MODULE_VERSIONS = {"amdgpu": Path("/sys/module/amdgpu/version"), "xe": Path("/sys/module/xe/version")}
_CPUINFO = Path("/proc/cpuinfo")
_MODEL_NAME = re.compile(r"^(?:model name|Model):?\s*:\s*(.+)$", re.MULTILINE)

#: What each part of a key is called where it differs.
_WORDS = {
    "model": "weights",
    "build": "library build",
    "devices": "devices",
    "tensor_split": "tensor split",
    "cache_types": "cache types",
    "offload_kqv": "place of the cache",
    "flash_attn": "flash attention",
    "rpc": "RPC servers",
    "n_gpu_layers": "layers on devices",
    "threads": "threads",
}


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """Everything that what was measured depends on, beside the mode, the batch sizes and the number of sequences.

    Attributes:
        model: digest of the model's files, weights included, 32 hex digits.
        build: which library, to the byte.
        devices: names of the devices, in order.
        tensor_split: shares of the devices, summing to one; None: the library's default.
        cache_types: types of keys and values.
        offload_kqv: whether the cache is on the devices.
        flash_attn: on or off; what is left to the library counts as on, which it chooses wherever it can.
        rpc: the servers behind RPC devices.
        n_gpu_layers: layers on devices; -1 for all.
        threads: for single tokens, and for batches.
    """

    model: str
    build: str
    devices: tuple[str, ...]
    tensor_split: tuple[float, ...] | None
    cache_types: tuple[str, ...]
    offload_kqv: bool
    flash_attn: FlashAttn
    rpc: tuple[str, ...] = ()
    n_gpu_layers: int = -1
    threads: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        library: Path,
        facts: ModelFacts,
        placement: Placement,
        device_names: Sequence[str] = (),
        rpc: tuple[str, ...] = (),
    ) -> Self:
        """Collect what a time depends on.

        Args:
            library: the library file.
            facts: what the model's header says.
            placement: the placement; its mode, context, batches and sequences do not count.
            device_names: the devices behind a placement that names none.
            rpc: the RPC servers in use, HOST:PORT each.

        Raises:
            BadModelFile, FileChanged: a file of the model cannot be read, or is being written to.
        """
        plain = resolve_threads(placement).normalise()
        return cls(
            model=model_digest(facts.files),
            build=build_id(library),
            devices=plain.devices or tuple(device_names),
            tensor_split=plain.tensor_split,
            cache_types=(plain.type_k, plain.type_v),
            offload_kqv=plain.offload_kqv,
            flash_attn=FlashAttn.OFF if plain.flash_attn is FlashAttn.OFF else FlashAttn.ON,
            rpc=rpc,
            n_gpu_layers=plain.n_gpu_layers,
            threads=(plain.n_threads, plain.n_threads_batch),
        )

    @property
    def file_name(self) -> str:
        """Name the file that a profile of this key is kept in."""
        told = json.dumps(to_object(self, _KINDS))
        return f"{hashlib.sha256(told.encode()).hexdigest()[:24]}.json"

    def differs(self, other: ProfileKey) -> tuple[str, ...]:
        """Name the fields in which another key differs, in the order of the class."""
        return tuple(name for name in _WORDS if getattr(self, name) != getattr(other, name))


@dataclass(frozen=True, slots=True)
class KeptProfile:
    """A profile as it is kept.

    Attributes:
        key: what it holds for.
        profile: what was measured.
        made_at: when, seconds since 1970 (UTC).
        library_version: the build, as the library says it.
        driver: what drives the devices, as `driver_text` gave it.
        model_path: the GGUF, as it was named.
        model_name: what the model calls itself.
        splitctl_version: of splitctl.
        cuts: what was left out of the measurements for want of time, one phrase each.
        older_at: when the oldest part of it was measured, where parts are older, seconds since 1970; 0: none is.
    """

    key: ProfileKey
    profile: Profile
    made_at: float
    library_version: str
    driver: str
    model_path: Path
    model_name: str
    splitctl_version: str
    cuts: tuple[str, ...] = field(default=(), metadata=LATER)
    older_at: float = field(default=0.0, metadata=LATER)

    def __post_init__(self) -> None:
        for name in ("made_at", "older_at"):
            if not 0.0 <= getattr(self, name) <= _MAX_TIME:
                raise ConfigInvalid(name, getattr(self, name), "seconds since 1970")

    @property
    def on_processors(self) -> bool:
        """Whether processors compute, which all workers share."""
        return self.key.n_gpu_layers == 0 or all(name.startswith("CPU") for name in self.key.devices)


_KINDS = {"profile": KeptProfile, "key": ProfileKey}


@dataclass(frozen=True, slots=True)
class Found:
    """What a look for a profile came to.

    Attributes:
        kept: the profile that holds here; None without one.
        why: what is missing or has changed, and the command that measures it, one sentence; empty with `kept`.
        stale: the nearest one that is kept for this model and does not hold here; None with `kept`, or without one.
    """

    kept: KeptProfile | None
    why: str = ""
    stale: KeptProfile | None = None


def profiles_folder() -> Path:
    """Name the folder of kept profiles, in the user's cache folder; it may not exist."""
    return cache_folder() / "profiles"


def keep(kept: KeptProfile, folder: Path | None = None) -> Path:
    """Keep a profile in place of an earlier one of its key; returns its file. Any process, at any time.

    Args:
        kept: the profile.
        folder: where; None: in the user's cache folder. It is made.

    Raises:
        OSError: it cannot be written; what was there is still there.
    """
    folder = profiles_folder() if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / kept.key.file_name
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(line_of(to_object(kept, _KINDS)))
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path


def with_kept(kept: KeptProfile, folder: Path | None = None) -> tuple[KeptProfile, str]:
    """Put a new profile together with what is kept of the same key and still holds; any process.

    Args:
        kept: the new one.
        folder: where profiles are kept; None: in the user's cache folder.

    Returns:
        What to keep, and what of it is earlier, for a person; empty where nothing is.
    """
    try:
        old = _read((profiles_folder() if folder is None else folder) / kept.key.file_name)
    except MessageInvalid:
        return kept, ""
    if old is None or old.driver != kept.driver:
        return kept, ""
    whole, stays = merged(kept.profile, old.profile)
    if not stays:
        return dataclasses.replace(kept, profile=whole), ""
    # What was cut of one may be in the other.
    cuts = tuple(one for one in kept.cuts if one in old.cuts)
    older_at = old.older_at or old.made_at
    return dataclasses.replace(
        kept, profile=whole, cuts=cuts, older_at=older_at
    ), f"{', '.join(stays)} of {day_of(old)}"


def look_up(
    library: Path,
    facts: ModelFacts,
    placement: Placement,
    device_names: Sequence[str] = (),
    rpc: tuple[str, ...] = (),
    folder: Path | None = None,
) -> Found:
    """Look for the profile of a model as it would lie and compute now.

    Args:
        library: the library file in use.
        facts: what the model's header says.
        placement: where and how; its mode, context, batches and sequences do not count.
        device_names: the devices behind a placement that names none.
        rpc: the RPC servers in use, HOST:PORT each.
        folder: where profiles are kept; None: in the user's cache folder.

    Returns:
        The profile, or why there is none. Never raises for a file that is missing or damaged.
    """
    folder = profiles_folder() if folder is None else folder
    way = _command(facts, placement, rpc)
    try:
        key = ProfileKey.of(library, facts, placement, device_names, rpc)
    except (BadModelFile, FileChanged) as error:
        return Found(None, f"the model cannot be told from others: {error}")
    # What is left to the library is on wherever it can be, and off where it cannot.
    flashes = (FlashAttn.ON, FlashAttn.OFF) if placement.flash_attn is FlashAttn.AUTO else (key.flash_attn,)
    damaged = ""
    for flash in flashes:
        path = folder / dataclasses.replace(key, flash_attn=flash).file_name
        try:
            kept = _read(path)
        except MessageInvalid as error:
            damaged = f"the profile in {path} is damaged ({error})"
            continue
        if kept is None:
            continue
        if kept.driver == (driver := driver_text()):
            return Found(kept)
        changed = f"the driver is {driver or 'none'} now, and was {kept.driver or 'none'}"
        return Found(None, f"the profile of {day_of(kept)} is stale: {changed}; measure again: {way}", kept)
    if damaged:
        return Found(None, f"{damaged}; measure again: {way}")
    near = min(_of_model(folder, key, facts), key=lambda one: (len(key.differs(one.key)), -one.made_at), default=None)
    if near is None:
        return Found(None, f"{facts.name} has not been measured here; measure it: {way}")
    changed = "; ".join(_change(name, key, near) for name in key.differs(near.key))
    return Found(None, f"the profile of {day_of(near)} does not hold here: {changed}; measure it: {way}", near)


def day_of(kept: KeptProfile) -> str:
    """Say from which day and build a profile is, for a person."""
    parts = f", parts from {_minute(kept.older_at)}" if kept.older_at else ""
    return f"{_minute(kept.made_at)}{parts} ({kept.library_version})"


def _minute(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M}"


def driver_text() -> str:
    """Say what computes here and what drives it: the processor, GPUs' drivers and models; nothing of what is absent.

    Read from /proc and /sys, so it takes no library and less than a millisecond.
    """
    told = [_processor()]
    version = re.search(r"Kernel Module.*?(\d+\.\d[\d.]*)", _text(_NVIDIA / "version"))
    if version:
        told.append(f"NVIDIA {version[1]}")
    for number, one in enumerate(sorted(_NVIDIA.glob("gpus/*/information"))):
        model = _MODEL_NAME.search(_text(one))
        told.append(f"GPU {number} {model[1].strip() if model else 'unknown'}")
    told += [f"{name} {text}" for name, path in _MODULE_VERSIONS.items() if (text := _text(path).strip())]
    return ", ".join(one for one in told if one)


def _processor() -> str:
    model = _MODEL_NAME.search(_text(_CPUINFO))
    return model[1].strip() if model else platform.machine()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read(path: Path) -> KeptProfile | None:
    """Read a kept profile; None without a file; MessageInvalid for one that is damaged."""
    try:
        # Not to be waited for, should it be a pipe.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise MessageInvalid("", "no regular file", "a file that can be read")
            raw = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise MessageInvalid("", error.strerror or str(error), "a file that can be read") from error
    kept = from_object(object_of(raw, max_bytes=_MAX_BYTES), _KINDS)
    if not isinstance(kept, KeptProfile) or kept.key.file_name != path.name:
        raise MessageInvalid("key", "of another profile", "the one that its name says")
    return kept


def _of_model(folder: Path, key: ProfileKey, facts: ModelFacts) -> Iterator[KeptProfile]:
    """Give what is kept of the same weights, or of other ones in the same place."""
    for path in sorted(folder.glob("*.json")):
        try:
            kept = _read(path)
        except MessageInvalid:
            continue
        if kept is not None and (kept.key.model == key.model or kept.model_path.absolute() == facts.path.absolute()):
            yield kept


def _change(name: str, now: ProfileKey, kept: KeptProfile) -> str:
    """Say one thing that differs."""
    if name == "model":
        return "the model's file holds other weights now"
    if name == "build":
        return f"the library is another build than {kept.library_version}"
    return f"its {_WORDS[name]} {_shown(getattr(kept.key, name))}, not {_shown(getattr(now, name))}"


def _shown(value: object) -> str:
    match value:
        case tuple():
            return ",".join(one if isinstance(one, str) else f"{one:g}" for one in value) or "none"
        case FlashAttn():
            return value.value
        case bool():
            return "on the devices" if value else "on the host"
        case _:
            return "the default" if value is None else str(value)


def _command(facts: ModelFacts, placement: Placement, rpc: tuple[str, ...]) -> str:
    """Give the command line that measures a model as it would lie."""
    plain = Placement()
    flags = placement.changed(
        mode=placement.mode, n_ctx=0, n_batch=plain.n_batch, n_ubatch=plain.n_ubatch, n_seq_max=1, kv_unified=False
    ).describe()
    flags = re.sub(r"^-sm \w+ ?", "", flags)
    words = ["splitctl bench -m", shlex.quote(str(facts.path)), flags, f"--rpc {','.join(rpc)}" if rpc else ""]
    return " ".join(one for one in words if one)
