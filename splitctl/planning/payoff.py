"""What one run can say about its own switch: what it measured, and whether the switch can have paid.

A run reads in one mode and generates in the other, so it knows half of the rates. That the switch did not pay can
sometimes be concluded from that half; that it did pay never can, and then the limits are given that the unknown rates
have to keep. Pure: same input, same output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from splitctl.outcome import WeightsTier
from splitctl.placement import SplitMode


@dataclass(frozen=True, slots=True)
class SwitchedRun:
    """What a run with a switch measured.

    Attributes:
        reads_in: the mode that read the prompt.
        generates_in: the mode that generated; the same one where the switch did not come about.
        requested: the mode that was to generate.
        n_prompt: tokens read.
        prompt_s: time to read them, seconds; None where nothing was read.
        n_generated: tokens generated.
        generate_s: time to generate them, seconds; None where nothing was.
        switch_s: time of the switch, a failed one too, seconds.
        weights: where the switch took the weights from; None where it placed none.
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

    @property
    def prompt_tps(self) -> float | None:
        """Tokens read in a second; None where none were."""
        return _rate(self.n_prompt, self.prompt_s)

    @property
    def generate_tps(self) -> float | None:
        """Tokens generated in a second; None where none were."""
        return _rate(self.n_generated, self.generate_s)

    @property
    def has_switched(self) -> bool:
        """Whether the generation was in the mode that was asked for, and not in the prompt's."""
        return self.generates_in is not self.reads_in


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
    """

    observed: SwitchedRun
    paid: bool | None
    reader_below: float | None
    writer_below: float | None
    sentence: str

    def to_json(self) -> dict[str, Any]:
        """Give what is known as plain values: paid, sentence, pays_if and rates.

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
            "rates": {"switch_s": seen.switch_s, "modes": rates} | self._tier(),
        }

    def _tier(self) -> dict[str, Any]:
        """Say to which tier the time of a switch belongs; what pinned weights cost a token is in the rates already."""
        seen = self.observed
        if seen.weights is None or not seen.has_switched:
            return {}
        more = {"pinned_ms_per_token": 0.0} if seen.weights is WeightsTier.PINNED else {}
        return {"tier_switch_s": {seen.weights.value: seen.switch_s}, **more}


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


def _rate(n: int, seconds: float | None) -> float | None:
    return n / seconds if n > 0 and seconds else None


def _below(n: int, seconds: float) -> float | None:
    return n / seconds if n > 0 and seconds > 0.0 else None
