"""The rules: which placements are refused or warned of, with numbers and a way out, and what a try can settle."""

from __future__ import annotations

import dataclasses

import pytest

from splitctl.model.facts import ModelFacts, Recurrence
from splitctl.model.header import TensorInfo
from splitctl.placement import FlashAttn, Placement, SplitMode
from splitctl.probing.verdicts import ProbeVerdict, Verdict
from splitctl.switching import tables
from splitctl.switching.rules import BuildFacts, Diagnostic, HostFacts, SessionFacts, check, refused, worth_a_try
from tests.ctl.model_facts import model_facts

TWO = ("CPU", "CPU")
MEASURED = BuildFacts("xllamacpp 2026.10.11549")
OLD = BuildFacts("xllamacpp 2026.6.9713")
NEWER = BuildFacts("xllamacpp 2027.1.13000")
HOST = HostFacts({"CPU": "cpu"}, mem_available=2**34)
EMPTY = SessionFacts({})
LAYER = Placement(mode=SplitMode.LAYER, devices=TWO, flash_attn=FlashAttn.ON, n_ctx=256)
TENSOR = dataclasses.replace(LAYER, mode=SplitMode.TENSOR)
OK = ProbeVerdict(Verdict.OK)
DIES = ProbeVerdict(Verdict.DIES, "GGML_ASSERT(src_ss[0].axis)")


def diagnostics(
    facts: ModelFacts,
    target: Placement = TENSOR,
    *,
    current: Placement | None = LAYER,
    build: BuildFacts = MEASURED,
    host: HostFacts = HOST,
    session: SessionFacts = EMPTY,
    probe: ProbeVerdict | None = None,
) -> tuple[Diagnostic, ...]:
    """Ask the rules."""
    return check(current, target, facts, build, host, session, probe)


def blocking(*args: object, **named: object) -> list[str]:
    """Ask the rules for the codes of what blocks."""
    return [one.code for one in diagnostics(*args, **named) if one.blocking]  # type: ignore[arg-type]


def test_a_plain_model_may_go_to_tensor_mode() -> None:
    """Two KV heads on two devices with an f16 cache: nothing to say."""
    assert diagnostics(model_facts()) == ()


@pytest.mark.parametrize("n_devices", [1, 2])
def test_adapters_keep_a_session_out_of_tensor_mode(n_devices: int) -> None:
    """The library would abort, on one device too; a try loads no adapter and lifts nothing."""
    target = dataclasses.replace(TENSOR, devices=TWO[:n_devices])
    session = SessionFacts({}, n_adapters=1)
    assert blocking(model_facts(), target, session=session, probe=OK) == ["adapters-in-tensor-mode"]
    assert blocking(model_facts(), LAYER, session=session) == []


@pytest.mark.parametrize(
    ("build", "streams", "n_held", "named", "blocks"),
    [
        (OLD, 4, 2, {}, True),
        (BuildFacts("xllamacpp 2026.8.10566"), 2, 2, {}, True),
        (BuildFacts("xllamacpp 2026.9.11063"), 4, 2, {}, False),
        (BuildFacts("llama-cpp-python 0.3.36"), 4, 2, {}, False),
        (BuildFacts("of an unknown time"), 4, 2, {}, False),
        (OLD, 4, 1, {}, False),
        (OLD, 1, 2, {}, False),
        (OLD, 4, 2, {"architecture": "mamba"}, False),
    ],
)
def test_builds_that_restore_one_stream_alone_are_not_asked_to_restore_more(
    build: BuildFacts, streams: int, n_held: int, named: dict[str, object], blocks: bool
) -> None:
    """Two sequences in streams of their own are refused before anything is freed; no try lifts it."""
    layout = dataclasses.replace(LAYER, n_seq_max=4, kv_unified=streams == 1, n_ctx=1024)
    target = dataclasses.replace(layout, tensor_split=(3.0, 1.0))
    session = SessionFacts(dict.fromkeys(range(n_held), 5))
    found = blocking(model_facts(**named), target, current=layout, build=build, session=session, probe=OK)  # type: ignore[arg-type]
    assert found == (["streams-lost-on-restore"] if blocks else [])


