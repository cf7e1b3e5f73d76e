"""Messages in the form that a template takes: what llama-server makes of the same, and nothing lost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from splitctl.model.chat import render
from splitctl.model.chat_caps import Caps, lost
from splitctl.model.chat_messages import ChatTemplateFailed

# Passes every message through, as ChatML does.
ANY = "{% for m in messages %}[{{ m.role + ':' + m.content }}]{% endfor %}{% if add_generation_prompt %}[{% endif %}"
# Takes one system message, at the start, as Llama 2 does.
FIRST = (
    "{% if messages[0].role == 'system' %}<<{{ messages[0].content }}>>{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('system must be first') }}{% endif %}"
    "{% if m.role == 'user' and loop.index0 % 2 != 0 %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ m.role + ':' + m.content }}]{% endfor %}"
)
# Refuses system messages, as Gemma does.
NONE = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + FIRST
# Drops them without a word.
DROPS = "{% for m in messages %}{% if m.role != 'system' %}[{{ m.role + ':' + m.content }}]{% endif %}{% endfor %}"
# Takes texts and lists, as templates of image models do; lists alone, as their first ones did.
PARTS = "{% for part in m.content %}({{ part.text }}){% endfor %}"
BOTH = (
    "{% for m in messages %}[{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}]{% endfor %}"
)
LISTS = "{% for m in messages %}[" + PARTS + "]{% endfor %}"
DUMPS = "{% for m in messages %}[{{ m.content | tojson }}]{% endfor %}"
PRINTS = "{% for m in messages %}[{{ m.content }}]{% endfor %}"

TWO = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def said(*messages: tuple[str, Any]) -> list[dict[str, Any]]:
    """Make messages of roles and contents."""
    return [{"role": role, "content": content} for role, content in messages]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (ANY, "[user:a\nb][user:c]["),
        (BOTH, "[(a)(b)][c]"),
        (LISTS, "[(a)(b)][(c)]"),
        (DUMPS, '["a\\nb"]["c"]'),
        (PRINTS, "[a\nb][c]"),
    ],
)
def test_parts_are_joined_or_given_as_a_list(template: str, expected: str) -> None:
    """Templates that take lists get them; for others the parts are joined by line feeds, as llama-server does."""
    assert render(template, said(("user", TWO), ("user", "c"))) == expected


def test_a_role_without_lists_gets_a_text() -> None:
    """A template that takes a list from users and none from the system gets what each of them takes."""
    template = "{% for m in messages %}{% if m.role == 'system' %}[{{ m.content + '' }}]{% else %}" + PARTS
    assert render(template + "{% endif %}{% endfor %}", said(("system", TWO), ("user", TWO))) == "[a\nb](a)(b)"


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (ANY, [("system", "s"), ("user", "u"), ("system", "t")], "[system:s][user:u][system:t]["),
        (ANY, [("developer", "s"), ("user", "u")], "[system:s][user:u]["),
        (ANY + "{# 'developer' #}", [("developer", "s"), ("user", "u")], "[developer:s][user:u]["),
        (FIRST, [("developer", "s"), ("user", "u")], "<<s>>[user:u]"),
        (FIRST, [("system", "s"), ("developer", "t"), ("user", "u")], "<<s\nt>>[user:u]"),
        (FIRST, [("system", "s"), ("user", "u"), ("assistant", "a"), ("system", "t"), ("user", "v")],
         "<<s>>[user:u][assistant:a][user:t\nv]"),
        (FIRST, [("user", "u"), ("system", "t")], "[user:u\nt]"),
        (FIRST, [("user", "u"), ("system", TWO), ("assistant", "a")], "[user:u\na\nb][assistant:a]"),
        (FIRST, [("user", "u"), ("assistant", "a"), ("system", "t")], "[user:u][assistant:a][user:t]"),
        (NONE, [("system", "s"), ("user", "u")], "[user:s\nu]"),
        (NONE, [("system", "s"), ("system", ""), ("system", "t"), ("user", TWO)], "[user:s\nt\na\nb]"),
        (NONE, [("system", "s")], "[user:s]"),
        (DROPS, [("system", "s"), ("user", "u")], "[user:s\nu]"),
        (LISTS.replace("[", "{{ m.role }}["), [("system", "s"), ("user", "u")], "system[(s)]user[(u)]"),
    ],
)  # fmt: skip
def test_a_system_message_is_never_lost(template: str, messages: list[tuple[str, Any]], expected: str) -> None:
    """Where a template takes none, or one at the start alone, system messages are merged beside where they stood."""
    assert render(template, said(*messages)) == expected


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_nothing_said_is_an_empty_text(content: dict[str, Any]) -> None:
    """A template that adds texts does not fail on null, and does not write None."""
    messages = [*said(("user", "u")), {"role": "assistant", **content}, *said(("user", "v"))]
    assert render(ANY, messages) == "[user:u][assistant:][user:v]["


CALLS = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}<{{ c.function.name }} {{ ARGUMENTS }}>"
CALLS += "{% endfor %}{% if m.role == 'tool' %}{{ m.tool_call_id }}{{ m.name }}{% endif %}{% endfor %}"
WRITTEN = '{"city": "Köln"}'


@pytest.mark.parametrize("arguments", [WRITTEN, json.loads(WRITTEN)])
@pytest.mark.parametrize(
    "template",
    [
        CALLS.replace("ARGUMENTS", "c.function.arguments | tojson"),
        CALLS.replace("ARGUMENTS", "c.function.arguments"),
        CALLS.replace("ARGUMENTS", "'' + c.function.arguments"),
        CALLS.replace("{{ m.content }}", "{{ 'said:' + m.content if m.content is not none else '' }}").replace(
            "in m.tool_calls", "in (m.tool_calls or []) if m.content is none"
        ).replace("ARGUMENTS", "'' + c.function.arguments"),
    ],
)  # fmt: skip
def test_calls_of_tools_reach_the_template(template: str, arguments: Any) -> None:
    """Arguments are an object or a text, as the template takes them; ids and names of results come along."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    result = {"role": "tool", "content": "sunny", "tool_call_id": "abcdefghi", "name": "N"}
    text = render(template, [{"role": "assistant", "content": None, "tool_calls": [call]}, result])
    assert text.replace("said:", "") == f"<weather {WRITTEN}>sunnyabcdefghiN"


