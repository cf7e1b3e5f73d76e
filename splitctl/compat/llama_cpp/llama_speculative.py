"""Drafts by looking back at the prompt, for programs that make such an object (docs/compat.md: ``draft_model``)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class LlamaPromptLookupDecoding:
    """Guesses what comes next: what came after the same few tokens before."""

    def __init__(self, max_ngram_size: int = 2, num_pred_tokens: int = 10) -> None:
        """Compare so many tokens at most, and guess so many."""
        self.max_ngram_size, self.num_pred_tokens = max_ngram_size, num_pred_tokens

    @staticmethod
    def find_candidate_pred_tokens(
        input_ids: NDArray[np.int32], max_ngram_size: int, num_pred_tokens: int
    ) -> NDArray[np.int32]:
        """Return the tokens that followed the first place that ends as ``input_ids`` does; none where there is none."""
        n = len(input_ids)
        for size in range(min(max_ngram_size, n - 1), 0, -1):
            places = np.lib.stride_tricks.sliding_window_view(input_ids[:-1], size)
            (found,) = np.nonzero((places == input_ids[-size:]).all(axis=1))
            if found.size:
                first = int(found[0]) + size
                return input_ids[first : first + num_pred_tokens]
        return np.zeros(0, np.int32)

    def __call__(self, input_ids: NDArray[np.int32], /, **_: Any) -> NDArray[np.int32]:
        """Guess what follows these tokens."""
        return self.find_candidate_pred_tokens(input_ids, self.max_ngram_size, self.num_pred_tokens)
