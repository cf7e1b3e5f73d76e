"""How tensor mode cuts tensors: which device gets how many of each tensor's rows or columns. Pure.

A cut is rounded down to whole heads (or whole blocks), the rest goes to the last device, and which device is the last
rotates from layer to layer. So what a device really gets is a sum over layers, and not what was asked.

Source: llama_meta_device_get_split_state in llama-model.cpp of llama.cpp (llama-cpp-python 0.3.36). Shares are C
floats.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from splitctl.model.facts import ModelFacts
from splitctl.model.header import TensorInfo
from splitctl.model.layers import LayerFacts, layers_of
from splitctl.model.tensor_types import TENSOR_TYPES

#: Cuts of the feed-forward part are whole multiples of this, for the kernels' sake.
_GOOD_BLOCK = 128
_Q_GATED = frozenset({"qwen3next", "qwen35", "qwen35moe", "qwen4exp"})
_ATTENTION, _STATE = ("attn_output.weight", "ssm_out.weight"), ("ssm_out.weight",)
_FFN = ("ffn_down.weight", "ffn_down_exps.weight")

#: Dimension that is cut, tensors that say in which blocks, and the tails of the names of those that are cut so.
_GROUPS: tuple[tuple[int, tuple[str, ...], tuple[str, ...]], ...] = (
    (1, _ATTENTION, ("attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_qkv.weight", "attn_gate.weight")),
    (0, _ATTENTION, ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_qkv.bias")),
    (0, _ATTENTION[:1], ("cache_k", "cache_v", "attn_sinks.weight")),
    (0, (), ("attn_output.weight", "ssm_out.weight")),
    (0, _STATE, ("ssm_dt.bias", "ssm_a", "cache_r", "cache_s")),
    (1, _STATE, ("ssm_alpha.weight", "ssm_beta.weight", "ssm_ba.weight", "ssm_conv1d.weight")),
    (1, _FFN, ("ffn_up.weight", "ffn_gate.weight", "ffn_up_exps.weight", "ffn_gate_exps.weight")),
    (1, _FFN, ("ffn_gate_up.weight", "ffn_gate_up_exps.weight")),
    (0, _FFN, ("ffn_up.bias", "ffn_gate.bias", "ffn_up_exps.bias", "ffn_gate_exps.bias")),
    (0, _FFN, _FFN),
)
_AXES: Mapping[str, tuple[int, tuple[str, ...]]] = {
    tail: (axis, pairs) for axis, pairs, tails in _GROUPS for tail in tails
}
#: deepseek4 cuts its heads another way, and keeps its caches whole on every device.
_AXES_DSV4: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "attn_sinks.weight": (0, ("attn_output_a.weight",)),
    "attn_q_b.weight": (1, ("attn_output_a.weight",)),
    "attn_output_a.weight": (2, ()),
    "attn_output_b.weight": (0, ()),
    "ffn_up_shexp.weight": (1, ("ffn_down_shexp.weight",)),
    "ffn_gate_shexp.weight": (1, ("ffn_down_shexp.weight",)),
    "ffn_down_shexp.weight": (0, ("ffn_down_shexp.weight",)),
}
_BLOCK = re.compile(r"^blk\.(\d+)\.(.+)$")
_CACHE = re.compile(r"^(cache_[krsv])_l(\d+)$")


@dataclass(frozen=True, slots=True)
class Cut:
    """How one tensor is cut.

    Args:
        axis: the dimension, fastest first; None when every device holds the whole tensor.
        sizes: entries of that dimension on each device; empty when it is not cut.
    """

    axis: int | None
    sizes: tuple[int, ...] = ()


class Cutter:
    """Cuts the tensors of one model over devices.

    Thread:
        Any; it is only read.
    """

    def __init__(self, facts: ModelFacts, n_devices: int, shares: Sequence[float] | None) -> None:
        """Prepare.

        Args:
            facts: the model.
            n_devices: how many devices.
            shares: the tensor split that is asked; None for even shares.
        """
        self._facts = facts
        self._n = n_devices
        given = [*(shares or ()), *([0.0] * n_devices)][:n_devices]
        self._shares = given if any(given) else None
        self._layers = layers_of(facts).each
        self._blocks = {tensor.name: _block_values(tensor) for tensor in facts.tensors}
        self._values = dict(facts.metadata)
        self._rotations = _rotations(self._layers, n_devices)

    def cut(self, name: str, dims: Sequence[int]) -> Cut:
        """Cut one tensor, or one of the cache.

        Args:
            name: as in the file; the cache's are cache_k_l0 and the like.
            dims: its sizes, fastest first.

        Returns:
            The cut.
        """
        facts = self._facts
        if facts.architecture == "hrm_text":
            return Cut(None)
        index, tail = _split_name(name)
        if index is None:
            return self._cut_output(name, dims)
        found = self._axis(tail, dims)
        if found is None or index >= len(self._layers):
            return Cut(None)
        axis, pairs = found
        if axis >= len(dims):
            return Cut(None)
        prefix = f"blk.{index}."
        names = [prefix + pair for pair in pairs] or [name]
        block = next((self._blocks[one] for one in names if one in self._blocks), 1)
        layer = self._layers[index]
        segments = self._segments(layer, tail, dims[axis])
        grains = self._grains(layer, tail, dims, block, len(segments))
        sizes = [0] * self._n
        for (n_values, n_times), grain in zip(segments, grains, strict=True):
            for device, size in enumerate(self._shared(n_values, grain, self._rotations[index])):
                sizes[device] += size * n_times
        return Cut(axis, tuple(sizes))

    def _cut_output(self, name: str, dims: Sequence[int]) -> Cut:
        """Cut the output matrix; all else outside of the layers is whole on every device."""
        if self._facts.architecture == "deepseek4" or name not in {"output.weight", "output.bias"}:
            return Cut(None)
        axis = 1 if name == "output.weight" else 0
        n_used = sum(1 for layer in self._layers if not layer.is_prediction)
        return Cut(axis, self._shared(dims[axis], 1, n_used % self._n))

    def _axis(self, tail: str, dims: Sequence[int]) -> tuple[int, tuple[str, ...]] | None:
        """Tell which dimension is cut; None for a tensor that stays whole."""
        facts = self._facts
        if facts.architecture == "deepseek4":
            if tail.startswith("cache_"):
                return None
            if tail in _AXES_DSV4:
                return _AXES_DSV4[tail]
        if tail in {"attn_q_norm.weight", "attn_k_norm.weight"}:
            return (1, _ATTENTION[:1]) if len(dims) > 1 and dims[1] > 1 else None
        if tail in {"cache_r", "cache_s"} and facts.architecture in {"lfm2", "lfm2moe"}:
            return None
        return _AXES.get(tail)

    def _shared(self, n_values: int, grain: int, rotation: int) -> tuple[int, ...]:
        """Give every device its whole grains; the last in the rotation gets the rest."""
        sizes = [0] * self._n
        low = 0
        scan: list[np.float32] = []
        if self._shares is not None:
            total = np.float32(0)
            for step in range(self._n):
                total = np.float32(total + np.float32(self._shares[(step + rotation) % self._n]))
                scan.append(total)
        for step in range(self._n - 1):
            if scan:
                high = int(np.float32(np.float32(n_values) * scan[step]) / scan[-1])
            else:
                high = n_values * (step + 1) // self._n
            high -= high % grain
            sizes[(step + rotation) % self._n] = high - low
            low = high
        sizes[(self._n - 1 + rotation) % self._n] = n_values - low
        return tuple(sizes)

    def _number(self, key: str) -> int:
        """Look up a number in the metadata."""
        value = self._values.get(key, 0)
        return int(value) if isinstance(value, int | float) else 0

    def _segments(self, layer: LayerFacts, tail: str, n_values: int) -> list[tuple[int, int]]:
        """Take fused tensors apart: (values of a part, how many such parts)."""
        if self._facts.architecture in _Q_GATED:
            return self._segments_gated(layer, tail, n_values)
        if tail in {"attn_qkv.weight", "attn_qkv.bias"}:
            query = layer.n_head * layer.n_embd_head_k
            key, value = layer.n_head_kv * layer.n_embd_head_k, layer.n_head_kv * layer.n_embd_head_v
            return [(query, 1), (key, 2)] if key == value else [(query, 1), (key, 1), (value, 1)]
        if tail in {"ffn_up.weight", "ffn_up.bias", "ffn_up_exps.weight", "ffn_up_exps.bias"}:
            return [(layer.n_ff, 2)] if n_values == 2 * layer.n_ff else [(n_values, 1)]
        if tail in {"ffn_gate_up.weight", "ffn_gate_up_exps.weight"}:
            return [(n_values // 2, 2)]
        return [(n_values, 1)]

    def _segments_gated(self, layer: LayerFacts, tail: str, n_values: int) -> list[tuple[int, int]]:
        """Take the fused tensors of the Qwen hybrids apart."""
        if not layer.is_recurrent and tail in {"attn_qkv.weight", "attn_qkv.bias"}:
            value = layer.n_head_kv * layer.n_embd_head_v
            return [(layer.n_head * layer.n_embd_head_k * 2, 1), (value, 2)]
        width, keys = self._number("ssm.state_size"), self._number("ssm.group_count")
        values = self._number("ssm.time_step_rank")
        key_dim, value_dim, conv = width * keys, width * values, max(self._number("ssm.conv_kernel") - 1, 0)
        if self._facts.architecture == "qwen3next":
            parts = {
                "attn_qkv.weight": [(key_dim, 2), (value_dim, 1)],
                "ssm_conv1d.weight": [(key_dim, 2), (value_dim, 1)],
                "cache_r": [(key_dim * conv, 2), (value_dim * conv, 1)],
            }
        else:
            ratio = values // keys if keys else 1
            by_head = [(keys, ratio)]
            parts = {
                "attn_qkv.weight": [(key_dim, 2 + ratio)],
                "ssm_conv1d.weight": [(key_dim, 2 + ratio)],
                "ssm_out.weight": [(key_dim, ratio)],
                "ssm_dt.bias": by_head,
                "ssm_a": by_head,
                "ssm_alpha.weight": by_head,
                "ssm_beta.weight": by_head,
                "cache_r": [(key_dim * conv, 2 + ratio)],
                "cache_s": [(keys * width * width, ratio)],
            }
            if layer.is_recurrent or n_values == value_dim:
                parts["attn_gate.weight"] = [(key_dim, ratio)]
        if tail in {"ffn_gate_up.weight", "ffn_gate_up_exps.weight"}:
            return [(n_values // 2, 2)]
        return parts.get(tail, [(n_values, 1)])

    def _grains(self, layer: LayerFacts, tail: str, dims: Sequence[int], block: int, n_segments: int) -> list[int]:
        """Tell the smallest piece of each part."""
        grain = self._grain_state(tail, block) if layer.is_recurrent else None
        if not layer.is_recurrent:
            found = self._grains_attention(layer, tail, dims, block, n_segments)
            if found:
                return found
        if grain is None and tail in _AXES and tail.startswith("ffn_"):
            grain = math.lcm(block, _GOOD_BLOCK)
        if grain is None and tail.endswith("_shexp.weight"):
            grain = math.lcm(block, _GOOD_BLOCK)
        return [grain or 1] * n_segments

    def _grain_state(self, tail: str, block: int) -> int | None:
        """Tell the grain of a tensor that belongs to a recurrent state."""
        width = self._number("ssm.state_size") or 1
        conv = max(self._number("ssm.conv_kernel") - 1, 0)
        grain = math.lcm(math.lcm(block, _GOOD_BLOCK), width)
        if tail in {"attn_qkv.weight", "attn_gate.weight", "ssm_conv1d.weight", "ssm_out.weight"}:
            return grain
        if tail in {"ssm_dt.bias", "ssm_a", "ssm_alpha.weight", "ssm_beta.weight"}:
            return grain // width
        if tail == "ssm_ba.weight":
            return 2 * (grain // width)
        return {"cache_r": grain * conv, "cache_s": grain * width}.get(tail)

    def _grains_attention(
        self, layer: LayerFacts, tail: str, dims: Sequence[int], block: int, n_segments: int
    ) -> list[int]:
        """Tell the grains of an attention tensor; empty for a tensor of another kind."""
        n_gqa = layer.n_head // layer.n_head_kv if layer.n_head_kv else 0
        width = n_gqa * layer.n_embd_head_k
        good = block
        while good < _GOOD_BLOCK and good * self._n < width:
            good *= 2
        grain_q = math.lcm(width, good) or 1
        by_head = grain_q // (layer.n_embd_head_k or 1)
        if self._facts.architecture == "deepseek4":
            group = layer.n_head // (self._number("attention.output_group_count") or 1)
            special = {
                "attn_sinks.weight": group,
                "attn_q_b.weight": group * layer.n_embd_head_k,
                "attn_output_a.weight": 1,
                "attn_output_b.weight": self._number("attention.output_lora_rank") or 1,
            }
            if tail in special:
                return [special[tail]]
        gated = self._facts.architecture in _Q_GATED
        grain_gated = math.lcm(2 * width, good) or 1
        grain_kv = grain_q // (n_gqa or 1)
        grain_v = grain_kv // (layer.n_embd_head_k or 1) * layer.n_embd_head_v
        if tail == "attn_gate.weight":
            return [by_head if len(dims) > 1 and dims[1] == layer.n_head else grain_q]
        if tail in {"attn_qkv.weight", "attn_qkv.bias"}:
            if gated:
                return [grain_gated, grain_kv]
            return [grain_q, grain_kv, grain_v][:n_segments]
        grains = {
            "attn_sinks.weight": by_head,
            "attn_q.weight": grain_gated if gated else grain_q,
            "attn_q.bias": grain_gated if gated else grain_q,
            "attn_output.weight": by_head * layer.n_embd_head_v,
            "attn_k.weight": grain_kv,
            "attn_k.bias": grain_kv,
            "cache_k": grain_kv,
            "attn_v.weight": grain_v,
            "attn_v.bias": grain_v,
            "cache_v": grain_v,
        }
        return [max(grains[tail], 1)] if tail in grains else []


def _split_name(name: str) -> tuple[int | None, str]:
    """Take a tensor's name apart: layer and tail; None and the name outside of the layers."""
    if found := _BLOCK.match(name):
        return int(found[1]), found[2]
    if found := _CACHE.match(name):
        return int(found[2]), found[1]
    return None, name


