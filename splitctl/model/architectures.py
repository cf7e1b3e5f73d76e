"""Families of architectures, by their GGUF names: what a header alone does not say.

Source: llama-arch.cpp and llama-model.cpp of llama.cpp (llm_arch_is_recurrent, llm_arch_is_hybrid, create_memory), and
the files in src/models that set f_max_alibi_bias.
"""

from __future__ import annotations

from collections.abc import Mapping

#: A recurrent memory in every layer, no attention cache.
RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})

#: A recurrent memory in some layers, an attention cache in the others (or both in each).
HYBRID = frozenset({
    "jamba", "falcon-h1", "plamo2", "granitehybrid", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "qwen3next",
    "kimi-linear", "bailingmoe3", "kimi-k3", "glm5-next", "qwen35", "qwen35moe", "qwen4exp", "deepseek4",
    "minimax-01",
})  # fmt: skip

#: Hybrids whose attention layers come every `full_attention_interval` layers.
INTERVAL_HYBRID = frozenset({"qwen3next", "qwen35", "qwen35moe", "qwen4exp"})

#: Text diffusion models, which keep no memory.
DIFFUSION = frozenset({"dream", "llada", "llada-moe", "rnd1"})

#: Encoders that keep no memory and generate nothing.
ENCODER_ONLY = frozenset({
    "bert", "jina-bert-v2", "jina-bert-v3", "nomic-bert", "nomic-bert-moe", "neo-bert", "eurobert", "modern-bert",
    "gemma-embedding", "wavtokenizer-dec", "t5encoder",
})  # fmt: skip

#: Decoders that give embeddings and no logits; they keep a cache.
EMBEDDING = frozenset({"llama-embed"})

#: Encoder and decoder.
ENCODER_DECODER = frozenset({"t5"})

#: Architectures whose ALiBi slope is fixed in the code: name -> largest bias.
ALIBI_FIXED: Mapping[str, float] = {"bloom": 8.0, "refact": 8.0, "jina-bert-v2": 8.0}

#: Architectures that read the bias from their metadata; absent means none.
ALIBI_FROM_KEY = frozenset({"mpt", "jais"})

#: Baichuan uses ALiBi in its 13B form; the number of layers tells which it is.
BAICHUAN_ALIBI_LAYERS = 40

#: Recurrent memories whose convolution row has the groups of `ssm.group_count`; the others do not read that key.
GROUPED_STATE = frozenset({
    "falcon-h1", "granitehybrid", "mamba2", "nemotron_h", "nemotron_h_moe", "plamo2", "qwen35", "qwen35moe",
    "qwen3next", "qwen4exp",
})  # fmt: skip

#: Its metadata may name the widths of latent attention, and it keeps whole rows all the same.
WHOLE_ROWS = frozenset({"plm"})

#: An indexer keeps one more row of keys per token: sparse attention.
INDEXER = frozenset({"deepseek32", "glm-dsa", "hy_v4", "dots3note", "glm5-next", "qwen4exp", "minimax-m3"})

#: Cache rows of K and V must have one type, beside the MLA models that show it in their metadata.
EQUAL_CACHE_TYPES = frozenset({"deepseek4"})


def max_alibi_bias(architecture: str, n_layer: int, from_key: float) -> float:
    """Tell how strong a model's ALiBi is; 0 when it uses none, whatever its metadata carries.

    Args:
        architecture: its GGUF name.
        n_layer: its layers.
        from_key: `attention.max_alibi_bias` of its metadata, 0 where it is absent.
    """
    if architecture in ALIBI_FROM_KEY:
        return from_key
    if architecture == "baichuan" and n_layer == BAICHUAN_ALIBI_LAYERS:
        return 8.0
    return ALIBI_FIXED.get(architecture, 0.0)
