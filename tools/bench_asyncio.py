"""Lets eight tasks ask one session on an asyncio loop, with two switches and three cancels, and measures the loop.

Prints how many texts a fresh context finds right (greedy_gaps), and how long the loop was held: the longest time, and
the 99th percentile of what a callback waited that was due at once, every millisecond. Ends with 1 where a text is
wrong, or the percentile is over 50 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from llama_native import Library
from splitctl import AsyncSession, Placement, SamplerSpec
from tools import greedy_gaps
from tools.places import usable_library

GREEDY = SamplerSpec(temp=0.0)
N_TASKS, N_CANCELLED = 8, 3
MOST_HELD_MS = 50.0


async def watch(held_ms: list[float]) -> None:
    """Note every millisecond how much later than asked the loop came back, ms; until it is cancelled."""
    while True:
        asked = perf_counter()
        await asyncio.sleep(0.001)
        held_ms.append((perf_counter() - asked) * 1e3 - 1.0)


async def play(session: AsyncSession, n: int, modes: tuple[str, str]) -> dict[str, Any]:
    """Play the scene once; `n` tokens an answer."""
    prompts = [f"Task {number} begins with a few words of its own" for number in range(N_TASKS)]
    held_ms: list[float] = []
    watching = asyncio.ensure_future(watch(held_ms))
    streams = [session.text(prompt, n=n, sampler=GREEDY) for prompt in prompts]
    whole = [asyncio.ensure_future(stream.read()) for stream in streams]
    lost = [asyncio.ensure_future(session.text(f"Lost {one}", sampler=GREEDY).read()) for one in range(N_CANCELLED)]
    statuses = [(await session.switch(modes[0])).status.value]
    for one in lost:
        one.cancel()
    statuses.append((await session.switch(modes[1])).status.value)
    await asyncio.gather(*whole)
    ends = await asyncio.gather(*lost, return_exceptions=True)
    watching.cancel()
    held_ms.sort()
    return {
        "answers": [
            (await session.tokenize(one), list(held.tokens)) for one, held in zip(prompts, streams, strict=True)
        ],
        "cancelled": sum(isinstance(one, asyncio.CancelledError) for one in ends),
        "switches": statuses,
        "held_longest_ms": round(held_ms[-1], 3),
        "held_p99_ms": round(held_ms[int(len(held_ms) * 0.99)], 3),
        "looks": len(held_ms),
    }


def main() -> int:
    """Run it; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--library", type=Path, help="a libllama; left out: the first usable one")
    parser.add_argument("--device", default="CPU,CPU", help="devices of the session")
    parser.add_argument("--modes", default="tensor,layer", help="where it switches to, and back")
    parser.add_argument("-n", type=int, default=48, help="tokens of an answer")
    given = parser.parse_args()
    there, back = given.modes.split(",")

    async def whole() -> dict[str, Any]:
        placement = Placement().changed(
            mode=back, devices=given.device, n_ctx=4096, n_seq_max=4, kv_unified=True, flash_attn="on", n_threads=1
        )
        library = Library.open(usable_library(given.library))
        async with await AsyncSession.open(given.model, placement, library=library, prober=None) as session:
            return await play(session, given.n, (there, back))

    found = asyncio.run(whole())
    texts = [([*prompt, *tokens], len(prompt)) for prompt, tokens in found.pop("answers")]
    gaps = greedy_gaps.measure(usable_library(given.library), Path(given.model), texts, given.device.split(","))
    found["wrong"] = sum(not one.is_right for one in gaps)
    found["right"] = len(gaps) - found["wrong"]
    print(json.dumps(found))
    return 1 if found["wrong"] or found["held_p99_ms"] > MOST_HELD_MS else 0


if __name__ == "__main__":
    sys.exit(main())
