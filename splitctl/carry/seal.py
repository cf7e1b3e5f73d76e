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
    from collections.abc import Mapping

    from splitctl.carry.arena import Arena
    from splitctl.carry.file import Carry
    from statecodec import StateImage


@dataclass(frozen=True, slots=True)
class Segment:
    """The state of one sequence, as the library gives it, in an arena.

    Attributes:
        seq_id: the sequence.
        offset: where it begins, bytes from the arena's start.
        n_bytes: its length.
        digest: its checksum (`splitctl.carry.digest`), 32 hex digits.
    """

    seq_id: int
    offset: int
    n_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Seal:
    """A sealed carry in shared memory.

    Attributes:
        arena: which of the session's two arenas holds it, 0 or 1.
        state_bytes: the library's bytes, from the arena's start; of all segments where there are any.
        state_digest: their checksum (`splitctl.carry.digest`), 32 hex digits; empty where there are segments.
        rest_offset: where everything else of the carry begins, bytes from the arena's start.
        rest_bytes: its length: a carry as `splitctl.carry.file` writes it, without the state.
        rest_digest: xxh3-128 of it.
        placement: where the state was made.
        segments: the state sequence by sequence, in place of that of all.
    """

    arena: int
    state_bytes: int
    state_digest: str
    rest_offset: int
    rest_bytes: int
    rest_digest: str
    placement: Placement
    segments: tuple[Segment, ...] = ()


def put(arena: Arena, index: int, carry: Carry, checksum: bytes, segments: tuple[Segment, ...] = ()) -> Seal:
    """Put what belongs to a state behind it, so that the arena holds the whole carry; returns where everything lies.

    Args:
        arena: shared memory, whose first bytes are the carry's state.
        index: which of the session's arenas it is.
        carry: the carry.
        checksum: that of its state (`splitctl.carry.digest`).
        segments: where its state lies in the arena, which is then in neither of both.

    Raises:
        CarryDamaged: the carry contradicts itself.
        OSError: the arena cannot grow by as much.
        ValueError: the carry's description is larger than a reader accepts.
    """
    from splitctl.carry import file as carries  # noqa: PLC0415 - numpy, which messages that name a seal do without

    n_state = sum(one.n_bytes for one in segments) or len(carry.state)
    n_taken = max((one.offset + one.n_bytes for one in segments), default=n_state)
    rest = carries.to_bytes(carries.seal(dataclasses.replace(carry, state=memoryview(b""))))
    offset = paged(n_taken)
    end = offset + len(rest)
    arena.reserve(end)
    arena.view(end)[offset:] = rest
    rest_digest = xxhash.xxh3_128_hexdigest(rest)
    return Seal(index, n_state, checksum.hex(), offset, len(rest), rest_digest, carry.placement, segments)


def paged(n_bytes: int) -> int:
    """Round up to whole pages."""
    return -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def take(arena: Arena, seal: Seal, *, is_state_proved: bool = False) -> Carry:
    """Take a sealed carry out of an arena.

    Lifetime: its state is a view of the arena; one that lies there by sequences is put together in memory of its own.

    With ``is_state_proved`` the checksum of a state in one piece is left to the caller, who holds it against what comes
    of the state.

    Raises:
        CarryDamaged: the memory does not hold what was sealed.
        OSError: the memory cannot be mapped.
    """
    if seal.segments:
        carry = take_rest(arena, seal)
        views = {one.seq_id: view_of(arena, one) for one in seal.segments}
        for one in seal.segments:
            verify(views[one.seq_id], one)
        return dataclasses.replace(carry, state=_put_together(views, carry))
    if not 0 <= seal.state_bytes <= seal.rest_offset:
        raise CarryDamaged(None, f"its state ends at {seal.state_bytes}, what follows begins at {seal.rest_offset}")
    carry = take_rest(arena, seal)
    state = arena.view(seal.state_bytes)
    if not is_state_proved:
        verify_state(state, seal)
    return dataclasses.replace(carry, state=state.toreadonly())


def take_rest(arena: Arena, seal: Seal) -> Carry:
    """Take out all of a sealed carry but its state, which is empty; errors as for :func:`take`."""
    from splitctl.carry import file as carries  # noqa: PLC0415 - as in `put`

    end = seal.rest_offset + seal.rest_bytes
    if seal.rest_offset < 0 or seal.rest_bytes < 0:
        raise CarryDamaged(None, f"what is not its state has {seal.rest_bytes} bytes from {seal.rest_offset} on")
    arena.reserve(end)
    rest = bytes(arena.view(end)[seal.rest_offset :])
    _verify("all but its state", xxhash.xxh3_128_hexdigest(rest), seal.rest_digest)
    return carries.from_bytes(rest).carry


def view_of(arena: Arena, segment: Segment) -> memoryview:
    """Give the bytes of a segment, not verified; errors as for :func:`take`."""
    if segment.offset < 0 or segment.n_bytes < 0:
        raise CarryDamaged(None, f"sequence {segment.seq_id} has {segment.n_bytes} bytes from {segment.offset} on")
    end = segment.offset + segment.n_bytes
    arena.reserve(end)
    return arena.view(end)[segment.offset :]


def verify(view: memoryview, segment: Segment) -> None:
    """Refuse bytes that are not those of a segment; raises CarryDamaged."""
    _verify(f"the state of sequence {segment.seq_id}", digest(view).hex(), segment.digest)


def merged(images: Mapping[int, StateImage], architecture: str, n_streams: int) -> StateImage:
    """Put the states of sequences together to that of a context with a stream for each; nothing is copied.

    Its bytes are those that the library writes of such a context. Source: seen on builds 9713 to 11549.

    Raises:
        CarryDamaged: they do not go together.
    """
    import statecodec  # noqa: PLC0415 - as in `put`

    try:
        return statecodec.transcode.merge(images, architecture=architecture, n_stream=n_streams)
    except statecodec.NotRepresentable as error:
        raise CarryDamaged(None, str(error)) from error


def _put_together(views: Mapping[int, memoryview], carry: Carry) -> memoryview:
    import statecodec  # noqa: PLC0415 - as in `put`

    architecture, n_streams = carry.fingerprint.identity.architecture, carry.placement.n_streams
    facts = statecodec.ModelFacts(architecture=architecture, n_seq_max=n_streams)
    try:
        images = {seq_id: statecodec.parse(view, facts=facts) for seq_id, view in views.items()}
    except statecodec.StateFormatError as error:
        raise CarryDamaged(None, str(error)) from error
    return memoryview(b"".join(statecodec.emit(merged(images, architecture, n_streams))))


def verify_state(state: memoryview, seal: Seal) -> None:
    """Refuse a state that is not the sealed one; raises CarryDamaged."""
    _verify("its state", digest(state).hex(), seal.state_digest)


def _verify(what: str, found: str, sealed: str) -> None:
    if found != sealed:
        raise CarryDamaged(None, f"what it was sealed with is not the checksum of {what}")
