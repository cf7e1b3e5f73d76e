"""A switch that a second worker makes while the first one serves: make before break.

Main path: the second worker is started and builds the target -> the first one copies idle sequences between decodes,
and the second restores and proves them -> the first one seals the session at a token boundary, what has changed since
copied anew -> the second one takes it over and proves it -> the workers are swapped. Streams stand still from the seal
to the swap.

Laws:
    1. Until the swap the first worker has the session: whatever the second one comes to, the first goes on as it was.
    2. Nothing goes on after a failure before the second worker is gone: it holds the memory that carries are sealed in.
    3. A first worker that is lost ends the switch; what it had sealed by then is there for the recovery.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from splitctl.errors import Reason
from splitctl.host.ledger import ReportWrong
from splitctl.host.link import End
from splitctl.host.manager import WorkerManager
from splitctl.host.streams import StreamTable
from splitctl.host.switches import SwitchRecord
from splitctl.ipc import orders
from splitctl.ipc.ahead import CopiedAhead, CopyAhead, TakeAhead, TookAhead
from splitctl.outcome import DevicePeak, Stage, StageTimes, SwitchOutcome, SwitchStatus, Via
from splitctl.placement import Placement
from splitctl.switching.machine import CANCELLED

_MS = 1e3

_Report = TypeVar("_Report", orders.Opened, CopiedAhead, TookAhead, orders.HandedOver, orders.TookOver)


class _Off(Exception):
    """The switch is off, and the first worker goes on."""

    def __init__(self, status: SwitchStatus, reason: Reason) -> None:
        super().__init__(reason.text)
        self.status = status
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Steps:
    """What a switch beside does to the session of the supervisor.

    Attributes:
        open_order: gives the order that opens the target in a second worker.
        reached: takes where the switch is, as a worker reports it.
        take_seal: takes a report of a carry that is sealed, or no more.
        take_opened: takes what the worker that serves from now on has opened.
        ended: takes the end of the switch.
        changed: called when a worker owes something else than before.
    """

    open_order: Callable[[Placement], orders.Open]
    reached: Callable[[orders.StageReached], None]
    take_seal: Callable[[orders.Sealed | orders.Unsealed], None]
    take_opened: Callable[[orders.Opened], None]
    ended: Callable[[orders.Switched], None]
    changed: Callable[[], None]


class Beside:
    """One such switch.

    Attributes:
        is_owed: the first worker was ordered to copy or seal for the second, and has not answered.
        is_detached: no worker is at any stream.

    Thread: the supervisor's loop.
    """

    def __init__(
        self,
        record: SwitchRecord,
        found: orders.FitsBeside,
        manager: WorkerManager,
        streams: StreamTable,
        steps: Steps,
    ) -> None:
        """Lead the switch of a record, whose target was found to fit."""
        record.is_beside = True
        self._record = record
        self._found = found
        self._manager = manager
        self._streams = streams
        self._steps = steps
        self._events: asyncio.Queue[orders.Report | End | None] = asyncio.Queue()
        self.is_owed = False
        self.is_detached = False
        self._task = asyncio.get_running_loop().create_task(self._run())

    def cancel(self) -> None:
        """End it; the first worker goes on."""
        self._fail(None)

    def abandon(self) -> None:
        """Do nothing more: the first worker is gone, and whoever starts another one ends the second."""
        self._task.cancel()
        self._record.is_handing = False

    async def over(self) -> None:
        """Wait until the switch has ended, one way or the other."""
        await asyncio.wait({self._task})

    # ---- what workers report ----

    def answered(self, report: CopiedAhead | orders.HandedOver | orders.Failed | orders.Switched) -> None:
        """Take the first worker's answer."""
        if not self.is_owed:
            raise ReportWrong(f"an answer to order {report.order}, which nobody gave")
        self._events.put_nowait(report)

    def reported(self, report: orders.Report) -> None:
        """Take a report of the second worker."""
        try:
            match report:
                case orders.StageReached():
                    self._steps.reached(report)
                case orders.Sealed() | orders.Unsealed():
                    self._steps.take_seal(report)
                case orders.Opened() | TookAhead() | orders.TookOver():
                    self._events.put_nowait(report)
                case orders.Failed():
                    self._fail(report)
                case _ if not isinstance(report, orders.Alive):
                    self._fail(End(f"the worker said {type(report).__name__.lower()} before it served"))
        except ReportWrong as error:
            self.ended(End(f"{error}, and was ended"))

    def ended(self, end: End) -> None:
        """Take the second worker's end."""
        self._fail(end)

    def _fail(self, event: orders.Failed | End | None) -> None:
        """Note where it failed: the first worker may go on to another stage before that is dealt with."""
        self._record.failed_at = self._record.failed_at or self._record.stage
        self._events.put_nowait(event)

    # ---- the way ----

    async def _run(self) -> None:
        try:
            outcome = await self._move()
        except _Off as off:
            report = await self._go_on(off)
        except ValueError as error:
            # What the second worker opened is not what was asked for.
            report = await self._go_on(_Off(SwitchStatus.FELL_BACK, Reason("failed", str(error))))
        else:
            report = orders.Switched(self._record.order, outcome)
        self._record.is_handing = False
        self._steps.ended(report)

    async def _move(self) -> dict[str, Any]:
        """Go the whole way; raises _Off where the first worker is to go on."""
        record, manager = self._record, self._manager
        if record.is_cancelled:
            raise _Off(SwitchStatus.CANCELLED, CANCELLED)
        self._reached(Stage.PLACING)
        end = manager.stand_by(self._steps.open_order(self._found.target), self)
        if end is not None:
            raise _lost(end)
        opened = await self._next(orders.Opened)
        manager.idle_standby()
        is_split = await self._sent_ahead()
        asked_at = time.monotonic()
        record.is_handing = self.is_owed = True
        self._reached(Stage.QUIESCING)
        manager.send(orders.HandOver(record.order, in_one_piece=not is_split))
        self._steps.changed()
        handed = await self._next(orders.HandedOver)
        self._has_answered()
        if record.seal is None:
            raise _Off(SwitchStatus.FELL_BACK, Reason("failed", "the worker has sealed nothing"))
        manager.send_standby(orders.TakeOver(record.order, record.seal, record.options))
        took = await self._next(orders.TookOver)
        if manager.standby_pid is None:
            await self._next(orders.TookOver)  # its end, which is why
        outcome = self._outcome(opened, handed, took, (handed.stood_at - asked_at) * _MS)
        # From here on nothing is waited for, and nothing fails: the session is in one worker or the other.
        manager.swap()
        self._steps.take_opened(opened)
        self._streams.back()
        return outcome

    async def _sent_ahead(self) -> bool:
        """Let idle sequences cross while the first worker serves on; says whether they did. Raises _Off as `_move`."""
        number, manager = self._record.order, self._manager
        self.is_owed = True
        manager.send(CopyAhead(number))
        self._steps.changed()
        copied = await self._next(CopiedAhead)
        self.is_owed = False
        self._steps.changed()
        if not copied.segments:
            return True
        manager.send_standby(TakeAhead(number, copied.arena, copied.segments))
        took = await self._next(TookAhead)
        manager.idle_standby()
        return took.is_done

    def _reached(self, stage: Stage) -> None:
        self._steps.reached(orders.StageReached(self._record.order, stage.value))

    def _has_answered(self) -> None:
        self.is_owed, self.is_detached = False, True
        self._streams.detached()
        self._steps.changed()

    async def _next(self, kind: type[_Report]) -> _Report:
        """Wait for a report of a kind; raises _Off where something else comes."""
        event = await self._events.get()
        if isinstance(event, kind):
            return event
        match event:
            case None:
                raise _Off(SwitchStatus.CANCELLED, CANCELLED)
            case End():
                raise _lost(event)
            case orders.Switched():
                # The first worker refuses: put back for who reads it.
                self._events.put_nowait(event)
                raise _Off(SwitchStatus.REFUSED, Reason("refused", "the session does not allow it any more"))
            case orders.Failed():
                if self.is_owed:
                    self.is_owed = False
                raise _Off(SwitchStatus.FELL_BACK, Reason("failed", event.message))
            case _:
                text = f"the second worker said {type(event).__name__.lower()} out of turn"
                raise _Off(SwitchStatus.FELL_BACK, Reason("worker-lost", text))

    async def _go_on(self, off: _Off) -> orders.Switched:
        """Let the first worker serve on; gives the end of the switch."""
        record = self._record
        stage = record.failed_at or record.stage
        record.leave(time.monotonic())
        await self._manager.alone()
        refused = None
        while self.is_owed:
            event = await self._events.get()
            if isinstance(event, orders.HandedOver):
                self._has_answered()
            elif isinstance(event, CopiedAhead | orders.Failed | orders.Switched):
                self.is_owed = False
                refused = event if isinstance(event, orders.Switched) else None
        self._manager.send(orders.GoOn(record.order))
        if self.is_detached:
            self._streams.back()
        now = time.monotonic()
        if refused is not None:
            return refused
        outcome = SwitchOutcome(
            off.status,
            self._found.target,
            record.original,
            off.reason.text,
            (off.reason,),
            stage,
            stages_ms=StageTimes(**record.stages_ms | {"checking": self._found.checking_ms}),
            total_ms=(now - record.started_at) * _MS,
            via=Via.BESIDE,
        )
        return orders.Switched(record.order, dict(outcome.to_json()))

    def _outcome(
        self, opened: orders.Opened, handed: orders.HandedOver, took: orders.TookOver, quiescing_ms: float
    ) -> dict[str, Any]:
        record, now = self._record, time.monotonic()
        ms = {"checking": self._found.checking_ms, "quiescing": max(quiescing_ms, 0.0)}
        outcome = SwitchOutcome(
            SwitchStatus.SWITCHED,
            self._found.target,
            opened.placement,
            stages_ms=StageTimes(**ms | handed.stages_ms | took.stages_ms),
            total_ms=(now - record.started_at) * _MS,
            state_bytes=None if record.seal is None else record.seal.state_bytes,
            n_sequences=handed.n_sequences,
            n_tokens=handed.n_tokens,
            conversions=took.conversions,
            weight_bytes=took.weight_bytes,
            weights=took.weights,
            weights_reason=took.weights_reason,
            carry_pinned=handed.carry_pinned,
            carry_pinned_reason=handed.carry_pinned_reason,
            ahead_bytes=handed.ahead_bytes,
            ahead_reason=handed.ahead_reason,
            via=Via.BESIDE,
            peak_device_bytes=_peaks(opened),
            pause_ms=(now - handed.stood_at) * _MS,
        )
        return dict(outcome.to_json())


def _lost(end: End) -> _Off:
    reason = end.reason.replace("the worker", "the second worker", 1)
    return _Off(SwitchStatus.FELL_BACK, Reason("worker-lost" if end.failure is None else "failed", reason))


def _peaks(opened: orders.Opened) -> tuple[DevicePeak, ...]:
    """Read the memory in use on every device, when both placements were there; None for processors."""
    listed = {one["name"]: one for one in opened.model.get("devices", ())}
    names = opened.placement.devices or tuple(listed)

    def used(name: str) -> int | None:
        one = listed.get(name, {})
        has_number = one.get("kind") not in {None, "cpu"} and one.get("memory_total")
        return one["memory_total"] - one["memory_free"] if has_number else None

    return tuple(DevicePeak(index, name, used(name)) for index, name in enumerate(names))
