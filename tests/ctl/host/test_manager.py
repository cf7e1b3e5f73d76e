"""A hosted session over workers that do what the test says: orders and reports in any order, every way to die."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from splitctl.carry import file as carries
from splitctl.carry.seal import Seal
from splitctl.control.requests import GenerateRequest
from splitctl.errors import Busy, Parked, Refused, WorkerLost
from splitctl.host import manager
from splitctl.host.events import SessionParked, SessionRecovered, SwitchEnded, TrialEnded, WorkerGone
from splitctl.host.streams import MAX_WAITING, Done, Why
from splitctl.host.supervisor import HostState, Supervisor
from splitctl.ipc.jobs import Failure, Fault, RequestFailed
from splitctl.ipc.orders import (
    Check,
    Checked,
    Drawn,
    Failed,
    Forgot,
    Halt,
    Open,
    Replaced,
    Restore,
    Save,
    Saved,
    Sealed,
    SequenceSnapshot,
    StageReached,
    Step,
    Switch,
    Switched,
    Tokenize,
    Tokenized,
    Trial,
)
from splitctl.outcome import Stage, SwitchOptions, SwitchOutcome, SwitchStatus
from splitctl.placement import Placement, SplitMode
from tests.ctl.hosting import GUARD_S, LAYER, TENSOR, Client, ScriptedLink, ask, config, request_of, soon
from tests.stublib import write_model

SEAL = Seal(1, 11, "cc" * 16, 4096, 21, "dd" * 16, LAYER)
A, B, C = (ord(letter) for letter in "abc")


class Scene:
    """A supervisor whose workers are scripted."""

    def __init__(self, folder: Path, **more: Any) -> None:
        self.said: list[str] = []
        self.links: list[ScriptedLink] = ScriptedLink.links
        model = write_model(folder / "tiny.gguf")
        self.supervisor = Supervisor(config(folder, model, None, **more), env={}, log=self.said.append)

    @property
    def link(self) -> ScriptedLink:
        """The worker of the moment."""
        return self.links[-1]

    async def start(self) -> None:
        """Serve."""
        await self.while_it(self.supervisor.start(), self.open)

    def open(self) -> None:
        """Let the worker of the moment serve."""
        self.link.open()

    async def while_it(self, work: Any, then: Callable[[], None]) -> Any:
        """Do something that begins a worker, and then what the worker does."""
        n = len(self.links)
        task = asyncio.ensure_future(work)
        await soon(lambda: len(self.links) > n)
        then()
        return await asyncio.wait_for(task, GUARD_S)

    async def next_link(self, n: int) -> ScriptedLink:
        """Wait for the n-th worker, from 1."""
        await soon(lambda: len(self.links) >= n)
        return self.link

    def switch(self, changes: dict[str, Any] | None = None, **more: Any) -> asyncio.Future[dict[str, Any]]:
        """Ask for a switch to tensor mode."""
        return asyncio.ensure_future(self.supervisor.switch(changes or {"mode": SplitMode.TENSOR}, **more))

    async def order(self, kind: type, link: ScriptedLink | None = None) -> Any:
        """Wait for an order of a kind, and give the last."""
        link = link or self.link
        await soon(lambda: any(isinstance(one, kind) for one in link.sent))
        return [one for one in link.sent if isinstance(one, kind)][-1]


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every worker be a scripted one."""
    monkeypatch.setattr(manager, "WorkerLink", ScriptedLink)
    monkeypatch.setattr(ScriptedLink, "links", [], raising=False)


def play(folder: Path, script: Callable[[Scene], Awaitable[None]], **more: Any) -> None:
    """Play a script on a session that serves, and end it."""

    async def run() -> None:
        scene = Scene(folder, **more)
        await scene.start()
        async with asyncio.timeout(GUARD_S):
            await script(scene)
            await scene.supervisor.stop(save=False)

    asyncio.run(run())


def outcome(status: SwitchStatus, effective: Placement | None, **fields: Any) -> dict[str, Any]:
    """An outcome as a worker reports it."""
    went_well = status in {SwitchStatus.SWITCHED, SwitchStatus.UNCHANGED}
    return dict(SwitchOutcome(status, TENSOR, effective, "" if went_well else "why", **fields).to_json())


def stage(order: Switch, name: str = "saving") -> StageReached:
    """A stage of a switch."""
    return StageReached(order.order, name)


# ---- streams ----


def test_streams_run_wait_and_end(tmp_path: Path) -> None:
    """Two run on two sequences, the third waits for the first to end; each client gets its own tokens and numbers."""

    async def script(scene: Scene) -> None:
        clients = [await ask(scene.supervisor, request_of([n, n], 2)) for n in (1, 2, 3)]
        assert [start.stream for start in scene.link.starts()] == [1, 2]
        assert scene.supervisor.status()["queued"] == 1
        scene.link.read(1)
        scene.link.read(2)
        scene.link.report(Step((Drawn(1, A, b"a", 0), Drawn(2, B, b"b", 0)), 4.0))
        scene.link.draw(1, B)
        scene.link.finish(1)
        done = await clients[0].end()
        assert (done.why, done.n_prompt, done.n_predicted, done.generate_ms) == (Why.LENGTH, 2, 2, 1.0)
        assert [start.seq_id for start in scene.link.starts()] == [0, 1, 0]
        scene.link.report(Step((Drawn(3, C, b"c", 0), Drawn(2, 0, b"", 0, is_end=True)), 1.0))
        scene.link.finish(2, "eos")
        scene.link.finish(3, "context")
        assert [(await one.end()).why for one in clients[1:]] == [Why.EOS, Why.CONTEXT]
        assert [one.text for one in clients] == ["ab", "b", "c"]
        assert not scene.link.is_expected

    play(tmp_path, script)


