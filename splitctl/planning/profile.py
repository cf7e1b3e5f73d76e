"""How fast one model is on one set of devices, as measured there, and what work takes by that.

Laws:
    1. What was measured is kept as it came: median, lowest and highest of the repetitions, never a rate alone.
    2. Between two measured points a straight line is taken. Beyond the last one the slope goes on that leads there from
       the nearest point that lies lower by more than repetitions differ; without one nothing is added. What was never
       measured in a mode is not guessed from the other mode.
    3. Seconds of a prompt are those of its uncached tokens, at the depth where they stand.
    4. What was not measured adds nothing: profiles from before it was measured are as good as they were.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import median
from typing import Self

from splitctl.errors import ConfigInvalid
from splitctl.outcome import StageTimes
from splitctl.placement import SplitMode
from splitctl.planning.cost import MAX_TOKENS, MAX_TPS, NOISE, TIMED, Choice, ModeRates, Rates, Work

#: Longer than any measurement [s].
_MAX_S = 1e6
#: More repetitions than anybody makes, and more things that are measured of one kind.
_MAX_RUNS, _MAX_THINGS = 10_000, 1_000
#: Nothing takes less than a token at the highest rate [s].
_LEAST_S = 1.0 / MAX_TPS
#: A token of another sequence that takes less than this share of what one of the own does is passed over, not computed.
_SKIPPED = 0.5
#: Lines that are remembered: a profile has a few for each mode and way of a switch.
_N_LINES = 512
#: Metadata of a field that older profiles lack, as `ipc.wire` knows it.
_LATER = {"later": True}


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated measurements of one thing, seconds.

    Attributes:
        median: the middle one.
        low: the shortest.
        high: the longest.
        n: how many.

    Raises:
        ConfigInvalid: they are no times, or not in order.
    """

    median: float
    low: float
    high: float
    n: int

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= self.median <= self.high <= _MAX_S:
            found = f"{self.low} to {self.median} to {self.high}"
            raise ConfigInvalid("median", found, f"low <= median <= high, from 0 to {_MAX_S:g} s")
        if not 1 <= self.n <= _MAX_RUNS:
            raise ConfigInvalid("n", self.n, f"1 to {_MAX_RUNS} repetitions")

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self:
        """Sum up repetitions; there is at least one."""
        return cls(median(seconds), min(seconds), max(seconds), len(seconds))

    @property
    def share(self) -> float:
        """Half of what lies between the shortest and the longest, as a share of the median; 0 for one of no length."""
        return (self.high - self.low) / 2 / self.median if self.median else 0.0


def _checked(name: str, n: int, depth: int) -> None:
    """Refuse numbers of tokens or sequences that nobody measures."""
    if not (1 <= n <= MAX_TOKENS and 0 <= depth <= MAX_TOKENS):
        most = 10 * MAX_TOKENS
        found = f"{min(n, most)} at depth {min(depth, most)}"
        raise ConfigInvalid(name, found, f"from 1, at a depth from 0 on, up to {MAX_TOKENS:.0e}")


@dataclass(frozen=True, slots=True)
class Read:
    """Tokens read at once by one sequence.

    Attributes:
        n_tokens: how many.
        depth: tokens that the sequence held before.
        seconds: until their logits were there.
    """

    n_tokens: int
    depth: int
    seconds: Spread

    def __post_init__(self) -> None:
        _checked("n_tokens", self.n_tokens, self.depth)


@dataclass(frozen=True, slots=True)
class Step:
    """One token of every sequence that generates.

    Attributes:
        n_seq: sequences that generate together.
        depth: tokens that each of them holds.
        seconds: of one step: a token of each.
    """

    n_seq: int
    depth: int
    seconds: Spread

    def __post_init__(self) -> None:
        _checked("n_seq", self.n_seq, self.depth)


