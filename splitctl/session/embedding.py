"""Embeddings of texts, on a sequence of a session that holds nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from splitctl.engine.live import Batch
from splitctl.errors import ConfigInvalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from splitctl.engine.live import LiveSession
    from splitctl.session.decoder import Decoder

POOLINGS = ("mean", "cls", "last")
"""What can be made of the rows of a text's tokens."""

#: By enum llama_pooling_type. Source: llama.h.
_OWN = {1: "mean", 2: "cls", 3: "last", 4: "rank"}


def embed(live: LiveSession, decoder: Decoder, tokens: Sequence[int], pooling: str | None) -> NDArray[np.float32]:
    """Embed one text, float32[n_embd]; see :meth:`Session.embed`. The sequence that it is read on is empty again."""
    if pooling is not None and pooling not in POOLINGS:
        raise ConfigInvalid("pooling", pooling, "one of " + " ".join(POOLINGS) + ", or None")
    if live.is_encoder_decoder or not live.engine.embeddings:
        raise ConfigInvalid(
            "embeddings", live.engine.embeddings, "True, given to Session.open (an encoder-decoder has no embeddings)"
        )
    own = _OWN.get(live.engine.live_context.pooling)
    if own is not None and pooling not in {None, own}:
        raise ConfigInvalid("pooling", pooling, f"None or {own}: this model does that by itself")
    slot = next((one for one in live.slots.values() if one.is_empty or not live.has_memory), None)
    if slot is None:
        n = len(live.slots)
        raise ConfigInvalid("n_seq_max", n, f"an empty sequence (remove one, or switch(n_seq_max={n + 1}))")
    if not live.has_memory or own in {"mean", "cls"}:
        live.check_encoder(len(tokens))  # it is pooled by micro-batch
    live.check_room(slot.seq_id, len(tokens))
    context = live.engine.live_context
    n_batch = context.n_batch
    rows: list[NDArray[np.float32]] = []
    before = (slot.tokens[:], slot.n_past, slot.embedding)
    try:
        for start in range(0, len(tokens), n_batch):
            chunk = tokens[start : start + n_batch]
            n = len(chunk)
            batch = Batch(chunk, range(start, start + n), [slot.seq_id] * n, [True] * n, with_rows=False)
            decoder.decode_new(slot, batch, accept=False)
            # A trial may have brought another context.
            read = live.engine.live_context.embeddings
            wanted = (n - 1,) if own else range(n)
            rows += [np.frombuffer(read(index, slot.seq_id), np.float32) for index in wanted]
    finally:
        if live.has_memory:
            decoder.empty(slot)
        else:
            slot.tokens, slot.n_past, slot.embedding = before
    return _pooled(rows, "last" if own else pooling or "mean")


def _pooled(rows: Sequence[NDArray[np.float32]], pooling: str) -> NDArray[np.float32]:
    if pooling == "mean":
        return np.asarray(np.mean(np.stack(rows), axis=0, dtype=np.float64), np.float32)
    return rows[0] if pooling == "cls" else rows[-1]


def stacked(rows: Sequence[NDArray[np.float32]], n_embd: int, *, normalize: bool) -> NDArray[np.float32]:
    """Put rows into one array, float32[n, n_embd], each of length 1 if ``normalize``."""
    found = np.array(rows, np.float32).reshape(-1, n_embd)
    if normalize:
        lengths = np.linalg.norm(found, axis=1, keepdims=True)
        np.divide(found, lengths, out=found, where=lengths > 0)
    return found
