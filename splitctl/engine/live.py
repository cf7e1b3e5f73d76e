"""What a session is made of, shared by the session and the effects of a switch: engine, slots, placement, arenas.

Thread: the session's turn guards everything here.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from llama_native import CallFailed, pin, pinnable
from splitctl.carry.arena import Arenas
from splitctl.carry.growth import Growth
from splitctl.engine.slot import Slot
from splitctl.engine.turn import Turn
from splitctl.errors import Cancelled, ConfigInvalid, ContextFull, Parked

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from llama_native import Model
    from splitctl.engine.engine import Engine
    from splitctl.model.facts import ModelFacts
    from splitctl.placement import Placement

_RC_ABORTED = 2
_BYTES_PER_FLOAT = 4
#: After so many new tokens the memory for saved states is held against what the sequences hold.
_LOOK_AFTER = 256


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens for one decode; lists of equal length. Outputs can be left with the library: they are large."""

    tokens: Sequence[int]
    positions: Sequence[int]
    seq_ids: Sequence[int]
    outputs: Sequence[bool]
    with_rows: bool = True


class CancelFlag:
    """A flag that a signal or another thread sets; shielded while a fallback must not be interrupted."""

    def __init__(self, event: threading.Event | None = None) -> None:
        """Watch an event, or one of its own."""
        self.event = event or threading.Event()
        self.shielded = False

    def is_set(self) -> bool:
        """Tell whether work should end now."""
        return not self.shielded and self.event.is_set()


