"""The soak of the policy: what it counts, and its short form on a real build."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from splitctl.cli.bench import bench
from splitctl.placement import Placement, SplitMode
from tests.native.real import NEWEST, library_of
from tests.tool import run_tool
from tools import soak_auto
from tools.greedy_gaps import Gaps
from tools.soak_auto import Answer, busy, summary

_STATUS = {
    "policy": "auto",
    "decisions": {"stay": 3, "switch": 1},
    "waits": {"count": 2, "sum_s": 6.0, "longest_s": 4.0},
}
_ENDED = {"switched": 1}
_SAID = ["loading", "policy: goes to tensor: 8 tokens to come", "policy: stays in layer: holds 1 prompt"]
_RIGHT = Gaps(worst=0.1, at=3, n_other=1, n=60, control=5.0)


def _answer(came: float, ended: float, **more: Any) -> Answer:
    return Answer(came < 5.0, [1, 2], 4, came, came + 1.0, ended, tokens=[3, 4], **more)


def test_time_counts_while_somebody_is_there() -> None:
    """Answers that overlap count once, and what lies between them not at all."""
    assert busy([_answer(10.0, 12.0), _answer(1.0, 4.0), _answer(2.0, 3.0), _answer(3.5, 6.0)]) == 7.0


def test_a_soak_without_faults() -> None:
    """Waits within the bound, a line for each switch and right texts are no fault; figures are what was seen."""
    found = summary([_answer(1.0, 4.0), _answer(8.0, 9.0)], _STATUS, _ENDED, _SAID, [_RIGHT], 4.0)
    assert (found["faults"], found["switches"], found["tokens"]) == ([], {"switched": 1}, 4)
    assert found["first_token_s"]["reads"] == {"median": 1.0, "worst": 1.0}


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({"max_wait_s": 2.0}, "held for 4.0 s, and 2 s is the bound"),
        ({"gaps": [Gaps(3.0, 0, 1, 60, 9.0)]}, "token 0 is 3.00 below"),
        ({"said": []}, "0 switches in the log"),
        ({"ended": {"fell_back": 2}}, "2 switches ended as fell_back"),
        ({"status": {"policy": "off", "fault": "ValueError"}}, "the policy is off: ValueError"),
        ({"answers": [_answer(1.0, 2.0, fault="it ended")]}, "it ended"),
    ],
)
def test_what_is_wrong_is_a_fault(more: dict[str, Any], fault: str) -> None:
    """Too long a wait, a wrong text, a switch that no line tells of or that fell back, and a policy that ended."""
    usual = {"answers": [_answer(1.0, 2.0)], "status": _STATUS, "ended": _ENDED, "said": _SAID, "gaps": [_RIGHT]}
    (found,) = summary(**usual | {"max_wait_s": 4.0} | more)["faults"]
    assert fault in found


def test_it_measures_what_it_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The bench is of the model, library, devices, threads and sequences that are served, in both modes."""
    ran: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        ran.append(command)
        return subprocess.CompletedProcess(command, len(ran) - 1)

    monkeypatch.setattr(soak_auto.subprocess, "run", run)
    placement = Placement(devices=("CPU", "CPU"), n_ctx=3584, n_seq_max=8, kv_unified=True, n_threads=1)
    soak_auto.measure(tmp_path / "a model.gguf", tmp_path / "lib.so", placement, 30.0)
    assert ran[0][1:4] == ["-m", "splitctl", "bench"]
    with bench.make_context("bench", ran[0][4:]) as context:
        asked = context.params
    assert (asked["model"], asked["library"]) == (tmp_path / "a model.gguf", tmp_path / "lib.so")
    assert (asked["modes"], asked["budget_s"]) == ((SplitMode.LAYER, SplitMode.TENSOR), 30.0)
    assert (asked["n_seq_max"], asked["n_threads"], asked["kv_unified"]) == (8, 1, True)
    with pytest.raises(SystemExit, match="ended with exit status 1"):
        soak_auto.measure(tmp_path / "a model.gguf", tmp_path / "lib.so", placement, 30.0)


@pytest.mark.build
@pytest.mark.model
@pytest.mark.slow
def test_a_real_session_switches_by_itself(smollm2: Path, tmp_path: Path) -> None:
    """Rates that make it switch, two clients of two kinds: it does, every text is right, and no wait is too long."""
    rates = tmp_path / "rates.json"
    modes = {"layer": {"prompt_tps": 400, "generate_tps": 8}, "tensor": {"prompt_tps": 40, "generate_tps": 80}}
    rates.write_text(json.dumps({"switch_s": 0.3, "modes": modes}), encoding="ascii")
    size = ("--clients", "2", "--seconds", "0", "--switches", "1", "--long", "32", "--short", "6", "--judge", "2")
    done = run_tool("soak_auto", "--json", *size, "--rates", rates, "--lib", library_of(NEWEST), "--model", smollm2)
    print(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["faults"] == []
    assert done.returncode == 0
    assert result["switches"]["switched"] >= 1
    assert result["requests"] >= 2
    assert (result["judged"], result["wrong"]) == (2, 0)
    assert any(line.startswith("policy: goes to tensor") for line in result["log"])
