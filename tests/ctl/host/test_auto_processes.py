"""A session that switches by itself, with workers that are real processes: texts are right whatever it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitctl.host.config import PolicyConfig
from splitctl.host.streams import Why
from splitctl.planning.cost import parse_rates
from splitctl.planning.learned import costs_of_rates
from splitctl.planning.policy import Settings
from tests.ctl.host.test_supervisor import Stage, play
from tests.ctl.hosting import TENSOR, Client, ask, request_of, soon
from tests.stublib import needs_compiler

pytestmark = [needs_compiler, pytest.mark.stub]

#: Prompts are read in layer mode, answers are generated in tensor mode, and a switch costs nothing.
_RATES = parse_rates(
    '{"switch_s": 0.001, "modes": {"layer": {"prompt_tps": 10000, "generate_tps": 10},'
    ' "tensor": {"prompt_tps": 10, "generate_tps": 1000}}}'
)
_AUTO = PolicyConfig(costs_of_rates(_RATES), "rates", Settings(min_stay_s=0.0, max_wait_s=60.0, max_pause_s=60.0))
_PLACEMENT = TENSOR.changed(n_seq_max=4, n_ctx=2048)
_LONG = tuple(tuple((11 * n + 3 * k) % 200 + 1 for k in range(100)) for n in range(2))


#: More tokens than are drawn while a session goes there and back.
_N = 250


async def _ask_all(stage: Stage) -> list[Client]:
    """Ask for one long answer, and for two answers to long prompts while it is generated."""
    clients = [await stage.ask(0, _N)]
    await clients[0].has(2)
    return clients + [await ask(stage.supervisor, request_of(prompt, _N)) for prompt in _LONG]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What the answers come to without a policy."""
    found: list[list[int]] = []

    async def script(stage: Stage) -> None:
        stage.arm(pace_us=0)
        for client in await _ask_all(stage):
            assert (await client.end()).why is Why.LENGTH
            found.append(client.tokens)

    play(tmp_path_factory.mktemp("undisturbed"), script, placement=_PLACEMENT)
    return found


async def _are_right(clients: list[Client], undisturbed: list[list[int]]) -> None:
    """Wait for some tokens of each, end the streams, and compare what came."""
    for client in clients:
        await client.has(len(client.tokens) + 3)
        client.stream.cancel()
        await client.end()
    for client, wanted in zip(clients, undisturbed, strict=True):
        assert client.tokens == wanted[: len(client.tokens)]
        assert len(client.tokens) >= 3


def test_long_prompts_are_read_in_the_other_mode(tmp_path: Path, undisturbed: list[list[int]]) -> None:
    """They are held, read together after a switch, and the session goes back; every token is the right one."""

    async def script(stage: Stage) -> None:
        clients = await _ask_all(stage)
        await soon(lambda: len(stage.supervisor.recent_switches()) == 2)
        await _are_right(clients, undisturbed)
        ways = [(one["status"], one["effective"]) for one in stage.supervisor.recent_switches()]
        assert ways[:2] == [("switched", "layer"), ("switched", "tensor")]
        status = stage.supervisor.status()["policy"]
        assert status["waits"]["count"] == 2
        assert status["decisions"]["switch"] >= 2

    play(tmp_path, script, placement=_PLACEMENT, policy=_AUTO)


def test_a_worker_that_is_killed_takes_no_held_prompt_along(tmp_path: Path, undisturbed: list[list[int]]) -> None:
    """It is killed while prompts wait for the switch: another one serves, and every token is the right one."""

    async def script(stage: Stage) -> None:
        clients = await _ask_all(stage)
        assert stage.supervisor.status()["policy"]["held"]
        stage.kill()
        await stage.serves(1)
        await _are_right(clients, undisturbed)

    play(tmp_path, script, placement=_PLACEMENT, policy=_AUTO)
