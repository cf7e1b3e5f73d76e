"""Real reports about sessions that should have survived, as tests of a hosted one."""

from __future__ import annotations

from pathlib import Path

from splitctl.host.events import WorkerGone
from splitctl.host.streams import Why
from splitctl.placement import FlashAttn, SplitMode
from tests.ctl.host.test_supervisor import FORCED, IN_PLACE, Stage, play
from tests.ctl.hosting import LAYER
from tests.stublib import needs_compiler

pytestmark = needs_compiler


def test_p8_an_abort_of_a_load_is_a_load_that_failed(tmp_path: Path) -> None:
    """P8: tensor mode aborts for want of memory: mode and tokens are unchanged, and the signal is named."""
    answers: list[list[int]] = []

    async def script(stage: Stage) -> None:
        for is_disturbed in (False, True):
            client = await stage.ask(0)
            await client.has(2)
            if is_disturbed:
                stage.arm("load:abort:tensor")
                outcome = await stage.switch(options=FORCED)
                assert (outcome["status"], outcome["requested"], outcome["effective"]) == (
                    "fell_back",
                    "tensor",
                    "layer",
                )
                assert "died by signal 6" in outcome["reason"]
            assert (await client.end()).why is Why.LENGTH
            answers.append(client.tokens)
        assert stage.supervisor.status()["placement"]["mode"] == "layer"

    play(tmp_path, script)
    assert answers[0] == answers[1]


def test_r7_after_an_abort_the_next_attempt_is_a_process_of_its_own(tmp_path: Path) -> None:
    """R7: who died for want of memory is asked nothing more; another process makes the next switch, and it works."""

    async def script(stage: Stage) -> None:
        supervisor = stage.supervisor
        events = supervisor.subscribe()
        first = supervisor.worker_pid
        stage.arm("load:abort:tensor@1")
        assert (await stage.switch(options=FORCED))["status"] == "fell_back"
        gone = await anext(one async for one in events if isinstance(one, WorkerGone))
        assert gone.pid == first != supervisor.worker_pid
        second = supervisor.worker_pid
        outcome = await stage.switch(options=FORCED)
        assert (outcome["status"], outcome["effective"]) == ("switched", "tensor")
        # The good case happens within the worker.
        assert supervisor.worker_pid == second

    play(tmp_path, script)


def test_p15_a_sampler_draws_on_where_it_was_after_a_switch_and_after_a_loss(tmp_path: Path) -> None:
    """P15: wherever samplers run, the draws after a switch, and in another process, are those without one."""
    answers: list[list[int]] = []

    async def script(stage: Stage) -> None:
        for what in ("calm", "switch", "kill"):
            client = await stage.ask(1)
            await client.has(4)
            if what == "switch":
                outcome = await stage.supervisor.switch({"tensor_split": (3.0, 1.0)}, IN_PLACE)
                assert outcome["status"] == "switched"
            elif what == "kill":
                stage.kill()
            await client.end()
            answers.append(client.tokens)

    play(tmp_path, script)
    assert answers[0] == answers[1] == answers[2]


def test_p19_a_fallback_differs_in_nothing_and_status_does_not_lie(tmp_path: Path) -> None:
    """P19: after a fallback every option is what it was, and what was requested stands beside what serves."""
    placement = LAYER.changed(n_seq_max=2, flash_attn=FlashAttn.ON, n_ubatch=64, tensor_split=(3.0, 1.0))

    async def script(stage: Stage) -> None:
        before = stage.supervisor.status()["placement"]
        stage.arm("load:abort:tensor@1")
        outcome = await stage.supervisor.switch({"mode": SplitMode.TENSOR, "n_ubatch": 128}, options=FORCED)
        status = stage.supervisor.status()
        assert outcome["effective_placement"] == status["placement"] == before
        assert outcome["requested_placement"]["n_ubatch"] == 128
        assert (status["requested"], status["effective"]) == ("tensor", "layer")
        assert status["last_switch"]["reason"]

    play(tmp_path, script, placement=placement)


def test_p19_a_cancel_is_no_failure_and_is_not_tried_again(tmp_path: Path) -> None:
    """P19: a switch that is cancelled ends in the old placement, and nothing is loaded after it."""

    async def script(stage: Stage) -> None:
        before = stage.supervisor.status()["placement"]
        switch = stage.supervisor.switch(
            {"mode": SplitMode.TENSOR}, IN_PLACE, on_stage=lambda _s, _x: stage.supervisor.cancel_switch()
        )
        outcome = await switch
        assert (outcome["status"], outcome["effective"]) == ("cancelled", "layer")
        status = stage.supervisor.status()
        assert status["placement"] == before
        assert status["switches"]["count"] == 1
        assert status["worker_restarts"] == 0

    play(tmp_path, script)
