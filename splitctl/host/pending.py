"""Orders that wait for their answer, and what becomes of them when the worker is lost."""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass
from typing import Any

from splitctl.errors import Busy, SplitctlError
from splitctl.host.ledger import ReportWrong
from splitctl.ipc.jobs import Fault, RequestFailed
from splitctl.ipc.orders import Check, Failed, Order, Restore, Save, Switch, Tokenize

#: Orders of a kind that may wait; clients that have hung up may have left them behind.
_MAX_ALIKE = 64


class OnLoss(enum.Enum):
    """What becomes of an order when the worker is lost over it."""

    FAIL = "it fails"
    REPEAT = "the next worker gets it"
    HOLD = "whoever follows it answers it"


@dataclass(slots=True)
class _Waiting:
    order: Tokenize | Switch | Check | Save | Restore
    answer: asyncio.Future[Any]
    on_loss: OnLoss
    is_sent: bool = False


class PendingOrders:
    """The orders of one session that wait for an answer.

    Thread: the supervisor's loop.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting] = {}
        self._n_given = 0

    def is_expecting(self, *kinds: type) -> bool:
        """Whether a worker owes an answer, of these kinds of orders if any are given."""
        return any(one.is_sent and isinstance(one.order, kinds or object) for one in self._waiting.values())

    def number(self) -> int:
        """Give the next number of an order."""
        self._n_given += 1
        return self._n_given

    def put(self, order: Tokenize | Switch | Check | Save | Restore, on_loss: OnLoss) -> asyncio.Future[Any]:
        """Take an order that is to be sent; gives its answer to be: the report, or RequestFailed.

        Raises:
            Busy: too many of its kind wait that are lost with their worker.
        """
        if (
            on_loss is OnLoss.FAIL
            and sum(type(one.order) is type(order) for one in self._waiting.values()) >= _MAX_ALIKE
        ):
            raise Busy(f"{_MAX_ALIKE} requests of this kind")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # It is no error if nobody waits for the answer any more.
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._waiting[order.order] = _Waiting(order, answer, on_loss)
        return answer

    def unsent(self) -> list[Order]:
        """Give the orders that no worker has, in their order; they count as sent from now on."""
        unsent = [one for one in self._waiting.values() if not one.is_sent]
        for one in unsent:
            one.is_sent = True
        return [one.order for one in unsent]

    def answer(self, number: int, report: object) -> None:
        """Pass an answer on; raises ReportWrong where nobody waits for one of that number."""
        waiting = self._waiting.pop(number, None)
        if waiting is None or not waiting.is_sent:
            raise ReportWrong(f"an answer to order {number}, which nobody gave")
        if waiting.answer.done():
            return
        if isinstance(report, Failed):
            waiting.answer.set_exception(RequestFailed(report.fault, report.name, report.message, report.body))
        else:
            waiting.answer.set_result(report)

    def moved(self) -> None:
        """Note that another worker serves, which gets what the one before has not answered."""
        for one in self._waiting.values():
            one.is_sent = one.is_sent and one.on_loss is OnLoss.HOLD

    def lost(self, reason: str) -> bool:
        """Note how the worker ended; says whether an order has failed by it."""
        n_before = len(self._waiting)
        for number, one in list(self._waiting.items()):
            if one.is_sent and one.on_loss is OnLoss.FAIL:
                what = type(one.order).__name__.lower()
                message = f"{what} failed: {reason}; the session goes on, try again"
                self._fail(number, RequestFailed(Fault.INTERNAL, "WorkerLost", message))
            elif one.on_loss is OnLoss.REPEAT:
                one.is_sent = False
        return len(self._waiting) < n_before

    def fail(self, error: SplitctlError, *kinds: type) -> None:
        """Give up on orders of these kinds; without any on all orders but those that are held."""
        for number, one in list(self._waiting.items()):
            if isinstance(one.order, kinds) if kinds else one.on_loss is not OnLoss.HOLD:
                self._fail(number, error)

    def _fail(self, number: int, error: SplitctlError) -> None:
        waiting = self._waiting.pop(number)
        if not waiting.answer.done():
            waiting.answer.set_exception(error)
