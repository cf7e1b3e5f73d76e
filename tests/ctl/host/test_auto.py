"""A session that switches by itself, over scripted workers: what is held, what is ordered, and who goes first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from splitctl.cli.sessions import status_lines
from splitctl.errors import ConfigInvalid
from splitctl.host import auto, manager
from splitctl.host.config import PolicyConfig
from splitctl.host.streams import Why
from splitctl.host.supervisor import HostState
from splitctl.ipc.jobs import Fault
from splitctl.ipc.orders import (
    Failed,
    Reading,
    Replaced,
    Restore,
    Save,
    Saved,
    StageReached,
    Switch,
    Switched,
    Trial,
)
from splitctl.outcome import SwitchOutcome, SwitchStatus
from splitctl.placement import Placement, SplitMode
from splitctl.planning.cost import parse_rates
from splitctl.planning.learned import costs_of_rates
from splitctl.planning.policy import Decision, Policy, Settings, Situation
from tests.ctl.host.test_manager import A, B, Scene, outcome
from tests.ctl.hosting import GUARD_S, LAYER, TENSOR, ScriptedLink, ask, request_of, soon

RATES = parse_rates(
    '{"switch_s": 1, "modes": {"layer": {"prompt_tps": 100, "generate_tps": 10},'
    ' "tensor": {"prompt_tps": 1000, "generate_tps": 5}}}'
)
NUMBERS = PolicyConfig(costs_of_rates(RATES), "rates of a test")


class Wishes(Policy):
    """Decides what the test says, and keeps what it is told.

    Attributes:
        mode: where it wants the session; None: where it is.
        holds: numbers that it holds.
        asked: every situation.
        told: ends of switches.
        seen: what was served.
    """

    last: Wishes

    def __init__(self, costs: Any, settings: Settings) -> None:
        super().__init__(costs, settings)
        self.mode: SplitMode | None = None
        self.holds: set[int] = set()
        self.again: float | None = None
        self.fault: Exception | None = None
        self.asked: list[Situation] = []
        self.told: list[tuple[bool, SplitMode | None]] = []
        self.seen: list[tuple[Any, ...]] = []
        Wishes.last = self

    def decide(self, situation: Situation) -> Decision:
        """Say what is wished."""
        self.asked.append(situation)
        if self.fault is not None:
            raise self.fault
        wanted, self.mode = self.mode or situation.mode, None
        return Decision(wanted, frozenset(self.holds), self.again, f"is in {situation.mode.value}", {"gain_s": 1.5})

    def switched(self, at: float, *, succeeded: bool, seconds: float, after: SplitMode | None = None) -> None:
        """Keep the end of a switch."""
        del at, seconds
        self.told.append((succeeded, after))

    def observe_read(self, mode: SplitMode, n: int, depth: int, seconds: float) -> None:
        """Keep it."""
        self.seen.append(("read", mode, n, depth, seconds))

    def observe_step(self, mode: SplitMode, n_seq: int, depth: float, seconds: float, n_steps: int = 1) -> None:
        """Keep it."""
        del n_steps
        self.seen.append(("step", mode, n_seq, depth, seconds))


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every worker be a scripted one, and the policy too."""
    monkeypatch.setattr(manager, "WorkerLink", ScriptedLink)
    monkeypatch.setattr(ScriptedLink, "links", [], raising=False)
    monkeypatch.setattr(auto, "Policy", Wishes)


Script = Callable[[Scene, Wishes], Awaitable[None]]


def play(folder: Path, script: Script, **more: Any) -> None:
    """Play a script on a session that serves, and end it."""

    async def run() -> None:
        scene = Scene(folder, **{"policy": NUMBERS, **more})
        await scene.start()
        async with asyncio.timeout(GUARD_S):
            await script(scene, Wishes.last)
            await scene.supervisor.stop(save=False)

    asyncio.run(run())


