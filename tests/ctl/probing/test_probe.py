"""The probe: a placement that a build gets wrong is found in a child, and remembered for exactly what it belongs to."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_native import Library, discover
from splitctl.ipc.jobs import Failure, Fault
from splitctl.ipc.probes import Prober
from splitctl.ipc.process import JobEnd
from splitctl.model.facts import ModelFacts, read_facts
from splitctl.model.header import TensorInfo
from splitctl.placement import FlashAttn, Placement, SplitMode
from splitctl.probing import (
    ProbeKey,
    ProbeVerdict,
    Verdict,
    VerdictCache,
    build_id,
    comparing,
    try_placement,
    verdict_of_death,
)
from splitctl.probing.comparing import NMSE_LIMIT_QUANTIZED, widened
from splitctl.probing.verdicts import shape_of
from tests.stublib import Stub, build, needs_compiler, run_child, write_model
from tools.make_dummies import make_many
from tools.places import default_folder

_TENSOR = Placement(mode=SplitMode.TENSOR, devices=("CPU", "CPU"), n_ctx=256, flash_attn=FlashAttn.ON)
_OK = ProbeVerdict(Verdict.OK, numbers={"nmse": 1e-6})


def _env(**more: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("STUB_")} | more


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny.gguf")


def _ask(
    model: Path, library: Path, placement: Placement, *, cache: VerdictCache | None = None, **env: str
) -> ProbeVerdict:
    return Prober(library, _env(**env), cache)(model, placement, read_facts(model))


# -- the try, with a library that misbehaves ---------------------------------------------------------------------------


@needs_compiler
@pytest.mark.stub
@pytest.mark.parametrize(("n_seq_max", "kv_unified"), [(1, False), (4, False), (4, True)])
def test_a_sound_build_is_ok(tiny: Path, n_seq_max: int, kv_unified: bool) -> None:
    """A build whose modes agree is OK, with the numbers that say how well."""
    placement = dataclasses.replace(_TENSOR, n_seq_max=n_seq_max, kv_unified=kv_unified)
    found = _ask(tiny, build(), placement)
    assert (found.verdict, found.why) == (Verdict.OK, "")
    assert found.numbers["nmse"] == 0.0
    assert found.numbers["top1_agreement"] == 1.0
    assert found.numbers["state_bytes"] > 0


@needs_compiler
@pytest.mark.stub
@pytest.mark.parametrize(
    ("faults", "verdict", "why"),
    [
        ("load:abort:tensor", Verdict.DIES, "GGML_ASSERT(stub_was_asked_to_abort) failed"),
        ("init:segv:tensor", Verdict.DIES, "died by signal 11 (SIGSEGV) while target: context"),
        ("decode:abort:tensor", Verdict.DIES, "while target: first batches"),
        # The prompt decodes, the first batch of one token kills: K-norm with one KV head in 2026.10.
        ("decode:abort:tensor@2", Verdict.DIES, "while target: first batches"),
        ("get_data:abort:tensor", Verdict.DIES, "while target: state out"),
        ("set_data:abort:tensor", Verdict.DIES, "while target: first restore"),
        ("load:kill:tensor", Verdict.INCONCLUSIVE, "killed"),
        ("load:abort:layer", Verdict.INCONCLUSIVE, "layer mode itself"),
    ],
)
def test_what_kills_a_build_is_found(tiny: Path, faults: str, verdict: Verdict, why: str) -> None:
    """A death gets its verdict and reason, whatever the library was doing."""
    found = _ask(tiny, build(), _TENSOR, STUB_FAULTS=faults)
    assert (found.verdict, why in found.why) == (verdict, True), found


_RETURNED = [
    # The stub says "unable to allocate" then, as a real build does.
    ("load:null:tensor", Verdict.INCONCLUSIVE, "not enough memory"),
    ("init:null:tensor", Verdict.INCONCLUSIVE, "not enough memory"),
    ("decode:fail:tensor", Verdict.FAILS, "llama_decode failed"),
    ("decode:nan:tensor", Verdict.WRONG, "not finite"),
    ("decode:const:tensor", Verdict.WRONG, "differ from layer mode's"),
    ("get_data:zero:tensor", Verdict.FAILS, "llama_state_get_data failed"),
    ("set_data:zero:tensor", Verdict.FAILS, "llama_state_set_data failed"),
    ("get_data:flip:tensor@2", Verdict.WRONG, "reads back changed"),
    ("decode:fail:layer", Verdict.INCONCLUSIVE, "layer mode itself"),
    ("init:null:layer", Verdict.INCONCLUSIVE, "not enough memory"),
]


def child_returned(path: str, model: str) -> dict[str, list[str]]:
    """Try tensor mode with every fault that leaves the process alive, one after the other."""
    library, stub, found = Library.open(path), Stub(path), dict[str, list[str]]()
    for faults, *_ in _RETURNED:
        stub.faults("clear")
        stub.faults(faults)
        verdict = try_placement(library, model, _TENSOR)
        found[faults] = [verdict.verdict.value, verdict.why]
    return found


@pytest.fixture(scope="module")
def returned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What is found with each of these faults, in one process for all."""
    model = write_model(tmp_path_factory.mktemp("returned") / "tiny.gguf")
    found: dict[str, list[str]] = run_child(child_returned, build(), model).value()
    return found


