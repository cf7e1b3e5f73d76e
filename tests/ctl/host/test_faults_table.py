"""The table of faults of a hosted session: it is whole, and its short form passes, on the stub and for real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from splitctl.ipc import orders
from splitctl.ipc.wire import to_line
from tests.native.real import NEWEST, library_of
from tests.stublib import FaultFile, needs_compiler
from tests.tool import run_tool
from tools.fault_cells import (
    AHEAD_STAGES,
    BESIDE_STAGES,
    BY_SIGNAL,
    FOR_EVER,
    ONCE,
    STAGES,
    UNSEALED,
    WAYS,
    Kind,
    ahead_cells,
    beside_cells,
    cells,
    few_ahead_cells,
    few_beside_cells,
    few_cells,
    few_pinned_cells,
    few_real_beside_cells,
    few_real_cells,
    few_resident_cells,
    pinned_cells,
    real_beside_cells,
    real_cells,
    resident_cells,
)


def _faults(*arguments: str | Path) -> dict[str, Any]:
    done = run_tool("faults", "--json", *arguments)
    print(done.stderr)
    assert done.stdout, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert (done.returncode == 0) is (result["failed"] == 0 and result["passed"] > 0)
    return result


def test_every_stage_meets_every_fault() -> None:
    """Nine stages x six faults, and three that last, x both ways x one stream and four; each is one cell."""
    found = Counter((cell.stage, cell.kind, (cell.start, cell.target), cell.n_streams) for cell in cells())
    assert found == Counter(
        (stage, kind, way, n) for stage in STAGES for kind in (*ONCE, *FOR_EVER) for way in WAYS for n in (1, 4)
    )
    assert len(ONCE) == 6
    assert len(cells()) == len({cell.name for cell in cells()})


def test_a_cell_is_played_or_says_why_not() -> None:
    """What is left out has a reason, and only what no stage can meet: a death is possible in all of them."""
    assert all(bool(cell.items) is not bool(cell.why_not) for cell in cells())
    left_out = {(cell.stage, cell.kind) for cell in cells() if cell.why_not and cell.kind in ONCE}
    assert left_out == {
        *((stage, Kind.FAILS) for stage in ("checking", "sealing", "freeing")),
        *((stage, Kind.HANGS) for stage in ("checking", "sealing")),
        *((stage, Kind.DAMAGED) for stage in ("checking", "freeing", "placing", "building")),
    }


def test_the_short_tables_miss_nothing() -> None:
    """Every stage and every kind comes in the short form, three stages in the real one, and both ways in both."""
    few = few_cells()
    assert {cell.stage for cell in few} == set(STAGES)
    assert {cell.kind for cell in few} >= set(ONCE)
    assert {cell.end for cell in few} == {cell.end for cell in cells()}
    assert {cell.kind for cell in few_real_cells()} == set(BY_SIGNAL)
    assert {cell.stage in UNSEALED for cell in few_real_cells()} == {True, False}
    assert len(list(real_cells())) == len(STAGES) * 2 * 2 * 2
    for table in (few, few_real_cells()):
        assert {(cell.start, cell.target) for cell in table} == set(WAYS)
        assert {cell.n_streams for cell in table} == {1, 4}


def test_both_workers_of_a_switch_beside_meet_every_fault_at_every_step() -> None:
    """What is left out has a reason; the second can fail at each of its steps, and either can be killed at any."""
    table = beside_cells()
    found = Counter((cell.stage, cell.kind, (cell.start, cell.target), cell.n_streams) for cell in table)
    assert found == Counter(
        (stage, kind, way, n) for stage in BESIDE_STAGES for kind in ONCE for way in WAYS for n in (1, 4)
    )
    assert all(bool(cell.items or cell.signal) is not bool(cell.why_not) for cell in table)
    left_out = {(cell.stage, cell.kind) for cell in table if cell.why_not}
    outside = ("first.placing", "first.handed", "first.swapped")
    assert left_out == {
        *((stage, kind) for stage in outside for kind in (Kind.FAILS, Kind.HANGS, Kind.DAMAGED)),
        *(("first.sealing", kind) for kind in (Kind.FAILS, Kind.HANGS)),
        *((stage, Kind.DAMAGED) for stage in ("second.placing", "second.building")),
    }
    few = few_beside_cells()
    assert [cell.stage for cell in few] == list(BESIDE_STAGES)
    assert {cell.kind for cell in few} == set(ONCE)
    assert {(cell.start, cell.target) for cell in few} == set(WAYS)
    assert {cell.n_streams for cell in few} == {1, 4}
    assert len(few_real_beside_cells()) == 2
    assert {cell.kind for cell in real_beside_cells()} == set(BY_SIGNAL)


def test_idle_sequences_that_go_ahead_have_a_table_of_their_own() -> None:
    """Each step meets each fault, but for the worker that has nothing to do; three cells in the short form."""
    table = ahead_cells()
    assert {(cell.stage, cell.kind, cell.start) for cell in table} == {
        (stage, kind, start) for stage in AHEAD_STAGES for kind in ONCE for start, _ in WAYS
    }
    assert {cell.stage for cell in table if cell.why_not} == {"first.handed"}
    assert all(cell.name.endswith(":idle") and bool(cell.items) is not bool(cell.why_not) for cell in table)
    few = few_ahead_cells()
    assert [cell.stage for cell in few] == ["first.copying", "second.taking", "first.handed"]
    assert {cell.end for cell in few} == {cell.end for cell in table if not cell.why_not}


def test_weights_that_are_there_already_have_a_table_of_their_own() -> None:
    """Both placements kept on the stub, a copy on a real library; three cells in the short form."""
    kept = resident_cells()
    assert {(cell.start, cell.target) for cell in kept} == set(WAYS)
    assert {(cell.stage, cell.kind) for cell in kept} == {
        *((stage, Kind.KILLED) for stage in ("freeing", "placing", "building", "restoring", "proving")),
        *((stage, kind) for stage in ("restoring", "proving") for kind in (Kind.FAILS, Kind.DAMAGED)),
    }
    assert all(cell.name.endswith(":resident") and cell.items for cell in kept)
    assert {cell.kind for cell in pinned_cells()} == set(BY_SIGNAL)
    assert [cell.stage for cell in few_pinned_cells()] == ["placing"]
    assert {cell.kind for cell in few_resident_cells()} == {Kind.KILLED, Kind.FAILS}


def _say(report: orders.Report, env: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    line = to_line(report, orders.REPORTS)
    program = f"import os; os.write(1, {line!r}); os.write(1, b'and goes on')"
    done = subprocess.run([sys.executable, "-P", "-c", program], env=os.environ | env, capture_output=True, check=False)
    assert done.stdout.startswith(line)
    return done


def test_a_worker_dies_at_the_stage_that_it_tells(tmp_path: Path) -> None:
    """The means by which a stage without a library call gets its death: at that stage only, once, after telling it."""
    armed = FaultFile(tmp_path / "faults")
    armed.arm("at-sealing:kill@1 at-trial:abort")
    outcome = {"status": "switched", "confirmed": False}
    ends = [
        _say(orders.StageReached(1, "saving"), armed.env),
        _say(orders.StageReached(1, "sealing", 0.5), armed.env),
        _say(orders.StageReached(1, "sealing"), armed.env),
        _say(orders.StageReached(1, "sealing"), armed.env),
        _say(orders.Switched(1, {**outcome, "status": "fell_back"}), armed.env),
        _say(orders.Switched(1, outcome), armed.env),
        _say(orders.Switched(1, outcome), armed.env),
    ]
    assert [done.returncode for done in ends] == [0, 0, -signal.SIGKILL, 0, 0, -signal.SIGABRT, -signal.SIGABRT]
    assert [done.stdout.endswith(b"and goes on") for done in ends] == [not done.returncode for done in ends]
    assert b"GGML_ASSERT" in ends[-1].stderr
    assert armed.fired() == ["at-sealing:kill@1", "at-trial:abort"]


@pytest.mark.stub
@pytest.mark.slow
@needs_compiler
def test_a_session_survives_the_short_table() -> None:
    """The session serves, or is parked and brought back; no token of a stream is lost or doubled; nothing is left."""
    result = _faults("--few")
    assert result["failures"] == {}
    assert result["left_over"] == []
    few = few_cells() + few_beside_cells() + few_ahead_cells() + few_resident_cells()
    assert result["passed"] == result["cells"] == len(few)


@pytest.mark.build
@pytest.mark.model
@pytest.mark.slow
def test_a_session_on_a_real_library_survives_signals(smollm2: Path) -> None:
    """Workers of a real build are killed and stopped at three stages; the texts are those of a fresh context."""
    result = _faults("--real", "--few", "--lib", library_of(NEWEST), "--model", smollm2)
    assert result["failures"] == {}
    assert result["left_over"] == []
    assert result["passed"] == result["cells"] == len(few_real_cells() + few_real_beside_cells() + few_pinned_cells())
