"""Turns what a client says, a text or a chat, into the tokens of the model that a session holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from splitctl.errors import ConfigInvalid
from splitctl.model.chat_messages import Message, refuse_unreadable

if TYPE_CHECKING:
    from splitctl.session.core import SessionCore


def text_tokens(session: SessionCore, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
    """Turn a text into tokens, as a Tokenize order says; raises ConfigInvalid where the model has no tokenizer."""
    _refuse_without_tokenizer(session)
    return session.tokenize(text, add_special=add_special, parse_special=parse_special)


def chat_text(
    session: SessionCore,
    messages: Sequence[Message],
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    continue_final_message: str | None = None,
) -> str:
    """Turn a chat, oldest message first, into a text, through the model's template; its special tokens are to be read.

    Args:
        session: holds the model.
        messages: the chat so far.
        chat_template_kwargs: more variables of the template.
        continue_final_message: field of the last message after whose text the prompt ends.

    Raises:
        ConfigInvalid: the model has no tokenizer, or these are no messages.
        ChatTemplateFailed: no template, a broken one, or one that refuses these messages.
    """
    from splitctl.model import chat  # noqa: PLC0415 - jinja2, which most workers never need

    refuse_unreadable(messages)
    _refuse_without_tokenizer(session)
    model = session.model
    bos = _token_text(session, model.token_bos)
    text = chat.render(
        model.chat_template(),
        messages,
        bos_token=bos,
        eos_token=_token_text(session, model.token_eos),
        chat_template_kwargs=chat_template_kwargs,
        continue_final_message=continue_final_message,
    )
    if model.add_bos:
        # The template writes the first token, and the tokenizer would write it again.
        text, _ = chat.without_bos(text, bos)
    return text


def pieces_of(session: SessionCore, tokens: Sequence[int], tick: Callable[[], None]) -> tuple[bytes, ...]:
    """Give the bytes of each different token, in the order in which they come first, control tokens by name.

    `tick` is called between them: tokens may be all of the vocabulary. Raises ConfigInvalid where the model has no such
    token.
    """
    _refuse_without_tokenizer(session)
    n_vocab = session.model.n_vocab
    pieces = []
    for token in dict.fromkeys(tokens):
        tick()
        if not 0 <= token < n_vocab:
            raise ConfigInvalid("tokens", token, f"0 to {n_vocab - 1}, the model's vocabulary")
        pieces.append(session.model.piece(token, special=True))
    return tuple(pieces)


def _refuse_without_tokenizer(session: SessionCore) -> None:
    if not session.model.has_tokenizer:
        raise ConfigInvalid("model", session.facts.name, "a model with a tokenizer: this one reads numbers only")


def _token_text(session: SessionCore, token: int) -> str:
    """Give a special token's text; empty when the model has none."""
    return session.model.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""
