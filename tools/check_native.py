"""Prove that the library's own switch never loses a session, whatever fails in it.

    python -m tools.check_native [--json] [--lib PATH] [--parts PART,PART] [--model PATH] [--step N]

Each part is a child, which may die. Wherever a switch fails it must return false, and leave the old mode serving with
the same bytes of state, the same rows and a later switch that works.

refusals      what cannot be switched is refused before anything is touched, with the reason in the log
allocations   every allocation of a switch fails in turn, there and back (malloc, mmap, threads); one, and several
limit         the address space is limited, in steps from what is used up to what a switch takes
uploads       an allocation of an upload thread fails
leaks         memory, file descriptors, threads and mappings do not grow over 200 switches
kept          pointers into the vocabulary stay, and no byte of a weight is read from the file where both placements fit

Exit code: 0 all held; 1 some did not. A library built by `ci/native.py --sanitize` runs the parts that need no failing
allocator; a report of ASan or UBSan ends a child, which fails it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.children import ChildRun, run_child
from tools.places import CHECKOUT, builds_folder, default_folder, small_model

CHILD = "tools.check_native_child"
PARTS = ("refusals", "kept", "uploads", "limit", "leaks", "allocations")
#: They replace malloc, or limit the address space, of which a sanitizer takes most.
_NOT_SANITIZED = {"uploads", "limit", "allocations"}
_TIMEOUT_S = 3600.0
#: What an interpreter keeps to its end, and what ggml keeps for each device of tensor mode, once, as it is meant to.
_SUPPRESSIONS = "".join(
    f"leak:{name}\n"
    for name in (
        "libpython", "_Py", "Py", "python3", "_cffi", "ffi_", "numpy", "_dl_",
        "ggml_backend_meta_device_get_buffer_type",
    )
)  # fmt: skip


def native_library() -> Path:
    """The newest library that `ci/builds --native` has built; it need not be there."""
    found = sorted(builds_folder().glob("native-*[0-9]/lib/libllama.so"))
    return found[-1] if found else builds_folder() / "native" / "lib" / "libllama.so"


def is_sanitized(library: Path) -> bool:
    """Tell whether a library wants the runtime of ASan."""
    told = subprocess.run(["ldd", str(library)], capture_output=True, text=True, check=False).stdout
    return "libasan" in told


def tiny_model() -> Path:
    """A dummy of a few layers (tools.make_dummies llama)."""
    found = sorted(default_folder().glob("llama-[0-9a-f]*.gguf"))
    if not found:
        raise SystemExit("no dummy models; make them with: python -m tools.make_dummies llama mamba")
    return found[0]


def run_parts(
    parts: Sequence[str], library: Path, model: Path, tiny: Path, step: int, n_switches: int = 200
) -> Iterator[dict[str, Any]]:
    """Run parts, each in a child.

    Args:
        parts: names of PARTS.
        library: what is checked.
        model: a model with weights large enough for upload threads.
        tiny: a model that is switched in milliseconds.
        step: fail every step-th allocation.
        n_switches: how many switches may not leak.

    Yields:
        For each: part, status (held, failed), what (numbers, or why it failed), seconds.
    """
    sanitized = is_sanitized(library)
    with tempfile.TemporaryDirectory() as folder:
        allocator = Path(folder) / "failing.so"
        source = CHECKOUT / "tools" / "native" / "failing.c"
        compiler = shutil.which("cc")
        if compiler is None:
            raise SystemExit("no C compiler (cc); install one, the failing allocator is compiled")
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(allocator), str(source), "-ldl"], check=True)
        env = _sanitizer_env(Path(folder)) if sanitized else {"LD_PRELOAD": str(allocator)}
        for part in parts:
            if sanitized and part in _NOT_SANITIZED:
                continue
            job = {
                "part": part, "library": str(library), "model": str(model), "tiny": str(tiny), "step": step,
                "allocator": str(allocator), "folder": folder, "n_switches": n_switches,
                "other": str(next(iter(default_folder().glob("mamba-*.gguf")), "")), "is_sanitized": sanitized,
            }  # fmt: skip
            started = time.monotonic()
            child = run_child(CHILD, job, _TIMEOUT_S, env=env)
            yield from _rows(part, child, time.monotonic() - started)


def _rows(part: str, child: ChildRun, seconds: float) -> Iterator[dict[str, Any]]:
    for told in child.told:
        yield {"part": part, "status": told["status"], "what": told["what"], "seconds": told.get("seconds", 0.0)}
    if child.end or not child.told:
        at = f" at {json.dumps(child.at)}" if child.at else ""
        what = f"{child.end or 'it said nothing'}{at}"
        yield {"part": part, "status": "failed", "what": what, "seconds": round(seconds, 1)}


def _sanitizer_env(folder: Path) -> dict[str, str]:
    """Let an interpreter that knows no sanitizer load a library that does."""
    runtimes = [
        subprocess.run(["cc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    suppressions = folder / "leaks.txt"
    suppressions.write_text(_SUPPRESSIONS, encoding="ascii")
    return {
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0:exitcode=99:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "LSAN_OPTIONS": f"suppressions={suppressions}:print_suppressions=0",
        "PYTHONMALLOC": "malloc",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--lib", type=Path, default=native_library(), help="the library (default: the native build)")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to run (default: all)")
    parser.add_argument("--model", type=Path, default=small_model(), help="the GGUF (default: SmolLM2)")
    parser.add_argument("--step", type=int, default=1, help="fail every STEP-th allocation (default: 1)")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    unknown = sorted(set(parts) - set(PARTS))
    if unknown:
        parser.error(f"no part {unknown[0]}; there are {', '.join(PARTS)}")
    if not options.lib.is_file():
        parser.error(f"{options.lib} is not there; build it with ci/builds --native")
    rows: list[dict[str, Any]] = []
    for row in run_parts(parts, options.lib, options.model, tiny_model(), options.step):
        rows.append(row)
        if not options.json:
            print(f"{row['status']:<7} {row['part']:<12} {row['seconds']:>7.1f} s  {row['what']}", flush=True)
    failed = sum(1 for row in rows if row["status"] != "held")
    if options.json:
        print(json.dumps({"library": str(options.lib), "failed": failed, "rows": rows}))
    else:
        print(f"{failed} of {len(rows)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