def _block_values(tensor: TensorInfo) -> int:
    """Values in a block of a tensor's type."""
    known = TENSOR_TYPES.get(tensor.type_id)
    return known[1] if known else 1


def _rotations(layers: Sequence[LayerFacts], n_devices: int) -> list[int]:
    """Count, for each layer, the earlier ones of its kind."""
    seen: dict[tuple[bool, bool], int] = {}
    found = []
    for layer in layers:
        kind = (layer.is_recurrent, layer.is_window)
        found.append(seen.get(kind, 0) % n_devices)
        seen[kind] = seen.get(kind, 0) + 1
    return found


@dataclass(frozen=True, slots=True)
class EffectiveSplit:
    """What devices really get of a tensor split, as shares of one.

    Args:
        weights: of the bytes of weights that are cut.
        cache: of the rows of the cache; empty when nothing of it is cut.
    """

    weights: tuple[float, ...]
    cache: tuple[float, ...]


def effective_split(facts: ModelFacts, n_devices: int, shares: Sequence[float] | None) -> EffectiveSplit:
    """Sum the cuts over all layers, the rotation of the rounding included; empty where tensors are not known."""
    cutter = Cutter(facts, n_devices, shares)
    weights, cache = [0.0] * n_devices, [0.0] * n_devices
    for tensor in facts.tensors:
        cut = cutter.cut(tensor.name, tensor.dims)
        if cut.axis is not None:
            for device, size in enumerate(cut.sizes):
                weights[device] += (tensor.n_bytes or 0) * size / tensor.dims[cut.axis]
    for layer in layers_of(facts).each:
        for letter, width in (("k", layer.k_width), ("v", layer.v_width)):
            cut = cutter.cut(f"cache_{letter}_l{layer.index}", (width,)) if layer.has_cache and width else Cut(None)
            for device, size in enumerate(cut.sizes):
                cache[device] += size
    return EffectiveSplit(shares_of_one(weights), shares_of_one(cache))


def shares_of_one(sizes: Sequence[float]) -> tuple[float, ...]:
    """Give sizes as shares of one; empty when there is nothing."""
    total = sum(sizes)
    return tuple(size / total for size in sizes) if total else ()
