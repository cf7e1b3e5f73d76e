"""What a model's file says about the model, before any library has seen it.

`read_facts` walks the header (see `gguf_header`) in a fraction of a second and never touches the weights, so a switch
can be judged before anything is freed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from splitctl.errors import BadModelFile, ModelFileFault
from splitctl.model import architectures
from splitctl.model.header import GgufHeader, TensorInfo, Value, read_header
from splitctl.model.tensor_types import row_bytes

#: More layers than any build allows.  Source: LLAMA_MAX_LAYERS in llama-hparams.h is 512.
MAX_LAYERS = 1024
#: No width, head count, vocabulary or context is larger; products of a few of these stay exact and sane.
MAX_SIZE = 1 << 31
MAX_PARTS = 1024

#: Beside its rows a cell holds its position and its sequences; M-RoPE models hold 12 bytes more.
_CELL_BYTES = 24
_F32_BYTES = 4
_PART_NAME = re.compile(r"^(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf$")
_NO_MODEL = "name a language model (a projector or an adapter cannot run alone)"


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The recurrent memory of a model: one row of each kind per layer and sequence, in f32.

    Args:
        n_layers: layers that have it.
        n_embd_r: values of the convolution (or token shift) row.
        n_embd_s: values of the state row.
    """

    n_layers: int
    n_embd_r: int
    n_embd_s: int

    @property
    def n_bytes(self) -> int:
        """Bytes per sequence."""
        return self.n_layers * (self.n_embd_r + self.n_embd_s) * _F32_BYTES


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the header of a model's file says.

    Args:
        path: the file that was named (the first part of a split model).
        files: every part.
        architecture: its GGUF name.
        name: `general.name`, or the architecture.
        file_bytes: all parts together, bytes.
        header_bytes: size of the first part's header without its padding, bytes.
        header_digest: xxh3-128 of the first part's header, hexadecimal.
        n_layer: layers.
        n_embd: width.
        n_head: query heads per layer.
        n_head_kv: KV heads per layer; 0 where a layer has no attention.
        n_embd_head_k: width of a key head.
        n_embd_head_v: width of a value head.
        n_ctx_train: context it was trained for, tokens; 0 where it is not said.
        n_vocab: tokens of the vocabulary.
        n_swa: sliding window as the metadata has it, tokens; not every architecture that carries the key uses it.
        n_expert: experts; 0 for a dense model.
        max_alibi_bias: strength of ALiBi as the architecture uses it; 0 for none.
        has_k_norm: a norm over keys or queries, per head.
        is_mla: multi-head latent attention, whose cache holds K rows only.
        n_embd_indexer: width of the row that a sparse-attention indexer keeps per token; 0 without one.
        recurrence: its recurrent memory; None for a pure attention model.
        rope: every `rope.*` entry of the metadata, by key.
        tensors: every tensor of every part.
        n_bytes_read: how much of the files was read, bytes.
        metadata: every entry of the architecture's own, by key without its prefix; texts' arrays are left out.
        part_tensors: how many tensors each part holds, in the order of `tensors`; empty for one file.
        headers: the header of every part.
    """

    path: Path
    files: tuple[Path, ...]
    architecture: str
    name: str
    file_bytes: int
    header_bytes: int
    header_digest: str
    n_layer: int
    n_embd: int
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    n_embd_head_k: int
    n_embd_head_v: int
    n_ctx_train: int
    n_vocab: int
    n_swa: int
    n_expert: int
    max_alibi_bias: float
    has_k_norm: bool
    is_mla: bool
    n_embd_indexer: int
    recurrence: Recurrence | None
    rope: tuple[tuple[str, Value], ...]
    tensors: tuple[TensorInfo, ...]
    n_bytes_read: int
    metadata: tuple[tuple[str, Value], ...] = ()
    part_tensors: tuple[int, ...] = ()
    headers: tuple[GgufHeader, ...] = field(default=(), repr=False, compare=False)

    @property
    def is_recurrent(self) -> bool:
        """Whether every layer has a recurrent memory and none an attention cache."""
        return self.architecture in architectures.RECURRENT

    @property
    def is_hybrid(self) -> bool:
        """Whether it has a recurrent memory beside an attention cache."""
        return self.architecture in architectures.HYBRID

    @property
    def is_diffusion(self) -> bool:
        """Whether it is a text diffusion model."""
        return self.architecture in architectures.DIFFUSION

    @property
    def is_encoder_only(self) -> bool:
        """Whether it is an encoder, which generates nothing."""
        return self.architecture in architectures.ENCODER_ONLY

    @property
    def gives_embeddings(self) -> bool:
        """Whether it answers with embeddings and has no logits."""
        return self.is_encoder_only or self.architecture in architectures.EMBEDDING

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether it has an encoder and a decoder."""
        return self.architecture in architectures.ENCODER_DECODER

    @property
    def has_memory(self) -> bool:
        """Whether it keeps anything between two decodes."""
        return not (self.is_encoder_only or self.is_diffusion)

    def number(self, key: str) -> int:
        """Look up a number of the architecture's own metadata; 0 where there is none."""
        value = dict(self.metadata).get(key, 0)
        return int(value) if isinstance(value, int | float) else 0

    @property
    def equal_cache_types(self) -> bool:
        """Whether the library takes only equal types for K and V."""
        return self.is_mla or self.architecture in architectures.EQUAL_CACHE_TYPES

    @property
    def least_head_kv(self) -> int:
        """The fewest KV heads of a layer that has any; 0 when none has."""
        return min((count for count in self._attention_heads if count), default=0)

    @property
    def weight_bytes(self) -> int:
        """Size of all tensors, bytes."""
        return sum(tensor.n_bytes or 0 for tensor in self.tensors)

    @property
    def largest_tensor_bytes(self) -> int:
        """Size of the largest tensor, bytes."""
        return max((tensor.n_bytes or 0 for tensor in self.tensors), default=0)

    @property
    def _attention_heads(self) -> tuple[int, ...]:
        """KV heads per layer, 0 where the layer keeps no attention cache."""
        return () if self.is_recurrent else self.n_head_kv

    def state_bytes(self, n_tokens: int, type_k: str = "f16", type_v: str = "f16", *, n_sequences: int = 1) -> int:
        """Estimate the saved state, never too low for what the metadata describes; bytes.

        Args:
            n_tokens: tokens held, over all sequences; a sliding window holds fewer than this assumes.
            type_k: cache type of keys.
            type_v: cache type of values.
            n_sequences: sequences, for the recurrent rows.
        """
        total = self.recurrence.n_bytes * n_sequences if self.recurrence else 0
        return total + n_tokens * (_CELL_BYTES + self.cache_bytes_per_token(type_k, type_v))

    def cache_bytes_per_token(self, type_k: str = "f16", type_v: str = "f16") -> int:
        """Size of the attention cache for one token, over all layers, bytes; 0 without an attention cache."""
        if not self.has_memory:
            return 0
        total = 0
        for heads in self._attention_heads:
            total += row_bytes(heads * self.n_embd_head_k, type_k)
            if not self.is_mla:
                total += row_bytes(heads * self.n_embd_head_v, type_v)
            if heads:
                total += row_bytes(self.n_embd_indexer, type_k)
        return total


