"""A switch that is first tried in a child process: streams go on meanwhile, and stand still for the switch alone."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from splitctl.control.requests import GenerateRequest
from splitctl.host.streams import Delta
from splitctl.host.supervisor import Supervisor
from splitctl.outcome import Route, SwitchOptions
from splitctl.placement import SplitMode
from tests.ctl.hosting import GREEDY, GUARD_S, LAYER, config, environment

_N_STREAMS = 4


@dataclass(slots=True)
class _Times:
    """When what was seen, seconds of one clock.

    Attributes:
        tokens: of each stream.
        stages: the first time that each stage of the switch was reported.
        drawn: set with every token.
    """

    tokens: list[list[float]] = field(default_factory=lambda: [[] for _ in range(_N_STREAMS)])
    stages: dict[str, float] = field(default_factory=dict)
    drawn: asyncio.Event = field(default_factory=asyncio.Event)

    async def more_than(self, n_tokens: list[int]) -> None:
        """Wait until every stream has more tokens than a number of its own."""
        while any(len(tokens) <= n for tokens, n in zip(self.tokens, n_tokens, strict=True)):
            self.drawn.clear()
            await self.drawn.wait()

    def within(self, stream: int, first: float, last: float) -> int:
        """Count the tokens of a stream between two moments."""
        return sum(first < at <= last for at in self.tokens[stream])


@pytest.mark.model
@pytest.mark.slow
def test_streams_go_on_while_a_switch_is_tried_in_a_child(smollm2: Path, tmp_path: Path) -> None:
    """Each of four streams gets tokens all through the trial; its longest wait is the one for the switch itself."""
    times = _Times()

    async def follow(supervisor: Supervisor, number: int) -> None:
        story = {"role": "user", "content": f"Tell me a very long story about {number + 2} friends at sea."}
        request = GenerateRequest(messages=(story,), n_predict=-1, sampler=GREEDY)
        async for event in await supervisor.generate(request):
            if isinstance(event, Delta) and event.token is not None:
                times.tokens[number].append(time.perf_counter())
                times.drawn.set()

    async def run() -> None:
        # A cache of its own: nothing is known of tensor mode yet, so it is tried.
        supervisor = Supervisor(
            config(tmp_path, smollm2, None, placement=LAYER.changed(n_seq_max=_N_STREAMS, n_ctx=4096)),
            env=environment(tmp_path),
            log=lambda _: None,
        )
        await supervisor.start()
        streams = [asyncio.ensure_future(follow(supervisor, number)) for number in range(_N_STREAMS)]
        try:
            async with asyncio.timeout(4 * GUARD_S):
                await times.more_than([0] * _N_STREAMS)
                outcome = await supervisor.switch(
                    {"mode": SplitMode.TENSOR},
                    SwitchOptions(via=Route.IN_PLACE),
                    on_stage=lambda name, _: times.stages.setdefault(name, time.perf_counter()),
                )
                assert (outcome["status"], outcome["effective"]) == ("switched", "tensor")
                await times.more_than([len(tokens) for tokens in times.tokens])
        finally:
            await supervisor.stop(save=False)
            await asyncio.gather(*streams, return_exceptions=True)

    asyncio.run(run())
    stages = times.stages
    assert list(stages)[:3] == ["checking", "quiescing", "saving"]
    for stream, tokens in enumerate(times.tokens):
        assert times.within(stream, stages["checking"], stages["quiescing"]) >= 3
        # One that was drawn before the boundary may still be on its way.
        assert times.within(stream, stages["saving"], stages["proving"]) <= 1
        waits = [end - begin for begin, end in pairwise(tokens)]
        at_switch = next(end - begin for begin, end in pairwise(tokens) if begin <= stages["sealing"] < end)
        # No wait is as long as the check was; on a machine without other work the longest is the switch's.
        assert max(waits) < stages["quiescing"] - stages["checking"]
        assert at_switch > stages["proving"] - stages["sealing"]
