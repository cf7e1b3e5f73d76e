"""A session that switches by itself, with workers that are real processes: texts are right whatever it does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from splitctl.host.config import HostState, PolicyConfig
from splitctl.planning.cost import parse_rates
from splitctl.planning.learned import costs_of_rates
from splitctl.planning.policy import Settings
from tests.ctl.host.test_supervisor import PROMPTS, Stage, play
from tests.ctl.hosting import LAYER, Client, ask, request_of, soon
from tests.stublib import needs_compiler

pytestmark = [needs_compiler, pytest.mark.stub]

#: Tensor mode is faster in everything, by far.
_RATES = parse_rates(
    '{"switch_s": 0.5, "modes": {"layer": {"prompt_tps": 100, "generate_tps": 10},'
    ' "tensor": {"prompt_tps": 10000, "generate_tps": 1000}}}'
)
_SETTINGS = Settings(min_stay_s=0.0, max_wait_s=60.0, max_pause_s=60.0, backoff_s=0.0)
_AUTO = PolicyConfig(costs_of_rates(_RATES), "rates", _SETTINGS)
_PLACEMENT = LAYER.changed(n_seq_max=4, n_ctx=2048)
_LONG = tuple(tuple((11 * n + 3 * k) % 200 + 1 for k in range(100)) for n in range(2))


#: More tokens than are drawn until the session is there.
_N = 250


def test_a_session_goes_over_lost_workers_to_the_faster_mode(tmp_path: Path) -> None:
    """A worker dies under the first switch, the next one makes it, and every token is the right one."""

    async def script(stage: Stage) -> None:
        supervisor = stage.supervisor
        requests = [request_of(PROMPTS[0], _N), *(request_of(prompt, _N) for prompt in _LONG)]
        clients: list[Client] = []
        for request in requests:
            clients.append(await ask(supervisor, request))
            await clients[0].has(2)
        await soon(lambda: supervisor.state is HostState.SWITCHING)
        stage.kill()
        await soon(lambda: supervisor.status()["effective"] == "tensor")
        for client in clients:
            await client.has(len(client.tokens) + 3)
            client.stream.cancel()
            await client.end()
        status = supervisor.status()
        assert status["worker_restarts"] == 1
        stage.arm(pace_us=0)
        for client, request in zip(clients, requests, strict=True):
            again = await ask(supervisor, replace(request, n_predict=len(client.tokens)))
            await again.end()
            assert len(client.tokens) >= 3
            assert client.tokens == again.tokens

    play(tmp_path, script, placement=_PLACEMENT, policy=_AUTO)
