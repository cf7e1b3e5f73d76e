"""Turns what a client says, a text or a chat, into the tokens of the model that a session holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from splitctl.errors import ConfigInvalid
from splitctl.model import chat
from splitctl.session import Session


def text_tokens(session: Session, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
    """Turn a text into tokens, as a Tokenize order says; raises ConfigInvalid where the model has no tokenizer."""
    _refuse_without_tokenizer(session)
    return session.tokenize(text, add_special=add_special, parse_special=parse_special)


def chat_tokens(session: Session, messages: Sequence[chat.Message], *, add_special: bool) -> list[int]:
    """Turn a chat, oldest message first, into tokens, through the model's template.

    Args:
        session: holds the model.
        messages: the chat so far.
        add_special: let the text begin with the model's first token, once.

    Raises:
        ConfigInvalid: the model has no tokenizer.
        ChatTemplateFailed: no template, a broken one, or one that refuses these messages.
    """
    _refuse_without_tokenizer(session)
    model = session.model
    bos = _token_text(session, model.token_bos)
    text = chat.render(model.chat_template(), messages, bos_token=bos, eos_token=_token_text(session, model.token_eos))
    if model.add_bos:
        # The template writes the first token, and the tokenizer would write it again.
        text, _ = chat.without_bos(text, bos)
    return session.tokenize(text, add_special=add_special, parse_special=True)


def messages_of(bodies: Sequence[Mapping[str, Any]]) -> tuple[chat.Message, ...]:
    """Read the messages of a chat.

    Args:
        bodies: objects with role and content; a content may be a list of objects with type "text" and text.

    Raises:
        ConfigInvalid: there is none, or one is something else.
    """
    if not bodies:
        raise ConfigInvalid("messages", "empty", "one message at least")
    return tuple(_message(at, body) for at, body in enumerate(bodies))


def _message(at: int, body: Mapping[str, Any]) -> chat.Message:
    role, content = body.get("role"), body.get("content")
    if not isinstance(role, str) or not role:
        raise ConfigInvalid(f"messages[{at}].role", role, "who speaks, such as user")
    if isinstance(content, list):
        parts = [one.get("text") for one in content if isinstance(one, dict) and one.get("type") == "text"]
        texts = [one for one in parts if isinstance(one, str)]
        content = "".join(texts) if len(texts) == len(content) else content
    if not isinstance(content, str):
        raise ConfigInvalid(f"messages[{at}].content", type(content).__name__, "a text, or a list of parts of text")
    return chat.Message(role, content)


def _refuse_without_tokenizer(session: Session) -> None:
    if not session.model.has_tokenizer:
        raise ConfigInvalid("model", session.facts.name, "a model with a tokenizer: this one reads numbers only")


def _token_text(session: Session, token: int) -> str:
    """Give a special token's text; empty when the model has none."""
    return session.model.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""
