"""What a bench's session times: the steps that count are those that go on for ever, not the first of their kind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from splitctl.ipc.measuring import Measure, Timed
from splitctl.placement import Placement
from splitctl.planning.schedule import LEAST_WARM_STEPS, MOST_WARM_STEPS, WARM_S
from splitctl.worker import bench


class _Session:
    """A session whose first steps of each kind are slow, on a clock of its own: a CPU records no graphs."""

    def __init__(self, step_s: float, *, n_slow: int) -> None:
        self.model = SimpleNamespace(has_tokenizer=False, n_vocab=100, token_bos=1)
        self.placement = Placement(n_seq_max=4, n_batch=512)
        self.now = 0.0
        self.n_steps = 0
        self._step_s, self._n_slow = step_s, n_slow
        self._held = dict.fromkeys(range(4), 0)

    def n_held(self, seq_id: int) -> int:
        return self._held[seq_id]

    def read(self, seq_id: int, tokens: list[int]) -> int:
        self._held[seq_id] += len(tokens)
        return len(tokens)

    def prefill(self, tokens: list[int]) -> None:
        self.read(0, tokens)

    def remove_sequence(self, seq_id: int) -> None:
        self._held[seq_id] = 0

    def begin(self, seq_id: int, sampler: object) -> None:
        del seq_id, sampler
        self.n_steps = 0

    def step(self, seq_ids: range) -> dict[int, int]:
        self.now += self._step_s * (10.0 if self.n_steps < self._n_slow else 1.0)
        self.n_steps += 1
        for seq_id in seq_ids:
            self._held[seq_id] += 1
        return dict.fromkeys(seq_ids, 1)


def _timed(monkeypatch: pytest.MonkeyPatch, session: _Session, n_steps: int) -> list[Timed]:
    monkeypatch.setattr(bench, "perf_counter", lambda: session.now)
    told: list[Any] = []
    bench._Bench(session, told.append).carry_out(Measure(1, n_seqs=(1, 4), n_steps=n_steps))  # type: ignore[arg-type]
    return told


def test_the_first_steps_of_a_kind_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that needs a few steps of a kind to be fast is measured when it is, alone and together."""
    times = _timed(monkeypatch, _Session(0.004, n_slow=4), n_steps=4)
    assert [(one.n, one.seconds) for one in times] == [(1, pytest.approx(0.004)), (4, pytest.approx(0.004))]


@pytest.mark.parametrize(("step_s", "n_warm"), [(0.001, MOST_WARM_STEPS), (10 * WARM_S, LEAST_WARM_STEPS)])
def test_a_slow_machine_is_not_warmed_up_for_long(monkeypatch: pytest.MonkeyPatch, step_s: float, n_warm: int) -> None:
    """Where a step takes seconds, few of them are made for nothing."""
    session = _Session(step_s, n_slow=0)
    _timed(monkeypatch, session, n_steps=2)
    assert session.n_steps == n_warm + 2


def test_a_second_sequence_is_timed_alone_and_beside_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read and steps of a second sequence are timed before and after the depths, and tell what the first one held."""
    session = _Session(0.004, n_slow=0)
    monkeypatch.setattr(bench, "perf_counter", lambda: session.now)
    told: list[Any] = []
    order = Measure(1, depths=(0, 64), chunk=64, crowd=16, n_steps=2)
    bench._Bench(session, told.append).carry_out(order)  # type: ignore[arg-type]
    alone, beside = told[:2], told[-2:]
    assert [(one.is_read, one.n, one.depth, one.n_others) for one in alone] == [(True, 16, 0, 0), (False, 1, 16, 0)]
    assert [(one.is_read, one.n, one.depth) for one in beside] == [(True, 16, 0), (False, 1, 16)]
    assert {one.n_others for one in beside} == {session.n_held(0)}
    assert session.n_held(0) >= 128
    assert session.n_held(1) == 0
    assert all(one.n_others is None for one in told[2:-2])
