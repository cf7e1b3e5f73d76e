"""How a command speaks with a host: which one, what may go wrong, and Ctrl-C as something to wait for."""

from __future__ import annotations

import functools
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import click

from splitctl.cli.completions import session_names
from splitctl.cli.options import json_option
from splitctl.cli.output import EXIT_OF_FAULT, ExitCode, Screen
from splitctl.control.client import Call, ControlAnswer, wait
from splitctl.control.requests import ControlRequest
from splitctl.control.sockets import Address, NoSuchSession, find, runtime_folder
from splitctl.errors import Cancelled, ConfigInvalid, SplitctlError
from splitctl.ipc.jobs import Fault, RequestFailed

Command = Callable[..., Any]

#: A host that says nothing for so long to a question that needs no work hangs [seconds].
STATUS_S = 5.0

_SIGNALS = 4096


def session_option(command: Command) -> Command:
    """Add `--session`."""
    return click.option(
        "--session", metavar="NAME", shell_complete=session_names, help="Which session; one alone needs no name."
    )(command)


class CtrlC:
    """Interrupts as a descriptor that becomes readable, so that nothing that was read is lost to one.

    Lifetime:
        Use as a context manager in the main thread; leaving it gives the handler back.
    """

    def __enter__(self) -> Self:
        self._read_end, self._write_end = socket.socketpair()
        for end in (self._read_end, self._write_end):
            end.settimeout(0.0)
        self._handler = signal.signal(signal.SIGINT, lambda _number, _frame: None)
        self._wakeup = signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._wakeup)
        signal.signal(signal.SIGINT, self._handler)
        self._read_end.close()
        self._write_end.close()

    def fileno(self) -> int:
        """Give the descriptor that becomes readable at an interrupt."""
        return self._read_end.fileno()

    def take(self) -> None:
        """Note that the interrupts so far were seen."""
        with suppress(BlockingIOError):
            self._read_end.recv(_SIGNALS)


def address_of(session: str | None) -> Address:
    """Find the host of a session; None is the only one. Raises as `find`."""
    return find(runtime_folder(os.environ), session)


def ask_host(session: str | None, request: ControlRequest) -> dict[str, Any]:
    """Ask a session's host, and wait for the answer; an interrupt ends the waiting, not the host's work."""
    with CtrlC() as ctrl_c, Call(address_of(session), request) as client:
        while True:
            if ctrl_c.fileno() in wait([client, ctrl_c.fileno()]):
                what = "waiting for the host, which goes on with what it was asked for,"
                raise Cancelled(what)
            for message in client.read():
                if isinstance(message, ControlAnswer):
                    return message.body


def with_screen(command: Command) -> Command:
    """Add `--json`; the command gets its `screen`, and what it raises is told there."""

    @json_option
    @functools.wraps(command)
    def wrapped(*, as_json: bool, verbose: bool = False, **given: Any) -> int:
        with Screen(as_json=as_json, verbose=verbose) as screen:
            try:
                code: int = command(screen=screen, **given)
            except (SplitctlError, OSError) as error:
                code = told(error, screen)
            return code

    return wrapped


def told(error: SplitctlError | OSError, screen: Screen) -> ExitCode:
    """Tell an error of a host, or of the way there; returns the exit status."""
    match error:
        case RequestFailed():
            return screen.fail(error.name, error.message, EXIT_OF_FAULT[error.fault], error.body)
        case NoSuchSession():
            code = ExitCode.NO_SESSION
        case ConfigInvalid():
            code = EXIT_OF_FAULT[Fault.CONFIG]
        case Cancelled():
            code = ExitCode.CANCELLED
        case OSError(filename=str() as name, strerror=str() as why):
            return screen.fail(type(error).__name__, f"{name}: {why}", ExitCode.FAILED)
        case _:
            code = ExitCode.FAILED
    return screen.fail(type(error).__name__, str(error), code)
