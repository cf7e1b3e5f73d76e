"""Let a hosted session switch by itself under two kinds of clients, and hold it to its bounds and the simulator's word.

    python -m tools.soak_auto [--json] [--seconds 300] [--switches N] [--clients 8] [--long N] [--short N]
                              [--rates FILE] [--bench S] [--max-wait S] [--min-stay S] [--weights TIER] [--judge N]
                              [--threads N] [--device A,B] [--lib PATH] [--model FILE]

Half of the clients ask for short answers to long prompts, the others for long answers to short prompts, each for one
after the other until the time is over. No two prompts are alike. The numbers are those of the profile that splitctl
bench has kept, or of --rates. Without one splitctl bench measures first, in 400 s, and with --bench S always, in so
many seconds. All answers are greedy.

requests, tokens     answers, and tokens of them
switches             how they ended
decisions            what the policy decided, by action; each switch and each hold is a line of the log
held                 prompts that were held, and for how long at most, s
busy_s, predicted    time in which somebody was there, and what the simulator says of the same requests, s: for the
                     policy (off_percent: how far it is from what was) and for each mode all the time
first_token_s        until the first token, by kind of client: median and worst; beside the simulator's mean
wrong, worst_gap     answers with a token that is not the likeliest of a fresh context that reads the same, and how far
                     the worst is from it, logits (greedy_gaps); at most 24 answers are looked at
faults               answers that failed or are wrong, switches that fell back, prompts that were held for too long

Exit code 0: there are no faults.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from splitctl.carry.sampling import SamplerSpec
from splitctl.cli.policy_options import NoNumbers, PolicyOptions, policy_config
from splitctl.control.requests import GenerateRequest
from splitctl.host.config import HostConfig, HostState, PolicyConfig
from splitctl.host.events import SwitchEnded, TrialEnded
from splitctl.host.streams import Begun, Delta, Done, Why
from splitctl.host.supervisor import Supervisor
from splitctl.outcome import WeightsTier
from splitctl.placement import FlashAttn, Placement, SplitMode
from splitctl.planning.learned import MODES, Learned
from splitctl.planning.policy import Policy
from splitctl.planning.simulate import follow, stay
from splitctl.planning.traces import Request
from tools import greedy_gaps
from tools.places import CHECKOUT, small_model, usable_library

_MOST_JUDGED = 24
#: A loop that is busy wakes up late [s].
_LATE_S = 1.0
_DEADLINE_S = 300.0
#: How long a bench may take where no profile is kept [s].
_BENCH_S = 400.0
#: How long a switch is waited for at the end [s].
_PATIENCE_S = 300.0
_PASSAGE = (
    "The river rises in the hills, runs through two towns and a forest, and meets the sea behind the old harbour. "
    "Every spring the water takes some of the bank along, and every autumn the people build it up again. "
)


@dataclass(slots=True)
class Answer:
    """What a client asked for, and got.

    Args:
        reads: its prompt is the long part, and not its answer.
        prompt: tokens.
        n_max: most tokens of the answer.
        came: when it was asked for, s.
        first: when its first token came, s.
        ended: when it ended, s.
        n_reused: tokens of the prompt that a sequence held.
        tokens: the answer.
        fault: what went wrong.
    """

    reads: bool
    prompt: list[int]
    n_max: int
    came: float
    first: float = 0.0
    ended: float = 0.0
    n_reused: int = 0
    tokens: list[int] = field(default_factory=list)
    fault: str = ""

    async def read(self, supervisor: Supervisor) -> None:
        """Ask for it."""
        request = GenerateRequest(tokens=tuple(self.prompt), n_predict=self.n_max, sampler=SamplerSpec(temp=0.0))
        async for event in await supervisor.generate(request):
            match event:
                case Begun():
                    self.n_reused = event.n_reused
                case Delta(token=int(token)):
                    self.first = self.first or time.monotonic()
                    if event.index != len(self.tokens):
                        self.fault = f"token {event.index} came as number {len(self.tokens)}"
                    self.tokens.append(token)
                case Done():
                    if event.why not in {Why.LENGTH, Why.EOS}:
                        self.fault = f"it ended with {event}"
        self.ended = time.monotonic()

    @property
    def request(self) -> Request:
        """The same, for the simulator."""
        return Request(self.came, len(self.prompt), self.n_reused, len(self.tokens), self.n_max)


async def soak(
    config: HostConfig, *, n_clients: int, seconds: float, n_switches: int, n_long: int, n_short: int
) -> tuple[list[Answer], dict[str, Any], Counter[str], list[str]]:
    """Serve clients until the time is over; every answer that was begun is waited for.

    Args:
        config: what is served.
        n_clients: at once, of both kinds together.
        seconds: how long they ask.
        n_switches: switches for which they go on asking.
        n_long: tokens of a long prompt, and of a long answer.
        n_short: of short ones.

    Returns:
        The answers, the policy's status at the end, how switches ended, and the lines of the log.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
    said: list[str] = []
    supervisor = Supervisor(config, env=env | {"GGML_NO_BACKTRACE": "1"}, log=said.append)
    await supervisor.start()
    ended: Counter[str] = Counter()
    watching = asyncio.create_task(_watch(supervisor, ended))
    passage = (await supervisor.tokenize({"text": _PASSAGE * 4})).tokens
    answers: list[Answer] = []
    started = time.monotonic()

    def is_patient() -> bool:
        return time.monotonic() - started < seconds + _PATIENCE_S

    async def client(*, reads: bool) -> None:
        while time.monotonic() - started < seconds or (ended["switched"] < n_switches and is_patient()):
            n = n_long if reads else n_short
            at = (13 * len(answers)) % len(passage)
            prompt = [*itertools.islice(itertools.cycle(passage), at, at + n)]
            answer = Answer(reads, prompt, n_short if reads else n_long, time.monotonic())
            answers.append(answer)
            await answer.read(supervisor)

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(n_clients):
                group.create_task(client(reads=number % 2 == 0))
        events = supervisor.subscribe()
        while supervisor.state is HostState.SWITCHING:
            await anext(events)
        return answers, supervisor.status()["policy"], ended, said
    finally:
        await supervisor.stop(save=False)
        await watching


