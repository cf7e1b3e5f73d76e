"""What is tried after a worker was lost, and in which order. Pure.

A process that dies takes the switch within it along: where the session goes on then is said here, and nowhere else.

Laws:
    1. The placement that the session is at home in comes first: where it served before the switch that is under way or
       on trial, once that has sealed; else where it serves.
    2. A sealed carry is tried before tokens are read again, and only while its arena still holds it.
    3. Nothing is tried twice for ever: a loss without a token since the last one goes on to the next attempt, unless a
       client's order has failed by it.
    4. A worker that somebody killed says nothing about what it was trying: that is tried again, a few times.
    5. The last attempt but parking is to serve without the streams over which workers died: one request does not take
       the session from everybody else.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from splitctl.carry.seal import Seal
from splitctl.placement import Placement

#: Workers that may be killed from outside, or die while they had nothing to do, one after the other, before that counts
#: as a failed attempt.
_FORGIVEN = 3


@dataclass(frozen=True, slots=True)
class Attempt:
    """One thing to try.

    Attributes:
        placement: where.
        seal: the carry to begin with; None: all tokens are read again.
        drops_streams: the streams that have had no token since the last loss are ended first.
    """

    placement: Placement
    seal: Seal | None = None
    drops_streams: bool = False


@dataclass(frozen=True, slots=True)
class Loss:
    """What is known when a worker is lost.

    Attributes:
        home: where the session belongs.
        seal: the carry that goes with it; None where there is none.
        previous: where it served before that; None where it did not.
        target: where a switch was to bring it; None without one under way or on trial.
        had_progress: a token has come since the last loss, or there was none, or a client's order has failed by it.
        was_idle: the worker had nothing to do.
        was_killed: somebody else ended it: the system that is short of memory, or a person.
    """

    home: Placement
    seal: Seal | None = None
    previous: Placement | None = None
    target: Placement | None = None
    had_progress: bool = True
    was_idle: bool = False
    was_killed: bool = False


def attempts(loss: Loss) -> tuple[Attempt, ...]:
    """Give what is to be tried, best first; after the last attempt the session is parked."""
    found = [Attempt(loss.home)]
    if loss.seal is not None:
        found.insert(0, Attempt(loss.home, loss.seal))
    # A placement in which a switch has just died is not tried again.
    taken = [loss.home] if loss.target is None else [loss.home, loss.target]
    if loss.previous is not None and all(loss.previous.differs(one) for one in taken):
        found.append(Attempt(loss.previous))
    return (*found, Attempt(loss.home, drops_streams=True))


class Recovery:
    """Where the session stands in its attempts."""

    def __init__(self) -> None:
        self._left: list[Attempt] = []
        self._n_forgiven = 0

    def lost(self, loss: Loss) -> None:
        """Note that a serving worker is gone."""
        if loss.had_progress:
            self._n_forgiven = 0
        if loss.had_progress or loss.target is not None or self._is_forgiven(loss.was_idle or loss.was_killed):
            self._left = list(attempts(loss))

    def failed(self, attempt: Attempt, *, was_killed: bool) -> None:
        """Note that a worker is gone which was to serve by an attempt, and whether somebody else ended it."""
        if self._is_forgiven(was_killed):
            self._left.insert(0, attempt)
        elif attempt.seal is None and not was_killed:
            # Without its streams the session is opened by the same order, which would fail again.
            self._left = [one for one in self._left if one != Attempt(attempt.placement, drops_streams=True)]

    def _is_forgiven(self, is_no_fault: bool) -> bool:  # noqa: FBT001 - private
        self._n_forgiven += is_no_fault
        return is_no_fault and self._n_forgiven <= _FORGIVEN

    def next(self, seals: Collection[Seal]) -> Attempt | None:
        """Give the next attempt that is possible with the carries that arenas still hold; None: nothing is left."""
        while self._left:
            attempt = self._left.pop(0)
            if attempt.seal is None or attempt.seal in seals:
                return attempt
        return None
