"""Every stage of a switch x every failure that returns, on the stub library: the session serves on, or is parked.

What must hold in each cell: the tokens are those of a session that was never switched, the outcome names the stage
and the reason, requested and effective say what is, nothing is left alive, and the library was never called in a
way that it does not allow (the stub notes a free out of order, a second free, a read before a synchronize).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from splitctl.outcome import Stage
from tests.ctl import scenes
from tests.stublib import Variant, build, needs_compiler, run_child, write_model

pytestmark = [pytest.mark.stub, needs_compiler]

SHAPES = ({"n_seq": 1}, {"n_seq": 4}, {"n_seq": 4, "unified": True})
WAYS = (("layer", "tensor"), ("tensor", "layer"), ("none", "tensor"))


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to fail.

    Args:
        faults: for the stub; T stands for the target's mode, S for the mode that the session began in.
        stage: where the outcome says that it failed.
        words: what the reason says, in part.
        recomputed: whether the history had to be read again.
    """

    faults: str
    stage: str
    words: str
    recomputed: bool = False

    def for_way(self, begin: str, target: str) -> str:
        """The stub's text for a switch between two modes."""
        return self.faults.replace(":T", f":{target}").replace(":S", f":{begin}")


BEFORE_FREEING = (
    Fault("get_size:zero", "saving", "0"),
    Fault("get_data:zero", "saving", "llama_state_get_data"),
    Fault("get_data:short", "saving", "announced"),
    Fault("get_data:short=200", "saving", "announced"),
    Fault("get_data:damage", "sealing", "does not parse"),
    Fault("get_data:damage=4", "sealing", "does not parse"),
    Fault("get_data:damage=17", "sealing", "position"),
    Fault("model:lost_layers=1", "sealing", "K layers is 1, by the model's header 2"),
)
FALLS_BACK = (
    Fault("load:null:T", "placing", "unable to allocate STUB1 buffer"),
    Fault("init:null:T", "building", "failed to allocate compute buffers"),
    Fault("set_data:zero:T", "restoring", "stub was asked to refuse"),
    Fault("set_data:short:T", "restoring", "llama_state_set_data"),
    Fault("set_data:lie:T", "proving", "positions"),
    Fault("set_data:flip:T", "proving", "byte for byte"),
    Fault("get_data:short:T", "proving", "read back"),
    Fault("get_data:zero:T", "proving", "llama_state_get_data"),
    Fault("get_data:damage:T", "proving", "byte for byte"),
    Fault("decode:fail:T", "trial", "llama_decode failed (returned -3)"),
    Fault("decode:fail=1:T", "trial", "llama_decode failed (returned 1)"),
    Fault("decode:nan:T", "trial", "not numbers"),
    Fault("decode:const:T", "trial", "all equal"),
)
RECOMPUTES = (
    Fault("load:null:T load:null:S@1", "placing", "unable to allocate", recomputed=True),
    Fault("load:null:T init:null:S@1", "placing", "unable to allocate", recomputed=True),
    Fault("init:null:T set_data:zero:S@1", "building", "compute buffers", recomputed=True),
    Fault("set_data:zero:T set_data:lie:S@1", "restoring", "asked to refuse", recomputed=True),
    # What was sealed has a payload byte that nothing but the proof can know to be wrong.
    Fault("get_data:flip@1", "proving", "byte for byte", recomputed=True),
    Fault("decode:nan:T set_data:zero:S@1", "trial", "not numbers", recomputed=True),
)
PARKS = (
    Fault("load:null", "placing", "unable to allocate"),
    Fault("init:null", "building", "compute buffers"),
    Fault("set_data:zero:T load:null:S", "restoring", "asked to refuse"),
    Fault("set_data:zero decode:fail:S", "restoring", "asked to refuse"),
    Fault("decode:nan:T load:null:S", "trial", "not numbers"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


def cells(faults: tuple[Fault, ...], ways: tuple[tuple[str, str], ...] = WAYS) -> list[tuple[Fault, dict[str, Any]]]:
    return [
        (fault, {"faults": fault.for_way(*way), "start": way[0], "target": way[1], **shape})
        for fault in faults
        for way in ways
        for shape in SHAPES
    ]


def play(
    model: Path, table: list[tuple[Fault, dict[str, Any]]], variant: Variant = Variant.STOCK
) -> list[tuple[Fault, dict[str, Any], dict[str, Any]]]:
    cache = str(model.parent / "cache")
    told = run_child(
        scenes.play_all, build(variant), model, [s for _, s in table], XDG_CACHE_HOME=cache, XDG_STATE_HOME=cache
    ).value()
    return [(fault, scene, seen) for (fault, scene), seen in zip(table, told, strict=True)]


def check_whole(seen: dict[str, Any]) -> None:
    """What holds however a switch ends."""
    assert seen["mistakes"] == []
    assert set(seen["live"].values()) == {0}
    assert seen["in_placement"]


def check_order(calls: list[dict[str, Any]]) -> None:
    """Law 5 and its kin: no memory question from the first free to the next context, one size call before any get."""
    freed = False
    for name in scenes.names(calls):
        if name in {"llama_free", "llama_model_free"}:
            freed = True
        elif name == "llama_init_from_model":
            freed = False
        assert not (freed and name in {"ggml_backend_dev_memory", "llama_state_get_data", "llama_state_get_size"})


def test_switches_without_a_fault(model: Path) -> None:
    """Every ordered pair of the modes, one sequence and four, with streams and unified: switched and confirmed."""
    pairs = [(a, b) for a in ("none", "layer", "tensor") for b in ("none", "layer", "tensor") if a != b]
    nothing = Fault("", "", "")
    for _, scene, seen in play(model, cells((nothing,), tuple(pairs))):
        check_whole(seen)
        check_order(seen["calls"])
        assert seen["tokens"] == seen["wanted"], scene
        assert (seen["status"], seen["effective"], seen["confirmed"]) == ("switched", scene["target"], True), scene
        assert (seen["stage"], seen["reason"], seen["recomputed"]) == (None, "", False)


def test_a_failure_before_freeing_touches_nothing(model: Path) -> None:
    """What fails while saving or sealing frees nothing: the session serves as it did, and says why."""
    for fault, scene, seen in play(model, cells(BEFORE_FREEING)):
        check_whole(seen)
        assert seen["tokens"] == seen["wanted"], scene
        assert (seen["status"], seen["stage"]) == ("fell_back", fault.stage), (scene, seen["reason"])
        assert (seen["requested"], seen["effective"]) == (scene["target"], scene["start"])
        assert fault.words in seen["reason"], scene
        assert not {"llama_free", "llama_model_free", "llama_model_load_from_file"} & set(scenes.names(seen["calls"]))


def test_a_failure_after_freeing_falls_back(model: Path) -> None:
    """A target that cannot be placed, built, restored, proved or decoded in leaves the session in the old mode."""
    for fault, scene, seen in play(model, cells(FALLS_BACK)):
        check_whole(seen)
        check_order(seen["calls"])
        assert seen["tokens"] == seen["wanted"], scene
        assert (seen["status"], seen["stage"]) == ("fell_back", fault.stage), (scene, seen["reason"])
        assert (seen["requested"], seen["effective"]) == (scene["target"], scene["start"])
        assert fault.words in seen["reason"], (scene, seen["reason"])
        assert not seen["confirmed"]
        assert not seen["recomputed"]
        assert seen["first"] == ("switched" if fault.stage == "trial" else "fell_back")
        assert seen["json"]["fallback_ms"] > 0


def test_a_fallback_is_the_original_to_the_last_field(model: Path) -> None:
    """What a fallback loads and builds equals, argument by argument, what the session opened with (law 7)."""
    table = [(FALLS_BACK[0], {"faults": "load:null:tensor", "change": change}) for change in CHANGES]
    for _, scene, seen in play(model, table):
        loads = [c["arguments"] for c in seen["calls"] if c["name"] == "llama_model_load_from_file"]
        built = [c["arguments"] for c in seen["calls"] if c["name"] == "llama_init_from_model"]
        assert [load["split_mode"] for load in loads] == ["3", "1"], scene
        assert loads[1]["devices"] == "STUB0,STUB1"
        assert (loads[1]["tensor_split"], loads[1]["main_gpu"], loads[1]["n_gpu_layers"]) == ("null", "0", "-1")
        assert [(b["n_ctx"], b["n_batch"], b["n_ubatch"], b["offload_kqv"]) for b in built] == [
            ("1024", "16", "16", "1")
        ]
        assert seen["tokens"] == seen["wanted"]


def test_a_failure_with_both_placements_kept_loads_nothing_on_the_way_back(model: Path) -> None:
    """The old model and context are simply still there; what the failed try made is freed."""
    table = cells(FALLS_BACK, WAYS[:1])
    for fault, scene, seen in play(model, [(f, {**s, "weights": "resident"}) for f, s in table]):
        check_whole(seen)
        assert seen["tokens"] == seen["wanted"], scene
        assert (seen["status"], seen["stage"]) == ("fell_back", fault.stage), (scene, seen["reason"])
        assert fault.words in seen["reason"], (scene, seen["reason"])
        assert not seen["recomputed"]
        loads = [c["arguments"] for c in seen["calls"] if c["name"] == "llama_model_load_from_file"]
        # Memory that is short beside the old placement may be enough without it: then the old one is given up for it.
        is_short = fault.stage in {"placing", "building"}
        assert [load["split_mode"] for load in loads] == (["3", "3", "1"] if fault.stage == "placing" else ["3", "1"])[
            : None if is_short else 1
        ], scene


def test_a_way_back_to_a_kept_placement_that_fails_reads_the_tokens_again(model: Path) -> None:
    """What was kept is freed, the old placement is loaded afresh, and nothing is lost."""
    fault = Fault("set_data:zero:T set_data:lie:S@1", "restoring", "asked to refuse", recomputed=True)
    for _, scene, seen in play(model, [(f, {**s, "weights": "resident"}) for f, s in cells((fault,), WAYS[:1])]):
        check_whole(seen)
        assert (seen["status"], seen["recomputed"], seen["effective"]) == ("fell_back", True, "layer"), scene
        assert seen["tokens"] == seen["wanted"], scene


CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"n_ctx": 2048, "n_batch": 64, "n_ubatch": 32},
    {"tensor_split": (3.0, 1.0)},
    {"devices": ("STUB1", "STUB0"), "n_gpu_layers": 1},
)