def read_facts(path: Path | str) -> ModelFacts:
    """Read a model's facts from its header (of a split model, from the first part's, and the headers of all others).

    Raises:
        BadModelFile: the file, or a part of it, cannot be used; says which, why and what to do.
    """
    first = Path(path)
    header = read_header(first)
    headers = [header, *_other_parts(header)]
    return _Reading(header).facts(headers)


def _other_parts(header: GgufHeader) -> list[GgufHeader]:
    """Read the headers of the other parts of a split model."""
    reading = _Reading(header)
    count, number = reading.size("split.count", 1), reading.size("split.no", 0)
    if count <= 1:
        return []
    if count > MAX_PARTS:
        raise reading.bad(ModelFileFault.LIMIT, f"it claims {count} parts, the limit is {MAX_PARTS}")
    named = _PART_NAME.match(header.path.name)
    if named is None or int(named["count"]) != count:
        raise reading.bad(
            ModelFileFault.BAD_VALUE,
            f"it is one of {count} parts, but is not called NAME-00001-of-{count:05}.gguf",
            "give the parts their names back",
        )
    names = [header.path.with_name(f"{named['stem']}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)]
    if number != 0:
        raise reading.bad(
            ModelFileFault.BAD_VALUE, f"it is part {number + 1} of {count}", f"name {names[0].name} instead"
        )
    others = [read_header(name) for name in names[1:]]
    found = len(header.tensors) + sum(len(other.tensors) for other in others)
    wanted = reading.size("split.tensors.count", found)
    if found != wanted:
        raise reading.bad(ModelFileFault.BAD_VALUE, f"its parts hold {found} tensors, it claims {wanted}")
    return others


class _Reading:
    """Typed look-ups in one header's metadata."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        found = header.values.get("general.architecture")
        self._architecture = found if isinstance(found, str) else ""

    def facts(self, headers: list[GgufHeader]) -> ModelFacts:
        """Build the facts of a model from the headers of its parts."""
        header, values = self._header, self._header.values
        if not self._architecture:
            raise self.bad(ModelFileFault.BAD_VALUE, "it does not name an architecture", _NO_MODEL)
        n_layer = self.size(self._own("block_count"))
        if not 1 <= n_layer <= MAX_LAYERS:
            raise self.bad(ModelFileFault.LIMIT, f"it claims {n_layer} layers, 1 to {MAX_LAYERS} are possible")
        n_embd = self.size(self._own("embedding_length"))
        n_head = self._per_layer("attention.head_count", (0,) * n_layer)
        n_head_kv = self._per_layer("attention.head_count_kv", n_head)
        heads = next((count for count in n_head if count), 0)
        even = n_embd // heads if heads else 0
        tensors = tuple(tensor for one in headers for tensor in one.tensors)
        recurrence = self._recurrence(n_layer, n_embd, n_head, n_head_kv)
        name = values.get("general.name")
        bias = values.get(self._own("attention.max_alibi_bias"), 0.0)
        indexed = self._architecture in architectures.INDEXER
        own = self._own("")
        return ModelFacts(
            path=header.path,
            files=tuple(one.path for one in headers),
            architecture=self._architecture,
            name=name if isinstance(name, str) and name else self._architecture,
            file_bytes=sum(one.file_bytes for one in headers),
            header_bytes=header.header_bytes,
            header_digest=header.digest,
            n_layer=n_layer,
            n_embd=n_embd,
            n_head=n_head,
            n_head_kv=self._with_interval(n_head_kv),
            n_embd_head_k=self.size(self._own("attention.key_length"), even),
            n_embd_head_v=self.size(self._own("attention.value_length"), even),
            n_ctx_train=self.size(self._own("context_length"), 0),
            n_vocab=self._n_vocab(tensors),
            n_swa=self.size(self._own("attention.sliding_window"), 0),
            n_expert=self.size(self._own("expert_count"), 0),
            max_alibi_bias=architectures.max_alibi_bias(
                self._architecture, n_layer, float(bias) if isinstance(bias, int | float) else 0.0
            ),
            has_k_norm=any(".attn_k_norm." in one.name or ".attn_q_norm." in one.name for one in tensors),
            is_mla=self._architecture not in architectures.WHOLE_ROWS
            and bool(self.size(self._own("attention.key_length_mla"), 0)),
            n_embd_indexer=self.size(self._own("attention.indexer.key_length"), 0) if indexed else 0,
            recurrence=recurrence,
            rope=tuple(sorted((key, value) for key, value in values.items() if f"{self._architecture}.rope." in key)),
            tensors=tensors,
            n_bytes_read=sum(one.read_bytes for one in headers),
            metadata=tuple(sorted((key[len(own) :], value) for key, value in values.items() if key.startswith(own))),
            part_tensors=tuple(len(one.tensors) for one in headers),
            headers=tuple(headers),
        )

    def size(self, key: str, default: int | None = None) -> int:
        """Look up a size or a count.

        Raises:
            BadModelFile: it is missing and has no default, or is no number from 0 to ``MAX_SIZE``.
        """
        value = self._header.values.get(key, default)
        if value is None:
            raise self.bad(ModelFileFault.BAD_VALUE, f"it has no {key}", _NO_MODEL)
        if isinstance(value, tuple) and value and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, tuple) and value:
            value = max(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SIZE:
            raise self.bad(
                ModelFileFault.BAD_VALUE, f"its {key} is {value!r}, wanted is a whole number up to {MAX_SIZE}"
            )
        return value

    def bad(self, kind: ModelFileFault, detail: str, action: str = "download or convert it again") -> BadModelFile:
        """Make the error for this file."""
        return BadModelFile(self._header.path, kind, detail, action)

    def _own(self, key: str) -> str:
        """Give a key its architecture's prefix."""
        return f"{self._architecture}.{key}"

    def _per_layer(self, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """Look up a count that is one number, or one a layer."""
        value = self._header.values.get(self._own(key))
        n_layer = len(default)
        if value is None:
            return default
        if isinstance(value, tuple):
            if len(value) < n_layer:
                detail = f"its {self._own(key)} has {len(value)} entries for {n_layer} layers"
                raise self.bad(ModelFileFault.BAD_VALUE, detail)
            counts = value[:n_layer]
        else:
            counts = (self.size(self._own(key)),) * n_layer
        if any(isinstance(one, bool) or not isinstance(one, int) or not 0 <= one <= MAX_SIZE for one in counts):
            raise self.bad(ModelFileFault.BAD_VALUE, f"its {self._own(key)} is {value!r}, wanted are counts")
        return tuple(int(one) for one in counts)

    def _with_interval(self, n_head_kv: tuple[int, ...]) -> tuple[int, ...]:
        """Leave only the layers that have attention, where the metadata gives their interval instead of their heads."""
        if self._architecture not in architectures.INTERVAL_HYBRID:
            return n_head_kv
        interval = self.size(self._own("full_attention_interval"), 4) or 1
        return tuple(heads if (index + 1) % interval == 0 else 0 for index, heads in enumerate(n_head_kv))

    def _n_vocab(self, tensors: tuple[TensorInfo, ...]) -> int:
        """Count the vocabulary: its tokens, what the metadata says, or the rows of the embedding."""
        listed = self._header.array_sizes.get("tokenizer.ggml.tokens")
        if listed is not None:
            return listed
        said = self.size(self._own("vocab_size"), 0)
        if said:
            return said
        return next((one.dims[1] for one in tensors if one.name == "token_embd.weight" and len(one.dims) > 1), 0)

    def _recurrence(
        self, n_layer: int, n_embd: int, n_head: tuple[int, ...], n_head_kv: tuple[int, ...]
    ) -> Recurrence | None:
        """Describe the recurrent memory.  Source: llama_hparams::n_embd_r and n_embd_s."""
        if (
            self._architecture not in architectures.RECURRENT | architectures.HYBRID
            or self._architecture == "deepseek4"
        ):
            return None
        heads = max(n_head, default=0)
        conv = max(self.size(self._own("ssm.conv_kernel"), 0) - 1, 0)
        inner, state = self.size(self._own("ssm.inner_size"), 0), self.size(self._own("ssm.state_size"), 0)
        wkv, kda = self.size(self._own("wkv.head_size"), 0), self.size(self._own("kda.head_dim"), 0)
        if "rwkv" in self._architecture:
            shifts = self.size(self._own("token_shift_count"), 2)
            row, held = shifts * n_embd, n_embd * wkv
        elif self._architecture.startswith("lfm2"):
            row, held = n_embd * max(self.size(self._own("shortconv.l_cache"), 0) - 1, 0), 0
        elif self._architecture in {"kimi-linear", "kimi-k3", "bailingmoe3", "glm5-next"}:
            row, held = 3 * (conv or 3) * heads * kda, kda * kda * heads
        elif self._architecture == "minimax-01":
            width = self.size(self._own("attention.key_length"), n_embd // heads if heads else 0)
            row, held = 0, width * width * heads
        else:
            grouped = self._architecture in architectures.GROUPED_STATE
            groups = self.size(self._own("ssm.group_count"), 0) if grouped else 0
            row, held = conv * (inner + 2 * groups * state), state * inner
        attention = self._with_interval(n_head_kv)
        both = self._architecture == "falcon-h1" or self._architecture in architectures.RECURRENT
        layers = n_layer if both or all(attention) else sum(1 for one in attention if not one)
        return Recurrence(layers, row, held)
