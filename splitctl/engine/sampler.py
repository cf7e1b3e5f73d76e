"""Drawing the next token from logits that the session holds, with the library's own samplers.

The logits are ours (a row copied after a decode, or carried), so a draw needs no context: it works the same before
and after a switch, and a chain outlives the model that it sampled for. A grammar does not: it is made anew on the next
model, and accepts again what it had accepted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llama_native import CANDIDATE_BYTES, ChainParams, Grammar, SamplerChain
from splitctl.errors import ConfigInvalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llama_native import Library, Model
    from splitctl.carry.sampling import SamplerSpec

_CANDIDATE = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])

LogitsProcessor = Callable[[NDArray[np.int32], NDArray[np.float32]], "NDArray[np.float32] | None"]
"""Changes logits before a token is drawn from them: called with the sequence's tokens, int32[n], and a row of logits,
float32[n_vocab], its own copy. It changes the row in place, or returns another one; minus infinity rules a token out.
"""


@dataclass(frozen=True, slots=True)
class Constraints:
    """What is done to logits before the chain has them.

    Args:
        grammar: a grammar in GBNF that what is drawn follows; empty: none.
        processors: called in this order, before the grammar rules out what it does not allow.
    """

    grammar: str = ""
    processors: tuple[LogitsProcessor, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.grammar or self.processors)


#: The library goes down a call for each bracket within another, and for each rule that leads to the next: its stack
#: ends at about 30,000 brackets and 60,000 rules, and the process with it (seen on build 11549, stack of 8 MiB).
_MAX_NESTED, _MAX_RULES = 1000, 10_000
#: What opens no bracket; a text or a set of characters that does not end goes to the end, as the library reads it.
_NO_BRACKETS = re.compile(r'"(?:\\.|[^"\\])*"?|\[(?:\\.|[^\]\\])*\]?|#[^\n]*|[^()"\[#]+', re.DOTALL)


def _refuse_deep(content: str) -> None:
    """Refuse what ends the library's stack."""
    n_rules = content.count("::=")
    if n_rules > _MAX_RULES:
        raise ConfigInvalid("grammar", f"{n_rules} rules", f"{_MAX_RULES} at most")
    if content.count("(") > _MAX_NESTED:
        steps = (1 if one == "(" else -1 for one in _NO_BRACKETS.sub("", content))
        if max(accumulate(steps, lambda depth, step: max(depth + step, 0)), default=0) > _MAX_NESTED:
            raise ConfigInvalid("grammar", "brackets within brackets", f"{_MAX_NESTED} deep at most")


def grammar_on(model: Model, content: str) -> Grammar:
    """Read a grammar; raises ConfigInvalid where it cannot be read, or the model has no tokenizer."""
    _refuse_deep(content)
    try:
        return Grammar(model, content)
    except ValueError as error:
        wanted = f"a grammar in GBNF with a rule named root ({error})"
        raise ConfigInvalid("grammar", content[:80], wanted) from error


