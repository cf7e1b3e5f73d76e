"""The stub library itself, before anything is tested with it: its model, its state bytes, its faults, its log."""

from __future__ import annotations

import ctypes
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import cffi
import pytest

from tests.stublib import FaultFile, Stub, Variant, build, needs_compiler, run_child, write_model

pytestmark = [pytest.mark.stub, needs_compiler]

# The tests declare the 2026.10 layout by hand: the stub must agree with it, not with our own profiles.
_CDEF = """
typedef struct { void **devices; void *overrides; int32_t n_gpu_layers, split_mode, load_mode, lazy_mode, main_gpu;
    const float *tensor_split; void *progress_callback, *progress_data, *kv_overrides; bool flags[6]; } model_params;
typedef struct { uint32_t n_ctx, n_batch, n_ubatch, n_seq_max, n_rs_seq, n_outputs_max, n_outputs_max_per_seq;
    int32_t n_threads, n_threads_batch, ctx_type, rope_scaling_type, pooling_type, attention_type, flash_attn_type;
    float rope[6]; uint32_t yarn_orig_ctx; float defrag_thold; void *cb_eval, *cb_eval_data; int32_t type_k, type_v;
    size_t moe_cache_size; void *abort_callback, *abort_data;
    bool embeddings, offload_kqv, no_perf, op_offload, swa_full, kv_unified; void *samplers; size_t n_samplers;
    void *ctx_other; } context_params;
typedef struct { int32_t n_tokens; int32_t *token; float *embd; int32_t *pos, *n_seq_id; int32_t **seq_id;
    int8_t *logits; } batch;
typedef struct { int32_t id; float logit, p; } token_data;
typedef struct { token_data *data; size_t size; int64_t selected; bool sorted; } token_data_array;
model_params llama_model_default_params(void);
context_params llama_context_default_params(void);
void *llama_model_load_from_file(const char *path, model_params params);
void llama_model_free(void *model);
void *llama_init_from_model(void *model, context_params params);
void llama_free(void *context);
void llama_synchronize(void *context);
int32_t llama_decode(void *context, batch b);
float *llama_get_logits_ith(void *context, int32_t i);
size_t llama_state_get_size(void *context);
size_t llama_state_get_data(void *context, uint8_t *out, size_t n);
size_t llama_state_set_data(void *context, const uint8_t *bytes, size_t n);
size_t llama_state_seq_get_size(void *context, int32_t seq);
size_t llama_state_seq_get_data(void *context, uint8_t *out, size_t n, int32_t seq);
size_t llama_state_seq_set_data(void *context, const uint8_t *bytes, size_t n, int32_t seq);
void *llama_get_memory(void *context);
bool llama_memory_seq_rm(void *memory, int32_t seq, int32_t p0, int32_t p1);
void llama_memory_seq_cp(void *memory, int32_t from, int32_t to, int32_t p0, int32_t p1);
void llama_memory_seq_add(void *memory, int32_t seq, int32_t p0, int32_t p1, int32_t delta);
int32_t llama_memory_seq_pos_max(void *memory, int32_t seq);
void *ggml_backend_dev_by_name(const char *name);
void ggml_backend_dev_memory(void *device, size_t *free, size_t *total);
int32_t llama_tokenize(void *vocab, const char *text, int32_t n, int32_t *out, int32_t room, bool special, bool parse);
bool llama_context_set_split_mode(void *context, int mode, const float *tensor_split);
int llama_model_get_split_mode(void *model);
typedef struct { bool no_perf; } chain_params;
void *llama_sampler_chain_init(chain_params p);
void llama_sampler_chain_add(void *chain, void *part);
void *llama_sampler_init_dist(uint32_t seed);
void *llama_sampler_init_top_k(int32_t k);
void *llama_sampler_init_top_p(float p, size_t keep);
void *llama_sampler_init_temp(float t);
void *llama_sampler_init_penalties(int32_t n_vocab, int32_t last_n, float repeat, float freq, float present);
void llama_sampler_accept(void *s, int32_t token);
void llama_sampler_apply(void *s, token_data_array *c);
void llama_sampler_reset(void *s);
void llama_sampler_free(void *s);
"""
_LAYER, _TENSOR = 1, 3
N_VOCAB = 260


