"""The carry: everything of a session that travels to another placement, process or day, with the seal that proves it.

Laws:
    1. A carry that contradicts itself is never sealed, and a file that is not exactly what was sealed is never read.
    2. The state is never copied: it is hashed and written where it lies, and read into memory once.

On disk it is one safetensors file: tensors ``state`` (uint8) and ``seq.<id>.tokens|logits|output_ids|accepted|
encoder_tokens``; its metadata holds the rest as JSON texts, the checksum of every tensor, and a checksum of all that.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from splitctl.carry.sequence import SequenceCarry
from splitctl.carry.tensorfile import PackedTensors, TensorFile, pack_tensors, view_of, write_tensors
from splitctl.carry.text import SequenceWords, Words, dump, from_texts, to_texts
from splitctl.errors import CarryDamaged, CarryMismatch, CarryNotWritten

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from splitctl.carry.fingerprint import Adapter, Fingerprint
    from splitctl.carry.tensorfile import TensorSlot
    from splitctl.errors import Difference
    from splitctl.placement import Placement

FORMAT = "splitctl-carry"
"""What ``format`` says in the metadata of a carry."""

VERSION = "1"
"""What ``version`` says; a reader reads exactly its own."""

_STATE = "state"
_ABOUT = "about"
_ROWS = ("tokens", "logits", "output_ids", "accepted", "encoder_tokens")


@dataclass(frozen=True, slots=True, eq=False)
class Carry:
    """Everything that travels.

    Args:
        state: the library's bytes for all sequences, flat; empty for a model without a memory.
        sequences: what else belongs to each sequence.
        adapters: adapters that the session loaded from files, in the order they are applied.
        placement: where it was made.
        fingerprint: what it belongs to.

    Lifetime: state and arrays are borrowed; changing them breaks the seal.
    """

    state: memoryview
    sequences: tuple[SequenceCarry, ...]
    adapters: tuple[Adapter, ...]
    placement: Placement
    fingerprint: Fingerprint

    @property
    def n_tokens(self) -> int:
        """Tokens over all sequences."""
        return sum(one.tokens.size for one in self.sequences)

    def problems(self) -> tuple[str, ...]:
        """Return what contradicts itself, one phrase each; empty when the carry is sound."""
        found = [f"sequence {one.seq_id}: {text}" for one in self.sequences for text in one.problems()]
        if found:
            return tuple(found)
        ids = [one.seq_id for one in self.sequences]
        n_seq_max, n_vocab = self.fingerprint.representation.n_seq_max, self.fingerprint.identity.n_vocab
        if len(set(ids)) != len(ids):
            found.append("a sequence id comes twice")
        if any(seq_id >= n_seq_max for seq_id in ids):
            found.append(f"sequence {max(ids)} in a context of {n_seq_max}")
        if self.state.ndim != 1 or self.state.itemsize != 1 or not self.state.c_contiguous:
            found.append(f"the state is a view of format {self.state.format!r}, wanted a flat row of bytes")
        found += [f"an adapter has the scale of {one.scale}" for one in self.adapters if not math.isfinite(one.scale)]
        if tuple((one.xxh3_128, one.scale) for one in self.adapters) != self.fingerprint.identity.adapters:
            found.append("the adapters are not those of the fingerprint")
        for one in self.sequences:
            if one.logits.size and one.logits.shape[1] != n_vocab:
                found.append(f"sequence {one.seq_id}: rows of {one.logits.shape[1]} logits, vocabulary of {n_vocab}")
            if any(row.size and row.max() >= n_vocab for row in (one.tokens, one.accepted, one.encoder_tokens)):
                found.append(f"sequence {one.seq_id}: a token is not in the vocabulary of {n_vocab}")
        return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class SealedCarry:
    """A carry with its checksums.

    Args:
        carry: the carry.
        checksums: tensor name -> xxh3-128, 32 hex digits; ``about`` covers everything that is not a tensor's bytes.
    """

    carry: Carry
    checksums: Mapping[str, str]


def seal(carry: Carry) -> SealedCarry:
    """Check a carry, which must not change from here on, against itself and take its checksums; copies nothing.

    Raises:
        CarryDamaged: it contradicts itself.
    """
    if problems := carry.problems():
        raise CarryDamaged(None, "; ".join(problems))
    return SealedCarry(carry, _checksums(_words(carry), _tensors(carry)))


def verify(sealed: SealedCarry, path: Path | None = None) -> None:
    """Check that a sealed carry is still what was sealed, every byte of it; ``path`` is for the message.

    Raises:
        CarryDamaged: something differs; it says what.
    """
    if problems := sealed.carry.problems():
        raise CarryDamaged(path, "; ".join(problems))
    _refuse_changed(path, _checksums(_words(sealed.carry), _tensors(sealed.carry)), sealed.checksums)


def check(path: Path, words: Words, tensors: Mapping[str, NDArray[Any]], checksums: Mapping[str, str]) -> None:
    """Check that a carry whose tensors are at hand one by one is what was sealed; ``path`` is for the message.

    Raises:
        CarryDamaged: something differs, is missing or too much; it says what.
    """
    _refuse_other_tensors(path, tensors, words)
    _refuse_changed(path, _checksums(words, tensors), checksums)


def _refuse_changed(path: Path | None, now: Mapping[str, str], then: Mapping[str, str]) -> None:
    if changed := sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name)):
        raise CarryDamaged(path, f"what it was sealed with is not the checksum of: {', '.join(changed)[:200]}")


def check_fits(carry: Carry, session: Fingerprint) -> tuple[Difference, ...]:
    """Check that a carry belongs to the model and adapters of a session, whose own carry would have its fingerprint.

    Returns:
        Differences of representation, which the caller converts or refuses by name.

    Raises:
        CarryMismatch: the identities differ: another model, vocabulary, rope setting, adapter or scale.
    """
    identity, representation = carry.fingerprint.differences(session)
    if identity:
        raise CarryMismatch(identity)
    return representation


def write(path: Path, sealed: SealedCarry) -> None:
    """Verify a sealed carry and put it on disk, whole or not at all; replaces a file, follows no link.

    Raises:
        CarryDamaged: it is not what was sealed.
        CarryNotWritten: the disk or the path does not allow it.
    """
    verify(sealed)
    try:
        write_tensors(path, _tensors(sealed.carry), _metadata(sealed))
    except (OSError, ValueError) as error:
        raise CarryNotWritten(path, getattr(error, "strerror", None) or str(error)) from error


def read(path: Path) -> SealedCarry:
    """Read a carry into memory of its own and verify every byte of it; its state is read-only.

    Raises:
        CarryDamaged: missing, cut short, damaged, or not a carry; it says what was found.
    """
    with TensorFile(path) as file:
        return _read(path, file)


def read_placement(path: Path) -> Placement:
    """Read where a carry was made, without its tensors, whose checksums are not looked at.

    Raises:
        CarryDamaged: missing, or not a carry; it says what was found.
    """
    with TensorFile(path) as file:
        return _read_words(path, file)[0].placement


def to_bytes(sealed: SealedCarry) -> bytes:
    """Return a sealed carry as the bytes of its file, a copy; :func:`from_bytes` reads them.

    Raises:
        ValueError: its description is larger than a reader accepts.
    """
    return pack_tensors(_tensors(sealed.carry), _metadata(sealed))


def from_bytes(packed: bytes) -> SealedCarry:
    """Read a carry from the bytes of its file, into memory of its own, and verify every byte of it.

    Raises:
        CarryDamaged: they are not a carry, or damaged; it says what was found.
    """
    return _read(None, PackedTensors(packed))


def _read(path: Path | None, file: TensorFile | PackedTensors) -> SealedCarry:
    words, checksums = _read_words(path, file)
    _refuse_other_tensors(path, file.slots, words)
    arrays = {name: file.read(name) for name in file.slots}
    sequences = tuple(
        SequenceCarry(
            seq_id=one.seq_id,
            n_past=one.n_past,
            n_draws=one.n_draws,
            sampler=one.sampler,
            grammar=one.grammar,
            n_ruled=one.n_ruled,
            **{row: arrays[_row_name(one.seq_id, row)] for row in _ROWS},
        )
        for one in words.sequences
    )
    carry = Carry(arrays[_STATE].data.toreadonly(), sequences, words.adapters, words.placement, words.fingerprint)
    if problems := carry.problems():
        raise CarryDamaged(path, "; ".join(problems))
    _refuse_changed(path, _checksums(words, arrays), checksums)
    # The texts may be those of a splitctl with fewer fields; the seal is that of the texts as this one writes them.
    return SealedCarry(carry, {**checksums, _ABOUT: _about(_words(carry), arrays)})


def _read_words(path: Path | None, file: TensorFile | PackedTensors) -> tuple[Words, dict[str, str]]:
    _refuse_foreign(path, file)
    try:
        return from_texts(file.metadata), checksum_texts(file.metadata)
    except (ValueError, RecursionError) as error:
        raise CarryDamaged(path, f"its description is wrong: {error}") from error


def _metadata(sealed: SealedCarry) -> dict[str, str]:
    texts = to_texts(_words(sealed.carry))
    return {"format": FORMAT, "version": VERSION, **texts, "checksums": dump(dict(sealed.checksums))}


def _words(carry: Carry) -> Words:
    sequences = tuple(
        SequenceWords(one.seq_id, one.n_past, one.n_draws, one.sampler, one.grammar, one.n_ruled)
        for one in carry.sequences
    )
    return Words(carry.fingerprint, carry.placement, carry.adapters, sequences)


def _row_name(seq_id: int, row: str) -> str:
    return f"seq.{seq_id}.{row}"


def _tensors(carry: Carry) -> dict[str, NDArray[Any]]:
    tensors: dict[str, NDArray[Any]] = {_STATE: np.frombuffer(carry.state, np.uint8)}
    for one in carry.sequences:
        tensors |= {_row_name(one.seq_id, row): getattr(one, row) for row in _ROWS}
    return tensors


def _checksums(words: Words, tensors: Mapping[str, NDArray[Any]]) -> dict[str, str]:
    """Take the checksum of every tensor, and of everything else."""
    checksums = {name: xxhash.xxh3_128_hexdigest(view_of(array)) for name, array in tensors.items()}
    return {**checksums, _ABOUT: _about(words, tensors)}


def _about(words: Words, tensors: Mapping[str, NDArray[Any]]) -> str:
    table = {name: [str(array.dtype), list(array.shape)] for name, array in tensors.items()}
    return xxhash.xxh3_128_hexdigest(dump([words.texts or to_texts(words), table]).encode())


def checksum_texts(metadata: Mapping[str, str]) -> dict[str, str]:
    """Read the checksums of a carry's metadata.

    Raises:
        ValueError: there are none.
    """
    checksums = json.loads(metadata.get("checksums", "null"))
    if not isinstance(checksums, dict) or not all(isinstance(one, str) for one in checksums.values()):
        raise ValueError("it has no checksums")
    return checksums


def _refuse_foreign(path: Path | None, file: TensorFile | PackedTensors) -> None:
    if file.metadata.get("format") != FORMAT:
        found = f"format {file.metadata.get('format', 'not said')!r:.40} with {len(file.slots)} tensors"
        raise CarryDamaged(path, f"it is a safetensors file of another kind ({found})")
    if file.metadata.get("version") != VERSION:
        raise CarryDamaged(path, f"it is version {file.metadata.get('version')!r:.40}, this splitctl reads {VERSION!r}")


def _refuse_other_tensors(path: Path | None, slots: Mapping[str, TensorSlot | NDArray[Any]], words: Words) -> None:
    wanted = {_STATE, *(_row_name(one.seq_id, row) for one in words.sequences for row in _ROWS)}
    if others := sorted(slots.keys() ^ wanted):
        raise CarryDamaged(path, f"missing from it, or not of its sequences: {', '.join(others)[:200]}")
    state = slots[_STATE]
    if state.dtype != np.uint8 or len(state.shape) != 1:
        raise CarryDamaged(path, f"its state is {state.dtype}{list(state.shape)}, wanted a row of bytes")
