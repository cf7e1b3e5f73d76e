"""The cache of a context: its tensors, as the library makes them.

Source: llama_context's constructor (paddings), llama_kv_cache, llama_kv_cache_iswa, _dsa, _dsv4, llama_memory_recurrent
and create_memory of llama.cpp (llama-cpp-python 0.3.36).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from splitctl.model.facts import ModelFacts
from splitctl.model.layers import CSA_RATIO, HCA_RATIO, LayerFacts, layers_of
from splitctl.model.tensor_types import row_bytes
from splitctl.placement import FlashAttn, Placement

#: Contexts and windows are padded to this many cells.
PADDING = 256
_F32_BYTES = 4


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One tensor of the cache.

    Args:
        section: attention, window, index, recurrent or compressed.
        name: the library's, such as cache_k_l0.
        layer: the layer that it belongs to.
        width: values of a row.
        row_bytes: bytes of a row.
        n_rows: rows, over all streams.
    """

    section: str
    name: str
    layer: int
    width: int
    row_bytes: int
    n_rows: int

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.row_bytes * self.n_rows

    def bytes_of(self, width: int) -> int:
        """Bytes of the tensor with its rows cut to `width` values."""
        return self.n_bytes * width // self.width if self.width else 0


@dataclass(frozen=True, slots=True)
class ContextShape:
    """The sizes that the library makes of the ones that it is asked for.

    Args:
        n_ctx: cells over all streams.
        n_ctx_seq: cells of a stream.
        n_streams: streams of cells.
        n_window: cells of a stream for the layers that look back a window.
        n_batch: most tokens of a decode.
        n_ubatch: most tokens of a computed batch.
    """

    n_ctx: int
    n_ctx_seq: int
    n_streams: int
    n_window: int
    n_batch: int
    n_ubatch: int


