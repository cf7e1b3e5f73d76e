"""`verify`: the cells it lays out, the numbers it compares with, every end of a cell, and what it remembers."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_native import Library, discover
from splitctl.cli.main import main
from splitctl.cli.output import ExitCode
from splitctl.errors import Refused
from splitctl.ipc import verifying
from splitctl.ipc.jobs import VerifyRequest
from splitctl.ipc.probes import Prober
from splitctl.ipc.process import JobEnd
from splitctl.ipc.verifying import Verification, Verifier, VerifyReport
from splitctl.model.facts import read_facts
from splitctl.model.identity import model_digest
from splitctl.placement import FlashAttn, Placement, SplitMode
from splitctl.probing import ProbeKey, ProbeVerdict, Verdict, VerdictCache
from splitctl.probing.comparing import NMSE_LIMIT, TIE_SIGMAS, WINDOW_ROWS, Tally, is_tie, nmse, nmse_limit, surprise
from splitctl.probing.matrix import Cell, cells
from splitctl.probing.verify import Task
from splitctl.session import Session
from splitctl.switching import rules
from splitctl.switching.rules import BuildFacts, HostFacts, SessionFacts
from tests.stublib import build, needs_compiler, run_child, write_model

_ROOT = Path(__file__).parents[3]
_BASE = Placement(devices=("STUB0", "STUB1"), n_ctx=256, n_threads=1)
_CPU = Placement(devices=("CPU", "CPU"), n_ctx=256, n_threads=1)
_F16 = [("f16", "f16")]
_TENSOR_ONLY = cells(_BASE, [SplitMode.TENSOR], _F16, [], [True])


def _env(**more: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("STUB_", "LLAMA_ARG_"))} | more


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny.gguf")


def _asked(model: Path, library: Path | None, some: tuple[Cell, ...], **more: Any) -> Verification:
    plain = Verification(model, read_facts(model), library, (), some, "the quick brown fox " * 8, 40, 4, 60.0)
    return dataclasses.replace(plain, **more)


def _verify(model: Path, faults: str = "", some: tuple[Cell, ...] = _TENSOR_ONLY, **more: Any) -> VerifyReport:
    env = _env(STUB_FAULTS=faults) if faults else _env()
    return Verifier(env)(_asked(model, build(), some, **more))


def _verify_each(
    model: Path,
    tries: Sequence[tuple[str, Cell]],
    cache: VerdictCache | None = None,
    on_found: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """Verify a sound reference, and then each cell with its own faults: what they share is computed once."""
    env, left = _env(), iter(tries)

    def on_cell(found: dict[str, Any]) -> None:
        assert found["verdict"] == "ok" or not found["reference"], found
        env["STUB_FAULTS"] = next(left, ("",))[0]
        on_found()

    some = (_TENSOR_ONLY[0], *(cell for _, cell in tries))
    return Verifier(env, cache, on_cell=on_cell)(_asked(model, build(), some)).cells[1:]


# -- the cells ---------------------------------------------------------------------------------------------------------


def test_every_mode_meets_every_cache_and_split() -> None:
    """Cells are modes times places times types times splits, each once, each pair of types after its reference."""
    modes = list(SplitMode)
    found = cells(_CPU, modes, [("f16", "f16"), ("q8_0", "q8_0")], [(3.0, 1.0), (6.0, 2.0)])
    # Splits of equal shares are one; mode none has no split; the reference is one of the layer cells.
    assert len(found) == 2 * (2 + 3 * 2 * 2)
    for types in (("f16", "f16"), ("q8_0", "q8_0")):
        mine = [one for one in found if one.cache_types == types]
        assert [one.is_reference for one in mine] == [True] + [False] * (len(mine) - 1)
        assert mine[0].placement.mode is SplitMode.LAYER
        assert (mine[0].placement.offload_kqv, mine[0].placement.tensor_split) == (True, None)
    tensor = [one.placement for one in found if one.placement.mode is SplitMode.TENSOR]
    assert {one.flash_attn for one in tensor} == {FlashAttn.ON}
    assert len({one.label() for one in found}) == len(found)


def test_several_sequences_are_tried_in_both_arrangements() -> None:
    """Every mode and split has them once more with one cache for all and with a stream each, in the first place."""
    asked = (_CPU, [SplitMode.LAYER, SplitMode.TENSOR], _F16, [(3.0, 1.0)], (False, True))
    alone, found = cells(*asked), cells(*asked, 3)
    several = [one.placement for one in found if one.placement.n_seq_max > 1]
    assert [one for one in found if one.placement.n_seq_max == 1] == list(alone)
    assert [(one.n_seq_max, one.kv_unified, one.offload_kqv) for one in several] == [
        (3, True, False),
        (3, False, False),
    ] * 4
    assert [one.is_reference for one in found] == [True] + [False] * (len(found) - 1)
    assert len({one.label() for one in found}) == len(found)


@given(
    st.lists(st.sampled_from(SplitMode), min_size=1, max_size=4),
    st.lists(st.sampled_from([("f16", "f16"), ("q8_0", "f16"), ("q4_0", "q4_0")]), min_size=1, max_size=3),
    st.lists(st.sampled_from([(1.0, 1.0), (3.0, 1.0), (1.0, 0.0)]), max_size=3),
)
def test_a_reference_always_comes_first(
    modes: list[SplitMode], types: list[tuple[str, str]], splits: list[tuple[float, ...]]
) -> None:
    """Whatever is asked, what a cell is compared with has been tried before it, and nothing is tried twice."""
    found = cells(_CPU, modes, types, splits)
    seen: set[tuple[str, str]] = set()
    for one in found:
        assert one.is_reference == (one.cache_types not in seen)
        seen.add(one.cache_types)
    normal = [one.placement.normalise() for one in found]
    assert len(set(normal)) == len(normal)


# -- the numbers -------------------------------------------------------------------------------------------------------


def _noise(shape: tuple[int, ...], seed: int = 1) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_equal_rows_have_no_error() -> None:
    """A text that is computed alike has error 0 and the same top token everywhere."""
    rows, tally = _noise((20, 100)), Tally()
    for row in rows:
        tally.add(row, row)
    assert (tally.nmse, tally.worst_nmse, tally.top1_agreement, tally.n_ties) == (0.0, 0.0, 1.0, 0)


def test_a_fault_that_begins_late_does_not_drown() -> None:
    """The worst stretch of rows is judged by itself: 500 right rows do not hide 20 wrong ones."""
    rows, wrong, tally = _noise((520, 50)), _noise((520, 50), 2), Tally()
    for index, row in enumerate(rows):
        tally.add(wrong[index] if index >= 500 else row, row)
    assert tally.nmse < 0.1
    assert tally.worst_nmse > 1.0


def test_few_rows_are_one_stretch() -> None:
    """A text shorter than a stretch is judged as a whole."""
    tally = Tally()
    for row in _noise((WINDOW_ROWS - 1, 10)):
        tally.add(row * np.float32(1.1), row)
    assert tally.worst_nmse == pytest.approx(0.01, rel=1e-3)


def test_masks_do_not_count() -> None:
    """Masked entries are left out of the error on both sides."""
    row = _noise((8,))
    masked = row.copy()
    masked[0] = -np.inf
    assert nmse(masked, masked) == 0.0
    assert nmse(masked, row) == 0.0


def test_an_error_against_nothing_is_infinite() -> None:
    """A reference of zeros agrees with zeros alone."""
    zeros = np.zeros(4, np.float32)
    assert nmse(zeros, zeros) == 0.0
    assert nmse(np.ones(4, np.float32), zeros) == float("inf")


def test_surprise_is_the_negative_log_likelihood() -> None:
    """Of equal logits every token has the likelihood of one in so many; large logits do not overflow."""
    assert surprise(np.full(100, 1e4, np.float32), 7) == pytest.approx(np.log(100))
    assert surprise(np.array([0.0, 1e4], np.float32), 1) == pytest.approx(0.0)


def test_quantized_caches_are_given_more_room() -> None:
    """The limit of the error is wider where either cache is quantized."""
    assert nmse_limit("f16", "bf16") < nmse_limit("q8_0", "f16") == nmse_limit("f16", "q4_0")


@given(st.integers(0, 2**32 - 1))
def test_another_top_token_within_the_noise_is_a_tie(seed: int) -> None:
    """A gap far below the noise of the row is a tie; one far above it never is."""
    row = _noise((1000,), seed)
    noise = np.float32(1e-3) * _noise((1000,), seed + 1)
    first, second = (int(one) for one in np.argsort(row)[::-1][:2])
    close = row.copy()
    close[first] = close[second] + np.float32(1e-4)
    mine = close + noise
    mine[second] = close[first] + np.float32(1e-3)
    assert is_tie(mine, close)
    far = row.copy()
    far[first] = far[second] + np.float32(1.0)
    mine = far + noise
    mine[second] = far[first] + np.float32(0.01)
    assert is_tie(mine, far) is (TIE_SIGMAS * float(np.sqrt(np.mean(np.square(mine - far)))) >= 1.0)
    assert not is_tie(mine, far)


# -- every end of a cell -----------------------------------------------------------------------------------------------


_ENDS: list[tuple[str, str, bool, dict[str, Any] | None]] = [
    ("load:abort:tensor", "dies", False, {"by": "signal", "name": "SIGABRT", "stage": "loading"}),
    ("init:segv:tensor", "dies", False, {"by": "signal", "signal": 11, "stage": "making the context"}),
    ("decode:abort:tensor", "dies", True, {"by": "signal", "stage": "reading the text"}),
    # The text is read, and the first batch of one token kills: K-norm with one KV head in 2026.10.
    ("decode:abort:tensor@3", "dies", True, {"by": "signal", "stage": "generating"}),
    ("get_data:abort:tensor", "dies", True, {"by": "signal", "stage": "taking the state out"}),
    ("set_data:abort:tensor", "dies", True, {"by": "signal", "stage": "putting the state into a fresh context"}),
    ("load:kill:tensor", "inconclusive", False, {"by": "signal", "name": "SIGKILL"}),
    ("load:null:tensor", "inconclusive", False, {"by": "return", "function": "llama_model_load_from_file"}),
    ("decode:fail:tensor", "fails", True, {"by": "return", "function": "llama_decode"}),
    ("set_data:zero:tensor", "fails", True, {"by": "return", "function": "llama_state_set_data"}),
    ("decode:nan:tensor", "wrong", True, None),
    ("decode:const:tensor", "wrong", True, None),
    ("get_data:flip:tensor@2", "wrong", True, None),
]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What is found with each of the faults."""
    model = write_model(tmp_path_factory.mktemp("ends") / "tiny.gguf")
    faults = [row[0] for row in _ENDS]
    return dict(zip(faults, _verify_each(model, [(one, _TENSOR_ONLY[1]) for one in faults]), strict=True))