def test_a_text_or_a_chat_becomes_tokens_first(tmp_path: Path) -> None:
    """What the worker makes of it is the prompt; an error and a text without tokens end the stream."""

    async def script(scene: Scene) -> None:
        request = GenerateRequest(messages=({"role": "user", "content": "hi"},), n_predict=1)
        clients = [await ask(scene.supervisor, request)]
        clients += [await ask(scene.supervisor, GenerateRequest(prompt=text)) for text in ("a", "b")]
        orders = [one for one in scene.link.sent if isinstance(one, Tokenize)]
        assert orders[0].messages == ({"role": "user", "content": "hi"},)
        assert (orders[1].text, orders[1].add_special, orders[1].parse_special) == ("a", True, False)
        assert scene.supervisor.status()["queued"] == 3
        scene.link.report(
            Tokenized(orders[0].order, (5, 6)),
            Failed(orders[1].order, Fault.CONFIG, "ConfigInvalid", "no template"),
            Tokenized(orders[2].order, ()),
        )
        ends = [await one.end() for one in clients[1:]]
        assert [(one.why, one.message) for one in ends] == [
            (Why.ERROR, "no template"),
            (Why.ERROR, "the prompt has no token; give some text"),
        ]
        await soon(scene.link.starts)
        (start,) = scene.link.starts()
        assert start.tokens == (5, 6)
        # The seed is fixed here, so that a draw that was lost with its worker is made again.
        assert start.sampler.seed != request.sampler.seed
        scene.link.draw(1, A)
        scene.link.finish(1)
        assert (await clients[0].end()).why is Why.LENGTH

    play(tmp_path, script)


def test_a_stop_text_halts_the_worker(tmp_path: Path) -> None:
    """The client has its end at once; the sequence is free when the worker says so, and holds what was drawn since."""

    async def script(scene: Scene) -> None:
        sampler = request_of([1]).sampler
        client = await ask(scene.supervisor, request_of([1, 2], sampler=type(sampler)(temp=0.0, stop=("bc",))))
        scene.link.draw(1, A, B, C, A)
        done = await client.end()
        assert (done.why, done.n_predicted, client.text) == (Why.STOP, 3, "a")
        assert scene.link.sent[-1] == Halt(1)
        assert scene.supervisor.status()["sequences"][0] == {"seq_id": 0, "n_tokens": 6, "state": "ending"}
        scene.link.finish(1, "halted")
        assert scene.supervisor.status()["sequences"][0]["state"] == "idle"

    play(tmp_path, script)


def test_a_client_that_leaves_frees_its_sequence(tmp_path: Path) -> None:
    """A stream ends wherever it is: while its prompt becomes tokens, while it waits, and while it runs."""

    async def script(scene: Scene) -> None:
        text = await ask(scene.supervisor, GenerateRequest(prompt="x"))
        runs = [await ask(scene.supervisor, request_of([n])) for n in (1, 2, 3)]
        for client in (text, runs[2], runs[0]):
            client.stream.cancel()
            assert (await client.end()).why is Why.CANCELLED
        assert scene.link.sent[-1] == Halt(2)
        order = await scene.order(Tokenize)
        scene.link.report(Tokenized(order.order, (1,)))
        late = await ask(scene.supervisor, request_of([9]))
        assert len(scene.link.starts()) == 2
        scene.link.finish(2, "halted")
        assert scene.link.starts()[-1].tokens == (9,)
        late.stream.cancel()
        runs[1].stream.cancel()

    play(tmp_path, script)


def test_too_many_that_wait_are_refused(tmp_path: Path) -> None:
    """The queue has an end, and what is in it goes on."""

    async def script(scene: Scene) -> None:
        for _ in range(2 + MAX_WAITING):
            await scene.supervisor.generate(request_of([1]))
        with pytest.raises(Busy, match="streams that wait"):
            await scene.supervisor.generate(request_of([1]))

    play(tmp_path, script)


# ---- losses ----


def test_a_stream_goes_on_in_the_next_worker(tmp_path: Path) -> None:
    """Its client hears of a pause; nothing that it has is drawn again, and nothing is left out."""

    async def script(scene: Scene) -> None:
        events = scene.supervisor.subscribe()
        client = await ask(scene.supervisor, request_of([1, 2], 4))
        waits = [await ask(scene.supervisor, request_of([n])) for n in (3, 4)]
        scene.link.read(1)
        scene.link.draw(1, A, B)
        scene.link.die("the worker died by signal 9 (SIGKILL) while serving")
        assert scene.supervisor.state is HostState.RECOVERING
        link = await scene.next_link(2)
        assert link.sent[0] == Open(
            LAYER,
            force=True,
            sequences=(SequenceSnapshot(0, (1, 2, A, B), is_pending=True, sampler=client_sampler(scene, 1)),),
        )
        link.open(recomputed=True)
        await soon(link.starts)
        first = link.starts()[0]
        assert (first.tokens, first.is_pending, first.n_predict) == ((1, 2, A, B), True, 2)
        link.draw(1, C, C)
        link.finish(1)
        assert (await client.end()).n_predicted == 4
        assert client.text == "abcc"
        assert client.kinds() == ["Begun", "Delta", "Paused", "Resumed", "Delta", "Done"]
        assert [start.stream for start in link.starts()] == [1, 2, 3]
        status = scene.supervisor.status()
        assert (status["worker_restarts"], status["recomputed"], status["state"]) == (1, 1, "serving")
        gone, back = await anext(events), await anext(events)
        assert gone == WorkerGone(1001, "the worker died by signal 9 (SIGKILL) while serving")
        assert isinstance(back, SessionRecovered)
        assert (back.mode, back.recomputed) == ("layer", True)
        for one in waits:
            one.stream.cancel()

    play(tmp_path, script)