async def _watch(supervisor: Supervisor, ended: Counter[str]) -> None:
    """Count how switches end, and trials that are fallen back from."""
    async for event in supervisor.subscribe():
        if isinstance(event, SwitchEnded) or (isinstance(event, TrialEnded) and not event.outcome["confirmed"]):
            ended[str(event.outcome["status"])] += 1


def busy(answers: Sequence[Answer]) -> float:
    """Sum up the time in which somebody was there, s."""
    total, end = 0.0, 0.0
    for one in sorted(answers, key=lambda one: one.came):
        total += max(one.ended - max(one.came, end), 0.0)
        end = max(end, one.ended)
    return total


def predicted(answers: Sequence[Answer], policy: PolicyConfig, n_clients: int) -> dict[str, Any]:
    """Ask the simulator for the same requests: busy seconds by the policy and in each mode, the mean first token."""
    if policy.costs is None:
        raise ValueError("there are no costs to go by")
    trace = [one.request for one in sorted(answers, key=lambda one: one.came)]
    decides = Policy(Learned(policy.costs), policy.settings)
    auto = follow(trace, decides, policy.costs, SplitMode.LAYER, n_clients)
    fixed = {mode.value: stay(trace, policy.costs, mode, n_clients).busy_s for mode in MODES}
    return {
        "auto_s": round(auto.busy_s, 2),
        **{f"{name}_s": round(seconds, 2) for name, seconds in fixed.items()},
        "first_token_s": round(statistics.mean(auto.firsts_s), 3),
        "switches": len(auto.switched_at),
    }


def summary(
    answers: Sequence[Answer],
    status: dict[str, Any],
    ended: Mapping[str, int],
    said: Sequence[str],
    gaps: Sequence[greedy_gaps.Gaps],
    max_wait_s: float,
) -> dict[str, Any]:
    """Put together what was seen."""
    faults = [f"an answer to {len(one.prompt)} tokens: {one.fault}" for one in answers if one.fault]
    faults += [f"a text: {one.fault}" for one in gaps if not one.is_right]
    faults += [f"{n} switches ended as {name}" for name, n in ended.items() if name not in {"switched", "cancelled"}]
    if status["policy"] != "auto":
        return {"faults": [*faults, f"the policy is off: {status.get('fault')}"]}
    held = status["waits"]
    if held["longest_s"] > max_wait_s + _LATE_S:
        faults.append(f"a prompt was held for {held['longest_s']:.1f} s, and {max_wait_s:g} s is the bound")
    n_logged = sum(line.startswith("policy: goes") for line in said)
    if n_logged != status["decisions"].get("switch", 0):
        faults.append(f"{n_logged} switches in the log, of {status['decisions']}")
    kinds = {"reads": [one for one in answers if one.reads], "writes": [one for one in answers if not one.reads]}
    return {
        "requests": len(answers),
        "tokens": sum(len(one.tokens) for one in answers),
        "switches": dict(ended),
        "decisions": status["decisions"],
        "held": {"count": held["count"], "longest_s": round(held["longest_s"], 2), "bound_s": max_wait_s},
        "first_token_s": {
            name: {
                "median": round(statistics.median(one.first - one.came for one in some), 2),
                "worst": round(max(one.first - one.came for one in some), 2),
            }
            for name, some in kinds.items()
            if some
        },
        "judged": len(gaps),
        "wrong": sum(not one.is_right for one in gaps),
        "worst_gap": round(max((one.worst for one in gaps), default=0.0), 3),
        "faults": faults,
    }


