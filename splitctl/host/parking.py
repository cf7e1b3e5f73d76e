"""A session that no worker can serve, put on disk by its supervisor: from the arena, or at least its tokens.

Law: a state is written only with the tokens that it was made from; where the session has gone on since, the tokens
alone are written, and whoever restores them reads them again.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from splitctl.carry import file as carries
from splitctl.carry.arena import Arena
from splitctl.carry.file import Carry
from splitctl.carry.fingerprint import Adapter, Fingerprint, Identity, Representation, rope_settings
from splitctl.carry.seal import Seal, take
from splitctl.carry.sequence import SamplerSpec, SequenceCarry, no_logits, no_tokens
from splitctl.errors import CarryDamaged
from splitctl.ipc.orders import AdapterFile, SequenceSnapshot
from splitctl.model.facts import read_facts
from splitctl.placement import FlashAttn, Placement

_HASH_CHUNK = 1 << 20
_PRIVATE = 0o700


@dataclass(frozen=True, slots=True)
class Owner:
    """What a session's carry belongs to.

    Attributes:
        identity: which model, with which adapters.
        adapters: the adapters with their files.
        build: the library's build.
    """

    identity: Identity
    adapters: tuple[Adapter, ...]
    build: str


def owner_of(model: Path, adapters: Sequence[AdapterFile], *, n_vocab: int, build: str) -> Owner:
    """Read whose a carry would be, while all files are there.

    Args:
        model: the GGUF.
        adapters: LoRA files.
        n_vocab: tokens in the vocabulary, as the library says.
        build: the library's build.

    Returns:
        The owner.

    Raises:
        BadModelFile: the model's file is not what it was.
        OSError: an adapter cannot be read.
    """
    facts = read_facts(os.fspath(model))
    loaded = tuple(Adapter(one.path, _digest(one.path), one.scale) for one in adapters)
    identity = Identity(
        header_xxh3_128=facts.header_digest,
        header_bytes=facts.header_bytes,
        file_bytes=facts.file_bytes,
        architecture=facts.architecture,
        n_vocab=n_vocab,
        rope=rope_settings(facts),
        adapters=tuple((one.xxh3_128, one.scale) for one in loaded),
    )
    return Owner(identity, loaded, build)


def park(
    path: Path,
    books: Sequence[SequenceSnapshot],
    *,
    placement: Placement,
    owner: Owner,
    sealed: Sequence[tuple[int, Seal]],
) -> bool:
    """Write a session to a file.

    Args:
        path: where; its folder is made.
        books: what every sequence holds.
        placement: where it served.
        owner: whose it is.
        sealed: carries that arenas still hold, with the arenas' descriptors, best first.

    Returns:
        Whether the state is in it; else the tokens alone are.

    Raises:
        CarryNotWritten: the disk or the path does not allow it.
        OSError: the folder cannot be made.
    """
    path.parent.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    carry = _with_state(books, sealed) or _tokens_alone(books, placement, owner)
    carries.write(path, carries.seal(carry))
    return bool(len(carry.state))


def _with_state(books: Sequence[SequenceSnapshot], sealed: Sequence[tuple[int, Seal]]) -> Carry | None:
    """Find a sealed carry that the books have not left behind."""
    for fd, seal in sealed:
        try:
            carry = take(Arena(fd), seal)
        except (CarryDamaged, OSError, ValueError):
            # Its worker died over it, or memory is short: another one, or the tokens, will do.
            continue
        held = {one.seq_id: one for one in carry.sequences}
        if held.keys() == {book.seq_id for book in books} and all(_is_of(held[book.seq_id], book) for book in books):
            return dataclasses.replace(carry, sequences=tuple(_gone_on(held[book.seq_id], book) for book in books))
    return None


def _is_of(sequence: SequenceCarry, book: SequenceSnapshot) -> bool:
    """Tell whether a sequence's rows are those of a book's tokens, but for one that is still to be decoded."""
    n_past = len(book.tokens) - book.is_pending
    return n_past == sequence.n_past and sequence.tokens[:n_past].tolist() == list(book.tokens[:n_past])


def _gone_on(sequence: SequenceCarry, book: SequenceSnapshot) -> SequenceCarry:
    """Give a sequence the token that was drawn since it was sealed."""
    tokens = _row(book.tokens)
    sampler = book.sampler or sequence.sampler
    is_same = sampler == sequence.sampler and np.array_equal(tokens, sequence.tokens)
    return dataclasses.replace(
        sequence,
        tokens=tokens,
        sampler=sampler,
        accepted=sequence.accepted if is_same else tokens,
        n_draws=book.n_draws if book.sampler is not None else sequence.n_draws,
    )


def _tokens_alone(books: Sequence[SequenceSnapshot], placement: Placement, owner: Owner) -> Carry:
    representation = Representation(
        build=owner.build,
        type_k=placement.type_k,
        type_v=placement.type_v,
        v_trans=placement.flash_attn is FlashAttn.OFF,
        n_stream=1 if placement.kv_unified else placement.n_seq_max,
        n_seq_max=placement.n_seq_max,
        state_version=0,
    )
    return Carry(
        state=memoryview(b""),
        sequences=tuple(_sequence(book) for book in books),
        adapters=owner.adapters,
        placement=placement,
        fingerprint=Fingerprint(owner.identity, representation),
    )


def _sequence(book: SequenceSnapshot) -> SequenceCarry:
    tokens = _row(book.tokens)
    return SequenceCarry(
        seq_id=book.seq_id,
        tokens=tokens,
        n_past=len(book.tokens) - book.is_pending,
        logits=no_logits(),
        output_ids=no_tokens(),
        sampler=book.sampler or SamplerSpec(),
        accepted=no_tokens() if book.sampler is None else tokens,
        n_draws=book.n_draws,
        encoder_tokens=_row(book.encoder_tokens),
    )


def _row(tokens: Sequence[int]) -> NDArray[np.int32]:
    return np.array(tokens, np.int32)


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
