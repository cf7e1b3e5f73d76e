"""A session as a serving worker needs it: sequences filled in pieces, steps for many, books in, books out, seals told.

Laws:
    1. A step that failed has drawn nothing, for no sequence.
    2. What is adopted holds exactly what its book says, whatever the session held before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from splitctl.carry import seal as seals
from splitctl.carry.seal import Seal
from splitctl.engine.live import batches
from splitctl.errors import ContextFull
from splitctl.ipc.orders import SequenceSnapshot
from splitctl.session import Session
from splitctl.switching import conversion

if TYPE_CHECKING:
    from splitctl.carry.arena import Arena
    from splitctl.carry.file import Carry
    from splitctl.carry.sequence import SamplerSpec, Token
    from splitctl.engine.slot import Slot
    from splitctl.errors import Reason
    from splitctl.placement import Placement
    from splitctl.switching.checking import Checked
    from splitctl.switching.sealing import SealedState


@dataclass(frozen=True, slots=True)
class Filling:
    """What is left to do until a sequence holds what it shall.

    Attributes:
        n_kept: tokens that it holds already.
        rest: tokens to read after them.
        pending: a token that was drawn and delivered before, and is not to be read; None: draw the next one.
    """

    n_kept: int
    rest: tuple[int, ...]
    pending: int | None


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a switch would do.

    Attributes:
        target: the whole placement.
        is_unchanged: the session serves in it.
        reasons: why it would be refused; none: it would be tried.
        conversions: what would be converted, one phrase each.
        state_bytes: size of the state now; None where there is no memory.
        weight_bytes: weights that would be placed again.
        mem_available: free memory of the host, bytes.
    """

    target: Placement
    is_unchanged: bool
    reasons: tuple[Reason, ...]
    conversions: tuple[str, ...]
    state_bytes: int | None
    weight_bytes: int
    mem_available: int


@dataclass(frozen=True, slots=True)
class SealTeller:
    """Keeps every sealed state with all that belongs to it in its arena, and tells of it.

    Attributes:
        arenas: the session's.
        carry: gives everything that travels with a sealed state.
        on_sealed: told where a whole carry lies.
        on_unsealing: told which arena is about to be overwritten.
    """

    arenas: tuple[Arena, Arena]
    carry: Callable[[SealedState | None], Carry]
    on_sealed: Callable[[Seal], None]
    on_unsealing: Callable[[int], None]

    def unsealing(self, arena: Arena) -> None:
        """Tell before an arena is overwritten."""
        self.on_unsealing(self.arenas.index(arena))

    def sealed(self, sealed: SealedState, arena: Arena) -> None:
        """Put what belongs to a state beside it, and tell."""
        self.on_sealed(seals.put(arena, self.arenas.index(arena), self.carry(sealed), sealed.digest))


