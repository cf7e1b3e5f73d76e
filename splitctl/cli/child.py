"""How a command uses a worker child: interrupts are passed on, events shown, and its end told."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, Self

from splitctl.cli.output import EXIT_OF_FAULT, ExitCode, Screen
from splitctl.errors import SplitctlError, WorkerLost
from splitctl.ipc.jobs import Failure, JobRequest, Partial, Piece, Progress, Result
from splitctl.ipc.orders import WorkerEvent
from splitctl.ipc.process import WorkerProcess
from splitctl.last_words import telling_line


class Interrupts:
    """Ctrl-C while a worker runs: the first asks it to stop, the second ends it.

    Lifetime:
        Use as a context manager in the main thread; leaving it gives the handler back, unless one came: then the
        command is about to end, and no more are heard.
    """

    def __init__(self) -> None:
        self.count = 0
        self._worker: WorkerProcess | None = None
        self._previous: Any = None

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN if self.count else self._previous)

    def attach(self, worker: WorkerProcess) -> None:
        """Pass interrupts on to a worker, also one that came before it existed."""
        self._worker = worker
        if self.count:
            worker.cancel()

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle one Ctrl-C; the event loop goes on, because the handler returns."""
        del number, frame
        self.count += 1
        if self._worker is None:
            return
        if self.count > 1:
            self._worker.kill()
        else:
            self._worker.cancel()


@dataclass(slots=True)
class JobAnswer:
    """What a worker came to.

    Attributes:
        body: the result, or what is known of it.
        code: the exit status so far; DONE when the worker delivered a result.
        text: the pieces of the answer that came, raw bytes.
    """

    body: dict[str, Any] = field(default_factory=dict)
    code: ExitCode = ExitCode.DONE
    text: bytearray = field(default_factory=bytearray)

    def known(self) -> dict[str, Any]:
        """Give what is known after the worker was lost: its last report, and the pieces that came since."""
        return {**self.body, "text": self.text.decode("utf-8", "replace")} if self.text else self.body


def ask(request: JobRequest, screen: Screen) -> JobAnswer:
    """Do a request in a worker and show what happens; a failure is told, and gives the exit status."""
    answer = JobAnswer()
    with Interrupts() as interrupts:
        try:
            with WorkerProcess(request, env=os.environ, on_output=screen.library_output) as worker:
                interrupts.attach(worker)
                for event in worker.events():
                    _show(event, screen, answer)
        except WorkerLost as error:
            if interrupts.count:
                message = f"cancelled; the worker {error.how}"
                answer.code = screen.fail("Cancelled", message, ExitCode.CANCELLED, answer.known())
            else:
                why = telling_line(error.log_tail) or "it said nothing"
                message = f"the worker {error.how}: {why}; splitctl doctor shows the library that it used"
                answer.code = screen.fail("WorkerLost", message, ExitCode.FAILED, answer.known())
        except SplitctlError as error:
            answer.code = screen.fail(type(error).__name__, str(error), ExitCode.FAILED, answer.body)
        except OSError as error:
            message = f"the worker could not be started: {error}; check the limits on processes and memory"
            answer.code = screen.fail(type(error).__name__, message, ExitCode.FAILED, answer.body)
    return answer


def _show(event: WorkerEvent, screen: Screen, answer: JobAnswer) -> None:
    match event:
        case Progress():
            screen.progress(event)
        case Piece():
            screen.text(event.data)
            answer.text += event.data
        case Partial():
            answer.body.update(event.body)
        case Result():
            answer.body = event.body
        case Failure():
            answer.body.update(event.body)
            answer.code = screen.fail(event.name, event.message, EXIT_OF_FAULT[event.fault], answer.body)
