"""Compare the planner with the driver of a GPU, run the GPU out of memory, and time switches there.

    python -m tools.check_gpu [--json] [--lib PATH] [--models 8b,27b] [--parts accuracy,short,rates,native]
                              [--device CUDA0,CUDA1] [--sizes CTXxUBATCH,...] [--folder DIR]

One GPU stands for two with GGML_CUDA_DEVICES=2; what lies on it is then compared as one sum. Models of these sizes are
made on the spot, with random weights. On processors (--device CPU,CPU) it is a rehearsal: resident memory takes the
driver's place, and is not judged.

accuracy  for each model, each size, and layer, tensor and the switch between them: what `splitctl plan` says, and the
          most that the driver counts (20 looks a second) over what was there before: within 3 % or 300 MiB, never under
short     another process holds the rest of the GPU: what a session comes to that does not fit, and whether a hosted one
          falls back with the right tokens (see `check_gpu_short`)
native    only by name, for a library with a call of its own for a switch: the call finds no memory and returns, and the
          session goes on as it was (see `check_gpu_native`)
rates     switch times with a long state, tokens a second in each mode, and what `splitctl explain` makes of them

failed    how many of all these are wrong; exit code 1 when there are any
"""

from __future__ import annotations

import argparse
import datetime as dt
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from splitctl.placement import Placement, SplitMode
from tools.check_gpu_native import declining
from tools.check_gpu_short import shortage
from tools.children import run_child
from tools.gpu_meter import HOST, Driver, Meter, Setup, group_of, visible_gpus
from tools.make_large import SHAPES, make_large
from tools.places import CHECKOUT, default_folder

_MIB = 1024 * 1024
#: How much too high a prediction may be: a share of what was measured, or so many bytes.
SHARE, BYTES = 0.03, 300 * _MIB
PARTS = ("accuracy", "short", "rates")
_TIMEOUT_S = 300.0
_N_GENERATE = 24
#: Tokens of the state whose switch is timed, and how often it goes there and back.
_STATE_TOKENS = 10_000
_N_ROUNDS = 3
_LAYER, _TENSOR = SplitMode.LAYER, SplitMode.TENSOR


def ask(*arguments: str) -> dict[str, Any]:
    """Run splitctl with --json.

    Raises:
        SystemExit: it says nothing that can be read.
    """
    program = "import sys; from splitctl.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments, "--json"],
        cwd=CHECKOUT, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S,
    )  # fmt: skip
    if not done.stdout.startswith("{"):
        raise SystemExit(f"splitctl {' '.join(arguments)} ends with {done.returncode}: {done.stderr.strip()[-400:]}")
    body: dict[str, Any] = json.loads(done.stdout)
    return body


def work(setup: Setup, model: Path, placement: Placement, **more: Any) -> dict[str, Any]:
    """Make a child's job of work; what is not named is nothing."""
    plain = {"n_warm_up": 0, "n_prompt": 0, "n_generate": _N_GENERATE, "switches": [], "n_further": 0}
    return {"job": "work", **setup.session(model, placement), **plain, **more}


def setup_of(library: Path | None, devices: Sequence[str]) -> Setup:
    """Look at the devices."""
    words = ("--lib", str(library)) if library else ()
    told = ask("doctor", *words)
    known = {one["name"]: one["description"] for one in told["devices"]}
    missing = [name for name in devices if name not in known]
    if missing:
        raise SystemExit(f"check_gpu: the library has no device {missing[0]}; it has {', '.join(known)}")
    visible = visible_gpus(os.environ)
    groups = tuple(group_of(name, known[name], visible) for name in devices)
    driver = Driver() if any(group != HOST for group in groups) else None
    return Setup(Path(told["library"]["path"]), tuple(devices), groups, driver, told["library"]["version"])


# ---- accuracy ----