def padded(n: int, multiple: int = PADDING) -> int:
    """Round a count up to the next multiple."""
    return -(-n // multiple) * multiple


def shape_of(facts: ModelFacts, placement: Placement) -> ContextShape:
    """Tell the sizes that the library makes of those that a placement asks for."""
    asked = placement.n_ctx or facts.n_ctx_train or PADDING
    n_batch = placement.n_batch if facts.is_encoder_only else min(asked, placement.n_batch)
    n_ubatch = min(n_batch, placement.n_ubatch)
    n_ctx = padded(asked)
    n_seq = placement.n_seq_max
    n_ctx_seq = n_ctx if placement.kv_unified else padded(n_ctx // n_seq)
    n_streams = 1 if placement.kv_unified else n_seq
    looks_back = layers_of(facts).n_window * (n_seq if placement.kv_unified else 1)
    n_window = padded(min(n_ctx_seq, looks_back + n_ubatch))
    return ContextShape(n_ctx_seq * n_streams, n_ctx_seq, n_streams, n_window, n_batch, n_ubatch)


def cache_tensors(facts: ModelFacts, placement: Placement) -> tuple[CacheTensor, ...]:
    """List the tensors of a context's cache in the library's order.

    K and V layer by layer, then what comes beside them.
    """
    shape, layers = shape_of(facts, placement), layers_of(facts).each
    trans = placement.flash_attn is FlashAttn.OFF
    most_v = max((layer.v_width for layer in layers), default=0)
    made: list[CacheTensor] = []
    for layer in layers:
        if layer.has_cache:
            made += _rows(layer, placement, shape, most_v if trans else None)
    for layer in layers:
        if layer.n_embd_index:
            made += _indexed(facts, layer, placement, shape)
    for layer in layers:
        if layer.compress_ratio and layer.has_cache:
            made += _compressed(facts, layer, placement, shape)
    if facts.recurrence is not None and (facts.is_recurrent or facts.is_hybrid):
        for layer in layers:
            if layer.is_recurrent and not layer.is_prediction:
                made += _recurrent(facts, layer, placement.n_seq_max)
    return tuple(made)


def _rows(layer: LayerFacts, placement: Placement, shape: ContextShape, v_width: int | None) -> Iterator[CacheTensor]:
    """Give a layer's rows of keys and values; transposed values are as wide as the widest layer's."""
    section, cells = ("window", shape.n_window) if layer.is_window else ("attention", shape.n_ctx_seq)
    kinds = [("k", layer.k_width, placement.type_k)]
    if layer.has_values:
        kinds.append(("v", layer.v_width if v_width is None else v_width, placement.type_v))
    for letter, width, kind in kinds:
        name = f"cache_{letter}_l{layer.index}"
        yield CacheTensor(section, name, layer.index, width, row_bytes(width, kind), cells * shape.n_streams)


def _indexed(facts: ModelFacts, layer: LayerFacts, placement: Placement, shape: ContextShape) -> Iterator[CacheTensor]:
    """Give the rows of a layer's indexer: keys, and for minimax-m3 values as well."""
    kinds = [("k", layer.n_embd_index, placement.type_k)]
    if facts.architecture == "minimax-m3":
        kinds.append(("v", layer.n_embd_head_v, placement.type_v))
    for letter, width, kind in kinds:
        name = f"cache_idx_{letter}_l{layer.index}"
        yield CacheTensor("index", name, layer.index, width, row_bytes(width, kind), shape.n_ctx_seq * shape.n_streams)


def _compressed(
    facts: ModelFacts, layer: LayerFacts, placement: Placement, shape: ContextShape
) -> Iterator[CacheTensor]:
    """Give what deepseek4 keeps of older tokens, always a stream per sequence."""
    ratio, streams = layer.compress_ratio, placement.n_seq_max
    cells = padded(max(1, -(-shape.n_ctx_seq // ratio)))
    width, index = layer.n_embd_head_k, facts.n_embd_indexer or facts.number("attention.indexer.key_length")

    def rows(tag: str, n_values: int) -> CacheTensor:
        n_bytes = row_bytes(n_values, placement.type_k)
        name = f"cache_{tag}_k_l{layer.index}"
        return CacheTensor("compressed", name, layer.index, n_values, n_bytes, cells * streams)

    def state(tag: str, n_values: int, n_rows: int) -> Iterator[CacheTensor]:
        for part in ("kv", "score"):
            name = f"dsv4_{tag}_state_{part}_l{layer.index}"
            yield CacheTensor("compressed", name, layer.index, n_values, n_values * _F32_BYTES, n_rows * streams)

    if ratio == CSA_RATIO:
        yield rows("csa", width)
        yield rows("lid", index)
        yield from state("csa", 2 * width, 2 * ratio)
        yield from state("lid", 2 * index, 2 * ratio)
    elif ratio == HCA_RATIO:
        yield rows("hca", width)
        yield from state("hca", width, ratio)


def _recurrent(facts: ModelFacts, layer: LayerFacts, n_rows: int) -> Iterator[CacheTensor]:
    recurrence = facts.recurrence
    if recurrence is None:
        return
    for letter, width in (("r", recurrence.n_embd_r), ("s", recurrence.n_embd_s)):
        name = f"cache_{letter}_l{layer.index}"
        yield CacheTensor("recurrent", name, layer.index, width, width * _F32_BYTES, n_rows)
    history = _prefix_history(facts, layer.index)
    if history:
        yield CacheTensor(
            "recurrent", f"cache_ple_r_l{layer.index}", layer.index, history, history * _F32_BYTES, n_rows
        )


def _prefix_history(facts: ModelFacts, index: int) -> int:
    """Values of qwen4exp's second history in the one layer that has it; 0 elsewhere."""
    named = dict(facts.metadata).get("ple.layers", ())
    if index not in (named if isinstance(named, tuple) else (named,)):
        return 0
    rows = max(facts.number("ple.conv_kernel") - 1, 0) * facts.number("ple.ngram_size")
    return rows * facts.number("hyper_connection.count") * facts.n_embd
