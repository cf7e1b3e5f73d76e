"""Puts the policy of `serve --policy auto` against fixed modes and an oracle, in simulated time, on traces by seed.

Rates, switches and traces are drawn at random, the same ones for the same seed. Laws, over all of them:

    1. The policy takes at most 5 % more than the better fixed mode. Where a switch makes every later token dearer
       (pinned weights), that comes on top: whoever was opened in the better mode does not have it.
    2. Of what the oracle saves against the better fixed mode the policy saves at least half, summed over the traces
       where the oracle saves more than 1 %.
    3. Between two switches there is at least the minimum stay.

A trace is fair if the better mode serves it in the time of fifty switches at least: whoever begins in the wrong mode,
and cannot know it, pays for having been there (a switch's worth, before it is sure) and for the switch, and that is 4 %
of fifty. Shorter ones are shown by `--pauses`, and not judged.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from splitctl.placement import SplitMode
from splitctl.planning.learned import MODES
from splitctl.planning.policy import Policy, Settings
from splitctl.planning.simulate import compare, stay
from splitctl.planning.traces import Request

_N_SEQ_MAX = 4
#: Requests that a fair trace has at least; a shorter one has its part of them.
_N_LEAST = 40
#: What a trace is worth in switches, to be judged.
_FAIR = 50.0
#: Most that the policy may take beyond the better mode; share of the oracle's gain that it has to have; and from which
#: gain on a trace counts for that.
_MOST_OVER, _LEAST_SHARE, _COUNTS_FROM = 0.05, 0.5, 0.01

Shape = tuple[int, int, int, int | None]
"""Tokens of a prompt, of them cached, generated, and asked for at most."""

_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
_AZURE_CODE = ((3, 147, 578, 1469, 2744, 5188, 7303, 7436, 7437), (6, 7, 9, 13, 24, 55, 90, 251, 1899))
_AZURE_CONVERSATION = ((2, 207, 396, 1020, 1189, 2734, 4083, 4142, 14050), (7, 54, 85, 129, 395, 424, 451, 601, 1000))
"""Prompts and answers at `_SHARES` of the 8,819 and 19,366 requests of the Azure LLM inference trace 2023.

