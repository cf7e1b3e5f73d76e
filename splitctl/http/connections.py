"""HTTP connections with limits: a client must send its request in time, read its answer, and speak HTTP.

Laws:
    1. A connection is closed if it sends no whole head in time, or does not read what it was sent.
    2. If there are too many, the one that has been waiting longest for a request is closed: one that asks is served
       before one that only holds a place.
    3. Bytes that are not HTTP get an error of the same shape as every other, as long as one can be sent.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from splitctl.http.errors import ApiError
from splitctl.http.intake import HttpLimits, head_too_long

#: How long a client may go on sending after an answer that ends its connection [seconds].
_LINGER_S = 2.0


class Patient(H11Protocol):
    """A connection.

    Thread: the loop's.
    """

    limits = HttpLimits()
    since = 0.0
    """When it began to wait for a request, by the loop's clock."""

    _waiting: asyncio.TimerHandle | None = None
    _is_over = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, and close another one if there are too many."""
        super().connection_made(transport)
        end: socket.socket | None = transport.get_extra_info("socket")
        if end is not None:
            # The system ends a connection whose other end reads nothing, even while nobody writes here.
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self.limits.write_s * 1e3))
        self._make_room()
        self._wait(self.limits.head_s)

    def data_received(self, data: bytes) -> None:
        """Take bytes; the time limit runs until they are a whole head."""
        if self._is_over:
            return
        super().data_received(data)
        if self._is_answering:
            self._wait_no_more()
        elif self._waiting is None:
            self._wait(self.limits.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time limit."""
        self._wait_no_more()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """End after the answer under way."""
        if not self.transport.is_closing():
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not a request; called from where h11 has found that out."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        # A transfer coding that h11 does not know is the client's fault all the same.
        status = status if 400 <= status < 500 else 400
        if self._is_answering:
            # Its request broke off in the middle: to its answerer the client is gone.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            self.transport.abort()
            return
        self._answer(_said(status, str(error or msg)))
        # Closing now, with bytes of the client unread, could lose the answer on its way.
        self._is_over = True
        self.transport.write_eof()
        self._wait_no_more()
        self._wait(_LINGER_S)

    @property
    def is_idle(self) -> bool:
        """Whether it only waits for its client: for a request, or for the rest of one."""
        return not self.transport.is_closing() and (not self._is_answering or self.cycle.more_body)

    @property
    def _is_answering(self) -> bool:
        cycle: Any = self.cycle  # None before the first request, whatever its type says
        return cycle is not None and not cycle.response_complete and not self._is_over

    def _answer(self, error: ApiError) -> None:
        body = json.dumps(error.body).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        response = h11.Response(status_code=error.status, headers=headers, reason=STATUS_PHRASES[error.status])
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))

    def _make_room(self) -> None:
        """Close the connection that has waited longest, if there are too many."""
        if len(self.connections) <= self.limits.n_connections:
            return
        known = [one for one in self.connections if isinstance(one, Patient) and not one.transport.is_closing()]
        if len(known) > self.limits.n_connections:
            idle = [one for one in known if one is not self and one.is_idle]
            (min(idle, key=lambda one: one.since) if idle else self).transport.abort()

    def _wait(self, seconds: float) -> None:
        self.since = self.loop.time()
        self._waiting = self.loop.call_later(seconds, self._give_up)

    def _wait_no_more(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _give_up(self) -> None:
        self._waiting = None
        if not self._is_answering:
            self.transport.abort()


def connection_class(limits: HttpLimits) -> type[Patient]:
    """Make the class of a server's connections; uvicorn makes the instances."""
    return type("Patient", (Patient,), {"limits": limits})


def _said(status: int, why: str) -> ApiError:
    if status == 431:
        return head_too_long()
    return ApiError(status, f"this is no HTTP/1.1 request: {why[:80]}", code="not_http")
