"""What each layer of a model keeps between two decodes, from its header alone. Pure.

Source: load_arch_hparams of the files in llama.cpp's src/models (windows, recurrent layers), llama-hparams.cpp (widths)
and create_memory in llama-model.cpp (which layer has which memory).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitctl.model import architectures
from splitctl.model.remembered import remembered

if TYPE_CHECKING:
    from splitctl.model.facts import ModelFacts

_Plain = bool | int | float


@dataclass(frozen=True, slots=True)
class WindowRule:
    """Which layers of an architecture look back a window only.

    Args:
        period: one layer of so many looks back to the start; 0: none does; -1: the metadata lists the layers.
        dense_first: whether it is the first of the period, else the last.
        n_tokens: the window where the metadata names none; 0: then there is no window at all.
        fixed: whether `n_tokens` stands whatever the metadata says, once it names a window.
        unnamed: whether the window is there although the metadata does not name one.
    """

    period: int
    dense_first: bool = False
    n_tokens: int = 0
    fixed: bool = False
    unnamed: bool = False


#: Architectures with a sliding window.
WINDOWS: Mapping[str, WindowRule] = {
    "afmoe": WindowRule(4),
    "cohere2": WindowRule(4),
    "cohere2moe": WindowRule(4, dense_first=True),
    "deepseek4": WindowRule(0),
    "dots3note": WindowRule(-1),
    "exaone-moe": WindowRule(4, n_tokens=128, unnamed=True),
    "exaone4": WindowRule(4, n_tokens=4096, unnamed=True),
    "gemma2": WindowRule(2, n_tokens=4096, unnamed=True),
    "gemma3": WindowRule(6),
    "gemma3n": WindowRule(5),
    "gemma4": WindowRule(-1),
    "gemma-embedding": WindowRule(6),
    "gpt-oss": WindowRule(2),
    "granite_swa": WindowRule(-1),
    "laguna": WindowRule(4, dense_first=True),
    "llama4": WindowRule(4, n_tokens=8192, fixed=True, unnamed=True),
    "maple": WindowRule(-1),
    "mellum": WindowRule(4),
    "mimo2": WindowRule(-1),
    "modern-bert": WindowRule(3, dense_first=True),
    "muse-glimmer": WindowRule(4),
    "olmo2": WindowRule(4),
    "plamo3": WindowRule(8),
    "smallthinker": WindowRule(4, dense_first=True, n_tokens=4096, fixed=True),
    "spark2_5": WindowRule(-1),
    "step35": WindowRule(-1),
}

#: Only the 32B model has one; the number of layers tells which it is.  Source: exaone4.cpp.
_EXAONE4_WINDOW_LAYERS = 64
#: Layers of gemma3n that keep rows of their own; the others use those of the last two.  Source: gemma3n.cpp.
_GEMMA3N_OWN_LAYERS = 20
#: Compression ratios of deepseek4's caches.  Source: llama-kv-cache-dsv4.cpp.
CSA_RATIO, HCA_RATIO = 4, 128


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """One layer.

    Args:
        index: from 0.
        n_head: query heads.
        n_head_kv: KV heads.
        n_embd_head_k: width of a key head.
        n_embd_head_v: width of a value head.
        n_ff: width of the dense feed-forward part; 0 where the metadata names none.
        has_cache: whether it keeps rows of keys (and values).
        has_values: whether it keeps values; models with latent attention keep keys alone.
        is_window: whether it looks back a window only.
        is_recurrent: whether it keeps a recurrent state.
        n_embd_index: width of the rows that an indexer keeps; 0 without one.
        is_prediction: whether it predicts further tokens (MTP); it is not used here, and some builds do not load it.
        compress_ratio: how many tokens deepseek4 keeps in one more row; 0 for none.
    """

    index: int
    n_head: int
    n_head_kv: int
    n_embd_head_k: int
    n_embd_head_v: int
    n_ff: int
    has_cache: bool
    has_values: bool
    is_window: bool
    is_recurrent: bool
    n_embd_index: int = 0
    is_prediction: bool = False
    compress_ratio: int = 0

    @property
    def k_width(self) -> int:
        """Values of one row of keys."""
        return self.n_head_kv * self.n_embd_head_k

    @property
    def v_width(self) -> int:
        """Values of one row of values; 0 where none are kept."""
        return self.n_head_kv * self.n_embd_head_v if self.has_values else 0


@dataclass(frozen=True, slots=True)
class Layers:
    """All layers of a model.

    Args:
        each: in order.
        n_window: tokens that the window layers look back; 0 without a window.
    """

    each: tuple[LayerFacts, ...]
    n_window: int


@remembered
def layers_of(facts: ModelFacts) -> Layers:
    """Describe the layers of a model, as the library counts them.

    A model that runs its layers in loops has one entry for each pass.
    """
    reading = _Reading(facts)
    n_window, windows = reading.windows()
    return Layers(tuple(reading.layer(index, windows) for index in range(reading.n_all)), n_window)


class _Reading:
    """Look-ups in the metadata of one model."""

    def __init__(self, facts: ModelFacts) -> None:
        self._facts = facts
        self._values = dict(facts.metadata)
        self._loops = max(self.number("num_loops", 1), 1) if facts.architecture == "nanbeige" else 1
        self.n_all = facts.n_layer * self._loops
        self._n_used = self.n_all - min(self.number("nextn_predict_layers", 0), self.n_all)
        self._mla = facts.is_mla and self.number("attention.value_length_mla", 0) > 0
        self._is_dsv4 = facts.architecture == "deepseek4"

    def number(self, key: str, default: int) -> int:
        """Look up one number."""
        value = self._values.get(key, default)
        return int(value) if isinstance(value, int | float) else default

    def each(self, key: str, default: Sequence[_Plain]) -> Sequence[_Plain]:
        """Look up one number a layer, given as a list or as one for all."""
        value = self._values.get(key)
        if isinstance(value, tuple) and len(value) >= self._facts.n_layer:
            return [value[index % len(value)] for index in range(self.n_all)]
        if isinstance(value, bool | int | float):
            return [value] * self.n_all
        return default

    def windows(self) -> tuple[int, Sequence[bool]]:
        """Tell the window, and which layers have it."""
        none = [False] * self.n_all
        named = self.number("attention.sliding_window", 0)
        architecture = self._facts.architecture
        if architecture.startswith("lfm2") and architecture != "lfm2moe" and named:
            return named, [heads > 0 for heads in self._facts.n_head_kv]
        rule = WINDOWS.get(architecture)
        is_named = "attention.sliding_window" in self._values
        if rule is None or (architecture == "exaone4" and self._n_used != _EXAONE4_WINDOW_LAYERS):
            return 0, none
        if not named and (is_named or not rule.unnamed):
            return 0, none
        n_tokens = rule.n_tokens if rule.fixed or not named else named
        listed = self._values.get("attention.sliding_window_pattern") if rule.period else None
        if isinstance(listed, tuple):
            return n_tokens, [bool(listed[index]) if index < len(listed) else False for index in range(self.n_all)]
        if rule.period < 0:
            return 0, none
        period = int(listed) if isinstance(listed, int) else rule.period
        return n_tokens, [
            index < self._n_used and self._in_window(index, period, dense_first=rule.dense_first)
            for index in range(self.n_all)
        ]

    @staticmethod
    def _in_window(index: int, period: int, *, dense_first: bool) -> bool:
        if period == 0:
            return True
        return index % period != 0 if dense_first else index % period < period - 1

    def _recurrent(self, index: int) -> bool:
        """Tell whether a layer keeps a recurrent state."""
        facts = self._facts
        name = facts.architecture
        if facts.is_recurrent or name == "falcon-h1":
            return True
        if name not in architectures.HYBRID or self._is_dsv4 or index >= self._n_used:
            return False
        if name in architectures.INTERVAL_HYBRID or name == "minimax-01":
            listed = self.each("attention.recurrent_layers", ())
            if listed:
                return bool(listed[index])
            interval = self.number("full_attention_interval", 8 if name == "minimax-01" else 4) or 1
            return (index + 1) % interval != 0
        no_heads = facts.n_head_kv[index] == 0
        return no_heads and self._width(index) == 0 if name.startswith("nemotron_h") else no_heads

    def _width(self, index: int) -> int:
        """Give the width of a layer's feed-forward part."""
        return int(self.each("feed_forward_length", [0] * self.n_all)[index])

    def _owns_rows(self, index: int) -> bool:
        """Tell whether a layer keeps rows of its own, where layers share them."""
        if self._facts.architecture == "gemma3n":
            return index < _GEMMA3N_OWN_LAYERS
        if self._facts.architecture == "gemma4":
            return index < self.n_all - self.number("attention.shared_kv_layers", 0)
        return True

    def _index_width(self, index: int, *, has_cache: bool) -> int:
        """Give the width of the rows that a layer's indexer keeps."""
        facts = self._facts
        if not has_cache or not facts.n_embd_indexer:
            return 0
        name = facts.architecture
        if name == "hy_v4" and not self.number("attention.indexer.top_k", 0):
            return 0
        if name == "minimax-m3":
            return facts.n_embd_indexer if index >= self.number("leading_dense_block_count", 0) else 0
        if name in {"glm-dsa", "hy_v4", "dots3note", "glm5-next"}:
            kinds = self.each("attention.indexer.types", [name not in {"hy_v4", "dots3note"}] * self.n_all)
            if not kinds[index]:
                return 0
        if name == "glm5-next":
            return facts.n_embd_indexer * (3 if self.number("attention.indexer.kpool", 0) > 0 else 1)
        # 2026.10.11549 keeps rows of twice the width, llama-cpp-python 0.3.36 of one: the larger is planned for.
        return facts.n_embd_indexer * (2 if name == "qwen4exp" else 1)

    def layer(self, index: int, windows: Sequence[bool]) -> LayerFacts:
        """Describe one layer."""
        facts, at = self._facts, index % self._facts.n_layer
        is_window, is_recurrent = bool(windows[index]), self._recurrent(index)
        heads_kv = int(self.each("attention.head_count_kv", facts.n_head_kv * self._loops)[index])
        # An encoder of t5 keeps rows that nobody reads again.
        has_cache = (
            (facts.has_memory or facts.architecture == "t5encoder") and index < self._n_used and self._owns_rows(index)
        )
        has_cache = has_cache and (not is_recurrent or facts.architecture == "falcon-h1") and not facts.is_recurrent
        if facts.architecture.startswith("nemotron_h"):
            has_cache = has_cache and self._width(index) == 0
        k, v = facts.n_embd_head_k, facts.n_embd_head_v
        if is_window:
            k, v = self.number("attention.key_length_swa", k), self.number("attention.value_length_swa", v)
        ratios = self.each("attention.compress_ratios", ()) if self._is_dsv4 else ()
        return LayerFacts(
            index=index,
            n_head=facts.n_head[at],
            n_head_kv=heads_kv,
            n_embd_head_k=k,
            n_embd_head_v=v,
            n_ff=self._width(index),
            has_cache=has_cache,
            has_values=not (self._mla or self._is_dsv4),
            is_window=is_window,
            is_recurrent=is_recurrent,
            n_embd_index=self._index_width(index, has_cache=has_cache and not is_window),
            is_prediction=index >= self._n_used,
            compress_ratio=int(ratios[index]) if ratios else 0,
        )
