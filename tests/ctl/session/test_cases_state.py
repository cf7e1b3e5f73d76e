"""Real reports about state (rows S), each with the right answer; on the stub library.

The rows that need a real model or a real build are in `tests/real/test_cases.py`.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from llama_native import CallFailed, Library
from splitctl.errors import CarryDamaged, CarryMismatch, Refused
from splitctl.ipc.probes import Prober
from splitctl.session import Session
from tests.ctl import scenes
from tests.ctl.scenes import N_TOKENS, Scene
from tests.stublib import Stub, Variant, build, needs_compiler, run_child, write_model

pytestmark = [pytest.mark.stub, needs_compiler]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny.gguf")


def played(model: Path, *table: dict[str, Any]) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = run_child(scenes.play_all, build(), model, list(table)).value()
    return told


def opened(path: str, model: str, scene: Scene | None = None) -> tuple[Stub, Session]:
    """Open a session that has read its prompts, and forget the calls so far."""
    session = scenes.start(Library.open(path), model, scene or Scene())
    stub = Stub(path)
    stub.reset()
    return stub, session


def decodes(stub: Stub) -> list[tuple[int, int]]:
    """First position and number of tokens of every decode so far."""
    return [
        (int(call.arguments["pos"]), int(call.arguments["n_tokens"]))
        for call in stub.calls()
        if call.name == "llama_decode"
    ]


# -- S1: a restored session replays the last token at the wrong position -----------------------------------------------


def child_s1(path: str, model: str, folder: str) -> dict[str, Any]:
    stub, first = opened(path, model)
    seen: dict[str, Any] = {}
    wanted = scenes.straight(first._live.engine.library, model, Scene())[0]
    for drawn in (0, N_TOKENS):
        scenes.generate(first, 1, drawn)
        first.save(f"{folder}/carry")
        second = Session.open(model, Scene().placement(), library=first._live.engine.library, prober=None)
        second.restore(f"{folder}/carry")
        held = second._live.positions()[0][1] + 1
        stub.reset()
        scenes.generate(second, 1, 2)
        seen[str(drawn)] = {
            "rows_behind": len(first.tokens()) - held,
            "next": [pos - held for pos, _ in decodes(stub)],
            "last": second._live.positions()[0][1] + 2 - len(second.tokens()),
            "same": second.tokens() == wanted[: len(second.tokens())],
        }
        second.close()
    first.close()
    return seen


def test_s1_a_restored_session_goes_on_at_the_right_position(model: Path, tmp_path: Path) -> None:
    """Rows are as many as tokens, or one fewer where the newest token was drawn only: nothing is decoded twice."""
    seen = run_child(child_s1, build(), model, tmp_path).value()
    assert seen["0"] == {"rows_behind": 0, "next": [0], "last": 0, "same": True}
    assert seen[str(N_TOKENS)] == {"rows_behind": 1, "next": [0, 1], "last": 0, "same": True}


# -- S8: restore says success and nothing is reused --------------------------------------------------------------------


def child_s8(path: str, model: str) -> dict[str, Any]:
    stub, session = opened(path, model)
    n = len(session.tokens())
    session.switch(session.placement.changed(mode=Scene(start="tensor").placement().mode))
    at_switch = decodes(stub)
    scenes.generate(session, 1, 2)
    one = decodes(stub)
    # A memory that cannot be cut: a shorter prefix is read again, from its first token.
    stub.faults("seq_rm:false")
    stub.reset()
    session.rewind(n - 2)
    after = decodes(stub)
    held = session._live.positions()[0]
    session.close()
    return {"n": n, "at_switch": at_switch, "one": one, "rewound": after, "held": held}


def test_s8_a_switch_reads_nothing_again(model: Path) -> None:
    """After a switch exactly one token is decoded for the next one; a rewind that must read again does so."""
    seen = run_child(child_s8, build(), model).value()
    n = seen["n"]
    assert seen["at_switch"] == []
    assert seen["one"] == [[n, 1]]
    assert seen["rewound"][0][0] == 0
    assert sum(count for _, count in seen["rewound"]) == n - 2
    assert seen["held"] == [0, n - 3]


# -- S18: a context without a memory -----------------------------------------------------------------------------------


def child_s18(path: str, model: str) -> dict[str, Any]:
    library = Library.open(path)
    stub = Stub(path)
    stub.faults("model:no_memory=1")
    with Session.open(model, Scene().placement(), library=library, prober=None) as session:
        stub.reset()
        outcome = session.switch(session.placement.changed(mode=Scene(start="tensor").placement().mode))
        names = stub.names()
    return {"status": outcome.status.value, "bytes": outcome.state_bytes, "names": names, "live": stub.live()}


def test_s18_nothing_to_carry_is_no_crash(model: Path) -> None:
    """A context that remembers nothing is switched without a size query, a get or a set."""
    seen = run_child(child_s18, build(), model).value()
    assert seen["status"] == "switched"
    assert seen["bytes"] == 0
    assert not [name for name in seen["names"] if name.startswith("llama_state")]
    assert set(seen["live"].values()) == {0}


# -- S19 and B14: a library that aborts while its state is read --------------------------------------------------------


def child_s19(path: str, model: str, env: dict[str, str]) -> dict[str, Any]:
    library = Library.open(path)
    stub = Stub(path)
    prober = Prober(Path(path), {**os.environ, **env})
    with Session.open(model, Scene().placement(), library=library, prober=prober) as session:
        session.prefill(session.tokenize("hello"))
        stub.reset()
        outcome = session.switch(session.placement.changed(mode=Scene(start="tensor").placement().mode))
        scenes.generate(session, 1, 2)
        children = psutil.Process().children(recursive=True)
        return {
            "status": outcome.status.value,
            "stage": outcome.stage.value if outcome.stage else "",
            "reason": outcome.reason,
            "mode": session.placement.mode.value,
            "effective": outcome.effective.value if outcome.effective else "",
            "freed": stub.count("llama_free") + stub.count("llama_model_free"),
            "children": len(children),
        }


@pytest.mark.parametrize("call", ["get_data", "load", "decode", "set_data"])
def test_s19_a_mode_that_aborts_is_refused_before_it_is_entered(model: Path, call: str) -> None:
    """A build that aborts in tensor mode is found out by a child: refused with its words, old mode, no zombie."""
    env = {"STUB_FAULTS": f"{call}:abort:tensor"}
    seen = run_child(child_s19, build(), model, env).value()
    assert (seen["status"], seen["stage"]) == ("refused", "checking")
    assert (seen["mode"], seen["effective"]) == ("layer", "layer")
    assert "GGML_ASSERT(stub_was_asked_to_abort) failed" in seen["reason"]
    assert seen["freed"] == 0
    assert seen["children"] == 0


# -- S22: on-device copies die with the context ------------------------------------------------------------------------


def test_s22_there_is_no_on_device_switch(model: Path) -> None:
    """A switch takes no on-device state: the argument does not exist, and no flagged call is ever made."""
    assert not [name for name in inspect.signature(Session.switch).parameters if "device" in name]
    (seen,) = played(model, {})
    assert not [name for name in scenes.names(seen["calls"]) if name.endswith("_ext")]


# -- S23: the size query is as slow as the save ------------------------------------------------------------------------


def test_s23_one_size_one_get_one_set(model: Path) -> None:
    """A switch asks for the size once, gets once and sets once; proving the bytes adds one get, and nothing else."""
    gets = {"off": 1, "positions": 1, "bytes": 2}
    for n_gets, seen in zip(
        gets.values(), played(model, *({"proof": proof, "n_seq": 4} for proof in gets)), strict=True
    ):
        names = scenes.names(seen["at_switch"])
        counts = [names.count(f"llama_state_{what}") for what in ("get_size", "get_data", "set_data")]
        assert counts == [1, n_gets, 1]
        assert seen["json"]["state_bytes"] > 0
        assert seen["json"]["stages_ms"]["saving"] is not None
        assert seen["tokens"] == seen["wanted"]


# -- S25: the answer of a removal is not ignored -----------------------------------------------------------------------


def child_s25(path: str, model: str) -> dict[str, Any]:
    stub, session = opened(path, model)
    scenes.generate(session, 1, 3)
    n = len(session.tokens()) - 1
    kept = session.tokens()[: n - 1]
    stub.faults("seq_rm:false")
    stub.reset()
    session.rewind(n - 1)
    calls = [call for call in stub.calls() if call.name in {"seq_rm", "llama_decode"}]
    told = {
        "names": [call.name for call in calls],
        "asked": [call.arguments["p0"] for call in calls if call.name == "seq_rm"],
        "first": decodes(stub)[0][0],
        "tokens": session.tokens() == kept,
        "held": session._live.positions()[0][1] == n - 2,
    }
    session.close()
    return told


def test_s25_a_cut_that_is_refused_means_reading_again(model: Path) -> None:
    """When seq_rm says no, the sequence is cleared and read again; nothing is decoded at the old position."""
    seen = run_child(child_s25, build(), model).value()
    assert seen["names"][:3] == ["seq_rm", "seq_rm", "llama_decode"]
    assert seen["asked"][1] == "-1"
    assert seen["first"] == 0
    assert seen["tokens"]
    assert seen["held"]


# -- S27: a state computed under another adapter -----------------------------------------------------------------------


def child_s27(path: str, model: str, adapter: str, folder: str) -> dict[str, Any]:
    library = Library.open(path)
    carry = f"{folder}/carry"
    with Session.open(model, Scene().placement(), library=library, prober=None, adapters=[(adapter, 1.0)]) as session:
        session.prefill(session.tokenize("hello"))
        session.save(carry)
    seen = {}
    for name, adapters in (("same", [(adapter, 1.0)]), ("scale", [(adapter, 0.5)]), ("none", [])):
        with Session.open(model, Scene().placement(), library=library, prober=None, adapters=adapters) as session:
            session.prefill(session.tokenize("other"))
            before = session.tokens()
            try:
                session.restore(carry)
                seen[name] = "restored"
            except CarryMismatch as error:
                seen[name] = f"{[one.field for one in error.differences]} {session.tokens() == before}"
    return seen


def test_s27_another_adapter_or_scale_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    """A carry made under an adapter at scale 1.0 is refused at 0.5, and without it; nothing is touched."""
    adapter = write_model(tmp_path / "adapter.gguf", extra={"general.type": "adapter", "adapter.type": "lora"})
    seen = run_child(child_s27, build(), model, adapter, tmp_path).value()
    assert seen["same"] == "restored"
    for name in ("scale", "none"):
        assert "adapter" in seen[name]
        assert seen[name].endswith("True")


def test_s27_adapters_travel_at_their_scales(model: Path, tmp_path: Path) -> None:
    """Adapters are loaded again and applied at the same scales after a switch and after a fallback."""
    adapter = write_model(tmp_path / "adapter.gguf", extra={"general.type": "adapter", "adapter.type": "lora"})
    table = [{"faults": faults, "adapters": [str(adapter)]} for faults in ("", "init:null:tensor", "decode:nan:tensor")]
    for seen in played(model, *table):
        assert seen["tokens"] == seen["wanted"]
        assert seen["mistakes"] == []
        assert set(seen["live"].values()) == {0}


# -- S31: a state that this build cannot read --------------------------------------------------------------------------


def child_s31_save(path: str, model: str, carry: str) -> list[int]:
    _stub, session = opened(path, model)
    scenes.generate(session, 1, N_TOKENS)
    session.save(carry)
    scenes.generate(session, 1, N_TOKENS)
    tokens = session.tokens()
    session.close()
    return tokens


def child_s31_restore(path: str, model: str, carry: str) -> dict[str, Any]:
    _stub, session = opened(path, model)
    before = session.tokens()
    try:
        session.restore(carry)
        answer = "restored"
    except (CarryDamaged, CarryMismatch, Refused, CallFailed) as error:
        answer = f"{type(error).__name__}: {error}"
    unchanged = session.tokens() == before
    scenes.generate(session, 1, N_TOKENS)
    tokens = session.tokens()
    session.close()
    return {"answer": answer, "unchanged": unchanged, "tokens": tokens}


def test_s31_a_state_of_another_size_is_an_error(model: Path, tmp_path: Path) -> None:
    """A carry that is cut is refused, and the session is as it was; one in another build's format is made to fit."""
    carry = tmp_path / "carry"
    run_child(child_s31_save, build(), model, carry).value()
    whole = carry.read_bytes()
    carry.write_bytes(whole[:-100])
    seen = run_child(child_s31_restore, build(), model, carry).value()
    assert seen["answer"].startswith("CarryDamaged")
    assert seen["unchanged"]
    tokens = run_child(child_s31_save, build(Variant.EPOCH_2609), model, carry).value()
    seen = run_child(child_s31_restore, build(), model, carry).value()
    assert seen["answer"] == "restored"
    assert seen["tokens"] == tokens


