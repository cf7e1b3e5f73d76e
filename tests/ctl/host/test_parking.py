"""A session that no worker can serve, on disk: its state where that is still its own, else its tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from splitctl.carry import file as carries
from splitctl.carry import seal as seals
from splitctl.carry.arena import Arena
from splitctl.carry.file import Carry
from splitctl.carry.sampling import SamplerSpec
from splitctl.errors import BadModelFile, CarryNotWritten
from splitctl.host.parking import Owner, owner_of, park
from splitctl.ipc.orders import AdapterFile, SequenceSnapshot
from splitctl.placement import FlashAttn, Placement
from tests.ctl.carry.test_carry import N_VOCAB, a_carry, a_sequence, assert_same
from tests.stublib import write_model

PLACEMENT = Placement(n_ctx=64, n_seq_max=2, type_k="q8_0", flash_attn=FlashAttn.OFF)


@pytest.fixture
def fd() -> Iterator[int]:
    """A memory file."""
    made = os.memfd_create("arena")
    yield made
    os.close(made)


def _sealed(fd: int, carry: Carry) -> list[tuple[int, seals.Seal]]:
    arena = Arena(fd)
    arena.reserve(max(len(carry.state), 1))
    arena.view(len(carry.state))[:] = carry.state
    return [(fd, seals.put(arena, 0, carry, xxhash.xxh3_128_digest(carry.state)))]


def _owner(carry: Carry) -> Owner:
    return Owner(carry.fingerprint.identity, carry.adapters, "b")


def _held(carry: Carry) -> list[SequenceSnapshot]:
    """What the ledger says of a session that is in a carry."""
    return [
        SequenceSnapshot(
            one.seq_id,
            tuple(one.tokens.tolist()),
            is_pending=one.n_past < one.tokens.size,
            sampler=one.sampler,
            n_draws=one.n_draws,
            encoder_tokens=tuple(one.encoder_tokens.tolist()),
            grammar=one.grammar,
            n_ruled=one.n_ruled,
        )
        for one in carry.sequences
    ]


def _park(path: Path, carry: Carry, held: list[SequenceSnapshot], sealed: list[tuple[int, seals.Seal]]) -> Carry:
    has_state = park(path, held, placement=PLACEMENT, owner=_owner(carry), sealed=sealed)
    written = carries.read(path).carry
    assert has_state == bool(len(written.state))
    return written


def test_a_sealed_session_is_parked_whole(tmp_path: Path, fd: int) -> None:
    """Where the session holds what was sealed, the file is the sealed carry, in a folder of its owner alone."""
    carry = a_carry()
    path = tmp_path / "made" / "x.safetensors"
    assert_same(_park(path, carry, _held(carry), _sealed(fd, carry)), carry)
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_token_that_was_drawn_since_is_parked_too(tmp_path: Path, fd: int) -> None:
    """The newest token belongs to the state although it is not decoded yet; so do the draws that were made."""
    carry = a_carry(sequences=(a_sequence(0),))
    (one,) = _held(carry)
    one = replace(
        one, tokens=(*one.tokens, 4), is_pending=True, n_draws=one.n_draws + 1, grammar="root ::= [a-z]", n_ruled=1
    )
    written = _park(tmp_path / "x", carry, [one], _sealed(fd, carry))
    (sequence,) = written.sequences
    assert sequence.tokens.tolist() == sequence.accepted.tolist() == list(one.tokens)
    assert (sequence.grammar, sequence.n_ruled) == (one.grammar, 1)
    assert (sequence.n_past, sequence.n_draws, len(written.state)) == (
        len(one.tokens) - 1,
        one.n_draws,
        len(carry.state),
    )


@pytest.mark.parametrize(
    "change", ["tokens", "prompt", "more", "fewer sequences", "another sequence", "damaged", "gone"]
)
def test_a_session_that_has_gone_on_is_parked_as_its_tokens(tmp_path: Path, fd: int, change: str) -> None:
    """A state that is of other tokens, or that is damaged, is not written: it would be believed."""
    carry = a_carry(sequences=(a_sequence(0), a_sequence(1)))
    sealed, held = _sealed(fd, carry), _held(carry)
    if change == "tokens":
        held[0] = replace(held[0], tokens=((held[0].tokens[0] + 1) % N_VOCAB, *held[0].tokens[1:]))
    elif change == "prompt":
        held[0] = replace(held[0], encoder_tokens=(*held[0].encoder_tokens, 1))
    elif change == "more":
        held[0] = replace(held[0], tokens=(*held[0].tokens, 1, 2), is_pending=True)
    elif change == "fewer sequences":
        del held[1]
    elif change == "another sequence":
        held[1] = replace(held[1], seq_id=3)
    elif change == "damaged":
        os.pwrite(fd, b"\xff\x00\xff", 0)
    else:
        sealed = []
    written = park(
        tmp_path / "x",
        held,
        placement=replace(PLACEMENT, n_seq_max=4),
        owner=_owner(carry),
        sealed=sealed,
    )
    read = carries.read(tmp_path / "x").carry
    assert (written, len(read.state)) == (False, 0)
    assert [one.tokens.tolist() for one in read.sequences] == [list(one.tokens) for one in held]
    assert [(one.grammar, one.n_ruled) for one in read.sequences] == [(one.grammar, one.n_ruled) for one in held]
    assert [one.n_past for one in read.sequences] == [len(one.tokens) - one.is_pending for one in held]
    assert [one.logits.size for one in read.sequences] == [0] * len(held)
    representation = read.fingerprint.representation
    assert (representation.type_k, representation.v_trans, representation.n_stream) == ("q8_0", True, 4)
    assert read.fingerprint.identity == carry.fingerprint.identity


def test_the_next_best_seal_is_taken(tmp_path: Path, fd: int) -> None:
    """A seal that the session has left behind does not hide an older one that is still its own."""
    carry = a_carry()
    other = os.memfd_create("arena")
    try:
        newer = _sealed(other, a_carry(sequences=(a_sequence(0, n_tokens=7),)))
        assert len(_park(tmp_path / "x", carry, _held(carry), [*newer, *_sealed(fd, carry)]).state)
    finally:
        os.close(other)


def test_a_sequence_that_nothing_drew_from_is_parked_plainly(tmp_path: Path) -> None:
    """Without a sampler nothing was drawn, and nothing is replayed."""
    carry = a_carry()
    written = _park(tmp_path / "x", carry, [SequenceSnapshot(0, (1, 2))], [])
    assert (written.sequences[0].sampler, written.sequences[0].accepted.size) == (SamplerSpec(), 0)


def test_a_disk_that_takes_nothing_is_an_error(tmp_path: Path) -> None:
    """What cannot be written is said, not swallowed."""
    (tmp_path / "x").mkdir()
    carry = a_carry()
    with pytest.raises(CarryNotWritten):
        park(tmp_path / "x", [SequenceSnapshot(0, (1, 2))], placement=PLACEMENT, owner=_owner(carry), sealed=[])


def test_whose_a_session_is_is_read_from_its_files(tmp_path: Path) -> None:
    """The model's header and the adapters' bytes say it; files that are not there are an error."""
    model, lora = write_model(tmp_path / "m.gguf"), tmp_path / "a.gguf"
    lora.write_bytes(b"lora")
    owner = owner_of(model, [AdapterFile(lora, 0.5)], n_vocab=260, build="b")
    digest = xxhash.xxh3_128_hexdigest(b"lora")
    assert owner.identity.adapters == ((digest, 0.5),)
    assert (owner.adapters[0].path, owner.identity.n_vocab, owner.build) == (lora, 260, "b")
    with pytest.raises(OSError, match="missing"):
        owner_of(model, [AdapterFile(tmp_path / "missing")], n_vocab=260, build="b")
    with pytest.raises(BadModelFile):
        owner_of(tmp_path / "missing", [], n_vocab=260, build="b")
