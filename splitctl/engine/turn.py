"""Whose turn it is: one thread at a time works on a session, a switch goes first, re-entry and forks are refused."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

from llama_native import ForkedProcess
from splitctl.errors import Busy, Cancelled, DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_POLL_S = 0.1
"""How often a waiting switch looks at its cancel flag, seconds."""


class Turn:
    """A lock that a switch is preferred for, so that a generating thread cannot starve it.

    Thread: any may take it; the one that holds it is refused a second time (a callback must not call back in).
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owner: int | None = None
        self._what = ""
        self._switch = ""
        self._announcer: int | None = None
        self._is_awaited = False
        self._pid = os.getpid()

    @contextmanager
    def take(self, what: str) -> Iterator[None]:
        """Wait for the turn, after any switch that waits for it; ``what`` is the work, as a noun, for who gets Busy.

        Raises:
            Busy: this thread holds the turn already.
            ForkedProcess: this process is a fork of the session's.
        """
        self._own_process()
        with self._changed:
            self._refuse_reentry()
            while self._owner is not None or self._is_awaited:
                self._changed.wait()
            self._enter(what)
        try:
            yield
        finally:
            with self._changed:
                self._owner = None
                self._changed.notify_all()

    @contextmanager
    def announce_switch(self, what: str) -> Iterator[None]:
        """Say that a switch is under way: other work goes on until :meth:`enter_switch`, another switch is refused.

        Raises:
            Busy: another switch runs or waits, or this thread holds the turn (a call from inside a callback).
            ForkedProcess: this process is a fork of the session's.
        """
        self._own_process()
        with self._changed:
            self._refuse_reentry()
            if self._switch:
                raise Busy(self._switch)
            self._switch, self._announcer = what, threading.get_ident()
        try:
            yield
        finally:
            with self._changed:
                self._switch, self._announcer, self._is_awaited = "", None, False
                if self._owner == threading.get_ident():
                    self._owner = None
                self._changed.notify_all()

    def enter_switch(self, timeout_s: float | None, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Wait for the token boundary, then hold the turn until the announcement ends; no other work comes between.

        ``timeout_s`` None waits as long as it takes; ``is_cancelled`` is asked meanwhile.

        Raises:
            DeadlineExceeded: the boundary did not come in time.
            Cancelled: ``is_cancelled`` said so before it came.
        """
        end = None if timeout_s is None else monotonic() + timeout_s
        with self._changed:
            self._is_awaited = True
            while self._owner is not None:
                left = None if end is None else end - monotonic()
                if left is not None and left <= 0:
                    raise DeadlineExceeded(f"the token boundary ({self._what} holds the session)", timeout_s or 0.0)
                if is_cancelled():
                    raise Cancelled("the switch")
                self._changed.wait(_POLL_S if left is None else min(left, _POLL_S))
            self._enter(self._switch)

    def _enter(self, what: str) -> None:
        self._owner, self._what = threading.get_ident(), what

    def _refuse_reentry(self) -> None:
        # A switch that still waits for its turn calls back too: its own thread would wait for itself.
        if threading.get_ident() in {self._owner, self._announcer}:
            raise Busy(self._switch or self._what)

    def _own_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcess(self._pid, os.getpid())
