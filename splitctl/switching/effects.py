"""Does what the machine says: one method a command, named after it, on a session's parts.

A method returns the event that it ended with; None where the command was done.

Laws:
    1. ``perform`` never raises for what a switch can meet: it returns the event that it was. Defects do raise.
    2. Commands of a fallback are shielded from the cancel flag.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llama_native import CallFailed, DeviceKind, LoadCancelled, NativeError
from splitctl.engine.weights import Chosen
from splitctl.errors import Cancelled, CannotConvert, FileChanged, Parked, Reason, SplitctlError, StateUnsound
from splitctl.last_words import telling_line
from splitctl.outcome import DevicePeak, Proof, Stage, SwitchOptions, Via, WeightsTier
from splitctl.switching.machine import HOUSEKEEPING, Command, EventKind, SwitchEvent
from splitctl.switching.sealing import SealedState
from splitctl.switching.transfer import Transfer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from llama_native import Library
    from splitctl.engine.live import LiveSession
    from splitctl.placement import Placement
    from splitctl.switching.checking import Checked
    from splitctl.switching.machine import MachineState


ON_HOST = "the old placement came back on the host alone"
"""What the library's own call says where the devices had no memory left for the placement that it goes back to."""

MEETS = (NativeError, SplitctlError, MemoryError, OSError, ValueError)
"""What a switch can meet; anything else is a defect and is raised."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a switch.

    Args:
        options: how it is to be done.
        checked_at: when a check that came before the switch began and ended, seconds of the switcher's clock.
        check: judges the target once more before anything is touched; returns the reasons to refuse it.
        found: what the check before the token boundary found; None where there was none.
        progress: told the stage and the share done, 0.0 to 1.0.
    """

    options: SwitchOptions = field(default_factory=SwitchOptions)
    checked_at: tuple[float, float] | None = None
    check: Callable[[], tuple[Reason, ...]] = tuple
    found: Callable[[], Checked | None] = lambda: None
    progress: Callable[[Stage, float], None] = lambda _stage, _share: None