def wish(scene: Scene, mode: SplitMode) -> None:
    """Want another mode, and let a stream come and go so that the policy is asked."""
    Wishes.last.mode = mode
    scene.supervisor._flush()  # what a stream that comes does


async def switch_of(scene: Scene, mode: SplitMode = SplitMode.TENSOR) -> Switch:
    """Let the policy order a switch; gives the order."""
    wish(scene, mode)
    order: Switch = await scene.order(Switch)
    assert order.target.mode is mode
    return order


def moved(placement: Placement) -> dict[str, Any]:
    """The outcome of a switch that succeeded."""
    return dict(SwitchOutcome(SwitchStatus.SWITCHED, placement, placement, pause_ms=2.0).to_json())


def held(scene: Scene) -> int:
    """How many prompts are held."""
    n: int = scene.supervisor.status()["policy"]["held"]
    return n


def started(scene: Scene) -> list[int]:
    """Streams that the worker of the moment has."""
    return [start.stream for start in scene.link.starts()]


# ---- what is held, and the switch ----


def test_a_prompt_that_is_held_is_read_after_the_switch(tmp_path: Path) -> None:
    """It waits, the next one passes it, the session switches, and then it is read and answered."""

    async def script(scene: Scene, policy: Wishes) -> None:
        policy.holds = {1}
        first = await ask(scene.supervisor, request_of([1, 2], 1))
        second = await ask(scene.supervisor, request_of([3], 1))
        assert (started(scene), held(scene)) == ([2], 1)
        order = await switch_of(scene)
        policy.holds = set()
        scene.link.report(Switched(order.order, moved(TENSOR)))
        assert (started(scene), held(scene)) == ([2, 1], 0)
        assert policy.told == [(True, SplitMode.TENSOR)]
        for number, client in ((1, first), (2, second)):
            scene.link.draw(number, A)
            scene.link.finish(number)
            assert ((await client.end()).why, client.text) == (Why.LENGTH, "a")
        status = scene.supervisor.status()["policy"]
        assert status["waits"]["count"] == 1
        assert status["decisions"]["switch"] == 1
        assert sum(line.startswith("policy: is in layer (gain_s 1.5)") for line in scene.said) == 2

    play(tmp_path, script)


def test_no_prompt_is_held_beyond_the_bound(tmp_path: Path) -> None:
    """A policy that holds for ever is passed over when the bound is reached, without anything that happens."""

    async def script(scene: Scene, policy: Wishes) -> None:
        policy.holds = {1}
        client = await ask(scene.supervisor, request_of([1, 2], 1))
        assert (started(scene), held(scene)) == ([], 1)
        await soon(lambda: started(scene))
        assert held(scene) == 0
        assert scene.supervisor.status()["policy"]["waits"]["longest_s"] >= 0.02
        scene.link.draw(1, A)
        scene.link.finish(1)
        assert (await client.end()).n_predicted == 1

    settings = Settings(max_wait_s=0.02)
    play(tmp_path, script, policy=PolicyConfig(NUMBERS.costs, "", settings))


def test_the_policy_is_asked_again_when_it_wants(tmp_path: Path) -> None:
    """After the time that it named it decides anew, though nothing has happened."""

    async def script(scene: Scene, policy: Wishes) -> None:
        policy.again, policy.holds = 0.01, {1}
        await ask(scene.supervisor, request_of([1, 2], 1))
        n = len(policy.asked)
        await soon(lambda: len(policy.asked) > n)
        policy.again, policy.holds = None, set()
        await soon(lambda: started(scene))

    play(tmp_path, script)


