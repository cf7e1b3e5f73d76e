"""The worker of a hosted session: how it is started and ended, and what is done when it is lost.

A hosted session has two halves. `WorkerManager` owns the process: the link to the worker of the moment, the arenas that
it maps, why it was ended, and the attempts after a loss. `supervisor.Supervisor` owns the session: its sequences,
streams and switches, where it serves or is parked. The supervisor calls the manager's methods; the manager knows of the
session what `Session` says, and neither reads or writes what the other keeps.

Main path: `WorkerManager.open` -> `WorkerLink` (a worker, and a thread that follows it) -> Opened -> orders go out by
`send`, reports come in by `Session.take`. A worker that is lost: `Session.lost` -> `recover` -> `Recovery` says what is
tried next -> `open`. A switch beside (`beside`): `stand_by` -> a second worker -> `swap`, after which the first one is
kept until `let_go`, or serves again by `swap_back`.

Laws:
    1. The loop writes everything here; nothing in it blocks on a worker.
    2. The next worker is started only when the last one is gone, with what it held of devices; but for one that is to
       take over from it, which stands by.
    3. Once a worker has lost count, or is being ended, its reports change nothing any more.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from splitctl.carry.seal import Seal
from splitctl.engine.host_copy import share_of
from splitctl.host.config import HostConfig
from splitctl.host.ledger import ReportWrong
from splitctl.host.link import End, WorkerLink
from splitctl.host.recovery import Attempt, Loss, Recovery
from splitctl.ipc.jobs import HostRequest
from splitctl.ipc.orders import Open, Opened, Order, Report, Unsealed
from splitctl.outcome import WeightsTier

_ARENAS = 2

#: How long a worker from which the session was taken over may take to close [seconds].
_GRACE_S = 10.0


class Session(Protocol):
    """What a manager needs of the session that its workers serve."""

    @property
    def seals(self) -> Collection[Seal]:
        """The carries that arenas hold."""

    def take(self, report: Report) -> None:
        """Take a worker's report; raises ReportWrong if it is impossible."""

    def lost(self, pid: int, end: End) -> None:
        """Note that a worker is gone which had opened the session, or whose opening nobody waits for."""

    def opening(self, attempt: Attempt) -> Open | None:
        """Give the order that makes an attempt; None where it is pointless."""


