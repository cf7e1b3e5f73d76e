"""The loop of a switch: event -> machine.step -> commands -> effects.perform -> event, with the time of each stage.

The one place that writes the machine's state, with the turn held. Before the machine starts, ``run`` checks the target
while others go on with the session, and waits for the token boundary: a switch that ends there has touched nothing, not
even the machine.
"""

from __future__ import annotations

import dataclasses
from time import perf_counter
from typing import TYPE_CHECKING

from splitctl.engine.engine import resolve_threads
from splitctl.errors import Cancelled, DeadlineExceeded, Parked, Reason
from splitctl.outcome import Stage, StageTimes, SwitchOutcome, SwitchStatus, Via
from splitctl.placement import FlashAttn, Placement
from splitctl.switching import machine
from splitctl.switching.effects import MEETS
from splitctl.switching.machine import Command, EventKind, MachineState, SwitchEvent, SwitchTarget

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitctl.switching.effects import Effects, Run

_TIMED = frozenset(field.name for field in dataclasses.fields(StageTimes))
"""The stages, by value, whose times an outcome tells."""


def complete(target: Placement, now: Placement) -> Placement:
    """Fill in what a target leaves open: context size, flash attention as ``now`` has them resolved, and threads."""
    return dataclasses.replace(
        resolve_threads(target) if target.n_threads == 0 else target,
        n_ctx=target.n_ctx or now.n_ctx,
        flash_attn=now.flash_attn if target.flash_attn is FlashAttn.AUTO else target.flash_attn,
    )