@pytest.mark.parametrize("mode", [SplitMode.NONE, SplitMode.LAYER])
@pytest.mark.parametrize("architecture", ["mamba", "t5", "bloom", "rwkv7", "deepseek2"])
def test_tables_of_tensor_mode_say_nothing_about_other_modes(mode: SplitMode, architecture: str) -> None:
    """What tensor mode cannot do, the other modes may."""
    facts = model_facts(architecture=architecture, max_alibi_bias=8.0, has_k_norm=True, n_head_kv=(1,))
    assert diagnostics(facts, dataclasses.replace(LAYER, mode=mode)) == ()


@pytest.mark.parametrize("architecture", ["glm-dsa", "mamba", "t5", "rwkv6", "t5encoder", "chameleon", "jina-bert-v2"])
def test_architectures_that_a_build_cannot_split_are_refused(architecture: str) -> None:
    """The header's architecture is enough to refuse, before anything is freed (P4)."""
    found = diagnostics(model_facts(architecture=architecture))
    assert [one.code for one in found if one.blocking] == ["architecture-in-tensor-mode"]
    assert architecture in found[0].text
    assert "layer mode" in found[0].text


@pytest.mark.parametrize(
    ("build", "blocked"),
    [
        (MEASURED, False),
        (NEWER, False),
        (OLD, True),
        (BuildFacts("llama-cpp-python 0.3.36"), True),
        (BuildFacts("libllama.so"), True),
    ],
)
def test_rows_end_with_the_build_that_mended_them(build: BuildFacts, blocked: bool) -> None:
    """An architecture that newer builds run is refused on older ones and where the number is not known."""
    assert blocking(model_facts(architecture="qwen4exp"), build=build) == ["architecture-in-tensor-mode"] * blocked


@pytest.mark.parametrize(
    ("target", "blocked"),
    [
        (TENSOR, True),
        (dataclasses.replace(TENSOR, devices=("CPU",)), False),
        (dataclasses.replace(TENSOR, tensor_split=(1.0, 0.0)), False),
        (dataclasses.replace(TENSOR, tensor_split=(1.0, 0.1)), True),
        (LAYER, False),
    ],
)
def test_alibi_on_several_devices_is_refused_whatever_a_try_says(target: Placement, blocked: bool) -> None:
    """ALiBi is silently wrong on two devices that both get a share; one device is right."""
    facts = model_facts(architecture="bloom", max_alibi_bias=8.0)
    for probe in (None, OK):
        assert blocking(facts, target, probe=probe) == ["alibi-in-tensor-mode"] * blocked
    assert worth_a_try(diagnostics(facts, target)) is not blocked


def test_k_norm_with_one_kv_head() -> None:
    """A K-norm and one KV head abort at the first single token; each alone does not block."""
    assert blocking(model_facts(has_k_norm=True, n_head_kv=(1,))) == ["k-norm-with-one-kv-head"]
    assert blocking(model_facts(has_k_norm=True, n_head_kv=(2,))) == []
    assert blocking(model_facts(n_head_kv=(1,))) == []


def test_layers_without_attention_do_not_count_as_the_fewest_heads() -> None:
    """A hybrid's layers of 0 heads are left out (P5)."""
    assert blocking(model_facts(has_k_norm=True, n_head_kv=(2, 0, 2, 0))) == []
    assert blocking(model_facts(has_k_norm=True, n_head_kv=(1, 0, 2, 0))) == ["k-norm-with-one-kv-head"]


@pytest.mark.parametrize(
    ("heads", "n_devices", "code", "blocked"),
    [
        (1, 2, "more-devices-than-kv-heads", True),
        (2, 2, None, False),
        (2, 3, "more-devices-than-kv-heads", True),
        (4, 4, None, False),
        (8, 3, "uneven-kv-heads", False),
    ],
)
def test_more_devices_than_kv_heads(heads: int, n_devices: int, code: str | None, blocked: bool) -> None:
    """On a build that nobody measured, more devices than KV heads block until a try, and an odd share warns (P5)."""
    target = dataclasses.replace(TENSOR, devices=("CPU",) * n_devices)
    found = diagnostics(model_facts(n_head_kv=(heads,)), target, build=NEWER)
    assert [one.code for one in found] == ([code] if code else [])
    assert any(one.blocking for one in found) is blocked
    assert blocking(model_facts(n_head_kv=(heads,)), target, build=NEWER, probe=OK) == []
    assert blocking(model_facts(n_head_kv=(heads,)), target) == []


