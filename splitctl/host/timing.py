"""Times a hosted session for `bench`: what a host adds to its steps, and switches beside, there and back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from splitctl.carry.sampling import SamplerSpec
from splitctl.control.requests import GenerateRequest
from splitctl.errors import Cancelled
from splitctl.host.config import HostConfig
from splitctl.host.streams import Delta, Done, Why
from splitctl.host.supervisor import Supervisor
from splitctl.ipc.benching import Benching
from splitctl.outcome import Route, SwitchOptions, SwitchStatus
from splitctl.placement import SplitMode
from splitctl.planning.schedule import SERVED_PROMPT, SERVED_ROUNDS, SERVED_TOKENS

#: How often it is asked whether to go on [seconds].
_POLL_S = 0.1
_GREEDY = SamplerSpec(temp=0.0)
_BESIDE = SwitchOptions(via=Route.BESIDE)

Outcome = Mapping[str, Any]
OnServed = Callable[[SplitMode, int, float], None]


def served_times(
    what: Benching,
    held: Sequence[int],
    on_outcome: Callable[[SplitMode, SplitMode, Outcome], None],
    *,
    env: Mapping[str, str],
    is_cancelled: Callable[[], bool],
    goes_on: Callable[[int], bool] = lambda _: True,
    n_seqs: Callable[[], Sequence[int]] = tuple,
    on_served: OnServed = lambda *_: None,
) -> None:
    """Host a session that begins in layer mode, switch it beside to tensor mode and back, and time its steps.

    Args:
        what: the model, and where it lies.
        held: tokens that the session holds, ascending; once more at the first of them, to begin with. Without any
            no switch is made.
        on_outcome: takes from where, to where, and the outcome, of each switch that was made.
        env: the environment of the workers.
        is_cancelled: asked all the while.
        goes_on: asked before each switch, with the tokens that it holds, whether there is time for it.
        n_seqs: asked at the end, when what streams leave in the cache goes into no switch any more: the numbers of
            streams for whose steps there is time.
        on_served: takes the mode, the number of streams, and the seconds between two of their steps, several times.

    Raises:
        Cancelled: `is_cancelled` said so; no process is left.
        SplitctlError: the session cannot be served.
        OSError: the system gives no memory file, or no process.
    """
    with TemporaryDirectory(prefix="splitctl-bench-") as folder:
        work = _hosted(what, held, on_outcome, goes_on, n_seqs, on_served, env, Path(folder))
        asyncio.run(_until(work, is_cancelled))


async def _until(work: Coroutine[Any, Any, None], is_cancelled: Callable[[], bool]) -> None:
    task = asyncio.ensure_future(work)
    while not task.done():
        await asyncio.wait({task}, timeout=_POLL_S)
        if is_cancelled() and task.cancel():
            await asyncio.wait({task})
            raise Cancelled("the bench")
    task.result()


async def _hosted(
    what: Benching,
    held: Sequence[int],
    on_outcome: Callable[[SplitMode, SplitMode, Outcome], None],
    goes_on: Callable[[int], bool],
    n_seqs: Callable[[], Sequence[int]],
    on_served: OnServed,
    env: Mapping[str, str],
    folder: Path,
) -> None:
    config = HostConfig(
        model=what.model,
        library=what.library,
        placement=what.placed((SplitMode.LAYER, what.n_ubatches[0])),
        rpc=what.rpc,
        deadline_s=what.deadline_s,
        state_folder=folder,
    )
    supervisor = Supervisor(config, env=env, log=lambda _: None)
    await supervisor.start()
    try:
        mode = await _there_and_back(supervisor, partial(_tokens, what), held, on_outcome, goes_on)
        await _steps(supervisor, partial(_tokens, what), n_seqs(), partial(on_served, mode))
    finally:
        await supervisor.stop(save=False)


async def _there_and_back(
    supervisor: Supervisor,
    tokens_of: Callable[[int], tuple[int, ...]],
    held: Sequence[int],
    on_outcome: Callable[[SplitMode, SplitMode, Outcome], None],
    goes_on: Callable[[int], bool],
) -> SplitMode:
    """Switch as long as there is time and it goes well; returns the mode in the end."""
    layer, tensor = SplitMode.LAYER, SplitMode.TENSOR
    for n_held in (*held[:1], *held):
        tokens = tokens_of(n_held)
        for before, after in ((layer, tensor), (tensor, layer)):
            if not goes_on(n_held):
                return before
            if before is layer:
                await _generate(supervisor, tokens)
            outcome = await supervisor.switch({"mode": after}, _BESIDE)
            # The first step is the trial of it.
            await _generate(supervisor, tokens)
            on_outcome(before, after, outcome)
            if outcome["status"] != SwitchStatus.SWITCHED.value:
                return before
    return layer


def _tokens(what: Benching, n: int, first: int = 0) -> tuple[int, ...]:
    return tuple((7919 * index + 13) % max(what.facts.n_vocab, 1) for index in range(first, first + n))


async def _steps(
    supervisor: Supervisor,
    tokens: Callable[[int, int], tuple[int, ...]],
    n_seqs: Sequence[int],
    on_served: Callable[[int, float], None],
) -> None:
    """Time what lies between the steps of so many streams: what its client waits beyond the steps themselves."""
    for _ in range(SERVED_ROUNDS):
        for n_seq in n_seqs:
            # Each turn begins one of them, and steps those before it: they end together.
            streams = (
                _between(supervisor, tokens(SERVED_PROMPT, SERVED_PROMPT * number), SERVED_TOKENS + n_seq - 1 - number)
                for number in range(n_seq)
            )
            *_, seconds = await asyncio.gather(*streams)
            if seconds is not None:
                on_served(n_seq, seconds)


async def _between(supervisor: Supervisor, tokens: tuple[int, ...], n: int) -> float | None:
    """Give the mean seconds between the steps of a stream of `n` tokens; None where it ended before."""
    times = []
    async for event in await supervisor.generate(GenerateRequest(tokens=tokens, n_predict=n, sampler=_GREEDY)):
        match event:
            case Delta(token=int()):
                times.append(time.perf_counter())
            case Done(why=Why.LENGTH):
                return max(times[-1] - times[0] - event.generate_ms / 1e3, 0.0) / (len(times) - 1)
    return None


async def _generate(supervisor: Supervisor, tokens: tuple[int, ...]) -> None:
    async for _ in await supervisor.generate(GenerateRequest(tokens=tokens, n_predict=2, sampler=_GREEDY)):
        pass
