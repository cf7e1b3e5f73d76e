"""What `bench_gpu_switch` compares: each arm moves one model between two placements in its own way, as a child.

A child opens its arm at the first line of its stdin and says so in one JSON line. Then it takes one JSON line a move,
{"target": placement, "looks": whether to look at the host's memory}, and answers with one: total_ms and stages_ms of
the move, first_ms, the time until the first token that is decoded after it, and tps, the tokens in a second after that.
It ends with its stdin.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import sys
import tempfile
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import psutil

from llama_native import Library, NativeError
from splitctl.carry.sampling import SamplerSpec
from splitctl.control.requests import GenerateRequest
from splitctl.errors import SplitctlError
from splitctl.host.config import HostConfig
from splitctl.host.streams import Delta, Done, Stream, Why
from splitctl.host.supervisor import Supervisor
from splitctl.model.facts import read_facts
from splitctl.outcome import Route, SwitchOptions, Via, WeightsTier
from splitctl.placement import Placement
from splitctl.planning.memory import carry_bytes
from splitctl.session import Session
from tools.bench_gpu_server import Server
from tools.bench_switch import BARE_STAGES, Bare
from tools.children import say
from tools.gpu_jobs import tokens_of

_GREEDY = SamplerSpec(temp=0.0)
#: A prompt before the first that counts: threads, kernels and graphs are made.
_WARM_UP = 512
#: Moves until a tier has what it needs, such as both placements.
_N_TRIES = 4
#: How long a copy of the weights may take to fill [s].
_COPY_S = 120.0
#: Tokens after the first that no rate counts: graphs are made in them.
_N_SETTLE = 8
#: Tokens that a stream has before it is moved.
_N_BEFORE = 8
#: Of the sequences beside a stream: how many, and the share of all tokens that the stream keeps.
_N_IDLE, _STREAM_SHARE = 2, 0.2
_TOLD = (
    "status", "reason", "pause_ms", "stages_ms", "state_bytes", "weight_bytes", "n_tokens", "n_sequences", "via",
    "via_reason", "weights", "weights_reason", "carry_pinned", "carry_pinned_reason", "ahead_bytes", "ahead_reason",
)  # fmt: skip


class ArmFailed(Exception):
    """An arm cannot do what it is for, and says why."""


class Arm(Protocol):
    """One way of moving a model."""

    def prepare(self) -> None:
        """Do what takes time and no device."""

    def open(self) -> dict[str, Any]:
        """Load the model in the first placement and read the prompt."""

    def move(self, target: Placement) -> dict[str, Any]:
        """Move it and generate."""

    def processes(self) -> Iterable[int]:
        """Whose memory it takes."""

    def close(self) -> None:
        """End it."""


class Clocked:
    """The library's functions, with the times of every call.

    Args:
        lib: what cffi gives.
    """

    def __init__(self, lib: object) -> None:
        self._lib = lib
        self.calls: list[tuple[float, float, str]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._lib, name)
        if not callable(found):
            return found

        def timed(*arguments: object) -> Any:
            began = perf_counter()
            try:
                return found(*arguments)
            finally:
                self.calls.append((began, perf_counter(), name))

        setattr(self, name, timed)
        return timed

    def told(self) -> dict[str, Any]:
        """Say how long at least one call was under way, and the calls that took longest together, ms; then forget."""
        calls, self.calls = sorted(self.calls), []
        busy, end, each = 0.0, 0.0, dict[str, float]()
        for began, ended, name in calls:
            busy += max(0.0, ended - max(began, end))
            end = max(end, ended)
            each[name] = each.get(name, 0.0) + (ended - began) * 1e3
        longest = sorted(each.items(), key=lambda item: -item[1])[:6]
        return {"library_ms": busy * 1e3, "calls_ms": {name: round(ms, 2) for name, ms in longest}}


class SessionArm:
    """A session in this process, in a tier of weights, moved by our calls or by the library's own."""

    def __init__(self, job: Mapping[str, Any], weights: WeightsTier, via: Route = Route.COMPOSED) -> None:
        self._job = job
        self._weights = weights
        self._via = via
        self._here, self._there = (Placement.from_json(job[name]) for name in ("here", "there"))

    def prepare(self) -> None:
        """Open the library, which touches no device yet."""
        self._library = library = Library.open(self._job["library"], env=os.environ)
        self._clocked = library._lib = Clocked(library._lib)  # noqa: SLF001 - the clock stands between it and its calls

    def open(self) -> dict[str, Any]:
        """Load, read, and move there and back until the tier has what it needs."""
        job, library = self._job, self._library
        began = perf_counter()
        # Nothing is tried in a child: what a trial finds is remembered, and no part of later switches.
        self._session = session = Session.open(
            job["model"], self._here, library=library, prober=None, weights=self._weights
        )
        told = {"open_s": perf_counter() - began}
        session.set_sampler(_GREEDY)
        n_vocab = session.facts.n_vocab
        session.prefill(tokens_of(min(_WARM_UP, job["n_tokens"]), n_vocab, 3))
        session.remove_sequence(0)
        session.set_sampler(_GREEDY)
        began = perf_counter()
        session.prefill(tokens_of(job["n_tokens"], n_vocab))
        told |= {"prompt_tps": job["n_tokens"] / (perf_counter() - began)}
        session.advance([0])
        if job["arm"].startswith("fresh"):
            return told | {"first": self._generated()}
        # All that a carry can take, so that no memory grows while it is measured.
        session.reserve(self._here.n_ctx)
        return told if self._weights is WeightsTier.FILE else told | self._made_ready()

    def _made_ready(self) -> dict[str, Any]:
        """Move until the weights come from where they should; says why they did not, a line a try."""
        copy = self._session._live.engine.copy  # noqa: SLF001 - nobody else has to wait for it
        told: dict[str, Any] = {}
        if copy is not None:
            began = perf_counter()
            if not copy.wait(_COPY_S):
                raise ArmFailed(f"there is no copy of the weights: {copy.why}")
            told = {"copy_wait_s": perf_counter() - began, "copy_pin_reason": copy.pin_reason}
        tries: list[str] = []
        found: dict[str, Any] = {}
        for number in range(_N_TRIES):
            # The library asks for the weights where it was so loaded; the first move away from the file is ours.
            found = self._moved(self._there if number % 2 == 0 else self._here, Route.COMPOSED)
            if found["status"] != "switched":
                raise ArmFailed(f"{found['status']}: {found['reason']}")
            tries.append(found["weights_reason"])
            if number % 2 and found["weights"] == self._weights.value and not found["weights_reason"]:
                return told | {"tries": tries}
        if found["weights"] != self._weights.value:
            raise ArmFailed(f"weights came from {found['weights']}: {found['weights_reason'] or 'no reason was given'}")
        return told | {"tries": tries}

    def move(self, target: Placement) -> dict[str, Any]:
        """Switch; what is neither a call of the library is ours."""
        if self._job["arm"].startswith("fresh"):
            # It has stood still while others were moved: as they were, it is at work first.
            self._generated()
            return self._generated()
        return self._moved(target, self._via)

    def _moved(self, target: Placement, via: Route) -> dict[str, Any]:
        """Switch by a route."""
        self._clocked.calls.clear()
        began = perf_counter()
        # What is asked for by name and forced waits for no trial of the call.
        outcome = self._session.switch(target, via=via, force=via is Route.NATIVE)
        total_ms = (perf_counter() - began) * 1e3
        clocked = self._clocked.told()
        plain = outcome.to_json()
        told = {name: plain[name] for name in _TOLD} | {"total_ms": total_ms, **clocked}
        if plain["status"] != "switched":
            return told
        told["own_ms"] = total_ms - clocked["library_ms"]
        return told | self._generated()

    def _generated(self) -> dict[str, float]:
        return generated(self._session, self._job["n_generate"])

    def processes(self) -> list[int]:
        """This one."""
        return [os.getpid()]

    def link(self) -> dict[str, Any]:
        """What the link to each device allows, GB/s."""
        from llama_native.pinning import link_gb_s  # noqa: PLC0415 - asked of one arm

        return {name: link_gb_s(self._library, name) for name in dict.fromkeys(self._here.devices)}

    def close(self) -> None:
        """Free everything."""
        self._session.close()


