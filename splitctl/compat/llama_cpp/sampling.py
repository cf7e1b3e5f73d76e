"""The sampling arguments of llama-cpp-python, as a sampler of ours: a chain, and what changes logits before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from splitctl.carry.sampling import RANDOM_SEED, SamplerSpec
from splitctl.compat.llama_cpp.llama_grammar import LlamaGrammar
from splitctl.engine.sampler import Constraints, LogitsProcessor, Sampler
from splitctl.errors import ConfigInvalid
from splitctl.placement import number, whole

if TYPE_CHECKING:
    from llama_native import Model

StoppingCriteria = Callable[[NDArray[np.int32], NDArray[np.float32]], bool]

#: Largest penalty and bias: float32 holds many of them.
_MOST = 1e30


class LogitsProcessorList(list[LogitsProcessor]):
    """Processors that are called one after the other."""

    def __call__(self, input_ids: NDArray[np.int32], scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """Let each change the row, float32[n_vocab]."""
        for processor in self:
            found = processor(input_ids, scores)
            scores = scores if found is None else found
        return scores


class StoppingCriteriaList(list[StoppingCriteria]):
    """Criteria any of which ends an answer."""

    def __call__(self, input_ids: NDArray[np.int32], logits: NDArray[np.float32]) -> bool:
        """Ask all of them."""
        return any(one(input_ids, logits) for one in self)


class MinTokensLogitsProcessor:
    """Rules out an end token until an answer has so many tokens."""

    def __init__(self, min_tokens: int, token_eos: int) -> None:
        """Count from the first call on."""
        self.min_tokens, self.token_eos = min_tokens, token_eos
        self.prompt_tokens: int | None = None

    def __call__(self, input_ids: NDArray[np.int32], scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """Change the row, float32[n_vocab], in place."""
        if self.prompt_tokens is None:
            self.prompt_tokens = len(input_ids)
        if len(input_ids) - self.prompt_tokens < self.min_tokens:
            scores[self.token_eos] = -np.inf
        return scores


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; names and defaults are those of ``llama_cpp.Llama.sample``.

    ``stopping_criteria`` are asked before each token is given, with the tokens and the logits; true ends the answer.

    Raises:
        ConfigInvalid: a value that cannot be followed.
    """

    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    temp: float = 0.80
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    tfs_z: float = 1.0
    mirostat_mode: int = 0
    mirostat_eta: float = 0.1
    mirostat_tau: float = 5.0
    penalize_nl: bool = True
    logits_processor: Sequence[LogitsProcessor] | LogitsProcessor | None = None
    grammar: LlamaGrammar | str | None = None
    stopping_criteria: Sequence[StoppingCriteria] | StoppingCriteria | None = None

    def __post_init__(self) -> None:
        for name in ("temp", "typical_p", "frequency_penalty", "presence_penalty"):
            found = number(getattr(self, name))
            if found is None or not abs(found) <= _MOST:
                shown = "temperature" if name == "temp" else name
                raise ConfigInvalid(shown, getattr(self, name), f"a number from {-_MOST:g} to {_MOST:g}")
        for name in ("logits_processor", "stopping_criteria"):
            object.__setattr__(self, name, _functions(name, getattr(self, name)))
        if self.mirostat_mode:
            raise ConfigInvalid("mirostat_mode", self.mirostat_mode, "0 (use temperature, top_p and min_p)")
        if self.typical_p < 1.0 and self.grammar:
            raise ConfigInvalid("typical_p", self.typical_p, "1.0 beside a grammar (use min_p)")
        if self.grammar is not None and not isinstance(self.grammar, str) and not hasattr(self.grammar, "_grammar"):
            raise ConfigInvalid("grammar", self.grammar, "a LlamaGrammar, or its text")
        self._spec(0, 0, repeat_penalty=self.repeat_penalty)

    def _spec(self, seed: int, last_n: int, *, repeat_penalty: float) -> SamplerSpec:
        # A temperature below zero draws from the whole distribution.
        plain = {"temp": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} if self.temp < 0.0 else {}
        given = {name: getattr(self, name) for name in ("temp", "top_k", "top_p", "min_p")}
        return SamplerSpec(
            **{**given, **plain}, repeat_penalty=repeat_penalty, repeat_last_n=max(last_n, -1), seed=seed & RANDOM_SEED
        )

    @property
    def processors(self) -> tuple[LogitsProcessor, ...]:
        """What changes logits, in order."""
        return self.logits_processor  # type: ignore[return-value] # since it was made

    def ends(self, tokens: Sequence[int], row: NDArray[np.float32]) -> bool:
        """Tell whether the answer ends before the token that was drawn from a row, float32[n_vocab], after tokens."""
        held = np.array(tokens, np.int32)
        return any(one(held, row) for one in self.stopping_criteria)  # type: ignore[union-attr] # a tuple now

    def sampler(self, model: Model, *, seed: int, last_n: int) -> Sampler:
        """Make a sampler that looks back at what it draws alone, as llama-cpp-python's does.

        Args:
            model: the placed model.
            seed: of the random draws.
            last_n: how many of the tokens drawn are penalized; negative: all.

        Raises:
            ConfigInvalid: the grammar cannot be read, or a value is out of range.
        """
        is_typical = self.typical_p < 1.0 and self.temp > 0.0
        # The chain has the first penalty alone, and has it after the processors.
        penalizes = self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or is_typical
        processors, drawn = list(self.processors), list[int]()
        if penalizes:
            factors = (self.repeat_penalty, self.frequency_penalty, self.presence_penalty)
            processors.append(_Penalties(drawn, last_n, factors))
        if is_typical:
            processors.append(_Typical(self.typical_p, self.top_k))
        spec = self._spec(seed, last_n, repeat_penalty=1.0 if penalizes else self.repeat_penalty)
        grammar = self.grammar if isinstance(self.grammar, str) else getattr(self.grammar, "_grammar", "")
        made = Sampler(model.library, spec, model.n_vocab, Constraints(grammar, tuple(processors)))
        if penalizes:
            # The processor looks at what the sampler draws.
            made.accepted = drawn
        try:
            made.grammar(model)
        except BaseException:
            made.close()
            raise
        return made


