"""The supervisor's end of a serving worker, for tests: orders go out, reports come in, one after the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from splitctl.carry.sampling import SamplerSpec
from splitctl.carry.seal import Seal
from splitctl.ipc import orders
from splitctl.ipc.jobs import Failure, HostRequest, JobEvent, Progress, Result
from splitctl.ipc.process import WorkerProcess
from splitctl.ipc.wire import to_line
from splitctl.placement import FlashAttn, Placement, SplitMode

GUARD_S = 120.0
"""The longest silence before a test fails; no test measures it."""

Kind = TypeVar("Kind")


class Arenas:
    """Two memory files, as a supervisor holds them. Lifetime: until :meth:`close`."""

    def __init__(self) -> None:
        self.fds = (os.memfd_create("arena-0"), os.memfd_create("arena-1"))

    def flip(self, seal: Seal, at: int) -> None:
        """Change one byte of what is sealed."""
        (byte,) = os.pread(self.fds[seal.arena], 1, at)
        os.pwrite(self.fds[seal.arena], bytes([byte ^ 0x10]), at)

    def close(self) -> None:
        """Give the memory back."""
        for fd in self.fds:
            os.close(fd)


class DrivenWorker:
    """A worker that serves a test as its supervisor, and its reports so far."""

    def __init__(self, process: WorkerProcess) -> None:
        self.process = process
        self.reports: list[Any] = []
        self.last: JobEvent | None = None
        self.stages: list[str] = []
        self._events = process.events(deadline_s=GUARD_S)

    def send(self, *several: orders.Order) -> None:
        """Send orders."""
        for one in several:
            self.process.send_line(to_line(one, orders.ORDERS))

    def next(self) -> Any:
        """Wait for the next report; None at the last event."""
        for event in self._events:
            if isinstance(event, orders.Report):
                self.reports.append(event)
                return event
            if isinstance(event, Progress):
                self.stages.append(event.stage)
            if isinstance(event, Result | Failure):
                self.last = event
        return None

    def until(self, kind: type[Kind], fits: Callable[[Kind], bool] = lambda _: True) -> Kind:
        """Wait for a report of a kind."""
        while (report := self.next()) is not None:
            if isinstance(report, kind) and fits(report):
                return report
        told = "\n".join(map(str, [*self.reports[-5:], self.last, *self.process.tail[-5:]]))
        raise AssertionError(f"the worker ended before {kind.__name__}:\n{told}")

    def until_drawn(self, stream: int, n: int) -> list[int]:
        """Wait until a stream has so many tokens; returns all that it has."""
        while len(tokens := self.drawn(stream)) < n:
            self.until(orders.Step)
        return tokens

    def end(self) -> JobEvent:
        """Wait for the last event."""
        while self.next() is not None:
            pass
        assert self.last is not None
        return self.last

    def close(self) -> JobEvent:
        """Let the worker close, and wait for it."""
        self.send(orders.Close())
        return self.end()

    def drawn(self, stream: int) -> list[int]:
        """The tokens of a stream so far."""
        return [one.token for step in self.of(orders.Step) for one in step.tokens if one.stream == stream]

    def last_drawn(self, stream: int) -> orders.Drawn:
        """The newest token of a stream."""
        return [one for step in self.of(orders.Step) for one in step.tokens if one.stream == stream][-1]

    def of(self, kind: type[Kind]) -> list[Kind]:
        """The reports of a kind so far."""
        return [one for one in self.reports if isinstance(one, kind)]

    def run(self, start: orders.Start) -> list[int]:
        """Let a stream run to its end; returns its tokens."""
        self.send(start)
        self.until(orders.Ended, lambda one: one.stream == start.stream)
        return self.drawn(start.stream)


@contextmanager
def serving(
    model: Path,
    library: Path,
    opening: orders.Open,
    arenas: Arenas | None = None,
    *,
    env: dict[str, str] | None = None,
) -> Iterator[DrivenWorker]:
    """Start a worker that serves, and wait until it does; it ends with the block."""
    held = arenas or Arenas()
    try:
        request = HostRequest(model, library, (), held.fds)
        with WorkerProcess(request, env={**os.environ, **(env or {})}, pass_fds=held.fds) as process:
            worker = DrivenWorker(process)
            worker.send(opening)
            yield worker
    finally:
        if arenas is None:
            held.close()


def placement(*, mode: SplitMode = SplitMode.LAYER, devices: Sequence[str] = ("CPU", "CPU"), **more: Any) -> Placement:
    """A small placement for four sequences in one buffer."""
    fields: dict[str, Any] = {
        "mode": mode,
        "devices": tuple(devices),
        "n_ctx": 1024,
        "n_batch": 32,
        "n_ubatch": 16,
        "n_seq_max": 4,
        "kv_unified": True,
        "flash_attn": FlashAttn.ON,
        "n_threads": 1,
        "n_threads_batch": 1,
    }
    return Placement(**{**fields, **more})


def sampler(seed: int = 1, **more: Any) -> SamplerSpec:
    """A seeded sampler with a penalty window."""
    return SamplerSpec(temp=0.9, top_k=20, repeat_penalty=1.3, repeat_last_n=8, seed=seed, **more)


def snapshot(start: orders.Start, worker: DrivenWorker) -> orders.SequenceSnapshot:
    """The snapshot of a stream's sequence, as a supervisor keeps it."""
    drawn = worker.drawn(start.stream)
    n_draws = worker.last_drawn(start.stream).n_draws if drawn else 0
    tokens = (*start.tokens, *drawn)
    return orders.SequenceSnapshot(
        start.seq_id,
        tokens,
        is_pending=bool(drawn),
        sampler=start.sampler,
        n_draws=n_draws,
        grammar=start.grammar,
        n_ruled=len(drawn) if start.grammar else 0,
    )


def onward(start: orders.Start, worker: DrivenWorker) -> orders.Start:
    """The order that makes another worker go on with a stream where this one was."""
    held = snapshot(start, worker)
    return orders.Start(
        start.stream,
        start.seq_id,
        held.tokens,
        start.sampler,
        start.n_predict - len(worker.drawn(start.stream)),
        n_draws=held.n_draws,
        is_pending=held.is_pending,
        n_delivered=len(worker.drawn(start.stream)),
        grammar=start.grammar,
    )
