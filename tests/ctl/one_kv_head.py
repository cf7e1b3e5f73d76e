"""A small random model with one KV head and the real model's tokenizer: tensor mode dies of its quantized cache."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np

from tools.places import default_folder

_N_EMBD, _N_HEAD, _N_FF, _N_LAYER = 128, 2, 256, 2
_N_HEAD_KV = 1


def made(tokenizer: Path) -> Path:
    """Write the model once, beside the other small ones; see :func:`make`."""
    path = default_folder() / "one-kv-head.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        begun = path.with_suffix(f".{os.getpid()}")
        make(begun, tokenizer)
        begun.replace(path)
    return path


def make(path: Path, tokenizer: Path) -> None:
    """Write the model.

    Args:
        path: where; about 13 MB.
        tokenizer: a GGUF file whose tokenizer it gets.
    """
    writer = gguf.GGUFWriter(path, "llama")
    n_vocab = 0
    for name, field in gguf.GGUFReader(tokenizer).fields.items():
        if name.startswith("tokenizer."):
            value = field.contents()
            kind = field.types[0]
            writer.add_key_value(name, value, kind, field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None)
            n_vocab = len(value) if name == "tokenizer.ggml.tokens" else n_vocab
    writer.add_name("one KV head")
    writer.add_context_length(512)
    writer.add_embedding_length(_N_EMBD)
    writer.add_block_count(_N_LAYER)
    writer.add_feed_forward_length(_N_FF)
    writer.add_head_count(_N_HEAD)
    writer.add_head_count_kv(_N_HEAD_KV)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(_N_EMBD // _N_HEAD)
    draw = np.random.default_rng(7)

    def matrix(name: str, n_out: int, n_in: int) -> None:
        writer.add_tensor(f"{name}.weight", (draw.standard_normal((n_out, n_in)) * 0.1).astype(np.float16))

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(_N_EMBD, dtype=np.float32))

    matrix("token_embd", n_vocab, _N_EMBD)
    norm("output_norm")
    n_kv = _N_EMBD // _N_HEAD * _N_HEAD_KV
    for index in range(_N_LAYER):
        block = f"blk.{index}"
        norm(f"{block}.attn_norm")
        matrix(f"{block}.attn_q", _N_EMBD, _N_EMBD)
        matrix(f"{block}.attn_k", n_kv, _N_EMBD)
        matrix(f"{block}.attn_v", n_kv, _N_EMBD)
        matrix(f"{block}.attn_output", _N_EMBD, _N_EMBD)
        norm(f"{block}.ffn_norm")
        matrix(f"{block}.ffn_gate", _N_FF, _N_EMBD)
        matrix(f"{block}.ffn_up", _N_FF, _N_EMBD)
        matrix(f"{block}.ffn_down", _N_EMBD, _N_FF)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
