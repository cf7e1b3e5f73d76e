"""The parent's side of a worker: start it, follow its events, say how it ended, leave nothing running.

Laws:
    1. A worker leads a process group of its own: Ctrl-C on the terminal reaches the parent alone, which passes it on.
    2. Its stdin stays open for as long as it may live; when the parent dies, even by SIGKILL, it reads end of file.
    3. Whatever it and the library print goes to one pipe, and its last lines are kept: an abort gives its reason there.
    4. Nobody waits for a child to read: messages to it are queued here, so one that is stopped holds up nothing, and
       SIGKILL still ends it.
"""

from __future__ import annotations

import os
import selectors
import signal
import site
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self, cast

from splitctl.errors import Cancelled, DeadlineExceeded, WorkerLost
from splitctl.ipc import jobs
from splitctl.ipc.jobs import Failure, JobRequest, Partial, Progress, Result
from splitctl.ipc.orders import EVENTS, WorkerEvent
from splitctl.ipc.wire import MessageInvalid, from_line, to_line
from splitctl.last_words import how_it_ended

_CHUNK_BYTES = 65536
_TAIL_LINES = 40
_GRACE_S = 5.0

#: A process that has said nothing at all is still being started, which no library slows down [seconds].
_START_S = 30.0

#: How often a silent child's parent asks whether to go on [seconds].
_POLL_S = 0.1