class Raw:
    """The stub through bare calls, with the layout of 2026.10 written down here."""

    def __init__(self, path: str, model: str) -> None:
        self.stub = Stub(path)
        self.ffi = cffi.FFI()
        self.ffi.cdef(_CDEF)
        self.lib: Any = self.ffi.dlopen(path)
        self.path = model.encode()

    def load(self, mode: int = _LAYER, devices: tuple[str, ...] = (), **fields: Any) -> Any:
        """The model, or NULL."""
        params = self.lib.llama_model_default_params()
        params.split_mode = mode
        handles = self.ffi.new(
            "void *[]", [self.lib.ggml_backend_dev_by_name(d.encode()) for d in devices] + [self.ffi.NULL]
        )
        if devices:
            params.devices = handles
        for name, value in fields.items():
            setattr(params, name, value)
        return self.lib.llama_model_load_from_file(self.path, params)

    def context(self, model: Any, **fields: Any) -> Any:
        """The context, or NULL."""
        params = self.lib.llama_context_default_params()
        for name, value in fields.items():
            setattr(params, name, value)
        return self.lib.llama_init_from_model(model, params)

    def decode(self, context: Any, tokens: list[int], start: int, seq: int = 0) -> int:
        """The return code of one batch, whose last token has an output."""
        ffi, n = self.ffi, len(tokens)
        ids = ffi.new("int32_t[1]", [seq])
        arrays = [
            ffi.new("int32_t[]", tokens),
            ffi.new("int32_t[]", list(range(start, start + n))),
            ffi.new("int32_t[]", [1] * n),
        ]
        seqs = ffi.new("int32_t *[]", [ids] * n)
        flags = ffi.new("int8_t[]", [0] * (n - 1) + [1])
        batch = ffi.new("batch *", [n, arrays[0], ffi.NULL, arrays[1], arrays[2], seqs, flags])
        return int(self.lib.llama_decode(context, batch[0]))

    def logits(self, context: Any) -> list[float]:
        """The logits of the last output."""
        return [float(x) for x in self.ffi.unpack(self.lib.llama_get_logits_ith(context, -1), N_VOCAB)]

    def state(self, context: Any) -> bytes:
        """The whole context's state."""
        self.lib.llama_synchronize(context)
        n = self.lib.llama_state_get_size(context)
        out = self.ffi.new("uint8_t[]", n)
        assert self.lib.llama_state_get_data(context, out, n) == n
        return bytes(self.ffi.buffer(out))


@pytest.fixture(scope="module")
def library() -> Path:
    return build()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny.gguf")


def test_variants_compile() -> None:
    """Every variant compiles without a warning and has a file of its own."""
    assert len({build(variant) for variant in Variant}) == len(Variant)


def child_defaults(path: str) -> dict[str, list[int]]:
    lib = ctypes.CDLL(path)
    seen = {}
    for name in ("llama_model_default_params", "llama_context_default_params"):
        function = getattr(lib, name)
        function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_void_p
        fills = [ctypes.create_string_buffer(bytes([fill]) * 512, 512) for fill in (0xA5, 0x5A)]
        for fill in fills:
            function(fill)
        seen[name] = [i for i in range(512) if fills[0].raw[i] == fills[1].raw[i]]
    return seen


@pytest.mark.parametrize(
    ("variant", "model_end", "context_end", "holes"),
    [
        (Variant.STOCK, 78, 168, [142, 143]),
        (Variant.EPOCH_2609, 78, 160, [134, 135]),
        (Variant.EPOCH_2608, 70, 160, [134, 135]),
        (Variant.EPOCH_2606, 72, 160, [84, 85, 86, 87, 134, 135]),
        (Variant.EXTRA_U32, 78, 168, [92, 93, 94, 95, 142, 143]),
        (Variant.SHORT_CONTEXT, 78, 152, [142, 143]),
    ],
)
def test_defaults_write_the_bytes_of_the_epoch(
    variant: Variant, model_end: int, context_end: int, holes: list[int]
) -> None:
    """The defaults write exactly the bytes that the real release of that epoch writes, padding left alone."""
    seen = run_child(child_defaults, build(variant)).value()
    assert max(seen["llama_model_default_params"]) + 1 == model_end
    written = seen["llama_context_default_params"]
    assert max(written) + 1 == context_end
    assert sorted(set(range(context_end)) - set(written)) == holes