def measure(model: Path, library: Path, placement: Placement, seconds: float) -> None:
    """Let splitctl bench make and keep the profile of what is served here.

    Raises:
        SystemExit: it could not.
    """
    # The context is the bench's own: it has room for what is measured at depth.
    flags = placement.changed(mode=SplitMode.LAYER, n_ctx=0).describe().removeprefix("-sm layer ").split()
    modes = [word for mode in MODES for word in ("-sm", mode.value)]
    words = ["-m", str(model), "--lib", str(library), *flags, *modes, "--ubatch", str(placement.n_ubatch)]
    command = [sys.executable, "-m", "splitctl", "bench", *words, "--budget", str(seconds)]
    _say(" ".join(command))
    done = subprocess.run(command, cwd=CHECKOUT, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise SystemExit(f"splitctl bench ended with exit status {done.returncode}; run it by hand to see why")


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Do all of it."""
    library, model = usable_library(asked.lib), asked.model or small_model()
    devices = tuple(asked.device.split(","))
    room = asked.long + asked.short + 8
    placement = Placement(
        mode=SplitMode.LAYER,
        devices=devices,
        n_ctx=-(-room * asked.clients // 256) * 256,
        n_seq_max=asked.clients,
        kv_unified=True,
        flash_attn=FlashAttn.ON,
        n_threads=asked.threads,
        n_threads_batch=asked.threads,
    )
    bounds = {"min_stay_s": asked.min_stay, "max_wait_s": asked.max_wait}
    options = PolicyOptions(is_on=True, rates=asked.rates, bounds=bounds)
    find = functools.partial(policy_config, options, model, placement, library, (), asked.weights, _say)
    try:
        if asked.bench is not None:
            measure(model, library, placement, asked.bench)
        policy = find()
    except NoNumbers:
        if asked.bench is not None:
            raise
        measure(model, library, placement, _BENCH_S)
        policy = find()
    with tempfile.TemporaryDirectory() as folder:
        config = HostConfig(
            model=model,
            library=library,
            placement=placement,
            name="soak",
            deadline_s=_DEADLINE_S,
            weights=asked.weights,
            policy=policy,
            state_folder=Path(folder),
        )
        sizes = {"n_clients": asked.clients, "n_long": asked.long, "n_short": asked.short}
        work = soak(config, **sizes, seconds=asked.seconds, n_switches=asked.switches)
        answers, status, ended, said = asyncio.run(work)
    texts = [([*one.prompt, *one.tokens], len(one.prompt)) for one in answers if one.tokens and not one.fault]
    texts = texts[:: -(-len(texts) // asked.judge)] if texts and asked.judge else []
    gaps = greedy_gaps.measure(library, model, texts, devices, always_control=False) if texts else []
    seconds, word = busy(answers), predicted(answers, policy, asked.clients)
    return {
        **summary(answers, status, ended, said, gaps, policy.settings.max_wait_s),
        "profile": policy.source,
        "busy_s": round(seconds, 2),
        "predicted": word,
        "off_percent": round(100 * (word["auto_s"] / seconds - 1), 1),
        "log": [line for line in said if line.startswith("policy: ")],
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; its exit code is 0 without faults, 1 with them, 2 for usage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, the log of decisions in it")
    parser.add_argument("--seconds", type=float, default=300.0, help="how long clients ask (default: 300)")
    parser.add_argument("--switches", type=int, default=0, help="go on until there were so many (default: 0)")
    parser.add_argument("--clients", type=int, default=8, help="of both kinds together (default: 8)")
    parser.add_argument("--long", type=int, default=400, help="tokens of a long prompt or answer (default: 400)")
    parser.add_argument("--short", type=int, default=24, help="tokens of short ones (default: 24)")
    parser.add_argument("--rates", type=Path, help="a file of rates (default: the kept profile)")
    parser.add_argument("--bench", type=float, metavar="S", help="let splitctl bench measure first, in so many seconds")
    parser.add_argument("--max-wait", type=float, default=20.0, help="longest that a prompt is held, s (default: 20)")
    parser.add_argument("--min-stay", type=float, default=2.0, help="least time between two switches, s (default: 2)")
    parser.add_argument("--judge", type=int, default=_MOST_JUDGED, help="most texts to judge (default: 24)")
    parser.add_argument("--threads", type=int, default=1, help="of a processor's devices (default: 1)")
    parser.add_argument("--weights", type=WeightsTier, default=WeightsTier.FILE, help="tier (default: file)")
    parser.add_argument("--device", default="CPU,CPU", help="two devices (default: CPU,CPU)")
    parser.add_argument("--lib", type=Path, help="the libllama (default: the first usable one)")
    parser.add_argument("--model", type=Path, help="the GGUF (default: SmolLM2 in the user's cache)")
    asked = parser.parse_args(arguments)
    if asked.bench is not None and asked.rates is not None:
        parser.error("--bench makes a profile, and --rates takes its place; leave out one of them")
    result = run(asked)
    if asked.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{name}: {value}" for name, value in result.items() if name != "log"))
        print("\n".join(result["log"]))
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
