"""Completions with the fields of llama-cpp-python's, made of what ``Llama.generate`` draws."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from splitctl.compat.llama_cpp.arguments import ArgumentInvalid
from splitctl.compat.llama_cpp.sampling import Bias, StoppingCriteria
from splitctl.ipc.stop_texts import Text

if TYPE_CHECKING:
    from splitctl.compat.llama_cpp.core import LlamaCore
    from splitctl.compat.llama_cpp.llama_types import Json


@dataclass(slots=True)
class _Logprobs:
    """Log probabilities of tokens, as a completion shows them; ``n`` alternatives each."""

    llama: LlamaCore
    n: int
    offset: int
    tokens: list[str] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)

    def add(self, token: int, row: NDArray[np.float32] | None) -> None:
        """Take a token and the logits that it was drawn from, float32[n_vocab]; None: it was given."""
        text = self._text(token)
        self.tokens.append(text)
        self.text_offset.append(self.offset)
        self.offset += len(text)
        if row is None:
            self.token_logprobs.append(None)
            self.top_logprobs.append(None)
            return
        found = logits_to_logprobs(row)
        best = np.argsort(-found, kind="stable")[: self.n].tolist()
        top = {self._text(one): float(found[one]) for one in best}
        top[text] = float(found[token])
        self.token_logprobs.append(float(found[token]))
        self.top_logprobs.append(top)

    def take(self) -> Json:
        """Give what has been added since the last time."""
        found: Json = {}
        for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
            found[name] = getattr(self, name)
            setattr(self, name, [])
        return found

    def _text(self, token: int) -> str:
        return self.llama.detokenize([token]).decode("utf-8", "ignore")


def logits_to_logprobs(logits: NDArray[np.float32] | Sequence[float], axis: int = -1) -> NDArray[np.float32]:
    """Turn logits into natural logarithms of probabilities, float32 of the same shape."""
    rows = np.asarray(logits, np.float32)
    most = np.max(rows, axis=axis, keepdims=True)
    shifted = rows - np.where(np.isfinite(most), most, np.float32(0))
    with np.errstate(divide="ignore"):
        found: NDArray[np.float32] = shifted - np.log(np.sum(np.exp(shifted), axis=axis, keepdims=True))
    return found


def complete(
    llama: LlamaCore,
    prompt: str | Sequence[int],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    echo: bool,
    stop: str | Sequence[str] | None,
    stream: bool,
    seed: int | None,
    model: str | None,
    stopping_criteria: StoppingCriteria | None,
    logit_bias: Mapping[Any, Any] | None,
    sampling: Mapping[str, Any],
) -> Iterator[Json]:
    """Generate the chunks of a stream, or one whole completion.

    Raises:
        ArgumentInvalid: the prompt leaves no room for an answer, or an argument cannot be followed.
    """
    tokens = _prompt(llama, prompt)
    n_room = llama.n_ctx() - len(tokens)
    n_most = n_room if max_tokens is None or max_tokens <= 0 else min(max_tokens, n_room)
    if logprobs is not None and echo and not llama.logits_all:
        raise ArgumentInvalid("logprobs", logprobs, "logits_all=True, where the prompt's are wanted too (echo)")
    sampling = dict(sampling)
    if logit_bias:
        given = sampling.get("logits_processor")
        before = [] if given is None else [given] if callable(given) else list(given)
        sampling["logits_processor"] = [Bias(logit_bias, llama.n_vocab()), *before]
    # As there: without a seed, the one of the object gives another one, always the same.
    llama.set_seed(random.Random(llama.seed).randint(0, 2**32) if seed is None else seed)  # noqa: S311
    _take_from_cache(llama, tokens)

    prompt_text = prompt if isinstance(prompt, str) else llama.detokenize(tokens).decode("utf-8", "ignore")
    head: Json = {
        "id": f"cmpl-{uuid.uuid4()}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model or llama.model_path,
    }
    marks = None if logprobs is None else _Logprobs(llama, logprobs, 0 if echo else len(prompt_text))
    if marks is not None and echo:
        _mark_prompt(llama, marks, tokens, sampling)
    answer = Text(() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop))
    drawn: list[int] = []
    text = prompt_text if echo else ""
    if stream and text:
        yield _chunk(head, text, marks, None)
    finish_reason = "stop"
    with closing(llama.generate(tokens, stopping_criteria=stopping_criteria, **sampling)) as generated:
        for token in generated:
            if llama.is_eog(token):
                break
            drawn.append(token)
            if marks is not None:
                marks.add(token, llama.last_logits())
            piece = answer.feed(llama.detokenize([token]))
            if not tokens[1:] and len(drawn) == 1 and not prompt_text:
                piece = piece.removeprefix(" ")  # the tokenizer's, before a text
            if stream and piece:
                yield _chunk(head, piece, marks, None)
            text += piece
            if answer.is_stopped:
                break
            if len(drawn) >= n_most:
                finish_reason = "length"
                break
    piece = answer.rest()
    text += piece
    if llama.cache is not None:
        llama.cache[[*tokens, *drawn]] = llama.save_state()
    if stream:
        if piece:
            yield _chunk(head, piece, marks, None)
        yield _chunk(head, "", None, finish_reason)
        return
    usage = {
        "prompt_tokens": len(tokens),
        "completion_tokens": len(drawn),
        "total_tokens": len(tokens) + len(drawn),
    }
    yield {**_chunk(head, text, marks, finish_reason), "usage": usage}


def _prompt(llama: LlamaCore, prompt: str | Sequence[int]) -> list[int]:
    """Return the tokens of a prompt.

    Raises:
        ArgumentInvalid: there is none, or it leaves no room for an answer.
    """
    tokens = llama.tokenize(prompt.encode(), special=True) if isinstance(prompt, str) else list(prompt)
    if not tokens:
        if llama.token_bos() < 0:
            raise ArgumentInvalid("prompt", prompt, "one token at least: this model has none that begins a text")
        tokens = [llama.token_bos()]
    n_ctx = llama.n_ctx()
    if len(tokens) >= n_ctx:
        wanted = f"{n_ctx - 1} tokens at most: Requested tokens ({len(tokens)}) exceed context window of {n_ctx}"
        raise ArgumentInvalid("prompt", f"{len(tokens)} tokens", f"{wanted}; give a larger n_ctx")
    return tokens


def _chunk(head: Json, text: str, marks: _Logprobs | None, finish_reason: str | None) -> Json:
    found = None if marks is None else marks.take()
    return {**head, "choices": [{"text": text, "index": 0, "logprobs": found, "finish_reason": finish_reason}]}


def _mark_prompt(llama: LlamaCore, marks: _Logprobs, tokens: list[int], sampling: Mapping[str, Any]) -> None:
    """Read the prompt, and take the log probabilities of its tokens; the first one has none."""
    if sampling.get("reset", True):
        llama.reset()
    n_before = llama.n_tokens
    llama.eval(tokens)
    begin = int(tokens[0] == llama.token_bos())
    for at, token in enumerate(tokens[begin:], begin):
        marks.add(token, None if at == begin else llama.scores[n_before + at - 1])


def _take_from_cache(llama: LlamaCore, tokens: Sequence[int]) -> None:
    """Load the state of the cache that begins like these tokens, where it holds more of them than is held now."""
    if llama.cache is None:
        return
    try:
        state = llama.cache[tokens]
    except KeyError:
        return
    held = llama.longest_token_prefix(llama.session.tokens(0), tokens)
    if llama.longest_token_prefix(state.input_ids.tolist(), tokens) > held:
        llama.load_state(state)
