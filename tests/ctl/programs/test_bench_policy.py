"""The bench of the policy: its traces are the same for the same seed, and a broken law is named."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from splitctl.planning.learned import MODES
from splitctl.planning.policy import Settings
from splitctl.planning.simulate import stay
from tools.bench_policy import KINDS, Row, broken, costs_by, play, share_of_gain, trace_by

_GOOD = Row(1, "mixed", 100.0, 98.0, 97.0, 0.05, 3, 9.0)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_trace_is_drawn_by_its_seed_and_long_enough(kind: str) -> None:
    """The same seed gives the same requests, in order, which take the better mode so many switches' time."""
    costs = costs_by(random.Random(5))
    drawn, again = (trace_by(random.Random(7), kind, costs, 3.0) for _ in range(2))
    assert drawn == again
    assert [one.arrival for one in drawn] == sorted(one.arrival for one in drawn)
    assert min(stay(drawn, costs, mode, 4).busy_s for mode in MODES) >= 3.0 * costs.pause


def test_one_trace_is_played() -> None:
    """A row has the better mode, the policy and an oracle that is not worse than either."""
    row = play(3, 3.0)
    assert row.kind == list(KINDS)[3]
    assert row.oracle_s <= min(row.auto_s, row.best_s)


def test_broken_laws_are_named() -> None:
    """Too much over the better mode, too little of the gain, and two switches within the stay: each is a line."""
    assert broken([_GOOD]) == []
    assert share_of_gain([_GOOD, replace(_GOOD, oracle_s=99.9, auto_s=104.0)]) == pytest.approx(2 / 3)
    assert broken([replace(_GOOD, auto_s=106.0, oracle_s=100.0)]) == [
        "seed 1 (mixed): 6.0% over the better mode, 5.0% allowed"
    ]
    assert broken([replace(_GOOD, auto_s=99.0)]) == ["33% of the oracle's gain, 50% wanted"]
    assert broken([replace(_GOOD, least_gap_s=Settings().min_stay_s / 2)]) == ["seed 1: two switches in 1.00 s"]
    assert share_of_gain([replace(_GOOD, oracle_s=100.0, least_gap_s=math.inf)]) is None
