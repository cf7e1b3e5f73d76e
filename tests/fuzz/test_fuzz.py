"""The short form of `ci/fuzz`: the kept cases, and a few thousand new ones, counted and not timed."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.law import CORPUS, Finding, check, checked_in_bounds, damaged, seeds

_KEPT = sorted(CORPUS.glob("*.bin"))
_SEEDS = seeds()


def test_the_corpus_is_small() -> None:
    """What is kept is there, and takes little room."""
    assert len(_KEPT) > 50
    assert sum(path.stat().st_size for path in _KEPT) < 200_000


@pytest.mark.parametrize("path", _KEPT, ids=lambda path: path.stem)
def test_a_kept_case_keeps_the_law(path: Path) -> None:
    """Every kept case is an error of the one kind or an image of its bytes."""
    data = path.read_bytes()
    assert check(data).name


@given(damaged(_SEEDS))
@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_damaged_states_keep_the_law(data: bytes) -> None:
    """A few thousand damaged states end in an error of the one kind or in an image of their bytes."""
    check(data)


def test_the_bounds_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that takes too much memory or time, or gives other bytes, is a finding."""
    seed = _SEEDS[0]
    # A model that another test has left would be unmapped within the limit, and make room.
    gc.collect()
    assert checked_in_bounds(seed).name
    monkeypatch.setattr("tests.fuzz.law.parse", lambda _: bytearray(1 << 28))
    with pytest.raises(Finding, match="wanted more"):
        checked_in_bounds(seed)
    monkeypatch.undo()
    monkeypatch.setattr("tests.fuzz.law.TIME_S", -1.0)
    with pytest.raises(Finding, match="took"):
        checked_in_bounds(seed)
    monkeypatch.undo()
    monkeypatch.setattr("tests.fuzz.law.emit", lambda _: [b"other"])
    with pytest.raises(Finding, match="others written"):
        check(seed)
