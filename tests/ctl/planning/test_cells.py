"""The tensors of a cache, with the library's paddings."""

from __future__ import annotations

import dataclasses

import pytest

from splitctl.model.facts import Recurrence
from splitctl.model.tensor_types import row_bytes
from splitctl.placement import FlashAttn, Placement
from splitctl.planning.cells import cache_tensors, shape_of
from tests.ctl.model_facts import model_facts

PLAIN = Placement(n_ctx=1000, flash_attn=FlashAttn.ON)
_WINDOW = (("attention.sliding_window", 512),)


@pytest.mark.parametrize(
    ("kind", "n_bytes"),
    [("f32", 256), ("f16", 128), ("bf16", 128), ("q8_0", 68), ("q4_0", 36), ("iq4_nl", 36), ("q4_1", 40), ("q5_0", 44),
     ("q5_1", 48)],
)  # fmt: skip
def test_rows_of_64_values(kind: str, n_bytes: int) -> None:
    """The printed table of row sizes; equal sizes are not equal types."""
    assert row_bytes(64, kind) == n_bytes


def _n_bytes(placement: Placement, section: str = "attention", **changes: object) -> int:
    facts = model_facts(**changes)
    return sum(one.n_bytes for one in cache_tensors(facts, placement) if one.section == section)


def test_qwen3_8b_takes_147456_bytes_a_token() -> None:
    """36 layers of 8 KV heads of 128 in f16; 10,000 tokens take 1.37 GiB, padded to 240 cells more."""
    facts = model_facts(n_layer=36, n_head=(32,) * 36, n_head_kv=(8,) * 36, n_embd_head_k=128, n_embd_head_v=128)
    tensors = cache_tensors(facts, dataclasses.replace(PLAIN, n_ctx=10_000))
    assert {one.n_rows for one in tensors} == {10_240}
    per_token = sum(one.row_bytes for one in tensors)
    assert per_token == 147_456
    assert round(per_token * 10_000 / 1024**3, 2) == 1.37


@pytest.mark.parametrize(
    ("changes", "n_ctx", "n_ctx_seq", "n_streams"),
    [
        ({}, 1024, 1024, 1),
        ({"n_ctx": 1024}, 1024, 1024, 1),
        ({"n_ctx": 0}, 4096, 4096, 1),
        ({"n_seq_max": 3}, 1536, 512, 3),
        ({"n_seq_max": 3, "kv_unified": True}, 1024, 1024, 1),
    ],
)
def test_contexts_are_padded(changes: dict[str, object], n_ctx: int, n_ctx_seq: int, n_streams: int) -> None:
    """To 256 cells, each stream for itself."""
    shape = shape_of(model_facts(), dataclasses.replace(PLAIN, **changes))  # type: ignore[arg-type]
    assert (shape.n_ctx, shape.n_ctx_seq, shape.n_streams) == (n_ctx, n_ctx_seq, n_streams)