def test_flash_attention_off() -> None:
    """Tensor mode without flash attention is refused up front (P7); unnamed, it keeps what the session has."""
    off = dataclasses.replace(LAYER, flash_attn=FlashAttn.OFF)
    auto = dataclasses.replace(TENSOR, flash_attn=FlashAttn.AUTO)
    assert "flash-attention-off" in blocking(model_facts(), dataclasses.replace(TENSOR, flash_attn=FlashAttn.OFF))
    assert blocking(model_facts(), auto, current=off) == ["flash-attention-off"]
    assert blocking(model_facts(), auto) == []
    assert blocking(model_facts(), auto, current=None) == []


@pytest.mark.parametrize("heads", [1, 2])
def test_cache_on_the_host(heads: int) -> None:
    """Tensor mode with the cache on the host is refused (P2); a model without memory has none to place."""
    target = dataclasses.replace(TENSOR, offload_kqv=False)
    assert blocking(model_facts(n_head_kv=(heads,)), target) == ["cache-on-host-in-tensor-mode"]
    assert blocking(model_facts(architecture="bert"), target) == []
    assert blocking(model_facts(), dataclasses.replace(LAYER, offload_kqv=False)) == []


def cached(placement: Placement, type_k: str, type_v: str | None = None) -> Placement:
    """Give a placement other cache types."""
    return dataclasses.replace(placement, type_k=type_k, type_v=type_v or type_k)


def test_quantized_cache_with_one_kv_head() -> None:
    """One KV head and a quantized cache abort at the first decode in tensor mode."""
    q8 = cached(TENSOR, "q8_0")
    current = cached(LAYER, "q8_0")
    assert blocking(model_facts(n_head_kv=(1,)), q8, current=current) == ["quantized-cache-with-one-kv-head"]
    assert blocking(model_facts(n_head_kv=(2,)), q8, current=current) == []


@pytest.mark.parametrize(
    ("mode", "cache_type", "build", "blocked"),
    [
        (TENSOR, "iq4_nl", OLD, True),
        (LAYER, "iq4_nl", OLD, False),
        (TENSOR, "q8_0", OLD, False),
        (TENSOR, "iq4_nl", MEASURED, False),
        (TENSOR, "q5_1", BuildFacts("other"), True),
        (TENSOR, "q5_1", NEWER, False),
    ],
)
def test_cache_types_by_build(mode: Placement, cache_type: str, build: BuildFacts, blocked: bool) -> None:
    """What tensor mode makes of a cache type depends on the build, and a try settles it (P3)."""
    target = cached(mode, cache_type)
    assert blocking(model_facts(), target, current=None, build=build) == ["cache-type-in-tensor-mode"] * blocked
    assert blocking(model_facts(), target, current=None, build=build, probe=OK) == []


def test_latent_attention_wants_equal_types() -> None:
    """An MLA cache with two types is refused with both names (P19)."""
    found = diagnostics(model_facts(is_mla=True), cached(LAYER, "f16", "q8_0"), current=None)
    assert [one.code for one in found] == ["unequal-cache-types"]
    assert "f16" in found[0].text
    assert "q8_0" in found[0].text


def test_quantized_values_want_flash_attention() -> None:
    """A quantized V cache without flash attention is refused."""
    off = dataclasses.replace(cached(LAYER, "f16", "q8_0"), flash_attn=FlashAttn.OFF)
    assert blocking(model_facts(), off, current=None) == ["quantized-v-without-flash-attention"]


def test_heads_that_do_not_fill_blocks() -> None:
    """Heads of 80 values cannot have a quantized cache in any mode."""
    facts = model_facts(n_embd_head_k=80, n_embd_head_v=64)
    assert blocking(facts, cached(LAYER, "q8_0"), current=None) == ["cache-type-does-not-fit-heads"]


def test_unknown_device_is_named_with_the_known_ones() -> None:
    """A device that is not there is refused with the list."""
    found = diagnostics(model_facts(), dataclasses.replace(LAYER, devices=("CUDA7", "CPU")))
    assert found[0].code == "unknown-device"
    assert "'CUDA7'" in found[0].text
    assert "CPU" in found[0].text
    assert not worth_a_try(found)


def test_tensor_mode_does_not_take_the_cpu_unasked() -> None:
    """Without a GPU tensor mode wants its devices named."""
    assert blocking(model_facts(), dataclasses.replace(TENSOR, devices=())) == ["no-device"]
    gpu = HostFacts({"CUDA0": "gpu", "CUDA1": "gpu", "CPU": "cpu"})
    assert blocking(model_facts(), dataclasses.replace(TENSOR, devices=()), host=gpu) == []


