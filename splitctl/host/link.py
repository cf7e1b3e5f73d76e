"""One life of a worker, as the supervisor's loop sees it: orders go in, reports and one end come out.

Laws:
    1. The loop waits for nothing here: a thread reads and writes, and posts what it reads.
    2. The end comes last and once, and when it comes the process is gone, with all that it held.
    3. Silence is measured while the worker has work, and only then.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from splitctl.errors import DeadlineExceeded, WorkerLost
from splitctl.ipc.jobs import Failure, HostRequest, JobEvent, ProtocolBroken, Result, SessionReport
from splitctl.ipc.orders import ORDERS, REPORTS, Close, Opened, Order, StageReached, Switched, Trial
from splitctl.ipc.orders import Report as Told
from splitctl.ipc.process import WorkerProcess
from splitctl.ipc.wire import MessageInvalid, from_object, to_line
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
        is_wanted: it was told to close, and did.
        was_killed: somebody else ended it: the system that is short of memory, or a person.
    """

    reason: str
    failure: Failure | None = None
    lost: WorkerLost | DeadlineExceeded | None = None
    is_wanted: bool = False
    was_killed: bool = False


@dataclass(frozen=True, slots=True)
class Listener:
    """What a life calls, in the loop's thread.

    Attributes:
        report: with everything that the worker tells.
        ended: once, at the end.
        output: with every line that the worker and the library print.
    """

    report: Callable[[WorkerLink, Told], None]
    ended: Callable[[WorkerLink, End], None]
    output: Callable[[str], None] = field(default=lambda _line: None)


class WorkerLink:
    """A worker process.

    Thread: the loop's. Lifetime: until `Listener.ended` was called.
    """

    def __init__(
        self,
        request: HostRequest,
        listener: Listener,
        *,
        env: Mapping[str, str],
        deadline_s: float | None,
        pass_fds: Sequence[int],
    ) -> None:
        """Start the process.

        Args:
            request: what it serves.
            listener: told what happens.
            env: its environment.
            deadline_s: longest silence that is borne while it has work, seconds; None: any.
            pass_fds: descriptors of the arenas.

        Raises:
            OSError: the system starts no more processes.
        """
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._deadline_s = deadline_s
        self._worker = WorkerProcess(request, env=dict(env), on_output=self._output, pass_fds=pass_fds)
        self.is_open = False
        self._is_ended_here = False
        self.end: End | None = None
        self._ended = self._loop.create_future()
        self._thread = threading.Thread(target=self._follow, name="worker", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._worker.pid

    def send(self, order: Order) -> None:
        """Send an order; it lies here until the worker takes it."""
        if self.end is None:
            self._worker.send_line(to_line(order, ORDERS))

    def expect(self, *, anything: bool, n_deadlines: float = 1.0) -> None:
        """Say whether it has work, and how many times as long as else it may be silent over it."""
        if self.end is None:
            self._worker.expect(anything=anything, n_deadlines=n_deadlines)

    def cancel(self) -> None:
        """Ask it to end the switch or load under way."""
        if self.end is None:
            self._worker.cancel()

    def kill(self) -> None:
        """End it at once, stopped or not."""
        self._is_ended_here = True
        self._worker.kill()

    async def ended(self) -> End:
        """Wait for its end."""
        return await asyncio.shield(self._ended)

    async def close(self, grace_s: float) -> None:
        """Tell it to close, wait, and kill it where it does not.

        Args:
            grace_s: how long to wait, seconds.
        """
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
            end = self._heard()
        self._post(self._take_end, end)

    def _heard(self) -> End:
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
            told = f"the worker made no progress for {error.timeout_s:g} s while {self._worker.stage} and was ended"
            return End(told, lost=error)
        except (ProtocolBroken, MessageInvalid) as error:
            self._worker.kill()
            return End(f"the worker said what is no report ({error}) and was ended")
        return End("the worker ended without a word")

    def _take(self, event: JobEvent) -> End | None:
        """Pass a report on; the last event is the end."""
        match event:
            case SessionReport():
                report: Told = from_object(event.body, REPORTS)
                self._note(report)
                self._post(self._take_report, report)
            case Result():
                return End("the worker closed", is_wanted=True)
            case Failure():
                return End(f"the worker gave up: {event.message}", failure=event)
            case _:
                return None
        return None

    def _note(self, report: Told) -> None:
        """Keep what it is doing, for the words of its end."""
        match report:
            case Opened() | Switched():
                self._worker.is_doing("serving")
            case StageReached():
                self._worker.is_doing(report.stage)
            case Trial():
                self._worker.is_doing("serving")
            case _:
                return

    def _output(self, line: str) -> None:
        self._post(self._listener.output, line)

    def _post(self, call: Callable[..., None], *arguments: object) -> None:
        """Let the loop call; one that is closed has nobody left to tell."""
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            return

    # ---- in the loop again ----

    def _take_report(self, report: Told) -> None:
        if isinstance(report, Opened):
            self.is_open = True
        self._listener.report(self, report)

    def _take_end(self, end: End) -> None:
        self.end = end
        self._thread.join()
        if not self._ended.done():
            self._ended.set_result(end)
        self._listener.ended(self, end)
