"""The long fuzz of `ci/fuzz --http`: bad requests to a host, beside clients that hold connections and do nothing.

Laws: every whole request is answered with a status below 500; a refusal is an object of OpenAI's shape; the host lives,
serves everybody else, and holds no more memory at the end than after the first requests.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil

from tests.ctl.houses import house, stub_arguments
from tests.ctl.web import Web, web
from tests.fuzz.requests import Sent, request

#: For an answer; one that takes longer was starved [seconds].
_PATIENCE_S = 60.0
_N_AT_ONCE = 16
#: Clients that hold a connection and say nothing, or not enough.
_N_HOLDING = 600
#: Growth of the host and its worker that is still flat, after the warm-up [bytes].
FLAT_BYTES = 24 << 20
_MAX_FINDINGS = 10


@dataclass(slots=True)
class Tally:
    """What came back.

    Attributes:
        statuses: how often each.
        findings: how a law was broken, and by which request.
        worst_s: the longest wait for an answer.
        grown: bytes that host and worker hold more at the end than after the warm-up.
    """

    statuses: collections.Counter[int] = field(default_factory=collections.Counter)
    findings: list[str] = field(default_factory=list)
    worst_s: float = 0.0
    grown: int = 0


async def answer(port: int, sent: Sent) -> tuple[int, bytes] | None:
    """Send a request; give the status and body of its answer.

    Raises:
        EOFError: no answer came.
        TimeoutError: none came in time.
        ValueError: what came is no answer.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        writer.write(sent.raw)
        if not sent.is_whole:
            await writer.drain()
            return None
        async with asyncio.timeout(_PATIENCE_S):
            return await _read(reader, is_head=sent.is_head)
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader, *, is_head: bool) -> tuple[int, bytes]:
    status = 100
    headers: dict[str, str] = {}
    while status == 100:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(head[0].split(" ")[1])
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    if is_head:
        return status, b""
    if "content-length" in headers:
        return status, await reader.readexactly(int(headers["content-length"]))
    body = b""
    if headers.get("transfer-encoding") != "chunked":
        return status, await reader.read(-1)
    while n := int(await reader.readline(), 16):
        body += await reader.readexactly(n)
        await reader.readline()
    return status, body


def broken(sent: Sent, status: int, body: bytes) -> str:
    """Say which law an answer breaks; empty for none."""
    if not (200 <= status < 300 or 400 <= status < 500):
        return f"status {status}: {body[:200]!r}"
    if status < 400 or sent.is_head:
        return ""
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return f"status {status} with no error in it: {body[:200]!r}"
    if set(error) != {"message", "type", "param", "code"} or not error["message"] or len(error["message"]) > 1000:
        return f"an error of another shape: {body[:300]!r}"
    return ""


async def send_all(port: int, seed: int, numbers: range, tally: Tally) -> None:
    """Send requests, several at once."""
    left = iter(numbers)

    async def client() -> None:
        for number in left:
            if len(tally.findings) >= _MAX_FINDINGS:
                return
            sent = request(seed, number)
            started = time.monotonic()
            try:
                got = await answer(port, sent)
                fault = "" if got is None else broken(sent, *got)
                tally.statuses[0 if got is None else got[0]] += 1
            except (OSError, EOFError, TimeoutError, ValueError) as error:
                fault = f"no answer: {type(error).__name__}: {error}"
            tally.worst_s = max(tally.worst_s, time.monotonic() - started)
            if fault:
                tally.findings.append(f"seed {seed} request {number} ({sent.kind}): {fault}")

    await asyncio.gather(*(client() for _ in range(_N_AT_ONCE)))


async def hold(port: int, n: int) -> list[asyncio.StreamWriter]:
    """Open connections that say nothing, half a head, half a body, or a request whose answer nobody reads."""
    said = (
        b"",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
        b"GET /split-mode/events HTTP/1.1\r\nHost: localhost\r\n\r\n",
    )
    ends = []
    for number in range(n):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(said[number % len(said)])
        ends.append(writer)
    return ends


def memory(server: Web) -> int:
    """Give the resident memory of the host and what it started, bytes."""
    processes = [psutil.Process(server.host.process.pid), *server.host.below()]
    return sum(one.memory_info().rss for one in processes)


async def attack(server: Web, seed: int, n_cases: int, n_holding: int) -> Tally:
    """Send it all; the first fifth warms up."""
    tally = Tally()
    warm = n_cases // 5
    held = await hold(server.port, n_holding)
    await send_all(server.port, seed, range(warm), tally)
    before = memory(server)
    held += await hold(server.port, n_holding)
    await send_all(server.port, seed, range(warm, n_cases), tally)
    for end in held:
        end.close()
    tally.grown = memory(server) - before
    if tally.grown > FLAT_BYTES:
        tally.findings.append(f"host and worker hold {tally.grown >> 20} MiB more than after the first requests")
    if server.get("/health").body != {"status": "ok"}:
        tally.findings.append("the host is not well")
    return tally


@contextmanager
def target() -> Iterator[Web]:
    """Start a host of the stub library."""
    with house() as home, web(home, *stub_arguments(home.folder), "-np", "4") as server:
        yield server
        status, log = server.host.end()
        if status or "failed:" in log:
            raise RuntimeError(f"the host ended with {status}: {log[-2000:]}")


def main(arguments: list[str]) -> int:
    """Run; 0 when the laws held, 1 when one was broken."""
    parser = argparse.ArgumentParser(prog="ci/fuzz --http", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000, help="requests (default 10000)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="the same seed sends the same requests")
    parser.add_argument("--holding", type=int, default=_N_HOLDING, help="clients that hold a connection")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args(arguments)
    started = time.monotonic()
    with target() as server:
        tally = asyncio.run(attack(server, asked.seed, asked.cases, asked.holding))
    for finding in tally.findings:
        sys.stderr.write(f"fuzz: {finding}\n")
    body: dict[str, Any] = {
        "n_cases": asked.cases,
        "seed": asked.seed,
        "n_findings": len(tally.findings),
        "statuses": {str(status): n for status, n in sorted(tally.statuses.items())},
        "grown_mib": round(tally.grown / 2**20, 1),
        "worst_ms": round(tally.worst_s * 1e3, 1),
        "seconds": round(time.monotonic() - started, 1),
    }
    print(json.dumps(body) if asked.json else "  ".join(f"{key} {value}" for key, value in body.items()))
    return 1 if tally.findings else 0
