"""The bench of a switch against the bare calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.native.real import NEWEST, library_of
from tests.tool import run_tool
from tools.check_native import native_library
from tools.make_large import make_large

ROUTES = ["layer-layer", "layer-tensor", "layer-tensor-pinned", "layer-tensor-resident"]


@pytest.mark.build
@pytest.mark.slow
def test_every_route_is_paired_with_its_bare_calls(tmp_path: Path) -> None:
    """Both move the same state in every tier, and a tier is held against the file."""
    model = make_large(tmp_path, "tiny")
    done = run_tool(
        "bench_switch", "--json", "--pairs", "1", "--tokens", "20", "--models", model, "--lib", library_of(NEWEST)
    )
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert body["left_out"] == []
    assert [run["route"] for run in body["runs"]] == ROUTES
    for run in body["runs"]:
        assert run["overhead_ratio"] > 0
        assert run["bare_stages_ms"]["saving"] > 0
        assert run["bare_stages_ms"].keys() <= run["stages_ms"].keys()
        assert ("times_faster" in run) == (run["route"] in ROUTES[2:])
    resident = body["runs"][-1]
    assert resident["stages_ms"]["placing"] < body["runs"][1]["stages_ms"]["placing"]
    assert "placing" not in resident["bare_stages_ms"]


@pytest.mark.build
@pytest.mark.slow
def test_the_library_s_own_call_is_a_route_of_its_own(tmp_path: Path) -> None:
    """From the file and from the copy, each held against the bare call, whose stages are not told."""
    if not native_library().is_file():
        pytest.skip("no native build: ci/builds --native")
    model = make_large(tmp_path, "tiny")
    words = ("--json", "--pairs", "1", "--tokens", "20", "--models", model, "--lib", native_library(), "-k", "native")
    done = run_tool("bench_switch", *words)
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert [run["route"] for run in body["runs"]] == ["layer-tensor-native", "layer-tensor-pinned-native"]
    for run in body["runs"]:
        assert run["bare_stages_ms"].keys() == {"switching_natively"}
        assert run["stages_ms"]["switching_natively"] > 0
        assert run["stages_ms"]["placing"] == 0
