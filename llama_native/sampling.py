"""Sampler chains over the caller's own candidate arrays, so that they work on logits that were carried.

Ownership: a SamplerChain owns its chain pointer, which owns its samplers. None of its samplers hold the vocabulary, so
a chain survives the free and reload of a model. A Grammar holds it, and is freed with its model. Thread: any; every
call holds the library's lock.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llama_native.errors import CallFailed
from llama_native.handle import Handle

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from llama_native.library import Library
    from llama_native.model import Model

CANDIDATE_BYTES = 12
"""A candidate is int32 id, float32 logit, float32 p. Source: llama.h, llama_token_data."""


@dataclass(frozen=True, slots=True)
class ChainParams:
    """A chain in llama.cpp's order: penalties, top-k, top-p, min-p, temperature, then the draw (temp <= 0: the top)."""

    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    seed: int = 0
    n_vocab: int = 0


class SamplerChain(Handle):
    """A sampler chain and the number of random draws that it has made."""

    KIND = "sampler"

    def __init__(self, library: Library, params: ChainParams) -> None:
        """Build the chain.

        Raises:
            CallFailed: the library returned NULL for one of its samplers.
            CapabilityMissing: a penalty is asked of a build without penalties.
        """
        super().__init__(library)
        self.params = params
        self.n_draws = 0
        self._draw: Any = None
        with self._making() as (_, lib):
            chain_params = lib.llama_sampler_chain_default_params()
            chain_params.no_perf = True
            pointer = library.call(lib.llama_sampler_chain_init, chain_params)
            if not pointer:
                raise CallFailed("llama_sampler_chain_init", None, library.log.said(2))
            self._pointer = pointer
            self._fill(lib)

    def _fill(self, lib: Any) -> None:
        params = self.params
        if params.repeat_penalty != 1.0 and params.repeat_last_n != 0:
            # Builds from 2026.8 on take n_vocab first; `behaviour.check` has proved what this one does.
            arguments = (params.repeat_last_n, params.repeat_penalty, 0.0, 0.0)
            if self.library.profile.penalties_take_n_vocab:
                self._add(lib, lib.llama_sampler_init_penalties(params.n_vocab, *arguments))
            else:
                self._add(lib, lib.llama_sampler_init_penalties(*arguments))
        if params.temp <= 0:
            self._add(lib, lib.llama_sampler_init_greedy())
            return
        if params.top_k > 0:
            self._add(lib, lib.llama_sampler_init_top_k(params.top_k))
        if params.top_p < 1.0:
            self._add(lib, lib.llama_sampler_init_top_p(params.top_p, 1))
        if params.min_p > 0.0:
            self._add(lib, lib.llama_sampler_init_min_p(params.min_p, 1))
        self._add(lib, lib.llama_sampler_init_temp(params.temp))
        self._draw = lib.llama_sampler_init_dist(params.seed)
        self._add(lib, self._draw)

    def _add(self, lib: Any, sampler: Any) -> None:
        if not sampler:
            raise CallFailed("llama_sampler_init", None, self.library.log.said(2))
        lib.llama_sampler_chain_add(self._pointer, sampler)

    def apply(self, candidates: Buffer, n: int) -> int:
        """Choose one of ``n`` candidates.

        Args:
            candidates: writable, ``n`` entries of CANDIDATE_BYTES (int32 id, float32 logit, float32 p); reordered.
            n: how many.

        Returns:
            The chosen token's id.

        Raises:
            CallFailed: the chain chose nothing.
        """
        with (
            self.library.calling() as (ffi, lib),
            ffi.from_buffer("llama_token_data[]", candidates, require_writable=True) as data,
        ):
            array = ffi.new("llama_token_data_array *")
            array.data, array.size, array.selected, array.sorted = data, n, -1, False
            lib.llama_sampler_apply(self.pointer, array)
            selected, size = int(array.selected), int(array.size)
            if not 0 <= selected < size:
                raise CallFailed("llama_sampler_apply", selected, self.library.log.said(2))
            if self._draw is not None and (size > 1 or self.library.draws_on_single):
                self.n_draws += 1
            return int(array.data[selected].id)

    def accept(self, token: int) -> None:
        """Tell the chain which token was taken (penalties look back on it)."""
        with self.library.calling() as (_, lib):
            lib.llama_sampler_accept(self.pointer, token)

    def replay(self, accepted: list[int], n_draws: int) -> None:
        """Bring a fresh chain to where one was that accepted these tokens, oldest first, and made so many draws."""
        with self.library.calling() as (ffi, lib):
            pointer = self.pointer
            for token in accepted:
                lib.llama_sampler_accept(pointer, token)
            if self._draw is not None:
                data = ffi.new("llama_token_data[]", 2)
                array = ffi.new("llama_token_data_array *")
                for _ in range(n_draws):
                    for index in range(2):
                        data[index].id, data[index].logit, data[index].p = index, 0.0, 0.0
                    array.data, array.size, array.selected, array.sorted = data, 2, -1, False
                    lib.llama_sampler_apply(self._draw, array)
        self.n_draws += n_draws

    @staticmethod
    def _free(lib: Any, pointer: Any) -> None:
        lib.llama_sampler_free(pointer)


class Grammar(Handle):
    """A grammar in GBNF over a model's vocabulary, at the place to which the accepted tokens have brought it.

    Lifetime: that of its model at most. Thread: any.
    """

    KIND = "grammar"

    def __init__(self, model: Model, content: str) -> None:
        """Read a grammar, whose first rule is ``root``.

        Raises:
            CapabilityMissing: the build has no grammars.
            ValueError: the model has no tokenizer, or the library cannot read the grammar.
        """
        model.library.need("grammar")
        super().__init__(model.library)
        self.model = model
        if not model.has_tokenizer:
            raise ValueError("this model has no tokenizer: a grammar needs the text of its tokens")
        # A build that finds no such rule may abort, and the text ends for it at a zero.
        if "\0" in content or re.search(r"^[ \t]*root[ \t]*::=", content, re.MULTILINE) is None:
            raise ValueError("it has no rule named root")
        with self._making() as (_, lib):
            pointer = self.library.call(lib.llama_sampler_init_grammar, model.vocab, content.encode("utf-8"), b"root")
            if not pointer:
                raise ValueError(" | ".join(self.library.log.said(2)) or "the library cannot read it")
            self._pointer = pointer
            model.depend(self)

    def apply(self, candidates: Buffer, n: int) -> None:
        """Set the logits of those of ``n`` candidates that cannot come next to minus infinity; see `SamplerChain`."""
        with (
            self.library.calling() as (ffi, lib),
            ffi.from_buffer("llama_token_data[]", candidates, require_writable=True) as data,
        ):
            array = ffi.new("llama_token_data_array *")
            array.data, array.size, array.selected, array.sorted = data, n, -1, False
            lib.llama_sampler_apply(self.pointer, array)

    def accept(self, token: int) -> None:
        """Move on by a token.

        Raises:
            ValueError: it cannot come next: the library would abort.
        """
        with self.library.calling() as (ffi, lib):
            data = ffi.new("llama_token_data[]", 1)
            data[0].id = token
            array = ffi.new("llama_token_data_array *")
            array.data, array.size, array.selected, array.sorted = data, 1, -1, False
            lib.llama_sampler_apply(self.pointer, array)
            if data[0].logit < 0:
                raise ValueError(f"token {token} cannot come next")
            lib.llama_sampler_accept(self.pointer, token)

    @staticmethod
    def _free(lib: Any, pointer: Any) -> None:
        lib.llama_sampler_free(pointer)