@pytest.mark.parametrize("arguments", ["no JSON", "[1]", "[" * 100_000])
def test_arguments_that_are_no_object_stay_a_text(arguments: str) -> None:
    """What a model has written badly is given as it was written."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    text = render(
        CALLS.replace("ARGUMENTS", "c.function.arguments | tojson"), [{"role": "assistant", "tool_calls": [call]}]
    )
    assert text == f"<f {json.dumps(arguments)}>"


@pytest.mark.parametrize(
    ("message", "left_out"),
    [
        ({"role": "tool", "content": "22 degrees"}, "messages of role tool"),
        ({"role": "critic", "content": "bad"}, "messages of role critic"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": "{}"}}]}, "tool_calls"),
    ],
)
def test_what_a_template_leaves_out_is_refused(message: dict[str, Any], left_out: str) -> None:
    """A message that the model would not see is not dropped in silence."""
    template = "{% for m in messages if m.role in ('user', 'assistant') %}[{{ m.content }}]{% endfor %}"
    with pytest.raises(ChatTemplateFailed, match=f"leaves out {left_out}"):
        render(template, [*said(("user", "u")), message])


class _Searched(str):  # noqa: SLOT000 - it counts
    """A text that counts the characters that are looked through in it."""

    n_looked_through = 0

    def find(self, what: str, start: int = 0) -> int:  # type: ignore[override]
        found = super().find(what, start)
        self.n_looked_through += (len(self) if found < 0 else found) - start
        return found

    def __contains__(self, what: object) -> bool:
        return self.find(str(what)) >= 0


def test_a_long_chat_is_looked_through_once() -> None:
    """Four thousand messages of a role of its own, and a thousand calls, are found in a time that grows with them."""
    chat: list[dict[str, Any]] = [{"role": "critic", "content": f"bad {n:06}"} for n in range(4096)]
    text = _Searched("".join(one["content"] for one in chat))
    assert lost(chat, text, Caps()) is None
    assert text.n_looked_through < len(text)
    calls = [{"function": {"name": f"{n:06}", "arguments": "{}"}} for n in reversed(range(1000))]
    text = _Searched(text)
    assert lost([{"role": "assistant", "content": "", "tool_calls": calls}], text, Caps()) is None
    assert text.n_looked_through < 16 * len(text)
    # A template may write them in an order of its own.
    assert lost(chat[::-1], text, Caps()) is None
    assert lost([*chat, {"role": "critic", "content": "worse"}], text, Caps()) == "messages of role critic"


THINKS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content | trim }}<end>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    ("last", "field", "expected"),
    [
        ({"content": "Sure, "}, "content", "Sure, "),
        ({"content": ""}, "content", ""),
        ({"content": None, "reasoning_content": "Hm"}, "reasoning_content", "<think>Hm"),
        ({"content": "So", "reasoning_content": "Hm"}, "content", "<think>Hm</think>So"),
    ],
)
def test_a_final_message_is_continued(last: dict[str, Any], field: str, expected: str) -> None:
    """The prompt ends with the message's own text, spaces at its end too: nothing closes it, and no turn is opened."""
    messages = [*said(("user", "Hi")), {"role": "assistant", **last}]
    assert render(THINKS, messages, continue_final_message=field) == f"<user>Hi<end>\n<assistant>{expected}"


def test_a_list_is_continued_after_its_last_part() -> None:
    """A template that takes lists goes on after the last part."""
    assert render(BOTH, said(("user", "Hi"), ("assistant", TWO)), continue_final_message="content") == "[Hi][(a)(b"


def test_what_a_template_does_not_write_cannot_be_continued() -> None:
    """A message that is left out is no place to go on from."""
    messages = [*said(("user", "Hi")), {"role": "assistant", "content": "", "reasoning_content": "Hm"}]
    with pytest.raises(ChatTemplateFailed, match="leaves out reasoning_content of the last message"):
        render(ANY, messages, continue_final_message="reasoning_content")


def test_variables_of_a_template_are_given_to_it() -> None:
    """What a client sends beside the messages is seen, tools of its own and the opening of a turn among it."""
    template = "{{ enable_thinking }}{{ tools | length }}{{ add_generation_prompt }}"
    given = {"enable_thinking": False, "tools": [1, 2], "add_generation_prompt": False}
    assert render(template, said(("user", "Hi")), chat_template_kwargs=given) == "False2False"
