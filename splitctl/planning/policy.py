"""When a host switches by itself: seconds of known work in each mode, against those of the switch.

Laws:
    1. No clock and no chance: times come in, and the same calls give the same decisions.
    2. A switch is never asked for within `min_stay_s` of the last one, nor within the backoff after a failed one.
    3. A prompt is held for `max_wait_s` at most since it came.
    4. While streams generate, no switch is asked for whose pause is longer than `max_pause_s`.

`planning/learned.py` has what a policy goes by: `Costs`, `costs_of`, `costs_of_rates`, `Learned` and `Answers`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from splitctl.errors import ConfigInvalid
from splitctl.placement import SplitMode
from splitctl.planning import reasons
from splitctl.planning.floor import Floor, Job
from splitctl.planning.learned import MODES, Costs, Learned, other_than
from splitctl.planning.plans import Bounds, Kind, Next, Plan, Plans

#: No setting is longer than a week [s].
_MAX_S = 7 * 24 * 3600.0
#: Requests by which what usually comes is known, and after how many new ones it is looked at again.
_N_SHAPES, _EVERY = 16, 4
#: Pauses that what was lost or won by switching is remembered up to; those that may be lost before more has to be
#: saved by a switch out of the mode that would have been best; and the share of what is lost beyond that is asked more.
_REMEMBERED, _ALLOWED, _STRICTER = 20.0, 1.0, 1.0
#: Most pauses that regret counts for.
_MOST_REGRET = 5.0
#: What tells how fast a mode is: tokens of a prompt, depth of a step.
_PROMPT, _DEPTH = 2048, 1024
#: While the mode is the slower one for what is done: share of a pause that regret grows by until it is looked at again;
#: and the least time until then [s].
_PATIENCE, _LOOK_S = 0.25, 0.25
#: Waiting requests that are thought of; those behind them wait anyway.
_MOST_WAITING = 16
#: Nobody is asked again sooner [s].
_SOONEST_S = 1e-3
#: Share by which a new request moves what is usual.
_SLOWLY = 0.1
#: Shares of a switch's pause: what holding prompts, and a switch while nobody is there, have to save.
_HOLDING, _WORTH_IDLE = 0.05, 0.2


@dataclass(frozen=True, slots=True)
class Settings:
    """Bounds of a policy.

    Attributes:
        min_stay_s: least time between two switches, s.
        max_wait_s: longest time that a prompt is held, s.
        max_pause_s: longest pause of a switch while streams generate, s.
        hysteresis: share of a switch's cost that it has to save on top of the cost.
        backoff_s: no switch for so long after a failed one, s; twice as long after each further one.
        max_backoff_s: longest backoff, s.

    Raises:
        ConfigInvalid: a number is negative or longer than a week, or the backoff is longer than its bound.
    """

    min_stay_s: float = 2.0
    max_wait_s: float = 20.0
    max_pause_s: float = 10.0
    hysteresis: float = 0.4
    backoff_s: float = 30.0
    max_backoff_s: float = 3600.0

    def __post_init__(self) -> None:
        for name in (one.name for one in fields(self)):
            value = getattr(self, name)
            if not 0.0 <= value <= _MAX_S:
                raise ConfigInvalid(name, value, f"a number from 0 to {_MAX_S:g}")
        if self.backoff_s > self.max_backoff_s:
            raise ConfigInvalid("backoff_s", self.backoff_s, f"at most max_backoff_s, {self.max_backoff_s:g} s")


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that is on no sequence yet.

    Attributes:
        number: its number.
        n_uncached: tokens of its prompt that have to be read.
        n_cached: tokens that the sequence it will be on holds already.
        n_expected: tokens that its answer is expected to have.
        waited_s: time since it came, s.
    """

    number: int
    n_uncached: int
    n_cached: int
    n_expected: float
    waited_s: float


@dataclass(frozen=True, slots=True)
class Active:
    """A request on a sequence.

    Attributes:
        number: its number.
        n_unread: tokens of its prompt that are still to be read; 0: it generates.
        n_held: tokens that its sequence holds.
        n_expected: tokens that are expected still to come.
    """

    number: int
    n_unread: int
    n_held: int
    n_expected: float


