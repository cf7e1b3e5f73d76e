"""The check against a GPU: what can be known of it without one, and a rehearsal on processors."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from splitctl.model.facts import read_facts
from tests.native.real import NEWEST, library_of
from tests.tool import GUARD_S, run_tool
from tools.check_native import native_library
from tools.gpu_meter import HOST, Meter, group_of, visible_gpus
from tools.make_large import SHAPES, make_large


@pytest.mark.parametrize(
    ("name", "description", "visible", "group"),
    [
        ("CUDA1", "NVIDIA H200", "", "gpu1"),
        ("CUDA1", "NVIDIA H200", "3,5", "gpu5"),
        ("CUDA1", "NVIDIA H200 (dev p0/v1)", "", "gpu0"),
        ("CUDA1", "NVIDIA H200 (dev p0/v1)", "2", "gpu2"),
        ("CPU", "AMD EPYC", "", HOST),
    ],
)
def test_devices_are_grouped_by_the_memory_they_have(name: str, description: str, visible: str, group: str) -> None:
    """Virtual ones with their real one, by the driver's index, which is not the library's where some are hidden."""
    assert group_of(name, description, visible_gpus({"CUDA_VISIBLE_DEVICES": visible})) == group


def test_a_meter_sees_what_a_child_took_at_most() -> None:
    """Also what it has given back since."""
    program = (
        "import sys; held = bytearray(b'x') * (100 << 20); print(1, flush=True); sys.stdin.readline(); del held; "
        "print(2, flush=True); sys.stdin.readline()"
    )
    with Meter((HOST,), None) as meter:
        child = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        child.stdout.readline()
        for _ in range(2):  # the first look may have begun before the child said so
            meter.looked.clear()
            assert meter.looked.wait(GUARD_S)
        child.communicate("\n\n", timeout=GUARD_S)
    assert meter.seen[HOST].taken > 100 << 20
    assert child.returncode == 0


def test_a_large_model_is_a_model_with_weights_that_differ(tmp_path: Path) -> None:
    """Its header is what the shape says, no block is zero, no two layers are alike; it is made once."""
    path = make_large(tmp_path, "tiny")
    shape, facts = SHAPES["tiny"], read_facts(path)
    assert (facts.n_layer, facts.n_embd, facts.n_vocab) == (shape.n_layer, shape.n_embd, shape.n_vocab)
    assert path.stat().st_size == facts.file_bytes
    data = {one.name: (one.offset, one.n_bytes or 0) for one in facts.tensors}
    whole = np.fromfile(path, np.uint8)
    start = len(whole) - max(offset + n_bytes for offset, n_bytes in data.values())
    ups = [whole[start + offset :][:n_bytes] for name, (offset, n_bytes) in data.items() if "ffn_up" in name]
    assert len(ups) == shape.n_layer
    for one, other in itertools.pairwise(ups):
        assert one.any()
        assert not np.array_equal(one, other)
    made = path.stat().st_mtime_ns
    assert make_large(tmp_path, "tiny").stat().st_mtime_ns == made


@pytest.mark.build
@pytest.mark.slow
@pytest.mark.skipif(not native_library().is_file(), reason="no native build: ci/builds --native")
def test_the_librarys_own_call_finds_no_memory_and_returns(tmp_path: Path) -> None:
    """With the address space limited the session goes on as if nobody had asked, and is switched once there is room."""
    done = run_tool(
        "check_gpu", "--json", "--device", "CPU,CPU", "--models", "tiny", "--sizes", "1024x256", "--parts", "native",
        "--lib", native_library(), "--folder", tmp_path,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)["native"]
    assert found["failures"] == []
    assert found["short"]["declined"]["reasons"][0]["code"] == "native-declined"
    assert found["short"]["later"]["effective"] == "tensor"
    assert len(found["short"]["tokens"]) > 32


@pytest.mark.build
@pytest.mark.slow
def test_a_rehearsal_on_processors_plays_every_row(tmp_path: Path) -> None:
    """Both modes and the switch are planned, done in children, and told with the library's own lines."""
    done = run_tool(
        "check_gpu", "--json", "--device", "CPU,CPU", "--models", "tiny", "--sizes", "1024x256", "--parts", "accuracy",
        "--folder", tmp_path, "--lib", library_of(NEWEST),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    body: dict[str, Any] = json.loads(done.stdout)
    assert (body["failed"], body["groups"]) == (0, [HOST, HOST])
    assert [row["what"] for row in body["accuracy"]] == ["layer", "tensor", "layer->tensor"]
    for row in body["accuracy"]:
        assert row["looks"] > 1
        assert row["predicted"] > 0
        assert {kind for _, kind, _ in row["lines"]} >= {"model", "cache", "compute"}
    last = body["accuracy"][-1]["steps"]
    assert [step["mode"] for step in last] == ["layer", "tensor"]
    assert last[1]["switch"]["status"] == "switched"