def client_sampler(scene: Scene, stream: int) -> Any:
    """How a stream draws, with the seed that was fixed for it."""
    return next(start.sampler for link in scene.links for start in link.starts() if start.stream == stream)


def test_orders_that_were_left_behind_are_bounded(tmp_path: Path) -> None:
    """Who asks and hangs up again and again is refused in the end; a switch goes out all the same."""

    async def script(scene: Scene) -> None:
        for _ in range(64):
            asked = asyncio.ensure_future(scene.supervisor.check({"mode": SplitMode.TENSOR}))
            await asyncio.wait({asked}, timeout=0)
            asked.cancel()
        with pytest.raises(Busy, match="64 requests of this kind"):
            await scene.supervisor.check({"mode": SplitMode.TENSOR})
        scene.link.report(Checked((await scene.order(Check)).order, TENSOR))
        again = asyncio.ensure_future(scene.supervisor.check({"mode": SplitMode.TENSOR}))
        await soon(lambda: len([one for one in scene.link.sent if isinstance(one, Check)]) == 65)
        switching = scene.switch()
        await scene.order(Switch)
        switching.cancel()
        again.cancel()

    play(tmp_path, script)


def test_orders_that_end_workers_do_not_park_the_session(tmp_path: Path) -> None:
    """What a client asks for and nobody repeats fails, however often it does so: the session serves the others on."""

    async def script(scene: Scene) -> None:
        for n in range(2, 7):
            asked = asyncio.ensure_future(scene.supervisor.tokenize({"text": "x"}))
            await scene.order(Tokenize)
            scene.link.die("the worker ended")
            with pytest.raises(RequestFailed, match="the session goes on, try again"):
                await asked
            (await scene.next_link(n)).open()
            await soon(lambda: scene.supervisor.state is HostState.SERVING)
        assert scene.supervisor.status()["worker_restarts"] == 5

    play(tmp_path, script)


def test_an_end_that_was_lost_is_not_asked_for_again(tmp_path: Path) -> None:
    """Where all tokens came and only the end did not, the stream ends as soon as a worker serves."""

    async def script(scene: Scene) -> None:
        clients = [await ask(scene.supervisor, request_of([1], 1)), await ask(scene.supervisor, request_of([2]))]
        scene.link.draw(1, A)
        scene.link.report(Step((Drawn(2, 0, b"", 0, is_end=True),), 1.0))
        scene.link.die("the worker ended")
        (await scene.next_link(2)).open()
        assert [(await one.end()).why for one in clients] == [Why.LENGTH, Why.EOS]
        assert scene.link.starts() == []

    play(tmp_path, script)


def test_orders_in_flight_fail_or_are_given_again(tmp_path: Path) -> None:
    """A save, a restore and a check fail clearly; a text is turned into tokens by the next worker."""

    async def script(scene: Scene) -> None:
        text = await ask(scene.supervisor, GenerateRequest(prompt="x"))
        asked = [
            asyncio.ensure_future(scene.supervisor.save(Path("/x/y"))),
            asyncio.ensure_future(scene.supervisor.check({"mode": SplitMode.TENSOR})),
        ]
        await scene.order(Save)
        await scene.order(Check)
        scene.link.die("the worker died")
        for one in asked:
            with pytest.raises(RequestFailed, match=r"failed: the worker died; the session goes on, try again"):
                await one
        with pytest.raises(Busy, match="recovering"):
            await scene.supervisor.switch({"mode": SplitMode.TENSOR})
        with pytest.raises(Busy, match="recovering"):
            await scene.supervisor.restore(Path("/x/y"))
        later = asyncio.ensure_future(scene.supervisor.save(Path("/x/z")))
        link = await scene.next_link(2)
        link.open()
        order = await scene.order(Tokenize)
        link.report(Tokenized(order.order, (1, 2)))
        save = await scene.order(Save)
        link.report(Saved(save.order, 77))
        assert await later == {"path": "/x/z", "bytes": 77, "sequences": 0, "tokens": 0}
        await soon(link.starts)
        text.stream.cancel()

    play(tmp_path, script)


