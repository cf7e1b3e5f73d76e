"""One worker as the loop sees it: what is no report, an end that comes once, and a process that cannot be started."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from splitctl.errors import DeadlineExceeded, WorkerLost
from splitctl.host import link as links
from splitctl.host.link import End, WorkerLink
from splitctl.ipc.jobs import Failure, Fault, HostRequest, Progress, Result
from splitctl.ipc.orders import Alive, Opened, Report, StageReached, Trial, WorkerEvent
from splitctl.ipc.wire import MessageInvalid
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

    def events(self, *, deadline_s: float | None) -> Iterator[WorkerEvent]:
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


def _followed(
    monkeypatch: pytest.MonkeyPatch, *script: Any, close: bool = False
) -> tuple[WorkerLink, End, list[Report]]:
    """Follow a worker to its end."""
    monkeypatch.setattr(FakeWorker, "script", script)
    monkeypatch.setattr(links, "WorkerProcess", FakeWorker)

    async def run() -> tuple[WorkerLink, End, list[Report]]:
        reports: list[Report] = []
        ends: list[End] = []
        link = WorkerLink(_REQUEST, on_report=reports.append, on_end=ends.append, env={}, deadline_s=None, pass_fds=())
        if close:
            await link.close(0.0)
        async with asyncio.timeout(GUARD_S):
            end = await link.ended()
        assert ends == [end]
        return link, end, reports

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        (WorkerLost(1, "died by signal 6 (SIGABRT) while placing", ("log: x", "GGML_ASSERT(y) failed")), None),
        (DeadlineExceeded("progress", 2.0), "the worker made no progress for 2 s while starting and was ended"),
        (
            MessageInvalid("kind", "'nonsense'", "x"),
            "the worker said what is no report ('kind' of the message is 'nonsense'",
        ),
        (Failure(Fault.MODEL, "BadModelFile", "it is cut short"), "the worker gave up: it is cut short"),
        (Result({}), "the worker closed"),
        (Progress("loading"), "the worker ended without a word"),
    ],
)
def test_every_end_has_its_words(monkeypatch: pytest.MonkeyPatch, last: Any, reason: str | None) -> None:
    """Lost, silent, talking nonsense, giving up or closing: the end says which, with the last words that explain it."""
    _, end, _ = _followed(monkeypatch, last)
    if reason is None:
        reason = "the worker died by signal 6 (SIGABRT) while placing: GGML_ASSERT(y) failed"
    assert end.reason.startswith(reason)
    assert end.failure == (last if isinstance(last, Failure) else None)


def test_reports_come_in_order_and_say_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every report reaches the loop; what the worker was doing is known for the words of its end."""
    said: list[Report] = [Opened(LAYER, {}), StageReached(1, "placing"), Alive(), Trial({})]
    link, _, reports = _followed(monkeypatch, *said, Result({}))
    assert reports == said
    assert link.is_open
    assert link._worker.doing == ["serving", "placing", "serving"]  # type: ignore[attr-defined]


def test_one_that_does_not_close_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordered to close it may take so long; then it is ended, and its end waited for."""
    link, end, _ = _followed(monkeypatch, "wait", close=True)
    assert len(link._worker.lines) == 1  # type: ignore[attr-defined]
    assert "SIGKILL" in end.reason


def test_a_process_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's no is raised at once, for whoever tries."""

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(links, "WorkerProcess", refuse)

    async def run() -> None:
        with pytest.raises(OSError, match="temporarily"):
            WorkerLink(_REQUEST, on_report=print, on_end=print, env={}, deadline_s=None, pass_fds=())

    asyncio.run(run())
