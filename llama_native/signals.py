"""Signals whose handlers raise, while something must not be left half done: their exceptions wait for its end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

#: Signals that programs have handlers for; those of a fault (SIGSEGV) come from the code itself and cannot wait.
_SIGNALS = tuple(
    signal.Signals[name]
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGUSR1", "SIGUSR2")
    if name in signal.Signals.__members__
)


class _Guard:
    """Where exceptions of handlers go while a block runs; None when it has ended."""

    __slots__ = ("held",)

    def __init__(self, held: list[BaseException]) -> None:
        self.held: list[BaseException] | None = held


class _StandIn:
    """Calls a signal's own handler at once, and holds what it raises while its guard is up."""

    __slots__ = ("guard", "own")

    def __init__(self, own: Callable[[int, Any], Any], guard: _Guard) -> None:
        self.own = own
        self.guard = guard

    def __call__(self, number: int, frame: Any) -> None:
        held = self.guard.held
        if held is None:
            self.own(number, frame)
            return
        try:
            self.own(number, frame)
        except BaseException as error:  # noqa: BLE001 - whoever reads the list raises it
            held.append(error)


@contextmanager
def guarded(held: list[BaseException]) -> Iterator[None]:
    """Let handlers run as ever, but append to ``held`` what they raise until the block ends.

    A signal that a block around this one guards goes on being guarded by that one.

    Thread: any; handlers run in the main thread, so in others nothing is done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    guard = _Guard(held)
    stand_ins: dict[signal.Signals, _StandIn] = {}
    try:
        for number in _SIGNALS:
            own: Any = signal.getsignal(number)
            if isinstance(own, _StandIn):
                if own.guard.held is not None:
                    continue
                own = own.own  # an exception at the end of a block left it in place: it is not stacked
            if callable(own):
                stand_ins[number] = _StandIn(own, guard)
                signal.signal(number, stand_ins[number])
        yield
    finally:
        guard.held = None  # for all of them at once: none may go on filling a list that nobody reads
        for number, one in stand_ins.items():
            is_there = signal.getsignal(number) is one
            if is_there:  # else a handler or a callback has put another one in its place
                signal.signal(number, one.own)
