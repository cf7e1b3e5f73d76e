"""The loop of a switch: event -> machine.step -> commands -> effects.perform -> event, with the time of each stage.

The one place that writes the machine's state. The session calls it with the turn announced (``run``) or held
(``trial_succeeded``, ``trial_failed``).
"""

from __future__ import annotations

import dataclasses
from time import perf_counter
from typing import TYPE_CHECKING

from splitctl.errors import Reason
from splitctl.outcome import Stage, StageTimes, SwitchOutcome, SwitchStatus
from splitctl.switching import machine
from splitctl.switching.machine import Command, EventKind, SwitchEvent, SwitchTarget

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitctl.placement import Placement
    from splitctl.switching.effects import Effects, SwitchOptions

_TIMED = {
    Stage.QUIESCING: "quiescing",
    Stage.CHECKING: "checking",
    Stage.SAVING: "saving",
    Stage.SEALING: "sealing",
    Stage.FREEING: "freeing",
    Stage.PLACING: "placing",
    Stage.BUILDING: "building",
    Stage.RESTORING: "restoring",
    Stage.PROVING: "proving",
}


class Switcher:
    """Runs switches of one session.

    Thread: the session's turn guards it.
    """

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

    def run(self, request: SwitchTarget, options: SwitchOptions) -> SwitchOutcome:
        """Carry out a switch to its end, whichever it is.

        Args:
            request: the whole target.
            options: how.

        Returns:
            The outcome; ``confirmed`` is False until the trial.
        """
        self.effects.options = options
        self._ms, self._fallback_ms, self._counts = {}, None, (None, 0, 0)
        started = self._clock()
        try:
            self._drive(SwitchEvent(EventKind.STARTED, request=request))
        finally:
            self.last = self._outcome((self._clock() - started) * 1e3 + options.waited_ms)
        return self.last

    def not_begun(self, target: Placement, status: SwitchStatus, reason: Reason) -> SwitchOutcome:
        """Give the outcome of a switch that never got its turn; others may be using the machine, so it is not moved."""
        return SwitchOutcome(
            status=status,
            requested_placement=target,
            effective_placement=self.state.effective or self.effects.live.placement,
            reason=reason.text,
            reasons=(reason,),
            stage=Stage.QUIESCING,
        )

    def trial_succeeded(self) -> None:
        """Confirm the switch: its first decode has succeeded; the kept carry is dropped."""
        self._drive(SwitchEvent(EventKind.DONE))
        if self.last is not None and self.last.status is SwitchStatus.SWITCHED:
            self.last = dataclasses.replace(self.last, confirmed=True)

    def trial_failed(self, reason: Reason) -> SwitchOutcome:
        """Fall back from a switch whose first decode failed.

        Returns:
            The switch's outcome as it is now: fell_back, or parked.
        """
        before = self.last
        started = self._clock()
        self._drive(SwitchEvent(EventKind.FAILED, reasons=(reason,)))
        spent = (self._clock() - started) * 1e3
        self._fallback_ms = spent
        self.last = self._outcome((before.total_ms if before else 0.0) + spent)
        return self.last

    def close(self) -> None:
        """Free everything; only while nothing is under way."""
        if EventKind.CLOSED in machine.TABLE[self.state.stage]:
            self._drive(SwitchEvent(EventKind.CLOSED))
        self.effects.live.engine.free()

    def _drive(self, event: SwitchEvent) -> None:
        """Take events until the machine rests; what a callback or a signal raised meanwhile is raised then."""
        self._interrupted = None
        pending: SwitchEvent | None = event
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
                if stage is not Stage.QUIESCING:  # the session told that when it began to wait
                    self.effects.options.progress(stage, 0.0)
                result = self.effects.perform(command, self.state)
            except BaseException as error:  # noqa: BLE001 - raised again by _drive, once the session is at rest
                result = self._interruption(stage, error)
        spent = (self._clock() - started) * 1e3
        if stage is Stage.QUIESCING:
            spent += self.effects.options.waited_ms
        if stage in _TIMED and command not in machine.HOUSEKEEPING:
            self._ms[_TIMED[stage]] = spent
        elif command not in machine.HOUSEKEEPING and stage is not Stage.SWITCHING_NATIVELY:
            self._fallback_ms = (self._fallback_ms or 0.0) + spent
        kept = self.effects.transfer.kept
        if kept is not None:
            self._counts = (len(kept.view), kept.n_sequences, kept.n_tokens)
        return result

    def _interruption(self, stage: Stage, error: BaseException) -> SwitchEvent:
        """Turn what was raised into the way back: a session is never left between two placements."""
        self._interrupted = self._interrupted or error
        self.effects.options = dataclasses.replace(self.effects.options, progress=lambda _stage, _share: None)
        if isinstance(error, KeyboardInterrupt) and stage in _TIMED:
            return SwitchEvent(EventKind.CANCELLED)
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return SwitchEvent(
            EventKind.FAILED, reasons=(Reason("interrupted", f"interrupted while {stage.value}: {text}"),)
        )

    def _outcome(self, total_ms: float) -> SwitchOutcome:
        state = self.state
        model = self.effects.live.engine.model
        went_well = state.status in {SwitchStatus.SWITCHED, SwitchStatus.UNCHANGED}
        touched = state.status not in {SwitchStatus.REFUSED, SwitchStatus.UNCHANGED}
        state_bytes, n_sequences, n_tokens = self._counts if touched else (None, 0, 0)
        requested = state.requested
        if state.status is None or requested is None:
            msg = "an outcome comes at the end of a switch"
            raise AssertionError(msg)
        return SwitchOutcome(
            status=state.status,
            requested_placement=requested,
            effective_placement=state.effective,
            reason="" if went_well else "; ".join(reason.text for reason in state.reasons),
            reasons=() if went_well else state.reasons,
            stage=None if went_well else state.failed_at,
            recomputed=state.recomputed,
            stages_ms=StageTimes(**self._ms),
            total_ms=total_ms,
            fallback_ms=self._fallback_ms,
            state_bytes=state_bytes,
            weight_bytes=model.size_bytes if model is not None and touched else None,
            n_sequences=n_sequences,
            n_tokens=n_tokens,
            conversions=self.effects.transfer.conversions if state.status is SwitchStatus.SWITCHED else (),
            via=state.via,
            peak_device_bytes=self.effects.peaks if went_well else (),
        )
