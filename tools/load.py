"""Ask a server for text from many clients at once, switch under them, and check every answer.

    python -m tools.load [--json] [--clients 50] [--seconds 60] [--switches 2] [--slots 8] [--model FILE [--lib PATH]]

A host is started on a port of this machine, on the tests' stub library unless a model is named. Clients keep their
connections and ask for one answer after the other, three of four as a stream. Switches, between layer and tensor, are
asked for over HTTP at even times. With the stub every text must be that which a single client got before; with a model
the tokens of answers that a switch interrupted are compared with a fresh context (greedy_gaps), and all are counted.

requests_per_s, tokens_per_s   over all clients, from the first request to the end of the last answer
first_token_ms                 from sending a request to its first token, waiting for a sequence included
pause_ms                       of every stream under way at a switch: its longest silence that touches the switch
switches                       how each ended, and its own time, ms
faults                         anything but 200; texts that differ; tokens lost or doubled; switches that failed

Exit code 0: there are no faults.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.ctl.houses import house, stub_arguments
from tests.ctl.web import web
from tools import greedy_gaps
from tools.places import usable_library

_N_PROMPTS = 40
_N_TOKENS = 48
_STREAMS_OF = 4
"""One of so many requests is for a whole answer."""
_MOST_JUDGED = 24
_MOST_FAULTS = 20
_WORDS = ("water", "a letter", "the sea", "bread", "music", "seven", "the moon", "a small dog")


@dataclass(slots=True)
class Answer:
    """What a client got.

    Args:
        prompt: number of its prompt.
        sent_at: when it was asked for, s.
        times: when its tokens came, s.
        tokens: their ids.
        text: the text.
        status: HTTP status.
        error: what was wrong, if anything.
        n_counted: tokens by the server's count.
        stop_type: what ended it, in llama-server's words.
    """

    prompt: int
    sent_at: float
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    status: int = 0
    error: str = ""
    n_counted: int = -1
    stop_type: str = ""


@dataclass(frozen=True, slots=True)
class Move:
    """A switch that was asked for.

    Args:
        began: when, s.
        ended: when, s.
        outcome: the server's answer.
    """

    began: float
    ended: float
    outcome: dict[str, Any]


class Client:
    """One client, and its connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._end: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, path: str, body: dict[str, Any], on_line: Callable[[bytes], None]) -> int:
        """Send a request; give its status, and its body line by line."""
        if self._end is None:
            self._end = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        reader, writer = self._end
        raw = json.dumps(body).encode()
        writer.write(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)
        status = int((await reader.readline()).split(b" ")[1])
        headers = {}
        while (line := await reader.readline()) not in {b"\r\n", b""}:
            name, _, value = line.decode().strip().partition(": ")
            headers[name.lower()] = value
        if "content-length" in headers:
            on_line(await reader.readexactly(int(headers["content-length"])))
            return status
        rest = b""
        while n := int(await reader.readline(), 16):
            rest += await reader.readexactly(n)
            await reader.readline()
            *lines, rest = rest.split(b"\n")
            for one in lines:
                on_line(one)
        await reader.readline()
        return status

    async def answer(self, prompt: int, given: str | list[int], *, is_stream: bool) -> Answer:
        """Ask for one answer."""
        answer = Answer(prompt, time.monotonic())
        body = {
            "prompt": given,
            "max_tokens": _N_TOKENS,
            "temperature": 0,
            "stream": is_stream,
            "return_tokens": True,
            **({"stream_options": {"include_usage": True}} if is_stream else {}),
        }
        is_whole = not is_stream

        def on_line(line: bytes) -> None:
            nonlocal is_whole
            if is_stream and line == b"data: [DONE]":
                is_whole = True
            elif not is_stream or line.startswith(b"data: "):
                _take(answer, json.loads(line.removeprefix(b"data: ")))

        try:
            answer.status = await self.ask("/v1/completions", body, on_line)
        except (OSError, ValueError, EOFError, IndexError) as error:
            answer.error, self._end = f"{type(error).__name__}: {error}", None
        if not is_whole and not answer.error:
            answer.error = "the stream ended early"
        return answer

    def close(self) -> None:
        """Hang up."""
        if self._end is not None:
            self._end[1].close()


