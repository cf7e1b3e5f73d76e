"""Make models of real sizes with random weights, as fast as the disk takes them.

    python -m tools.make_large [--out DIR] [--json] [NAME...]      NAME: 27b, 8b, moe, 3b-f16, tiny...; without any: 8b

Blocks are drawn once and laid side by side, each tensor beginning at another one: nothing is zero, and no two layers
are alike. The vocabulary is made up: bytes, and words that only a tokenizer would meet.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llama_native.user_model import MetaKind, MetaValue, TensorSlot
from tools.gguf_out import header_bytes, padded
from tools.places import default_folder

_F32, _F16, _Q8_0 = 0, 1, 8
#: A block of q8_0: a half float as scale, and so many bytes.  Source: ggml-common.h, block_q8_0.
_BLOCK_VALUES, _BLOCK_BYTES = 32, 34
#: Weights come out with a standard deviation of 0.02: so much a step of a byte drawn from -127 to 127.
_SCALE = 0.02 / 73.3
#: Blocks that are drawn; a prime, so that a tensor of any width begins elsewhere in each layer.
_POOL_BLOCKS = 1_999_993
_THREADS = 8
_N_BYTES_TOKENS = 259
_WORD, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6
"""Kinds of tokens.  Source: llama.h, llama_token_type."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model.

    Args:
        n_layer: layers.
        n_embd: width of a row.
        n_head: query heads.
        n_head_kv: KV heads.
        n_ff: width of the feed-forward part.
        n_vocab: tokens.
        is_half: weights are half floats, else blocks of q8_0.
        n_expert: experts of a layer, each `n_ff` wide; 0: the feed-forward part is dense.
        n_used: experts that work on a token.
        n_head_dim: width of a head; 0: that of a row divided by the heads.
    """

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_ff: int
    n_vocab: int
    is_half: bool = False
    n_expert: int = 0
    n_used: int = 0
    n_head_dim: int = 0

    @property
    def architecture(self) -> str:
        """What the library calls a model of this shape."""
        return "qwen3moe" if self.n_expert else "llama"

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.n_head_dim or self.n_embd // self.n_head

    def slots(self) -> list[TensorSlot]:
        """Every tensor of the model."""
        n_query, n_kv = self.n_head * self.head_dim, self.n_head_kv * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (self.n_embd,),
            "attn_q.weight": (self.n_embd, n_query),
            "attn_k.weight": (self.n_embd, n_kv),
            "attn_v.weight": (self.n_embd, n_kv),
            "attn_output.weight": (n_query, self.n_embd),
            "ffn_norm.weight": (self.n_embd,),
        }
        if self.n_expert:
            layer |= {
                "attn_q_norm.weight": (self.head_dim,),
                "attn_k_norm.weight": (self.head_dim,),
                "ffn_gate_inp.weight": (self.n_embd, self.n_expert),
                "ffn_gate_exps.weight": (self.n_embd, self.n_ff, self.n_expert),
                "ffn_up_exps.weight": (self.n_embd, self.n_ff, self.n_expert),
                "ffn_down_exps.weight": (self.n_ff, self.n_embd, self.n_expert),
            }
        else:
            layer |= {
                "ffn_gate.weight": (self.n_embd, self.n_ff),
                "ffn_up.weight": (self.n_embd, self.n_ff),
                "ffn_down.weight": (self.n_ff, self.n_embd),
            }
        named: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (self.n_embd, self.n_vocab),
            "output_norm.weight": (self.n_embd,),
            "output.weight": (self.n_embd, self.n_vocab),
        }
        for index in range(self.n_layer):
            named |= {f"blk.{index}.{name}": dims for name, dims in layer.items()}
        return [_slot(name, dims, is_half=self.is_half) for name, dims in named.items()]


#: The 8B is that of Llama 3; the 27B has the width and heads of models of its size. The mixture of experts has layers
#: of Qwen3-30B-A3B with half as many experts, and 32 of its 48 layers: 11.6 GB.
SHAPES: Mapping[str, Shape] = {
    "tiny": Shape(4, 512, 8, 4, 1408, 2048),
    "3b-f16": Shape(28, 3072, 24, 8, 8192, 128256, is_half=True),
    "8b": Shape(32, 4096, 32, 8, 14336, 128256),
    "27b": Shape(64, 5120, 40, 8, 21504, 152064),
    "moe": Shape(32, 2048, 32, 4, 768, 151936, n_expert=64, n_used=8, n_head_dim=128),
    "tiny-moe": Shape(4, 256, 8, 4, 128, 2048, n_expert=8, n_used=2, n_head_dim=64),
}


def make_large(folder: Path, name: str) -> Path:
    """Make a model, once.

    Args:
        folder: where it goes.
        name: one of `SHAPES`.

    Returns:
        Its path.
    """
    shape = SHAPES[name]
    metadata = _metadata(name, shape)
    slots = shape.slots()
    header = header_bytes(metadata, slots)
    path = folder / f"large-{name}-{hashlib.sha256(header).hexdigest()[:10]}.gguf"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{path.name}-")
    try:
        _fill(handle, header, slots, _halves() if shape.is_half else _blocks())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)
    return path


def _slot(name: str, dims: tuple[int, ...], *, is_half: bool) -> TensorSlot:
    """Size a tensor: norms and the choice of experts in floats, as converters do, the rest in halves or blocks."""
    n_values = int(np.prod(dims))
    if len(dims) == 1 or "ffn_gate_inp" in name:
        return TensorSlot(name, dims, _F32, 4 * n_values)
    if is_half:
        return TensorSlot(name, dims, _F16, 2 * n_values)
    return TensorSlot(name, dims, _Q8_0, n_values // _BLOCK_VALUES * _BLOCK_BYTES)


def _metadata(name: str, shape: Shape) -> tuple[MetaValue, ...]:
    """Say what the model is, with its vocabulary."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += [f"\u2581w{index}" for index in range(shape.n_vocab - len(words))]
    kinds = [_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 256, *[_WORD] * (shape.n_vocab - _N_BYTES_TOKENS)]
    arch = shape.architecture
    experts = (
        MetaValue(f"{arch}.attention.key_length", MetaKind.U32, shape.head_dim),
        MetaValue(f"{arch}.attention.value_length", MetaKind.U32, shape.head_dim),
        MetaValue(f"{arch}.expert_count", MetaKind.U32, shape.n_expert),
        MetaValue(f"{arch}.expert_used_count", MetaKind.U32, shape.n_used),
        MetaValue(f"{arch}.expert_feed_forward_length", MetaKind.U32, shape.n_ff),
    )
    return (
        MetaValue("general.architecture", MetaKind.STR, arch),
        MetaValue("general.name", MetaKind.STR, f"large-{name}"),
        MetaValue(f"{arch}.vocab_size", MetaKind.U32, shape.n_vocab),
        MetaValue(f"{arch}.context_length", MetaKind.U32, 131072),
        MetaValue(f"{arch}.embedding_length", MetaKind.U32, shape.n_embd),
        MetaValue(f"{arch}.block_count", MetaKind.U32, shape.n_layer),
        MetaValue(f"{arch}.feed_forward_length", MetaKind.U32, shape.n_ff),
        MetaValue(f"{arch}.attention.head_count", MetaKind.U32, shape.n_head),
        MetaValue(f"{arch}.attention.head_count_kv", MetaKind.U32, shape.n_head_kv),
        MetaValue(f"{arch}.attention.layer_norm_rms_epsilon", MetaKind.F32, 1e-5),
        MetaValue(f"{arch}.rope.dimension_count", MetaKind.U32, shape.head_dim),
        *(experts if shape.n_expert else ()),
        MetaValue("tokenizer.ggml.model", MetaKind.STR, "llama"),
        MetaValue("tokenizer.ggml.tokens", MetaKind.STR, tuple(words)),
        MetaValue("tokenizer.ggml.scores", MetaKind.F32, tuple(-float(index) for index in range(shape.n_vocab))),
        MetaValue("tokenizer.ggml.token_type", MetaKind.I32, tuple(kinds)),
        MetaValue("tokenizer.ggml.bos_token_id", MetaKind.U32, 1),
        MetaValue("tokenizer.ggml.eos_token_id", MetaKind.U32, 2),
    )


