"""Requests of the control socket as requests over HTTP, and answers back as messages of the socket. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, Protocol

from splitctl.carry.sampling import RANDOM_SEED, SAMPLER_PARAMS
from splitctl.client.errors import HostIncompatible
from splitctl.control.client import MAX_ANSWER_BYTES, ControlAnswer, ControlEvent, HostGone
from splitctl.control.requests import (
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
from splitctl.errors import ConfigInvalid, SplitctlError
from splitctl.ipc.jobs import Fault, RequestFailed
from splitctl.ipc.wire import to_object

Message = ControlEvent | ControlAnswer

#: The header that names the process that serves, for as long as it lives.
IDENTITY_HEADER = "x-splitctl-host"

_FAULT_OF_CODE = {"busy": Fault.BUSY, "parked": Fault.PARKED, "cancelled": Fault.CANCELLED, "stopping": Fault.BUSY}
_FAULT_OF_STATUS = {400: Fault.CONFIG, 401: Fault.CONFIG, 403: Fault.CONFIG, 404: Fault.CONFIG, 409: Fault.REFUSED,
                    413: Fault.CONFIG, 429: Fault.BUSY, 503: Fault.BUSY}  # fmt: skip
#: llama-server's stop_type -> why an answer ended.
_WHY = {"eos": "eos", "word": "stop", "limit": "length"}


class Translator(Protocol):
    """Makes the control socket's messages of the body of an answer."""

    def feed(self, chunk: bytes) -> Iterator[Message]:
        """Take some of the body."""

    def end(self) -> Iterator[Message]:
        """Take its end."""


class Json:
    """An answer that is one object."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._raw = bytearray()

    def feed(self, chunk: bytes) -> Iterator[Message]:
        """Take some of the body."""
        self._raw += chunk
        if len(self._raw) > MAX_ANSWER_BYTES:
            raise HostGone(self._url, f"said {len(self._raw)} bytes without an end and was left")
        yield from ()

    def end(self) -> Iterator[Message]:
        """Take its end."""
        yield ControlAnswer(_object(bytes(self._raw), self._url))


class Sse:
    """An answer of server-sent events."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[Message]:
        """Take some of the body."""
        *whole, self._rest = (self._rest + chunk).split(b"\n\n")
        if len(self._rest) > MAX_ANSWER_BYTES:
            raise HostGone(self._url, f"said {len(self._rest)} bytes without an end and was left")
        for one in whole:
            name, data = "", b""
            for line in one.split(b"\n"):
                if line.startswith(b":"):
                    yield from self.comment(line[1:].strip().decode("utf-8", "replace"))
                key, _, value = line.partition(b": ")
                name = value.decode("utf-8", "replace") if key == b"event" else name
                data += value if key == b"data" else b""
            if data:
                yield from self.data(name, data)

    def end(self) -> Iterator[Message]:
        """Take its end."""
        raise HostGone(self._url, "hung up")

    def comment(self, _text: str) -> Iterator[Message]:
        """Take a line that keeps the stream alive."""
        yield from ()

    def data(self, _name: str, _data: bytes) -> Iterator[Message]:
        """Take an event."""
        yield from ()


class Events(Sse):
    """What happens to a session."""

    def data(self, name: str, data: bytes) -> Iterator[Message]:
        """Take an event."""
        yield ControlEvent({**_object(data, self._url), "kind": name})

    def end(self) -> Iterator[Message]:
        """Take its end."""
        yield ControlAnswer({})


