"""Where a switch pays: the best choice for every length of prompt and answer, by a profile. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitctl.planning.advice import MADE, advise
from splitctl.planning.cost import Choice, Comparison, Work
from splitctl.planning.profile import ModeNotMeasured, Profile

#: Lengths of prompts and answers, from the shortest to what a context holds.
_SHORTEST, _N_POINTS = 16, 25


@dataclass(frozen=True, slots=True)
class Plane:
    """The best of the four choices over prompts and answers.

    Attributes:
        prompts: tokens of a prompt of which nothing is cached, ascending.
        answers: tokens generated, ascending.
        found: for each answer, for each prompt, how the choices compare in the fastest way of a switch.
        n_ctx: tokens that a prompt and its answer may have together.
    """

    prompts: tuple[int, ...]
    answers: tuple[int, ...]
    found: tuple[tuple[Comparison, ...], ...]
    n_ctx: int

    def switches(self) -> tuple[Comparison, ...]:
        """Give those points within the context where a switch is best, and by more than timings differ."""
        points = (one for row in self.found for one in row if one.work.prompt + one.work.generate <= self.n_ctx)
        return tuple(one for one in points if one.best.is_switch and not one.is_close)


def plane_of(profile: Profile, n_ctx: int, n_points: int = _N_POINTS) -> Plane:
    """Weigh the choices all over the plane.

    Args:
        profile: what was measured.
        n_ctx: tokens of the longest prompt, and of the longest answer.
        n_points: points along each side, a constant factor apart.

    Raises:
        ModeNotMeasured: layer mode, tensor mode, or every switch between them is missing.
    """
    lengths = _lengths(max(n_ctx, 2 * _SHORTEST), n_points)
    found = tuple(tuple(_fastest(profile, Work(prompt, answer)) for prompt in lengths) for answer in lengths)
    return Plane(lengths, lengths, found, n_ctx)


def conclusion(profile: Profile, n_ctx: int) -> str:
    """Say in one sentence which mode to use for what, with which micro-batch, and whether a switch ever pays."""
    return f"{_what_for(profile)}; {_switching(profile, n_ctx)}"


def _lengths(longest: int, n: int) -> tuple[int, ...]:
    factor = (longest / _SHORTEST) ** (1 / (n - 1))
    return tuple(sorted({round(_SHORTEST * factor**index) for index in range(n)}))


def _fastest(profile: Profile, work: Work) -> Comparison:
    advice = advise(profile, work)
    if not advice.ways:
        raise ModeNotMeasured("mode", "a switch", advice.missing)
    switches = [choice for choice in Choice if choice.is_switch]
    return min(advice.ways.values(), key=lambda one: min(one.seconds[choice] for choice in switches))


def _what_for(profile: Profile) -> str:
    # As long, and as deep, as every mode was measured.
    longest = min(max(one.depth + one.n_tokens for one in mode.reads) for mode in profile.modes)
    deepest = min(max(one.depth for one in mode.steps if one.n_seq == 1) for mode in profile.modes)
    reader = min(profile.modes, key=lambda one: one.read_s(longest))
    writer = min(profile.modes, key=lambda one: one.step_s(1, deepest))
    reads = f"-ub {reader.n_ubatch} ({longest / reader.read_s(longest):,.0f} tokens/s)"
    makes = f"({1 / writer.step_s(1, deepest):,.1f} tokens/s)"
    least = max(min(one.depth for one in mode.steps if one.n_seq == 1) for mode in profile.modes)
    first = min(profile.modes, key=lambda one: one.step_s(1, least))
    if first.mode is not writer.mode:
        makes = f"at depth {deepest:,} {makes}, {first.mode.value} mode at depth {least:,}"
        makes += f" ({1 / first.step_s(1, least):,.1f} tokens/s)"
    if reader.mode is writer.mode:
        return f"{reader.mode.value} mode reads fastest with {reads} and generates fastest {makes}"
    return f"{reader.mode.value} mode reads fastest with {reads}, {writer.mode.value} mode generates fastest {makes}"


def _switching(profile: Profile, n_ctx: int) -> str:
    try:
        plane = plane_of(profile, n_ctx)
    except ModeNotMeasured as error:
        return f"whether a switch pays was not measured: {error.wanted}"
    pays = plane.switches()
    if not pays:
        return _never(plane)
    best: Sequence[Choice] = sorted({one.best for one in pays}, key=lambda one: one.value)
    told = []
    for choice in best:
        points = [one for one in pays if one.best is choice]
        works = [one.work for one in points]
        made = " or ".join(dict.fromkeys(_made(one) for one in points))
        told.append(
            f"the switch {choice.value}, {made}, pays from about {min(one.prompt for one in works):,} tokens of prompt "
            f"with enough of an answer, and from about {min(one.generate for one in works):,} generated"
        )
    return "; ".join(told)


def _made(found: Comparison) -> str:
    """Say how the fastest switch is made."""
    times = found.rates.tier_switch_s
    return next(told for way, told in MADE.items() if times.get(way) == found.rates.switch_s)


def _never(plane: Plane) -> str:
    """Say why no switch pays within the context."""
    points = [one for row in plane.found for one in row if one.work.prompt + one.work.generate <= plane.n_ctx]
    best = {one.best for one in points}
    if any(one.is_switch for one in best):
        return "no switch pays by more than measurements differ"
    if len(best) == 1:
        (stay,) = best
        return f"no switch pays: {stay.value} mode is best for every prompt and answer within {plane.n_ctx:,} tokens"
    corner = plane.found[-1][-1]
    why = f"; {corner.why}" if corner.switch is not None else ""
    return f"no switch pays within {plane.n_ctx:,} tokens: it takes {corner.rates.switch_s:,.1f} s, and saves less{why}"