def test_the_policy_sees_the_session_as_it_is(tmp_path: Path) -> None:
    """Prompts that wait come with what their sequence holds of them, streams with what is left to read and to come."""

    async def script(scene: Scene, policy: Wishes) -> None:
        await ask(scene.supervisor, request_of([1, 2, 3], 4))
        scene.link.report(Reading(1, 2, 0, 1.0))
        policy.holds = {2}
        await ask(scene.supervisor, request_of([7, 8], 1))
        (waiting,), (active,) = policy.asked[-1].waiting, policy.asked[-1].active
        assert (waiting.number, waiting.n_uncached, waiting.n_cached, waiting.n_expected) == (2, 2, 0, 1.0)
        assert (active.number, active.n_unread, active.n_held, active.n_expected) == (1, 1, 2, 4.0)
        scene.link.read(1)
        scene.link.draw(1, A, B)
        scene.link.finish(1)
        policy.holds = {2, 3}
        await ask(scene.supervisor, request_of([1, 2, 3, A, 5, 6], 1))
        last = policy.asked[-1]
        assert [(one.n_uncached, one.n_cached) for one in last.waiting] == [(2, 0), (2, 4)]
        assert (last.mode, last.active, last.n_seq_max) == (SplitMode.LAYER, (), 2)

    play(tmp_path, script)


def test_rates_keep_learning(tmp_path: Path) -> None:
    """Pieces of prompts and whole steps are told with their mode, depth and time; a first token is no step."""

    async def script(scene: Scene, policy: Wishes) -> None:
        await ask(scene.supervisor, request_of([1, 2, 3], 4))
        scene.link.report(Reading(1, 0, 0, 0.0), Reading(1, 2, 0, 4.0), Reading(1, 3, 0, 6.0))
        scene.link.draw(1, A, B)
        assert policy.seen == [
            ("read", SplitMode.LAYER, 2, 0, 0.004),
            ("read", SplitMode.LAYER, 1, 2, 0.002),
            ("step", SplitMode.LAYER, 1, 4.0, 0.001),
        ]

    play(tmp_path, script)


class _Shared:
    """Costs of a cache for all, in which a pair of tokens takes a tenth of a millisecond; all else is in rates."""

    def others_s(self, mode: SplitMode, n_pairs: float, *, is_read: bool) -> float:
        assert (mode, is_read) in {(SplitMode.LAYER, True), (SplitMode.LAYER, False)}
        return n_pairs * 1e-4

    def __getattr__(self, name: str) -> Any:
        return getattr(costs_of_rates(RATES), name)


def test_what_other_sequences_add_is_not_learned(tmp_path: Path) -> None:
    """A read and a step beside what another sequence holds are told without what that costs."""

    async def script(scene: Scene, policy: Wishes) -> None:
        await ask(scene.supervisor, request_of([1, 2, 3], 4))
        await ask(scene.supervisor, request_of([5, 6], 4))
        scene.link.report(Reading(1, 0, 0, 0.0), Reading(1, 3, 0, 6.0))
        scene.link.draw(1, A)
        policy.seen.clear()
        scene.link.report(Reading(2, 0, 0, 0.0), Reading(2, 2, 0, 4.0))
        n = scene.supervisor.status()["sequences"][0]["n_tokens"]
        scene.link.draw(1, B)
        (_, *_, read_s), (_, *_, step_s) = policy.seen
        assert read_s == pytest.approx(4e-3 - 2 * n * 1e-4)
        assert step_s == pytest.approx(1e-3 - 2 * 1e-4)

    play(tmp_path, script, policy=PolicyConfig(_Shared(), "costs of a test"))


