"""The bench's parent: who is measured when, what a child's death costs, and what is left out for which reason."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Self

import pytest

from splitctl.errors import Cancelled, Reason, Refused, WorkerLost
from splitctl.ipc import benching
from splitctl.ipc.benching import Bencher, Benching, BenchReport
from splitctl.ipc.jobs import BenchRequest, Failure, Fault
from splitctl.ipc.measuring import Timed
from splitctl.ipc.timed_child import ChildFailed
from splitctl.model.facts import read_facts
from splitctl.outcome import StageTimes, WeightsTier
from splitctl.placement import FlashAttn, Placement, SplitMode
from splitctl.planning.memory import DeviceFacts
from splitctl.planning.profile import Profile
from tests.ctl.model_facts import model_facts
from tests.stublib import build, needs_compiler, write_model

_GIB = 1 << 30
_HOST = (DeviceFacts("CPU", "cpu", 64 * _GIB), DeviceFacts("host", "cpu", 64 * _GIB))
_PLACEMENT = Placement(devices=("CPU", "CPU"), n_ctx=4096, n_batch=512, n_ubatch=128, n_seq_max=4, kv_unified=True)
_BOTH = (SplitMode.LAYER, SplitMode.TENSOR)


def _what(**changes: Any) -> Benching:
    plain: dict[str, Any] = {
        "model": Path("model.gguf"),
        "facts": model_facts(),
        "library": Path("libllama.so"),
        "rpc": (),
        "devices": _HOST,
        "placement": _PLACEMENT,
        "modes": _BOTH,
        "n_ubatches": (128,),
        "n_seqs": (1, 4),
        "tiers": (WeightsTier.FILE,),
        "budget_s": 600.0,
        "rounds": 3,
        "deadline_s": 60.0,
    }
    return Benching(**plain | changes)


class _Machine:
    """Plays the children on a clock of its own, and notes what they do.

    Attributes:
        now: seconds.
        log: (mode, what was done), in order.
        alive: the children that are open; `most` of them were at once.
        more_s: what a token takes more after a switch, switch_s what a switch takes, by tier.
        fails: raises in place of an order; called with the request and the fields of a Measure, None for opening.
    """

    def __init__(self, token_s: float = 0.001, step_s: float = 0.01) -> None:
        self.now = 0.0
        self.token_s, self.step_s = token_s, step_s
        self.log: list[tuple[str, str]] = []
        self.alive: list[_Played] = []
        self.most = 0
        self.place_s = 1.0
        self.more_s: Mapping[WeightsTier, float] = {}
        self.switch_s: Mapping[WeightsTier, float] = {}
        self.fails: Callable[[BenchRequest, Mapping[str, Any] | None], None] = lambda _request, _what: None

    def monotonic(self) -> float:
        return self.now

    def __call__(self, request: BenchRequest, **_: object) -> _Played:
        return _Played(self, request)


class _Played:
    """A child that takes as long as the machine says."""

    def __init__(self, machine: _Machine, request: BenchRequest) -> None:
        machine.fails(request, None)
        self._machine, self._request = machine, request
        self.placement = request.placement.changed(flash_attn=FlashAttn.ON)
        self.open_s, self.place_s = 1.0 + machine.place_s, machine.place_s
        machine.now += self.open_s
        machine.alive.append(self)
        machine.most = max(machine.most, len(machine.alive))

    def measure(self, on_timed: Callable[[Timed], None], **what: Any) -> Mapping[str, Any] | None:
        machine, mode = self._machine, self._request.placement.mode
        name = f"{mode.value} -ub {self._request.placement.n_ubatch}"
        machine.log.append((name, ",".join(sorted(what))))
        slower = 1.0 if mode is SplitMode.LAYER else 2.0

        def timed(n: int, depth: int, seconds: float, *, is_read: bool) -> None:
            machine.now += seconds
            on_timed(Timed(1, is_read=is_read, n=n, depth=depth, seconds=seconds))

        for n in what.get("reads", ()):
            timed(n, 0, n * machine.token_s * slower, is_read=True)
        for n in what.get("n_seqs", ()):
            timed(n, 32, machine.step_s / slower, is_read=False)
        machine.fails(self._request, what)
        for depth in what.get("depths", ()):
            timed(what["chunk"], depth, what["chunk"] * machine.token_s * slower, is_read=True)
            timed(1, depth + what["chunk"], machine.step_s / slower, is_read=False)
        if "target" not in what:
            return None
        more = machine.more_s.get(self._request.weights, 0.0)
        machine.now += machine.switch_s.get(self._request.weights, 0.0) + what["n_held"] * machine.token_s
        timed(1, what["n_held"], machine.step_s + more, is_read=False)
        stages = dict.fromkeys((one.name for one in fields(StageTimes)), 1.0)
        return {
            "status": "switched",
            "reason": "",
            "weights": self._request.weights.value,
            "weights_reason": "",
            "total_ms": 600.0,
            "pause_ms": 500.0,
            "stages_ms": {**stages, "placing": None},
        }

    def end(self, *, is_well: bool) -> None:
        del is_well
        if self in self._machine.alive:
            self._machine.alive.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(is_well=True)


def _beside(machine: _Machine, switch_s: float = 8.0) -> Callable[..., None]:
    """Play a hosted session whose steps are timed, and which asks before each switch beside if there is time."""

    def beside(
        _what: Benching, held: Sequence[int], take: Callable[..., None], *, goes_on: Callable[[int], bool],
        n_seqs: Callable[[], Sequence[int]], on_served: Callable[..., None], **_: object,
    ) -> None:  # fmt: skip
        machine.now += 2.0
        machine.log.append(("hosted", ",".join(map(str, held))))
        for n, way in itertools.product((*held[:1], *held), (_BOTH, _BOTH[::-1])):
            if not goes_on(n):
                break
            machine.now += switch_s
            outcome = {"status": "switched", "n_tokens": n + 2, "total_ms": 2000.0, "pause_ms": 50.0}
            stages = dict.fromkeys(one.name for one in fields(StageTimes))
            take(*way, {**outcome, "stages_ms": stages})
        for n_seq in n_seqs():
            machine.now += 0.2
            on_served(SplitMode.LAYER, n_seq, n_seq * 1e-3)

    return beside


@contextmanager
def _played(machine: _Machine) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benching, "Child", machine)
        patch.setattr(benching, "time", machine)
        yield
    assert machine.alive == []


def _run(machine: _Machine, **changes: Any) -> BenchReport:
    with _played(machine):
        return Bencher({})(_what(**changes))


def _profile(report: BenchReport) -> Profile:
    assert report.profile is not None
    return report.profile


def _why(report: BenchReport, what: str) -> str:
    (why,) = (one.why for one in report.left_out if one.what == what)
    return why


def test_a_profile_is_measured() -> None:
    """Every mode has its reads and steps with as many repetitions as rounds, and every direction its switches."""
    report = _run(_Machine())
    profile = _profile(report)
    assert [one.mode for one in profile.modes] == list(_BOTH)
    for mode in profile.modes:
        assert {one.seconds.n for one in (*mode.reads, *mode.steps) if one.depth == 0} == {3}
        assert {one.n_seq for one in mode.steps} == {1, 4}
    assert profile.of(SplitMode.TENSOR).read_s(512) == pytest.approx(2 * profile.of(SplitMode.LAYER).read_s(512))
    warm = {(one.before, one.after) for one in profile.switches if not one.is_first}
    first = {(one.before, one.after) for one in profile.switches if one.is_first}
    assert warm == first == {_BOTH, _BOTH[::-1]}
    assert {one.pause.median for one in profile.switches} == {0.5}
    assert {(one.stages_ms.saving, one.stages_ms.placing) for one in profile.switches} == {(1.0, None)}
    assert {one.n_tokens for one in profile.switches if not one.is_first} == {256, 2048}
    assert report.flash_attn is FlashAttn.ON


def test_rounds_go_over_all_of_them() -> None:
    """No child is measured twice before every other was, and the order turns round from one round to the next."""
    machine = _Machine()
    _run(machine, n_ubatches=(128, 256))
    turns = [name for name, what in machine.log if "depths" in what]
    cells = ["layer -ub 128", "layer -ub 256", "tensor -ub 128", "tensor -ub 256"]
    assert turns == [*cells, *cells[::-1], *cells]
    assert machine.most == 4


def test_sessions_that_do_not_fit_at_once_take_turns() -> None:
    """Where the memory holds one placement, one session is open at a time, and rounds go over all of them still."""
    machine = _Machine()
    facts = model_facts()
    need = benching.needs_of_mode(benching.plan_mode(facts, _PLACEMENT, _HOST), _HOST)[0].wanted
    tight = tuple(DeviceFacts(one.name, one.kind, int(1.6 * need)) for one in _HOST)
    report = _run(machine, devices=tight, tiers=())
    assert machine.most == 1
    assert [name for name, what in machine.log if "depths" in what][:3] == [
        "layer -ub 128",
        "tensor -ub 128",
        "tensor -ub 128",
    ]
    assert len(_profile(report).modes) == 2


def test_a_mode_that_is_refused_is_left_out() -> None:
    """A mode that cannot be opened is left out with its reason; the others are measured."""
    machine = _Machine()

    def fails(request: BenchRequest, what: Mapping[str, Any] | None) -> None:
        if request.placement.mode is SplitMode.ROW and what is None:
            raise ChildFailed("row mode is deprecated", Failure(Fault.REFUSED, "Refused", "row mode is deprecated"))

    machine.fails = fails
    report = _run(machine, modes=(*_BOTH, SplitMode.ROW))
    assert _why(report, "row") == "row mode is deprecated"
    assert {one.mode for one in _profile(report).modes} == set(_BOTH)
    assert report.failure is None


def test_a_mode_that_does_not_fit_is_not_opened() -> None:
    """What the plan says does not fit is left out with both numbers, and no child tries it."""
    machine = _Machine()
    report = _run(machine, devices=tuple(DeviceFacts(one.name, one.kind, 1 << 20) for one in _HOST))
    assert "would hold" in _why(report, "layer")
    assert machine.log == []
    assert report.failure is not None
    assert "layer: " in report.failure.message


def test_where_nothing_can_be_opened_the_failure_is_told() -> None:
    """A library or a model that no mode can use is a failure of its own kind."""
    machine = _Machine()

    def fails(_request: BenchRequest, _what: Mapping[str, Any] | None) -> None:
        raise ChildFailed("no library", Failure(Fault.LIBRARY, "LibraryNotFound", "no library"))

    machine.fails = fails
    report = _run(machine)
    assert report.profile is None
    assert report.failure == Failure(Fault.LIBRARY, "LibraryNotFound", "no library")


def test_a_child_that_dies_in_its_second_round_keeps_its_first() -> None:
    """A death ends one size of micro-batches of one mode: what it had counts, and the others go on."""
    machine = _Machine()
    deaths = []

    def fails(request: BenchRequest, what: Mapping[str, Any] | None) -> None:
        is_it = request.placement.mode is SplitMode.TENSOR and request.placement.n_ubatch == 256
        if is_it and what is not None and "depths" in what:
            deaths.append(what)
            if len(deaths) == 2:
                raise ChildFailed("its process was ended by signal 6 (SIGABRT)")

    machine.fails = fails
    report = _run(machine, n_ubatches=(128, 256), tiers=())
    assert len(deaths) == 2
    assert _why(report, "tensor -ub 256") == "its process was ended by signal 6 (SIGABRT); what came before it counts"
    found = {(one.mode.value, one.n_ubatch): one for one in _profile(report).modes}
    assert found["tensor", 256].reads[-1].seconds.n == 1
    assert found["tensor", 128].reads[-1].seconds.n == 3


def test_a_mode_that_dies_at_once_is_left_out() -> None:
    """A mode whose child dies before anything of it was timed has no numbers, and its name has the reason."""
    machine = _Machine()

    def fails(request: BenchRequest, what: Mapping[str, Any] | None) -> None:
        if request.placement.mode is SplitMode.TENSOR and what is not None:
            raise ChildFailed("it died")

    machine.fails = fails
    report = _run(machine)
    assert _why(report, "tensor") == "it died"
    assert [one.mode for one in _profile(report).modes] == [SplitMode.LAYER]
    assert _profile(report).switches == ()


def test_a_tier_that_is_not_had_is_left_out() -> None:
    """Weights that come from elsewhere than was asked for are no times of that tier."""
    machine = _Machine()

    def fails(request: BenchRequest, what: Mapping[str, Any] | None) -> None:
        if request.weights is WeightsTier.PINNED and what is not None:
            raise ChildFailed("weights came from file: the copy was refused")

    machine.fails = fails
    report = _run(machine, tiers=(WeightsTier.FILE, WeightsTier.PINNED, WeightsTier.RESIDENT))
    assert _why(report, "pinned") == "weights came from file: the copy was refused"
    assert {one.way for one in _profile(report).switches} == {"file", "resident"}


def test_switches_beside_are_measured_where_they_fit() -> None:
    """A hosted session is switched where both fit and the time is left; its first switch counts by itself."""
    machine, asked = _Machine(), []

    def beside(what: Benching, held: Sequence[int], *more: Any, **others: Any) -> None:
        asked.append((what, held, list(machine.alive)))
        _beside(machine)(what, held, *more, **others)

    with _played(machine):
        report = Bencher({}, beside=beside)(_what())
    assert [(one[1], one[2]) for one in asked] == [((256, 2048), [])]
    found = [one for one in _profile(report).switches if one.way == "beside"]
    assert {(one.n_tokens, one.is_first) for one in found} == {(258, True), (258, False), (2050, False)}
    assert _profile(report).switch(*_BOTH, "beside", 258) == (0.05, 0.0)
    with _played(machine):
        short = Bencher({}, beside=beside)(_what(budget_s=9.0))
    assert "no time was left" in _why(short, "beside")
    # What a host adds to steps takes no switch.
    assert [one[1] for one in asked[1:]] == [()]
    assert [one.n_seq for one in _profile(short).served] == [1]


_ALL_TIERS = (WeightsTier.FILE, WeightsTier.RESIDENT, WeightsTier.PINNED)


@pytest.mark.parametrize("budget_s", [30.0, 60.0, 90.0, 120.0, 150.0, 200.0, 300.0])
def test_a_bench_keeps_its_budget_and_each_way_comes_before_repetitions(budget_s: float) -> None:
    """Nothing is begun that does not fit, and a way of a switch is left out only where none is repeated for long."""
    machine = _Machine(step_s=0.05)
    machine.place_s = 4.0
    machine.switch_s = {WeightsTier.FILE: 4.0, WeightsTier.RESIDENT: 0.2, WeightsTier.PINNED: 5.0}
    with _played(machine):
        report = Bencher({}, beside=_beside(machine))(_what(budget_s=budget_s, tiers=_ALL_TIERS, rounds=5))
    assert report.seconds <= budget_s
    profile = _profile(report)
    left_out = {one.what for one in report.left_out}
    repeated = {one.seconds.n for mode in profile.modes for one in mode.reads}
    again = {one.pause.n for one in profile.switches}
    assert max(repeated | again) <= 2 or not left_out
    # To open a session and have it open another takes longer than any other way begins in.
    assert ("beside" in left_out) is (budget_s < 60.0)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Refused((Reason("x", "it does not fit"),)), "it does not fit"),
        (WorkerLost(1, "died by signal 6 (SIGABRT)", ()), "SIGABRT"),
        (OSError("no memory file"), "no memory file"),
    ],
)
def test_a_switch_beside_that_fails_is_left_out(error: Exception, said: str) -> None:
    """Whatever goes wrong with a hosted session costs its own switches alone."""

    def beside(*_: object, **__: object) -> None:
        raise error

    machine = _Machine()
    with _played(machine):
        report = Bencher({}, beside=beside)(_what())
    assert said in _why(report, "beside")
    assert _profile(report).ways(*_BOTH) == ("file",)


def test_what_pinned_weights_add_to_a_token_is_measured() -> None:
    """A step takes longer after a switch with pinned weights by what it takes more than after one from the file."""
    machine = _Machine()
    machine.more_s = {WeightsTier.PINNED: 0.001}
    profile = _profile(_run(machine, tiers=(WeightsTier.FILE, WeightsTier.PINNED)))
    more = {one.way: one.more_ms for one in profile.switches if not one.is_first}
    assert more == {"file": 0.0, "pinned": pytest.approx(1.0)}


def test_time_that_runs_out_ends_the_rounds() -> None:
    """A machine that becomes slower is measured less often, and that is said; the switches have their time still."""
    machine = _Machine()

    def fails(_request: BenchRequest, what: Mapping[str, Any] | None) -> None:
        if what is not None and "depths" in what:
            machine.now += 100.0

    machine.fails = fails
    report = _run(machine, budget_s=300.0)
    assert "repetitions: 1, not 3" in report.cuts
    assert _profile(report).ways(*_BOTH) == ("file",)


def test_time_that_is_left_makes_more_rounds() -> None:
    """A machine that turns out faster than its first look is measured as often as was wished, in every way."""
    slow_at_first = _Machine(token_s=0.01)

    def fails(_request: BenchRequest, what: Mapping[str, Any] | None) -> None:
        if what is not None and "depths" in what:
            slow_at_first.token_s = 0.0001

    slow_at_first.fails = fails
    report = _run(slow_at_first, budget_s=150.0, rounds=6, tiers=(WeightsTier.FILE, WeightsTier.PINNED))
    assert not any(one.startswith("repetitions") for one in report.cuts)
    assert _profile(report).of(SplitMode.LAYER).reads[0].seconds.n == 6
    assert _profile(report).ways(*_BOTH) == ("file", "pinned")


def test_a_cancel_keeps_what_was_timed() -> None:
    """What was measured before a cancel is told, and marked as not whole."""
    machine = _Machine()
    n_turns = []

    def fails(_request: BenchRequest, what: Mapping[str, Any] | None) -> None:
        if what is not None and "depths" in what:
            n_turns.append(1)
            if len(n_turns) == 4:
                raise Cancelled("the bench")

    machine.fails = fails
    report = _run(machine)
    assert report.is_cancelled
    assert [one.mode for one in _profile(report).modes] == list(_BOTH)
    assert _profile(report).switches == ()


def test_progress_says_how_long_it_will_take() -> None:
    """Each step is told with its share and the time that is left, which is never more than was given."""
    machine, told = _Machine(), []
    with _played(machine):
        Bencher({}, on_progress=told.append)(_what())
    assert [one.stage for one in told[:2]] == ["a first look at layer mode", "a first look at tensor mode"]
    shares = [one.done for one in told]
    assert shares == sorted(shares)
    assert all(one.note.startswith("about ") for one in told)


def test_a_bench_beyond_its_time_says_so() -> None:
    """The least is measured however long it takes, and then no time is promised."""
    machine, told = _Machine(token_s=1.0), []
    with _played(machine):
        Bencher({}, on_progress=told.append)(_what(budget_s=5.0))
    assert told[0].note == "about 0:05 left"
    assert told[-1].note == "takes longer than planned"


# -- real processes ----------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.stub
def test_a_process_that_dies_takes_its_mode_along_alone(tmp_path: Path) -> None:
    """A library that aborts in tensor mode is left out with its own last words, and layer mode is measured."""
    model = write_model(tmp_path / "tiny.gguf")
    env = {name: text for name, text in os.environ.items() if not name.startswith("STUB_")}
    env |= {"STUB_FAULTS": "decode:abort:tensor@30", "XDG_CACHE_HOME": str(tmp_path)}
    what = _what(
        model=model, facts=read_facts(model), library=build(), placement=_PLACEMENT.changed(n_ctx=512, n_threads=1),
        budget_s=20.0, rounds=1, tiers=(),
    )  # fmt: skip
    report = Bencher(env)(what)
    assert _profile(report).modes[0].mode is SplitMode.LAYER
    (why,) = (one.why for one in report.left_out if one.what.startswith("tensor"))
    assert "SIGABRT" in why
    assert "stub_was_asked_to_abort" in why


@needs_compiler
@pytest.mark.stub
def test_a_cancel_ends_the_process_under_way(tmp_path: Path) -> None:
    """A cancel in the middle ends the child at once; what was timed before it is there."""
    model = write_model(tmp_path / "tiny.gguf")
    env = dict(os.environ) | {"XDG_CACHE_HOME": str(tmp_path)}
    told: list[str] = []
    what = _what(
        model=model, facts=read_facts(model), library=build(), placement=_PLACEMENT.changed(n_ctx=512, n_threads=1),
        modes=(SplitMode.LAYER,), budget_s=20.0, rounds=1000,
    )  # fmt: skip
    report = Bencher(env, lambda one: told.append(one.stage), is_cancelled=lambda: len(told) > 3)(what)
    assert report.is_cancelled
    assert [one.mode for one in _profile(report).modes] == [SplitMode.LAYER]
