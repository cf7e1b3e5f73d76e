"""What one run can say about its own switch: what it measured, and whether the switch can have paid.

A run reads in one mode and generates in the other, so it knows half of the rates. That the switch did not pay can
sometimes be concluded from that half; that it did pay never can, and then the limits are given that the unknown rates
have to keep. A profile has the other half, and says of a run without a switch what another choice would have taken.
Pure: same input, same output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from splitctl.outcome import WeightsTier
from splitctl.placement import SplitMode
from splitctl.planning.cost import NOISE, Choice
from splitctl.planning.profile import MeasuredMode, ModeNotMeasured, Profile


@dataclass(frozen=True, slots=True)
class SwitchedRun:
    """What a run measured, with a switch or without one.

    Attributes:
        reads_in: the mode that read the prompt.
        generates_in: the mode that generated; the same one where the switch did not come about.
        requested: the mode that was to generate.
        n_prompt: tokens read.
        prompt_s: time to read them, seconds; None where nothing was read.
        n_generated: tokens generated.
        generate_s: time to generate them, seconds; None where nothing was.
        switch_s: time of the switch, a failed one too, seconds; 0 without one.
        weights: where the switch took the weights from; None where it placed none. Without a switch where one would.
        n_held: tokens that the session held before the prompt.
        n_ubatch: tokens of a micro-batch.
    """

    reads_in: SplitMode
    generates_in: SplitMode
    requested: SplitMode
    n_prompt: int
    prompt_s: float | None
    n_generated: int
    generate_s: float | None
    switch_s: float
    weights: WeightsTier | None = None
    n_held: int = 0
    n_ubatch: int | None = None

    @property
    def took_s(self) -> float:
        """All that was measured, seconds."""
        return (self.prompt_s or 0.0) + self.switch_s + (self.generate_s or 0.0)

    @property
    def prompt_tps(self) -> float | None:
        """Tokens read in a second; None where none were."""
        return _rate(self.n_prompt, self.prompt_s)

    @property
    def generate_tps(self) -> float | None:
        """Tokens generated in a second; None where none were."""
        return _rate(self.n_generated, self.generate_s)

    @property
    def wanted_switch(self) -> bool:
        """Whether another mode was to generate than read."""
        return self.requested is not self.reads_in

    @property
    def has_switched(self) -> bool:
        """Whether the generation was in the mode that was asked for, and not in the prompt's."""
        return self.generates_in is not self.reads_in


@dataclass(frozen=True, slots=True)
class ByProfile:
    """What a run's choice was worth, by what was measured before it.

    Attributes:
        paid: whether its switch paid; None where the numbers are too close, and for a run without a switch.
        other: the best of the other choices that can be judged.
        other_s: what it would have taken, seconds: measured in this run as far as it did the same, else by the profile.
        saved_s: how much less this run took than that, seconds; negative where the other would have been better.
        is_close: whether that is less than measurements differ.
        sentence: the answer in one sentence.
    """

    paid: bool | None
    other: Choice
    other_s: float
    saved_s: float
    is_close: bool
    sentence: str

    def to_json(self) -> dict[str, Any]:
        """Give plain values: paid, other, other_s, saved_s, close, sentence."""
        return {
            "paid": self.paid,
            "other": self.other.value,
            "other_s": self.other_s,
            "saved_s": self.saved_s,
            "close": self.is_close,
            "sentence": self.sentence,
        }


