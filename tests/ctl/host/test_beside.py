"""A switch that a second worker makes beside the first: led over scripted workers, and played on real processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from splitctl.carry.seal import Seal, Segment
from splitctl.errors import Busy
from splitctl.host import manager
from splitctl.host.events import SwitchEnded, TrialEnded
from splitctl.host.supervisor import HostState
from splitctl.ipc import orders
from splitctl.ipc.ahead import CopiedAhead, CopyAhead, TakeAhead, TookAhead
from splitctl.ipc.jobs import Failure, Fault
from splitctl.outcome import Route, SwitchOptions
from splitctl.placement import SplitMode
from tests.ctl.host.test_manager import A, B, Scene
from tests.ctl.hosting import GUARD_S, LAYER, TENSOR, Client, ScriptedLink, ask, request_of, soon

SEAL = Seal(0, 11, "cc" * 16, 4096, 21, "dd" * 16, LAYER)
SEGMENTS = (Segment(2, 0, 7, "ee" * 16), Segment(3, 4096, 9, "ff" * 16))
BESIDE = SwitchOptions(via=Route.BESIDE)


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every worker be a scripted one."""
    monkeypatch.setattr(manager, "WorkerLink", ScriptedLink)
    monkeypatch.setattr(ScriptedLink, "links", [], raising=False)


