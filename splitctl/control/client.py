"""The other end of the control socket: ask a host for something, and read its answer as it comes."""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from splitctl.control.requests import REQUESTS, ControlRequest
from splitctl.control.sockets import Address, NoSuchSession, peer_pid, peer_uid
from splitctl.errors import SplitctlError
from splitctl.ipc.jobs import CANCEL, Fault, RequestFailed
from splitctl.ipc.wire import MessageInvalid, object_of, to_line

#: A longer line is no answer [bytes].
MAX_ANSWER_BYTES = 64 * 1024 * 1024
#: A host that takes no connection, or no request, for so long hangs [seconds].
CONNECT_S = 10.0

_CHUNK_BYTES = 1 << 16


@dataclass(eq=False, repr=False)
class HostGone(SplitctlError):
    """The host ended, or hangs, before its answer was whole.

    Attributes:
        name: the session.
        how: what the host did, as a phrase ("hung up").
    """

    name: str
    how: str

    def __str__(self) -> str:
        return f"the host of session {self.name} {self.how} before it had answered; splitctl ps shows what is served"


@dataclass(frozen=True, slots=True)
class ControlEvent:
    """Something on the way to an answer; its body has a ``kind``."""

    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ControlAnswer:
    """The last line of a success."""

    body: dict[str, Any]


class Call:
    """One request to a host.

    Attributes:
        address: where the session is reached.
        host_pid: process id of who listens there; 0 if it is of another namespace.

    Lifetime:
        Use as a context manager; leaving it hangs up.

    Thread:
        One; `cancel` and `hang_up` may be called from any and from a signal handler.
    """

    def __init__(self, address: Address, request: ControlRequest, *, connect_s: float = CONNECT_S) -> None:
        """Connect and ask.

        Args:
            address: where the session is reached.
            request: what it is asked for.
            connect_s: longest wait for the host to take the request, seconds.

        Raises:
            NoSuchSession: nobody listens there.
            HostGone: it hangs, or another user's process listens there.
        """
        self.address = address
        self._pending = bytearray()
        self._failure: RequestFailed | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(connect_s)
            self._socket.connect(str(address.path))
            self.host_pid = peer_pid(self._socket)
            uid = peer_uid(self._socket)
            if uid != os.getuid():
                raise HostGone(address.name, f"is not yours (it runs as user {uid}) and was left")  # noqa: TRY301
            self._socket.sendall(to_line(request, REQUESTS))
            self._socket.settimeout(None)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            self._socket.close()
            raise NoSuchSession(address.name, ()) from error
        except TimeoutError as error:
            self._socket.close()
            raise HostGone(address.name, f"took nothing for {connect_s:g} s") from error
        except (BrokenPipeError, ConnectionResetError):
            # It hung up while we were still asking; what it said before stands in our queue.
            self._socket.settimeout(None)
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """Give the descriptor that becomes readable when there is something to `read`."""
        return self._socket.fileno()

    def read(self) -> list[ControlEvent | ControlAnswer]:
        """Read what came; waits where nothing did.

        Returns:
            Whole messages, perhaps none yet; after a ControlAnswer nothing more comes.

        Raises:
            RequestFailed: the host said so.
            HostGone: it hung up, or speaks another language.
        """
        if self._failure is not None:
            raise self._failure
        try:
            chunk = self._socket.recv(_CHUNK_BYTES)
        except ConnectionResetError:
            chunk = b""
        if not chunk:
            raise HostGone(self.address.name, "hung up")
        self._pending += chunk
        if b"\n" not in chunk:
            if len(self._pending) > MAX_ANSWER_BYTES:
                raise HostGone(self.address.name, f"said {len(self._pending)} bytes without an end and was left")
            return []
        *lines, rest = bytes(self._pending).split(b"\n")
        self._pending = bytearray(rest)
        messages: list[ControlEvent | ControlAnswer] = []
        for line in lines:
            try:
                messages.append(self._message(line))
            except RequestFailed as error:
                if not messages:
                    raise
                # What came before it counts. It is raised next time, because a host that said so hangs up.
                self._failure = error
        return messages

    def cancel(self) -> None:
        """Ask the host to end this work early; it still answers."""
        try:
            self._socket.sendall(CANCEL)
        except (BrokenPipeError, ConnectionResetError):
            # It has answered and hung up already; `read` finds that.
            return

    def hang_up(self) -> None:
        """End the connection: the next `read` finds the end, and the host a client that is gone."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _message(self, line: bytes) -> ControlEvent | ControlAnswer:
        try:
            body = object_of(line, max_bytes=MAX_ANSWER_BYTES)
        except MessageInvalid as error:
            raise HostGone(self.address.name, f"said what is no answer ({error}) and was left") from error
        match body:
            case {"event": dict() as event}:
                return ControlEvent(event)
            case {"result": dict() as result}:
                return ControlAnswer(result)
            case {"error": {"fault": str() as fault, "kind": str() as kind, "message": str() as message, **more}}:
                known = Fault(fault) if fault in {one.value for one in Fault} else Fault.INTERNAL
                about = more.get("body")
                raise RequestFailed(known, kind, message, about if isinstance(about, dict) else {})
        raise HostGone(self.address.name, "said what is no answer and was left")


def ask(
    address: Address,
    request: ControlRequest,
    *,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """Ask a host and wait for its answer.

    Args:
        address: where the session is reached.
        request: what it is asked for.
        on_event: called with every event on the way.
        timeout_s: longest silence that is borne, seconds; None: any.

    Raises:
        NoSuchSession: nobody listens there.
        RequestFailed: the host did not do it.
        HostGone: it ended or was silent for too long.
    """
    with Call(address, request) as client:
        while True:
            if not wait([client], timeout_s):
                raise HostGone(address.name, f"was silent for {timeout_s:g} s")
            for message in client.read():
                if isinstance(message, ControlAnswer):
                    return message.body
                if on_event is not None:
                    on_event(message.body)


def wait(sources: Iterable[Call | int], timeout_s: float | None = None) -> list[Call | int]:
    """Wait until one of several has something to read.

    Args:
        sources: clients and descriptors.
        timeout_s: longest wait, seconds; None: any.

    Returns:
        Those that have; empty when the time is over.
    """
    with selectors.DefaultSelector() as selector:
        for source in sources:
            selector.register(source, selectors.EVENT_READ, source)
        return [key.data for key, _ in selector.select(timeout_s)]
