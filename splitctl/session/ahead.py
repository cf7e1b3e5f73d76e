"""Sequences on their way to another process before the others: those that nothing changes meanwhile are copied ahead.

The one that serves copies idle sequences into an arena, one between two decodes (`Outgoing`). The other one restores
and proves them meanwhile (`Incoming`). At the token boundary only what has changed since is copied.

Laws:
    1. A copy counts only as long as its sequence, its context and its arena are what they were.
    2. The state of all sequences, put together from the copies, is held against the session before it is sealed.
    3. What was copied ahead comes to the very bytes that the state in one piece comes to: elsewhere nothing is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llama_native import CallFailed, sequence_state_get, sequence_state_set, sequence_state_size, state_size
from splitctl.carry.digest import digest
from splitctl.carry.seal import Seal, Segment, paged, verify, view_of
from splitctl.errors import StateUnsound
from splitctl.switching import conversion
from splitctl.switching.sealing import Part, SealedState, agreed, part

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from splitctl.engine.live import LiveSession
    from splitctl.placement import Placement


def why_not(live: LiveSession, target: Placement) -> str:
    """Say why no sequence can go ahead to a target; "" where one can, or there is but one.

    The bytes of all sequences would not be those that a state in one piece comes to. Source: seen on build 11549.
    """
    if live.placement.n_seq_max == 1 or not live.has_memory:
        return ""
    if live.placement.kv_unified:
        return "its sequences share one cache, in which they would lie in another order (-np gives a stream to each)"
    if live.facts.is_recurrent or live.facts.is_hybrid or live.model.n_swa or live.is_encoder_decoder:
        return "its memory is recurrent or has a window: the states of its sequences are not all of it"
    if conversion.plan(live.placement, target) is not None:
        return "the state is converted as a whole"
    if not live.engine.library.has("sequence-state"):
        return "this build does not give the state of one sequence"
    return ""


class Outgoing:
    """Copies of sequences of the session that serves. Thread: the session's turn guards it."""

    def __init__(self, live: LiveSession) -> None:
        """Take an arena; what is in it is lost.

        Raises:
            OSError: the system has no such memory.
        """
        self._live = live
        self._context = live.engine.live_context
        self.arena, _ = live.arenas.writable(state_size(self._context))
        self._n_given = live.arenas.n_given[self.arena]
        self._end = 0
        self.n_ahead = 0
        """Bytes of the copies that count which were made ahead; after :meth:`complete`."""
        self._parts: dict[int, tuple[Part, int]] = {}

    @property
    def is_valid(self) -> bool:
        """Whether context and arena are what they were."""
        live = self._live
        return live.engine.context is self._context and live.arenas.n_given[self.arena] == self._n_given

    def copy_next(self, busy: Collection[int]) -> bool:
        """Copy one sequence that is idle and not copied yet; says whether there was one.

        Raises:
            StateUnsound: its bytes do not parse.
            llama_native.CallFailed: the library wrote nothing.
            OSError: there is no memory for it.
        """
        live = self._live
        if live.pending_shift or not self.is_valid:
            return False
        idle = [one for one in live.used() if one.n_past and one.seq_id not in busy and one.seq_id not in self._parts]
        if idle:
            self._copy(idle[0].seq_id)
        return bool(idle)

    def segments(self) -> tuple[Segment, ...]:
        """Say where the copies lie."""
        return tuple(one.segment() for one, _ in self._parts.values())

    def complete(self) -> bool:
        """Copy what has changed since it was copied, and what was busy; drop what is no more.

        Errors as for :meth:`copy_next`.

        Returns:
            False: none of the copies counts any more, and nothing was done.
        """
        kept = {slot.seq_id for slot in self._live.used() if slot.n_past}
        self._parts = {seq_id: one for seq_id, one in self._parts.items() if seq_id in kept and self._is_same(seq_id)}
        self.n_ahead = sum(one.n_bytes for one, _ in self._parts.values())
        for seq_id in kept - self._parts.keys() if self._parts else ():
            self._copy(seq_id)
        return bool(self._parts)

    def seal(self) -> SealedState:
        """Hold the copies of all sequences against the session, and seal them.

        Raises:
            StateUnsound: bytes, library and session disagree.
        """
        live = self._live
        used, positions = live.used(), live.positions()
        wanted = {slot.seq_id: slot.n_past - 1 for slot in used if slot.n_past}
        held = {seq_id: last for seq_id, (_first, last) in positions.items() if last >= 0}
        if held != wanted:
            raise StateUnsound(f"the library holds last positions {held}, the session counts {wanted}")
        parts = {seq_id: self._parts[seq_id][0] for seq_id in sorted(wanted)}
        return SealedState(
            view=memoryview(b""),
            arena=self.arena,
            digest=b"",
            positions=positions,
            n_tokens=sum(len(slot.tokens) for slot in used),
            n_sequences=len(used),
            version=agreed(live, parts, wanted, state_size(self._context)),
            segments=tuple(one.segment() for one in parts.values()),
        )

    def _is_same(self, seq_id: int) -> bool:
        return seq_id in self._parts and self._parts[seq_id][1] == self._context.version(seq_id)

    def _copy(self, seq_id: int) -> None:
        context, arena = self._context, self._live.arenas.both[self.arena]
        version, n_bytes = context.version(seq_id), sequence_state_size(context, seq_id)
        at, end = self._end, self._end + n_bytes
        arena.reserve(end)
        view = arena.view(end)[at:]
        written = sequence_state_get(context, view, seq_id)
        if written != n_bytes:
            raise StateUnsound(f"the library announced {n_bytes} bytes of sequence {seq_id} and wrote {written}")
        self._parts[seq_id] = part(self._live, seq_id, at, view), version
        self._end = paged(end)


