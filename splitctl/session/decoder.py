"""Decoding for a session: prompts, drawn tokens, cuts, copies and shifts, and the trial that ends a switch.

Main path: ``fill`` keeps what a sequence has in common with a prompt, ``read`` reads the rest of it a batch at a time,
``step`` decodes what several sequences have pending and draws the next token of each.

Laws:
    1. The memory and the slots agree after every call, whether it returned or raised.
    2. The first decode after a switch is its trial: one that fails is fallen back from, and done again in the old
       placement.
    3. A step that failed has drawn nothing, for no sequence; nor has one that a signal's handler ended.
    4. A copy or a shift is whole when its call returns: none is left for a later decode, where a saved state would
       miss it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llama_native import (
    CallFailed,
    sequence_state_get,
    sequence_state_set,
    sequence_state_size,
    state_get,
    state_set,
    state_size,
)
from splitctl.carry.sampling import SamplerSpec, Token
from splitctl.carry.sequence import common, no_logits, no_tokens
from splitctl.engine.live import Batch, batches
from splitctl.engine.sampler import Constraints, Sampler
from splitctl.errors import Cancelled, ConfigInvalid, Reason, Refused, TrialFailed
from splitctl.outcome import Stage
from splitctl.placement import SplitMode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from splitctl.engine.live import LiveSession
    from splitctl.engine.slot import Slot
    from splitctl.switching.switcher import Switcher


@dataclass(frozen=True, slots=True)
class Filling:
    """What is left to do until a sequence holds its prompt.

    Attributes:
        n_kept: tokens that it holds already.
        rest: tokens to read after them.
        pending: a token that was drawn and delivered before, and is not to be read; None: draw the next one.
    """

    n_kept: int
    rest: tuple[int, ...]
    pending: int | None


@dataclass(frozen=True, slots=True)
class _Mark:
    """How far a sequence was before a draw, so that one that nobody gets can be taken back."""

    n_tokens: int
    n_accepted: int | None
    n_draws: int
    n_ruled: int

    @classmethod
    def of(cls, slot: Slot) -> _Mark:
        if (sampler := slot.sampler) is None:
            return cls(len(slot.tokens), None, 0, 0)
        return cls(len(slot.tokens), len(sampler.accepted), sampler.n_draws, sampler.n_ruled)

    def back(self, slot: Slot) -> None:
        del slot.tokens[self.n_tokens :]
        sampler, is_new = slot.sampler, self.n_accepted is None
        if sampler is not None:
            accepted = sampler.accepted[: self.n_accepted]
            slot.set_sampler(None if is_new else sampler.fresh(accepted, self.n_draws, self.n_ruled))


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """What a sequence held, but for its memory; the arrays are borrowed, and nobody changes them."""

    tokens: array[int]
    n_past: int
    logits: NDArray[np.float32]
    output_ids: NDArray[np.int32]
    sampler: tuple[SamplerSpec, Constraints, Sequence[int], int, int] | None

    @classmethod
    def of(cls, slot: Slot) -> Held:
        """Note what a sequence holds."""
        one = slot.sampler
        sampler = None if one is None else (one.spec, one.constraints, tuple(one.accepted), one.n_draws, one.n_ruled)
        return cls(slot.tokens[:], slot.n_past, slot.logits, slot.output_ids, sampler)


class Decoder:
    """Decodes for one session. Thread: the session's turn guards it."""

    def __init__(self, live: LiveSession, switcher: Switcher) -> None:
        """Decode on ``live``; ``switcher`` hears how a trial went."""
        self._live = live
        self._switcher = switcher
        self._effects = switcher.effects
        self.must_succeed = False
        """The next decode is the trial of a state that another process has sealed, and keeps."""

    # ---- prompts ----

    def fill(
        self, slot: Slot, tokens: Sequence[int], *, n_delivered: int, encoder_tokens: Sequence[int] | None
    ) -> Filling:
        """Let a sequence keep of what it holds as much as ``tokens`` begin with; see :meth:`Session.fill`."""
        live = self._live
        slot.set_sampler(None)
        if live.is_encoder_decoder and encoder_tokens is None:
            # An encoder reads its prompt as a whole, so nothing of another one can be kept.
            self.empty(slot)
            n_prompt = len(tokens) - n_delivered
            encoder_tokens, tokens = tokens[:n_prompt], (live.decoder_start, *tokens[n_prompt:])
        elif live.is_encoder_decoder and tuple(slot.encoder_tokens.tolist()) != tuple(encoder_tokens or ()):
            self.empty(slot)
        wanted, pending = (tokens[:-1], tokens[-1]) if n_delivered else (tokens, None)
        n_kept = self._keep_common(slot, wanted, needs_logits=pending is None)
        if encoder_tokens and not slot.encoder_tokens.size:
            self.encode_prompt(slot, encoder_tokens)
        self._live.expect(len(wanted) - n_kept)
        return Filling(n_kept, tuple(wanted[n_kept:]), pending)

    def refill(self, slot: Slot, tokens: Sequence[int]) -> Filling:
        """Let a sequence keep what ``tokens`` begin with, and draw as before; see :meth:`Session.feed`."""
        old = slot.sampler
        spec, n_draws, constraints = (old.spec, old.n_draws, old.constraints) if old is not None else (None, 0, None)
        filling = self.fill(slot, tokens, n_delivered=0, encoder_tokens=None)
        if spec is not None:
            self.put_sampler(slot, spec, n_draws, constraints)
        return filling

    def _keep_common(self, slot: Slot, wanted: Sequence[int], *, needs_logits: bool) -> int:
        """Cut a sequence to what it has in common with what is wanted; returns the tokens that are left."""
        n_common = common(slot.tokens[: slot.n_past], wanted)
        if n_common == len(wanted) and needs_logits and not (n_common == slot.n_past and slot.logits.size):
            n_common = max(n_common - 1, 0)
        if n_common == 0:
            self.empty(slot)
            return 0
        return self.keep(slot, n_common)

    def read(self, slot: Slot, tokens: Sequence[int], *, n_most: int | None = None, draws_next: bool = True) -> int:
        """Read the beginning of ``tokens``, a batch at most; see :meth:`Session.read`."""
        n_batch = self._live.engine.live_context.n_batch
        n = min(len(tokens), n_most or n_batch, n_batch)
        self._live.check_room(slot.seq_id, n)
        is_last = draws_next and n == len(tokens)
        for batch in batches(slot.seq_id, tokens[:n], slot.n_past, n, last_output=is_last):
            self.decode_new(slot, batch)
        return n

    def encode_prompt(self, slot: Slot, tokens: Sequence[int]) -> None:
        """Give an encoder-decoder's prompt to its encoder; the decoder begins with a first token of its own.

        Raises:
            ConfigInvalid: the prompts of all sequences are more than the encoder reads at once.
        """
        self._live.check_encoder(len(tokens) + sum(int(one.encoder_tokens.size) for one in self._live.used()))
        slot.encoder_tokens = np.array(tokens, np.int32)
        try:
            self.encode_again()
        except CallFailed:
            slot.encoder_tokens = no_tokens()
            raise

    def encode_again(self) -> None:
        """Run the encoder over every sequence's prompt, for the library keeps the output of its last call only.

        It refuses positions that the memory holds, so what the decoder has so far steps aside meanwhile.
        """
        context = self._live.engine.live_context
        if not any(slot.n_past for slot in self._live.used()):
            self._live.encode()
            return
        held = bytearray(state_size(context))
        n = state_get(context, held)
        context.clear()
        try:
            self._live.encode()
        finally:
            state_set(context, memoryview(held)[:n])

    # ---- decodes and draws ----

    def advance(self, slots: Sequence[Slot]) -> dict[int, Token]:
        """Generate one token for each of several sequences, or for none; see :meth:`Session.advance`."""
        if len(set(slots)) != len(slots):
            raise ConfigInvalid("seq_ids", [slot.seq_id for slot in slots], "each sequence once")
        for slot in slots:
            if not slot.is_pending and not slot.has_logits:
                raise ConfigInvalid("seq_id", slot.seq_id, "a sequence that holds a prompt (prefill first)")
        tokens = {}
        for seq_id, drawn in self.step(slots).items():
            if isinstance(drawn, Exception):
                raise drawn
            tokens[seq_id] = drawn
        return tokens

    def step(self, slots: Sequence[Slot]) -> dict[int, Token | Exception]:
        """Decode what sequences have pending, in one batch, and draw the next token of each.

        Returns:
            Sequence id -> its next token, or why it could not be drawn.
        """
        self.decode_pending(slots)
        before = {slot.seq_id: _Mark.of(slot) for slot in slots}
        try:
            return self._draw_each(slots, before)
        except BaseException:
            for slot in slots:
                before[slot.seq_id].back(slot)
            raise

    def _draw_each(self, slots: Sequence[Slot], before: Mapping[int, _Mark]) -> dict[int, Token | Exception]:
        drawn: dict[int, Token | Exception] = {}
        for slot in slots:
            try:
                drawn[slot.seq_id] = self._draw(slot)
            except Exception as error:  # noqa: BLE001 - the others of the step have drawn, and their tokens count
                before[slot.seq_id].back(slot)
                drawn[slot.seq_id] = error
        if self._live.engine.library.is_interrupted:
            raise Cancelled("a step")  # what interrupted it comes in its place
        return drawn

    def decode_pending(self, slots: Sequence[Slot]) -> None:
        """Decode the newest token of those sequences where it was drawn and delivered but not decoded yet."""
        slots = [slot for slot in slots if slot.is_pending]
        if not slots:
            return
        for slot in slots:
            # In one buffer of cells for all they need one each.
            self._live.check_room(slot.seq_id, len(slots) if self._live.placement.kv_unified else 1)
        batch = Batch(
            [slot.tokens[-1] for slot in slots],
            [slot.n_past for slot in slots],
            [slot.seq_id for slot in slots],
            [True] * len(slots),
        )
        try:
            with self._live.engine.library.holding():
                rows = self._run(batch)
                for index, slot in enumerate(slots):
                    self._take(slot, index, rows[index])
                    slot.n_past += 1
        except BaseException:
            for slot in slots:
                self._keep_what_is_held(slot, ())
            raise

    def decode_new(self, slot: Slot, batch: Batch, *, accept: bool = True) -> None:
        """Decode tokens that the sequence does not have yet, and keep those that the memory holds, even on an error."""
        n_past, n_tokens = slot.n_past, len(slot.tokens)
        try:
            with self._live.engine.library.holding():
                rows = self._run(batch)
                if not rows:
                    slot.take_rows(no_logits(), no_tokens())
                for index, row in rows.items():
                    self._take(slot, index, row)
                if slot.sampler is not None and accept:
                    for token in batch.tokens:
                        slot.sampler.accept(token)
                slot.tokens.extend(batch.tokens)
                slot.n_past += len(batch.tokens)
        except BaseException:
            if slot.n_past == n_past:
                del slot.tokens[n_tokens:]
                self._keep_what_is_held(slot, batch.tokens)
            raise

    def _keep_what_is_held(self, slot: Slot, new: Sequence[int]) -> None:
        """After a decode that ended early: micro-batches that were done stay in the memory, so the slot follows it."""
        live = self._live
        if not live.has_memory or live.engine.context is None:
            return
        context = live.engine.live_context
        n_held = context.pos_max(slot.seq_id) + 1 - slot.n_past
        if n_held > 0 and (new or not context.seq_rm(slot.seq_id, slot.n_past, -1)):
            slot.tokens.extend(new[:n_held])
            slot.n_past += n_held
            slot.take_rows(no_logits(), no_tokens())
        self._effects.transfer.reseal()

    def _take(self, slot: Slot, index: int, row: NDArray[np.float32]) -> None:
        if self._live.facts.is_encoder_only:
            slot.embedding = row
            return
        if self._live.engine.embeddings:
            slot.embedding = np.frombuffer(self._live.engine.live_context.embeddings(index, slot.seq_id), np.float32)
        slot.take_rows(row.reshape(1, -1), np.array([index], np.int32))

    def _run(self, batch: Batch) -> dict[int, NDArray[np.float32]]:
        """Decode; a trial that fails is done again in the old placement."""
        live = self._live
        if not (self._switcher.on_trial or self.must_succeed):
            return live.run(batch)
        try:
            rows = live.run(batch)
            # An embedding decoder leaves its logits at zero.
            wrong = "" if live.engine.embeddings else nonsense(rows)
        except CallFailed as error:
            if live.engine.library.is_interrupted:
                raise  # it was ended, which says nothing of the placement
            rows, wrong = {}, str(error)
        if self.must_succeed and wrong:
            raise TrialFailed(wrong)
        self.must_succeed = False
        if not wrong:
            if self._switcher.on_trial:
                self._switcher.trial_succeeded()
            return rows
        self._switcher.trial_failed(Reason("trial-failed", f"the first decode after the switch failed: {wrong}"))
        if self._switcher.state.stage is Stage.PARKED:
            raise self._effects.gone(self._switcher.state)
        return live.run(batch)

    def _draw(self, slot: Slot) -> Token:
        """Draw a sequence's next token from its logits, and append it; ConfigInvalid where it has none."""
        if not slot.has_logits:
            raise ConfigInvalid("seq_id", slot.seq_id, "a sequence that holds a prompt with logits (prefill first)")
        sampler = slot.sampler or self.put_sampler(slot, SamplerSpec(), 0)
        model = self._live.model
        token = sampler.sample(slot.logits[-1], model, slot.tokens)
        slot.tokens.append(token)
        is_end = model.is_eog(token)
        piece = b"" if is_end or not model.has_tokenizer else model.piece(token)
        return Token(token, piece, len(slot.tokens) - 1, is_end)

    def put_sampler(
        self, slot: Slot, spec: SamplerSpec, n_draws: int, constraints: Constraints | None = None, n_ruled: int = 0
    ) -> Sampler:
        """Give a sequence a fresh sampler that has accepted its tokens, and has made so many draws."""
        fresh = Sampler(self._live.engine.library, spec, self._live.n_vocab, constraints)
        fresh.replay(slot.tokens, n_draws, n_ruled)
        slot.set_sampler(fresh)
        return fresh

    # ---- copies, cuts and shifts ----

    def copy(self, src: Slot, dst: Slot) -> None:
        """Let an empty sequence be what another one is, whole at once."""
        self._copy_memory(src, dst)
        dst.tokens = src.tokens[:]
        dst.n_past = src.n_past
        dst.encoder_tokens = src.encoder_tokens
        if dst.encoder_tokens.size:
            self.encode_again()
        dst.take_rows(src.logits.copy(), src.output_ids.copy())
        self._effects.transfer.reseal()

    def _copy_memory(self, src: Slot, dst: Slot) -> None:
        live = self._live
        context = live.engine.live_context
        if not live.has_memory or src.n_past == 0:
            return
        if live.placement.kv_unified and live.facts.architecture not in _ALWAYS_STREAMS:
            context.seq_cp(src.seq_id, dst.seq_id)
            return
        # Between streams the library copies rows at the next decode only; the sequence's state is whole at once.
        buffer = bytearray(sequence_state_size(context, src.seq_id))
        n = sequence_state_get(context, buffer, src.seq_id)
        sequence_state_set(context, memoryview(buffer)[:n], dst.seq_id)

    def cut(self, slot: Slot, n_tokens: int) -> None:
        """Keep a sequence's first ``n_tokens``; a memory that cannot be cut is filled from the tokens again."""
        tokens, n_cut = slot.tokens[:n_tokens], len(slot.tokens) - n_tokens
        kept = self.keep(slot, n_tokens - 1)
        n_batch = self._live.engine.live_context.n_batch
        for batch in batches(slot.seq_id, tokens[kept:], kept, n_batch, last_output=True):
            self.decode_new(slot, batch, accept=False)
        if slot.sampler is not None:
            # Penalties look back at the tokens that are left; the random draws go on where they were.
            old = slot.sampler
            self.put_sampler(slot, old.spec, old.n_draws, old.constraints, max(old.n_ruled - n_cut, 0))

    def take_back(self, slot: Slot, held: Held) -> None:
        """Let a sequence be again what it was, as far as nothing of that has been cut since; then no logits are left.

        Where the memory cannot be cut, the tokens are read again.
        """
        # An encoder has read another prompt as a whole.
        is_other = self._live.is_encoder_decoder
        n_kept = 0 if is_other else common(held.tokens[: held.n_past], slot.tokens[: slot.n_past])
        if n_kept == 0:
            self.empty(slot)
        else:
            n_left = self.keep(slot, n_kept)
            n_batch = self._live.engine.live_context.n_batch
            for batch in batches(slot.seq_id, held.tokens[n_left:n_kept], n_left, n_batch, last_output=True):
                self.decode_new(slot, batch, accept=False)
        slot.set_sampler(None)
        if n_kept == held.n_past:
            slot.tokens = held.tokens[:]
            slot.take_rows(held.logits, held.output_ids)
        if held.sampler is not None:
            spec, constraints, accepted, n_draws, n_ruled = held.sampler
            fresh = Sampler(self._live.engine.library, spec, self._live.n_vocab, constraints)
            if n_kept == held.n_past:
                fresh.replay(accepted, n_draws, n_ruled)
            else:
                fresh.replay(slot.tokens, n_draws)
            slot.set_sampler(fresh)

    def keep(self, slot: Slot, n_tokens: int) -> int:
        """Cut a sequence to its first ``n_tokens``, or to none where its memory cannot be cut there; returns how many.

        Decodes nothing. The sampler stays as it is, and so do the logits where nothing but an undecoded token goes.
        """
        live = self._live
        n_kept = n_tokens
        if n_tokens < slot.n_past:
            context = live.engine.live_context
            if not live.has_memory:
                n_kept = 0
            elif not self._can_keep(slot, n_tokens) or not context.seq_rm(slot.seq_id, n_tokens, -1):
                context.seq_rm(slot.seq_id)
                n_kept = 0
            slot.take_rows(no_logits(), no_tokens())
        del slot.tokens[n_kept:]
        slot.n_past = n_kept
        self._effects.transfer.reseal()
        return n_kept

    def _can_keep(self, slot: Slot, n_tokens: int) -> bool:
        """Tell whether the memory still holds all that a token after so many looks back at: a window moves on."""
        oldest_seen = max(0, n_tokens - self._live.model.n_swa) if self._live.model.n_swa else 0
        return n_tokens > 0 and 0 <= self._live.engine.live_context.pos_min(slot.seq_id) <= oldest_seen

    def empty(self, slot: Slot) -> None:
        """Forget a sequence."""
        was_empty = slot.is_empty
        slot.clear()
        if not was_empty:
            if self._live.has_memory:
                self._live.engine.live_context.seq_rm(slot.seq_id)
            self._effects.transfer.reseal()

    def again(self, slot: Slot) -> None:
        """Decode a sequence's last token again in its place."""
        self._live.engine.live_context.seq_rm(slot.seq_id, slot.n_past - 1, -1)
        slot.n_past -= 1
        if self._switcher.on_trial:
            self._effects.transfer.reseal()
        self.decode_pending([slot])

    def shift(self, slot: Slot, n_keep: int, n_discard: int) -> None:
        """Drop ``n_discard`` tokens after the first ``n_keep`` and move the rest down, keys included."""
        if self._switcher.on_trial:
            self.again(slot)  # a shift cannot be saved before a decode has applied it, so the trial comes first
        self.refuse_shift()  # the trial may have brought another placement back
        context = self._live.engine.live_context
        if not context.seq_rm(slot.seq_id, n_keep, n_keep + n_discard):
            raise Refused((Reason("cannot-shift", "this memory cannot drop tokens from its middle"),))
        self._live.pending_shift = True
        context.seq_add(slot.seq_id, n_keep + n_discard, -1, -n_discard)
        del slot.tokens[n_keep : n_keep + n_discard]
        slot.n_past -= n_discard
        # The keys follow at the next decode, so one is done now: the last token once more, in its new place.
        self.again(slot)

    def refuse_shift(self) -> None:
        """Raise Refused where a shift would end in an abort, or cannot be."""
        if self._live.placement.mode is SplitMode.TENSOR:
            text = (
                "the context cannot be shifted in tensor mode (the library's next decode would abort); "
                "switch to layer first, or open a larger context"
            )
            raise Refused((Reason("shift-in-tensor-mode", text),))
        if not self._live.engine.live_context.can_shift():
            raise Refused((Reason("cannot-shift", "this model's memory cannot be shifted; open a larger context"),))


_ALWAYS_STREAMS = frozenset({"deepseek4"})
"""Architectures that keep a stream for each sequence whatever is asked. Source: seen on build 11549."""


def nonsense(rows: Mapping[int, NDArray[np.float32]]) -> str:
    """Say why logits, float32[n_vocab] each, cannot be those of a decode; "" where they can."""
    for row in rows.values():
        if bool(np.isnan(row).any()):
            return "its logits are not numbers"
        if row.size > 1 and bool((row == row[0]).all()):
            return "its logits are all equal"
    return ""
