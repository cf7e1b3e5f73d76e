"""Bodies of OpenAI's requests: read field by field, refused by name, and turned into what a host generates from.

Laws:
    1. A field that would change the answer and cannot be honoured is refused, and so is one that nobody knows; one that
       changes nothing is ignored. `fields` says which.
    2. Nothing is built from a body before its size has been checked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from splitctl.carry.sampling import RANDOM_SEED, SAMPLER_PARAMS, SamplerSpec
from splitctl.control.requests import GenerateRequest
from splitctl.errors import ConfigInvalid
from splitctl.http import fields
from splitctl.http.errors import ApiError
from splitctl.ipc.wire import shown

Body = Mapping[str, Any]

#: Stop texts of one request, and characters of one.
_MAX_STOPS, _MAX_STOP_CHARS = 16, 1024
#: Characters of the name that a client uses for the model, and of a role.
MAX_MODEL_CHARS, _MAX_ROLE_CHARS = 256, 64

_MAX_MESSAGES = 4096
_MAX_TOKENS = 2**31 - 1
#: Names of the most tokens to generate; the first that is given counts.
_LENGTHS = ("max_completion_tokens", "max_tokens", "n_predict")


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
    fields.CHAT.refuse_others(body)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", messages, "a list of at least one message")
    if len(messages) > _MAX_MESSAGES:
        raise wrong("messages", f"{len(messages)} messages", f"{_MAX_MESSAGES} at most")
    said = tuple(_message(one, f"messages[{index}]") for index, one in enumerate(messages))
    return _asked(body, model, is_chat=True, messages=said, **_template(body, said[-1]))


def completion(body: Body, model: str) -> Asked:
    """Read a request of /v1/completions to the model of this name; raises ApiError with the field."""
    fields.COMPLETION.refuse_others(body)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    if isinstance(prompt, str) and prompt:
        return _asked(body, model, is_chat=False, prompt=text_of("prompt", prompt))
    tokens = [as_whole(one) for one in prompt] if isinstance(prompt, list) else []
    if tokens and all(type(one) is int for one in tokens):
        return _asked(body, model, is_chat=False, tokens=tuple(tokens))
    raise wrong("prompt", prompt, "one text, or one list of tokens (one prompt a request)")


def _asked(body: Body, model: str, *, is_chat: bool, **prompt: Any) -> Asked:
    is_stream = flag(body, "stream")
    options = _object(body, "stream_options")
    fields.STREAM_OPTIONS.refuse_others(options, "stream_options")
    with_usage = flag(options, "include_usage")
    if with_usage and not is_stream:
        raise wrong("stream_options", options, "nothing, without stream")
    fields.RESPONSE_FORMAT.refuse_others(_object(body, "response_format"), "response_format")
    lengths = [_number(body, name, -1, -1, _MAX_TOKENS, whole=True) for name in _LENGTHS if body.get(name) is not None]
    try:
        request = GenerateRequest(
            n_predict=int(*lengths[:1] or (-1,)),
            sampler=_sampler(body),
            grammar=text_of("grammar", "" if body.get("grammar") is None else body["grammar"]),
            **prompt,
        )
    except ConfigInvalid as error:
        raise ApiError(400, str(error), param=error.field) from error
    order = body.get("samplers")
    if order is not None and "penalties" not in order and request.sampler.repeat_penalty != 1.0:
        raise wrong("samplers", order, "penalties among them, or no repeat_penalty")
    name = body.get("model", model)
    # Every chunk of a stream repeats it.
    if name is not None and not (isinstance(name, str) and len(name) <= MAX_MODEL_CHARS):
        raise wrong("model", name, f"a text of {MAX_MODEL_CHARS} characters at most")
    texts = [request.prompt or "", *(text for one in request.messages or () for text in _texts(one["content"]))]
    n_bytes = sum(len(one.encode()) for one in texts)
    return Asked(
        request,
        text_of("model", name or model),
        is_stream=is_stream,
        with_usage=with_usage,
        with_tokens=flag(body, "return_tokens"),
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
    stops = value if isinstance(value, list) else ["" if value is None else value]
    if len(stops) > _MAX_STOPS or not all(isinstance(one, str) for one in stops):
        raise wrong("stop", value, f"a text, or a list of {_MAX_STOPS} texts at most")
    if not all(len(one) <= _MAX_STOP_CHARS for one in stops):
        raise wrong("stop", "a very long text", f"texts of {_MAX_STOP_CHARS} characters at most")
    # As in llama-server an empty text ends nothing.
    return tuple(text_of("stop", one) for one in stops if one)


def _message(value: Any, where: str) -> dict[str, Any]:
    """Read a message; what is absent, null or empty is left out."""
    if not isinstance(value, dict):
        raise wrong(where, value, "an object with role and content")
    fields.MESSAGE.refuse_others(value, where)
    role, content = value.get("role"), value.get("content")
    if not isinstance(role, str) or not 0 < len(role) <= _MAX_ROLE_CHARS:
        raise wrong(f"{where}.role", role, "system, user or assistant")
    if isinstance(content, list) and content:
        content = [_part(one, f"{where}.content[{index}]") for index, one in enumerate(content)]
    elif content is None and role == "assistant":
        # One that calls tools says nothing.
        content = ""
    elif not isinstance(content, str):
        raise wrong(f"{where}.content", content, "a text, or a list of text parts")
    said: dict[str, Any] = {"role": role, "content": content}
    for name in ("name", "tool_call_id", "reasoning_content"):
        said[name] = value.get(name) if value.get(name) is not None else ""
        if not isinstance(said[name], str):
            raise wrong(f"{where}.{name}", said[name], "a text")
    calls = value.get("tool_calls") if value.get("tool_calls") is not None else []
    if not isinstance(calls, list):
        raise wrong(f"{where}.tool_calls", calls, "a list of calls")
    said["tool_calls"] = [_call(one, f"{where}.tool_calls[{index}]") for index, one in enumerate(calls)]
    return {name: one for name, one in said.items() if one or name == "content"}


def _call(value: Any, where: str) -> dict[str, Any]:
    """Read the call of a tool."""
    function = value.get("function") if isinstance(value, dict) and value.get("type") in (None, "function") else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong(where, value, "an object of type function with id and function, its name and arguments")
    if not isinstance(function.get("arguments"), str | dict):
        raise wrong(f"{where}.function.arguments", function.get("arguments"), "an object, or one written as a text")
    return {**value, "type": "function"}


def _part(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or value.get("type") != "text" or not isinstance(value.get("text"), str):
        kind = value.get("type") if isinstance(value, dict) else value
        raise wrong(where, kind, "a part of type text (images and sound are not taken)")
    fields.TEXT_PART.refuse_others(value, where)
    return {"type": "text", "text": value["text"]}


def _texts(content: str | list[dict[str, str]]) -> list[str]:
    return [content] if isinstance(content, str) else [one["text"] for one in content]


def _template(body: Body, last: Mapping[str, Any]) -> dict[str, Any]:
    """Read what the model's template is given besides the messages, of which this is the last."""
    kwargs = dict(_object(body, "chat_template_kwargs"))
    effort = body.get("reasoning_effort")
    if effort is not None and not isinstance(effort, str):
        raise wrong("reasoning_effort", effort, "a text, such as low")
    if effort:
        # As llama-server tells it to templates.
        kwargs |= {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
    goes_on = body.get("continue_final_message")
    if isinstance(goes_on, bool):
        field = "reasoning_content" if last.get("reasoning_content") and not last["content"] else "content"
        goes_on = field if goes_on else None
    if goes_on not in (None, "content", "reasoning_content"):
        raise wrong("continue_final_message", goes_on, "true, false, content or reasoning_content")
    if goes_on == "reasoning_content" and last["content"]:
        raise wrong("continue_final_message", goes_on, "content: the last message has one")
    if body.get("add_generation_prompt") is not None:
        kwargs["add_generation_prompt"] = flag(body, "add_generation_prompt")
        if goes_on and kwargs["add_generation_prompt"]:
            raise wrong("add_generation_prompt", "true", "false, or no continue_final_message")
    return {"chat_template_kwargs": kwargs or None, "continue_final_message": goes_on}


def _object(body: Body, name: str) -> dict[str, Any]:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise wrong(name, value, "an object")
    return value or {}


def flag(body: Body, name: str, default: bool = False) -> bool:  # noqa: FBT001, FBT002 - as dict.get
    """Read true or false; raises ApiError with the field."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise wrong(name, value, "true or false")
    return default if value is None else value


def _number(body: Body, name: str, default: float, low: float, high: float, *, whole: bool = False) -> float:
    value = as_whole(body.get(name)) if whole else body.get(name)
    if value is None:
        return default
    kinds: tuple[type, ...] = (int,) if whole else (int, float)
    if type(value) not in kinds or not low <= value <= high or not math.isfinite(value):
        kind = "a whole number" if whole else "a number"
        raise wrong(name, value, f"{kind} from {low:g} to {high:g}")
    return value if whole else float(value)


def as_whole(value: Any) -> Any:
    """Take 8.0 for 8: some clients know one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def text_of(name: str, value: Any) -> str:
    """Take a text; raises ApiError with the field."""
    if not isinstance(value, str):
        raise wrong(name, value, "a text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise wrong(name, "a text with half a character", "a text that UTF-8 can hold") from error
    return value


def wrong(name: str, found: Any, wanted: str) -> ApiError:
    """Give the refusal of a field."""
    return ApiError(400, f"{name} is {shown(found)}; wanted: {wanted}", param=name.partition("[")[0])