def _take(answer: Answer, body: dict[str, Any]) -> None:
    if "error" in body:
        answer.error = str(body["error"]["message"])
        return
    for choice in body["choices"]:
        answer.text += choice["text"]
        answer.tokens += choice.get("tokens", [])
        answer.times += [time.monotonic()] * bool(choice.get("tokens"))
    answer.stop_type = body.get("stop_type", answer.stop_type)
    if body.get("usage"):
        # The server counts the token that ended the answer as well, and does not send it.
        answer.n_counted = body["usage"]["completion_tokens"] - (answer.stop_type == "eos")


async def load(
    port: int, prompts: Sequence[str | list[int]], *, n_clients: int, seconds: float, n_switches: int
) -> tuple[list[Answer], list[Move]]:
    """Let clients ask until the time is over; every answer that was begun is waited for.

    Args:
        port: of the server.
        prompts: texts or tokens.
        n_clients: at once.
        seconds: how long new requests are sent.
        n_switches: at even times within.

    Returns:
        All answers, and all switches.
    """
    answers: list[Answer] = []
    started = time.monotonic()
    numbers = iter(range(1 << 60))

    async def client() -> None:
        one = Client(port)
        while time.monotonic() - started < seconds:
            number = next(numbers)
            prompt = number % len(prompts)
            answers.append(await one.answer(prompt, prompts[prompt], is_stream=number % _STREAMS_OF != 0))
        one.close()

    async def switches() -> list[Move]:
        moves = []
        for number in range(n_switches):
            await asyncio.sleep(max(0.0, started + seconds * (number + 1) / (n_switches + 1) - time.monotonic()))
            # A connection of its own: the server closes one that is silent for so long.
            one, began, told = Client(port), time.monotonic(), list[bytes]()
            await one.ask("/split-mode", {"to": "layer" if number % 2 else "tensor"}, told.append)
            moves.append(Move(began, time.monotonic(), json.loads(told[0])))
            one.close()
        return moves

    switching = asyncio.create_task(switches())
    await asyncio.gather(*(client() for _ in range(n_clients)))
    return answers, await switching


def longest_silence(answer: Answer, move: Move) -> float | None:
    """Give the longest time without a token that touches a switch, s; None for an answer that was not under way."""
    times = answer.times
    touching = [b - a for a, b in itertools.pairwise(times) if a < move.ended and b > move.began]
    return max(touching, default=None)


def wrong_texts(answers: Sequence[Answer], expected: Sequence[Answer]) -> list[str]:
    """Compare texts and tokens with those that a single client got."""
    return [
        f"prompt {one.prompt}: {one.text!r} with {len(one.tokens)} tokens; wanted {expected[one.prompt].text!r}"
        for one in answers
        if not one.error and (one.text, one.tokens) != (expected[one.prompt].text, expected[one.prompt].tokens)
    ]


def gaps_of(
    answers: Sequence[Answer], moves: Sequence[Move], prompts: Sequence[list[int]], library: Path, model: Path
) -> tuple[list[str], float]:
    """Compare answers that a switch interrupted with a fresh context; give faults and the worst gap, logits."""
    moved = [one for one in answers if any(longest_silence(one, move) is not None for move in moves)]
    judged = [one for one in moved if len(one.tokens) > 1][:_MOST_JUDGED]
    texts = [([*prompts[one.prompt], *one.tokens], len(prompts[one.prompt])) for one in judged]
    gaps = greedy_gaps.measure(library, model, texts) if texts else []
    faults = [f"prompt {one.prompt}: {gap.fault}" for one, gap in zip(judged, gaps, strict=True) if not gap.is_right]
    return faults, max((gap.worst for gap in gaps), default=0.0)


