"""One worker as the loop sees it: what is no report, an end that comes once, and a process that cannot be started."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from splitctl.errors import DeadlineExceeded, WorkerLost
from splitctl.host import link as lives
from splitctl.host.link import End, Listener, WorkerLink
from splitctl.ipc.jobs import Failure, Fault, HostRequest, JobEvent, Progress, ProtocolBroken, Result, SessionReport
from splitctl.ipc.orders import REPORTS, Alive, Close, Opened, StageReached, Trial
from splitctl.ipc.orders import Report as Told
from splitctl.ipc.wire import to_object
from tests.ctl.hosting import GUARD_S, LAYER

_REQUEST = HostRequest(Path("m.gguf"), None, (), ())


class FakeWorker:
    """Says what the test lets it say.

    Attributes:
        script: events, and at its end perhaps an error.
        doing: what it was said to be doing.
    """

    script: tuple[Any, ...] = ()

    def __init__(self, request: HostRequest, **options: Any) -> None:
        del request
        self.options = options
        self.pid = 1
        self.stage = "starting"
        self.doing: list[str] = []
        self.lines: list[bytes] = []
        self.is_killed = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def events(self, *, deadline_s: float | None) -> Iterator[JobEvent]:
        """Say it all."""
        del deadline_s
        for one in self.script:
            if isinstance(one, Exception):
                raise one
            if one == "wait":
                self.is_killed.wait(GUARD_S)
                raise WorkerLost(1, "died by signal 9 (SIGKILL)", ())
            yield one

    def is_doing(self, stage: str) -> None:
        """Note it."""
        self.stage = stage
        self.doing.append(stage)

    def send_line(self, line: bytes) -> None:
        """Note it."""
        self.lines.append(line)

    def kill(self) -> None:
        """Note it."""
        self.is_killed.set()

    def expect(self, **_: object) -> None:
        """Take it."""

    def cancel(self) -> None:
        """Take it."""


def _live(monkeypatch: pytest.MonkeyPatch, *script: Any, close: bool = False) -> tuple[WorkerLink, End, list[Told]]:
    """Let a worker live to its end."""
    monkeypatch.setattr(FakeWorker, "script", script)
    monkeypatch.setattr(lives, "WorkerProcess", FakeWorker)

    async def run() -> tuple[WorkerLink, End, list[Told]]:
        reports: list[Told] = []
        ends: list[End] = []
        listener = Listener(report=lambda _, report: reports.append(report), ended=lambda _, end: ends.append(end))
        life = WorkerLink(_REQUEST, listener, env={}, deadline_s=None, pass_fds=())
        if close:
            await life.close(0.0)
        async with asyncio.timeout(GUARD_S):
            end = await life.ended()
        assert ends == [end]
        return life, end, reports

    return asyncio.run(run())


def _report(report: Told) -> SessionReport:
    return SessionReport(to_object(report, REPORTS))


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (WorkerLost(1, "died by signal 6 (SIGABRT) while placing", ("log: x", "GGML_ASSERT(y) failed")), None),
        (DeadlineExceeded("progress", 2.0), "the worker made no progress for 2 s while starting and was ended"),
        (ProtocolBroken("rubbish", "an event"), "the worker said what is no report (a message between splitctl"),
        (SessionReport({"kind": "nonsense"}), "the worker said what is no report ('kind' of the message is 'nonsense'"),
        (
            SessionReport({"kind": "tokenized", "order": "x", "tokens": []}),
            "the worker said what is no report ('order'",
        ),
        (Failure(Fault.MODEL, "BadModelFile", "it is cut short"), "the worker gave up: it is cut short"),
        (Result({}), "the worker closed"),
        (Progress("loading"), "the worker ended without a word"),
    ],
)
def test_every_end_has_its_words(monkeypatch: pytest.MonkeyPatch, last: Any, reason: str | None) -> None:
    """Lost, silent, talking nonsense, giving up or closing: the end says which, with the last words that explain it."""
    _, end, _ = _live(monkeypatch, last)
    if reason is None:
        reason = "the worker died by signal 6 (SIGABRT) while placing: GGML_ASSERT(y) failed"
    assert end.reason.startswith(reason)
    assert end.is_wanted == isinstance(last, Result)
    assert end.failure == (last if isinstance(last, Failure) else None)


def test_reports_come_in_order_and_say_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every report reaches the loop; what the worker was doing is known for the words of its end."""
    told: list[Told] = [Opened(LAYER, {}), StageReached(1, "placing"), Alive(), Trial({})]
    life, _, reports = _live(monkeypatch, *map(_report, told), Result({}))
    assert reports == told
    assert life.is_open
    assert life._worker.doing == ["serving", "placing", "serving"]  # type: ignore[attr-defined]


def test_one_that_is_gone_takes_no_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders for the dead go nowhere."""
    life, _, _ = _live(monkeypatch, Result({}))
    life.send(Close())
    life.cancel()
    life.expect(anything=True)
    assert life._worker.lines == []  # type: ignore[attr-defined]


def test_one_that_does_not_close_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told to close it may take so long; then it is ended, and its end waited for."""
    life, end, _ = _live(monkeypatch, "wait", close=True)
    assert len(life._worker.lines) == 1  # type: ignore[attr-defined]
    assert "SIGKILL" in end.reason


def test_a_process_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's no is raised at once, for whoever tries."""

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(lives, "WorkerProcess", refuse)

    async def run() -> None:
        listener = Listener(report=lambda *_: None, ended=lambda *_: None)
        with pytest.raises(OSError, match="temporarily"):
            WorkerLink(_REQUEST, listener, env={}, deadline_s=None, pass_fds=())

    asyncio.run(run())