def test_split_longer_than_the_devices() -> None:
    """A split is judged against the devices that are there, and the build's own limit."""
    host = HostFacts({"CUDA0": "gpu", "CPU": "cpu"})
    long = dataclasses.replace(LAYER, devices=(), tensor_split=(1.0, 1.0, 1.0))
    assert blocking(model_facts(), long, host=host) == ["tensor-split-too-long"]
    many = Placement(devices=("CPU",) * 20, n_ctx=256)
    assert blocking(model_facts(), many, current=None) == ["too-many-devices"]


def test_main_device_out_of_range() -> None:
    """A main device that is not among the devices is refused with both numbers."""
    found = diagnostics(model_facts(), dataclasses.replace(LAYER, main_gpu=2))
    assert [one.code for one in found] == ["main-gpu-out-of-range"]
    assert "2" in found[0].text


@pytest.mark.parametrize(
    ("held", "n_seq_max", "unified", "n_ctx", "code"),
    [
        ({0: 300}, 1, False, 256, "context-too-small"),
        ({0: 256}, 1, False, 256, None),
        ({0: 100, 1: 200}, 2, True, 256, "context-too-small"),
        ({0: 100, 1: 120}, 2, False, 256, None),
        ({0: 10, 1: 129}, 2, False, 256, "context-too-small"),
        ({0: 10, 3: 10}, 2, True, 256, "too-few-sequences"),
    ],
)
def test_room_for_what_the_session_holds(
    held: dict[int, int], n_seq_max: int, unified: bool, n_ctx: int, code: str | None
) -> None:
    """A context too small for the tokens or the sequences held is refused."""
    target = dataclasses.replace(LAYER, n_ctx=n_ctx, n_seq_max=n_seq_max, kv_unified=unified)
    found = blocking(model_facts(), target, current=target, session=SessionFacts(held))
    assert found == ([code] if code else [])


def test_too_small_a_context_says_both_numbers() -> None:
    """The refusal says what is held, what there would be, and what to ask for."""
    found = diagnostics(model_facts(), LAYER, session=SessionFacts({0: 300}))
    assert "300 tokens" in found[0].text
    assert "room for 256" in found[0].text
    assert "-c 300" in found[0].text


@pytest.mark.parametrize(("n_batch", "n_ubatch", "code"), [(512, 128, ""), (512, 64, "x"), (64, 128, "x")])
def test_an_encoder_must_be_able_to_read_its_prompts_again(n_batch: int, n_ubatch: int, code: str) -> None:
    """It reads them as a whole, and the library aborts where they are more than a micro-batch."""
    target = dataclasses.replace(LAYER, n_batch=n_batch, n_ubatch=n_ubatch)
    found = diagnostics(model_facts(architecture="t5"), target, session=SessionFacts({0: 1}, n_encoder_tokens=100))
    assert [one.code for one in found] == (["encoder-prompt-too-long"] if code else [])
    assert all("-ub 100" in one.text for one in found)


def test_the_context_of_the_training_counts_where_none_is_named() -> None:
    """A context of 0 is the model's own."""
    target = dataclasses.replace(LAYER, n_ctx=0)
    session = SessionFacts({0: 300})
    assert blocking(model_facts(n_ctx_train=256), target, session=session) == ["context-too-small"]
    assert blocking(model_facts(n_ctx_train=0), target, session=session) == []


def test_a_recurrent_state_fits_any_context() -> None:
    """A recurrent memory does not grow with its tokens."""
    assert blocking(model_facts(architecture="mamba"), LAYER, session=SessionFacts({0: 900})) == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"type_k": "f32"}, "K cache from f16 to f32"),
        ({"type_v": "bf16"}, "V cache from f16 to bf16"),
        ({"flash_attn": FlashAttn.OFF}, "flash attention from on to off"),
        ({"n_seq_max": 4}, "1 stream(s) of cells to 4"),
    ],
)
def test_what_needs_a_conversion_is_named(change: dict[str, object], word: str) -> None:
    """Another cache layout is no impossibility: it is named as the conversion it needs."""
    found = diagnostics(model_facts(), dataclasses.replace(LAYER, **change))  # type: ignore[arg-type]
    assert [one.code for one in found] == ["needs-conversion"]
    assert word in found[0].text


