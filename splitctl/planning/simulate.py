"""Requests against costs in simulated time: each mode for good, a policy, and an oracle that knows what will come."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from splitctl.placement import SplitMode
from splitctl.planning.floor import Floor, Job
from splitctl.planning.learned import MODES, Answers, Costs
from splitctl.planning.plans import Bounds, Kind, Plan, Plans
from splitctl.planning.policy import Active, Policy, Settings, Situation, Waiting


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace.

    Attributes:
        arrival: when it comes, s.
        prompt: tokens of its prompt.
        cached: of them, those that the cache holds.
        generated: tokens that it generates.
        n_max: most tokens that it asked for; None: no limit.
    """

    arrival: float
    prompt: int
    cached: int
    generated: int
    n_max: int | None = None


@dataclass(frozen=True, slots=True)
class Course:
    """How a trace went.

    Attributes:
        name: the policy's.
        busy_s: time in which somebody was there, s.
        waits_s: from each request's coming until it is read, s, in their order.
        firsts_s: from each request's coming until its first token, s, in their order.
        switched_at: when each switch began, s.
    """

    name: str
    busy_s: float
    waits_s: tuple[float, ...]
    firsts_s: tuple[float, ...]
    switched_at: tuple[float, ...]


def stay(requests: Sequence[Request], costs: Costs, mode: SplitMode, n_seq_max: int) -> Course:
    """Be in one mode all the time."""
    floor = Floor(costs, n_seq_max, requests[0].arrival, mode)
    ended: list[Job] = []
    for job in _jobs(requests):
        _run_until(floor, job.came, ended)
        floor.come(job)
    _run_until(floor, math.inf, ended)
    return _course(mode.value, floor, ended, ())


def _run_until(floor: Floor, until: float, ended: list[Job]) -> None:
    while floor.at < until and not floor.is_empty:
        ended += floor.run(until) or ()


def follow(requests: Sequence[Request], policy: Policy, costs: Costs, mode: SplitMode, n_seq_max: int) -> Course:
    """Let a policy decide, which knows how long answers are no better than a host does."""
    floor = Floor(costs, n_seq_max, requests[0].arrival, mode)
    host = _Host(floor, requests, policy)
    jobs = _jobs(requests)
    for index, job in enumerate(jobs):
        until = job.came
        if floor.is_empty and until > floor.at:
            host.wait(until)
        host.run(until)
        floor.come(job)
        if index + 1 == len(jobs) or jobs[index + 1].came > floor.at:
            host.is_due = True
    host.run(math.inf)
    return _course("auto", floor, host.ended, tuple(host.switched_at))


class _Host:
    """What a host does about a policy."""

    def __init__(self, floor: Floor, requests: Sequence[Request], policy: Policy) -> None:
        self.floor, self.policy = floor, policy
        self.ended: list[Job] = []
        self.switched_at: list[float] = []
        self.is_due = True
        self._requests = requests
        self._limits = [one.n_max for one in requests]
        self._answers = Answers()
        self._held: frozenset[int] = frozenset()
        self._again = math.inf

    def run(self, until: float) -> None:
        floor = self.floor
        while floor.at < until and not floor.is_empty:
            if self.is_due or floor.at >= self._again:
                self._decide()
                continue
            mode, before = floor.mode, self._snapshot()
            started = floor.at
            done = floor.run(min(until, self._again), self._held)
            if done is None:
                floor.at = min(until, self._again)
                continue
            self._tell(mode, before, floor.at - started)
            for job in done:
                self._answers.ended(self._requests[job.number].n_max, self._requests[job.number].generated)
            self.ended += done
            self.is_due = bool(done) or any(job.first == floor.at for job in floor.active)

    def wait(self, until: float) -> None:
        """Decide while nobody is there, before the next request comes."""
        floor = self.floor
        self._decide()
        while self._again < until:
            floor.at = max(floor.at, self._again)
            self._decide()

    def _decide(self) -> None:
        floor, requests = self.floor, self._requests
        self.is_due = False
        answers, limits = self._answers, self._limits
        waiting = tuple(
            Waiting(job.number, job.n_unread, job.n_held, answers.expected(limits[job.number]), floor.at - job.came)
            for job in floor.queue
        )
        active = []
        for job in floor.active:
            one = requests[job.number]
            left = answers.expected(one.n_max, one.generated - job.n_left)
            active.append(Active(job.number, job.n_unread, job.n_held, left))
        situation = Situation(floor.at, floor.mode, waiting, tuple(active), floor.n_seq_max)
        decision = self.policy.decide(situation)
        self._held = decision.hold
        self._again = math.inf if decision.look_again_s is None else floor.at + max(decision.look_again_s, 1e-3)
        if decision.mode is not floor.mode:
            self.switched_at.append(floor.at)
            pause = floor.switch()
            self.policy.switched(floor.at, succeeded=True, seconds=pause)
            self.is_due = True

    def _snapshot(self) -> list[tuple[Job, int, int, int]]:
        return [(job, job.n_unread, job.n_held, job.n_left) for job in (*self.floor.active, *self.floor.queue)]

    def _tell(self, mode: SplitMode, before: list[tuple[Job, int, int, int]], seconds: float) -> None:
        costs = self.floor.costs
        stepped = [(held, left - job.n_left) for job, _, held, left in before if left > job.n_left]
        if stepped:
            n_steps = stepped[0][1]
            depth = sum(held for held, _ in stepped) / len(stepped) + n_steps / 2
            step = costs.step_s(mode, len(stepped), depth) + self.floor.more_s
            self.policy.observe_step(mode, len(stepped), depth, step, n_steps)
            seconds -= step * n_steps
        for job, unread, held, _ in before:
            if unread > job.n_unread:
                self.policy.observe_read(mode, unread - job.n_unread, held, seconds)