def test_a_decision_that_takes_long_is_made_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes right after one waits for the next, which comes by itself; the loop is there for tokens meanwhile."""
    spent = iter([0.0, 0.1])
    monkeypatch.setattr(auto.time, "thread_time", lambda: next(spent, 0.1))

    async def script(scene: Scene, policy: Wishes) -> None:
        assert len(policy.asked) == 1
        await ask(scene.supervisor, request_of([1], 1))
        assert (len(policy.asked), started(scene), held(scene)) == (1, [], 1)
        await soon(lambda: started(scene))
        assert (len(policy.asked), held(scene)) == (2, 0)

    play(tmp_path, script)


# ---- switches that fail, and workers that die ----


@pytest.mark.parametrize("how", ["refused", "fell_back", "not taken", "trial"])
def test_a_switch_that_fails_is_told_to_the_policy(tmp_path: Path, how: str) -> None:
    """Whether it was refused, fell back, was not taken or failed on trial: the policy backs off, the session serves."""

    async def script(scene: Scene, policy: Wishes) -> None:
        order = await switch_of(scene)
        fell_back = outcome(SwitchStatus.FELL_BACK, LAYER)
        match how:
            case "not taken":
                scene.link.report(Failed(order.order, Fault.INTERNAL, "Error", "why"))
            case "trial":
                scene.link.report(Switched(order.order, moved(TENSOR)), Trial(fell_back))
                wish(scene, SplitMode.LAYER)
            case _:
                scene.link.report(Switched(order.order, outcome(SwitchStatus(how), LAYER)))
        assert policy.told[-1] == (False, SplitMode.TENSOR)
        assert any("the switch to tensor failed" in line for line in scene.said)
        client = await ask(scene.supervisor, request_of([1], 1))
        scene.link.draw(1, A)
        scene.link.finish(1)
        assert (await client.end()).n_predicted == 1

    play(tmp_path, script)


def test_a_worker_that_dies_takes_no_held_prompt_along(tmp_path: Path) -> None:
    """The prompt stays held while the session recovers, in which nothing is decided, and is read by the next worker."""

    async def script(scene: Scene, policy: Wishes) -> None:
        policy.holds = {1}
        client = await ask(scene.supervisor, request_of([1, 2], 1))
        await switch_of(scene)
        n = len(policy.asked)
        scene.link.die("killed", was_killed=True)
        link = await scene.next_link(2)
        other = await ask(scene.supervisor, request_of([3], 1))
        assert len(policy.asked) == n
        assert scene.supervisor.state is HostState.RECOVERING
        policy.holds = set()
        link.open(LAYER)
        await soon(lambda: scene.supervisor.state is HostState.SERVING)
        assert started(scene) == [1, 2]
        assert policy.told == [(False, SplitMode.TENSOR)]
        for number, one in ((1, client), (2, other)):
            link.draw(number, A)
            link.finish(number)
            assert ((await one.end()).why, one.text) == (Why.LENGTH, "a")

    play(tmp_path, script)


def test_a_fault_of_the_policy_ends_the_policy_alone(tmp_path: Path) -> None:
    """It is logged once, the status says so, and what was held is read."""

    async def script(scene: Scene, policy: Wishes) -> None:
        policy.holds = {1}
        await ask(scene.supervisor, request_of([1, 2], 1))
        policy.fault = ZeroDivisionError("a share of nothing")
        client = await ask(scene.supervisor, request_of([3], 1))
        assert started(scene) == [1, 2]
        for number in (1, 2):
            scene.link.draw(number, A)
            scene.link.finish(number)
        assert (await client.end()).n_predicted == 1
        status = scene.supervisor.status()
        assert status["policy"] == {"policy": "off", "fault": "ZeroDivisionError: a share of nothing"}
        assert sum("a share of nothing" in line for line in scene.said) == 1
        assert "  policy       off: ZeroDivisionError: a share of nothing" in list(status_lines(status))

    play(tmp_path, script)


def test_the_policy_is_turned_off_and_on(tmp_path: Path) -> None:
    """Off starts what was held and decides nothing, on decides anew; a host without numbers has none to turn on."""

    async def script(scene: Scene, policy: Wishes) -> None:
        policy.holds = {1}
        await ask(scene.supervisor, request_of([1, 2], 1))
        assert scene.supervisor.set_policy("off") == {"policy": "off"}
        assert started(scene) == [1]
        n = len(policy.asked)
        await ask(scene.supervisor, request_of([3], 1))
        assert len(policy.asked) == n
        assert scene.supervisor.set_policy("auto")["policy"] == "auto"
        assert (Wishes.last is policy, len(Wishes.last.asked)) == (False, 1)

    play(tmp_path, script)


# ---- clients go first ----


def test_a_clients_switch_goes_before(tmp_path: Path) -> None:
    """The policy's own switch is cancelled for it, which is no failure, and the client's is ordered next."""

    async def script(scene: Scene, policy: Wishes) -> None:
        order = await switch_of(scene)
        asked = scene.switch({"n_ctx": 512})
        await soon(lambda: scene.link.n_cancels)
        policy.mode = SplitMode.TENSOR
        scene.link.report(Switched(order.order, outcome(SwitchStatus.CANCELLED, LAYER)))
        await soon(lambda: sum(isinstance(one, Switch) for one in scene.link.sent) == 2)
        second = await scene.order(Switch)
        assert second.target == LAYER.changed(n_ctx=512)
        policy.mode = None
        scene.link.report(Switched(second.order, moved(second.target)))
        assert (await asked)["status"] == "switched"
        assert policy.told == [(True, SplitMode.LAYER)]

    play(tmp_path, script)


def test_a_clients_switch_waits_for_one_past_the_boundary(tmp_path: Path) -> None:
    """Streams stand still for it already: it is not cancelled, and the client's follows."""

    async def script(scene: Scene, policy: Wishes) -> None:
        order = await switch_of(scene)
        scene.link.report(StageReached(order.order, "saving"))
        asked = scene.switch({"mode": SplitMode.LAYER})
        scene.link.report(Switched(order.order, moved(TENSOR)))
        await soon(lambda: sum(isinstance(one, Switch) for one in scene.link.sent) == 2)
        second = await scene.order(Switch)
        assert (second.target, scene.link.n_cancels) == (LAYER, 0)
        scene.link.report(Switched(second.order, moved(LAYER)))
        assert (await asked)["status"] == "switched"
        assert policy.told == [(True, SplitMode.TENSOR), (True, SplitMode.LAYER)]

    play(tmp_path, script)


