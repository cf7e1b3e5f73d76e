"""A new profile put together with an earlier one of the same key, so that a bench of a part loses nothing of the whole.

Laws:
    1. What was measured anew, and not with less, stands in place of the earlier; all else of the earlier stays.
    2. What counts together stays together: a mode with one size of micro-batches, and one way of a switch in one
       direction, are of one bench, so that no line goes through points of two days. What others cost is a pair of times
       of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from splitctl.placement import SplitMode
from splitctl.planning.profile import LeftOut, MeasuredMode, Profile, Served, SwitchTime

#: Measured up to so many times as many tokens counts as deep as this: the next depth that is left out is half as deep.
_AS_DEEP = 1.4


def merged(new: Profile, old: Profile) -> tuple[Profile, tuple[str, ...]]:
    """Put a new profile together with an earlier one.

    Returns:
        All of it, and what is of the earlier one, one phrase each: what the new one has not, or has less of.
    """
    stays: list[str] = []
    modes = tuple(_modes(new, old, stays))
    switches = tuple(_switches(new, old, stays))
    served = tuple(_served(new, old, stays))
    whole = replace(new, modes=modes, switches=switches, served=served, left_out=())
    return replace(whole, left_out=tuple(_left_out(whole, (*new.left_out, *old.left_out)))), tuple(stays)


def _modes(new: Profile, old: Profile, stays: list[str]) -> Iterator[MeasuredMode]:
    mine = {(one.mode, one.n_ubatch): one for one in new.modes}
    for was in old.modes:
        name = was.mode.value
        now = mine.pop((was.mode, was.n_ubatch), None)
        if now is None:
            is_other = any(one.mode is was.mode for one in new.modes)
            stays.append(f"{name} mode with -ub {was.n_ubatch}" if is_other else f"{name} mode")
            yield was
        elif less := [*_less(now, was)]:
            stays += [f"{name} mode {what}" for what in less]
            yield replace(was, crowds=now.crowds or was.crowds)
        else:
            # A bench of one sequence says nothing of several.
            yield replace(now, crowds=now.crowds or was.crowds)
    yield from mine.values()


def _less(now: MeasuredMode, was: MeasuredMode) -> Iterator[str]:
    """Say what less was measured of one mode."""
    if _AS_DEEP * now.reach < was.reach:
        yield f"up to {was.reach:,} tokens"
    together = [max(step.n_seq for step in one.steps) for one in (now, was)]
    if together[0] < together[1]:
        yield f"with {together[1]} sequences"
    # One repetition says nothing of how far the next one would lie.
    repeated = [max(read.seconds.n for read in one.reads) for one in (now, was)]
    if repeated[0] == 1 < repeated[1]:
        yield f"in {repeated[1]} repetitions"


def _switches(new: Profile, old: Profile, stays: list[str]) -> Iterator[SwitchTime]:
    mine, theirs = _by_way(new.switches), _by_way(old.switches)
    for key, was in theirs.items():
        before, after, way = key
        now = mine.pop(key, ())
        # Later ones of a session tell more than its first one, and two sizes of a state more than the smaller one.
        is_less = not now or any(
            _AS_DEEP * max((one.n_tokens for one in now if one.is_first is is_first), default=0) < most
            for is_first in (False, True)
            if (most := max((one.n_tokens for one in was if one.is_first is is_first), default=0))
        )
        if is_less:
            stays.append(f"{before.value} -> {after.value} {way}")
        yield from was if is_less else now
    for found in mine.values():
        yield from found


def _by_way(switches: Iterable[SwitchTime]) -> dict[tuple[SplitMode, SplitMode, str], list[SwitchTime]]:
    found: dict[tuple[SplitMode, SplitMode, str], list[SwitchTime]] = {}
    for one in switches:
        found.setdefault((one.before, one.after, one.way), []).append(one)
    return found


def _served(new: Profile, old: Profile, stays: list[str]) -> Iterator[Served]:
    for mode in dict.fromkeys(one.mode for one in (*new.served, *old.served)):
        now, was = ([one for one in whose.served if one.mode is mode] for whose in (new, old))
        most = [max((one.n_seq for one in some), default=0) for some in (now, was)]
        if most[0] < most[1]:
            n = f"{most[1]} stream{'' if most[1] == 1 else 's'}"
            stays.append(f"what a host adds to steps of {n} in {mode.value} mode")
        yield from was if most[0] < most[1] else now


def _left_out(whole: Profile, found: Sequence[LeftOut]) -> Iterator[LeftOut]:
    """Give what neither of the two has, each thing once."""
    known = {one.mode.value for one in whole.modes}
    known |= {f"{one.mode.value} -ub {one.n_ubatch}" for one in whole.modes}
    known |= {one.way for one in whole.switches} | ({"serving"} if whole.served else set())
    for what, one in {one.what: one for one in reversed(found)}.items():
        if what not in known:
            yield one
