"""A session on disk: writing what it holds as a carry, reading one back, parking one that can serve no more."""

from __future__ import annotations

import os
import re
from array import array
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import time_ns
from typing import TYPE_CHECKING

import numpy as np

from splitctl.carry import file as carries
from splitctl.carry import seal as seals
from splitctl.carry.file import Carry
from splitctl.carry.fingerprint import Adapter, Fingerprint, Identity, Representation
from splitctl.carry.mapped import mapped
from splitctl.carry.sampling import SamplerSpec
from splitctl.carry.sequence import no_logits, no_tokens
from splitctl.carry.tensorfile import is_safetensors
from splitctl.engine.sampler import Constraints, Sampler
from splitctl.engine.slot import Slot
from splitctl.errors import (
    CannotConvert,
    CarryDamaged,
    CarryMismatch,
    ConfigInvalid,
    Difference,
    Refused,
    SplitctlError,
    StateUnsound,
)
from splitctl.places import state_folder
from splitctl.switching import rules
from splitctl.switching.conversion import FileContent, kind_of, look, n_cells, n_held
from splitctl.switching.rules import SessionFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from splitctl.carry.seal import Seal, Segment
    from splitctl.carry.sequence import SequenceCarry
    from splitctl.engine.live import LiveSession
    from splitctl.session.ahead import Incoming
    from splitctl.switching.sealing import SealedState
    from splitctl.switching.transfer import Transfer

_LIBRARY_FILES = frozenset({b"nsgg", b"qsgg"})
"""First bytes of the library's session files, and of its sequence files (slot files of its server are such)."""

