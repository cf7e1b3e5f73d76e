"""Runs a GPU out of memory for real: another process holds the rest, and a session that does not fit is opened there.

In layer mode such a load returns; in tensor mode stock builds abort. A hosted session has to survive the second:
it serves in layer mode, is switched by force to a tensor split that does not fit, and has to go on in layer mode with
the tokens that it would have drawn without the attempt.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from splitctl.carry.sampling import SamplerSpec
from splitctl.control.requests import GenerateRequest
from splitctl.host.config import HostConfig
from splitctl.host.supervisor import Supervisor
from splitctl.model.facts import read_facts
from splitctl.outcome import Route, SwitchOptions
from splitctl.placement import Placement, SplitMode
from tools import greedy_gaps
from tools.children import run_child
from tools.clients import start_streams
from tools.gpu_jobs import tokens_of
from tools.gpu_meter import HOST, Meter, Setup
from tools.places import CHECKOUT

_MIB = 1024 * 1024
_JOBS = "tools.gpu_jobs"
_TIMEOUT_S = 300.0
#: A stream alone has the same floats every time; of two, who else was in a batch changes their order.
_N_STREAMS = (1, 2)
_MOST = max(_N_STREAMS)
_N_PROMPT = 400
_N_PREDICT = 160
#: Tokens that the last stream has drawn before the switch is asked for.
_N_BEFORE = 20
#: What is left free beyond what layer mode takes.
_ROOM_BYTES = 512 * _MIB
#: The tensor placement that cannot fit has a context so many times as long; on processors one that no memory holds.
_LONGER = 16
_ENDLESS = 1 << 24


def shortage(setup: Setup, model: Path, size: tuple[int, int]) -> dict[str, Any]:
    """Open sessions that do not fit, then switch a hosted session to such a placement.

    Args:
        setup: where.
        model: the GGUF.
        size: context and micro-batch of layer mode, tokens.

    Returns:
        What was seen, and under ``failures`` what is wrong.
    """
    layer = replace(setup.place(SplitMode.LAYER, *size), n_seq_max=_MOST, kv_unified=True)
    is_gpu = setup.driver is not None
    longer = layer.n_ctx * _LONGER if is_gpu else _ENDLESS
    tensor = replace(layer, mode=SplitMode.TENSOR, n_ctx=longer)
    body: dict[str, Any] = {"layer": layer.to_json(), "tensor": tensor.to_json()}
    wanted = {n: asyncio.run(host(setup, model, layer, None, n)) for n in _N_STREAMS}
    body["undisturbed"] = wanted
    with Meter(setup.groups, setup.driver) as meter:
        body["fits"] = opening(setup, model, layer)
    taken = {group: seen.taken for group, seen in meter.seen.items()}
    body["layer_takes"] = taken
    failures = [] if body["fits"]["status"] == "opened" else [f"layer mode does not open: {body['fits']}"]
    if is_gpu:
        with held({group: n_bytes // 2 for group, n_bytes in taken.items()}):
            body["half"] = {one.mode.value: opening(setup, model, one) for one in (layer, tensor)}
        if body["half"]["layer"]["status"] != "refused":
            failures.append(f"layer mode in half of its memory does not return an error: {body['half']['layer']}")
    with held({group: n_bytes + _ROOM_BYTES for group, n_bytes in taken.items()}) as free:
        body["free"] = free
        body["enough"] = {one.mode.value: opening(setup, model, one) for one in (layer, tensor)}
        if body["enough"]["layer"]["status"] != "opened":
            failures.append(f"layer mode does not open in its own memory: {body['enough']['layer']}")
        if body["enough"]["tensor"]["status"] != "died" and is_gpu:
            failures.append(f"tensor mode does not abort where it does not fit: {body['enough']['tensor']}")
        found = {n: asyncio.run(host(setup, model, layer, tensor, n)) for n in _N_STREAMS}
    body["hosted"] = found
    n_lost = 1 if body["enough"]["tensor"]["status"] == "died" else 0
    for n, seen in found.items():
        failures += [f"{n} streams: {what}" for what in _wrong(setup, model, wanted[n], seen, n_lost=n_lost)]
    return body | {"failures": failures}


def opening(setup: Setup, model: Path, placement: Placement) -> dict[str, Any]:
    """Open a session in a child.

    Returns:
        Under ``status`` opened, refused (it returned an error) or died.
    """
    n_prompt = min(placement.n_ctx // 2, 4 * placement.n_ubatch)
    job = {"job": "open", **setup.session(model, placement), "n_prompt": n_prompt}
    child = run_child(_JOBS, job, _TIMEOUT_S)
    if child.end or not child.told:
        return {"status": "died", "at": child.at.get("at"), "end": child.end}
    return child.told[-1]


@contextmanager
def held(leave: dict[str, int]) -> Iterator[dict[str, int]]:
    """Hold the memory of every GPU but so many bytes; processors' is left alone.

    Yields:
        What is free of each, bytes.
    """
    children: list[subprocess.Popen[str]] = []
    free = {}
    try:
        for number, (group, n_bytes) in enumerate(leave.items()):
            if group == HOST:
                continue
            words = json.dumps({"job": "hold", "gpu": number, "leave": n_bytes})
            child = subprocess.Popen(
                [sys.executable, "-m", _JOBS, words],
                cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            children.append(child)
            said = child.stdout.readline() if child.stdout else ""
            if not said.startswith("{"):
                raise SystemExit(f"check_gpu: the memory of {group} cannot be held: {said!r}")
            free[group] = json.loads(said)["free"]
        yield free
    finally:
        for child in children:
            child.communicate("")


async def host(setup: Setup, model: Path, layer: Placement, target: Placement | None, n_streams: int) -> dict[str, Any]:
    """Serve so many streams in layer mode, and switch by force on the way where there is a target.

    Returns:
        The tokens of every stream, how each ended, the outcome of the switch, and the status at the end.
    """
    n_vocab = read_facts(model).n_vocab
    requests = [
        GenerateRequest(
            tokens=tuple(tokens_of(_N_PROMPT, n_vocab, 10 + stream)),
            n_predict=_N_PREDICT,
            sampler=SamplerSpec(temp=0.0),
        )
        for stream in range(n_streams)
    ]
    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        config = HostConfig(
            model=model, library=setup.library, placement=layer, name="short", state_folder=Path(folder)
        )
        supervisor = Supervisor(config, env=dict(os.environ, GGML_NO_BACKTRACE="1"), log=said.append)
        await supervisor.start()
        try:
            texts, readers = await start_streams(supervisor, requests, _N_BEFORE)
            outcome = None
            if target is not None:
                await texts[-1].has_some.wait()
                drawn = [len(text.tokens) for text in texts]
                changes = {"mode": target.mode, "n_ctx": target.n_ctx}
                outcome = await supervisor.switch(changes, SwitchOptions(force=True, via=Route.IN_PLACE))
                outcome["drawn_before"] = drawn
            await asyncio.gather(*readers)
            status = supervisor.status()
        finally:
            await supervisor.stop(save=False)
    kept = ("state", "effective", "worker_restarts", "recomputed")
    return {
        "texts": [text.tokens for text in texts],
        "ends": [text.done.why.value if text.done else "" for text in texts],
        "outcome": outcome,
        "status": {name: status[name] for name in kept},
        "said": said,
    }


def _wrong(setup: Setup, model: Path, wanted: dict[str, Any], found: dict[str, Any], n_lost: int) -> list[str]:
    """Say what is wrong with the hosted session."""
    failures = []
    outcome, status = found["outcome"], found["status"]
    if outcome["status"] != "fell_back" or outcome["effective"] != "layer":
        failures.append(f"the switch came to {outcome['status']} in {outcome['effective']}: {outcome['reason']}")
    if status["state"] != "serving" or status["worker_restarts"] != n_lost:
        failures.append(f"the session is {status['state']} after {status['worker_restarts']} lost workers")
    n_vocab = read_facts(model).n_vocab
    found["equal"] = [one == other for one, other in zip(found["texts"], wanted["texts"], strict=True)]
    if not all(found["equal"]):
        # Who else was in a batch changes the order of floats: a fresh context judges what differs.
        texts = [
            ([*tokens_of(_N_PROMPT, n_vocab, 10 + stream), *text], _N_PROMPT)
            for stream, text in enumerate(found["texts"])
        ]
        found["differ_at"] = [
            _first_other(one, other) for one, other in zip(found["texts"], wanted["texts"], strict=True)
        ]
        try:
            gaps = greedy_gaps.measure(setup.library, model, texts, setup.devices)
        except RuntimeError as error:
            return [*failures, str(error)]
        found["gaps"] = [[gap.worst, gap.control, gap.n_other] for gap in gaps]
        failures += [f"stream {stream} has other tokens" for stream, gap in enumerate(gaps) if not gap.is_right]
    failures += [f"a stream ended with {end}" for end in found["ends"] if end != "length"]
    return failures


def _first_other(one: list[int], other: list[int]) -> int | None:
    """Find the first token that differs; None where none does."""
    return next((index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