class Completion(Sse):
    """A stream of OpenAI's chunks, as the events of a generation."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._n_tokens = 0
        self._is_paused = False
        self._done: dict[str, Any] = {}

    def cancelled(self) -> ControlAnswer:
        """Give the last message of one that its client has ended: what it took is not known."""
        return ControlAnswer(_done("cancelled", self._n_tokens))

    def comment(self, text: str) -> Iterator[Message]:
        """Take a line that keeps the stream alive."""
        kind, _, why = text.partition(": ")
        if kind == "waiting" and why and not self._is_paused:
            self._is_paused = True
            yield ControlEvent({"kind": "paused", "why": why})

    def data(self, _name: str, data: bytes) -> Iterator[Message]:
        """Take an event."""
        if data == b"[DONE]":
            yield ControlAnswer(self._done or _done("cancelled", self._n_tokens))
            return
        body = _object(data, self._url)
        if "error" in body:
            raise _failure(500, body, self._url)
        for choice in body.get("choices") or ():
            yield from self._choice(choice)
        if "stop_type" in body:
            times = body["timings"]
            why = "context" if body.get("truncated") else _WHY.get(str(body["stop_type"]), "length")
            n_prompt = times["prompt_n"] + times["cache_n"]
            self._done = _done(
                why, times["predicted_n"] - (why == "eos"), n_prompt=n_prompt, n_reused=times["cache_n"],
                prompt_ms=times["prompt_ms"], generate_ms=times["predicted_ms"],
            )  # fmt: skip

    def _choice(self, choice: dict[str, Any]) -> Iterator[Message]:
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or ""
        tokens = choice.get("tokens") or []
        if not text and not tokens:
            return
        if self._is_paused:
            self._is_paused = False
            yield ControlEvent({"kind": "resumed"})
        token = tokens[0] if tokens else None
        self._n_tokens += len(tokens)
        index = max(self._n_tokens - 1, 0)
        yield ControlEvent({"kind": "delta", "text": text, "token": token, "index": index})


def _done(why: str, n_predicted: int, **more: Any) -> dict[str, Any]:
    """Compose the last message of a generation, as the control socket has it."""
    plain: dict[str, Any] = {"why": why, "n_prompt": 0, "n_reused": 0, "n_predicted": n_predicted}
    return {**plain, "prompt_ms": 0.0, "generate_ms": 0.0, "message": "", "fault": None, **more}


Asked = tuple[str, str, dict[str, Any] | None, Callable[[str], Translator]]


def asked(request: ControlRequest) -> Asked:
    """Write a request of the control socket as one of the server: method, path, body, and who reads the answer."""
    match request:
        case StatusRequest():
            return "GET", "/session", None, Json
        case EventsRequest():
            return "GET", "/split-mode/events", None, Events
        case PolicyRequest():
            return "POST", "/policy", {"policy": request.policy}, Json
        case SwitchRequest() | CheckRequest():
            plain = to_object(request, REQUESTS)
            del plain["kind"]
            more = {"dry_run": True} if isinstance(request, CheckRequest) else {}
            return "POST", "/split-mode", plain | more, Json
        case SaveRequest() | RestoreRequest():
            verb = "save" if isinstance(request, SaveRequest) else "restore"
            return "POST", f"/session/{verb}", {"filename": _base_name(request)}, Json
        case StopRequest():
            raise ConfigInvalid("stop", "a client of a URL", "a client of the session's name: no route ends a host")
        case GenerateRequest():
            return _generation(request)


def _base_name(request: SaveRequest | RestoreRequest) -> str:
    """Give the name of a file; over HTTP it lies in the server's folder, so a path here is the name below the root."""
    if len(request.path.parts) != 2:
        raise ConfigInvalid("path", str(request.path), "a name without a folder: a server has one for files")
    return request.path.name


def _generation(request: GenerateRequest) -> Asked:
    for name, usual in (("add_special", True), ("parse_special", False)):
        if request.tokens is None and request.messages is None and getattr(request, name) is not usual:
            raise ConfigInvalid(name, not usual, f"{usual} over HTTP; give tokens instead of a text")
    sampler = request.sampler
    body: dict[str, Any] = {SAMPLER_PARAMS[name].json_name: value for name, value in asdict(sampler).items()}
    body |= {"stop": list(sampler.stop), "seed": -1 if sampler.seed == RANDOM_SEED else sampler.seed}
    body |= {"stream": True, "return_tokens": True}
    body |= {"n_predict": request.n_predict} if request.n_predict >= 0 else {}
    body |= {"grammar": request.grammar} if request.grammar else {}
    if request.messages is None:
        prompt = list(request.tokens) if request.tokens is not None else request.prompt
        return "POST", "/v1/completions", {**body, "prompt": prompt}, Completion
    body |= {"messages": list(request.messages)}
    kwargs = dict(request.chat_template_kwargs or {})
    if "add_generation_prompt" in kwargs:
        body["add_generation_prompt"] = kwargs.pop("add_generation_prompt")
    body |= {"chat_template_kwargs": kwargs} if kwargs else {}
    if request.continue_final_message is not None:
        body["continue_final_message"] = request.continue_final_message
    return "POST", "/v1/chat/completions", body, Completion


def _object(raw: bytes, url: str) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise HostIncompatible(url, "answers what is no JSON") from error
    if not isinstance(body, dict):
        raise HostIncompatible(url, "answers what is no JSON object")
    return body


def refusal(status: int, location: str, raw: bytes, url: str) -> SplitctlError:
    """Give the error of an answer with such a status."""
    if status < 400:
        return HostIncompatible(url, f"sends its clients on to {location[:200] or 'elsewhere'}")
    try:
        return _failure(status, _object(raw, url), url)
    except HostIncompatible:
        return HostIncompatible(url, f"answers with status {status} as no splitctl server does")


def _failure(status: int, body: dict[str, Any], url: str) -> SplitctlError:
    error = body.get("error")
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        raise HostIncompatible(url, "refuses as no splitctl server does")
    message, code = error["message"], error.get("code")
    if status == 404 and "there is nothing at" in message:
        return HostIncompatible(url, f"does not know the request ({message})")
    if status == 401:
        message = f"{message}; give connect(api_key=...)"
    fault = _FAULT_OF_CODE.get(str(code)) or _FAULT_OF_STATUS.get(status, Fault.INTERNAL)
    name = code if isinstance(code, str) else str(error.get("type") or f"Status{status}")
    return RequestFailed(fault, name, message, error)
