"""Keeps a session served: the worker of the moment, what it tells, and what is done when it is lost.

Main path: `WorkerManager.open` -> `WorkerLink` (a worker, and a thread that follows it) -> Opened -> orders go out by
`flush`, reports come in by `_take` -> `StreamTable`, `Switches`, `PendingOrders`. A worker that is lost: `_lost` ->
`Recovery` says what is tried next -> `_recovered`, or `_park`.

Laws:
    1. One loop writes everything here; nothing in it waits for a worker.
    2. A worker's place is taken by another one only when the first is gone, with what it held of devices.
    3. A report of a worker that has lost count, or is being ended, changes nothing any more.
    4. Whatever happens to a worker, the session serves again, or lies parked at a path that everybody is told.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from splitctl.errors import Parked, SplitctlError
from splitctl.host.config import HostConfig, HostState
from splitctl.host.events import Hub, SessionParked, SessionRecovered, SwitchEnded, SwitchStage, TrialEnded, WorkerGone
from splitctl.host.ledger import ReportWrong
from splitctl.host.link import End, Listener, WorkerLink
from splitctl.host.parking import Owner, owner_of, park
from splitctl.host.pending import PendingOrders
from splitctl.host.recovery import Attempt, Recovery
from splitctl.host.stream_table import StreamTable
from splitctl.host.switches import Switches, UnderWay
from splitctl.ipc.jobs import Fault, HostRequest
from splitctl.ipc.orders import (
    Checked,
    Ended,
    Failed,
    Forgot,
    Open,
    Opened,
    Order,
    Reading,
    Replaced,
    Report,
    Restore,
    Save,
    Saved,
    Sealed,
    StageReached,
    Step,
    Switched,
    Tokenized,
    Trial,
    Unsealed,
)
from splitctl.placement import Placement

_ARENAS = 2

#: A file is written and read in one piece, without a sign of life: about 2 s a GiB from memory, and disks are slower.
_FILE_DEADLINES = 10.0


class WorkerManager:
    """The inside of a hosted session.

    Thread: the loop's. Lifetime: the arenas are there from `prepare` to `give_back`.
    """

    def __init__(self, config: HostConfig, env: Mapping[str, str], tell: Callable[[str], None]) -> None:
        """Nothing is started yet."""
        self.config = config
        self.tell = tell
        self.state = HostState.LOADING
        self.home = config.placement
        self.model: dict[str, Any] = {}
        self.life: WorkerLink | None = None
        self.parked_at: Path | None = None
        self.park_reason = ""
        self.n_recomputed = 0
        self.n_restarts = 0
        self.is_replacing = False
        self.on_stage: Callable[[str, float], None] | None = None
        self.switches = Switches()
        self.desk = PendingOrders()
        self.hub = Hub()
        self.traffic = StreamTable(self.desk, self._send, self.flush)
        self._env = env
        self._fds: tuple[int, ...] = ()
        self._blame = ""
        self._worker_parked_at: Path | None = None
        self._opening: asyncio.Future[Opened | End] | None = None
        self._last_end = End("the worker was never started")
        self._owner: Owner | None = None
        self._lost_at = 0.0
        self._recovery = Recovery()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def held(self) -> tuple[int, int]:
        """Sequences that hold something, and tokens over all of them."""
        books = self.traffic.books.books()
        return len(books), sum(len(book.tokens) for book in books)

    def cancel_switch(self) -> None:
        """Ask the switch under way, or waiting for its boundary, to end in the old placement."""
        if self.switches.under_way is not None:
            self.switches.under_way.is_cancelled = True
            if self.life is not None:
                self.life.cancel()

    def miss_boundary(self, switch: UnderWay) -> None:
        """Cancel a switch for which the token boundary is overdue."""
        if switch is self.switches.under_way and not switch.is_begun and not switch.is_cancelled:
            switch.is_late = True
            self.cancel_switch()

    @property
    def is_switching(self) -> bool:
        """Whether a switch is under way."""
        return self.switches.under_way is not None

    def prepare(self) -> None:
        """Make the arenas.

        Raises:
            OSError: the system has no memory files.
        """
        self._fds = tuple(os.memfd_create(f"splitctl-arena-{index}", os.MFD_CLOEXEC) for index in range(_ARENAS))

    def give_back(self) -> None:
        """Close the arenas."""
        for fd in self._fds:
            os.close(fd)
        self._fds = ()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Let something go on beside everything else, until it ends or the session does."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end_tasks(self) -> None:
        """End what was spawned."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- one worker ----

    async def open(self, order: Open) -> Opened | End:
        """Start a worker and let it open the session.

        Returns:
            What it opened; or how it ended.
        """
        self._blame = ""
        opening = self._opening = asyncio.get_running_loop().create_future()
        request = HostRequest(self.config.model, self.config.library, self.config.rpc, self._fds)
        listener = Listener(report=self._on_report, ended=self._on_end)
        try:
            life = WorkerLink(request, listener, env=self._env, deadline_s=self.config.deadline_s, pass_fds=self._fds)
        except OSError as error:
            opening.cancel()
            return End(f"the worker could not be started: {error.strerror or error}")
        self.life = life
        life.send(order)
        opened = await opening
        # It may have ended between its report and this moment.
        return opened if life is self.life else self._last_end

    def serve(self, opened: Opened) -> None:
        """Note where a worker serves."""
        self.home = opened.placement
        self.model = opened.model
        self.n_recomputed += opened.recomputed
        self.traffic.resize(opened.placement.n_seq_max)

    def go_on(self) -> None:
        """Let everything go on that waited for a worker."""
        self.state = HostState.SERVING
        self.traffic.back()
        self.flush()

    def flush(self) -> None:
        """Give the worker what waits for it, if one serves."""
        if self.life is not None and self.life.is_open and self.state is not HostState.RECOVERING:
            for order in self.desk.unsent():
                self._send(order)
            if self.state is HostState.SERVING and not self.is_switching and not self.is_replacing:
                self.traffic.start_waiting()
        self._expect()

    async def end_worker(self, grace_s: float) -> None:
        """Close the worker, or kill one that has not opened or does not close; return when it is gone."""
        life = self.life
        if life is None:
            return
        if not life.is_open:
            life.kill()
        await life.close(grace_s)

    def _send(self, order: Order) -> None:
        if self.life is not None:
            self.life.send(order)

    def _expect(self) -> None:
        """Let the worker's silence be measured as long as it owes something."""
        if self.life is not None:
            owes = not self.life.is_open or self.desk.is_expecting or self.traffic.books.is_working
            n = _FILE_DEADLINES if self.desk.is_expecting_one_of(Save, Restore) else 1.0
            self.life.expect(anything=owes or self.state is HostState.STOPPING, n_deadlines=n)

    # ---- what a worker tells ----

    def _on_report(self, life: WorkerLink, report: Report) -> None:
        if life is not self.life or self._blame:
            return
        try:
            self._take(report)
        except ReportWrong as error:
            self._blame_worker(f"{error}, and was ended")
        self._expect()

    def _take(self, report: Report) -> None:
        now = time.monotonic()
        match report:
            case Opened():
                if self._opening is not None and not self._opening.done():
                    self._opening.set_result(report)
            case Reading() | Step() | Ended() | Forgot():
                self.traffic.take(report)
            case StageReached():
                self._reached(report, now)
            case Sealed():
                self.switches.sealed(report)
            case Unsealed():
                self.switches.unsealed(report.arena)
            case Switched():
                self._switched(self.switches.switched(report, now), report.order)
            case Trial():
                self._tried(self.switches.tried(report))
            case Replaced():
                self.traffic.books.replace(report.books)
                self.desk.answer(report.order, report)
            case Tokenized() | Checked() | Saved():
                self.desk.answer(report.order, report)
            case Failed():
                self.switches.not_taken(report.order)
                self.desk.answer(report.order, report)
                self.flush()

    def _reached(self, report: StageReached, now: float) -> None:
        switch = self.switches.under_way
        is_first = switch is not None and not switch.is_begun
        stage = self.switches.reached(report, now)
        if is_first and switch is not None:
            self.traffic.pause(f"the session is moved to {switch.target.mode.value} mode")
        if self.on_stage is not None:
            self.on_stage(stage.value, report.share)
        self.hub.tell(SwitchStage(stage.value, report.share))

    def _switched(self, outcome: dict[str, Any], order: int) -> None:
        if self._is_parked_by_worker(outcome):
            return
        self._serves_on()
        self._tell_switched(outcome, order)
        self.traffic.resume()
        self.flush()

    def _tried(self, outcome: dict[str, Any]) -> None:
        if not self._is_parked_by_worker(outcome):
            self._serves_on()
            self._tell_tried(outcome)

    def _serves_on(self) -> None:
        """Note where the worker that is there serves now."""
        if self.switches.effective is not None:
            self.home = self.switches.effective
            self.traffic.resize(self.home.n_seq_max)

    def _tell_switched(self, outcome: dict[str, Any], order: int) -> None:
        self.on_stage = None
        self.desk.answer(order, outcome)
        self.hub.tell(SwitchEnded(outcome))

    def _tell_tried(self, outcome: dict[str, Any]) -> None:
        if outcome["status"] != "switched":
            self.tell(f"the switch to {outcome['requested']} was fallen back from: {outcome['reason']}")
        self.hub.tell(TrialEnded(outcome))

    def _is_parked_by_worker(self, outcome: dict[str, Any]) -> bool:
        """End a worker that has parked the session: a new one may find the room that it did not."""
        if outcome["status"] != "parked":
            return False
        self._note_parked_by_worker(outcome)
        self._blame_worker(str(outcome.get("reason") or "the worker could not go on"))
        return True

    def _note_parked_by_worker(self, told: Mapping[str, Any]) -> None:
        written = told.get("parked_at")
        self._worker_parked_at = Path(written) if isinstance(written, str) else None

    def _blame_worker(self, reason: str) -> None:
        self._blame = reason
        if self.life is not None:
            self.life.kill()

    # ---- a worker is gone ----

    def _on_end(self, life: WorkerLink, end: End) -> None:
        if life is not self.life:
            return
        self.life = None
        self._last_end = dataclasses.replace(end, reason=self._blame or end.reason)
        if end.failure is not None and end.failure.fault is Fault.PARKED:
            self._note_parked_by_worker(end.failure.body)
        if self._opening is not None and not self._opening.done():
            self._opening.set_result(self._last_end)
        elif self.state is HostState.SERVING:
            self._lost(life.pid, self._last_end)
        else:
            # Whoever opened it, or is closing it, goes on from here.
            self.desk.lost(self._last_end.reason)

    def _lost(self, pid: int, end: End) -> None:
        """Note the loss, and begin to recover."""
        reason = end.reason
        was_idle = not (self.desk.is_expecting or self.traffic.books.is_working)
        loss = self.switches.loss(
            had_progress=self.traffic.had_progress, was_idle=was_idle, was_killed=end.was_killed and not self._blame
        )
        self.state = HostState.RECOVERING
        self.home, self._lost_at = loss.home, time.monotonic()
        self._recovery.lost(loss)
        self.tell(f"{reason}; recovering")
        self.hub.tell(WorkerGone(pid, reason))
        self.desk.lost(reason)
        self.traffic.lost(reason, had_started=True)
        self.spawn(self._recover(reason))

    async def _recover(self, reason: str) -> None:
        """Try what there is to try, and park the session when nothing is left."""
        why = reason
        unreadable: list[Placement] = []
        while (attempt := self._recovery.next(self.switches.seals)) is not None:
            # Without its streams the session is opened by the same order: what failed so in a worker fails again.
            if attempt.drops_streams and (attempt.placement in unreadable or not self.traffic.has_stuck):
                continue
            opened = await self.open(self._order_of(attempt))
            if isinstance(opened, Opened):
                if attempt.drops_streams:
                    self.traffic.drop_stuck(why)
                self._recovered(opened, reason)
                return
            if attempt.seal is None and not opened.was_killed:
                unreadable.append(attempt.placement)
            self._recovery.failed(attempt, was_killed=opened.was_killed)
            why = opened.reason
            self.tell(f"it cannot be served {'from its saved state' if attempt.seal else 'from its tokens'}: {why}")
        await self._park(reason if why == reason else f"{reason}; then {why}")

    def _order_of(self, attempt: Attempt) -> Open:
        books = self.traffic.books.books()
        return Open(attempt.placement, self.config.adapters, force=True, seal=attempt.seal, books=books)

    def _recovered(self, opened: Opened, reason: str) -> None:
        """Go on in a new worker."""
        self.serve(opened)
        self.n_restarts += 1
        self._forget_parked_by_worker()
        self._tell_outcomes(opened.placement, reason, recomputed=opened.recomputed)
        ms, mode = (time.monotonic() - self._lost_at) * 1e3, opened.placement.mode.value
        self.hub.tell(SessionRecovered(0 if self.life is None else self.life.pid, mode, opened.recomputed, ms))
        self.tell(f"the session serves again, in {mode} mode{', read again from its tokens' * opened.recomputed}")
        self.go_on()

    def _tell_outcomes(self, placement: Placement | None, reason: str, *, recomputed: bool) -> None:
        """End the switch that was under way or on trial."""
        switch = self.switches.under_way
        outcomes = self.switches.recovered(
            placement, reason, recomputed=recomputed, held=self.held, now=time.monotonic(), lost_at=self._lost_at
        )
        for outcome in outcomes:
            if placement is None:
                outcome["parked_at"] = None if self.parked_at is None else str(self.parked_at)
        if switch is not None:
            self._tell_switched(outcomes.pop(), switch.order)
        for outcome in outcomes:
            self._tell_tried(outcome)

    async def _park(self, reason: str) -> None:
        """Put the session on disk, and tell everybody where."""
        written = await self.write(self.config.park_path)
        if written is not None:
            self._forget_parked_by_worker()
        self.parked_at, self.park_reason = written or self._worker_parked_at, reason
        self.state = HostState.PARKED
        self._tell_outcomes(None, reason, recomputed=False)
        self.desk.fail(Parked(self.parked_at, reason))
        where = f"is parked at {self.parked_at}: splitctl restore {self.parked_at} brings it back"
        told = f"{reason}; the session {where if self.parked_at else 'could not be saved'}"
        self.traffic.end_all(told)
        self.tell(told)
        self.hub.tell(SessionParked(self.parked_at, reason))

    async def write(self, path: Path) -> Path | None:
        """Write what the books hold, and a state that an arena holds for it, without a worker.

        Returns:
            The path; None where it could not be written, which is told.
        """
        books = self.traffic.books.books()
        sealed = [(self._fds[seal.arena], seal) for seal in reversed(self.switches.seals) if seal.arena < _ARENAS]
        try:
            owner = await self.know_owner()
            await asyncio.to_thread(park, path, books, placement=self.home, owner=owner, sealed=sealed)
        except (SplitctlError, OSError, ValueError) as error:
            self.tell(f"the session could not be written to {path}: {error}")
            return None
        return path

    async def know_owner(self) -> Owner:
        """Read whose a carry is; remembered, because files may be gone when it is needed.

        Raises:
            BadModelFile, OSError: one of the files cannot be read.
        """
        if self._owner is None:
            n_vocab, build = int(self.model.get("n_vocab", 0)), str(self.model.get("build", ""))
            model, adapters = self.config.model, self.config.adapters
            self._owner = await asyncio.to_thread(owner_of, model, adapters, n_vocab=n_vocab, build=build)
        return self._owner

    def _forget_parked_by_worker(self) -> None:
        """Remove the file of a session that is not parked after all, or lies parked elsewhere."""
        if self._worker_parked_at is not None:
            with suppress(OSError):
                self._worker_parked_at.unlink()
        self._worker_parked_at = None