@dataclass(frozen=True, slots=True)
class Crowd:
    """One decode of one sequence, without and with tokens that another sequence holds in the same cache.

    Attributes:
        n_tokens: tokens that were read at once; 1: a step.
        n_others: tokens that the other sequence held.
        alone: without them, seconds.
        crowded: with them, seconds.
    """

    n_tokens: int
    n_others: int
    alone: Spread
    crowded: Spread

    def __post_init__(self) -> None:
        _checked("n_tokens", self.n_tokens, self.n_others)
        if not self.n_others:
            raise ConfigInvalid("n_others", self.n_others, "at least one token")

    @property
    def pair_s(self) -> float:
        """What one token takes more for one token that another sequence holds, seconds; 0 where that may be noise."""
        if self.crowded.median <= self.alone.high or self.crowded.low <= self.alone.median:
            return 0.0
        return (self.crowded.median - self.alone.median) / (self.n_tokens * self.n_others)


@dataclass(frozen=True, slots=True)
class Served:
    """What a host adds to each step: reports, orders, who goes on. It lies between two steps and in none.

    Attributes:
        mode: the mode in which it was measured.
        n_seq: streams that generate together.
        seconds: from the end of a step to the beginning of the next one.
    """

    mode: SplitMode
    n_seq: int
    seconds: Spread

    def __post_init__(self) -> None:
        _checked("n_seq", self.n_seq, 0)


