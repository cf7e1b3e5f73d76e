"""The loop of a switch: event -> machine.step -> commands -> effects.perform -> event, with the time of each stage.

The one place that writes the machine's state. The session calls it with the turn announced (``run``) or held
(``trial_succeeded``, ``trial_failed``).
"""

from __future__ import annotations

import dataclasses
from time import perf_counter
from typing import TYPE_CHECKING

from splitctl.outcome import StageTimes, SwitchOutcome, SwitchStatus
from splitctl.switching import machine
from splitctl.switching.machine import Command, Event, EventKind, Request, Stage

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitctl.outcome import Reason
    from splitctl.placement import Placement
    from splitctl.switching.effects import Effects, Options

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

    @property
    def on_trial(self) -> bool:
        """Whether the next decode is the trial of a switch."""
        return self.state.stage is Stage.TRIAL

    def run(self, request: Request, options: Options) -> SwitchOutcome:
        """Carry out a switch to its end, whichever it is.

        Args:
            request: the whole target.
            options: how.

        Returns:
            The outcome; ``confirmed`` is False until the trial.
        """
        self.effects.options = options
        self._ms, self._fallback_ms = {}, None
        started = self._clock()
        self._drive(Event(EventKind.STARTED, request=request))
        self.last = self._outcome((self._clock() - started) * 1e3)
        return self.last

    def trial_succeeded(self) -> None:
        """Confirm the switch: its first decode has succeeded; the kept carry is dropped."""
        self._drive(Event(EventKind.DONE))
        if self.last is not None and self.last.status is SwitchStatus.SWITCHED:
            self.last = dataclasses.replace(self.last, confirmed=True)

    def trial_failed(self, reason: Reason) -> SwitchOutcome:
        """Fall back from a switch whose first decode failed.

        Returns:
            The switch's outcome as it is now: fell_back, or parked.
        """
        before = self.last
        started = self._clock()
        self._drive(Event(EventKind.FAILED, reasons=(reason,)))
        spent = (self._clock() - started) * 1e3
        self._fallback_ms = spent
        self.last = self._outcome((before.total_ms if before else 0.0) + spent)
        return self.last

    def close(self) -> None:
        """Free everything; only while nothing is under way."""
        if EventKind.CLOSED in machine.TABLE[self.state.stage]:
            self._drive(Event(EventKind.CLOSED))

    def _drive(self, event: Event) -> None:
        pending: Event | None = event
        while pending is not None:
            self.state, commands = machine.step(self.state, pending)
            pending = None
            for command in commands:
                result = self._perform(command)
                if command not in machine.HOUSEKEEPING:
                    pending = result

    def _perform(self, command: Command) -> Event | None:
        stage = self.state.stage
        if command not in machine.HOUSEKEEPING:
            self.effects.options.progress(stage, 0.0)
        started = self._clock()
        result = self.effects.perform(command, self.state)
        spent = (self._clock() - started) * 1e3
        if stage in _TIMED and command not in machine.HOUSEKEEPING:
            self._ms[_TIMED[stage]] = spent
        elif command not in machine.HOUSEKEEPING and stage is not Stage.SWITCHING_NATIVELY:
            self._fallback_ms = (self._fallback_ms or 0.0) + spent
        kept = self.effects.transfer.kept
        if kept is not None:
            self._counts = (len(kept.view), kept.n_sequences, kept.n_tokens)
        return result

    def _outcome(self, total_ms: float) -> SwitchOutcome:
        state = self.state
        model = self.effects.core.engine.model
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


__all__ = ["Switcher"]
