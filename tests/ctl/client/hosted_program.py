"""A user's program with every public name of splitctl.client; mypy reads it strictly, and nobody runs it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, assert_type

import splitctl
from splitctl import client as hosted


def told(restart: hosted.Restarted) -> None:
    """Take the news of a restart."""
    assert_type(restart.n, int)


def waits() -> None:
    """Use the client that waits."""
    client = hosted.connect("main", timeout_s=1, reconnect_s=0, on_restart=told)
    assert_type(client, hosted.Client)
    status = client.status()
    assert_type(status, hosted.Status)
    assert_type(status.sequences, tuple[hosted.SequenceStatus, ...])
    assert_type(status.last_switch, splitctl.SwitchOutcome | None)
    assert_type(status.raw, Mapping[str, Any])

    answer = client.generate([1, 2], n=3, sampler={"temp": 0.0}, stop=["a"])
    assert_type(answer, hosted.Generation)
    for delta in answer:
        assert_type(delta, hosted.Delta)
    assert_type(answer.usage, hosted.Usage | None)
    assert_type(answer.events(), Iterator[hosted.AnswerEvent])
    for event in answer.events():
        match event:
            case hosted.Begun():
                assert_type(event.n_reused, int)
            case hosted.Delta():
                assert_type(event.token, int | None)
            case hosted.Paused():
                assert_type(event.why, str)
            case hosted.Resumed():
                answer.cancel()
    whole = client.chat([{"role": "user", "content": "hi"}], sampler=splitctl.SamplerSpec(seed=1)).result()
    assert_type(whole, hosted.Answer)

    switch = client.switch("tensor", n_ctx=4096, devices=["CPU", "CPU"], tensor_split="3,1")
    assert_type(switch, hosted.Switch)
    for step in switch:
        if isinstance(step, hosted.SwitchStage):
            assert_type(step.share, float)
        else:
            assert_type(step, splitctl.SwitchOutcome)
    assert_type(client.switch(splitctl.Placement()).result(), splitctl.SwitchOutcome)
    fields: hosted.PlacementFields = {"mode": splitctl.SplitMode.LAYER, "n_seq_max": 2}
    assert_type(client.check(**fields), hosted.SwitchCheck)
    assert_type(client.save(Path("a")), hosted.Saved)
    assert_type(client.restore("a"), hosted.Restored)
    assert_type(client.policy("off"), hosted.PolicyStatus)
    watching = client.events(wait_s=1)
    assert_type(watching, hosted.Work[hosted.SessionEvent, None])
    for happened in watching:
        assert_type(happened.outcome, splitctl.SwitchOutcome | None)
    assert_type(client.stop(), hosted.Stopped)


def fails(client: hosted.Client) -> None:
    """Handle each error."""
    try:
        client.generate("a").result()
    except hosted.AnswerBroken as error:
        client.generate([*error.tokens])
    except hosted.HostBusy as error:
        assert_type(error.what, str)
    except hosted.HostParked as error:
        client.restore(error.path or "")
    except hosted.HostRefused as error:
        assert_type(error.reasons[0].code, str)
    except (hosted.NoSuchSession, hosted.ServerUnreachable, hosted.HostGone, hosted.HostIncompatible) as error:
        assert_type(str(error), str)
    except (hosted.ClientClosed, hosted.RequestFailed, splitctl.DeadlineExceeded) as error:
        assert_type(str(error), str)


async def on_a_loop() -> None:
    """Use the client of asyncio."""
    async with hosted.connect_async(url="http://127.0.0.1:8080", api_key="KEY") as client:
        assert_type(client, hosted.AsyncClient)
        answer = client.generate("a")
        assert_type(answer, hosted.AsyncGeneration)
        async for delta in answer:
            assert_type(delta, hosted.Delta)
        assert_type(answer.events(), AsyncIterator[hosted.AnswerEvent])
        switch = client.switch(mode="layer")
        assert_type(switch, hosted.AsyncSwitch)
        async for step in switch:
            assert_type(step, hosted.SwitchStage | splitctl.SwitchOutcome)
        answers = await asyncio.gather(client.generate("a").result(), client.generate("b").result())
        assert_type(answers[0].text, str)
        assert_type(client.events(), hosted.AsyncWork[hosted.SessionEvent, None])
