"""What a chat template takes, found out by rendering small chats, and messages in the form that it takes. Pure.

As llama-server does it: a template takes contents as texts or as lists of parts; system messages anywhere, one at the
start, or none; the arguments of a tool call as an object or as a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from splitctl.model.chat_messages import Message

#: Writes messages through the template; empty where it fails.
Render = Callable[[Sequence[Message]], str]

#: Words that no template holds.
_ONE, _TWO, _THREE = "splitctlOne", "splitctlTwo", "splitctlThree"
#: Some templates want nine characters.
_CALL_ID = "splitctl1"
_ARGUMENTS = {_ONE: _TWO}
#: Names of called tools that are looked for in a text: each search may take as long as the whole.
_MAX_NAMES = 16
_DEVELOPER = re.compile(r"""["']developer["']""")


@dataclass(frozen=True, slots=True)
class Caps:
    """What a template takes.

    Attributes:
        texts: roles whose content may be a text.
        lists: roles whose content may be a list of parts.
        has_systems: whether system messages may stand anywhere; if not, one may at the start if system is a role above.
        has_calls: whether it writes tool calls.
        has_objects: whether their arguments are an object.
        has_nulls: whether the content beside them is None, not empty.
        has_developer: whether it knows the role developer.
    """

    texts: frozenset[str] = frozenset()
    lists: frozenset[str] = frozenset()
    has_systems: bool = False
    has_calls: bool = False
    has_objects: bool = False
    has_nulls: bool = False
    has_developer: bool = False


def caps_of(template: str, render: Render) -> Caps:
    """Find out what a template takes; `render` writes messages through it."""
    caps = Caps()
    for role in ("user", "system", "assistant", "tool"):
        if role == "tool":
            caps = _with_calls(caps, render)
        if _ONE in render(_probe(caps, role, _ONE)):
            caps = replace(caps, texts=caps.texts | {role})
        listed = render(_probe(caps, role, [{"type": "text", "text": _ONE, _TWO: True}]))
        # A list that is written as it stands shows its other fields too.
        if _ONE in listed and _TWO not in listed:
            caps = replace(caps, lists=caps.lists | {role})
    if _DEVELOPER.search(template):
        # Some name it to refuse it, or to leave it out.
        has_developer = _ONE in render([_said(caps, "developer", _ONE), _said(caps, "user", "a")])
        caps = replace(caps, has_developer=has_developer)
    said = [("system", _ONE), ("system", _TWO), ("user", "a"), ("assistant", "b"), ("system", _THREE), ("user", "c")]
    text = render([_said(caps, role, content) for role, content in said])
    return replace(caps, has_systems=all(mark in text for mark in (_ONE, _TWO, _THREE)))


def _with_calls(caps: Caps, render: Render) -> Caps:
    for has_nulls, has_objects in ((False, True), (False, False), (True, True), (True, False)):
        tried = replace(caps, has_calls=True, has_nulls=has_nulls, has_objects=has_objects)
        text = render(_probe(tried, "tool", "c"))
        # An object that is written as Python writes it was not meant to be one.
        if _ONE in text and str(_ARGUMENTS) not in text:
            return tried
    return caps


def fitted(messages: Sequence[Message], caps: Caps) -> list[dict[str, Any]]:
    """Give messages in the form that a template takes, without losing a text.

    Args:
        messages: objects with role and content, oldest first; a content is a text, a list of parts of type text, or
            absent or None where nothing was said.
        caps: what the template takes.
    """
    chat = [{**one, "content": one.get("content") or ""} for one in messages]
    for at, one in enumerate(chat):
        knows = caps.has_developer and (caps.has_systems or not at)
        if one["role"] == "developer" and not knows:
            one["role"] = "system"
    if not caps.has_systems:
        chat = _merged(chat, takes_first="system" in caps.texts | caps.lists)
    for one in chat:
        one["content"] = _formed(caps, one["role"], one["content"])
        if one.get("tool_calls"):
            one["tool_calls"] = [_called(caps, call) for call in one["tool_calls"]]
            one["content"] = one["content"] or (None if caps.has_nulls else "")
    return chat


def lost(chat: Sequence[Message], text: str, caps: Caps) -> str | None:
    """Name what a template has left out of messages, of which it made this text; None where that is nothing."""
    known = {"user", "assistant"} | caps.texts | caps.lists
    at = 0
    for one in chat:
        if one["role"] not in known:
            # In their order: from the start of a long chat each search would take as long as all of it.
            said = _text_of(one["content"] or "").strip()
            found = text.find(said, at)
            at = found if found >= 0 else text.find(said)
            if at < 0:
                return f"messages of role {one['role']}"
    if not caps.has_calls:
        names = dict.fromkeys(call["function"]["name"] for one in chat for call in one.get("tool_calls") or ())
        if any(name not in text for name in islice(names, _MAX_NAMES)):
            return "tool_calls"
    return None


def _merged(chat: Sequence[dict[str, Any]], *, takes_first: bool) -> list[dict[str, Any]]:
    """Put system messages together at the start, where one is taken; others go into a user's message beside them."""
    done: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []
    for one in (*chat, None):
        if one is not None and one["role"] == "system":
            waiting.append(one)
            continue
        if waiting and takes_first and not done:
            done.append({**waiting[0], "content": _joined(waiting)})
        elif waiting and one is not None and one["role"] == "user":
            one["content"] = _joined([*waiting, one])
        elif waiting and done and done[-1]["role"] == "user":
            done[-1]["content"] = _joined([done[-1], *waiting])
        elif waiting:
            done.append({"role": "user", "content": _joined(waiting)})
        waiting = []
        if one is not None:
            done.append(one)
    return done


def _joined(messages: Sequence[Message]) -> Any:
    """Join what messages say by line feeds; what a single one says stays as it is."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n".join(filter(None, (_text_of(one["content"]) for one in messages)))


def _text_of(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _formed(caps: Caps, role: str, content: Any) -> Any:
    kind = role if role in {"system", "assistant", "tool"} else "user"
    if isinstance(content, str):
        is_list = kind in caps.lists and kind not in caps.texts
        return [{"type": "text", "text": content}] if is_list else content
    return content if kind in caps.lists else _text_of(content)


def _called(caps: Caps, call: Any) -> Any:
    """Write the arguments of a tool call as the template takes them."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    arguments = function["arguments"]
    if caps.has_objects and isinstance(arguments, str):
        try:
            read = json.loads(arguments)
        except (ValueError, RecursionError):
            return call
        arguments = read if isinstance(read, dict) else arguments
    elif not caps.has_objects and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _said(caps: Caps, role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": _formed(caps, role, content)}


def _probe(caps: Caps, role: str, content: Any) -> list[dict[str, Any]]:
    """Give a small chat with this content in a message of this role."""
    said = {"role": role, "content": content}
    user = _said(caps, "user", "a")
    match role:
        case "user":
            return [said]
        case "system":
            return [said, user]
        case "assistant":
            return [user, said, user]
    call = {"id": _CALL_ID, "type": "function", "function": {"name": "f", "arguments": _ARGUMENTS}}
    chat = [user, {"role": "assistant", "tool_calls": [call]}]
    return [*fitted(chat, caps), {**said, "tool_call_id": _CALL_ID, "name": "f"}]
