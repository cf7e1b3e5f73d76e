"""The bench of switches on GPUs: a rehearsal on processors, and what can be known of it without either."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from tests.native.real import NEWEST, library_of
from tests.tool import run_tool
from tools import bench_gpu_switch, bench_gpu_told
from tools.bench_gpu_arms import Clocked
from tools.bench_gpu_server import Server, ServerFailed
from tools.bench_gpu_switch import ARMS, NATIVE_ARMS, ArmLost, Bench, Budget, Moved, grouped
from tools.check_native import native_library
from tools.gpu_meter import HOST, Setup
from tools.make_large import make_large

NATIVE = native_library()
WAYS = ("layer->tensor", "tensor->layer")
SERVER = """#!{python}
import http.server, json, pathlib, sys, urllib.parse
said = dict(zip(sys.argv[1::2], sys.argv[2::2]))
slot = pathlib.Path(said["--slot-save-path"])
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.tell(200, {{"status": "ok"}})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        action = urllib.parse.parse_qs(urllib.parse.urlparse(self.path).query).get("action")
        if action is None:
            n = len(asked["prompt"]) if not (slot / "restored").exists() else 1
            timings = {{"prompt_n": n, "predicted_ms": 10.0}}
            self.tell(200, {{"timings": timings}})
        elif action == ["save"]:
            (slot / asked["filename"]).write_text(said["--split-mode"])
            self.tell(200, {{"n_written": 5000}})
        elif (slot / asked["filename"]).read_text() == said["--split-mode"]:
            self.tell(400, {{"error": "saved in this very mode"}})
        else:
            (slot / "restored").touch()
            self.tell(200, {{}})
    def tell(self, status, body):
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(said["--port"])), Answers).serve_forever()
"""


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """A program that answers as llama-server does, and refuses a slot that was saved in the mode it is started in."""
    path = tmp_path / "llama-server"
    path.write_text(SERVER.format(python=sys.executable), encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.mark.build
@pytest.mark.slow
def test_a_rehearsal_on_processors_has_every_row(tmp_path: Path, server: Path) -> None:
    """Each arm moves both ways, is told as it goes, and has its times, its rates and its memory."""
    # beside is as beside-idle, with nothing beside the stream
    arms = [arm for arm in ARMS if arm != "beside" and arm not in NATIVE_ARMS]
    done = run_tool(
        "bench_gpu_switch", "--json", "--devices", "CPU,CPU", "--model", "tiny", "--tokens", "48", "--generate", "4",
        "--repeats", "1", "--only", *arms, "--lib", library_of(NEWEST), "--server", server, "--folder", tmp_path,
    )  # fmt: skip
    body: dict[str, Any] = json.loads(done.stdout)
    rows = {(row["arm"], row["way"]): row for row in body["rows"]}
    assert body["lost"] == {}
    for arm in arms:
        if arm.startswith("fresh"):
            assert body["fresh"][arm.removeprefix("fresh-")]["tps"]["median"] > 0
        else:
            assert {way for name, way in rows if name == arm} == set(WAYS), arm
    for row in rows.values():
        assert row["n"] == 1
        assert row["stages_ms"]["saving"] > 0
        assert row["tps"]["median"] > 0
    ours = rows["file", WAYS[0]]
    assert 0 < ours["own_ms"]["median"] < ours["total_ms"]["median"]
    assert ours["own_ms"]["median"] + ours["library_ms"]["median"] == pytest.approx(ours["total_ms"]["median"], abs=0.1)
    idle = rows["beside-idle", WAYS[0]]
    assert 0 < idle["ahead_bytes"] < idle["state_bytes"]
    assert rows["server", WAYS[0]]["state_bytes"] == 5000
    assert body["rates"]["modes"]["layer"]["generate_tps"] == body["fresh"]["layer"]["tps"]["median"]
    planned = {one["arm"]: one["plan"] for one in body["memory"] if one["group"] == HOST}
    assert planned["file"] > 0
    assert done.returncode == 0
    told = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert sum("total_ms" in one for one in told) == len(rows)


@pytest.mark.build
@pytest.mark.slow
@pytest.mark.skipif(not NATIVE.is_file(), reason="no native build: ci/builds --native")
def test_the_librarys_own_call_is_an_arm_of_its_own(tmp_path: Path) -> None:
    """With weights from the file and from the copy, each move is one call of the library, and is told as such."""
    done = run_tool(
        "bench_gpu_switch", "--json", "--devices", "CPU,CPU", "--model", "tiny", "--tokens", "48", "--generate", "4",
        "--repeats", "1", "--only", *NATIVE_ARMS, "--lib", NATIVE, "--folder", tmp_path, "--no-plan",
    )  # fmt: skip
    body: dict[str, Any] = json.loads(done.stdout)
    assert body["lost"] == {}
    weights = {"native": "file", "native-pinned": "pinned"}
    assert {(row["arm"], row["way"]) for row in body["rows"]} == set(itertools.product(weights, WAYS))
    for row in body["rows"]:
        assert (row["via"], row["weights"]) == ("native", weights[row["arm"]])
        assert row["stages_ms"]["switching_natively"] >= row["calls_ms"]["llama_context_set_split_mode"]
        assert row["gb_s"]["switching_natively"] > 0


class _Child:
    """Stands in for an arm's process: it moves at once, or says why it does not."""

    asked: list[tuple[str, str]]
    opened: list[str]

    def __init__(self, job: dict[str, Any]) -> None:
        self._arm = job["arm"]

    def open(self, limit_s: float) -> dict[str, Any]:
        assert limit_s > 0
        if self._arm == "pinned":
            raise ArmLost("there is no copy")
        self.opened.append(self._arm)
        return {"status": "open", "prompt_tps": 1.0, "open_s": 1.0, "first": {"first_ms": 2.0, "tps": 100.0}}

    def move(self, target: Any, *, looks: bool, limit_s: float) -> dict[str, Any]:
        assert limit_s > 0
        self.asked.append((self._arm, target.mode.value))
        n_by_now = sum(arm == self._arm for arm, _ in self.asked)
        status = "refused" if (self._arm, n_by_now) == ("resident", 2) else "switched"
        found = {
            "status": status, "reason": "it does not fit", "total_ms": 10.0, "stages_ms": {"saving": 4.0},
            "first_ms": 3.0, "tps": 100.0 if self._arm.startswith("fresh") else 50.0, "state_bytes": 1000,
        }  # fmt: skip
        return {"found": found, "host": {"anon": 1, "shmem": 2, "file": 3} if looks else None}

    def let_go(self) -> None:
        assert self._arm in self.opened

    def end(self) -> None:
        self.asked.append((self._arm, "end"))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A bench of four arms and two rounds whose children are played."""
    monkeypatch.setattr(_Child, "asked", [], raising=False)
    monkeypatch.setattr(_Child, "opened", [], raising=False)
    monkeypatch.setattr(bench_gpu_switch, "Child", _Child)
    setup = Setup(Path("libllama.so"), ("CPU", "CPU"), (HOST, HOST), None, "a build")
    only = ("fresh-tensor", "file", "pinned", "resident")
    options = argparse.Namespace(tokens=10, generate=4, repeats=2, only=only, server=Path("none"))
    return Bench(setup, Path("model.gguf"), options, Budget(None), lambda _: None)


def test_arms_are_moved_in_turn_and_a_lost_one_is_noted(bench: Bench) -> None:
    """All go there before any goes back, the next round begins with another, and whatever fails leaves the rest."""
    bench.run([bench.arms])
    moves = [(arm, what) for arm, what in _Child.asked if what != "end"]
    assert moves == [
        ("fresh-tensor", "tensor"), ("file", "tensor"), ("resident", "tensor"),
        ("file", "layer"), ("resident", "layer"),
        ("file", "tensor"), ("fresh-tensor", "tensor"), ("file", "layer"),
    ]  # fmt: skip
    assert {arm.name: arm.lost for arm in bench.arms if arm.lost} == {
        "pinned": "there is no copy", "resident": "tensor->layer: refused: it does not fit",
    }  # fmt: skip
    assert {arm for arm, what in _Child.asked if what == "end"} == {arm.name for arm in bench.arms}
    body = bench_gpu_told.body_of(bench.arms, None, (HOST, HOST))
    counts = {(row["arm"], row["way"]): row["n"] for row in body["rows"]}
    assert counts == {("file", WAYS[0]): 2, ("file", WAYS[1]): 2, ("resident", WAYS[0]): 1}
    assert body["rows"][0]["rate_ratio"] == 0.5
    assert body["memory"] == [
        {"arm": name, "group": HOST, "anon": 0.0, "shmem": 0.0, "file": 0.0, "plan": None}
        for name in ("fresh-tensor", "file", "resident")
    ]


def test_a_budget_ends_the_rounds_with_what_there_is(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A move that would take longer than what is left is not begun, and the children are ended."""

    def take(needed_s: float) -> None:
        if len(_Child.asked) >= 3 or needed_s < 0:
            raise bench_gpu_switch.OutOfTime

    monkeypatch.setattr(bench, "_budget", argparse.Namespace(take=take, until=None))
    bench.run([bench.arms, bench.arms])
    assert bench.is_over
    assert [what for _, what in _Child.asked][:4] == ["end", "tensor", "tensor", "end"]
    with pytest.raises(bench_gpu_switch.OutOfTime):
        Budget(time.monotonic() + 15.0).take(10.0)
    Budget(time.monotonic() + 100.0).take(10.0)


