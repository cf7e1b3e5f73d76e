"""Facts from a GGUF header: right on sound files, one typed error on any other."""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_native.user_model import MetaKind, MetaValue, TensorSlot
from splitctl.errors import BadModelFile, ModelFileFault
from splitctl.model.facts import MAX_LAYERS, ModelFacts, read_facts
from splitctl.model.header import MAX_ARRAY, MAX_PAIRS, MAX_TENSORS, read_header
from splitctl.model.tensor_types import CACHE_BLOCKS, TENSOR_TYPES, row_bytes
from tools.gguf_out import header_bytes, padded
from tools.make_dummies import make_big, recipes, to_metadata

U32, STR, F32 = MetaKind.U32, MetaKind.STR, MetaKind.F32
EMBEDDING = TensorSlot("token_embd.weight", (64, 10), 0, 64 * 10 * 4)


def metadata(architecture: str = "llama", **own: object) -> list[MetaValue]:
    """Metadata of a small model; keys are the architecture's own, with `__` for a dot, and None takes one away."""
    plain: dict[str, object] = {
        "block_count": 4,
        "embedding_length": 64,
        "context_length": 256,
        "attention__head_count": 4,
        "attention__head_count_kv": 2,
    } | own
    items = [MetaValue("general.architecture", STR, architecture)]
    for name, value in plain.items():
        kind = F32 if isinstance(value, float) else STR if isinstance(value, str) else U32
        if value is not None:
            items.append(MetaValue(f"{architecture}.{name.replace('__', '.')}", kind, value))  # type: ignore[arg-type]
    return items


def written(
    folder: Path, items: list[MetaValue], tensors: tuple[TensorSlot, ...] = (EMBEDDING,), name: str = "m.gguf"
) -> Path:
    """Write a model whose tensors are zero."""
    path = folder / name
    path.write_bytes(header_bytes(items, tensors) + b"\0" * sum(padded(slot.n_bytes) for slot in tensors))
    return path


def facts_of(folder: Path, items: list[MetaValue], tensors: tuple[TensorSlot, ...] = (EMBEDDING,)) -> ModelFacts:
    """Write a model and read its facts."""
    return read_facts(written(folder, items, tensors))


def recipe_facts(folder: Path, name: str) -> ModelFacts:
    """Read the facts of a recipe's metadata, without weights."""
    return facts_of(folder, list(to_metadata(recipes()[name])), ())


def test_a_small_model_reads_as_written(tmp_path: Path) -> None:
    """Every plain fact is what the metadata says."""
    facts = facts_of(tmp_path, metadata(expert_count=3, attention__sliding_window=32, rope__freq_base=1000.0))
    assert (facts.architecture, facts.name, facts.n_layer, facts.n_embd) == ("llama", "llama", 4, 64)
    assert (facts.n_head, facts.n_head_kv, facts.n_embd_head_k) == ((4,) * 4, (2,) * 4, 16)
    assert (facts.n_ctx_train, facts.n_vocab, facts.n_swa, facts.n_expert) == (256, 10, 32, 3)
    assert facts.rope == (("llama.rope.freq_base", 1000.0),)
    assert facts.weight_bytes == facts.largest_tensor_bytes == 2560
    assert facts.files == (facts.path,)
    assert facts.has_memory
    assert not facts.has_k_norm
    assert not facts.max_alibi_bias
    assert not any((facts.is_mla, facts.is_recurrent, facts.is_hybrid))


def test_counts_per_layer_are_kept(tmp_path: Path) -> None:
    """An array of head counts gives each layer its own, and layers without heads do not count as the fewest."""
    facts = facts_of(tmp_path, metadata(attention__head_count_kv=(2, 0, 4, 0)))
    assert facts.n_head_kv == (2, 0, 4, 0)
    assert facts.least_head_kv == 2


def test_head_counts_without_kv_are_taken_from_the_heads(tmp_path: Path) -> None:
    """A model that does not name KV heads has as many as heads."""
    assert facts_of(tmp_path, metadata(attention__head_count_kv=None)).n_head_kv == (4,) * 4


