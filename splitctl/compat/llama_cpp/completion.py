"""Completions with the fields of llama-cpp-python's, made of what ``Llama.generate`` draws."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from splitctl.compat.llama_cpp.arguments import tokens_of
from splitctl.compat.llama_cpp.sampling import Bias
from splitctl.errors import ConfigInvalid
from splitctl.ipc.stop_texts import Text
from splitctl.placement import whole
from splitctl.session import arguments

if TYPE_CHECKING:
    from splitctl.compat.llama_cpp.core import LlamaCore
    from splitctl.compat.llama_cpp.llama_types import Json
    from splitctl.compat.llama_cpp.sampling import Sampling


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
    prompt: str | bytes | Sequence[int],
    sampling: Sampling,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    echo: bool,
    stop: str | Sequence[str] | None,
    stream: bool,
    seed: int | None,
    model: str | None,
    logit_bias: Mapping[Any, Any] | None,
) -> Json | Iterator[Json]:
    """Give the chunks of a stream, or one whole completion. What is wrong is refused now, not at the first chunk.

    Raises:
        ConfigInvalid: the prompt leaves no room for an answer, or an argument cannot be followed.
    """
    tokens = _prompt(llama, prompt)
    n_room = llama.n_ctx() - len(tokens)
    n_most = n_room if max_tokens is None else whole(max_tokens)
    if n_most is None:
        raise ConfigInvalid("max_tokens", max_tokens, "a whole number; None or 0: as many as there is room for")
    n_best = 0 if logprobs is None else whole(logprobs)
    if n_best is None or n_best < 0:
        raise ConfigInvalid("logprobs", logprobs, "None, or how many alternatives of each token are wanted")
    if logprobs is not None and echo and not llama.logits_all:
        raise ConfigInvalid("logprobs", logprobs, "logits_all=True, where the prompt's are wanted too (echo)")
    if logit_bias:
        sampling = replace(sampling, logits_processor=[Bias(logit_bias, llama.n_vocab()), *sampling.processors])
    # As there: without a seed, the one of the object gives another one, always the same.
    seed = arguments.count_of("seed", random.Random(llama.seed).randint(0, 2**32) if seed is None else seed)  # noqa: S311
    if sampling.grammar:
        llama.sampler(sampling).close()
    texts = () if stop is None else arguments.stops_of(stop)
    prompt_text = prompt if isinstance(prompt, str) else llama.detokenize(tokens).decode("utf-8", "ignore")
    answer = _Answer(
        llama,
        tokens,
        sampling,
        n_most=min(n_most, n_room) if n_most > 0 else n_room,
        seed=seed,
        text=Text(texts),
        marks=None if logprobs is None else _Logprobs(llama, n_best, 0 if echo else len(prompt_text)),
        head={
            "id": f"cmpl-{uuid.uuid4()}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model or llama.model_path,
        },
        is_first=not prompt_text and len(tokens) == 1,
    )
    chunks = answer.chunks(prompt_text if echo else "")
    if stream:
        return chunks
    with llama.one_at_a_time:
        return answer.whole(chunks)


@dataclass(slots=True)
class _Answer:
    """An answer as it is drawn: its chunks, or all of them as one."""

    llama: LlamaCore
    tokens: list[int]
    sampling: Sampling
    n_most: int
    seed: int
    text: Text
    marks: _Logprobs | None
    head: Json
    is_first: bool
    drawn: list[int] = field(default_factory=list)

    def chunks(self, shown: str) -> Iterator[Json]:
        """Draw it; ``shown`` is text of the prompt that comes first."""
        llama, marks = self.llama, self.marks
        llama.set_seed(self.seed)
        _take_from_cache(llama, self.tokens)
        if marks is not None and shown:
            _mark_prompt(llama, marks, self.tokens)
        if shown:
            yield self._chunk(shown)
        finish_reason = "stop"
        with closing(llama.draw(self.tokens, self.sampling)) as generated:
            for token in generated:
                if llama.is_eog(token):
                    break
                self.drawn.append(token)
                if marks is not None:
                    marks.add(token, llama.last_logits())
                piece = self.text.feed(llama.detokenize([token]))
                if self.is_first and len(self.drawn) == 1:
                    piece = piece.removeprefix(" ")  # the tokenizer's, before a text
                if piece:
                    yield self._chunk(piece)
                if self.text.is_stopped:
                    break
                if len(self.drawn) >= self.n_most:
                    finish_reason = "length"
                    break
        rest = self.text.rest()
        if llama.cache is not None:
            llama.cache[[*self.tokens, *self.drawn]] = llama.save_state()
        if rest:
            yield self._chunk(rest)
        yield {**self.head, "choices": [_choice("", None, finish_reason)]}

    def _chunk(self, text: str) -> Json:
        return {**self.head, "choices": [_choice(text, None if self.marks is None else self.marks.take(), None)]}

    def whole(self, chunks: Iterator[Json]) -> Json:
        """Put the chunks together, with what they took."""
        choices = [chunk["choices"][0] for chunk in chunks]
        marks = None
        if self.marks is not None:
            parts = [one["logprobs"] for one in choices if one["logprobs"]] + [self.marks.take()]
            marks = {name: [entry for part in parts for entry in part[name]] for name in parts[0]}
        n_prompt, n_drawn = len(self.tokens), len(self.drawn)
        usage = {"prompt_tokens": n_prompt, "completion_tokens": n_drawn, "total_tokens": n_prompt + n_drawn}
        text = "".join(one["text"] for one in choices)
        return {**self.head, "choices": [_choice(text, marks, choices[-1]["finish_reason"])], "usage": usage}


def _choice(text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
    return {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": finish_reason}


def _prompt(llama: LlamaCore, prompt: str | bytes | Sequence[int]) -> list[int]:
    """Return the tokens of a prompt.

    Raises:
        ConfigInvalid: there is none, or it leaves no room for an answer.
    """
    if isinstance(prompt, str | bytes):
        tokens = llama.tokenize(prompt, special=True)
    else:
        tokens = tokens_of(prompt, llama.n_vocab())
    if not tokens:
        if llama.token_bos() < 0:
            raise ConfigInvalid("prompt", prompt, "one token at least: this model has none that begins a text")
        tokens = [llama.token_bos()]
    n_ctx = llama.n_ctx()
    if len(tokens) >= n_ctx:
        wanted = f"{n_ctx - 1} tokens at most: Requested tokens ({len(tokens)}) exceed context window of {n_ctx}"
        raise ConfigInvalid("prompt", f"{len(tokens)} tokens", f"{wanted}; give a larger n_ctx")
    return tokens


def _mark_prompt(llama: LlamaCore, marks: _Logprobs, tokens: list[int]) -> None:
    """Read the prompt, and take the log probabilities of its tokens; the first one has none."""
    llama.reset()
    llama.eval(tokens)
    begin = int(tokens[0] == llama.token_bos())
    for at, token in enumerate(tokens[begin:], begin):
        marks.add(token, None if at == begin else llama.scores[at - 1])


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
