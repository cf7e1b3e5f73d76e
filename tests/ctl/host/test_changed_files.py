"""The files of a hosted session change while its worker is lost: it is parked, and serves again with the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitctl.errors import Parked
from splitctl.host.events import SessionParked
from splitctl.host.supervisor import HostState
from splitctl.ipc.jobs import Fault, RequestFailed
from splitctl.ipc.orders import AdapterFile
from tests.ctl.host.test_supervisor import Stage, play
from tests.ctl.hosting import soon
from tests.stublib import needs_compiler, write_model

pytestmark = needs_compiler

_WEIGHTS = bytes(range(256)) * 8
_CHANGED = "the file changed since the session opened"


def test_a_session_is_parked_when_its_worker_is_lost_and_its_model_is_another(tmp_path: Path) -> None:
    """No worker serves other weights or opens what is gone; with the same bytes in place a restore serves again."""
    model = write_model(tmp_path / "tiny.gguf", weights=_WEIGHTS)

    async def script(stage: Stage) -> None:
        client = await stage.ask(0)
        await client.end()
        write_model(tmp_path / "next.gguf", weights=_WEIGHTS[::-1]).replace(model)
        outcome = await stage.switch()
        assert (outcome["status"], _CHANGED in outcome["reason"]) == ("refused", True)
        events = stage.supervisor.subscribe()
        stage.kill()
        parked = await anext(one async for one in events if isinstance(one, SessionParked))
        assert _CHANGED in parked.reason
        assert parked.path is not None
        with pytest.raises(RequestFailed, match=_CHANGED) as refused:
            await stage.supervisor.restore(parked.path)
        assert refused.value.fault is Fault.MODEL
        assert stage.supervisor.state is HostState.PARKED
        write_model(model, weights=_WEIGHTS)
        restored = await stage.supervisor.restore(parked.path)
        assert restored["sequences"] == 1
        again = await stage.ask(0)
        await again.end()
        assert again.tokens == client.tokens

    play(tmp_path, script)


def test_an_adapter_that_is_gone_parks_a_session_that_lost_its_worker(tmp_path: Path) -> None:
    """An adapter's file counts as the model's does; an equal one in its place is taken."""
    extra = {"general.type": "adapter", "adapter.type": "lora"}
    adapter = write_model(tmp_path / "adapter.gguf", weights=_WEIGHTS, extra=extra)

    async def script(stage: Stage) -> None:
        await (await stage.ask(0)).end()
        adapter.unlink()
        write_model(adapter, weights=_WEIGHTS, extra=extra)
        stage.kill()
        await stage.serves(1)
        adapter.unlink()
        stage.kill()
        await soon(lambda: stage.supervisor.state is HostState.PARKED)
        with pytest.raises(Parked) as gone:
            await stage.ask(0)
        assert f"{adapter}: {_CHANGED}: it is gone" in gone.value.why

    play(tmp_path, script, adapters=(AdapterFile(adapter, 0.5),))