@pytest.mark.parametrize(
    ("facts", "change", "word"),
    [
        (model_facts(architecture="deepseek4"), {"type_k": "f32"}, "carried whole"),
        (model_facts(), {"type_k": "iq4_nl"}, "read and not written"),
    ],
)
def test_what_cannot_be_converted_is_refused_before_anything_is_freed(
    facts: ModelFacts, change: dict[str, object], word: str
) -> None:
    """A state of its own format, and a type that is only read, are no conversion that --no-convert could be about."""
    found = diagnostics(facts, dataclasses.replace(LAYER, **change))  # type: ignore[arg-type]
    assert "cannot-convert" in [one.code for one in found if one.blocking]
    assert any(word in one.text for one in found)


_DSV4 = model_facts(
    architecture="deepseek4",
    n_head_kv=(1,),
    metadata=(("attention.compress_ratios", (4, 128, 4, 0)), ("attention.indexer.key_length", 32)),
)


@pytest.mark.parametrize(
    ("start", "change", "is_refused"),
    [
        ({"n_ctx": 1024}, {"n_ctx": 2048}, True),
        ({"n_ctx": 2048}, {"n_ctx": 1024}, True),
        ({"n_ctx": 512, "n_seq_max": 2, "kv_unified": True}, {"n_ctx": 2048}, True),
        ({"n_ctx": 2048, "n_seq_max": 2, "kv_unified": True}, {"n_seq_max": 3}, True),
        ({"n_ctx": 256}, {"n_ctx": 1024}, False),
        ({"n_ctx": 512, "n_seq_max": 2}, {"n_ctx": 2048}, False),
        ({"n_ctx": 2048}, {"n_ubatch": 16}, False),
    ],
)
def test_a_state_that_is_carried_whole_fits_only_a_context_of_its_size(
    start: dict[str, object], change: dict[str, object], is_refused: bool
) -> None:
    """What deepseek4 keeps of older tokens is written whole, so a context that keeps more or less cannot take it."""
    current = dataclasses.replace(LAYER, **start)  # type: ignore[arg-type]
    found = blocking(_DSV4, dataclasses.replace(current, **change), current=current)  # type: ignore[arg-type]
    assert found == (["cannot-convert"] if is_refused else [])


def test_the_same_layout_needs_none() -> None:
    """Unified sequences are one stream however many, and a recurrent or opening session has nothing to convert."""
    assert blocking(model_facts(), dataclasses.replace(LAYER, n_seq_max=4, kv_unified=True)) == []
    assert blocking(model_facts(architecture="mamba"), cached(LAYER, "f32")) == []
    assert blocking(model_facts(), cached(LAYER, "f32"), current=None) == []


def test_nothing_may_be_in_flight() -> None:
    """A shift that no decode has applied refuses the switch."""
    assert blocking(model_facts(), session=dataclasses.replace(EMPTY, pending_shift=True)) == ["pending-shift"]


def test_host_memory_for_the_carry() -> None:
    """The state and the largest tensor must fit what is available (S34), with the numbers."""
    tensor = TensorInfo("t", (1000,), 0, 4000, 0)
    facts = model_facts(tensors=(tensor,))
    session = SessionFacts({0: 10}, state_bytes=6000)
    assert blocking(facts, session=session, host=HostFacts({"CPU": "cpu"}, mem_available=10_000)) == []
    found = diagnostics(facts, session=session, host=HostFacts({"CPU": "cpu"}, mem_available=9_999))
    assert [one.code for one in found] == ["does-not-fit"]
    assert all(number in found[0].text for number in ("6000", "4000", "10000", "9999"))
    mapped = dataclasses.replace(session, sealed_bytes=6000)
    assert blocking(facts, session=mapped, host=HostFacts({"CPU": "cpu"}, mem_available=4_000)) == []


def test_host_memory_is_estimated_where_the_state_was_not_asked() -> None:
    """Without the library's word the header's estimate stands in, recurrent rows included."""
    facts = model_facts(recurrence=Recurrence(1, 100, 100))
    estimate = facts.state_bytes(10, n_sequences=1)
    session = SessionFacts({0: 10})
    assert blocking(facts, session=session, host=HostFacts({"CPU": "cpu"}, mem_available=estimate - 1)) == [
        "does-not-fit"
    ]
    assert blocking(facts, session=session, host=HostFacts({"CPU": "cpu"}, mem_available=estimate)) == []
    assert blocking(facts, session=session, host=HostFacts({"CPU": "cpu"})) == []


