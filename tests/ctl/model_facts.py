"""Facts of a small model, made without a file."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from splitctl.model.facts import ModelFacts

_PLAIN = ModelFacts(
    path=Path("model.gguf"),
    files=(Path("model.gguf"),),
    architecture="llama",
    name="small",
    file_bytes=1_000_000,
    header_bytes=1000,
    header_digest="00" * 16,
    n_layer=4,
    n_embd=256,
    n_head=(4, 4, 4, 4),
    n_head_kv=(2, 2, 2, 2),
    n_embd_head_k=64,
    n_embd_head_v=64,
    n_ctx_train=4096,
    n_vocab=128,
    n_swa=0,
    n_expert=0,
    max_alibi_bias=0.0,
    has_k_norm=False,
    is_mla=False,
    n_embd_indexer=0,
    recurrence=None,
    rope=(),
    tensors=(),
    n_bytes_read=1000,
)


def model_facts(**changes: object) -> ModelFacts:
    """Give the facts of a plain model, changed by field; a single head count stands for every layer."""
    heads = changes.get("n_head_kv")
    if isinstance(heads, tuple) and len(heads) == 1:
        changes["n_head_kv"] = heads * _PLAIN.n_layer
    return dataclasses.replace(_PLAIN, **changes)  # type: ignore[arg-type]