class Sampler:
    """A chain with its candidate array and the tokens that it accepted.

    Thread: one at a time; the session's turn guards it. Lifetime: until :meth:`close`.
    """

    def __init__(
        self, library: Library, spec: SamplerSpec, n_vocab: int, constraints: Constraints | None = None
    ) -> None:
        """Build the chain; ``self.spec`` has the seed that is used where ``spec`` asks for a random one.

        Raises:
            llama_native.CallFailed: the library refused one of the samplers.
        """
        if _CANDIDATE.itemsize != CANDIDATE_BYTES:
            raise AssertionError("a candidate is 12 bytes")
        self.spec = spec = spec.seeded()
        self.constraints = constraints or Constraints()
        self.accepted: list[int] = []
        self.n_ruled = 0
        """How many of the accepted tokens, the newest ones, the grammar has accepted too."""
        self._candidates = np.zeros(n_vocab, _CANDIDATE)
        self._ids = np.arange(n_vocab, dtype=np.int32)
        self._grammar: Grammar | None = None
        self._chain = SamplerChain(
            library,
            ChainParams(
                temp=spec.temp,
                top_k=spec.top_k,
                top_p=spec.top_p,
                min_p=spec.min_p,
                repeat_penalty=spec.repeat_penalty,
                repeat_last_n=spec.repeat_last_n,
                seed=spec.seed,
                n_vocab=n_vocab,
            ),
        )

    @property
    def n_draws(self) -> int:
        """Random draws made since the seed was set."""
        return self._chain.n_draws

    def sample(self, logits: NDArray[np.float32], model: Model, tokens: Sequence[int]) -> int:
        """Draw one token; the chain accepts it.

        Args:
            logits: float32[n_vocab], not changed.
            model: what the session is placed as now; a grammar needs its vocabulary.
            tokens: what the sequence holds, for the processors.

        Raises:
            ConfigInvalid: the constraints leave no token, or a processor returned something else than a row.
            Exception: what a processor raised.
        """
        candidates = self._candidates
        candidates["id"] = self._ids
        candidates["logit"] = self._processed(logits, tokens) if self.constraints.processors else logits
        candidates["p"] = 0.0
        grammar = self.grammar(model)
        if grammar is not None:
            grammar.apply(candidates.data, candidates.size)
        if self.constraints:
            # Samplers keep a certain number of candidates, ruled out or not.
            candidates = candidates[candidates["logit"] > -np.inf]
            if not candidates.size:
                field = "processors" if grammar is None else "grammar"
                raise ConfigInvalid(field, "no token", "one at least that may come next")
        token = self._chain.apply(candidates.data, candidates.size)
        if grammar is not None:
            grammar.accept(token)
        self._chain.accept(token)
        self.accepted.append(token)
        self.n_ruled += 1
        return token

    def _processed(self, logits: NDArray[np.float32], tokens: Sequence[int]) -> NDArray[np.float32]:
        row, held = logits.copy(), np.array(tokens, np.int32)
        for processor in self.constraints.processors:
            try:
                found = processor(held, row)
            except (StopIteration, StopAsyncIteration) as error:
                # It would end whoever iterates over the answer, as if the answer had ended.
                raise RuntimeError(f"a processor of logits raised {type(error).__name__}") from error
            wanted = f"float32[{logits.size}] of numbers, from a processor of logits"
            try:
                row = row if found is None else np.asarray(found, np.float32)
            except (TypeError, ValueError) as error:
                raise ConfigInvalid("processors", type(found).__name__, wanted) from error
            if row.shape != logits.shape or not bool((row < np.inf).all()):
                raise ConfigInvalid("processors", f"{row.dtype}{list(row.shape)}", wanted)
        return row

    def grammar(self, model: Model) -> Grammar | None:
        """Return the grammar on a model, where it has accepted what it had on the last one; None: there is none.

        Raises:
            ConfigInvalid: it cannot be read, or the tokens drawn so far do not follow it.
        """
        if not self.constraints.grammar:
            return None
        if self._grammar is None or self._grammar.closed or self._grammar.model is not model:
            self._drop_grammar()
            grammar = grammar_on(model, self.constraints.grammar)
            try:
                for token in self.accepted[len(self.accepted) - self.n_ruled :]:
                    grammar.accept(token)
            except ValueError as error:
                wanted = f"one that the tokens drawn so far follow ({error})"
                raise ConfigInvalid("grammar", self.constraints.grammar[:80], wanted) from error
            self._grammar = grammar
        return self._grammar

    def _drop_grammar(self) -> None:
        if self._grammar is not None:
            self._grammar.close()
            self._grammar = None

    def accept(self, token: int) -> None:
        """Let the chain accept a token of a prompt: penalties look back at it. A grammar begins anew after it."""
        self._chain.accept(token)
        self.accepted.append(token)
        self.n_ruled = 0
        self._drop_grammar()

    def replay(self, accepted: Sequence[int], n_draws: int, n_ruled: int = 0) -> None:
        """Bring this fresh sampler to where a carried one was.

        Args:
            accepted: tokens, oldest first.
            n_draws: random draws made.
            n_ruled: how many of the tokens, the newest ones, were drawn under the grammar.
        """
        self.accepted.extend(int(token) for token in accepted)
        self._chain.replay(self.accepted, n_draws)
        self.n_ruled = n_ruled

    def fresh(self, accepted: Sequence[int], n_draws: int, n_ruled: int) -> Sampler:
        """Return another one by the same specification that was brought to such a place; see :meth:`replay`."""
        other = Sampler(self._chain.library, self.spec, self._ids.size, self.constraints)
        other.replay(accepted, n_draws, n_ruled)
        return other

    def close(self) -> None:
        """Free the chain and the grammar; a second call does nothing."""
        self._drop_grammar()
        self._chain.close()