@needs_compiler
@pytest.mark.stub
@pytest.mark.parametrize(("faults", "verdict", "why"), _RETURNED)
def test_what_a_build_gets_wrong_is_found(
    returned: dict[str, list[str]], tmp_path: Path, faults: str, verdict: Verdict, why: str
) -> None:
    """Failing calls, wrong logits and a lost state get their verdict and reason; what is inconclusive is not kept."""
    found = returned[faults]
    assert (found[0], why in found[1]) == (verdict.value, True), found
    VerdictCache(tmp_path / "probes.json").put(_key(), ProbeVerdict(Verdict(found[0]), found[1]), lambda: "digest")
    assert (tmp_path / "probes.json").exists() is (verdict is not Verdict.INCONCLUSIVE)


@needs_compiler
@pytest.mark.stub
def test_a_library_that_hangs_is_dead(tiny: Path) -> None:
    """A try that makes no progress for its deadline counts as a death."""
    prober = Prober(build(), _env(STUB_FAULTS="decode:hang:tensor"), deadline_s=2.0)
    found = prober(tiny, _TENSOR, read_facts(tiny))
    assert found.verdict is Verdict.DIES
    assert "it hangs" in found.why


@needs_compiler
@pytest.mark.stub
@pytest.mark.parametrize(
    "faults",
    ["decode:abort:layer", "decode:nan:layer", "decode:hang:layer"],
)
def test_what_goes_wrong_in_layer_mode_is_not_put_on_another(tiny: Path, tmp_path: Path, faults: str) -> None:
    """Whatever happens in the mode that the target is compared with, the try is inconclusive and not remembered."""
    prober = Prober(build(), _env(STUB_FAULTS=faults), VerdictCache(tmp_path / "probes.json"), deadline_s=2.0)
    assert prober(tiny, _TENSOR, read_facts(tiny)).verdict is Verdict.INCONCLUSIVE
    assert not (tmp_path / "probes.json").exists()


@needs_compiler
@pytest.mark.stub
def test_a_file_that_cannot_be_tried_says_nothing_about_the_build(tiny: Path, tmp_path: Path) -> None:
    """A missing or unreadable file is inconclusive and not remembered: with a sound one the mode is tried."""
    cache, facts, kept = VerdictCache(tmp_path / "probes.json"), read_facts(tiny), tiny.read_bytes()
    changes: list[Callable[[Path], object]] = [Path.unlink, Path.mkdir, lambda path: path.write_bytes(b"no model")]
    for change in changes:
        if tiny.is_dir():
            tiny.rmdir()
        change(tiny)
        found = Prober(build(), _env(), cache)(tiny, _TENSOR, facts)
        assert (found.verdict, (tmp_path / "probes.json").exists()) == (Verdict.INCONCLUSIVE, False)
    tiny.write_bytes(kept)
    assert _ask(tiny, build(), _TENSOR, cache=cache).verdict is Verdict.OK