def _functions(name: str, given: object) -> tuple[Callable[..., Any], ...]:
    if given is None or callable(given):
        return () if given is None else (given,)
    found = tuple(given) if isinstance(given, Iterable) else (None,)
    if not all(map(callable, found)):
        raise ConfigInvalid(name, given, "a function of tokens and a row of logits, or a list of them")
    return found


class Bias:
    """Adds to the logits of some tokens."""

    def __init__(self, bias: object, n_vocab: int) -> None:
        """Take token ids, as numbers or texts of digits, and what is added to their logits."""
        pairs = {}
        for token, value in bias.items() if isinstance(bias, Mapping) else [(bias, None)]:
            found = int(token) if isinstance(token, str) and token.isdecimal() else whole(token)
            added = number(value)
            if found is None or not 0 <= found < n_vocab:
                raise ConfigInvalid(
                    "logit_bias", token, f"token ids from 0 to {n_vocab - 1}, and what is added to each"
                )
            if added is None or not (abs(added) <= _MOST or added == -np.inf):
                raise ConfigInvalid(f"logit_bias[{found}]", value, f"a number up to {_MOST:g}; -inf rules it out")
            pairs[found] = added
        self._ids = np.array(list(pairs), np.int64)
        self._values = np.array(list(pairs.values()), np.float32)

    def __call__(self, _: NDArray[np.int32], scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """Change the row, float32[n_vocab], in place."""
        scores[self._ids] += self._values
        return scores


class _Penalties:
    """The library's penalties, whose chain here has the first of them alone. Source: llama-sampler.cpp, penalties."""

    def __init__(self, drawn: Sequence[int], last_n: int, factors: tuple[float, float, float]) -> None:
        self._drawn, self._last_n = drawn, last_n
        self._repeat, self._frequency, self._presence = map(np.float32, factors)

    def __call__(self, _: NDArray[np.int32], row: NDArray[np.float32]) -> NDArray[np.float32]:
        recent = self._drawn[-self._last_n :] if self._last_n > 0 else self._drawn if self._last_n else ()
        if counts := Counter(recent):
            ids, n = np.array(list(counts)), np.array(list(counts.values()), np.float32)
            found = row[ids]
            found = np.where(found <= 0, found * self._repeat, found / self._repeat)
            row[ids] = found - (n * self._frequency + self._presence)
        return row


class _Typical:
    """Locally typical sampling after a top-k. Source: llama-sampler.cpp, typical."""

    def __init__(self, share: float, top_k: int) -> None:
        self._share, self._top_k = share, top_k

    def __call__(self, _: NDArray[np.int32], row: NDArray[np.float32]) -> NDArray[np.float32]:
        n = min(self._top_k, row.size) if self._top_k > 0 else row.size
        ids = np.argsort(-row, kind="stable")[:n]
        p = np.exp(row[ids] - row[ids[0]])
        p /= p.sum()
        with np.errstate(divide="ignore", invalid="ignore"):
            surprise = -np.log(p)
            entropy = np.nansum(p * surprise)
        order = np.argsort(np.abs(surprise - entropy), kind="stable")
        n_kept = int(np.searchsorted(np.cumsum(p[order]), self._share, side="right")) + 1
        kept = ids[order[:n_kept]]
        masked = np.full_like(row, -np.inf)
        masked[kept] = row[kept]
        return masked
