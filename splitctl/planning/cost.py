"""Whether a switch pays: seconds of every choice from measured rates.

Laws:
    1. Pure: the same rates and the same work give the same answer.
    2. No mode is the fast one for prompts by nature: both directions of a switch are weighed alike.
    3. A switch has to save more than it costs; where two choices take equally long, the one without a switch is taken.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from splitctl.errors import ConfigInvalid
from splitctl.outcome import Via, WeightsTier
from splitctl.placement import SplitMode

#: Rates outside these are no rates of any machine [tokens/s].
MIN_TPS, MAX_TPS = 1e-6, 1e9
#: A longer switch is no switch [s].
MAX_SWITCH_S = 1e6
#: More tokens than any context holds.
MAX_TOKENS = 10**12
#: No switch adds more to a token [ms].
_MAX_MS_PER_TOKEN = 1e6

PINNED_MS_PER_LAYER = 0.02
"""What each layer of a model adds to a token on CUDA after weights came from a copy in host memory, ms: tensors that
the file lacks exist. Source: two H200, 32 layers 0.6 to 0.9 ms, 64 layers 1.5 ms (docs/speed.md)."""
PINNED_MS_PER_TOKEN = 0.6
"""The same for a model of which nothing is known, ms: 8B q8_0 has 32 layers.

