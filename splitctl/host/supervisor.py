"""A session that outlives the process which holds the library: its state, and what clients may ask of it.

The supervisor never loads the library. It owns the session: the sequences and the streams on them, the orders that wait
for an answer, the switches, where the session serves or is parked. The worker is `manager.WorkerManager`'s, whose
docstring says where the cut between the two runs.

Main path: a client asks -> an order goes out by `_flush` -> the worker reports by `take` -> `StreamTable`, `Switches`
and `PendingOrders` are written -> the client gets its answer. A worker that is lost: `lost` -> `WorkerManager.recover`
-> `_go_on`, or `_park`.

Laws:
    1. The loop writes everything here, and no other thread does.
    2. Whatever happens to a worker, the session serves again, or lies parked at a path that clients are given.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from splitctl.carry.seal import Seal
from splitctl.control.requests import GenerateRequest
from splitctl.errors import Busy, CarryNotWritten, Parked
from splitctl.host import auto, events
from splitctl.host.access import AccessLog
from splitctl.host.config import HostConfig, HostState
from splitctl.host.link import End
from splitctl.host.manager import WorkerManager
from splitctl.host.moves import Moves
from splitctl.host.parking import SessionFiles
from splitctl.host.pending import OnLoss, PendingOrders
from splitctl.host.recovery import Attempt, Loss
from splitctl.host.saving import Saving
from splitctl.host.streams import Stream, StreamTable
from splitctl.host.switches import Switches
from splitctl.ipc import orders
from splitctl.ipc.ahead import CopiedAhead
from splitctl.ipc.jobs import Fault
from splitctl.model.identity import FileIdentity
from splitctl.outcome import SwitchOptions, to_plain
from splitctl.placement import Placement

#: How long a worker that was ordered to close may take [seconds].
_GRACE_S = 10.0

#: A file is written and read in one piece, without a sign of life: about 2 s a GiB from memory, and disks are slower.
_FILE_DEADLINES = 10.0

_PLAIN = SwitchOptions()
_FOUND = (
    "target", "is_unchanged", "reasons", "conversions", "state_bytes", "weight_bytes", "mem_available", "via",
    "via_reason", "weights", "weights_reason",
)  # fmt: skip


class Supervisor:
    """One hosted session.

    Thread: the loop that calls `start`. Lifetime: from `start` to `stop`.
    """

    def __init__(self, config: HostConfig, *, env: Mapping[str, str], log: Callable[[str], None]) -> None:
        """Nothing is started yet; workers get `env` as it is when they start, and `log` takes lines for a person."""
        self._config = config
        self._log = log
        self._manager = WorkerManager(config, self, env=env, log=log)
        self._state = HostState.LOADING
        self._model: dict[str, Any] = {"path": str(config.model)}
        self._opened_from: tuple[FileIdentity, ...] = ()
        self._files = SessionFiles(config, log)
        self._switches = Switches(config.placement)
        self._pending = PendingOrders()
        self._access = None if config.access_log is None else AccessLog(config.access_log, log)
        self._streams = StreamTable(self._pending, self._manager.send, self._flush, self._access)
        self._saving = Saving(
            config.save_path, self._streams.ledger, by_worker=self._save, without_worker=self._write, log=log
        )
        self._hub = events.Hub()
        self._moves = Moves(
            self._switches,
            self._streams,
            self._pending,
            self._manager,
            self._hub,
            open_order=lambda target, number: self._reopening(target, standby_for=number),
            take_opened=self._take_opened,
            is_parked=self._is_parked_by_worker,
            flush=self._flush,
            log=log,
        )
        session = auto.Session(self._is_free, self._begin, self.cancel_switch, self._flush, log)
        self._auto = auto.Auto(config.policy, self._streams, self._switches, session)
        self._is_replacing = False
        self._parked: events.SessionParked | None = None
        self._lost_at = 0.0
        self._n_recomputed = 0
        self._n_restarts = 0
        self._started_at = time.time()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[dict[str, Any]] | None = None

    # ---- what clients ask ----

    @property
    def state(self) -> HostState:
        """What the session is doing."""
        is_switching = self._state is HostState.SERVING and self._switches.under_way is not None
        return HostState.SWITCHING if is_switching else self._state

    @property
    def worker_pid(self) -> int | None:
        """The worker's process id; None while there is none."""
        return self._manager.pid

    def subscribe(self) -> AsyncIterator[events.HostEvent]:
        """Give what happens to the session from now on; the iterator ends with it."""
        return self._hub.subscribe()

    def recent_switches(self) -> list[dict[str, Any]]:
        """Give the outcomes of the last switches as they are by now, oldest first."""
        return self._switches.recent

    async def start(self) -> None:
        """Load the model and serve.

        Raises:
            RequestFailed: the worker says why it cannot, or the saved session cannot be used.
            WorkerLost: it died of it; nothing was at stake.
            DeadlineExceeded: it hung.
            OSError: the system gives no memory file.
        """
        config = self._config
        try:
            await self._saving.warn()
            order = orders.Open(config.placement, config.adapters, force=config.force, weights=config.weights)
            await self._open(order)
            self._go_on()
            await self._files.know_owner(self._model)
            if config.resume is not None:
                await self._replace(config.resume)
        except BaseException:
            await self.stop(save=False)
            raise
        if config.resume is None:
            self._files.offer()
        if config.checkpoint_s is not None:
            self._spawn(self._saving.every(config.checkpoint_s, is_serving=lambda: self.state is HostState.SERVING))

    async def generate(self, request: GenerateRequest) -> Stream:
        """Begin a generation; raises Parked, or Busy where it is stopped or too many wait."""
        self._refuse_gone()
        return self._streams.open(request)

    async def tokenize(self, asked: Mapping[str, Any]) -> orders.Tokenized:
        """Do what fields of `orders.Tokenize` ask for; raises as `save`."""
        self._refuse_gone()
        found: orders.Tokenized = await self._ask(orders.Tokenize(self._pending.number(), **asked))
        return found

    async def switch(
        self,
        changes: Mapping[str, Any],
        options: SwitchOptions = _PLAIN,
        *,
        timeout_s: float | None = None,
        on_stage: Callable[[str, float], None] | None = None,
    ) -> dict[str, Any]:
        """Move the session; a switch goes on when its caller stops waiting.

        Args:
            changes: the named fields of the placement; what is not named stays, a tensor split within a mode alone.
            options: how.
            timeout_s: longest wait for the token boundary, seconds; None: as long as it takes.
            on_stage: called with the stage and the share of it that is done.

        Returns:
            The outcome object of the contract; of a parked session with ``parked_at``.

        Raises:
            Busy: another switch, a restore or a recovery is under way.
            Parked: the session serves no more.
            PlacementInvalid: no placement can be so.
            RequestFailed: the worker could not take it.
        """
        await self._auto.give_way()
        target = self._target(changes)
        outcome: dict[str, Any] = await asyncio.shield(self._moves.begin(target, options, timeout_s, on_stage))
        return outcome

    def cancel_switch(self) -> None:
        """Ask the switch under way to end in the old placement; without one nothing happens."""
        self._moves.cancel()

    def set_policy(self, policy: str) -> dict[str, Any]:
        """Let the session switch by itself (auto), or no more (off); gives the policy's status; raises as `turn`."""
        self._refuse_gone()
        self._auto.turn(is_on=policy == "auto")
        self._flush()
        return self._auto.status()

    async def check(self, changes: Mapping[str, Any], options: SwitchOptions = _PLAIN) -> dict[str, Any]:
        """Say what a switch would do; the arguments are those of `switch`.

        Returns:
            What the worker found (`orders.Checked`, as an object), the modes under ``requested`` and ``effective``, and
            under ``expected_s`` the seconds that such a switch has taken so far, or None.

        Raises:
            Busy, Parked, PlacementInvalid: as `switch`.
            RequestFailed: it could not be judged.
        """
        target = self._target(changes)
        before, after = self._switches.effective.mode.value, target.mode.value
        report: orders.Checked = await self._ask(orders.Check(self._pending.number(), target, options))
        found = {name: to_plain(getattr(report, name)) for name in _FOUND}
        return {
            "effective": before,
            "requested": after,
            **found,
            "expected_s": self._switches.expected_s(before, after),
        }

    async def save(self, path: Path) -> dict[str, Any]:
        """Write the whole session to a file with an absolute path, at a token boundary.

        Returns:
            Keys path, bytes, sequences and tokens.

        Raises:
            Parked, Busy: there is no session to save.
            RequestFailed: it could not be written.
        """
        self._refuse_gone()
        n_bytes = await self._save(path)
        n_sequences, n_tokens = self._streams.ledger.held
        return {"path": str(path), "bytes": n_bytes, "sequences": n_sequences, "tokens": n_tokens}

    async def restore(self, path: Path) -> dict[str, Any]:
        """Replace all that the session holds with a file; a parked session serves again with it.

        The file is a carry, or a session or slot file of llama.cpp; its path is absolute.

        Returns:
            Keys path, sequences, tokens, conversions, recomputed and reason.

        Raises:
            Busy: streams, a switch, a restore or a recovery are under way.
            RequestFailed: the file cannot be used; the session is as it was.
            WorkerLost, DeadlineExceeded: a parked session's new worker was lost; it is parked as it was.
        """
        if self._state is HostState.PARKED:
            return await self._bring_back(path)
        await self._auto.give_way()
        self._refuse_busy()
        if n_streams := self._streams.n_open:
            raise Busy(f"{n_streams} streams, from which a restore would take their sequences")
        return await self._replace(path)

    async def stop(self, *, save: bool = True, force: bool = True) -> dict[str, Any]:
        """End the session: streams get an error, it is saved, the worker is closed. A second call waits for the first.

        Args:
            save: whether it is saved.
            force: end it even if it cannot be saved.

        Returns:
            Keys path (where it was saved, or a parked session lies; None where it was not) and reason (why it was not
            saved; empty where it was, or held nothing).

        Raises:
            Refused: it cannot be saved, and goes on.
        """
        if save and not force and self._ended is None and self._is_unsaved:
            is_serving = self._state is HostState.SERVING
            await self._saving.before_the_end(has_worker=is_serving, stop_switching=self.cancel_switch)
        if self._ended is None:
            self._ended = asyncio.ensure_future(self._stop(save=save))
        return dict(await asyncio.shield(self._ended))

    def status(self) -> dict[str, Any]:
        """Say how the session is, as JSON types."""
        ledger, switches = self._streams.ledger, self._switches
        switch, last, mode = switches.under_way, switches.last, switches.effective.mode.value
        asked = switch.target.mode.value if switch is not None else mode if last is None else last["requested"]
        return {
            "name": self._config.name,
            "state": self.state.value,
            "pid": os.getpid(),
            "worker_pid": self.worker_pid,
            "standby_pid": self._manager.standby_pid,
            "model": dict(self._model),
            "placement": switches.effective.to_json(),
            "weights": self._weights(),
            "policy": self._auto.status(),
            "requested": asked,
            "effective": mode if self._state is HostState.SERVING else None,
            "sequences": ledger.status(),
            "streams": self._streams.n_open,
            "queued": self._streams.n_waiting,
            "tokens_per_second": ledger.tokens_per_second,
            "totals": to_plain(ledger.totals),
            "stage": None if switch is None else switch.stage.value,
            "on_trial": switches.trial is not None,
            "last_switch": last,
            "switches": switches.summary(),
            "started_at": self._started_at,
            "parked_at": to_plain(self._parked_at),
            "recomputed": self._n_recomputed,
            "worker_restarts": self._n_restarts,
        }

    # ---- what the manager asks, and what workers report ----

    @property
    def seals(self) -> tuple[Seal, ...]:
        """The carries that arenas hold, oldest first."""
        return self._switches.seals

    def opening(self, attempt: Attempt) -> orders.Open | None:
        """Give the order that makes an attempt; None where there are no streams to end."""
        if attempt.drops_streams and not self._streams.has_stuck:
            return None
        held = self._streams.ledger.snapshots()
        return self._reopening(attempt.placement, seal=attempt.seal, sequences=held)

    def take(self, report: orders.Report) -> None:
        """Take a worker's report; raises ReportWrong if it is impossible."""
        self._auto.saw(report)
        match report:
            case orders.Reading() | orders.Step() | orders.Ended() | orders.Forgot():
                self._streams.take(report)
            case (
                orders.StageReached() | orders.Sealed() | orders.Unsealed() | orders.FitsBeside() | CopiedAhead()
                | orders.HandedOver() | orders.FirstStep() | orders.Switched() | orders.Trial()
            ):  # fmt: skip
                self._moves.take(report)
            case orders.Replaced():
                self._streams.ledger.replace(report.sequences)
                self._pending.answer(report.order, report)
            case orders.Tokenized() | orders.Checked() | orders.Saved():
                self._pending.answer(report.order, report)
            case orders.Failed():
                if not self._moves.has_taken_failure(report):
                    self._pending.answer(report.order, report)
                self._flush()
        self._moves.settle()
        if self._auto.is_due:
            self._flush()
        self._expect()

    def _is_parked_by_worker(self, outcome: Mapping[str, Any]) -> bool:
        """End a worker that has parked the session: a new one may find the room that it did not."""
        if outcome["status"] != "parked":
            return False
        self._files.note_parked_by_worker(outcome)
        self._manager.give_up(str(outcome.get("reason") or "the worker could not go on"))
        return True

    # ---- a worker serves ----

    async def _open(self, order: orders.Open) -> None:
        """Open the session where nothing runs yet; raises as `start`."""
        opened = await self._manager.open(order)
        if isinstance(opened, End):
            raise opened.error()
        self._take_opened(opened)
        self._switches.effective = opened.placement

    def _reopening(self, placement: Placement, **held: Any) -> orders.Open:
        """Give the order that opens the session again, from the same files."""
        one = self._config
        files, weights = self._opened_from, one.weights
        return orders.Open(placement, one.adapters, force=True, files=files, weights=weights, **held)

    def _weights(self) -> dict[str, Any]:
        """Say where switches take the weights from, how far the copy is, and where the worker's came from."""
        share = self._manager.copy_share
        copy = None if share is None else "complete" if share == 1.0 else f"{100 * share:.0f} %"
        return {"tier": self._config.weights.value, "copy": copy, "from": self._model.get("weights_from")}

    def _take_opened(self, opened: orders.Opened) -> None:
        self._model, self._opened_from = opened.model, opened.files
        self._n_recomputed += opened.recomputed
        self._streams.ledger.decoder_start = opened.model.get("decoder_start")
        self._streams.resize(opened.placement.n_seq_max)

    def _go_on(self) -> None:
        """Continue everything that waited for a worker."""
        self._state = HostState.SERVING
        self._streams.back()
        self._flush()

    def _flush(self) -> None:
        """Give the worker what waits for it, if one serves."""
        self._auto.look()
        if self._manager.is_open and self._state is not HostState.RECOVERING:
            switch = self._switches.under_way
            for order in () if switch is not None and switch.is_handing else self._pending.unsent():
                self._manager.send(order)
            if self._state is HostState.SERVING and not self._switches.is_moving and not self._is_replacing:
                self._streams.start_waiting()
        self._expect()

    def _expect(self) -> None:
        """Let the worker's silence be measured as long as it owes something."""
        asked = self._pending.is_expecting(orders.Tokenize, orders.Check, orders.Save, orders.Restore)
        owes = asked or self._moves.owes or self._state is HostState.STOPPING
        has_file = self._pending.is_expecting(orders.Save, orders.Restore)
        self._manager.expect(anything=owes, n_deadlines=_FILE_DEADLINES if has_file else 1.0)

    async def _ask(self, order: orders.Tokenize | orders.Check | orders.Save | orders.Restore) -> Any:
        answer = self._pending.put(order, OnLoss.FAIL)
        self._flush()
        return await asyncio.shield(answer)

    # ---- a worker is gone ----

    def lost(self, pid: int, end: End) -> None:
        """Note that a worker is gone; the session recovers if it was serving."""
        reason = end.reason
        self._moves.lost()
        if self._state is HostState.SERVING and self._moves.has_gone_back(end):
            return
        if end.failure is not None and end.failure.fault is Fault.PARKED:
            self._files.note_parked_by_worker(end.failure.body)
        was_idle = not (self._pending.is_expecting() or self._streams.ledger.is_working)
        # An order that has failed is not there to end the next worker too.
        had_progress = self._pending.lost(reason) or self._streams.had_progress
        if self._state is not HostState.SERVING:
            # Whoever opened it, or is closing it, handles its end.
            return
        loss = self._switches.lost(had_progress=had_progress, was_idle=was_idle, was_killed=end.was_killed)
        self._state, self._lost_at = HostState.RECOVERING, time.monotonic()
        self._log(f"{reason}; recovering")
        self._hub.publish(events.WorkerGone(pid, reason))
        self._streams.lost(reason)
        self._spawn(self._recover(loss, reason))

    async def _recover(self, loss: Loss, reason: str) -> None:
        """Serve in another worker, or park the session when nothing is left to try."""
        found = await self._manager.recover(loss, reason)
        if isinstance(found, End):
            await self._park(reason if found.reason == reason else f"{reason}; then {found.reason}")
            return
        opened, mode = found.opened, found.opened.placement.mode.value
        if found.attempt.drops_streams:
            self._streams.drop_stuck(found.why)
        self._take_opened(opened)
        self._n_restarts += 1
        self._files.forget_parked_by_worker()
        self._end_switches(opened.placement, reason, recomputed=opened.recomputed)
        ms = (time.monotonic() - self._lost_at) * 1e3
        self._hub.publish(events.SessionRecovered(self.worker_pid or 0, mode, opened.recomputed, ms))
        self._log(f"the session serves again, in {mode} mode{', read again from its tokens' * opened.recomputed}")
        self._go_on()

    def _end_switches(self, placement: Placement | None, reason: str, *, recomputed: bool) -> None:
        """End the switch that was under way or on trial when the worker was lost."""
        parked = {} if placement is not None else {"parked_at": to_plain(self._parked_at)}
        self._moves.end(placement, reason, recomputed=recomputed, lost_at=self._lost_at, more=parked)

    # ---- files ----

    async def _park(self, reason: str) -> None:
        """Put the session on disk, and say where to clients, in the log and as an event."""
        path: Path | None = self._config.park_path
        try:
            await self._write(self._config.park_path)
            self._files.forget_parked_by_worker()
        except CarryNotWritten as error:
            self._log(str(error))
            path = self._files.parked_by_worker
        self._parked, self._state = events.SessionParked(path, reason), HostState.PARKED
        self._end_switches(None, reason, recomputed=False)
        self._pending.fail(Parked(path, reason))
        where = f"is parked at {path}: splitctl restore {path} brings it back" if path else "could not be saved"
        text = f"{reason}; the session {where}"
        self._streams.end_all(text)
        self._log(text)
        self._hub.publish(self._parked)

    async def _bring_back(self, path: Path) -> dict[str, Any]:
        """Open a parked session again, where it served, and restore a file into it."""
        self._state = HostState.LOADING
        try:
            await self._open(self._reopening(self._switches.effective))
            restored = await self._replace(path)
        except BaseException as error:
            await self._manager.end(_GRACE_S)
            self._state = HostState.PARKED
            self._streams.end_all(f"the session is still parked: {error}")
            raise
        self._parked = None
        self._go_on()
        self._log(f"the session serves again, from {path}")
        return restored

    async def _replace(self, path: Path) -> dict[str, Any]:
        """Let the worker restore a file; streams that come meanwhile wait."""
        self._is_replacing = True
        try:
            report: orders.Replaced = await self._ask(orders.Restore(self._pending.number(), path))
        finally:
            self._is_replacing = False
            self._flush()
        return {
            "path": str(path),
            "sequences": len(report.sequences),
            "tokens": sum(len(one.tokens) for one in report.sequences),
            "conversions": list(report.conversions),
            "recomputed": report.recomputed,
            "reason": report.reason,
        }

    async def _write(self, path: Path) -> None:
        """Write the session without a worker; raises CarryNotWritten."""
        sealed = self._manager.arenas_of(reversed(self.seals))
        sequences, placement = self._streams.ledger.snapshots(), self._switches.effective
        await self._files.write(path, sequences, model=self._model, placement=placement, sealed=sealed)

    async def _save(self, path: Path) -> int:
        """Let the worker save the session; gives the bytes written."""
        saved: orders.Saved = await self._ask(orders.Save(self._pending.number(), path))
        self._hub.publish(events.SessionSaved(path, saved.n_bytes))
        return saved.n_bytes

    # ---- the end ----

    async def _stop(self, *, save: bool) -> dict[str, Any]:
        has_worker = self._state is HostState.SERVING and self._manager.is_open
        self.cancel_switch()
        self._auto.close()
        self._state = HostState.STOPPING
        await self._moves.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._streams.end_all("the session is being stopped")
        if self._access is not None:
            self._access.close()
        path, reason = self._parked_at, ""
        if save and self._is_unsaved:
            reason = await self._saving.at_the_end(has_worker=has_worker)
            path = None if reason else self._config.save_path
        await self._manager.close(_GRACE_S)
        self._pending.fail(Busy("its end"))
        self._hub.close()
        return {"path": to_plain(path), "reason": reason}

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task until it ends or the session does."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _is_free(self) -> bool:
        is_asked = self._is_replacing or self._pending.is_expecting(orders.Save, orders.Restore)
        return self._state is HostState.SERVING and not is_asked

    def _begin(self, target: Placement) -> asyncio.Future[dict[str, Any]]:
        return self._moves.begin(target, _PLAIN, None, None)

    # ---- what cannot be done now ----

    @property
    def _is_unsaved(self) -> bool:
        """Whether it holds something that lies parked nowhere."""
        return self._parked_at is None and self._streams.ledger.held != (0, 0)

    @property
    def _parked_at(self) -> Path | None:
        return None if self._parked is None else self._parked.path

    def _target(self, changes: Mapping[str, Any]) -> Placement:
        """Give the whole target of a switch."""
        self._refuse_gone()
        self._refuse_busy()
        return self._switches.effective.changed(**changes)

    def _refuse_gone(self) -> None:
        if self._parked is not None and self._state is HostState.PARKED:
            raise Parked(self._parked.path, self._parked.reason)
        if self._state is HostState.STOPPING:
            raise Busy("its end")

    def _refuse_busy(self) -> None:
        if self._switches.under_way is not None:
            raise Busy(f"a switch to {self._switches.under_way.target.mode.value}")
        if self._is_replacing:
            raise Busy("a restore")
        if self._state is not HostState.SERVING:
            raise Busy("recovering from the loss of its worker" if self._state is HostState.RECOVERING else "loading")