def child_round_trip(path: str, model_path: str) -> dict[str, Any]:
    raw = Raw(path, model_path)
    prompt = list(b"the quick brown fox")
    first = raw.load(_LAYER)
    context = raw.context(first, n_ctx=256)
    assert raw.decode(context, prompt, 0) == 0
    before, blob = raw.logits(context), raw.state(context)
    assert raw.decode(context, [65], len(prompt)) == 0
    after = raw.logits(context)
    raw.lib.llama_free(context)
    raw.lib.llama_model_free(first)
    second = raw.load(_TENSOR)
    context = raw.context(second, n_ctx=512)
    assert raw.lib.llama_state_set_data(context, blob, len(blob)) == len(blob)
    again = raw.state(context)
    assert raw.decode(context, [65], len(prompt)) == 0
    result = {
        "same_bytes": again == blob,
        "same_logits": raw.logits(context) == after,
        "differ": before != after,
        "size": len(blob),
        "head": blob[:21].hex(),
        "mistakes": raw.stub.mistakes(),
    }
    raw.lib.llama_free(context)
    raw.lib.llama_model_free(second)
    return result | {"live": raw.stub.live()}


def test_state_travels_between_modes(library: Path, model: Path) -> None:
    """State taken in one mode and set in another gives the same bytes and the same next logits."""
    seen = run_child(child_round_trip, library, model).value()
    assert seen["same_bytes"]
    assert seen["same_logits"]
    assert seen["differ"]
    assert seen["mistakes"] == []
    assert set(seen["live"].values()) == {0}
    # u32 length and name, n_stream 1, 19 cells, then pos 0 in the sequences {0}
    assert seen["head"] == (struct.pack("<I", 5) + b"llama" + struct.pack("<III", 1, 19, 0)).hex()
    # 9 + 4 + 4 + cells*12 + v_trans, n_layer, 2 x rot + 2 layers x (K and V: 12 + 19 x 32 x 2)
    assert seen["size"] == 9 + 8 + 19 * 12 + 16 + 2 * 2 * (12 + 19 * 64)


def child_refusals(path: str, model_path: str) -> dict[str, Any]:
    raw = Raw(path, model_path)
    model = raw.load()
    context = raw.context(model, n_ctx=256)
    raw.decode(context, list(b"abc"), 0)
    blob = raw.state(context)
    wrong = {
        "cut": blob[:-1],
        "arch": blob.replace(b"llama", b"gemma"),
        "streams": blob[:9] + struct.pack("<I", 2) + blob[13:],
        "cells": blob[:13] + struct.pack("<I", 0xFFFFFFFF) + blob[17:],
        "type": blob.replace(struct.pack("<iQ", 1, 64), struct.pack("<iQ", 8, 64), 1),
        "v_trans": blob[:53] + struct.pack("<I", 1) + blob[57:],
    }
    refused = {}
    for name, data in wrong.items():
        fresh = raw.context(model, n_ctx=256)
        refused[name] = int(raw.lib.llama_state_set_data(fresh, data, len(data)))
        raw.lib.llama_free(fresh)
    longer = raw.context(model, n_ctx=256, n_seq_max=2)
    refused["other streams"] = int(raw.lib.llama_state_set_data(longer, blob, len(blob)))
    return refused | {"left": blob[53:57].hex()}


def test_restore_checks_like_the_library(library: Path, model: Path) -> None:
    """A blob that is cut, foreign or shaped for another context is refused by returning 0."""
    seen = run_child(child_refusals, library, model).value()
    assert seen.pop("left") == "00000000"
    assert set(seen.values()) == {0}


