"""Moves the state between a context and a sealed copy: out, checked, converted, in again, proved.

The only module that imports both leaves.

Laws:
    1. A sealed original is untouched from SEALING until SERVE; a save meanwhile goes beside it.
    2. Nothing reaches the library that has not been parsed and held against the session.
    3. After a restore that failed the context is thrown away.
    4. A sealed state is reported (``on_sealed``) before anything is freed.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import statecodec
from llama_native import CallFailed, NativeError, state_get, state_set, state_size
from splitctl.carry.digest import Digest, digest
from splitctl.errors import CannotConvert, CarryDamaged, Reason, Refused, SplitctlError, StateUnsound
from splitctl.switching import conversion
from splitctl.switching.sealing import SealedState, contradictions, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from splitctl.engine.live import LiveSession
    from splitctl.engine.slot import Slot
    from splitctl.placement import Placement


class _Saved(NamedTuple):
    """A state as it was copied out: its bytes, the arena that they lie in, first and last position by sequence."""

    view: memoryview
    arena: int | None
    positions: Mapping[int, tuple[int, int]]


class Transfer:
    """The state of one session on its way. Thread: the session's turn guards it."""

    def __init__(self, live: LiveSession) -> None:
        """Work on ``live``."""
        self.live = live
        self.kept: SealedState | None = None
        self.conversions: tuple[str, ...] = ()
        self.on_sealed: Callable[[SealedState, int], None] | None = None
        """Called with every sealed state that is kept, and its arena; what this raises fails the sealing."""
        self.pinned: tuple[bool | None, str] = (None, "")
        """Whether the last saved state lies in pinned memory, None where nothing would gain; and why it does not."""
        self._saved: _Saved | None = None
        self._fresh: SealedState | None = None
        self._plan: conversion.Plan | None = None
        self._converted: memoryview | None = None
        self._given: tuple[memoryview, bytes] | None = None

    def save(self, *, reads_back: bool = False) -> None:
        """Copy the state out, beside a sealed original that is still kept.

        Args:
            reads_back: whether it will be read back once it is restored: the memory for that is taken now, because
                later there is no old placement to go on in without it.

        Raises:
            StateUnsound: the library wrote another number of bytes than it announced.
            OSError: the system has no such memory.
            llama_native.CallFailed: it wrote nothing.
        """
        arenas = self.live.arenas
        self.live.keep_ahead(2 if reads_back else 1)
        self._saved = self._take()
        arena = self._saved.arena
        self.pinned = (None, "") if arena is None else arenas.both[arena].pinned
        if reads_back and arena is not None and arenas.original is None:
            arenas.both[1 - arena].reserve(len(self._saved.view))

    def seal(self, target: Placement) -> None:
        """Parse what was saved, hold it against the session, checksum it; convert a copy where the target needs it.

        Raises:
            StateUnsound: the bytes do not parse, or bytes, library and session disagree.
            CannotConvert: the target cannot hold them.
        """
        if self._saved is None:
            raise AssertionError("sealing comes after saving")
        saved, self._saved = self._saved, None
        self._fresh = self._sealed(saved)
        self._converted, self.conversions, self._plan = None, (), None
        if self.live.has_memory and _last_positions(self.live.used()):
            self._plan = conversion.plan(self.live.placement, target)
        if self._plan is not None and not self._plan.is_quantized:
            self._convert(self._fresh.view, self._plan, None)
        self.report(self._fresh)

    def _convert(self, state: memoryview, plan: conversion.Plan, shown: memoryview | None) -> None:
        try:
            self._converted, self.conversions = conversion.convert(state, plan, shown)
        except statecodec.NotRepresentable as error:
            raise CannotConvert(str(error)) from error
        if self.pinned[0]:
            self.pinned = (False, "it was converted, and what is converted lies in memory that is not pinned")

    def seal_as_it_is(self) -> SealedState:
        """Seal what was saved, for another process; returns it. The original of a trial becomes the same.

        Raises:
            StateUnsound: the bytes do not parse, or bytes, library and session disagree.
        """
        if self._saved is None:
            raise AssertionError("sealing comes after saving")
        saved, self._saved = self._saved, None
        sealed = self._sealed(saved)
        if self.kept is not None:
            sealed = dataclasses.replace(sealed, is_foreign=self._plan is not None)
            self._keep(sealed)
        self.report(sealed)
        return sealed

    def accept(self) -> None:
        """Let what was sealed now be the original: the switch is past the point where a trial before it counts."""
        if self._fresh is not None:
            self._keep(self._fresh)
            self._fresh = None

    def give_target(self) -> None:
        """Give the target's fresh context the carry, converted where it must be.

        Raises:
            llama_native.CallFailed: the library refused it.
            CannotConvert: the target cannot hold it.
        """
        sealed = self.original
        if self._plan is not None and self._plan.is_quantized:
            self._convert(sealed.view, self._plan, self._shown())
        self._give(sealed.view if self._converted is None else self._converted)

    def give_original(self) -> None:
        """Give the old placement's fresh context the sealed original.

        Raises:
            llama_native.CallFailed: the library refused it.
        """
        self._converted = None
        state = self.original.view
        if self.original.is_foreign and _last_positions(self.live.used()):
            # It was sealed again in the target's layout, so it is rewritten as the old one has it.
            state, _ = conversion.fit(state, self._shown())
            self._converted = state
        self._give(state)

    def unproved(self, *, read_back: bool) -> str:
        """Say what of the restored state is not what was given, with ``read_back`` byte for byte; "" for nothing."""
        live, sealed = self.live, self.original
        if not live.has_memory:
            return ""
        then, now, nowhere = sealed.positions, live.positions(), (-1, -1)
        both = {one: (then.get(one, nowhere), now.get(one, nowhere)) for one in then.keys() | now.keys()}
        if moved := {seq_id: pair for seq_id, pair in both.items() if pair[0] != pair[1]}:
            return f"positions (saved, restored) differ: {moved}"
        if not read_back:
            return ""
        given, wanted = sealed.view, sealed.digest
        if self._converted is not None:
            given, wanted = self._converted, digest(self._converted)
        return self._unlike(given, wanted)

    def unlike_what_was_given(self) -> str:
        """Read back what :meth:`replace` gave the library, and let go of it; says what differs, "" for nothing."""
        given, self._given = self._given, None
        return self._unlike(*given) if given is not None and self.live.has_memory else ""

    def _unlike(self, given: memoryview, wanted: bytes) -> str:
        """Say how what the library holds differs from bytes of a checksum; "" where it does not."""
        _, view = self.live.arenas.writable(len(given))
        n = state_get(self.live.engine.live_context, view)
        if n != len(given):
            return f"{len(given)} bytes were restored and {n} read back"
        return "" if digest(view) == wanted else "the restored state does not read back byte for byte"

    def enter_trial(self) -> None:
        """Keep the sealed original only."""
        self._fresh = self._saved = self._converted = None

    def drop(self) -> None:
        """Keep nothing."""
        self._keep(None)
        self._plan = None
        self.enter_trial()

    @property
    def latest(self) -> SealedState | None:
        """The sealed state that is the best there is; None where there is none."""
        return self.kept or self._fresh

    @property
    def original(self) -> SealedState:
        """The sealed original; there is one until the trial ends."""
        if self.kept is None:
            raise AssertionError("a sealed original is kept until the trial ends")
        return self.kept

    def snapshot(self) -> SealedState:
        """Save and seal outside of a switch; valid until the next save, switch or proof.

        Raises:
            StateUnsound: bytes, library and session disagree.
            Refused: a shift is not applied yet, so the keys are not where the positions are.
            llama_native.CallFailed: the library wrote nothing.
        """
        if self.live.pending_shift:
            raise Refused((Reason("pending-shift", "a shift is not applied yet; decode one token first"),))
        return self._sealed(self._take())

    def reseal(self) -> None:
        """Keep a trial's original in step with a change of the memory that no decode was part of."""
        if self.kept is not None:
            fresh = dataclasses.replace(self.snapshot(), is_foreign=self._plan is not None)
            self._keep(fresh)
            self.report(fresh)

    def state_bytes(self) -> int | None:
        """Say how many bytes a state would take now; None for a model without a memory."""
        return state_size(self.live.engine.live_context) if self.live.has_memory else None

    def report(self, sealed: SealedState) -> None:
        """Report that a state lies sealed in an arena, to where it matters beyond this process."""
        if self.on_sealed is not None and sealed.arena is not None:
            self.on_sealed(sealed, sealed.arena)
            self.live.arenas.reported = sealed.arena

    def _keep(self, sealed: SealedState | None) -> None:
        self.kept = sealed
        self.live.arenas.original = None if sealed is None else sealed.arena

    def replace(
        self, state: memoryview, slots: dict[int, Slot], *, refit: bool = False, checksum: bytes | None = None
    ) -> tuple[str, ...]:
        """Put other sequences in place of those that the session holds.

        Args:
            state: their bytes; empty: the tokens are read again.
            slots: the sequences, by id.
            refit: the bytes come from another layout and are rewritten as this context writes them.
            checksum: that of the bytes; :meth:`unlike_what_was_given` comes next. None: it does not.

        Returns:
            One phrase a change that the bytes needed.

        Raises:
            CarryDamaged: the bytes do not parse, or hold something other than the sequences; the session is as it was.
            CannotConvert: this context cannot hold them; the session is as it was.
            Refused: the library would not take them; the session is as it was.
        """
        live = self.live
        wanted = _last_positions(slots.values())
        if not wanted:
            state = memoryview(b"")
        if live.has_memory and state and not refit:
            self._hold_against(state, wanted)
        before, old = self.snapshot(), live.slots
        live.slots = slots
        changes: tuple[str, ...] = ()
        try:
            live.engine.live_context.clear()
            if state:
                if refit and live.has_memory:
                    state, changes = conversion.fit(state, self._shown())
                    self._hold_against(state, wanted)
                self._give(state)
                if checksum is not None:
                    self._given = (state, digest(state) if refit else checksum)
            else:
                live.replay_tokens()
            self._check_positions(wanted)
        except BaseException as error:
            live.slots = old
            # A restore that failed can leave a context half written: it is thrown away. A signal's handler that raises
            # meanwhile has its turn when the session is whole again.
            with live.engine.library.holding():
                live.engine.rebuild(live.placement)
                self._give(before.view)
            if not isinstance(error, (NativeError, SplitctlError, statecodec.StateCodecError)):
                raise
            raise _refusal(error) from error
        for slot in old.values():
            slot.clear()
        self.reseal()
        return changes

    def _check_positions(self, wanted: Mapping[int, int]) -> None:
        """Refuse a restore after which the library holds something else; some builds say that it went well."""
        if self.live.has_memory and (held := _held(self.live.positions())) != wanted:
            raise StateUnsound(f"after the restore the library holds last positions {held}, wanted {wanted}")

    def _hold_against(self, state: memoryview, wanted: Mapping[int, int]) -> None:
        """Refuse bytes that do not parse, or hold other last positions."""
        try:
            wrong = contradictions(self.live, state, wanted)[0]
        except statecodec.StateFormatError as error:
            raise CarryDamaged(None, str(error)) from error
        if wrong:
            raise CarryDamaged(None, wrong)

    def _take(self) -> _Saved:
        """Copy the state out, beside a sealed original that is still kept."""
        live = self.live
        if not live.has_memory:
            return _Saved(memoryview(b""), None, {})
        context = live.engine.live_context
        positions = live.positions()
        n_bytes = state_size(context)
        arena, view = live.arenas.writable(n_bytes)
        written = state_get(context, view)
        if written != n_bytes:
            raise StateUnsound(f"the library announced {n_bytes} bytes of state and wrote {written}")
        return _Saved(view, arena, positions)

    def _sealed(self, saved: _Saved) -> SealedState:
        """Parse the bytes, check them against the session and checksum them meanwhile."""
        live = self.live
        used = live.used()
        checksum = Digest(saved.view)
        try:
            version = self._agreed(saved.view, saved.positions) if live.has_memory else 0
        finally:
            found = checksum.result()
        return SealedState(
            view=saved.view,
            arena=saved.arena,
            digest=found,
            positions=saved.positions,
            n_tokens=sum(len(slot.tokens) for slot in used),
            n_sequences=len(used),
            version=version,
        )

    def _agreed(self, view: memoryview, positions: Mapping[int, tuple[int, int]]) -> int:
        """Refuse a state on which bytes, library and session disagree; returns the version that it is."""
        live = self.live
        held, wanted = _held(positions), _last_positions(live.used())
        if held != wanted:
            raise StateUnsound(f"the library holds last positions {held}, the session counts {wanted}")
        try:
            wrong, version = contradictions(live, view, wanted)
        except statecodec.StateFormatError as error:
            raise StateUnsound(f"the saved state does not parse: {error}") from error
        if wrong:
            raise StateUnsound(wrong)
        return version

    def learn(self) -> None:
        """Read the state of what the memory holds now, a token or two: the next one is read without a search for how.

        Raises:
            llama_native.CallFailed: the library wrote nothing.
        """
        context = self.live.engine.live_context
        buffer = bytearray(state_size(context))
        n_bytes = state_get(context, buffer)
        with suppress(statecodec.StateFormatError):  # whoever needs it says so
            read(self.live, memoryview(buffer)[:n_bytes])

    def _shown(self) -> memoryview:
        """Let the target write a state of its own: one token into its empty memory, which is cleared again."""
        live = self.live
        slot = next(slot for slot in live.used() if slot.n_past)
        context = live.engine.live_context
        context.decode(slot.tokens[:1], [0], [slot.seq_id], [True])
        buffer = bytearray(state_size(context))
        shown = memoryview(buffer)[: state_get(context, buffer)]
        context.clear()
        return shown

    def _give(self, state: memoryview) -> None:
        live = self.live
        live.encode()
        if live.has_memory:
            n = state_set(live.engine.live_context, state)
            if n != len(state):
                raise CallFailed("llama_state_set_data", n, live.engine.library.log.tail(4))


def _last_positions(slots: Iterable[Slot]) -> dict[int, int]:
    """Return the last position of every sequence that the memory is to hold, by id."""
    return {slot.seq_id: slot.n_past - 1 for slot in slots if slot.n_past}


def _held(positions: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    """Return the last position of every sequence that the library holds, by id."""
    return {seq_id: last for seq_id, (_first, last) in positions.items() if last >= 0}


def _refusal(error: Exception) -> SplitctlError:
    """Say why other sequences could not be put in place."""
    if isinstance(error, SplitctlError):
        return error
    if isinstance(error, statecodec.StateFormatError):
        return CarryDamaged(None, str(error))
    if isinstance(error, statecodec.NotRepresentable):
        return CannotConvert(str(error))
    return Refused((Reason("restore-refused", str(error)),))
