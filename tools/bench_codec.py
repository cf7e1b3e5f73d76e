"""Time the codec on a state of one GiB: inspecting it through mmap, sealing it, turning V, changing cache types.

    python -m tools.bench_codec [--json] [--rounds N] [--mib N]

inspect        parse and full structural validation of a context blob (30 layers, 8192 cells, f16, one GiB) in a file,
               through mmap: median time, and how much the process's resident memory grew (pages of the file included)
seal           the checksum of a carry over the same bytes in memory, by threads, against memcpy of them
seal_plain     the same by one thread: xxh3-128, as a file has it
v_transposed   V plain to transposed (flash attention on to off), and back; ratios are to a numpy copy of the same
v_plain        layers into fresh memory, as a change writes them; GB/s is source bytes a second
q8_0_to_f16    K and V, not rotated; ratios are to a copy of the f16 layers, the larger side of the change.
f16_to_q8_0    `rotated_64` undoes (or does) the Hadamard rotation on the way

Rounds alternate the work and the copy, so that what else the machine does hits both; every number is a median.
cpu_ratio is the ratio in processor time, which other programs on the machine disturb less.
Exit code 0: it ran. The aims are printed beside the numbers, not judged.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import statistics
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import psutil
import xxhash

from splitctl.carry.digest import digest
from statecodec import AttentionSection, Rotation, StateImage, TensorType, emit, parse, transcode, validate

_GIB = 1 << 30
_MIB = 1 << 20
_LAYERS = 30
_CELLS = 8192
#: Bytes of an f16 row, so that the whole is one GiB or a little more: 30 layers of K and V, 8192 cells.
_ROW_BYTES = 2304
_AIMS = {
    "inspect": {"ms": 20, "grown_mib": 32},
    "seal": {"ratio": 1.5},
    "v_transposed": {"ratio": 8},
    "v_plain": {"ratio": 8},
    "q8_0_to_f16": {"ratio": 12},
}


def header(n_cells: int) -> bytes:
    """What stands before the rows of a context blob of the newest version."""
    cells = np.zeros((n_cells, 3), dtype="<i4")
    cells[:, 0], cells[:, 1] = np.arange(n_cells), 1
    name = struct.pack("<I", 5) + b"llama"
    return name + struct.pack("<II", 1, n_cells) + cells.tobytes() + struct.pack("<IIII", 0, _LAYERS, 0, 0)


def write_state(path: Path, n_cells: int) -> int:
    """Write a state of random f16 values; returns its size, in bytes."""
    values = np.random.default_rng(1).normal(size=(n_cells, _ROW_BYTES // 2)).astype("<f2")
    with path.open("wb") as file:
        file.write(header(n_cells))
        for layer in range(2 * _LAYERS):
            file.write(struct.pack("<iQ", 1, _ROW_BYTES))
            file.write(np.roll(values, layer, axis=1).data)
        return file.tell()


def median_ms(times: Sequence[float]) -> float:
    """The median of seconds, in milliseconds."""
    return round(statistics.median(times) * 1e3, 3)


def inspect(path: Path, rounds: int) -> dict[str, Any]:
    """Read and validate the mapped file again and again, each time through a mapping of its own."""
    process = psutil.Process()
    with path.open("rb") as file:
        times: list[float] = []
        grown: list[int] = []
        for _ in range(rounds):
            before = process.memory_info().rss
            started = perf_counter()
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            image = parse(mapped)
            validate(image)
            times.append(perf_counter() - started)
            grown.append(process.memory_info().rss - before)
            if image.sections[0].n_layers != _LAYERS:
                raise SystemExit("the state was not read as what it is")
            del image, mapped
            # Failed readings are kept by their tracebacks in cycles, and they keep the mapping.
            gc.collect()
    return {
        "file_bytes": path.stat().st_size,
        "ms": median_ms(times),
        "worst_ms": round(max(times) * 1e3, 3),
        "grown_mib": round(max(grown) / _MIB, 2),
    }


def race(work: Callable[[], object], copy: Callable[[], object], rounds: int) -> dict[str, float]:
    """Seconds of the work, and how much more than a copy it takes: medians over rounds that do one after the other."""
    mine: list[tuple[float, float]] = []
    theirs: list[tuple[float, float]] = []
    for _ in range(rounds + 1):
        for call, times in ((work, mine), (copy, theirs)):
            started, cpu = perf_counter(), process_time()
            call()
            times.append((perf_counter() - started, process_time() - cpu))
    # The first round faults pages in.
    pairs = list(zip(mine[1:], theirs[1:], strict=True))
    return {
        "s": statistics.median(one[0] for one in mine[1:]),
        "ratio": statistics.median(one[0] / other[0] for one, other in pairs),
        "cpu_ratio": statistics.median(one[1] / max(other[1], 1e-6) for one, other in pairs),
    }


def seal(path: Path, rounds: int, checksum: Callable[[memoryview], bytes]) -> dict[str, Any]:
    """A checksum over the state in memory, against a copy of it."""
    data = np.fromfile(path, dtype=np.uint8)
    target = np.ones_like(data)
    took = race(lambda: checksum(data.data), lambda: np.copyto(target, data), rounds)
    return {
        "n_bytes": data.size,
        "ms": round(took["s"] * 1e3, 3),
        "gb_per_s": round(data.size / took["s"] / 1e9, 2),
        "ratio": round(took["ratio"], 2),
        "cpu_ratio": round(took["cpu_ratio"], 2),
    }


def layers_of(image: StateImage, *, v_only: bool) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    """The rows of every layer of a state as bytes; those of V alone where only V changes."""
    caches = [section for section in image.sections if isinstance(section, AttentionSection)]
    streams = [stream for cache in caches for _, stream in cache.filled()]
    layers = [layer for stream in streams for layer in (*(() if v_only else stream.keys), *stream.values)]
    return [np.frombuffer(layer.data, dtype=np.uint8) for layer in layers]


def change(
    image: StateImage, work: Callable[[StateImage], StateImage], rounds: int, *, v_only: bool = False
) -> dict[str, Any]:
    """Time one change against copies, layer by layer as well, of the larger of what it reads and what it writes."""
    sides = [layers_of(one, v_only=v_only) for one in (image, work(image))]
    n_source, n_result = (sum(layer.size for layer in side) for side in sides)
    larger = sides[0] if n_source >= n_result else sides[1]
    took = race(lambda: work(image), lambda: [layer.copy() for layer in larger], rounds)
    return {
        "source_bytes": n_source,
        "result_bytes": n_result,
        "ms": round(took["s"] * 1e3, 3),
        "gb_per_s": round(n_source / took["s"] / 1e9, 2),
        "ratio": round(took["ratio"], 2),
        "cpu_ratio": round(took["cpu_ratio"], 2),
    }


def changes(n_mib: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Every change, on a state of so many MiB."""
    n_cells = max(32, n_mib * _MIB // (2 * _LAYERS * _ROW_BYTES))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "state")
        write_state(path, n_cells)
        plain = parse(path.read_bytes())
    turned = transcode.to_v_trans(plain, v_trans=True)
    if b"".join(emit(transcode.to_v_trans(turned, v_trans=False))) != b"".join(emit(plain)):
        raise SystemExit("V turned twice is not what it was")
    found = {
        "v_transposed": change(plain, lambda image: transcode.to_v_trans(image, v_trans=True), rounds, v_only=True),
        "v_plain": change(turned, lambda image: transcode.to_v_trans(image, v_trans=False), rounds, v_only=True),
    }
    for suffix, blocks in (("", 0), ("_rotated_64", 64)):
        rotation = Rotation(blocks, blocks)
        q8 = typed(plain, TensorType.Q8_0, rotation)
        found |= {
            f"q8_0_to_f16{suffix}": change(q8, partial(typed, kind=TensorType.F16, rotation=Rotation(0, 0)), rounds),
            f"f16_to_q8_0{suffix}": change(plain, partial(typed, kind=TensorType.Q8_0, rotation=rotation), rounds),
        }
    return found


def typed(image: StateImage, kind: TensorType, rotation: Rotation) -> StateImage:
    """K and V in one type."""
    return transcode.to_types(image, type_k=kind, type_v=kind, rotation=rotation)


def measure(rounds: int, n_mib: int, folder: str | None) -> dict[str, Any]:
    """Everything."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        path = Path(temporary, "state")
        if write_state(path, _CELLS) < _GIB:
            raise SystemExit("the state is smaller than one GiB")
        found: dict[str, Any] = {
            "inspect": inspect(path, max(rounds, 9)),
            "seal": seal(path, rounds, digest),
            "seal_plain": seal(path, rounds, xxhash.xxh3_128_digest),
        }
    return found | changes(n_mib, rounds)


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default 5)")
    parser.add_argument("--mib", type=int, default=128, help="size of the state that is changed (default 128)")
    parser.add_argument("--folder", help="where the state of one GiB is kept meanwhile (default: the temporary folder)")
    given = parser.parse_args()
    found = measure(given.rounds, given.mib, given.folder)
    body = {
        "n_cpus": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        **{name: {**values, "aim": _AIMS.get(name)} for name, values in found.items()},
    }
    if given.json:
        sys.stdout.write(json.dumps(body) + "\n")
        return 0
    for name, values in found.items():
        told = "  ".join(f"{key} {value:,}" for key, value in values.items())
        print(f"{name:24} {told}  aim {_AIMS.get(name, '-')}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
