"""`splitctl bench`, as a user calls it."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from splitctl.cli import bench
from splitctl.cli.bench_text import csv_of, grids, markdown_of, print_tables
from splitctl.cli.main import main
from splitctl.cli.output import ExitCode
from splitctl.cli.profiled import unknown_line
from splitctl.ipc import profiles
from splitctl.ipc.benching import Bencher, Benching, BenchReport
from splitctl.ipc.jobs import Failure, Fault
from splitctl.ipc.reserving import Reserved, Reserver
from splitctl.ipc.wire import from_object
from splitctl.outcome import to_plain
from splitctl.placement import FlashAttn, SplitMode
from splitctl.planning.profile import Crowd, LeftOut, Profile, Served
from tests.ctl.planning.profiles import MEASURED, exactly
from tests.stublib import write_model

_ROOT = Path(__file__).parents[3]
_LEFT_OUT = LeftOut("beside", "nobody | tried")


class _Place:
    """A model, a library and a cache folder of their own, and a bench that measures what it is told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = write_model(folder / "tiny.gguf")
        self.library = folder / "libllama.so"
        self.library.write_bytes(b"x")
        profile = Profile(MEASURED.modes, MEASURED.switches, (_LEFT_OUT,))
        self.report = BenchReport(profile, FlashAttn.ON, ("repetitions: 2, not 5",), seconds=12.0)
        self.asked: list[Benching] = []

    def bench(self, *arguments: str) -> int:
        return main(["bench", "-m", str(self.model), "--device", "CPU,CPU", "-t", "1", *arguments])

    @property
    def kept(self) -> list[Path]:
        return sorted(profiles.profiles_folder().glob("*"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Place]:
    made = _Place(tmp_path)
    cpu = {"name": "CPU", "kind": "cpu", "description": "", "backend": "CPU", "memory_free": 1, "memory_total": 1}
    told = {"path": str(made.library), "version": "made up 1", "has_nccl": False, "devices": [cpu]}

    def measure(_self: Bencher, what: Benching) -> BenchReport:
        made.asked.append(what)
        return made.report

    monkeypatch.setattr(Bencher, "__call__", measure)
    monkeypatch.setattr(Reserver, "__call__", lambda *_: Reserved((), "", told))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bench, "conclusion", lambda *_: "it depends")
    return made


@pytest.fixture
def drawing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """matplotlib, for pictures of few points."""
    found = pytest.importorskip("matplotlib", reason="matplotlib is not there: pip install 'splitctl[plot]'")
    monkeypatch.setattr("splitctl.cli.bench_picture._N_POINTS", 9)
    return found


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "'-m'"),
        (["-m", "x", "--ubatch", "512,none"], "a list of sizes"),
        (["-m", "x", "--ubatch", "0"], "a list of sizes"),
        (["-m", "x", "--budget", "0"], "--budget"),
        (["-m", "x", "-sm", "sideways"], "none, layer, row, tensor"),
        (["-m", "x", "--md", "--csv"], "one of them"),
        (["-m", "x", "--md", "--json"], "one of them"),
        (
            ["-m", "x", "--show", "--quick", "-sm", "none"],
            "measures nothing and prints all that is kept; leave out -sm, --quick",
        ),
    ],
)
def test_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    """Refused before anything is read."""
    assert main(["bench", *arguments]) == ExitCode.USAGE
    assert said in capsys.readouterr().err