class _Driver:
    """Stands in for that of two GPUs: each arm takes 100 MiB of both when it opens, and 10 more when it moves."""

    def used(self, index: int) -> int:
        n_moves = len([what for _, what in _Child.asked if what != "end"])
        return (1 << 30) * (index + 1) + (100 * len(_Child.opened) + 10 * n_moves) * (1 << 20)


def test_what_an_arm_holds_is_told_apart_from_what_the_others_hold(bench: Bench) -> None:
    """Each has what it took itself, and stands beside what the plan says of its tier, a GPU at a time."""
    setup = Setup(Path("libllama.so"), ("CUDA0", "CUDA1"), ("gpu0", "gpu1"), _Driver(), "a build")  # type: ignore[arg-type]
    bench._setup = setup
    bench.run([bench.arms])
    share = {"index": 0, "device": "CUDA0", "total": 150 << 20}
    plan = {"file": {"devices": [share, share | {"index": 1, "total": 90 << 20}], "host": {"total": 0}}}
    rows = bench_gpu_told.body_of(bench.arms, plan, setup.groups)["memory"]
    held = {(one["arm"], one["group"]): one for one in rows if one["group"] != HOST}
    assert {arm for arm, _ in held} == {"fresh-tensor", "file", "resident"}
    assert held["file", "gpu0"] == {"arm": "file", "group": "gpu0", "most": 140.0, "last": 140.0, "plan": 150.0}
    assert held["file", "gpu1"]["plan"] == 90.0
    assert held["resident", "gpu1"] == {"arm": "resident", "group": "gpu1", "most": 120.0, "last": 120.0, "plan": None}