Source: AzureLLMInferenceTrace_code.csv and _conv.csv of github.com/Azure/AzurePublicDataset (CC-BY), counted on
2026-11-30; described by Patel et al., Splitwise, ISCA 2024. Prompts and answers correlate by 0.00 and -0.11, so they
are drawn apart.
"""


@dataclass(frozen=True, slots=True)
class _Line:
    """A mode on straight lines, seconds: a token read, and more by its depth; a step, by sequence, and by depth."""

    read: float
    read_deeper: float
    step: float
    step_each: float
    step_deeper: float


@dataclass(frozen=True, slots=True)
class _Lines:
    """Costs on straight lines; a switch takes `pause`, and `a_token` for each token held, s."""

    lines: dict[SplitMode, _Line]
    pause: float
    a_token: float
    more_ms: float

    def read_s(self, mode: SplitMode, n: int, depth: int) -> float:
        line = self.lines[mode]
        return n * (line.read + line.read_deeper * (depth + n / 2))

    def step_s(self, mode: SplitMode, n_seq: int, depth: float) -> float:
        line = self.lines[mode]
        return line.step + n_seq * (line.step_each + line.step_deeper * depth)

    def switch(self, before: SplitMode, after: SplitMode, n_tokens: int) -> tuple[float, float]:
        del before, after
        return self.pause + n_tokens * self.a_token, self.more_ms

    def slowed_s(self, before: SplitMode) -> float:
        del before
        return 0.0

    def served_s(self, mode: SplitMode, n_seq: int) -> float:
        del mode, n_seq
        return 0.0

    def others_s(self, mode: SplitMode, n_pairs: float, *, is_read: bool) -> float:
        del mode, n_pairs, is_read
        return 0.0


def _between(rng: random.Random, low: float, high: float) -> float:
    """Draw a number whose logarithm is uniform."""
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def costs_by(rng: random.Random) -> _Lines:
    """Draw rates: one mode generates up to twice as fast, and mostly reads up to 2.2 times as slowly."""
    prompt_tps, generate_tps = _between(rng, 300.0, 8000.0), _between(rng, 8.0, 150.0)
    slow_read, slow_step = rng.uniform(0.95, 2.2), rng.uniform(0.95, 2.0)
    each, deeper = rng.uniform(0.0, 0.15), rng.uniform(0.0, 1e-5)
    reader = rng.choice(MODES)
    lines = {}
    for mode in MODES:
        read = (1.0 if mode is reader else slow_read) / prompt_tps
        step = (slow_step if mode is reader else 1.0) / generate_tps
        lines[mode] = _Line(read, read * rng.uniform(0.0, 2e-5), step * (1.0 - each), step * each, step * deeper)
    return _Lines(lines, _between(rng, 0.05, 6.0), _between(rng, 1e-7, 2e-5), rng.choice((0.0, 0.0, 0.6)))


# ---- requests ----


def _chat(rng: random.Random) -> Shape:
    cached = rng.randrange(500, 12_000)
    return cached + rng.randrange(20, 500), cached, round(_between(rng, 40, 700)), None


def _short_answer(rng: random.Random) -> Shape:
    return round(_between(rng, 3000, 30_000)), 0, rng.randrange(10, 120), 128


def _long_answer(rng: random.Random) -> Shape:
    return round(_between(rng, 3000, 30_000)), 0, round(_between(rng, 300, 2000)), None


def _mixed(rng: random.Random) -> Shape:
    return rng.choice((_chat, _chat, _short_answer, _long_answer))(rng)


def _azure_code(rng: random.Random) -> Shape:
    return _drawn(rng, _AZURE_CODE[0]), 0, _drawn(rng, _AZURE_CODE[1]), None


def _azure_conversation(rng: random.Random) -> Shape:
    return _drawn(rng, _AZURE_CONVERSATION[0]), 0, _drawn(rng, _AZURE_CONVERSATION[1]), None


def _drawn(rng: random.Random, values: Sequence[float]) -> int:
    at = rng.random()
    for (low, left), (high, right) in itertools.pairwise(zip(_SHARES, values, strict=True)):
        if at <= high:
            return round(left + (right - left) * (at - low) / (high - low))
    return round(values[-1])


KINDS: dict[str, Callable[[random.Random], Shape]] = {
    "chat, long shared prefixes": _chat,
    "documents, short answers": _short_answer,
    "documents, long answers": _long_answer,
    "bursts": _mixed,
    "mixed": _mixed,
    "phases": _mixed,
    "Azure 2023, code": _azure_code,
    "Azure 2023, conversation": _azure_conversation,
}


def trace_by(rng: random.Random, kind: str, costs: _Lines, n_pauses: float) -> list[Request]:
    """Draw requests until the better mode takes the time of so many switches, with a load of 15 to 130 %."""
    state, share = rng.getstate(), n_pauses
    n_least = math.ceil(_N_LEAST * min(n_pauses / _FAIR, 1.0))
    while True:
        rng.setstate(state)
        found = _requests(rng, kind, costs, share, n_least)
        least = min(stay(found, costs, mode, _N_SEQ_MAX).busy_s for mode in MODES)
        wanted = n_pauses * costs.switch(*MODES, 8192)[0]
        if least >= wanted:
            return found
        share *= 1.2 * wanted / least


def _requests(rng: random.Random, kind: str, costs: _Lines, n_pauses: float, n_least: int) -> list[Request]:
    shapes: list[Shape] = []
    work = dict.fromkeys(MODES, 0.0)
    make = KINDS[kind]
    while len(shapes) < n_least or min(work.values()) < n_pauses * costs.pause:
        if kind == "phases" and not len(shapes) % 25:
            make = rng.choice((_chat, _short_answer, _long_answer))
        shapes.append(make(rng))
        prompt, cached, generated, _ = shapes[-1]
        for mode in MODES:
            work[mode] += costs.read_s(mode, prompt - cached, cached)
            work[mode] += generated * costs.step_s(mode, 2, prompt) / 2
    gap = min(work.values()) / len(shapes) / rng.uniform(0.15, 1.3)
    at, n_left = 0.0, 0
    found = []
    for shape in shapes:
        if kind == "bursts" and n_left:
            at += 0.01
        elif kind == "bursts":
            n_left = rng.randrange(3, 13)
            at += rng.expovariate(1 / (gap * n_left))
        else:
            at += rng.expovariate(1 / gap)
        n_left -= 1
        found.append(Request(at, *shape))
    return found


# ---- what came of it ----


@dataclass(frozen=True, slots=True)
class Row:
    """One trace: seconds of the better mode, the policy and the oracle, and what is allowed."""

    seed: int
    kind: str
    best_s: float
    auto_s: float
    oracle_s: float
    most_over: float
    n_switches: int
    least_gap_s: float

    @property
    def over(self) -> float:
        """What the policy takes beyond the better mode, as a share."""
        return self.auto_s / self.best_s - 1.0

    @property
    def gain(self) -> float:
        """What the oracle saves, as a share."""
        return 1.0 - self.oracle_s / self.best_s


def play(seed: int, n_pauses: float = _FAIR) -> Row:
    """Draw a trace and serve it in every way."""
    rng = random.Random(seed)  # noqa: S311 - a draw that can be repeated
    kind = list(KINDS)[seed % len(KINDS)]
    costs = costs_by(rng)
    requests = trace_by(rng, kind, costs, n_pauses)
    found = compare(requests, Policy(costs, Settings()), costs, rng.choice(MODES), _N_SEQ_MAX)
    oracle = found.oracle or found.auto
    best = found.best_fixed
    step_s = costs.step_s(SplitMode(best.name), 1, 0)
    gaps = [after - before for before, after in itertools.pairwise(found.auto.switched_at)]
    return Row(
        seed,
        kind,
        best.busy_s,
        found.auto.busy_s,
        oracle.busy_s,
        _MOST_OVER + costs.more_ms / 1e3 / step_s,
        len(gaps) + bool(found.auto.switched_at),
        min(gaps, default=math.inf),
    )


def share_of_gain(rows: Sequence[Row]) -> float | None:
    """Give the share of the oracle's gain that the policy has, over traces where there is one; None without any."""
    counted = [row for row in rows if row.gain > _COUNTS_FROM]
    return -sum(row.over for row in counted) / sum(row.gain for row in counted) if counted else None


