"""The host's memory: the least of the machine's and of every control group's that this process is in.

A container, a service and a user's slice have limits of their own, and so may every group above them. What a group has
in caches that the kernel can drop counts as free, as it does for the machine.
Source: cgroup-v2.rst and cgroup-v1/memory.rst of the kernel, proc_pid_mountinfo(5).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

import psutil

#: Files with a limit, the file with what is used, and what of memory.stat can be dropped, by file system type.
_FILES = {
    "cgroup2": (
        ("memory.max", "memory.high"),
        "memory.current",
        ("active_file", "inactive_file", "slab_reclaimable"),
    ),
    "cgroup": (
        ("memory.limit_in_bytes",),
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
}
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory that this process can have.

    Attributes:
        total: in all, bytes.
        available: without making anything swap, bytes.
    """

    total: int
    available: int


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Read the memory of the machine and of every control group of this process.

    Args:
        root: where proc and the control groups are looked for.
    """
    machine = psutil.virtual_memory()
    found = [HostMemory(machine.total, machine.available)]
    lines = (tuple(_lines(root / "proc/self" / name)) for name in ("cgroup", "mountinfo"))
    for kind, folder in _groups(root, *lines):
        group = _group(kind, folder)
        if group is not None:
            found.append(group)
    return HostMemory(min(one.total for one in found), min(one.available for one in found))


@lru_cache(maxsize=4)  # asked again and again, and the files that it comes from hardly ever change
def _groups(root: Path, of_process: tuple[str, ...], mounts: tuple[str, ...]) -> tuple[tuple[str, Path], ...]:
    """Give the folders of this process's groups, each hierarchy from its group up, with the file system's type."""
    found: list[tuple[str, Path]] = []
    paths: dict[str, PurePosixPath] = {}
    for line in of_process:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            paths["cgroup2"] = PurePosixPath(path)
        elif "memory" in controllers.split(","):
            paths["cgroup"] = PurePosixPath(path)
    for line in mounts:
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind not in paths or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        shown, point = (PurePosixPath(_plain(one)) for one in before.split()[3:5])
        top = root / point.relative_to("/")
        below = _below(paths[kind], shown)
        found.extend((kind, top / part) for part in (() if below is None else (below, *below.parents)))
    return tuple(found)


def _below(path: PurePosixPath, shown: PurePosixPath) -> PurePosixPath | None:
    """Tell where a group is in a mount; the mount's own group where a namespace hides it, None where it is not there.

    Args:
        path: of the group, in its hierarchy.
        shown: the group that the mount shows as its root.
    """
    if ".." in path.parts or ".." in shown.parts:
        return PurePosixPath()
    return path.relative_to(shown) if path.is_relative_to(shown) else None


def _group(kind: str, folder: Path) -> HostMemory | None:
    """Read one group; None where it has no limit, or no memory to count."""
    limit_files, usage_file, droppable = _FILES[kind]
    limits = [n for name in limit_files if (n := _number(folder / name)) is not None]
    used = _number(folder / usage_file)
    if not limits or used is None:
        return None
    stat = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat"))
    # A limit of a version 1 group that a namespace hides is told here alone.
    limit = min(*limits, int(stat.get("hierarchical_memory_limit", limits[0])))
    held = used - sum(int(stat.get(name, 0)) for name in droppable)
    return HostMemory(limit, max(limit - max(held, 0), 0))


def _number(path: Path) -> int | None:
    """Read a file of one number; None where it is not there or says "max"."""
    text = "".join(_lines(path))
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    """Read a file; no lines where it cannot be read: a group may end at any time."""
    try:
        with path.open("rb", buffering=0) as file:  # a switch reads a dozen of them, twice
            return file.read().decode(errors="surrogateescape").splitlines()
    except OSError:
        return []


def _plain(text: str) -> str:
    """Undo the escapes of mountinfo."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), text)
