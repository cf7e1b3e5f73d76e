"""Handlers of signals that wait with what they raise, and are as they were afterwards."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from llama_native import signals
from tests.interrupted import Interruption


class Alarm(Exception):
    """What the handler raises."""


def raising(*_: object) -> None:
    """Stand for a program's handler."""
    raise Alarm


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, raising), signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGUSR1, before[0])
    signal.signal(signal.SIGUSR2, before[1])


def test_what_a_handler_raises_is_held_until_the_block_ends() -> None:
    """The handler itself runs at once; ignored and default signals are left alone; all is as it was afterwards."""
    held: list[BaseException] = []
    with signals.guarded(held):
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        assert [type(error) for error in held] == [Alarm, Alarm]
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGUSR1) is raising


def test_a_handler_that_is_put_in_place_meanwhile_stays() -> None:
    """As a program's handler does that lets a second Ctrl-C end it."""
    with signals.guarded([]):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_one_that_was_left_behind_passes_everything_on() -> None:
    """It is neither stacked nor does it swallow anything."""
    held: list[BaseException] = []
    with signals.guarded(held):
        left = signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, left)
    with pytest.raises(Alarm):
        signal.raise_signal(signal.SIGUSR1)
    with signals.guarded(held):
        signal.raise_signal(signal.SIGUSR1)
    assert len(held) == 1
    assert signal.getsignal(signal.SIGUSR1) is raising


def test_a_block_within_another_does_not_end_its_guard() -> None:
    """A switch inside a step: what comes behind it in the step is held too."""
    held: list[BaseException] = []
    with signals.guarded(held):
        with signals.guarded(held):
            signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
    assert len(held) == 2
    assert signal.getsignal(signal.SIGUSR1) is raising


def test_no_signal_is_swallowed_wherever_a_block_is_interrupted() -> None:
    """A handler that raises while its own or another signal's stand-in is put in place or taken away is heard again."""
    signal.signal(signal.SIGUSR2, raising)
    n, where = 0, "the start"
    while where:
        n += 1
        interruption = Interruption(n, signals)
        with interruption.armed(), signals.guarded([]):
            pass
        where = interruption.where
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            with pytest.raises(Alarm):
                signal.raise_signal(number)
    assert n > 20


def test_other_threads_change_no_handlers() -> None:
    """Python runs handlers in the main thread alone."""
    found: list[object] = []

    def work() -> None:
        with signals.guarded([]):
            found.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert found == [raising]