def test_a_fallback_that_fails_reads_the_tokens_again(model: Path) -> None:
    """Where the old placement cannot be given the carry either, the history is read again from its tokens."""
    for fault, scene, seen in play(model, cells(RECOMPUTES)):
        check_whole(seen)
        check_order(seen["calls"])
        assert (seen["status"], seen["stage"]) == ("fell_back", fault.stage), (scene, seen["reason"])
        assert seen["recomputed"], scene
        assert seen["tokens"] == seen["wanted"], scene
        assert (seen["requested"], seen["effective"]) == (scene["target"], scene["start"])
        assert fault.words in seen["reason"], (scene, seen["reason"])


def test_what_cannot_even_be_read_again_is_parked(model: Path, tmp_path: Path) -> None:
    """Where no placement can be had the carry is put on disk, its path is told, and nothing stays alive."""
    for fault, scene, seen in play(model, cells(PARKS)):
        check_whole(seen)
        assert (seen["status"], seen["stage"]) == ("parked", fault.stage), (scene, seen["reason"])
        assert seen["parked"]
        assert seen["effective"] is None
        assert fault.words in seen["reason"], (scene, seen["reason"])
        assert Path(seen["parked_at"]).is_file()
        # The tokens are still told: none of what was delivered is lost.
        assert [t[: len(w) - scenes.N_TOKENS] for t, w in zip(seen["tokens"], seen["wanted"], strict=True)] == [
            w[: -scenes.N_TOKENS] for w in seen["wanted"]
        ]