def child_sequences(path: str, model_path: str) -> dict[str, Any]:
    raw = Raw(path, model_path)
    model = raw.load()
    seen: dict[str, Any] = {}
    for unified in (False, True):
        context = raw.context(model, n_ctx=1024, n_seq_max=4, kv_unified=unified)
        memory = raw.lib.llama_get_memory(context)
        raw.decode(context, list(b"hello"), 0, seq=2)
        raw.lib.llama_memory_seq_cp(memory, 2, 1, -1, -1)
        raw.decode(context, list(b"X"), 5, seq=1)
        one = raw.logits(context)
        raw.decode(context, list(b"X"), 5, seq=2)
        n = raw.lib.llama_state_seq_get_size(context, 1)
        out = raw.ffi.new("uint8_t[]", n)
        raw.lib.llama_synchronize(context)
        got = raw.lib.llama_state_seq_get_data(context, out, n, 1)
        set_back = raw.lib.llama_state_seq_set_data(context, out, n, 3)
        other = raw.context(model, n_ctx=1024, n_seq_max=4, kv_unified=unified)
        blob = raw.state(context)
        seen[str(unified)] = {
            "copy_is_equal": one == raw.logits(context),
            "seq": [got == n, set_back == n],
            "pos": [int(raw.lib.llama_memory_seq_pos_max(memory, s)) for s in range(4)],
            "all": int(raw.lib.llama_state_set_data(other, blob, len(blob))) == len(blob),
            "again": raw.state(other) == blob,
            "cut": bool(raw.lib.llama_memory_seq_rm(memory, 1, 3, -1)),
            "after_cut": int(raw.lib.llama_memory_seq_pos_max(memory, 1)),
            "bad_pos": raw.decode(context, [1], 9, seq=1),
        }
        raw.stub.faults("seq_rm:false")
        seen[str(unified)]["refused"] = bool(raw.lib.llama_memory_seq_rm(memory, 1, 1, -1))
        raw.stub.faults("clear")
    return seen


def test_sequences_with_streams_and_without(library: Path, model: Path) -> None:
    """Copies, cuts, sequence blobs and whole blobs work for one stream a sequence and for a unified cache."""
    seen = run_child(child_sequences, library, model).value()
    for unified in ("False", "True"):
        assert seen[unified] == {
            "copy_is_equal": True,
            "seq": [True, True],
            "pos": [-1, 5, 5, 5],
            "all": True,
            "again": True,
            "cut": True,
            "after_cut": 2,
            "bad_pos": -1,
            "refused": False,
        }


def child_types(path: str, model_path: str) -> list[bool]:
    raw = Raw(path, model_path)
    model = raw.load()
    same = []
    for type_k, type_v, flash in ((0, 0, 1), (1, 1, 0), (30, 0, 0), (8, 8, 1), (8, 1, 0)):
        contexts = [raw.context(model, type_k=type_k, type_v=type_v, flash_attn_type=flash) for _ in range(2)]
        raw.decode(contexts[0], list(b"\x00\xff~types"), 0)
        blob = raw.state(contexts[0])
        n = raw.lib.llama_state_set_data(contexts[1], blob, len(blob))
        results = [raw.decode(c, [7], 8) for c in contexts]
        same.append(n == len(blob) and results == [0, 0] and raw.logits(contexts[0]) == raw.logits(contexts[1]))
    return same


def test_tokens_are_read_back_from_rows_of_every_type(library: Path, model: Path) -> None:
    """f32, f16, bf16 and q8_0 rows, V transposed or not, carry the tokens through a state blob."""
    assert run_child(child_types, library, model).value() == [True] * 5


