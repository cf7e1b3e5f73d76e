"""Memory for saved states: grows in place, keeps views alive, and says what it holds."""

from __future__ import annotations

import pytest

from splitctl.arena import Arena

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
