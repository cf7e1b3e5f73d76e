"""What to do with some work on a machine that was measured: the choice, its seconds, and why, in one sentence.

Laws:
    1. A mode that was not measured is not recommended, and nothing is said of its speed.
    2. What lies closer together than repetitions of one measurement is called too close, with both numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from splitctl.outcome import Via, WeightsTier
from splitctl.placement import SplitMode
from splitctl.planning.cost import TIMED, BreakEven, Choice, Comparison, Work, compare
from splitctl.planning.profile import ModeNotMeasured, Profile, Spread, SwitchTime

_MODES = (SplitMode.LAYER, SplitMode.TENSOR)

#: How a switch is made, by its way, for a sentence.
MADE = {
    WeightsTier.FILE.value: "with weights from the file",
    WeightsTier.PINNED.value: "with pinned weights",
    WeightsTier.RESIDENT.value: "with both placements resident",
    Via.BESIDE.value: "beside in a served session",
}


@dataclass(frozen=True, slots=True)
class Advice:
    """What a profile says of some work.

    Attributes:
        work: what one sequence has to do.
        best: the choice that takes least.
        seconds: what each takes; without those that need what was not measured.
        sentence: the answer in one sentence.
        way: where the weights of a switch come from, or "beside"; "" without a switch to weigh.
        ways: the four choices weighed with each way that was measured, in the order of `TIMED`; empty where a mode or
            every switch is missing.
        alone_s: what one device does it in without the others (mode none), seconds; None where that was not measured.
        missing: why there is no switch to weigh; "" with one.
    """

    work: Work
    best: Choice
    seconds: Mapping[Choice, float]
    sentence: str
    way: str = ""
    ways: Mapping[str, Comparison] = field(default_factory=dict)
    alone_s: float | None = None
    missing: str = ""

    @property
    def comparison(self) -> Comparison | None:
        """The four choices weighed; None where a mode or every switch is missing."""
        return self.ways.get(self.way)

    def to_json(self) -> dict[str, Any]:
        """Give plain values: those of `Comparison.to_json`, null for what was not measured, `way` and `alone_s`."""
        if self.comparison is not None:
            plain = self.comparison.to_json()
            measured = {name: one for name, one in plain["tiers"].items() if name in self.ways}
            return {**plain, "sentence": self.sentence, "tiers": measured, "way": self.way, "alone_s": self.alone_s}
        return {
            "best": self.best.value,
            "seconds": {choice.value: self.seconds.get(choice) for choice in Choice},
            "break_even": BreakEven(None, None).to_json(),
            "margin": max(self.seconds.values()) - self.seconds[self.best] if len(self.seconds) > 1 else None,
            "sentence": self.sentence,
            "switch": None,
            "close": False,
            "uncached": self.work.uncached,
            "tiers": {},
            "way": None,
            "alone_s": self.alone_s,
        }


def advise(
    profile: Profile, work: Work, *, n_seq: int = 1, way: str | None = None, switch_s: float | None = None
) -> Advice:
    """Weigh the choices for the work of each of so many sequences.

    Args:
        profile: what was measured.
        work: what one sequence has to do.
        n_seq: how many sequences have as much to do.
        way: judge switches of this way, one of `TIMED`; None: with weights from the file, else the first measured.
        switch_s: seconds of a switch, in place of what was measured.

    Raises:
        ModeNotMeasured: neither mode was measured, or no switch of this way.
    """
    advice = _advise(profile, work, n_seq, way, switch_s)
    if not any(one.mode is SplitMode.NONE for one in profile.modes):
        return advice
    alone_s = _stay(profile, SplitMode.NONE, work, n_seq)
    text = advice.sentence
    if alone_s < advice.seconds[advice.best]:
        text += f"; one device alone takes {alone_s:,.1f} s (-sm none)"
    return replace(advice, sentence=text, alone_s=alone_s)


def _advise(profile: Profile, work: Work, n_seq: int, way: str | None, switch_s: float | None) -> Advice:
    missing = {}
    for mode in _MODES:
        try:
            profile.of(mode)
        except ModeNotMeasured as error:
            missing[mode] = error
    if len(missing) == len(_MODES):
        raise missing[SplitMode.LAYER]
    stays = {Choice(mode.value): _stay(profile, mode, work, n_seq) for mode in _MODES if mode not in missing}
    best = min(stays, key=stays.__getitem__)
    for mode, why in missing.items():
        missing_mode = f"{mode.value} mode was not measured: {why.wanted}"
        text = f"stay in {best.value} mode: {stays[best]:,.1f} s; {missing_mode}"
        return Advice(work, best, stays, text, missing=missing_mode)
    try:
        rates = profile.rates(work, n_seq=n_seq)
    except ModeNotMeasured:
        if switch_s is None:
            missing_switch = _without_switch(profile)
            return Advice(work, best, stays, f"{_stays(stays)}; {missing_switch}", missing=missing_switch)
        rates = replace(profile, switches=_given(switch_s, way)).rates(work, n_seq=n_seq)
    way = way or next(iter(rates.tier_switch_s))
    if switch_s is not None:
        rates = rates.in_tier(way, switch_s)
    if way not in rates.tier_switch_s:
        why_not = next((one.why for one in profile.left_out if one.what == way), "measure it: splitctl bench")
        raise ModeNotMeasured("way", f"a switch ({way}) to another", why_not)
    ways = {one: compare(rates.in_tier(one), work) for one in TIMED if one in rates.tier_switch_s}
    found = ways[way]
    return Advice(work, found.best, found.seconds, f"{_sentence(found)}{_made(way, ways)}", way, ways)


def _stay(profile: Profile, mode: SplitMode, work: Work, n_seq: int) -> float:
    return sum(profile.work_s(profile.of(mode), work, n_seq))


def _stays(stays: Mapping[Choice, float]) -> str:
    (first, least), (second, most) = sorted(stays.items(), key=lambda pair: pair[1])
    return f"stay in {first.value} mode: {least:,.1f} s, {most - least:,.1f} s less than {second.value} ({most:,.1f} s)"


def _without_switch(profile: Profile) -> str:
    whys = dict.fromkeys(one.why for one in profile.left_out if one.what in TIMED)
    ways = [", ".join(one.what for one in profile.left_out if one.what in TIMED and one.why == why) for why in whys]
    why = "; ".join(f"{names}: {why}" for names, why in zip(ways, whys, strict=True))
    return f"no switch between them was measured{f' ({why})' if why else ''}"


def _given(seconds: float, way: str | None) -> tuple[SwitchTime, ...]:
    """Make switches of a given time both ways."""
    exactly = Spread(seconds, seconds, seconds, 1)
    return tuple(
        SwitchTime(
            before, after, way or WeightsTier.FILE.value, is_first=False, n_tokens=0, pause=exactly, total=exactly
        )
        for before, after in (_MODES, _MODES[::-1])
    )


def _sentence(found: Comparison) -> str:
    if not found.is_close:
        return found.sentence
    best, other = found.best, found.next_best
    return (
        f"too close to call: {best.value} takes {found.seconds[best]:,.1f} s and {other.value} "
        f"{found.seconds[other]:,.1f} s, and measurements differ by {found.rates.noise:.0%}; {found.why}"
    )


def _made(way: str, ways: Mapping[str, Comparison]) -> str:
    """Say how the switches that were judged are made, and which other way would make the work faster."""
    found = ways[way]
    if len(ways) == 1 or all(one.switch is None for one in ways.values()):
        return ""
    quickest = min(ways, key=lambda one: ways[one].seconds[ways[one].best])
    text = f"; this is for a switch {MADE[way]}"
    least_s = ways[quickest].seconds[ways[quickest].best]
    if found.seconds[found.best] - least_s <= found.rates.noise * least_s:
        return text
    return f"{text}: {MADE[quickest]} {ways[quickest].best.value} takes {least_s:,.1f} s"