def child_faults(path: str, model_path: str) -> dict[str, Any]:
    raw = Raw(path, model_path)
    stub, null = raw.stub, raw.ffi.NULL
    seen: dict[str, Any] = {}
    stub.faults("load:null@2; init:null:tensor; decode:fail@2; decode:nan@3; decode:const:tensor")
    models = [raw.load(_LAYER), raw.load(_LAYER), raw.load(_TENSOR)]
    seen["loads"] = [m != null for m in models]
    seen["init"] = [raw.context(m) != null for m in models if m != null]
    context = raw.context(models[0])
    seen["decode"] = [raw.decode(context, [65], 0), raw.decode(context, [66], 1), raw.decode(context, [66], 1)]
    seen["nan"] = math.isnan(raw.logits(context)[0])
    stub.faults("clear")
    in_tensor = raw.context(models[2])
    stub.faults("decode:const:tensor")
    raw.decode(in_tensor, [65], 0)
    seen["const"] = set(raw.logits(in_tensor))
    raw.decode(context, [67], 2)
    seen["not_const"] = len(set(raw.logits(context))) > 1
    raw.lib.llama_synchronize(context)
    blob = raw.state(context)
    stub.faults(
        "clear get_data:short@1 get_data:zero@2 get_data:damage@3 get_data:flip@4 set_data:zero@1 set_data:lie@2"
    )
    out = raw.ffi.new("uint8_t[]", len(blob))
    seen["get"] = []
    for _ in range(4):
        n = raw.lib.llama_state_get_data(context, out, len(blob))
        seen["get"].append([n - len(blob), [i for i in range(len(blob)) if out[i] != blob[i]]])
    seen["set"] = [int(raw.lib.llama_state_set_data(context, blob, len(blob))) for _ in range(2)]
    seen["pos"] = int(raw.lib.llama_memory_seq_pos_max(raw.lib.llama_get_memory(context), 0))
    seen["size"] = len(blob)
    seen["log"] = [c.arguments for c in stub.calls() if c.name == "fault"][:3]
    for bad in ("load", "load:null@0", "load:null:sideways"):
        with pytest.raises(ValueError, match="does not understand"):
            stub.faults(bad)
    return seen | {"set_of": list(seen.pop("const"))}


def test_faults_come_when_they_were_asked_for(library: Path, model: Path) -> None:
    """A fault names its call, its turn and its mode, and nothing else is touched."""
    seen = run_child(child_faults, library, model).value()
    assert seen["loads"] == [True, False, True]
    assert seen["init"] == [True, False]
    assert seen["decode"] == [0, -3, 0]
    assert seen["nan"]
    assert seen["set_of"] == [1.0]
    assert seen["not_const"]
    size = seen["size"]
    assert seen["get"] == [[-1, []], [-size, []], [0, [13]], [0, [size - 1]]]
    assert seen["set"] == [0, size]
    assert seen["pos"] == 3
    assert seen["log"][0] == {"call": "load", "action": "null"}


def child_dies(path: str, model_path: str) -> None:
    raw = Raw(path, model_path)
    raw.load(_LAYER)
    raw.load(_TENSOR)


@pytest.mark.parametrize(
    ("faults", "signal", "words"),
    [
        ("load:abort:tensor", "SIGABRT", "GGML_ASSERT(stub_was_asked_to_abort) failed"),
        ("load:segv:tensor", "SIGSEGV", ""),
        ("load:kill@2", "SIGKILL", ""),
        (
            "budget:STUB0=3000 budget:STUB1=3000 model:weights=8000",
            "SIGABRT",
            "GGML_ASSERT(meta_buf_ctx->bufs[i]) failed",
        ),
    ],
)
def test_deaths_leave_their_words_and_the_log(
    library: Path, model: Path, tmp_path: Path, faults: str, signal: str, words: str
) -> None:
    """A child that aborts, faults or is killed leaves its assert on stderr and its calls in the file of STUB_CALLS."""
    calls = tmp_path / "calls"
    ended = run_child(child_dies, library, model, STUB_FAULTS=faults, STUB_CALLS=str(calls))
    assert ended.signal == signal
    assert words in ended.stderr
    assert "split_mode=3" in calls.read_text().splitlines()[-2 if "budget" not in faults else -1]


def child_budget(path: str, model_path: str) -> dict[str, Any]:
    raw = Raw(path, model_path)
    raw.stub.faults("budget:STUB0=3000 budget:STUB1=70000 model:weights=4000")
    free, total = raw.ffi.new("size_t *"), raw.ffi.new("size_t *")
    device = raw.lib.ggml_backend_dev_by_name(b"STUB1")
    split = raw.ffi.new("float[16]", [0.25, 0.75])
    even = raw.load(_LAYER)
    contexts = [raw.context(even, n_ctx=256) != raw.ffi.NULL]
    raw.lib.ggml_backend_dev_memory(device, free, total)
    seen = {"free": int(free[0]), "total": int(total[0])}
    raw.lib.llama_model_free(even)
    raw.stub.faults("model:weights=8000")
    seen["too_big"] = raw.load(_LAYER) == raw.ffi.NULL
    seen["uneven_fits"] = raw.load(_LAYER, tensor_split=split) != raw.ffi.NULL
    return seen | {"contexts": contexts, "used": [c.arguments.get("tensor_split") for c in raw.stub.calls()][-1]}