class Effects:
    """Carries out commands on a session's parts. Thread: the session's turn guards it."""

    def __init__(self, live: LiveSession, park: Callable[[SealedState | None], Path]) -> None:
        """Work on ``live``; ``park`` writes a carry (or at least the tokens) to disk and returns where."""
        self.live = live
        self._park_to = park
        self.run = Run()
        self.transfer = Transfer(live)
        self.parked_at: Path | None = None
        self.peaks: tuple[DevicePeak, ...] = ()
        self._resolved: Placement | None = None

    def perform(self, command: Command, state: MachineState) -> SwitchEvent | None:
        """Carry out one command of the machine in ``state``; returns how it ended, None for housekeeping."""
        live = self.live
        live.cancel.shielded = command in _SHIELDED
        try:
            done = None if command in HOUSEKEEPING else _DONE
            event = getattr(self, f"_{command.name.lower()}")(state) or done
        except (LoadCancelled, Cancelled):
            return SwitchEvent(EventKind.CANCELLED)
        except CallFailed as error:
            if self._is_cancelled():
                return SwitchEvent(EventKind.CANCELLED)
            return _failed("call-failed", str(error))
        except CannotConvert as error:
            return _failed("cannot-convert", str(error))
        except StateUnsound as error:
            return _failed("state-unsound", str(error))
        except FileChanged as error:
            return _failed("file-changed", str(error))
        except MEETS as error:
            return _failed("failed", str(error) or type(error).__name__)
        finally:
            live.cancel.shielded = False
        ended = event is not None and event.kind in {EventKind.DONE, EventKind.REFUSED}
        if ended and command in _CANCELLABLE and self._is_cancelled():
            return SwitchEvent(EventKind.CANCELLED)
        return event

    def _is_cancelled(self) -> bool:
        """Whether the cancel flag is set, or a callback or a signal's handler has raised: that comes at the end."""
        cancel = self.live.cancel
        return cancel.is_set() or (not cancel.shielded and self.live.engine.library.is_interrupted)

    def _check(self, state: MachineState) -> SwitchEvent | None:
        if not self.live.placement.differs(_requested(state)):
            return SwitchEvent(EventKind.UNCHANGED)
        reasons = self.run.check()
        return SwitchEvent(EventKind.REFUSED, reasons=reasons) if reasons else None

    def _save(self, _state: MachineState) -> None:
        self.transfer.save(reads_back=self.run.options.proof is Proof.BYTES)

    def _seal(self, state: MachineState) -> None:
        self.transfer.seal(_requested(state))
        # The last moment at which a file that changed since the check costs nothing.
        self.live.engine.confirm_files()

    def _free(self, state: MachineState) -> None:
        self.transfer.accept()
        self.live.engine.leave(_requested(state), keep=self.weights.tier is WeightsTier.RESIDENT)

    def _place(self, state: MachineState) -> None:
        report = self.run.progress
        self.live.engine.place(_requested(state), lambda share: report(state.stage, share), tier=self.weights.tier)

    def _build(self, state: MachineState) -> None:
        self._resolved = self.live.engine.build(_requested(state))

    def _restore(self, _state: MachineState) -> None:
        self.transfer.give_target()

    def _native_switch(self, state: MachineState) -> SwitchEvent | None:
        target, engine = _requested(state), self.live.engine
        if engine.is_stale and engine.own_call_reads is WeightsTier.FILE:
            return _declined("the model's file is not what it was, and the library's own call reads it")
        self.transfer.accept()
        mode = {"none": 0, "layer": 1, "row": 2, "tensor": 3}[target.mode.value]
        if not engine.live_context.native_switch(mode, target.tensor_split):
            lines = engine.library.log.said(200)
            said = telling_line(lines) or "it does not say why"
            if any(ON_HOST in line for line in lines):
                said += f"; {ON_HOST}, where it is slow: switch when the devices have memory again"
            # It says that nothing has changed, and that is looked at like a restored state.
            if wrong := self._unproved():
                text = f"the library's own call failed ({said}) and did not leave things as they were: {wrong}"
                return _failed("native-broke", text)
            return _declined(f"the library could not go to {target.mode.value} mode by its own call: {said}")
        engine.moved(target)
        engine.confirm_files()
        if engine.is_stale and engine.came_from is WeightsTier.FILE:
            return _failed("file-changed", "the model's file changed during the library's own call")
        self._resolved = target
        return None

    def _prove(self, _state: MachineState) -> SwitchEvent:
        if wrong := self._unproved():
            return _failed("proof-failed", wrong)
        resolved, found = self._resolved or self.live.placement, self.run.found()
        self.live.serve_in(resolved)
        self.peaks = _device_peaks(self.live.engine.library, resolved, has_asked=found is not None and found.has_asked)
        return SwitchEvent(EventKind.DONE, placement=resolved)

    def _unproved(self) -> str:
        proof = self.run.options.proof
        return "" if proof is Proof.OFF else self.transfer.unproved(read_back=proof is Proof.BYTES)

    def _enter_trial(self, _state: MachineState) -> None:
        self.transfer.enter_trial()

    def _serve(self, state: MachineState) -> None:
        self.transfer.drop()
        if state.effective is not None:
            self.live.serve_in(state.effective)

    def _release_failed(self, _state: MachineState) -> None:
        self.live.engine.free_failed()

    def _place_old(self, state: MachineState) -> None:
        self.live.engine.place(_original_of(state), cancellable=False, tier=self.weights.back)

    def _build_old(self, state: MachineState) -> None:
        self.live.engine.build(_original_of(state))

    def _restore_old(self, _state: MachineState) -> None:
        self.transfer.give_original()

    def _prove_old(self, state: MachineState) -> SwitchEvent | None:
        if wrong := self._unproved():
            return _failed("proof-failed", wrong)
        self.live.serve_in(_original_of(state))
        return None

    def _recompute(self, state: MachineState) -> None:
        live = self.live
        live.engine.free()
        original = _original_of(state)
        live.engine.place(original, cancellable=False, tier=self.weights.back)
        live.engine.build(original)
        live.replay_tokens()
        live.serve_in(original)

    def _park(self, _state: MachineState) -> None:
        self.live.engine.free()
        self.parked_at = self._park_to(self.transfer.latest)

    @property
    def weights_reason(self) -> str:
        """Why the weights did not come from where they were wanted from, or why auto took them from there."""
        return self.live.engine.why or self.weights.reason

    @property
    def via(self) -> Via:
        """Who is to do the work."""
        found = self.run.found()
        return (None if found is None else found.via) or Via.COMPOSED

    @property
    def via_reason(self) -> str:
        """Why it is not the library's own call, where that could have been."""
        found = self.run.found()
        return "" if found is None else found.via_reason

    @property
    def weights(self) -> Chosen:
        """Where the weights are to come from."""
        found = self.run.found()
        return Chosen() if found is None else found.weights

    def gone(self, state: MachineState) -> Parked:
        """Give the error of a session that serves no more."""
        why = "" if state.stage is Stage.CLOSED else "; ".join(reason.text for reason in state.reasons)
        return Parked(self.parked_at, why)

    def _report(self, _state: MachineState) -> None:
        return None

    def _close(self, _state: MachineState) -> None:
        self.live.engine.free()
        self.transfer.drop()


_DONE = SwitchEvent(EventKind.DONE)
_SHIELDED = frozenset(
    {
        Command.RELEASE_FAILED,
        Command.PLACE_OLD,
        Command.BUILD_OLD,
        Command.RESTORE_OLD,
        Command.PROVE_OLD,
        Command.RECOMPUTE,
        Command.PARK,
    }
)
_CANCELLABLE = frozenset(Command) - HOUSEKEEPING - _SHIELDED - {Command.NATIVE_SWITCH}


def _device_peaks(library: Library, placement: Placement, *, has_asked: bool) -> tuple[DevicePeak, ...]:
    """Read the memory in use on every device of a placement (one that names none uses all of the library's).

    Read once in a switch, and not between free and place (law 5 of the switch): the question is slow on some builds, so
    there are no numbers where the check has asked. A processor has no memory of its own, and no number.
    """
    kinds = {device.name: device.kind for device in library.devices(memory=False)}
    names = placement.devices or tuple(kinds)
    is_asked = not has_asked and any(kinds.get(name) is not DeviceKind.CPU for name in names)
    held = {
        device.name: device.memory_total - device.memory_free
        for device in (library.devices() if is_asked else ())
        if device.kind is not DeviceKind.CPU and device.memory_total
    }
    return tuple(DevicePeak(index, name, held.get(name)) for index, name in enumerate(names))


def _failed(code: str, text: str) -> SwitchEvent:
    return SwitchEvent(EventKind.FAILED, reasons=(Reason(code, text),))


def _declined(text: str) -> SwitchEvent:
    return SwitchEvent(EventKind.DECLINED, reasons=(Reason("native-declined", text),))


def _requested(state: MachineState) -> Placement:
    if state.requested is None:
        raise AssertionError("a switch has a requested placement")
    return state.requested


def _original_of(state: MachineState) -> Placement:
    if state.original is None:
        raise AssertionError("a switch has an original placement")
    return state.original
