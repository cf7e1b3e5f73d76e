"""A session that obeys the test, behind a real HTTP server in a thread: it can be tried step by step."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from splitctl.control.requests import GenerateRequest
from splitctl.host.events import Hub
from splitctl.host.streams import Done, Stream, Why
from splitctl.http import HttpConfig, HttpServer
from splitctl.ipc.orders import Tokenized
from splitctl.outcome import SwitchOptions
from tests.ctl.web import Answer, asked

_T = TypeVar("_T")
WAIT_S = 60.0
"""How long anything may take before a test fails; no test measures it."""


class FakeSession:
    """Does what the test says. Its streams are real ones, which the test feeds."""

    def __init__(self) -> None:
        self.hub = Hub()
        self.streams: asyncio.Queue[Stream] = asyncio.Queue()
        self.requests: list[GenerateRequest] = []
        self.cancelled = threading.Event()
        self.error: Exception | None = None
        self.state = "serving"
        self.more: dict[str, Any] = {}
        self.refused = {"row": "no-row"}
        """Modes that a check refuses, with the code of the reason."""
        self.held: asyncio.Event | None = None
        """Checks, switches, saves and restores wait for it."""
        self.at_work: asyncio.Queue[str] = asyncio.Queue()
        """What began to wait, how it ended, as it happens."""

    def status(self) -> dict[str, Any]:
        """Say what the test wants."""
        placement = {"mode": "layer", "devices": ["CPU"], "n_ctx": 4096, "n_seq_max": 2, "kv_unified": True}
        sequences = [{"seq_id": number, "n_tokens": 0, "state": "idle"} for number in range(2)]
        model = {"path": "/somewhere/fake.gguf", "name": "fake", "n_vocab": 100}
        return {
            "name": "fake",
            "state": self.state,
            "requested": "layer",
            "effective": "layer",
            "placement": placement,
            "sequences": sequences,
            "model": model,
            "queued": 0,
            **self.more,
        }

    async def generate(self, request: GenerateRequest) -> Stream:
        """Begin a stream and give it to the test."""
        self._fail()
        self.requests.append(request)
        stream = Stream(request.sampler.stop, lambda: self._cancel(stream))
        self.streams.put_nowait(stream)
        return stream

    async def tokenize(self, asked: Mapping[str, Any]) -> Tokenized:
        """Let every byte be a token."""
        await self._work("tokenize")
        text = asked.get("text") or "".join(f"<{one['content']}>" for one in asked.get("messages") or ())
        tokens = asked.get("tokens") or tuple(text.encode())
        return Tokenized(1, tokens, text, tuple(bytes([one]) for one in dict.fromkeys(tokens)))

    def _cancel(self, stream: Stream) -> None:
        self.cancelled.set()
        stream.end(Done(Why.CANCELLED))

    async def switch(self, changes: Mapping[str, Any], _options: SwitchOptions, **_more: Any) -> dict[str, Any]:
        """Say what was asked."""
        await self._work("switch")
        return {"status": "switched", "requested": changes["mode"].value}

    def cancel_switch(self) -> None:
        """Note it."""
        self.cancelled.set()

    def set_policy(self, policy: str) -> dict[str, Any]:
        """Say what was asked."""
        self._fail()
        return {"policy": policy}

    async def check(self, changes: Mapping[str, Any], _options: SwitchOptions) -> dict[str, Any]:
        """Allow everything but what is refused."""
        await self._work("check")
        mode = changes["mode"].value
        reasons = (
            [{"code": self.refused[mode], "text": f"this build has no {mode} mode"}] if mode in self.refused else []
        )
        return {"reasons": reasons, "expected_s": None}

    async def save(self, path: Path) -> dict[str, Any]:
        """Write nothing."""
        await self._work("save")
        return {"path": str(path), "bytes": 0, "sequences": 0, "tokens": 0}

    async def restore(self, path: Path) -> dict[str, Any]:
        """Read nothing."""
        await self._work("restore")
        return {"path": str(path)}

    def recent_switches(self) -> list[dict[str, Any]]:
        """Say that there were none."""
        return []

    def subscribe(self) -> AsyncIterator[Any]:
        """Watch."""
        return self.hub.subscribe()

    async def _work(self, what: str) -> None:
        self._fail()
        if self.held is None:
            return
        self.at_work.put_nowait(f"{what} began")
        end = "was given up"
        try:
            await self.held.wait()
            end = "ended"
        finally:
            self.at_work.put_nowait(f"{what} {end}")

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error


@dataclass(frozen=True, slots=True)
class Site:
    """A fake session that is served.

    Args:
        session: to obey.
        server: to look into.
        loop: the server's.
        port: its port on this machine.
        lines: its log.
    """

    session: FakeSession
    server: HttpServer
    loop: asyncio.AbstractEventLoop
    port: int
    lines: list[str]

    def await_(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run something in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)

    def call(self, function: Callable[[], _T]) -> _T:
        """Call something in the server's loop."""

        async def run() -> _T:
            return function()

        return self.await_(run())

    def stream(self) -> Stream:
        """Take the next stream that a client began."""
        return self.await_(self.session.streams.get())

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Send one request."""
        return asked(self.port, method, path, body, **headers)

    def get(self, path: str, **headers: str) -> Answer:
        """Ask for something."""
        return self.ask("GET", path, **headers)

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        """Send something."""
        return self.ask("POST", path, body, **headers)

    def connect(self, *, n_buffer: int = 0) -> socket.socket:
        """Open a connection; with a small buffer the server notices soon that nobody reads."""
        end = socket.socket()
        if n_buffer:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, n_buffer)
        end.settimeout(WAIT_S)
        end.connect(("127.0.0.1", self.port))
        return end

    def say(self, raw: bytes) -> bytes:
        """Send bytes and nothing more; give what comes back until the server closes."""
        with self.connect() as end:
            end.sendall(raw)
            return rest(end)


def rest(end: socket.socket) -> bytes:
    """Read to the end of a connection; one that is reset has ended."""
    got = b""
    try:
        while chunk := end.recv(1 << 16):
            got += chunk
    except ConnectionError:
        pass
    return got


@contextmanager
def site(config: HttpConfig | None = None) -> Iterator[Site]:
    """Serve a fake session on a free port until the block ends."""
    made: list[Site] = []
    ready = threading.Event()
    ends: list[Callable[[], Any]] = []

    async def main() -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        ends.append(lambda: loop.call_soon_threadsafe(over.set))
        session, lines = FakeSession(), []  # type: ignore[var-annotated]
        server = HttpServer(session, config or HttpConfig(port=0), log=lines.append)
        server.listen()
        await server.start()
        port = int(server.url.rpartition(":")[2])
        made.append(Site(session, server, loop, port, lines))
        ready.set()
        await over.wait()
        session.hub.close()
        await server.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(WAIT_S)
    try:
        yield made[0]
    finally:
        ends[0]()
        thread.join()
