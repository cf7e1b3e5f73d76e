"""Chat completions with the fields of llama-cpp-python's, made of completions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from splitctl.compat.llama_cpp import llama_grammar as grammars
from splitctl.compat.llama_cpp.llama_types import Json
from splitctl.errors import ConfigInvalid
from splitctl.session.arguments import stops_of


def answer(
    llama: Any,
    formatter: Callable[..., Any],
    messages: Sequence[Json],
    *,
    functions: Sequence[Json] | None = None,
    function_call: str | Json | None = None,
    tools: Sequence[Json] | None = None,
    tool_choice: str | Json | None = None,
    stop: str | Sequence[str] | None = None,
    response_format: Json | None = None,
    grammar: Any = None,
    logprobs: bool | None = None,
    top_logprobs: int | None = None,
    stream: bool = False,
    **arguments: Any,
) -> Json | Iterator[Json]:
    """Answer a chat; arguments are those of ``Llama.create_chat_completion``."""
    if functions or function_call not in {None, "none", "auto"}:
        raise ConfigInvalid("functions", functions or function_call, "None (use tools)")
    made = formatter(messages=messages, tools=tools)
    prompt = llama.tokenize(made.prompt.encode(), add_bos=not made.added_special, special=True)
    theirs = [made.stop] if isinstance(made.stop, str) else made.stop or ()
    texts = [*(() if stop is None else stops_of(stop)), *filter(None, theirs)]
    if made.stopping_criteria is not None:
        arguments["stopping_criteria"] = made.stopping_criteria
    tool = _chosen(tools, tool_choice)
    if tool is not None:
        grammar = grammars.of_schema({"type": "object", **(tool["function"].get("parameters") or {})})
    elif rules := grammars.of_response_format(response_format):
        grammar = rules
    found = llama.create_completion(
        prompt,
        stop=texts,
        grammar=grammar,
        logprobs=(top_logprobs or 0) if logprobs else None,
        stream=stream,
        **arguments,
    )
    if stream:
        return _stream(found, tool)
    return _whole(found, tool)


def _chosen(tools: Sequence[Json] | None, tool_choice: str | Json | None) -> Json | None:
    """Return the tool whose arguments the answer shall be; None: a text."""
    try:
        known = {tool["function"]["name"]: tool for tool in tools or ()}
    except (TypeError, KeyError) as error:
        raise ConfigInvalid("tools", tools, "a list of {'type': 'function', 'function': {'name': ...}}") from error
    if tool_choice is None or tool_choice in ("none", "auto"):
        return None
    function = tool_choice.get("function") if isinstance(tool_choice, dict) else None
    if isinstance(function, dict) and function.get("name") in known:
        return known[function["name"]]
    wanted = "none, auto, or {'type': 'function', 'function': {'name': one of the tools}}"
    raise ConfigInvalid("tool_choice", tool_choice, wanted)


def _logprobs(found: Json | None) -> Json | None:
    if found is None:
        return None

    def one(text: str, logprob: float | None) -> Json:
        return {"token": text, "bytes": None, "logprob": logprob}

    rows = zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)
    content = [
        {**one(text, logprob), "top_logprobs": [one(*other) for other in (top or {}).items()]}
        for text, logprob, top in rows
    ]
    return {"content": content, "refusal": None}


def _whole(completion: Json, tool: Json | None) -> Json:
    (choice,) = completion["choices"]
    message: Json = {"role": "assistant", "content": choice["text"]}
    finish_reason = choice["finish_reason"]
    if tool is not None:
        call = {"name": tool["function"]["name"], "arguments": choice["text"]}
        message = {
            "role": "assistant",
            "content": None,
            "function_call": call,
            "tool_calls": [{"id": _call_id(completion, tool), "type": "function", "function": call}],
        }
        finish_reason = "tool_calls" if _is_json(choice["text"]) else finish_reason
    return {
        **_head(completion, "chat.completion"),
        "choices": [
            {
                "index": 0,
                "message": message,
                "logprobs": _logprobs(choice["logprobs"]),
                "finish_reason": finish_reason,
            }
        ],
        "usage": completion["usage"],
    }


def _stream(chunks: Iterator[Json], tool: Json | None) -> Iterator[Json]:
    is_first, text = True, ""
    for chunk in chunks:
        (choice,) = chunk["choices"]
        if is_first:
            yield _chunk(chunk, {"role": "assistant"}, None, None)
            is_first = False
        text += choice["text"]
        finish_reason, delta = choice["finish_reason"], {}
        if finish_reason is None and tool is None:
            delta = {"content": choice["text"]}
        elif finish_reason is None and tool is not None:
            call = {"name": tool["function"]["name"], "arguments": choice["text"]}
            named = {"index": 0, "id": _call_id(chunk, tool), "type": "function", "function": call}
            delta = {"content": None, "tool_calls": [named]}
        elif tool is not None and _is_json(text):
            finish_reason = "tool_calls"
        yield _chunk(chunk, delta, _logprobs(choice["logprobs"]), finish_reason)


def _chunk(chunk: Json, delta: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
    choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
    return {**_head(chunk, "chat.completion.chunk"), "choices": [choice]}


def _head(completion: Json, kind: str) -> Json:
    return {
        "id": "chat" + completion["id"],
        "object": kind,
        "created": completion["created"],
        "model": completion["model"],
    }


def _call_id(completion: Json, tool: Json) -> str:
    return f"call_0_{tool['function']['name']}_{completion['id']}"


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
