"""The short form of `ci/fuzz --control`: a few hundred bad requests to a host that lives."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.ctl.houses import house, served, stub_arguments
from tests.fuzz.control import case, fuzz, is_bad
from tests.stublib import needs_compiler

_N_CASES = 400


def test_most_cases_are_bad_and_some_are_not() -> None:
    """The cases try both what is refused at once and what goes a step further."""
    bad = [is_bad(case(random.Random(number))) for number in range(1000)]
    assert 0.5 < sum(bad) / len(bad) < 0.98


@needs_compiler
@pytest.mark.stub
def test_bad_requests_get_errors_and_the_host_lives(tmp_path: Path) -> None:
    """Every bad request gets one clear error; the host lives, draws the same tokens, and holds no more than before."""
    said: list[str] = []
    with house() as home, served(home, *stub_arguments(tmp_path)) as host:
        tally = fuzz(host.address, host.process.pid, _N_CASES, 1, tell=said.append)
        code, log = host.end()
    assert (said, code) == ([], 0)
    assert tally.n_cases == _N_CASES
    assert {"left", "config", "result"} <= tally.ends.keys()
    assert "fault of splitctl" not in log
