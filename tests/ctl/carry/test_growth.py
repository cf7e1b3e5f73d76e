"""Arenas grow beside a session's work, and no further than the host allows."""

from __future__ import annotations

import os

import pytest

from splitctl.carry import growth
from splitctl.carry.arena import Arena, Arenas, Block
from splitctl.carry.growth import Growth
from splitctl.host_memory import HostMemory
from tests.ctl.pins import FakePins

MIB = 1 << 20


def _grown(arenas: Arenas) -> list[int]:
    arenas.catch_up()
    return [one.n_bytes // MIB for one in arenas.both]


def test_both_arenas_grow_alike_and_the_thread_ends() -> None:
    """What is wanted is there after the wait, pinned; wanting less does nothing."""
    arenas, pins = Arenas(), FakePins()
    for one in arenas.both:
        one.pinner = pins
    grower = Growth(arenas)
    grower.wait()
    grower.want(3 * MIB, 2)
    grower.wait()
    assert _grown(arenas) == [4, 4]
    assert [one.pinned for one in arenas.both] == [(True, "")] * 2
    grower.want(4 * MIB, 2)
    assert grower._thread is None


def test_one_arena_grows_where_one_is_wanted() -> None:
    """Without a proof on bytes the second one takes no memory."""
    arenas = Arenas()
    grower = Growth(arenas)
    grower.want(2 * MIB, 1)
    grower.wait()
    assert _grown(arenas) == [2, 0]


def test_the_newest_wish_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wish that was not begun yet is replaced by the next, and one that comes meanwhile is met after it."""
    arenas = Arenas()
    grower = Growth(arenas)
    made: list[int] = []
    ahead = Arena.ahead

    def noting(arena: Arena, n_bytes: int, goes_on: object) -> Block | None:
        made.append(n_bytes // MIB)
        if len(made) == 1:
            grower.want(4 * MIB, 1)
            grower.want(6 * MIB, 1)
        return ahead(arena, n_bytes)

    monkeypatch.setattr(Arena, "ahead", noting)
    grower.want(2 * MIB, 1)
    grower.wait()
    assert made == [2, 6]
    assert _grown(arenas) == [6, 0]


def test_what_would_not_leave_the_host_as_much_again_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both arenas count."""
    monkeypatch.setattr(growth, "host_memory", lambda: HostMemory(64 * MIB, 16 * MIB))
    arenas = Arenas()
    grower = Growth(arenas)
    grower.want(4 * MIB, 2)
    grower.wait()
    assert _grown(arenas) == [0, 0]
    grower.want(2 * MIB, 2)
    grower.wait()
    assert _grown(arenas) == [2, 2]


def test_memory_that_another_process_has_taken_is_mapped_and_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second worker finds the arenas of the first one full, and the host has no more for it to take."""
    fds = [os.memfd_create("arena") for _ in range(2)]
    try:
        for fd in fds:
            Arena(fd).reserve(4 * MIB)
        monkeypatch.setattr(growth, "host_memory", lambda: HostMemory(64 * MIB, 0))
        arenas, pins = Arenas(*map(Arena, fds)), FakePins()
        for one in arenas.both:
            one.pinner = pins
        grower = Growth(arenas)
        grower.want(4 * MIB, 2)
        grower.wait()
        assert (_grown(arenas), len(pins.held)) == ([4, 4], 2)
        grower.want(6 * MIB, 2)
        grower.wait()
        assert _grown(arenas) == [4, 4]
    finally:
        for fd in fds:
            os.close(fd)


def test_memory_that_was_made_before_a_device_could_gain_by_it_is_made_again() -> None:
    """A session that moves from processors to GPUs gets pinned memory, no less than it had."""
    arenas, pins = Arenas(), FakePins()
    arenas.both[0].reserve(4 * MIB)
    assert arenas.both[0].pinned == (None, "")
    arenas.both[0].pinner = pins
    is_pinned, why = arenas.both[0].pinned
    assert (is_pinned, "was not ready" in why) == (False, True)
    grower = Growth(arenas)
    grower.want(2 * MIB, 1)
    grower.wait()
    assert (_grown(arenas)[0], arenas.both[0].pinned) == (4, (True, ""))


def test_what_cannot_be_pinned_is_tried_once() -> None:
    """The same memory would be made again and again."""
    arenas, pins = Arenas(), FakePins(refusal="no driver")
    arenas.both[0].pinner = pins
    grower = Growth(arenas)
    grower.want(2 * MIB, 1)
    grower.wait()
    arenas.catch_up()
    grower.want(2 * MIB, 1)
    assert grower._thread is None
    assert arenas.both[0].pinned == (False, "no driver")


def test_memory_that_cannot_be_had_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The switch that needs it says so; a later wish is tried again."""

    def fails(_arena: Arena, _n_bytes: int, _goes_on: object) -> None:
        raise OSError(12, "no memory")

    arenas = Arenas()
    grower = Growth(arenas)
    with monkeypatch.context() as patched:
        patched.setattr(Arena, "ahead", fails)
        grower.want(2 * MIB, 1)
        grower.wait()
    grower.want(2 * MIB, 1)
    grower.wait()
    assert _grown(arenas) == [2, 0]


def test_a_closed_one_grows_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was under way ends early, what comes later is not begun, and nothing stays pinned."""
    arenas, pins = Arenas(), FakePins()
    arenas.both[0].pinner = pins
    grower = Growth(arenas)
    ahead = Arena.ahead

    def closed_meanwhile(arena: Arena, n_bytes: int, goes_on: object) -> Block | None:
        grower._is_closed = True
        return ahead(arena, n_bytes, goes_on)  # type: ignore[arg-type]

    monkeypatch.setattr(Arena, "ahead", closed_meanwhile)
    grower.want(2 * MIB, 1)
    grower.close()
    grower.want(8 * MIB, 1)
    arenas.close()
    assert (_grown(arenas), pins.held) == ([0, 0], {})