@pytest.mark.parametrize(
    ("architecture", "own", "bias"),
    [
        ("bloom", {}, 8.0),
        ("refact", {}, 8.0),
        ("jina-bert-v2", {}, 8.0),
        ("baichuan", {"block_count": 40}, 8.0),
        ("baichuan", {"block_count": 32}, 0.0),
        ("jais", {"attention__max_alibi_bias": 8.0}, 8.0),
        ("jais", {"attention__max_alibi_bias": 0.0}, 0.0),
        ("mpt", {"attention__max_alibi_bias": 4.0}, 4.0),
        ("mpt", {}, 0.0),
        ("falcon", {"attention__max_alibi_bias": 8.0}, 0.0),
        ("llama", {"attention__max_alibi_bias": 8.0, "block_count": 40}, 0.0),
    ],
)
def test_alibi_is_what_the_architecture_uses(
    tmp_path: Path, architecture: str, own: dict[str, object], bias: float
) -> None:
    """The bias counts only where the architecture reads it, whatever the metadata carries."""
    assert facts_of(tmp_path, metadata(architecture, **own)).max_alibi_bias == bias


@pytest.mark.parametrize("name", ["blk.0.attn_k_norm.weight", "blk.3.attn_q_norm.weight"])
def test_a_norm_over_keys_or_queries_is_seen_in_the_tensors(tmp_path: Path, name: str) -> None:
    """The K-norm is told by its tensor."""
    norm = TensorSlot(name, (16,), 0, 64)
    assert facts_of(tmp_path, metadata(), (EMBEDDING, norm)).has_k_norm


def test_cache_of_a_real_model_is_exact(tmp_path: Path) -> None:
    """Qwen3-8B in f16 takes 147,456 bytes a token, so 10,000 tokens take 1.37 GiB (S34)."""
    items = metadata(
        "qwen3",
        block_count=36,
        embedding_length=4096,
        attention__head_count=32,
        attention__head_count_kv=8,
        attention__key_length=128,
        attention__value_length=128,
    )
    facts = facts_of(tmp_path, items)
    assert facts.cache_bytes_per_token() == 147_456
    assert round(facts.state_bytes(10_000) / 2**30, 2) == 1.37


@pytest.mark.parametrize(
    ("cache_type", "n_bytes"),
    [
        ("f32", 256),
        ("f16", 128),
        ("bf16", 128),
        ("q8_0", 68),
        ("q4_0", 36),
        ("iq4_nl", 36),
        ("q4_1", 40),
        ("q5_0", 44),
        ("q5_1", 48),
    ],
)
def test_cache_rows(cache_type: str, n_bytes: int) -> None:
    """A row of 64 values takes the measured bytes, for every cache type."""
    assert row_bytes(64, cache_type) == n_bytes
    assert cache_type in CACHE_BLOCKS


def test_latent_attention_keeps_keys_only(tmp_path: Path) -> None:
    """An MLA cache is one row of 576 values a layer, and takes equal types for K and V only."""
    facts = recipe_facts(tmp_path, "deepseek2")
    assert facts.is_mla
    assert facts.equal_cache_types
    assert facts.cache_bytes_per_token() == 4 * 576 * 2
    assert not recipe_facts(tmp_path, "deepseek2-ocr").is_mla


def test_a_recurrent_state_does_not_grow(tmp_path: Path) -> None:
    """A recurrent model holds the same rows for 1 and for 100 tokens, once a sequence."""
    facts = recipe_facts(tmp_path, "mamba")
    assert facts.is_recurrent
    assert facts.cache_bytes_per_token() == 0
    assert facts.recurrence is not None
    grown = facts.state_bytes(100, n_sequences=2) - facts.state_bytes(100)
    assert grown == facts.recurrence.n_bytes > 0


def test_a_hybrid_has_attention_in_some_layers(tmp_path: Path) -> None:
    """Hybrids that name an interval have a cache in every second layer here, the rest is recurrent."""
    facts = recipe_facts(tmp_path, "qwen35")
    assert facts.is_hybrid
    assert [heads > 0 for heads in facts.n_head_kv] == [False, True, False, True]
    assert facts.recurrence is not None
    assert facts.recurrence.n_layers == 2


def test_encoders_and_diffusion_models_have_no_memory(tmp_path: Path) -> None:
    """What keeps nothing between decodes takes no cache."""
    assert recipe_facts(tmp_path, "bert").is_encoder_only
    assert recipe_facts(tmp_path, "dream").is_diffusion
    assert recipe_facts(tmp_path, "t5").is_encoder_decoder
    assert recipe_facts(tmp_path, "bert").cache_bytes_per_token() == 0
    embedder = recipe_facts(tmp_path, "llama-embed")
    assert embedder.gives_embeddings
    assert embedder.cache_bytes_per_token() > 0


def test_every_recipe_has_facts(tmp_path: Path) -> None:
    """All recipes of nearly every architecture read, with layers and a vocabulary."""
    for name in recipes():
        facts = recipe_facts(tmp_path, name)
        assert facts.n_layer > 0
        assert facts.n_vocab > 0
        assert len(facts.n_head) == len(facts.n_head_kv) == facts.n_layer


