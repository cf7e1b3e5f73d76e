"""Bodies of OpenAI's requests: read field by field, refused by name, and turned into what a host generates from.

Laws:
    1. A field that would change the answer and cannot be honoured is refused; one that changes nothing is ignored.
    2. Nothing is built from a body before its size has been checked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from splitctl.carry.sampling import RANDOM_SEED, SAMPLER_PARAMS, SamplerSpec
from splitctl.control.requests import ChatMessage, GenerateRequest
from splitctl.errors import ConfigInvalid
from splitctl.http.errors import ApiError
from splitctl.ipc.wire import shown

Body = Mapping[str, Any]

#: Stop texts of one request, and characters of one.
_MAX_STOPS, _MAX_STOP_CHARS = 16, 1024
#: Characters of the name that a client uses for the model, and of a role.
MAX_MODEL_CHARS, _MAX_ROLE_CHARS = 256, 64

_MAX_MESSAGES = 4096
_MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request for text asks for.

    Attributes:
        request: what to generate.
        model: the name that the client used; it gets it back.
        is_stream: whether it wants the tokens as they come.
        with_usage: whether a stream ends with the counts.
        with_tokens: whether it wants the tokens' ids beside their text.
        is_chat: whether the answer is a message.
        n_text_bytes: of the prompt's text, in UTF-8; 0 for tokens.
    """

    request: GenerateRequest
    model: str
    is_stream: bool
    with_usage: bool
    with_tokens: bool
    is_chat: bool
    n_text_bytes: int


def object_of(raw: bytes) -> dict[str, Any]:
    """Read a body.

    Raises:
        ApiError: it is no JSON object.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is {shown(raw)}; wanted: a JSON object in UTF-8") from error
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is {shown(body)}; wanted: a JSON object")
    return body


def chat(body: Body, model: str) -> Asked:
    """Read a request of /v1/chat/completions to the model of this name; raises ApiError with the field."""
    _refuse_unsupported(body, {**_NEITHER, **_NOT_IN_CHAT})
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", messages, "a list of at least one message")
    if len(messages) > _MAX_MESSAGES:
        raise _wrong("messages", f"{len(messages)} messages", f"{_MAX_MESSAGES} at most")
    said = tuple(_message(one, f"messages[{index}]") for index, one in enumerate(messages))
    most = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    return _asked(body, model, most, is_chat=True, messages=said)


def completion(body: Body, model: str) -> Asked:
    """Read a request of /v1/completions to the model of this name; raises ApiError with the field."""
    _refuse_unsupported(body, {**_NEITHER, **_NOT_IN_COMPLETION})
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    if isinstance(prompt, str) and prompt:
        return _asked(body, model, "max_tokens", is_chat=False, prompt=_text("prompt", prompt))
    if isinstance(prompt, list) and prompt and all(type(one) is int for one in prompt):
        return _asked(body, model, "max_tokens", is_chat=False, tokens=tuple(prompt))
    raise _wrong("prompt", prompt, "one text, or one list of tokens (one prompt a request)")


def _asked(body: Body, model: str, most: str, *, is_chat: bool, **prompt: Any) -> Asked:
    is_stream = _flag(body, "stream")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise _wrong("stream_options", options, "an object")
    if options and not is_stream:
        raise _wrong("stream_options", options, "nothing, without stream")
    n_predict = _number(body, most, -1, -1, _MAX_TOKENS, whole=True)
    if most not in body or body[most] is None:
        n_predict = _number(body, "n_predict", -1, -1, _MAX_TOKENS, whole=True)
    try:
        request = GenerateRequest(n_predict=int(n_predict), sampler=_sampler(body), **prompt)
    except ConfigInvalid as error:
        raise ApiError(400, str(error), param=error.field) from error
    name = body.get("model", model)
    # Every chunk of a stream repeats it.
    if name is not None and not (isinstance(name, str) and len(name) <= MAX_MODEL_CHARS):
        raise _wrong("model", name, f"a text of {MAX_MODEL_CHARS} characters at most")
    with_usage = bool(options) and _flag(options or {}, "include_usage")
    texts = [one.content for one in request.messages or ()] if request.prompt is None else [request.prompt]
    n_bytes = sum(len(one.encode()) for one in texts)
    return Asked(
        request,
        _text("model", name or model),
        is_stream=is_stream,
        with_usage=with_usage,
        with_tokens=_flag(body, "return_tokens"),
        is_chat=is_chat,
        n_text_bytes=n_bytes,
    )


def _sampler(body: Body) -> SamplerSpec:
    """Read how tokens are drawn; what is not given is llama.cpp's default."""
    given: dict[str, Any] = {}
    for name, param in SAMPLER_PARAMS.items():
        if isinstance(param.default, tuple):
            given[name] = _stops(body.get(param.json_name))
        else:
            whole = isinstance(param.default, int)
            given[name] = _number(body, param.json_name, param.default, *param.served, whole=whole)
    # The library's seeds have 32 bits; the last one, and so -1, means a random one.
    return SamplerSpec(**{**given, "seed": given["seed"] % (RANDOM_SEED + 1)})


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > _MAX_STOPS or not all(isinstance(one, str) for one in stops):
        raise _wrong("stop", value, f"a text, or a list of {_MAX_STOPS} texts at most")
    if not all(0 < len(one) <= _MAX_STOP_CHARS for one in stops):
        raise _wrong("stop", "an empty or very long text", f"texts of 1 to {_MAX_STOP_CHARS} characters")
    return tuple(_text("stop", one) for one in stops)


