"""Answers in OpenAI's format with llama-server's timings: whole ones, and the chunks of a stream. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from splitctl.host.streams import Done, Why

#: Why an answer ended -> OpenAI's finish_reason and llama-server's stop_type.
_FINISH = {
    Why.EOS: ("stop", "eos"),
    Why.STOP: ("stop", "word"),
    Why.LENGTH: ("length", "limit"),
    Why.CONTEXT: ("length", "limit"),
}

#: The last line of a stream that ended well.
DONE = b"data: [DONE]\n\n"


def data(body: dict[str, Any]) -> bytes:
    """Write one event of a stream."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def comment(text: str) -> bytes:
    """Write a line that keeps a stream alive and that clients skip."""
    return f": {' '.join(text.split())}\n\n".encode()


def finish_reason(why: Why) -> str | None:
    """Say in OpenAI's words why an answer ended; None where it did not end well."""
    return _FINISH[why][0] if why in _FINISH else None


@dataclass(frozen=True, slots=True)
class Form:
    """What all parts of one answer have in common.

    Attributes:
        number: makes the answer's id.
        model: the name that the client used.
        created: when the request came, seconds since 1970.
        is_chat: whether the answer is a message.
        with_usage: whether a stream ends with the counts.
        with_tokens: whether the tokens' ids stand beside their text.
        build: of the library; empty where it is not known.
    """

    number: str
    model: str
    created: int
    is_chat: bool
    with_usage: bool = False
    with_tokens: bool = False
    build: str = ""

    def whole(self, text: str, done: Done, tokens: Sequence[int] = ()) -> dict[str, Any]:
        """Give a whole answer."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason(done.why), "logprobs": None}
        if self.is_chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        if self.with_tokens:
            choice["tokens"] = list(tokens)
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self._head(kind), "choices": [choice], "usage": usage(done), **_ending(done)}

    def first(self) -> dict[str, Any] | None:
        """Give the chunk that opens a stream; only a chat has one."""
        return self._chunk({"delta": {"role": "assistant", "content": ""}}, None) if self.is_chat else None

    def piece(self, text: str, token: int | None = None) -> dict[str, Any]:
        """Give a chunk of text, and the token with which it has come."""
        said: dict[str, Any] = {"delta": {"content": text}} if self.is_chat else {"text": text}
        if self.with_tokens:
            said["tokens"] = [] if token is None else [token]
        return self._chunk(said, None)

    def last(self, done: Done) -> dict[str, Any]:
        """Give the chunk that says why the answer ended."""
        chunk = self._chunk({"delta": {}} if self.is_chat else {"text": ""}, finish_reason(done.why))
        return {**chunk, **_ending(done)}

    def counts(self, done: Done) -> dict[str, Any]:
        """Give the chunk with the counts alone."""
        return {**self._head(self._chunk_kind), "choices": [], "usage": usage(done)}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _chunk(self, said: dict[str, Any], finish: str | None) -> dict[str, Any]:
        choice = {"index": 0, **said, "finish_reason": finish, "logprobs": None}
        # As OpenAI does: who asked for the counts gets none in every chunk but the last.
        return {**self._head(self._chunk_kind), "choices": [choice], **({"usage": None} if self.with_usage else {})}

    def _head(self, kind: str) -> dict[str, Any]:
        name = "chatcmpl" if self.is_chat else "cmpl"
        head = {"id": f"{name}-{self.number}", "object": kind, "created": self.created, "model": self.model}
        return {**head, "system_fingerprint": self.build or None}


def usage(done: Done) -> dict[str, Any]:
    """Count tokens as OpenAI and llama-server do, a token that ended the answer included."""
    return {
        "prompt_tokens": done.n_prompt,
        "completion_tokens": done.n_drawn,
        "total_tokens": done.n_prompt + done.n_drawn,
        "prompt_tokens_details": {"cached_tokens": done.n_reused},
    }


def _ending(done: Done) -> dict[str, Any]:
    """Say how an answer ended as llama-server does: truncated tells a full context from a limit that was asked for."""
    return {
        "truncated": done.why is Why.CONTEXT,
        "stop_type": _FINISH[done.why][1] if done.why in _FINISH else "none",
        "timings": timings(done),
    }


def timings(done: Done) -> dict[str, Any]:
    """Give times as llama-server does: prompt_n counts what was read, cache_n what was held before.

    The first token comes from the prompt's last decode: it counts in no rate, and its time is the prompt's. A rate of
    nothing is 0.
    """
    n_read, n_steps = done.n_prompt - done.n_reused, max(done.n_drawn - 1, 0)
    return {
        "cache_n": done.n_reused,
        "prompt_n": n_read,
        "prompt_ms": done.prompt_ms,
        "prompt_per_token_ms": _ratio(done.prompt_ms, n_read),
        "prompt_per_second": _ratio(n_read * 1e3, done.prompt_ms),
        "predicted_n": done.n_drawn,
        "predicted_ms": done.generate_ms,
        "predicted_per_token_ms": _ratio(done.generate_ms, n_steps),
        "predicted_per_second": _ratio(n_steps * 1e3, done.generate_ms),
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