def test_a_large_vocabulary_is_stepped_over_once(tmp_path: Path) -> None:
    """262,144 tokens are counted by reading the header once and nothing behind it."""
    tokens = tuple(f"<unused{index}>" for index in range(262_144))
    items = [*metadata(), MetaValue("tokenizer.ggml.tokens", STR, tokens)]
    big = TensorSlot("token_embd.weight", (64, 262_144), 0, 64 * 262_144 * 4)
    path = tmp_path / "big.gguf"
    path.write_bytes(header_bytes(items, (big,)))
    os.truncate(path, path.stat().st_size + big.n_bytes)
    facts = read_facts(path)
    assert facts.n_vocab == 262_144
    assert facts.n_bytes_read == facts.header_bytes


def test_weights_are_never_read(tmp_path: Path) -> None:
    """Of a model of 20 MB the header alone is read."""
    facts = read_facts(make_big(tmp_path, 20))
    assert facts.file_bytes > 10_000_000
    assert facts.n_bytes_read == facts.header_bytes


def test_the_digest_covers_the_header_and_nothing_else(tmp_path: Path) -> None:
    """Another key gives another digest, other weights do not."""
    path = written(tmp_path, metadata())
    first = read_facts(path)
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)
    assert read_facts(path).header_digest == first.header_digest
    assert facts_of(tmp_path, metadata(context_length=257)).header_digest != first.header_digest


def test_the_type_table_agrees_with_the_gguf_package() -> None:
    """Block sizes are those of gguf-py, except q8_1, which it has as it was before 2023."""
    for number, (name, per_block, block_bytes) in TENSOR_TYPES.items():
        try:
            known = gguf.GGMLQuantizationType(number)
        except ValueError:
            continue
        assert known.name.lower() == name
        if name != "q8_1":
            assert gguf.GGML_QUANT_SIZES[known] == (per_block, block_bytes)


# Bad files.


def refused(path: Path) -> BadModelFile:
    """Read a file that must be refused with one line of text."""
    with pytest.raises(BadModelFile) as caught:
        read_facts(path)
    assert "\n" not in str(caught.value)
    assert caught.value.path == path
    assert caught.value.action
    return caught.value


def test_missing_file(tmp_path: Path) -> None:
    """A path to nothing is missing."""
    assert refused(tmp_path / "nothing.gguf").kind is ModelFileFault.MISSING


def test_directory(tmp_path: Path) -> None:
    """A folder is told to be one."""
    error = refused(tmp_path)
    assert error.kind is ModelFileFault.NOT_A_FILE
    assert "directory" in error.detail


def test_fifo_does_not_block(tmp_path: Path) -> None:
    """A named pipe without a writer is refused, not waited for."""
    os.mkfifo(tmp_path / "pipe")
    assert refused(tmp_path / "pipe").kind is ModelFileFault.NOT_A_FILE


def test_empty_file(tmp_path: Path) -> None:
    """A file of zero bytes is empty."""
    (tmp_path / "empty").touch()
    assert refused(tmp_path / "empty").kind is ModelFileFault.EMPTY


@pytest.mark.parametrize("body", [b"PK\x03\x04" + b"\0" * 100, b"GG", b"\0", b"# a text\n"])
def test_not_a_gguf(tmp_path: Path, body: bytes) -> None:
    """What does not start like a GGUF is named with what it starts with."""
    (tmp_path / "x").write_bytes(body)
    error = refused(tmp_path / "x")
    assert error.kind is ModelFileFault.NOT_GGUF
    assert repr(body[:4]) in error.detail


def test_big_endian_file(tmp_path: Path) -> None:
    """A big-endian file is told apart from an unknown version."""
    (tmp_path / "be").write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    error = refused(tmp_path / "be")
    assert error.kind is ModelFileFault.UNSUPPORTED
    assert "big-endian" in error.detail


@pytest.mark.parametrize("version", [0, 1, 4, 99])
def test_unknown_version(tmp_path: Path, version: int) -> None:
    """A version that no reader of ours knows is refused by number."""
    (tmp_path / "v").write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    error = refused(tmp_path / "v")
    assert error.kind is ModelFileFault.UNSUPPORTED
    assert str(version) in error.detail


