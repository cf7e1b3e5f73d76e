"""Memory for saved states: grows in place, keeps views alive, and says what it holds."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator

import pytest

from splitctl.carry.arena import Arena, Arenas

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
