"""Texts as tokens and back, and chats as texts, without generating: llama-server's /tokenize and its relatives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from splitctl.control.server import SessionService
from splitctl.http import bodies
from splitctl.http.bodies import Body
from splitctl.http.chat import Chat
from splitctl.http.fields import Fields
from splitctl.http.intake import Intake
from splitctl.http.sse import unless_gone
from splitctl.ipc.orders import Tokenized

_TOKENIZE = Fields(frozenset({"content", "add_special", "parse_special", "with_pieces"}), frozenset({"model"}))
_DETOKENIZE = Fields(frozenset({"tokens"}), frozenset({"model"}))
_MOST_TOKENS = 1 << 31


class Service(SessionService, Protocol):
    """What the routes need of a supervisor."""

    async def tokenize(self, asked: Mapping[str, Any]) -> Tokenized:
        """Turn a text, a chat or tokens into tokens and their texts."""


class Tokens:
    """The routes.

    Thread: the loop's.
    """

    def __init__(self, host: Service, intake: Intake, chat: Chat) -> None:
        """Ask a session; `chat` counts what is under way."""
        self._host = host
        self._intake = intake
        self._chat = chat

    async def tokenize(self, request: Request) -> Response:
        """Give the tokens of a text, with the text of each if asked."""
        with_pieces = False

        def read(body: Body) -> dict[str, Any]:
            nonlocal with_pieces
            _TOKENIZE.refuse_others(body)
            with_pieces = bodies.flag(body, "with_pieces")
            return {
                "text": bodies.text_of("content", body.get("content")),
                "with_pieces": with_pieces,
                "add_special": bodies.flag(body, "add_special"),
                "parse_special": bodies.flag(body, "parse_special", default=True),
            }

        found = await self._ask(request, read)
        if not with_pieces:
            return JSONResponse({"tokens": list(found.tokens)})
        pieces = {token: _piece(piece) for token, piece in _pieces(found)}
        return JSONResponse({"tokens": [{"id": token, "piece": pieces[token]} for token in found.tokens]})

    async def detokenize(self, request: Request) -> Response:
        """Give the text of tokens."""
        n_vocab = (self._host.status().get("model") or {}).get("n_vocab") or _MOST_TOKENS

        def read(body: Body) -> dict[str, Any]:
            _DETOKENIZE.refuse_others(body)
            tokens = body.get("tokens")
            tokens = [bodies.as_whole(one) for one in tokens] if isinstance(tokens, list) else tokens
            if not isinstance(tokens, list) or not all(type(one) is int and 0 <= one < n_vocab for one in tokens):
                raise bodies.wrong("tokens", tokens, f"a list of tokens, each from 0 to {n_vocab - 1}")
            return {"tokens": tuple(tokens), "with_pieces": True}

        found = await self._ask(request, read)
        pieces = dict(_pieces(found))
        return JSONResponse({"content": b"".join(pieces[token] for token in found.tokens).decode("utf-8", "replace")})

    async def apply_template(self, request: Request) -> Response:
        """Give the text that the model's template makes of a chat."""
        name = self._chat.model_name

        def read(body: Body) -> dict[str, Any]:
            asked = bodies.chat(body, name).request
            given = ("messages", "chat_template_kwargs", "continue_final_message")
            return {"text_alone": True, **{one: getattr(asked, one) for one in given}}

        return JSONResponse({"prompt": (await self._ask(request, read)).text})

    async def _ask(self, request: Request, read: Callable[[Body], dict[str, Any]]) -> Tokenized:
        asked, n_bytes = await self._intake.read(request, read, self._intake.limits.token_body_bytes)
        answer = self._chat.begin(n_bytes)
        try:
            return await unless_gone(request.receive, self._host.tokenize(asked))
        finally:
            answer.end()


def _pieces(found: Tokenized) -> Iterable[tuple[int, bytes]]:
    return zip(dict.fromkeys(found.tokens), found.pieces, strict=True)


def _piece(piece: bytes) -> str | list[int]:
    """Write a token's text; its bytes where it is a part of a character."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)