def broken(rows: Sequence[Row]) -> list[str]:
    """Name the laws that these traces break."""
    said = [
        f"seed {row.seed} ({row.kind}): {row.over:.1%} over the better mode, {row.most_over:.1%} allowed"
        for row in rows
        if row.over > row.most_over
    ]
    share = share_of_gain(rows)
    if share is not None and share < _LEAST_SHARE:
        said.append(f"{share:.0%} of the oracle's gain, {_LEAST_SHARE:.0%} wanted")
    stay_s = Settings().min_stay_s
    return said + [
        f"seed {row.seed}: two switches in {row.least_gap_s:.2f} s" for row in rows if row.least_gap_s < stay_s
    ]


def table_of(rows: Sequence[Row], title: str) -> Table:
    """Lay out what came of traces, by their kind."""
    table = Table(title=title)
    table.add_column("traces")
    for name in (
        "n",
        "over best fixed: mean",
        "worst",
        "oracle gains > 1 %",
        "oracle's gain",
        "auto's share",
        "switches",
    ):
        table.add_column(name, justify="right")
    for kind in [*KINDS, "all"]:
        of = [row for row in rows if kind in {row.kind, "all"}]
        if not of:
            continue
        counted = [row for row in of if row.gain > _COUNTS_FROM]
        share = share_of_gain(of)
        table.add_row(
            kind,
            f"{len(of):,}",
            f"{sum(row.over for row in of) / len(of):+.2%}",
            f"{max(row.over for row in of):+.2%}",
            f"{len(counted):,}",
            f"{sum(row.gain for row in counted) / len(counted):.1%}" if counted else "-",
            "-" if share is None else f"{share:.0%}",
            f"{sum(row.n_switches for row in of) / len(of):.1f}",
            end_section=kind == list(KINDS)[-1],
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Play traces, print the table, and say which laws they break."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-n", type=int, default=1000, help="traces (default: 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument(
        "--pauses", type=float, default=_FAIR, help=f"length of a trace, in switches (default: {_FAIR:g})"
    )
    given = parser.parse_args(argv)
    seeds = range(given.first, given.first + given.n)
    with ProcessPoolExecutor(given.jobs) as pool:
        rows = list(pool.map(play, seeds, itertools.repeat(given.pauses), chunksize=4))
    Console(width=140).print(table_of(rows, f"{given.n:,} traces of {given.pauses:g} switches or more"))
    faults = broken(rows)
    for fault in faults:
        print(fault)
    if given.pauses < _FAIR:
        return 0
    print(f"{len(faults)} broken" if faults else "every law holds")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