def summary(answers: Sequence[Answer], moves: Sequence[Move], faults: list[str]) -> dict[str, Any]:
    """Put together what was seen."""
    for one in answers:
        if one.status != 200 or one.error:
            faults.append(f"prompt {one.prompt}: status {one.status}: {one.error}")
        elif len(one.tokens) != one.n_counted:
            faults.append(f"prompt {one.prompt}: {len(one.tokens)} tokens came of {one.n_counted}")
    faults += [f"a switch ended as {one.outcome}" for one in moves if one.outcome.get("status") != "switched"]
    seconds = max(time for one in answers for time in one.times) - min(one.sent_at for one in answers)
    streams = [one for one in answers if len(one.times) > 1]
    pauses = [gap for move in moves for one in streams if (gap := longest_silence(one, move)) is not None]
    return {
        "requests": len(answers),
        "requests_per_s": round(len(answers) / seconds, 1),
        "tokens_per_s": round(sum(len(one.tokens) for one in answers) / seconds, 1),
        "first_token_ms": _spread([one.times[0] - one.sent_at for one in streams]),
        "pause_ms": _spread(pauses),
        "switches": [
            {name: move.outcome.get(name) for name in ("status", "effective", "total_ms", "n_tokens")} for move in moves
        ],
        "n_faults": len(faults),
        "faults": faults[:_MOST_FAULTS],
    }


def _spread(seconds: Sequence[float]) -> dict[str, float | int]:
    if not seconds:
        return {"n": 0}
    ordered = sorted(one * 1e3 for one in seconds)
    return {
        "median": round(statistics.median(ordered), 1),
        "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 1),
        "worst": round(ordered[-1], 1),
        "n": len(ordered),
    }


@contextmanager
def host(model: Path | None, library: Path | None, n_slots: int) -> Iterator[int]:
    """Start a host and give its port."""
    with house() as home:
        if model is None:
            placed: list[str | Path] = [*stub_arguments(home.folder), "-c", str(128 * n_slots)]
        else:
            placed = ["-m", model, "--device", "CPU,CPU", "-c", str(128 * n_slots), "-t", "1"]
            placed += [] if library is None else ["--lib", library]
        with web(home, *placed, "-np", str(n_slots), "-sm", "layer") as server:
            yield server.port
            status, log = server.host.end()
            if status:
                raise RuntimeError(f"the host ended with {status}: {log}")


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Do all of it."""
    how = {"n_clients": asked.clients, "seconds": asked.seconds, "n_switches": asked.switches}
    texts = [f"Number {index}: tell me about {_WORDS[index % len(_WORDS)]}" for index in range(_N_PROMPTS)]
    if asked.model is None:
        with host(None, None, asked.slots) as port:
            expected = asyncio.run(_calm(port, texts))
            answers, moves = asyncio.run(load(port, texts, **how))
        return {**how, "slots": asked.slots, **summary(answers, moves, wrong_texts(answers, expected))}
    library = usable_library(asked.lib)
    prompts = greedy_gaps.tokenize(library, asked.model, texts)
    with host(asked.model, asked.lib, asked.slots) as port:
        answers, moves = asyncio.run(load(port, prompts, **how))
    faults, worst = gaps_of(answers, moves, prompts, library, asked.model)
    return {**how, "slots": asked.slots, **summary(answers, moves, faults), "worst_gap": round(worst, 3)}


async def _calm(port: int, prompts: Sequence[str]) -> list[Answer]:
    """Let a single client ask for everything, in order."""
    client = Client(port)
    answers = [await client.answer(number, prompt, is_stream=True) for number, prompt in enumerate(prompts)]
    client.close()
    return answers


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; its exit code is 0 without faults, 1 with them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--switches", type=int, default=2)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--lib", type=Path)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    result = run(asked)
    if asked.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{name}: {value}" for name, value in result.items()))
    return 1 if result["n_faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