def test_rates_are_a_file_that_explain_reads() -> None:
    """The time without a token in each tier, and what pinned weights add to a token, go into the table of the band."""

    def row(arm: str, ms: float, tps: float) -> dict[str, Any]:
        found = {"median": ms, "min": ms, "max": ms}
        return {"arm": arm, "way": WAYS[0], "total_ms": found, "stages_ms": {}, "tps": found | {"median": tps}}

    fresh = {
        "layer": {"prompt_tps": 1000.0, "tps": {"median": 10.0}},
        "tensor": {"prompt_tps": 500.0, "tps": {"median": 20.0}},
    }
    rows = [
        row("bare", 1500.0, 20.0),
        row("file", 2000.0, 20.0),
        row("pinned", 1000.0, 16.0),
        row("resident", 100.0, 20.0),
    ]
    rates = bench_gpu_told._rates({"fresh": fresh, "rows": rows})
    assert rates == {
        "switch_s": 2.0,
        "modes": {
            "layer": {"prompt_tps": 1000.0, "generate_tps": 10.0},
            "tensor": {"prompt_tps": 500.0, "generate_tps": 20.0},
        },
        "tier_switch_s": {"pinned": 1.0, "resident": 0.1},
        "pinned_ms_per_token": 12.5,
    }  # fmt: skip
    lines = bench_gpu_told.band({"rates": rates, "rows": rows}).splitlines()
    assert [line for line in lines if line.startswith("|")][2:] == [
        "| bare | layer to tensor | 1.50 | 1,500 | 30 |",
        "| file | layer to tensor | 2.00 | 2,000 | 40 |",
        "| pinned | layer to tensor | 1.00 | 1,000 | 27 |",
        "| resident | layer to tensor | 0.10 | 100 | 2 |",
    ]