class HostedSession(Session):
    """A session that a server fills and steps. Thread: as for a session; the worker uses one."""

    def tell_seals(self, on_sealed: Callable[[Seal], None], on_unsealing: Callable[[int], None]) -> None:
        """Tell of every sealed carry from now on, and before an arena is overwritten; both are called while working."""
        arenas = (self._live.arena, self._live.spare)
        self._effects.transfer.watch = SealTeller(arenas, self._storage.carry, on_sealed, on_unsealing)

    def take_over(self, seal: Seal) -> tuple[str, ...]:
        """Become what lies sealed in one of the arenas; nothing is read again.

        Returns:
            One phrase a change that the state needed.

        Raises:
            SplitctlError: it is not what was sealed, or this context cannot hold it; the session is as it was.
        """
        with self._working("taking over a sealed carry"):
            arena = (self._live.arena, self._live.spare)[seal.arena]
            carry = seals.take(arena, seal)
            self._effects.transfer.told = arena
            return self._storage.take_over(carry, self._effects)

    def fill(self, seq_id: int, tokens: Sequence[int], *, n_delivered: int = 0) -> Filling:
        """Let a sequence keep of what it holds as much as ``tokens`` begin with, and say what is left to read.

        Args:
            seq_id: the sequence.
            tokens: what it shall hold.
            n_delivered: how many of them were drawn and delivered before; the newest of those is not read.

        Raises:
            ConfigInvalid: no token, one outside the vocabulary, or more than an encoder reads at once.
        """
        slot = self._slot(seq_id)
        self._live.check_tokens(tokens)
        with self._working("making ready for a prompt"):
            self._drop_sampler(slot)
            pending = tokens[-1] if n_delivered else None
            if self._live.is_encoder_decoder:
                # An encoder reads its prompt as a whole, so nothing of another one can be kept.
                self._empty(slot)
                start = self._decoder.begin_decoder(slot, tokens[: len(tokens) - n_delivered])
                drawn = tokens[len(tokens) - n_delivered :]
                return Filling(0, (*start, *drawn[:-1]), pending)
            wanted = tokens[:-1] if n_delivered else tokens
            n_kept = self._keep(slot, wanted, needs_logits=pending is None)
            return Filling(n_kept, tuple(wanted[n_kept:]), pending)

    def read(self, seq_id: int, tokens: Sequence[int], *, is_last: bool) -> None:
        """Read a piece of a prompt, of at most n_batch tokens.

        Args:
            seq_id: the sequence.
            tokens: the piece.
            is_last: whether the next token is drawn after it.

        Raises:
            ContextFull: there is no room; nothing was decoded.
            llama_native.CallFailed: the library refused or failed; the sequence holds what was read.
        """
        with self._working("reading a prompt"):
            slot = self._slot(seq_id)
            self._live.check_room(seq_id, len(tokens))
            for batch in batches(seq_id, tokens, slot.n_past, len(tokens), last_output=is_last):
                self._decoder.decode_new(slot, batch)

    def begin(self, seq_id: int, sampler: SamplerSpec, *, n_draws: int = 0, pending: int | None = None) -> None:
        """Make a sequence that holds its prompt ready to be stepped.

        Args:
            seq_id: the sequence.
            sampler: how to draw.
            n_draws: random draws that were made before.
            pending: the token that was drawn last and is not decoded yet; None: none was.
        """
        with self._working("beginning to generate"):
            slot = self._slot(seq_id)
            if pending is not None:
                slot.tokens.append(pending)
            self._decoder.put_sampler(slot, sampler, n_draws)

    def step(self, seq_ids: Sequence[int]) -> dict[int, Token | Exception]:
        """Decode what sequences have pending, in one batch, and draw the next token of each.

        Args:
            seq_ids: sequences that were begun, each once.

        Returns:
            Sequence id -> its next token, or why it could not be drawn.

        Raises:
            ContextFull: there is no room; nothing was decoded.
            Parked: it was the trial of a switch, which could not be fallen back from.
            llama_native.CallFailed: the library refused or failed; nothing was drawn.
        """
        with self._working("generating"):
            slots = [self._slot(seq_id) for seq_id in seq_ids]
            self._decoder.decode_pending([slot for slot in slots if slot.n_past < len(slot.tokens)])
            return {slot.seq_id: self._drawn(slot) for slot in slots}

    def n_draws(self, seq_id: int) -> int:
        """Random draws that a sequence's sampler has made."""
        sampler = self._slot(seq_id).sampler
        return 0 if sampler is None else sampler.n_draws

    def held(self, seq_id: int) -> int:
        """Tokens that the memory holds of a sequence."""
        return self._slot(seq_id).n_past

    def has_room(self, seq_id: int, n_new: int) -> bool:
        """Tell whether so many more tokens fit; in one buffer for all it counts for all."""
        return self._live.short_of(seq_id, n_new) == 0

    def why_full(self, seq_id: int, n_new: int) -> ContextFull:
        """Give the error that so many more tokens would be."""
        placement = self.placement
        room = placement.n_ctx if placement.kv_unified else placement.n_ctx // placement.n_seq_max
        return ContextFull(self.held(seq_id), n_new, room)

    def adopt(
        self, books: Sequence[SequenceSnapshot], progress: Callable[[int, int], None] = lambda _done, _n: None
    ) -> int:
        """Let every sequence hold what its book says, and those without a book nothing.

        Args:
            books: one a sequence.
            progress: told tokens read and to be read, after each batch.

        Returns:
            Tokens that had to be read.

        Raises:
            SplitctlError: a book is not one of this model, or there is no room.
            llama_native.CallFailed: the library refused or failed.
        """
        known = {book.seq_id for book in books if book.tokens}
        for slot in list(self._live.used()):
            if slot.seq_id not in known:
                self.remove_sequence(slot.seq_id)
        todo = [(book, self._opened(book)) for book in books if book.tokens]
        n, done = sum(len(filling.rest) for _, filling in todo if filling), 0
        for book, filling in todo:
            if filling is None:
                continue
            n_batch = self.placement.n_batch
            for at in range(0, len(filling.rest), n_batch):
                piece = filling.rest[at : at + n_batch]
                is_last = at + n_batch >= len(filling.rest) and filling.pending is None
                self.read(book.seq_id, piece, is_last=is_last)
                done += len(piece)
                progress(done, n)
            if book.sampler is not None:
                self.begin(book.seq_id, book.sampler, n_draws=book.n_draws, pending=filling.pending)
            elif filling.pending is not None:
                self._slot(book.seq_id).tokens.append(filling.pending)
        return done

    def books(self) -> tuple[SequenceSnapshot, ...]:
        """Say what every sequence holds."""
        with self._working("telling what it holds"):
            return tuple(
                SequenceSnapshot(
                    slot.seq_id,
                    tuple(slot.tokens),
                    is_pending=slot.n_past < len(slot.tokens),
                    sampler=None if slot.sampler is None else slot.sampler.spec,
                    n_draws=0 if slot.sampler is None else slot.sampler.n_draws,
                    encoder_tokens=tuple(slot.encoder_tokens.tolist()),
                )
                for slot in self._live.used()
            )

    def judge(self, checked: Checked) -> Judgement:
        """Say what a switch to a target that has been checked would do."""
        with self._working("judging a switch"):
            live, target = self._live, checked.target
            return Judgement(
                target=target,
                is_unchanged=not live.placement.differs(target),
                reasons=checked.reasons,
                conversions=_conversions(live.placement, target),
                state_bytes=self._effects.transfer.state_bytes(),
                weight_bytes=live.model.size_bytes,
                mem_available=psutil.virtual_memory().available,
            )

    def _opened(self, book: SequenceSnapshot) -> Filling | None:
        """Let a sequence keep what its book has in common with it; None where the book is nothing to fill it from."""
        slot = self._slot(book.seq_id)
        if not self._live.is_encoder_decoder:
            return self.fill(book.seq_id, book.tokens, n_delivered=int(book.is_pending))
        wanted = book.tokens[:-1] if book.is_pending else book.tokens
        with self._working("making ready for a book"):
            self._drop_sampler(slot)
            if tuple(slot.encoder_tokens.tolist()) != book.encoder_tokens:
                self._empty(slot)
            if not book.encoder_tokens:
                return None
            n_kept = self._keep(slot, wanted, needs_logits=not book.is_pending)
            if not slot.encoder_tokens.size:
                self._decoder.begin_decoder(slot, book.encoder_tokens)
            return Filling(n_kept, tuple(wanted[n_kept:]), book.tokens[-1] if book.is_pending else None)

    def _keep(self, slot: Slot, wanted: Sequence[int], *, needs_logits: bool) -> int:
        """Cut a sequence to what it has in common with what is wanted; returns the tokens that are left."""
        n_common = common(slot.tokens[: slot.n_past], wanted)
        is_whole = n_common == len(wanted)
        if is_whole and needs_logits and not (n_common == slot.n_past and slot.logits.size):
            n_common = max(n_common - 1, 0)
        if n_common == 0:
            self._empty(slot)
            return 0
        return self._decoder.keep(slot, n_common)

    def _empty(self, slot: Slot) -> None:
        if slot.is_empty:
            return
        if self._live.has_memory:
            self._live.engine.live_context.seq_rm(slot.seq_id)
        slot.clear()
        self._effects.transfer.reseal()

    def _drop_sampler(self, slot: Slot) -> None:
        if slot.sampler is not None:
            slot.sampler.close()
            slot.sampler = None

    def _drawn(self, slot: Slot) -> Token | Exception:
        try:
            return self._token(slot)
        except Exception as error:  # noqa: BLE001 - the others of the step have their tokens, and must hear of them
            return error


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens that two rows begin with alike."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _conversions(now: Placement, target: Placement) -> tuple[str, ...]:
    plan = conversion.plan(now, target)
    if plan is None:
        return ()
    v_order = "transposed" if plan.v_trans else "in rows"
    phrases = (
        (plan.type_k, f"K from {now.type_k} to {target.type_k}"),
        (plan.type_v, f"V from {now.type_v} to {target.type_v}"),
        (plan.v_trans, f"V turned: {v_order}"),
        (plan.n_stream, f"streams from {conversion.n_streams(now)} to {plan.n_stream}"),
    )
    return tuple(text for wanted, text in phrases if wanted is not None)
