"""One session in a process of its own, in which a bench has things timed; the process may die of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from splitctl.errors import Cancelled, DeadlineExceeded, SplitctlError, WorkerLost
from splitctl.ipc.jobs import BenchRequest, Failure, Fault
from splitctl.ipc.measuring import Measure, Measured, Timed
from splitctl.ipc.orders import ORDERS, Close, Failed, Opened
from splitctl.ipc.process import WorkerProcess
from splitctl.ipc.wire import to_line
from splitctl.last_words import telling_line


class ChildFailed(SplitctlError):
    """A child could not open its session, did not do what it was asked to, or died; the text says why."""

    def __init__(self, why: str, failure: Failure | None = None) -> None:
        super().__init__(why)
        self.failure = failure


class Child:
    """One session in a process of its own.

    Lifetime: a context manager. Thread: one.
    """

    def __init__(
        self,
        request: BenchRequest,
        *,
        env: Mapping[str, str],
        on_output: Callable[[str], None],
        is_cancelled: Callable[[], bool],
        deadline_s: float,
    ) -> None:
        """Start the process and wait until its session is open; raises as `measure`.

        Args:
            request: what it opens.
            env: its environment.
            on_output: called with every line that it or the library prints.
            is_cancelled: asked all the while; the process is killed at the first yes.
            deadline_s: longest silence while it has something to do, seconds.
        """
        started = time.monotonic()
        self._worker = WorkerProcess(request, env=env, on_output=on_output)
        self._events = self._worker.events(deadline_s=deadline_s, is_cancelled=is_cancelled)
        self._n_orders = 0
        self._is_over = False
        try:
            opened = self._wait(lambda _: None)
        except BaseException:
            self._worker.close()
            raise
        if not isinstance(opened, Opened):
            raise ChildFailed("it did not open a session")
        self.placement = opened.placement
        self.open_s = time.monotonic() - started
        self.place_s = opened.load_ms / 1e3

    def measure(self, on_timed: Callable[[Timed], None], **what: Any) -> Mapping[str, Any] | None:
        """Have something timed.

        Args:
            on_timed: takes each time as it comes.
            what: fields of a Measure.

        Returns:
            The outcome of the switch; None without one.

        Raises:
            ChildFailed: it could not be done, or the child died of it.
            Cancelled: the bench is to end.
        """
        self._n_orders += 1
        self._worker.expect(anything=True)
        self._worker.send_line(to_line(Measure(self._n_orders, **what), ORDERS))
        done = self._wait(on_timed)
        return done.outcome if isinstance(done, Measured) else None

    def _wait(self, on_timed: Callable[[Timed], None]) -> Opened | Measured:
        try:
            for event in self._events:
                match event:
                    case Timed():
                        on_timed(event)
                    case Opened() | Measured():
                        self._worker.expect(anything=False)
                        return event
                    case Failed(_, fault, name, message) | Failure(fault, name, message):
                        if fault is Fault.CANCELLED:
                            raise Cancelled("the bench")
                        raise ChildFailed(message, Failure(fault, name, message))
        except WorkerLost as lost:
            said = telling_line(lost.log_tail)
            raise ChildFailed(f"its process {lost.how}{f': {said}' if said else ''}") from lost
        except DeadlineExceeded as lost:
            raise ChildFailed(f"it hangs: {lost}") from lost
        raise ChildFailed("its process said nothing more")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(is_well=error is None)

    def end(self, *, is_well: bool) -> None:
        """End the process: politely where all is well; a second call does nothing."""
        if self._is_over:
            return
        self._is_over = True
        if is_well:
            self._worker.send_line(to_line(Close(), ORDERS))
            self._worker.expect(anything=True)
            with suppress(SplitctlError):
                for _ in self._events:
                    pass
        self._worker.kill()
        self._worker.close()