class Beside:
    """A switch beside, and its two workers, step by step."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.first = scene.link
        self.asked: asyncio.Future[dict[str, Any]] | None = None
        self.number = 0

    @property
    def second(self) -> ScriptedLink:
        """The worker that stands by."""
        return self.scene.links[1]

    async def check(self, options: SwitchOptions = BESIDE) -> None:
        """Ask for it, and let the first worker say that the target fits."""
        self.asked = self.scene.switch(options=options)
        self.number = (await self.scene.order(orders.Switch, self.first)).order
        self.first.report(orders.FitsBeside(self.number, TENSOR, 2.0))
        await self.scene.next_link(2)

    async def place(self) -> None:
        """Let the second worker build the target, and the first be told to copy idle sequences."""
        await self.check()
        self.second.report(orders.StageReached(self.number, "building"))
        self.second.open()
        await self.scene.order(CopyAhead, self.first)

    async def copy(self) -> None:
        """Go on to where the first worker has copied some, and the second is told to take them."""
        await self.place()
        self.first.report(orders.Unsealed(1), CopiedAhead(self.number, 1, SEGMENTS))
        await self.scene.order(TakeAhead, self.second)

    async def nothing_ahead(self) -> None:
        """Let the first worker have no idle sequence, and be told to seal."""
        await self.scene.order(CopyAhead, self.first)
        self.first.report(CopiedAhead(self.number))
        await self.scene.order(orders.HandOver, self.first)

    async def open(self) -> None:
        """Go on to where nothing was copied ahead, and the first worker is told to seal."""
        await self.place()
        await self.nothing_ahead()

    def seal(self, **more: Any) -> None:
        """Let the first worker seal the session."""
        self.first.report(
            orders.StageReached(self.number, "saving"),
            orders.Unsealed(0),
            orders.StageReached(self.number, "sealing"),
            orders.Sealed(SEAL),
            orders.HandedOver(self.number, 0.0, {"saving": 1.0, "sealing": 2.0}, 1, 3, **more),
        )

    async def hand(self) -> None:
        """Go on to where the second worker is told to take over."""
        await self.open()
        self.seal()
        await self.scene.order(orders.TakeOver, self.second)
        self.second.report(orders.StageReached(self.number, "restoring"), orders.Unsealed(1))

    async def take(self) -> dict[str, Any]:
        """Go the whole way; gives the outcome."""
        await self.hand()
        times = {"placing": 5.0, "building": 6.0, "restoring": 3.0, "proving": 4.0}
        self.second.report(orders.TookOver(self.number, times, weight_bytes=7))
        return await self.outcome()

    async def outcome(self) -> dict[str, Any]:
        """Wait for the outcome."""
        assert self.asked is not None
        return await asyncio.wait_for(self.asked, GUARD_S)

    async def is_off(self, status: str = "fell_back") -> dict[str, Any]:
        """Wait for a switch that came to nothing: the second worker is gone, and the first serves as before."""
        outcome = await self.outcome()
        assert (outcome["status"], outcome["effective"], outcome["via"]) == (status, "layer", "beside")
        supervisor = self.scene.supervisor
        assert supervisor.state is HostState.SERVING
        assert self.first.sent.count(orders.GoOn(self.number)) == 1
        assert self.second.end is not None
        found = supervisor.status()
        assert (found["worker_pid"], found["standby_pid"], found["worker_restarts"]) == (self.first.pid, None, 0)
        return outcome


def play(folder: Path, script: Callable[[Beside], Awaitable[None]], **more: Any) -> None:
    """Play a script on a session that serves, and end it; no worker is left."""

    async def run() -> None:
        scene = Scene(folder, **more)
        await scene.start()
        async with asyncio.timeout(GUARD_S):
            await script(Beside(scene))
            await scene.supervisor.stop(save=False)
        assert all(link.end is not None for link in scene.links)

    asyncio.run(run())


async def streaming(scene: Scene) -> Client:
    """A client whose stream has two tokens, in the worker of the moment."""
    client = await ask(scene.supervisor, request_of([1, 2], 9))
    scene.link.read(1)
    scene.link.draw(1, A, B)
    await client.has(2)
    return client


# ---- the way ----


def test_streams_go_on_in_the_second_worker(tmp_path: Path) -> None:
    """They are drawn by the first until it has sealed, pause once, and are confirmed by the second's first step."""

    async def script(beside: Beside) -> None:
        scene = beside.scene
        client = await streaming(scene)
        events = scene.supervisor.subscribe()
        await beside.open()
        opening = beside.second.sent[0]
        assert opening == orders.Open(TENSOR, force=True, standby_for=beside.number)
        beside.first.draw(1, A)
        await client.has(3)
        assert "Paused" not in client.kinds()
        status = scene.supervisor.status()
        assert (status["state"], status["stage"]) == ("switching", "quiescing")
        assert (status["worker_pid"], status["standby_pid"]) == (beside.first.pid, beside.second.pid)
        beside.seal()
        taking = await scene.order(orders.TakeOver, beside.second)
        assert taking == orders.TakeOver(beside.number, SEAL, BESIDE)
        assert client.kinds()[-1] == "Paused"
        times = {"placing": 5.0, "building": 6.0, "restoring": 3.0, "proving": 4.0}
        beside.second.report(orders.Unsealed(1), orders.TookOver(beside.number, times, weight_bytes=7))
        outcome = await beside.outcome()
        assert (outcome["status"], outcome["via"], outcome["confirmed"]) == ("switched", "beside", False)
        assert outcome["stages_ms"] == {
            "checking": 2.0, "quiescing": 0.0, "saving": 1.0, "sealing": 2.0, "freeing": None,
            "switching_natively": None, **times
        }  # fmt: skip
        assert (outcome["state_bytes"], outcome["weight_bytes"]) == (11, 7)
        assert (outcome["n_sequences"], outcome["n_tokens"]) == (1, 3)
        assert 0.0 < outcome["total_ms"] < outcome["pause_ms"]  # the scripted worker says that it stood since 0
        (start,) = beside.second.starts()
        assert (start.tokens, start.is_pending, start.n_predict) == ((1, 2, A, B, A), True, 6)
        assert beside.first.end is None
        beside.second.draw(1, B)
        beside.second.report(orders.FirstStep(beside.number))
        await soon(lambda: beside.first.end)
        await client.has(4)
        assert client.kinds().count("Paused") == client.kinds().count("Resumed") == 1
        assert client.tokens == [A, B, A, B]
        kinds = {}
        async for event in events:
            kinds[type(event)] = event
            if isinstance(event, TrialEnded):
                break
        assert kinds[SwitchEnded].outcome["confirmed"] is False
        assert kinds[TrialEnded].outcome["confirmed"] is True
        status = scene.supervisor.status()
        assert (status["effective"], status["worker_pid"], status["on_trial"]) == ("tensor", beside.second.pid, False)
        assert (status["worker_restarts"], status["switches"]["ended"]) == (0, {"switched": 1})
        client.stream.cancel()

    play(tmp_path, script)


def test_an_idle_session_lets_the_first_worker_go_at_once(tmp_path: Path) -> None:
    """Nobody would show soon whether the second can step: it is on trial, and its seal is there to go back to."""

    async def script(beside: Beside) -> None:
        outcome = await beside.take()
        assert outcome["status"] == "switched"
        await soon(lambda: beside.first.end)
        assert beside.scene.supervisor.status()["on_trial"]
        beside.second.die("the worker died by signal 9 (SIGKILL)")
        third = await beside.scene.next_link(3)
        assert third.sent[0] == orders.Open(LAYER, force=True, seal=SEAL)
        third.open()
        await soon(lambda: beside.scene.supervisor.state is HostState.SERVING)
        last = beside.scene.supervisor.status()["last_switch"]
        assert (last["status"], last["effective"], last["stage"]) == ("fell_back", "layer", "trial")

    play(tmp_path, script)


