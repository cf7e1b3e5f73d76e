"""One client at the control socket: lines in, lines out, and how answers are written."""

from __future__ import annotations

import asyncio
import re
import select
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from typing import Any, TypeVar

from splitctl.control.sockets import peer_uid
from splitctl.errors import SplitctlError
from splitctl.ipc.jobs import CANCEL, Fault, fault_of
from splitctl.ipc.wire import MessageInvalid, line_of, object_of
from splitctl.outcome import to_plain

_T = TypeVar("_T")

_CHUNK_BYTES = 1 << 16
_MAX_CONTROL_BYTES = 4096
#: Progress is left out for a client that has this much unread [bytes].
_UNREAD_BYTES = 1 << 18


class Connection:
    """One client's connection. Thread: the loop's."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, write_s: float) -> None:
        self._reader = reader
        self._writer = writer
        self._write_s = write_s
        self._rest = b""
        writer.transport.set_write_buffer_limits(high=_UNREAD_BYTES)

    def peer_uid(self) -> int:
        """Ask which user is at the other end."""
        return peer_uid(self._writer.get_extra_info("socket"))

    async def read(self) -> bytes:
        """Read what there is; empty at the end."""
        rest, self._rest = self._rest, b""
        return rest or await self._reader.read(_CHUNK_BYTES)

    def put_back(self, rest: bytes) -> None:
        """Give back what was read beyond the request."""
        self._rest = rest

    async def listen(self, cancel: Callable[[], None]) -> None:
        """Call ``cancel`` for every `jobs.CANCEL`, until the client hangs up or sends something else."""
        pending = bytearray()
        with suppress(ConnectionError, MessageInvalid):
            while chunk := await self.read():
                pending += chunk
                *lines, rest = bytes(pending).split(b"\n")
                pending = bytearray(rest)
                for raw in lines:
                    if object_of(raw, max_bytes=_MAX_CONTROL_BYTES) != object_of(CANCEL, max_bytes=_MAX_CONTROL_BYTES):
                        return
                    cancel()
                if len(pending) > _MAX_CONTROL_BYTES:
                    return

    async def gone(self) -> None:
        """Wait until the client hangs up; one that only has no more to say stays, and what it says is dropped."""
        with suppress(ConnectionError):
            while await self.read():
                continue
            poll = select.poll()
            poll.register(self._writer.get_extra_info("socket"), 0)
            if not poll.poll(0):
                await asyncio.Event().wait()

    def offer(self, event: Mapping[str, Any]) -> None:
        """Send an event that may be left out, if the client keeps up."""
        transport = self._writer.transport
        if not transport.is_closing() and transport.get_write_buffer_size() < _UNREAD_BYTES:
            self._writer.write(line_of({"event": dict(event)}))

    async def event(self, body: Mapping[str, Any]) -> None:
        """Send an event.

        Raises:
            ConnectionError: the client hung up.
            TimeoutError: it does not read.
        """
        await self._send({"event": dict(body)})

    async def result(self, body: Mapping[str, Any]) -> None:
        """Send the last line of a success; a client that is gone is no error."""
        with suppress(ConnectionError):
            await self._send({"result": dict(body)})

    async def error(self, error: Exception) -> None:
        """Send the last line of a failure; a client that is gone is no error."""
        with suppress(ConnectionError):
            await self._send({"error": error_body(error)})

    def abort(self) -> None:
        """Drop what is unsent."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Send what is unsent, and close."""
        self._writer.close()
        try:
            async with asyncio.timeout(self._write_s):
                await self._writer.wait_closed()
        except (ConnectionError, TimeoutError):
            self.abort()

    async def _send(self, body: Mapping[str, Any]) -> None:
        self._writer.write(line_of(body))
        async with asyncio.timeout(self._write_s):
            await self._writer.drain()


async def unless_gone(gone: Coroutine[Any, Any, None], work: Coroutine[Any, Any, _T], *, goes_on: bool = False) -> _T:
    """Do some work unless its client hangs up first.

    Args:
        gone: ends when the client has hung up.
        work: what is done.
        goes_on: let the work end by itself where the client is gone; otherwise it is cancelled.

    Raises:
        ConnectionError: the client hung up.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone)
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ConnectionResetError("the client hung up")
        return working.result()
    finally:
        # Nobody may be left to take what the work comes to.
        working.add_done_callback(lambda done: done.cancelled() or done.exception())
        given_up = {leaving} if goes_on else {working, leaving}
        for task in given_up:
            task.cancel()
        await asyncio.wait(given_up)


def event_body(event: Any) -> dict[str, Any]:
    """Write an event of the supervisor, a dataclass or an object with a ``kind``, as an object with a ``kind``."""
    if not is_dataclass(event):
        return dict(event)
    plain = to_plain(event)
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(event).__name__).lower()
    return {"kind": name, **(plain if isinstance(plain, dict) else {})}


def error_body(error: Exception) -> dict[str, Any]:
    """Say an error to a client.

    Args:
        error: any; one that a worker reported has its ``fault``, ``name`` and ``body``.

    Returns:
        Keys fault, kind, message and body.
    """
    fault, name = getattr(error, "fault", None), getattr(error, "name", None)
    if not isinstance(fault, Fault):
        # A message that cannot be read is the client's fault here, and splitctl's own between its processes.
        fault, name = Fault.CONFIG if isinstance(error, MessageInvalid) else fault_of(error), None
    message = str(error)
    if not isinstance(error, SplitctlError | OSError):
        message = f"{type(error).__name__}: {error}; this is a fault of splitctl, please report it"
    return {
        "fault": fault.value,
        "kind": name or type(error).__name__,
        "message": message,
        "body": getattr(error, "body", None) or {},
    }
