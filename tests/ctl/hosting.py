"""For tests of a supervisor: a worker that does what the test says, clients of streams, and sessions on the stub."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from splitctl.carry.sampling import SamplerSpec
from splitctl.control.requests import GenerateRequest
from splitctl.host.config import HostConfig
from splitctl.host.link import End
from splitctl.host.streams import Begun, Delta, Done, Stream, StreamEvent
from splitctl.host.supervisor import Supervisor
from splitctl.ipc.jobs import HostRequest
from splitctl.ipc.orders import Drawn, Ended, Open, Opened, Order, Reading, Report, Start, Step
from splitctl.placement import FlashAttn, Placement, SplitMode

GUARD_S = 60.0
"""How long anything may take before a test fails; no test measures it."""

LAYER = Placement(
    mode=SplitMode.LAYER,
    devices=("CPU", "CPU"),
    n_ctx=256,
    n_seq_max=2,
    kv_unified=True,
    flash_attn=FlashAttn.ON,
    n_threads=1,
    n_threads_batch=1,
)
TENSOR = LAYER.changed(mode=SplitMode.TENSOR)

GREEDY = SamplerSpec(temp=0.0)


class ScriptedLink:
    """Stands in for a worker and the link to it: keeps the orders, and reports what the test lets it report.

    Attributes:
        sent: every order, oldest first.
        n_cancels: how often it was asked to cancel.
        is_expected: whether its silence is measured.
    """

    links: list[ScriptedLink]

    def __init__(
        self,
        request: HostRequest,
        *,
        on_report: Callable[[Report], None],
        on_end: Callable[[End], None],
        env: Mapping[str, str],
        deadline_s: float | None,
        pass_fds: Sequence[int],
    ) -> None:
        del request, env, deadline_s
        self.sent: list[Order] = []
        self.n_cancels = 0
        self.is_expected, self.n_deadlines = True, 1.0
        self.is_open = False
        self.fds = tuple(pass_fds)
        self.end: End | None = None
        self._on_report, self._on_end = on_report, on_end
        self._ended = asyncio.get_running_loop().create_future()
        self.links.append(self)
        self.pid = 1000 + len(self.links)

    def send(self, order: Order) -> None:
        """Keep an order."""
        self.sent.append(order)

    def expect(self, *, anything: bool, n_deadlines: float = 1.0) -> None:
        """Keep whether something is owed."""
        self.is_expected, self.n_deadlines = anything, n_deadlines

    def cancel(self) -> None:
        """Count."""
        self.n_cancels += 1

    def kill(self) -> None:
        """Die of it, once the loop comes round."""
        asyncio.get_running_loop().call_soon(self.die, "the worker died by signal 9 (SIGKILL)")

    async def ended(self) -> End:
        """Wait for the end."""
        return await asyncio.shield(self._ended)

    async def close(self, grace_s: float) -> None:
        """Close at once."""
        del grace_s
        self.die("the worker closed")

    # ---- for the test ----

    def report(self, *reports: Report) -> None:
        """Report one after the other."""
        for report in reports:
            self.is_open = self.is_open or isinstance(report, Opened)
            self._on_report(report)

    def open(self, placement: Placement | None = None, *, recomputed: bool = False) -> None:
        """Serve where it was ordered to, or elsewhere."""
        first = self.sent[0]
        assert isinstance(first, Open)
        self.report(Opened(placement or first.placement, {"n_vocab": 260, "build": "b"}, recomputed=recomputed))

    def die(self, reason: str, **more: Any) -> None:
        """End."""
        if self.end is None:
            self.end = End(reason, **more)
            self._ended.set_result(self.end)
            self._on_end(self.end)

    def starts(self) -> list[Start]:
        """The streams that it was given."""
        return [order for order in self.sent if isinstance(order, Start)]

    def read(self, stream: int) -> None:
        """Read a stream's prompt."""
        start = next(one for one in self.starts() if one.stream == stream)
        self.report(Reading(stream, len(start.tokens) - start.is_pending, 0, 1.0))

    def draw(self, stream: int, *tokens: int) -> None:
        """Draw tokens, each its own letter."""
        for token in tokens:
            self.report(Step((Drawn(stream, token, bytes([token]), 0),), 1.0))

    def finish(self, stream: int, why: str = "length") -> None:
        """End a stream."""
        self.report(Ended(stream, why))


def request_of(tokens: Sequence[int], n_predict: int = -1, **more: Any) -> GenerateRequest:
    """Ask for a generation after tokens."""
    return GenerateRequest(tokens=tuple(tokens), n_predict=n_predict, sampler=more.pop("sampler", GREEDY), **more)


async def soon(holds: Callable[[], object]) -> None:
    """Let the loop come round until something holds."""
    async with asyncio.timeout(GUARD_S):
        while not holds():
            await _round()


async def _round() -> None:
    """Let everything that is ready run once."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.005, done.set_result, None)
    await done


@dataclass(slots=True)
class Client:
    """What a client has got of its stream.

    Attributes:
        events: everything, oldest first.
        tokens: ids, in the order of their numbers.
        text: all text.
        done: the last event.
    """

    stream: Stream
    events: list[StreamEvent] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    done: Done | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    reader: asyncio.Task[None] | None = None

    async def read(self) -> None:
        """Read to the end, and hold the stream to its laws."""
        async for event in self.stream:
            assert self.done is None
            self.events.append(event)
            match event:
                case Begun():
                    assert not self.tokens
                case Delta():
                    self.text += event.text
                    if event.token is not None:
                        assert event.index == len(self.tokens)
                        self.tokens.append(event.token)
                case Done():
                    self.done = event
            self.changed.set()

    async def has(self, n_tokens: int) -> None:
        """Wait for so many tokens, or the end."""
        async with asyncio.timeout(GUARD_S):
            while len(self.tokens) < n_tokens and self.done is None:
                self.changed.clear()
                await self.changed.wait()

    async def end(self) -> Done:
        """Wait for the end."""
        assert self.reader is not None
        async with asyncio.timeout(GUARD_S):
            await self.reader
        assert self.done is not None
        return self.done

    def kinds(self) -> list[str]:
        """Names of the events, a run of deltas as one."""
        names = [type(event).__name__ for event in self.events]
        return [name for at, name in enumerate(names) if at == 0 or name != "Delta" or names[at - 1] != "Delta"]


async def ask(supervisor: Supervisor, request: GenerateRequest) -> Client:
    """Begin a generation and read it."""
    client = Client(await supervisor.generate(request))
    client.reader = asyncio.ensure_future(client.read())
    return client


def config(folder: Path, model: Path, library: Path | None, **more: Any) -> HostConfig:
    """Say what is hosted."""
    return HostConfig(
        **{"model": model, "library": library, "placement": LAYER, "state_folder": folder / "sessions", **more}
    )


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Give the environment of workers whose caches and states are in a folder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LLAMA_", "STUB_"))}
    places = {"XDG_CACHE_HOME": str(folder / "cache"), "XDG_STATE_HOME": str(folder / "state")}
    return kept | {"GGML_NO_BACKTRACE": "1"} | places | more