def test_orders_wait_for_the_second_worker(tmp_path: Path) -> None:
    """What is asked while the session is handed over goes to whoever has it then, and what was left to it as well."""

    async def script(beside: Beside) -> None:
        scene = beside.scene
        text = asyncio.ensure_future(scene.supervisor.tokenize({"text": "a"}))
        await scene.order(orders.Tokenize, beside.first)
        await beside.open()
        client = await ask(scene.supervisor, request_of([5]))
        late = asyncio.ensure_future(scene.supervisor.tokenize({"text": "b"}))
        with pytest.raises(Busy, match="a switch to tensor"):
            await scene.supervisor.switch({"mode": SplitMode.TENSOR})
        beside.seal()
        await scene.order(orders.TakeOver, beside.second)
        assert not beside.first.starts()
        beside.second.report(orders.TookOver(beside.number))
        await beside.outcome()
        both = [one for one in beside.second.sent if isinstance(one, orders.Tokenize)]
        assert [one.text for one in both] == ["a", "b"]
        beside.first.report(orders.Tokenized(both[0].order, (9,)))
        beside.second.report(*(orders.Tokenized(one.order, (1,)) for one in both))
        assert [(await one).tokens for one in (text, late)] == [(1,), (1,)]
        assert [start.tokens for start in beside.second.starts()] == [(5,)]
        client.stream.cancel()

    play(tmp_path, script)


def test_a_worker_that_goes_in_place_is_followed_as_ever(tmp_path: Path) -> None:
    """Nobody asks for a second worker where the request says so, and an auto one may come to it too."""

    async def script(beside: Beside) -> None:
        for route in (Route.IN_PLACE, Route.AUTO):
            asked = beside.scene.switch(options=SwitchOptions(via=route))
            await soon(lambda: beside.scene.supervisor.status()["stage"] is not None)
            order = await beside.scene.order(orders.Switch)
            assert order.may_be_beside is (route is Route.AUTO)
            beside.first.report(orders.Switched(order.order, {**REFUSED, "via_reason": "no room"}))
            assert (await asked)["via_reason"] == "no room"
        assert len(beside.scene.links) == 1

    play(tmp_path, script)


REFUSED: dict[str, Any] = {
    "status": "refused",
    "requested": "tensor",
    "effective": "layer",
    "requested_placement": TENSOR.to_json(),
    "effective_placement": LAYER.to_json(),
    "reason": "why",
}


# ---- the second worker fails ----


def _dies(link: ScriptedLink) -> None:
    link.die("the worker died by signal 9 (SIGKILL) while placing", was_killed=True)


def _gives_up(link: ScriptedLink) -> None:
    failure = Failure(Fault.MODEL, "CallFailed", "no memory")
    link.die("the worker gave up: no memory", failure=failure)


@pytest.mark.parametrize("ends", [_dies, _gives_up])
def test_a_second_worker_that_cannot_open_costs_nothing(tmp_path: Path, ends: Callable[[ScriptedLink], None]) -> None:
    """The first one never stopped: its streams were not paused, and the outcome names the stage and the reason."""

    async def script(beside: Beside) -> None:
        client = await streaming(beside.scene)
        await beside.check()
        beside.second.report(orders.StageReached(beside.number, "building"))
        ends(beside.second)
        outcome = await beside.is_off()
        assert (outcome["stage"], outcome["reason"].startswith("the second worker ")) == ("building", True)
        assert len(beside.first.starts()) == 1
        beside.first.draw(1, A)
        await client.has(3)
        assert "Paused" not in client.kinds()
        client.stream.cancel()

    play(tmp_path, script)


@pytest.mark.parametrize("is_first_slow", [False, True])
def test_a_second_worker_that_is_lost_at_the_boundary_gives_the_streams_back(
    tmp_path: Path, is_first_slow: bool
) -> None:
    """Before or after the first worker has sealed, its streams are started again where they stood."""

    async def script(beside: Beside) -> None:
        client = await streaming(beside.scene)
        if is_first_slow:
            await beside.open()
            _dies(beside.second)
            beside.seal()
        else:
            await beside.hand()
            _dies(beside.second)
        outcome = await beside.is_off()
        assert outcome["stage"] == ("quiescing" if is_first_slow else "restoring")
        assert [start.tokens for start in beside.first.starts()] == [(1, 2), (1, 2, A, B)]
        beside.first.draw(1, A)
        await client.has(3)
        assert client.tokens == [A, B, A]
        client.stream.cancel()

    play(tmp_path, script)


