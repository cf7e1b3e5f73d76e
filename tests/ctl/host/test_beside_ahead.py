"""Idle sequences that go to a second worker before the others: led over scripted workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from splitctl.host.supervisor import HostState
from splitctl.ipc import orders
from splitctl.ipc.ahead import CopiedAhead, CopyAhead, TakeAhead, TookAhead
from splitctl.ipc.jobs import Fault
from tests.ctl.host.test_beside import SEGMENTS, Beside, play, scripted, streaming  # noqa: F401 - a fixture
from tests.ctl.host.test_manager import A
from tests.ctl.hosting import ScriptedLink, soon


def test_they_cross_while_the_first_worker_serves_on(tmp_path: Path) -> None:
    """Streams draw all the while, and only then the first stops; the outcome tells what crossed, and why no more."""

    async def script(beside: Beside) -> None:
        client = await streaming(beside.scene)
        await beside.copy()
        (taking,) = [one for one in beside.second.sent if isinstance(one, TakeAhead)]
        assert (taking.arena, taking.segments) == (1, SEGMENTS)
        beside.first.draw(1, A)
        await client.has(3)
        assert "Paused" not in client.kinds()
        assert not [one for one in beside.first.sent if isinstance(one, orders.HandOver)]
        beside.second.report(TookAhead(beside.number))
        assert not (await beside.scene.order(orders.HandOver, beside.first)).in_one_piece
        beside.seal(ahead_bytes=10, ahead_reason="why")
        await beside.scene.order(orders.TakeOver, beside.second)
        beside.second.report(orders.TookOver(beside.number))
        outcome = await beside.outcome()
        assert (outcome["ahead_bytes"], outcome["ahead_reason"], outcome["state_bytes"]) == (10, "why", 11)
        assert outcome["stages_gb_s"]["saving"] == pytest.approx(1e-6)
        client.stream.cancel()

    play(tmp_path, script)


@pytest.mark.parametrize(
    "fails",
    [
        lambda link, _number: link.die("the worker died by signal 9 (SIGKILL)"),
        lambda link, number: link.report(orders.Failed(number, Fault.MODEL, "CarryDamaged", "the memory is none")),
        lambda link, number: link.report(orders.TookOver(number)),
    ],
    ids=["killed", "failed", "out of turn"],
)
def test_a_second_worker_that_fails_over_them_costs_nothing(
    tmp_path: Path, fails: Callable[[ScriptedLink, int], None]
) -> None:
    """The first serves on and never stood still."""

    async def script(beside: Beside) -> None:
        client = await streaming(beside.scene)
        await beside.copy()
        fails(beside.second, beside.number)
        await beside.is_off()
        assert "Paused" not in client.kinds()
        beside.first.draw(1, A)
        await client.has(3)
        assert len(beside.first.starts()) == 1
        client.stream.cancel()

    play(tmp_path, script)


def test_what_the_second_worker_does_not_take_comes_in_one_piece(tmp_path: Path) -> None:
    """The first is told so, and the switch goes on."""

    async def script(beside: Beside) -> None:
        await beside.copy()
        beside.second.report(TookAhead(beside.number, is_done=False))
        assert (await beside.scene.order(orders.HandOver, beside.first)).in_one_piece
        beside.seal()
        await beside.scene.order(orders.TakeOver, beside.second)
        beside.second.report(orders.TookOver(beside.number))
        assert (await beside.outcome())["status"] == "switched"

    play(tmp_path, script)


def test_a_first_worker_that_cannot_copy_goes_on(tmp_path: Path) -> None:
    """The switch is off, with its words."""

    async def script(beside: Beside) -> None:
        await beside.place()
        beside.first.report(orders.Failed(beside.number, Fault.CONFIG, "ConfigInvalid", "no such switch"))
        assert (await beside.is_off())["reason"] == "no such switch"

    play(tmp_path, script)


def test_copies_that_nobody_ordered_are_a_fault(tmp_path: Path) -> None:
    """The worker that says so has lost count."""

    async def script(beside: Beside) -> None:
        await beside.check()
        beside.first.report(CopiedAhead(beside.number))
        third = await beside.scene.next_link(3)
        third.open()
        assert "nobody gave" in (await beside.outcome())["reason"]
        await soon(lambda: beside.scene.supervisor.state is HostState.SERVING)
        assert not [one for one in third.sent if isinstance(one, CopyAhead)]

    play(tmp_path, script)
