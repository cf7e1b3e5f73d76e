"""Why a policy goes or stays, in one sentence with the numbers that decided."""

from __future__ import annotations

import math

from splitctl.planning.floor import Floor, Job
from splitctl.planning.learned import other_than
from splitctl.planning.plans import Kind, Next, Plan, Plans


def going(plans: Plans, floor: Floor, plan: Plan, pause: float, regret: float) -> str:
    """Say why to leave the mode."""
    there = other_than(floor.mode)
    if plan.kind is Kind.BE and regret >= pause:
        lost = f"what was served took {_s(regret)} more here than it would have there"
        return f"goes to {there.value}: {lost}, a switch costs {_s(pause)}"
    prompts = _unread(floor)
    jobs = [*floor.active, *floor.queue]
    if plans.reader is plans.writer:
        known = f"{_prompts(prompts)} and {_answers(jobs)}" if prompts else _answers(jobs)
        return f"goes to {there.value}: {known} gain by it, a switch costs {_s(pause)}"
    if there is plans.reader and prompts:
        saved = sum(plans.gain_of_read(job) for job in prompts)
        cost = f"two switches cost {_s(2 * pause)}" if plan.kind is Kind.GATHER else f"a switch costs {_s(pause)}"
        return f"goes to {there.value}: {_prompts(prompts)} save {_s(saved)}, {cost}"
    saved = plans.gain_of_steps(jobs) * (1 if there is plans.writer else -1)
    return f"goes to {there.value}: {_answers(jobs)} save {_s(saved)}, a switch costs {_s(pause)}"


def staying(plans: Plans, floor: Floor, now: Next, more: float, stay_s: float, go_s: float) -> str:
    """Say why to stay; "" where nothing but a bound is in the way.

    Args:
        plans: what is possible.
        floor: what is to be done.
        now: what is done about it.
        more: what a switch has to save beyond its pause, s.
        stay_s: seconds of all known work if the mode stays.
        go_s: the same if it is left now; infinite where it cannot be.
    """
    here, pause = floor.mode, floor.cost_s()
    start = f"stays in {here.value}: "
    if now.held:
        held = [job for job in floor.queue if job.number in now.held]
        left = f" for {_s(max(now.until - floor.at, 0.0))} at most" if math.isfinite(now.until) else ""
        return f"{start}holds {_prompts(held)}{left}, to read them together in {plans.reader.value}"
    prompts = _unread(floor)
    if plans.reader is plans.writer:
        if here is plans.reader:
            return f"{start}it is as fast as {other_than(here).value} in everything"
        return f"{start}what is to be done is less than pays for a switch of {_s(pause)} to {plans.reader.value}"
    if here is plans.reader:
        if prompts:
            return f"{start}{_prompts(prompts)} {_are(prompts)} read faster here"
        jobs = floor.active
        n = sum(job.n_left for job in jobs)
        short = _short(pause + more, plans.gain_of_steps(jobs), n)
        what = _the(jobs, "answer")
    else:
        if not prompts:
            return f"{start}{_answers(floor.active)} {_are(floor.active)} generated faster here"
        n = sum(job.n_unread for job in prompts)
        short = _short(2 * pause + more, sum(plans.gain_of_read(job) for job in prompts), n)
        what = _the(prompts, "prompt")
    if short:
        return f"{start}{what} {short:,} tokens short of paying"
    if go_s < math.inf:
        return f"{start}all that is known takes {_s(stay_s)} from here, and {_s(go_s)} with a switch now"
    return ""


def _short(cost: float, gain: float, n: int) -> int:
    """Count the tokens that are missing for a gain that grows with them to reach a cost; 0: it does."""
    if gain >= cost:
        return 0
    return min(math.ceil((cost - gain) * n / gain - 1e-6), 10**9) if gain > 0.0 else 10**9


def _unread(floor: Floor) -> list[Job]:
    return [job for job in (*floor.active, *floor.queue) if job.n_unread]


def _the(jobs: list[Job], what: str) -> str:
    return f"the {what} is" if len(jobs) == 1 else f"the {len(jobs)} {what}s are"


def _are(jobs: list[Job]) -> str:
    return "is" if len(jobs) == 1 else "are"


def _prompts(jobs: list[Job]) -> str:
    n = sum(job.n_unread for job in jobs)
    return f"{len(jobs)} prompt{'s' if len(jobs) > 1 else ''} of {n:,} uncached tokens"


def _answers(jobs: list[Job]) -> str:
    n = sum(job.n_left for job in jobs)
    return f"{len(jobs)} answer{'s' if len(jobs) > 1 else ''} of {n:,} tokens to come"


def _s(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 1.0 else f"{seconds:.2f} s"