class WorkerProcess:
    """One child process that holds the library and answers one request.

    Lifetime:
        Use as a context manager; leaving it ends the child and its process group.

    Thread:
        One thread reads `events`; everything else may be called from any thread, `cancel` and `kill` from a signal
        handler too.
    """

    def __init__(
        self,
        request: JobRequest,
        *,
        env: Mapping[str, str],
        on_output: Callable[[str], None] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start the child; the request is the first thing that `events` sends it.

        Args:
            request: what to do.
            env: the child's environment.
            on_output: called with every line that the child or the library prints.
            pass_fds: descriptors that the child gets too, under the same numbers.
        """
        self._on_output = on_output
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._unfinished = b""
        self._outgoing: deque[bytes] = deque((to_line(request, jobs.REQUESTS),))
        self._begun = memoryview(b"")
        self._cancelled = False
        self._killed = False
        self._stage = "starting"
        self._expected_since: float | None = time.monotonic()
        self._n_deadlines = 1.0
        events_out, events_in = os.pipe()
        self._alarm = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # One that a signal handler may take again in the thread that it interrupts.
        self._alarm_lock = threading.RLock()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "splitctl.worker.main", str(events_in)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(events_in, *pass_fds),
                process_group=0,
                env=_child_env(env),
                bufsize=0,
            )
        except BaseException:
            os.close(events_out)
            os.close(self._alarm)
            raise
        finally:
            os.close(events_in)
        self._events_fd = events_out
        self._input = cast("IO[bytes]", self._process.stdin)
        self._output = cast("IO[bytes]", self._process.stdout)
        os.set_blocking(self._input.fileno(), False)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    @property
    def stage(self) -> str:
        """What the child last said it was doing."""
        return self._stage

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines that the child and the library printed, oldest first."""
        lines = [*self._tail, self._unfinished.decode("utf-8", "replace")]
        return tuple(line for line in lines if line.strip())

    def send_line(self, line: bytes) -> None:
        """Send a line to the child as soon as it takes it; one that is gone is noticed by `events`, not here."""
        self._outgoing.append(line)
        self._wake()

    def expect(self, *, anything: bool, n_deadlines: float = 1.0) -> None:
        """Say whether the child has something to do: only then is its silence measured.

        Args:
            anything: whether it has; at first it has, the request.
            n_deadlines: how many deadlines it may be silent.
        """
        if anything is (self._expected_since is not None) and n_deadlines == self._n_deadlines:
            return
        self._n_deadlines = n_deadlines
        if anything is not (self._expected_since is not None):
            self._expected_since = time.monotonic() if anything else None
        self._wake()

    def is_doing(self, stage: str) -> None:
        """Say what the child is doing, for the words of its end; its own Progress says it too."""
        self._stage = stage

    def events(
        self, *, deadline_s: float | None = None, is_cancelled: Callable[[], bool] | None = None
    ) -> Iterator[WorkerEvent]:
        """Follow the child until its last event.

        Args:
            deadline_s: longest silence while something is expected, seconds; the child is killed after it. Before its
                first event the child has 30 s in any case. None waits for ever.
            is_cancelled: asked before every event and all through a silence; the child is killed at the first yes.

        Yields:
            Every event in order; the last is a Result or a Failure.

        Raises:
            Cancelled: `is_cancelled` said so.
            WorkerLost: the child ended without a last event.
            DeadlineExceeded: the child said nothing for too long.
            MessageInvalid: the child said something that is no event.
        """
        pending = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._events_fd, selectors.EVENT_READ, "events")
            selector.register(self._output, selectors.EVENT_READ, "output")
            selector.register(self._alarm, selectors.EVENT_READ, "alarm")
            heard_at = time.monotonic() + max(0.0, _START_S - (deadline_s or 0.0))
            while True:
                self._end_if(is_cancelled)
                self._write(selector)
                for key in self._ready(selector, heard_at, deadline_s, is_polled=is_cancelled is not None):
                    if key.data == "alarm":
                        os.eventfd_read(self._alarm)
                    if key.data in {"alarm", "input"}:
                        continue
                    chunk = os.read(key.fd, _CHUNK_BYTES)
                    if key.data == "output":
                        self._take_output(chunk)
                        if not chunk:
                            selector.unregister(key.fd)
                        continue
                    if not chunk:
                        raise self._lost()
                    heard_at = time.monotonic()
                    pending += chunk
                    for event in self._decode(pending):
                        self._end_if(is_cancelled)
                        yield event
                        if isinstance(event, Result | Failure):
                            return

    def cancel(self) -> None:
        """Ask the child to stop at the next point where it can; it answers with a Failure or a result."""
        self._cancelled = True
        self.send_line(jobs.CANCEL)

    def kill(self) -> None:
        """End the child and everything that it started, at once."""
        self._killed = True
        if self._process.returncode is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                # It ended between the look and the signal; wait() in close collects it.
                return

    def close(self) -> None:
        """End the child: politely by closing its stdin, then by force; collect it and close every descriptor."""
        if self._events_fd < 0:
            return
        self._input.close()
        try:
            self._drain(_GRACE_S)
        finally:
            self.kill()
            self._process.wait()
            os.close(self._events_fd)
            self._events_fd = -1
            with self._alarm_lock:
                os.close(self._alarm)
                self._alarm = -1
            self._output.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wake(self) -> None:
        """Let `events` look at what has changed."""
        with self._alarm_lock:
            if self._alarm >= 0:
                os.eventfd_write(self._alarm, 1)

    def _ready(
        self, selector: selectors.BaseSelector, heard_at: float, deadline_s: float | None, *, is_polled: bool
    ) -> list[selectors.SelectorKey]:
        """Wait for something to read, or for room to write; kill a child that is silent for too long."""
        ends_at = self._silence_ends_at(heard_at, deadline_s)
        left_s = None if ends_at is None else max(0.0, ends_at - time.monotonic())
        if is_polled:
            left_s = _POLL_S if left_s is None else min(left_s, _POLL_S)
        ready = [key for key, _ in selector.select(left_s)]
        # What is expected may have changed meanwhile, in another thread.
        ends_at = self._silence_ends_at(heard_at, deadline_s)
        if not ready and deadline_s is not None and ends_at is not None and time.monotonic() >= ends_at:
            self.kill()
            raise DeadlineExceeded(f"progress of the worker while {self._stage}", deadline_s * self._n_deadlines)
        return ready

    def _silence_ends_at(self, heard_at: float, deadline_s: float | None) -> float | None:
        """Say when a child that is silent has been so for too long; None: never."""
        since = self._expected_since
        if deadline_s is None or since is None:
            return None
        return max(heard_at, since) + deadline_s * self._n_deadlines

    def _write(self, selector: selectors.BaseSelector) -> None:
        """Give the child what it takes, and watch for room where that is not all."""
        stdin = self._input.fileno()
        is_watched = stdin in selector.get_map()
        try:
            while self._begun or self._outgoing:
                self._begun = self._begun or memoryview(self._outgoing.popleft())
                self._begun = self._begun[os.write(stdin, self._begun) :]
        except BlockingIOError:
            if not is_watched:
                selector.register(stdin, selectors.EVENT_WRITE, "input")
            return
        except BrokenPipeError:
            # The child died first; its events end, and _lost() says why.
            self._outgoing.clear()
            self._begun = memoryview(b"")
        if is_watched:
            selector.unregister(stdin)

    def _end_if(self, is_cancelled: Callable[[], bool] | None) -> None:
        """Kill the child once its work is no longer wanted: one that hangs would not hear a cancel."""
        if is_cancelled is not None and is_cancelled():
            self.kill()
            raise Cancelled(f"the worker's work ({self._stage})")

    def _decode(self, pending: bytearray) -> Iterator[WorkerEvent]:
        """Take whole lines out of `pending` and decode them."""
        while (end := pending.find(b"\n")) >= 0:
            line = bytes(pending[:end])
            del pending[: end + 1]
            event: WorkerEvent = from_line(line, EVENTS, max_bytes=jobs.MAX_LINE_BYTES)
            if isinstance(event, Progress):
                self._stage = event.stage
            yield event
        if len(pending) > jobs.MAX_LINE_BYTES:
            raise MessageInvalid("", "without an end", f"{jobs.MAX_LINE_BYTES} bytes a line at most")

    def _take_output(self, chunk: bytes) -> None:
        *lines, self._unfinished = (self._unfinished + chunk).split(b"\n")
        # A line that never ends must not fill the memory.
        self._unfinished = self._unfinished[-_CHUNK_BYTES:]
        for raw in lines:
            line = raw.decode("utf-8", "replace").rstrip()
            if not line:
                continue
            self._tail.append(line)
            if self._on_output is not None:
                self._on_output(line)

    def _drain(self, timeout_s: float) -> None:
        """Read what the child still prints until it ends, so that it never waits for a full pipe."""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            while (left_s := deadline - time.monotonic()) > 0:
                if not selector.select(left_s):
                    return
                chunk = os.read(self._output.fileno(), _CHUNK_BYTES)
                if not chunk:
                    break
                self._take_output(chunk)
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            # close() goes on with SIGKILL.
            return

    def _lost(self) -> WorkerLost:
        """Collect a child that ended without a last event, and say how it ended."""
        self._drain(_GRACE_S)
        self.kill()
        how = how_it_ended(self._process.wait())
        if self._killed and self._cancelled:
            how = "killed by the second interrupt"
        return WorkerLost(self.pid, f"{how} while {self._stage}", self.tail)


