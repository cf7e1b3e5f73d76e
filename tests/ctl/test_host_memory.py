"""The host's memory under control groups: trees of files for what a kernel can show, and a group of our own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest import mock

import psutil
import pytest

from splitctl.host_memory import HostMemory, host_memory
from tests.rooms import House, uses

_MIB = 1024 * 1024
_MACHINE = HostMemory(64 * 1024 * _MIB, 48 * 1024 * _MIB)
_UNLIMITED = "9223372036854771712"


def _memory(root: Path, files: Mapping[str, str | int]) -> HostMemory:
    """Read the memory of a machine of 64 GiB that has these files."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    machine = psutil.virtual_memory()._replace(total=_MACHINE.total, available=_MACHINE.available)
    with mock.patch("psutil.virtual_memory", return_value=machine):
        return host_memory(root)


def _mounted(kind: str, point: str, shown: str = "/", options: str = "rw") -> str:
    return f"31 23 0:28 {shown} {point} rw,nosuid shared:9 - {kind} cgroup {options}"


def _v2(path: str, *, shown: str = "/", point: str = "/sys/fs/cgroup") -> dict[str, str | int]:
    return {"proc/self/cgroup": f"0::{path}", "proc/self/mountinfo": _mounted("cgroup2", point, shown)}


def _v1(path: str, *, shown: str = "/") -> dict[str, str | int]:
    return {
        "proc/self/cgroup": f"5:cpu,cpuacct:/elsewhere\n4:memory:{path}\n1:name=systemd:/elsewhere",
        "proc/self/mountinfo": "\n".join(
            (
                "22 1 8:1 / / rw - ext4 /dev/sda1 rw",
                _mounted("cgroup", "/sys/fs/cgroup/cpu", options="rw,cpu,cpuacct"),
                _mounted("cgroup", "/sys/fs/cgroup/memory", shown, "rw,memory"),
            )
        ),
    }


def _group2(
    folder: str, limit: str | int, used: int, *, stat: str = "anon 5", high: str | int = "max"
) -> dict[str, str | int]:
    own = {"memory.max": limit, "memory.current": used, "memory.stat": stat, "memory.high": high}
    return {f"sys/fs/cgroup{folder}/{name}": content for name, content in own.items()}


def _group1(folder: str, limit: str | int, used: int, *, stat: str = "cache 5") -> dict[str, str | int]:
    own = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}
    return {f"sys/fs/cgroup/memory{folder}/{name}": content for name, content in own.items()}


def _stat(**sizes: int) -> str:
    return "\n".join(f"{name} {n_mib * _MIB}" for name, n_mib in sizes.items())


_STAT_2 = _stat(file=300, shmem=200, active_file=30, inactive_file=60, slab_reclaimable=10)
_STAT_1 = _stat(active_file=1, inactive_file=1, total_active_file=40, total_inactive_file=60)
_HIDDEN = _stat(hierarchical_memory_limit=256)


@pytest.mark.parametrize(
    "files",
    [
        {},
        _v2("/"),
        {**_v2("/a"), **_group2("/a", "max", 700 * _MIB)},
        {**_v1("/a"), **_group1("/a", _UNLIMITED, 700 * _MIB), **_group1("", _UNLIMITED, 700 * _MIB)},
        {**_v2("/a/gone (deleted)"), **_group2("/a", "max", 5)},
        {**_v2("/a"), "sys/fs/cgroup/a/memory.max": 5},
    ],
    ids=["no groups", "the root alone", "v2 without a limit", "v1 without a limit", "gone", "no use told"],
)
def test_without_a_limit_the_machine_counts(tmp_path: Path, files: dict[str, str | int]) -> None:
    """Files that are missing limit nothing."""
    assert _memory(tmp_path, files) == _MACHINE


@pytest.mark.parametrize(
    ("files", "total", "available"),
    [
        ({**_v2("/a/b"), **_group2("/a/b", 1024 * _MIB, 600 * _MIB, stat=_STAT_2)}, 1024, 524),
        ({**_v2("/a/b"), **_group2("/a/b", "max", 5), **_group2("/a", 512 * _MIB, 500 * _MIB, stat=_STAT_2)}, 512, 112),
        (
            {
                **_v2("/a/b"),
                **_group2("/a/b", 2048 * _MIB, 2000 * _MIB),
                **_group2("/a", 4096 * _MIB, 2100 * _MIB),
                **_group2("", 1024 * _MIB, 1),
            },
            1024,
            48,
        ),
        ({**_v2("/a"), **_group2("/a", 1024 * _MIB, 24 * _MIB, high=512 * _MIB)}, 512, 488),
        ({**_v2("/a"), **_group2("/a", 100 * _MIB, 300 * _MIB)}, 100, 0),
        ({**_v1("/a/b"), **_group1("/a/b", 1024 * _MIB, 600 * _MIB, stat=_STAT_1)}, 1024, 524),
        (
            {**_v1("/a/b"), **_group1("/a/b", _UNLIMITED, 5), **_group1("/a", 512 * _MIB, 500 * _MIB, stat=_STAT_1)},
            512,
            112,
        ),
        ({**_v1("/docker/abc", shown="/docker/abc"), **_group1("", 256 * _MIB, 56 * _MIB)}, 256, 200),
        ({**_v1("/docker/abc/in", shown="/docker/abc"), **_group1("/in", 256 * _MIB, 56 * _MIB)}, 256, 200),
        (
            {**_v1("/", shown="/"), **_group1("", _UNLIMITED, 56 * _MIB, stat=_HIDDEN)},
            256,
            200,
        ),
        ({**_v2("/", shown="/../.."), **_group2("", 256 * _MIB, 56 * _MIB)}, 256, 200),
        ({**_v2("/../other"), **_group2("", 256 * _MIB, 56 * _MIB)}, 256, 200),
    ],
    ids=[
        "v2, caches count as free but shared memory does not",
        "v2, a group above",
        "v2, the least of all, each by itself",
        "v2, the limit that slows down",
        "v2, more used than allowed",
        "v1, caches count as free",
        "v1, a group above",
        "v1, a container's own mount",
        "v1, a group in a container",
        "v1, a group above that is hidden",
        "v2, a mount from before the namespace",
        "v2, a group outside the namespace",
    ],
)  # fmt: skip
def test_the_least_of_all_groups_counts(
    tmp_path: Path, files: dict[str, str | int], total: int, available: int
) -> None:
    """Of version 1 and 2, from the process's own group up, MiB."""
    assert _memory(tmp_path, files) == HostMemory(total * _MIB, available * _MIB)


