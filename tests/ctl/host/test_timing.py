"""Switches beside, timed for `bench` in a session of real processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from splitctl.errors import Cancelled
from splitctl.host.timing import served_times
from splitctl.ipc.benching import Benching
from splitctl.model.facts import read_facts
from splitctl.placement import SplitMode
from splitctl.planning.schedule import SERVED_ROUNDS
from tests.ctl.hosting import LAYER, environment
from tests.stublib import build, needs_compiler, write_model

pytestmark = [needs_compiler, pytest.mark.stub]


def _what(folder: Path) -> Benching:
    model = write_model(folder / "tiny.gguf")
    return Benching(
        model=model, facts=read_facts(model), library=build(), rpc=(), devices=(), placement=LAYER,
        modes=(SplitMode.LAYER, SplitMode.TENSOR), n_ubatches=(64,), n_seqs=(1,), tiers=(), budget_s=60.0, rounds=1,
        deadline_s=30.0,
    )  # fmt: skip


def test_a_session_goes_there_and_back_until_it_is_cancelled(tmp_path: Path) -> None:
    """Each switch goes beside and is told with its pause and what the session held; a cancel leaves no process."""
    found: list[tuple[SplitMode, SplitMode, Mapping[str, Any]]] = []
    before = set(psutil.Process().children())
    with pytest.raises(Cancelled):
        served_times(
            _what(tmp_path), (16,), lambda *one: found.append(one), env=environment(tmp_path),
            is_cancelled=lambda: len(found) > 1,
        )  # fmt: skip
    layer, tensor = SplitMode.LAYER, SplitMode.TENSOR
    assert [one[:2] for one in found] == [(layer, tensor), (tensor, layer)]
    assert {(one["status"], one["via"]) for *_, one in found} == {("switched", "beside")}
    assert all(0 < one["pause_ms"] < one["total_ms"] and one["n_tokens"] >= 16 for *_, one in found)
    assert set(psutil.Process().children()) <= before


def test_steps_of_a_served_session_are_timed_at_the_end(tmp_path: Path) -> None:
    """What lies between steps is told for each number of streams, after the switches, where there is time for it."""
    told: list[tuple[Any, ...]] = []
    served_times(
        _what(tmp_path), (16,), lambda *one: told.append(one[:2]), env=environment(tmp_path),
        is_cancelled=lambda: False, goes_on=lambda _: not told, n_seqs=lambda: (1, 2),
        on_served=lambda *one: told.append(one),
    )  # fmt: skip
    tensor = SplitMode.TENSOR
    assert told[0] == (SplitMode.LAYER, tensor)
    assert [one[:2] for one in told[1:]] == [(tensor, 1), (tensor, 2)] * SERVED_ROUNDS
    assert all(0.0 <= seconds < 60.0 for *_, seconds in told[1:])
