"""The memory of a carry: made and pinned beside the session's work, so that a switch touches nothing new."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable

import pytest

from splitctl import SamplerSpec, Session, Stage, SwitchOutcome, SwitchStatus
from splitctl.carry import arena as arenas
from splitctl.engine import live as parts
from tests.ctl.pins import FakePin, FakePins
from tests.real.conftest import SMALL_PROMPT, Opener, base

GREEDY = SamplerSpec(temp=0.0)
PAGE = 4096


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> FakePins:
    """Let the processor gain by pinned memory, of which there is a page at a time."""
    found = FakePins()

    def pin(_library: object, _devices: object, memory: memoryview) -> FakePin | str:
        return found(memory)

    monkeypatch.setattr(parts, "pinnable", lambda _library, _devices: {"CPU": 0})
    monkeypatch.setattr(parts, "pin", pin)
    monkeypatch.setattr(arenas, "_GRAIN", PAGE)
    return found


def _switched(session: Session, **named: object) -> SwitchOutcome:
    outcome = session.switch(session.placement.changed(**(named or {"tensor_split": (0.2, 0.8)})))
    assert outcome.status is SwitchStatus.SWITCHED, outcome.reason
    return outcome


def _tokens(session: Session, n: int = 1) -> list[int]:
    return [token.id for token in session.generate(n=n, sampler=GREEDY)]


def test_a_reserved_carry_is_pinned_and_grows_ahead_of_its_sequences(open_small: Opener, pins: FakePins) -> None:
    """A prompt far larger than what was reserved finds pinned memory when it is switched."""
    session = open_small(base(n_ctx=2048))
    session.reserve(8)
    session.prefill(SMALL_PROMPT)
    assert _switched(session).carry_pinned
    _tokens(session)
    before = session._live.arenas.n_bytes
    session.prefill([5, 9, 2, 7] * 256)
    session._live.growth.wait()
    _tokens(session)
    assert session._live.arenas.n_bytes > before
    outcome = _switched(session, tensor_split=(0.8, 0.2))
    assert (outcome.carry_pinned, outcome.carry_pinned_reason) == (True, "")
    assert pins.holds(session._effects.transfer.original.view)
    session.close()
    assert pins.held == {}


def test_a_carry_that_nothing_was_reserved_for_is_pinned_from_the_next_switch_on(
    open_small: Opener, pins: FakePins
) -> None:
    """The first switch takes what memory it finds and says so; the trial's decode has more made."""
    session = open_small()
    session.prefill(SMALL_PROMPT)
    outcome = _switched(session)
    assert outcome.carry_pinned is False
    assert "was pinned ahead" in outcome.carry_pinned_reason
    assert outcome.to_json()["carry_pinned"] is False
    _tokens(session, 2)
    session._live.growth.wait()
    assert _switched(session, tensor_split=(0.8, 0.2)).carry_pinned
    assert len(pins.held) == 2


