"""Memory for saved states: grows in place, keeps views alive, and says what it holds."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator

import pytest

from splitctl.carry.arena import Arena, Arenas
from tests.ctl.pins import FakePins

HUGE_PAGE = 2 << 20


def test_it_holds_nothing_until_something_is_reserved() -> None:
    """A view of nothing is a fault of the caller."""
    arena = Arena()
    assert arena.n_bytes == 0
    with pytest.raises(ValueError, match="1 bytes of an arena of 0"):
        arena.view(1)


def test_it_grows_in_place_up_to_twice_and_keeps_what_it_holds() -> None:
    """A state that has grown by some tokens finds its room without a new mapping."""
    arena = Arena()
    arena.reserve(5)
    assert arena.n_bytes == HUGE_PAGE
    first = arena.view(5)
    first[:] = b"state"
    arena.reserve(2 * HUGE_PAGE)
    assert arena.n_bytes == 2 * HUGE_PAGE
    assert bytes(arena.view(5)) == b"state"
    arena.reserve(1)
    assert arena.n_bytes == 2 * HUGE_PAGE


def test_a_view_outlives_a_block_that_was_outgrown() -> None:
    """A sealed state stays readable while another is saved."""
    arena = Arena()
    arena.reserve(5)
    first = arena.view(5)
    first[:] = b"state"
    arena.reserve(5 * HUGE_PAGE)
    assert bytes(first) == b"state"


def test_room_that_was_not_touched_is_not_given_out() -> None:
    """The mapping is larger than what is held."""
    arena = Arena()
    arena.reserve(5)
    with pytest.raises(ValueError, match="of an arena of"):
        arena.view(HUGE_PAGE + 1)


@pytest.fixture
def memory_file() -> Iterator[int]:
    """The descriptor of an empty memory file."""
    fd = os.memfd_create("arena")
    yield fd
    os.close(fd)


def test_what_is_in_a_memory_file_stays_for_the_next_arena(memory_file: int) -> None:
    """Another process maps what a lost one has written; reserving changes none of it."""
    first = Arena(memory_file)
    first.reserve(5)
    first.view(5)[:] = b"state"
    second = Arena(memory_file)
    second.reserve(3 * HUGE_PAGE)
    assert bytes(second.view(5)) == b"state"
    assert second.n_bytes == 3 * HUGE_PAGE
    second.view(5)[:] = b"STATE"
    assert bytes(first.view(5)) == b"STATE"


def test_a_view_of_a_memory_file_is_the_same_memory_after_it_grows(memory_file: int) -> None:
    """The old mapping shows what is written through the new one."""
    arena = Arena(memory_file)
    arena.reserve(5)
    first = arena.view(5)
    first[:] = b"state"
    arena.reserve(5 * HUGE_PAGE)
    assert bytes(arena.view(5)) == b"state"
    arena.view(5)[:] = b"STATE"
    assert bytes(first) == b"STATE"


def test_a_memory_file_that_cannot_grow_is_an_error() -> None:
    """Where there is no memory, the caller is told; it is not ended by a signal."""
    fd = os.memfd_create("arena", os.MFD_ALLOW_SEALING)
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
        with pytest.raises(OSError, match="not permitted"):
            Arena(fd).reserve(5)
    finally:
        os.close(fd)


def test_the_first_of_two_arenas_is_used_until_something_must_be_kept() -> None:
    """A session that keeps nothing needs one arena, and the other takes no memory."""
    arenas = Arenas()
    assert [arenas.writable(5)[0] for _ in range(3)] == [0, 0, 0]
    assert arenas.both[1].n_bytes == 0


@pytest.mark.parametrize("index", [0, 1])
def test_the_arena_of_the_original_is_never_given_out(index: int) -> None:
    """Neither a save nor a proof overwrites the sealed original, even where the newest carry lies in the other one."""
    arenas = Arenas()
    arenas.original, arenas.reported = index, 1 - index
    assert [arenas.writable(5)[0] for _ in range(2)] == [1 - index] * 2
    assert arenas.reported is None


def test_the_newest_reported_carry_is_kept_and_the_other_arena_announced() -> None:
    """Without an original the newest carry that others know of stays, and they hear of what is overwritten."""
    overwritten: list[int] = []
    arenas = Arenas()
    arenas.on_overwrite = overwritten.append
    for wanted in (0, 1, 0):
        index, view = arenas.writable(5)
        assert (index, len(view)) == (wanted, 5)
        arenas.reported = index
    assert overwritten == [0, 1, 0]


def _ready(arena: Arena, n_bytes: int) -> None:
    """Make memory ahead and use it."""
    made = arena.ahead(n_bytes)
    assert made is not None
    left = arena.take(made)
    if left is not None:
        left.unpin()


@pytest.fixture(params=["private", "shared"])
def pinned_arena(request: pytest.FixtureRequest, memory_file: int) -> tuple[Arena, FakePins]:
    """An arena whose device gains by pinned memory."""
    arena, pins = Arena(memory_file if request.param == "shared" else None), FakePins()
    arena.pinner = pins
    return arena, pins


def test_memory_made_ahead_is_pinned_as_one_piece(pinned_arena: tuple[Arena, FakePins]) -> None:
    """A copy that ends outside of the registered piece ends the process, so all that is held is in one."""
    arena, pins = pinned_arena
    assert arena.pinned == (None, "")
    _ready(arena, 3 * HUGE_PAGE + 1)
    assert arena.pinned == (True, "")
    assert pins.holds(arena.view(arena.n_bytes))
    assert list(pins.held.values()) == [4 * HUGE_PAGE]


def test_larger_memory_replaces_the_pinned_one_which_is_let_go(pinned_arena: tuple[Arena, FakePins]) -> None:
    """The new one is pinned before the old one is unpinned, and views of the old one stay."""
    arena, pins = pinned_arena
    _ready(arena, 5)
    old = arena.view(5)
    old[:] = b"state"
    made = arena.ahead(2 * HUGE_PAGE)
    assert made is not None
    assert pins.holds(old)
    left = arena.take(made)
    assert left is not None
    left.unpin()
    assert not pins.holds(old)
    assert pins.holds(arena.view(2 * HUGE_PAGE))
    assert bytes(old) == b"state"
    if arena.n_file_bytes:
        assert bytes(arena.view(5)) == b"state"


def test_what_grows_during_a_switch_is_not_pinned_and_says_so(pinned_arena: tuple[Arena, FakePins]) -> None:
    """Nothing may lie in two registrations, and there is no time for a new one."""
    arena, pins = pinned_arena
    _ready(arena, 5)
    arena.reserve(HUGE_PAGE + 1)
    assert pins.held == {}
    is_pinned, why = arena.pinned
    assert is_pinned is False
    assert "the state needs more memory than was pinned ahead" in why
    # As large a block, pinned, is better than what is held.
    _ready(arena, HUGE_PAGE + 1)
    assert arena.pinned == (True, "")


def test_memory_made_too_late_is_not_taken(pinned_arena: tuple[Arena, FakePins]) -> None:
    """A switch that came in between has made more; what was made ahead goes."""
    arena, pins = pinned_arena
    made = arena.ahead(5)
    assert made is not None
    arena.reserve(5 * HUGE_PAGE)
    view = arena.view(5 * HUGE_PAGE)
    assert arena.take(made) is made
    made.unpin()
    assert (arena.n_bytes, pins.held) == (len(view), {})


def test_memory_that_cannot_be_pinned_is_used_and_says_why(pinned_arena: tuple[Arena, FakePins]) -> None:
    """Everything goes on, slower."""
    arena, pins = pinned_arena
    pins.refusal = "memory could not be pinned: no driver"
    _ready(arena, 5)
    assert arena.pinned == (False, pins.refusal)
    arena.view(5)[:] = b"state"


def test_a_pin_that_was_undone_is_not_called_one(pinned_arena: tuple[Arena, FakePins]) -> None:
    """Some builds reset a device, and the driver forgets what it held."""
    arena, _ = pinned_arena
    made = arena.ahead(5)
    assert made is not None
    arena.take(made)
    assert made.pin is not None
    made.pin.release()
    is_pinned, why = arena.pinned
    assert is_pinned is False
    assert "reset" in why


def test_making_memory_ahead_ends_when_it_is_not_wanted_any_more() -> None:
    """Closing a session does not wait for gigabytes."""
    asked: list[int] = []

    def goes_on() -> bool:
        asked.append(1)
        return len(asked) < 2

    assert Arena().ahead(33 << 20, goes_on) is None
    assert len(asked) == 2


def test_the_place_of_an_original_is_not_replaced_until_it_is_dropped() -> None:
    """The way back reads the original from pinned memory, so that stays pinned meanwhile."""
    arenas, pins = Arenas(), FakePins()
    for one in arenas.both:
        one.pinner = pins
        _ready(one, 5)
    arenas.original = 0
    views = [one.view(5) for one in arenas.both]
    for index, one in enumerate(arenas.both):
        made = one.ahead(HUGE_PAGE + 1)
        assert made is not None
        arenas.offer(index, made)
    arenas.catch_up()
    assert [one.n_bytes for one in arenas.both] == [HUGE_PAGE, 2 * HUGE_PAGE]
    assert [pins.holds(one) for one in views] == [True, False]
    arenas.original = None
    arenas.catch_up()
    assert [one.n_bytes for one in arenas.both] == [2 * HUGE_PAGE] * 2
    assert not arenas.is_behind
    assert len(pins.held) == 2


def test_a_switch_takes_what_was_made_and_unpins_nothing() -> None:
    """Unpinning takes time, which comes with the next decode."""
    arenas, pins = Arenas(), FakePins()
    arenas.both[0].pinner = pins
    _ready(arenas.both[0], 5)
    for size in (HUGE_PAGE + 1, 2 * HUGE_PAGE + 1):
        made = arenas.both[0].ahead(size)
        assert made is not None
        arenas.offer(0, made)
    index, view = arenas.writable(2 * HUGE_PAGE + 1)
    assert (index, pins.holds(view), len(pins.held)) == (0, True, 3)
    arenas.catch_up()
    assert len(pins.held) == 1
    assert pins.holds(view)


def test_closing_unpins_everything() -> None:
    """Also what was made and never used, and the place of an original."""
    arenas, pins = Arenas(), FakePins()
    arenas.both[0].pinner = pins
    _ready(arenas.both[0], 5)
    arenas.original = 0
    made = arenas.both[0].ahead(5 * HUGE_PAGE)
    assert made is not None
    arenas.offer(0, made)
    arenas.close()
    assert pins.held == {}