@pytest.mark.parametrize(
    ("changes", "cells"),
    [
        ({"n_ctx": 8192}, 1024),
        ({"n_ctx": 8192, "n_ubatch": 100}, 768),
        ({"n_ctx": 600}, 768),
        ({"n_ctx": 8192, "n_seq_max": 4}, 1024),
        ({"n_ctx": 8192, "n_seq_max": 4, "kv_unified": True}, 2560),
    ],
)
def test_a_window_holds_itself_and_a_micro_batch(changes: dict[str, object], cells: int) -> None:
    """512 tokens and the micro-batch, padded; of all sequences when they share the cells."""
    placement = dataclasses.replace(PLAIN, **changes)  # type: ignore[arg-type]
    tensors = cache_tensors(model_facts(architecture="gemma2", metadata=_WINDOW), placement)
    streams = shape_of(model_facts(), placement).n_streams
    assert {one.n_rows // streams for one in tensors if one.section == "window"} == {cells}


def test_a_micro_batch_is_never_larger_than_the_context() -> None:
    """Nor than the batch."""
    assert shape_of(model_facts(), dataclasses.replace(PLAIN, n_ctx=300)).n_ubatch == 300
    assert shape_of(model_facts(), dataclasses.replace(PLAIN, n_batch=64)).n_ubatch == 64


def test_quantized_and_mixed_types() -> None:
    """K and V each in its own type."""
    both = dataclasses.replace(PLAIN, type_k="q8_0", type_v="q4_0")
    assert _n_bytes(both) == 4 * 1024 * (2 * 68 + 2 * 36)


def test_transposed_values_are_as_wide_as_the_widest_layer() -> None:
    """Without flash attention, where layers differ."""
    wide = {"n_head_kv": (2, 4, 2, 2)}
    assert _n_bytes(PLAIN, **wide) == 1024 * 2 * 64 * (10 + 10)
    assert _n_bytes(dataclasses.replace(PLAIN, flash_attn=FlashAttn.OFF), **wide) == 1024 * 2 * 64 * (10 + 16)


def test_recurrent_rows_are_one_a_sequence() -> None:
    """In f32, whatever the types of the cache."""
    changes = {"architecture": "jamba", "n_head_kv": (0, 2, 0, 2), "recurrence": Recurrence(2, 300, 5000)}
    four = dataclasses.replace(PLAIN, n_seq_max=4, type_k="q8_0")
    assert _n_bytes(four, "recurrent", **changes) == 2 * 4 * (300 + 5000) * 4


def test_an_indexer_keeps_rows_of_its_own() -> None:
    """Keys beside the latent ones, in the layers that have it."""
    metadata = (
        ("attention.key_length_mla", 64),
        ("attention.value_length_mla", 64),
        ("attention.indexer.types", (1, 0, 1, 0)),
    )
    changes = {"architecture": "glm-dsa", "is_mla": True, "n_embd_indexer": 128, "metadata": metadata}
    assert _n_bytes(PLAIN, "index", **changes) == 2 * 1024 * 128 * 2
    assert _n_bytes(PLAIN, "attention", **changes) == 4 * 1024 * 128 * 2


def test_deepseek4_keeps_compressed_rows_beside_its_window() -> None:
    """Every fourth and every 128th token, an indexer's rows, and states in f32."""
    metadata = (
        ("attention.sliding_window", 32),
        ("attention.compress_ratios", (0, 0, 4, 128)),
        ("attention.indexer.key_length", 128),
    )
    tensors = cache_tensors(model_facts(architecture="deepseek4", n_head_kv=(1,), metadata=metadata), PLAIN)
    assert [(one.name, one.width, one.n_rows) for one in tensors if one.section == "compressed"] == [
        ("cache_csa_k_l2", 64, 256),
        ("cache_lid_k_l2", 128, 256),
        ("dsv4_csa_state_kv_l2", 128, 8),
        ("dsv4_csa_state_score_l2", 128, 8),
        ("dsv4_lid_state_kv_l2", 256, 8),
        ("dsv4_lid_state_score_l2", 256, 8),
        ("cache_hca_k_l3", 64, 256),
        ("dsv4_hca_state_kv_l3", 64, 128),
        ("dsv4_hca_state_score_l3", 64, 128),
    ]


def test_a_model_without_memory_has_no_cache() -> None:
    """Encoders and diffusion models."""
    assert cache_tensors(model_facts(architecture="bert"), PLAIN) == ()
    assert cache_tensors(model_facts(architecture="dream"), PLAIN) == ()


def test_qwen4exp_keeps_a_second_history_in_one_layer() -> None:
    """Named by its metadata."""
    metadata = (
        ("full_attention_interval", 2),
        ("ple.layers", (0,)),
        ("ple.conv_kernel", 4),
        ("ple.ngram_size", 3),
        ("hyper_connection.count", 4),
    )
    facts = model_facts(architecture="qwen4exp", metadata=metadata, recurrence=Recurrence(2, 8, 8))
    found = [one for one in cache_tensors(facts, PLAIN) if one.name.startswith("cache_ple")]
    assert [(one.layer, one.width) for one in found] == [(0, 3 * 3 * 4 * 256)]