def _message(value: Any, where: str) -> ChatMessage:
    if not isinstance(value, dict):
        raise _wrong(where, value, "an object with role and content")
    role, content = value.get("role"), value.get("content")
    if not isinstance(role, str) or not 0 < len(role) <= _MAX_ROLE_CHARS:
        raise _wrong(f"{where}.role", role, "system, user or assistant")
    if isinstance(content, list):
        content = "".join(_part(one, f"{where}.content[{index}]") for index, one in enumerate(content))
    if not isinstance(content, str):
        raise _wrong(f"{where}.content", content, "a text, or a list of text parts")
    return ChatMessage(_text(f"{where}.role", role), _text(f"{where}.content", content))


def _part(value: Any, where: str) -> str:
    if isinstance(value, dict) and value.get("type") == "text" and isinstance(value.get("text"), str):
        return str(value["text"])
    kind = value.get("type") if isinstance(value, dict) else value
    raise _wrong(where, kind, "a part of type text (images and sound are not taken)")


def _flag(body: Body, name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return bool(value)


def _number(body: Body, name: str, default: float, low: float, high: float, *, whole: bool = False) -> float:
    value = body.get(name)
    if value is None:
        return default
    kinds: tuple[type, ...] = (int,) if whole else (int, float)
    if type(value) not in kinds or not low <= value <= high or not math.isfinite(value):
        kind = "a whole number" if whole else "a number"
        raise _wrong(name, value, f"{kind} from {low:g} to {high:g}")
    return value if whole else float(value)


def _text(name: str, value: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _wrong(name, "a text with half a character", "a text that UTF-8 can hold") from error
    return value


def _wrong(name: str, found: Any, wanted: str) -> ApiError:
    return ApiError(400, f"{name} is {shown(found)}; wanted: {wanted}", param=name.partition("[")[0])


def _refuse_unsupported(body: Body, fields: Mapping[str, tuple[Callable[[Any], bool], str]]) -> None:
    for name, (is_neutral, why) in fields.items():
        value = body.get(name)
        if value is not None and not is_neutral(value):
            raise ApiError(400, f"{name} is {shown(value)}; {why}", param=name, code="unsupported")


def _is_one(value: Any) -> bool:
    return type(value) in {int, float} and value == 1


def _is_zero(value: Any) -> bool:
    return type(value) in {int, float} and value == 0


def _is_off(value: Any) -> bool:
    return type(value) in {int, float} and value <= 0


def _is_empty(value: Any) -> bool:
    return value in ({}, [], "", False)


def _is_text_format(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


def _is_no_choice(value: Any) -> bool:
    return value in ("none", "auto")


#: Fields that would change the answer and cannot be honoured: what is neutral in them, and what to do.
_NEITHER: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "n": (_is_one, "one answer a request: send several requests"),
    "presence_penalty": (_is_zero, "use repeat_penalty and repeat_last_n"),
    "frequency_penalty": (_is_zero, "use repeat_penalty and repeat_last_n"),
    "logit_bias": (_is_empty, "single tokens cannot be weighed"),
    "mirostat": (_is_zero, "use temperature, top_k, top_p and min_p"),
    "dynatemp_range": (_is_zero, "use temperature"),
    "typical_p": (_is_one, "use top_k, top_p and min_p"),
    "top_n_sigma": (_is_off, "use top_k, top_p and min_p"),
    "xtc_probability": (_is_zero, "use top_k, top_p and min_p"),
    "dry_multiplier": (_is_zero, "use repeat_penalty and repeat_last_n"),
    "n_probs": (_is_zero, "probabilities are not given"),
    "ignore_eos": (_is_empty, "an answer ends where the model ends it"),
    "lora": (_is_empty, "adapters are applied for all requests: splitctl serve --lora"),
    "grammar": (_is_empty, "grammars are not applied"),
    "json_schema": (_is_empty, "grammars are not applied"),
}
_NOT_IN_CHAT: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "logprobs": (_is_empty, "probabilities are not given"),
    "tools": (_is_empty, "tools are not called"),
    "functions": (_is_empty, "functions are not called"),
    "tool_choice": (_is_no_choice, "tools are not called"),
    "response_format": (_is_text_format, "answers are text: the format cannot be forced"),
}
_NOT_IN_COMPLETION: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "best_of": (_is_one, "one answer a request: send several requests"),
    "logprobs": (_is_zero, "probabilities are not given"),
    "echo": (_is_empty, "the prompt is not sent back"),
    "suffix": (_is_empty, "text is generated after a prompt only"),
}
