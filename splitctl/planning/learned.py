"""What work takes in each mode: as measured or given, corrected by what was served; and how long answers get.

Laws:
    1. What was served corrects only what it was: reads of a mode those of that mode, short ones the short ones.
    2. A correction stays within a tenth and ten times of what was measured; one observation moves it by 3 % at most.
"""

from __future__ import annotations

import math
from collections import deque
from functools import lru_cache, partial
from statistics import median
from typing import Protocol

from splitctl.outcome import Via
from splitctl.placement import SplitMode
from splitctl.planning.cost import Rates
from splitctl.planning.profile import ModeNotMeasured, Profile

#: The modes between which a host chooses.
MODES = (SplitMode.LAYER, SplitMode.TENSOR)

#: A correction's bounds.
_MAX_FACTOR = 10.0
#: Share of the way to an observation that a correction goes, and the most of the way that counts (of a logarithm):
#: whatever is observed once moves it by 3 %.
_PACE, _FARTHEST = 0.15, 0.2
#: From how many tokens on a read is a long one.
_LONG = 512
#: Depths are told apart by so many tokens where seconds are remembered.
_DEPTH_STEP = 32
#: Seconds of one kind that are remembered.
_N_REMEMBERED = 65_536

#: Answers that are remembered.
_N_ANSWERS = 256
#: Answers of one limit from which on they alone count.
_ENOUGH = 4
#: What an answer is taken for before any has ended, tokens, and how many such answers that is worth.
_ASSUMED, _N_ASSUMED = 64.0, 1


def other_than(mode: SplitMode) -> SplitMode:
    """Give the other one of `MODES`."""
    return SplitMode.TENSOR if mode is SplitMode.LAYER else SplitMode.LAYER


class Costs(Protocol):
    """What work takes in each mode; a mode is one of `MODES`."""

    def read_s(self, mode: SplitMode, n: int, depth: int) -> float:
        """Give the seconds in which a sequence that holds `depth` tokens reads `n` more."""
        ...

    def step_s(self, mode: SplitMode, n_seq: int, depth: float) -> float:
        """Give the seconds of one token for each of so many sequences that hold `depth` tokens each."""
        ...

    def switch(self, before: SplitMode, after: SplitMode, n_tokens: int) -> tuple[float, float]:
        """Give a switch's pause, s, with so many tokens held, and what it adds to a token afterwards, ms."""
        ...

    def slowed_s(self, before: SplitMode) -> float:
        """Give the seconds that a switch out of a mode takes from who is served, beyond its pause."""
        ...

    def served_s(self, mode: SplitMode, n_seq: int) -> float:
        """Give the seconds that a host adds to a step of so many streams; no step has them in it."""
        ...

    def others_s(self, mode: SplitMode, n_pairs: float, *, is_read: bool) -> float:
        """Give the seconds that tokens of other sequences add to a read, or to steps.

        Args:
            mode: the mode.
            n_pairs: tokens that are computed, each times the tokens that other sequences hold meanwhile, summed up.
            is_read: a prompt is read; else it is steps.
        """
        ...


def costs_of(profile: Profile, way: str, *, on_processors: bool = False) -> Costs:
    """Take what was measured.

    Args:
        profile: the measurements.
        way: the switch's, one of `cost.TIMED`.
        on_processors: a second worker that loads beside takes its time from the streams: all of it, as measured on two
            cores.

    Raises:
        ModeNotMeasured: one of the modes was not measured, or no switch between them of this way.
    """
    for before in MODES:
        profile.of(before)
        if profile.switch(before, other_than(before), way) is None:
            what = f"a switch to {other_than(before).value} ({way})"
            raise ModeNotMeasured("mode", what, "measure it: splitctl bench")
    return _Measured(profile, way, is_slowed=on_processors and way == Via.BESIDE.value)


def costs_of_rates(rates: Rates) -> Costs:
    """Take rates: steps of several sequences take what one of one takes; depth, others and a host add nothing."""
    return _Rated(rates)