def child_s31_parked(path: str, model: str) -> dict[str, Any]:
    library = Library.open(path)
    stub = Stub(path)
    seen = {}
    for name, faults in (("with state", "load:null"), ("tokens only", "get_data:damage load:null")):
        session = scenes.start(library, model, Scene())
        scenes.generate(session, 1, N_TOKENS)
        stub.faults(faults)
        outcome = session.switch(session.placement.changed(mode=Scene(start="tensor").placement().mode))
        stub.faults("clear")
        if session.parked_at is None:
            seen[name] = f"not parked: {outcome.status.value}"
            session.close()
            continue
        with Session.open(model, Scene().placement(), library=library, prober=None) as second:
            second.restore(session.parked_at)
            scenes.generate(second, 1, N_TOKENS)
            seen[name] = "goes on" if [second.tokens()] == scenes.straight(library, model, Scene()) else "differs"
        session.close()
    return seen


def test_s31_what_was_parked_can_be_restored(model: Path, tmp_path: Path) -> None:
    """A parked session goes on in a new one with the same tokens; a failure before freeing parks nothing."""
    seen = run_child(child_s31_parked, build(), model, XDG_STATE_HOME=str(tmp_path)).value()
    assert seen == {"with state": "goes on", "tokens only": "not parked: fell_back"}


# -- S33: the sampler is not in the state ------------------------------------------------------------------------------


def test_s33_seeded_sampling_goes_on_as_if_nothing_had_happened(model: Path) -> None:
    """Ten tokens drawn with a seed and a penalty window around a switch are the ten of a session without one."""
    for seen in played(model, {"n_seq": 1}, {"n_seq": 4}, {"n_seq": 4, "unified": True}):
        assert seen["tokens"] == seen["wanted"]
        assert all(len(set(tokens[-2 * N_TOKENS :])) > 1 for tokens in seen["tokens"])