class Switcher:
    """Runs switches of one session. Thread: the session's turn guards it."""

    def __init__(self, effects: Effects, placement: Placement, *, clock: Callable[[], float] = perf_counter) -> None:
        """Start serving in ``placement``; ``clock`` gives seconds."""
        self.effects = effects
        self.state = machine.serving(placement)
        self.last: SwitchOutcome | None = None
        self._clock = clock
        self._ms: dict[str, float] = {}
        self._fallback_ms: float | None = None
        self._counts: tuple[int | None, int, int] = (None, 0, 0)
        self._interrupted: BaseException | None = None

    @property
    def on_trial(self) -> bool:
        """Whether the next decode is the trial of a switch."""
        return self.state.stage is Stage.TRIAL

    def run(
        self,
        target: Placement,
        run: Run,
        *,
        check: Callable[[], tuple[Reason, ...]],
        enter: Callable[[], None],
    ) -> SwitchOutcome:
        """Carry out a switch to its end, whichever it is.

        Args:
            target: the whole placement.
            run: how, and what is called meanwhile.
            check: returns the reasons to refuse the target; called without the turn, may take as long as a trial in a
                child process.
            enter: waits for the token boundary and takes the turn.

        Returns:
            The outcome; ``confirmed`` is False until the trial.
        """
        started, checked = run.checked_at or (self._clock(), None)
        ms: dict[str, float] = {}

        def not_begun(status: SwitchStatus, at: Stage, reasons: tuple[Reason, ...] = ()) -> SwitchOutcome:
            served = self.state.effective or self.effects.live.placement
            state = MachineState(Stage.SERVING, served, requested=target, status=status, failed_at=at, reasons=reasons)
            return self._outcome(state, ms, (self._clock() - started) * 1e3)

        def before(stage: Stage, began: float, work: Callable[[], tuple[Reason, ...] | None]) -> SwitchOutcome | None:
            """Do what comes before the machine; returns the outcome where the switch ends with it."""
            run.progress(stage, 0.0)
            status = SwitchStatus.REFUSED
            try:
                reasons = work() or ()
            except Parked:
                raise
            except Cancelled:
                status, reasons = SwitchStatus.CANCELLED, (machine.CANCELLED,)
            except DeadlineExceeded as error:
                reasons = (Reason("busy", str(error)),)
            except MEETS as error:
                status, reasons = SwitchStatus.FELL_BACK, (Reason("failed", str(error) or type(error).__name__),)
            if self.effects.live.cancel.is_set():
                status, reasons = SwitchStatus.CANCELLED, (machine.CANCELLED,)
            ms[stage.value] = (self._clock() - began) * 1e3
            return not_begun(status, stage, reasons) if reasons else None

        if not self.effects.live.placement.differs(target):
            ended: SwitchOutcome | None = not_begun(SwitchStatus.UNCHANGED, Stage.CHECKING)
        else:
            ended = before(Stage.CHECKING, started, check)
            if checked is not None:
                ms[Stage.CHECKING.value] = (checked - started) * 1e3
            ended = ended or before(Stage.QUIESCING, checked or self._clock(), enter)
        if ended is None:
            self.effects.run = run
            self._ms, self._fallback_ms, self._counts = ms, None, (None, 0, 0)
            wanted = SwitchTarget(target, self.effects.via)
            resting = self.state
            try:
                self._drive(SwitchEvent(EventKind.STARTED, request=wanted))
            finally:
                if self.state is not resting:  # else a signal's handler raised before it began
                    ended = self.last = self._outcome(self.state, ms, (self._clock() - started) * 1e3)
                self.effects.run = dataclasses.replace(run, check=tuple)  # it holds the session, which may be dropped
        if ended is None:
            raise AssertionError("a switch that has begun has an outcome")
        self.last = ended
        return ended

    def trial_succeeded(self) -> None:
        """Confirm the switch: its first decode has succeeded; the kept carry is dropped."""
        self._drive(SwitchEvent(EventKind.DONE))
        if self.last is not None and self.last.status is SwitchStatus.SWITCHED:
            self.last = dataclasses.replace(self.last, confirmed=True)

    def trial_failed(self, reason: Reason) -> SwitchOutcome:
        """Fall back from a switch whose first decode failed; returns its outcome now: fell_back, or parked."""
        before, started = self.last, self._clock()
        self._drive(SwitchEvent(EventKind.FAILED, reasons=(reason,)))
        self._fallback_ms = (self._clock() - started) * 1e3
        self.last = self._outcome(self.state, self._ms, (before.total_ms if before else 0.0) + self._fallback_ms)
        return self.last

    def close(self) -> None:
        """Free everything; only while nothing is under way."""
        if EventKind.CLOSED in machine.TABLE[self.state.stage]:
            self._drive(SwitchEvent(EventKind.CLOSED))
        self.effects.live.engine.close()

    def _drive(self, event: SwitchEvent) -> None:
        """Take events until the machine rests; what a callback or a signal raised meanwhile is raised then."""
        self._interrupted = None
        pending: SwitchEvent | None = event
        live = self.effects.live
        with live.placing, live.engine.library.holding(everything=True):
            while pending is not None:
                self.state, commands = machine.step(self.state, pending)
                pending = None
                for command in commands:
                    result = self._perform(command)
                    if command not in machine.HOUSEKEEPING:
                        pending = result
        if self._interrupted is not None:
            raise self._interrupted

    def _perform(self, command: Command) -> SwitchEvent | None:
        stage = self.state.stage
        started = self._clock()
        if command in machine.HOUSEKEEPING:
            result = self.effects.perform(command, self.state)
        else:
            try:
                if stage is not Stage.CHECKING:  # told when it began, before the machine did
                    self.effects.run.progress(stage, 0.0)
                result = self.effects.perform(command, self.state)
            except BaseException as error:  # noqa: BLE001 - raised again by _drive, once the session is at rest
                result = self._interruption(stage, error)
        spent = (self._clock() - started) * 1e3
        if stage.value in _TIMED and command not in machine.HOUSEKEEPING:
            self._ms[stage.value] = self._ms.get(stage.value, 0.0) + spent
        elif command not in machine.HOUSEKEEPING:
            self._fallback_ms = (self._fallback_ms or 0.0) + spent
        kept = self.effects.transfer.kept
        if kept is not None:
            self._counts = (len(kept.view), kept.n_sequences, kept.n_tokens)
        return result

    def _interruption(self, stage: Stage, error: BaseException) -> SwitchEvent:
        """Turn what was raised into the way back: a session is never left between two placements."""
        self._interrupted = self._interrupted or error
        self.effects.run = dataclasses.replace(self.effects.run, progress=lambda _stage, _share: None)
        if isinstance(error, KeyboardInterrupt) and stage.value in _TIMED:
            return SwitchEvent(EventKind.CANCELLED)
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return SwitchEvent(
            EventKind.FAILED, reasons=(Reason("interrupted", f"interrupted while {stage.value}: {text}"),)
        )

    def _outcome(self, state: MachineState, ms: dict[str, float], total_ms: float) -> SwitchOutcome:
        model = self.effects.live.engine.model
        went_well = state.status in {SwitchStatus.SWITCHED, SwitchStatus.UNCHANGED}
        touched = Stage.SAVING.value in ms
        before = ms.get(Stage.CHECKING.value, 0.0) + ms.get(Stage.QUIESCING.value, 0.0)
        state_bytes, n_sequences, n_tokens = self._counts if touched else (None, 0, 0)
        is_pinned, why_not = self.effects.transfer.pinned if touched else (None, "")
        placed = Stage.PLACING.value in ms or (state.via is Via.NATIVE and state.status is SwitchStatus.SWITCHED)
        requested = state.requested
        if state.status is None or requested is None:
            raise AssertionError("an outcome comes at the end of a switch")
        return SwitchOutcome(
            status=state.status,
            requested_placement=requested,
            effective_placement=state.effective,
            reason="" if went_well else "; ".join(reason.text for reason in state.reasons),
            reasons=() if went_well else state.reasons,
            stage=None if went_well else state.failed_at,
            recomputed=state.recomputed,
            stages_ms=StageTimes(**ms),
            total_ms=total_ms,
            fallback_ms=self._fallback_ms if touched else None,
            state_bytes=state_bytes,
            weight_bytes=model.size_bytes if model is not None and touched else None,
            n_sequences=n_sequences,
            n_tokens=n_tokens,
            conversions=self.effects.transfer.conversions if state.status is SwitchStatus.SWITCHED else (),
            via=state.via,
            via_reason=self.effects.via_reason if touched else "",
            peak_device_bytes=self.effects.peaks if state.status is SwitchStatus.SWITCHED else (),
            pause_ms=total_ms - before if touched else None,
            weights=self.effects.live.engine.came_from if placed else None,
            weights_reason=self.effects.weights_reason if placed else "",
            carry_pinned=is_pinned,
            carry_pinned_reason=why_not,
        )
