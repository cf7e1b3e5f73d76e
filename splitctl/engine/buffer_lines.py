"""What the library says of the buffers that it makes: its own log lines, taken apart.

Source: load_tensors, llama_kv_cache, llama_memory_recurrent, llama_dsv4_comp_state and sched_reserve of llama.cpp; all
print sizes in MiB with two digits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_MIB = 1024 * 1024
_SIZE = re.compile(
    r":\s+(?P<buffer>\S.*?)\s+(?P<kind>model|KV|RS|output|compute|DSV4 \w+ state) buffer size =\s+(?P<mib>\d+\.\d+) MiB"
)
_SECTION = re.compile(
    r"(?P<where>llama_kv_cache|llama_memory_recurrent)\w*: size =\s+(?P<mib>\d+\.\d+) MiB \(\s*(?P<cells>\d+) cells"
)


@dataclass(frozen=True, slots=True)
class BufferLine:
    """One buffer that the library made.

    Args:
        buffer: its name, such as CPU_Mapped, CUDA0, CUDA_Host or Meta().
        kind: model, cache, recurrent, output or compute.
        n_bytes: its size, bytes, to a hundredth of a MiB.
    """

    buffer: str
    kind: str
    n_bytes: int


_KINDS = {"model": "model", "KV": "cache", "RS": "recurrent", "output": "output", "compute": "compute"}


def buffer_lines(log: Iterable[str]) -> tuple[BufferLine, ...]:
    """Find the lines of the library's log that tell a buffer's size; returns the buffers in their order."""
    found = (_SIZE.search(line) for line in log)
    return tuple(
        BufferLine(one["buffer"], _KINDS.get(one["kind"], "cache"), round(float(one["mib"]) * _MIB))
        for one in found
        if one is not None
    )


def cache_sections(log: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Find the lines of the log that tell the size of a part of the cache, which a dry run prints in full.

    Yields:
        "cache" or "recurrent", and bytes.
    """
    for line in log:
        if found := _SECTION.search(line):
            what = "recurrent" if "recurrent" in found["where"] else "cache"
            yield what, round(float(found["mib"]) * _MIB)
