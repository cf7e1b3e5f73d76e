"""A model's chat template, rendered in a sandbox: the template comes from a file that a stranger made.

The conventions are those of Hugging Face's `apply_chat_template`, which the templates are written for: blocks are
trimmed, `tojson` does not escape for HTML, loop controls work, `raise_exception` refuses, `strftime_now` dates.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from splitctl.errors import SplitctlError

#: Longer than any real template by two orders of magnitude [characters].
MAX_TEMPLATE_CHARS = 1_000_000

#: A rendering that is longer than this is no chat [characters].
MAX_RENDERED_CHARS = 64_000_000


class ChatTemplateFailed(SplitctlError):
    """A model's chat template is missing, broken, or refuses the messages."""

    def __init__(self, why: str) -> None:
        """Build from the fault.

        Args:
            why: what is wrong, in the template's own words where it has some.
        """
        self.why = why
        super().__init__(why)

    def __str__(self) -> str:
        """Name the fault and what to do."""
        return f"the model's chat template cannot be used: {self.why}; leave out --chat and give the prompt as raw text"


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat.

    Attributes:
        role: who speaks: system, user or assistant.
        content: what is said.
    """

    role: str
    content: str


def render(
    template: str | None,
    messages: Sequence[Message],
    *,
    bos_token: str = "",
    eos_token: str = "",
    add_generation_prompt: bool = True,
    now: Callable[[], dt.datetime] = dt.datetime.now,
) -> str:
    """Write messages the way the model was trained to read them.

    Args:
        template: the model's template; None when it has none.
        messages: the chat so far, oldest first.
        bos_token: text of the token that begins a text; empty when there is none.
        eos_token: text of the token that ends one; empty when there is none.
        add_generation_prompt: whether to end with the opening of the assistant's turn.
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
    try:
        text = (
            _environment(now)
            .from_string(template)
            .render(
                messages=[{"role": one.role, "content": one.content} for one in messages],
                add_generation_prompt=add_generation_prompt,
                bos_token=bos_token,
                eos_token=eos_token,
                tools=None,
                documents=None,
            )
        )
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        where = f" (line {line})" if line is not None else ""
        raise ChatTemplateFailed(f"{error.message or type(error).__name__}{where}") from error
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError, MemoryError) as error:
        # A template is a program: whatever it trips over is the template's fault.
        raise ChatTemplateFailed(f"{type(error).__name__}: {error}") from error
    if len(text) > MAX_RENDERED_CHARS:
        why = f"it renders {len(text)} characters, over the limit of {MAX_RENDERED_CHARS}"
        raise ChatTemplateFailed(why)
    return text


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
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


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


def messages_from(prompt: str, *, system: str | None = None) -> tuple[Message, ...]:
    """Make a chat of one question, after a system message where there is one."""
    asked = Message("user", prompt)
    return (asked,) if system is None else (Message("system", system), asked)


def without_bos(text: str, bos_token: str) -> tuple[str, bool]:
    """Take a leading `bos_token` off, and say whether there was one: templates write it, and so does the tokenizer."""
    if bos_token and text.startswith(bos_token):
        return text[len(bos_token) :], True
    return text, False