@dataclass(frozen=True, slots=True)
class Payoff:
    """What can be said after a run.

    Attributes:
        observed: what it is said of.
        paid: False where the switch cannot have paid; None where the run cannot tell.
        reader_below: the mode that read would have to generate slower than this for the switch to have paid against
            staying in it, tokens in a second; None where nothing was generated after a switch.
        writer_below: the mode that generated would have to read slower than this for the switch to have paid against
            being in it from the start, tokens in a second; None where nothing was read, or there was no switch.
        sentence: the answer in one sentence.
        by_profile: what the run's choice was worth by a profile; None without one.
    """

    observed: SwitchedRun
    paid: bool | None
    reader_below: float | None
    writer_below: float | None
    sentence: str
    by_profile: ByProfile | None = None

    def to_json(self) -> dict[str, Any]:
        """Give what is known as plain values: paid, sentence, pays_if, rates and by_profile.

        `rates` has the form that `splitctl explain --rates` takes, null for what was not measured.
        """
        seen = self.observed
        rates: dict[str, dict[str, float | None]] = {
            mode.value: {"prompt_tps": None, "generate_tps": None} for mode in (seen.reads_in, seen.requested)
        }
        rates[seen.reads_in.value]["prompt_tps"] = seen.prompt_tps
        rates[seen.generates_in.value]["generate_tps"] = seen.generate_tps
        return {
            "paid": self.paid,
            "sentence": self.sentence,
            "pays_if": {
                f"{seen.reads_in.value}_generate_tps_below": self.reader_below,
                f"{seen.generates_in.value}_prompt_tps_below": self.writer_below,
            }
            if seen.has_switched
            else None,
            "rates": {"switch_s": seen.switch_s if seen.wanted_switch else None, "modes": rates} | self._tier(),
            "by_profile": None if self.by_profile is None else self.by_profile.to_json(),
        }

    def _tier(self) -> dict[str, Any]:
        """Say to which tier the time of a switch belongs; what pinned weights cost a token is in the rates already."""
        seen = self.observed
        if seen.weights is None or not seen.has_switched:
            return {}
        more = {"pinned_ms_per_token": 0.0} if seen.weights is WeightsTier.PINNED else {}
        return {"tier_switch_s": {seen.weights.value: seen.switch_s}, **more}


def without_switch(seen: SwitchedRun, known: ByProfile) -> Payoff:
    """Give what a profile says of a run that did not switch."""
    return Payoff(seen, None, None, None, known.sentence, known)


def look_back(seen: SwitchedRun, n_devices: int) -> Payoff:
    """Conclude what a run can say about its switch; `n_devices` share the work."""
    reader, writer, cost = seen.reads_in.value, seen.generates_in.value, f"{seen.switch_s:,.2f} s"
    if not seen.has_switched:
        text = f"the switch did not pay: it took {cost} and ended in {writer} mode, where it began"
        return Payoff(seen, paid=False, reader_below=None, writer_below=None, sentence=text)
    reader_below = _below(seen.n_generated, seen.switch_s + (seen.generate_s or 0.0))
    writer_below = _below(seen.n_prompt, seen.switch_s + (seen.prompt_s or 0.0))

    def failed(why: str) -> Payoff:
        text = f"the switch did not pay: {why}"
        return Payoff(seen, paid=False, reader_below=reader_below, writer_below=writer_below, sentence=text)

    if reader_below is None or seen.generate_tps is None:
        return failed(f"nothing was generated after it, so its {cost} gained nothing")
    if writer_below is None:
        return failed(f"nothing was read before it, so {writer} mode from the start would have saved its {cost}")
    if seen.generate_tps >= writer_below:
        return failed(
            f"{writer} mode generates {seen.generate_tps:,.1f} tokens/s and reads no slower than that, so from the "
            f"start it would have read {seen.n_prompt:,} tokens sooner than {reader} mode and the switch did"
        )
    if seen.reads_in is SplitMode.LAYER and seen.generate_tps / max(n_devices, 1) >= reader_below:
        # A layer split works on a token with one device after the other; n together are at most n times as fast.
        return failed(
            f"{n_devices} devices together are at most {n_devices} times as fast as one after the other, so layer mode "
            f"would have generated {seen.n_generated:,} tokens sooner than {writer} mode with the {cost} of the switch"
        )
    text = (
        f"whether the switch paid this run cannot tell, as it did not generate in {reader} mode or read in {writer} "
        f"mode: it paid if {reader} mode generates fewer than {reader_below:,.1f} tokens/s and {writer} mode reads "
        f"fewer than {writer_below:,.1f} tokens/s (a run without -psm in each mode measures them, splitctl explain "
        "compares)"
    )
    return Payoff(seen, None, reader_below, writer_below, text)


