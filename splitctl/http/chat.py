"""OpenAI's answers over a hosted session: /v1/chat/completions, /v1/completions and /v1/models.

Laws:
    1. A client that hangs up frees its sequence at once.
    2. An error before the first token is an HTTP status where it comes soon enough; a later one is an event of the
       stream.
    3. Pauses are filled with comments, so that no proxy takes a switch for a dead server.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitctl.control.server import SessionService, TokenStream
from splitctl.errors import Busy
from splitctl.host.streams import Begun, Delta, Done, Paused, Why
from splitctl.http import answers, bodies
from splitctl.http.answers import Form
from splitctl.http.bodies import Asked, Body
from splitctl.http.errors import ApiError, prompt_too_long
from splitctl.http.intake import Intake
from splitctl.http.sse import EventStream, unless_gone
from splitctl.ipc.jobs import Fault
from splitctl.ipc.wire import shown

#: Longest silence of a stream [seconds].
_SILENCE_S = 10.0

#: No vocabulary has longer tokens: a longer text than so much for each of a sequence's cells cannot fit it [bytes].
_MAX_BYTES_PER_TOKEN = 512


class _Answer:
    """The resources of one answer, from the start of its stream to its end."""

    def __init__(self, chat: Chat, n_bytes: int) -> None:
        self._chat = chat
        self._n_bytes = n_bytes
        self._is_over = False
        self.stream: TokenStream | None = None
        self.why = Why.CANCELLED
        """What ended the stream, as soon as that is known."""

    def end(self) -> None:
        """Release everything, once; a stream that goes on is cancelled."""
        if self.stream is not None:
            self.stream.cancel()
        if not self._is_over:
            self._is_over = True
            self._chat.ended(self._n_bytes, None if self.stream is None else self.why)


class Chat:
    """The routes of OpenAI's clients.

    Thread: the loop's.
    """

    def __init__(
        self, host: SessionService, intake: Intake, on_end: Callable[[Why], None], aliases: Sequence[str]
    ) -> None:
        """Answer from a session; `on_end` is called with the end of every generation, `aliases` name the model."""
        self._host = host
        self._aliases = aliases
        self._intake = intake
        self._on_end = on_end
        self._n_open = 0
        self._n_held = 0
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, and wait until those under way are answered, at most ``seconds``."""
        self._is_draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()

    def ended(self, n_bytes: int, why: Why | None) -> None:
        """Note that the answer to a request of ``n_bytes`` is over, and why; None: its generation never began."""
        if why is not None:
            self._on_end(why)
        self._n_open -= 1
        self._n_held -= n_bytes
        if not self._n_open:
            self._idle.set()

    async def models(self, _request: Request) -> Response:
        """List the model that is served."""
        return JSONResponse({"object": "list", "data": [self._model(self.model_name)]})

    async def model(self, request: Request) -> Response:
        """Describe the model that is served, under any of its names."""
        asked = request.path_params["id"]
        if asked not in names_of(self._host.status().get("model") or {}, self._aliases):
            message = f"there is no model {shown(asked)}; this server has {shown(self.model_name)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return JSONResponse(self._model(asked))

    def _model(self, name: str) -> dict[str, Any]:
        status = self._host.status()
        model = status.get("model") or {}
        meta = {key: model.get(key) for key in ("n_vocab", "n_ctx_train", "n_layer", "weight_bytes")}
        return {
            "id": name,
            "aliases": list(self._aliases),
            "object": "model",
            "created": int(status.get("started_at") or 0),
            "owned_by": "splitctl",
            "meta": {**meta, "n_ctx": room_of(status.get("placement") or {}), "size": model.get("weight_bytes")},
        }

    @property
    def model_name(self) -> str:
        """What the model is called in answers."""
        return names_of(self._host.status().get("model") or {}, self._aliases)[0]

    async def chat_completions(self, request: Request) -> Response:
        """Answer a chat."""
        return await self._complete(request, bodies.chat)

    async def completions(self, request: Request) -> Response:
        """Complete a prompt."""
        return await self._complete(request, bodies.completion)

    async def _complete(self, request: Request, read: Callable[[Body, str], Asked]) -> Response:
        name = self.model_name
        asked, n_bytes = await self._intake.read(request, lambda body: read(body, name))
        self._refuse_hopeless(asked)
        form = Form(
            secrets.token_hex(12),
            asked.model,
            int(time.time()),
            is_chat=asked.is_chat,
            with_usage=asked.with_usage,
            with_tokens=asked.with_tokens,
            build=str((self._host.status().get("model") or {}).get("build") or ""),
        )
        answer = self.begin(n_bytes)
        try:
            stream = answer.stream = await self._generate(asked)
            if not asked.is_stream:
                return await self._whole(request, answer, stream, form)
            first = await unless_gone(request.receive, self._first_of(answer, stream))
        except BaseException:
            answer.end()
            raise
        else:
            chunks = self._chunks(answer, stream, form, first)
            return EventStream(chunks, on_gone=answer.end, write_s=self._intake.limits.write_s)
        finally:
            if not asked.is_stream:
                answer.end()

    def begin(self, n_bytes: int) -> _Answer:
        """Note that an answer to a request of ``n_bytes`` is under way, until its `end`.

        Raises:
            ApiError: there is no room for it, or the server is being stopped.
        """
        if self._is_draining:
            raise ApiError(503, "the server is being stopped", code="stopping")
        limits = self._intake.limits
        if int(self._host.status().get("queued") or 0) >= limits.n_queued:
            raise ApiError(429, "too many requests wait already; try again", code="queue_full")
        if self._n_held + n_bytes > limits.held_bytes:
            raise ApiError(429, "too many long requests are under way; try again", code="queue_full")
        self._n_open += 1
        self._n_held += n_bytes
        self._idle.clear()
        return _Answer(self, n_bytes)

    async def _generate(self, asked: Asked) -> TokenStream:
        try:
            return await self._host.generate(asked.request)
        except Busy as error:
            is_ending = self._host.status()["state"] == "stopping"
            raise ApiError(503 if is_ending else 429, str(error), code="stopping" if is_ending else "busy") from error

    def _refuse_hopeless(self, asked: Asked) -> None:
        """Refuse what no sequence could hold, before others have to wait for its tokens."""
        status = self._host.status()
        room, n_vocab = room_of(status.get("placement") or {}), (status.get("model") or {}).get("n_vocab")
        tokens = asked.request.tokens
        if tokens is not None and n_vocab and max(tokens) >= int(n_vocab):
            raise ApiError(400, f"prompt has token {max(tokens)}; the model has 0 to {n_vocab - 1}", param="prompt")
        if not room or not n_vocab:
            # Loading: what the context will be is known when it is there.
            return
        n_least = -(-asked.n_text_bytes // _MAX_BYTES_PER_TOKEN) if tokens is None else len(tokens)
        if n_least > room:
            raise prompt_too_long(n_least, room, at_least=tokens is None)

    async def _whole(self, request: Request, answer: _Answer, stream: TokenStream, form: Form) -> Response:
        """Wait for the whole answer."""

        async def collect() -> tuple[list[Delta], Done]:
            pieces: list[Delta] = []
            async for event in stream:
                if isinstance(event, Delta):
                    pieces.append(event)
                elif isinstance(event, Done):
                    return pieces, event
            raise ApiError(503, "the session was closed", code="closed")

        pieces, done = await unless_gone(request.receive, collect())
        answer.why = done.why
        if (failure := self._failure(done)) is not None:
            raise failure
        tokens = [one.token for one in pieces if one.token is not None]
        return JSONResponse(form.whole("".join(one.text for one in pieces), done, tokens))

    async def _chunks(
        self, answer: _Answer, stream: TokenStream, form: Form, event: Any
    ) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a stream; `event` is its first one, None if that has not come within a while."""
        if (opening := form.first()) is not None:
            yield answers.data(opening)
        events = aiter(stream)
        while True:
            match event:
                case Delta(text=text, token=token) if text or (form.with_tokens and token is not None):
                    yield answers.data(form.piece(text, token))
                case Paused(why=why):
                    yield answers.comment(f"waiting: {why}")
                case Done():
                    answer.why = event.why
                    for part in self._ending(form, event):
                        yield part
                    return
                case None:
                    yield answers.comment("waiting")
            event = await _next(events)

    def _ending(self, form: Form, done: Done) -> list[bytes]:
        failure = self._failure(done)
        if failure is not None:
            return [answers.data(failure.body)]
        counts = [answers.data(form.counts(done))] if form.with_usage else []
        return [answers.data(form.last(done)), *counts, answers.DONE]

    async def _first_of(self, answer: _Answer, stream: TokenStream) -> Any:
        """Wait for the first event that shows that tokens will come; raise an error that comes before it.

        It is None if none came within a while, so that the client gets its headers.
        """
        room = room_of(self._host.status().get("placement") or {})
        with suppress(TimeoutError):
            async with asyncio.timeout(_SILENCE_S):
                async for event in stream:
                    if isinstance(event, Done) and (failure := self._failure(event)) is not None:
                        answer.why = event.why
                        raise failure
                    # A prompt that cannot fit is begun all the same, and ends before its first token.
                    if isinstance(event, Delta | Done) or (isinstance(event, Begun) and event.n_prompt < room):
                        return event
        return None

    def _failure(self, done: Done) -> ApiError | None:
        """Return the error of an answer that failed; None if it ended well."""
        if done.why is Why.CONTEXT and not done.n_predicted:
            room = room_of(self._host.status().get("placement") or {})
            if done.n_prompt > room:
                return prompt_too_long(done.n_prompt, room)
            # It would fit alone.  How much others hold is not for this client.
            return ApiError(429, "the cache is full with other requests; try again", code="cache_full")
        if answers.finish_reason(done.why) is not None:
            return None
        if done.why is Why.CANCELLED or self._host.status()["state"] in {"stopping", "parked"}:
            return ApiError(503, done.message or "the session is being stopped", code="stopped")
        if done.fault in {Fault.CONFIG, Fault.MODEL}:
            return ApiError(400, done.message or "the prompt cannot be used", code="invalid_prompt")
        return ApiError(500, done.message or "the answer could not be generated", code="failed")


def names_of(model: Mapping[str, Any], aliases: Sequence[str]) -> list[str]:
    """Give all that a model may be called, that of answers first: its aliases, the name in its header, its file's."""
    name, path = str(model.get("name") or ""), str(model.get("path") or "model")
    # A name that was made of a path would tell where that was.
    own = [one.rpartition("/")[2] if one.startswith("/") else one for one in (name, path)]
    return [one for one in (*aliases, *own) if 0 < len(one) <= bodies.MAX_MODEL_CHARS]


def room_of(placement: Mapping[str, Any]) -> int:
    """Give the most tokens that a sequence of a placement can hold; 0 where that is not known yet."""
    n_ctx, n_seq_max = int(placement.get("n_ctx") or 0), int(placement.get("n_seq_max") or 1)
    return n_ctx if placement.get("kv_unified") else n_ctx // n_seq_max


async def _next(events: AsyncIterator[Any]) -> Any:
    """Wait for the next event; None after a while of silence."""
    try:
        async with asyncio.timeout(_SILENCE_S):
            return await anext(events)
    except TimeoutError:
        return None
