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


class _StandIn:
    """Calls a signal's own handler at once, and holds what it raises while ``held`` is there."""

    __slots__ = ("held", "own")

    def __init__(self, own: Callable[[int, Any], Any], held: list[BaseException]) -> None:
        self.own = own
        self.held: list[BaseException] | None = held

    def __call__(self, number: int, frame: Any) -> None:
        held = self.held
        if held is None:
            self.own(number, frame)
            return
        try:
            self.own(number, frame)
        except BaseException as error:  # noqa: BLE001 - whoever reads the list raises it
            held.append(error)


def _own_of(handler: Any) -> Any:
    # One that an exception at the end of a block left in place passes everything on, and is not stacked.
    return handler.own if isinstance(handler, _StandIn) else handler


@contextmanager
def guarded(held: list[BaseException]) -> Iterator[None]:
    """Let handlers run as ever, but append to ``held`` what they raise until the block ends.

    Thread: any; handlers run in the main thread, so in others nothing is done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stand_ins: dict[signal.Signals, _StandIn] = {}
    try:
        for number in _SIGNALS:
            own = _own_of(signal.getsignal(number))
            if callable(own):
                stand_ins[number] = _StandIn(own, held)
                signal.signal(number, stand_ins[number])
        yield
    finally:
        for one in stand_ins.values():
            one.held = None
        for number, one in stand_ins.items():
            is_there = signal.getsignal(number) is one
            if is_there:  # else a handler or a callback has put another one in its place
                signal.signal(number, one.own)