@needs_compiler
@pytest.mark.stub
@pytest.mark.parametrize(("faults", "verdict", "loads", "end"), _ENDS)
def test_every_end_is_a_finding(
    ends: dict[str, dict[str, Any]], faults: str, verdict: str, loads: bool, end: dict[str, Any] | None
) -> None:
    """A cell that dies, fails or computes wrongly says how far it came and what ended it, beside a sound reference."""
    found = ends[faults]
    assert (found["verdict"], found["loads"]) == (verdict, loads), found
    assert found["why"]
    if end is None:
        assert found["end"] is None
    else:
        assert {name: found["end"][name] for name in end} == end
    if "abort" in faults:
        assert found["end"]["assert"] == "ggml-backend.cpp:1: GGML_ASSERT(stub_was_asked_to_abort) failed"
    if "@3" in faults:
        # What was found before the death is told.
        assert found["nmse"] == 0.0
    json.dumps(found, allow_nan=False)


@needs_compiler
@pytest.mark.stub
def test_a_sound_build_is_right_in_every_cell(tiny: Path) -> None:
    """Where the modes agree, every number says so: error 0, the same text, the state back, memory used."""
    every = cells(_BASE, [SplitMode.TENSOR], _F16, [(3.0, 1.0)])
    report = _verify(tiny, some=(every[0], every[1], every[-1]))
    assert [(one["verdict"], one["cache"], one["tensor_split"]) for one in report.cells] == [
        ("ok", "devices", None),
        ("ok", "devices", None),
        ("ok", "host", [3.0, 1.0]),
    ]
    first, *others = report.cells
    assert first["reference"]
    assert "nmse" not in first
    assert first["nmse_control"] == 0.0
    for found in others:
        assert ("nmse_control" in found, found["nmse_limit"]) == (False, NMSE_LIMIT)
        assert (found["nmse"], found["top1_agreement"], found["top1_ties"]) == (0.0, 1.0, 0)
        assert (found["text_hash"], found["perplexity"]) == (first["text_hash"], first["perplexity"])
    for found in report.cells:
        assert found["state_equal"] is True
        assert found["state_bytes"] > 0
        assert 0 < found["rss_before_bytes"] < found["rss_peak_bytes"]
        assert len(found["text_hash"]) == 8
    assert report.library["devices"]


