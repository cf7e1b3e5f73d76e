"""Messages of a chat as clients send them: objects with role and content, and what else a template knows. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from splitctl.errors import ConfigInvalid, SplitctlError

Message = Mapping[str, Any]

#: Lists and objects within each other. Deeper ones could be read, and not be written from deeper in the stack.
_MAX_DEPTH = 64
_SURROGATE = re.compile("[\ud800-\udfff]")


class ChatTemplateFailed(SplitctlError):
    """A model's chat template is missing, broken, or refuses the messages."""

    def __init__(self, why: str) -> None:
        """Build from the fault.

        Args:
            why: what is wrong, in the template's own words where it has some.
        """
        # A template can write half a character, which no message can hold.
        self.why = why.encode("utf-8", "replace").decode("utf-8")
        super().__init__(self.why)

    def __str__(self) -> str:
        """Name the fault and what to do."""
        way_out = "give the prompt as raw text: without --chat, to /v1/completions"
        return f"the model's chat template cannot be used: {self.why}; {way_out}"


def messages_from(prompt: str, *, system: str | None = None) -> tuple[Message, ...]:
    """Make a chat of one question, after a system message where there is one."""
    asked = {"role": "user", "content": prompt}
    return (asked,) if system is None else ({"role": "system", "content": system}, asked)


def refuse_unsound(name: str, value: Any) -> None:
    """Refuse JSON with half a character in a text, or with lists and objects too deep within each other.

    Args:
        name: of the field that holds it, for the error.
        value: as JSON was read.

    Raises:
        ConfigInvalid: it is such.
    """
    if not _is_sound(value, _MAX_DEPTH):
        wanted = f"texts that UTF-8 can hold, {_MAX_DEPTH} levels deep at most"
        raise ConfigInvalid(name, "a text with half a character, or too deep", wanted)


def refuse_unreadable(messages: Sequence[Message]) -> None:
    """Refuse messages that no template could take.

    Args:
        messages: objects with role and content, oldest first; a content may be a list of objects with type "text" and
            text, and absent or None in what the assistant said. Other fields are the template's.

    Raises:
        ConfigInvalid: there is none, or one is something else.
    """
    if not messages:
        raise ConfigInvalid("messages", "empty", "one message at least")
    for at, one in enumerate(messages):
        role, content = one.get("role"), one.get("content")
        if not isinstance(role, str) or not role:
            raise ConfigInvalid(f"messages[{at}].role", role, "who speaks, such as user")
        is_list = isinstance(content, list) and bool(content) and all(map(_is_text_part, content))
        if not (isinstance(content, str) or is_list or (content is None and role == "assistant")):
            wanted = "a text, or a list of parts of text"
            raise ConfigInvalid(f"messages[{at}].content", type(content).__name__, wanted)
        calls = one.get("tool_calls") or []
        if not isinstance(calls, list) or not all(map(_is_call, calls)):
            raise ConfigInvalid(f"messages[{at}].tool_calls", type(calls).__name__, "a list of calls of functions")


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str) and "arguments" in function


def _is_sound(value: Any, depth: int) -> bool:
    if isinstance(value, str):
        return value.isascii() or _SURROGATE.search(value) is None
    if not isinstance(value, dict | list | tuple):
        return True
    inner = (*value, *value.values()) if isinstance(value, dict) else value
    return depth > 0 and all(_is_sound(one, depth - 1) for one in inner)
