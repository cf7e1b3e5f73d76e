"""The control socket: one request a connection, answered in lines, over a supervisor that does the work.

Laws:
    1. A connection sends one request line and may send `jobs.CANCEL` after it. It gets event lines and one last
       line, ``{"result": ...}`` or ``{"error": {fault, kind, message, body}}``, whatever it sent.
    2. A client of another user gets nothing.
    3. No client holds up another or the session: a line that does not come, an answer that is not read, too many
       connections and too many bytes end that connection alone.
    4. A client that hangs up cancels its generation, and leaves its check, switch, save or restore to end by itself.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from splitctl.control.connection import Connection, error_body, event_body, unless_gone
from splitctl.control.requests import (
    MAX_REQUEST_BYTES,
    REQUESTS,
    CheckRequest,
    ControlRequest,
    EventsRequest,
    GenerateRequest,
    PolicyRequest,
    RestoreRequest,
    SaveRequest,
    StatusRequest,
    StopRequest,
    SwitchRequest,
)
from splitctl.errors import Busy, SplitctlError
from splitctl.ipc.wire import MessageInvalid, from_line
from splitctl.outcome import SwitchOptions

_CHUNK_BYTES = 1 << 16
#: Turns of the loop from accepting a connection to its handler.
_STEPS_TO_A_HANDLER = 4
#: A request that is longer is read by a thread: the loop has tokens to pass on [bytes].
_LONG_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ControlLimits:
    """What a client may take.

    Attributes:
        n_connections: at once.
        n_pending_bytes: of requests that are not whole yet, over all connections.
        request_s: until the request line is there, seconds.
        write_s: until a client has read what it was sent, seconds.
        close_s: for answers that are under way when the server closes, seconds.
    """

    n_connections: int = 64
    n_pending_bytes: int = 4 * MAX_REQUEST_BYTES
    request_s: float = 10.0
    write_s: float = 30.0
    close_s: float = 5.0


class TokenStream(Protocol):
    """A generation as the supervisor gives it."""

    def __aiter__(self) -> AsyncIterator[Any]:
        """Give its events; the last says how it ended."""

    def cancel(self) -> None:
        """End it."""


class SessionService(Protocol):
    """What a control socket needs of a supervisor."""

    def status(self) -> dict[str, Any]:
        """Say how the session is."""

    def recent_switches(self) -> list[dict[str, Any]]:
        """Give the outcomes of the last switches as they are by now, oldest first."""

    async def generate(self, request: GenerateRequest) -> TokenStream:
        """Begin a generation."""

    async def switch(
        self,
        changes: Mapping[str, Any],
        options: SwitchOptions,
        *,
        timeout_s: float | None,
        on_stage: Callable[[str, float], None],
    ) -> dict[str, Any]:
        """Move the session; the outcome object of the contract."""

    def cancel_switch(self) -> None:
        """Ask the switch under way to end."""

    async def check(self, changes: Mapping[str, Any], options: SwitchOptions) -> dict[str, Any]:
        """Say what a switch would do."""

    def set_policy(self, policy: str) -> dict[str, Any]:
        """Let the session switch by itself, auto, or no more, off; gives the policy's status."""

    async def save(self, path: Path) -> dict[str, Any]:
        """Write the session to a file."""

    async def restore(self, path: Path) -> dict[str, Any]:
        """Replace the session with a file."""

    def subscribe(self) -> AsyncIterator[Any]:
        """Give what happens to the session from now on."""


class Stop(Protocol):
    """Ends a session."""

    async def __call__(self, *, force: bool) -> dict[str, Any]:
        """End it; one that cannot be saved is refused, unless ``force``."""


