"""Orders and reports of a bench; `ipc/orders.py` has the others, and what holds for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from splitctl.placement import Placement


@dataclass(frozen=True, slots=True)
class Measure:
    """Time some work in a session that is opened for it alone (`bench`). Answered by Measured, after a Timed for each.

    What is left at its default is not done. Before what counts something alike is done that does not.

    Attributes:
        reads: tokens to read at once into an empty sequence, each by itself.
        n_seqs: sequences to generate together, each after a few tokens.
        depths: tokens that a sequence holds when `chunk` more are read into it, ascending; after each it generates.
        chunk: tokens.
        n_steps: steps of a generation that count.
        crowd: tokens to read into a second sequence, which generates then: once alone, before the first of `depths`,
            and once beside all that the first sequence holds, after the last.
        target: where to switch to; the first sequence generates after it.
        n_held: tokens that the first sequence holds at the switch.
    """

    order: int
    reads: tuple[int, ...] = ()
    n_seqs: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    chunk: int = 0
    n_steps: int = 1
    crowd: int = 0
    target: Placement | None = None
    n_held: int = 0


@dataclass(frozen=True, slots=True)
class Timed:
    """One thing that was timed.

    Attributes:
        is_read: whether `n` tokens were read at once; else one token was generated for each of `n` sequences.
        depth: tokens that the sequence, or each of them, held before.
        seconds: what it took; of several steps the mean.
        n_others: tokens that another sequence held; None: it was not timed for what these cost.
    """

    order: int
    is_read: bool
    n: int
    depth: int
    seconds: float
    n_others: int | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """All of a Measure is done; `outcome` is that of its switch, confirmed, or None without one."""

    order: int
    outcome: dict[str, Any] | None = None
