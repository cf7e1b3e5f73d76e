"""The comparison of a profile with what it predicts: which points are run, what counts, and a short form of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from splitctl.ipc.profiles import KeptProfile, ProfileKey, driver_text, keep
from splitctl.model.facts import read_facts
from splitctl.placement import Placement, SplitMode
from splitctl.planning.cost import Choice
from splitctl.planning.profile import ModeNotMeasured, Profile
from tests.ctl.planning.profiles import MEASURED, constant, switch
from tests.native.real import NEWEST, library_of
from tests.tool import run_tool
from tools import check_bench
from tools.check_bench import Compared, Point, candidates, chosen, measure, summary
from tools.make_large import make_large

#: Either mode, and the switch from layer to tensor mode, are best somewhere within a small context.
_BAND = replace(MEASURED, switches=(switch(SplitMode.LAYER, SplitMode.TENSOR, 2.0),))


def _compared(predicted: Mapping[Choice, float], measured: Mapping[Choice, float]) -> Compared:
    return Compared(Point(100, 100, predicted), {choice: [seconds] for choice, seconds in measured.items()})


def _each(layer: float, tensor: float, to_tensor: float, to_layer: float) -> dict[Choice, float]:
    return dict(zip(Choice, (layer, tensor, to_tensor, to_layer), strict=True))


def test_a_prediction_is_judged_by_its_worst_choice() -> None:
    """An error is a share of what was measured, and one choice that is off spoils the point."""
    one = _compared(_each(10.0, 12.0, 11.0, 13.0), _each(10.0, 10.0, 11.0, 13.0))
    assert one.worst_error == one.errors[Choice.TENSOR] == pytest.approx(0.2)
    body = summary([one])
    assert (body["within"], body["right"], body["passed"]) == (0, 1, False)
    assert "0 of 1 points were predicted within 15% (all 4 predictions: median 0.0%, worst 20.0%)" in body["sentence"]


def test_a_choice_is_right_within_a_twentieth_of_the_best() -> None:
    """What was predicted best is held against what was measured best, by what was measured of both."""
    close = _compared(_each(10.0, 10.2, 14.0, 15.0), _each(10.4, 10.0, 14.0, 15.0))
    assert (close.point.best, close.best, close.regret) == (Choice.LAYER, Choice.TENSOR, pytest.approx(0.04))
    wrong = _compared(_each(10.0, 10.2, 14.0, 15.0), _each(10.6, 10.0, 14.0, 15.0))
    body = summary([close, wrong])
    assert (body["within"], body["right"], body["passed"]) == (2, 1, False)
    assert summary([close])["passed"] is True


def test_a_median_of_rounds_counts() -> None:
    """One run that was disturbed is not what was measured."""
    one = _compared(_each(1.0, 2.0, 3.0, 4.0), _each(1.0, 2.0, 3.0, 4.0))
    one.runs[Choice.LAYER] = [1.0, 9.0, 1.1]
    assert one.measured[Choice.LAYER] == 1.1


def test_points_lie_where_each_choice_is_best_and_fit_the_time() -> None:
    """As many as were asked for, none twice, of every choice that is best anywhere, and no more than the time holds."""
    found = list(candidates(_BAND, 8192))
    assert all(one.prompt + one.generate <= 8192 for one in found)
    points = chosen(found, 12, 2000.0)
    assert len({(one.prompt, one.generate) for one in points}) == len(points) == 12
    assert {one.best for one in points} == {Choice.LAYER, Choice.TENSOR, Choice.LAYER_TO_TENSOR}
    assert sum(one.seconds for one in points) <= 2000.0
    short = chosen(found, 12, 300.0)
    assert sum(one.seconds for one in short) <= 300.0
    assert short
    assert chosen(found, 12, 1.0) == []


def test_points_are_far_apart() -> None:
    """The second point of a choice is not a neighbour of the first."""
    points = chosen([one for one in candidates(_BAND, 8192) if one.best is Choice.TENSOR], 2, 10_000.0)
    assert points[0].distance(points[1]) > 2.0


class _Played:
    """Takes what was predicted, and a tenth more in tensor mode."""

    def __init__(self, points: list[Point]) -> None:
        self.asked: list[tuple[Choice, int, int]] = []
        self._points = {(one.prompt, one.generate): one for one in points}

    def run(self, choice: Choice, prompt: int, generate: int) -> float:
        self.asked.append((choice, prompt, generate))
        more = 1.1 if choice is Choice.TENSOR else 1.0
        return self._points[prompt, generate].predicted[choice] * more


def test_rounds_go_over_all_points_and_need_no_switch_in_between() -> None:
    """Every choice of every point is run in each round, and begins in the mode in which the one before it ended."""
    points = chosen(list(candidates(_BAND, 2048)), 4, 500.0)
    played = _Played(points)
    compared = measure(played, points, 3, float("inf"))  # type: ignore[arg-type]
    assert {len(runs) for one in compared for runs in one.runs.values()} == {3}
    mode = SplitMode.LAYER
    for choice, _, _ in played.asked:
        assert choice.reads_in is mode
        mode = choice.generates_in
    assert all(one.errors[Choice.TENSOR] == pytest.approx(1 / 1.1 - 1) for one in compared)
    one_round = measure(_Played(points), points, 3, float("-inf"))  # type: ignore[arg-type]
    assert {len(runs) for one in one_round for runs in one.runs.values()} == {1}


def test_a_profile_of_one_mode_gives_nothing_to_compare() -> None:
    """The error says what was not measured."""
    with pytest.raises(ModeNotMeasured, match="tensor mode was not measured"):
        list(candidates(Profile(MEASURED.modes[:1]), 2048))


@pytest.mark.build
@pytest.mark.slow
def test_the_short_form_runs_every_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept profile is taken, each choice really runs, and numbers that are wrong are found to be."""
    model, library = make_large(tmp_path, "tiny"), library_of(NEWEST)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    placement = Placement(devices=("CPU", "CPU"), n_threads=1)
    # Faster than any machine: every prediction is too low.
    modes = tuple(constant(mode, 1e6, 1e6) for mode in (SplitMode.LAYER, SplitMode.TENSOR))
    key = ProfileKey.of(library, read_facts(model), placement)
    profile = Profile(modes, (switch(SplitMode.LAYER, SplitMode.TENSOR, 0.01),))
    keep(KeptProfile(key, profile, 1.7e9, "b1", driver_text(), model, "tiny", "1"))
    words = ["--models", model, "--lib", library, "-t", "1", "--points", "1", "--ctx", "128", "--seconds", "0.1"]
    done = run_tool("check_bench", *words, "--json")
    assert done.returncode == 1, done.stderr
    (found,) = json.loads(done.stdout)["models"]
    assert (found["within"], found["passed"], found["rounds"]) == (0, False, 1)
    (point,) = found["points"]
    assert list(point["measured_s"]) == [choice.value for choice in check_bench.CYCLE]
    assert all(seconds > 0.0 for seconds in point["measured_s"].values())
    assert all(error < 0.0 for error in point["errors"].values())
