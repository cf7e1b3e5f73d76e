"""What `check_gpu` lets children do: work in a session, open one, or hold a GPU's memory. One JSON object each.

A child says on stdout where it is ({"at": ...}) and what came of it ({"status": ...}); the library may end it.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from llama_native import Library, NativeError
from splitctl.carry.sampling import SamplerSpec
from splitctl.engine.buffer_lines import buffer_lines
from splitctl.errors import SplitctlError
from splitctl.placement import Placement
from splitctl.session import Session
from tools.children import say

_MIB = 1024 * 1024
#: Memory is held in pieces of this size, and what is left in pages of a GPU.
_PIECE_BYTES = 1024 * _MIB
_PAGE_BYTES = 2 * _MIB
#: Tokens below it are bytes and controls; see `make_large`.
FIRST_WORD = 259
_WARM_UP = 512


def tokens_of(n: int, n_vocab: int, seed: int = 1) -> list[int]:
    """Draw a prompt of words, int[n]."""
    return [int(one) for one in np.random.default_rng(seed).integers(FIRST_WORD, n_vocab, n)]


def work(job: Mapping[str, Any]) -> None:
    """Open a session, read a prompt, generate, and for every further placement switch, read and generate again.

    Free memory is told before, when the session is open, and after each step, by the library's own word.

    Job: model, library, placement, n_warm_up, n_prompt, n_generate, switches (placements), n_further (tokens read after
    each switch).
    """
    library = Library.open(job["library"], env=os.environ)
    heard: list[str] = []
    library.log.listen(lambda _, text: heard.append(text))
    say(at="opening")
    placement = Placement.from_json(job["placement"])
    free = [_free(library, placement.devices)]
    started = perf_counter()
    with Session.open(job["model"], placement, library=library, prober=None) as session:
        body: dict[str, Any] = {"build": library.version, "open_s": perf_counter() - started, "steps": []}
        free.append(_free(library, placement.devices))
        lines = buffer_lines("".join(heard).splitlines())
        body["lines"] = [[line.buffer, line.kind, line.n_bytes] for line in lines]
        n_vocab = session.facts.n_vocab
        if job["n_warm_up"]:
            say(at="warming up")
            _step(session, tokens_of(job["n_warm_up"], n_vocab), 8)
            session.remove_sequence(0)
        say(at="working")
        body["steps"].append(_step(session, tokens_of(job["n_prompt"], n_vocab), job["n_generate"]))
        free.append(_free(library, placement.devices))
        for plain in job["switches"]:
            target = Placement.from_json(plain)
            say(at=f"switching to {target.mode.value}")
            outcome = session.switch(target, force=True)
            step = _step(session, tokens_of(job["n_further"], n_vocab, 2), job["n_generate"])
            body["steps"].append(step | {"switch": outcome.to_json()})
            free.append(_free(library, placement.devices))
    body["free"] = free
    body["log"] = [text for text in "".join(heard).splitlines() if _is_worth_keeping(text)]
    say(status="done", **body)


def _free(library: Library, names: Sequence[str]) -> int:
    """Sum the free memory of devices by the library's own word, bytes."""
    return sum(device.memory_free for device in library.devices() if device.name in names)


def _is_worth_keeping(line: str) -> bool:
    words = ("AllReduce", "NCCL", "pipeline", "virtual device", "flash", "graph splits", "failed")
    return any(word in line for word in words)


def _step(session: Session, prompt: list[int], n_generate: int) -> dict[str, Any]:
    """Read and generate; rates in tokens per second, None where nothing was done."""
    mode = session.placement.mode.value
    laps = [perf_counter()]
    if prompt:
        session.prefill(prompt)
    laps.append(perf_counter())
    made = [token.id for token in session.generate(n=n_generate, sampler=SamplerSpec(temp=0.0))]
    laps.append(perf_counter())
    return {
        "mode": mode,
        "prompt_tps": len(prompt) / (laps[1] - laps[0]) if prompt else None,
        "generate_tps": len(made) / (laps[2] - laps[1]) if made else None,
        "tokens": made[:16],
    }


def try_opening(job: Mapping[str, Any]) -> None:
    """Open a session and say how that went, if there is anybody left to say it."""
    library = Library.open(job["library"], env=os.environ)
    say(at="opening")
    try:
        with Session.open(job["model"], Placement.from_json(job["placement"]), library=library, prober=None) as session:
            say(at="working")
            _step(session, tokens_of(job["n_prompt"], session.facts.n_vocab), 4)
    except (NativeError, SplitctlError) as error:
        say(status="refused", error=f"{type(error).__name__}: {error}")
        return
    say(status="opened")


def hold(job: Mapping[str, Any]) -> None:
    """Take all memory of a GPU but so much, by plain allocations, until stdin ends.

    Job: gpu (index as this process sees it), leave (bytes).
    """
    driver = ctypes.CDLL("libcuda.so.1")

    def check(code: int, what: str) -> None:
        if code:
            raise SystemExit(f"{what} failed: CUDA error {code}")

    device, context = ctypes.c_int(), ctypes.c_void_p()
    check(driver.cuInit(0), "cuInit")
    check(driver.cuDeviceGet(ctypes.byref(device), job["gpu"]), "cuDeviceGet")
    check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    check(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")

    def free() -> int:
        n_free, total = ctypes.c_size_t(), ctypes.c_size_t()
        check(driver.cuMemGetInfo_v2(ctypes.byref(n_free), ctypes.byref(total)), "cuMemGetInfo")
        return n_free.value

    left = free() - job["leave"]
    while left >= _PAGE_BYTES:
        size = min(left // _PAGE_BYTES * _PAGE_BYTES, _PIECE_BYTES)
        address = ctypes.c_ulonglong()
        check(driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)), f"taking {size} bytes")
        left -= size
    say(status="held", free=free())
    while os.read(sys.stdin.fileno(), 4096):
        pass


JOBS = {"work": work, "open": try_opening, "hold": hold}


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    JOBS[told["job"]](told)
