"""The link to one worker process, as the supervisor's loop sees it: orders go in, reports and one end come out.

Laws:
    1. The loop waits for nothing here: a thread reads and writes, and posts what it reads.
    2. The end comes last and once, and when it comes the process is gone, with all that it held.
    3. Silence is measured while the worker has work, and only then.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from splitctl.errors import DeadlineExceeded, WorkerLost
from splitctl.ipc.jobs import Failure, Fault, HostRequest, RequestFailed, Result
from splitctl.ipc.orders import (
    ORDERS,
    Close,
    FitsBeside,
    HandedOver,
    Opened,
    Order,
    Report,
    StageReached,
    Switched,
    TookOver,
    Trial,
    WorkerEvent,
)
from splitctl.ipc.process import WorkerProcess
from splitctl.ipc.wire import MessageInvalid, to_line
from splitctl.last_words import telling_line

_FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT")
"""Signals that no library sends itself."""


@dataclass(frozen=True, slots=True)
class End:
    """How a worker ended.

    Attributes:
        reason: a sentence without its end, which begins with "the worker".
        failure: what it said itself; None where it was lost.
        lost: the error of a lost one.
        was_killed: somebody else ended it: the system that is short of memory, or a person.
    """

    reason: str
    failure: Failure | None = None
    lost: WorkerLost | DeadlineExceeded | None = None
    was_killed: bool = False

    def error(self) -> Exception:
        """Give the error of a worker that could not open the session."""
        if self.failure is not None:
            return RequestFailed(self.failure.fault, self.failure.name, self.failure.message, self.failure.body)
        text = f"{self.reason}; splitctl doctor shows the library"
        return self.lost or RequestFailed(Fault.INTERNAL, "WorkerLost", text)


class WorkerLink:
    """The link to a worker process.

    Thread: the loop's. Lifetime: until `on_end` was called.
    """

    def __init__(
        self,
        request: HostRequest,
        *,
        on_report: Callable[[Report], None],
        on_end: Callable[[End], None],
        env: Mapping[str, str],
        deadline_s: float | None,
        pass_fds: Sequence[int],
    ) -> None:
        """Start the process; `pass_fds` are the arenas.

        `on_report` is called in the loop's thread with everything that the worker reports, `on_end` there once at the
        end. `deadline_s` is the longest silence while it has work, seconds; None: any.

        Raises:
            OSError: the system starts no more processes.
        """
        self._loop = asyncio.get_running_loop()
        self._on_report = on_report
        self._on_end = on_end
        self._deadline_s = deadline_s
        self._worker = WorkerProcess(request, env=dict(env), pass_fds=pass_fds)
        self.is_open = False
        self._is_ended_here = False
        self._ended: asyncio.Future[End] = self._loop.create_future()
        self._thread = threading.Thread(target=self._follow, name="worker", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._worker.pid

    def send(self, order: Order) -> None:
        """Send an order; it lies here until the worker takes it."""
        self._worker.send_line(to_line(order, ORDERS))

    def expect(self, *, anything: bool, n_deadlines: float = 1.0) -> None:
        """Say whether it has work, and how many deadlines it may be silent over it."""
        self._worker.expect(anything=anything, n_deadlines=n_deadlines)

    def cancel(self) -> None:
        """Ask it to end the switch or load under way."""
        self._worker.cancel()

    def kill(self) -> None:
        """End it at once, stopped or not."""
        self._is_ended_here = True
        self._worker.kill()

    async def ended(self) -> End:
        """Wait for its end."""
        return await asyncio.shield(self._ended)

    async def close(self, grace_s: float) -> None:
        """Order it to close, wait, and kill it where that takes longer than so many seconds."""
        self.send(Close())
        try:
            async with asyncio.timeout(grace_s):
                await self.ended()
        except TimeoutError:
            self.kill()
            await self.ended()

    # ---- in the thread ----

    def _follow(self) -> None:
        """Follow the worker to its end."""
        with self._worker:
            end = self._read_to_end()
        self._post(self._take_end, end)

    def _read_to_end(self) -> End:
        try:
            for event in self._worker.events(deadline_s=self._deadline_s):
                end = self._take(event)
                if end is not None:
                    return end
        except WorkerLost as error:
            why = telling_line(error.log_tail)
            was_killed = not self._is_ended_here and any(name in error.how for name in _FROM_OUTSIDE)
            return End(f"the worker {error.how}{f': {why}' if why else ''}", lost=error, was_killed=was_killed)
        except DeadlineExceeded as error:
            reason = f"the worker made no progress for {error.timeout_s:g} s while {self._worker.stage} and was ended"
            return End(reason, lost=error)
        except MessageInvalid as error:
            self._worker.kill()
            return End(f"the worker said what is no report ({error}) and was ended")
        return End("the worker ended without a word")

    def _take(self, event: WorkerEvent) -> End | None:
        """Pass a report on; the last event is the end."""
        if isinstance(event, Result):
            return End("the worker closed")
        if isinstance(event, Failure):
            return End(f"the worker gave up: {event.message}", failure=event)
        if isinstance(event, Report):
            # Kept for the words of its end.
            if isinstance(event, StageReached):
                self._worker.is_doing(event.stage)
            elif isinstance(event, Opened | FitsBeside | HandedOver | TookOver | Switched | Trial):
                self._worker.is_doing("serving")
            self._post(self._take_report, event)
        return None

    def _post(self, call: Callable[..., None], *arguments: object) -> None:
        """Let the loop call; a loop that is closed needs to know nothing any more."""
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            return

    # ---- in the loop again ----

    def _take_report(self, report: Report) -> None:
        self.is_open = self.is_open or isinstance(report, Opened)
        self._on_report(report)

    def _take_end(self, end: End) -> None:
        self._thread.join()
        self._ended.set_result(end)
        self._on_end(end)