def test_a_restore_goes_before(tmp_path: Path) -> None:
    """The policy's own switch is cancelled for it, and nothing is decided until the file is there."""

    async def script(scene: Scene, policy: Wishes) -> None:
        order = await switch_of(scene)
        asked = asyncio.ensure_future(scene.supervisor.restore(tmp_path / "kept.safetensors"))
        await soon(lambda: scene.link.n_cancels)
        policy.mode = SplitMode.TENSOR
        n = len(policy.asked)
        scene.link.report(Switched(order.order, outcome(SwitchStatus.CANCELLED, LAYER)))
        restore = await scene.order(Restore)
        assert len(policy.asked) == n
        policy.mode = None
        scene.link.report(Replaced(restore.order, ()))
        assert (await asked)["sequences"] == 0
        assert len(policy.asked) > n

    play(tmp_path, script)


def test_nothing_is_decided_while_a_client_saves(tmp_path: Path) -> None:
    """A switch that would be in the way of a save is decided after it."""

    async def script(scene: Scene, policy: Wishes) -> None:
        asked = asyncio.ensure_future(scene.supervisor.save(tmp_path / "kept.safetensors"))
        order = await scene.order(Save)
        n = len(policy.asked)
        wish(scene, SplitMode.TENSOR)
        assert len(policy.asked) == n
        scene.link.report(Saved(order.order, 5))
        assert (await asked)["bytes"] == 5
        assert (await scene.order(Switch)).target == TENSOR

    play(tmp_path, script)


