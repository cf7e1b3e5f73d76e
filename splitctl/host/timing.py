"""Times switches beside for `bench`: a hosted session that holds a prompt goes to the other mode and back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from splitctl.carry.sampling import SamplerSpec
from splitctl.control.requests import GenerateRequest
from splitctl.errors import Cancelled
from splitctl.host.config import HostConfig
from splitctl.host.supervisor import Supervisor
from splitctl.ipc.benching import Benching
from splitctl.outcome import Route, SwitchOptions, SwitchStatus
from splitctl.placement import SplitMode

#: How often it is asked whether to go on [seconds].
_POLL_S = 0.1
_GREEDY = SamplerSpec(temp=0.0)
_BESIDE = SwitchOptions(via=Route.BESIDE)

Outcome = Mapping[str, Any]


def switches_beside(
    what: Benching,
    held: Sequence[int],
    on_outcome: Callable[[SplitMode, SplitMode, Outcome], None],
    *,
    env: Mapping[str, str],
    is_cancelled: Callable[[], bool],
    goes_on: Callable[[int], bool] = lambda _: True,
) -> None:
    """Host a session that begins in layer mode, and switch it beside to tensor mode and back.

    Args:
        what: the model, and where it lies.
        held: tokens that the session holds, ascending; once more at the first of them, to begin with.
        on_outcome: takes from where, to where, and the outcome, of each switch that was made.
        env: the environment of the workers.
        is_cancelled: asked all the while.
        goes_on: asked before each switch, with the tokens that it holds, whether there is time for it.

    Raises:
        Cancelled: `is_cancelled` said so; no process is left.
        SplitctlError: the session cannot be served.
        OSError: the system gives no memory file, or no process.
    """
    with TemporaryDirectory(prefix="splitctl-bench-") as folder:
        asyncio.run(_until(_there_and_back(what, held, on_outcome, goes_on, env, Path(folder)), is_cancelled))


async def _until(work: Coroutine[Any, Any, None], is_cancelled: Callable[[], bool]) -> None:
    task = asyncio.ensure_future(work)
    while not task.done():
        await asyncio.wait({task}, timeout=_POLL_S)
        if is_cancelled() and task.cancel():
            await asyncio.wait({task})
            raise Cancelled("the bench")
    task.result()


async def _there_and_back(
    what: Benching,
    held: Sequence[int],
    on_outcome: Callable[[SplitMode, SplitMode, Outcome], None],
    goes_on: Callable[[int], bool],
    env: Mapping[str, str],
    folder: Path,
) -> None:
    layer, tensor = SplitMode.LAYER, SplitMode.TENSOR
    config = HostConfig(
        model=what.model,
        library=what.library,
        placement=what.placed((layer, what.n_ubatches[0])),
        rpc=what.rpc,
        deadline_s=what.deadline_s,
        state_folder=folder,
    )
    supervisor = Supervisor(config, env=env, log=lambda _: None)
    await supervisor.start()
    try:
        for n_held in (held[0], *held):
            tokens = tuple((7919 * index + 13) % max(what.facts.n_vocab, 1) for index in range(n_held))
            for before, after in ((layer, tensor), (tensor, layer)):
                if not goes_on(n_held):
                    return
                if before is layer:
                    await _generate(supervisor, tokens)
                outcome = await supervisor.switch({"mode": after}, _BESIDE)
                # The first step is the trial of it.
                await _generate(supervisor, tokens)
                on_outcome(before, after, outcome)
                if outcome["status"] != SwitchStatus.SWITCHED.value:
                    return
    finally:
        await supervisor.stop(save=False)


async def _generate(supervisor: Supervisor, tokens: tuple[int, ...]) -> None:
    async for _ in await supervisor.generate(GenerateRequest(tokens=tokens, n_predict=2, sampler=_GREEDY)):
        pass
