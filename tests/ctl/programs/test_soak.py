"""The soak: what it counts as growth, and its short form on a real build."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.native.real import NEWEST, library_of
from tests.tool import run_tool
from tools.greedy_gaps import TOLERANCE, Gaps
from tools.soak import Sample, Soak, growth, summary

_MIB = 1 << 20


def _sample(**changed: int) -> Sample:
    usual = Sample(fds=20, processes=1, shm_bytes=_MIB, worker_rss=300 * _MIB, host_rss=_MIB)
    return dataclasses.replace(usual, **changed)


def _soak(samples: list[Sample]) -> Soak:
    return Soak(samples=samples, switch_ms=[1.0, 3.0, 2.0], pauses_ms=[4.0, 9.0, 5.0])


_RIGHT = Gaps(worst=0.1, at=3, n_other=1, n=60, control=5.0)


def test_nothing_that_stays_is_growth() -> None:
    """Even samples are no fault, whatever they are, and the figures are medians and the worst."""
    result = summary(_soak([_sample()] * 20), [_RIGHT] * 3)
    assert result["faults"] == []
    assert (result["switches"], result["texts"], result["wrong"]) == (3, 3, 0)
    assert result["switch_ms"] == {"median": 2.0, "worst": 3.0}
    assert result["pause_ms"] == {"median": 5.0, "worst": 9.0, "n": 3}


@pytest.mark.parametrize("name", ["fds", "processes", "shm_bytes", "worker_rss", "host_rss"])
def test_each_kind_of_growth_is_a_fault(name: str) -> None:
    """One descriptor, process or byte of shared memory more, or a twentieth of the memory and a little."""
    before = getattr(_sample(), name)
    after = before + 1 if name in {"fds", "processes", "shm_bytes"} else int(before * 1.06)
    result = summary(_soak([_sample()] * 10 + [_sample(**{name: after})] * 10), [_RIGHT])
    assert len(result["faults"]) == 1
    assert name in result["faults"][0]


def test_memory_that_comes_and_goes_is_flat() -> None:
    """The first fifth is compared with the last by medians, so a peak in between is none of it."""
    values = [100] * 5 + [300] * 15 + [104] * 5
    assert growth(values) == (100, 104, pytest.approx(0.04))


@pytest.mark.parametrize(
    ("gaps", "is_right"),
    [
        (_RIGHT, True),
        (Gaps(TOLERANCE, 0, 1, 60, 9.0), True),
        (Gaps(TOLERANCE + 0.1, 0, 1, 60, 9.0), False),
        (Gaps(0.0, 0, 0, 0, 9.0), False),
    ],
)
def test_a_text_is_right_or_not(gaps: Gaps, is_right: bool) -> None:
    """Every token near the likeliest one, and there is one."""
    assert gaps.is_right is is_right


def test_texts_that_show_nothing_are_a_fault() -> None:
    """A text that repeats itself looks right with a token lost: one of five may be such."""
    blind = Gaps(worst=0.1, at=3, n_other=1, n=60, control=0.2)
    assert summary(_soak([_sample()] * 20), [_RIGHT] * 4 + [blind])["faults"] == []
    assert len(summary(_soak([_sample()] * 20), [_RIGHT] * 3 + [blind])["faults"]) == 1


@pytest.mark.build
@pytest.mark.model
@pytest.mark.slow
def test_a_session_is_switched_under_streams(smollm2: Path) -> None:
    """Twelve switches under two streams: nothing grows, no token is lost, and every text is right."""
    size = ("--switches", "12", "--streams", "2", "--tokens", "24")
    done = run_tool("soak", "--json", *size, "--lib", library_of(NEWEST), "--model", smollm2)
    print(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["faults"] == []
    assert done.returncode == 0
    assert result["switches"] == 12
    assert result["texts"] >= 4
    assert result["pause_ms"]["n"] >= 12