@pytest.mark.parametrize("verdict", list(Verdict))
def test_a_file_that_changes_during_a_try_leaves_no_verdict(
    tiny: Path, tmp_path: Path, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a child found, it may have found it of other bytes."""

    def replaced(*_: object, **__: object) -> JobEnd:
        tiny.write_bytes(tiny.read_bytes())
        return JobEnd(ProbeVerdict(verdict, "it seems so").to_json())

    monkeypatch.setattr("splitctl.ipc.probes.run_job", replaced)
    prober = Prober(Path("libllama.so"), {}, VerdictCache(tmp_path / "probes.json"))
    assert prober(tiny, _TENSOR, read_facts(tiny)).verdict is Verdict.INCONCLUSIVE
    assert not (tmp_path / "probes.json").exists()


@pytest.mark.parametrize("fault", list(Fault))
def test_a_child_that_gives_no_verdict_leaves_none(
    tiny: Path, tmp_path: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that ends with an error, ours too, or that cannot be started says nothing about the mode."""
    ends = iter([JobEnd(error=Failure(fault, "Error", "it is gone")), OSError("no more processes")])

    def ended(*_: object, **__: object) -> JobEnd:
        if isinstance(end := next(ends), OSError):
            raise end
        return end

    monkeypatch.setattr("splitctl.ipc.probes.run_job", ended)
    prober = Prober(Path("libllama.so"), {}, VerdictCache(tmp_path / "probes.json"))
    for said in ("it is gone", "no more processes"):
        found = prober(tiny, _TENSOR, read_facts(tiny))
        assert (found.verdict, said in found.why) == (Verdict.INCONCLUSIVE, True)
    assert not (tmp_path / "probes.json").exists()


def child_loses_the_file(path: str, model: str) -> list[Any]:
    """Try a placement whose file disappears once layer mode has answered; tell the stages too."""
    stages: list[str] = []

    def on_stage(name: str) -> None:
        stages.append(name)
        if name.startswith("target"):
            Path(model).unlink(missing_ok=True)

    found = try_placement(Library.open(path), model, _TENSOR, on_stage=on_stage)
    return [found.verdict.value, found.why, stages.count("reference")]


@needs_compiler
@pytest.mark.stub
def test_a_file_that_is_lost_between_two_modes_is_not_the_second_ones_fault(tiny: Path) -> None:
    """A call that fails in the target is tried again in layer mode first; a load says all along that it goes on."""
    verdict, why, n_signs = run_child(child_loses_the_file, build(), tiny).value()
    assert (verdict, "layer mode itself" in why) == ("inconclusive", True)
    assert n_signs > 1


@needs_compiler
@pytest.mark.stub
def test_a_cancelled_try_says_nothing_about_the_build(tiny: Path, tmp_path: Path) -> None:
    """A try that is stopped is inconclusive, and is not remembered."""
    cache = VerdictCache(tmp_path / "probes.json")
    prober = Prober(build(), _env(), cache, is_cancelled=lambda: True)
    assert prober(tiny, _TENSOR, read_facts(tiny)).verdict is Verdict.INCONCLUSIVE
    assert not (tmp_path / "probes.json").exists()


@needs_compiler
@pytest.mark.stub
def test_a_cancel_does_not_wait_for_a_try_that_hangs(tiny: Path) -> None:
    """A child that hangs is asked about all the while, and the first yes ends the try."""
    answers = iter([False] * 20 + [True])
    prober = Prober(build(), _env(STUB_FAULTS="load:hang"), is_cancelled=lambda: next(answers))
    found = prober(tiny, _TENSOR, read_facts(tiny))
    assert (found.verdict, found.why) == (Verdict.INCONCLUSIVE, "the trial was cancelled")
    assert list(answers) == []


@needs_compiler
@pytest.mark.stub
def test_a_verdict_is_remembered_and_a_shortage_is_not(tiny: Path, tmp_path: Path) -> None:
    """The second question is answered from the file, without a child; what came of a shortage is tried again."""
    cache = VerdictCache(tmp_path / "cache" / "probes.json")
    calls = tmp_path / "calls"
    short = _ask(tiny, build(), _TENSOR, cache=cache, STUB_FAULTS="init:null:tensor", STUB_CALLS=str(calls))
    assert (short.verdict, short.remembered) == (Verdict.INCONCLUSIVE, False)
    first = _ask(tiny, build(), _TENSOR, cache=cache, STUB_CALLS=str(calls))
    assert (first.verdict, first.remembered) == (Verdict.OK, False)
    before = calls.read_text()
    second = _ask(tiny, build(), _TENSOR, cache=cache, STUB_CALLS=str(calls))
    assert (second, second.remembered) == (dataclasses.replace(first, remembered=True), True)
    assert calls.read_text() == before


@needs_compiler
@pytest.mark.stub
def test_a_cache_that_cannot_be_written_costs_nothing(tiny: Path, tmp_path: Path) -> None:
    """Without a place for the file the verdict is given all the same."""
    (tmp_path / "file").write_text("")
    found = _ask(tiny, build(), _TENSOR, cache=VerdictCache(tmp_path / "file" / "probes.json"))
    assert found.verdict is Verdict.OK


# -- the verdicts' file ------------------------------------------------------------------------------------------------


def _key(**changes: Any) -> ProbeKey:
    plain = ProbeKey("b", "s", "tensor", ("CPU", "CPU"), None, ("f16", "f16"), True, "on", False, False)
    return dataclasses.replace(plain, **changes)


@pytest.mark.parametrize(
    "change",
    [
        {"build": "c"},
        {"shape": "t"},
        {"mode": "row"},
        {"devices": ("CPU",)},
        {"tensor_split": (0.75, 0.25)},
        {"cache_types": ("q8_0", "f16")},
        {"offload_kqv": False},
        {"flash_attn": "off"},
        {"many_sequences": True},
        {"kv_unified": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_verdict_belongs_to_everything_that_could_change_it(tmp_path: Path, change: dict[str, Any]) -> None:
    """A key that differs in any field asks again."""
    cache = VerdictCache(tmp_path / "probes.json")
    cache.put(_key(), _OK)
    assert cache.get(_key()) == dataclasses.replace(_OK, remembered=True)
    assert cache.get(_key(**change)) is None


@pytest.mark.parametrize("verdict", [Verdict.WRONG, Verdict.FAILS])
def test_what_may_lie_in_the_weights_is_remembered_of_them_alone(tmp_path: Path, verdict: Verdict) -> None:
    """Wrong values and failing calls count for the file that was tried; that a mode works or dies, for its shape."""
    cache, bad = VerdictCache(tmp_path / "probes.json"), ProbeVerdict(verdict, "its logits are not finite")
    cache.put(_key(), _OK, lambda: "sound")
    cache.put(_key(), bad, lambda: "damaged")
    assert cache.get(_key(), lambda: "damaged") == dataclasses.replace(bad, remembered=True)
    assert cache.get(_key(), lambda: "sound") is None
    cache.put(_key(), _OK, lambda: "sound")
    assert cache.get(_key(), lambda: "damaged") == dataclasses.replace(bad, remembered=True)
    for name in ("sound", "never seen"):
        assert cache.get(_key(), lambda name=name: name) == dataclasses.replace(_OK, remembered=True)  # type: ignore[misc]
    cache.put(_key(), ProbeVerdict(Verdict.DIES, "an abort"), lambda: "damaged")
    for name in ("damaged", "sound", "never seen"):
        found = cache.get(_key(), lambda name=name: name)  # type: ignore[misc]
        assert found is not None
        assert found.verdict is Verdict.DIES


@needs_compiler
@pytest.mark.stub
def test_a_verdict_on_damaged_weights_does_not_outlive_them(tmp_path: Path) -> None:
    """A file that was tried and found wrong is tried anew when a sound one, under the same header, takes its place."""
    path, cache = tmp_path / "model.gguf", VerdictCache(tmp_path / "probes.json")
    write_model(path, weights=b"damaged!" * 64)
    assert _ask(path, build(), _TENSOR, cache=cache, STUB_FAULTS="decode:nan:tensor").verdict is Verdict.WRONG
    again = _ask(path, build(), _TENSOR, cache=cache)
    assert (again.verdict, again.remembered) == (Verdict.WRONG, True)
    write_model(path, weights=b"sound!!!" * 64)
    assert _ask(path, build(), _TENSOR, cache=cache).verdict is Verdict.OK


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b'{"format":99,"verdicts":{}}',
        b'{"format":1,"verdicts":[]}',
        b'{"format":1,"verdicts":{"KEY":[]}}',
        b'{"format":1,"verdicts":{"KEY":{"verdict":"sideways","why":"","numbers":{}}}}',
        b'{"format":1,"verdicts":{"KEY":{"verdict":"ok"}}}',
        b"[" * 200_000,
    ],
)
def test_a_damaged_file_counts_as_empty(tmp_path: Path, raw: bytes) -> None:
    """Whatever lies in the file's place, nothing is remembered from it, and the next verdict replaces it."""
    path = tmp_path / "probes.json"
    path.write_bytes(raw.replace(b"KEY", _key().text().replace('"', '\\"').encode()))
    cache = VerdictCache(path)
    assert cache.get(_key()) is None
    cache.put(_key(), _OK)
    assert cache.get(_key()) is not None


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    """Verdicts of many writers are all there afterwards, and no temporary file is left."""
    path = tmp_path / "probes.json"
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(VerdictCache(path).put, _key(build=str(n)), _OK) for n in range(40)]:
            done.result()
    assert all(VerdictCache(path).get(_key(build=str(n))) for n in range(40))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["probes.json", "probes.lock"]


def test_a_build_is_told_by_its_files(tmp_path: Path) -> None:
    """Another library file, or another ggml beside it, is another build."""
    library = tmp_path / "libllama.so"
    library.write_bytes(b"1")
    first = build_id(library)
    assert build_id(library) == first
    (tmp_path / "libggml-cpu.so").write_bytes(b"2")
    second = build_id(library)
    library.write_bytes(b"12")
    assert len({first, second, build_id(library)}) == 3


@pytest.mark.parametrize("change", [{"n_head_kv": (1,)}, {"has_k_norm": True}, {"max_alibi_bias": 8.0}, {"n_layer": 3}])
def test_a_shape_is_told_by_heads_and_norms(tiny: Path, change: dict[str, Any]) -> None:
    """Models that differ in what a build trips over have different shapes; the file's place does not matter."""
    facts: ModelFacts = read_facts(tiny)
    assert shape_of(facts) == shape_of(dataclasses.replace(facts, path=Path("/elsewhere"), name="other"))
    assert shape_of(facts) != shape_of(dataclasses.replace(facts, **change))


@pytest.mark.parametrize("change", [{"type_id": 2}, {"dims": (32, 64)}, {"name": "blk.0.attn_q.bias"}])
def test_a_shape_is_told_by_its_tensors(tiny: Path, change: dict[str, Any]) -> None:
    """Another quantization, another width or another tensor is another shape: a split is cut by whole blocks."""
    tensor = TensorInfo("blk.0.attn_q.weight", (64, 64), 0, 16384, 0)
    plain, other = (
        dataclasses.replace(read_facts(tiny), tensors=(one,)) for one in (tensor, dataclasses.replace(tensor, **change))
    )
    assert shape_of(plain) != shape_of(other)


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT", "SIGKILL", "SIGXCPU", "SIGBUS"])
def test_a_child_that_somebody_ended_says_nothing_about_the_build(signal: str) -> None:
    """Neither a signal from outside, nor a mapped file that is cut short, nor a child that never began is a death."""
    how = f"died by signal 1 ({signal}) while target: loading"
    assert verdict_of_death(how, "target: loading", ()).verdict is Verdict.INCONCLUSIVE
    assert verdict_of_death("ended with status 1", "starting", ()).verdict is Verdict.INCONCLUSIVE
    assert verdict_of_death("ended with status 1", "reference again", ()).verdict is Verdict.INCONCLUSIVE
    assert verdict_of_death("died by signal 11 (SIGSEGV)", "target: loading", ()).verdict is Verdict.DIES


def test_a_death_for_want_of_memory_says_nothing_about_the_build() -> None:
    """The abort of a stock tensor mode without memory is inconclusive; any other death is the build's."""
    tail = ("log: loading", "ggml-backend-meta.cpp:1: GGML_ASSERT(meta_buf_ctx->bufs[i]) failed")
    assert verdict_of_death("died by signal 6 (SIGABRT)", "target: loading", tail).verdict is Verdict.INCONCLUSIVE
    assert verdict_of_death("died by signal 6 (SIGABRT)", "target: loading", ()).verdict is Verdict.DIES


# -- real libraries ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_library() -> Path:
    for one in discover.candidates(os.environ):
        if one.usable:
            return one.path
    pytest.skip("no libllama is installed: pip install xllamacpp")


@pytest.mark.model
def test_a_real_build_can_split_smollm2(smollm2: Path, real_library: Path) -> None:
    """SmolLM2 (3 KV heads) in tensor mode on two devices agrees with layer mode up to float order."""
    found = _ask(smollm2, real_library, _TENSOR)
    assert found.verdict is Verdict.OK, found
    assert 0.0 < found.numbers["nmse"] < 0.02


def _strictly(library: str, model: str, limit: float) -> dict[str, Any]:
    """Try tensor mode with a stricter limit; runs in a child."""
    comparing.NMSE_LIMIT = limit
    placement = dataclasses.replace(_TENSOR, n_seq_max=4)
    return try_placement(Library.open(library), model, placement).to_json()


@pytest.mark.model
def test_a_model_that_differs_from_itself_as_much_is_not_wrong(smollm2: Path, real_library: Path) -> None:
    """What another order of the same floats does in layer mode too is no fault of tensor mode."""
    found = run_child(_strictly, real_library, smollm2, 1e-9).value()
    numbers = found["numbers"]
    assert found["verdict"] == "ok", found
    assert 1e-9 < numbers["nmse"] <= 4 * numbers["nmse_control"]


def test_a_limit_is_widened_by_the_models_own_noise_and_no_further() -> None:
    """Four times what the model differs from itself by, never less than the limit, never more than the wider one."""
    assert [widened(0.02, control) for control in (0.0, 0.004, 0.01, 0.5)] == [0.02, 0.02, 0.04, NMSE_LIMIT_QUANTIZED]
    assert widened(NMSE_LIMIT_QUANTIZED, 1.0) == NMSE_LIMIT_QUANTIZED


@pytest.mark.model
def test_a_real_build_dies_with_its_cache_on_the_host(smollm2: Path, real_library: Path) -> None:
    """Tensor mode with the cache in host memory crashes in the first decode; the command that asked does not."""
    found = _ask(smollm2, real_library, dataclasses.replace(_TENSOR, offload_kqv=False))
    assert found.verdict in {Verdict.DIES, Verdict.WRONG}, found


def test_a_real_build_dies_of_one_kv_head_with_a_norm(real_library: Path) -> None:
    """A Gemma 3 (one KV head, K-norm) in tensor mode dies at the first batch of one token."""
    ((_, model, why),) = make_many(default_folder(), ["gemma3+mqa"])
    assert model is not None, why
    found = _ask(model, real_library, _TENSOR)
    assert found.verdict is Verdict.DIES, found
    assert "GGML_ASSERT" in found.why


@pytest.mark.parametrize(
    ("name", "verdict", "keeps_state"),
    [
        ("bert", Verdict.OK, False),
        ("dream", Verdict.OK, False),
        ("mamba", Verdict.FAILS, False),
        ("qwen3next", Verdict.OK, True),
        ("baichuan+8h", Verdict.WRONG, True),
    ],
)
def test_a_real_build_is_judged_by_architecture(
    name: str, verdict: Verdict, keeps_state: bool, real_library: Path
) -> None:
    """Encoders, diffusion models, recurrent and hybrid memories and ALiBi get the verdict that the build deserves."""
    ((_, model, why),) = make_many(default_folder(), [name])
    if model is None:
        pytest.skip(f"this build cannot make {name}: {why}")
    found = _ask(model, real_library, _TENSOR)
    assert found.verdict is verdict, found
    assert ("state_bytes" in found.numbers) is keeps_state