def _halves() -> npt.NDArray[np.uint8]:
    """Draw half floats: uint8[_POOL_BLOCKS, 34], seventeen a row."""
    random = np.random.default_rng(16)
    halves = random.standard_normal((_POOL_BLOCKS, _BLOCK_BYTES // 2), dtype=np.float32) * np.float32(0.02)
    return halves.astype(np.float16).view(np.uint8)


def _blocks() -> npt.NDArray[np.uint8]:
    """Draw the blocks: uint8[_POOL_BLOCKS, 34]."""
    random = np.random.default_rng(8)
    blocks = random.integers(-127, 128, (_POOL_BLOCKS, _BLOCK_BYTES), dtype=np.int8).view(np.uint8)
    scales = (_SCALE * random.uniform(0.5, 1.5, _POOL_BLOCKS)).astype(np.float16)
    blocks[:, :2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks


def _fill(handle: int, header: bytes, slots: Sequence[TensorSlot], drawn: npt.NDArray[np.uint8]) -> None:
    """Write everything, several tensors at a time."""
    pool = drawn.reshape(-1).data
    offsets, end = [], len(header)
    for slot in slots:
        offsets.append(end)
        end += padded(slot.n_bytes)
    os.truncate(handle, end)
    os.pwrite(handle, header, 0)

    def write(job: tuple[int, TensorSlot, int]) -> None:
        number, slot, at = job
        for part in _data(number, slot, pool):
            done = 0
            while done < len(part):
                done += os.pwrite(handle, part[done:], at + done)
            at += len(part)

    with ThreadPoolExecutor(_THREADS) as threads:
        for _ in threads.map(write, zip(range(len(slots)), slots, offsets, strict=True)):
            pass


def _data(number: int, slot: TensorSlot, pool: memoryview) -> Iterator[memoryview]:
    """Give a tensor's bytes: ones for a norm, else drawn, for blocks from another place of the pool a tensor."""
    if slot.type_id == _F32 and len(slot.dims) > 1:
        yield np.random.default_rng(number).standard_normal(slot.dims, np.float32).view(np.uint8).data.cast("B")
        return
    if slot.type_id == _F32:
        yield np.ones(slot.dims, np.float32).view(np.uint8).data
        return
    start = number * 104_729 % _POOL_BLOCKS * _BLOCK_BYTES
    left = slot.n_bytes
    while left:
        part = pool[start : start + left]
        yield part
        left -= len(part)
        start = 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the models that are named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*SHAPES, []], metavar="NAME")
    parser.add_argument("--out", type=Path, default=default_folder(), help="folder (default: the user's cache)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args(arguments)
    made = {}
    for name in options.names or ["8b"]:
        made[name] = str(make_large(options.out, name))
        if not options.json:
            print(f"{name}: {made[name]}")
    if options.json:
        print(json.dumps({"made": made}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