class _Measured:
    """A profile's seconds, remembered: they are asked for again and again."""

    def __init__(self, profile: Profile, way: str, *, is_slowed: bool) -> None:
        # One of each for a mode, in the order of `MODES`: to look a mode up by its hash takes as long as all the rest.
        modes = [profile.of(mode) for mode in MODES]
        remembered = lru_cache(_N_REMEMBERED)
        self._chunks = [max(one.n_tokens for one in mode.reads) for mode in modes]
        # Seconds of so many chunks, one after the other, from an empty sequence on.
        self._sums = [[0.0] for _ in modes]
        self._read = [remembered(mode.read_s) for mode in modes]
        self._step = [remembered(mode.step_s) for mode in modes]
        self._switch = [remembered(partial(_switch_of, profile, before, way)) for before in MODES]
        self._slowed_s = [_beyond_pause_s(profile, before, way) if is_slowed else 0.0 for before in MODES]
        self._served = [remembered(partial(profile.served_s, mode)) for mode in MODES]
        # Of a pair of tokens, in steps and in reads.
        self._pair_s = [[mode.pair_s(is_read=one) for one in (False, True)] for mode in modes]

    def read_s(self, mode: SplitMode, n: int, depth: int) -> float:
        place = mode is MODES[1]
        chunk = self._chunks[place]
        whole, rest = divmod(n, chunk)
        seconds = self._until(place, depth / chunk + whole) - self._until(place, depth / chunk) if whole else 0.0
        return seconds + (self._read[place](rest, _rounded(depth + whole * chunk)) if rest else 0.0)

    def _until(self, place: int, n_chunks: float) -> float:
        """Give the seconds of so many chunks, a straight line between whole numbers of them."""
        chunk, sums = self._chunks[place], self._sums[place]
        whole = int(n_chunks)
        while len(sums) <= whole + 1:
            sums.append(sums[-1] + self._read[place](chunk, (len(sums) - 1) * chunk))
        return sums[whole] + (n_chunks - whole) * (sums[whole + 1] - sums[whole])

    def step_s(self, mode: SplitMode, n_seq: int, depth: float) -> float:
        return self._step[mode is MODES[1]](n_seq, round(depth / _DEPTH_STEP) * _DEPTH_STEP)

    def switch(self, before: SplitMode, after: SplitMode, n_tokens: int) -> tuple[float, float]:
        if before is after:
            return 0.0, 0.0
        return self._switch[before is MODES[1]](n_tokens // _LONG * _LONG)

    def slowed_s(self, before: SplitMode) -> float:
        return self._slowed_s[before is MODES[1]]

    def served_s(self, mode: SplitMode, n_seq: int) -> float:
        return self._served[mode is MODES[1]](n_seq)

    def others_s(self, mode: SplitMode, n_pairs: float, *, is_read: bool) -> float:
        return n_pairs * self._pair_s[mode is MODES[1]][is_read]


def _switch_of(profile: Profile, before: SplitMode, way: str, n_tokens: int) -> tuple[float, float]:
    return profile.switch(before, other_than(before), way, n_tokens) or (0.0, 0.0)


def _beyond_pause_s(profile: Profile, before: SplitMode, way: str) -> float:
    found = [one for one in profile.switches if (one.before, one.way) == (before, way)]
    return median(max(one.total.median - one.pause.median, 0.0) for one in found)


def _rounded(depth: float) -> int:
    return round(depth / _DEPTH_STEP) * _DEPTH_STEP


class _Rated:
    """Seconds by rates alone."""

    def __init__(self, rates: Rates) -> None:
        self._read = {mode: 1.0 / rates.of(mode).prompt_tps for mode in MODES}
        self._step = {mode: 1.0 / rates.of(mode).generate_tps for mode in MODES}
        self._switch = (rates.switch_s, rates.after_switch_ms)

    def read_s(self, mode: SplitMode, n: int, depth: int) -> float:
        del depth
        return n * self._read[mode]

    def step_s(self, mode: SplitMode, n_seq: int, depth: float) -> float:
        del n_seq, depth
        return self._step[mode]

    def switch(self, before: SplitMode, after: SplitMode, n_tokens: int) -> tuple[float, float]:
        del before, after, n_tokens
        return self._switch

    def slowed_s(self, before: SplitMode) -> float:
        del before
        return 0.0

    def served_s(self, mode: SplitMode, n_seq: int) -> float:
        del mode, n_seq
        return 0.0

    def others_s(self, mode: SplitMode, n_pairs: float, *, is_read: bool) -> float:
        del mode, n_pairs, is_read
        return 0.0


class Learned:
    """Costs, corrected by what was served.

    Thread: one at a time.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        # The logarithm of what served work takes more than was measured, by kind of work.
        self._more: dict[tuple[object, ...], float] = {}
        # By how much work takes longer, as it was asked for since the last observation.
        self._factors: dict[tuple[object, ...], float] = {}

    def read_s(self, mode: SplitMode, n: int, depth: int) -> float:
        """Give the seconds in which a sequence that holds `depth` tokens reads `n` more."""
        return self._costs.read_s(mode, n, depth) * self._factor("read", mode, _is_long(n))

    def step_s(self, mode: SplitMode, n_seq: int, depth: float) -> float:
        """Give the seconds of one token for each of so many sequences that hold `depth` tokens each."""
        key = n_seq.bit_length(), mode is MODES[1]
        factor = self._factors.get(key)
        if factor is None:
            factor = self._factors[key] = self.factor("step", mode, key[0])
        return self._costs.step_s(mode, n_seq, depth) * factor

    def switch(self, before: SplitMode, after: SplitMode, n_tokens: int) -> tuple[float, float]:
        """Give a switch's pause, s, with so many tokens held, and what it adds to a token afterwards, ms."""
        pause, more_ms = self._costs.switch(before, after, n_tokens)
        return pause * self._factor("switch", before, after), more_ms

    def slowed_s(self, before: SplitMode) -> float:
        """Give the seconds that a switch out of a mode takes from who is served, beyond its pause."""
        return self._costs.slowed_s(before)

    def served_s(self, mode: SplitMode, n_seq: int) -> float:
        """Give the seconds that a host adds to a step of so many streams."""
        return self._costs.served_s(mode, n_seq)

    def others_s(self, mode: SplitMode, n_pairs: float, *, is_read: bool) -> float:
        """Give the seconds that so many pairs of tokens add; observations are told without them."""
        return self._costs.others_s(mode, n_pairs, is_read=is_read)

    def observe_read(self, mode: SplitMode, n: int, depth: int, seconds: float) -> None:
        """Note that `n` tokens were read in so many seconds."""
        self._observe(self._costs.read_s(mode, n, depth), seconds, "read", mode, _is_long(n))

    def observe_step(self, mode: SplitMode, n_seq: int, depth: float, seconds: float, more_ms: float = 0.0) -> None:
        """Note that a token of each took so many seconds, of which the last switch added `more_ms`."""
        known = self._costs.step_s(mode, n_seq, depth)
        self._observe(known, max(seconds - more_ms / 1e3, 0.0), "step", mode, n_seq.bit_length())

    def observe_switch(self, before: SplitMode, after: SplitMode, n_tokens: int, seconds: float) -> None:
        """Note a switch's pause."""
        self._observe(self._costs.switch(before, after, n_tokens)[0], seconds, "switch", before, after)

    def factor(self, kind: str, mode: SplitMode, size: object) -> float:
        """Give by how much work takes longer than measured: of its size, else of its mode, else 1.

        Args:
            kind: "read", "step" or "switch".
            mode: the mode; of a switch the one that it leaves.
            size: of a read if it is long; of a step the bits of the number of sequences; of a switch where it goes.
        """
        more = self._more.get((kind, mode, size))
        return math.exp(self._more.get((kind, mode), 0.0) if more is None else more)

    def _factor(self, kind: str, mode: SplitMode, size: object) -> float:
        # The hash of a mode takes as long as all the rest: which of two it is says as much.
        key = kind, mode is MODES[1], size is MODES[1] if kind == "switch" else size
        found = self._factors.get(key)
        if found is None:
            found = self._factors[key] = self.factor(kind, mode, size)
        return found

    def _observe(self, known: float, seconds: float, kind: str, mode: SplitMode, size: object) -> None:
        if not (known > 0.0 and seconds > 0.0 and math.isfinite(seconds)):
            return
        self._factors.clear()
        bound = math.log(_MAX_FACTOR)
        seen = min(max(math.log(seconds / known), -bound), bound)
        start = self._more.get((kind, mode), 0.0)
        for key in ((kind, mode), (kind, mode, size)):
            now = self._more.get(key, start)
            self._more[key] = now + _PACE * min(max(seen - now, -_FARTHEST), _FARTHEST)


def _is_long(n: int) -> bool:
    return n >= _LONG


class Answers:
    """How long answers get, from their limits and from those that have ended.

    Thread: one at a time.
    """

    def __init__(self) -> None:
        self._ended: deque[tuple[int | None, int]] = deque(maxlen=_N_ANSWERS)

    def ended(self, n_max: int | None, n_made: int) -> None:
        """Note an answer.

        Args:
            n_max: most tokens that it could have; None or negative: no limit.
            n_made: tokens that it has.
        """
        self._ended.append((_limit(n_max), max(n_made, 0)))

    def expected(self, n_max: int | None, n_made: int = 0) -> float:
        """Give the tokens that are still to come of an answer that has `n_made`: from 1 on, within its limit."""
        limit = _limit(n_max)
        longer = [(of, made) for of, made in self._ended if made > n_made]
        alike = [made for of, made in longer if of == limit]
        # Answers with the same limit are mostly of one kind of client.
        known = alike if len(alike) >= _ENOUGH else [made for _, made in longer]
        left = math.fsum(made - n_made for made in known) + _N_ASSUMED * max(_ASSUMED, n_made / 2)
        mean = left / (len(known) + _N_ASSUMED)
        return max(mean if limit is None else min(mean, limit - n_made), 1.0)


def _limit(n_max: int | None) -> int | None:
    return None if n_max is None or n_max < 0 else n_max
