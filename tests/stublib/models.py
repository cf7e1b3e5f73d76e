"""Model files for the stub: a real GGUF header with one tensor or none; the stub reads no weights."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

_UINT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 6, 7, 8, 9
_INT32 = 5

Value = int | float | bool | str | list[str] | list[int]


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Value) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(_string(str(item)) for item in value)
    return struct.pack(f"<IIQ{len(value)}i", _ARRAY, _INT32, len(value), *value)


def write_model(
    path: Path, *, n_bytes: int = 0, extra: Mapping[str, Value] | None = None, weights: bytes = b""
) -> Path:
    """Write a llama model of two layers that the stub loads.

    Args:
        path: where to.
        n_bytes: the file's size, padded with zeros; at least that of the header.
        extra: metadata to add or to put in place of the usual.
        weights: the data of its one tensor, f32[len / 4]; empty: no tensor.

    Returns:
        ``path``.
    """
    pieces = [chr(i) if 32 <= i < 127 else f"<0x{i:02X}>" for i in range(256)] + ["<bos>", "<eos>", "<eot>", "<pad>"]
    pairs: dict[str, Value] = {
        "general.architecture": "llama",
        "general.name": "stub",
        "llama.block_count": 2,
        "llama.context_length": 2048,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 128,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": 16,
        "llama.vocab_size": 260,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [6] * 256 + [3] * 4,
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        **(extra or {}),
    }
    body = b"".join(_string(key) + _value(value) for key, value in pairs.items())
    if weights:
        body += _string("token_embd.weight") + struct.pack("<IQIQ", 1, len(weights) // 4, 0, 0)
    header = b"GGUF" + struct.pack("<IQQ", 3, bool(weights), len(pairs)) + body
    if weights:
        header = header.ljust(-(-len(header) // 32) * 32, b"\0") + weights
    path.write_bytes(header.ljust(max(n_bytes, len(header)), b"\0"))
    return path
