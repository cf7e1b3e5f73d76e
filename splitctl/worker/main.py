"""The child that holds the library: `python -m splitctl.worker.main FD`, started by `ipc.process.WorkerProcess` alone.

Laws:
    1. End of file on stdin means that the parent is gone: the process ends at once, whatever the library is doing.
    2. Answers go to the descriptor named by the argument; stdout and stderr are the library's.
    3. A cancel sets a flag, which the progress and abort callbacks read; it interrupts nothing by itself.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Mapping

from llama_native import Library
from splitctl.errors import Cancelled
from splitctl.ipc import jobs
from splitctl.ipc.jobs import (
    BenchRequest,
    DevicesRequest,
    DoctorRequest,
    Failure,
    Fault,
    HostRequest,
    JobRequest,
    ProbeRequest,
    ReserveRequest,
    Result,
    RunRequest,
    VerifyRequest,
)
from splitctl.ipc.orders import EVENTS, WorkerEvent
from splitctl.ipc.wire import MessageInvalid, from_line, to_line
from splitctl.last_words import LOG_PREFIX
from splitctl.probing import ProbeVerdict, try_copy, try_own_call, try_placement
from splitctl.worker import inspection
from splitctl.worker.failures import failure_of, logged_failure_of
from splitctl.worker.inbox import CancelGate, Inbox

_STDIN = 0
_STDERR = 2
_CHUNK_BYTES = 1 << 16
_CANCEL_LINE = jobs.CANCEL.rstrip(b"\n")
#: Source: ggml.h, enum ggml_log_level.
_LEVEL_INFO = 2
_LEVEL_CONTINUES = 5
_EXIT_ORPHANED = 1
_EXIT_MISUSED = 2


class Emitter:
    """Writes events to the parent, on a descriptor that stays open. Thread: any."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def __call__(self, event: WorkerEvent) -> None:
        """Write one event; a parent that is gone ends the process."""
        view = memoryview(to_line(event, EVENTS))
        with self._lock:
            try:
                while view:
                    view = view[os.write(self._fd, view) :]
            except BrokenPipeError:
                os._exit(_EXIT_ORPHANED)


def _listen(requests: queue.SimpleQueue[bytes], gate: CancelGate, inbox: Inbox) -> None:
    """Read stdin: the request first, then orders and control lines; end the process with the parent."""
    pending = bytearray()
    is_first = True
    while chunk := os.read(_STDIN, _CHUNK_BYTES):
        pending += chunk
        # The chunk decides: a request of megabytes must not be searched again for each piece of it.
        if b"\n" not in chunk:
            continue
        *lines, rest = bytes(pending).split(b"\n")
        pending = bytearray(rest)
        for line in lines:
            if is_first:
                requests.put(line)
                is_first = False
            elif line == _CANCEL_LINE:
                gate.ask()
            else:
                inbox.put_line(line)
    os._exit(_EXIT_ORPHANED)


def _forward_log(library: Library) -> None:
    """Print the library's log, so that the parent has it when the process aborts; debug lines are left out."""
    is_line_shown = False

    def show(level: int, text: str) -> None:
        nonlocal is_line_shown
        if level != _LEVEL_CONTINUES:
            is_line_shown = level >= _LEVEL_INFO
        if is_line_shown and text.strip():
            prefix = "" if level == _LEVEL_CONTINUES else LOG_PREFIX
            os.write(_STDERR, f"{prefix}{text}".encode("utf-8", "replace"))

    library.log.listen(show)


def _answer(
    request: JobRequest, env: Mapping[str, str], emit: Emitter, cancel: CancelGate, inbox: Inbox
) -> WorkerEvent:
    """Do a request; give the last event."""
    model = request.model if isinstance(request, RunRequest | ProbeRequest | BenchRequest | HostRequest) else None
    if cancel.is_set():
        return failure_of(Cancelled("the start"))
    try:
        if isinstance(request, DoctorRequest):
            return Result(inspection.examine(request, env, emit))
        library = Library.open(request.library, env=env)
        library.add_rpc_servers(request.rpc)
        match request:
            case DevicesRequest():
                return Result(inspection.list_devices(library))
            case ReserveRequest():
                return Result(inspection.reserve_buffers(request, library, emit))
        _forward_log(library)
        match request:
            case ProbeRequest():
                return Result(_tried(request, library, emit, cancel.is_set).to_json())
            case VerifyRequest():
                return Result(_verify(request, library, emit, cancel.is_set))
            case RunRequest():
                from splitctl.worker import run  # noqa: PLC0415 - as below

                return run.run(request, library, env, emit, cancel)
            case BenchRequest():
                from splitctl.worker import bench  # noqa: PLC0415 - as below

                return bench.bench(request, library, env, emit, inbox, cancel)
            case HostRequest():
                # Half of what a worker imports is a session, which a trial does without.
                from splitctl.worker import serve  # noqa: PLC0415

                return serve.serve(request, library, env, emit, inbox, cancel)
    except Exception as error:  # noqa: BLE001 - whatever it is, the parent gets to know it
        return logged_failure_of(error, model=model)


def _tried(request: ProbeRequest, library: Library, emit: Emitter, is_cancelled: Callable[[], bool]) -> ProbeVerdict:
    model, where = str(request.model), request.placement

    def on_stage(name: str) -> None:
        emit(jobs.Progress(name))

    if request.moved_from is not None:
        return try_own_call(library, model, request.moved_from, where, on_stage=on_stage, is_cancelled=is_cancelled)
    tried = try_copy if request.of_copy else try_placement
    return tried(library, model, where, on_stage=on_stage, is_cancelled=is_cancelled)


def _verify(
    request: VerifyRequest, library: Library, emit: Emitter, is_cancelled: Callable[[], bool]
) -> dict[str, object]:
    """Measure a placement; what is known is sent on the way, because the next step may be the last."""
    from splitctl.probing.verify import Task, measure  # noqa: PLC0415 - as for a session

    devices = [device.name for device in library.devices(memory=False)]
    emit(jobs.Partial({"library": {"path": str(library.path), "version": library.version, "devices": devices}}))
    return measure(
        library,
        str(request.model),
        request.placement,
        Task(
            request.text,
            request.n_tokens,
            request.n_generate,
            request.reference,
            request.twin,
            request.keep,
            request.control,
        ),
        on_stage=lambda stage, done: emit(jobs.Progress(stage, done)),
        on_found=lambda found: emit(jobs.Partial(found)),
        is_cancelled=is_cancelled,
    )


def main(arguments: list[str]) -> None:
    """Serve one request and end the process; the one argument is the number of the descriptor for events."""
    if len(arguments) != 1 or not arguments[0].isdigit():
        sys.stderr.write("this is a part of splitctl and is started by it: run splitctl --help\n")
        sys.exit(_EXIT_MISUSED)
    env = dict(os.environ)
    # ggml's abort handler would start a debugger for a backtrace, which takes seconds.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    emit = Emitter(int(arguments[0]))
    cancel = CancelGate()
    inbox = Inbox(cancel)
    signal.signal(signal.SIGINT, lambda _number, _frame: cancel.ask())
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests, cancel, inbox), name="parent", daemon=True).start()
    try:
        request = from_line(requests.get(), jobs.REQUESTS, max_bytes=jobs.MAX_LINE_BYTES)
        last = _answer(request, env, emit, cancel, inbox)
    except MessageInvalid as error:
        last = Failure(Fault.INTERNAL, type(error).__name__, str(error))
    emit(last)
    sys.stdout.flush()
    sys.stderr.flush()
    # Some builds crash in their destructors at a normal exit; the answer is out, and the kernel frees the rest.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