def test_a_state_that_is_not_taken_or_not_proved_is_fallen_back_from(tmp_path: Path) -> None:
    """The second worker says so itself, and is ended."""

    async def script(beside: Beside) -> None:
        client = await streaming(beside.scene)
        await beside.hand()
        beside.second.report(orders.StageReached(beside.number, "proving"))
        beside.second.report(orders.Failed(beside.number, Fault.INTERNAL, "StateUnsound", "it does not read back"))
        outcome = await beside.is_off()
        assert (outcome["stage"], outcome["reason"]) == ("proving", "it does not read back")
        assert len(beside.first.starts()) == 2
        client.stream.cancel()

    play(tmp_path, script)


@pytest.mark.parametrize(
    "report",
    [
        orders.Step((), 1.0),
        orders.StageReached(99, "placing"),
        orders.StageReached(1, "nowhere"),
        orders.TookOver(1),
    ],
)
def test_a_second_worker_that_says_the_impossible_is_ended(tmp_path: Path, report: orders.Report) -> None:
    """It is not believed any more, and the first one goes on."""

    async def script(beside: Beside) -> None:
        await beside.check()
        beside.second.report(report)
        await beside.is_off()

    play(tmp_path, script)


def test_a_second_worker_that_opens_elsewhere_is_ended(tmp_path: Path) -> None:
    """A placement of another mode than was asked for is no switch."""

    async def script(beside: Beside) -> None:
        await beside.check()
        beside.second.open(LAYER)
        await beside.nothing_ahead()
        beside.seal()
        await beside.scene.order(orders.TakeOver, beside.second)
        beside.second.report(orders.TookOver(beside.number))
        assert "requested mode" in (await beside.is_off())["reason"]

    play(tmp_path, script)


def test_a_second_worker_that_is_lost_before_its_first_step_gives_the_session_back(tmp_path: Path) -> None:
    """The first worker serves again, with what the second has drawn and delivered; the outcome is that of a trial."""

    async def script(beside: Beside) -> None:
        client = await streaming(beside.scene)
        waits = await ask(beside.scene.supervisor, request_of([7, 8], 5))
        beside.first.read(2)
        await beside.take()
        # It draws from logits that came with the state, which is no decode.
        beside.second.draw(2, A)
        await waits.has(1)
        beside.second.die("the worker gave up: the first decode after the switch failed: NaN")
        await soon(lambda: len(beside.first.starts()) == 4)
        assert {start.stream: start.tokens for start in beside.first.starts()} == {1: (1, 2, A, B), 2: (7, 8, A)}
        status = beside.scene.supervisor.status()
        assert (status["state"], status["effective"], status["worker_pid"]) == ("serving", "layer", beside.first.pid)
        assert (status["worker_restarts"], status["recomputed"], status["on_trial"]) == (0, 0, False)
        last = status["last_switch"]
        assert (last["status"], last["effective"], last["stage"]) == ("fell_back", "layer", "trial")
        assert "the first decode after the switch failed" in last["reason"]
        assert status["switches"]["ended"] == {"fell_back": 1}
        beside.first.draw(1, A)
        await client.has(3)
        for one in (client, waits):
            one.stream.cancel()

    play(tmp_path, script)


def test_a_second_worker_that_is_lost_later_is_recovered_from_like_any_other(tmp_path: Path) -> None:
    """After its first step the session is at home in the target, and begins with the seal."""

    async def script(beside: Beside) -> None:
        client = await streaming(beside.scene)
        await beside.take()
        beside.second.draw(1, A)
        beside.second.report(orders.FirstStep(beside.number))
        beside.second.die("the worker died")
        third = await beside.scene.next_link(3)
        opening = third.sent[0]
        assert isinstance(opening, orders.Open)
        assert (opening.placement, opening.seal) == (TENSOR, SEAL)
        assert opening.sequences[0].tokens == (1, 2, A, B, A)
        assert beside.first.end is not None
        third.open()
        client.stream.cancel()
        await soon(lambda: beside.scene.supervisor.state is HostState.SERVING)

    play(tmp_path, script)


# ---- the first worker fails ----


