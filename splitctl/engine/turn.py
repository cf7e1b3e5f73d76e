"""Whose turn it is: one thread at a time works on a session, a switch goes first, re-entry and forks are refused."""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

from llama_native import ForkedProcess
from splitctl.errors import Busy, Cancelled, DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_POLL_S = 0.1
"""How often a waiting switch looks at its cancel flag, seconds."""


class _Ticket:
    """A thread that waits for the turn; its gate is opened when the turn is its own."""

    def __init__(self, what: str) -> None:
        self.thread = threading.get_ident()
        self.what = what
        self.gate = threading.Lock()
        self.gate.acquire()


class Turn:
    """A lock that is handed on in the order of asking, so that a generating thread starves nobody; a switch goes first.

    Thread: any may take it; the one that holds it is refused a second time (a callback must not call back in). What a
    signal's handler raises in a thread that waits ends its waiting.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[_Ticket] = deque()
        self._owner: int | None = None
        self._what = ""
        self._switch = ""
        self._announcer: int | None = None
        self._pid = os.getpid()

    @contextmanager
    def take(self, what: str) -> Iterator[None]:
        """Wait for the turn, after whoever waits for it; ``what`` is the work, as a noun, for who gets Busy.

        Raises:
            Busy: this thread holds the turn already.
            ForkedProcess: this process is a fork of the session's.
        """
        self.refuse_fork()
        self._refuse_reentry()
        ticket = _Ticket(what)
        try:
            if not self._asked(ticket):
                # A signal that comes as a wait begins is seen when that wait is over.
                while not ticket.gate.acquire(timeout=_POLL_S):
                    pass
            yield
        finally:
            try:
                self._leave(ticket)
            except BaseException:  # a signal's handler: raised when the turn is given up
                self._leave(ticket)
                raise

    @contextmanager
    def announce_switch(self, what: str) -> Iterator[None]:
        """Say that a switch is under way: other work goes on until :meth:`enter_switch`, another switch is refused.

        Raises:
            Busy: another switch runs or waits, or this thread holds the turn (a call from inside a callback).
            ForkedProcess: this process is a fork of the session's.
        """
        self.refuse_fork()
        self._refuse_reentry()
        me = threading.get_ident()
        try:
            with self._mutex:
                if self._switch:
                    raise Busy(self._switch)
                self._switch, self._announcer = what, me
            yield
        finally:
            try:
                self._end_switch(me)
            except BaseException:  # as in `take`
                self._end_switch(me)
                raise

    def enter_switch(self, timeout_s: float | None, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Wait for the token boundary, then hold the turn until the announcement ends; no other work comes between.

        ``timeout_s`` None waits as long as it takes; ``is_cancelled`` is asked meanwhile.

        Raises:
            DeadlineExceeded: the boundary did not come in time.
            Cancelled: ``is_cancelled`` said so before it came.
        """
        ticket = _Ticket(self._switch)
        try:
            if not self._asked(ticket, is_first=True):
                self._wait(ticket, timeout_s, is_cancelled)
        except BaseException:
            self._leave(ticket)
            raise

    def _wait(self, ticket: _Ticket, timeout_s: float | None, is_cancelled: Callable[[], bool]) -> None:
        end = None if timeout_s is None else monotonic() + timeout_s
        while True:
            left = None if end is None else end - monotonic()
            if left is not None and left <= 0:
                raise DeadlineExceeded(f"the token boundary ({self._what} holds the session)", timeout_s or 0.0)
            if is_cancelled():
                raise Cancelled("the switch")
            if ticket.gate.acquire(timeout=_POLL_S if left is None else min(left, _POLL_S)):
                return

    def _asked(self, ticket: _Ticket, *, is_first: bool = False) -> bool:
        """Take the turn if it is free, else a place among those who wait; returns whether it was taken."""
        with self._mutex:
            if self._owner is None:
                self._owner, self._what = ticket.thread, ticket.what
                return True
            if is_first:
                self._waiting.appendleft(ticket)
            else:
                self._waiting.append(ticket)
            return False

    def _leave(self, ticket: _Ticket) -> None:
        """Give the turn up, or the place among those who wait."""
        with self._mutex:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            elif self._owner == ticket.thread:
                self._hand_on()

    def _end_switch(self, announcer: int) -> None:
        """Give the turn up if the switch has it, and let another be announced."""
        with self._mutex:
            if self._announcer == announcer:
                if self._owner == announcer:
                    self._hand_on()
                self._switch, self._announcer = "", None

    def _hand_on(self) -> None:
        """Let the first of those who wait have the turn. The mutex is held."""
        if not self._waiting:
            self._owner = None
            return
        # Python looks for signals after a call: what is raised there must find who has the turn.
        ticket = self._waiting[0]
        del self._waiting[0]
        self._owner, self._what = ticket.thread, ticket.what
        ticket.gate.release()

    def _refuse_reentry(self) -> None:
        # A switch that still waits for its turn calls back too: its own thread would wait for itself.
        if threading.get_ident() in {self._owner, self._announcer}:
            raise Busy(self._switch or self._what)

    def refuse_fork(self) -> None:
        """Refuse what a fork asks: the threads whose locks it has copied are not there.

        Raises:
            ForkedProcess: this process is a fork of the session's.
        """
        if os.getpid() != self._pid:
            raise ForkedProcess(self._pid, os.getpid())
