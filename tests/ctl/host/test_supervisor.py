"""Hosted sessions whose workers really die: killed, stopped, aborted and hung, in serving and in every stage."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from splitctl.carry import file as carries
from splitctl.carry.sampling import SamplerSpec
from splitctl.control.requests import GenerateRequest
from splitctl.errors import Busy, Parked, WorkerLost
from splitctl.host.events import SessionParked, SessionSaved, TrialEnded, WorkerGone
from splitctl.host.streams import Why
from splitctl.host.supervisor import HostState, Supervisor
from splitctl.ipc.jobs import Fault, RequestFailed
from splitctl.outcome import Route, SwitchOptions
from splitctl.placement import Placement, SplitMode
from tests.ctl.hosting import GREEDY, GUARD_S, LAYER, TENSOR, Client, ask, config, environment, request_of, soon
from tests.stublib import FaultFile, build, needs_compiler, write_model

PROMPTS = tuple(tuple((7 * n + k) % 200 + 1 for k in range(12)) for n in range(4))
_SAMPLERS = tuple(SamplerSpec(temp=0.9, top_k=20, repeat_penalty=1.3, seed=100 + n) for n in range(4))
_N = 24

_STAGES = ("checking", "sealing", "freeing", "placing", "proving")
"""On both sides of the seal; tools.faults plays every stage, and every way to die in it."""


_PACE_US = 20_000
"""Time of a decode: streams must be there when something happens to them, on whatever machine."""


FORCED = SwitchOptions(force=True, via=Route.IN_PLACE)
IN_PLACE = SwitchOptions(via=Route.IN_PLACE)


class Stage:
    """A session on the stub, and the faults of its workers."""

    def __init__(self, folder: Path, **more: Any) -> None:
        self.folder = folder
        self.faults = FaultFile(folder / "faults")
        self.said: list[str] = []
        model = folder / "tiny.gguf"
        if not model.exists():
            write_model(model)
        self.supervisor = Supervisor(
            config(folder, model, build(), **{"deadline_s": 30.0, **more}),
            env=environment(folder, **self.faults.env),
            log=self.said.append,
        )
        self.arm()

    def arm(self, text: str = "", *, pace_us: int = _PACE_US) -> None:
        """Ask for faults in place of those before, and for a time of every decode."""
        self.faults.arm(f"pace:decode={pace_us} {text}")

    async def ask(self, stream: int, n: int = _N) -> Client:
        """Ask for the stream of a number."""
        return await ask(self.supervisor, request_of(PROMPTS[stream], n, sampler=_SAMPLERS[stream]))

    async def ask_all(self, n_streams: int = 4) -> list[Client]:
        """Ask for several, one after the other."""
        clients = []
        for stream in range(n_streams):
            clients.append(await self.ask(stream))
            await clients[-1].has(1)
        return clients

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send the worker a signal."""
        pid = self.supervisor.worker_pid
        assert pid is not None
        os.kill(pid, number)

    def switch(self, **more: Any) -> asyncio.Future[dict[str, Any]]:
        """Ask for a switch to tensor mode, in place."""
        return asyncio.ensure_future(self.supervisor.switch({"mode": SplitMode.TENSOR}, **{"options": IN_PLACE} | more))

    async def serves(self, n_restarts: int) -> None:
        """Wait until a worker serves again."""
        await soon(lambda: self.supervisor.status()["worker_restarts"] >= n_restarts)


def play(folder: Path, script: Callable[[Stage], Awaitable[None]], *, save: bool = False, **more: Any) -> None:
    """Play a script on a session that serves, end it, and see that nothing is left of it."""

    async def run() -> None:
        stage = Stage(folder, **more)
        await stage.supervisor.start()
        try:
            async with asyncio.timeout(GUARD_S):
                await script(stage)
        finally:
            pid = stage.supervisor.worker_pid
            await stage.supervisor.stop(save=save)
        assert pid is None or not psutil.pid_exists(pid)

    before = _n_descriptors()
    asyncio.run(run())
    assert _n_descriptors() == before


def _n_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[int, ...], ...]:
    """What the four streams come to when nothing happens."""
    answers: list[tuple[int, ...]] = []

    async def script(stage: Stage) -> None:
        for client in await stage.ask_all():
            assert (await client.end()).why is Why.LENGTH
            answers.append(tuple(client.tokens))

    play(tmp_path_factory.mktemp("undisturbed"), script, placement=LAYER.changed(n_seq_max=4))
    return tuple(answers)


