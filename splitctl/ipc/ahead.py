"""Orders and reports by which idle sequences go to a second worker before the others: see `splitctl.ipc.orders`."""

from __future__ import annotations

from dataclasses import dataclass

from splitctl.carry.seal import Segment


@dataclass(frozen=True, slots=True)
class CopyAhead:
    """Copy the idle sequences for a second worker, one between two decodes. Answered by CopiedAhead, or Failed."""

    order: int


@dataclass(frozen=True, slots=True)
class TakeAhead:
    """Restore and prove sequences that another worker has copied; for a standby. Answered by TookAhead, or Failed.

    Attributes:
        arena: which of the session's two arenas holds them, 0 or 1.
        segments: where they lie in it.
    """

    order: int
    arena: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class CopiedAhead:
    """Where idle sequences lie, for as long as they stay idle: an arena, 0 or 1, and their places in it, if any."""

    order: int
    arena: int = 0
    segments: tuple[Segment, ...] = ()


@dataclass(frozen=True, slots=True)
class TookAhead:
    """The sequences are restored and proved; or none is, because the library did not take one as it was copied."""

    order: int
    is_done: bool = True
