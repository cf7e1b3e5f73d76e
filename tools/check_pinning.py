"""Pin memory for the devices of a library as a session does, and say what came of it.

    python -m tools.check_pinning [--json] [--mib N] [--devices CUDA0,CUDA1] [--lib PATH]

For memory of one process and for a memory file: how long it takes to touch and pin, whether the driver knows of it,
what it says of a second registration, and whether it can be pinned again after it was let go. For each device what its
link allows, GB/s.

Exit code 0: all of it was as it should be, or no device gains by pinned memory, which is said; 1: something was not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from llama_native import Library, link_gb_s, pin, pinnable
from splitctl.carry.arena import Arena

_MIB = 1 << 20


def check(library: Library, devices: tuple[str, ...], n_bytes: int) -> dict[str, Any]:
    """Pin and let go; returns what was seen, under ``failures`` what is wrong."""
    found: dict[str, Any] = {"devices": list(pinnable(library, devices)), "failures": []}
    if not found["devices"]:
        return found
    found["link_gb_s"] = {name: link_gb_s(library, name) for name in found["devices"]}
    found["failures"] += [f"no link of {name}" for name, link in found["link_gb_s"].items() if link is None]
    fd = os.memfd_create("check_pinning")
    try:
        for kind, arena in (("private", Arena()), ("memory_file", Arena(fd))):
            found[kind] = _arena(library, devices, arena, n_bytes)
            found["failures"] += [f"{kind}: {one}" for one in found[kind].pop("failures")]
    finally:
        os.close(fd)
    return found


def _arena(library: Library, devices: tuple[str, ...], arena: Arena, n_bytes: int) -> dict[str, Any]:
    arena.pinner = lambda memory: pin(library, devices, memory)
    started = perf_counter()
    block = arena.ahead(n_bytes)
    found: dict[str, Any] = {"s": round(perf_counter() - started, 3), "failures": []}
    if block is None:
        raise AssertionError("nobody said that it is not wanted")
    arena.take(block)
    is_pinned, why = arena.pinned
    if not is_pinned:
        return found | {"failures": [f"it is not pinned: {why}"]}
    second = pin(library, devices, arena.view(n_bytes))
    found["second"] = second if isinstance(second, str) else ""
    if not isinstance(second, str):
        second.release()
        found["failures"].append("it was registered twice")
    started = perf_counter()
    block.unpin()
    found["unpin_s"] = round(perf_counter() - started, 3)
    again = pin(library, devices, arena.view(n_bytes))
    if isinstance(again, str):
        found["failures"].append(f"it cannot be pinned again: {again}")
    else:
        again.release()
    return found


def main() -> int:
    """Check and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--mib", type=int, default=1024, help="size of each memory (default 1024)")
    parser.add_argument("--devices", default="", help="names of devices (default: all of the library)")
    parser.add_argument("--lib", type=Path, help="the libllama; default: the first that is found")
    given = parser.parse_args()
    library = Library.open(given.lib, env=os.environ)
    found = check(library, tuple(filter(None, given.devices.split(","))), given.mib * _MIB)
    if given.json:
        print(json.dumps(found))
    elif not found["devices"]:
        print("no device of this library gains by pinned memory")
    else:
        for name, value in found.items():
            print(f"{name:12} {value}")
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