pytestmark = [needs_compiler, pytest.mark.stub]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGABRT])
def test_streams_survive_a_worker_that_is_gone(
    tmp_path: Path, undisturbed: tuple[tuple[int, ...], ...], number: signal.Signals
) -> None:
    """Killed, stopped or aborted while four streams run: each ends with the very tokens of a session left in peace."""

    async def script(stage: Stage) -> None:
        clients = await stage.ask_all()
        events = stage.supervisor.subscribe()
        stage.kill(number)
        for client, wanted in zip(clients, undisturbed, strict=True):
            assert (await client.end()).why is Why.LENGTH
            assert tuple(client.tokens) == wanted
        gone = await anext(events)
        assert isinstance(gone, WorkerGone)
        how = "no progress for 1 s" if number is signal.SIGSTOP else f"signal {int(number)}"
        assert how in gone.reason
        status = stage.supervisor.status()
        assert (status["state"], status["worker_restarts"], status["recomputed"]) == ("serving", 1, 1)

    deadline_s = 1.0 if number is signal.SIGSTOP else 30.0
    play(tmp_path, script, placement=LAYER.changed(n_seq_max=4), deadline_s=deadline_s)


@pytest.mark.parametrize("name", _STAGES)
def test_an_abort_in_a_switch_is_fallen_back_from(
    tmp_path: Path, undisturbed: tuple[tuple[int, ...], ...], name: str
) -> None:
    """Whatever stage the worker aborts in, the stream goes on in the old placement with the same tokens."""

    async def script(stage: Stage) -> None:
        stage.arm(f"at-{name}:abort@1")
        client = await stage.ask(0)
        await client.has(2)
        outcome = await stage.switch()
        assert (outcome["status"], outcome["stage"], outcome["effective"]) == ("fell_back", name, "layer")
        assert "died by signal 6 (SIGABRT)" in outcome["reason"]
        assert "GGML_ASSERT(stub_was_asked_to_abort) failed" in outcome["reason"]
        # What was sealed before it died is not read again.
        assert outcome["recomputed"] == (name in {"checking", "saving", "sealing"})
        assert (await client.end()).why is Why.LENGTH
        assert tuple(client.tokens) == undisturbed[0]

    play(tmp_path, script)


def test_an_abort_on_trial_is_fallen_back_from(tmp_path: Path, undisturbed: tuple[tuple[int, ...], ...]) -> None:
    """The first decode takes the worker along: the switch that was reported as done is reported as fallen back from."""

    async def script(stage: Stage) -> None:
        stage.arm("decode:abort:tensor")
        client = await stage.ask(0)
        await client.has(2)
        events = stage.supervisor.subscribe()
        assert (await stage.switch(options=FORCED))["status"] == "switched"
        async for event in events:
            if isinstance(event, TrialEnded):
                break
        assert event.outcome["status"] == "fell_back"
        assert event.outcome["recomputed"] is False
        await client.end()
        assert tuple(client.tokens) == undisturbed[0]
        assert stage.supervisor.status()["effective"] == "layer"

    play(tmp_path, script)


def test_a_switch_that_hangs_is_ended_by_its_silence(tmp_path: Path) -> None:
    """A load that never returns is ended at the deadline; asked to cancel meanwhile, the switch was cancelled."""

    async def script(stage: Stage) -> None:
        stage.arm("load:hang:tensor")
        client = await stage.ask(0)
        await client.has(2)
        stages: list[str] = []
        asked = stage.switch(on_stage=lambda name, _share: stages.append(name), options=FORCED)
        await soon(lambda: "placing" in stages)
        with pytest.raises(Busy, match="a switch to tensor"):
            await stage.supervisor.switch({"mode": SplitMode.TENSOR})
        waits = await stage.ask(1)
        stage.supervisor.cancel_switch()
        outcome = await asked
        assert (outcome["status"], outcome["stage"]) == ("cancelled", "placing")
        assert "no progress for 1 s" in outcome["reason"]
        for one in (client, waits):
            assert (await one.end()).why is Why.LENGTH

    play(tmp_path, script, deadline_s=1.0)


def test_a_cancel_reaches_a_switch_that_waits(tmp_path: Path) -> None:
    """Asked for right behind the switch it ends it before anything is touched; the next switch is not cancelled."""

    async def script(stage: Stage) -> None:
        client = await stage.ask(0, -1)
        await client.has(2)
        asked = stage.switch()
        await soon(lambda: stage.supervisor.status()["stage"] is not None)
        stage.supervisor.cancel_switch()
        outcome = await asked
        assert (outcome["status"], outcome["effective"]) == ("cancelled", "layer")
        assert (await stage.switch())["status"] == "switched"
        client.stream.cancel()
        assert (await client.end()).why is Why.CANCELLED

    play(tmp_path, script)


