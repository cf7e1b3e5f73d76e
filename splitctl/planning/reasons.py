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
        known = f"{_prompts(prompts)} and {_answers(jobs)} take less there" if prompts else f"{_answers(jobs)} do"
        known = known if prompts else f"{_answers(jobs)} take less there"
        return f"goes to {there.value}: {known}, a switch costs {_s(pause)}"
    if there is plans.reader and prompts:
        saved = sum(plans.gain_of_read(job) for job in prompts)
        cost = f"two switches cost {_s(2 * pause)}" if plan.kind is Kind.GATHER else f"a switch costs {_s(pause)}"
        return f"goes to {there.value}: {_prompts(prompts)} save {_s(saved)}, {cost}"
    saved = plans.gain_of_steps(jobs) * (1 if there is plans.writer else -1)
    return f"goes to {there.value}: {_answers(jobs)} save {_s(saved)}, a switch costs {_s(pause)}"


def staying(plans: Plans, floor: Floor, now: Next, pause: float, more: float) -> str:
    """Say why to stay; `more` is what a switch has to save beyond its pause, s."""
    here = floor.mode
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
            return (
                f"{start}{_prompts(prompts)} are read faster here"
                if len(prompts) > 1
                else (f"{start}{_prompts(prompts)} is read faster here")
            )
        jobs = floor.active
        n = sum(job.n_left for job in jobs)
        short = _short(pause + more, plans.gain_of_steps(jobs), n)
        what, verb = ("the answer", "is") if len(jobs) == 1 else (f"the {len(jobs)} answers", "are")
    else:
        if not prompts:
            return f"{start}{_answers(floor.active)} are generated faster here"
        n = sum(job.n_unread for job in prompts)
        short = _short(2 * pause + more, sum(plans.gain_of_read(job) for job in prompts), n)
        what, verb = ("the prompt", "is") if len(prompts) == 1 else (f"the {len(prompts)} prompts", "are")
    if short:
        return f"{start}{what} {verb} {short:,} tokens short of paying"
    return f"{start}what is generated meanwhile weighs more than {what}"


def _short(cost: float, gain: float, n: int) -> int:
    """Count the tokens that are missing for a gain that grows with them to reach a cost; 0: it does."""
    if gain >= cost:
        return 0
    return min(math.ceil((cost - gain) * n / gain), 10**9) if gain > 0.0 else 10**9


def _unread(floor: Floor) -> list[Job]:
    return [job for job in (*floor.active, *floor.queue) if job.n_unread]


def _prompts(jobs: list[Job]) -> str:
    n = sum(job.n_unread for job in jobs)
    return f"{len(jobs)} prompt{'s' if len(jobs) > 1 else ''} of {n:,} uncached tokens"


def _answers(jobs: list[Job]) -> str:
    n = sum(job.n_left for job in jobs)
    return f"{len(jobs)} answer{'s' if len(jobs) > 1 else ''} of {n:,} tokens to come"


def _s(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 1.0 else f"{seconds:.2f} s"
