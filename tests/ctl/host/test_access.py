"""The access log: a line for each answer, which replay reads."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path

import pytest

from splitctl.carry.sampling import SamplerSpec
from splitctl.host import manager
from splitctl.host.access import AccessLog
from splitctl.host.ledger import StreamJob
from splitctl.ipc.orders import Reading
from splitctl.planning.traces import parse_trace
from tests.ctl.host.test_manager import A, Scene
from tests.ctl.hosting import GUARD_S, ScriptedLink, ask, request_of


def _job(number: int, n_prompt: int, n_cached: int | None, n_made: int, n_most: int = -1) -> StreamJob:
    return StreamJob(number, (7,) * n_prompt, SamplerSpec(), n_most, drawn=[5] * n_made, n_reused=n_cached)


def test_replay_reads_what_it_writes(tmp_path: Path) -> None:
    """Every answer that was begun is a line with its own arrival, in the order of their ends; lines are appended."""
    path, times = tmp_path / "access.jsonl", itertools.count(1000, 10)
    for first in (1, 4):
        log = AccessLog(path, pytest.fail, clock=lambda: float(next(times)))
        for number in range(first, first + 3):
            log.came(number)
        log.ended(first + 1, _job(first + 1, 40, 30, 12, 64), "eos")
        log.ended(first, _job(first, 500, 0, 7), "length")
        # One that was never begun, one without tokens of its prompt, and one that is not known.
        log.ended(first + 2, _job(first + 2, 10, None, 0), "cancelled")
        log.ended(first + 2, None, "error")
        log.ended(99, _job(99, 10, 0, 0), "error")
        log.close()
    assert json.loads(path.read_text().splitlines()[0]) == {
        "arrival": 1010.0, "prompt": 40, "cached": 30, "generated": 12, "max_tokens": 64, "end": "eos",
    }  # fmt: skip
    found = [(one.arrival, one.prompt, one.cached, one.generated, one.n_max) for one in parse_trace(path.read_text())]
    assert found == [(0.0, 500, 0, 7, None), (10.0, 40, 30, 12, 64), (30.0, 500, 0, 7, None), (40.0, 40, 30, 12, 64)]


def test_a_full_disk_is_said_once() -> None:
    """What cannot be written is one warning, and no stream's business."""
    said: list[str] = []
    log = AccessLog(Path("/dev/full"), said.append)
    for number in (1, 2):
        log.came(number)
        log.ended(number, _job(number, 4, 0, 1), "eos")
    log.close()
    assert said == ["warning: no more is written to /dev/full: No space left on device"]


def test_a_host_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that is served with an access log writes the streams that were begun, stopped ones too."""
    monkeypatch.setattr(manager, "WorkerLink", ScriptedLink)
    monkeypatch.setattr(ScriptedLink, "links", [], raising=False)
    path = tmp_path / "access.jsonl"

    async def run() -> None:
        scene = Scene(tmp_path, access_log=path)
        await scene.start()
        async with asyncio.timeout(GUARD_S):
            done, stopped = [await ask(scene.supervisor, request_of([1, 2, 3], n)) for n in (1, 9)]
            for number in (1, 2):
                scene.link.report(Reading(number, 3, number - 1, 2.0))
                scene.link.draw(number, A)
            scene.link.finish(1)
            await done.end()
            await scene.supervisor.stop(save=False)
            await stopped.end()

    asyncio.run(run())
    told = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(one["prompt"], one["cached"], one["generated"], one["max_tokens"]) for one in told] == [
        (3, 0, 1, 1),
        (3, 1, 1, 9),
    ]
    assert len(parse_trace(path.read_text())) == 2