def test_a_library_that_decodes_nowhere_says_so_and_loses_nothing(model: Path) -> None:
    """A trial that fails is fallen back from; an old mode that does not decode either is an error, not a loss."""
    for _, scene, seen in play(model, cells((Fault("decode:fail", "trial", "returned -3"),))):
        check_whole(seen)
        assert (seen["status"], seen["stage"], seen["effective"]) == ("fell_back", "trial", scene["start"])
        assert "llama_decode failed (returned -3)" in seen["error"]
        assert seen["tokens"] == seen["wanted"], scene


CANCELLABLE = ("quiescing", "checking", "saving", "sealing", "freeing", "placing", "building", "restoring", "proving")


def test_a_cancel_ends_in_the_old_placement(model: Path) -> None:
    """A cancel at any stage is no failure and is not tried again: the session goes on in the mode that it had."""
    table = [
        (Fault("", stage, "cancelled"), {"cancel_at": stage, **shape}) for stage in CANCELLABLE for shape in SHAPES
    ]
    for fault, scene, seen in play(model, table):
        check_whole(seen)
        check_order(seen["calls"])
        assert (seen["status"], seen["effective"]) == ("cancelled", "layer"), (scene, seen["reason"])
        assert seen["tokens"] == seen["wanted"], scene
        assert [c["arguments"]["split_mode"] for c in seen["calls"] if c["name"] == "llama_model_load_from_file"].count(
            "3"
        ) <= 1
        assert seen["stage"] == fault.stage


