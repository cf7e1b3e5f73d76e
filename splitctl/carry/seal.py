"""A sealed carry in an arena: put there whole, and taken out again by whoever holds the memory.

Law: nothing of it is used before its checksums have been verified.
"""

from __future__ import annotations

import dataclasses
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from splitctl.carry.digest import digest
from splitctl.errors import CarryDamaged
from splitctl.placement import Placement

if TYPE_CHECKING:
    from splitctl.carry.arena import Arena
    from splitctl.carry.file import Carry


@dataclass(frozen=True, slots=True)
class Seal:
    """A sealed carry in shared memory.

    Attributes:
        arena: which of the session's two arenas holds it, 0 or 1.
        state_bytes: the library's bytes, from the arena's start.
        state_digest: their checksum (`splitctl.carry.digest`), 32 hex digits.
        rest_offset: where everything else of the carry begins, bytes from the arena's start.
        rest_bytes: its length: a carry as `splitctl.carry.file` writes it, without the state.
        rest_digest: xxh3-128 of it.
        placement: where the state was made.
    """

    arena: int
    state_bytes: int
    state_digest: str
    rest_offset: int
    rest_bytes: int
    rest_digest: str
    placement: Placement


def put(arena: Arena, index: int, carry: Carry, checksum: bytes) -> Seal:
    """Put what belongs to a state behind it, so that the arena holds the whole carry; returns where everything lies.

    Args:
        arena: shared memory, whose first bytes are the carry's state.
        index: which of the session's arenas it is.
        carry: the carry.
        checksum: that of its state (`splitctl.carry.digest`).

    Raises:
        CarryDamaged: the carry contradicts itself.
        OSError: the arena cannot grow by as much.
        ValueError: the carry's description is larger than a reader accepts.
    """
    from splitctl.carry import file as carries  # noqa: PLC0415 - numpy, which messages that name a seal do without

    n_state = len(carry.state)
    rest = carries.to_bytes(carries.seal(dataclasses.replace(carry, state=memoryview(b""))))
    offset = -(-n_state // mmap.PAGESIZE) * mmap.PAGESIZE
    end = offset + len(rest)
    arena.reserve(end)
    arena.view(end)[offset:] = rest
    return Seal(index, n_state, checksum.hex(), offset, len(rest), xxhash.xxh3_128_hexdigest(rest), carry.placement)


def take(arena: Arena, seal: Seal, *, is_state_proved: bool = False) -> Carry:
    """Take a sealed carry out of an arena. Lifetime: its state is a view of the arena.

    With ``is_state_proved`` the state's checksum is left to the caller, who holds it against what comes of the state.

    Raises:
        CarryDamaged: the memory does not hold what was sealed.
        OSError: the memory cannot be mapped.
    """
    from splitctl.carry import file as carries  # noqa: PLC0415 - as in `put`

    end = seal.rest_offset + seal.rest_bytes
    if not 0 <= seal.state_bytes <= seal.rest_offset or seal.rest_bytes < 0:
        raise CarryDamaged(None, f"its state ends at {seal.state_bytes}, what follows begins at {seal.rest_offset}")
    arena.reserve(end)
    whole = arena.view(end)
    state, rest = whole[: seal.state_bytes], bytes(whole[seal.rest_offset :])
    if not is_state_proved:
        verify_state(state, seal)
    _verify("all but its state", xxhash.xxh3_128_hexdigest(rest), seal.rest_digest)
    return dataclasses.replace(carries.from_bytes(rest).carry, state=state.toreadonly())


def verify_state(state: memoryview, seal: Seal) -> None:
    """Refuse a state that is not the sealed one; raises CarryDamaged."""
    _verify("its state", digest(state).hex(), seal.state_digest)


def _verify(what: str, found: str, sealed: str) -> None:
    if found != sealed:
        raise CarryDamaged(None, f"what it was sealed with is not the checksum of {what}")
