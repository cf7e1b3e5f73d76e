"""Drawing the next token from logits that the session holds, with the library's own samplers.

The logits are ours (a row copied after a decode, or carried), so a draw needs no context: it works the same before
and after a switch, and a chain outlives the model that it sampled for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llama_native import CANDIDATE_BYTES, ChainParams, SamplerChain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from llama_native import Library
    from splitctl.carry.sampling import SamplerSpec

_CANDIDATE = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])


class Sampler:
    """A chain with its candidate array and the tokens that it accepted.

    Thread: one at a time; the session's turn guards it. Lifetime: until :meth:`close`.
    """

    def __init__(self, library: Library, spec: SamplerSpec, n_vocab: int) -> None:
        """Build the chain; ``self.spec`` has the seed that is used where ``spec`` asks for a random one.

        Raises:
            llama_native.CallFailed: the library refused one of the samplers.
        """
        if _CANDIDATE.itemsize != CANDIDATE_BYTES:
            raise AssertionError("a candidate is 12 bytes")
        self.spec = spec = spec.seeded()
        self.accepted: list[int] = []
        self._candidates = np.zeros(n_vocab, _CANDIDATE)
        self._ids = np.arange(n_vocab, dtype=np.int32)
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

    def sample(self, logits: NDArray[np.float32]) -> int:
        """Draw one token from logits (float32[n_vocab], not changed); the chain accepts it."""
        candidates = self._candidates
        candidates["id"] = self._ids
        candidates["logit"] = logits
        candidates["p"] = 0.0
        token = self._chain.apply(candidates.data, candidates.size)
        self.accept(token)
        return token

    def accept(self, token: int) -> None:
        """Let the chain accept a token, of the prompt too: penalties look back at it."""
        self._chain.accept(token)
        self.accepted.append(token)

    def replay(self, accepted: Sequence[int], n_draws: int) -> None:
        """Bring this fresh sampler to where a carried one was: tokens accepted, oldest first, and draws made."""
        self.accepted.extend(int(token) for token in accepted)
        self._chain.replay(self.accepted, n_draws)

    def fresh(self, accepted: Sequence[int], n_draws: int) -> Sampler:
        """Return another one by the same specification that accepted these tokens and made so many draws."""
        other = Sampler(self._chain.library, self.spec, self._ids.size)
        other.replay(accepted, n_draws)
        return other

    def close(self) -> None:
        """Free the chain; a second call does nothing."""
        self._chain.close()