def test_both_versions_at_once(tmp_path: Path) -> None:
    """A hybrid machine has its memory controller in one of the two; a mount of another group's is not ours."""
    one, two = _v1("/mine"), _v2("/mine", point="/sys/fs/cgroup/uni\\040fied")
    files: dict[str, str | int] = {name: f"{one[name]}\n{two[name]}" for name in one}
    files["proc/self/mountinfo"] = (
        f"{files['proc/self/mountinfo']}\n{_mounted('cgroup', '/other', '/other', 'rw,memory')}"
    )
    files |= _group1("/mine", 512 * _MIB, 12 * _MIB)
    limited = {"sys/fs/cgroup/uni fied/mine/memory.max": 256 * _MIB, "sys/fs/cgroup/uni fied/mine/memory.current": 0}
    other = {"other/memory.limit_in_bytes": 1, "other/memory.usage_in_bytes": 0}
    assert _memory(tmp_path / "one", {**files, **other}) == HostMemory(512 * _MIB, 500 * _MIB)
    assert _memory(tmp_path / "two", {**files, **limited}) == HostMemory(256 * _MIB, 256 * _MIB)


def test_a_machine_with_less_than_its_groups_counts_itself(tmp_path: Path) -> None:
    """Limits that are larger than the machine limit nothing."""
    files = {**_v2("/a"), **_group2("/a", 1 << 50, 1 << 30)}
    assert _memory(tmp_path, files) == _MACHINE


@contextlib.contextmanager
def _real_group(limit: int) -> Iterator[tuple[Path, Path]]:
    """Make a group with a limit and one without in it; skip where that is not allowed."""
    tops = [(Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max")]
    top, name = next((one for one in tops if (one[0] / "cgroup.procs").exists()), tops[1])
    outer = top / f"splitctl-test-{os.getpid()}"
    inner = outer / "inner"
    with contextlib.ExitStack() as stack:
        try:
            outer.mkdir()
            stack.callback(outer.rmdir)
            (outer / name).write_text(str(limit))
            if name == "memory.max":
                (outer / "cgroup.subtree_control").write_text("+memory")
            inner.mkdir()
            stack.callback(inner.rmdir)
        except OSError as error:
            pytest.skip(f"no control group with a limit can be made here: {error}")
        yield outer, inner


_CHILD = """
import json, sys, time
from pathlib import Path
from splitctl.host_memory import host_memory
from splitctl.http.devices import Devices
Path(sys.argv[1], "cgroup.procs").write_text("0")
before = host_memory()
Path(sys.argv[2]).read_bytes()
deadline = time.monotonic() + 10
while abs((cached := host_memory()).available - before.available) >= 16 << 20 and time.monotonic() < deadline:
    time.sleep(0.1)  # the kernel counts a group's files up to two seconds late
held = bytearray(b"x") * (64 << 20)
page = Devices().read({"model": {"devices": [{"name": "CPU", "kind": "cpu"}]}})
print(json.dumps([before.total, before.available, cached.available, host_memory().available, page[0]["memory_total"]]))
"""


def test_a_real_group(tmp_path: Path) -> None:
    """Its limit holds for a process in a group below; a file that was read takes nothing away, an array does."""
    file = tmp_path / "file"
    file.write_bytes(bytes(32 * _MIB))
    fd = os.open(file, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    with _real_group(512 * _MIB) as (_, inner):
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, str(inner), str(file)], capture_output=True, text=True, check=True
        )
    total, before, cached, held, on_page = json.loads(done.stdout)
    assert total == on_page == 512 * _MIB
    assert 448 * _MIB < before <= 512 * _MIB
    assert abs(cached - before) < 16 * _MIB
    assert 56 * _MIB < cached - held < 80 * _MIB


def test_nobody_asks_for_the_machines_memory_alone() -> None:
    """Planner, rules, the check of a carry and the page all count what control groups leave."""
    house = House.read(Path(__file__).parents[2])
    asks = {module.name for module in house.modules.values() for name, _ in uses(module.tree) if "virtual_mem" in name}
    assert asks == {"splitctl.host_memory"}