class Standby(Protocol):
    """Who leads a second worker."""

    def reported(self, report: Report) -> None:
        """Take a report of it."""

    def ended(self, end: End) -> None:
        """Note that it is gone."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """A worker that serves after a loss.

    Attributes:
        attempt: the attempt that succeeded.
        opened: what the worker opened.
        why: why the attempt before it failed; of the first one why the worker was lost.
    """

    attempt: Attempt
    opened: Opened
    why: str


class WorkerManager:
    """Starts, ends and replaces the worker of one session.

    Thread: the loop's. Lifetime: from the first `open` to `close`.
    """

    def __init__(
        self, config: HostConfig, session: Session, *, env: Mapping[str, str], log: Callable[[str], None]
    ) -> None:
        """Nothing is started yet; workers get `env` as it is when they start, and `log` takes lines for a person."""
        self._config = config
        self._session = session
        self._env = env
        self._log = log
        self._link: WorkerLink | None = None
        self._standby: WorkerLink | None = None
        self._former: WorkerLink | None = None
        self._ending: set[WorkerLink] = set()
        self._leads: Standby | None = None
        self._arenas: tuple[int, ...] = ()
        self._weights: int | None = None
        self._blame = ""
        self._opening: asyncio.Future[Opened | End] | None = None
        self._last_end = End("the worker was never started")
        self._recovery = Recovery()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int | None:
        """The worker's process id; None while there is none."""
        return None if self._link is None else self._link.pid

    @property
    def standby_pid(self) -> int | None:
        """The process id of a worker that stands by; None while there is none."""
        return None if self._standby is None else self._standby.pid

    @property
    def is_open(self) -> bool:
        """Whether there is a worker that has opened the session."""
        return self._link is not None and self._link.is_open

    @property
    def has_former(self) -> bool:
        """Whether the worker from which the session was taken over is still there."""
        return self._former is not None

    def arenas_of(self, seals: Iterable[Seal]) -> list[tuple[int, Seal]]:
        """Give the descriptors of the arenas that carries are in, with the carries."""
        return [(self._arenas[seal.arena], seal) for seal in seals if seal.arena < len(self._arenas)]

    async def open(self, order: Open) -> Opened | End:
        """Start a worker and let it open the session; gives what it opened, or how it ended.

        Raises:
            OSError: the system has no memory files.
        """
        if not self._arenas:
            self._arenas = tuple(os.memfd_create(f"splitctl-arena-{n}", os.MFD_CLOEXEC) for n in range(_ARENAS))
        if self._weights is None and self._config.weights in {WeightsTier.PINNED, WeightsTier.AUTO}:
            self._weights = os.memfd_create("splitctl-weights", os.MFD_CLOEXEC)
        self._blame = ""
        opening: asyncio.Future[Opened | End] = asyncio.get_running_loop().create_future()
        self._opening = opening
        link = self._started()
        if isinstance(link, End):
            opening.cancel()
            return link
        self._link = link
        link.send(order)
        opened = await opening
        # It may have ended between its report and this moment.
        return opened if self.is_open else self._last_end

    def _started(self) -> WorkerLink | End:
        """Start a worker process; what it reports is told by whose it is then."""
        mine: list[WorkerLink] = []
        try:
            link = WorkerLink(
                HostRequest(self._config.model, self._config.library, self._config.rpc, self._arenas, self._weights),
                on_report=lambda report: self._take_report(mine[0], report),
                on_end=lambda end: self._take_end(mine[0], end),
                env=self._env,
                deadline_s=self._config.deadline_s,
                pass_fds=self._shared,
            )
        except OSError as error:
            return End(f"the worker could not be started: {error.strerror or error}")
        mine.append(link)
        return link

    @property
    def copy_share(self) -> float | None:
        """How much of the copy of the weights is filled, 0 to 1; None where there is none."""
        return None if self._weights is None else share_of(self._weights)

    @property
    def _shared(self) -> tuple[int, ...]:
        """The memory that outlives a worker."""
        return self._arenas if self._weights is None else (*self._arenas, self._weights)

    # ---- a second worker ----

    def stand_by(self, order: Open, leads: Standby) -> End | None:
        """Start a second worker with an order; `leads` gets all that it reports, and its end.

        Returns:
            The end of one that the system does not start.
        """
        link = self._started()
        if isinstance(link, End):
            return link
        self._standby, self._leads = link, leads
        link.send(order)
        return None

    def send_standby(self, order: Order) -> None:
        """Give the second worker an order; its silence is measured until `idle_standby`."""
        if self._standby is not None:
            self._standby.expect(anything=True)
            self._standby.send(order)

    def idle_standby(self) -> None:
        """Note that the second worker owes nothing."""
        if self._standby is not None:
            self._standby.expect(anything=False)

    def swap(self) -> None:
        """Let the second worker be the one that serves; the first is kept, and owes nothing."""
        if self._standby is None or self._link is None:
            raise AssertionError("a swap needs two workers")
        self._former, self._link, self._standby, self._leads = self._link, self._standby, None, None
        self._former.expect(anything=False)

    def swap_back(self) -> bool:
        """Let the first worker serve again, now that the second is gone; says whether it is there."""
        if self._link is not None or self._former is None:
            return False
        self._link, self._former, self._blame = self._former, None, ""
        return True

    def let_go(self) -> None:
        """Close the worker from which the session was taken over; it ends by itself."""
        former, self._former = self._former, None
        if former is not None:
            self._ending.add(former)
            task = asyncio.get_running_loop().create_task(former.close(_GRACE_S))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def alone(self) -> None:
        """End every worker but the one that serves, at once; return when they are gone."""
        others = {link for link in (self._standby, self._former) if link is not None}
        self._ending |= others
        self._standby = self._former = self._leads = None
        for link in tuple(self._ending):
            link.kill()
            await link.ended()
        if self._closing:
            await asyncio.wait(self._closing)

    # ---- after a loss ----

    async def recover(self, loss: Loss, reason: str) -> Recovered | End:
        """Let a new worker open the session, by one attempt after the other.

        Returns:
            The worker that serves now; or how the last one ended, and nothing is left to try.
        """
        self._recovery.lost(loss)
        await self.alone()
        end = End(reason)
        while (attempt := self._recovery.next(self._session.seals)) is not None:
            order = self._session.opening(attempt)
            if order is None:
                continue
            opened = await self.open(order)
            if isinstance(opened, Opened):
                return Recovered(attempt, opened, end.reason)
            end = opened
            self._recovery.failed(attempt, was_killed=end.was_killed)
            source = "its saved state" if attempt.seal else "its tokens"
            self._log(f"it cannot be served from {source}: {end.reason}")
        return end

    def send(self, order: Order) -> None:
        """Give the worker an order, where there is one."""
        if self._link is not None:
            self._link.send(order)

    def expect(self, *, anything: bool, n_deadlines: float) -> None:
        """Say whether the worker has work, and how many deadlines it may be silent over it."""
        if self._link is not None:
            self._link.expect(anything=anything or not self._link.is_open, n_deadlines=n_deadlines)

    def cancel(self) -> None:
        """Ask the worker to end the switch or load under way."""
        if self._link is not None:
            self._link.cancel()

    def give_up(self, reason: str) -> None:
        """Kill the worker and ignore what it still reports; its end gets this reason."""
        self._blame = reason
        if self._link is not None:
            self._link.kill()

    async def end(self, grace_s: float) -> None:
        """Close the worker, or kill one that has not opened or does not close; return when it is gone."""
        link = self._link
        if link is not None:
            if not link.is_open:
                link.kill()
            await link.close(grace_s)

    async def close(self, grace_s: float) -> None:
        """End all workers and give the arenas back."""
        await self.alone()
        await self.end(grace_s)
        for fd in self._shared:
            os.close(fd)
        self._arenas, self._weights = (), None

    # ---- what the link calls ----

    def _take_report(self, link: WorkerLink, report: Report) -> None:
        if link is not self._link:
            if link is self._standby and self._leads is not None:
                self._leads.reported(report)
            elif isinstance(report, Unsealed):
                # What it overwrote before its end is no carry any more.
                self._session.take(report)
            return
        if self._blame:
            return
        if isinstance(report, Opened):
            if self._opening is not None and not self._opening.done():
                self._opening.set_result(report)
            return
        try:
            self._session.take(report)
        except ReportWrong as error:
            self.give_up(f"{error}, and was ended")

    def _take_end(self, link: WorkerLink, end: End) -> None:
        if link is not self._link:
            self._take_other_end(link, end)
            return
        pid, self._link = self.pid or 0, None
        was_killed = end.was_killed and not self._blame
        self._last_end = dataclasses.replace(end, reason=self._blame or end.reason, was_killed=was_killed)
        if self._opening is not None and not self._opening.done():
            self._opening.set_result(self._last_end)
        else:
            self._session.lost(pid, self._last_end)

    def _take_other_end(self, link: WorkerLink, end: End) -> None:
        """Note the end of a worker that does not serve: it takes nothing of the session along."""
        self._ending.discard(link)
        if link is self._former:
            self._former = None
            self._log(f"{end.reason}, from which the session had been taken over")
        if link is self._standby:
            leads, self._standby, self._leads = self._leads, None, None
            if leads is not None:
                leads.ended(end)
