"""A trace in simulated time: each mode for good, a policy, and an oracle that knows what will come.

Laws:
    1. All of them serve the same requests by the same rules of batching (`floor`), at the same costs.
    2. The policy knows of an answer's length what a host knows: its limit, and how long others were.
    3. The oracle keeps to the policy's bounds, and is never worse than the policy or a fixed mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from splitctl.placement import SplitMode
from splitctl.planning.floor import Floor, Job, Trail
from splitctl.planning.learned import MODES, Answers, Costs
from splitctl.planning.plans import Bounds, Kind, Plan, Plans
from splitctl.planning.policy import Active, Policy, Settings, Situation, Waiting
from splitctl.planning.traces import Request

#: A policy is not asked sooner than after this share of the time in which nothing has happened, and of that since the
#: first request.
_RARER, _FINEST = 0.004, 1e-9
#: Waiting requests that a policy is told of; those behind them wait anyway.
_TOLD = 32
#: Ways that things may have gone which the oracle keeps, of each mode.
_KEPT = 4
#: Requests from which on the oracle is not asked: it takes a millisecond for each that waits, again and again.
MAX_FOR_ORACLE = 5_000

Tick = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Course:
    """How a trace went.

    Attributes:
        name: by what.
        busy_s: time in which somebody was there, s.
        waits_s: from each request's coming until its prompt is begun, s, in their order.
        firsts_s: from each request's coming until its first token, s, in their order.
        switched_at: when each switch began, s.
    """

    name: str
    busy_s: float
    waits_s: tuple[float, ...]
    firsts_s: tuple[float, ...]
    switched_at: tuple[float, ...] = ()

    def to_json(self, oracle: Course | None = None) -> dict[str, Any]:
        """Give plain values, seconds: busy_s, regret_s against the oracle, switches, and wait_s and first_token_s.

        The last two are objects of mean, p95 and max.
        """
        return {
            "busy_s": self.busy_s,
            "regret_s": None if oracle is None else self.busy_s - oracle.busy_s,
            "switches": len(self.switched_at),
            "wait_s": _summed(self.waits_s),
            "first_token_s": _summed(self.firsts_s),
        }


def _summed(times: Sequence[float]) -> dict[str, float]:
    ranked = sorted(times)
    return {
        "mean": math.fsum(ranked) / len(ranked),
        "p95": ranked[min(math.ceil(0.95 * len(ranked)), len(ranked)) - 1],
        "max": ranked[-1],
    }


@dataclass(frozen=True, slots=True)
class Comparison:
    """One trace, served in every way.

    Attributes:
        fixed: each mode for good.
        auto: by the policy.
        oracle: by one who knows; None where the trace is too long for that.
    """

    fixed: tuple[Course, ...]
    auto: Course
    oracle: Course | None

    @property
    def best_fixed(self) -> Course:
        """The mode that has it done soonest."""
        return min(self.fixed, key=lambda one: one.busy_s)

    @property
    def courses(self) -> tuple[Course, ...]:
        """All of them."""
        return (*self.fixed, self.auto, *(() if self.oracle is None else (self.oracle,)))

    @property
    def sentence(self) -> str:
        """Say whether switching would have paid, and by how much."""
        best, auto = self.best_fixed, self.auto
        gain = best.busy_s - auto.busy_s
        known = ""
        if self.oracle is not None:
            known = f"; an oracle would save {best.busy_s - self.oracle.busy_s:,.1f} s"
        n = len(auto.switched_at)
        how = f"{n} switch{'' if n == 1 else 'es'} by --policy auto"
        share = abs(gain) / best.busy_s if best.busy_s else 0.0
        text = f"{abs(gain):,.1f} s of {best.busy_s:,.1f} s ({share:.1%})"
        if share < 0.005:
            return f"it would not have mattered: {how} and {best.name} mode for good differ by {text}{known}"
        if gain > 0.0:
            return f"it would have paid: {how} save {text} against {best.name} mode for good{known}"
        return f"it would not have paid: {best.name} mode for good saves {text} against {how}{known}"


def compare(
    requests: Sequence[Request], policy: Policy, costs: Costs, mode: SplitMode, n_seq_max: int, tick: Tick | None = None
) -> Comparison:
    """Serve a trace in every way.

    Args:
        requests: at least one, in the order in which they come.
        policy: a new one; it begins in `mode`.
        costs: what work really takes.
        mode: where the policy begins.
        n_seq_max: sequences that there are.
        tick: told how much is done, from 0 to 1.
    """
    say = tick or (lambda _done: None)
    fixed = tuple(stay(requests, costs, one, n_seq_max) for one in MODES)
    auto = follow(requests, policy, costs, mode, n_seq_max, lambda done: say(0.3 * done))
    oracle = None
    if len(requests) <= MAX_FOR_ORACLE:
        oracle = best(requests, costs, policy.settings, n_seq_max, tick=lambda done: say(0.3 + 0.7 * done))
        oracle = replace(min((oracle, auto, *fixed), key=lambda one: one.busy_s), name="oracle")
    return Comparison(fixed, auto, oracle)


def stay(requests: Sequence[Request], costs: Costs, mode: SplitMode, n_seq_max: int) -> Course:
    """Be in one mode all the time."""
    floor = Floor(costs, n_seq_max, requests[0].arrival, mode)
    ended: list[Job] = []

    def run(until: float) -> None:
        while floor.at < until and not floor.is_empty:
            ended.extend(floor.run(until) or ())

    for job in _jobs(requests):
        run(job.came)
        floor.come(job)
    run(math.inf)
    return _course(mode.value, floor, ended)


def follow(
    requests: Sequence[Request], policy: Policy, costs: Costs, mode: SplitMode, n_seq_max: int, tick: Tick | None = None
) -> Course:
    """Let a policy decide."""
    host = _Host(Floor(costs, n_seq_max, requests[0].arrival, mode), requests, policy)
    for index, job in enumerate(_jobs(requests)):
        host.run(job.came)
        host.floor.come(job)
        host.is_due = True
        if tick is not None and not index % 50:
            tick(index / len(requests))
    host.run(math.inf)
    return _course("auto", host.floor, host.ended)


class _Host:
    """What a host does about a policy."""

    def __init__(self, floor: Floor, requests: Sequence[Request], policy: Policy) -> None:
        self.floor = floor
        self.ended: list[Job] = []
        self.is_due = True
        self._requests = requests
        self._policy = policy
        self._answers = Answers()
        self._held: frozenset[int] = frozenset()
        self._again = math.inf
        self._since = floor.at

    def run(self, until: float) -> None:
        """Serve until a time, or until nobody is there and nothing is to be decided before it."""
        floor = self.floor
        while floor.at < until:
            if self.is_due or floor.at >= self._again:
                self._decide()
            elif not floor.is_empty:
                self._turn(min(until, self._again))
            elif self._again < until:
                floor.at = self._again
            else:
                break

    def _turn(self, until: float) -> None:
        floor, mode = self.floor, self.floor.mode
        before = {job.number: (job.n_unread, job.n_held, job.n_left) for job in floor.active}
        done = floor.run(until, self._held)
        if done is None:
            floor.at = until
            return
        self._tell(mode, before, [*floor.active, *done])
        for job in done:
            one = self._requests[job.number]
            self._answers.ended(one.n_max, one.generated)
        self.ended += done
        self.is_due = bool(done) or any(job.first == floor.at for job in floor.active)

    def _tell(self, mode: SplitMode, before: dict[int, tuple[int, int, int]], after: Sequence[Job]) -> None:
        """Tell the policy what was served, as a host does: without what other sequences and the host add."""
        costs = self.floor.costs
        stepped = []
        for job in after:
            n_unread, n_held, n_left = before.get(job.number) or self._start_of(job.number)
            if n_left > job.n_left:
                stepped.append((n_held, n_left - job.n_left))
            elif n_unread > job.n_unread:
                n = n_unread - job.n_unread
                self._policy.observe_read(mode, n, n_held, costs.read_s(mode, n, n_held))
        if stepped:
            n_steps = stepped[0][1]
            depth = sum(held for held, _ in stepped) / len(stepped) + n_steps / 2
            step = costs.step_s(mode, len(stepped), depth) + self.floor.more_s
            self._policy.observe_step(mode, len(stepped), depth, step, n_steps)

    def _start_of(self, number: int) -> tuple[int, int, int]:
        job = _job(number, self._requests[number])
        return job.n_unread, job.n_held, job.n_left

    def _decide(self) -> None:
        floor, expected = self.floor, self._answers.expected
        if self.is_due:
            self._since = floor.at
        self.is_due = False
        waiting = []
        for job in floor.queue[:_TOLD]:
            left, waited = expected(self._requests[job.number].n_max), floor.at - job.came
            waiting.append(Waiting(job.number, job.n_unread, job.n_held, left, waited))
        active = []
        for job in floor.active:
            one = self._requests[job.number]
            left = expected(one.n_max, max(one.generated, 1) - job.n_left)
            active.append(Active(job.number, job.n_unread, job.n_held, left))
        decision = self._policy.decide(Situation(floor.at, floor.mode, tuple(waiting), tuple(active), floor.n_seq_max))
        self._held = decision.hold
        look_s = math.inf if decision.look_again_s is None else decision.look_again_s
        if not decision.hold:
            # While nothing happens for days nobody is asked every moment, and no clock stands still.
            look_s = max(look_s, _RARER * (floor.at - self._since), _FINEST * floor.at)
        self._again = floor.at + look_s
        if decision.mode is not floor.mode:
            pause = floor.switch()
            self._policy.switched(floor.at, succeeded=True, seconds=pause)
            self.is_due = True


# ---- the oracle ----

#: A chain of those who have ended, the last ones first.
_Ended = tuple["_Ended", list[Job]] | None


def best(
    requests: Sequence[Request],
    costs: Costs,
    settings: Settings,
    n_seq_max: int,
    *,
    kept: int = _KEPT,
    tick: Tick | None = None,
) -> Course:
    """Look for the course in which somebody is there for the shortest time, knowing all that will come.

    From every coming to the next one each plan is followed from each of the states that are kept; kept are those that
    would be done soonest with what is there, of each mode.
    """
    bounds = Bounds(settings.min_stay_s, settings.max_wait_s, settings.max_pause_s)
    plans = Plans(costs, n_seq_max, bounds)
    jobs = _jobs(requests)
    states: list[tuple[Floor, _Ended]] = [(Floor(costs, n_seq_max, requests[0].arrival, mode), None) for mode in MODES]
    for index, job in enumerate(jobs):
        for floor, _ in states:
            floor.come(job)
        until = jobs[index + 1].came if index + 1 < len(jobs) else math.inf
        if all(floor.at >= until for floor, _ in states):
            continue
        states = _fittest([one for state in states for one in _grown(state, plans, until)], plans, kept)
        if tick is not None and not index % 10:
            tick(index / len(jobs))
    floor, chain = min(states, key=lambda one: _busy(one[0]))
    ended: list[Job] = []
    while chain is not None:
        chain, more = chain
        ended += more
    return _course("oracle", floor, ended)


def _grown(state: tuple[Floor, _Ended], plans: Plans, until: float) -> list[tuple[Floor, _Ended]]:
    """Follow every plan from a state; and switch, where nobody is left."""
    grown: list[tuple[Floor, _Ended]] = []
    for plan in plans.all(state[0]):
        floor = state[0].copy()
        more = plans.follow(floor, plan, until)
        ended = (state[1], more) if more else state[1]
        grown.append((floor, ended))
        if floor.is_empty and floor.at < until < math.inf and plans.allowed_at(floor) <= floor.at:
            other = floor.copy()
            other.switch()
            grown.append((other, ended))
    return grown


def _busy(floor: Floor) -> float:
    return (floor.empty_since if floor.is_empty else floor.at) - floor.idle_s


def _fittest(states: list[tuple[Floor, _Ended]], plans: Plans, kept: int) -> list[tuple[Floor, _Ended]]:
    scored = []
    seen = set()
    for number, (floor, _) in enumerate(states):
        key = floor.mode, floor.at, _busy(floor), len(floor.queue), floor.switched_at
        if key in seen:
            continue
        seen.add(key)
        rest = math.inf
        for mode in MODES if not floor.is_empty else ():
            twin = floor.copy()
            plans.follow(twin, Plan(Kind.BE, mode))
            rest = min(rest, twin.at - floor.at)
        scored.append((_busy(floor) + (0.0 if floor.is_empty else rest), number))
    scored.sort()
    return [
        states[number]
        for mode in MODES
        for _, number in [one for one in scored if states[one[1]][0].mode is mode][:kept]
    ]


# ---- in and out ----


def _job(number: int, one: Request) -> Job:
    return Job(number, one.arrival, one.prompt - one.cached, one.cached, one.generated)


def _jobs(requests: Sequence[Request]) -> list[Job]:
    return [_job(number, one) for number, one in enumerate(requests)]


def _course(name: str, floor: Floor, ended: Sequence[Job]) -> Course:
    jobs = sorted(ended, key=lambda job: job.number)
    busy, end = 0.0, -math.inf
    for job in jobs:
        busy += max(job.ended - max(job.came, end), 0.0)
        end = max(end, job.ended)
    times = []
    trail: Trail = floor.trail
    while trail is not None:
        trail, at = trail
        times.append(at)
    return Course(
        name,
        busy,
        tuple(job.began - job.came for job in jobs),
        tuple(job.first - job.came for job in jobs),
        tuple(reversed(times)),
    )