def test_a_native_switch_goes_through_the_same_machine(model: Path) -> None:
    """A build with its own call uses it when only mode and tensor_split change; the state is proved as ever."""
    table = [(Fault("", "", ""), {"start": a, "target": b, **s}) for a, b in WAYS for s in SHAPES]
    for _, scene, seen in play(model, table, Variant.NATIVE_SPLIT):
        check_whole(seen)
        assert (seen["status"], seen["via"], seen["confirmed"]) == ("switched", "native", True), scene
        assert seen["tokens"] == seen["wanted"], scene
        names = scenes.names(seen["at_switch"])
        assert names.count("llama_context_set_split_mode") == 1
        assert not {"llama_free", "llama_model_free", "llama_model_load_from_file"} & set(names)


NATIVE_FAULTS = (
    Fault("native:fail", Stage.SWITCHING_NATIVELY.value, "does not fit"),
    Fault("native:spoil", Stage.SWITCHING_NATIVELY.value, "did not leave things as they were"),
    Fault("native:state", "proving", "byte for byte"),
    Fault("get_data:damage:T", "proving", "byte for byte"),
    Fault("decode:nan:T", "trial", "not numbers"),
    Fault("decode:fail:T load:null:S@1", "trial", "returned -3", recomputed=True),
)


def test_a_native_switch_that_fails_falls_back(model: Path) -> None:
    """A library that puts its old mode back is believed; a failed proof or trial is undone by our own calls."""
    for fault, scene, seen in play(model, cells(NATIVE_FAULTS), Variant.NATIVE_SPLIT):
        check_whole(seen)
        assert (seen["status"], seen["stage"], seen["via"]) == ("fell_back", fault.stage, "native"), scene
        assert (seen["effective"], seen["recomputed"]) == (scene["start"], fault.recomputed)
        assert fault.words in seen["reason"], (scene, seen["reason"])
        assert seen["tokens"] == seen["wanted"], scene


def test_what_else_changes_is_not_left_to_the_library(model: Path) -> None:
    """A target that differs in more than mode and tensor_split is composed, though the library has its own call."""
    changes: tuple[dict[str, Any], ...] = (
        {"n_ctx": 2048},
        {"devices": ("STUB1", "STUB0")},
        {"n_batch": 8, "n_ubatch": 8},
    )
    table = [(Fault("", "", ""), {"change": change}) for change in changes]
    for _, scene, seen in play(model, table, Variant.NATIVE_SPLIT):
        assert (seen["status"], seen["via"]) == ("switched", "composed"), scene
        assert seen["tokens"] == seen["wanted"], scene
