"""Lets the library's own switch find no memory, for real: another process holds what the GPUs have left.

The call frees the old placement, cannot place the new one, places the old one again and returns false: the session has
to go on with the tokens that it would have drawn without the attempt, and to switch by the same call once there is
memory. On processors the address space is limited instead. This module is also the child that does it.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from llama_native import Library
from splitctl.carry.sampling import SamplerSpec
from splitctl.outcome import Route, Via
from splitctl.placement import Placement, SplitMode
from splitctl.session import Session
from tools.check_gpu_short import held
from tools.children import run_child, say
from tools.gpu_jobs import tokens_of
from tools.gpu_meter import HOST, Setup

_MIB = 1024 * 1024
_TIMEOUT_S = 300.0
_N_PROMPT, _N_BEFORE, _N_AFTER = 400, 8, 32
#: What is left beyond the placement that serves: less than a quarter of a model, more than what the calls around take.
_ROOM_BYTES = 64 * _MIB
_HOST_ROOM_BYTES = 8 * _MIB


def declining(setup: Setup, model: Path, size: tuple[int, int]) -> dict[str, Any]:
    """Switch by the library's own call to a tensor split that does not fit, and again where it does.

    Args:
        setup: where.
        model: the GGUF.
        size: context and micro-batch, tokens.

    Returns:
        What was seen, and under ``failures`` what is wrong.
    """
    groups = dict.fromkeys(setup.groups)
    # Three quarters on one of two GPUs, or, where one stands for two, the buffers of a second device, are too much.
    is_pair = len(groups) > 1 or HOST in groups
    here = setup.place(SplitMode.LAYER if is_pair else SplitMode.NONE, *size)
    there = setup.place(SplitMode.TENSOR, *size)
    too_large = there.changed(tensor_split=(3.0, 1.0)) if is_pair else there
    job = {
        "model": str(model), "library": str(setup.library), "here": here.to_json(), "there": there.to_json(),
        "groups": list(groups),
    }  # fmt: skip
    body: dict[str, Any] = {}
    for name, more in (("undisturbed", {}), ("short", {"too_large": too_large.to_json()})):
        child = run_child("tools.check_gpu_native", job | more, _TIMEOUT_S)
        if child.end or not child.told:
            return body | {"failures": [f"the library's own switch: {name}: died {child.at.get('at')}: {child.end}"]}
        body[name] = child.told[-1]
    return body | {"failures": list(_wrong(body, here.mode.value))}


def _wrong(body: Mapping[str, Any], mode: str) -> Iterator[str]:
    """Say what is wrong."""
    declined, later = body["short"]["declined"], body["short"]["later"]
    if (declined["status"], declined["via"], declined["effective"]) != ("fell_back", Via.NATIVE.value, mode):
        yield f"a switch without memory came to {declined['status']} by {declined['via']}: {declined['reason']}"
    if (later["status"], later["via"]) != ("switched", Via.NATIVE.value):
        yield f"a switch after it came to {later['status']} by {later['via']}: {later['reason']}"
    if body["short"]["tokens"] != body["undisturbed"]["tokens"]:
        yield "the session draws other tokens after a switch that found no memory"


@contextmanager
def _full(groups: list[str]) -> Iterator[dict[str, int]]:
    """Leave no memory but a little; gives what is free of each group, bytes."""
    if HOST not in groups:
        with held(dict.fromkeys(groups, _ROOM_BYTES)) as free:
            yield free
        return
    threading.stack_size(_MIB)  # our own threads shall find room
    former = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + _HOST_ROOM_BYTES, former[1]))
    try:
        yield {HOST: _HOST_ROOM_BYTES}
    finally:
        resource.setrlimit(resource.RLIMIT_AS, former)


def main() -> None:
    """Read, generate, switch without memory where that is asked for, generate, and switch with memory."""
    job = json.loads(sys.argv[1])
    here, there = Placement.from_json(job["here"]), Placement.from_json(job["there"])
    library = Library.open(job["library"], env=os.environ)
    say(at="opening")
    body: dict[str, Any] = {}
    with Session.open(job["model"], here, library=library, prober=None) as session:
        session.set_sampler(SamplerSpec(temp=0.0))
        session.prefill(tokens_of(_N_PROMPT, session.facts.n_vocab))
        tokens = [session.advance([0])[0].id for _ in range(_N_BEFORE)]
        session.reserve(here.n_ctx)  # what a switch takes of the host is there before memory is short
        if "too_large" in job:
            say(at="switching without memory")
            with _full(job["groups"]) as free:
                outcome = session.switch(Placement.from_json(job["too_large"]), via=Route.NATIVE, force=True)
            body = {"free": free, "declined": outcome.to_json()}
        say(at="going on")
        tokens += [session.advance([0])[0].id for _ in range(_N_AFTER)]
        if "too_large" in job:
            say(at="switching with memory")
            body["later"] = session.switch(there, via=Route.NATIVE, force=True).to_json()
            session.advance([0])
    say(status="done", tokens=tokens, **body)


if __name__ == "__main__":
    main()
