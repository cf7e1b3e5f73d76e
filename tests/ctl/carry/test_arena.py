"""Memory for saved states: grows in place, keeps views alive, and says what it holds."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator

import pytest

from splitctl.carry.arena import Arena

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
    assert arena.holds(first)
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
    assert not arena.holds(first)
    assert bytes(first) == b"state"
    assert arena.holds(arena.view(5 * HUGE_PAGE))


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


def test_a_view_of_a_memory_file_stays_its_own_when_it_grows(memory_file: int) -> None:
    """The old mapping is the same memory, so a sealed state in it must not be taken for one that lies elsewhere."""
    arena = Arena(memory_file)
    arena.reserve(5)
    first = arena.view(5)
    first[:] = b"state"
    arena.reserve(5 * HUGE_PAGE)
    assert arena.holds(first)
    assert bytes(arena.view(5)) == b"state"
    assert not Arena(memory_file).holds(first)


def test_a_memory_file_that_cannot_grow_is_an_error() -> None:
    """Where there is no memory, the caller is told; it is not ended by a signal."""
    fd = os.memfd_create("arena", os.MFD_ALLOW_SEALING)
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
        with pytest.raises(OSError, match="not permitted"):
            Arena(fd).reserve(5)
    finally:
        os.close(fd)