class LiveSession:
    """The parts of a session."""

    def __init__(
        self,
        engine: Engine,
        facts: ModelFacts,
        placement: Placement,
        cancel: CancelFlag,
        arenas: Arenas | None = None,
    ) -> None:
        """Hold the parts; ``placement`` is the one that the engine serves in, as the library resolved it."""
        self.engine = engine
        self.facts = facts
        self.placement = placement
        self.cancel = cancel
        self.turn = Turn()
        self.placing = threading.Lock()
        """Held while anything is freed or placed, and while free memory is read: the two must not meet (law 5)."""
        self.slots = {seq_id: Slot(seq_id) for seq_id in range(placement.n_seq_max)}
        self.arenas = arenas or Arenas()
        self.growth = Growth(self.arenas)
        self._n_kept_ahead = 0
        self._n_unlooked = 0
        self._choose_pinner()
        self.n_decodes = 0
        self.pending_shift = False
        self.state_shape: tuple[frozenset[int], tuple[str, ...], bool | None, tuple[bool, ...]] | None = None
        """How the last state was read: versions, kinds of sections, extra records in cells, V in attention sections."""
        self.has_memory = engine.live_context.has_memory
        self.n_vocab = self.model.n_vocab
        self.is_encoder_decoder = self.model.has_encoder and self.model.has_decoder
        self.decoder_start = max(self.model.decoder_start_token, 0)

    @property
    def model(self) -> Model:
        """The placed model.

        Raises:
            Parked: there is none, because one that was lost could not be loaded again.
        """
        if self.engine.model is None:
            raise Parked(None, "its model was lost and could not be loaded again")
        return self.engine.model

    def serve_in(self, placement: Placement) -> None:
        """Note where the session serves now, and have a slot for each sequence that the context can hold."""
        if placement.devices != self.placement.devices:
            self.placement = placement
            self._choose_pinner()
        self.placement = placement
        for seq_id in range(placement.n_seq_max):
            self.slots.setdefault(seq_id, Slot(seq_id))
        for seq_id in [one for one in self.slots if one >= placement.n_seq_max and self.slots[one].is_empty]:
            self.slots.pop(seq_id).clear()

    def used(self) -> list[Slot]:
        """Return the sequences that hold anything, by id."""
        # A copy: a check of a switch asks while another thread works.
        return [slot for slot in list(self.slots.values()) if not slot.is_empty]

    def positions(self) -> dict[int, tuple[int, int]]:
        """Ask the library for every sequence's first and last position; (-1, -1) where it holds none."""
        context = self.engine.live_context
        return {seq_id: (context.pos_min(seq_id), context.pos_max(seq_id)) for seq_id in range(context.n_seq_max)}

    def _choose_pinner(self) -> None:
        """Have the memory for saved states pinned where a device of the placement gains by it."""
        library, devices = self.engine.library, self.placement.devices
        for arena in self.arenas.both:
            arena.pinner = partial(pin, library, devices) if pinnable(library, devices) else None

    def reserve(self, n_tokens: int, *, n_copies: int, wait: bool) -> int:
        """Hold ``n_copies`` (1 or 2) arenas for a state of ``n_tokens``, if the host keeps as much free again.

        From then on they grow ahead of what the sequences hold. Without ``wait`` it has only begun.

        Returns:
            Bytes held by the arenas now.
        """
        self.keep_ahead(n_copies)
        if self.has_memory:
            # What another process made of them is needed here as well.
            made = max(one.n_file_bytes for one in self.arenas.both)
            self.growth.want(max(self._bytes_of(n_tokens), made), n_copies)
        if wait:
            self.growth.wait()
            self.arenas.catch_up()
        return self.arenas.n_bytes

    def keep_ahead(self, n_copies: int) -> None:
        """Let so many arenas at least (1 or 2) grow ahead of what the sequences hold, from the next decode on."""
        if n_copies > self._n_kept_ahead:
            self._n_kept_ahead, self._n_unlooked = n_copies, _LOOK_AFTER

    def expect(self, n_new: int) -> None:
        """Have room for saving what the sequences hold and as many tokens more, twice, ahead of need."""
        self._n_unlooked = 0
        if not self._n_kept_ahead or not self.has_memory:
            return
        needed = self._bytes_of(sum(slot.n_past for slot in self.slots.values()) + n_new)
        reserved = min(map(self.arenas.n_ahead, range(self._n_kept_ahead)))
        if 2 * needed > reserved:
            most = max(needed, self._bytes_of(self.engine.live_context.n_ctx))
            self.growth.want(min(2 * max(needed, reserved), most), self._n_kept_ahead)

    def _bytes_of(self, n_tokens: int) -> int:
        """Tell how much a sealed state of so many tokens takes, with one row of logits a sequence."""
        placement = self.placement
        n_bytes = self.facts.state_bytes(n_tokens, placement.type_k, placement.type_v, n_sequences=placement.n_seq_max)
        return n_bytes + placement.n_seq_max * self.n_vocab * _BYTES_PER_FLOAT

    def close_arenas(self) -> None:
        """Stop growing and unpin; no call of the library may be under way."""
        self.growth.close()
        self.arenas.close()

    def check_room(self, seq_id: int, n_new: int) -> None:
        """Refuse tokens that the cache has no cells for, before anything is decoded.

        Raises:
            ContextFull: with the numbers.
            ConfigInvalid: more tokens than a model without a memory can read, which is as a whole.
        """
        if not self.has_memory:
            self.check_encoder(n_new)
        full = self.why_full(seq_id, n_new)
        if full is not None:
            raise full

    def why_full(self, seq_id: int, n_new: int) -> ContextFull | None:
        """Return the error that so many more tokens would be; None where they fit."""
        if not self.has_memory or self.facts.is_recurrent:
            return None
        context, unified = self.engine.live_context, self.placement.kv_unified
        held = sum(s.n_past for s in self.slots.values()) if unified else self.slots[seq_id].n_past
        room = context.n_ctx if unified or self.placement.n_seq_max == 1 else context.n_ctx_seq
        return ContextFull(held, n_new, room) if held + n_new > room else None

    def is_full(self, seq_id: int) -> bool:
        """Tell whether a sequence's newest token is the last that its memory has a cell for."""
        slot = self.slots[seq_id]
        return self.why_full(seq_id, len(slot.tokens) - slot.n_past + 1) is not None

    def check_encoder(self, n_tokens: int) -> None:
        """Refuse more tokens than an encoder reads at once: the library would abort.

        Raises:
            ConfigInvalid: with both numbers.
        """
        most = self.engine.live_context.n_ubatch
        if n_tokens > most:
            wanted = f"{most} at most, the size of a micro-batch (-ub): an encoder reads its prompts as a whole"
            raise ConfigInvalid("tokens", f"{n_tokens} for the encoder", wanted)

    def run(self, batch: Batch) -> dict[int, NDArray[np.float32]]:
        """Decode one batch of at most n_batch tokens and copy the wanted rows.

        Returns:
            Place in the batch -> float32[n_vocab] logits, for every wanted output; of an encoder the embedding,
            float32[n_embd].

        Raises:
            Cancelled: the cancel flag ended it; the memory holds what was decoded until then.
            llama_native.CallFailed: the library refused or failed.
        """
        context = self.engine.live_context
        if self.arenas.is_behind:
            self.arenas.catch_up()
        try:
            context.decode(batch.tokens, batch.positions, batch.seq_ids, batch.outputs)
        except CallFailed as error:
            if error.rc == _RC_ABORTED and self.cancel.is_set():
                raise Cancelled("a decode") from error
            raise
        self.n_decodes += 1
        self.pending_shift = False
        self._n_unlooked += len(batch.tokens)
        if self._n_unlooked >= _LOOK_AFTER:
            self.expect(len(batch.tokens))
        wanted = [index for index, output in enumerate(batch.outputs) if output and batch.with_rows]
        if self.facts.is_encoder_only:
            rows = {index: context.embeddings(index, batch.seq_ids[index]) for index in wanted}
            return {index: np.frombuffer(row, np.float32) for index, row in rows.items()}
        return {index: np.frombuffer(context.logits(index), np.float32) for index in wanted}

    def encode(self) -> None:
        """Run the encoder over what every sequence gave it, in one batch: the library keeps the last one only."""
        slots = [slot for slot in self.used() if slot.encoder_tokens.size]
        if not slots:
            return
        tokens = [token for slot in slots for token in slot.encoder_tokens.tolist()]
        positions = [position for slot in slots for position in range(slot.encoder_tokens.size)]
        seq_ids = [slot.seq_id for slot in slots for _ in range(slot.encoder_tokens.size)]
        self.engine.live_context.encode(tokens, positions, seq_ids, [True] * len(tokens))

    def replay_tokens(self) -> None:
        """Read every sequence's tokens again into an empty memory; logits that the session holds stay as they are."""
        self.encode()
        for slot in self.used():
            for batch in batches(slot.seq_id, slot.tokens[: slot.n_past], 0, self.engine.live_context.n_batch):
                self.run(batch)


def batches(
    seq_id: int, tokens: Sequence[int], first: int, n_batch: int, *, last_output: bool = False
) -> Iterable[Batch]:
    """Cut tokens, the first of which has position ``first``, into batches of ``n_batch`` at most.

    With ``last_output`` the logits of the very last token are wanted.
    """
    for start in range(0, len(tokens), n_batch):
        chunk = tokens[start : start + n_batch]
        end = start + len(chunk)
        outputs = [last_output and place == len(tokens) for place in range(start + 1, end + 1)]
        yield Batch(chunk, range(first + start, first + end), [seq_id] * len(chunk), outputs)
