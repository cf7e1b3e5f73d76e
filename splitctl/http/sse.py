"""A response of server-sent events, which ends when its client hangs up or does not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from splitctl.control import connection

_T = TypeVar("_T")


class EventStream(Response):
    """Sends chunks as they come."""

    def __init__(self, chunks: AsyncGenerator[bytes], *, on_gone: Callable[[], None], write_s: float) -> None:
        """Take the chunks: whole events.

        `on_gone` is called when the response is over, however it ended. `write_s` is the longest time until a client
        has read a chunk, seconds.
        """
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        # Otherwise nginx holds tokens back.
        self.headers["x-accel-buffering"] = "no"
        self._chunks = chunks
        self._on_gone = on_gone
        self._write_s = write_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them until they end, or the client is gone."""
        if scope["method"] == "HEAD":
            self._on_gone()
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        try:
            await unless_gone(receive, self._send_all(send))
        finally:
            self._on_gone()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._chunks) as chunks:
            async for chunk in chunks:
                async with asyncio.timeout(self._write_s):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _T], *, goes_on: bool = False) -> _T:
    """Do some work unless the client hangs up first, as on the control socket; what it still sends is dropped."""
    return await connection.unless_gone(_hung_up(receive), work, goes_on=goes_on)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