def test_every_truncation_is_told(tmp_path: Path) -> None:
    """A file cut at any byte is refused, and never read beyond."""
    norm = TensorSlot("blk.0.attn_k_norm.weight", (16,), 0, 64)
    items = [*metadata(), MetaValue("tokenizer.ggml.tokens", STR, ("a", "bc")), MetaValue("k.f", F32, (1.0, 2.0))]
    whole = written(tmp_path, items, (EMBEDDING, norm)).read_bytes()
    head = len(header_bytes(items, (EMBEDDING, norm)))
    cut = tmp_path / "cut.gguf"
    for length in [*range(1, head + 1), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        wanted = ModelFileFault.NOT_GGUF if length < 4 else ModelFileFault.TRUNCATED
        assert refused(cut).kind is wanted


def test_truncated_weights_say_both_numbers(tmp_path: Path) -> None:
    """A download that stopped early is told with where the tensors and where the file end."""
    path = written(tmp_path, metadata())
    size = path.stat().st_size
    os.truncate(path, size - 100)
    error = refused(path)
    assert error.kind is ModelFileFault.TRUNCATED
    assert str(size) in error.detail
    assert str(size - 100) in error.detail


@pytest.mark.parametrize(
    ("n_tensors", "n_pairs"),
    [(2**63, 1), (MAX_TENSORS + 1, 0), (0, MAX_PAIRS + 1), (0, 2**64 - 1), (5000, 0), (0, 5000)],
)
def test_hostile_counts_are_refused_before_they_are_used(tmp_path: Path, n_tensors: int, n_pairs: int) -> None:
    """Counts that the file cannot hold are refused, whether over the limit or under it."""
    (tmp_path / "h").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_pairs) + b"\0" * 64)
    assert refused(tmp_path / "h").kind in {ModelFileFault.LIMIT, ModelFileFault.TRUNCATED}


def one_pair(folder: Path, key: bytes, rest: bytes, *, key_length: int | None = None) -> Path:
    """Write a file with a single pair, given as bytes."""
    length = len(key) if key_length is None else key_length
    path = folder / "pair.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", length) + key + rest)
    return path


@pytest.mark.parametrize(
    ("rest", "kind"),
    [
        (struct.pack("<I", 13), ModelFileFault.BAD_VALUE),
        (struct.pack("<IQ", 8, 2**62), ModelFileFault.LIMIT),
        (struct.pack("<IQ", 8, 1000), ModelFileFault.TRUNCATED),
        (struct.pack("<IIQ", 9, 8, 2**40), ModelFileFault.LIMIT),
        (struct.pack("<IIQ", 9, 4, MAX_ARRAY), ModelFileFault.TRUNCATED),
        (struct.pack("<IIQ", 9, 8, 1) + struct.pack("<Q", 2**62), ModelFileFault.LIMIT),
        (struct.pack("<IIQ", 9, 8, 1) + struct.pack("<Q", 2**20), ModelFileFault.TRUNCATED),
        (struct.pack("<IIQ", 9, 9, 1), ModelFileFault.BAD_VALUE),
        (struct.pack("<II", 9, 77), ModelFileFault.BAD_VALUE),
    ],
)
def test_hostile_values(tmp_path: Path, rest: bytes, kind: ModelFileFault) -> None:
    """Unknown types, nested arrays and lengths past the end each have their fault."""
    assert refused(one_pair(tmp_path, b"key", rest)).kind is kind


def test_hostile_key_length(tmp_path: Path) -> None:
    """A key longer than any is refused before it is read."""
    error = refused(one_pair(tmp_path, b"key", b"\0" * 8, key_length=2**61))
    assert error.kind is ModelFileFault.LIMIT


def test_a_key_twice(tmp_path: Path) -> None:
    """A key that comes twice is refused, as ggml does."""
    assert "twice" in refused(written(tmp_path, [*metadata(), *metadata()])).detail


@pytest.mark.parametrize(
    ("slot", "word"),
    [
        (TensorSlot("t", (0,), 0, 0), "sizes"),
        (TensorSlot("t", (2**32, 2**32), 0, 64), "sizes"),
        (TensorSlot("t", (1, 1, 1, 1, 1), 0, 4), "dimensions"),
        (TensorSlot("t", (33,), 8, 34), "blocks"),
    ],
)
def test_hostile_tensors(tmp_path: Path, slot: TensorSlot, word: str) -> None:
    """Sizes that overflow, vanish, or do not fill the type's blocks are refused."""
    error = refused(written(tmp_path, metadata(), (slot,)))
    assert error.kind is ModelFileFault.BAD_VALUE
    assert word in error.detail


