"""States of a ``Llama`` in memory: one saved, and a cache of them by their tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitctl.carry.sequence import common

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(slots=True)
class LlamaState:
    """What ``Llama.save_state`` gives.

    Attributes:
        input_ids: int32[n_tokens], what the sequence holds.
        scores: float32[n_tokens, n_vocab] with ``logits_all``, else of no rows.
        n_tokens: how many tokens it holds.
        llama_state: a sealed carry: tokens, cache and last logits, with checksums.
        llama_state_size: its size, bytes.
        seed: of the ``Llama``.
    """

    input_ids: NDArray[np.int32]
    scores: NDArray[np.float32]
    n_tokens: int
    llama_state: bytes
    llama_state_size: int
    seed: int


class LlamaRAMCache:
    """States by the tokens that they hold; the one that begins most alike is found. Thread: one at a time."""

    def __init__(self, capacity_bytes: int = 2 << 30) -> None:
        """Hold so many bytes of states; the ones that were used longest ago go first."""
        self.capacity_bytes = capacity_bytes
        self.cache_state: OrderedDict[tuple[int, ...], LlamaState] = OrderedDict()

    @property
    def cache_size(self) -> int:
        """Bytes of the states."""
        return sum(state.llama_state_size for state in self.cache_state.values())

    def _closest(self, key: Sequence[int]) -> tuple[int, ...] | None:
        n_best, best = 0, None
        for one in self.cache_state:
            if (n_common := common(one, key)) > n_best:
                n_best, best = n_common, one
        return best

    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        if (found := self._closest(key)) is None:
            raise KeyError("no state begins with any of these tokens")
        self.cache_state.move_to_end(found)
        return self.cache_state[found]

    def __contains__(self, key: Sequence[int]) -> bool:
        return self._closest(key) is not None

    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        self.cache_state.pop(tuple(key), None)
        self.cache_state[tuple(key)] = value
        while self.cache_state and self.cache_size > self.capacity_bytes:
            self.cache_state.popitem(last=False)
