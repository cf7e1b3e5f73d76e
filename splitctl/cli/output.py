"""What the command line shows: the answer on stdout, everything else on stderr, and exit codes.

Laws:
    1. With `--json`, stdout gets one JSON object and nothing else, also when the command fails.
    2. Progress, tables, logs and errors go to stderr: a bar on a terminal, plain lines otherwise.
    3. An error is one line: what happened and what to do.
"""

from __future__ import annotations

import codecs
import enum
import json
import math
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from splitctl.ipc.jobs import Fault, Progress
from splitctl.outcome import table_rows


class ExitCode(enum.IntEnum):
    """What a command's exit status says."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    FELL_BACK = 3
    REFUSED = 4
    PARKED = 5
    NO_SESSION = 6
    BUSY = 7
    CANCELLED = 130


EXIT_OF_FAULT: Mapping[Fault, ExitCode] = {
    Fault.CONFIG: ExitCode.USAGE,
    Fault.MODEL: ExitCode.FAILED,
    Fault.LIBRARY: ExitCode.FAILED,
    Fault.REFUSED: ExitCode.REFUSED,
    Fault.CANCELLED: ExitCode.CANCELLED,
    Fault.PARKED: ExitCode.PARKED,
    Fault.BUSY: ExitCode.BUSY,
    Fault.INTERNAL: ExitCode.FAILED,
}

#: How the outcome of a switch ends a command.
EXIT_OF_STATUS: Mapping[str, ExitCode] = {
    "switched": ExitCode.DONE,
    "unchanged": ExitCode.DONE,
    "fell_back": ExitCode.FELL_BACK,
    "refused": ExitCode.REFUSED,
    "cancelled": ExitCode.CANCELLED,
    "parked": ExitCode.PARKED,
}


def one_line(text: str) -> str:
    """Fold a message into one line; control characters are left out."""
    joined = " ".join(part for line in text.splitlines() if (part := line.strip()))
    return "".join(char for char in joined if char.isprintable())


def error_body(kind: str, message: str, code: ExitCode, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Make the object that `--json` prints when a command fails: `more`, `error` {kind, message} and `exit_code`."""
    return {**(more or {}), "error": {"kind": kind, "message": one_line(message)}, "exit_code": int(code)}


def print_json(body: Mapping[str, Any]) -> None:
    """Print one object on stdout, as strict JSON on one line; numbers that JSON lacks become null."""
    sys.stdout.write(json.dumps(_strict(body), ensure_ascii=True, allow_nan=False) + "\n")
    sys.stdout.flush()


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value


class Screen:
    """The terminal while a command runs.

    Attributes:
        as_json: whether stdout is kept for one JSON object.
        console: stderr.

    Lifetime:
        Use as a context manager: leaving it gives the terminal back as it was.
    """

    def __init__(self, *, as_json: bool, verbose: bool = False) -> None:
        self.as_json = as_json
        self._verbose = verbose
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bars: Bars | None = None
        self._task: TaskID | None = None
        self._stage = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._wrote_text = False
        self._is_mid_line = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_bars()

    def progress(self, event: Progress) -> None:
        """Show where the work is; what a restore came to stays, and all else gives way to what follows."""
        if event.stage == "restored":
            self.note(f"{event.stage}: {event.note}")
            return
        if not self.console.is_terminal:
            if event.stage != self._stage or event.note:
                self.line(f"{event.stage}: {event.note}" if event.note else event.stage)
            self._stage = event.stage
            return
        if event.stage == "generating" and not self.as_json:
            # The answer is about to be written on the same terminal.
            self.end_bars()
            return
        if self._bars is None:
            self._bars = Bars(
                TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=self.console, transient=True
            )
            self._bars.start()
        if event.stage != self._stage or self._task is None:
            if self._task is not None:
                self._bars.remove_task(self._task)
            self._task = self._bars.add_task(event.stage, total=None if event.done is None else 1.0)
            self._stage = event.stage
        self._bars.update(
            self._task,
            description=f"{event.stage} {event.note}".strip(),
            total=None if event.done is None else 1.0,
            completed=event.done or 0.0,
        )

    def text(self, data: bytes) -> None:
        """Write a piece of the answer as soon as its characters are whole; one may be split over two calls."""
        if self.as_json:
            return
        self.end_bars()
        self._write(self._decoder.decode(data))

    def end_text(self) -> None:
        """End the answer: what is left of a split character, and a line feed."""
        if self.as_json or not self._wrote_text:
            return
        self._write(self._decoder.decode(b"", final=True) + "\n")
        self._decoder.reset()
        self._wrote_text = False

    def library_output(self, line: str) -> None:
        """Show a line of the library's own output, when asked to."""
        if self._verbose:
            self.line(line)

    def line(self, text: str) -> None:
        """Write one plain line to stderr; markup in it is not interpreted."""
        self.console.print(text, markup=False)

    def note(self, text: str) -> None:
        """Write one plain line to stderr that may come in the middle of an answer."""
        self.end_bars()
        if self._is_mid_line and self.console.is_terminal and sys.stdout.isatty():
            self.console.print()
            self._is_mid_line = False
        self.line(text)

    def question(self, text: str) -> None:
        """Ask something on stderr, without ending the line."""
        self.end_bars()
        self.console.print(text, markup=False, end="")

    def table(self, table: Table) -> None:
        """Write a table to stderr."""
        self.end_bars()
        self.console.print(table)

    def answer(self, body: Mapping[str, Any], *shown: str | Table) -> ExitCode:
        """Show on stdout what a command came to: the object with `--json`, else texts and tables."""
        self.end_bars()
        if self.as_json:
            print_json(body)
            return ExitCode.DONE
        console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        for one in shown:
            if isinstance(one, str):
                sys.stdout.write(f"{one}\n")
            else:
                console.print(one)
        sys.stdout.flush()
        return ExitCode.DONE

    def fail(self, kind: str, message: str, code: ExitCode, more: Mapping[str, Any] | None = None) -> ExitCode:
        """Tell an error: one line on stderr, and the object on stdout with `--json`; returns `code`."""
        self.end_bars()
        self.end_text()
        self.line(f"splitctl: {one_line(message)}")
        if self.as_json:
            print_json(error_body(kind, message, code, more))
        return code

    def _write(self, text: str) -> None:
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
            self._wrote_text = True
            self._is_mid_line = not text.endswith("\n")

    def end_bars(self) -> None:
        """Take the bar away."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
            self._task = None
            self._stage = ""


def switch_table(outcome: Mapping[str, Any]) -> Table:
    """Lay out the stages of a switch, from the outcome object of the contract."""
    table = Table(title=f"switch to {outcome.get('requested')}: {outcome.get('status')}", title_justify="left")
    table.add_column("stage")
    table.add_column("time", justify="right")
    table.add_column("GB/s", justify="right")
    stages, sums = table_rows(outcome)
    for stage in stages:
        table.add_row(*stage)
    table.add_section()
    for one in sums:
        table.add_row(*one)
    return table
