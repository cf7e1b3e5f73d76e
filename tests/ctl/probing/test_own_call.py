"""The trial of the library's own call: a call that is not right is found in a child, remembered, and not used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from llama_native import Library
from splitctl.ipc.probes import Prober
from splitctl.model.facts import read_facts
from splitctl.model.identity import model_digest
from splitctl.outcome import Route
from splitctl.placement import FlashAttn, Placement, SplitMode
from splitctl.probing import Verdict, VerdictCache, build_id, try_own_call
from splitctl.probing.verdicts import shape_of
from splitctl.session import Session
from tests.stublib import Stub, Variant, build, needs_compiler, run_child, write_model

pytestmark = [pytest.mark.stub, needs_compiler]

_LAYER = Placement(devices=("STUB0", "STUB1"), n_ctx=256, n_seq_max=2, flash_attn=FlashAttn.ON)
_TENSOR = _LAYER.changed(mode=SplitMode.TENSOR)

# The first call of a trial is the one that is to be refused, the second goes there, the third back.
_FAULTS = [
    ("", Verdict.OK, ""),
    ("native:shared@1", Verdict.WRONG, "under another context"),
    ("native:spoil@2", Verdict.FAILS, "it declines"),
    ("native:state@2", Verdict.WRONG, "the call changes the state"),
    ("native:rows@2", Verdict.WRONG, "the call changes the rows of the last decode"),
    ("native:onward@2", Verdict.WRONG, "what it decodes after the call is not"),
    ("native:state@3", Verdict.WRONG, "the call back changes the state"),
    ("native:rows@3", Verdict.WRONG, "the call back changes the rows"),
    ("native:onward@3", Verdict.WRONG, "what it decodes after the call back is not"),
    ("decode:fail:layer@1", Verdict.INCONCLUSIVE, "llama_decode failed"),
    ("load:null:tensor", Verdict.INCONCLUSIVE, "not enough memory"),
]


def child_trials(path: str, model: str) -> dict[str, list[str]]:
    """Try the call with every fault that leaves the process alive, one after the other."""
    library, stub, found = Library.open(path), Stub(path), dict[str, list[str]]()
    for faults, *_ in _FAULTS:
        stub.faults("clear")
        stub.faults(faults)
        verdict = try_own_call(library, model, _LAYER, _TENSOR)
        found[faults] = [verdict.verdict.value, verdict.why]
    return found


def test_a_call_that_is_not_right_is_found(tmp_path: Path) -> None:
    """Another state, other rows, other tokens onward, there or back, and a refusal that is none: each has its words."""
    model = write_model(tmp_path / "tiny.gguf")
    found = run_child(child_trials, build(Variant.NATIVE_SPLIT), model).value()
    wanted = {faults: (verdict.value, why) for faults, verdict, why in _FAULTS}
    assert {faults: verdict for faults, (verdict, _) in found.items()} == {
        faults: verdict for faults, (verdict, _) in wanted.items()
    }
    assert [faults for faults, (_, why) in found.items() if wanted[faults][1] not in why] == [], found


@pytest.mark.parametrize(
    ("faults", "why"),
    [("native:abort@2", "GGML_ASSERT(stub_was_asked_to_abort) failed"), ("native:state@2", "changes the state")],
)
def test_a_call_that_is_not_right_is_remembered_both_ways(tmp_path: Path, faults: str, why: str) -> None:
    """One trial counts for both directions, and another split, number of layers or build is another question."""
    model, cache = write_model(tmp_path / "tiny.gguf"), VerdictCache(tmp_path / "probes.json")
    env = {name: value for name, value in os.environ.items() if not name.startswith("STUB_")}
    facts, library = read_facts(model), build(Variant.NATIVE_SPLIT)
    tried = Prober(library, env | {"STUB_FAULTS": faults}, cache)
    told = tried.why_no_own_call(_LAYER, _TENSOR, facts)
    assert "is refused with this build" in told
    assert why in told
    later = Prober(library, env, cache)
    for now, target in ((_LAYER, _TENSOR), (_TENSOR, _LAYER)):
        assert why in later.why_no_own_call(now, target, facts, known_only=True)
    (known,) = cache.own_calls(build_id(library), shape_of(facts), lambda: model_digest(facts.files))
    assert (known["mode"], known["trial"]) == ("tensor", "moved from layer even, -1 layers")
    assert why in known["why"]
    for other in (_TENSOR.changed(tensor_split=(3.0, 1.0)), _TENSOR.changed(n_gpu_layers=1)):
        known = later.why_no_own_call(_LAYER.changed(n_gpu_layers=other.n_gpu_layers), other, facts, known_only=True)
        assert known.endswith("has not been tried yet")
    assert Prober(build(), env, cache).why_no_own_call(_LAYER, _TENSOR, facts, known_only=True).endswith("tried yet")


def child_sessions(path: str, model: str, cache: str) -> list[dict[str, Any]]:
    """Switch by each route with a call that a trial finds wrong; the trial's child has the fault, the session not."""
    library = Library.open(path)
    env = {name: value for name, value in os.environ.items() if not name.startswith("STUB_")}
    prober = Prober(library.path, env | {"STUB_FAULTS": "native:state@2"}, VerdictCache(Path(cache)))
    told: list[dict[str, Any]] = []
    with Session.open(model, _LAYER, library=library, prober=prober) as session:
        session.prefill(list(b"abc"))
        for via in ("composed", "native", "in-place", "auto"):
            other = SplitMode.TENSOR if session.placement.mode is SplitMode.LAYER else SplitMode.LAYER
            target = session.placement.changed(mode=other)
            told.append(dict(session.switch(target, via=Route(via)).to_json()))
            known = prober.why_no_own_call(session.placement, target, session.facts, known_only=True)
            told[-1]["is_known"] = "tried yet" not in known
        forced = session.check(session.placement.changed(mode=SplitMode.NONE))
        told.append({"n_tokens": len(session.tokens()), "reasons": [one.code for one in forced.reasons]})
    return told


def test_a_build_whose_call_is_wrong_is_used_by_the_composed_way(tmp_path: Path) -> None:
    """The call is tried only where it would be made; it is refused by name, and otherwise the reason is told."""
    model = write_model(tmp_path / "tiny.gguf")
    told = run_child(child_sessions, build(Variant.NATIVE_SPLIT), model, tmp_path / "probes.json").value()
    composed, native, in_place, auto, after = told
    assert (composed["status"], composed["via"], composed["via_reason"]) == ("switched", "composed", "")
    assert (composed["is_known"], native["is_known"]) == (False, True)
    assert (native["status"], [one["code"] for one in native["reasons"]]) == ("refused", ["native-refused"])
    assert native["reason"].endswith("(--via composed)")
    for one in (in_place, auto):
        assert (one["status"], one["via"]) == ("switched", "composed")
        assert "is refused with this build: the call changes the state" in one["via_reason"]
    assert after == {"n_tokens": 3, "reasons": []}