def test_a_switch_by_hand_is_told_to_the_policy(tmp_path: Path) -> None:
    """What a person switched counts as a switch; what a person was refused says nothing."""

    async def script(scene: Scene, policy: Wishes) -> None:
        for status, effective in ((SwitchStatus.REFUSED, LAYER), (SwitchStatus.SWITCHED, TENSOR)):
            n = len(scene.link.sent)
            asked = scene.switch()
            await soon(lambda n=n: any(isinstance(one, Switch) for one in scene.link.sent[n:]))
            scene.link.report(Switched((await scene.order(Switch)).order, outcome(status, effective)))
            await asked
        assert policy.told == [(True, SplitMode.TENSOR)]
        assert policy.asked[-1].mode is SplitMode.TENSOR

    play(tmp_path, script)


def test_a_person_is_not_overruled_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its numbers the real policy would go back at once; within its least stay it orders no switch."""
    monkeypatch.setattr(auto, "Policy", Policy)

    async def script(scene: Scene, policy: Wishes) -> None:
        del policy
        asked = scene.switch()
        scene.link.report(Switched((await scene.order(Switch)).order, moved(TENSOR)))
        await asked
        await ask(scene.supervisor, request_of([1] * 20, 1000))
        scene.link.read(1)
        scene.link.draw(1, A, B)
        assert sum(isinstance(one, Switch) for one in scene.link.sent) == 1
        numbers = scene.supervisor.status()["policy"]["numbers"]
        assert numbers["n_to_come"] >= 64
        assert scene.supervisor.status()["policy"]["decision"].startswith("stays in tensor")

    async def without_a_person(scene: Scene, policy: Wishes) -> None:
        del policy
        await ask(scene.supervisor, request_of([1] * 20, 1000))
        assert (await scene.order(Switch)).target == LAYER

    rates = parse_rates(
        '{"switch_s": 0.1, "modes": {"layer": {"prompt_tps": 1000, "generate_tps": 100},'
        ' "tensor": {"prompt_tps": 10, "generate_tps": 1}}}'
    )
    numbers = PolicyConfig(costs_of_rates(rates), "", Settings(min_stay_s=600.0))
    Wishes.last = Wishes(None, Settings())
    play(tmp_path, script, policy=numbers)
    play(tmp_path, without_a_person, policy=numbers, placement=TENSOR)


def test_a_mode_that_nobody_measured_is_left_alone(tmp_path: Path) -> None:
    """A session that a person put into another mode stays there, and the status says why."""

    async def script(scene: Scene, policy: Wishes) -> None:
        await ask(scene.supervisor, request_of([1], 1))
        assert not policy.asked
        assert scene.supervisor.status()["policy"]["decision"] == "stays in none: nothing was measured of this mode"

    play(tmp_path, script, placement=LAYER.changed(mode=SplitMode.NONE, devices=("CPU",)))


def test_a_split_comes_back_with_its_mode(tmp_path: Path) -> None:
    """Shares of devices that were named for a mode are taken again when the policy goes back to it."""

    async def script(scene: Scene, policy: Wishes) -> None:
        del policy
        order = await switch_of(scene)
        assert order.target == TENSOR
        scene.link.report(Switched(order.order, moved(TENSOR)))
        wish(scene, SplitMode.LAYER)
        await soon(lambda: sum(isinstance(one, Switch) for one in scene.link.sent) == 2)
        assert (await scene.order(Switch)).target == LAYER.changed(tensor_split=(3.0, 1.0))

    play(tmp_path, script, placement=LAYER.changed(tensor_split=(3.0, 1.0)))


def test_without_a_policy_nothing_is_watched(tmp_path: Path) -> None:
    """Off is the default: nobody is asked, and the status says off."""

    async def script(scene: Scene, policy: Wishes) -> None:
        await ask(scene.supervisor, request_of([1], 1))
        assert scene.supervisor.status()["policy"] == {"policy": "off"}
        with pytest.raises(ConfigInvalid, match="started with --policy auto"):
            scene.supervisor.set_policy("auto")
        assert not policy.asked

    Wishes.last = Wishes(None, Settings())
    play(tmp_path, script, policy=PolicyConfig())