Source: 207 and 232 tokens/s in place of 244 and 269 (docs/speed.md).
"""

TIMED = (WeightsTier.FILE.value, WeightsTier.PINNED.value, WeightsTier.RESIDENT.value, Via.BESIDE.value)
"""The ways of a switch that have times of their own: three tiers of weights, and a second worker that takes over."""

_MS = 1e-3

#: Timings of identical work differ by this share from run to run, where nobody measured by how much.
NOISE = 0.05


class RatesInvalid(ConfigInvalid):
    """A file of rates that cannot be used."""

    def __str__(self) -> str:
        return f"the rates cannot be used: {self.field} is {self.value}; wanted: {self.wanted}"


@dataclass(frozen=True, slots=True)
class ModeRates:
    """How fast one split mode is.

    Attributes:
        prompt_tps: tokens of a prompt read in a second.
        generate_tps: tokens generated in a second.
    """

    prompt_tps: float
    generate_tps: float


@dataclass(frozen=True, slots=True)
class Rates:
    """What was measured of one model on one set of devices.

    Attributes:
        switch_s: seconds of a switch.
        layer: rates in layer mode.
        tensor: rates in tensor mode.
        tier_switch_s: seconds of a switch with weights from a tier, by its name; "beside": seconds that streams stand
            still while a second worker takes over.
        pinned_ms_per_token: what a token takes more after a switch with pinned weights, ms.
        after_switch_ms: what a token takes more after the switch of `switch_s`, ms.
        noise: share by which timings of identical work differ from run to run: what is closer is not decided by them.
        is_of_work: they hold for the work that was asked about, and at other lengths they are others.
        tier: where the switch of `switch_s` takes the weights from, one of `TIMED`.
        timed: the switch whose times these are; None: each of both.
        way_back_s: seconds of the other one, by tier, where they are known.
    """

    switch_s: float
    layer: ModeRates
    tensor: ModeRates
    tier_switch_s: Mapping[str, float] = field(default_factory=dict)
    pinned_ms_per_token: float = PINNED_MS_PER_TOKEN
    after_switch_ms: float = 0.0
    noise: float = NOISE
    is_of_work: bool = False
    tier: str = WeightsTier.FILE.value
    timed: Choice | None = None
    way_back_s: Mapping[str, float] = field(default_factory=dict)

    def switch_time(self, choice: Choice) -> float:
        """Give the seconds of one of the two switches."""
        is_back = self.timed is not None and choice is not self.timed
        return self.way_back_s.get(self.tier, self.switch_s) if is_back else self.switch_s

    def of(self, mode: SplitMode) -> ModeRates:
        """Give the rates of a mode; ConfigInvalid for one that nobody measured."""
        if mode is SplitMode.LAYER:
            return self.layer
        if mode is SplitMode.TENSOR:
            return self.tensor
        raise ConfigInvalid("mode", mode.value, "layer or tensor")

    @property
    def tiers(self) -> Mapping[str, Rates]:
        """The rates with each tier whose time is known, in the order of `TIMED`; the file's time is always."""
        return {tier: self.in_tier(tier) for tier in TIMED if tier in self._times}

    @property
    def _times(self) -> Mapping[str, float]:
        return {WeightsTier.FILE.value: self.switch_s, **self.tier_switch_s}

    def in_tier(self, tier: str, switch_s: float | None = None) -> Rates:
        """Give the rates for switches with weights from a tier.

        Args:
            tier: one of `TIMED`.
            switch_s: seconds of such a switch; None: as measured.

        Raises:
            RatesInvalid: nobody measured its time.
        """
        times = {**self._times, **({} if switch_s is None else {tier: switch_s})}
        if tier not in times:
            raise RatesInvalid(f"tier_switch_s.{tier}", "missing", "seconds of a switch with weights from this tier")
        more = self.pinned_ms_per_token if tier == WeightsTier.PINNED.value else 0.0
        back = self.way_back_s if switch_s is None else {}
        return replace(
            self, switch_s=times[tier], tier_switch_s=times, after_switch_ms=more, tier=tier, way_back_s=back
        )


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be done.

    Attributes:
        prompt: tokens of the prompt.
        generate: tokens to generate.
        cached: tokens of the prompt that the cache holds already; they cost nothing in any mode.

    Raises:
        ConfigInvalid: a number is negative or beyond any context, or more is cached than there is.
    """

    prompt: int
    generate: int
    cached: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt", "generate", "cached"):
            value = getattr(self, name)
            if not 0 <= value <= MAX_TOKENS:
                raise ConfigInvalid(name, value, f"from 0 to {MAX_TOKENS} tokens")
        if self.cached > self.prompt:
            raise ConfigInvalid("cached", self.cached, f"{self.prompt} at most, as the prompt has no more tokens")

    @property
    def uncached(self) -> int:
        """Tokens of the prompt that have to be read."""
        return self.prompt - self.cached


class Choice(enum.Enum):
    """A way to do the work. Where two take equally long the earlier is taken."""

    LAYER = "layer"
    TENSOR = "tensor"
    LAYER_TO_TENSOR = "layer->tensor"
    TENSOR_TO_LAYER = "tensor->layer"

    @property
    def reads_in(self) -> SplitMode:
        """The mode of the prompt."""
        return SplitMode(self.value.partition("->")[0])

    @property
    def generates_in(self) -> SplitMode:
        """The mode of the generation."""
        return SplitMode(self.value.rpartition("->")[2])

    @property
    def is_switch(self) -> bool:
        """Whether the mode changes between the two."""
        return self.reads_in is not self.generates_in


@dataclass(frozen=True, slots=True)
class BreakEven:
    """From where on a switch pays: both have to be exceeded.

    Attributes:
        prompt: uncached tokens of the prompt from which it beats staying in the mode that generates; None: never.
        generate: tokens generated from which it beats staying in the mode that reads; None: never.
    """

    prompt: float | None
    generate: float | None

    def to_json(self) -> dict[str, int | None]:
        """Give whole tokens."""
        return {
            "prompt": None if self.prompt is None else round(self.prompt),
            "generate": None if self.generate is None else round(self.generate),
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """What each choice costs, and which is best.

    Attributes:
        work: what is to be done.
        rates: how fast the modes are.
        best: the choice that takes least.
        seconds: what each takes.
        switch: the one switch that can pay at all with these rates; None where one mode is as fast in everything.
        break_even: from where on that switch pays.
        margin: what the best saves against the next best, seconds.
    """

    work: Work
    rates: Rates
    best: Choice
    seconds: Mapping[Choice, float]
    switch: Choice | None
    break_even: BreakEven
    margin: float

    @property
    def next_best(self) -> Choice:
        """The choice that takes least after the best."""
        return min((one for one in Choice if one is not self.best), key=self.seconds.__getitem__)

    @property
    def is_close(self) -> bool:
        """Whether the margin is within what timings differ from run to run."""
        return self.margin <= self.rates.noise * self.seconds[self.best]

    @property
    def sentence(self) -> str:
        """The answer in one sentence, for a person."""
        best, other = self.best, self.next_best
        first, second = best.reads_in.value, best.generates_in.value
        if best.is_switch:
            what = f"read the prompt in {first} mode, switch, and generate in {second} mode"
        else:
            what = f"stay in {first} mode"
        text = (
            f"{what}: {self.seconds[best]:,.1f} s, {self.margin:,.1f} s less than {other.value} "
            f"({self.seconds[other]:,.1f} s)"
        )
        if self.is_close:
            text += ", which is less than timings differ from run to run"
        return f"{text}; {self.why}"

    def to_json(self) -> dict[str, Any]:
        """Give plain values.

        Best, seconds, break_even (whole tokens or null), margin (seconds), sentence, switch, close, uncached, and for
        each tier whose time is known: switch_s, ms_per_token (what a token takes more after it), break_even, best, and
        the seconds of the switch that can pay, or null.
        """
        tiers = {tier: compare(rates, self.work) for tier, rates in self.rates.tiers.items()}
        return {
            "best": self.best.value,
            "seconds": {choice.value: self.seconds[choice] for choice in Choice},
            "break_even": self.break_even.to_json(),
            "margin": self.margin,
            "sentence": self.sentence,
            "switch": None if self.switch is None else self.switch.value,
            "close": self.is_close,
            "uncached": self.work.uncached,
            "tiers": {
                tier: {
                    "switch_s": one.rates.switch_s,
                    "ms_per_token": one.rates.after_switch_ms,
                    "break_even": one.break_even.to_json(),
                    "best": one.best.value,
                    "seconds": None if one.switch is None else one.seconds[one.switch],
                }
                for tier, one in tiers.items()
            },
        }

    @property
    def why(self) -> str:
        """From where on a switch pays, or why none does: a part of the sentence."""
        if self.switch is None or self.break_even.prompt is None or self.break_even.generate is None:
            more = self.rates.after_switch_ms
            if more and _break_even(replace(self.rates, after_switch_ms=0.0))[0] is not None:
                return f"no switch pays with these weights: no mode gains the {more:g} ms that they add to a token"
            fast = _as_fast_in_everything(self.rates)
            slow = SplitMode.TENSOR if fast is SplitMode.LAYER else SplitMode.LAYER
            known = f"{fast.value} mode reads and generates"
            if self.rates.is_of_work:
                return f"no switch pays for such work: {known} it at least as fast as {slow.value} mode"
            return f"no switch ever pays: {known} at least as fast as {slow.value} mode"
        prompt, generate = round(self.break_even.prompt), round(self.break_even.generate)
        return (
            f"the switch {self.switch.value} pays from more than {prompt:,} uncached tokens of prompt and "
            f"{generate:,} generated"
        )


def compare(rates: Rates, work: Work) -> Comparison:
    """Weigh the four choices."""
    seconds = {choice: _seconds(choice, rates, work) for choice in Choice}
    ranked = sorted(Choice, key=seconds.__getitem__)
    best, other = ranked[0], ranked[1]
    switch, even = _break_even(rates)
    return Comparison(work, rates, best, seconds, switch, even, seconds[other] - seconds[best])


def _seconds(choice: Choice, rates: Rates, work: Work) -> float:
    reading = work.uncached / rates.of(choice.reads_in).prompt_tps
    generating = work.generate / rates.of(choice.generates_in).generate_tps
    more = work.generate * rates.after_switch_ms * _MS
    switching = rates.switch_time(choice) + more if choice.is_switch else 0.0
    return reading + generating + switching


def _break_even(rates: Rates) -> tuple[Choice | None, BreakEven]:
    """Find the switch that gains at both ends, and where its gains reach its cost."""
    for switch in (Choice.LAYER_TO_TENSOR, Choice.TENSOR_TO_LAYER):
        reader, writer = rates.of(switch.reads_in), rates.of(switch.generates_in)
        # What a token gains: of the prompt against staying in the writer's mode, of the answer in the reader's [s].
        reading = 1.0 / writer.prompt_tps - 1.0 / reader.prompt_tps
        writing = 1.0 / reader.generate_tps - 1.0 / writer.generate_tps - rates.after_switch_ms * _MS
        if reading > 0.0 and writing > 0.0:
            return switch, BreakEven(rates.switch_time(switch) / reading, rates.switch_time(switch) / writing)
    return None, BreakEven(None, None)


def _as_fast_in_everything(rates: Rates) -> SplitMode:
    """Name the mode that is not slower in anything; there is one where no switch can pay."""
    layer, tensor = rates.layer, rates.tensor
    is_layer = layer.prompt_tps >= tensor.prompt_tps and layer.generate_tps >= tensor.generate_tps
    return SplitMode.LAYER if is_layer else SplitMode.TENSOR


# ---- the file of rates ----


def parse_rates(text: str | bytes) -> Rates:
    """Read rates as a file holds them.

    Args:
        text: JSON: `{"switch_s": S, "modes": {"layer": {"prompt_tps": a, "generate_tps": b}, "tensor": {...}}}`, and if
            they are known `"tier_switch_s": {"pinned": S, ...}` and `"pinned_ms_per_token": ms`.

    Raises:
        RatesInvalid: it is not JSON, a key is missing, repeated or unknown, or a number is none, is not finite, is zero
            or negative, or is beyond any machine.
    """
    try:
        plain = json.loads(text, parse_constant=_no_number, object_pairs_hook=_each_key_once)
    except RatesInvalid:
        raise
    except (ValueError, RecursionError) as error:
        wanted = 'JSON: {"switch_s": S, "modes": {"layer": {"prompt_tps": a, "generate_tps": b}, "tensor": {...}}}'
        raise RatesInvalid("the file", f"no JSON ({error})", wanted) from error
    top = _keys(plain, "the file", ("switch_s", "modes"), ("tier_switch_s", "pinned_ms_per_token"))
    tiers = _keys(top.get("tier_switch_s", {}), "tier_switch_s", (), TIMED)
    more = top.get("pinned_ms_per_token", PINNED_MS_PER_TOKEN)
    modes = _keys(top["modes"], "modes", (SplitMode.LAYER.value, SplitMode.TENSOR.value))
    return Rates(
        _number(top["switch_s"], "switch_s", 0.0, MAX_SWITCH_S, "seconds"),
        layer=_mode(modes[SplitMode.LAYER.value], "modes.layer"),
        tensor=_mode(modes[SplitMode.TENSOR.value], "modes.tensor"),
        tier_switch_s={
            name: _number(value, f"tier_switch_s.{name}", 0.0, MAX_SWITCH_S, "seconds") for name, value in tiers.items()
        },
        pinned_ms_per_token=_number(more, "pinned_ms_per_token", 0.0, _MAX_MS_PER_TOKEN, "ms"),
    )


def _mode(plain: object, where: str) -> ModeRates:
    values = _keys(plain, where, ("prompt_tps", "generate_tps"))
    return ModeRates(
        *(
            _number(values[name], f"{where}.{name}", MIN_TPS, MAX_TPS, "tokens in a second")
            for name in ("prompt_tps", "generate_tps")
        )
    )


def _keys(plain: object, where: str, names: tuple[str, ...], others: tuple[str, ...] = ()) -> dict[str, object]:
    """Take an object with all of some keys, and any of others."""
    wanted = "an object with " + ", and if known ".join(
        f"the keys {' and '.join(keys)}" for keys in (names, others) if keys
    )
    if not isinstance(plain, dict):
        raise RatesInvalid(where, _shown(plain), wanted)
    missing = [name for name in names if name not in plain]
    more = [str(name) for name in plain if name not in (*names, *others)]
    if missing:
        raise RatesInvalid(where, f"without {' and '.join(missing)}", wanted)
    if more:
        raise RatesInvalid(where, f"with {_shown(more[0])}", f"{wanted} and no other")
    return plain


def _number(plain: object, where: str, low: float, high: float, unit: str) -> float:
    wanted = f"a number from {low:g} to {high:g} ({unit})"
    if isinstance(plain, bool) or not isinstance(plain, int | float):
        found = "null, which means that nobody measured it" if plain is None else _shown(plain)
        raise RatesInvalid(where, found, wanted)
    # A comparison of an integer with a float is exact, however long the integer.
    if not low <= plain <= high:
        raise RatesInvalid(where, _shown(plain), wanted)
    return float(plain)


def _no_number(word: str) -> NoReturn:
    """Refuse NaN and the infinities, which Python's JSON knows and JSON does not."""
    raise RatesInvalid("a number of the file", word, "a finite number")


def _each_key_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Refuse a key that is given twice: one of its values would be lost in silence."""
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise RatesInvalid("a key of the file", f"{name} twice", "each key once")
        found[name] = value
    return found


def _shown(plain: object, limit: int = 60) -> str:
    if isinstance(plain, float) and not math.isfinite(plain):
        return "too large for a number"
    text = repr(plain)
    return text if len(text) <= limit else f"{text[:limit]}..."
