"""OpenAI's answers over a hosted session: /v1/chat/completions, /v1/completions and /v1/models.

Laws:
    1. Who hangs up frees its sequence, at once.
    2. A stream has its status before its first byte: what can be refused is refused with a status, and only what goes
       wrong later is an error within the stream.
    3. Silence is filled with comments, so that no proxy takes a switch for a dead server.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitctl.host.control import Hosted, Stream
from splitctl.host.streams import Begun, Delta, Done, Paused, Why
from splitctl.http import answers, bodies
from splitctl.http.answers import Form
from splitctl.http.bodies import Asked, Body
from splitctl.http.errors import ApiError
from splitctl.http.guard import Intake
from splitctl.http.sse import EventStream, hung_up

#: A longer body is read by a thread: the loop has tokens to pass on [bytes].
_LONG_BYTES = 1 << 16

#: Longest silence of a stream [seconds].
_SILENCE_S = 10.0


class Chat:
    """The routes of OpenAI's clients.

    Thread: the loop's.
    """

    def __init__(self, host: Hosted, intake: Intake, on_done: Callable[[Done], None]) -> None:
        """Answer from a session.

        Args:
            host: does the work.
            intake: reads bodies.
            on_done: told how every answer ended.
        """
        self._host = host
        self._intake = intake
        self._on_done = on_done

    async def models(self, _request: Request) -> Response:
        """List the model that is served."""
        status = self._host.status()
        model = status.get("model") or {}
        entry = {
            "id": self.model_name,
            "object": "model",
            "created": int(status.get("started_at") or 0),
            "owned_by": "splitctl",
            "meta": {key: model.get(key) for key in ("n_vocab", "n_ctx_train", "n_layer", "weight_bytes")},
        }
        return JSONResponse({"object": "list", "data": [entry]})

    @property
    def model_name(self) -> str:
        """What the model is called: the name in its header, else that of its file."""
        model = self._host.status().get("model") or {}
        return str(model.get("name") or model.get("path") or "model").rpartition("/")[2]

    async def chat_completions(self, request: Request) -> Response:
        """Answer a chat."""
        return await self._complete(request, bodies.chat)

    async def completions(self, request: Request) -> Response:
        """Go on from a prompt."""
        return await self._complete(request, bodies.completion)

    async def _complete(self, request: Request, read: Callable[[Body, str], Asked]) -> Response:
        raw = await self._intake.body(request)
        name = self.model_name
        if len(raw) <= _LONG_BYTES:
            asked = read(bodies.object_of(raw), name)
        else:
            asked = await asyncio.to_thread(lambda: read(bodies.object_of(raw), name))
        if int(self._host.status().get("queued") or 0) >= self._intake.limits.n_queued:
            raise ApiError(429, "too many requests wait already; try again", code="queue_full")
        form = Form(secrets.token_hex(12), asked.model, int(time.time()), asked.is_chat)
        stream = await self._host.generate(asked.request)
        try:
            if not asked.is_stream:
                return await self._whole(request, stream, form)
            first = await _unless_gone(request, _first_of(stream, self._room()))
        except BaseException:
            stream.cancel()
            raise
        chunks = self._chunks(stream, form, first, with_usage=asked.with_usage)
        return EventStream(chunks, on_gone=stream.cancel, write_s=self._intake.limits.write_s)

    def _room(self) -> int:
        """Most tokens that a sequence can hold."""
        placement = self._host.status().get("placement") or {}
        n_ctx, n_seq_max = int(placement.get("n_ctx") or 0), int(placement.get("n_seq_max") or 1)
        return n_ctx if placement.get("kv_unified") else n_ctx // n_seq_max

    async def _whole(self, request: Request, stream: Stream, form: Form) -> Response:
        """Wait for the whole answer."""

        async def collect() -> tuple[str, Done]:
            text: list[str] = []
            async for event in stream:
                if isinstance(event, Delta):
                    text.append(event.text)
                elif isinstance(event, Done):
                    return "".join(text), event
            raise ApiError(503, "the session was closed", code="closed")

        text, done = await _unless_gone(request, collect())
        self._on_done(done)
        _refuse_failed(done)
        return JSONResponse(form.whole(text, done))

    async def _chunks(self, stream: Stream, form: Form, event: Any, *, with_usage: bool) -> AsyncIterator[bytes]:
        """Give the bytes of a stream whose first event is there."""
        if (opening := form.first()) is not None:
            yield answers.data(opening)
        events = aiter(stream)
        while True:
            match event:
                case Delta(text=text) if text:
                    yield answers.data(form.piece(text))
                case Paused(why=why):
                    yield answers.comment(f"waiting: {why}".replace("\n", " "))
                case Done():
                    self._on_done(event)
                    for part in _ending(form, event, with_usage=with_usage):
                        yield part
                    return
                case None:
                    yield answers.comment("waiting")
            event = await _next(events)


def _ending(form: Form, done: Done, *, with_usage: bool) -> list[bytes]:
    if answers.finish_reason(done.why) is None:
        return [answers.data(_failed(done).body)]
    counts = [answers.data(form.counts(done))] if with_usage else []
    return [answers.data(form.last(done)), *counts, answers.DONE]


async def _first_of(stream: Stream, room: int) -> Any:
    """Wait for the first event that says that something will come; an error before it is a status."""
    async for event in stream:
        if isinstance(event, Done):
            _refuse_failed(event)
        # A prompt that cannot fit is begun all the same, and ends before its first token.
        if isinstance(event, Delta | Done) or (isinstance(event, Begun) and event.n_prompt < room):
            return event
    raise ApiError(503, "the session was closed", code="closed")


async def _next(events: AsyncIterator[Any]) -> Any:
    """Wait for the next event; None after a while of silence."""
    try:
        async with asyncio.timeout(_SILENCE_S):
            return await anext(events)
    except TimeoutError:
        return None


async def _unless_gone(request: Request, work: Any) -> Any:
    """Do some work unless the client hangs up first.

    Raises:
        ConnectionError: it did.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(hung_up(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ConnectionResetError("the client hung up")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait({working, leaving})


def _refuse_failed(done: Done) -> None:
    """Raise what an answer that did not come is worth."""
    if done.why is Why.CONTEXT and not done.n_predicted:
        message = done.message or f"the prompt of {done.n_prompt} tokens does not fit the context"
        raise ApiError(400, message, code="context_length_exceeded")
    if answers.finish_reason(done.why) is None:
        raise _failed(done)


def _failed(done: Done) -> ApiError:
    if done.why is Why.CANCELLED:
        return ApiError(503, done.message or "the session is being stopped", code="stopped")
    return ApiError(500, done.message or "the answer could not be generated", code="failed")


__all__ = ["Chat"]
