"""A supervisor that obeys the test, behind a real control socket: what the socket does can be tried step by step."""

from __future__ import annotations

import asyncio
import queue
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitctl.control.requests import GenerateRequest
from splitctl.control.server import ControlLimits, ControlServer
from splitctl.control.sockets import Address, claim, prepared
from splitctl.errors import Busy
from splitctl.host.streams import Begun, Delta, Done, Why
from splitctl.outcome import SwitchOptions


class FakeStream:
    """A stream of as many tokens as were asked for, each when the test lets it through."""

    def __init__(self, host: FakeHost, n: int) -> None:
        self._host = host
        self._n = n
        self._cancelled = asyncio.Event()

    def cancel(self) -> None:
        """End it."""
        self._cancelled.set()
        self._host.ended.set()
        self._host.n_cancelled += 1

    async def __aiter__(self) -> AsyncIterator[Begun | Delta | Done]:
        yield Begun(3, 1)
        index = 0
        while self._n < 0 or index < self._n:
            if self._cancelled.is_set():
                break
            await asyncio.sleep(0)
            yield Delta("x" * self._host.piece, 7, index)
            index += 1
            self._host.n_drawn += 1
        yield Done(Why.CANCELLED if self._cancelled.is_set() else Why.LENGTH)


class FakeHost:
    """Does what the test says; a switch lasts until the test, or a cancel, ends it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.loop = asyncio.get_running_loop()
        self.switch_end = asyncio.Event()
        self.switch_began = threading.Event()
        self.ended = threading.Event()
        self.events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.subscribed = threading.Event()
        self.unsubscribed = threading.Event()
        self.error: Exception | None = None
        self.held: asyncio.Event | None = None
        """Checks, saves and restores wait for it."""
        self.at_work: queue.SimpleQueue[str] = queue.SimpleQueue()
        """What began to wait, and how it ended."""
        self.is_switching = False
        self.was_cancelled = False
        self.n_cancelled = 0
        self.n_drawn = 0
        self.piece = 1
        self.lines: list[str] = []

    def status(self) -> dict[str, Any]:
        """Say how often it was called."""
        return {"name": "fake", "state": "serving", "n": len(self.calls)}

    def recent_switches(self) -> list[dict[str, Any]]:
        """Say that there were none."""
        return []

    async def generate(self, request: GenerateRequest) -> FakeStream:
        """Begin a stream."""
        self._take("generate", request=request)
        return FakeStream(self, request.n_predict)

    async def switch(
        self,
        changes: Mapping[str, Any],
        options: SwitchOptions,
        *,
        on_stage: Callable[[str, float], None],
        **more: Any,
    ) -> dict[str, Any]:
        """Report one stage and wait for the end."""
        self._take("switch", changes=dict(changes), options=options, **more)
        if self.is_switching:
            what = "a switch"
            raise Busy(what)
        self.is_switching = True
        on_stage("saving", 0.5)
        self.switch_began.set()
        await self.switch_end.wait()
        self.is_switching = False
        return {"status": "cancelled" if self.was_cancelled else "switched"}

    def cancel_switch(self) -> None:
        """End the switch."""
        self.was_cancelled = True
        self.switch_end.set()

    async def check(self, changes: Mapping[str, Any], options: SwitchOptions) -> dict[str, Any]:
        """Note the call."""
        await self._work("check", changes=dict(changes), options=options)
        return {"is_unchanged": False}

    async def save(self, path: Path) -> dict[str, Any]:
        """Note the call."""
        await self._work("save", path=path)
        return {"n_bytes": 5}

    async def restore(self, path: Path) -> dict[str, Any]:
        """Note the call."""
        await self._work("restore", path=path)
        return {}

    async def subscribe(self) -> AsyncIterator[dict[str, Any]]:
        """Pass on what the test puts in, until None."""
        self.subscribed.set()
        try:
            while (event := await self.events.get()) is not None:
                yield event
        finally:
            self.unsubscribed.set()

    async def _work(self, name: str, **more: Any) -> None:
        self._take(name, **more)
        if self.held is None:
            return
        self.at_work.put("began")
        end = "was given up"
        try:
            await self.held.wait()
            end = "ended"
        finally:
            self.at_work.put(end)

    def _take(self, name: str, **more: Any) -> None:
        self.calls.append((name, more))
        if self.error is not None:
            raise self.error


@dataclass(frozen=True, slots=True)
class Served:
    """A fake host that answers.

    Args:
        address: where.
        host: to look into.
        server: to look into.
        call: runs a function in the host's loop.
    """

    address: Address
    host: FakeHost
    server: ControlServer
    call: Callable[[Callable[[], Any]], Any]


@contextmanager
def served(limits: ControlLimits | None = None, name: str = "fake", runtime: Path | None = None) -> Iterator[Served]:
    """Serve a fake host in a thread, until the block ends; in a runtime folder, or in one of its own."""
    ready = threading.Event()
    made: list[Served] = []
    with tempfile.TemporaryDirectory() as folder:

        async def main() -> None:
            host = FakeHost()
            over = asyncio.Event()

            async def stop(*, force: bool) -> dict[str, Any]:
                host.calls.append(("stop", {"force": force}))
                return {"saved": None}

            with claim(prepared((runtime or Path(folder) / "run") / "splitctl"), name) as held:
                server = ControlServer(host, stop=stop, log=host.lines.append, limits=limits or ControlLimits())
                await server.start(held.listen())

                def call(function: Callable[[], Any]) -> Any:
                    async def run() -> Any:
                        return function()

                    return asyncio.run_coroutine_threadsafe(run(), host.loop).result(60)

                made.extend([Served(held.address, host, server, call)])
                ends.append(lambda: host.loop.call_soon_threadsafe(over.set))
                ready.set()
                await over.wait()
                host.switch_end.set()
                host.events.put_nowait(None)
                await server.close()

        ends: list[Callable[[], Any]] = []
        thread = threading.Thread(target=lambda: asyncio.run(main()))
        thread.start()
        assert ready.wait(60)
        try:
            yield made[0]
        finally:
            ends[0]()
            thread.join()