def test_budgets_are_shared_by_tensor_split(library: Path, model: Path) -> None:
    """A load over a device's budget returns NULL in layer mode; another tensor_split makes it fit."""
    seen = run_child(child_budget, library, model).value()
    # 256 cells x 2 layers x (64 + 64) bytes over two devices do not fit beside 2000 bytes of weights on STUB0
    assert seen == {
        "free": 68000,
        "total": 70000,
        "too_big": True,
        "uneven_fits": True,
        "contexts": [False],
        "used": "0.25,0.75",
    }


def child_native(path: str, model_path: str) -> dict[str, Any]:
    raw = Raw(path, model_path)
    model = raw.load(_LAYER)
    context = raw.context(model)
    raw.decode(context, list(b"abc"), 0)
    before, logits = raw.state(context), raw.logits(context)
    old_memory = raw.lib.llama_get_memory(context)
    raw.stub.faults("native:fail@1")
    seen = {"failed": bool(raw.lib.llama_context_set_split_mode(context, _TENSOR, raw.ffi.NULL))}
    seen["kept"] = raw.lib.llama_model_get_split_mode(model) == _LAYER and raw.state(context) == before
    seen["done"] = bool(raw.lib.llama_context_set_split_mode(context, _TENSOR, raw.ffi.NULL))
    seen["moved"] = raw.lib.llama_model_get_split_mode(model) == _TENSOR and raw.state(context) == before
    seen["logits"] = raw.logits(context) == logits
    raw.stub.reset()
    raw.lib.llama_memory_seq_pos_max(old_memory, 0)
    raw.lib.llama_model_free(model)
    raw.lib.llama_free(context)
    raw.lib.llama_free(context)
    return seen | {"mistakes": raw.stub.mistakes()}


def test_native_switch_and_mistakes(model: Path) -> None:
    """The library's own call keeps context, state and logits; stale handles, wrong order and double frees are noted."""
    seen = run_child(child_native, build(Variant.NATIVE_SPLIT), model).value()
    assert seen.pop("mistakes") == [
        "pos_max on a stale memory handle",
        "llama_model_free with 1 contexts alive",
        "llama_free of a context whose model is gone: on a freed handle",
        "llama_free on a freed handle",
    ]
    assert seen == {"failed": False, "kept": True, "done": True, "moved": True, "logits": True}


def child_samplers(path: str, model_path: str) -> dict[str, Any]:
    raw = Raw(path, model_path)
    ffi, lib = raw.ffi, raw.lib

    def array(logits: list[float]) -> tuple[Any, Any]:
        data = ffi.new("token_data[]", [[i, logit, 0.0] for i, logit in enumerate(logits)])
        return ffi.new("token_data_array *", [data, len(logits), -1, False]), data

    def draw(sampler: Any, logits: list[float]) -> int:
        candidates, _data = array(logits)
        lib.llama_sampler_apply(sampler, candidates)
        return int(candidates.data[candidates.selected].id)

    chain = lib.llama_sampler_chain_init([True])
    for part in (
        lib.llama_sampler_init_penalties(N_VOCAB, 2, 4.0, 0.0, 0.0),
        lib.llama_sampler_init_top_k(3),
        lib.llama_sampler_init_top_p(0.999, 1),
        lib.llama_sampler_init_temp(0.5),
        lib.llama_sampler_init_dist(7),
    ):
        lib.llama_sampler_chain_add(chain, part)
    flat = [1.0] * 8
    raw.stub.reset()
    first = [draw(chain, flat) for _ in range(12)]
    lib.llama_sampler_reset(chain)
    again = [draw(chain, flat) for _ in range(12)]
    lib.llama_sampler_accept(chain, 0)
    penalised, _data = array([5.0, 4.0, 0.0])
    lib.llama_sampler_apply(chain, penalised)
    seen: dict[str, Any] = {
        "repeats": first == again,
        "within": max(first) < 3,
        "varies": len(set(first)) > 1,
        "draws": raw.stub.count("draws"),
    }
    seen["order"] = [int(penalised.data[i].id) for i in range(penalised.size)]
    lib.llama_sampler_free(chain)
    return seen | {"live": raw.stub.live()["samplers"]}


