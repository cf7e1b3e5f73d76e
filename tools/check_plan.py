"""Compare predicted bytes with the buffers that the library reports, and with resident memory.

    python -m tools.check_plan [--json] [--only WORD] [--no-rpc]

Every case loads a model in a child, reads the library's own lines about its buffers, fills the context (the tokens of
the first micro-batch all ask for logits), and looks at the child's resident memory. Weights and cache have to agree to
the library's own rounding, compute buffers within a tenth, the sums within 2 % or 64 MiB, and none of them may be too
low. Two RPC servers, where the llama-cpp-python build is there, show what each device holds alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from splitctl.engine.buffer_lines import BufferLine
from splitctl.ipc.reserving import Reserver
from splitctl.model.facts import ModelFacts, read_facts
from splitctl.model.slices import Cutter
from splitctl.placement import FlashAttn, Placement, SplitMode
from splitctl.planning.cells import cache_tensors
from splitctl.planning.memory import DeviceFacts, ModePlan, plan_mode
from tools.check_plan_child import settled
from tools.children import run_child
from tools.make_dummies import make_many, recipes
from tools.places import builds_folder, default_folder, models_folder
from tools.rpc_server import served

_MIB = 1024 * 1024
#: The library prints hundredths of a MiB; a sum of several lines is off by half of one each.
_ROUNDING = 0.0101
_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Case:
    """One combination.

    Args:
        model: a real model's name, or a recipe's.
        placement: mode, devices and sizes.
        rpc: whether the devices are two RPC servers.
    """

    model: str
    placement: Placement
    rpc: bool = False

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.model} {self.placement.describe()}" + (" by RPC" if self.rpc else "")


@dataclass(slots=True)
class Checked:
    """What became of a case; sizes in MiB.

    Args:
        name: of the case.
        architecture: of its model.
        rows: what, predicted, reported, and whether it is within its bound.
        trouble: why there are no rows; empty for none.
    """

    name: str
    architecture: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    trouble: str = ""

    def add(self, what: str, predicted: float, reported: float, *, bound: float, least: float = 0.0) -> None:
        """Compare two sizes.

        Args:
            what: it is.
            predicted: by the planner.
            reported: by the library, or by the kernel.
            bound: how much too high the prediction may be.
            least: how much too low it may be: the rounding of what is reported.
        """
        off = predicted - reported
        self.rows.append(
            {
                "what": what,
                "predicted": round(predicted, 2),
                "reported": round(reported, 2),
                "off": round(off, 3),
                "within": -least <= off <= bound,
            }
        )


def _place(mode: SplitMode, **more: Any) -> Placement:
    """Make a placement on two processors."""
    devices = ("CPU",) if mode is SplitMode.NONE else ("CPU", "CPU")
    plain = {"flash_attn": FlashAttn.ON, "n_ctx": 1000, "n_threads": 1, "n_threads_batch": 1}
    return Placement(mode=mode, **{"devices": devices, **plain, **more})


def cases() -> Iterator[Case]:
    """List the combinations."""
    none, layer, tensor = SplitMode.NONE, SplitMode.LAYER, SplitMode.TENSOR
    for model in ("smollm2", "gemma3-270m"):
        for mode in (none, layer, tensor):
            yield Case(model, _place(mode))
        yield Case(model, _place(layer, n_ctx=1500, n_batch=512, n_ubatch=256))
        yield Case(model, _place(layer, n_ctx=1500, n_seq_max=3, kv_unified=True, tensor_split=(3.0, 1.0)))
    yield Case("smollm2", _place(layer, n_ctx=1500, n_batch=1024, n_ubatch=1024))
    yield Case("smollm2", _place(tensor, n_ctx=2048, n_ubatch=256, n_seq_max=4))
    yield Case("gemma3-270m", _place(layer, n_ctx=1024, n_ubatch=256, n_seq_max=4))
    yield Case("smollm2", _place(tensor, tensor_split=(1.0, 0.0)))
    yield Case("smollm2", _place(tensor, tensor_split=(0.1, 0.9), type_k="q8_0", type_v="q8_0", n_ctx=1500))
    yield Case("smollm2", _place(layer, type_k="q4_0", type_v="q4_0", n_ctx=1500))
    yield Case("smollm2", _place(layer, flash_attn=FlashAttn.OFF))
    yield Case("smollm2", _place(tensor, devices=("CPU",) * 3))
    yield Case("smollm2", _place(layer, offload_kqv=False))
    for model in (
        "llama+moe",
        "qwen3+gqa",
        "gemma2+gqa",
        "gpt-oss+gqa",
        "qwen35+gqa",
        "lfm2+gqa",
        "phi3",
        "cohere2",
    ):
        yield Case(model, _place(layer, n_ctx=2048))
        yield Case(model, _place(tensor, n_ctx=2048))
    for model in ("mamba2", "deepseek2", "gemma3n"):
        yield Case(model, _place(layer, n_ctx=2048))
    for mode in (layer, tensor):
        for split in (None, (3.0, 1.0)):
            yield Case("smollm2", _place(mode, devices=("RPC0", "RPC1"), tensor_split=split), rpc=True)
    yield Case("gemma3-270m", _place(layer, devices=("RPC0", "RPC1")), rpc=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check all cases and say the worst."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose name holds this")
    parser.add_argument("--no-rpc", action="store_true", help="leave the RPC servers out")
    options = parser.parse_args(arguments)
    wanted = [one for one in cases() if options.only in one.name]
    skipped = []
    if options.no_rpc or not _python_build().exists():
        skipped = [one.name for one in wanted if one.rpc]
        wanted = [one for one in wanted if not one.rpc]
    checked = []
    for case in wanted:
        checked.append(check(case))
        if not options.json:
            _show(checked[-1])
    body = _summary(checked, skipped)
    print(json.dumps(body) if options.json else _sentence(body))
    return 1 if body["failed"] else 0


def check(case: Case) -> Checked:
    """Load a case's model and compare."""
    with ExitStack() as stack:
        path = model_of(case.model)
        facts = read_facts(path)
        found = Checked(case.name, facts.architecture)
        library = _python_build() if case.rpc else None
        servers = [stack.enter_context(served(library)) for _ in range(2)] if library else []
        addresses = tuple(address for address, _ in servers)
        reserver = Reserver(path, library, dict(os.environ), addresses)
        size = (case.placement.n_ctx, case.placement.n_batch, case.placement.n_ubatch)
        reserved = reserver(case.placement, [size])
        if not reserved.reservations:
            found.trouble = reserved.why
            return found
        devices = tuple(
            DeviceFacts(
                one["name"], one["kind"], one["memory_free"], None, one["description"] * one["name"].startswith("RPC")
            )
            for one in reserved.library["devices"]
        )
        rows = min(case.placement.n_ubatch, case.placement.n_ctx)
        plan = plan_mode(facts, case.placement, devices, reserved.reservations, n_outputs=rows)
        plain = plan_mode(facts, case.placement, devices, reserved.reservations)
        before = [settled(pid) for _, pid in servers]
        job = {
            "model": str(path),
            "library": str(library) if library else None,
            "rpc": addresses,
            "placement": case.placement.to_json(),
            "rows": rows,
        }
        child = run_child("tools.check_plan_child", job, _LIMIT_S)
        if child.end or not child.told:
            found.trouble = f"the child ended: {child.end or 'it said nothing'}"
            return found
        told = child.told[-1]
        lines = [BufferLine(*line) for line in told["lines"]]
        _compare_lines(found, case, facts, plain, lines)
        if case.rpc:
            for share, now, was in zip(plan.shares, told["servers"], before, strict=True):
                _total(found, f"resident {share.device}", share.total, max(now - was, 0))
        else:
            everything = plan.total + plan.host.total
            _total(found, "resident", everything, told["resident"] * _MIB)
    return found


