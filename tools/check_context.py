"""Find the largest context by trying, under a limit on memory, and compare it with what the planner says.

    python -m tools.check_context [--json] [--model PATH] [--budget MIB]

Each try is a child that may take so much more address space than it has when the library is open. It opens a session
in the first mode, reads a few tokens, and for a switch goes to the second mode. A child that dies, falls back, or gets
smaller buffers than the library wanted, did not survive. The largest context that survives is found by halving; the
planner gets the same budget as free memory. Address space is not memory: stacks, and arenas of 1.4 GiB that tensor mode
reserves and never touches, come on top of the budget, as measured with the smallest context.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama_native import Library
from splitctl.ipc.reserving import Reserver
from splitctl.model.facts import ModelFacts, read_facts
from splitctl.placement import FlashAttn, Placement, SplitMode
from splitctl.planning.fitting import Need, largest_context, needs_of_mode, needs_of_switch
from splitctl.planning.memory import DeviceFacts, carry_bytes, plan_mode, plan_switch
from splitctl.planning.survey import CARRY_COPIES
from splitctl.session import Session
from tools.children import run_child, say
from tools.places import small_model

_MIB = 1024 * 1024
_N_TOKENS = 512
_LIMIT = 131_072
_STEP = 256
#: How far the two may be apart, as a share of what was found by trying.
BOUND = 0.05
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Case:
    """A mode, or a switch between two.

    Args:
        before: where the session opens.
        after: where it goes; None: it stays.
    """

    before: SplitMode
    after: SplitMode | None = None

    @property
    def name(self) -> str:
        """For people."""
        return self.before.value + (f" -> {self.after.value}" if self.after else "")


CASES = (
    Case(SplitMode.LAYER),
    Case(SplitMode.TENSOR),
    Case(SplitMode.LAYER, SplitMode.TENSOR),
    Case(SplitMode.TENSOR, SplitMode.LAYER),
)


def place(mode: SplitMode, n_ctx: int) -> Placement:
    """Make the placement of a try."""
    return Placement(
        mode=mode, devices=("CPU", "CPU"), n_ctx=n_ctx, n_ubatch=256, flash_attn=FlashAttn.ON, n_threads=1,
        n_threads_batch=1,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--model", type=Path, default=small_model(), help="the GGUF (default: SmolLM2)")
    parser.add_argument("--budget", type=int, default=1536, metavar="MIB", help="memory that a try may take")
    options = parser.parse_args(arguments)
    facts = read_facts(options.model)
    rows: list[dict[str, Any]] = []
    for case in CASES:
        predicted = predict(case, facts, options.model, options.budget * _MIB)
        room = options.budget * _MIB + untouched(case, options.model, facts)
        tried = largest_by_trying(functools.partial(survives, case, options.model, room))
        off = (predicted - tried) / tried if tried else 1.0
        rows.append({"case": case.name, "predicted": predicted, "tried": tried, "off": round(off, 4)})
        if not options.json:
            print(f"{case.name:<18} predicted {predicted:>7}  tried {tried:>7}  {off:+.2%}")
    failed = sum(1 for row in rows if abs(row["off"]) > BOUND)
    if options.json:
        print(json.dumps({"budget_mib": options.budget, "bound": BOUND, "failed": failed, "cases": rows}))
    else:
        print(f"{failed} of {len(rows)} further apart than {BOUND:.0%}")
    return 1 if failed else 0


def predict(case: Case, facts: ModelFacts, model: Path, budget: int) -> int:
    """Ask the planner for the largest context."""
    return largest_context(_LIMIT, _needs(case, facts, model, budget), step=_STEP)[0]


def untouched(case: Case, model: Path, facts: ModelFacts) -> int:
    """Measure how much more address space than memory a case takes, with the smallest context, bytes."""
    peak = _run(case, model, None, 2 * _STEP)
    if peak is None:
        raise SystemExit(f"check_context: {case.name} does not run at all here")
    return max(peak - _needs(case, facts, model, 0)(2 * _STEP)[-1].wanted, 0)


def _needs(case: Case, facts: ModelFacts, model: Path, budget: int) -> Callable[[int], tuple[Need, ...]]:
    """Make the planner's answer for a context of so many tokens."""
    devices = (DeviceFacts("CPU", "cpu", budget), DeviceFacts("host", "cpu", budget))
    reserver = Reserver(model, None, dict(os.environ))
    modes = [case.before, *([case.after] if case.after else [])]
    sizes = [(n_ctx, 2048, 256) for n_ctx in (_STEP, 8192, 32768, _LIMIT)]
    known = {mode: reserver(place(mode, 0), sizes).reservations for mode in modes}

    def needs(n_ctx: int) -> tuple[Need, ...]:
        plans = [plan_mode(facts, place(mode, n_ctx), devices, known[mode]) for mode in modes]
        if len(plans) == 1:
            return needs_of_mode(plans[0], devices)
        carry = CARRY_COPIES * carry_bytes(facts, plans[0].placement, _N_TOKENS)
        return needs_of_switch(plan_switch(plans[0], plans[1], carry), devices)

    return needs


def largest_by_trying(works: Callable[[int], bool]) -> int:
    """Halve until the largest context that works is known to within a step."""
    low, high = 0, _LIMIT // _STEP + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle * _STEP) else (low, middle)
    return low * _STEP


def survives(case: Case, model: Path, room: int, n_ctx: int) -> bool:
    """Try one context in a child that may take so many bytes of address space."""
    return _run(case, model, room, n_ctx) is not None


def _run(case: Case, model: Path, room: int | None, n_ctx: int) -> int | None:
    """Run a child; the most address space that it took, bytes, or None when it did not survive."""
    modes = [case.before.value, case.after.value if case.after else None]
    job = {"model": str(model), "modes": modes, "room": room, "n_ctx": n_ctx}
    # One heap and a fixed threshold: what is freed goes back, as it does on a device.
    env = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "1048576"}
    done = run_child("tools.check_context", job, _TIMEOUT_S, words=("--child",), env=env)
    return int(done.told[-1]["peak"]) if done.told and not done.end else None


def child(job: Mapping[str, Any]) -> int:
    """Do one try; 0 when the session serves where it should."""
    library = Library.open(env=os.environ)
    library.devices()
    heard: list[str] = []
    library.log.listen(lambda _, text: heard.append(text))
    before, after = job["modes"]
    used = _peak()
    if job["room"] is not None:
        resource.setrlimit(resource.RLIMIT_AS, (used + job["room"], resource.RLIM_INFINITY))
    with Session.open(job["model"], place(SplitMode(before), job["n_ctx"]), library=library, prober=None) as session:
        session.prefill([5] * min(_N_TOKENS, job["n_ctx"] - 8))
        if after is not None:
            outcome = session.switch(place(SplitMode(after), job["n_ctx"]))
            if outcome.status.value != "switched":
                return 1
        for _ in session.generate(n=2):
            pass
    # It serves, with smaller compute buffers, so its devices wait for one another. Source: sched_reserve in llama.cpp.
    if "retrying without pipeline parallelism" in "".join(heard):
        return 1
    say(status="survived", peak=_peak() - used)
    os._exit(0)


def _peak() -> int:
    """The most address space that this process has had, bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmPeak"))


if __name__ == "__main__":
    sys.exit(child(json.loads(sys.argv[2])) if sys.argv[1:2] == ["--child"] else main())
