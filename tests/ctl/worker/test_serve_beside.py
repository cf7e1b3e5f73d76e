"""Two workers and one session: the first serves and seals, the second builds the target and takes over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from splitctl.ipc import orders
from splitctl.ipc.jobs import Failure, Fault
from splitctl.ipc.orders import Ended, HandOver, Open, Sealed, StageReached, Switch, Switched, TakeOver, TookOver
from splitctl.outcome import Route, SwitchOptions
from splitctl.placement import SplitMode
from tests.ctl.serving import Arenas, DrivenWorker, onward, placement, sampler, serving
from tests.stublib import build, needs_compiler, write_model

pytestmark = [pytest.mark.stub, needs_compiler]

PLACE = placement(devices=("STUB0", "STUB1"))
TENSOR = PLACE.changed(mode=SplitMode.TENSOR)
N = 40
START = orders.Start(1, 1, tuple(b"the quick brown fox jumps over"), sampler(1), N)
PACE = "pace:decode=10000"
STANDBY = Open(TENSOR, force=True, standby_for=7)
BESIDE = SwitchOptions(force=True, via=Route.BESIDE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """No verdicts from before, and streams that last."""
    return {"XDG_CACHE_HOME": str(tmp_path / "cache"), "STUB_FAULTS": PACE}


@pytest.fixture
def arenas() -> Iterator[Arenas]:
    held = Arenas()
    yield held
    held.close()


@pytest.fixture
def first(model: Path, arenas: Arenas, env: dict[str, str]) -> Iterator[DrivenWorker]:
    """A worker that serves."""
    with serving(model, build(), Open(PLACE), arenas, env=env) as worker:
        worker.until(orders.Opened)
        yield worker


def _handed(worker: DrivenWorker) -> orders.HandedOver:
    """Let a worker that streams check a switch beside and hand over."""
    worker.send(Switch(7, TENSOR, BESIDE, may_be_beside=True))
    found = worker.until(orders.FitsBeside)
    assert (found.order, found.target) == (7, TENSOR)
    worker.send(HandOver(7))
    return worker.until(orders.HandedOver)


def test_a_stream_goes_on_in_the_second_worker(
    first: DrivenWorker, model: Path, arenas: Arenas, env: dict[str, str]
) -> None:
    """Each token is drawn once; nothing is read again; the first decode is told once, and what all of it took."""
    with serving(model, build(), Open(PLACE), env=env) as worker:
        alone = worker.run(START)
    with serving(model, build(), STANDBY, arenas, env=env) as second:
        second.until(orders.Opened)
        first.send(START)
        first.until_drawn(1, 3)
        assert [one.stage for one in second.of(StageReached) if one.share == 0.0] == ["placing", "building", "trial"]
        handed = _handed(first)
        drawn = first.drawn(1)
        assert (handed.n_sequences, handed.n_tokens) == (1, len(START.tokens) + len(drawn))
        assert [one.stage for one in first.of(StageReached)] == ["checking", "saving", "sealing"]
        assert not first.of(Ended)
        second.send(TakeOver(7, first.of(Sealed)[-1].seal, BESIDE))
        took = second.until(TookOver)
        assert set(took.stages_ms) == {"placing", "building", "restoring", "proving"}
        assert took.weight_bytes is not None
        rest = second.run(onward(START, first))
        assert drawn + rest == alone
        reading = second.of(orders.Reading)[0]
        assert reading.n_done == reading.n_reused
        assert len(second.of(orders.FirstStep)) == 1
        assert [one.arena for one in second.of(orders.Unsealed)] == [1 - first.of(Sealed)[-1].seal.arena] * 2


def test_the_first_worker_goes_on_when_the_switch_is_off(first: DrivenWorker, model: Path, env: dict[str, str]) -> None:
    """It keeps everything: started again its stream draws the very tokens, and another switch goes in place."""
    with serving(model, build(), Open(PLACE), env=env) as worker:
        alone = worker.run(START)
    first.send(START)
    first.until_drawn(1, 3)
    _handed(first)
    first.send(orders.GoOn(7), onward(START, first))
    first.until(Ended)
    assert first.drawn(1) == alone
    first.send(HandOver(7))
    assert first.until(orders.Failed).fault is Fault.CONFIG
    first.send(Switch(8, TENSOR, SwitchOptions(force=True)))
    assert first.until(Switched).outcome["status"] == "switched"


def test_a_worker_that_has_streams_takes_nothing_over(first: DrivenWorker) -> None:
    """It would take their sequences from them."""
    first.send(START)
    first.until_drawn(1, 1)
    seal = orders.Seal(0, 0, "00" * 16, 0, 0, "00" * 16, PLACE)
    first.send(TakeOver(9, seal))
    assert "streams" in first.until(orders.Failed).message


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ("decode:nan:tensor@1", "not numbers"),
        ("decode:fail:tensor@1", "llama_decode"),
        ("init:null:tensor@1", "failed to initialize the context"),
    ],
)
def test_a_standby_that_cannot_make_a_decode_says_so_and_ends(
    model: Path, arenas: Arenas, env: dict[str, str], faults: str, said: str
) -> None:
    """Before anybody has stopped for it."""
    with serving(model, build(), STANDBY, arenas, env={**env, "STUB_FAULTS": faults}) as worker:
        last = worker.end()
    assert isinstance(last, Failure)
    assert said in last.message
    assert not worker.of(orders.Opened)


@pytest.mark.parametrize(
    ("route", "force", "comes_to"), [("auto", False, "switched"), ("beside", False, "refused"), ("beside", True, "")]
)
def test_what_does_not_fit_beside_goes_in_place_or_is_refused(
    model: Path, arenas: Arenas, env: dict[str, str], route: str, force: bool, comes_to: str
) -> None:
    """Two placements of 1 GiB and more a device do not fit 1.7 GiB at once; one does, and why is told."""
    faults = " ".join(f"budget:STUB{n}={1700 << 20}" for n in range(2))
    place = PLACE.changed(n_ctx=1 << 23)
    with serving(model, build(), Open(place), arenas, env={**env, "STUB_FAULTS": faults}) as worker:
        worker.until(orders.Opened)
        options = SwitchOptions(force=force, via=Route(route))
        worker.send(Switch(1, place.changed(mode=SplitMode.TENSOR), options, may_be_beside=True))
        if not comes_to:
            assert worker.until(orders.FitsBeside).order == 1
            return
        outcome = worker.until(Switched).outcome
    assert outcome["status"] == comes_to, outcome
    assert "does not fit beside what serves" in outcome["via_reason"]
    assert "MiB" in outcome["via_reason"]
    codes = [one["code"] for one in outcome["reasons"]]
    assert codes == (["does-not-fit"] if comes_to == "refused" else [])
    assert outcome["effective"] == ("layer" if comes_to == "refused" else "tensor")
