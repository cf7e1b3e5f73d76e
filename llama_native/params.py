"""What a model and a context are asked to be: plain values, with llama.cpp's names and defaults."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class SplitMode(Enum):
    """How a model lies on its devices. Source: llama.h, llama_split_mode."""

    NONE = 0
    LAYER = 1
    ROW = 2
    TENSOR = 3


class LoadMode(Enum):
    """How the weights are read. Source: llama.h, llama_load_mode (older builds: use_mmap, use_mlock)."""

    AUTO = -1
    READ = 0
    MMAP = 1
    MLOCK = 2
    MMAP_MLOCK = 3
    DIRECT_IO = 4


class FlashAttn(Enum):
    """When flash attention is used. Source: llama.h, llama_flash_attn_type."""

    AUTO = -1
    OFF = 0
    ON = 1


class KvType(Enum):
    """Element types of a KV cache. Source: ggml.h, ggml_type."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    IQ4_NL = 20
    BF16 = 30


@dataclass(frozen=True, slots=True)
class ModelParams:
    """How to place a model; ``tensor_split`` is a share for each device, ``devices`` may name one twice."""

    split_mode: SplitMode = SplitMode.LAYER
    devices: tuple[str, ...] = ()
    tensor_split: tuple[float, ...] | None = None
    main_gpu: int = 0
    n_gpu_layers: int = -1
    load_mode: LoadMode = LoadMode.AUTO
    check_tensors: bool = False
    no_alloc: bool = False
    vocab_only: bool = False


@dataclass(frozen=True, slots=True)
class ContextParams:
    """How to make a context; ``n_ctx`` 0 is the model's own, counts are tokens, threads 0 are the library's own."""

    n_ctx: int = 0
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq_max: int = 1
    n_threads: int = 0
    n_threads_batch: int = 0
    flash_attn: FlashAttn = FlashAttn.AUTO
    type_k: KvType = KvType.F16
    type_v: KvType = KvType.F16
    offload_kqv: bool = True
    kv_unified: bool = False
    swa_full: bool = False
    embeddings: bool = False