def test_arms_that_fit_together_are_interleaved() -> None:
    """A group is filled up to the room, an arm that is larger than it goes alone, and the order stays."""
    arms = [Moved(name) for name in ("bare", "file", "resident", "beside")]
    assert [[arm.name for arm in group] for group in grouped(arms, [3, 3, 8, 1], 6)] == [
        ["bare", "file"], ["resident"], ["beside"],
    ]  # fmt: skip
    assert len(list(grouped(arms, [3, 3, 8, 1], None))) == 1


def test_time_in_the_library_counts_once() -> None:
    """Calls of two threads at once are one time in the library; what is no function is passed through."""
    clock = Clocked(argparse.Namespace(CONSTANT=7, call=lambda value: value + 1))
    assert (clock.CONSTANT, clock.call(1)) == (7, 2)
    assert len(clock.calls) == 1
    clock.calls = [(1.0, 3.0, "load"), (2.0, 4.0, "set"), (2.5, 2.75, "set"), (6.0, 7.0, "free")]
    assert clock.told() == {"library_ms": 4000.0, "calls_ms": {"set": 2250.0, "load": 2000.0, "free": 1000.0}}
    assert clock.calls == []


def test_a_server_that_ends_or_refuses_says_why(tmp_path: Path, server: Path) -> None:
    """Its exit status and last words, or the answer to what it refused, are the error."""
    model = make_large(tmp_path, "tiny-moe")
    placement = Setup(Path(), ("CPU", "CPU"), (HOST, HOST), None, "").place(bench_gpu_switch._LAYER, 256, 64)
    started = Server(server, model, placement, tmp_path).start()
    try:
        assert started.save() == 5000
        with pytest.raises(ServerFailed, match=r"with 400: .*this very mode"):
            started.restore()
    finally:
        started.stop()
    server.write_text("#!/bin/sh\necho out of memory\nexit 3\n", encoding="utf-8")
    with pytest.raises(ServerFailed, match="ended with 3: out of memory"):
        Server(server, model, placement, tmp_path).start()


def test_the_page_of_speeds_is_drawn_from_its_numbers() -> None:
    """Tables and pictures of docs/speed.md are those of docs/speed.json; UPDATE_DOCS=1 writes them."""
    if os.environ.get("UPDATE_DOCS"):
        bench_gpu_told.draw_docs()
    for name, text in bench_gpu_told.drawn().items():
        assert (bench_gpu_told.DOCS / name).read_text(encoding="utf-8") == text, name
        if name.endswith(".svg"):
            assert ET.fromstring(text).tag.endswith("svg")  # noqa: S314 - drawn a moment ago


def test_a_run_takes_the_place_of_an_older_one_of_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its numbers, its table and its picture are those of the page then, and other models keep theirs."""
    for name in ("speed.json", "speed.md"):
        shutil.copy(bench_gpu_told.DOCS / name, tmp_path / name)
    monkeypatch.setattr(bench_gpu_told, "DOCS", tmp_path)
    (old,) = (run for run in json.loads((tmp_path / "speed.json").read_text(encoding="utf-8")) if run["model"] == "8b")
    row = old["rows"][0] | {"arm": "pinned", "total_ms": {"median": 1234.0, "min": 1200.0, "max": 1300.0}}
    results = []
    for model in ("8b", "moe"):
        results.append(tmp_path / f"{model}.run")
        results[-1].write_text(
            json.dumps(old | {"model": model, "rows": [row], "lost": {"server": "gone"}}), encoding="utf-8"
        )
        assert bench_gpu_switch.main(["--from", str(results[-1]), "--docs"]) == 1  # something was not measured
    page = (tmp_path / "speed.md").read_text(encoding="utf-8")
    assert page.count("| pinned | layer to tensor | 1,234 (1,200 to 1,300) |") == 2
    assert "(speed-8b.svg)" in page
    assert "(speed-moe.svg)" in page
    assert "1,234</text>" in (tmp_path / "speed-moe.svg").read_text(encoding="utf-8")
    assert capsys.readouterr().out == ""


def test_numbers_of_the_page_say_where_they_are_from() -> None:
    """Every run has a date, a build, its devices and a source."""
    for run in json.loads((bench_gpu_told.DOCS / "speed.json").read_text(encoding="utf-8")):
        assert all(run.get(name) for name in ("model", "date", "build", "devices", "gpus", "source")), run["model"]