def _jobs(requests: Sequence[Request]) -> list[Job]:
    return [
        Job(number, one.arrival, one.prompt - one.cached, one.cached, one.generated)
        for number, one in enumerate(requests)
    ]


def _course(name: str, floor: Floor, ended: Sequence[Job], switched_at: tuple[float, ...]) -> Course:
    jobs = sorted(ended, key=lambda job: job.number)
    busy, end = 0.0, -math.inf
    for job in sorted(jobs, key=lambda one: one.came):
        busy += max(job.ended - max(job.came, end), 0.0)
        end = max(end, job.ended)
    return Course(
        name,
        busy,
        tuple(job.began - job.came for job in jobs),
        tuple(job.first - job.came for job in jobs),
        switched_at,
    )


# ---- the oracle ----


def best(requests: Sequence[Request], costs: Costs, settings: Settings, n_seq_max: int, width: int = 8) -> float:
    """Give the busy seconds of the best course that is found by one who knows all that will come."""
    bounds = Bounds(settings.min_stay_s, settings.max_wait_s, settings.max_pause_s)
    plans = Plans(costs, n_seq_max, bounds)
    jobs = _jobs(requests)
    floors = [Floor(costs, n_seq_max, requests[0].arrival, mode) for mode in MODES]
    for index, job in enumerate(jobs):
        for floor in floors:
            floor.come(job.copy())
        until = jobs[index + 1].came if index + 1 < len(jobs) else math.inf
        if floors[0].at >= until and all(floor.at >= until for floor in floors):
            continue
        grown = []
        for floor in floors:
            for plan in plans.all(floor):
                twin = floor.copy()
                plans.follow(twin, plan, until)
                grown.append(twin)
                is_idle = twin.is_empty and twin.at < until < math.inf
                if is_idle and plans.allowed_at(twin) <= twin.at:
                    other = twin.copy()
                    other.switch()
                    grown.append(other)
        floors = _fittest(grown, plans, width)
    return min(_busy(floor) for floor in floors) - requests[0].arrival


def _busy(floor: Floor) -> float:
    return (floor.empty_since if floor.is_empty else floor.at) - floor.idle_s


def _fittest(floors: list[Floor], plans: Plans, width: int) -> list[Floor]:
    scored: list[tuple[float, int, Floor]] = []
    for floor in floors:
        rest = math.inf
        if floor.is_empty:
            rest = 0.0
        else:
            for mode in MODES:
                twin = floor.copy()
                plans.follow(twin, Plan(Kind.BE, mode))
                rest = min(rest, twin.at - floor.at)
        scored.append((_busy(floor) + rest, len(scored), floor))
    scored.sort(key=lambda one: one[:2])
    kept: list[Floor] = []
    seen = set()
    for mode in MODES:
        n = 0
        for score, _, floor in scored:
            if floor.mode is not mode:
                continue
            key = (mode, round(score, 6), round(floor.at, 6))
            if key in seen:
                continue
            seen.add(key)
            kept.append(floor)
            n += 1
            if n == width // 2:
                break
    return kept
