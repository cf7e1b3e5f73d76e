"""How a chat becomes a prompt: the model's own template, a format by name, or a handler of the caller's.

Templates are rendered in the sandbox of `model.chat`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from splitctl.compat.llama_cpp.llama_types import Json
from splitctl.errors import ConfigInvalid
from splitctl.model.chat_messages import refuse_unreadable
from splitctl.session.arguments import messages_of

if TYPE_CHECKING:
    from splitctl.compat.llama_cpp.sampling import StoppingCriteriaList

#: By name. Sources: the models' own cards.
TEMPLATES: Mapping[str, str] = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama-2": "{{ bos_token }}{% set ns = namespace(sys='') %}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{% set ns.sys = '<<SYS>>\n' + m['content'] + '\n<</SYS>>\n\n' %}"
    "{% elif m['role'] == 'user' %}{{ '[INST] ' + ns.sys + m['content'] + ' [/INST]' }}{% set ns.sys = '' %}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token + bos_token }}{% endif %}{% endfor %}",
    "llama-3": "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + "
    "m['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    "mistral-instruct": "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + m['content'] + ' [/INST]' }}{% elif m['role'] == 'assistant' %}{{ m['content'] + eos_token }}"
    "{% endif %}{% endfor %}",
    "gemma": "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else "
    "'user') + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<start_of_turn>model\n' }}{% endif %}",
}
#: Texts that end an answer, where the model's own end token does not.
STOPS: Mapping[str, tuple[str, ...]] = {
    "chatml": ("<|im_end|>",),
    "llama-3": ("<|eot_id|>",),
    "gemma": ("<end_of_turn>",),
}


@dataclass
class ChatFormatterResponse:
    """A prompt made of a chat.

    Attributes:
        prompt: its text, special tokens as text.
        stop: texts that end the answer.
        stopping_criteria: what else ends it.
        added_special: whether the text begins with the token that begins a text, where there is one.
    """

    prompt: str
    stop: str | list[str] | None = None
    stopping_criteria: StoppingCriteriaList | None = None
    added_special: bool = False


class ChatFormatter(Protocol):
    """Makes a prompt of a chat."""

    def __call__(self, *, messages: Sequence[Json], **kwargs: Any) -> ChatFormatterResponse:
        """Take messages, oldest first."""
        ...


Handler = Callable[..., Any]
"""Answers a chat: called with ``llama``, ``messages`` and the arguments of ``create_chat_completion``, by name."""


class Jinja2ChatFormatter:
    """Makes a prompt by a template, as Hugging Face's tools do."""

    def __init__(
        self,
        template: str,
        eos_token: str,
        bos_token: str,
        add_generation_prompt: bool = True,  # noqa: FBT001, FBT002 - as it is called
        stop_token_ids: Sequence[int] | None = None,  # noqa: ARG002 - the model's end tokens end an answer anyway
    ) -> None:
        """Take a template and the texts of the tokens that end and begin a text."""
        self.template, self.eos_token, self.bos_token = template, eos_token, bos_token
        self.add_generation_prompt = add_generation_prompt

    def __call__(self, *, messages: Sequence[Json], **kwargs: Any) -> ChatFormatterResponse:
        """Render; ConfigInvalid where these are no messages, ChatTemplateFailed where the template refuses them."""
        from splitctl.model import chat  # noqa: PLC0415 - jinja2, which completions do not need

        refuse_unreadable(chat_messages := messages_of(messages))
        given = {name: value for name, value in kwargs.items() if value is not None}
        text = chat.render(
            self.template,
            chat_messages,
            bos_token=self.bos_token,
            eos_token=self.eos_token,
            chat_template_kwargs={"add_generation_prompt": self.add_generation_prompt, **given},
        )
        return ChatFormatterResponse(text, [self.eos_token] if self.eos_token else None, added_special=True)

    def to_chat_handler(self) -> Handler:
        """Return a handler for ``Llama(chat_handler=...)``."""
        return chat_formatter_to_chat_completion_handler(self)


def hf_tokenizer_config_to_chat_formatter(
    tokenizer_config: Mapping[str, Any],
    add_generation_prompt: bool = True,  # noqa: FBT001, FBT002 - as it is called
) -> ChatFormatter:
    """Make a formatter of what a ``tokenizer_config.json`` says.

    An empty message of the assistant stands where its answer begins, as llama-cpp-python has it.
    """
    found = {name: tokenizer_config.get(name) for name in ("chat_template", "bos_token", "eos_token")}
    for name, value in found.items():
        if not isinstance(value, str):
            raise ConfigInvalid(f"tokenizer_config[{name!r}]", value, "a text")
    inner = Jinja2ChatFormatter(str(found["chat_template"]), str(found["eos_token"]), str(found["bos_token"]))

    def formatted(*, messages: Sequence[Json], **kwargs: Any) -> ChatFormatterResponse:
        opened = [*messages, {"role": "assistant", "content": ""}] if add_generation_prompt else messages
        return inner(messages=opened, **kwargs)

    return formatted


def format_mistral_instruct(messages: Sequence[Json], **_: Any) -> ChatFormatterResponse:
    """Make the prompt of the format "mistral-instruct", without the token that begins a text."""
    text = Jinja2ChatFormatter(TEMPLATES["mistral-instruct"], "</s>", "")(messages=messages).prompt
    return ChatFormatterResponse(text, "</s>")


_handlers: dict[str, Handler] = {}


def register_chat_completion_handler(name: str) -> Callable[[Handler], Handler]:
    """Give a handler a name for ``Llama(chat_format=...)``; a decorator."""

    def register(handler: Handler) -> Handler:
        _handlers[name] = handler
        return handler

    return register


def register_chat_format(name: str) -> Callable[[ChatFormatter], ChatFormatter]:
    """Give a formatter a name for ``Llama(chat_format=...)``; a decorator."""

    def register(formatter: ChatFormatter) -> ChatFormatter:
        _handlers[name] = chat_formatter_to_chat_completion_handler(formatter)
        return formatter

    return register


def handler_of(name: str, *, bos_token: str, eos_token: str) -> Handler:
    """Return the handler of a format by its name.

    Raises:
        ConfigInvalid: nobody knows it.
    """
    if name in _handlers:
        return _handlers[name]
    if name not in TEMPLATES:
        known = " ".join(sorted({*TEMPLATES, *_handlers}))
        raise ConfigInvalid("chat_format", name, f"None (the model's template), a chat_handler, or one of {known}")
    inner = Jinja2ChatFormatter(TEMPLATES[name], eos_token, bos_token)

    def formatted(*, messages: Sequence[Json], **kwargs: Any) -> ChatFormatterResponse:
        made = inner(messages=messages, **kwargs)
        made.stop = [*(made.stop or ()), *STOPS.get(name, ())]
        return made

    return chat_formatter_to_chat_completion_handler(formatted)


def chat_formatter_to_chat_completion_handler(formatter: ChatFormatter) -> Handler:
    """Make a handler of a formatter."""

    def handler(*, llama: Any, messages: Sequence[Json], **arguments: Any) -> Json | Iterator[Json]:
        from splitctl.compat.llama_cpp import chat  # noqa: PLC0415 - it uses what stands here

        return chat.answer(llama, formatter, messages, **arguments)

    return handler