class ControlServer:
    """Answers on a session's socket. Thread: the loop's."""

    def __init__(
        self,
        host: SessionService,
        *,
        stop: Stop,
        log: Callable[[str], None],
        limits: ControlLimits = ControlLimits(),
    ) -> None:
        """Answer nobody yet.

        Args:
            host: does the work.
            stop: ends the session, when a client asks for it; its answer is passed on.
            log: takes a line.
            limits: what a client may take.
        """
        self._host = host
        self._stop = stop
        self._log = log
        self._limits = limits
        self._n_pending_bytes = 0
        self._handlers: set[asyncio.Task[None]] = set()
        self._asking: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def n_connections(self) -> int:
        """Connections that are open."""
        return len(self._handlers)

    async def start(self, listening: socket.socket) -> None:
        """Begin to answer on a socket, which is closed with the server."""
        self._server = await asyncio.start_unix_server(self._connected, sock=listening, limit=_CHUNK_BYTES)

    async def close(self) -> None:
        """Take no more connections, let answers under way end for a while, and close."""
        if self._server is None:
            return
        for listening in self._server.sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
        # Connections that were accepted get their handlers first: a closed server drops them half made.
        for _ in range(_STEPS_TO_A_HANDLER):
            await asyncio.sleep(0)
        self._server.close()
        for handler in self._asking:
            handler.cancel()
        if self._handlers:
            await asyncio.wait(self._handlers, timeout=self._limits.close_s)
        for handler in self._handlers:
            handler.cancel()
        if self._handlers:
            await asyncio.wait(self._handlers)
        self._server = None

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take a connection; known from this moment, so that closing waits for it."""
        handler = asyncio.ensure_future(self._serve(reader, writer))
        for known in (self._handlers, self._asking):
            known.add(handler)
            handler.add_done_callback(known.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Connection(reader, writer, self._limits.write_s)
        try:
            await self._handle(line)
        except (ConnectionError, TimeoutError):
            # It hung up, or does not read: nobody would get an answer.
            line.abort()
        finally:
            await line.close()

    async def _handle(self, line: Connection) -> None:
        try:
            if line.peer_uid() != os.getuid():
                self._log(f"a client of user {line.peer_uid()} was turned away")
                return
            self._refuse_too_many()
            raw = await self._read_request(line)
            self._has_asked()
            if raw is None:
                return
            await self._answer(await _request(raw), line)
        except SplitctlError as error:
            await line.error(error)
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:  # noqa: BLE001 - the last stand: a fault of ours must not end the host
            self._log(f"a request failed: {error_body(error)['message']}")
            await line.error(error)

    def _has_asked(self) -> None:
        """Note that this handler's request is there: closing gives it time for its answer."""
        task = asyncio.current_task()
        if task is not None:
            self._asking.discard(task)

    def _refuse_too_many(self) -> None:
        if len(self._handlers) > self._limits.n_connections:
            raise Busy(f"{self._limits.n_connections} connections")

    async def _read_request(self, line: Connection) -> bytes | None:
        """Read the request line; None where the client hung up without one."""
        raw = bytearray()
        try:
            async with asyncio.timeout(self._limits.request_s):
                while True:
                    chunk = await line.read()
                    self._n_pending_bytes += len(chunk)
                    raw += chunk
                    if b"\n" in chunk:
                        whole, _, rest = bytes(raw).partition(b"\n")
                        line.put_back(rest)
                        return whole
                    if not chunk:
                        # The end of what it sends ends the line too.
                        return bytes(raw) or None
                    if len(raw) > MAX_REQUEST_BYTES:
                        raise MessageInvalid("", f"over {len(raw)} bytes long", f"{MAX_REQUEST_BYTES} bytes at most")
                    if self._n_pending_bytes > self._limits.n_pending_bytes:
                        raise Busy("requests of other clients that are not whole yet")
        except TimeoutError as error:
            wanted = f"a whole line within {self._limits.request_s:g} s"
            raise MessageInvalid("", f"{len(raw)} bytes without a line feed", wanted) from error
        finally:
            self._n_pending_bytes -= len(raw)

    async def _answer(self, request: ControlRequest, line: Connection) -> None:
        match request:
            case StatusRequest():
                await line.result(self._host.status())
            case SwitchRequest():
                await self._switch(request, line)
            case CheckRequest():
                work = self._host.check(request.changes, request.options)
                await line.result(await unless_gone(line.gone(), work))
            case GenerateRequest():
                await self._generate(request, line)
            case SaveRequest():
                await line.result(await unless_gone(line.gone(), self._host.save(request.path), goes_on=True))
            case RestoreRequest():
                await line.result(await unless_gone(line.gone(), self._host.restore(request.path), goes_on=True))
            case PolicyRequest():
                await line.result(self._host.set_policy(request.policy))
            case StopRequest():
                await line.result(await self._stop(force=request.force))
            case EventsRequest():
                await self._events(line)

    async def _switch(self, request: SwitchRequest, line: Connection) -> None:
        """Move the session; a client that hangs up leaves it moving."""

        def on_stage(stage: str, share: float) -> None:
            line.offer({"kind": "stage", "stage": stage, "share": share})

        listener = asyncio.create_task(line.listen(self._host.cancel_switch))
        try:
            outcome = await self._host.switch(
                request.changes, request.options, timeout_s=request.timeout_s, on_stage=on_stage
            )
        finally:
            listener.cancel()
        await line.result(outcome)

    async def _generate(self, request: GenerateRequest, line: Connection) -> None:
        """Pass on a stream; a client that hangs up, or does not read, ends it."""
        stream = await self._host.generate(request)
        listener = asyncio.create_task(line.listen(stream.cancel))
        listener.add_done_callback(lambda _: stream.cancel())
        try:
            async for event in stream:
                body = event_body(event)
                if body["kind"] == "done":
                    del body["kind"]
                    await line.result(body)
                else:
                    await line.event(body)
        finally:
            listener.cancel()
            stream.cancel()

    async def _events(self, line: Connection) -> None:
        """Pass on what happens until the client hangs up."""

        async def pass_on() -> None:
            async for event in self._host.subscribe():
                await line.event(event_body(event))

        sender = asyncio.create_task(pass_on())
        listener = asyncio.create_task(line.listen(lambda: None))
        try:
            await asyncio.wait({sender, listener}, return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
        finally:
            for task in (sender, listener):
                task.cancel()
            await asyncio.wait({sender, listener})
        await line.result({})


async def _request(raw: bytes) -> ControlRequest:
    """Read a request; a long one in a thread, because the loop has tokens to pass on."""
    if len(raw) <= _LONG_BYTES:
        request: ControlRequest = from_line(raw, REQUESTS, max_bytes=MAX_REQUEST_BYTES)
        return request
    return await asyncio.to_thread(from_line, raw, REQUESTS, max_bytes=MAX_REQUEST_BYTES)
