"""Switch a hosted session back and forth under streams that never end, and look for anything that grows or goes wrong.

    python -m tools.soak [--json] [--switches 200] [--streams 4] [--tokens N] [--lib PATH] [--model FILE]

One session, two virtual devices, several greedy streams; as soon as one ends its client begins the next. Every switch
must come to `switched`, and be confirmed by its trial. Samples are taken between two switches, after the first fifth of
them has warmed everything up.

fds, processes, shm_bytes   of the host and its worker, at the first sample; any later growth is a fault
rss                         of the worker (its arenas, which are shared memory, included) and of the host, MiB: medians
                            of the first fifth of the samples and of the last, and the growth in percent
pause_ms                    how long a stream that generates gets no token at a switch: median and worst
texts, wrong                answers, and those with a token that is not the likeliest one
worst_gap                   how far a token is from the likeliest of a fresh context that reads the same history,
                            logits: float order makes less than a half (greedy_gaps)
control_gap, blind          the same of texts with one token left out: the median, and how many texts would not show it

Exit code 0: no switch failed, nothing grew, all texts are right.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from splitctl.carry.sampling import SamplerSpec
from splitctl.control.requests import GenerateRequest
from splitctl.host.config import HostConfig
from splitctl.host.streams import Begun, Delta, Done, Why
from splitctl.host.supervisor import Supervisor
from splitctl.outcome import Route, SwitchOptions
from splitctl.placement import FlashAttn, Placement, SplitMode
from tools import greedy_gaps
from tools.places import small_model, usable_library

#: Switches before the first sample, and their share of all: pools, arenas and heaps reach their size. Measured: the
#: worker's resident memory grows by 6 % in the first 40 switches, and by 0.2 % in the next 80.
WARM_UP, WARM_UP_SHARE = 6, 0.2
#: Tokens that a stream gets between two switches.
_BETWEEN = 3
#: Growth of resident memory that is still flat [share].
FLAT = 0.05
_DEADLINE_S = 120.0
_MIB = 1 << 20
_PROMPTS = (
    "Once upon a time there was a little girl who lived near the sea. Every morning",
    "The capital of France is",
    "To make a good soup you first need",
    "In 1969, two men walked",
    "The three most important rules of writing are",
    "Water boils at a lower temperature on a mountain because",
)


@dataclass(frozen=True, slots=True)
class Sample:
    """What the host and its worker hold at one moment.

    Args:
        fds: open descriptors of both.
        processes: processes below the host.
        shm_bytes: shared memory that they have open, bytes.
        worker_rss: resident memory of the worker, bytes.
        host_rss: resident memory of this process, bytes.
    """

    fds: int
    processes: int
    shm_bytes: int
    worker_rss: int
    host_rss: int

    @classmethod
    def take(cls, worker_pid: int) -> Sample:
        """Look at this process and a worker."""
        # Python keeps dead cycles until they are a quarter of everything; what grows is what is there without them.
        gc.collect()
        host, worker = psutil.Process(), psutil.Process(worker_pid)
        folder = Path("/proc/self/fd")
        shared = [path for path in folder.iterdir() if path.is_symlink() and "/memfd:" in str(path.readlink())]
        return cls(
            fds=host.num_fds() + worker.num_fds(),
            processes=len(host.children(recursive=True)),
            shm_bytes=sum(path.stat().st_size for path in shared),
            worker_rss=worker.memory_info().rss,
            host_rss=host.memory_info().rss,
        )


@dataclass(slots=True)
class Soak:
    """What is seen while it lasts.

    Args:
        texts: prompt and answer of every stream that ended, and the length of the prompt.
        faults: what went wrong.
        samples: one between any two switches.
        outcomes: of every switch: status and total time, ms.
        pauses_ms: of every stream at every switch.
    """

    texts: list[tuple[list[int], int]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    switch_ms: list[float] = field(default_factory=list)
    pauses_ms: list[float] = field(default_factory=list)


class Client:
    """Asks for one answer after the other, until it is told to stop."""

    def __init__(self, supervisor: Supervisor, prompts: Sequence[tuple[int, ...]], n_predict: int, soak: Soak) -> None:
        self._supervisor = supervisor
        self._prompts = itertools.cycle(prompts)
        self._n_predict = n_predict
        self._soak = soak
        self._last = 0.0
        self._longest = 0.0
        self._count = 0
        self._got_one = asyncio.Event()
        self.is_last = False

    async def run(self) -> None:
        """Read answers."""
        while not self.is_last:
            await self._answer(next(self._prompts))

    async def _answer(self, prompt: tuple[int, ...]) -> None:
        tokens: list[int] = []
        request = GenerateRequest(tokens=prompt, n_predict=self._n_predict, sampler=SamplerSpec(temp=0.0))
        async for event in await self._supervisor.generate(request):
            match event:
                case Begun() | Delta(token=None):
                    # Reading is no pause of a stream that generates.
                    self._last = 0.0
                case Delta(token=int(token)):
                    if event.index != len(tokens):
                        self._soak.faults.append(f"token {event.index} came as number {len(tokens)}")
                    tokens.append(token)
                    self._note()
                case Done():
                    if event.why not in {Why.LENGTH, Why.EOS}:
                        self._soak.faults.append(f"a stream ended with {event}")
                    self._soak.texts.append(([*prompt, *tokens], len(prompt)))
        self._last = 0.0

    def _note(self) -> None:
        now = time.perf_counter()
        if self._last:
            self._longest = max(self._longest, now - self._last)
        self._last = now
        self._count += 1
        self._got_one.set()

    def look(self) -> None:
        """Begin to look for the longest time between two tokens."""
        self._longest = 0.0

    def seen_ms(self) -> float:
        """Give the longest time since `look`, ms; 0 where the stream did not generate."""
        return self._longest * 1e3

    async def more(self, n: int) -> None:
        """Wait for further tokens."""
        wanted = self._count + n
        while self._count < wanted:
            self._got_one.clear()
            await self._got_one.wait()


async def soak_session(
    library: Path, model: Path, folder: Path, *, n_switches: int, n_streams: int, n_predict: int, quiet: bool
) -> Soak:
    """Host a session and switch it.

    Args:
        library: the libllama.
        model: the GGUF.
        folder: for what the session keeps.
        n_switches: switches, both ways together.
        n_streams: streams that generate all the time.
        n_predict: tokens of each answer.
        quiet: say nothing.

    Returns:
        What was seen.
    """
    prompts = [tuple(tokens) for tokens in greedy_gaps.tokenize(library, model, _PROMPTS)]
    placement = Placement(
        mode=SplitMode.LAYER,
        devices=("CPU", "CPU"),
        n_ctx=256 * n_streams,
        n_batch=64,
        n_ubatch=64,
        n_seq_max=n_streams,
        kv_unified=True,
        flash_attn=FlashAttn.ON,
        n_threads=1,
        n_threads_batch=1,
    )
    config = HostConfig(
        model=model, library=library, placement=placement, name="soak", deadline_s=_DEADLINE_S, state_folder=folder
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
    soak = Soak()
    supervisor = Supervisor(config, env=env | {"GGML_NO_BACKTRACE": "1"}, log=lambda _: None)
    await supervisor.start()
    try:
        clients = [
            Client(supervisor, prompts[index:] + prompts[:index], n_predict + 7 * index, soak)
            for index in range(n_streams)
        ]
        running = [asyncio.create_task(client.run()) for client in clients]
        pid = supervisor.status()["worker_pid"]
        for number in range(n_switches):
            await _rounds(clients, running)
            for client in clients:
                client.look()
            mode = SplitMode.TENSOR if number % 2 == 0 else SplitMode.LAYER
            outcome = await supervisor.switch({"mode": mode}, SwitchOptions(via=Route.IN_PLACE))
            await _rounds(clients, running)
            _judge(soak, supervisor.status(), outcome, pid, number)
            soak.pauses_ms += [seen for client in clients if (seen := client.seen_ms())]
            if number >= max(WARM_UP, WARM_UP_SHARE * n_switches):
                soak.samples.append(Sample.take(pid))
            if not quiet and number % 20 == 19:
                print(f"{number + 1} of {n_switches} switches, {len(soak.texts)} answers", file=sys.stderr)
        for client in clients:
            client.is_last = True
        await asyncio.gather(*running)
    finally:
        await supervisor.stop(save=False)
    return soak


async def _rounds(clients: Sequence[Client], running: Sequence[asyncio.Task[None]]) -> None:
    """Wait until every stream has got some tokens, or one of them failed."""
    waits = [asyncio.create_task(client.more(_BETWEEN)) for client in clients]
    everyone = asyncio.gather(*waits)
    either: list[asyncio.Future[Any]] = [everyone, *running]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED, timeout=_DEADLINE_S)
    if not everyone.done():
        everyone.cancel()
        for task in running:
            if task.done():
                task.result()
        raise RuntimeError(f"the streams stand still for {_DEADLINE_S:g} s, or ended before their time")


def _judge(soak: Soak, status: dict[str, Any], outcome: dict[str, Any], pid: int, number: int) -> None:
    soak.switch_ms.append(outcome["total_ms"])
    last = status["last_switch"]
    if outcome["status"] != "switched" or not last["confirmed"]:
        soak.faults.append(f"switch {number}: {last['status']}, confirmed {last['confirmed']}: {last['reason']}")
    if status["worker_pid"] != pid:
        soak.faults.append(f"switch {number}: another worker serves")


def growth(samples: Sequence[int]) -> tuple[float, float, float]:
    """Compare the first fifth of samples with the last: both medians, and the growth as a share."""
    n = max(1, len(samples) // 5)
    first, last = statistics.median(samples[:n]), statistics.median(samples[-n:])
    return first, last, last / first - 1.0


def summary(soak: Soak, gaps: Sequence[greedy_gaps.Gaps]) -> dict[str, Any]:
    """Put together what was seen."""
    faults = list(soak.faults)
    for name in ("fds", "processes", "shm_bytes"):
        values = [getattr(sample, name) for sample in soak.samples]
        if max(values) > values[0]:
            faults.append(f"{name} grew from {values[0]} to {max(values)}")
    rss: dict[str, Any] = {}
    for name in ("worker_rss", "host_rss"):
        first, last, share = growth([getattr(sample, name) for sample in soak.samples])
        rss[name] = {
            "first_mib": round(first / _MIB, 1),
            "last_mib": round(last / _MIB, 1),
            "growth_percent": round(100 * share, 2),
        }
        if share > FLAT:
            faults.append(f"{name} grew by {100 * share:.1f} %")
    blind = sum(gap.is_blind for gap in gaps)
    if 5 * blind > len(gaps):
        faults.append(f"{blind} of {len(gaps)} texts would not show a lost token")
    wrong = [index for index, gap in enumerate(gaps) if not gap.is_right]
    faults += [f"answer {index}: {gaps[index].fault}" for index in wrong]
    first_sample = soak.samples[0]
    return {
        "switches": len(soak.switch_ms),
        "texts": len(gaps),
        "tokens": sum(gap.n for gap in gaps),
        "wrong": len(wrong),
        "worst_gap": round(max((gap.worst for gap in gaps), default=0.0), 3),
        "other_tokens": sum(gap.n_other for gap in gaps),
        "control_gap": round(statistics.median(gap.control for gap in gaps), 2),
        "blind": blind,
        "switch_ms": {"median": round(statistics.median(soak.switch_ms), 1), "worst": round(max(soak.switch_ms), 1)},
        "pause_ms": {
            "median": round(statistics.median(soak.pauses_ms), 1),
            "worst": round(max(soak.pauses_ms), 1),
            "n": len(soak.pauses_ms),
        },
        "fds": first_sample.fds,
        "processes": first_sample.processes,
        "shm_bytes": first_sample.shm_bytes,
        "rss": rss,
        "faults": faults,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; its exit code is 0 when nothing went wrong and nothing grew, 1 otherwise, 2 for usage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--switches", type=int, default=200, help="how many (default: 200)")
    parser.add_argument("--streams", type=int, default=4, help="how many generate at once (default: 4)")
    parser.add_argument("--tokens", type=int, default=60, help="of an answer (default: 60)")
    parser.add_argument("--lib", type=Path, help="the libllama (default: the first usable one)")
    parser.add_argument("--model", type=Path, help="the GGUF (default: SmolLM2 in the user's cache)")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    options = parser.parse_args(arguments)
    if options.switches <= WARM_UP + 5:
        parser.error(
            f"--switches is {options.switches}; more than {WARM_UP + 5} are needed, the first {WARM_UP} warm up"
        )
    library, model = usable_library(options.lib), options.model or small_model()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        soak = asyncio.run(
            soak_session(
                library,
                model,
                Path(folder),
                n_switches=options.switches,
                n_streams=options.streams,
                n_predict=options.tokens,
                quiet=options.quiet,
            )
        )
    result = summary(soak, greedy_gaps.measure(library, model, soak.texts))
    result["seconds"] = round(time.monotonic() - started, 1)
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name}: {value}")
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
