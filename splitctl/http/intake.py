"""Reads request bodies, within limits on size, time and the total of all clients.

Laws:
    1. A body is never kept beyond its size limit, nor waited for beyond its time limit.
    2. Nothing is built from a body before its size, and the number of values in it, have been judged.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request

from splitctl.http.bodies import object_of
from splitctl.http.errors import ApiError

_T = TypeVar("_T")

#: Bytes of a request's first line and headers.
MAX_HEAD_BYTES = 32 << 10

#: A longer body is read by a thread, one at a time: the loop has tokens to pass on, and objects take many times the
#: bytes that they were written in [bytes].
_LONG_BYTES = 1 << 16

#: Values in one body, counted by what stands between and around them: a list of a million empty lists is few bytes and
#: much memory.
_MAX_VALUES = 1 << 21


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What clients may take.

    Attributes:
        body_bytes: of one request for text.
        token_body_bytes: of one for tokens alone, which the worker answers between two decodes.
        small_body_bytes: of any other request.
        pending_bytes: of bodies that are not whole, or not read yet, over all clients.
        held_bytes: of bodies whose answers are under way, over all clients.
        head_s: from accepting a connection, or its last answer, to a whole head of a request, seconds.
        body_s: until a body is whole, seconds.
        write_s: until a client has read what it was sent, seconds.
        n_queued: streams that may wait for a sequence.
        n_watchers: clients that watch the events.
        n_connections: at once.
    """

    body_bytes: int = 16 << 20
    token_body_bytes: int = 1 << 20
    small_body_bytes: int = 64 << 10
    pending_bytes: int = 64 << 20
    held_bytes: int = 128 << 20
    head_s: float = 20.0
    body_s: float = 30.0
    write_s: float = 60.0
    n_queued: int = 240
    n_watchers: int = 64
    n_connections: int = 512


class Intake:
    """Reads bodies within the limits.

    Thread: the loop's.
    """

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self._n_pending = 0
        self._reading = asyncio.Lock()

    async def small(self, request: Request) -> dict[str, Any]:
        """Read the object of a request that is no request for text.

        Raises:
            ApiError: it is none, is too long, or does not come.
        """
        async with self._body(request, self.limits.small_body_bytes) as raw:
            return object_of(raw)

    async def read(
        self, request: Request, read: Callable[[dict[str, Any]], _T], most: int | None = None
    ) -> tuple[_T, int]:
        """Read the object of a request for text.

        Args:
            request: the request.
            read: makes something of the object; in a thread, where that may take long.
            most: bytes of it; None: those of a request for text.

        Returns:
            What it made, and the bytes that it was made from.

        Raises:
            ApiError: it is none, is too long, or does not come.
        """
        async with self._body(request, self.limits.body_bytes if most is None else most) as raw:
            if len(raw) <= _LONG_BYTES:
                return read(object_of(raw)), len(raw)
            async with self._reading:
                return await asyncio.to_thread(_read_long, raw, read), len(raw)

    @asynccontextmanager
    async def _body(self, request: Request, most: int) -> AsyncIterator[bytes]:
        """Take a body, which counts as pending until the block ends."""
        said = request.headers.get("content-length", "")
        if len(said) > len(str(most)) or (said.isdecimal() and int(said) > most):
            raise _too_long(most)
        raw = bytearray()
        try:
            try:
                async with asyncio.timeout(self.limits.body_s):
                    async for chunk in request.stream():
                        raw += chunk
                        self._n_pending += len(chunk)
                        if len(raw) > most:
                            raise _too_long(most)
                        if self._n_pending > self.limits.pending_bytes:
                            raise ApiError(429, "too many long requests at once; try again", code="busy")
            except TimeoutError as error:
                raise ApiError(408, f"the body did not come within {self.limits.body_s:g} s", code="slow") from error
            yield bytes(raw)
        finally:
            self._n_pending -= len(raw)


def _read_long(raw: bytes, read: Callable[[dict[str, Any]], _T]) -> _T:
    if sum(raw.count(sign) for sign in (b",", b"[", b"{")) > _MAX_VALUES:
        raise ApiError(413, f"the body holds too many values; {_MAX_VALUES} at most", code="body_too_long")
    return read(object_of(raw))


def head_too_long() -> ApiError:
    """Refuse a request for its first line and headers."""
    return ApiError(431, f"the head of the request is too long; {MAX_HEAD_BYTES} bytes at most", code="head_too_long")


def _too_long(most: int) -> ApiError:
    return ApiError(413, f"the body is too long; {most} bytes at most", code="body_too_long")
