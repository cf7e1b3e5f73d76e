"""Standard input, output and error as commands need them: they are there, and a failing one ends in one line.

Laws:
    1. A stream that was closed reads and writes nothing, and its descriptor is no other file's.
    2. What cannot be written on stdout ends the command; what cannot be written on stderr is left out.
    3. A character that the encoding lacks is written as an escape.
"""

from __future__ import annotations

import errno
import os
import sys
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any

#: The variable by which a shell asks how a command line goes on.  Source: click, of the program's name.
COMPLETE = "_SPLITCTL_COMPLETE"

_STDIN, _STDOUT, _STDERR = range(3)


class OutputLost(Exception):
    """What a command says on stdout cannot be written; no OSError, which would be of what the command does.

    Attributes:
        why: in words for people; empty where the reader is gone, who needs no word.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(error)
        self.why = "" if error.errno == errno.EPIPE else error.strerror or str(error)


class _Output(FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OutputLost(error) from error


class _Notes(FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def settle() -> None:
    """Open what was closed, and put writers in the place of stdout and stderr that keep the laws."""
    for number in (_STDIN, _STDOUT, _STDERR):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is given, which is this one; children get it too.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # noqa: FBT003 (positional only)
    if sys.stdin is None:
        sys.stdin = open(_STDIN, encoding="utf-8", closefd=False)  # noqa: SIM115 (for good)
    sys.stdout = _text(_Output(_STDOUT, "w", closefd=False), sys.stdout)
    sys.stderr = _text(_Notes(_STDERR, "w", closefd=False), sys.stderr)


def silence() -> None:
    """Let what is still to be written on stdout go nowhere: Python writes it at its end, and would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)


def _text(raw: FileIO, before: object) -> TextIOWrapper:
    encoding = getattr(before, "encoding", None) or "utf-8"
    return TextIOWrapper(BufferedWriter(raw), encoding, "backslashreplace", line_buffering=True)