@pytest.mark.parametrize("when", ["loading", "copying", "copied", "saving", "handed"])
def test_a_first_worker_that_is_lost_ends_the_second(tmp_path: Path, when: str) -> None:
    """The usual recovery, in the old placement, with what had been sealed by then; no second worker is there."""

    async def script(beside: Beside) -> None:
        client = await streaming(beside.scene)
        way = {"loading": beside.check, "copying": beside.place, "copied": beside.copy, "saving": beside.open}
        await way.get(when, beside.hand)()
        if when == "saving":
            beside.first.report(orders.StageReached(beside.number, "saving"))
        beside.first.die("the worker died by signal 11 (SIGSEGV)")
        third = await beside.scene.next_link(3)
        assert beside.second.end is not None
        opening = third.sent[0]
        assert isinstance(opening, orders.Open)
        assert (opening.placement, opening.seal) == (LAYER, SEAL if when == "handed" else None)
        third.open()
        outcome = await beside.outcome()
        copying = dict.fromkeys(("copying", "copied"), "building")
        stage = {"loading": "placing", "saving": "saving", "handed": "restoring", **copying}[when]
        assert (outcome["status"], outcome["stage"], outcome["via"]) == ("fell_back", stage, "beside")
        assert "SIGSEGV" in outcome["reason"]
        await soon(third.starts)
        assert third.starts()[0].tokens == (1, 2, A, B)
        assert beside.scene.supervisor.status()["worker_restarts"] == 1
        client.stream.cancel()

    play(tmp_path, script)


def test_a_first_worker_that_is_lost_after_the_swap_changes_nothing(tmp_path: Path) -> None:
    """It had given everything; without it a lost trial is recovered from, in the old placement."""

    async def script(beside: Beside) -> None:
        client = await streaming(beside.scene)
        await beside.take()
        beside.first.die("the worker died")
        assert beside.scene.supervisor.state is HostState.SERVING
        assert any("from which the session had been taken over" in line for line in beside.scene.said)
        beside.second.die("the worker died")
        third = await beside.scene.next_link(3)
        assert third.sent[0].placement == LAYER  # type: ignore[union-attr]
        third.open()
        client.stream.cancel()
        await soon(lambda: beside.scene.supervisor.state is HostState.SERVING)

    play(tmp_path, script)


def test_a_session_that_cannot_be_sealed_goes_on(tmp_path: Path) -> None:
    """The first worker says that it could not: its streams are where they were."""

    async def script(beside: Beside) -> None:
        await beside.open()
        beside.first.report(orders.StageReached(beside.number, "saving"))
        beside.first.report(orders.Failed(beside.number, Fault.LIBRARY, "CallFailed", "it wrote nothing"))
        outcome = await beside.is_off()
        assert (outcome["stage"], outcome["reason"]) == ("saving", "it wrote nothing")

    play(tmp_path, script)


def test_a_session_that_has_changed_meanwhile_refuses(tmp_path: Path) -> None:
    """The rules are looked at once more at the boundary; the first worker's outcome counts."""

    async def script(beside: Beside) -> None:
        await beside.open()
        beside.first.report(orders.Switched(beside.number, REFUSED))
        assert (await beside.outcome())["status"] == "refused"
        assert beside.second.end is not None
        assert beside.scene.supervisor.state is HostState.SERVING

    play(tmp_path, script)


@pytest.mark.parametrize("report", [orders.HandedOver(1, 0.0), orders.FitsBeside(1, TENSOR)])
def test_a_first_worker_that_says_the_impossible_is_lost(tmp_path: Path, report: orders.Report) -> None:
    """An answer that nobody asked for is a worker that has lost count."""

    async def script(beside: Beside) -> None:
        await beside.check()
        beside.first.report(replace(report, order=beside.number))  # type: ignore[type-var]
        third = await beside.scene.next_link(3)
        third.open()
        assert "lost count" in (await beside.outcome())["reason"]

    play(tmp_path, script)


# ---- cancelled, late, stopped ----