def test_streams_go_on_through_switches_both_ways(tmp_path: Path, undisturbed: tuple[tuple[int, ...], ...]) -> None:
    """Two run, two wait; after two switches all four have their tokens, and what the switches took is known."""

    async def script(stage: Stage) -> None:
        # Streams go on during a check, and must not be over before the second switch: the mode is tried before.
        await stage.supervisor.check({"mode": SplitMode.TENSOR})
        stage.arm(pace_us=80_000)
        clients = [await stage.ask(n) for n in range(4)]
        await clients[0].has(2)
        assert (await stage.switch())["status"] == "switched"
        outcome = await stage.supervisor.switch({"mode": SplitMode.LAYER}, IN_PLACE)
        assert outcome["status"] == "switched"
        for client, wanted in zip(clients, undisturbed, strict=True):
            assert (await client.end()).why is Why.LENGTH
            assert tuple(client.tokens) == wanted
        assert clients[0].kinds().count("Paused") == clients[0].kinds().count("Resumed") == 2
        found = await stage.supervisor.check({"mode": SplitMode.TENSOR})
        assert (found["requested"], found["is_unchanged"], found["reasons"]) == ("tensor", False, [])
        assert found["expected_s"] > 0.0
        assert stage.supervisor.status()["switches"]["ended"] == {"switched": 2}

    play(tmp_path, script)


@pytest.mark.parametrize("is_sealed", [True, False])
def test_a_parked_session_comes_back(tmp_path: Path, undisturbed: tuple[tuple[int, ...], ...], is_sealed: bool) -> None:
    """Where no worker opens any more the session is on disk, with its state if it was sealed, and is brought back."""

    async def script(stage: Stage) -> None:
        client = await stage.ask(0)
        await client.has(2)
        events = stage.supervisor.subscribe()
        if is_sealed:
            stage.arm("load:abort")
            outcome = await stage.switch(options=FORCED)
            assert (outcome["status"], outcome["effective"], outcome["stage"]) == ("parked", None, "placing")
        else:
            stage.arm("load:null")
            stage.kill()
        async for event in events:
            if isinstance(event, SessionParked):
                break
        path = tmp_path / "sessions" / "default.parked.safetensors"
        assert event.path == path
        done = await client.end()
        assert done.why is Why.ERROR
        assert str(path) in done.message
        parked = carries.read(path).carry
        assert bool(len(parked.state)) == is_sealed
        assert parked.sequences[0].tokens.tolist() == [*PROMPTS[0], *client.tokens]
        with pytest.raises(Parked, match=str(path)):
            await stage.ask(1)
        with pytest.raises((RequestFailed, WorkerLost)):
            await stage.supervisor.restore(path)
        assert stage.supervisor.state is HostState.PARKED
        stage.faults.clear()
        restored = await stage.supervisor.restore(path)
        assert (restored["sequences"], restored["recomputed"]) == (1, not is_sealed)
        assert stage.supervisor.status()["parked_at"] is None
        sampler = _SAMPLERS[0]
        rest = await ask(stage.supervisor, request_of([*PROMPTS[0], *client.tokens], 2, sampler=sampler))
        assert (await rest.end()).n_reused >= len(PROMPTS[0])

    play(tmp_path, script)


def test_a_session_is_gone_on_with_in_another_host(tmp_path: Path) -> None:
    """What a host saved when it stopped is offered to the next, which goes on from it without reading again."""
    held: list[int] = []

    async def first(stage: Stage) -> None:
        client = await ask(stage.supervisor, request_of(PROMPTS[0], 6))
        await client.end()
        held.extend([*PROMPTS[0], *client.tokens])

    async def second(stage: Stage) -> None:
        assert any("default.safetensors" in line for line in stage.said)
        assert await stage.supervisor.restore(tmp_path / "sessions" / "default.safetensors")

    async def third(stage: Stage) -> None:
        assert stage.supervisor.status()["sequences"][0]["n_tokens"] == len(held)
        client = await ask(stage.supervisor, request_of([*held, 5], 1))
        # The newest token was drawn and delivered, and has not been decoded yet.
        assert (await client.end()).n_reused == len(held) - 1

    play(tmp_path, first, save=True)
    play(tmp_path, second)
    play(tmp_path, third, resume=tmp_path / "sessions" / "default.safetensors")


def test_a_checkpoint_is_a_session(tmp_path: Path) -> None:
    """One that was written while a stream ran can be read, and holds what had been delivered by then."""

    async def script(stage: Stage) -> None:
        events = stage.supervisor.subscribe()
        client = await ask(stage.supervisor, request_of(PROMPTS[0], -1))
        async for event in events:
            if isinstance(event, SessionSaved):
                break
        tokens = carries.read(event.path).carry.sequences[0].tokens.tolist()
        client.stream.cancel()
        await client.end()
        whole = [*PROMPTS[0], *client.tokens]
        assert tokens == whole[: len(tokens)]

    play(tmp_path, script, checkpoint_s=0.05)


