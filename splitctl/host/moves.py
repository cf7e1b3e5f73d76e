"""Follows the switches of a hosted session: from the order to the outcome that its client, the events and the log get.

A switch is made in place, by the worker that serves, or beside it, led by `beside.Beside`; which of both, the worker's
check says.

Laws:
    1. The loop writes everything here.
    2. Streams are paused when a switch passes the token boundary, and go on when it has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from splitctl.host import events
from splitctl.host.beside import Beside, Steps
from splitctl.host.ledger import ReportWrong
from splitctl.host.link import End
from splitctl.host.manager import WorkerManager
from splitctl.host.pending import OnLoss, PendingOrders
from splitctl.host.streams import StreamTable
from splitctl.host.switches import Switches, SwitchRecord
from splitctl.ipc import orders
from splitctl.ipc.ahead import CopiedAhead
from splitctl.outcome import Stage, SwitchOptions
from splitctl.placement import Placement

OnStage = Callable[[str, float], None]
_Moving = (
    orders.StageReached | orders.Sealed | orders.Unsealed | orders.FitsBeside | CopiedAhead | orders.HandedOver
    | orders.FirstStep | orders.Switched | orders.Trial
)  # fmt: skip
"""Reports that are about a switch."""


class Moves:
    """Follows the switches of one session. Thread: the supervisor's loop."""

    def __init__(
        self,
        switches: Switches,
        streams: StreamTable,
        pending: PendingOrders,
        manager: WorkerManager,
        hub: events.Hub,
        *,
        open_order: Callable[[Placement, int], orders.Open],
        take_opened: Callable[[orders.Opened], None],
        is_parked: Callable[[dict[str, Any]], bool],
        flush: Callable[[], None],
        log: Callable[[str], None],
    ) -> None:
        """Follow none yet.

        Args:
            switches: the records; these are written here.
            streams: those of the session.
            pending: orders that wait for an answer.
            manager: the workers.
            hub: takes events.
            open_order: gives the order that opens a placement in a second worker, for a switch of a number.
            take_opened: takes what a worker has opened that serves from now on.
            is_parked: takes an outcome, and says whether the worker has parked the session by it.
            flush: called when orders may go out that could not before.
            log: takes lines for a person.
        """
        self._switches = switches
        self._streams = streams
        self._pending = pending
        self._manager = manager
        self._hub = hub
        self._open_order = open_order
        self._take_opened = take_opened
        self._is_parked = is_parked
        self._flush = flush
        self._log = log
        self._on_stage: OnStage | None = None
        self._beside: Beside | None = None

    # ---- what is asked ----

    def begin(
        self, target: Placement, options: SwitchOptions, timeout_s: float | None, on_stage: OnStage | None
    ) -> asyncio.Future[dict[str, Any]]:
        """Order a switch; gives its outcome to be."""
        order = orders.Switch(self._pending.number(), target, options, may_be_beside=options.via.may_be_beside)
        self._manager.let_go()
        self._switches.begin(order.order, target, time.monotonic(), timeout_s, options)
        self._on_stage = on_stage
        answer = self._pending.put(order, OnLoss.HOLD)
        self._flush()
        return answer

    def cancel(self) -> None:
        """Ask the switch under way to end in the old placement; without one nothing happens."""
        if self._switches.under_way is None:
            return
        self._switches.under_way.is_cancelled = True
        if self._beside is None:
            self._manager.cancel()
        else:
            self._beside.cancel()

    async def stop(self) -> None:
        """End a second worker; returns when the session is in one."""
        if self._beside is not None:
            self.cancel()
            await self._beside.over()

    # ---- what a worker owes ----

    @property
    def owes(self) -> bool:
        """Whether the worker that serves owes anything for a switch or for streams."""
        beside = self._beside
        if beside is None:
            return self._pending.is_expecting(orders.Switch) or self._streams.ledger.is_working
        return beside.is_owed or (self._streams.ledger.is_working and not beside.is_detached)

    # ---- what workers report ----

    def take(self, report: _Moving) -> None:
        """Take a report of the worker that serves; raises ReportWrong if it is impossible."""
        match report:
            case orders.StageReached():
                self._reached(report)
            case orders.Sealed() | orders.Unsealed():
                self._take_seal(report)
            case orders.FitsBeside():
                self._lead(report)
            case CopiedAhead() | orders.HandedOver():
                self._answered(report)
            case orders.FirstStep():
                self._confirmed(report)
            case orders.Switched():
                if self._beside is not None:
                    self._answered(report)
                else:
                    self._switched(report)
            case orders.Trial():
                self._tried(report)

    def has_taken_failure(self, report: orders.Failed) -> bool:
        """Take the report of an order that failed; says whether it belongs to a switch beside."""
        record = self._switches.under_way
        if self._beside is not None and record is not None and report.order == record.order:
            self._beside.answered(report)
            return True
        self._switches.not_taken(report.order)
        return False

    def _take_seal(self, report: orders.Sealed | orders.Unsealed) -> None:
        if isinstance(report, orders.Sealed):
            self._switches.sealed(report)
        else:
            self._switches.unsealed(report.arena)

    def _reached(self, report: orders.StageReached) -> None:
        switch = self._switches.under_way
        was_begun = switch is not None and switch.is_begun
        stage = self._switches.reached(report, time.monotonic())
        if switch is not None and switch.is_begun and not was_begun:
            self._streams.pause(f"the session is moved to {switch.target.mode.value} mode")
        if switch is not None and stage is Stage.QUIESCING and switch.timeout_s is not None:
            asyncio.get_running_loop().call_later(switch.timeout_s, self._miss_boundary, switch)
        if self._on_stage is not None:
            self._on_stage(stage.value, report.share)
        self._hub.publish(events.SwitchStage(stage.value, report.share))

    def _miss_boundary(self, switch: SwitchRecord) -> None:
        """Cancel a switch for which the token boundary is overdue."""
        if switch is self._switches.under_way and not switch.is_begun and not switch.is_cancelled:
            switch.is_late = True
            self.cancel()

    def _lead(self, found: orders.FitsBeside) -> None:
        """Have a second worker do the switch."""
        record = self._switches.fits_beside(found)
        steps = Steps(
            open_order=lambda target: self._open_order(target, record.order),
            reached=self._reached,
            take_seal=self._take_seal,
            take_opened=self._take_opened,
            ended=self._is_over,
            changed=self._flush,
        )
        self._beside = Beside(record, found, self._manager, self._streams, steps)

    def _answered(self, report: CopiedAhead | orders.HandedOver | orders.Switched) -> None:
        self._switches.of(report.order)
        if self._beside is None:
            raise ReportWrong(f"an answer to order {report.order}, which nobody gave")
        self._beside.answered(report)

    def _is_over(self, report: orders.Switched) -> None:
        """Take the end of a switch beside; where it succeeded the first worker is kept while streams are open."""
        self._beside = None
        if self._manager.has_former:
            self._pending.moved()
        self._switched(report)
        self.settle()

    def _switched(self, report: orders.Switched) -> None:
        outcome = self._switches.switched(report, time.monotonic())
        if self._is_parked(outcome):
            return
        self._streams.resize(self._switches.effective.n_seq_max)
        self._publish(outcome, report.order)
        self._streams.resume()
        self._flush()

    def _tried(self, report: orders.Trial) -> None:
        outcome = self._switches.tried(report)
        if not self._is_parked(outcome):
            self._streams.resize(self._switches.effective.n_seq_max)
            self._publish_trial(outcome)

    def _confirmed(self, report: orders.FirstStep) -> None:
        """Note that the second worker has made a step: the first one is not wanted any more."""
        trial = self._switches.trial
        if trial is not None and trial.order == report.order:
            self._tried(orders.Trial({**trial.outcome, "confirmed": True}))
        self._manager.let_go()

    def settle(self) -> None:
        """Let the first worker go where no stream is open, which would show whether the second one can step."""
        if self._manager.has_former and not self._streams.n_open:
            self._manager.let_go()

    def _publish(self, outcome: dict[str, Any], order: int) -> None:
        self._on_stage = None
        self._pending.answer(order, outcome)
        self._hub.publish(events.SwitchEnded(outcome))

    def _publish_trial(self, outcome: dict[str, Any]) -> None:
        if outcome["status"] != "switched":
            self._log(f"the switch to {outcome['requested']} was fallen back from: {outcome['reason']}")
        self._hub.publish(events.TrialEnded(outcome))

    # ---- a worker is gone ----

    def lost(self) -> None:
        """Note that the worker which serves is gone: a switch beside has ended with it."""
        if self._beside is not None:
            self._beside.abandon()
            self._beside = None

    def has_gone_back(self, end: End) -> bool:
        """Let the first worker serve again where the second is lost before its first step; says whether it does."""
        trial = self._switches.trial
        if trial is None or self._switches.under_way is not None or not self._manager.swap_back():
            return False
        self._pending.lost(end.reason)
        self._streams.detached()
        self.end(trial.original, end.reason, recomputed=False, lost_at=time.monotonic())
        self._streams.resize(trial.original.n_seq_max)
        self._manager.send(orders.GoOn(trial.order))
        self._streams.back()
        self._flush()
        return True

    def end(
        self,
        placement: Placement | None,
        reason: str,
        *,
        recomputed: bool,
        lost_at: float,
        more: dict[str, Any] | None = None,
    ) -> None:
        """End the switch that was under way or on trial when the worker was lost.

        Args:
            placement: where the session serves now; None: it is parked.
            reason: how the worker ended.
            recomputed: tokens were read again.
            lost_at: when it was lost, seconds of the loop's clock.
            more: further fields of the outcomes.
        """
        switch = self._switches.under_way
        outcomes = self._switches.recovered(
            placement,
            reason,
            recomputed=recomputed,
            held=self._streams.ledger.held,
            now=time.monotonic(),
            lost_at=lost_at,
        )
        for outcome in outcomes:
            outcome.update(more or {})
        if switch is not None:
            self._publish(outcomes.pop(), switch.order)
        for outcome in outcomes:
            self._publish_trial(outcome)
