"""Does what the machine says: one method a command, on a session's parts. The only module that imports both leaves.

Laws:
    1. ``perform`` never raises for what a switch can meet: it returns the event that it was. Defects do raise.
    2. The sealed original is untouched from SEALING until SERVE; a switch that interrupts a trial saves beside it.
    3. Commands of a fallback are shielded from the cancel flag.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

import statecodec
from llama_native import CallFailed, LoadCancelled, NativeError, state_get, state_set, state_size
from splitctl.errors import Cancelled, CarryDamaged, DeadlineExceeded, Refused, SplitctlError
from splitctl.outcome import DevicePeak, Reason
from splitctl.switching.machine import Command, Event, EventKind
from splitctl.switching.peaks import device_peaks
from splitctl.switching.sealing import Sealed, contradictions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from splitctl.arena import Arena
    from splitctl.core import Core
    from splitctl.placement import Placement
    from splitctl.slot import Slot
    from splitctl.switching.machine import MachineState, Stage


@dataclass(frozen=True, slots=True)
class Options:
    """How one switch is to be done.

    Args:
        read_back: prove by reading the restored state back; False proves positions only.
        prove: prove at all.
        timeout_s: how long to wait for the token boundary, seconds; None: as long as it takes.
        check: judges the target before anything is touched; returns the reasons to refuse it.
        progress: told the stage and the share done, 0.0 to 1.0.
    """

    read_back: bool = True
    prove: bool = True
    timeout_s: float | None = None
    check: Callable[[Placement], tuple[Reason, ...]] = lambda _: ()
    progress: Callable[[Stage, float], None] = lambda _stage, _share: None


class Effects:
    """Carries out commands on a session's parts. Thread: the session's turn guards it."""

    def __init__(self, core: Core, park: Callable[[Sealed | None], Path]) -> None:
        """Work on ``core``; ``park`` writes a carry (or at least the tokens) to disk and returns where."""
        self.core = core
        self._park_to = park
        self.options = Options()
        self._park_to = park
        self.kept: Sealed | None = None
        self.parked_at: Path | None = None
        self.peaks: tuple[DevicePeak, ...] = ()
        self._saved: tuple[memoryview, Mapping[int, tuple[int, int]]] | None = None
        self._fresh: Sealed | None = None
        self._resolved: Placement | None = None
        self._methods: Mapping[Command, Callable[[MachineState], Event | None]] = {
            Command.QUIESCE: self._quiesce,
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

    def perform(self, command: Command, state: MachineState) -> Event | None:
        """Carry out one command.

        Args:
            command: what to do.
            state: where the machine is now that it says so.

        Returns:
            How it ended; None for housekeeping.
        """
        core = self.core
        core.cancel.shielded = command in _SHIELDED
        try:
            event = self._methods[command](state)
        except (LoadCancelled, Cancelled):
            return Event(EventKind.CANCELLED)
        except CallFailed as error:
            if core.cancel.is_set():
                return Event(EventKind.CANCELLED)
            return _failed("call-failed", str(error))
        except statecodec.StateFormatError as error:
            return _failed("state-damaged", f"the saved state does not parse: {error}")
        except DeadlineExceeded as error:
            return Event(EventKind.TIMED_OUT, reasons=(Reason("busy", str(error)),))
        except (NativeError, SplitctlError, MemoryError, OSError, ValueError) as error:
            return _failed("failed", str(error) or type(error).__name__)
        finally:
            core.cancel.shielded = False
        if event is not None and core.cancel.is_set() and command in _CANCELLABLE and event.kind is EventKind.DONE:
            return Event(EventKind.CANCELLED)
        return event

    def _quiesce(self, _state: MachineState) -> Event:
        self.core.turn.enter_switch(self.options.timeout_s)
        return _DONE

    def _check(self, state: MachineState) -> Event:
        target = _requested(state)
        if not self.core.placement.differs(target):
            return Event(EventKind.UNCHANGED)
        reasons = self.options.check(target)
        return Event(EventKind.REFUSED, reasons=reasons) if reasons else _DONE

    def _save(self, _state: MachineState) -> Event:
        saved = self._take()
        if isinstance(saved, str):
            return _failed("short-state", saved)
        self._saved = saved
        return _DONE

    def _take(self) -> tuple[memoryview, Mapping[int, tuple[int, int]]] | str:
        """Copy the state out, beside a sealed original that is still kept; a text says what went wrong."""
        core = self.core
        if not core.has_memory:
            return memoryview(b""), {}
        context = core.engine.live
        positions = core.positions()
        n_bytes = state_size(context)
        arena = core.arena if self.kept is None else self._other_arena(self.kept)
        arena.reserve(n_bytes)
        view = arena.view(n_bytes)
        written = state_get(context, view)
        if written != n_bytes:
            return f"the library announced {n_bytes} bytes of state and wrote {written}"
        return view, positions

    def _seal(self, _state: MachineState) -> Event:
        if self._saved is None:
            msg = "sealing comes after saving"
            raise AssertionError(msg)
        view, positions = self._saved
        self._saved = None
        sealed = self._sealed(view, positions)
        if isinstance(sealed, str):
            return _failed("state-contradicts-session", sealed)
        self._fresh = sealed
        return _DONE

    def _sealed(self, view: memoryview, positions: Mapping[int, tuple[int, int]]) -> Sealed | str:
        """Parse the bytes, hold them against the session's books and checksum them; a text says what is wrong."""
        core = self.core
        version = 0
        used = core.used()
        if core.has_memory:
            held = {seq_id: last for seq_id, (_first, last) in positions.items() if last >= 0}
            wanted = {slot.seq_id: slot.n_past - 1 for slot in used if slot.n_past}
            if held != wanted:
                return f"the library holds last positions {held}, the session counts {wanted}"
            wrong, version = contradictions(core, view, wanted)
            if wrong:
                return wrong
        return Sealed(
            view=view,
            digest=xxhash.xxh3_128_digest(view),
            positions=positions,
            n_tokens=sum(len(slot.tokens) for slot in used),
            n_sequences=len(used),
            version=version,
        )

    def snapshot(self) -> Sealed:
        """Save and seal outside of a switch; valid until the next save, switch or proof.

        Raises:
            CarryDamaged: the bytes and the session's books disagree.
            llama_native.CallFailed: the library wrote nothing.
        """
        taken = self._take()
        sealed = taken if isinstance(taken, str) else self._sealed(*taken)
        if isinstance(sealed, str):
            raise CarryDamaged(None, sealed)
        return sealed

    def reseal(self) -> None:
        """Keep a trial's original in step with a change of the memory that no decode was part of."""
        if self.kept is not None:
            self.kept = self.snapshot()

    def replace(self, state: memoryview, slots: dict[int, Slot]) -> None:
        """Put other sequences in place of those that the session holds.

        Args:
            state: their bytes; empty: the tokens are read again.
            slots: the sequences, by id.

        Raises:
            CarryDamaged: the bytes do not parse, or hold something other than the sequences; nothing was touched.
            Refused: the library would not take them; the session is as it was.
        """
        core = self.core
        wanted = {slot.seq_id: slot.n_past - 1 for slot in slots.values() if slot.n_past}
        try:
            wrong = contradictions(core, state, wanted)[0] if core.has_memory and len(state) else ""
        except statecodec.StateFormatError as error:
            raise CarryDamaged(None, str(error)) from error
        if wrong:
            raise CarryDamaged(None, wrong)
        before, old = self.snapshot(), core.slots
        core.slots = slots
        try:
            core.engine.live.clear()
            if len(state):
                self._give(state)
            else:
                core.replay_tokens()
        except NativeError as error:
            core.slots = old
            # A restore that failed can leave a context half written: it is thrown away.
            core.engine.rebuild(core.placement)
            self._give(before.view)
            raise Refused((Reason("restore-refused", str(error)),)) from error
        for slot in old.values():
            slot.clear()
        self.reseal()

    def _free(self, _state: MachineState) -> Event:
        self._swap_original()
        self.core.engine.free()
        return _DONE

    def _swap_original(self) -> None:
        """The switch is past the point where the trial before it counts: what was saved now is the original."""
        if self._fresh is not None:
            self.kept, self._fresh = self._fresh, None

    def _place(self, state: MachineState) -> Event:
        report = self.options.progress
        self.core.engine.place(_requested(state), lambda share: report(state.stage, share))
        return _DONE

    def _build(self, state: MachineState) -> Event:
        self._resolved = self.core.engine.build(_requested(state))
        return _DONE

    def _restore(self, _state: MachineState) -> Event:
        self._give(self._original().view)
        return _DONE

    def _give(self, state: memoryview) -> None:
        core = self.core
        core.encode()
        if core.has_memory:
            n = state_set(core.engine.live, state)
            if n != len(state):
                raise CallFailed("llama_state_set_data", n, core.engine.library.log.tail(4))

    def _native_switch(self, state: MachineState) -> Event:
        target = _requested(state)
        self._swap_original()
        mode = {"none": 0, "layer": 1, "row": 2, "tensor": 3}[target.mode.value]
        if not self.core.engine.live.native_switch(mode, target.tensor_split):
            tail = " | ".join(self.core.engine.library.log.tail(3))
            return Event(
                EventKind.DECLINED,
                reasons=(Reason("native-declined", f"the library could not place {target.mode.value}: {tail}"),),
            )
        self._resolved = target
        return _DONE

    def _prove(self, _state: MachineState) -> Event:
        wrong = self._unproved(self._original())
        return _failed("proof-failed", wrong) if wrong else self._placed()

    def _placed(self) -> Event:
        resolved = self._resolved or self.core.placement
        self.core.placement = resolved
        self.peaks = device_peaks(self.core.engine.library, resolved)
        return Event(EventKind.DONE, placement=resolved)

    def _unproved(self, sealed: Sealed) -> str:
        """Say what of the restored state is not what was sealed; "" for nothing."""
        core = self.core
        if not self.options.prove or not core.has_memory:
            return ""
        now = core.positions()
        moved = {
            seq_id: (sealed.positions.get(seq_id, (-1, -1)), now.get(seq_id, (-1, -1)))
            for seq_id in sealed.positions.keys() | now.keys()
            if sealed.positions.get(seq_id, (-1, -1)) != now.get(seq_id, (-1, -1))
        }
        if moved:
            return f"positions (saved, restored) differ: {moved}"
        if not self.options.read_back:
            return ""
        n_bytes = len(sealed.view)
        arena = self._other_arena(sealed)
        arena.reserve(n_bytes)
        view = arena.view(n_bytes)
        n = state_get(core.engine.live, view)
        if n != n_bytes:
            return f"{n_bytes} bytes were restored and {n} read back"
        if xxhash.xxh3_128_digest(view) != sealed.digest:
            return "the restored state does not read back byte for byte"
        return ""

    def _other_arena(self, sealed: Sealed) -> Arena:
        core = self.core
        return core.spare if core.arena.holds(sealed.view) else core.arena

    def _enter_trial(self, _state: MachineState) -> None:
        self._fresh = self._saved = None

    def _serve(self, state: MachineState) -> None:
        self.kept = self._fresh = self._saved = None
        if state.effective is not None:
            self.core.placement = state.effective

    def _release_failed(self, _state: MachineState) -> Event:
        self.core.engine.free()
        return _DONE

    def _place_old(self, state: MachineState) -> Event:
        self.core.engine.place(_original_of(state), cancellable=False)
        return _DONE

    def _build_old(self, state: MachineState) -> Event:
        self.core.engine.build(_original_of(state))
        return _DONE

    def _restore_old(self, _state: MachineState) -> Event:
        self._give(self._original().view)
        return _DONE

    def _prove_old(self, state: MachineState) -> Event:
        wrong = self._unproved(self._original())
        if wrong:
            return _failed("proof-failed", wrong)
        self.core.placement = _original_of(state)
        return _DONE

    def _recompute(self, state: MachineState) -> Event:
        core = self.core
        core.engine.free()
        original = _original_of(state)
        core.engine.place(original, cancellable=False)
        core.engine.build(original)
        core.replay_tokens()
        core.placement = original
        return _DONE

    def _park(self, _state: MachineState) -> Event:
        self.core.engine.free()
        self.parked_at = self._park_to(self.kept or self._fresh)
        return _DONE

    def _original(self) -> Sealed:
        if self.kept is None:
            msg = "a sealed original is kept until the trial ends"
            raise AssertionError(msg)
        return self.kept

    def _report(self, _state: MachineState) -> None:
        return None

    def _close(self, _state: MachineState) -> None:
        self.core.engine.free()
        self.kept = self._fresh = self._saved = None


_DONE = Event(EventKind.DONE)
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


def _failed(code: str, text: str) -> Event:
    return Event(EventKind.FAILED, reasons=(Reason(code, text),))


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


__all__ = ["Effects", "Options"]
