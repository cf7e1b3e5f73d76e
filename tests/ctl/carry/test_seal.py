"""A sealed carry in shared memory: it comes out as it went in, and nothing damaged is believed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from splitctl.carry import file as carries
from splitctl.carry import seal as seals
from splitctl.carry.arena import Arena
from splitctl.carry.file import Carry
from splitctl.carry.tensorfile import MAX_HEADER_BYTES
from splitctl.errors import CarryDamaged
from tests.ctl.carry.test_carry import a_carry, assert_same


@pytest.fixture
def fd() -> Iterator[int]:
    """A memory file."""
    made = os.memfd_create("arena")
    yield made
    os.close(made)


def _put(fd: int, carry: Carry) -> seals.Seal:
    arena = Arena(fd)
    if carry.state:
        arena.reserve(len(carry.state))
        arena.view(len(carry.state))[:] = carry.state
    return seals.put(arena, 1, carry, xxhash.xxh3_128_digest(carry.state))


@pytest.mark.parametrize("n_bytes", [0, 1, 4096, 4097, 3 << 20])
def test_what_is_put_is_taken_out_by_another(fd: int, n_bytes: int) -> None:
    """Whoever holds the memory and knows the seal has the whole carry."""
    carry = a_carry(state=bytes(range(251)) * (n_bytes // 251) + bytes(n_bytes % 251))
    seal = _put(fd, carry)
    assert (seal.arena, seal.state_bytes, seal.placement) == (1, n_bytes, carry.placement)
    assert seal.rest_offset % 4096 == 0
    taken = seals.take(Arena(fd), seal)
    assert_same(taken, carry)
    assert taken.state.readonly


@pytest.mark.parametrize("where", ["state", "rest", "rest_end"])
def test_a_changed_byte_is_found(fd: int, where: str) -> None:
    """Checksums cover every byte of both parts."""
    seal = _put(fd, a_carry())
    at = {"state": 3, "rest": seal.rest_offset, "rest_end": seal.rest_offset + seal.rest_bytes - 1}[where]
    (byte,) = os.pread(fd, 1, at)
    os.pwrite(fd, bytes([byte ^ 1]), at)
    with pytest.raises(CarryDamaged, match="checksum"):
        seals.take(Arena(fd), seal)


def test_a_seal_that_contradicts_itself_is_refused(fd: int) -> None:
    """Places that overlap or have no length are no carry's, and what is no state is none of a sequence."""
    seal = _put(fd, a_carry())
    backwards = seals.Segment(0, -1, 5, "00" * 16)
    no_state = seals.Segment(0, 0, 3, xxhash.xxh3_128_hexdigest(a_carry().state[:3]))
    for wrong in (
        replace(seal, state_bytes=-1),
        replace(seal, state_bytes=1 << 20),
        replace(seal, rest_bytes=-5),
        replace(seal, segments=(backwards,)),
        replace(seal, segments=(no_state,)),
    ):
        with pytest.raises(CarryDamaged):
            seals.take(Arena(fd), wrong)


def test_memory_that_is_lost_is_no_carry(fd: int) -> None:
    """A file that was cut short reads as zeros, which nothing was sealed as."""
    seal = _put(fd, a_carry())
    os.ftruncate(fd, 0)
    with pytest.raises(CarryDamaged):
        seals.take(Arena(fd), seal)


def test_bytes_are_those_of_a_file() -> None:
    """A carry in bytes comes back whole, with the checksums that it was sealed with."""
    sealed = carries.seal(a_carry())
    back = carries.from_bytes(carries.to_bytes(sealed))
    assert_same(back.carry, sealed.carry)
    assert back.checksums == sealed.checksums


@given(st.data())
def test_damaged_bytes_are_one_known_error(data: st.DataObject) -> None:
    """Whatever was changed or cut off, it is CarryDamaged and nothing else."""
    packed = bytearray(carries.to_bytes(carries.seal(a_carry())))
    n_header = 8 + int.from_bytes(packed[:8], "little")
    at = data.draw(st.integers(0, len(packed) - 1) | st.integers(0, n_header - 1))
    if data.draw(st.booleans()):
        del packed[at:]
    else:
        packed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CarryDamaged):
        carries.from_bytes(bytes(packed))


@pytest.mark.parametrize(
    "packed",
    [b"", b"\0" * 8, (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}", b"\x02\0\0\0\0\0\0\0{}", b"\xff" * 64],
)
def test_other_bytes_are_no_carry(packed: bytes) -> None:
    """Too short, too long, and nothing at all."""
    with pytest.raises(CarryDamaged):
        carries.from_bytes(packed)