def test_a_tensor_twice(tmp_path: Path) -> None:
    """A tensor that comes twice is refused, as ggml does."""
    assert "twice" in refused(written(tmp_path, metadata(), (EMBEDDING, EMBEDDING))).detail


def test_an_unknown_tensor_type_is_no_fault(tmp_path: Path) -> None:
    """A type newer than this table leaves the size unknown, the library may know it."""
    odd = TensorSlot("odd", (64,), 999, 64)
    assert read_header(written(tmp_path, metadata(), (odd,))).tensors[0].n_bytes is None


@pytest.mark.parametrize(
    "own",
    [
        {"block_count": None},
        {"block_count": 0},
        {"block_count": 2**32 - 1},
        {"block_count": "four"},
        {"embedding_length": None},
        {"embedding_length": 1.5},
        {"attention__head_count_kv": (1, 2)},
        {"attention__head_count": "many"},
    ],
)
def test_values_that_no_model_has(tmp_path: Path, own: dict[str, object]) -> None:
    """Missing, absurd and mistyped values are refused by their key."""
    assert refused(written(tmp_path, metadata(**own))).kind in {ModelFileFault.BAD_VALUE, ModelFileFault.LIMIT}


def test_no_architecture(tmp_path: Path) -> None:
    """A file that names no architecture is no language model."""
    error = refused(written(tmp_path, metadata()[1:]))
    assert "language model" in error.action


@pytest.mark.parametrize("alignment", [0, 3, 2**21])
def test_alignment_must_be_a_power_of_two(tmp_path: Path, alignment: int) -> None:
    """An alignment that cannot be is refused before anything is divided by it."""
    items = [*metadata(), MetaValue("general.alignment", U32, alignment)]
    assert refused(written(tmp_path, items)).kind is ModelFileFault.BAD_VALUE


# Models in several parts.


def parts(folder: Path, count: int, *, claimed: int | None = None) -> list[Path]:
    """Write a model of several parts with one tensor each."""
    names = []
    for part in range(count):
        split = [
            MetaValue("split.no", MetaKind.U16, part),
            MetaValue("split.count", MetaKind.U16, count),
            MetaValue("split.tensors.count", MetaKind.I32, count if claimed is None else claimed),
        ]
        items = [*metadata(), *split] if part == 0 else split
        slot = TensorSlot(f"blk.{part}.x", (64,), 0, 256)
        names.append(written(folder, items, (slot,), f"m-{part + 1:05}-of-{count:05}.gguf"))
    return names


def test_all_parts_are_read(tmp_path: Path) -> None:
    """The tensors of every part are the model's."""
    names = parts(tmp_path, 3)
    facts = read_facts(names[0])
    assert facts.files == tuple(names)
    assert facts.weight_bytes == 3 * 256
    assert facts.file_bytes == sum(name.stat().st_size for name in names)


def test_a_part_that_is_not_the_first_names_the_first(tmp_path: Path) -> None:
    """Given the second part, the error says which to name."""
    names = parts(tmp_path, 2)
    assert names[0].name in refused(names[1]).action


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    """When a part is gone, the error is about that part."""
    names = parts(tmp_path, 3)
    names[2].unlink()
    with pytest.raises(BadModelFile) as caught:
        read_facts(names[0])
    assert (caught.value.kind, caught.value.path) == (ModelFileFault.MISSING, names[2])


def test_parts_that_lost_their_names(tmp_path: Path) -> None:
    """A first part under another name cannot find the rest, and says so."""
    names = parts(tmp_path, 2)
    error = refused(names[0].rename(tmp_path / "renamed.gguf"))
    assert "00001-of-00002" in error.detail


def test_parts_that_lack_tensors(tmp_path: Path) -> None:
    """Parts that hold fewer tensors than claimed are refused with both numbers."""
    error = refused(parts(tmp_path, 2, claimed=9)[0])
    assert "2 tensors" in error.detail
    assert "9" in error.detail


@given(st.data())
def test_any_bytes_give_facts_or_the_one_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A sound header with bytes changed anywhere reads, or raises BadModelFile, and nothing else."""
    items = [*metadata(), MetaValue("tokenizer.ggml.tokens", STR, ("a", "bc")), MetaValue("k.f", F32, (1.0, 2.0))]
    body = bytearray(header_bytes(items, (EMBEDDING,)) + b"\0" * EMBEDDING.n_bytes)
    head = len(body) - EMBEDDING.n_bytes
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, head - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "fuzzed.gguf"
    path.write_bytes(body)
    with contextlib.suppress(BadModelFile):
        assert 0 < read_facts(path).n_layer <= MAX_LAYERS
