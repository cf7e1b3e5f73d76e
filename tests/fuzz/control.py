"""Bad requests to the control socket of a host that lives: random bytes, damaged requests, clients that misbehave.

The law: whoever sends whatever gets at most one last line, a result or an error that says whose fault it is, what was
found and what was wanted; no fault of ours comes out; and afterwards the host serves the same tokens as before, with
no more memory and no more descriptors.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import psutil

from splitctl.carry.sampling import SamplerSpec
from splitctl.control.client import ask
from splitctl.control.requests import MAX_REQUEST_BYTES, REQUESTS, GenerateRequest, StatusRequest
from splitctl.control.sockets import Address
from splitctl.ipc.jobs import CANCEL
from splitctl.ipc.wire import MessageInvalid, from_line

_GUARD_S = 120.0
_N_CLIENTS = 4
#: What a host may hold more at the end than after the first part of the cases [bytes].
GROWTH_BYTES = 8 << 20
_WARM_SHARE = 0.3

#: Sound requests, which are damaged; none of them writes a file, ends the host, or takes long.
_SOUND: tuple[dict[str, Any], ...] = (
    {"kind": "status"},
    {"kind": "switch", "changes": {"mode": "tensor"}, "proof": "off", "convert": True, "force": False, "timeout_s": 5},
    {"kind": "switch", "changes": {"devices": ["STUB0", "STUB1"], "tensor_split": [1, 1], "n_batch": 64}},
    {"kind": "check", "changes": {"type_k": "q8_0", "flash_attn": "on"}, "convert": True, "force": False},
    {"kind": "generate", "prompt": "hello", "n_predict": 2, "sampler": {"temp": 0.0, "seed": 1, "stop": ["x"]}},
    {"kind": "generate", "tokens": [1, 2, 3], "n_predict": 1, "add_special": True, "parse_special": False},
    {"kind": "generate", "messages": [{"role": "user", "content": "hi"}], "n_predict": 1},
    {"kind": "save", "path": "not/absolute"},
    {"kind": "restore", "path": "/nonexistent/carry"},
    {"kind": "stop", "now": True},
    {"kind": "events"},
)
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 7, 2**31, 2**63, -(10**400), 10**400, 0.5, -1e308, float("nan"), float("inf"), "", "x",
    "tensor", "\ud800", "\0", "é" * 50, "x" * 3000, "../../x", [], [[]], {}, {"kind": "status"}, [None], [1, "2"],
    ["CPU"], {"mode": "sideways"}, {"": ""}, [{"role": "user"}],
)  # fmt: skip


class Finding(Exception):
    """The law was broken."""


@dataclass(slots=True)
class Tally:
    """What came of the cases.

    Attributes:
        n_cases: how many.
        ends: how many ended in which way.
        growth_bytes: what the host held more at the end than after the first part of the cases.
        growth_fds: descriptors likewise.
    """

    n_cases: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    growth_bytes: int = 0
    growth_fds: int = 0


def case(rng: random.Random) -> bytes:
    """One line, most likely bad; with its line feed or without."""
    kind = rng.randrange(10)
    if kind == 0:
        return rng.randbytes(rng.randrange(200))
    if kind == 1:
        return b"[" * rng.randrange(1, 50_000) + b"\n"
    if kind == 2:
        return b'{"kind":"generate","prompt":"' + b"a" * rng.randrange(1 << 18) + rng.choice((b"", b'"', b"\n"))
    body = json.loads(json.dumps(rng.choice(_SOUND)))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        _damage(body, rng)
    if body == {"kind": "stop"}:
        # The one request that would end the host.
        body["now"] = True
    line = json.dumps(body, ensure_ascii=rng.random() < 0.9).encode("utf-8", "surrogatepass")
    if kind == 3:
        at = rng.randrange(len(line))
        line = line[:at] + rng.randbytes(rng.randrange(4)) + line[at + rng.randrange(3) :]
    elif kind == 4:
        line = line[: rng.randrange(len(line) + 1)]
    return line + rng.choice((b"\n", b"\n", b"\n", b"", b"\r\n", b"\n\n\n", b"\n" + CANCEL, b"\nwhat\n"))


def _damage(body: dict[str, Any], rng: random.Random) -> None:
    """Change one thing, somewhere."""
    where: Any = body
    while True:
        keys = list(where) if isinstance(where, dict) else list(range(len(where)))
        if not keys:
            return
        key = rng.choice(keys)
        inner = where[key]
        if not isinstance(inner, dict | list) or rng.random() < 0.4:
            break
        where = inner
    what = rng.randrange(4)
    if what == 0 and isinstance(where, dict):
        del where[key]
    elif what == 1 and isinstance(where, dict):
        where[rng.choice(("more", "kind", "", "order", "changes", "path"))] = copy.deepcopy(rng.choice(_VALUES))
    else:
        where[key] = copy.deepcopy(rng.choice(_VALUES))


def is_bad(line: bytes) -> bool:
    """Whether the line is no request."""
    try:
        from_line(line.partition(b"\n")[0], REQUESTS, max_bytes=MAX_REQUEST_BYTES)
    except MessageInvalid:
        return True
    return False


def send(address: Address, line: bytes, rng: random.Random) -> str:
    """Be one client.

    Returns:
        How it ended: left, silent, result, or the fault of the error.

    Raises:
        Finding: the answer is none.
    """
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_GUARD_S)
        client.connect(str(address.path))
        try:
            if rng.random() < 0.2 and len(line) > 2:
                middle = rng.randrange(len(line))
                client.sendall(line[:middle])
                client.sendall(line[middle:])
            else:
                client.sendall(line)
            if rng.random() < 0.15:
                return "left"
            client.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            # It has answered already, and waits for no more.
            pass
        except OSError as error:
            # The other end is gone: only then can this half not be closed.
            if error.errno is None:
                raise
        return _end_of(_read(client), line)


def _read(client: socket.socket) -> bytes:
    said = bytearray()
    try:
        while chunk := client.recv(1 << 16):
            said += chunk
    except ConnectionResetError:
        # It hung up on bytes that it had no use for; what it said before that has been read.
        return bytes(said)
    except TimeoutError as error:
        raise Finding(f"no end within {_GUARD_S:g} s") from error
    return bytes(said)


def _end_of(said: bytes, line: bytes) -> str:
    lines = [json.loads(one) for one in said.splitlines()]
    if not lines:
        if line.partition(b"\n")[0]:
            raise Finding("no answer")
        return "silent"
    *told, last = lines
    if any(set(one) != {"event"} for one in told):
        raise Finding(f"more than one last line: {lines[:3]}")
    match last:
        case {"result": dict()} if not is_bad(line):
            return "result"
        case {"error": {"fault": str() as fault, "kind": str() as kind, "message": str() as message}}:
            if not message or "this is a fault of splitctl" in message:
                raise Finding(f"an error that is our fault: {kind}: {message}")
            if is_bad(line) and (fault, kind) not in {("config", "MessageInvalid"), ("busy", "Busy")}:
                raise Finding(f"a bad request that is {fault}, {kind}: {message}")
            return fault
        case _:
            raise Finding(f"no answer: {str(last)[:200]}")


def fuzz(address: Address, pid: int, n_cases: int, seed: int, *, tell: Callable[[str], None]) -> Tally:
    """Be many clients, a few at a time.

    Args:
        address: where the host is reached.
        pid: its process.
        n_cases: how many.
        seed: of all randomness.
        tell: takes the case that broke the law, for a person.

    Returns:
        What came of them.

    Raises:
        Finding: the law was broken.
    """
    before = _tokens(address)
    tally = Tally()
    process = psutil.Process(pid)
    n_warm = int(n_cases * _WARM_SHARE)

    broken = threading.Event()

    def one(number: int) -> str:
        if broken.is_set():
            return "not tried"
        rng = random.Random(f"{seed} {number}")
        line = case(rng)
        try:
            return send(address, line, rng)
        except Exception:
            broken.set()
            tell(f"case {number} of seed {seed}: {line[:300]!r}")
            raise

    with ThreadPoolExecutor(_N_CLIENTS) as pool:
        for numbers in (range(n_warm), range(n_warm, n_cases)):
            for end in pool.map(one, numbers):
                tally.n_cases += 1
                tally.ends[end] = tally.ends.get(end, 0) + 1
            _settle(address, process)
            memory, fds = process.memory_info().rss, process.num_fds()
            tally.growth_bytes, tally.growth_fds = memory - tally.growth_bytes, fds - tally.growth_fds
    if tally.growth_bytes > GROWTH_BYTES:
        raise Finding(f"the host holds {tally.growth_bytes} bytes more than after {n_warm} cases")
    if tally.growth_fds > 0:
        raise Finding(f"the host has {tally.growth_fds} descriptors more than after {n_warm} cases: {_held(pid)}")
    if _tokens(address) != before:
        raise Finding("the host draws other tokens than before")
    return tally


def _settle(address: Address, process: psutil.Process) -> None:
    """Wait until what clients that left have asked for is over, and every connection but the listening one is closed.

    A host closes a connection after its last line: whoever has read that line may look at its descriptors too early.
    A switch whose client has left goes on, with a child for its trial or a second worker beside the first.
    """
    deadline = monotonic() + _GUARD_S
    while ask(address, StatusRequest())["streams"]:
        pass
    while sum(one.laddr == str(address.path) for one in process.net_connections("unix")) > 1:
        if monotonic() > deadline:
            raise Finding(f"a connection is still open {_GUARD_S:g} s after its client left")
    while len(process.children()) > 1:
        if monotonic() > deadline:
            raise Finding(f"a child other than the worker lives {_GUARD_S:g} s after the last request")


def _held(pid: int) -> list[str]:
    """What every descriptor of the process is."""
    held = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            held.append(f"{entry.name}: {entry.readlink()}")
    return sorted(held)


def _tokens(address: Address) -> list[int]:
    told: list[dict[str, Any]] = []
    request = GenerateRequest(prompt="the quick brown fox", n_predict=8, sampler=SamplerSpec(temp=0.0))
    ask(address, request, on_event=told.append)
    return [one["token"] for one in told if one["kind"] == "delta" and one["token"] is not None]
