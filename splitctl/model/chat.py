"""A model's chat template, rendered in a sandbox: the template comes from a file that a stranger made.

The conventions are those of Hugging Face's `apply_chat_template`, which the templates are written for: blocks are
trimmed, `tojson` does not escape for HTML, loop controls work, `raise_exception` refuses, `strftime_now` dates.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from splitctl.model.chat_caps import Caps, caps_of, fitted, lost
from splitctl.model.chat_messages import ChatTemplateFailed, Message

#: Longer than any real template by two orders of magnitude [characters].
MAX_TEMPLATE_CHARS = 1_000_000

#: A rendering that is longer than this is no chat [characters].
MAX_RENDERED_CHARS = 64_000_000

#: Stands after the message that is gone on with; what a template writes after it is left out.
_HERE = "splitctlGoesOnHere"


def render(
    template: str | None,
    messages: Sequence[Message],
    *,
    bos_token: str = "",
    eos_token: str = "",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    continue_final_message: str | None = None,
    now: Callable[[], dt.datetime] = dt.datetime.now,
) -> str:
    """Write messages the way the model was trained to read them.

    Args:
        template: the model's template; None when it has none.
        messages: the chat so far, oldest first: objects with role and content, and what else the template knows. They
            are brought into the form that it takes.
        bos_token: text of the token that begins a text; empty when there is none.
        eos_token: text of the token that ends one; empty when there is none.
        chat_template_kwargs: more variables of the template; `add_generation_prompt`, whether to end with the opening
            of the assistant's turn, is true if absent.
        continue_final_message: field of the last message, content or reasoning_content, after whose text the prompt
            ends; None: all messages are whole.
        now: the clock for templates that write the date.

    Returns:
        The prompt, special tokens as text: tokenize it with them parsed.

    Raises:
        ChatTemplateFailed: no template, a broken one, or one that refuses these messages.
    """
    if template is None or not template.strip():
        why = "it has none"
        raise ChatTemplateFailed(why)
    if len(template) > MAX_TEMPLATE_CHARS:
        why = f"it is {len(template)} characters long, over the limit of {MAX_TEMPLATE_CHARS}"
        raise ChatTemplateFailed(why)
    compiled, caps = _known(template, now)
    chat = fitted(messages, caps)
    if continue_final_message is not None:
        chat[-1][continue_final_message] = _marked(chat[-1].get(continue_final_message))
    # As Hugging Face does it: a message that is gone on with is not followed by the opening of another.
    variables = {"add_generation_prompt": continue_final_message is None, **(chat_template_kwargs or {})}
    text = _rendered(compiled, {**variables, "messages": chat, "bos_token": bos_token, "eos_token": eos_token})
    if (left_out := lost(chat, text, caps)) is not None:
        why = f"it leaves out {left_out}"
        raise ChatTemplateFailed(why)
    if continue_final_message is not None:
        text, mark, _ = text.rpartition(_HERE)
        if not mark:
            why = f"it leaves out {continue_final_message} of the last message, which cannot be continued"
            raise ChatTemplateFailed(why)
    return text


@functools.lru_cache(maxsize=4)
def _known(template: str, now: Callable[[], dt.datetime]) -> tuple[jinja2.Template, Caps]:
    """Compile a template and find out what it takes."""
    try:
        compiled = _environment(now).from_string(template)
    except _TRIPPED as error:
        raise _failed(error) from error

    def render_probe(messages: Sequence[Message]) -> str:
        try:
            return _rendered(
                compiled, {"messages": messages, "add_generation_prompt": True, "bos_token": "", "eos_token": ""}
            )
        except ChatTemplateFailed:
            return ""

    return compiled, caps_of(template, render_probe)


def _marked(content: Any) -> Any:
    """Put the mark after a text, or after the last part of a list."""
    if isinstance(content, list):
        return [*content[:-1], {**content[-1], "text": content[-1]["text"] + _HERE}]
    return (content or "") + _HERE


def _rendered(compiled: jinja2.Template, variables: Mapping[str, Any]) -> str:
    absent = {name: _Absent(name=name) for name in ("tools", "documents")}
    try:
        text = compiled.render({**absent, **variables})
        text.encode("utf-8")
    except _TRIPPED as error:
        raise _failed(error) from error
    if len(text) > MAX_RENDERED_CHARS:
        why = f"it renders {len(text)} characters, over the limit of {MAX_RENDERED_CHARS}"
        raise ChatTemplateFailed(why)
    return text


#: A template is a program: whatever it trips over is the template's fault.
_TRIPPED = (
    jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError,
    MemoryError,
)  # fmt: skip


def _failed(error: BaseException) -> ChatTemplateFailed:
    if not isinstance(error, jinja2.TemplateError):
        return ChatTemplateFailed(f"{type(error).__name__}: {error}")
    line = getattr(error, "lineno", None)
    where = f" (line {line})" if line is not None else ""
    return ChatTemplateFailed(f"{error.message or type(error).__name__}{where}")


def _environment(now: Callable[[], dt.datetime]) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Build the sandbox that templates expect."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        # A prompt is no HTML: escaping would change what the model reads.
        autoescape=False,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.tests["none"] = lambda value: value == None  # noqa: E711 - what is absent is none too
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


class _Absent(jinja2.Undefined):
    """What is not given: undefined and empty, and none for templates that compare it without a look."""

    def __eq__(self, other: object) -> bool:
        return other is None

    __hash__ = jinja2.Undefined.__hash__


def _raise_exception(message: str) -> None:
    """Let a template refuse its messages."""
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates pass these by position too
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Write a value as JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationBlock(jinja2.ext.Extension):
    """The `{% generation %}` block, which marks the assistant's words for training and renders as what is inside."""

    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc] # the stub says instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Take the block's body as it is."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def without_bos(text: str, bos_token: str) -> tuple[str, bool]:
    """Take a leading `bos_token` off, and say whether there was one: templates write it, and so does the tokenizer."""
    if bos_token and text.startswith(bos_token):
        return text[len(bos_token) :], True
    return text, False
