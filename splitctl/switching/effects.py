"""Does what the machine says: one method a command, on a session's parts.

Laws:
    1. ``perform`` never raises for what a switch can meet: it returns the event that it was. Defects do raise.
    2. Commands of a fallback are shielded from the cancel flag.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llama_native import CallFailed, LoadCancelled, NativeError
from splitctl.errors import Cancelled, CannotConvert, Parked, Reason, SplitctlError, StateUnsound
from splitctl.outcome import DevicePeak, Proof, Stage, SwitchOptions
from splitctl.switching.machine import Command, EventKind, SwitchEvent
from splitctl.switching.peaks import device_peaks
from splitctl.switching.sealing import SealedState
from splitctl.switching.transfer import Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from splitctl.engine.live import LiveSession
    from splitctl.placement import Placement
    from splitctl.switching.machine import MachineState


MEETS = (NativeError, SplitctlError, MemoryError, OSError, ValueError)
"""What a switch can meet; anything else is a defect and is raised."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a switch.

    Args:
        options: how it is to be done.
        checked_at: when a check that came before the switch began and ended, seconds of the switcher's clock.
        check: judges the target once more before anything is touched; returns the reasons to refuse it.
        progress: told the stage and the share done, 0.0 to 1.0.
    """

    options: SwitchOptions = field(default_factory=SwitchOptions)
    checked_at: tuple[float, float] | None = None
    check: Callable[[], tuple[Reason, ...]] = tuple
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
        self._methods: Mapping[Command, Callable[[MachineState], SwitchEvent | None]] = {
            Command.CHECK: self._check,
            Command.SAVE: self._save,
            Command.SEAL: self._seal,
            Command.FREE: self._free,
            Command.PLACE: self._place,
            Command.BUILD: self._build,
            Command.RESTORE: self._restore,
            Command.NATIVE_SWITCH: self._native_switch,
            Command.PROVE: self._prove,
            Command.ENTER_TRIAL: self._enter_trial,
            Command.SERVE: self._serve,
            Command.RELEASE_FAILED: self._release_failed,
            Command.PLACE_OLD: self._place_old,
            Command.BUILD_OLD: self._build_old,
            Command.RESTORE_OLD: self._restore_old,
            Command.PROVE_OLD: self._prove_old,
            Command.RECOMPUTE: self._recompute,
            Command.PARK: self._park,
            Command.REPORT: self._report,
            Command.CLOSE: self._close,
        }

    def perform(self, command: Command, state: MachineState) -> SwitchEvent | None:
        """Carry out one command.

        Args:
            command: what to do.
            state: where the machine is now that it says so.

        Returns:
            How it ended; None for housekeeping.
        """
        live = self.live
        live.cancel.shielded = command in _SHIELDED
        try:
            event = self._methods[command](state)
        except (LoadCancelled, Cancelled):
            return SwitchEvent(EventKind.CANCELLED)
        except CallFailed as error:
            if live.cancel.is_set():
                return SwitchEvent(EventKind.CANCELLED)
            return _failed("call-failed", str(error))
        except CannotConvert as error:
            return _failed("cannot-convert", str(error))
        except StateUnsound as error:
            return _failed("state-unsound", str(error))
        except MEETS as error:
            return _failed("failed", str(error) or type(error).__name__)
        finally:
            live.cancel.shielded = False
        ended = event is not None and event.kind in {EventKind.DONE, EventKind.REFUSED}
        if ended and live.cancel.is_set() and command in _CANCELLABLE:
            return SwitchEvent(EventKind.CANCELLED)
        return event

    def _check(self, state: MachineState) -> SwitchEvent:
        if not self.live.placement.differs(_requested(state)):
            return SwitchEvent(EventKind.UNCHANGED)
        reasons = self.run.check()
        return SwitchEvent(EventKind.REFUSED, reasons=reasons) if reasons else _DONE

    def _save(self, _state: MachineState) -> SwitchEvent:
        self.transfer.save()
        return _DONE

    def _seal(self, state: MachineState) -> SwitchEvent:
        self.transfer.seal(_requested(state))
        return _DONE

    def _free(self, _state: MachineState) -> SwitchEvent:
        self.transfer.accept()
        self.live.engine.free()
        return _DONE

    def _place(self, state: MachineState) -> SwitchEvent:
        report = self.run.progress
        self.live.engine.place(_requested(state), lambda share: report(state.stage, share))
        return _DONE

    def _build(self, state: MachineState) -> SwitchEvent:
        self._resolved = self.live.engine.build(_requested(state))
        return _DONE

    def _restore(self, _state: MachineState) -> SwitchEvent:
        self.transfer.give_target()
        return _DONE

    def _native_switch(self, state: MachineState) -> SwitchEvent:
        target = _requested(state)
        self.transfer.accept()
        mode = {"none": 0, "layer": 1, "row": 2, "tensor": 3}[target.mode.value]
        if not self.live.engine.live_context.native_switch(mode, target.tensor_split):
            tail = " | ".join(self.live.engine.library.log.tail(3))
            return SwitchEvent(
                EventKind.DECLINED,
                reasons=(Reason("native-declined", f"the library could not place {target.mode.value}: {tail}"),),
            )
        self._resolved = target
        return _DONE

    def _prove(self, _state: MachineState) -> SwitchEvent:
        wrong = self._unproved()
        return _failed("proof-failed", wrong) if wrong else self._placed()

    def _unproved(self) -> str:
        proof = self.run.options.proof
        return "" if proof is Proof.OFF else self.transfer.unproved(read_back=proof is Proof.BYTES)

    def _placed(self) -> SwitchEvent:
        resolved = self._resolved or self.live.placement
        self.live.serve_in(resolved)
        self.peaks = device_peaks(self.live.engine.library, resolved)
        return SwitchEvent(EventKind.DONE, placement=resolved)

    def _enter_trial(self, _state: MachineState) -> None:
        self.transfer.enter_trial()

    def _serve(self, state: MachineState) -> None:
        self.transfer.drop()
        if state.effective is not None:
            self.live.serve_in(state.effective)

    def _release_failed(self, _state: MachineState) -> SwitchEvent:
        self.live.engine.free()
        return _DONE

    def _place_old(self, state: MachineState) -> SwitchEvent:
        self.live.engine.place(_original_of(state), cancellable=False)
        return _DONE

    def _build_old(self, state: MachineState) -> SwitchEvent:
        self.live.engine.build(_original_of(state))
        return _DONE

    def _restore_old(self, _state: MachineState) -> SwitchEvent:
        self.transfer.give_original()
        return _DONE

    def _prove_old(self, state: MachineState) -> SwitchEvent:
        wrong = self._unproved()
        if wrong:
            return _failed("proof-failed", wrong)
        self.live.serve_in(_original_of(state))
        return _DONE

    def _recompute(self, state: MachineState) -> SwitchEvent:
        live = self.live
        live.engine.free()
        original = _original_of(state)
        live.engine.place(original, cancellable=False)
        live.engine.build(original)
        live.replay_tokens()
        live.serve_in(original)
        return _DONE

    def _park(self, _state: MachineState) -> SwitchEvent:
        self.live.engine.free()
        self.parked_at = self._park_to(self.transfer.latest)
        return _DONE

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
_CANCELLABLE = frozenset(
    {
        Command.CHECK,
        Command.SAVE,
        Command.SEAL,
        Command.FREE,
        Command.PLACE,
        Command.BUILD,
        Command.RESTORE,
        Command.PROVE,
    }
)
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


def _failed(code: str, text: str) -> SwitchEvent:
    return SwitchEvent(EventKind.FAILED, reasons=(Reason(code, text),))


def _requested(state: MachineState) -> Placement:
    if state.requested is None:
        msg = "a switch has a requested placement"
        raise AssertionError(msg)
    return state.requested


def _original_of(state: MachineState) -> Placement:
    if state.original is None:
        msg = "a switch has an original placement"
        raise AssertionError(msg)
    return state.original
