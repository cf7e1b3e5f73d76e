"""A switch beside with processes that are there: streams, orders and a stop under it; tools.faults plays its faults."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from splitctl.errors import Busy
from splitctl.host.streams import Why
from splitctl.outcome import Route, SwitchOptions
from splitctl.placement import SplitMode
from tests.ctl.host.test_supervisor import PROMPTS, Stage, play
from tests.ctl.hosting import LAYER, request_of, soon
from tests.stublib import needs_compiler

pytestmark = [needs_compiler, pytest.mark.stub]

BESIDE = SwitchOptions(force=True, via=Route.BESIDE)
_SLOW_US = 40_000
"""Time of a decode while a second worker starts."""


def test_streams_go_on_through_switches_both_ways(tmp_path: Path) -> None:
    """Two run, two wait: all have the tokens of a session left in peace, and pause for the state alone."""
    calm: list[list[int]] = []

    async def undisturbed(stage: Stage) -> None:
        stage.faults.clear()
        for client in [await stage.ask(n, 150) for n in range(4)]:
            await client.end()
            calm.append(client.tokens)

    async def script(stage: Stage) -> None:
        stage.arm(pace_us=_SLOW_US)
        clients = [await stage.ask(n, 150) for n in range(4)]
        await clients[1].has(2)
        first = stage.supervisor.worker_pid
        stages: list[str] = []

        def on_stage(name: str, _share: float) -> None:
            stages.append(name)
            if name == "building":
                status = stage.supervisor.status()
                assert (status["state"], status["stage"], status["worker_pid"]) == ("switching", "building", first)
                assert psutil.pid_exists(status["standby_pid"])

        there = await stage.switch(options=BESIDE, on_stage=on_stage)
        assert (there["status"], there["via"], there["n_sequences"]) == ("switched", "beside", 2)
        assert 0.0 < there["pause_ms"] < there["total_ms"]
        order = ["checking", "placing", "building", "trial", "quiescing", "saving", "sealing", "restoring", "proving"]
        assert list(dict.fromkeys(stages)) == order
        assert {name for name, ms in there["stages_ms"].items() if ms is None} == {"freeing", "switching_natively"}
        second = stage.supervisor.worker_pid
        back = await stage.supervisor.switch({"mode": SplitMode.LAYER}, BESIDE)
        assert (back["status"], back["effective"]) == ("switched", "layer")
        assert len({first, second, stage.supervisor.worker_pid}) == 3
        assert not any(client.done for client in clients[:2])
        await clients[0].has(len(clients[0].tokens) + 2)
        stage.faults.clear()
        for client, wanted in zip(clients, calm, strict=True):
            assert (await client.end()).why is Why.LENGTH
            assert client.tokens == wanted
        assert clients[0].kinds().count("Paused") == clients[0].kinds().count("Resumed") == 2
        status = stage.supervisor.status()
        assert status["switches"]["ended"] == {"switched": 2}
        assert (status["worker_restarts"], status["recomputed"], status["standby_pid"]) == (0, 0, None)
        assert status["last_switch"]["confirmed"]

    place = LAYER.changed(n_ctx=1024)
    play(tmp_path, undisturbed, placement=place)
    play(tmp_path, script, placement=place)


def test_an_idle_session_goes_beside_by_itself_and_keeps_what_it_holds(tmp_path: Path) -> None:
    """Auto takes the way where it fits; a prompt that goes on afterwards reads only what is new."""

    async def script(stage: Stage) -> None:
        client = await stage.ask(0, 4)
        await client.end()
        outcome = await stage.switch(options=SwitchOptions(force=True))
        assert (outcome["status"], outcome["via"], outcome["via_reason"]) == ("switched", "beside", "")
        assert (outcome["n_sequences"], outcome["confirmed"]) == (1, False)
        held = len(client.tokens) + client.events[0].n_prompt - 1  # type: ignore[union-attr]
        again = await stage.supervisor.generate(request_of([*PROMPTS[0], *client.tokens, 5], 2))
        events = [event async for event in again]
        assert events[-1].n_reused == held  # type: ignore[union-attr]
        assert stage.supervisor.status()["last_switch"]["confirmed"]
        refused = await stage.switch(options=SwitchOptions(force=True))
        assert refused["status"] == "unchanged"

    play(tmp_path, script)


def test_idle_sequences_with_a_stream_of_cells_each_go_ahead(tmp_path: Path) -> None:
    """One generates, two are idle: the state of these crosses before it stops, and a prompt that goes on reuses it."""

    async def script(stage: Stage) -> None:
        idle = [await stage.ask(n, 4) for n in (0, 1)]
        for client in idle:
            await client.end()
        running = await stage.ask(2, 150)
        stage.arm(pace_us=_SLOW_US)
        await running.has(2)
        there = await stage.switch(options=BESIDE)
        stage.faults.clear()
        assert (there["status"], there["n_sequences"], there["ahead_reason"]) == ("switched", 3, "")
        assert 0 < there["ahead_bytes"] < there["state_bytes"]
        assert (await running.end()).why is Why.LENGTH
        for n, client in enumerate(idle):
            held = len(client.tokens) + client.events[0].n_prompt - 1  # type: ignore[union-attr]
            again = await stage.supervisor.generate(request_of([*PROMPTS[n], *client.tokens, 5], 2))
            events = [event async for event in again]
            assert events[-1].n_reused == held  # type: ignore[union-attr]
        assert (stage.supervisor.status()["recomputed"], stage.supervisor.status()["worker_restarts"]) == (0, 0)

    play(tmp_path, script, placement=LAYER.changed(n_ctx=1536, n_seq_max=3, kv_unified=False))


@pytest.mark.parametrize("when", ["placing", "restoring"])
def test_a_stop_in_the_middle_leaves_no_process(tmp_path: Path, when: str) -> None:
    """Both workers are gone with the session, whatever the switch was at; a second switch was Busy until then."""

    async def script(stage: Stage) -> None:
        client = await stage.ask(0, -1)
        await client.has(2)
        reached = asyncio.Event()
        pids: list[int] = []

        def on_stage(name: str, _share: float) -> None:
            if name == when:
                status = stage.supervisor.status()
                pids.extend(pid for pid in (status["worker_pid"], status["standby_pid"]) if pid)
                reached.set()

        asked = stage.switch(options=BESIDE, on_stage=on_stage)
        await reached.wait()
        with pytest.raises(Busy, match="a switch to tensor"):
            await stage.supervisor.switch({"mode": SplitMode.NONE})
        await soon(lambda: when == "restoring" or stage.supervisor.status()["standby_pid"])
        pids += [pid for pid in (stage.supervisor.status()["standby_pid"],) if pid]
        await stage.supervisor.stop(save=False)
        assert (await asked)["status"] in {"cancelled", "switched"}
        assert not [pid for pid in pids if psutil.pid_exists(pid)]

    play(tmp_path, script)