class Incoming:
    """Sequences that have come ahead into an empty session. Thread: the session's turn guards it."""

    def __init__(self, live: LiveSession) -> None:
        """Hold none yet."""
        self._live = live
        self._held: dict[int, Segment] = {}

    def take(self, arena: int, segments: Sequence[Segment]) -> bool:
        """Restore and prove sequences; says whether all are here. If one is not, the memory is empty again.

        Raises:
            OSError: there is no memory for it.
        """
        live = self._live
        live.arenas.take_made()
        for one in segments:
            view = view_of(live.arenas.both[arena], one)
            # The arena is the other process's: what it holds may change until its last byte has been read.
            self._held[one.seq_id] = one
            if digest(view).hex() != one.digest or not self._is_set(one, view):
                self.drop()
                return False
        return True

    def complete(self, seal: Seal, wanted: Mapping[int, int], *, is_read_back: bool) -> list[Segment]:
        """Restore what has not come ahead, and forget what was changed or removed since; gives what was restored.

        With ``is_read_back`` :meth:`unlike` comes next, which proves the checksums too.

        Raises:
            CarryDamaged: a sequence is not what was sealed.
            StateUnsound: the library holds something else afterwards.
            llama_native.CallFailed: it refused a sequence.
        """
        live = self._live
        context, arena = live.engine.live_context, live.arenas.both[seal.arena]
        for seq_id in [seq_id for seq_id, one in self._held.items() if one not in seal.segments]:
            context.seq_rm(seq_id)
            del self._held[seq_id]
        late = [one for one in seal.segments if one.seq_id not in self._held]
        for one in late:
            view = view_of(arena, one)
            if not is_read_back:
                verify(view, one)
            self._set(one, view)
        held = {seq_id: last for seq_id, (_first, last) in live.positions().items() if last >= 0}
        if held != wanted:
            raise StateUnsound(f"after the restore the library holds last positions {held}, wanted {wanted}")
        self._held.clear()
        return late

    def drop(self) -> None:
        """Let the memory be empty again."""
        if self._held:
            self._live.engine.live_context.clear()
            self._held.clear()

    def unlike(self, segments: Sequence[Segment]) -> str:
        """Read sequences back; says what differs, "" for nothing."""
        if not segments:
            return ""
        _, view = self._live.arenas.writable(max(one.n_bytes for one in segments))
        for one in segments:
            if not self._reads_back(one, view[: one.n_bytes]):
                return f"the restored state of sequence {one.seq_id} does not read back byte for byte"
        return ""

    def _set(self, segment: Segment, view: memoryview) -> None:
        n = sequence_state_set(self._live.engine.live_context, view, segment.seq_id)
        if n != segment.n_bytes:
            said = self._live.engine.library.log.tail(4)
            raise CallFailed("llama_state_seq_set_data", n, said)

    def _is_set(self, segment: Segment, view: memoryview) -> bool:
        try:
            self._set(segment, view)
            return self._reads_back(segment, memoryview(bytearray(segment.n_bytes)))
        except CallFailed:
            return False

    def _reads_back(self, segment: Segment, view: memoryview) -> bool:
        context = self._live.engine.live_context
        if sequence_state_size(context, segment.seq_id) != segment.n_bytes:
            return False
        n = sequence_state_get(context, view, segment.seq_id)
        return n == segment.n_bytes and digest(view).hex() == segment.digest
