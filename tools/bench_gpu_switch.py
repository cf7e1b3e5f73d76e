"""Time a switch on GPUs in every way that there is, both ways, and what each costs afterwards.

    python -m tools.bench_gpu_switch [--json] [--model FILE|8b|27b|moe] [--tokens N] [--repeats N] [--only NAME ...]
                                     [--devices CUDA0,CUDA1] [--lib PATH] [--server PATH] [--budget-s S] [--md]
                                     [--leave GIB]
    python -m tools.bench_gpu_switch --from FILE.json ... --docs       put results into docs/speed.md

bare         the library's calls alone: size, get, free, free, load, build, set; pageable memory that was touched before
file         ours, weights from the file
pinned       ours, weights from a copy in pinned memory
native, native-pinned   by the library's own call (a build of `ci/builds --native`), weights from the file, or from us,
             who have the copy in pinned memory
resident     ours, both placements on the devices
beside       ours, hosted, one stream generates while a second worker takes over
beside-idle  the same; four fifths of the tokens are in idle sequences
server       without us: llama-server stopped with its slot saved, started in the other mode, slot restored
fresh-layer, fresh-tensor   never moved: the first token and the rate that the others are compared with

Without --only all are measured but the two of the library's own call, which other builds do not have. Every arm is a
process. All that fit on the devices together are moved in turn, layer to tensor, then tensor to layer, in an order that
changes from round to round, so that drift hits all alike; the last three, which start a process in every move, come
after the others. What an arm cannot do is noted, and the others go on. With --budget-s the rounds end in time. Every
move is told as it comes, one JSON object a line, on stderr.

total_ms     of a move on the clock: median, min, max; pause_ms: how long no token could be generated
stages_ms    of each stage, median, and gb_s where it moves bytes; "link": the share of what one link allows
own_ms       of total_ms what is no call of the library: checks, the checksum, comparing, thinking
first_ms     until the first token that is decoded after a move; tps: tokens a second after that; both also as a ratio
             to those of a fresh load in that mode
gap_ms       the longest time without a token that a client of a hosted session saw
memory       most and last bytes of each group of devices, of the host, and what `splitctl plan` says

Exit code 0: every arm was measured both ways; 1: one was not, or the time was over.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import IO, Any

from splitctl.model.facts import ModelFacts, read_facts
from splitctl.placement import Placement, SplitMode
from splitctl.planning.memory import carry_bytes
from tools import bench_gpu_told as told
from tools.check_gpu import ask, setup_of
from tools.check_gpu_short import held
from tools.children import last_words
from tools.gpu_meter import HOST, Meter, Setup
from tools.make_large import SHAPES, make_large
from tools.places import CHECKOUT, default_folder

#: Arms of a library that has a call of its own for a switch.
NATIVE_ARMS = ("native", "native-pinned")
ARMS = (
    "fresh-layer", "fresh-tensor", "bare", "file", "pinned", *NATIVE_ARMS,
    "resident", "beside", "beside-idle", "server",
)  # fmt: skip
_CHILD = "tools.bench_gpu_arms"
_LAYER, _TENSOR = SplitMode.LAYER, SplitMode.TENSOR
#: Tokens of a context beyond those of the prompt: streams go on while a second worker loads.
_ROOM = 4096
#: Arms that start processes in every move; the others are measured before them.
_SLOW = ("beside", "beside-idle", "server")
#: Arms with both placements on the devices at a time.
_TWICE = ("resident", "beside", "beside-idle")
#: Bytes of devices that a placement takes beyond weights and cache: contexts, buffers, NCCL.
_MORE_BYTES = 4 << 30
#: Share of the devices' memory that arms fill together.
_FILL = 0.9
#: A child that says nothing for so long is ended [s]; what is kept of a budget to end with [s].
_SILENCE_S = 240.0
_END_S = 10.0
#: How long a child may take to close [s].
_CLOSE_S = 30.0


class OutOfTime(Exception):
    """The budget is used up."""


class ArmLost(Exception):
    """An arm cannot go on."""


@dataclass(slots=True)
class Budget:
    """Time that is left.

    Args:
        until: when it ends, on the monotonic clock; None: never.
    """

    until: float | None

    def take(self, needed_s: float) -> None:
        """Refuse what would take longer than what is left; OutOfTime."""
        if self.until is not None and monotonic() + needed_s + _END_S > self.until:
            raise OutOfTime


@dataclass(slots=True)
class Moved:
    """What is seen of an arm.

    Args:
        name: of the arm.
        opened: what it said when it was open.
        moves: way -> what each move came to.
        device_bytes: group -> last and most bytes, as the driver counts them.
        host_bytes: of the arm's processes, by kind; the most that was seen.
        lost: why it goes on no more; empty while it does.
        longest_s: its longest move.
    """

    name: str
    opened: dict[str, Any] = field(default_factory=dict)
    moves: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    device_bytes: dict[str, list[int]] = field(default_factory=dict)
    host_bytes: dict[str, int] | None = None
    lost: str = ""
    longest_s: float = 0.0


class Child:
    """An arm's process."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        env = {**os.environ, "GGML_NO_BACKTRACE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", _CHILD, json.dumps(job)],
            cwd=CHECKOUT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            start_new_session=True,
        )  # fmt: skip

    def open(self, limit_s: float) -> dict[str, Any]:
        """Let it open its arm; ArmLost where it cannot."""
        return self._ask({}, limit_s)

    def move(self, target: Placement, *, looks: bool, limit_s: float) -> dict[str, Any]:
        """Let it move; ArmLost where it does not."""
        return self._ask({"target": target.to_json(), "looks": looks}, limit_s)

    def _ask(self, words: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Say a line and read the answer."""
        with suppress(BrokenPipeError):
            stdin = self._process.stdin
            if stdin is not None:
                stdin.write(json.dumps(words) + "\n")
                stdin.flush()
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._kill()

        timer = threading.Timer(limit_s, give_up)
        timer.start()
        try:
            for line in self._process.stdout or ():
                if line.startswith("{"):
                    found: dict[str, Any] = json.loads(line)
                    if found["status"] == "failed":
                        raise ArmLost(found["reason"])
                    return found
        finally:
            timer.cancel()
        code = self._process.wait()
        if late.is_set():
            raise ArmLost(f"no answer within {limit_s:.0f} s")
        self._log.seek(0)
        said = last_words(self._log.read().decode(errors="replace"))
        raise ArmLost(f"its process ended with {code}: {said}")

    def let_go(self) -> None:
        """End its stdin, at which it closes what it has."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def end(self) -> None:
        """Wait until it has closed; a child that does not is ended with what it started."""
        self.let_go()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class Bench:
    """One run: arms, opened and moved in turn."""

    def __init__(
        self,
        setup: Setup,
        model: Path,
        options: argparse.Namespace,
        budget: Budget,
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        self._setup = setup
        self._model = model
        self._options = options
        self._budget = budget
        self._tell = tell
        n_ctx = -(-(options.tokens + _ROOM) // 256) * 256
        self.modes = {mode: setup.place(mode, n_ctx, 512) for mode in (_LAYER, _TENSOR)}
        if setup.driver is None:  # two threads that spin for each other take minutes where there is other work
            self.modes = {mode: one.changed(n_threads=1, n_threads_batch=1) for mode, one in self.modes.items()}
        self.arms = [Moved(name) for name in ARMS if name in options.only]
        self.is_over = False
        self._children: dict[str, Child] = {}

    def run(self, groups: Iterable[Sequence[Moved]]) -> None:
        """Measure groups of arms, each group interleaved."""
        for group in () if self.is_over else groups:
            try:
                for arm in group:
                    self._guarded(arm, self._start)
                for arm in group:
                    self._budget.take(0.0)
                    if not arm.lost:
                        self._guarded(arm, self._open)
                for number in range(self._options.repeats):
                    self._round(group, number)
            except OutOfTime:
                self.is_over = True
                return
            finally:
                for child in self._children.values():
                    child.let_go()
                for child in self._children.values():
                    child.end()
                self._children.clear()

    def _round(self, group: Sequence[Moved], number: int) -> None:
        """Move all arms there and back."""
        first = number % len(group)
        for start, target in ((_LAYER, _TENSOR), (_TENSOR, _LAYER)):
            for arm in (*group[first:], *group[:first]):
                if arm.name in self._children and not (arm.name.startswith("fresh") and target.value not in arm.name):
                    self._budget.take(1.2 * arm.longest_s)
                    self._guarded(arm, lambda arm: self._move(arm, start, target, looks=number == 0))  # noqa: B023

    def _guarded(self, arm: Moved, work: Callable[[Moved], None]) -> None:
        """Do it; an arm that is lost is noted."""
        began = monotonic()
        try:
            work(arm)
        except ArmLost as lost:
            arm.lost = str(lost)
            self._tell({"arm": arm.name, "lost": arm.lost})
            child = self._children.pop(arm.name, None)
            if child is not None:
                child.end()
        arm.longest_s = max(arm.longest_s, monotonic() - began) if arm.moves else 0.0

    def _limit_s(self) -> float:
        """How long a child may take now [s]."""
        until = self._budget.until
        return _SILENCE_S if until is None else max(1.0, min(_SILENCE_S, until - monotonic()))

    def _start(self, arm: Moved) -> None:
        """Start an arm's process; all of a group get ready at the same time."""
        here, there = self.modes[_LAYER], self.modes[_TENSOR]
        if arm.name == "fresh-tensor":
            here, there = there, here
        server = self._options.server
        if arm.name == "server" and not server.is_file():
            raise ArmLost(f"there is no {server}; name it with --server")
        job = {
            "arm": arm.name, "model": str(self._model), "library": str(self._setup.library), "server": str(server),
            "here": here.to_json(), "there": there.to_json(),
            "n_tokens": self._options.tokens, "n_generate": self._options.generate,
        }  # fmt: skip
        self._children[arm.name] = Child(job)

    def _open(self, arm: Moved) -> None:
        child = self._children[arm.name]
        with Meter(self._setup.groups, self._setup.driver) as meter:
            found = child.open(self._limit_s())
        self._weigh(arm, meter, found)
        arm.opened = {name: value for name, value in found.items() if name not in {"status", "host"}}
        self._tell({"arm": arm.name, "opened": arm.opened})

    def _move(self, arm: Moved, start: SplitMode, target: SplitMode, *, looks: bool) -> None:
        child, way = self._children[arm.name], f"{start.value}->{target.value}"
        with Meter(self._setup.groups, self._setup.driver) as meter:
            answer = child.move(self.modes[target], looks=looks, limit_s=self._limit_s())
        self._weigh(arm, meter, answer)
        found = answer["found"]
        if found.get("status", "switched") != "switched":
            raise ArmLost(f"{way}: {found['status']}: {found['reason']}")
        arm.moves.setdefault(way, []).append(found)
        self._tell({"arm": arm.name, "way": way, **told.rounded(found)})

    def _weigh(self, arm: Moved, meter: Meter, answer: dict[str, Any]) -> None:
        """Add up what an arm holds: while one works, the others hold what they held."""
        for group, seen in meter.seen.items():
            if group == HOST:
                continue
            last, most = arm.device_bytes.get(group, [0, 0])
            arm.device_bytes[group] = [last + seen.last - seen.before, max(most, last + seen.taken)]
        host = answer.get("host")
        if host is not None:
            known = arm.host_bytes or {}
            arm.host_bytes = {name: max(size, known.get(name, 0)) for name, size in host.items()}


def grouped(arms: Sequence[Moved], needs: Sequence[int], room: int | None) -> Iterator[list[Moved]]:
    """Put arms together that fit on the devices at once.

    Args:
        arms: in order.
        needs: bytes that each takes at most.
        room: bytes of all devices; None: enough.

    Yields:
        Groups in the same order, each of one arm at least.
    """
    group: list[Moved] = []
    held = 0
    for arm, need in zip(arms, needs, strict=True):
        if group and room is not None and held + need > room:
            yield group
            group, held = [], 0
        group.append(arm)
        held += need
    if group:
        yield group


def needs_of(arms: Sequence[Moved], facts: ModelFacts, placement: Placement) -> list[int]:
    """Estimate what arms take on all devices together, bytes."""
    one = facts.weight_bytes + carry_bytes(facts, placement) + _MORE_BYTES
    return [one * (2 if arm.name in _TWICE else 1) for arm in arms]


def planned(setup: Setup, model: Path, placement: Placement) -> dict[str, Any] | None:
    """Ask `splitctl plan` what each way of a switch takes; None where it does not say."""
    body = ask(
        "plan", "-m", str(model), "--device", ",".join(setup.devices), "-psm", "layer", "-sm", "tensor", "-fa", "on",
        "-c", str(placement.n_ctx), "-ub", str(placement.n_ubatch), "-b", str(placement.n_batch),
        "--lib", str(setup.library),
    )  # fmt: skip
    tiers: dict[str, Any] = body.get("tiers") or {"file": body["switch"]}
    return {name: one for name, one in tiers.items() if one is not None} or None


def _about(setup: Setup, model: Path, facts: ModelFacts, options: argparse.Namespace) -> dict[str, Any]:
    """Say what was measured, on what, and when."""
    body: dict[str, Any] = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "model": options.model if options.model in SHAPES else model.name,
        "weight_bytes": facts.weight_bytes,
        "n_tensors": len(facts.tensors),
        "n_tokens": options.tokens,
        "build": setup.version,
        "library": str(setup.library),
        "devices": list(setup.devices),
        "groups": list(setup.groups),
        "source": f"tools.bench_gpu_switch --tokens {options.tokens} --repeats {options.repeats}"
        + ("" if options.leave is None else f" --leave {options.leave:g}"),
    }
    if setup.driver is not None:
        gpus = [int(group.removeprefix("gpu")) for group in dict.fromkeys(setup.groups) if group != HOST]
        body |= {"driver": setup.driver.version(), "gpus": [setup.driver.name(index) for index in gpus]}
    return body


def measure(options: argparse.Namespace, tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Run everything; the body is that of --json."""
    began = monotonic()
    budget = Budget(None if options.budget_s is None else began + options.budget_s)
    setup = setup_of(options.lib, options.devices.split(","))
    model = make_large(options.folder, options.model) if options.model in SHAPES else Path(options.model)
    options.server = options.server or setup.library.parent / "llama-server"
    facts = read_facts(model)
    tell(about := _about(setup, model, facts, options))
    bench = Bench(setup, model, options, budget, tell)
    leave = {} if options.leave is None else dict.fromkeys(setup.groups, int(options.leave * (1 << 30)))
    with held(leave):
        room = None
        if setup.driver is not None:
            gpus = [int(group.removeprefix("gpu")) for group in dict.fromkeys(setup.groups) if group != HOST]
            room = int(_FILL * sum(map(setup.driver.free, gpus)))
        for is_slow in (False, True):
            arms = [arm for arm in bench.arms if (arm.name in _SLOW) is is_slow]
            bench.run(grouped(arms, needs_of(arms, facts, bench.modes[_LAYER]), room))
    plan = None
    if not options.no_plan:
        with suppress(OutOfTime, SystemExit, subprocess.TimeoutExpired):
            budget.take(20.0)
            plan = planned(setup, model, bench.modes[_LAYER])
    return (
        about
        | told.body_of(bench.arms, plan, setup.groups)
        | {
            "is_over": bench.is_over,
            "took_s": round(monotonic() - began, 1),
        }
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--md", action="store_true", help="tables in Markdown on stdout")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="also draw where the time goes")
    parser.add_argument("--model", default="8b", help=f"a GGUF, or one of {', '.join(SHAPES)} (default: 8b)")
    parser.add_argument("--tokens", type=int, default=10_000, metavar="N", help="of the state (default: 10000)")
    parser.add_argument("--generate", type=int, default=64, metavar="N", help="tokens of a rate (default: 64)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="moves each way that count (default: 5)")
    parser.add_argument("--only", nargs="+", choices=ARMS, metavar="NAME", help=f"of {', '.join(ARMS)}")
    parser.add_argument("--devices", default="CUDA0,CUDA1", help="two devices (default: CUDA0,CUDA1)")
    parser.add_argument("--lib", type=Path, help="the libllama; else the first usable one")
    parser.add_argument("--server", type=Path, help="llama-server (default: the one beside the library)")
    parser.add_argument("--budget-s", type=float, metavar="S", help="end in so many seconds with what there is")
    parser.add_argument(
        "--leave", type=float, metavar="GIB", help="let another process hold all memory of each GPU but so much"
    )
    parser.add_argument("--no-plan", action="store_true", help="do not ask splitctl plan")
    parser.add_argument("--folder", type=Path, default=default_folder(), help="where models are made")
    parser.add_argument("--from", dest="results", nargs="+", type=Path, metavar="FILE", help="results of earlier runs")
    parser.add_argument("--docs", action="store_true", help="put the results into docs/speed.json and docs/speed.md")
    options = parser.parse_args(arguments)
    options.only = options.only or [arm for arm in ARMS if arm not in NATIVE_ARMS]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; see the module."""
    options = _options(arguments)
    if options.results:
        bodies = [json.loads(path.read_text(encoding="utf-8")) for path in options.results]
    else:
        bodies = [measure(options, lambda found: print(json.dumps(found), file=sys.stderr, flush=True))]
    if options.docs:
        told.write_docs(bodies)
    if options.picture:
        options.picture.write_text(told.picture(bodies[-1]), encoding="utf-8")
    if options.json:
        print(json.dumps(bodies[-1]))
    elif options.md or not options.docs:
        print("\n".join(told.tables(body) for body in bodies))
    return 1 if any(body.get("lost") or body.get("is_over") for body in bodies) else 0


if __name__ == "__main__":
    sys.exit(main())
