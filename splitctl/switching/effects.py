"""Does what the machine says: one method a command, on a session's parts. The only module that imports both leaves.

Laws:
    1. ``perform`` never raises for what a switch can meet: it returns the event that it was. Defects do raise.
    2. The sealed original is untouched from SEALING until SERVE; a switch that interrupts a trial saves beside it.
    3. Commands of a fallback are shielded from the cancel flag.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

import statecodec
from llama_native import CallFailed, DeviceKind, LoadCancelled, NativeError, state_get, state_set, state_size
from splitctl.errors import Cancelled, DeadlineExceeded, SplitctlError
from splitctl.outcome import DevicePeak, Reason
from splitctl.switching.machine import Command, Event, EventKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from splitctl.arena import Arena
    from splitctl.core import Core
    from splitctl.placement import Placement
    from splitctl.switching.machine import MachineState, Stage


@dataclass(frozen=True, slots=True)
class Sealed:
    """A saved state that has been parsed, checked against the session and checksummed.

    Args:
        view: its bytes, in the arena.
        digest: xxh3-128 of them.
        positions: sequence id -> first and last position when it was saved.
        n_tokens: tokens of all sequences.
        n_sequences: sequences that hold anything.
    """

    view: memoryview
    digest: bytes
    positions: Mapping[int, tuple[int, int]]
    n_tokens: int
    n_sequences: int


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
        self.options = Options()
        self.kept: Sealed | None = None
        self.parked_at: Path | None = None
        self.peaks: tuple[DevicePeak, ...] = ()
        self._saved: tuple[memoryview, Mapping[int, tuple[int, int]]] | None = None
        self._fresh: Sealed | None = None
        self._resolved: Placement | None = None

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
            event = _METHODS[command](self, state)
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

    def _save(self, state: MachineState) -> Event:
        core = self.core
        if not core.has_memory:
            self._saved = (memoryview(b""), {})
            return _DONE
        context = core.engine.live
        positions = core.positions()
        n_bytes = state_size(context)
        # A trial that is interrupted keeps its sealed original in the one arena, so this save takes the other.
        arena = core.spare if state.suspended is not None and self.kept is not None else core.arena
        arena.reserve(n_bytes)
        view = arena.view(n_bytes)
        written = state_get(context, view)
        if written != n_bytes:
            return _failed("short-state", f"the library announced {n_bytes} bytes of state and wrote {written}")
        self._saved = (view, positions)
        return _DONE

    def _seal(self, _state: MachineState) -> Event:
        if self._saved is None:
            msg = "sealing comes after saving"
            raise AssertionError(msg)
        view, positions = self._saved
        self._saved = None
        wrong = self._contradictions(view, positions)
        if wrong:
            return _failed("state-contradicts-session", wrong)
        used = self.core.used()
        self._fresh = Sealed(
            view=view,
            digest=xxhash.xxh3_128_digest(view),
            positions=positions,
            n_tokens=sum(len(slot.tokens) for slot in used),
            n_sequences=len(used),
        )
        return _DONE

    def _contradictions(self, view: memoryview, positions: Mapping[int, tuple[int, int]]) -> str:
        """Say in what the saved bytes, the library's own positions and the session's books disagree; "" for nothing."""
        core = self.core
        if not core.has_memory:
            return ""
        placement = core.placement
        image = statecodec.parse(
            view,
            facts=statecodec.ModelFacts(
                architecture=core.facts.architecture,
                n_layer=core.facts.n_layer,
                n_seq_max=placement.n_seq_max,
            ),
        )
        wanted = {slot.seq_id: slot.n_past - 1 for slot in core.used() if slot.n_past}
        held = {seq_id: last for seq_id, (_first, last) in positions.items() if last >= 0}
        if held != wanted:
            return f"the library holds last positions {held}, the session counts {wanted}"
        if image.is_opaque:
            return ""
        saved = {seq_id: span.pos_max for seq_id, span in image.sequences().items()}
        return "" if saved == wanted else f"the saved bytes hold last positions {saved}, the session counts {wanted}"

    def _free(self, _state: MachineState) -> Event:
        self._swap_original()
        self.core.engine.free()
        return _DONE

    def _swap_original(self) -> None:
        """The switch is past the point where the trial before it counts: what was saved now is the original."""
        if self._fresh is not None:
            if self.kept is not None and self._fresh.view.obj is not self.kept.view.obj:
                self.core.arena, self.core.spare = self.core.spare, self.core.arena
            self.kept, self._fresh = self._fresh, None

    def _place(self, state: MachineState) -> Event:
        report = self.options.progress
        self.core.engine.place(_requested(state), lambda share: report(state.stage, share))
        return _DONE

    def _build(self, state: MachineState) -> Event:
        self._resolved = self.core.engine.build(_requested(state))
        return _DONE

    def _restore(self, _state: MachineState) -> Event:
        self._give(self._original())
        return _DONE

    def _give(self, sealed: Sealed) -> None:
        core = self.core
        core.encode()
        if core.has_memory:
            n = state_set(core.engine.live, sealed.view)
            if n != len(sealed.view):
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
        self.peaks = self._peaks(resolved)
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
        self._give(self._original())
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

    def _peaks(self, placement: Placement) -> tuple[DevicePeak, ...]:
        """Read what each device holds now, once; processors share the machine's memory and have no number of their own."""
        known = {device.name: device for device in self.core.engine.library.devices(memory=self._has_gpu())}
        names = placement.devices or tuple(known)
        return tuple(
            DevicePeak(
                index,
                name,
                known[name].memory_total - known[name].memory_free
                if name in known and known[name].kind is not DeviceKind.CPU and known[name].memory_total
                else None,
            )
            for index, name in enumerate(names)
        )

    def _has_gpu(self) -> bool:
        return any(d.kind is not DeviceKind.CPU for d in self.core.engine.library.devices(memory=False))

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
    {Command.CHECK, Command.SAVE, Command.SEAL, Command.FREE, Command.PLACE, Command.BUILD, Command.RESTORE, Command.PROVE}
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


_METHODS: Mapping[Command, Callable[[Effects, MachineState], Event | None]] = {
    Command.QUIESCE: Effects._quiesce,
    Command.CHECK: Effects._check,
    Command.SAVE: Effects._save,
    Command.SEAL: Effects._seal,
    Command.FREE: Effects._free,
    Command.PLACE: Effects._place,
    Command.BUILD: Effects._build,
    Command.RESTORE: Effects._restore,
    Command.NATIVE_SWITCH: Effects._native_switch,
    Command.PROVE: Effects._prove,
    Command.ENTER_TRIAL: Effects._enter_trial,
    Command.SERVE: Effects._serve,
    Command.RELEASE_FAILED: Effects._release_failed,
    Command.PLACE_OLD: Effects._place_old,
    Command.BUILD_OLD: Effects._build_old,
    Command.RESTORE_OLD: Effects._restore_old,
    Command.PROVE_OLD: Effects._prove_old,
    Command.RECOMPUTE: Effects._recompute,
    Command.PARK: Effects._park,
    Command.REPORT: Effects._report,
    Command.CLOSE: Effects._close,
}

__all__ = ["Effects", "Options", "Sealed"]