def test_a_profile_is_told_and_kept(place: _Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables of all that was measured, what was cut and the one sentence; the profile is found again by its key."""
    assert place.bench() == ExitCode.DONE
    out, err = capsys.readouterr()
    for words in ("prompts", "generation", "switches", "not measured", "nobody | tried", "800.0"):
        assert words in out
    assert "cut for want of time: repetitions: 2, not 5" in err
    assert out.splitlines()[-1] == "it depends"
    (path,) = place.kept
    assert err.splitlines()[-1] == f"kept in {path}"
    what = place.asked[0]
    found = profiles.look_up(place.library, what.facts, what.placement.changed(flash_attn=FlashAttn.ON), ("CPU",))
    assert found.kept is not None
    assert found.kept.profile == place.report.profile
    assert (found.kept.model_name, found.kept.library_version) == ("stub", "made up 1")


def test_what_is_measured_follows_the_flags(place: _Place) -> None:
    """All modes, three micro-batches and ten minutes; --quick: two modes, one, and one minute; flags say otherwise."""
    for arguments in ([], ["--quick"], ["--quick", "-sm", "none", "--ubatch", "64,4096", "--budget", "5", "-np", "3"]):
        place.bench(*arguments)
    whole, quick, named = place.asked
    assert whole.modes == (SplitMode.LAYER, SplitMode.TENSOR, SplitMode.NONE, SplitMode.ROW)
    assert (whole.n_ubatches, whole.n_seqs, whole.budget_s) == ((512, 1024, 2048), (1, 2, 4), 600.0)
    assert whole.placement.kv_unified
    assert quick.modes == (SplitMode.LAYER, SplitMode.TENSOR)
    assert (quick.n_ubatches, quick.budget_s) == ((512,), 60.0)
    assert (named.modes, named.n_ubatches, named.n_seqs) == ((SplitMode.NONE,), (64, 4096), (1, 2, 3))
    assert (quick.placement.n_batch, named.placement.n_batch) == (2048, 4096)
    assert named.budget_s == 5.0


def test_json_is_the_whole_profile(place: _Place, capsys: pytest.CaptureFixture[str]) -> None:
    """One object on stdout, whose profile is read back as what was measured."""
    assert place.bench("--json", "--no-keep") == ExitCode.DONE
    body = json.loads(capsys.readouterr().out)
    assert from_object({"kind": "profile", **body["profile"]}, {"profile": Profile}) == place.report.profile
    assert body["key"]["devices"] == ["CPU", "CPU"]
    assert body["sentence"] == "it depends"
    assert (body["kept"], body["cuts"], body["exit_code"]) == (None, ["repetitions: 2, not 5"], 0)
    assert place.kept == []


def test_csv_has_a_line_for_each_measurement(place: _Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Every read, step and switch is a line with its median and spread."""
    assert place.bench("--csv", "--no-keep") == ExitCode.DONE
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    n_reads, n_steps = (sum(len(getattr(one, name)) for one in MEASURED.modes) for name in ("reads", "steps"))
    kinds = [row["kind"] for row in rows]
    assert [kinds.count(one) for one in ("prompt", "step", "switch")] == [n_reads, n_steps, len(MEASURED.switches)]
    read = next(row for row in rows if row["n_tokens"] == "512" and row["depth"] == "0")
    assert float(read["median_s"]) == 0.64
    assert float(read["tokens_s"]) == pytest.approx(800.0)
    pinned = next(row for row in rows if row["way"] == "pinned")
    assert (pinned["before"], pinned["after"], pinned["first"], pinned["more_ms"]) == ("layer", "tensor", "0", "0.5")


def test_markdown_is_tables(place: _Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Each table has a row for each measurement with as many cells as it has columns; a bar in a text is escaped."""
    assert place.bench("--md", "--no-keep") == ExitCode.DONE
    out = capsys.readouterr().out
    profile = place.report.profile
    assert profile is not None
    assert markdown_of(profile) in out
    assert r"nobody \| tried" in out
    for grid in grids(profile):
        assert f"**{grid.title}**" in out
        assert all(len(row) == len(grid.columns) for row in grid.rows)
    assert csv_of(profile).count("\n") == sum(len(one.rows) for one in grids(profile)[:3]) + 1


@pytest.mark.usefixtures("drawing")
def test_a_plane_is_drawn(place: _Place) -> None:
    """The picture is a file of the kind that its name says."""
    path = place.folder / "plane.png"
    assert place.bench("--no-keep", "--plot", str(path)) == ExitCode.DONE
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plane_names_each_choice_that_is_best_somewhere(place: _Place, drawing: Any) -> None:
    """The legend has the colours that are there, and the lines on which a switch breaks even."""
    path = place.folder / "plane.svg"
    with drawing.rc_context({"svg.fonttype": "none"}):
        place.bench("--no-keep", "--plot", str(path))
    text = path.read_text()
    for words in ("read in layer, switch, generate in tensor", "stay in tensor", "breaks even with tensor mode"):
        assert words in text
    assert "read in tensor, switch" not in text


@pytest.mark.usefixtures("drawing")
def test_a_picture_of_no_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The end of its name says what a picture is, before anything is measured."""
    assert main(["bench", "-m", "x", "--plot", "plane.txt"]) == ExitCode.USAGE
    assert "png, svg, pdf" in capsys.readouterr().err


@pytest.mark.usefixtures("drawing")
def test_a_picture_without_a_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that is missing is named before anything is measured, not ten minutes later."""
    assert main(["bench", "-m", "x", "--plot", str(tmp_path / "none" / "plane.png")]) == ExitCode.USAGE
    assert f"there is no folder {tmp_path / 'none'}; make it" in capsys.readouterr().err


@pytest.mark.usefixtures("drawing")
def test_a_picture_that_cannot_be_drawn_is_told(place: _Place, capsys: pytest.CaptureFixture[str]) -> None:
    """What was measured is told and kept all the same; the last word is the status."""
    place.report.profile = Profile(MEASURED.modes)
    assert place.bench("--plot", str(place.folder / "plane.png")) == ExitCode.FAILED
    out, err = capsys.readouterr()
    assert "plane.png: no switch between them was measured" in err.splitlines()[0]
    assert "prompts" in out
    assert len(place.kept) == 1


def test_a_picture_without_matplotlib_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before anything is read or measured; the bench itself does without."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "splitctl.cli.bench_picture", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    assert main(["bench", "-m", "x", "--plot", "plane.png"]) == ExitCode.USAGE
    assert "pip install 'splitctl[plot]'" in capsys.readouterr().err
    assert main(["bench", "-m", "x"]) == ExitCode.FAILED


def test_a_narrow_terminal_gets_fewer_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal of 80 columns shows every line whole, without the stages; a file has them all."""
    print_tables(MEASURED)
    assert "restoring" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    print_tables(MEASURED)
    out = capsys.readouterr().out
    assert "restoring" not in out
    assert "layer -> tensor" in out
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in out.splitlines()) <= 80


def test_a_cancel_tells_what_was_measured_and_keeps_nothing(place: _Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C ends with the status of a cancel, the tables so far, and nothing on disk."""
    place.report.is_cancelled = True
    assert place.bench() == ExitCode.CANCELLED
    out, err = capsys.readouterr()
    assert "prompts" in out
    assert err.splitlines()[-1] == "splitctl: cancelled; nothing was kept"
    assert place.bench("--json") == ExitCode.CANCELLED
    body = json.loads(capsys.readouterr().out)
    assert body["profile"] == to_plain(place.report.profile)
    assert place.kept == []


@pytest.mark.parametrize(
    ("report", "code", "said"),
    [
        (BenchReport(failure=Failure(Fault.LIBRARY, "LibraryNotFound", "no library")), ExitCode.FAILED, "no library"),
        (BenchReport(failure=Failure(Fault.REFUSED, "Refused", "not so")), ExitCode.REFUSED, "not so"),
        (BenchReport(left_out=[LeftOut("layer", "it died")]), ExitCode.FAILED, "layer: it died"),
        (BenchReport(is_cancelled=True), ExitCode.CANCELLED, "cancelled"),
    ],
)
def test_where_nothing_was_measured_the_reason_is_told(
    place: _Place, capsys: pytest.CaptureFixture[str], report: BenchReport, code: ExitCode, said: str
) -> None:
    """One line says why, and nothing is kept."""
    place.report = report
    assert place.bench() == code
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert place.kept == []


def test_a_model_that_changes_meanwhile_is_told(
    place: _Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times of one file are not kept for another that has taken its place."""

    def measure(_self: Bencher, _what: Benching) -> BenchReport:
        write_model(place.model, weights=bytes(64))
        return place.report

    monkeypatch.setattr(Bencher, "__call__", measure)
    assert place.bench() == ExitCode.FAILED
    assert "changed meanwhile" in capsys.readouterr().err
    assert place.kept == []


def test_a_profile_that_cannot_be_kept_is_told(
    place: _Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk costs the keeping and not what was measured."""

    def full(*_: object) -> Path:
        raise OSError(28, "No space left on device", "/x")

    monkeypatch.setattr(bench, "keep", full)
    assert place.bench() == ExitCode.DONE
    out, err = capsys.readouterr()
    assert "the profile was not kept: No space left on device (/x)" in err
    assert "prompts" in out


def test_a_bench_of_a_part_is_kept_with_what_there_was(
    place: _Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bench that lost a mode tells what it has, and keeps the earlier rest; one of another driver does not."""
    place.bench()
    (path,) = place.kept
    place.report = BenchReport(Profile(MEASURED.modes[:1], MEASURED.switches[:2]), FlashAttn.ON)
    capsys.readouterr()
    assert place.bench("--json") == ExitCode.DONE
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert (told["kept"], len(told["profile"]["modes"])) == (str(path), 1)
    assert told["kept_of_earlier"].startswith("tensor mode, layer -> tensor pinned, tensor -> layer file of 20")
    assert f"to forget that, remove {path} first" in err
    assert len(json.loads(path.read_text())["profile"]["modes"]) == 2
    place.report = BenchReport(MEASURED, FlashAttn.ON)
    place.bench()
    assert "older_at" not in json.loads(path.read_text())
    monkeypatch.setattr(bench, "driver_text", lambda: "another driver")
    place.report = BenchReport(Profile(MEASURED.modes[:1]), FlashAttn.ON)
    place.bench()
    assert len(json.loads(path.read_text())["profile"]["modes"]) == 1


def test_what_serving_adds_is_shown() -> None:
    """Decodes beside another sequence's tokens, and what a host adds, are tables and lines of their own."""
    crowd = Crowd(128, 2048, exactly(0.5), exactly(0.625))
    modes = tuple(replace(one, crowds=(crowd,)) for one in MEASURED.modes)
    told = replace(MEASURED, modes=modes, served=(Served(SplitMode.LAYER, 8, exactly(0.002)),))
    text = markdown_of(told)
    assert "| layer | 512 | 128 | 2,048 | 625.0 ms | 500.0 ms |" in text
    assert "| layer | 8 | 2.0 ms |" in text
    rows = [*csv.DictReader(csv_of(told).splitlines())]
    crowds = [(one["mode"], one["n_others"], one["median_s"]) for one in rows if one["kind"] == "crowd"]
    assert crowds[:2] == [("layer", "0", "0.5"), ("layer", "2048", "0.625")]
    assert [(one["n_seq"], one["median_s"]) for one in rows if one["kind"] == "served"] == [("8", "0.002")]
    assert "another sequence holds" not in markdown_of(MEASURED)


@pytest.mark.parametrize(
    ("is_shared", "is_served", "said"),
    [
        (True, True, " and what a host"),
        (True, False, "each other was not"),
        (False, True, "a host"),
        (False, False, ""),
    ],
)
def test_what_a_profile_does_not_know_of_serving_is_said(*, is_shared: bool, is_served: bool, said: str) -> None:
    """Only what counts for the question is named, and nothing where it was measured."""
    text = unknown_line(MEASURED, is_shared=is_shared, is_served=is_served)
    assert said in text
    assert bool(text) == bool(said)
    modes = tuple(replace(one, crowds=(Crowd(128, 2048, exactly(0.5), exactly(0.6)),)) for one in MEASURED.modes)
    known = replace(MEASURED, modes=modes, served=(Served(SplitMode.LAYER, 8, exactly(0.002)),))
    assert not unknown_line(known, is_shared=is_shared, is_served=is_served)


def test_show_prints_what_is_kept(place: _Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is measured: the kept profile is told, with its day and build; without one the way to get one is."""
    assert place.bench("--show") == ExitCode.FAILED
    assert "splitctl bench -m" in capsys.readouterr().err
    place.bench()
    capsys.readouterr()
    assert place.bench("--show") == ExitCode.DONE
    out, err = capsys.readouterr()
    assert len(place.asked) == 1
    assert "(made up 1)" in err
    assert "stale" not in err
    assert out.splitlines()[-1] == "it depends"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda place: place.library.write_bytes(b"other"), "the library is another build than made up 1"),
        (lambda place: os.utime(place.library, (1, 1)), "the library is another build than made up 1"),
    ],
    ids=["other bytes", "replaced by its equal"],
)
def test_show_says_that_a_profile_is_stale(
    place: _Place, capsys: pytest.CaptureFixture[str], change: Callable[[_Place], Any], said: str
) -> None:
    """A profile of another build is shown, with what has changed and how to measure again."""
    place.bench("--json")
    cuts = json.loads(capsys.readouterr().out)["cuts"]
    change(place)
    assert place.bench("--show", "--json") == ExitCode.DONE
    out, err = capsys.readouterr()
    assert said in err
    assert json.loads(out)["kept_profile"]["stale"] is True
    assert json.loads(out)["cuts"] == cuts


@pytest.mark.model
def test_a_real_bench_in_seconds(smollm2: Path) -> None:
    """With a tiny budget both modes of a real model are read and stepped, and what was cut for it is said."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_ARG_", "STUB_"))}
    program = "import sys; from splitctl.cli import main; sys.exit(main())"
    flags = [
        "--device",
        "CPU,CPU",
        "-t",
        "1",
        "-c",
        "256",
        "-np",
        "2",
        "--quick",
        "--budget",
        "2",
        "--no-keep",
        "--json",
    ]
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, "bench", "-m", str(smollm2), *flags],
        stdin=subprocess.DEVNULL, capture_output=True, check=False,
        env=clean | {"PYTHONPATH": str(_ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    body = json.loads(done.stdout)
    profile: Profile = from_object({"kind": "profile", **body["profile"]}, {"profile": Profile})
    assert {one.mode for one in profile.modes} == {SplitMode.LAYER, SplitMode.TENSOR}
    assert all(one.read_s(16) > 0 and one.step_s() > 0 for one in profile.modes)
    assert any("tokens at once: " in one for one in body["cuts"])