@pytest.mark.parametrize(
    "lie",
    [
        Step((Drawn(9, A, b"a", 0),)),
        Tokenized(99, (1,)),
        Switched(99, {}),
        StageReached(99, "saving"),
        Forgot(99),
        Trial({"status": "switched"}),
        Replaced(99, ()),
        Failed(99, Fault.CONFIG, "x", "y"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_worker_that_lost_count_is_ended(tmp_path: Path, lie: Any) -> None:
    """What cannot be ends the worker; nothing that it says after that counts, and another one goes on."""

    async def script(scene: Scene) -> None:
        client = await ask(scene.supervisor, request_of([1], 2))
        scene.link.draw(1, A)
        scene.link.report(lie)
        scene.link.draw(1, C)
        link = await scene.next_link(2)
        assert any("the worker lost count" in line for line in scene.said)
        link.open()
        await soon(link.starts)
        link.draw(1, B)
        link.finish(1)
        await client.end()
        assert client.text == "ab"

    play(tmp_path, script)


def test_attempts_end_in_a_parked_session(tmp_path: Path) -> None:
    """When nothing opens any more the tokens are on disk, everybody hears where, and it comes back."""

    async def script(scene: Scene) -> None:
        events = scene.supervisor.subscribe()
        client = await ask(scene.supervisor, request_of([1, 2], 9))
        text = await ask(scene.supervisor, GenerateRequest(prompt="x"))
        scene.link.read(1)
        scene.link.draw(1, A, B)
        scene.link.die("the worker died")
        await scene.next_link(2)
        scene.link.die("the worker died again")
        done = await client.end()
        path = tmp_path / "sessions" / "default.parked.safetensors"
        assert done.why is Why.ERROR
        assert str(path) in done.message
        assert str(path) in (await text.end()).message
        parked = carries.read(path).carry
        assert [one.tokens.tolist() for one in parked.sequences] == [[1, 2, A, B]]
        assert (parked.sequences[0].n_past, len(parked.state)) == (3, 0)
        assert isinstance(await anext(events), WorkerGone)
        assert await anext(events) == SessionParked(path, "the worker died; then the worker died again")
        status = scene.supervisor.status()
        assert (status["state"], status["effective"], status["parked_at"]) == ("parked", None, str(path))
        for work in (
            scene.supervisor.generate(request_of([1])),
            scene.supervisor.switch({"mode": SplitMode.TENSOR}),
            scene.supervisor.save(path),
        ):
            with pytest.raises(Parked, match=str(path)):
                await work
        await _come_back(scene, path)

    play(tmp_path, script)


async def _come_back(scene: Scene, path: Path) -> None:
    """Fail to bring a parked session back in three ways, then do it."""
    n = len(scene.links)
    with pytest.raises(RequestFailed, match="could not"):
        await scene.while_it(scene.supervisor.restore(path), lambda: scene.link.die("the worker could not"))
    lost = WorkerLost(1, "died", ())
    with pytest.raises(WorkerLost):
        await scene.while_it(scene.supervisor.restore(path), lambda: scene.link.die("x", lost=lost))
    again = asyncio.ensure_future(scene.supervisor.restore(path))
    await scene.next_link(n + 3)
    scene.link.open()
    order = await scene.order(Restore)
    scene.link.report(Failed(order.order, Fault.CONFIG, "CarryDamaged", "damaged"))
    with pytest.raises(RequestFailed, match="damaged"):
        await again
    assert scene.supervisor.state is HostState.PARKED
    again = asyncio.ensure_future(scene.supervisor.restore(path))
    await scene.next_link(n + 4)
    assert scene.link.sent[0] == Open(LAYER, force=True)
    scene.link.open()
    order = await scene.order(Restore)
    client = await ask(scene.supervisor, request_of([1, 2, A], 1))
    assert scene.link.starts() == []
    scene.link.report(Replaced(order.order, (SequenceSnapshot(0, (1, 2, A)),), recomputed=True, reason="why"))
    assert await again == {
        "path": str(path),
        "sequences": 1,
        "tokens": 3,
        "conversions": [],
        "recomputed": True,
        "reason": "why",
    }
    await soon(scene.link.starts)
    assert scene.supervisor.state is HostState.SERVING
    scene.link.draw(1 + 2, B)
    scene.link.finish(1 + 2)
    assert (await client.end()).why is Why.LENGTH


def test_a_stream_that_kills_workers_does_not_take_the_session_along(tmp_path: Path) -> None:
    """When every attempt dies over the same stream it is ended, with its reason, and the others are served."""

    async def script(scene: Scene) -> None:
        client = await ask(scene.supervisor, request_of([1, 2]))
        scene.link.report(Sealed(SEAL))
        for n in (2, 3):
            scene.link.die("the worker died over it")
            (await scene.next_link(n)).open()
            await soon(scene.link.starts)
        scene.link.die("the worker died over it")
        (await scene.next_link(4)).open()
        done = await client.end()
        assert (done.why, done.message) == (Why.ERROR, "workers were lost over it: the worker died over it")
        await soon(lambda: scene.supervisor.state is HostState.SERVING)
        late = await ask(scene.supervisor, request_of([3], 1))
        scene.link.draw(2, A)
        scene.link.finish(2)
        assert (await late.end()).why is Why.LENGTH

    play(tmp_path, script)


def test_a_stream_over_which_five_workers_died_is_ended(tmp_path: Path) -> None:
    """Also where another stream gets on in between, one that never does is ended some day."""

    async def script(scene: Scene) -> None:
        good, bad = await ask(scene.supervisor, request_of([1])), await ask(scene.supervisor, request_of([2]))
        for n in range(2, 7):
            scene.link.draw(1, A)
            scene.link.die("the worker died")
            (await scene.next_link(n)).open()
            await soon(scene.link.starts)
        assert "5 workers were lost over it" in (await bad.end()).message
        assert len(good.tokens) == 5
        good.stream.cancel()

    play(tmp_path, script)


def test_a_worker_that_dies_as_it_opens_is_one_attempt(tmp_path: Path) -> None:
    """An end that comes right behind the report is seen before anything is given to the dead."""

    async def script(scene: Scene) -> None:
        scene.link.die("the worker died")
        link = await scene.next_link(2)
        link.open()
        link.die("the worker died at once")
        (await scene.next_link(3)).open()
        await soon(lambda: scene.supervisor.state is HostState.SERVING)

    async def with_seal(scene: Scene) -> None:
        scene.link.report(Sealed(SEAL))
        await script(scene)
        assert [link.sent[0].seal for link in scene.links[1:] if isinstance(link.sent[0], Open)] == [SEAL, None]

    play(tmp_path, with_seal)


# ---- switches ----


def test_a_switch_pauses_streams_and_makes_others_wait(tmp_path: Path) -> None:
    """Who runs hears of a pause, who comes waits, a second switch is busy, and all go on in the new placement."""

    async def script(scene: Scene) -> None:
        stages: list[tuple[str, float]] = []
        client = await ask(scene.supervisor, request_of([1], 2))
        scene.link.draw(1, A)
        asked = scene.switch(on_stage=lambda name, share: stages.append((name, share)))
        order = await scene.order(Switch)
        assert order.target == TENSOR
        assert scene.supervisor.status()["state"] == "switching"
        for work in (scene.supervisor.switch({}), scene.supervisor.check({}), scene.supervisor.restore(Path("/x"))):
            with pytest.raises(Busy, match="a switch to tensor"):
                await work
        scene.link.report(stage(order, "checking"), stage(order, "quiescing"))
        assert client.kinds() == ["Begun", "Delta"]
        scene.link.report(stage(order), StageReached(order.order, "placing", 0.5), Sealed(SEAL))
        late = await ask(scene.supervisor, request_of([2], 1))
        assert len(scene.link.starts()) == 1
        scene.link.report(Switched(order.order, outcome(SwitchStatus.SWITCHED, TENSOR)))
        assert (await asked)["status"] == "switched"
        assert stages == [("checking", 0.0), ("quiescing", 0.0), ("saving", 0.0), ("placing", 0.5)]
        assert len(scene.link.starts()) == 2
        assert scene.supervisor.status()["on_trial"]
        scene.link.draw(1, B)
        scene.link.report(Trial(outcome(SwitchStatus.SWITCHED, TENSOR, confirmed=True)))
        scene.link.finish(1)
        scene.link.draw(2, C)
        scene.link.finish(2)
        await client.end()
        await late.end()
        assert client.kinds() == ["Begun", "Delta", "Paused", "Resumed", "Delta", "Done"]
        status = scene.supervisor.status()
        assert (status["effective"], status["requested"], status["last_switch"]["confirmed"]) == (
            "tensor",
            "tensor",
            True,
        )

    play(tmp_path, script)


def test_a_worker_that_dies_in_a_switch_is_fallen_back_from(tmp_path: Path) -> None:
    """The next one opens the old placement with the switch's own seal, and the asker gets the whole reason."""

    async def script(scene: Scene) -> None:
        client = await ask(scene.supervisor, request_of([1], 2))
        scene.link.draw(1, A)
        asked = scene.switch()
        order = await scene.order(Switch)
        scene.link.report(stage(order), Sealed(SEAL), stage(order, "freeing"), stage(order, "placing"))
        scene.link.die("the worker died by signal 6 (SIGABRT) while placing: GGML_ASSERT(x) failed")
        link = await scene.next_link(2)
        opening = link.sent[0]
        assert isinstance(opening, Open)
        assert (opening.placement, opening.seal) == (LAYER, SEAL)
        link.open()
        result = await asked
        assert (result["status"], result["stage"], result["effective"]) == ("fell_back", "placing", "layer")
        assert "signal 6 (SIGABRT) while placing: GGML_ASSERT(x) failed" in result["reason"]
        link.draw(1, B)
        link.finish(1)
        await client.end()
        assert client.text == "ab"
        assert scene.supervisor.status()["last_switch"] == result

    play(tmp_path, script)


def test_a_worker_that_dies_on_trial_is_fallen_back_from(tmp_path: Path) -> None:
    """Who asked has had an outcome; events, log and status say how it went on."""

    async def script(scene: Scene) -> None:
        client = await ask(scene.supervisor, request_of([1], 1))
        asked = scene.switch()
        order = await scene.order(Switch)
        scene.link.report(stage(order), Sealed(SEAL), Switched(order.order, outcome(SwitchStatus.SWITCHED, TENSOR)))
        assert (await asked)["status"] == "switched"
        events = scene.supervisor.subscribe()
        scene.link.die("the worker died")
        link = await scene.next_link(2)
        assert isinstance(link.sent[0], Open)
        assert (link.sent[0].placement, link.sent[0].seal) == (LAYER, SEAL)
        link.open()
        seen = [await anext(events) for _ in range(3)]
        assert [type(one) for one in seen] == [WorkerGone, TrialEnded, SessionRecovered]
        assert isinstance(seen[1], TrialEnded)
        assert (seen[1].outcome["status"], seen[1].outcome["stage"]) == ("fell_back", "trial")
        assert any("was fallen back from" in line for line in scene.said)
        await soon(link.starts)
        link.draw(1, A)
        link.finish(1)
        await client.end()

    play(tmp_path, script)


@pytest.mark.parametrize("is_trial", [False, True])
@pytest.mark.parametrize("is_saved", [False, True])
def test_a_session_that_the_worker_parked_gets_another_worker(tmp_path: Path, is_trial: bool, is_saved: bool) -> None:
    """What one process had no room for another one may have; the file that the first wrote is removed."""
    written = tmp_path / "worker.safetensors"

    async def script(scene: Scene) -> None:
        written.write_bytes(b"x")
        asked = scene.switch()
        order = await scene.order(Switch)
        parked = {**outcome(SwitchStatus.PARKED, None, stage=Stage.PLACING), "parked_at": str(written)}
        scene.link.report(stage(order), Sealed(SEAL))
        if is_trial:
            scene.link.report(Switched(order.order, outcome(SwitchStatus.SWITCHED, TENSOR)), Trial(parked))
        else:
            scene.link.report(Switched(order.order, parked))
        link = await scene.next_link(2)
        if is_saved:
            link.open()
            await soon(lambda: scene.supervisor.state is HostState.SERVING)
        else:
            link.die("the worker died")
            (await scene.next_link(3)).die("the worker died")
            await soon(lambda: scene.supervisor.state is HostState.PARKED)
        result = await asked
        last = scene.supervisor.status()["last_switch"]
        assert last["status"] == ("fell_back" if is_saved else "parked")
        assert result["status"] == ("switched" if is_trial else last["status"])
        assert not written.exists()
        if not is_saved:
            assert last["parked_at"] == scene.supervisor.status()["parked_at"]

    play(tmp_path, script)


def test_a_cancel_is_passed_on(tmp_path: Path) -> None:
    """Without a switch nobody is cancelled; a switch whose worker then dies was cancelled, not failed."""

    async def script(scene: Scene) -> None:
        scene.supervisor.cancel_switch()
        assert scene.link.n_cancels == 0
        asked = scene.switch()
        order = await scene.order(Switch)
        scene.supervisor.cancel_switch()
        assert scene.link.n_cancels == 1
        scene.link.report(Switched(order.order, outcome(SwitchStatus.CANCELLED, LAYER, stage=Stage.CHECKING)))
        assert (await asked)["status"] == "cancelled"
        asked = scene.switch()
        await soon(lambda: scene.supervisor.status()["stage"] is not None)
        scene.supervisor.cancel_switch()
        scene.link.die("the worker died")
        (await scene.next_link(2)).open()
        assert (await asked)["status"] == "cancelled"

    play(tmp_path, script)


def test_a_switch_waits_so_long_for_its_boundary(tmp_path: Path) -> None:
    """One whose boundary does not come in time after its check was refused; one that has it goes on."""

    async def script(scene: Scene) -> None:
        asked = scene.switch(timeout_s=0.0)
        order = await scene.order(Switch)
        scene.link.report(stage(order, "checking"), stage(order, "quiescing"))
        await soon(lambda: scene.link.n_cancels)
        scene.link.report(Switched(order.order, outcome(SwitchStatus.CANCELLED, LAYER, stage=Stage.QUIESCING)))
        result = await asked
        assert (result["status"], result["reasons"][0]["code"]) == ("refused", "busy")
        asked = scene.switch(timeout_s=3600.0)
        await soon(lambda: scene.supervisor.status()["stage"] is not None)
        order = await scene.order(Switch)
        scene.link.report(stage(order))
        assert scene.link.n_cancels == 1
        scene.link.report(Switched(order.order, outcome(SwitchStatus.REFUSED, LAYER, stage=Stage.CHECKING)))
        assert (await asked)["reason"] == "why"

    play(tmp_path, script)


def test_a_switch_that_the_worker_cannot_take_is_over(tmp_path: Path) -> None:
    """Its error is the asker's, and the next switch is not busy with it."""

    async def script(scene: Scene) -> None:
        asked = scene.switch()
        order = await scene.order(Switch)
        scene.link.report(Failed(order.order, Fault.BUSY, "Busy", "not now"))
        with pytest.raises(RequestFailed, match="not now"):
            await asked
        assert scene.supervisor.state is HostState.SERVING

    play(tmp_path, script)


def test_a_switch_goes_on_without_its_asker(tmp_path: Path) -> None:
    """Whoever stops waiting does not stop it, and events show its end."""

    async def script(scene: Scene) -> None:
        events = scene.supervisor.subscribe()
        asked = scene.switch()
        order = await scene.order(Switch)
        asked.cancel()
        scene.link.report(Switched(order.order, outcome(SwitchStatus.SWITCHED, TENSOR, confirmed=True)))
        ended = await anext(events)
        assert isinstance(ended, SwitchEnded)
        assert scene.supervisor.status()["effective"] == "tensor"

    play(tmp_path, script)


def test_a_check_tells_what_is_known(tmp_path: Path) -> None:
    """The worker's findings, the modes, and the time that such a switch has taken before."""

    async def script(scene: Scene) -> None:
        asked = asyncio.ensure_future(scene.supervisor.check({"mode": SplitMode.TENSOR}, SwitchOptions(force=True)))
        order = await scene.order(Check)
        assert (order.target, order.options) == (TENSOR, SwitchOptions(force=True))
        reason = {"code": "c", "text": "t"}
        scene.link.report(Checked(order.order, TENSOR, reasons=(reason,), conversions=("x",), state_bytes=5))
        found = await asked
        assert (found["effective"], found["requested"], found["reasons"], found["expected_s"]) == (
            "layer",
            "tensor",
            [reason],
            None,
        )

    play(tmp_path, script)


def test_more_sequences_come_with_a_placement(tmp_path: Path) -> None:
    """After a switch to more sequences more streams run."""

    async def script(scene: Scene) -> None:
        clients = [await ask(scene.supervisor, request_of([n])) for n in range(3)]
        assert len(scene.link.starts()) == 2
        asked = scene.switch({"n_seq_max": 4})
        order = await scene.order(Switch)
        wide = LAYER.changed(n_seq_max=4)
        done = {**outcome(SwitchStatus.SWITCHED, TENSOR), "effective_placement": wide.to_json()}
        scene.link.report(Switched(order.order, done))
        await asked
        assert [start.seq_id for start in scene.link.starts()] == [0, 1, 2]
        for client in clients:
            client.stream.cancel()

    play(tmp_path, script)


# ---- restore, start and stop ----


def test_a_restore_has_the_session_for_itself(tmp_path: Path) -> None:
    """Streams make it wait; streams that come meanwhile wait for it; a second one is busy."""

    async def script(scene: Scene) -> None:
        client = await ask(scene.supervisor, request_of([1]))
        with pytest.raises(Busy, match="1 streams"):
            await scene.supervisor.restore(Path("/x"))
        client.stream.cancel()
        scene.link.finish(1, "halted")
        asked = asyncio.ensure_future(scene.supervisor.restore(Path("/x")))
        order = await scene.order(Restore)
        late = await ask(scene.supervisor, request_of([7, 8], 1))
        with pytest.raises(Busy, match="a restore"):
            await scene.supervisor.restore(Path("/x"))
        assert len(scene.link.starts()) == 1
        scene.link.report(Replaced(order.order, (SequenceSnapshot(1, (7, 8, 9)),)))
        assert (await asked)["tokens"] == 3
        await soon(lambda: len(scene.link.starts()) == 2)
        assert scene.link.starts()[-1].seq_id == 1
        late.stream.cancel()

    play(tmp_path, script)


@pytest.mark.parametrize("can_save", [True, False])
def test_stopping_saves_and_ends_streams(tmp_path: Path, can_save: bool) -> None:
    """Streams end clearly; the worker saves, or the supervisor writes the tokens; a second stop waits for the first."""

    async def script(scene: Scene) -> None:
        client = await ask(scene.supervisor, request_of([1, 2]))
        queued = [await ask(scene.supervisor, request_of([n])) for n in (3, 4)]
        scene.link.draw(1, A)
        stopping = asyncio.ensure_future(scene.supervisor.stop())
        order = await scene.order(Save)
        assert [(await one.end()).why for one in (client, *queued)] == [Why.ERROR] * 3
        with pytest.raises(Busy, match="its end"):
            await scene.supervisor.generate(request_of([1]))
        path = tmp_path / "sessions" / "default.safetensors"
        assert order.path == path
        if can_save:
            scene.link.report(Saved(order.order, 5))
        else:
            scene.link.die("the worker died")
        assert await stopping == {"path": str(path), "reason": ""}
        assert await scene.supervisor.stop() == {"path": str(path), "reason": ""}
        if not can_save:
            assert [one.tokens.tolist() for one in carries.read(path).carry.sequences] == [[1, 2, A]]

    play(tmp_path, script)


def test_stopping_while_recovering_writes_what_it_holds(tmp_path: Path) -> None:
    """The worker that is being opened is ended, and nothing of the session is lost."""

    async def script(scene: Scene) -> None:
        client = await ask(scene.supervisor, request_of([1, 2]))
        scene.link.draw(1, A)
        scene.link.die("the worker died")
        await scene.next_link(2)
        saved = await scene.supervisor.stop()
        assert (await client.end()).message == "the session is being stopped"
        assert [one.tokens.tolist() for one in carries.read(Path(saved["path"])).carry.sequences] == [[1, 2, A]]

    play(tmp_path, script)


def test_a_session_that_cannot_be_saved_goes_on(tmp_path: Path) -> None:
    """A place that is not good is refused before the worker is asked; streams and the switch under way go on."""
    (tmp_path / "sessions").write_text("a file where the folder should be")

    async def script(scene: Scene) -> None:
        client = await ask(scene.supervisor, request_of([1, 2], 2))
        scene.link.draw(1, A)
        switching = scene.switch()
        order = await scene.order(Switch)
        with pytest.raises(Refused, match=r"could not be saved as .*default\.safetensors: .* stop --force") as caught:
            await scene.supervisor.stop(force=False)
        assert [one.code for one in caught.value.reasons] == ["cannot-be-saved"]
        assert (scene.link.n_cancels, [one for one in scene.link.sent if isinstance(one, Save)]) == (0, [])
        scene.link.report(Switched(order.order, outcome(SwitchStatus.SWITCHED, TENSOR)))
        assert (await switching)["status"] == "switched"
        scene.link.draw(1, A)
        scene.link.finish(1)
        assert (await client.end()).why is Why.LENGTH
        assert scene.supervisor.state is HostState.SERVING
        stopping = asyncio.ensure_future(scene.supervisor.stop())
        scene.link.report(Failed((await scene.order(Save)).order, Fault.REFUSED, "CarryNotWritten", "no such place"))
        ended = await stopping
        assert ended["path"] is None
        assert "Not a directory" in ended["reason"]

    play(tmp_path, script)


def test_a_save_that_fails_leaves_the_session_running(tmp_path: Path) -> None:
    """Where the place is good and the worker cannot write all of it, the streams go on; the next stop saves."""

    async def script(scene: Scene) -> None:
        client = await ask(scene.supervisor, request_of([1, 2], 2))
        scene.link.draw(1, A)
        stopping = asyncio.ensure_future(scene.supervisor.stop(force=False))
        order = await scene.order(Save)
        scene.link.report(Failed(order.order, Fault.REFUSED, "CarryNotWritten", "No space left on device"))
        with pytest.raises(Refused, match="No space left on device"):
            await stopping
        scene.link.draw(1, A)
        scene.link.finish(1)
        assert (await client.end()).why is Why.LENGTH
        stopping = asyncio.ensure_future(scene.supervisor.stop(force=False))
        await soon(lambda: len([one for one in scene.link.sent if isinstance(one, Save)]) == 2)
        scene.link.report(Saved((await scene.order(Save)).order, 5))
        # Nothing came since: it is saved once.
        assert await stopping == {"path": str(tmp_path / "sessions" / "default.safetensors"), "reason": ""}

    play(tmp_path, script)


def test_what_came_while_it_was_saved_is_saved_too(tmp_path: Path) -> None:
    """Streams go on until the save has succeeded; then they end, and the last tokens are saved with the rest."""

    async def script(scene: Scene) -> None:
        client = await ask(scene.supervisor, request_of([1, 2]))
        scene.link.draw(1, A)
        stopping = asyncio.ensure_future(scene.supervisor.stop(force=False))
        order = await scene.order(Save)
        scene.link.draw(1, B)
        assert client.done is None
        scene.link.report(Saved(order.order, 5))
        await soon(lambda: len([one for one in scene.link.sent if isinstance(one, Save)]) == 2)
        assert (await client.end()).why is Why.ERROR
        scene.link.report(Saved((await scene.order(Save)).order, 6))
        assert (await stopping)["reason"] == ""

    play(tmp_path, script)


def test_a_session_that_could_not_be_parked_is_written_when_it_ends(tmp_path: Path) -> None:
    """Parked in no file it is still held: a stop is refused while it has no place, and writes it once it has one."""
    place = tmp_path / "sessions"
    place.write_text("a file where the folder should be")

    async def script(scene: Scene) -> None:
        client = await ask(scene.supervisor, request_of([1, 2]))
        scene.link.draw(1, A)
        while client.done is None:
            scene.link.die("the worker died")
            await soon(lambda: scene.link.end is None or client.done is not None)
        with pytest.raises(Refused, match="Not a directory"):
            await scene.supervisor.stop(force=False)
        place.unlink()
        ended = await scene.supervisor.stop(force=False)
        assert [one.tokens.tolist() for one in carries.read(Path(ended["path"])).carry.sequences] == [[1, 2, A]]

    play(tmp_path, script)


def test_a_host_says_at_its_start_that_it_cannot_save(tmp_path: Path) -> None:
    """The folder is looked at before anything is loaded; a good one is not mentioned."""

    def warnings() -> list[str]:
        said: list[str] = []

        async def script(scene: Scene) -> None:
            said.extend(line for line in scene.said if "warning" in line)

        play(tmp_path, script)
        return said

    assert warnings() == []
    place = tmp_path / "sessions"
    place.rmdir()
    place.write_text("a file where the folder should be")
    (warned,) = warnings()
    assert "will not be saved when it ends" in warned
    assert f"{place}/default.safetensors: Not a directory" in warned


def test_an_empty_session_leaves_no_file(tmp_path: Path) -> None:
    """Where nothing is held nothing is saved."""

    async def script(scene: Scene) -> None:
        assert await scene.supervisor.stop(force=False) == {"path": None, "reason": ""}
        assert list((tmp_path / "sessions").iterdir()) == []

    play(tmp_path, script)


@pytest.mark.parametrize(
    ("end", "error"),
    [
        ({"failure": Failure(Fault.MODEL, "BadModelFile", "it is cut short")}, RequestFailed),
        ({"lost": WorkerLost(1, "died by signal 6 (SIGABRT)", ())}, WorkerLost),
        ({}, RequestFailed),
    ],
)
def test_a_session_that_cannot_be_opened_is_an_error(tmp_path: Path, end: dict[str, Any], error: type) -> None:
    """Whatever its first worker dies of is raised, and nothing is left behind."""

    async def run() -> None:
        scene = Scene(tmp_path)
        with pytest.raises(error) as caught:
            await scene.while_it(scene.supervisor.start(), lambda: scene.link.die("the worker died", **end))
        if "failure" in end:
            assert isinstance(caught.value, RequestFailed)
            assert (caught.value.fault, caught.value.name, str(caught.value)) == (
                Fault.MODEL,
                "BadModelFile",
                "it is cut short",
            )
        assert scene.supervisor.state is HostState.STOPPING

    asyncio.run(run())


def test_a_saved_session_is_offered(tmp_path: Path) -> None:
    """A start without --resume names the newest file that its name has."""
    (tmp_path / "sessions").mkdir()
    (tmp_path / "sessions" / "default.safetensors").write_bytes(b"x")

    async def script(scene: Scene) -> None:
        assert any("default.safetensors" in line and "--resume" in line for line in scene.said)

    play(tmp_path, script)


def test_checkpoints_come_while_something_changes(tmp_path: Path) -> None:
    """A session is saved again only after it has changed, and one that cannot be saved is logged and tried again."""

    async def script(scene: Scene) -> None:
        client = await ask(scene.supervisor, request_of([1]))
        first = await scene.order(Save)
        scene.link.report(Failed(first.order, Fault.INTERNAL, "CarryNotWritten", "no room"))
        await soon(lambda: any("no room" in line for line in scene.said))
        await soon(lambda: sum(isinstance(one, Save) for one in scene.link.sent) == 2)
        second = await scene.order(Save)
        scene.link.report(Saved(second.order, 5))
        scene.link.draw(1, A)
        await soon(lambda: sum(isinstance(one, Save) for one in scene.link.sent) == 3)
        client.stream.cancel()

    play(tmp_path, script, checkpoint_s=0.001)


def test_a_resumed_session_begins_with_its_file(tmp_path: Path) -> None:
    """--resume restores before anybody is served; a file that cannot be used is an error."""

    async def run() -> None:
        scene = Scene(tmp_path, resume=Path("/x/y"))
        starting = asyncio.ensure_future(scene.supervisor.start())
        await scene.next_link(1)
        scene.link.open()
        order = await scene.order(Restore)
        assert order.path == Path("/x/y")
        scene.link.report(Replaced(order.order, (SequenceSnapshot(0, (1, 2)),)))
        await asyncio.wait_for(starting, GUARD_S)
        assert scene.supervisor.status()["sequences"][0]["n_tokens"] == 2
        await scene.supervisor.stop(save=False)

    asyncio.run(run())


def test_silence_counts_only_while_something_is_owed(tmp_path: Path) -> None:
    """An idle worker may be silent; one with a stream or an order may not."""

    async def script(scene: Scene) -> None:
        assert not scene.link.is_expected
        client = await ask(scene.supervisor, request_of([1], 1))
        assert scene.link.is_expected
        scene.link.draw(1, A)
        assert scene.link.is_expected
        scene.link.finish(1)
        assert isinstance(await client.end(), Done)
        assert not scene.link.is_expected
        saving = asyncio.ensure_future(scene.supervisor.save(Path("/x")))
        order = await scene.order(Save)
        assert scene.link.is_expected
        assert scene.link.n_deadlines > 1.0
        scene.link.report(Saved(order.order, 1))
        await saving
        assert not scene.link.is_expected

    play(tmp_path, script)


def test_a_client_of_many_tokens_reads_at_its_own_pace(tmp_path: Path) -> None:
    """Events lie there for a client until it takes them, also after the stream is over."""

    async def script(scene: Scene) -> None:
        client = Client(await scene.supervisor.generate(request_of([1], 500)))
        scene.link.draw(1, *[A] * 500)
        scene.link.finish(1)
        await client.read()
        assert client.text == "a" * 500

    play(tmp_path, script)
