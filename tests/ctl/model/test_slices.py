"""How tensor mode cuts: rounding to heads, the rotation, and what a split really comes to."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitctl.model.facts import ModelFacts, read_facts
from splitctl.model.header import TensorInfo
from splitctl.model.slices import Cutter, effective_split
from tests.ctl.model_facts import model_facts

_F32, _Q4_1 = 0, 3


def _tensor(name: str, *dims: int, type_id: int = _F32) -> TensorInfo:
    n_bytes = 4
    for size in dims:
        n_bytes *= size
    return TensorInfo(name, dims, type_id, n_bytes, 0)


def _small(**changes: object) -> ModelFacts:
    """Four layers of four heads of 64 over two KV heads."""
    tensors = [
        one
        for layer in range(4)
        for one in (
            _tensor(f"blk.{layer}.attn_q.weight", 256, 256),
            _tensor(f"blk.{layer}.attn_k.weight", 256, 128),
            _tensor(f"blk.{layer}.attn_output.weight", 256, 256),
            _tensor(f"blk.{layer}.attn_norm.weight", 256),
            _tensor(f"blk.{layer}.ffn_up.weight", 256, 640),
            _tensor(f"blk.{layer}.ffn_down.weight", 640, 256),
        )
    ]
    return model_facts(tensors=(*tensors, _tensor("output.weight", 256, 128)), **changes)


def test_heads_are_cut_whole() -> None:
    """Queries in groups of two heads, keys in single ones: each device gets whole KV heads."""
    cutter = Cutter(_small(), 2, None)
    assert cutter.cut("blk.0.attn_q.weight", (256, 256)).sizes == (128, 128)
    assert cutter.cut("blk.0.attn_k.weight", (256, 128)).sizes == (64, 64)
    assert cutter.cut("cache_k_l0", (128,)).sizes == (64, 64)


def test_the_rounding_rotates() -> None:
    """Five blocks of 128 on two devices: two and three, the other way round in the next layer."""
    cutter = Cutter(_small(), 2, None)
    assert [cutter.cut(f"blk.{n}.ffn_up.weight", (256, 640)).sizes for n in range(3)] == [
        (256, 384),
        (384, 256),
        (256, 384),
    ]
    assert cutter.cut("blk.0.ffn_down.weight", (640, 256)) == Cutter(_small(), 2, None).cut(
        "blk.2.ffn_down.weight", (640, 256)
    )


def test_what_is_not_cut_is_whole_everywhere() -> None:
    """Norms, the embedding, and everything of an architecture that shares its cache slots."""
    assert Cutter(_small(), 2, None).cut("blk.0.attn_norm.weight", (256,)).axis is None
    assert Cutter(_small(), 2, None).cut("token_embd.weight", (256, 128)).axis is None
    assert Cutter(_small(architecture="hrm_text"), 2, None).cut("blk.0.attn_q.weight", (256, 256)).axis is None
    assert Cutter(_small(architecture="lfm2"), 2, None).cut("cache_r_l0", (512,)).axis is None


def test_a_fused_tensor_is_cut_part_by_part() -> None:
    """Queries, keys and values of one matrix: each device gets its part of each."""
    cut = Cutter(_small(), 2, None).cut("blk.0.attn_qkv.weight", (256, 512))
    assert (cut.axis, cut.sizes) == (1, (256, 256))


def test_uneven_shares_come_out_in_whole_heads() -> None:
    """Two KV heads, shares a little uneven or very: the first device gets one head of every other layer."""
    facts = _small()
    assert effective_split(facts, 2, (0.49, 0.51)).cache == (0.25, 0.75)
    assert effective_split(facts, 2, (0.1, 0.9)).cache == (0.25, 0.75)
    assert effective_split(facts, 2, (0.5, 0.5)).cache == (0.5, 0.5)


def test_a_share_that_is_left_out_is_zero() -> None:
    """A split may be shorter than the list of devices; all zero is the library's own even split."""
    facts = _small()
    assert effective_split(facts, 2, (1.0,)) == effective_split(facts, 2, (1.0, 0.0))
    assert effective_split(facts, 2, (0.0, 0.0)) == effective_split(facts, 2, None)


def test_a_model_without_tensors_has_no_share_of_weights() -> None:
    """Facts that were not read from a file say nothing."""
    assert effective_split(model_facts(), 2, (3.0, 1.0)).weights == ()


@pytest.mark.parametrize(
    ("shares", "cache_mib"), [((1.0, 0.0), (37.5, 7.5)), (None, (22.5, 22.5)), ((0.0, 1.0), (7.5, 37.5))]
)
def test_smollm2_is_cut_as_the_library_does(
    smollm2: Path, shares: tuple[float, ...] | None, cache_mib: tuple[float, float]
) -> None:
    """Three KV heads, of which a cut takes two at least: asked 1:0, and 7.5 of 45 MiB of cache lie on the other."""
    got = effective_split(read_facts(smollm2), 2, shares).cache
    assert tuple(round(share * 45, 2) for share in got) == cache_mib