@dataclass(slots=True)
class JobEnd:
    """How a job in a child process ended.

    Attributes:
        body: the result, or as much of it as the child sent.
        error: what the child says went wrong, or how it died or hung; None where it gave a result.
        stage: what the child was doing last.
        tail: the last lines that it and the library printed.
    """

    body: dict[str, Any] = field(default_factory=dict)
    error: Failure | WorkerLost | DeadlineExceeded | None = None
    stage: str = ""
    tail: tuple[str, ...] = ()


def run_job(
    request: JobRequest,
    *,
    env: Mapping[str, str],
    deadline_s: float,
    is_cancelled: Callable[[], bool] | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
    on_output: Callable[[str], None] | None = None,
) -> JobEnd:
    """Run a job in a child process, which may die of it, and wait for its end.

    Args:
        request: what to do.
        env: the child's environment.
        deadline_s: longest silence of the child, seconds.
        is_cancelled: asked all the while; the child is killed at the first yes.
        on_progress: called with every Progress.
        on_output: called with every line that the child or the library prints.

    Returns:
        How it ended.

    Raises:
        Cancelled: `is_cancelled` said so.
        MessageInvalid: the child said something that is no event.
        OSError: the system starts no more processes.
    """
    end = JobEnd()
    with WorkerProcess(request, env=env, on_output=on_output) as worker:
        try:
            for event in worker.events(deadline_s=deadline_s, is_cancelled=is_cancelled):
                match event:
                    case Progress():
                        on_progress(event)
                    case Partial() | Result():
                        end.body.update(event.body)
                    case Failure():
                        end.error = event
        except (WorkerLost, DeadlineExceeded) as error:
            end.error = error
        end.stage, end.tail = worker.stage, worker.tail
    return end


def _child_env(env: Mapping[str, str]) -> dict[str, str]:
    """Make sure that the child finds this very splitctl, also when it runs from a source tree."""
    child = dict(env)
    root = Path(__file__).resolve().parents[2]
    if root not in {Path(folder).resolve() for folder in site.getsitepackages()}:
        child["PYTHONPATH"] = os.pathsep.join(part for part in (str(root), child.get("PYTHONPATH", "")) if part)
    return child