@dataclass(frozen=True, slots=True)
class Situation:
    """What a host has before it.

    Attributes:
        at: now, s, on any clock that only goes forward.
        mode: the mode that the session is in.
        waiting: requests without a sequence, in the order in which they came.
        active: requests on sequences, in the order in which they are read.
        n_seq_max: sequences that there are.
    """

    at: float
    mode: SplitMode
    waiting: tuple[Waiting, ...] = ()
    active: tuple[Active, ...] = ()
    n_seq_max: int = 4


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now.

    Attributes:
        mode: the mode to be in; another than the situation's: switch now.
        hold: numbers of waiting requests that are not to be started yet; the others start in their order.
        look_again_s: ask again after so many seconds, if nothing happens before; None: no need.
        sentence: why, for a person.
        numbers: what it was decided by: seconds and counts by name.
    """

    mode: SplitMode
    hold: frozenset[int]
    look_again_s: float | None
    sentence: str
    numbers: Mapping[str, float] = field(default_factory=dict)


class Policy:
    """Decides when to switch.

    Ask it whenever a request comes, is read or ends, and when `look_again_s` is over; tell it what was served and of
    every switch. Thread: one at a time.
    """

    def __init__(self, costs: Costs, settings: Settings | None = None) -> None:
        self.costs = costs
        self.settings = settings or Settings()
        self._free_at = self._blocked_until = -math.inf
        self._n_failures = 0
        self._was_empty = True
        self._mode: SplitMode | None = None
        self._more_s = 0.0
        # Seconds that what was served took more than it would have in the other mode; never below zero.
        self._regret = 0.0
        # Seconds that all that was served took more, switches included, than it would have in one mode for good.
        self._over = dict.fromkeys(MODES, 0.0)
        # What a switch takes from who is served: its pause, on processors more.
        self._pause = 0.0
        self._seen: set[int] = set()
        self._shapes: deque[tuple[int, int, int]] = deque(maxlen=_N_SHAPES)
        self._crowd = 1.0
        self._busy_share = 0.5
        self._endings = dict.fromkeys(MODES, 0.0)
        self._endings_n_new = 0

    # ---- what happened ----

    def switched(self, at: float, *, succeeded: bool, seconds: float, after: SplitMode | None = None) -> None:
        """Note a switch that ended, whoever asked for it.

        Args:
            at: when it ended, s.
            succeeded: the session serves in another mode now.
            seconds: its pause, and what else of its time no step or read tells.
            after: the mode that it was to go to; None: the one that was decided last.
        """
        del after
        self._free_at = at + self.settings.min_stay_s
        if not self._was_empty:
            self._took(seconds, dict.fromkeys(MODES, 0.0))
        if succeeded:
            self._n_failures = 0
            self._regret = 0.0
            return
        # 2 ** 60 times the shortest backoff is beyond any bound.
        longest = self.settings.backoff_s * 2.0 ** min(self._n_failures, 60)
        self._blocked_until = at + min(longest, self.settings.max_backoff_s)
        self._n_failures += 1

    def observe_read(self, mode: SplitMode, n: int, depth: int, seconds: float) -> None:
        """Note that a sequence that held `depth` tokens has read `n`; the costs learn from it if they can."""
        if isinstance(self.costs, Learned):
            self.costs.observe_read(mode, n, depth, seconds)
        if mode in MODES:
            self._served(mode, seconds, self.costs.read_s(other_than(mode), n, depth))

    def observe_step(self, mode: SplitMode, n_seq: int, depth: float, seconds: float, n_steps: int = 1) -> None:
        """Note that each of so many sequences, which hold `depth` tokens, made `n_steps` tokens, `seconds` each."""
        if isinstance(self.costs, Learned):
            self.costs.observe_step(mode, n_seq, depth, seconds, self._more_s * 1e3)
        if mode in MODES:
            there = other_than(mode)
            # Whoever goes there has what that adds to a token; who was there from the start has not.
            more_s = self.costs.switch(mode, there, 0)[1] / 1e3 * n_steps
            self._served(mode, seconds * n_steps, self.costs.step_s(there, n_seq, depth) * n_steps, more_s)

    def _served(self, mode: SplitMode, seconds: float, other_s: float, more_s: float = 0.0) -> None:
        self._took(seconds, {mode: seconds, other_than(mode): other_s})
        self._regret = max(self._regret + seconds - other_s - more_s, 0.0)

    def _took(self, seconds: float, fixed: Mapping[SplitMode, float]) -> None:
        # Bounded: what was long ago shall not outweigh what comes for ever.
        bound = _REMEMBERED * self._pause
        self._over = {mode: min(max(self._over[mode] + seconds - fixed[mode], -bound), bound) for mode in MODES}

    # ---- what to do ----

    def decide(self, situation: Situation) -> Decision:
        """Say which mode to be in, and which requests to hold."""
        mode = situation.mode
        if mode not in MODES:
            return Decision(mode, frozenset(), None, f"stays in {mode.value}: it is none of those that were measured")
        self._note_mode(mode)
        self._learn_of(situation)
        self._was_empty = not situation.waiting and not situation.active
        own = self.settings
        bounds = Bounds(own.min_stay_s, own.max_wait_s, own.max_pause_s, self._blocked_until)
        plans = Plans(self.costs, situation.n_seq_max, bounds)
        floor = _floor_of(situation, self.costs, self._free_at - own.min_stay_s, self._more_s)
        self._look_back(situation, plans)
        self._pause = floor.cost_s()
        return self._decide_empty(floor, plans) if floor.is_empty else self._decide_busy(floor, plans)

    def _note_mode(self, mode: SplitMode) -> None:
        if self._mode is not None and self._mode is not mode:
            self._more_s = self.costs.switch(self._mode, mode, 0)[1] / 1e3
        self._mode = mode

    def _decide_busy(self, floor: Floor, plans: Plans) -> Decision:
        mode, pause = floor.mode, self._pause
        # To be in this mode for good is a plan, and stays: the first one.
        stays: tuple[float, Plan, Next] = (math.inf, Plan(Kind.BE, mode), Next(switches=False))
        goes: tuple[float, Plan, Next] | None = None
        every = plans.all(floor)
        for plan, end in zip(every, plans.ends(floor, every), strict=True):
            now = plans.next(floor, plan)
            seconds = end.at - floor.at + self._endings[end.mode] * self._busy_share
            if plan.kind is Kind.BE and plan.mode is not mode:
                seconds -= min(self._regret, _MOST_REGRET * pause)
            if now.switches:
                if goes is None or seconds < goes[0]:
                    goes = seconds, plan, now
            elif seconds < stays[0] - _HOLDING * pause * bool(now.held):
                stays = seconds, plan, now
        more = self._margin(mode) * pause
        numbers = self._numbers(floor, len(stays[2].held)) | {"stay_s": stays[0]}
        if goes is not None:
            numbers["go_s"] = goes[0]
            if goes[0] + more < stays[0]:
                sentence = reasons.going(plans, floor, goes[1], pause, self._regret)
                return Decision(other_than(mode), frozenset(), None, sentence, numbers)
        now = stays[2]
        until = min(now.until - floor.at, self._until_regret(floor, plans, pause))
        said = reasons.staying(plans, floor, now, more, stays[0], goes[0] if goes else math.inf)
        is_kept = goes is None and stays[1].kind is Kind.BE and stays[1].mode is not mode
        sentence = self._why_not(floor) if is_kept or not said else said
        return Decision(mode, now.held, max(until, _SOONEST_S) if math.isfinite(until) else None, sentence, numbers)

    def _decide_empty(self, floor: Floor, plans: Plans) -> Decision:
        mode = floor.mode
        gain = self._endings[mode] - self._endings[other_than(mode)]
        numbers = self._numbers(floor, 0) | {"gain_s": gain}
        if gain <= _WORTH_IDLE * (1.0 + self._lost(mode)) * self._pause:
            return Decision(mode, frozenset(), None, f"stays in {mode.value}: nobody is there", numbers)
        at = plans.allowed_at(floor)
        if at > floor.at:
            return Decision(mode, frozenset(), max(at - floor.at, _SOONEST_S), self._why_not(floor), numbers)
        there = other_than(mode)
        why = f"nobody is there, and a request like the last {len(self._shapes)} takes {gain:,.2f} s less from there"
        return Decision(there, frozenset(), None, f"goes to {there.value}: {why}", numbers)

    def _why_not(self, floor: Floor) -> str:
        """Say which bound is in the way of a switch that would be made."""
        start, own = f"stays in {floor.mode.value}: ", self.settings
        if self._blocked_until > floor.at:
            return f"{start}the last switch failed, and none is tried for {self._blocked_until - floor.at:,.1f} s"
        pause = floor.pause_s()
        if pause > own.max_pause_s and any(not job.n_unread for job in floor.active):
            return f"{start}a switch pauses streams for {pause:,.1f} s, and {own.max_pause_s:g} s are allowed"
        return f"{start}the last switch was less than {own.min_stay_s:g} s ago"

    def _numbers(self, floor: Floor, n_held: int) -> dict[str, float]:
        unread = [job.n_unread for job in (*floor.active, *floor.queue) if job.n_unread]
        return {
            "n_prompts": len(unread),
            "n_uncached": sum(unread),
            "n_to_come": sum(job.n_left for job in (*floor.active, *floor.queue)),
            "n_held": n_held,
            "pause_s": floor.pause_s(),
            "regret_s": self._regret,
            "backoff_s": max(self._blocked_until - floor.at, 0.0),
        }

    def _margin(self, mode: SplitMode) -> float:
        """Say what a switch out of a mode has to save beyond its pause, as a share of that."""
        if self._over[mode] < self._over[other_than(mode)]:
            # To where it would have been best to be all the time.
            return self.settings.hysteresis
        return self.settings.hysteresis + _STRICTER * self._lost(mode)

    def _lost(self, mode: SplitMode) -> float:
        """Say how many pauses all switches so far have lost against this mode for good, beyond what is allowed."""
        return max(self._over[mode] / self._pause - _ALLOWED, 0.0) if self._pause else 0.0

    def _until_regret(self, floor: Floor, plans: Plans, pause: float) -> float:
        """Give the seconds until what is done now may have cost a switch's pause; nothing else would be asked for."""
        at = plans.allowed_at(floor)
        if at == math.inf:
            return math.inf
        n_seq = sum(1 for job in floor.active if not job.n_unread) or 1
        mode = floor.mode
        share = 1.0 - (
            self.costs.step_s(other_than(mode), n_seq, _DEPTH) / self.costs.step_s(mode, n_seq, _DEPTH)
            if len(floor.active) == n_seq
            else self.costs.read_s(other_than(mode), _PROMPT, 0) / self.costs.read_s(mode, _PROMPT, 0)
        )
        if share <= 0.0:
            return math.inf
        missing = max((1.0 + self.settings.hysteresis) * pause - self._regret, _PATIENCE * pause)
        return max(missing / share, at - floor.at, _LOOK_S)

    # ---- what usually comes ----

    def _learn_of(self, situation: Situation) -> None:
        here = {one.number for one in situation.waiting} | {one.number for one in situation.active}
        for one in situation.waiting:
            if one.number not in self._seen:
                self._shapes.append((one.n_uncached, one.n_cached, math.ceil(one.n_expected)))
                self._crowd += _SLOWLY * (min(len(here), situation.n_seq_max) - self._crowd)
                self._busy_share += _SLOWLY * ((len(here) > 1) - self._busy_share)
                self._endings_n_new += 1
        self._seen = here

    def _look_back(self, situation: Situation, plans: Plans) -> None:
        """Say what being in each mode costs when what usually comes comes next, beyond the better mode."""
        if self._endings_n_new < min(_EVERY, max(len(self._shapes), 1)):
            return
        self._endings_n_new = 0
        crowd = max(round(self._crowd), 1)
        shapes = list(self._shapes)
        seconds = dict.fromkeys(MODES, 0.0)
        n = 0
        for start in range(0, len(shapes) - crowd + 1, crowd):
            n += 1
            for mode in MODES:
                floor = Floor(self.costs, situation.n_seq_max, 0.0, mode)
                for number, shape in enumerate(shapes[start : start + crowd]):
                    floor.come(Job(number, 0.0, *shape))
                seconds[mode] += min(end.at for end in plans.ends(floor, plans.all(floor)))
        least = min(seconds.values())
        self._endings = {mode: (seconds[mode] - least) / max(n, 1) for mode in MODES}


def _floor_of(situation: Situation, costs: Costs, switched_at: float, more_s: float) -> Floor:
    floor = Floor(costs, situation.n_seq_max, situation.at, situation.mode)
    floor.switched_at, floor.more_s = switched_at, more_s
    for one in situation.active:
        job = Job(one.number, situation.at, one.n_unread, one.n_held, math.ceil(one.n_expected))
        job.n_unread = one.n_unread
        floor.active.append(job)
    floor.queue = [
        Job(one.number, situation.at - one.waited_s, one.n_uncached, one.n_cached, math.ceil(one.n_expected))
        for one in situation.waiting[:_MOST_WAITING]
    ]
    return floor
