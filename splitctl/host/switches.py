"""The switches of a hosted session as its supervisor follows them: under way, on trial, over. Pure.

What a switch whose worker died comes to is said here; where the session goes on after it is `recovery`'s to say.

Laws:
    1. A switch ends with one outcome, whoever is left to report it: the worker, or this module when the worker is gone.
    2. A carry counts as sealed from the report that says so to the one that says that it is about to be overwritten.
    3. Requested and effective are two fields, here too.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from splitctl.carry.seal import Seal
from splitctl.errors import Reason, SplitctlError
from splitctl.host.ledger import ReportWrong
from splitctl.host.recovery import Loss
from splitctl.ipc.orders import FitsBeside, Sealed, StageReached, Switched, Trial
from splitctl.outcome import Stage, StageTimes, SwitchOptions, SwitchOutcome, SwitchStatus, Via
from splitctl.placement import Placement
from splitctl.switching.machine import FALLING_BACK

#: Switches that are kept, for what the next one will take.
_KEPT = 256
#: Those of them whose outcomes are shown.
_SHOWN = 16

_SERVES = frozenset({Stage.CHECKING, Stage.QUIESCING})
"""Stages in which streams go on."""
_SERVES_BESIDE = _SERVES | {Stage.PLACING, Stage.BUILDING, Stage.TRIAL}
"""The same where a second worker does it: there the first decode is one that is forgotten."""

_BACK = FALLING_BACK | {Stage.RECOMPUTING, Stage.PARKING}
"""Stages after something failed: where it failed is the stage before."""

_MS = 1e3

_PLAIN = SwitchOptions()


@dataclass(slots=True, eq=False)
class SwitchRecord:
    """A switch: under way, on trial or over.

    Attributes:
        order: number of the order.
        target: what was asked for.
        original: where the session served when it was asked, and goes if the switch fails.
        started_at: when, seconds of the supervisor's clock.
        timeout_s: longest wait for the token boundary, seconds; None: as long as it takes.
        stage: where it is.
        stage_at: when the present stage began.
        options: how.
        is_begun: the token boundary has come, and streams stand still.
        is_beside: a second worker does it, and the first one serves on until it has sealed.
        is_handing: the first one has been ordered to seal, and gets no other order.
        failed_at: the last stage before it went back, if it did.
        seal: the carry that it has sealed.
        is_cancelled: it was asked to end.
        is_late: the token boundary did not come in time; it is cancelled for that.
        stages_ms: time of the stages that are over, ms.
        took_s: the whole of it, seconds, once it is over.
        outcome: its outcome as it is by now, once it is over.
    """

    order: int
    target: Placement
    original: Placement
    started_at: float
    timeout_s: float | None
    options: SwitchOptions = field(default_factory=SwitchOptions)
    stage: Stage = Stage.CHECKING
    stage_at: float = field(kw_only=True)
    is_begun: bool = False
    is_beside: bool = False
    is_handing: bool = False
    failed_at: Stage | None = None
    seal: Seal | None = None
    is_cancelled: bool = False
    is_late: bool = False
    stages_ms: dict[str, float] = field(default_factory=dict)
    took_s: float = 0.0
    outcome: dict[str, Any] = field(default_factory=dict)

    @property
    def way(self) -> tuple[str, str]:
        """The modes before and after."""
        return self.original.mode.value, self.target.mode.value

    @property
    def has_succeeded(self) -> bool:
        """Whether it ended in its target."""
        return bool(self.outcome.get("status") == SwitchStatus.SWITCHED.value)

    def leave(self, now: float) -> None:
        """End the time of the present stage."""
        if self.stage.value in StageTimes.__slots__:
            spent = self.stages_ms.get(self.stage.value, 0.0)
            self.stages_ms[self.stage.value] = spent + (now - self.stage_at) * _MS
        self.stage_at = now


class Switches:
    """All switches of one session, and where it serves; an impossible report raises ReportWrong.

    Attributes:
        effective: where the session serves; without a worker where it belongs, before the first one where it begins.
        previous: where it served before that; None where it did not, or where that has failed.
        under_way: the switch that a worker is at.
        trial: the switch whose first decode is still to come.

    Thread: the supervisor's loop, alone.
    """

    def __init__(self, placement: Placement) -> None:
        self.effective = placement
        self.previous: Placement | None = None
        self.under_way: SwitchRecord | None = None
        self.trial: SwitchRecord | None = None
        self._seals: dict[int, Seal] = {}
        self._ended: deque[SwitchRecord] = deque(maxlen=_KEPT)
        self._totals: Counter[str] = Counter()
        self._newest: SwitchRecord | None = None

    @property
    def seals(self) -> tuple[Seal, ...]:
        """The carries that arenas hold, oldest first."""
        return tuple(self._seals.values())

    @property
    def last(self) -> dict[str, Any] | None:
        """The newest outcome, that of a trial included; None before the first."""
        return None if self._newest is None else self._newest.outcome

    @property
    def newest(self) -> SwitchRecord | None:
        """The last switch that has ended, that of a trial included; None before the first."""
        return self._newest

    @property
    def recent(self) -> list[dict[str, Any]]:
        """Outcomes of the last switches as they are by now, oldest first."""
        return [one.outcome for one in self._ended][-_SHOWN:]

    def serve_in(self, placement: Placement) -> None:
        """Note where the session serves now."""
        if self.effective.differs(placement):
            self.previous = self.effective
        self.effective = placement

    @property
    def is_moving(self) -> bool:
        """Whether a switch is at the token boundary or past it: the worker gets nothing else to do."""
        return self.under_way is not None and (self.under_way.is_begun or self.under_way.is_handing)

    # ---- what is asked and reported ----

    def begin(
        self,
        order: int,
        target: Placement,
        now: float,
        timeout_s: float | None = None,
        options: SwitchOptions = _PLAIN,
    ) -> None:
        """Take a switch that a worker is ordered to do."""
        self.under_way = SwitchRecord(order, target, self.effective, now, timeout_s, options, stage_at=now)

    def fits_beside(self, report: FitsBeside) -> SwitchRecord:
        """Give the switch of which a worker has said that its target fits beside."""
        switch = self.of(report.order)
        if switch.is_begun or switch.is_beside or not switch.options.via.may_be_beside:
            raise ReportWrong("a switch that fits beside, and nobody had asked")
        return switch

    def reached(self, report: StageReached, now: float) -> Stage:
        """Note where the switch is."""
        try:
            stage = Stage(report.stage)
        except ValueError as error:
            raise ReportWrong(f"a switch in a stage {report.stage!r:.40}") from error
        if self.trial is not None and self.trial.order == report.order:
            # Its first decode failed, and the worker goes back: the trial is over when it says so.
            return stage
        switch = self.of(report.order)
        switch.is_begun = switch.is_begun or stage not in (_SERVES_BESIDE if switch.is_beside else _SERVES)
        if stage is not switch.stage:
            switch.leave(now)
            if stage in _BACK and switch.failed_at is None:
                switch.failed_at = switch.stage
            switch.stage = stage
        return stage

    def sealed(self, report: Sealed) -> None:
        """Note that an arena holds a carry."""
        self._seals.pop(report.seal.arena, None)
        self._seals[report.seal.arena] = report.seal
        if self.under_way is not None and self.under_way.is_begun:
            self.under_way.seal = report.seal

    def unsealed(self, arena: int) -> None:
        """Note that an arena holds none any more."""
        self._seals.pop(arena, None)

    def not_taken(self, order: int) -> None:
        """Forget a switch that the worker could not take."""
        if self.under_way is not None and self.under_way.order == order:
            self.under_way = None

    def switched(self, report: Switched, now: float) -> dict[str, Any]:
        """Take the outcome of the switch under way; gives it, corrected by what only the supervisor knows."""
        switch = self.of(report.order)
        outcome = dict(report.outcome)
        status, effective = read_outcome(outcome)
        if status is SwitchStatus.CANCELLED and switch.is_late:
            text = "the token boundary did not come in time; give the switch a longer timeout"
            outcome |= {
                "status": SwitchStatus.REFUSED.value,
                "reason": text,
                "reasons": [{"code": "busy", "text": text}],
                "stage": Stage.QUIESCING.value,
            }
        if status is SwitchStatus.PARKED:
            # Not the end: a new worker may find the room that this one did not.
            return outcome
        self.under_way = None
        self._end(switch, outcome, now)
        is_on_trial = status is SwitchStatus.SWITCHED and not outcome.get("confirmed")
        if switch.is_beside and not is_on_trial and self.trial is not None:
            # The first worker goes on as it was, and its trial with it; its original is what it sealed last.
            self.trial.seal = switch.seal or self.trial.seal
        elif is_on_trial or switch.seal is not None:
            self._settle(self.trial)
            self.trial = None
        if is_on_trial:
            self.trial = switch
        else:
            self._settle(switch)
        if effective is not None:
            self.serve_in(effective)
        return outcome

    def tried(self, report: Trial) -> dict[str, Any]:
        """Take and give the outcome of a switch after its first decode."""
        outcome = dict(report.outcome)
        status, effective = read_outcome(outcome)
        if status is SwitchStatus.PARKED:
            # As above: the trial is over when the session serves again, or nothing is left to try.
            return outcome
        if self.trial is not None or self._newest is None or not self._newest.is_beside:
            # Else it is that of a switch which another one beside has replaced, and was itself fallen back from.
            self._end_trial(outcome)
        if status is not SwitchStatus.SWITCHED:
            self._fall_back(effective)
            if self.under_way is not None:
                # One that is still being checked begins where the session serves now.
                self.under_way.original = self.effective
        return outcome

    # ---- a worker is gone ----

    def lost(self, *, had_progress: bool, was_idle: bool, was_killed: bool) -> Loss:
        """Say where the session belongs, now that its worker is gone; the arguments are those of `Loss`."""
        home = self.effective
        seal = self.seals[-1] if self._seals else None
        switch, trial = self.under_way, self.trial
        target = None if switch is None else switch.target
        if switch is not None and switch.seal is not None:
            home, seal = switch.original, switch.seal
        elif trial is not None:
            home, seal, target = trial.original, trial.seal, self.effective
        self.effective = home
        held = seal if seal in self.seals else None
        return Loss(home, held, self.previous, target, had_progress, was_idle, was_killed)

    def recovered(
        self,
        placement: Placement | None,
        reason: str,
        *,
        recomputed: bool,
        held: tuple[int, int],
        now: float,
        lost_at: float,
    ) -> list[dict[str, Any]]:
        """End what was under way or on trial when the worker was lost.

        The session serves in `placement` now, or is parked (None), and holds so many sequences and tokens. Times are
        seconds of the supervisor's clock.

        Returns:
            The outcomes: of the switch that was on trial, then of the one under way.
        """
        outcomes = []
        switch, trial = self.under_way, self.trial
        fallback_ms = (now - lost_at) * _MS
        if trial is not None and (switch is None or switch.seal is None):
            outcomes.append(
                _trial_lost(trial.outcome, placement, reason, recomputed=recomputed, fallback_ms=fallback_ms)
            )
            self._end_trial(outcomes[0])
        if switch is not None:
            switch.leave(lost_at)
            outcome = _switch_lost(switch, placement, reason, recomputed=recomputed, held=held)
            outcome |= {"total_ms": (now - switch.started_at) * _MS, "fallback_ms": fallback_ms}
            outcomes.append(outcome)
            self._end(switch, outcome, now)
        self._settle(self.trial)
        self._settle(switch)
        self.trial = self.under_way = None
        if outcomes:
            self._fall_back(placement)
        elif placement is not None:
            self.serve_in(placement)
        return outcomes

    # ---- what is over ----

    def summary(self) -> dict[str, Any]:
        """Sum up all switches so far: how many, how they ended, and what the last of those that succeeded took.

        How one on trial ended is told when its trial is over: no count ever goes down.
        """
        ways = sorted({one.way for one in self._ended if one.has_succeeded})
        return {
            "count": self._totals.total() + (self.trial is not None),
            "ended": dict(self._totals),
            "took": [{"from": one, "to": other, "median_s": self.expected_s(one, other)} for one, other in ways],
        }

    def expected_s(self, before: str, after: str) -> float | None:
        """Say what a switch between two modes has taken so far, seconds; None where there was none."""
        times = [one.took_s for one in self._ended if one.way == (before, after) and one.has_succeeded]
        return median(times) if times else None

    def of(self, order: int) -> SwitchRecord:
        """Give the switch under way, by the number of its order."""
        if self.under_way is None or self.under_way.order != order:
            raise ReportWrong(f"a switch {order}, which is not under way")
        return self.under_way

    def _fall_back(self, placement: Placement | None) -> None:
        """Serve where the session came from; what has just failed is no place to go back to."""
        if placement is not None:
            self.effective = placement
        self.previous = None

    def _end(self, switch: SwitchRecord, outcome: dict[str, Any], now: float) -> None:
        switch.outcome, switch.took_s = outcome, now - switch.started_at
        self._ended.append(switch)
        self._newest = switch

    def _end_trial(self, outcome: dict[str, Any]) -> None:
        trial, self.trial = self.trial, None
        if trial is not None:
            self._newest = trial
        if self._newest is None:
            raise ReportWrong("the end of a trial, and there was no switch")
        self._newest.outcome = outcome
        self._settle(trial)

    def _settle(self, switch: SwitchRecord | None) -> None:
        """Count a switch whose outcome stays as it is."""
        if switch is not None:
            self._totals[str(switch.outcome["status"])] += 1


def read_outcome(outcome: Mapping[str, Any]) -> tuple[SwitchStatus, Placement | None]:
    """Read status and effective placement out of a worker's outcome.

    Raises:
        ReportWrong: it has none, or they contradict each other.
    """
    try:
        status = SwitchStatus(outcome["status"])
        plain = outcome["effective_placement"]
        effective = None if plain is None else Placement.from_json(plain)
        Placement.from_json(outcome["requested_placement"])
        str(outcome["requested"])
    except (KeyError, TypeError, ValueError, AttributeError, SplitctlError) as error:
        raise ReportWrong(f"an outcome that is none ({error})") from error
    if (effective is None) != (status is SwitchStatus.PARKED):
        raise ReportWrong(f"an outcome of status {status.value} with effective placement {effective}")
    return status, effective


def _switch_lost(
    switch: SwitchRecord, placement: Placement | None, reason: str, *, recomputed: bool, held: tuple[int, int]
) -> dict[str, Any]:
    """Compose the outcome of a switch whose worker is gone."""
    status = SwitchStatus.CANCELLED if switch.is_cancelled and not switch.is_late else SwitchStatus.FELL_BACK
    was_native = (
        Stage.SWITCHING_NATIVELY in {switch.stage, switch.failed_at} or "switching_natively" in switch.stages_ms
    )
    return SwitchOutcome(
        status=SwitchStatus.PARKED if placement is None else status,
        requested_placement=switch.target,
        effective_placement=placement,
        reason=reason,
        reasons=(Reason("worker-lost", reason),),
        stage=switch.failed_at or switch.stage,
        via=Via.BESIDE if switch.is_beside else Via.NATIVE if was_native else Via.COMPOSED,
        recomputed=recomputed,
        stages_ms=StageTimes(**switch.stages_ms),
        state_bytes=None if switch.seal is None else switch.seal.state_bytes,
        n_sequences=held[0],
        n_tokens=held[1],
    ).to_json()


def _trial_lost(
    outcome: Mapping[str, Any], placement: Placement | None, reason: str, *, recomputed: bool, fallback_ms: float
) -> dict[str, Any]:
    """Compose the outcome of a switch whose first decode took the worker with it."""
    text = f"the first decode after the switch failed: {reason}"
    total_ms = outcome.get("total_ms")
    return {
        **outcome,
        "status": (SwitchStatus.PARKED if placement is None else SwitchStatus.FELL_BACK).value,
        "effective": None if placement is None else placement.mode.value,
        "effective_placement": None if placement is None else placement.to_json(),
        "confirmed": False,
        "recomputed": recomputed,
        "reason": text,
        "reasons": [{"code": "trial-failed", "text": text}],
        "stage": Stage.TRIAL.value,
        "total_ms": (total_ms if isinstance(total_ms, int | float) else 0.0) + fallback_ms,
        "fallback_ms": fallback_ms,
        "conversions": [],
        "peak_device_bytes": [],
    }
