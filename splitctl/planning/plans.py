"""Ways to go on with known work: which mode when, what is held meanwhile, and how long all of it takes.

A plan says at every moment what to do next, from that moment alone:

    be      be in one mode, for good.
    once    read in the mode that reads faster, and generate in the other one from then on.
    gather  the same, and back: prompts that are worth it are held until so many can be read together.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from splitctl.placement import SplitMode
from splitctl.planning.floor import Floor, Job
from splitctl.planning.learned import MODES, Costs, other_than

#: A prompt is held if reading it in the other mode saves this share of a switch's pause.
_WORTH_HOLDING = 0.1
#: What tells the modes apart: tokens of a prompt, and depth of a step.
_PROMPT, _DEPTH = 2048, 1024
#: No plan is followed for more turns than this; one that is, is none.
_MAX_RUNS = 20_000


class Kind(enum.Enum):
    """Kinds of plans."""

    BE = "be"
    ONCE = "once"
    GATHER = "gather"


@dataclass(frozen=True, slots=True)
class Plan:
    """One plan.

    Attributes:
        kind: its kind.
        mode: the mode to be in, of a `Kind.BE`.
        n: prompts to read together, of a `Kind.GATHER`.
    """

    kind: Kind
    mode: SplitMode | None = None
    n: int = 0


@dataclass(frozen=True, slots=True)
class Bounds:
    """What every plan keeps to; times in seconds.

    Attributes:
        min_stay_s: least time between two switches.
        max_wait_s: longest time that a prompt is held.
        max_pause_s: longest pause of a switch while requests generate.
        blocked_until: no switch before.
    """

    min_stay_s: float
    max_wait_s: float
    max_pause_s: float
    blocked_until: float = -math.inf


@dataclass(frozen=True, slots=True)
class Next:
    """What a plan says at one moment.

    Attributes:
        switches: switch now.
        held: numbers of requests that are not started.
        until: when to ask again at the latest, s.
    """

    switches: bool
    held: frozenset[int] = frozenset()
    until: float = math.inf


_GO_ON, _SWITCH = Next(switches=False), Next(switches=True)


class Plans:
    """The plans that two modes allow."""

    def __init__(self, costs: Costs, n_seq_max: int, bounds: Bounds) -> None:
        self._costs, self._n_seq_max, self._bounds = costs, n_seq_max, bounds
        # A request has so much unread at one depth only; asked for at every turn of every plan. One that waits has all
        # of it unread, and is the same one on every floor.
        self._gains: dict[tuple[int, int], float] = {}
        self._gains_waiting: dict[Job, float] = {}
        self.reader = min(MODES, key=lambda mode: costs.read_s(mode, _PROMPT, 0))
        n_seq = (n_seq_max + 1) // 2
        self.writer = min(MODES, key=lambda mode: costs.step_s(mode, n_seq, _DEPTH))
        if costs.step_s(self.reader, n_seq, _DEPTH) <= costs.step_s(self.writer, n_seq, _DEPTH):
            self.writer = self.reader
        elif costs.read_s(self.writer, _PROMPT, 0) <= costs.read_s(self.reader, _PROMPT, 0):
            self.reader = self.writer

    def all(self, floor: Floor) -> list[Plan]:
        """Give the plans from here, the plainest first."""
        plans = [Plan(Kind.BE, floor.mode), Plan(Kind.BE, other_than(floor.mode))]
        if self.reader is self.writer:
            return plans
        if floor.mode is self.reader:
            plans.append(Plan(Kind.ONCE))
        plans += [Plan(Kind.GATHER, n=n) for n in sorted({1, (self._n_seq_max + 1) // 2, self._n_seq_max})]
        return plans

    def next(self, floor: Floor, plan: Plan) -> Next:
        """Say what a plan does now."""
        return self._said(floor, plan, {})

    def _said(self, floor: Floor, plan: Plan, known: dict[object, tuple[Next, float]]) -> Next:
        """Say what a plan does now; what others have asked at this moment is `known`, and the same object."""
        if plan.kind is Kind.BE:
            return _GO_ON if floor.mode is plan.mode else self._once(known, self._switching, floor, _GO_ON)
        if floor.mode is self.reader:
            return self._once(known, self._after_reading, floor)
        if plan.kind is Kind.ONCE:
            return _GO_ON
        if "gathering" not in known:
            known["gathering"] = self._gathering(floor)
        hold, n_ready = known["gathering"]
        return hold if n_ready < plan.n else self._once(known, self._switching, floor, hold)

    @staticmethod
    def _once(known: dict[object, tuple[Next, float]], ask: Callable[..., Next], *about: object) -> Next:
        key = ask.__name__, id(about[-1])
        if key not in known:
            known[key] = ask(*about), 0.0
        return known[key][0]

    def ends(self, floor: Floor, plans: Sequence[Plan]) -> list[Floor]:
        """Follow each plan from one place until nobody is there; gives where each of them ends.

        Plans go on together as long as they say the same: most of them do for long.
        """
        found = [floor] * len(plans)
        groups = [(floor.copy(), list(range(len(plans))), 0)]
        while groups:
            here, members, n_runs = groups.pop()
            while n_runs < _MAX_RUNS and (here.queue or here.active):
                n_runs += 1
                known: dict[object, tuple[Next, float]] = {}
                now = self._said(here, plans[members[0]], known)
                if len(members) > 1:
                    # Alike is what is one object; what only looks different goes to the same end on its own.
                    said = [self._said(here, plans[member], known) for member in members]
                    for its in {id(one): one for one in said if one is not now}.values():
                        some = [member for member, one in zip(members, said, strict=True) if one is its]
                        groups.append((self._gone(here.copy(), its), some, n_runs))
                    members = [member for member, one in zip(members, said, strict=True) if one is now]
                self._gone(here, now)
            for member in members:
                found[member] = here
        return found

    @staticmethod
    def _gone(floor: Floor, now: Next) -> Floor:
        """Go on to the next moment."""
        if now.switches:
            floor.switch()
        elif floor.run(now.until, now.held) is None:
            # All that is there is held: time passes.
            floor.at = now.until
        return floor

    def follow(self, floor: Floor, plan: Plan, until: float = math.inf) -> list[Job]:
        """Go on by a plan until nobody is there or a time is reached; gives who has ended."""
        ended: list[Job] = []
        for _ in range(_MAX_RUNS):
            if floor.at >= until or not (floor.queue or floor.active):
                break
            now = self.next(floor, plan)
            if now.switches:
                floor.switch()
                continue
            done = floor.run(min(now.until, until), now.held)
            if done is None:
                # All that is there is held: time passes.
                floor.at = min(now.until, until)
            else:
                ended += done
        return ended

    def allowed_at(self, floor: Floor) -> float:
        """Give the time from which on a switch may be made; infinite while its pause is too long for who generates."""
        bounds = self._bounds
        if any(not job.n_unread for job in floor.active) and floor.pause_s() > bounds.max_pause_s:
            return math.inf
        return max(floor.switched_at + bounds.min_stay_s, bounds.blocked_until)

    def _switching(self, floor: Floor, otherwise: Next) -> Next:
        """Switch as soon as one may."""
        at = self.allowed_at(floor)
        if at <= floor.at:
            return _SWITCH
        return Next(switches=False, held=otherwise.held, until=min(at, otherwise.until))

    def _after_reading(self, floor: Floor) -> Next:
        """Leave the mode that reads when all is read, if what is to be generated is worth it."""
        n_free = self._n_seq_max - len(floor.active)
        if floor.queue and n_free:
            return _GO_ON
        for job in floor.active:
            if job.n_unread:
                return _GO_ON
        if self.gain_of_steps(floor.active) <= floor.cost_s():
            return _GO_ON
        return self._switching(floor, _GO_ON)

    def _gathering(self, floor: Floor) -> tuple[Next, float]:
        """Hold prompts in the mode that generates, until enough can be read together in the other.

        Returns:
            What to hold, and how many can be read together; no number is enough where none is worth it, any is where
            it is time to go.
        """
        if not floor.queue and not any(job.n_unread for job in floor.active):
            return _GO_ON, -math.inf
        pause = floor.cost_s()
        worth = _WORTH_HOLDING * pause
        long: list[tuple[Job, float]] = []
        known = self._gains_waiting
        for job in floor.queue:
            gain = known.get(job)
            if gain is None:
                gain = known[job] = self.gain_of_read(job)
            if gain > worth:
                long.append((job, gain))
                if len(long) == self._n_seq_max:
                    break
        unread = sum(self.gain_of_read(job) for job in floor.active if job.n_unread)
        if unread + sum(gain for _, gain in long) <= pause:
            return _GO_ON, -math.inf
        n_free = self._n_seq_max - len(floor.active)
        # Nobody is held for longer than the bound; whoever waits for a sequence is not held.
        dues = {job.number: job.came + self._bounds.max_wait_s for job, _ in long}
        due = min(dues.values(), default=math.inf)
        is_idle = all(job.n_unread for job in floor.active)
        n_ready = min(len(long), n_free) + sum(1 for job in floor.active if job.n_unread)
        held = frozenset(number for number, at in dues.items() if at > floor.at)
        # One whose bound is over may still wait for a sequence: the next bound counts.
        hold = Next(switches=False, held=held, until=min((dues[number] for number in held), default=math.inf))
        return hold, math.inf if is_idle or (due <= floor.at and n_free) else n_ready

    def gain_of_read(self, job: Job) -> float:
        """Give the seconds that reading the rest of a prompt takes less in the mode that reads faster."""
        n, depth = job.n_unread, job.n_held
        key = job.number, n
        if key not in self._gains:
            self._gains[key] = self._costs.read_s(self.writer, n, depth) - self._costs.read_s(self.reader, n, depth)
        return self._gains[key]

    def gain_of_steps(self, jobs: Sequence[Job]) -> float:
        """Give the seconds that all tokens to come take less in the mode that generates faster."""
        gain, before = 0.0, 0
        ordered = sorted(jobs, key=lambda job: job.n_left)
        for index, job in enumerate(ordered):
            if job.n_left > before:
                n_seq, depth = len(ordered) - index, job.n_held + (before + job.n_left) / 2
                slow = self._costs.step_s(self.reader, n_seq, depth)
                gain += (job.n_left - before) * (slow - self._costs.step_s(self.writer, n_seq, depth))
                before = job.n_left
        return gain