@pytest.mark.parametrize("when", ["checking", "loading", "copying", "copied", "saving", "handed"])
def test_a_cancel_ends_the_second_worker(tmp_path: Path, when: str) -> None:
    """At any time before the swap; the first one goes on with its streams."""

    async def script(beside: Beside) -> None:
        client = await streaming(beside.scene)
        supervisor = beside.scene.supervisor
        if when == "checking":
            beside.asked = beside.scene.switch(options=BESIDE)
            beside.number = (await beside.scene.order(orders.Switch)).order
            supervisor.cancel_switch()
            beside.first.report(orders.FitsBeside(beside.number, TENSOR, 2.0))
            assert (await beside.outcome())["status"] == "cancelled"
            assert len(beside.scene.links) == 1
        else:
            way = {"loading": beside.check, "copying": beside.place, "copied": beside.copy, "saving": beside.open}
            await way.get(when, beside.hand)()
            supervisor.cancel_switch()
            if when == "copying":
                beside.first.report(CopiedAhead(beside.number, 1, SEGMENTS))
            if when == "saving":
                beside.seal()
            await beside.is_off("cancelled")
        assert len(beside.first.starts()) == (2 if when in {"saving", "handed"} else 1)
        beside.first.draw(1, A)
        await client.has(3)
        client.stream.cancel()

    play(tmp_path, script)


def test_a_boundary_that_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    """The timeout runs from the order to seal, not from the start: placing may take as long as it takes."""

    async def script(beside: Beside) -> None:
        beside.asked = beside.scene.switch(options=BESIDE, timeout_s=0.0)
        beside.number = (await beside.scene.order(orders.Switch, beside.first)).order
        beside.first.report(orders.FitsBeside(beside.number, TENSOR, 2.0))
        await beside.scene.next_link(2)
        beside.second.open()
        await beside.nothing_ahead()
        await soon(lambda: beside.second.end is not None)
        beside.seal()
        outcome = await beside.is_off("refused")
        assert (outcome["stage"], outcome["reasons"][0]["code"]) == ("quiescing", "busy")

    play(tmp_path, script)


@pytest.mark.parametrize("when", ["loading", "copied", "saving", "handed", "swapped"])
def test_a_stop_ends_both_workers(tmp_path: Path, when: str) -> None:
    """Whatever the switch was at, no worker is left, and what the session holds is saved by the one that has it."""

    async def script(beside: Beside) -> None:
        client = await streaming(beside.scene)
        way = {"loading": beside.check, "copied": beside.copy, "saving": beside.open, "swapped": beside.take}
        await way.get(when, beside.hand)()
        stopping = asyncio.ensure_future(beside.scene.supervisor.stop())
        if when == "saving":
            await soon(lambda: beside.second.end is not None)
            beside.seal()
        saver = beside.second if when == "swapped" else beside.first
        save = await beside.scene.order(orders.Save, saver)
        saver.report(orders.Saved(save.order, 5))
        assert (await stopping)["reason"] == ""
        assert (await client.end()).message
        assert all(link.end is not None for link in beside.scene.links)

    play(tmp_path, script)


def test_a_worker_that_cannot_be_started_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system gives no process: the switch has fallen back, and the session serves."""

    def none(*_: object, **__: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    async def script(beside: Beside) -> None:
        beside.asked = beside.scene.switch(options=BESIDE)
        number = (await beside.scene.order(orders.Switch)).order
        monkeypatch.setattr(manager, "WorkerLink", none)
        beside.first.report(orders.FitsBeside(number, TENSOR))
        outcome = await beside.outcome()
        assert (outcome["status"], outcome["effective"]) == ("fell_back", "layer")
        assert "could not be started: Resource temporarily unavailable" in outcome["reason"]

    play(tmp_path, script)


def test_silence_is_measured_of_whoever_owes_something(tmp_path: Path) -> None:
    """The first worker owes nothing while the second loads and no stream runs, and everything while it seals."""

    async def script(beside: Beside) -> None:
        await beside.check()
        assert (beside.first.is_expected, beside.second.is_expected) == (False, True)
        beside.second.open()
        await beside.scene.order(CopyAhead, beside.first)
        assert (beside.first.is_expected, beside.second.is_expected) == (True, False)
        beside.first.report(CopiedAhead(beside.number, 1, SEGMENTS))
        await beside.scene.order(TakeAhead, beside.second)
        assert (beside.first.is_expected, beside.second.is_expected) == (False, True)
        beside.second.report(TookAhead(beside.number))
        await beside.scene.order(orders.HandOver, beside.first)
        assert (beside.first.is_expected, beside.second.is_expected) == (True, False)
        beside.seal()
        await beside.scene.order(orders.TakeOver, beside.second)
        assert (beside.first.is_expected, beside.second.is_expected) == (False, True)
        beside.second.report(orders.TookOver(beside.number))
        await beside.outcome()
        assert not beside.second.is_expected

    play(tmp_path, script)