def _total(found: Checked, what: str, predicted: int, reported: float) -> None:
    """Compare sums: 2 % or 64 MiB too high at most, and never too low."""
    reported_mib = reported / _MIB
    found.add(what, predicted / _MIB, reported_mib, bound=max(64.0, 0.02 * reported_mib))


def _compare_lines(found: Checked, case: Case, facts: ModelFacts, plan: ModePlan, lines: Sequence[BufferLine]) -> None:
    """Compare a plan with the library's lines about its buffers."""
    reported: dict[str, dict[str, int]] = {}
    for line in lines:
        here = reported.setdefault("cache" if line.kind == "recurrent" else line.kind, {})
        here[line.buffer] = here.get(line.buffer, 0) + line.n_bytes
    n_lines = {kind: sum(1 for line in lines if line.kind == kind) for kind in ("model", "cache", "recurrent")}
    tensor = case.placement.mode is SplitMode.TENSOR

    def same(what: str, predicted: int, told: int, count: int) -> None:
        slack = _ROUNDING / 2 * max(count, 1) + 0.0051
        found.add(what, predicted / _MIB, told / _MIB, bound=slack, least=slack)

    model, cache = reported.get("model", {}), reported.get("cache", {})
    fullest = _fullest_cache(facts, plan) if tensor else 0
    if tensor:
        meta = next((n_bytes for name, n_bytes in model.items() if name.startswith("Meta")), 0)
        same("weights of the fullest device", max(share.weights for share in plan.shares), meta, 1)
        same("weights on the host", plan.host.weights, sum(model.values()) - meta, 1)
        same("cache of the fullest device", fullest, sum(cache.values()), n_lines["cache"] + n_lines["recurrent"])
    elif case.rpc:
        for share, address in zip(plan.shares, _addresses(reported), strict=False):
            same(f"weights on {share.device}", share.weights, model.get(address, 0), 1)
            same(f"cache on {share.device}", share.cache, cache.get(address, 0), 1)
            _compute(found, f"compute on {share.device}", share.compute, reported["compute"].get(address, 0))
    if not tensor:
        weights = sum(share.weights for share in plan.shares) + plan.host.weights
        same("weights together", weights, sum(model.values()), n_lines["model"])
        rows = sum(share.cache for share in plan.shares) + plan.host.cache
        same("cache together", rows, sum(cache.values()), n_lines["cache"] + n_lines["recurrent"])
    told = dict(reported.get("compute", {}))
    meta = next((n_bytes for name, n_bytes in told.items() if name.startswith("Meta")), 0)
    if tensor:
        _compute(found, "compute of a device", plan.shares[0].compute, meta)
        _compute(found, "compute on the host", plan.host.compute, sum(told.values()) - meta)
    else:
        together = sum(share.compute for share in plan.shares) + plan.host.compute
        _compute(found, "compute together", together, sum(told.values()))
    output = sum(reported.get("output", {}).values())
    found.add("output", plan.host.output / _MIB, output / _MIB, bound=0.02, least=0.02)
    buffers = sum(line.n_bytes for line in lines)
    if tensor:
        largest = max(share.weights for share in plan.shares) + fullest + plan.shares[0].compute
        predicted = largest + plan.host.weights + plan.host.compute + plan.host.output
    else:
        predicted = plan.total + plan.host.total - plan.host.fixed - sum(share.fixed for share in plan.shares)
    slack = _ROUNDING / 2 * (len(lines) + 2)
    found.add("buffers", predicted / _MIB, buffers / _MIB, bound=max(64.0, 0.02 * buffers / _MIB), least=slack)