def test_row_mode() -> None:
    """Row mode is refused until a try shows that this build has it."""
    row = dataclasses.replace(LAYER, mode=SplitMode.ROW)
    assert blocking(model_facts(), row) == ["row-mode"]
    assert blocking(model_facts(), row, probe=OK) == []


def test_a_try_lifts_what_tables_refuse() -> None:
    """A build that turns out right is not held back by a table."""
    facts = model_facts(architecture="mamba2", has_k_norm=True, n_head_kv=(1,))
    assert worth_a_try(diagnostics(facts))
    assert blocking(facts, probe=OK) == []


@pytest.mark.parametrize("verdict", [Verdict.DIES, Verdict.WRONG, Verdict.FAILS])
def test_a_try_refuses_what_no_table_knows(verdict: Verdict) -> None:
    """A build that turns out wrong is refused with what was seen, whatever the tables say."""
    found = diagnostics(model_facts(), probe=ProbeVerdict(verdict, "what was seen"))
    assert [one.code for one in found] == [f"probe-{verdict.value}"]
    assert "what was seen" in found[0].text


def test_a_try_that_told_nothing_changes_nothing() -> None:
    """An inconclusive try leaves the tables' word."""
    verdict = ProbeVerdict(Verdict.INCONCLUSIVE, "not enough memory")
    assert diagnostics(model_facts(), probe=verdict) == ()
    facts = model_facts(architecture="mamba")
    assert diagnostics(facts, probe=verdict) == diagnostics(facts)


def test_what_blocks_comes_first() -> None:
    """Warnings follow refusals, and only refusals become reasons."""
    facts = model_facts(architecture="mamba2", n_head_kv=(1,))
    found = diagnostics(facts, probe=DIES)
    assert [one.blocking for one in found] == sorted((one.blocking for one in found), reverse=True)
    assert [one.code for one in refused(found)] == [one.code for one in found if one.blocking]


@pytest.mark.parametrize(
    ("version", "number", "measured"),
    [
        ("xllamacpp 2026.10.11549", 11549, True),
        ("llama-cpp-python 0.3.36", 11063, True),
        ("llama-cpp-py-sync 0.11739", 11739, False),
        ("llama-cpp-python 0.3.35", None, False),
        ("libllama.so", None, False),
        ("", None, False),
    ],
)
def test_build_numbers(version: str, number: int | None, measured: bool) -> None:
    """A package's version tells llama.cpp's build number, where it holds one."""
    assert BuildFacts(version).number == number
    assert BuildFacts(version).measured is measured


def test_every_row_has_a_phrase_and_no_architecture_twice() -> None:
    """The table is sound."""
    named = [name for row in tables.TENSOR_ARCHITECTURES for name in row.architectures]
    assert len(named) == len(set(named))
    assert all(row.what for row in tables.TENSOR_ARCHITECTURES)


def _with_tensors() -> ModelFacts:
    """Two KV heads, and tensors to cut."""
    names = ("attn_k.weight", "attn_output.weight")
    tensors = tuple(TensorInfo(f"blk.{n}.{name}", (256, 128), 0, 256 * 128 * 4, 0) for n in range(4) for name in names)
    return model_facts(tensors=tensors)


@pytest.mark.parametrize(
    ("shares", "said"),
    [((0.1, 0.9), "0.250:0.750 of the cache"), ((1.0, 1.0), ""), ((0.75, 0.25), ""), (None, "")],
)
def test_a_split_that_whole_heads_cannot_give_is_told(shares: tuple[float, ...] | None, said: str) -> None:
    """Asked and effective, summed over the layers with the rotation of the rounding; never a refusal."""
    found = diagnostics(_with_tensors(), dataclasses.replace(TENSOR, tensor_split=shares))
    uneven = [one for one in found if one.code == "uneven-tensor-split"]
    assert all(not one.blocking for one in found)
    assert any(said in one.text for one in uneven) if said else not uneven


def test_a_split_of_layers_or_of_one_device_is_not_rounded_to_heads() -> None:
    """Nothing to tell there."""
    for target in (LAYER, dataclasses.replace(TENSOR, devices=("CPU",))):
        shares = (0.1, 0.9)[: len(target.devices)]
        found = diagnostics(_with_tensors(), dataclasses.replace(target, tensor_split=shares))
        assert all(one.code != "uneven-tensor-split" for one in found)