@needs_compiler
@pytest.mark.stub
@pytest.mark.parametrize("how", ["abort", "nan", "fail"])
def test_what_ends_the_comparison_of_a_reference_with_itself_ends_nothing_else(tiny: Path, how: str) -> None:
    """By then the reference is measured: it is right, how far it is from itself is unknown, the others are tried."""
    first, tensor = _verify(tiny, f"decode:{how}:layer@12").cells
    assert (first["verdict"], first["end"], first["state_equal"], first["nmse_control"]) == ("ok", None, True, None)
    assert (tensor["verdict"], tensor["nmse_limit"]) == ("ok", NMSE_LIMIT)


def test_each_cell_is_held_to_the_noise_of_what_it_is_judged_by(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is widened by the reference of the same cache types, or by the first one."""
    some = cells(_CPU, [SplitMode.TENSOR], [("f16", "f16"), ("f32", "f32")], [], [True])
    noise = {"f16": 0.01, "f32": 0.02}
    asked: list[float] = []

    def answer(request: VerifyRequest, **_: Any) -> JobEnd:
        asked.append(request.control)
        if request.keep is None:
            return JobEnd({"verdict": "ok"})
        request.keep.touch()
        return JobEnd({"verdict": "ok", "nmse_control": noise[request.placement.type_k]})

    monkeypatch.setattr(verifying, "run_job", answer)
    Verifier(_env())(_asked(tiny, None, some))
    assert asked == [0.0, 0.01, 0.01, 0.02]
    task = Task("", 1, 1, None, None, None, asked[-1])
    assert task.limit(some[-1].placement) == pytest.approx(0.08)


@needs_compiler
@pytest.mark.stub
def test_what_goes_wrong_with_several_sequences_alone_is_found(tiny: Path) -> None:
    """A build that lets a sequence see another one's cells is right with one, and wrong where they share a cache."""
    _, alone, unified, streams = cells(_BASE, [SplitMode.TENSOR], _F16, [], [True], 2)
    mixed = "decode:mix:tensor"
    found = _verify_each(tiny, [("", unified), (mixed, alone), (mixed, unified), (mixed, streams)])
    assert [(one["n_seq"], one["kv_unified"], one["verdict"]) for one in found] == [
        (2, True, "ok"),
        (1, False, "ok"),
        (2, True, "wrong"),
        (2, False, "ok"),
    ]
    right = [one for one in found if one["verdict"] == "ok"]
    assert [(one["nmse"], one["state_equal"]) for one in right] == [(0.0, True)] * 3
    assert len({one["text_hash"] for one in right}) == 1


@needs_compiler
@pytest.mark.stub
def test_a_state_of_several_that_is_lost_keeps_nobody_from_opening(tiny: Path, tmp_path: Path) -> None:
    """That is a finding of the table; a session may be served so, and a rule refuses the switches that lose it."""
    cache = VerdictCache(tmp_path / "probes.json")
    some = cells(_BASE, [SplitMode.TENSOR], _F16, [], [True], 2)
    report = Verifier(_env(STUB_FAULTS="get_data:flip:tensor@2"), cache)(_asked(tiny, build(), (some[0], some[3])))
    assert [one["verdict"] for one in report.cells] == ["ok", "wrong"]
    devices = tuple(report.library["devices"])
    keys = [ProbeKey.of(build(), read_facts(tiny), one.placement, devices) for one in (some[0], some[3])]
    assert [cache.get(key) is None for key in keys] == [False, True]


@needs_compiler
@pytest.mark.stub
def test_a_hang_ends_at_the_deadline(tiny: Path) -> None:
    """A child that is silent for too long is ended and said to hang."""
    found = _verify(tiny, "decode:hang:tensor", deadline_s=3.0).cells[-1]
    assert (found["verdict"], found["end"]["by"], found["end"]["deadline_s"]) == ("dies", "deadline", 3.0)
    assert "it hangs while reading the text" in found["why"]


@needs_compiler
@pytest.mark.stub
def test_a_cancel_ends_the_child_and_keeps_what_was_found(tiny: Path) -> None:
    """A cancel while a cell hangs ends it at once; the cells before it stay found."""
    done: list[Any] = []
    env = _env(STUB_FAULTS="decode:hang:tensor")
    verifier = Verifier(env, on_cell=done.append, is_cancelled=lambda: bool(done))
    report = verifier(_asked(tiny, build(), _TENSOR_ONLY))
    assert report.is_cancelled
    assert [one["verdict"] for one in report.cells] == ["ok"]
    assert psutil.Process().children(recursive=True) == []


# -- what it tells the rules -------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.stub
def test_what_was_found_takes_the_place_of_what_was_known(tiny: Path, tmp_path: Path) -> None:
    """The prober of a session gives what `verify` found last, without a child of its own; a shortage is not kept."""
    cache = VerdictCache(tmp_path / "probes.json")
    prober = Prober(build(), _env(), cache, device_names=("CPU",))
    placement = _BASE.changed(mode=SplitMode.TENSOR)
    facts = read_facts(tiny)
    seen: list[ProbeVerdict | None] = []

    def look() -> None:
        seen.append(prober.known(placement, facts))
        assert seen[-1] is None or prober(tiny, placement, facts) == seen[-1]
        assert prober.known(_BASE.changed(flash_attn=FlashAttn.ON), facts) is not None

    # What came of missing memory says nothing about the build.
    for some in (("init:null:tensor", "", "decode:abort:tensor"), ("", "decode:const:tensor")):
        _verify_each(tiny, [(faults, _TENSOR_ONLY[1]) for faults in some], cache, look)
    assert [one and (one.verdict.value, one.remembered) for one in seen] == [
        None,
        None,
        ("ok", True),
        ("dies", True),
        ("dies", True),
        ("ok", True),
        ("wrong", True),
    ]


@needs_compiler
@pytest.mark.stub
@pytest.mark.parametrize("faults", ["load:abort:layer", "init:null:layer", "decode:nan:layer", "decode:fail:layer"])
def test_without_a_reference_nothing_is_compared_or_remembered(tiny: Path, tmp_path: Path, faults: str) -> None:
    """Where layer mode itself is not right, maybe for its file's sake, that is shown, not kept, and ends the whole."""
    verifier = Verifier(_env(STUB_FAULTS=faults), VerdictCache(tmp_path / "probes.json"))
    report = verifier(_asked(tiny, build(), _TENSOR_ONLY))
    assert len(report.cells) == 1
    assert (report.cells[0]["verdict"] != "ok", report.remembered) == (True, 0)
    assert not (tmp_path / "probes.json").exists()


@needs_compiler
@pytest.mark.stub
def test_a_file_that_goes_away_between_two_cells_is_no_finding(tiny: Path, tmp_path: Path) -> None:
    """A cell whose file is gone is inconclusive, and only what was found of the file itself is remembered."""
    verifier = Verifier(_env(), VerdictCache(tmp_path / "probes.json"), on_cell=lambda _: tiny.unlink(missing_ok=True))
    report = verifier(_asked(tiny, build(), _TENSOR_ONLY))
    assert [one["verdict"] for one in report.cells] == ["ok", "inconclusive"]
    assert report.remembered == 1


def child_with_what_is_known(path: str, model: str, cache: str) -> dict[str, Any]:
    """Open a session in layer mode with a cache of f32, and one of f16; switch the second to f32."""
    library = Library.open(path)
    prober = Prober(Path(path), _env(), VerdictCache(Path(cache)), is_cancelled=lambda: True)
    quantized = _BASE.changed(type_k="f32", type_v="f32")
    try:
        Session.open(model, quantized, library=library, prober=prober).close()
        opened = ""
    except Refused as error:
        opened = str(error)
    with Session.open(model, _BASE, library=library, prober=prober) as session:
        session.prefill(session.tokenize("hello"))
        outcome = session.switch(session.placement.changed(type_k="f32", type_v="f32"))
        mode = session.placement.type_k
    return {"opened": opened, "status": outcome.status.value, "reason": outcome.reason, "type": mode}


@needs_compiler
@pytest.mark.stub
def test_what_is_known_counts_in_layer_mode_too(tiny: Path, tmp_path: Path) -> None:
    """A cache type that `verify` found wrong in layer mode is refused when a session opens and when it switches."""
    cache = VerdictCache(tmp_path / "probes.json")
    some = cells(_BASE, [SplitMode.LAYER], [("f16", "f16"), ("f32", "f32")], [], [True])
    verifier = Verifier(_env(), cache)
    assert [one["verdict"] for one in verifier(_asked(tiny, build(), some)).cells] == ["ok", "ok"]
    seen = run_child(child_with_what_is_known, build(), tiny, tmp_path / "probes.json").value()
    assert (seen["opened"], seen["status"], seen["type"]) == ("", "switched", "f32")
    facts = read_facts(tiny)
    wrong = ProbeVerdict(Verdict.WRONG, "NMSE 0.5 (limit 0.1)")
    for flash in (FlashAttn.AUTO, FlashAttn.ON):
        placement = _BASE.changed(type_k="f32", type_v="f32", flash_attn=flash)
        key = ProbeKey.of(build(), facts, placement, ("STUB0", "STUB1"))
        cache.put(key, wrong, lambda: model_digest(facts.files))
    seen = run_child(child_with_what_is_known, build(), tiny, tmp_path / "probes.json").value()
    assert "came to: wrong (NMSE 0.5 (limit 0.1))" in seen["opened"]
    assert (seen["status"], seen["type"]) == ("refused", "f16")
    assert "came to: wrong" in seen["reason"]


# -- the command -------------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.stub
def test_the_command_prints_one_object(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`verify --json` prints the cells on stdout, progress on stderr, and leaves the verdicts in the cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("STUB_FAULTS", "decode:abort:tensor")
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog")
    command = ["verify", "-m", str(tiny), "--lib", str(build()), "--device", "STUB0,STUB1", "-t", "1", "-n", "2"]
    more = [
        "--text",
        str(text),
        "-np",
        "1",
        "-sm",
        "tensor",
        "-ts",
        "3,1",
        "-ctk",
        "f16,q8_0",
        "--cache",
        "devices",
        "--json",
    ]
    assert main([*command, *more]) == ExitCode.DONE
    out, err = capfd.readouterr()
    body = json.loads(out)
    assert out.count("\n") == 1
    assert body["n_cells"] == len(body["cells"]) == 6
    assert [(one["mode"], one["type_k"], one["tensor_split"], one["verdict"]) for one in body["cells"]] == [
        ("layer", "f16", None, "ok"),
        ("tensor", "f16", None, "dies"),
        ("tensor", "f16", [3.0, 1.0], "dies"),
        ("layer", "q8_0", None, "ok"),
        ("tensor", "q8_0", None, "dies"),
        ("tensor", "q8_0", [3.0, 1.0], "dies"),
    ]
    assert body["library"]["path"] == str(build())
    assert "2 of 6: tensor, f16/f16, cache on the devices" in err
    assert "SIGABRT while reading the text, ggml-backend.cpp:1: GGML_ASSERT" in err
    assert (tmp_path / "splitctl" / "probes.json").is_file()


@needs_compiler
@pytest.mark.stub
def test_the_command_prints_a_table(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without --json a table is on stdout, with what is said of cells that are not right below it; nothing is kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("STUB_FAULTS", "decode:abort:tensor")
    command = ["verify", "-m", str(tiny), "--lib", str(build()), "--device", "STUB0,STUB1", "-t", "1", "-n", "2"]
    assert main([*command, "--tokens", "20", "-sm", "tensor", "--cache", "devices", "--no-remember"]) == ExitCode.DONE
    out, _ = capfd.readouterr()
    assert "layer *" in out
    assert out.count("2 unified") == out.count("2 streams") == 1
    assert "2: dies: SIGABRT while reading the text, ggml-backend.cpp:1: GGML_ASSERT" in out
    assert not (tmp_path / "splitctl" / "probes.json").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["-ctk", "f16,q3_k"], ExitCode.USAGE, "'q3_k' is not one of"),
        (["-ts", "1,2,3"], ExitCode.USAGE, "2 shares at most"),
        (["-ts", "x"], ExitCode.USAGE, "such as 3,1"),
        (["-sm", "sideways"], ExitCode.USAGE, "none, layer, row, tensor"),
        (["--tokens", "1"], ExitCode.USAGE, "--tokens"),
        (["--deadline", "0"], ExitCode.USAGE, "--deadline"),
        (["--text", "/nonexistent"], ExitCode.FAILED, "cannot be read"),
        (["--lib", "/nonexistent/libllama.so"], ExitCode.FAILED, "/nonexistent/libllama.so"),
        (["-m", "/nonexistent.gguf"], ExitCode.FAILED, "/nonexistent.gguf"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_verified_is_one_line(
    arguments: list[str], code: ExitCode, said: str, tiny: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A flag, a file or a library that cannot be used is told in one line, and nothing is on stdout."""
    assert main(["verify", "-m", str(tiny), "--device", "CPU,CPU", "-sm", "tensor", *arguments]) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert said in err.splitlines()[-1]


def test_no_room_for_the_logits_is_told_before_anything_is_tried(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where the file of logits would not fit, the command says how much it wants and where, and starts no child."""
    monkeypatch.setattr(verifying.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 1000))
    assert main(["verify", "-m", str(tiny), "--device", "CPU,CPU", "--no-remember"]) == ExitCode.FAILED
    _, err = capfd.readouterr()
    assert "532480 bytes and 1000 are free; set TMPDIR" in err
    assert err.count("\n") == 1


@needs_compiler
@pytest.mark.stub
def test_an_unknown_device_is_a_flag_s_fault(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A device that the library lacks ends the whole with status 2 and names those that there are."""
    command = ["verify", "-m", str(tiny), "--lib", str(build()), "--device", "NOPE,STUB0", "--no-remember", "--json"]
    assert main(command) == ExitCode.USAGE
    out, _ = capfd.readouterr()
    assert "STUB0" in json.loads(out)["error"]["message"]


@needs_compiler
@pytest.mark.stub
def test_ctrl_c_ends_the_children(tiny: Path) -> None:
    """An interrupt while a cell hangs ends command and child with status 130, and tells what was found before."""
    program = "import sys; from splitctl.cli import main; sys.exit(main())"
    devices = ["--device", "STUB0,STUB1", "-t", "1", "-sm", "tensor"]
    arguments = ["verify", "-m", tiny, "--lib", build(), *devices, "--json", "--no-remember"]
    with subprocess.Popen(
        [sys.executable, "-P", "-c", program, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_env(STUB_FAULTS="decode:hang:tensor", PYTHONPATH=str(_ROOT)),
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith(b"2 of "):
                break
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == ExitCode.CANCELLED, err
    body = json.loads(out)
    assert body["error"]["kind"] == "Cancelled"
    assert [one["verdict"] for one in body["cells"]] == ["ok"]
    assert psutil.wait_procs(children, timeout=60.0)[1] == []


# -- a real build ------------------------------------------------------------------------------------------------------

_CURRENT = "xllamacpp 2026.10.11549"


@pytest.fixture(scope="module")
def current() -> Path:
    """The build that the tables were filled by watching."""
    for one in discover.candidates({}):
        if one.usable and f"xllamacpp {one.version}".endswith(_CURRENT.split()[1]):
            return one.path
    pytest.skip(f"{_CURRENT} is not installed: pip install 'splitctl[cpu]'")


@pytest.fixture(scope="module")
def verified(
    current: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Path], tuple[VerifyReport, VerdictCache]]:
    """Verifies a model on two virtual devices in layer and tensor mode, once for all tests."""
    known: dict[Path, tuple[VerifyReport, VerdictCache]] = {}
    folder = tmp_path_factory.mktemp("verified")

    def verify(model: Path) -> tuple[VerifyReport, VerdictCache]:
        if model not in known:
            cache = VerdictCache(folder / f"{model.stem}.json")
            asked = _asked(model, current, cells(_CPU, [SplitMode.TENSOR], _F16, []), n_tokens=24)
            known[model] = Verifier(_env(), cache)(asked), cache
        return known[model]

    return verify


def _codes(model: Path, library: Path, cache: VerdictCache, placement: Placement) -> tuple[list[str], str]:
    """What the rules say of a placement, with the verdict that is remembered."""
    facts = read_facts(model)
    known = Prober(library, _env(), cache).known(placement, facts)
    host, session = HostFacts({"CPU": "cpu"}), SessionFacts({})
    found = rules.check(None, placement, facts, BuildFacts(_CURRENT), host, session, known)
    return [one.code for one in found if one.blocking], " ".join(one.text for one in found)


@pytest.mark.model
def test_smollm2_is_right_in_tensor_mode(
    smollm2: Path, current: Path, verified: Callable[[Path], tuple[VerifyReport, VerdictCache]]
) -> None:
    """SmolLM2 (3 KV heads) on two devices: tensor mode agrees with layer mode, and the rules let it pass."""
    report, cache = verified(smollm2)
    layer, tensor, _ = report.cells
    assert (layer["verdict"], tensor["verdict"]) == ("ok", "ok"), tensor["why"]
    assert 0.0 < tensor["nmse"] < 0.02
    # Another order of floats changes the last bits of one mode as it does those between two.
    assert 0.1 < layer["nmse_control"] / tensor["nmse"] < 10.0
    assert tensor["perplexity"] == pytest.approx(layer["perplexity"], rel=0.05)
    assert tensor["state_equal"] is True
    assert tensor["state_bytes"] == layer["state_bytes"]
    assert tensor["buffer_bytes"] > 0
    assert _codes(smollm2, current, cache, _CPU.changed(mode=SplitMode.TENSOR))[0] == []


@pytest.mark.model
def test_a_cache_on_the_host_kills_tensor_mode(
    smollm2: Path, current: Path, verified: Callable[[Path], tuple[VerifyReport, VerdictCache]]
) -> None:
    """SmolLM2 with the cache in host memory dies in tensor mode, and the rules refuse it by name from then on."""
    report, cache = verified(smollm2)
    found = report.cells[2]
    assert (found["mode"], found["cache"], found["verdict"]) == ("tensor", "host", "dies")
    assert found["end"]["by"] == "signal"
    codes, text = _codes(smollm2, current, cache, _CPU.changed(mode=SplitMode.TENSOR, offload_kqv=False))
    assert codes == ["cache-on-host-in-tensor-mode", "probe-dies"]
    assert f"{_CURRENT} with llama, -sm tensor --device CPU,CPU" in text
    assert found["end"]["name"] in text


@pytest.mark.slow
@pytest.mark.model
def test_gemma3_dies_in_tensor_mode(
    gemma3_270m: Path, current: Path, verified: Callable[[Path], tuple[VerifyReport, VerdictCache]]
) -> None:
    """Gemma 3 (one KV head, K-norm) reads its text, and the first batch of one token aborts: refused by name."""
    report, cache = verified(gemma3_270m)
    _, tensor, host = report.cells
    assert (tensor["verdict"], tensor["loads"], tensor["end"]["name"]) == ("dies", True, "SIGABRT")
    assert tensor["end"]["stage"] == "generating"
    assert tensor["end"]["assert"].startswith("ggml-backend-meta.cpp:547: GGML_ASSERT(src_ss[0].axis")
    assert tensor["nmse"] < 0.02
    assert host["verdict"] == "dies"
    codes, text = _codes(gemma3_270m, current, cache, _CPU.changed(mode=SplitMode.TENSOR))
    assert codes == ["k-norm-with-one-kv-head", "probe-dies"]
    assert "GGML_ASSERT(src_ss[0].axis" in text
    assert _codes(gemma3_270m, current, cache, _CPU.changed(mode=SplitMode.TENSOR, offload_kqv=False))[0][-1] == (
        "probe-dies"
    )


@pytest.mark.slow
@pytest.mark.model
def test_what_was_verified_is_refused_without_another_try(
    gemma3_270m: Path, current: Path, verified: Callable[[Path], tuple[VerifyReport, VerdictCache]]
) -> None:
    """The prober answers from what `verify` left, so a session is refused at once."""
    _, cache = verified(gemma3_270m)
    prober = Prober(current, _env(), cache, is_cancelled=lambda: True)
    answer = prober(gemma3_270m, _CPU.changed(mode=SplitMode.TENSOR), read_facts(gemma3_270m))
    assert (answer.verdict, answer.remembered) == (Verdict.DIES, True)