class BareArm(SessionArm):
    """The library's calls alone, behind the session's back; see `bench_switch.Bare`."""

    def open(self) -> dict[str, Any]:
        """Load and read, and touch the buffer of the calls."""
        self._job = {**self._job, "arm": "fresh"}
        told = super().open()
        full = carry_bytes(self._session.facts, self._session.placement)
        self._bare = Bare(self._library, self._session, full - (self._session.n_state_bytes() or 0))
        return told | {"link_gb_s": self.link()}

    def move(self, target: Placement) -> dict[str, Any]:
        """Move by size, get, free, free, load, build, set."""
        times = self._bare.switch(target)
        self._clocked.calls.clear()
        return {
            "status": "switched",
            "reason": "",
            "total_ms": times.wall_s * 1e3,
            "stages_ms": {name: self._bare.stages[name][-1] for name in BARE_STAGES},
            "state_bytes": self._bare.n_bytes,
            "weight_bytes": self._session.facts.weight_bytes,
            **self._generated(),
        }


def generated(session: Session, n: int) -> dict[str, float]:
    """Generate a first token, a few that are not timed, and so many more; the newest token is not decoded yet."""
    laps = [perf_counter()]
    for _ in range(1 + _N_SETTLE + n):
        session.advance([0])
        laps.append(perf_counter())
    return {"first_ms": (laps[1] - laps[0]) * 1e3, "tps": n / (laps[-1] - laps[1 + _N_SETTLE])}


