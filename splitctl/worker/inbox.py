"""Orders on their way from the pipe to the loop that carries them out, and the cancel that overtakes them.

Law: a cancel is meant for the switch, the check or the load that runs or waits when it comes; where there is none it is
forgotten, and no decode ever hears of it.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitctl.ipc import jobs, orders, wire
from splitctl.ipc.orders import Check, Order, Switch
from splitctl.ipc.wire import MessageInvalid

if TYPE_CHECKING:
    from splitctl.switching.checking import Checked


class CancelGate(threading.Event):
    """A cancel flag that is seen only while there is something to cancel.

    It begins with the request itself under way: whoever never calls :meth:`end` has an ordinary flag.

    Thread: :meth:`begin` and :meth:`end` from the one that works, the others from any.
    """

    def __init__(self) -> None:
        super().__init__()
        # Asked for in a signal handler too, which may interrupt the very thread that holds it.
        self._lock = threading.RLock()
        self._n_expected = 1
        self._is_open = True

    def ask(self) -> None:
        """Ask for a cancel of what runs or waits."""
        with self._lock:
            if self._n_expected:
                self.set()

    def is_set(self) -> bool:
        """Tell whether what runs shall end."""
        return self._is_open and super().is_set()

    def is_asked(self) -> bool:
        """Tell whether what runs or waits shall end, also while decodes go on beside it."""
        return super().is_set()

    def expect(self) -> None:
        """Note that something comes which can be cancelled."""
        with self._lock:
            self._n_expected += 1

    def begin(self) -> None:
        """Note that it runs now."""
        self._is_open = True

    def end(self) -> None:
        """Note that it is over; a cancel of it is forgotten."""
        with self._lock:
            self._is_open = False
            self._n_expected = max(0, self._n_expected - 1)
            if not self._n_expected:
                self.clear()


@dataclass(frozen=True, slots=True)
class CheckDone:
    """A check that ran on a thread of its own is over.

    Attributes:
        order: what was checked.
        found: what was found, or raised.
        why_not_beside: why a second worker cannot place the target; "" where it can, None where nobody wants to know.
    """

    order: Switch | Check
    found: Checked | Exception
    why_not_beside: str | None = None


class Inbox:
    """Orders in the order in which they came, and checks as they end; the gate expects those that can be cancelled.

    Thread: any puts, one takes.
    """

    def __init__(self, gate: CancelGate) -> None:
        self._gate = gate
        self._orders: queue.SimpleQueue[Order | CheckDone | MessageInvalid] = queue.SimpleQueue()

    def put_line(self, line: bytes) -> None:
        """Put in a line; one that is no order is raised where it is taken."""
        try:
            order: Order = wire.from_line(line, orders.ORDERS, max_bytes=jobs.MAX_LINE_BYTES)
        except MessageInvalid as error:
            self._orders.put(error)
            return
        if isinstance(order, Switch | Check):
            self._gate.expect()
        self._orders.put(order)

    def put(self, done: CheckDone) -> None:
        """Put in a check that is over."""
        self._orders.put(done)

    def take(self, *, waiting: bool) -> Order | CheckDone | None:
        """Take the next order, or check that is over; None where there is nothing now and nothing is waited for.

        Raises:
            MessageInvalid: a line came that is none.
        """
        try:
            found = self._orders.get(block=waiting)
        except queue.Empty:
            return None
        if isinstance(found, MessageInvalid):
            raise found
        return found