def _compute(found: Checked, what: str, predicted: int, told: int) -> None:
    """Compare compute buffers: a tenth too high at most, too low by rounding only."""
    found.add(what, predicted / _MIB, told / _MIB, bound=max(0.1 * told / _MIB, _ROUNDING), least=_ROUNDING)


def _addresses(reported: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Give the RPC buffers in the order in which the compute buffers name them: the devices' own."""
    return [name for name in reported.get("compute", {}) if name.startswith("RPC")]


def _fullest_cache(facts: ModelFacts, plan: ModePlan) -> int:
    """Sum, part by part, what the fullest device holds of the cache: what the library prints in tensor mode."""
    n_devices = len(plan.shares)
    cutter = Cutter(facts, n_devices, plan.placement.tensor_split)
    sums: dict[str, list[int]] = {}
    for one in cache_tensors(facts, plan.placement):
        cut = cutter.cut(one.name, (one.width,))
        here = sums.setdefault(one.section, [0] * n_devices)
        for device in range(n_devices):
            here[device] += one.n_bytes if cut.axis is None else one.bytes_of(cut.sizes[device])
    return sum(max(each) for each in sums.values())


def model_of(name: str) -> Path:
    """Find a model, or make it of its recipe.

    Raises:
        SystemExit: a real model is not there, or the recipe's cannot be made.
    """
    real = models_folder() / f"{name}.gguf"
    if real.exists():
        return real
    if name not in recipes():
        raise SystemExit(f"check_plan: {real} is not there: run ci/model {name}, or leave its cases out with --only")
    ((_, path, why),) = make_many(default_folder(), [name])
    if path is None:
        raise SystemExit(f"check_plan: {name} cannot be made: {why}")
    return path


def _python_build() -> Path:
    """Where the build of llama-cpp-python is, if it is there: it can serve RPC."""
    return builds_folder() / "llama-cpp-python-0.3.36" / "llama_cpp" / "lib" / "libllama.so"


def _summary(checked: Sequence[Checked], skipped: Sequence[str]) -> dict[str, Any]:
    """Count, and find the worst."""
    rows = [(one, row) for one in checked for row in one.rows]
    bad = [{"case": one.name, **row} for one, row in rows if not row["within"]]
    trouble = [{"case": one.name, "why": one.trouble} for one in checked if one.trouble]

    def worst(word: str, measure: str) -> dict[str, Any] | None:
        some = [(one, row) for one, row in rows if word in row["what"]]
        if not some:
            return None
        one, row = max(
            some,
            key=lambda pair: abs(pair[1]["off"]) / (max(pair[1]["reported"], 0.01) if measure == "share" else 1.0),
        )
        return {"case": one.name, **row}

    return {
        "cases": len(checked),
        "architectures": sorted({one.architecture for one in checked}),
        "failed": len(bad) + len(trouble),
        "outside": bad,
        "trouble": trouble,
        "skipped": list(skipped),
        "worst": {
            "weights": worst("weights", "mib"),
            "cache": worst("cache", "mib"),
            "compute": worst("compute", "share"),
            "buffers": worst("buffers", "mib"),
            "resident": worst("resident", "mib"),
        },
        "checked": [dataclasses.asdict(one) for one in checked],
    }


def _show(one: Checked) -> None:
    """Print one case."""
    print(f"{one.name}" + (f"  NOT CHECKED: {one.trouble}" if one.trouble else ""))
    for row in one.rows:
        mark = " " if row["within"] else "!"
        print(f"  {mark} {row['what']:<34} {row['predicted']:>10.2f} {row['reported']:>10.2f} {row['off']:>+9.3f}")


def _sentence(body: Mapping[str, Any]) -> str:
    """Sum up in a few lines."""
    lines = [f"{body['cases']} cases, {len(body['architectures'])} architectures, {body['failed']} outside their bound"]
    for kind, row in body["worst"].items():
        if row:
            lines.append(
                f"  worst {kind}: {row['off']:+.3f} of {row['reported']:.2f} MiB, {row['what']} ({row['case']})"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