def test_samplers_repeat_and_are_counted(library: Path, model: Path) -> None:
    """A seeded chain repeats after a reset, penalties look back, every draw is counted and nothing leaks."""
    seen = run_child(child_samplers, library, model).value()
    assert seen == {"repeats": True, "within": True, "varies": True, "draws": 25, "order": [1, 0, 2], "live": 0}


def child_tokens(path: str, model_path: str) -> list[list[int]]:
    raw = Raw(path, model_path)
    out = raw.ffi.new("int32_t[64]")
    made: list[list[int]] = []
    for text, special, parse in (
        (b"hi", True, False),
        (b"a<eos>", False, True),
        (b"a<eos>", False, False),
        (b"", False, False),
    ):
        n = raw.lib.llama_tokenize(raw.ffi.NULL, text, len(text), out, 64, special, parse)
        made.append([int(t) for t in raw.ffi.unpack(out, n)] if n else [])
    made.append([int(raw.lib.llama_tokenize(raw.ffi.NULL, b"abcd", 4, out, 2, True, False))])
    return made


def test_tokens_are_bytes(library: Path, model: Path) -> None:
    """Tokens are bytes, special tokens are parsed on request, and too little room says how much is wanted."""
    assert run_child(child_tokens, library, model).value() == [[256, 104, 105], [97, 257], [97, *b"<eos>"], [], [-5]]


def child_armed(path: str, model_path: str, file: str, turns: int) -> dict[str, Any]:
    raw = Raw(path, model_path)
    armed = FaultFile(Path(file))
    seen: list[bool] = []
    for turn in range(turns):
        if turn == 1:
            armed.arm("load:null@2 init:null:tensor")
        if turn == turns - 1:
            armed.clear()
        model = raw.load(_LAYER)
        seen.append(bool(model))
        if model:
            raw.lib.llama_model_free(model)
    return {"loads": seen, "fired": armed.fired()}


def child_dies_once(path: str, model_path: str) -> list[bool]:
    raw = Raw(path, model_path)
    return [bool(raw.load(_LAYER)) for _ in range(2)]


def test_faults_come_from_a_file_at_any_time(library: Path, model: Path, tmp_path: Path) -> None:
    """A file of faults is read when it appears, its turns count from there, and it can be taken away again."""
    file = tmp_path / "faults"
    seen = run_child(child_armed, library, model, file, 6, STUB_FAULTS_FILE=str(file)).value()
    assert seen == {"loads": [True, True, False, True, True, True], "fired": []}


def test_a_fault_of_a_file_fires_in_one_process(library: Path, model: Path, tmp_path: Path) -> None:
    """With a turn it is for the first process that gets there, without one for all; what fired can be seen."""
    armed = FaultFile(tmp_path / "faults")
    armed.arm("load:abort@2 get_data:zero")
    ends = [run_child(child_dies_once, library, model, STUB_FAULTS_FILE=str(armed.path)).signal for _ in range(2)]
    assert ends == ["SIGABRT", None]
    assert armed.fired() == ["load:abort@2"]
    armed.arm("load:abort")
    ends = [run_child(child_dies_once, library, model, STUB_FAULTS_FILE=str(armed.path)).signal for _ in range(2)]
    assert ends == ["SIGABRT", "SIGABRT"]


def child_saves_and_dies(path: str, model_path: str, out: str) -> None:
    raw = Raw(path, model_path)
    context = raw.context(raw.load(_LAYER))
    raw.decode(context, list(b"abc"), 0)
    raw.lib.llama_synchronize(context)
    n = raw.lib.llama_state_get_size(context)
    with Path(out).open("wb+") as file:
        file.truncate(n)
        with mmap.mmap(file.fileno(), n) as room:
            raw.lib.llama_state_get_data(context, raw.ffi.from_buffer("uint8_t[]", room), n)


def test_a_death_in_a_save_leaves_its_bytes(library: Path, model: Path, tmp_path: Path) -> None:
    """What dies in a save has overwritten the buffer: bytes of before are gone, as with a real library."""
    out = tmp_path / "state"
    assert run_child(child_saves_and_dies, library, model, out, STUB_FAULTS="get_data:kill").signal == "SIGKILL"
    assert b"llama" in out.read_bytes()