def by_profile(seen: SwitchedRun, profile: Profile, source: str) -> ByProfile | None:
    """Hold a run against what its other choices would have taken.

    A switch is held against staying in each of the two modes; a run without one against the other mode and both
    switches.

    Args:
        seen: the run.
        profile: what was measured.
        source: from which day and build it is, for the sentence.

    Returns:
        None where the profile knows no other choice, or the switch did not come about.
    """
    chosen = next(
        (one for one in Choice if (one.reads_in, one.generates_in) == (seen.reads_in, seen.generates_in)), None
    )
    if chosen is None or seen.requested is not seen.generates_in:
        return None
    judged = [one for one in Choice if one is not chosen and not (chosen.is_switch and one.is_switch)]
    others = {one: seconds for one in judged if (seconds := _would_take(one, seen, profile)) is not None}
    if not others:
        return None
    other = min(others, key=others.__getitem__)
    saved = others[other] - seen.took_s
    noise = max(NOISE, *(one.noise for one in profile.modes))
    is_close = abs(saved) <= noise * min(others[other], seen.took_s)
    text = _of_switch(seen, other, saved) if chosen.is_switch else _of_one_mode(seen, other, saved)
    if is_close:
        what = "whether the switch paid" if chosen.is_switch else "whether another choice would have been better"
        text = (
            f"{what} is too close to call: this run took {seen.took_s:,.2f} s, {other.value} would have taken "
            f"{others[other]:,.2f} s, and measurements differ by {noise:.0%}"
        )
    paid = saved > 0.0 if chosen.is_switch and not is_close else None
    return ByProfile(paid, other, others[other], saved, is_close, f"{text} (by the profile of {source})")


def _would_take(choice: Choice, seen: SwitchedRun, profile: Profile) -> float | None:
    """Give a choice's seconds: measured by the run where it did the same, else by the profile; None: not known."""
    try:
        reading, generating = seen.prompt_s or 0.0, seen.generate_s or 0.0
        if choice.reads_in is not seen.reads_in:
            reading = _mode(profile, choice.reads_in, seen.n_ubatch).read_s(seen.n_prompt, seen.n_held)
        n_held = seen.n_held + seen.n_prompt
        if choice.generates_in is not seen.generates_in:
            generating = _mode(profile, choice.generates_in, seen.n_ubatch).generate_s(seen.n_generated, n_held)
    except ModeNotMeasured:
        return None
    if not choice.is_switch:
        return reading + generating
    tiers: tuple[WeightsTier, ...] = (WeightsTier.FILE, WeightsTier.PINNED, WeightsTier.RESIDENT)
    if seen.weights in tiers:
        tiers = (seen.weights,)
    before, after = choice.reads_in, choice.generates_in
    times = [profile.switch(before, after, tier.value, n_held, is_first=True) for tier in tiers]
    costs = [pause + seen.n_generated * more_ms / 1e3 for pause, more_ms in filter(None, times)]
    return reading + generating + min(costs) if costs else None


def _mode(profile: Profile, mode: SplitMode, n_ubatch: int | None) -> MeasuredMode:
    """Give a mode with the run's size of micro-batches where that was measured, else with the best one."""
    try:
        return profile.of(mode, n_ubatch)
    except ModeNotMeasured:
        return profile.of(mode)


def _of_switch(seen: SwitchedRun, other: Choice, saved: float) -> str:
    mode = other.value
    if saved > 0.0:
        took = f"{seen.took_s:,.2f} s"
        return f"the switch paid: {mode} mode throughout would have taken {saved:,.2f} s more than the {took}"
    return (
        f"the switch did not pay: {mode} mode throughout would have saved {-saved:,.2f} s: leave out -psm, -sm {mode}"
    )


def _of_one_mode(seen: SwitchedRun, other: Choice, saved: float) -> str:
    reader, writer = other.reads_in.value, other.generates_in.value
    if saved > 0.0:
        return f"no other choice would have been better than {seen.generates_in.value} mode throughout"
    if not other.is_switch:
        return f"{writer} mode throughout would have saved {-saved:,.2f} s: -sm {writer}"
    if other.generates_in is seen.generates_in:
        return f"reading in {reader} mode and switching would have saved {-saved:,.2f} s: -psm {reader}"
    return f"generating in {writer} mode after a switch would have saved {-saved:,.2f} s: -psm {reader} -sm {writer}"


def _rate(n: int, seconds: float | None) -> float | None:
    return n / seconds if n > 0 and seconds else None


def _below(n: int, seconds: float) -> float | None:
    return n / seconds if n > 0 and seconds > 0.0 else None