def test_a_switch_that_comes_while_memory_is_made_does_not_wait_for_it(
    open_small: Opener, pins: FakePins, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes what is there, and says that this was not ready."""
    begun, goes_on = threading.Event(), threading.Event()
    ahead = arenas.Arena.ahead

    def slow(arena: arenas.Arena, n_bytes: int, wanted: Callable[[], bool]) -> arenas.Block | None:
        begun.set()
        goes_on.wait(60)
        return ahead(arena, n_bytes, wanted)

    monkeypatch.setattr(arenas.Arena, "ahead", slow)
    session = open_small()
    session.prefill(SMALL_PROMPT)
    session.reserve(64, wait=False)
    assert begun.wait(60)
    outcome = _switched(session)
    assert (outcome.carry_pinned, "was not ready" in outcome.carry_pinned_reason) == (False, True)
    goes_on.set()
    session._live.growth.wait()
    _tokens(session, 2)
    assert _switched(session, tensor_split=(0.8, 0.2)).carry_pinned


def test_a_carry_that_cannot_be_pinned_goes_all_the_same(open_small: Opener, pins: FakePins) -> None:
    """The outcome has the driver's reason."""
    pins.refusal = "memory could not be pinned: cuInit failed with 100"
    session = open_small()
    session.reserve(64)
    session.prefill(SMALL_PROMPT)
    outcome = _switched(session)
    assert (outcome.carry_pinned, outcome.carry_pinned_reason) == (False, pins.refusal)


def test_a_converted_carry_is_not_called_pinned(open_small: Opener, pins: FakePins) -> None:
    """The copy that the target gets lies elsewhere."""
    session = open_small(base(flash="on"))
    session.reserve(64)
    session.prefill(SMALL_PROMPT)
    outcome = _switched(session, type_k="f32", type_v="f32")
    assert (outcome.carry_pinned, "converted" in outcome.carry_pinned_reason) == (False, True)
    assert pins.held


def test_processors_gain_nothing_by_pinned_memory(open_small: Opener) -> None:
    """Then nothing is said of it."""
    session = open_small()
    session.prefill(SMALL_PROMPT)
    outcome = _switched(session)
    assert (outcome.carry_pinned, outcome.carry_pinned_reason) == (None, "")
    refused = session.switch(session.placement.changed(n_ctx=8))
    assert refused.carry_pinned is None


def test_a_first_switch_touches_what_it_needs_before_anything_is_freed(
    open_small: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was reserved: the memory for reading back too is taken while the old placement is still there."""
    session = open_small(base(n_ctx=512))
    session.prefill(SMALL_PROMPT)
    seen: list[str] = []
    touch = arenas.Arena._touch

    def noted(arena: arenas.Arena, block: arenas.Block, size: int) -> None:
        seen.append("touched")
        touch(arena, block, size)

    monkeypatch.setattr(arenas.Arena, "_touch", noted)
    outcome = session.switch(
        session.placement.changed(tensor_split=(0.2, 0.8)),
        progress=lambda at, share: seen.append(at.value) if share == 0.0 else None,
    )
    assert outcome.status is SwitchStatus.SWITCHED, outcome.reason
    assert seen.count("touched") == 2
    goes = next(at for at, name in enumerate(seen) if name in {"freeing", "switching_natively"})
    assert "touched" not in seen[goes:]


def test_memory_for_reading_back_that_cannot_be_had_costs_nothing(
    open_small: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session never leaves its placement, and goes on."""
    session, straight = open_small(), open_small()
    for one in (session, straight):
        one.prefill(SMALL_PROMPT)
    second = session._live.arenas.both[1]

    def fails(_n_bytes: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(second, "reserve", fails)
    outcome = session.switch(session.placement.changed(tensor_split=(0.2, 0.8)))
    assert (outcome.status, outcome.stage) == (SwitchStatus.FELL_BACK, Stage.SAVING)
    assert "Cannot allocate memory" in outcome.reason
    assert outcome.stages_ms.freeing is None
    assert _tokens(session, 6) == _tokens(straight, 6)


@pytest.mark.parametrize("mode", ["split", "type"])
def test_a_second_switch_maps_and_touches_nothing_new(
    open_small: Opener, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Between the free and the trial no memory of the size of a state is taken, and the arenas stay as they are."""
    session = open_small(base(n_ctx=2048, flash="on"))
    session.prefill([5, 9, 2, 7] * 400)
    there = {"tensor_split": (0.2, 0.8)} if mode == "split" else {"type_k": "f32", "type_v": "f32"}
    first, second = session.placement, session.placement.changed(**there)
    for target in (second, first):
        assert session.switch(target).status is SwitchStatus.SWITCHED
        _tokens(session, 2)
        session._live.growth.wait()
    _tokens(session)
    touched: list[int] = []
    monkeypatch.setattr(arenas.Arena, "_touch", lambda _arena, _block, size: touched.append(size))

    def watch(at: Stage, share: float) -> None:
        if at in {Stage.FREEING, Stage.SWITCHING_NATIVELY} and share == 0.0:
            tracemalloc.start()

    outcome = session.switch(second, progress=watch)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert outcome.status is SwitchStatus.SWITCHED, outcome.reason
    assert touched == []
    assert outcome.state_bytes is not None
    assert peak < outcome.state_bytes / 4