class HostedArm:
    """A hosted session under a stream; a second worker takes over. With idle sequences beside the stream, or without.

    Thread: a loop of its own runs the supervisor, also between moves.
    """

    def __init__(self, job: Mapping[str, Any], *, is_idle: bool) -> None:
        self._job = job
        self._is_idle = is_idle
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._folder = tempfile.TemporaryDirectory()
        self._said: list[str] = []

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def prepare(self) -> None:
        """Let the loop run."""
        self._thread.start()

    def open(self) -> dict[str, Any]:
        """Host the session and fill the idle sequences."""
        began = perf_counter()
        self._do(self._start())
        return {"open_s": perf_counter() - began}

    async def _start(self) -> None:
        job = self._job
        n_stream = job["n_tokens"] if not self._is_idle else max(1, int(job["n_tokens"] * _STREAM_SHARE))
        n_vocab = read_facts(job["model"]).n_vocab
        placement = Placement.from_json(job["here"])
        n_idle = max(1, (job["n_tokens"] - n_stream) // _N_IDLE)
        if self._is_idle:
            # With a stream of cells each: only then idle sequences go ahead of the one that generates.
            each = max(n_stream, n_idle) + placement.n_ctx - job["n_tokens"]
            placement = placement.changed(n_seq_max=_N_IDLE + 1, kv_unified=False, n_ctx=each * (_N_IDLE + 1))
        config = HostConfig(
            model=Path(job["model"]), library=Path(job["library"]), placement=placement, name="bench",
            state_folder=Path(self._folder.name),
        )  # fmt: skip
        self._supervisor = Supervisor(config, env=dict(os.environ, GGML_NO_BACKTRACE="1"), log=self._said.append)
        await self._supervisor.start()
        for number in range(_N_IDLE if self._is_idle else 0):
            tokens = tokens_of(n_idle, n_vocab, 10 + number)
            async for _ in await self._supervisor.generate(_request(tokens, 1)):
                pass
        self._prompt = tokens_of(n_stream, n_vocab)

    def move(self, target: Placement) -> dict[str, Any]:
        """Move the session under a stream that begins anew after the same prompt."""
        return dict(self._do(self._move(target)))

    async def _move(self, target: Placement) -> dict[str, Any]:
        client = _Client(self._supervisor, _request(self._prompt, -1))
        reading = asyncio.create_task(client.read())
        try:
            await client.has(_N_BEFORE)
            began = perf_counter()
            # Made-up weights: the modes' logits differ more than a real model's may, and a trial refuses that.
            options = SwitchOptions(force=True, via=Route.BESIDE)
            plain = await self._supervisor.switch({"mode": target.mode}, options)
            ended = perf_counter()
            told = {name: plain[name] for name in _TOLD} | {
                "total_ms": plain["total_ms"],
                "wall_ms": (ended - began) * 1e3,
            }
            if plain["status"] != "switched":
                return told
            if plain["via"] != Via.BESIDE.value:
                raise ArmFailed(f"it went {plain['via']}: {plain['via_reason'] or 'no reason was given'}")
            stages = {name: ms or 0.0 for name, ms in plain["stages_ms"].items()}
            told["stages_ms"] = stages | {"starting": max(0.0, plain["total_ms"] - sum(stages.values()))}
            n_by_then, n = len(client.at), self._job["n_generate"]
            await client.has(n_by_then + _N_SETTLE + n + 1)
            at = client.at
            gaps = [after - before for before, after in itertools.pairwise(at) if after >= began]
            return told | {
                "gap_ms": max(gaps) * 1e3,
                "tps": n / (at[n_by_then + _N_SETTLE + n] - at[n_by_then + _N_SETTLE]),
            }
        finally:
            client.stop()
            await reading

    def processes(self) -> list[int]:
        """This one and its workers."""
        children = psutil.Process().children(recursive=True)
        return [os.getpid(), *(child.pid for child in children)]

    def close(self) -> None:
        """Stop the session without saving it."""
        with suppress(AttributeError):
            self._do(self._supervisor.stop(save=False))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._folder.cleanup()


class _Client:
    """Asks for one answer after the other and notes when each token came [s]."""

    def __init__(self, supervisor: Supervisor, request: GenerateRequest) -> None:
        self._supervisor = supervisor
        self._request = request
        self._stream: Stream | None = None
        self._over = asyncio.Event()
        self.at: list[float] = []
        self._came = asyncio.Event()
        self._done: Done | None = None

    async def read(self) -> None:
        """Read until it is stopped, or an answer fails; made-up weights may end one at any token."""
        while not self._over.is_set() and self._done is None:
            self._stream = await self._supervisor.generate(self._request)
            if self._over.is_set():
                self._stream.cancel()
            async for event in self._stream:
                match event:
                    case Delta(token=int()):
                        self.at.append(perf_counter())
                    case Done(why=why) if why is not Why.EOS:
                        self._done = event
                self._came.set()

    def stop(self) -> None:
        """Let the answer end, and ask for no other."""
        self._over.set()
        if self._stream is not None:
            self._stream.cancel()

    async def has(self, n: int) -> None:
        """Wait until so many tokens have come; ArmFailed if the stream ends before."""
        while len(self.at) < n:
            if self._done is not None:
                raise ArmFailed(f"the stream ended after {len(self.at)} tokens: {self._done.message or self._done.why}")
            self._came.clear()
            await self._came.wait()


def _request(tokens: Sequence[int], n_predict: int) -> GenerateRequest:
    return GenerateRequest(tokens=tuple(tokens), n_predict=n_predict, sampler=_GREEDY)


class ServerArm:
    """What is done without us: llama-server stopped with its slot saved, and started again in the other mode."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self._job = job
        self._folder = tempfile.TemporaryDirectory()
        self._server: Server | None = None

    def prepare(self) -> None:
        """Nothing: a start is a part of what is timed."""

    def open(self) -> dict[str, Any]:
        """Start it and read the prompt."""
        self._tokens = tokens_of(self._job["n_tokens"], read_facts(self._job["model"]).n_vocab)
        began = perf_counter()
        self._server = server = self._started("here")
        told = {"open_s": perf_counter() - began}
        return told | {"prompt": server.complete(self._tokens, 1)}

    def _started(self, name: str) -> Server:
        job = self._job
        return Server(
            Path(job["server"]), Path(job["model"]), Placement.from_json(job[name]), Path(self._folder.name)
        ).start()

    def move(self, target: Placement) -> dict[str, Any]:
        """Save, stop, start, restore; then generate."""
        server = self._server
        if server is None:
            raise ArmFailed("the server is gone")
        laps = [perf_counter()]
        n_bytes = server.save()
        laps.append(perf_counter())
        server.stop()
        laps.append(perf_counter())
        name = "here" if target.mode.value == self._job["here"]["mode"] else "there"
        self._server = server = self._started(name)
        laps.append(perf_counter())
        server.restore()
        laps.append(perf_counter())
        stages = dict(zip(("saving", "stopping", "starting", "restoring"), _ms(laps), strict=True))
        made = server.complete(self._tokens, self._job["n_generate"] + 1)
        return {
            "status": "switched",
            "reason": "",
            "total_ms": (laps[-1] - laps[0]) * 1e3,
            "stages_ms": stages,
            "state_bytes": n_bytes,
            **made,
        }

    def processes(self) -> list[int]:
        """The server's."""
        return [] if self._server is None else [self._server.pid]

    def close(self) -> None:
        """Stop it."""
        if self._server is not None:
            self._server.stop()
        self._folder.cleanup()


def _ms(laps: Sequence[float]) -> list[float]:
    return [(after - before) * 1e3 for before, after in itertools.pairwise(laps)]


def resident(pids: Iterable[int]) -> dict[str, int] | None:
    """Sum what processes keep in memory, bytes, shared pages divided among those that have them; None: not told here.

    Keys: anon (their own), shmem (memory files), file (the page cache's, which others may have too).
    """
    sums = {"anon": 0, "shmem": 0, "file": 0}
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
        except OSError:
            return None
        for name in sums:
            found = re.search(rf"^Pss_{name}:\s+(\d+) kB$", text, re.MULTILINE | re.IGNORECASE)
            if found is None:
                return None
            sums[name] += int(found[1]) * 1024
    return sums


def arm_of(job: Mapping[str, Any]) -> Arm:
    """Make the arm of a job."""
    match job["arm"]:
        case "bare":
            return BareArm(job, WeightsTier.FILE)
        case "file" | "pinned" | "resident" as tier:
            return SessionArm(job, WeightsTier(tier))
        case "native":
            return SessionArm(job, WeightsTier.FILE, Route.NATIVE)
        case "native-pinned":
            return SessionArm(job, WeightsTier.PINNED, Route.NATIVE)
        case "beside" | "beside-idle" as name:
            return HostedArm(job, is_idle=name == "beside-idle")
        case "server":
            return ServerArm(job)
        case _:
            return SessionArm(job, WeightsTier.FILE)


def main() -> None:
    """Take moves from stdin; see the module."""
    job = json.loads(sys.argv[1])
    arm = arm_of(job)
    try:
        arm.prepare()
        for _ in itertools.islice(sys.stdin, 1):
            say(status="open", **arm.open(), host=resident(arm.processes()))
        for line in sys.stdin:
            asked = json.loads(line)
            found = arm.move(Placement.from_json(asked["target"]))
            # Looking through the pages of a large model takes as long as a move.
            say(status="moved", found=found, host=resident(arm.processes()) if asked["looks"] else None)
    except (ArmFailed, NativeError, SplitctlError, OSError) as error:
        say(
            status="failed",
            reason=f"{type(error).__name__}: {error}" if not isinstance(error, ArmFailed) else str(error),
        )
    finally:
        with suppress(NativeError, SplitctlError, OSError, AttributeError):
            arm.close()


if __name__ == "__main__":
    main()
