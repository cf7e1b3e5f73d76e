"""A hosted session whose weights are copied into memory of the host: a worker is lost, the file is lost, it goes on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from splitctl.carry.sampling import SamplerSpec
from splitctl.host.streams import Why
from splitctl.host.supervisor import Supervisor
from splitctl.outcome import Route, SwitchOptions, WeightsTier
from splitctl.placement import SplitMode
from tests.ctl.hosting import GUARD_S, LAYER, ask, config, environment, request_of, soon
from tests.native.real import NEWEST, library_of
from tests.stublib import FaultFile
from tools.make_dummies import make_many
from tools.places import default_folder

pytestmark = [pytest.mark.build, pytest.mark.slow]

_PROMPT = tuple(range(3, 40))
_SAMPLER = SamplerSpec(temp=0.9, top_k=20, seed=11)
_IN_PLACE = SwitchOptions(via=Route.IN_PLACE)


def _play(folder: Path, script: Callable[[Supervisor, FaultFile, Path], Awaitable[None]]) -> None:
    """Host a copy of the small model with a copy of its weights, which is complete when the script begins."""
    ((_, made, why),) = make_many(default_folder(), ["llama"])
    assert made is not None, why
    model = folder / "model.gguf"
    model.write_bytes(made.read_bytes())
    faults = FaultFile(folder / "faults")
    supervisor = Supervisor(
        config(folder, model, library_of(NEWEST), placement=LAYER.changed(n_seq_max=1), weights=WeightsTier.PINNED),
        env=environment(folder, **faults.env),
        log=print,
    )

    async def run() -> None:
        await supervisor.start()
        try:
            async with asyncio.timeout(GUARD_S):
                await soon(lambda: supervisor.status()["weights"]["copy"] == "complete")
                await script(supervisor, faults, model)
        finally:
            await supervisor.stop(save=False)

    asyncio.run(run())


async def _switch(supervisor: Supervisor, mode: SplitMode) -> dict[str, Any]:
    return await supervisor.switch({"mode": mode}, options=_IN_PLACE)


async def _there_and_back(supervisor: Supervisor) -> None:
    """Let both modes be tried from the copy in children, and switch both ways."""
    for mode in (SplitMode.TENSOR, SplitMode.LAYER):
        outcome = await _switch(supervisor, mode)
        assert (outcome["status"], outcome["weights"]) == ("switched", "pinned"), outcome["weights_reason"]


def test_a_worker_that_is_killed_while_placing_is_back_from_the_copy(tmp_path: Path) -> None:
    """The new worker finds the copy filled; the stream has the tokens of one that nobody disturbed."""

    async def script(supervisor: Supervisor, faults: FaultFile, _model: Path) -> None:
        straight = await ask(supervisor, request_of(_PROMPT, 40, sampler=_SAMPLER))
        await straight.end()
        await _there_and_back(supervisor)
        client = await ask(supervisor, request_of(_PROMPT, 40, sampler=_SAMPLER))
        await client.has(4)
        faults.arm("at-placing:kill@1")
        outcome = await _switch(supervisor, SplitMode.TENSOR)
        assert faults.fired()
        assert (await client.end()).why is Why.LENGTH
        status = supervisor.status()
        assert (outcome["status"], outcome["stage"]) == ("fell_back", "placing")
        assert status["weights"] == {"tier": "pinned", "copy": "complete", "from": "pinned"}
        assert status["worker_restarts"] == 1
        assert client.tokens == straight.tokens

    _play(tmp_path, script)


def test_a_model_s_file_that_is_removed_is_not_missed(tmp_path: Path) -> None:
    """A switch, and a worker that starts anew, take the copy; the outcome says that the file is gone."""

    async def script(supervisor: Supervisor, _faults: FaultFile, model: Path) -> None:
        await _there_and_back(supervisor)
        client = await ask(supervisor, request_of(_PROMPT, 60, sampler=_SAMPLER))
        await client.has(4)
        await asyncio.to_thread(model.unlink)
        outcome = await _switch(supervisor, SplitMode.TENSOR)
        assert (outcome["status"], outcome["weights"]) == ("switched", "pinned"), outcome["reason"]
        assert "it is gone; the copy of the weights in host memory stands in" in outcome["weights_reason"]
        pid = supervisor.worker_pid
        assert pid is not None
        os.kill(pid, 9)
        assert (await client.end()).why is Why.LENGTH
        await soon(lambda: supervisor.status()["state"] == "serving")
        status = supervisor.status()
        assert status["worker_restarts"] == 1
        assert status["weights"]["from"] == "pinned"
        assert len(client.tokens) == 60

    _play(tmp_path, script)
