"""A user's program with every public name of splitctl; mypy reads it strictly, and nobody runs it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import assert_type

import numpy as np
from numpy.typing import NDArray

import splitctl


def lower(tokens: NDArray[np.int32], row: NDArray[np.float32]) -> None:
    """Change logits in place."""
    row[tokens] -= 1


def higher(_tokens: NDArray[np.int32], row: NDArray[np.float32]) -> NDArray[np.float32]:
    """Give other logits."""
    return row + np.float32(1)


PROCESSORS: list[splitctl.LogitsProcessor] = [lower, higher]


def in_this_process(model: Path, library: Path) -> None:
    """Open, answer, switch, keep."""
    placement = splitctl.Placement(mode="layer", devices="CPU,CPU", flash_attn=splitctl.FlashAttn.ON)  # type: ignore[arg-type]
    assert_type(placement.changed(mode=splitctl.SplitMode.TENSOR), splitctl.Placement)
    found = splitctl.Library.open(library)
    with splitctl.Session.open(model, "layer", library=found, weights="pinned") as session:
        sampler = splitctl.SamplerSpec(temp=0.0, stop=("\n",))
        stream = session.text("Once", n=5, stop="x", sampler=sampler, grammar="", processors=PROCESSORS)
        assert_type(stream, splitctl.TextStream)
        for piece in stream:
            assert_type(piece, str)
        assert_type(stream.usage, splitctl.Usage | None)
        answer = session.chat([{"role": "user", "content": "Hello"}], chat_template_kwargs={"x": 1})
        assert_type(answer.read(), str)
        assert_type(session.feed([1, 2]), splitctl.Fed)
        token = next(session.generate(n=1))
        assert_type(token, splitctl.Token)
        assert_type(session.embed(["a", [1, 2]], pooling="last"), NDArray[np.float32])
        checked = session.check("tensor", splitctl.SwitchOptions(convert=False))
        assert_type(checked, splitctl.Checked)
        outcome = session.switch(mode="tensor", n_ctx=4096, proof=splitctl.Proof.POSITIONS)
        assert_type(outcome, splitctl.SwitchOutcome)
        if outcome.status is splitctl.SwitchStatus.FELL_BACK and outcome.via is splitctl.Via.COMPOSED:
            reasons: tuple[splitctl.Reason, ...] = tuple(outcome.reasons)
            print(reasons, session.stage is splitctl.Stage.SERVING, session.weights_from is splitctl.WeightsTier.FILE)
        state = session.state_bytes()
        assert_type(session.load_state_bytes(state), splitctl.Restored)
        session.load_state_bytes(memoryview(state), {0: [1, 2]}, logits={0: [0.0, 1.0]})


async def on_a_loop(model: Path) -> None:
    """The same for asyncio."""
    async with await splitctl.AsyncSession.open(model, "layer") as session:
        stream = session.text("Once", n=5)
        assert_type(stream, splitctl.AsyncTextStream)
        async for piece in stream:
            assert_type(piece, str)
        both = await asyncio.gather(session.switch("tensor"), session.run(lambda one: one.tokens(0)))
        assert_type(both, tuple[splitctl.SwitchOutcome, list[int]])


def of_a_host() -> None:
    """A session that another process hosts."""
    with splitctl.connect("main") as client:
        assert_type(client, splitctl.Client)
        for delta in client.generate("Once", n=5):
            assert_type(delta.text, str)


async def of_a_host_on_a_loop() -> None:
    """The same for asyncio."""
    async with splitctl.connect_async(url="http://127.0.0.1:8080") as client:
        assert_type(client, splitctl.AsyncClient)
        print((await client.switch("tensor").result()).status)


def told(error: Exception) -> str:
    """Say what to do on each error."""
    match error:
        case splitctl.PlacementInvalid() | splitctl.ConfigInvalid():
            return error.wanted
        case splitctl.ContextFull():
            return f"{error.n_held} + {error.n_new} > {error.n_ctx}"
        case splitctl.Refused():
            return error.reasons[0].code
        case splitctl.Parked() | splitctl.CarryDamaged() | splitctl.CarryNotWritten():
            return str(error.path)
        case splitctl.BadModelFile() | splitctl.FileChanged() | splitctl.AdapterInvalid():
            return error.path.name
        case splitctl.Busy() | splitctl.Cancelled() | splitctl.DeadlineExceeded():
            return error.what
        case splitctl.CarryMismatch():
            return error.differences[0].field
        case splitctl.CannotConvert() | splitctl.StateUnsound() | splitctl.ChatTemplateFailed():
            return error.why
        case splitctl.WorkerLost():
            return error.how
        case splitctl.AnswerBroken():
            return error.text
        case splitctl.HostGone() | splitctl.HostIncompatible() | splitctl.NoSuchSession():
            return str(error)
        case splitctl.RequestFailed() | splitctl.ServerUnreachable():
            return str(error)
        case splitctl.SplitctlError() | splitctl.NativeError():
            return str(error)
    return ""
