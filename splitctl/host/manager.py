"""The worker of a hosted session: how it is started and ended, and what is done when it is lost.

A hosted session has two halves. `WorkerManager` owns the process: the link to the worker of the moment, the arenas that
it maps, why it was ended, and the attempts after a loss. `supervisor.Supervisor` owns the session: its sequences,
streams and switches, where it serves or is parked. The supervisor calls the manager's methods; the manager knows of the
session what `Session` says, and neither reads or writes what the other keeps.

Main path: `WorkerManager.open` -> `WorkerLink` (a worker, and a thread that follows it) -> Opened -> orders go out by
`send`, reports come in by `Session.take`. A worker that is lost: `Session.lost` -> `recover` -> `Recovery` says what is
tried next -> `open`.

Laws:
    1. The loop writes everything here; nothing in it blocks on a worker.
    2. The next worker is started only when the last one is gone, with what it held of devices.
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
from splitctl.host.config import HostConfig
from splitctl.host.ledger import ReportWrong
from splitctl.host.link import End, WorkerLink
from splitctl.host.recovery import Attempt, Loss, Recovery
from splitctl.ipc.jobs import HostRequest
from splitctl.ipc.orders import Open, Opened, Order, Report

_ARENAS = 2


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
        self._arenas: tuple[int, ...] = ()
        self._blame = ""
        self._opening: asyncio.Future[Opened | End] | None = None
        self._last_end = End("the worker was never started")
        self._recovery = Recovery()

    @property
    def pid(self) -> int | None:
        """The worker's process id; None while there is none."""
        return None if self._link is None else self._link.pid

    @property
    def is_open(self) -> bool:
        """Whether there is a worker that has opened the session."""
        return self._link is not None and self._link.is_open

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
        self._blame = ""
        opening: asyncio.Future[Opened | End] = asyncio.get_running_loop().create_future()
        self._opening = opening
        try:
            self._link = WorkerLink(
                HostRequest(self._config.model, self._config.library, self._config.rpc, self._arenas),
                on_report=self._take_report,
                on_end=self._take_end,
                env=self._env,
                deadline_s=self._config.deadline_s,
                pass_fds=self._arenas,
            )
        except OSError as error:
            opening.cancel()
            return End(f"the worker could not be started: {error.strerror or error}")
        self._link.send(order)
        opened = await opening
        # It may have ended between its report and this moment.
        return opened if self.is_open else self._last_end

    async def recover(self, loss: Loss, reason: str) -> Recovered | End:
        """Let a new worker open the session, by one attempt after the other.

        Returns:
            The worker that serves now; or how the last one ended, and nothing is left to try.
        """
        self._recovery.lost(loss)
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
        """End the worker and give the arenas back."""
        await self.end(grace_s)
        for fd in self._arenas:
            os.close(fd)
        self._arenas = ()

    # ---- what the link calls ----

    def _take_report(self, report: Report) -> None:
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

    def _take_end(self, end: End) -> None:
        pid, self._link = self.pid or 0, None
        was_killed = end.was_killed and not self._blame
        self._last_end = dataclasses.replace(end, reason=self._blame or end.reason, was_killed=was_killed)
        if self._opening is not None and not self._opening.done():
            self._opening.set_result(self._last_end)
        else:
            self._session.lost(pid, self._last_end)