def check_accuracy(setup: Setup, name: str, model: Path, sizes: Sequence[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """Compare every mode and the switch at every size."""
    for n_ctx, n_ubatch in sizes:
        told = ask(
            "plan", "-m", str(model), "--device", ",".join(setup.devices), "-psm", "layer", "-sm", "tensor",
            "-fa", "on", "-c", str(n_ctx), "-ub", str(n_ubatch), "-b", str(max(2048, n_ubatch)),
            "--lib", str(setup.library),
        )  # fmt: skip
        room = n_ctx - n_ubatch - 2 * _N_GENERATE - 8
        for what, start, switches in (
            ("layer", _LAYER, ()),
            ("tensor", _TENSOR, ()),
            ("layer->tensor", _LAYER, (_TENSOR,)),
        ):
            plan = told["switch"] if switches else told["modes"][what]
            targets = [setup.place(mode, n_ctx, n_ubatch).to_json() for mode in switches]
            job = work(
                setup, model, setup.place(start, n_ctx, n_ubatch), n_prompt=room, switches=targets,
                n_further=n_ubatch if switches else 0,
            )  # fmt: skip
            with Meter(setup.groups, setup.driver) as meter:
                child = run_child("tools.gpu_jobs", job, _TIMEOUT_S)
            row = {"model": name, "what": what, "n_ctx": n_ctx, "n_ubatch": n_ubatch, "end": child.end}
            done = child.told[-1] if child.told and not child.end else {}
            for group in dict.fromkeys(setup.groups):
                yield row | _compared(setup, plan, group, meter, done)


def _compared(
    setup: Setup, plan: Mapping[str, Any], group: str, meter: Meter, done: Mapping[str, Any]
) -> dict[str, Any]:
    """Compare a group's peak with a plan; sizes in MiB."""
    seen = meter.seen[group]
    shares = [share for share, where in zip(plan["devices"], setup.groups, strict=True) if where == group]
    if group == HOST:
        shares.append(plan["host"])
    predicted = sum(share["total"] for share in shares)
    off = predicted - seen.taken
    switch = next((step["switch"] for step in done.get("steps", ()) if "switch" in step), None)
    went_well = bool(done) and (switch is None or switch["status"] == "switched")
    return {
        "group": group,
        "predicted": round(predicted / _MIB, 1),
        "measured": round(seen.taken / _MIB, 1),
        "before": round(seen.before / _MIB, 1),
        "off": round(off / _MIB, 1),
        "off_share": round(off / seen.taken, 4) if seen.taken else None,
        "looks": seen.looks,
        "within": went_well and (group == HOST or 0 <= off <= max(SHARE * seen.taken, BYTES)),
        "shares": [{name: _rounded(size) for name, size in share.items()} for share in shares],
        "lines": done.get("lines", []),
        "log": done.get("log", []),
        "steps": done.get("steps", []),
        "open_s": done.get("open_s"),
        "free": [round(n_bytes / _MIB, 1) for n_bytes in done.get("free", [])],
    }


def _rounded(size: object) -> object:
    """Give bytes as MiB, anything else as it is."""
    return round(size / _MIB, 2) if isinstance(size, int) and abs(size) > _MIB else size


# ---- rates ----


def measure_rates(setup: Setup, model: Path, n_state: int) -> dict[str, Any]:
    """Time prompts, generations and switches with a state of so many tokens, and ask what pays."""
    n_ctx = -(-(n_state + 4096) // 256) * 256
    modes = {mode: setup.place(mode, n_ctx, 512) for mode in (_LAYER, _TENSOR)}
    rates: dict[str, dict[str, float]] = {}
    switches: dict[str, list[dict[str, Any]]] = {}
    for start, other in ((_LAYER, _TENSOR), (_TENSOR, _LAYER)):
        targets = [modes[mode].to_json() for _ in range(_N_ROUNDS) for mode in (other, start)]
        job = work(
            setup, model, modes[start], n_warm_up=512, n_prompt=n_state, n_generate=128,
            switches=targets if start is _LAYER else [],
        )  # fmt: skip
        child = run_child("tools.gpu_jobs", job, _TIMEOUT_S)
        if child.end or not child.told:
            return {"trouble": f"the child of {start.value} ended: {child.end or 'it said nothing'}"}
        steps = child.told[-1]["steps"]
        rates[start.value] = {name: round(steps[0][name], 2) for name in ("prompt_tps", "generate_tps")}
        for before, step in itertools.pairwise(steps):
            switches.setdefault(f"{before['mode']}->{step['mode']}", []).append(step["switch"])
    times = {way: _times(each) for way, each in switches.items()}
    one = times["layer->tensor"]
    body = {"switch_s": one["total_ms"] / 1e3, "modes": rates}
    return {
        "n_tokens": n_state,
        "rates": body,
        "switches": times,
        "explain": [explain(body, n_state, n_generate) for n_generate in (100, 1000, 10_000)],
    }


def _times(outcomes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Give the median of every stage, ms."""
    stages = {
        name: round(statistics.median(one["stages_ms"][name] for one in outcomes), 1)
        for name, first in outcomes[0]["stages_ms"].items()
        if first is not None
    }
    return {
        "n": len(outcomes),
        "statuses": sorted({one["status"] for one in outcomes}),
        "total_ms": round(statistics.median(one["total_ms"] for one in outcomes), 1),
        "stages_ms": stages,
        "state_bytes": outcomes[0]["state_bytes"],
        "weight_bytes": outcomes[0]["weight_bytes"],
    }


def explain(rates: Mapping[str, Any], n_prompt: int, n_generate: int) -> dict[str, Any]:
    """Ask whether a switch pays."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(rates, file)
        file.flush()
        return ask("explain", "--rates", file.name, "--prompt", str(n_prompt), "--generate", str(n_generate))


# ---- all of it ----


def _sizes(text: str) -> list[tuple[int, int]]:
    """Read 8192x512,32768x2048."""
    pairs = (part.split("x") for part in text.split(","))
    return [(int(n_ctx), int(n_ubatch)) for n_ctx, n_ubatch in pairs]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object, and what is found on the way to stderr"
    )
    parser.add_argument("--lib", type=Path, help="the libllama; else the first usable one")
    parser.add_argument("--device", default="CUDA0,CUDA1", help="two devices (default: CUDA0,CUDA1)")
    parser.add_argument("--models", default="8b,27b", help=f"of {', '.join(SHAPES)}; the first for short and rates")
    parser.add_argument("--sizes", type=_sizes, default="8192x512,32768x2048", help="contexts and micro-batches")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)} (default: these), and native")
    parser.add_argument("--state", type=int, default=_STATE_TOKENS, metavar="N", help="tokens of the state to switch")
    parser.add_argument("--folder", type=Path, default=default_folder(), help="where models are made")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    setup = setup_of(options.lib, options.device.split(","))
    body, failures = _about(setup), list[str]()
    names = options.models.split(",")
    models = {name: make_large(options.folder, name) for name in names}
    told = partial(_show, file=sys.stderr if options.json else sys.stdout)
    if "accuracy" in parts:
        rows = body["accuracy"] = []
        for name, path in models.items():
            for row in check_accuracy(setup, name, path, options.sizes):
                rows.append(row)
                told(row)
        failures += [_failure(row) for row in rows if not row["within"]]
    if "rates" in parts:
        found = body["rates"] = measure_rates(setup, models[names[0]], options.state)
        told(found)
        failures += [found["trouble"]] if "trouble" in found else []
    if "short" in parts:
        found = body["short"] = shortage(setup, models[names[0]], options.sizes[0])
        told(found)
        failures += found["failures"]
    if "native" in parts:
        found = body["native"] = declining(setup, models[names[0]], options.sizes[0])
        told(found)
        failures += found["failures"]
    body |= {"failed": len(failures), "failures": failures}
    print(json.dumps(body) if options.json else _sentence(body))
    return 1 if failures else 0


def _about(setup: Setup) -> dict[str, Any]:
    """Say what was measured on, and when."""
    body: dict[str, Any] = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "build": setup.version,
        "library": str(setup.library),
        "devices": list(setup.devices),
        "groups": list(setup.groups),
    }
    if setup.driver is not None:
        gpus = [int(group.removeprefix("gpu")) for group in dict.fromkeys(setup.groups) if group != HOST]
        body |= {"driver": setup.driver.version(), "gpus": [setup.driver.name(index) for index in gpus]}
    return body


def _failure(row: Mapping[str, Any]) -> str:
    """Say what is wrong with a row."""
    name = f"{row['model']} {row['what']} -c {row['n_ctx']} -ub {row['n_ubatch']} on {row['group']}"
    if row["end"]:
        return f"{name}: {row['end']}"
    return f"{name}: predicted {row['predicted']} MiB, measured {row['measured']} MiB"


def _show(found: Mapping[str, Any], file: TextIO) -> None:
    """Print a row for people, or a part as it is."""
    if "off" not in found:
        print(json.dumps(found, indent=1), file=file, flush=True)
        return
    mark = " " if found["within"] else "!"
    print(
        f"{mark} {found['model']:<5} {found['what']:<14} -c {found['n_ctx']:<6} -ub {found['n_ubatch']:<5} "
        f"{found['group']:<5} predicted {found['predicted']:>9.1f}  measured {found['measured']:>9.1f}  "
        f"{found['off']:>+8.1f} MiB",
        file=file,
        flush=True,
    )


def _sentence(body: Mapping[str, Any]) -> str:
    """Say the end."""
    return "\n".join([f"{body['failed']} outside their bounds", *(f"  {one}" for one in body["failures"])])


if __name__ == "__main__":
    sys.exit(main())