_CANNOT_REWIND = "this memory cannot be rewound by the one token that gives logits"


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore came to.

    Args:
        conversions: what was rewritten, one phrase each.
        recomputed: the tokens were read again: the same positions, not the same bytes.
        reason: why; empty where they were not.
    """

    conversions: tuple[str, ...] = ()
    recomputed: bool = False
    reason: str = ""


class Storage:
    """Carries of one session. Thread: the session's turn guards it."""

    def __init__(self, live: LiveSession) -> None:
        """Work on a session's parts."""
        self._live = live
        # Taken now: when a session has to be parked, an adapter or the library may be gone.
        self._adapters = tuple(Adapter.of(Path(one.path), one.scale) for one in live.engine.adapters)
        self._build = live.engine.library.build

    def save(self, path: str | os.PathLike[str], transfer: Transfer) -> int:
        """Write the session to a file; returns its size in bytes.

        Raises:
            CarryNotWritten: what was at the path before is still there.
        """
        target = Path(path)
        sealed = transfer.snapshot()
        carries.write(target, carries.seal(self.carry(sealed)))
        n_bytes = target.stat().st_size
        with suppress(OSError):  # the file is written; that it could not be kept in an arena too is no failure of it
            transfer.report(sealed)
        return n_bytes

    def packed(self, transfer: Transfer, *, bare: bool) -> bytes:
        """Return the session as the bytes of its file, or the library's state alone; for `Session.state_bytes`."""
        sealed = transfer.snapshot()
        packed = bytes(sealed.view) if bare else carries.to_bytes(carries.seal(self.carry(sealed)))
        with suppress(OSError):
            transfer.report(sealed)
        return packed

    def unpack(
        self,
        state: memoryview,
        tokens: Mapping[int, Sequence[int]] | None,
        logits: Mapping[int, NDArray[np.float32]] | None,
        transfer: Transfer,
    ) -> Restored:
        """Replace what the session holds with a state in memory; see :meth:`Session.load_state_bytes`."""
        is_carry = is_safetensors(state)
        if is_carry or bytes(state[:4]) in _LIBRARY_FILES:
            if tokens is not None or logits is not None:
                raise ConfigInvalid("tokens", "given", "None: this state has its own")
            if is_carry:
                return self._restore_carry(carries.from_bytes(bytes(state)).carry, transfer)
            return self._restore_library_file(None, state, transfer)
        if tokens is None:
            raise ConfigInvalid("tokens", None, "what each sequence of a bare state holds, such as {0: tokens}")
        return self._restore_bare(state, tokens, logits or {}, transfer)

    def _restore_bare(
        self,
        state: memoryview,
        tokens: Mapping[int, Sequence[int]],
        logits: Mapping[int, NDArray[np.float32]],
        transfer: Transfer,
    ) -> Restored:
        live = self._live
        if others := sorted((tokens.keys() | logits.keys()) - live.slots.keys()):
            raise ConfigInvalid("tokens", others[0], f"sequences 0 to {len(live.slots) - 1}")
        if live.has_memory:
            try:
                held = n_held(state)
            except StateUnsound as error:
                raise CarryDamaged(None, str(error)) from error
        else:
            held = {seq_id: len(row) for seq_id, row in tokens.items()}
        for seq_id in sorted(held.keys() | tokens.keys()):
            n, n_tokens = held.get(seq_id, 0), len(tokens.get(seq_id, ()))
            if n not in {n_tokens, n_tokens - 1} or (seq_id in logits and n != n_tokens):
                about = f"{n} positions of sequence {seq_id}"
                raise CarryMismatch([Difference("state", about, f"as many as its {n_tokens} tokens")])
        self._refuse_without_room(SessionFacts(dict(held)), state)

        def slots() -> dict[int, Slot]:
            fresh = {seq_id: Slot(seq_id) for seq_id in live.slots}
            for seq_id, row in tokens.items():
                fresh[seq_id].tokens, fresh[seq_id].n_past = array("i", row), held.get(seq_id, 0)
                if seq_id in logits:
                    fresh[seq_id].take_rows(logits[seq_id].reshape(1, -1), np.zeros(1, np.int32))
            return fresh

        def unread() -> dict[int, Slot]:
            fresh = slots()
            for slot in fresh.values():
                slot.n_past = max(len(slot.tokens) - 1, 0)
                slot.take_rows(no_logits(), no_tokens())
            return fresh

        restored = self._put(state, slots, transfer, refit=True, unread=unread)
        for slot in live.used():
            if slot.n_past == len(slot.tokens) and not slot.has_logits and live.has_memory:
                if not live.engine.live_context.seq_rm(slot.seq_id, slot.n_past - 1, -1):
                    return self._read_again(unread, transfer, _CANNOT_REWIND)
                slot.n_past -= 1
        transfer.reseal()
        return restored

    def park(self, sealed: SealedState | None) -> Path:
        """Write what is left (without a state: the tokens) to the user's state folder; returns the file.

        Raises:
            CarryNotWritten: it could not be written.
        """
        folder = state_folder() / "parked"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        stem = re.sub(r"[^A-Za-z0-9._-]", "_", Path(self._live.engine.model_path).stem)[:60]
        target = folder / f"{stem}-{os.getpid()}-{time_ns()}.safetensors"
        try:
            carries.write(target, carries.seal(self.carry(sealed)))
        except SplitctlError:
            if sealed is None:
                raise
            # The tokens alone are small, and enough to make everything else again.
            carries.write(target, carries.seal(self.carry(None)))
        return target

    def restore(self, path: str | os.PathLike[str], transfer: Transfer) -> Restored:
        """Replace what the session holds with a carry, or with a session or slot file of the library, from disk.

        What another layout wrote is rewritten; where that cannot be, or where a library's file is damaged behind its
        token list, the tokens are read again.

        Returns:
            What it came to.

        Raises:
            CarryDamaged: it is not what was sealed, or no state at all.
            CarryMismatch: it belongs to another model or adapter, or its tokens cannot be those of this model.
            Refused: this context has no room for it, or the library would not take it; the session is as it was.
        """
        source = Path(path)
        with mapped(source) as file:
            if bytes(file[:4]) in _LIBRARY_FILES:
                return self._restore_library_file(source, file, transfer)
            if not is_safetensors(file):
                wanted = "name a session that splitctl saved, or a session or slot file of llama.cpp"
                raise CarryDamaged(source, f"it is {kind_of(file)}; {wanted}")
        return self._restore_carry(carries.read(source).carry, transfer)

    def _restore_carry(self, read: Carry, transfer: Transfer) -> Restored:
        slots, is_foreign = self._fitting(read)
        restored = self._put(read.state, slots, transfer, refit=is_foreign)
        self._take_samplers(read)
        return restored

    def notify_seals(
        self, transfer: Transfer, on_sealed: Callable[[Seal], None], on_overwrite: Callable[[int], None]
    ) -> None:
        """Report carries that are sealed in an arena from now on, and arenas that are about to be overwritten."""
        arenas = self._live.arenas

        def sealed(state: SealedState, index: int) -> None:
            on_sealed(seals.put(arenas.both[index], index, self.carry(state), state.digest, state.segments))

        transfer.on_sealed = sealed
        arenas.on_overwrite = on_overwrite

    def take_over(self, seal: Seal, transfer: Transfer, *, is_read_back: bool) -> tuple[str, ...]:
        """Replace what the session holds with a carry in an arena; where its state cannot be used, nothing is.

        With ``is_read_back`` :meth:`Transfer.unlike_what_was_given` comes next; it proves the seal's checksum too.

        Returns:
            One phrase a change that the state needed.

        Raises:
            SplitctlError: the carry is damaged, of another model, or this context cannot hold it; the session is as it
                was.
        """
        arenas = self._live.arenas
        arenas.take_made()
        read = seals.take(arenas.both[seal.arena], seal, is_state_proved=is_read_back)
        arenas.reported = seal.arena
        slots, is_foreign = self._fitting(read)
        if is_read_back and is_foreign:
            seals.verify_state(read.state, seal)
        checksum = bytes.fromhex(seal.state_digest) if is_read_back else None
        changes = transfer.replace(read.state, slots(), refit=is_foreign, checksum=checksum)
        self._take_samplers(read)
        return changes

    def complete(self, seal: Seal, incoming: Incoming, *, is_read_back: bool) -> list[Segment]:
        """Become a carry in an arena of which some sequences have come ahead; gives those that had not.

        Raises:
            SplitctlError, llama_native.CallFailed: it is damaged, or this context cannot hold it; the session is not to
                be used again.
        """
        arenas = self._live.arenas
        arenas.take_made()
        read = seals.take_rest(arenas.both[seal.arena], seal)
        arenas.reported = seal.arena
        slots, is_foreign = self._fitting(read)
        if is_foreign:
            raise StateUnsound("another layout wrote the sequences, which are not converted one by one")
        wanted = {one.seq_id: one.n_past - 1 for one in read.sequences if one.n_past}
        late = incoming.complete(seal, wanted, is_read_back=is_read_back)
        self._live.slots = slots()
        self._take_samplers(read)
        return late

    def _fitting(self, read: Carry) -> tuple[Callable[[], dict[int, Slot]], bool]:
        """Refuse a carry of another model; return its sequences, and whether another layout wrote its state."""
        mine = self._fingerprint(read.fingerprint.representation.state_version)
        differing = [one.field for one in carries.check_fits(read, mine) if one.field != "n_seq_max"]

        def slots() -> dict[int, Slot]:
            fresh = {seq_id: Slot(seq_id) for seq_id in self._live.slots}
            for sequence in read.sequences:
                _fill(fresh[sequence.seq_id], sequence)
            return fresh

        tokens = {one.seq_id: one.n_past for one in read.sequences}
        n_encoded = sum(int(one.encoder_tokens.size) for one in read.sequences)
        self._refuse_without_room(SessionFacts(tokens, n_encoder_tokens=n_encoded), read.state)
        return slots, bool(differing)

    def _refuse_without_room(self, held: SessionFacts, state: memoryview | None = None) -> None:
        """Refuse, as a switch would, what this context has no room for; ``state`` holds it where it is not read again.

        Raises:
            Refused: with both numbers.
        """
        live = self._live
        found = rules.refused(rules.room(held, live.placement, live.facts, holder="the saved session"))
        if [one.code for one in found] == ["context-too-small"] and live.placement.kv_unified and state:
            # Sequences may share cells, which their tokens do not tell.
            found = () if n_cells(state) <= live.placement.n_ctx else found
        if found:
            raise Refused(found)

    def _take_samplers(self, read: Carry) -> None:
        for slot in self._live.slots.values():
            slot.sampler = self._sampler(next((s for s in read.sequences if s.seq_id == slot.seq_id), None))

    def _restore_library_file(self, path: Path | None, state: memoryview, transfer: Transfer) -> Restored:
        live = self._live
        try:
            found = look(state)
        except StateUnsound as error:
            raise CarryDamaged(path, str(error)) from error
        n_tokens, n_rows = len(found.tokens), found.rows.get(0, 0)
        is_whole = not found.damage and n_rows in {n_tokens, n_tokens - 1}
        self._refuse_without_room(SessionFacts({0: n_rows if is_whole else n_tokens - 1} if n_tokens else {}))
        if self._is_empty(found):
            transfer.replace(memoryview(b""), {seq_id: Slot(seq_id) for seq_id in live.slots})
            return Restored()

        def slots() -> dict[int, Slot]:
            fresh = {seq_id: Slot(seq_id) for seq_id in live.slots}
            fresh[0].tokens, fresh[0].n_past = array("i", found.tokens.tobytes()), n_rows
            return fresh

        def unread() -> dict[int, Slot]:
            fresh = slots()
            fresh[0].n_past = n_tokens - 1
            return fresh

        if not is_whole:
            why = f"its token list has {n_tokens} entries and its cache {n_rows} rows"
            return self._read_again(unread, transfer, found.damage or why)
        restored = self._put(state, slots, transfer, refit=True, unread=unread)
        slot = live.slots[0]
        if slot.n_past == n_tokens and not live.engine.live_context.seq_rm(0, n_tokens - 1, -1):
            # No logits came with it, and this memory cannot drop its last row to make them again.
            return self._read_again(unread, transfer, _CANNOT_REWIND)
        slot.n_past = n_tokens - 1
        transfer.reseal()
        return restored

    def _is_empty(self, found: FileContent) -> bool:
        """Refuse tokens that cannot be those of this model; tell whether there is none, and nothing made from any."""
        tokens, n_vocab = found.tokens, self._live.n_vocab
        if not tokens.size and not found.rows:
            return True
        if not tokens.size:
            raise CarryMismatch([Difference("tokens", "none", "the tokens that the state was made from")])
        if tokens.min() < 0:
            raise CarryMismatch([Difference("tokens", "an image or the like among them", "text only")])
        if tokens.max() >= n_vocab:
            raise CarryMismatch([Difference("token", str(tokens.max()), f"below {n_vocab}, this model's vocabulary")])
        others = sorted(set(found.rows) - {0})
        if others:
            raise CarryMismatch([Difference("sequences", f"{others} without tokens", "the one that the tokens are of")])
        return False

    def _put(
        self,
        state: memoryview,
        slots: Callable[[], dict[int, Slot]],
        transfer: Transfer,
        *,
        refit: bool,
        unread: Callable[[], dict[int, Slot]] | None = None,
    ) -> Restored:
        """Give the session a state, rewritten where it must be; where it cannot be used, read the tokens again."""
        if not len(state):
            return self._read_again(unread or slots, transfer, "the file holds no state")
        try:
            return Restored(conversions=transfer.replace(state, slots(), refit=refit))
        except (CannotConvert, Refused, StateUnsound) as error:
            return self._read_again(unread or slots, transfer, str(error))

    def _read_again(self, slots: Callable[[], dict[int, Slot]], transfer: Transfer, why: str) -> Restored:
        fresh = slots()
        self._refuse_without_room(SessionFacts({slot.seq_id: slot.n_past for slot in fresh.values() if slot.n_past}))
        transfer.replace(memoryview(b""), fresh)
        return Restored(recomputed=True, reason=f"the tokens were read again: {why}")

    def carry(self, sealed: SealedState | None) -> Carry:
        """Return everything that travels, with a sealed state or without one; borrowed."""
        live = self._live
        return Carry(
            state=sealed.view if sealed is not None else memoryview(b""),
            sequences=tuple(slot.carry() for slot in live.used()),
            adapters=self._adapters,
            placement=live.placement,
            fingerprint=self._fingerprint(sealed.version if sealed is not None else 0),
        )

    def _fingerprint(self, version: int) -> Fingerprint:
        live = self._live
        return Fingerprint(
            Identity.of(live.facts, self._adapters, live.n_vocab),
            Representation.of(live.placement, self._build, version),
        )

    def _sampler(self, sequence: SequenceCarry | None) -> Sampler | None:
        if sequence is None or (not sequence.accepted.size and sequence.sampler == SamplerSpec()):
            return None
        constraints = Constraints(sequence.grammar)
        sampler = Sampler(self._live.engine.library, sequence.sampler, self._live.n_vocab, constraints)
        sampler.replay(sequence.accepted.tolist(), sequence.n_draws, sequence.n_ruled)
        return sampler


def _fill(slot: Slot, sequence: SequenceCarry) -> None:
    slot.tokens = array("i", sequence.tokens.tolist())
    slot.n_past = sequence.n_past
    slot.encoder_tokens = sequence.encoder_tokens
    slot.take_rows(sequence.logits, sequence.output_ids)