def test_a_stream_that_is_left_frees_its_sequence(tmp_path: Path, undisturbed: tuple[tuple[int, ...], ...]) -> None:
    """One without an end is cancelled, and the one that waited for its sequence runs."""

    async def script(stage: Stage) -> None:
        endless = await ask(stage.supervisor, request_of(PROMPTS[3], -1))
        await endless.has(2)
        waits = await stage.ask(0)
        assert stage.supervisor.status()["queued"] == 1
        endless.stream.cancel()
        assert (await endless.end()).why is Why.CANCELLED
        stage.faults.clear()
        await waits.end()
        assert tuple(waits.tokens) == undisturbed[0]

    play(tmp_path, script, placement=LAYER.changed(n_seq_max=1))


def test_a_worker_that_is_killed_while_idle_is_replaced(tmp_path: Path) -> None:
    """Several times in a row, with nothing under way, the session serves again."""

    async def script(stage: Stage) -> None:
        await (await ask(stage.supervisor, request_of(PROMPTS[0], 3))).end()
        for n in range(1, 4):
            stage.kill()
            await stage.serves(n)
        client = await stage.ask(1, 3)
        assert (await client.end()).n_predicted == 3
        assert stage.supervisor.status()["sequences"][0]["n_tokens"] == len(PROMPTS[0]) + 3

    play(tmp_path, script)


def test_a_model_that_is_none_is_an_error(tmp_path: Path) -> None:
    """A session that cannot be opened says whose fault it is, and leaves nothing running."""
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")

    async def run() -> None:
        stage = Stage(tmp_path)
        with pytest.raises(RequestFailed) as caught:
            await stage.supervisor.start()
        assert caught.value.fault is Fault.MODEL
        assert stage.supervisor.worker_pid is None

    asyncio.run(run())


# ---- a real model on a real build ----

_SENTENCE = "The river rises in the mountains and"


def _real(folder: Path, model: Path, placement: Placement = LAYER, **more: Any) -> Supervisor:
    return Supervisor(
        config(folder, model, None, placement=placement, **more),
        env=environment(folder, XDG_CACHE_HOME=str(Path.home() / ".cache")),
        log=lambda _: None,
    )


@pytest.mark.model
@pytest.mark.slow
def test_a_real_session_survives_its_workers(smollm2: Path, tmp_path: Path) -> None:
    """Killed while it streams, killed in a switch, switched: the greedy text is that of a session left in peace."""

    async def text_of(supervisor: Supervisor, disturb: Callable[[Client], Awaitable[None]]) -> str:
        request = GenerateRequest(prompt=_SENTENCE, n_predict=24, sampler=GREEDY)
        client = await ask(supervisor, request)
        await client.has(4)
        await disturb(client)
        assert (await client.end()).why is Why.LENGTH
        assert len(client.tokens) == 24
        return client.text

    async def run() -> None:
        supervisor = _real(tmp_path, smollm2)
        await supervisor.start()

        async def nothing(_: Client) -> None:
            return

        async def kill(_: Client) -> None:
            os.kill(supervisor.worker_pid or 0, signal.SIGKILL)

        async def kill_while_placing(_: Client) -> None:
            def on_stage(name: str, _share: float) -> None:
                if name == "placing" and supervisor.worker_pid is not None:
                    os.kill(supervisor.worker_pid, signal.SIGKILL)

            outcome = await supervisor.switch({"mode": SplitMode.TENSOR}, IN_PLACE, on_stage=on_stage)
            assert (outcome["status"], outcome["recomputed"]) == ("fell_back", False)

        try:
            async with asyncio.timeout(4 * GUARD_S):
                wanted = await text_of(supervisor, nothing)
                assert await text_of(supervisor, kill) == wanted
                assert await text_of(supervisor, kill_while_placing) == wanted
                chat = GenerateRequest(
                    messages=({"role": "user", "content": "Say hello."},), n_predict=4, sampler=GREEDY
                )
                assert (await (await ask(supervisor, chat)).end()).n_predicted > 0
                outcome = await supervisor.switch({"mode": SplitMode.TENSOR}, IN_PLACE)
                assert (outcome["status"], outcome["effective"]) == ("switched", "tensor")
                assert (await (await ask(supervisor, chat)).end()).n_predicted > 0
                assert supervisor.status()["last_switch"]["confirmed"] is True
                assert supervisor.status()["placement"]["mode"] == TENSOR.mode.value
        finally:
            await supervisor.stop(save=False)

    asyncio.run(run())
