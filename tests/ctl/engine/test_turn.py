"""Whose turn it is: in the order of asking, a switch first, and nobody waits for ever for one who was interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from splitctl.engine import turn as module
from splitctl.engine.turn import Turn
from splitctl.errors import Busy, Cancelled, DeadlineExceeded
from tests.interrupted import Interruption

GUARD_S = 60.0


class Watched(Turn):
    """Tells when a thread has begun to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.n_waiting = threading.Semaphore(0)

    def _asked(self, *arguments: Any, **named: Any) -> bool:
        is_mine = super()._asked(*arguments, **named)
        if not is_mine:
            self.n_waiting.release()
        return is_mine


def started(*works: Callable[[], None]) -> list[threading.Thread]:
    """Threads at work."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    return threads


def test_turns_are_given_in_the_order_of_asking() -> None:
    """One who gives the turn up and wants it again at once, as a generation does, waits for those who asked before."""
    turn, order = Watched(), []

    def once(name: str) -> None:
        with turn.take(name):
            order.append(name)

    threads = []
    with turn.take("a generation"):
        for name in ("first", "second"):
            threads += started(lambda name=name: once(name))
            assert turn.n_waiting.acquire(timeout=GUARD_S)
        order.append("generation")
    once("generation")
    for thread in threads:
        thread.join(GUARD_S)
    assert order == ["generation", "first", "second", "generation"]


def test_a_switch_goes_before_those_who_asked_earlier() -> None:
    """The others have their turns when it has ended."""
    turn, order = Watched(), []

    def work() -> None:
        with turn.take("work"):
            order.append("work")

    def switch() -> None:
        with turn.announce_switch("a switch"):
            turn.enter_switch(None)
            order.append("switch")

    threads = []
    with turn.take("a generation"):
        for one in (work, switch):
            threads += started(one)
            assert turn.n_waiting.acquire(timeout=GUARD_S)
    for thread in threads:
        thread.join(GUARD_S)
    assert order == ["switch", "work"]


def test_a_second_switch_and_a_call_from_inside_are_refused() -> None:
    """Each is told what is under way, and the turn is as it was."""
    turn = Turn()
    with turn.take("a decode"):
        with pytest.raises(Busy, match="a decode"), turn.take("more"):
            pass
        with pytest.raises(Busy, match="a decode"), turn.announce_switch("a switch"):
            pass
    refused: list[str] = []

    def second() -> None:
        try:
            with turn.announce_switch("another"):
                pass
        except Busy as error:
            refused.append(error.what)

    with turn.announce_switch("a switch"):
        for thread in started(second):
            thread.join(GUARD_S)
        turn.enter_switch(0.0)
        with pytest.raises(Busy, match="a switch"), turn.take("more"):
            pass
    assert refused == ["a switch"]
    with turn.take("work"):
        pass


def test_a_switch_that_gives_up_leaves_no_trace() -> None:
    """Out of time or cancelled: the one who waits behind it is next."""
    turn, done = Watched(), threading.Event()

    def work() -> None:
        with turn.take("work"):
            done.set()

    inside, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with turn.take("a long prompt"):
            inside.set()
            assert go_on.wait(GUARD_S)

    threads = started(hold)
    assert inside.wait(GUARD_S)
    with turn.announce_switch("a switch"):
        with pytest.raises(DeadlineExceeded, match="a long prompt holds the session"):
            turn.enter_switch(0.0)
        with pytest.raises(Cancelled):
            turn.enter_switch(None, lambda: True)
    threads += started(work)
    go_on.set()
    assert done.wait(GUARD_S)
    for thread in threads:
        thread.join(GUARD_S)


def test_a_signal_ends_a_wait_and_the_next_one_is_served() -> None:
    """What the handler raises comes out of the wait; nobody is handed a turn that no one takes."""
    turn, inside, done = Watched(), threading.Event(), threading.Event()
    me = threading.get_ident()

    def hold() -> None:
        with turn.take("a long prompt"):
            inside.set()
            assert turn.n_waiting.acquire(timeout=GUARD_S)
            signal.pthread_kill(me, signal.SIGUSR1)
            assert done.wait(GUARD_S)

    def handler(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        threads = started(hold)
        assert inside.wait(GUARD_S)
        with pytest.raises(TimeoutError), turn.take("work"):
            pass
    finally:
        signal.signal(signal.SIGUSR1, before)
    done.set()
    for thread in threads:
        thread.join(GUARD_S)
    with turn.take("work"):
        pass


def test_a_signal_at_any_place_leaves_the_turn_to_the_others() -> None:
    """One who waits while another is interrupted on the way in or out gets the turn, and so does a later switch."""

    def wait(turn: Turn) -> None:
        with turn.take("other work"):
            pass

    def work(turn: Turn) -> None:
        with turn.take("work"):
            others.extend(started(lambda: wait(turn)))
            assert turn.n_waiting.acquire(timeout=GUARD_S)

    def switch(turn: Turn) -> None:
        with turn.announce_switch("a switch"):
            turn.enter_switch(None)
            others.extend(started(lambda: wait(turn)))
            assert turn.n_waiting.acquire(timeout=GUARD_S)

    def follow(turn: Turn) -> None:
        with turn.announce_switch("a later switch"):
            turn.enter_switch(GUARD_S)

    for what in (work, switch):
        n, where = 0, "the start"
        while where:
            n, turn, others = n + 1, Watched(), list[threading.Thread]()
            interruption = Interruption(n, module)
            with interruption.armed():
                what(turn)
            where = interruption.where
            others += started(lambda turn=turn: follow(turn))
            for thread in others:
                thread.join(GUARD_S)
                assert not thread.is_alive(), where
        assert n > 10