@dataclass(frozen=True, slots=True)
class MeasuredMode:
    """One split mode with one size of micro-batches.

    Attributes:
        mode: the mode.
        n_ubatch: tokens of a micro-batch.
        reads: what was read; at least one at depth 0.
        steps: what was generated; at least one of one sequence.
        crowds: what tokens of other sequences cost in a cache for all; none where that was not measured.

    Raises:
        ConfigInvalid: nothing is there that says how fast it reads or generates.
    """

    mode: SplitMode
    n_ubatch: int
    reads: tuple[Read, ...]
    steps: tuple[Step, ...]
    crowds: tuple[Crowd, ...] = field(default=(), metadata=_LATER)

    def __post_init__(self) -> None:
        for name in ("reads", "steps", "crowds"):
            _few(name, getattr(self, name))
        if not any(one.depth == 0 and one.seconds.median > 0.0 for one in self.reads):
            raise ConfigInvalid("reads", "none at depth 0", "at least one, which took some time")
        if not any(one.n_seq == 1 and one.seconds.median > 0.0 for one in self.steps):
            raise ConfigInvalid("steps", "none of one sequence", "at least one, which took some time")

    def read_s(self, n: int, depth: int = 0) -> float:
        """Give the seconds in which one sequence reads so many tokens after those it holds."""
        if n <= 0:
            return 0.0
        chunk = max(one.n_tokens for one in self.reads)
        whole, rest = divmod(n, chunk)
        # Chunks lie on straight lines between the depths: the two ends of each piece say what all of it takes.
        deep = {one.depth for one in self.reads}
        first = sorted({0, whole, *(min(max(-((depth - at) // chunk), 0), whole) for at in deep)})
        seconds = sum(
            (b - a) * (self._chunk_s(chunk, depth + a * chunk) + self._chunk_s(chunk, depth + (b - 1) * chunk)) / 2
            for a, b in itertools.pairwise(first)
        )
        return seconds + (self._chunk_s(rest, depth + whole * chunk) if rest else 0.0)

    def step_s(self, n_seq: int = 1, depth: float = 0.0) -> float:
        """Give the seconds of one token for each of so many sequences, each of which holds `depth` tokens."""
        lone = [_point(one.depth, one.seconds) for one in self.steps if one.n_seq == 1]
        if n_seq <= 1:
            return max(_line(lone, depth), _LEAST_S)
        # Sequences together are measured at one depth; each of them adds what depth adds to one alone.
        at = min(one.depth for one in self.steps)
        together = [_point(one.n_seq, one.seconds) for one in self.steps if one.depth == at]
        return max(_line(together, n_seq) + n_seq * (_line(lone, depth) - _line(lone, at)), 1e-9)

    def generate_s(self, n: int, depth: int = 0, n_seq: int = 1) -> float:
        """Give the seconds in which each of so many sequences generates `n` tokens after those it holds."""
        if n <= 0:
            return 0.0
        # Steps lie on straight lines between the depths: the middle of each piece says what all of it takes.
        cuts = sorted({depth, depth + n, *(one.depth for one in self.steps if depth < one.depth < depth + n)})
        return sum((b - a) * self.step_s(n_seq, (a + b) / 2) for a, b in itertools.pairwise(cuts))

    def pair_s(self, *, is_read: bool) -> float:
        """Give the seconds that one token takes more for one token that another sequence holds in the same cache.

        A library that computes all that the cache holds, whosever it is, takes as long for it as for the sequence's
        own tokens. Of steps together `step_s` has that counted: each adds its own depth once.
        """
        found = [one.pair_s for one in self.crowds if (one.n_tokens > 1) is is_read]
        if not found:
            return 0.0
        pair_s = median(found)
        if is_read:
            return pair_s
        start, end = (pick([step.depth for step in self.steps if step.n_seq == 1]) for pick in (min, max))
        own_s = (self.step_s(1, end) - self.step_s(1, start)) / (end - start) if end > start else math.inf
        return pair_s if pair_s < _SKIPPED * own_s else 0.0

    def others_read_s(self, n: int, depth: int, n_seq: int) -> float:
        """Give what so many prompts of `n` tokens, read one after the other, take more in one cache for all.

        While one is read those before it are whole; those after it hold `depth` tokens, as each did before.
        """
        pairs = n * n_seq * (n_seq - 1) * (depth + n / 2)
        return pairs * self.pair_s(is_read=True)

    def others_generate_s(self, n: int, depth: int, n_seq: int) -> float:
        """Give what `n` steps of so many sequences, which hold `depth` tokens each, take more in one cache for all."""
        pairs = n * n_seq * (n_seq - 1) * (depth + n / 2)
        return pairs * self.pair_s(is_read=False)

    def _chunk_s(self, n: int, depth: int) -> float:
        flat = [_point(one.n_tokens, one.seconds) for one in self.reads if one.depth == 0]
        deep = {one.n_tokens for one in self.reads if one.depth > 0}
        shortest = min(flat)
        if n < shortest[0]:
            # One token read is a token generated.
            alone = min(self.step_s(), shortest[1])
            flat.append((1, alone, alone, alone))
        seconds = _line(flat, n)
        if not deep or not depth:
            return max(seconds, _LEAST_S)
        size = max(deep)
        series = [_point(one.depth, one.seconds) for one in self.reads if one.n_tokens == size]
        if not any(not point[0] for point in series):
            start = _line(flat, size)
            series.append((0, start, start, start))
        return max(seconds + (_line(series, depth) - _line(series, 0)) * n / size, 1e-9)

    @property
    def reach(self) -> int:
        """Most tokens that a sequence held in a measurement, those read there included."""
        return max(*(one.depth + one.n_tokens for one in self.reads), *(one.depth for one in self.steps))

    @property
    def noise(self) -> float:
        """How far repetitions of one thing lie from their median, as a share: the middle over all things."""
        return median([*(one.seconds.share for one in self.reads), *(one.seconds.share for one in self.steps)])


@dataclass(frozen=True, slots=True)
class SwitchTime:
    """Switches one way.

    Attributes:
        before: the mode that it leaves.
        after: the mode that it goes to.
        way: where the weights came from, or "beside": one of `cost.TIMED`.
        is_first: the first of its session, which also makes what later ones find.
        n_tokens: tokens that the session held.
        pause: how long no token could be generated.
        total: all of it.
        stages_ms: time of each stage, ms: the median of each by itself.
        more_ms: what a token takes more after it than in a session that was opened in that mode, ms.
    """

    before: SplitMode
    after: SplitMode
    way: str
    is_first: bool
    n_tokens: int
    pause: Spread
    total: Spread
    stages_ms: StageTimes = field(default_factory=StageTimes)
    more_ms: float = 0.0

    def __post_init__(self) -> None:
        if self.way not in TIMED:
            raise ConfigInvalid("way", self.way, f"one of {', '.join(TIMED)}")
        if not (0 <= self.n_tokens <= MAX_TOKENS and 0.0 <= self.more_ms <= _MAX_S):
            found = f"{min(self.n_tokens, 10 * MAX_TOKENS):,}, {self.more_ms:g} ms more"
            raise ConfigInvalid("n_tokens", found, f"numbers from 0 on, up to {MAX_TOKENS:.0e} tokens")


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Something that was not measured.

    Attributes:
        what: a mode, or a way of a switch.
        why: one phrase.
    """

    what: str
    why: str


class ModeNotMeasured(ConfigInvalid):
    """A profile says nothing of a mode."""

    def __str__(self) -> str:
        return f"the profile has no numbers of {self.value} mode: {self.wanted}"


@dataclass(frozen=True, slots=True)
class Profile:
    """All that was measured of one model on one set of devices.

    Attributes:
        modes: each mode with each size of micro-batches that was tried.
        switches: the switches.
        left_out: what is missing, and why.
        served: what a host adds to steps; none where that was not measured.
    """

    modes: tuple[MeasuredMode, ...]
    switches: tuple[SwitchTime, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    served: tuple[Served, ...] = field(default=(), metadata=_LATER)

    def __post_init__(self) -> None:
        for name in ("modes", "switches", "left_out", "served"):
            _few(name, getattr(self, name))

    def of(self, mode: SplitMode, n_ubatch: int | None = None) -> MeasuredMode:
        """Give a mode with a size of micro-batches; None: the one that reads a long prompt fastest.

        Raises:
            ModeNotMeasured: it was not measured.
        """
        found = [one for one in self.modes if one.mode is mode and n_ubatch in {None, one.n_ubatch}]
        if not found:
            names = (mode.value, f"{mode.value} -ub ")
            left_out = (one.why for one in self.left_out if one.what == names[0] or one.what.startswith(names[1]))
            why = next(left_out, "measure it: splitctl bench")
            raise ModeNotMeasured("mode", mode.value, why)
        if len(found) == 1:
            return found[0]
        n = max(read.n_tokens for one in found for read in one.reads)
        return min(found, key=lambda one: one.read_s(n))

    def switch(
        self, before: SplitMode, after: SplitMode, way: str, n_tokens: int = 0, *, is_first: bool = False
    ) -> tuple[float, float] | None:
        """Give a switch's pause and the milliseconds that it adds to a token; None where it was not measured.

        What later switches of a session take counts, or what its first one does, where that is known; between two sizes
        of the state a straight line.
        """
        found = [one for one in self.switches if (one.before, one.after, one.way) == (before, after, way)]
        found = [one for one in found if one.is_first is is_first] or found
        if not found:
            return None
        pause = max(_line([_point(one.n_tokens, one.pause) for one in found], n_tokens), 0.0)
        return pause, median([one.more_ms for one in found])

    def ways(self, before: SplitMode, after: SplitMode) -> tuple[str, ...]:
        """Name the ways of a switch that were measured, in the order of `cost.TIMED`."""
        return tuple(one for one in TIMED if self.switch(before, after, one) is not None)

    def work_s(self, mode: MeasuredMode, work: Work, n_seq: int) -> tuple[float, float]:
        """Give the seconds of so many sequences in one mode: of their prompts, one after the other, and answers.

        Several sequences are those of a host; one alone needs none.
        """
        reading = n_seq * mode.read_s(work.uncached, work.cached)
        steps = mode.generate_s(work.generate, work.prompt, n_seq)
        if n_seq > 1:
            reading += mode.others_read_s(work.uncached, work.cached, n_seq)
            steps += mode.others_generate_s(work.generate, work.prompt, n_seq)
            steps += work.generate * self.served_s(mode.mode, n_seq)
        return reading, steps

    def _token_s(self, mode: MeasuredMode, work: Work, n_seq: int) -> tuple[float, float]:
        """Give the seconds of a token of each prompt, and of each answer; where there is none, of a short one."""
        n = max(work.prompt, 1)
        one = Work(n, max(work.generate, 1), min(work.cached, n - 1))
        reading, steps = self.work_s(mode, one, n_seq)
        return max(reading / one.uncached, 1.0 / MAX_TPS), max(steps / one.generate, 1.0 / MAX_TPS)

    def unshared(self) -> Self:
        """Give the same for sequences with a cache each: none of them has to do with what others hold."""
        return replace(self, modes=tuple(replace(one, crowds=()) for one in self.modes))

    def served_s(self, mode: SplitMode, n_seq: int) -> float:
        """Give what a host adds to a step of so many streams, seconds; of a mode that lacks it, that of another."""
        found = [one for one in self.served if one.mode is mode] or self.served
        return max(_line([_point(one.n_seq, one.seconds) for one in found], n_seq), 0.0) if found else 0.0

    @property
    def reach(self) -> int:
        """Most tokens that a sequence held in a measurement of every mode."""
        return min(one.reach for one in self.modes)

    def rates(self, work: Work, *, n_seq: int = 1) -> Rates:
        """Give the rates that this work would see, and what its switch would cost.

        The work is that of each of so many sequences: their prompts are read one after the other, and one token of each
        is generated at a time. The switch is the one from the mode that reads faster; it holds all prompts.

        Raises:
            ModeNotMeasured: one of the two modes was not measured, or no switch between them.
        """
        layer, tensor = self.of(SplitMode.LAYER), self.of(SplitMode.TENSOR)
        both = [self._token_s(one, work, n_seq) for one in (layer, tensor)]
        (read_l, make_l), (read_t, make_t) = both
        before, after = (SplitMode.LAYER, SplitMode.TENSOR) if read_l <= read_t else (SplitMode.TENSOR, SplitMode.LAYER)
        times = {way: self.switch(before, after, way, work.prompt * n_seq) for way in self.ways(before, after)}
        if not times:
            raise ModeNotMeasured("mode", f"a switch to {after.value}", "measure it: splitctl bench")
        costs = {way: cost for way, cost in times.items() if cost is not None}
        back = {way: self.switch(after, before, way, work.prompt * n_seq) for way in costs}
        first = next(iter(costs))
        return Rates(
            costs[first][0],
            ModeRates(1.0 / read_l, 1.0 / make_l),
            ModeRates(1.0 / read_t, 1.0 / make_t),
            tier_switch_s={way: pause for way, (pause, _) in costs.items()},
            pinned_ms_per_token=costs["pinned"][1] if "pinned" in costs else 0.0,
            noise=max(NOISE, layer.noise, tensor.noise),
            is_of_work=True,
            tier=first,
            timed=Choice(f"{before.value}->{after.value}"),
            way_back_s={way: cost[0] for way, cost in back.items() if cost is not None},
        )


def _few(name: str, things: Sequence[object]) -> None:
    """Refuse more things of one kind than anybody measures: every answer goes through all of them."""
    if len(things) > _MAX_THINGS:
        raise ConfigInvalid(name, f"{len(things):,} entries", f"{_MAX_THINGS:,} at most")


Point = tuple[float, float, float, float]
"""Where, and the median, the lowest and the highest of what was measured there."""


def _point(where: float, seconds: Spread) -> Point:
    return where, seconds.median, seconds.low, seconds.high


def _line(points: Iterable[Point], at: float) -> float:
    """Take the value at a place from straight lines through points; before the first point it is that one's value.

    Beyond the last the line goes on from the nearest one that is lower for certain; a slope that is within what
    repetitions differ by would be noise, many times over.
    """
    known = _knots(tuple(points))
    if at <= known[0][0] or len(known) == 1:
        return known[0][1]
    for (x0, y0, *_), (x1, y1, *_) in itertools.pairwise(known):
        if at <= x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    last, value, low, _ = known[-1]
    lower = next(((x, y) for x, y, _, high in reversed(known[:-1]) if high < low), None)
    return value if lower is None else value + (value - lower[1]) * (at - last) / (last - lower[0])


@lru_cache(_N_LINES)
def _knots(points: tuple[Point, ...]) -> list[Point]:
    """Put points in order, and take the mean of those in one place; a policy asks for the same lines all the time."""
    found: dict[float, list[Point]] = {}
    for point in points:
        found.setdefault(point[0], []).append(point)
    return sorted(_mean(same) for same in found.values())


def _mean(points: Sequence[Point]) -> Point:
    where, value, low, high = (math.fsum(column) / len(points) for column in zip(*points, strict=True))
    return where, value, low, high
