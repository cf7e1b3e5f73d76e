"""Ends or stops a hosted session's worker as it reaches a stage; some stages call no library that could do it.

A worker whose PYTHONPATH begins with this folder runs this file first. Its ``os.write`` then reads what it tells the
supervisor: with an item ``at-STAGE:ACTION[@1]`` in the file of faults (control.c has its rules) it does ACTION right
after it has told of STAGE: abort, kill or stop. ``at-trial`` is when it has told that the switch is done, and
``at-handed`` when it has told that the session is sealed for another worker.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

_really_write = os.write
_STAGE = re.compile(rb'"kind":"stagereached",.*"stage":"([a-z_]+)","share":0(?:\.0)?[,}]')
_SWITCHED = re.compile(rb'"kind":"switched",.*"status":"switched"')
_HANDED = re.compile(rb'"kind":"handedover"')
_LONGEST = 1 << 16


def _reached(line: bytes) -> str:
    stage = _STAGE.search(line)
    if stage:
        return stage[1].decode()
    return "trial" if _SWITCHED.search(line) else "handed" if _HANDED.search(line) else ""


def _claim(mark: Path, *, once: bool) -> bool:
    try:
        os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | (os.O_EXCL if once else 0), 0o600))
    except FileExistsError:
        return False
    return True


def _act(stage: str) -> None:
    path = Path(os.environ.get("STUB_FAULTS_FILE", "/nonexistent"))
    items = path.read_text().split() if path.exists() else []
    for item in items:
        found = re.fullmatch(rf"at-{stage}:(abort|kill|stop)(@1)?", item)
        if found is None or not _claim(path.with_name(f"{path.name}.{item}"), once=found[2] is not None):
            continue
        if found[1] == "abort":
            _really_write(2, b"/stub/ggml/src/ggml.c:1: GGML_ASSERT(stub_was_asked_to_abort) failed\n")
            os.abort()
        os.kill(os.getpid(), signal.SIGKILL if found[1] == "kill" else signal.SIGSTOP)


def _write(fd: int, data: Any) -> int:
    n = _really_write(fd, data)
    if n == len(data) < _LONGEST and (stage := _reached(bytes(data))):
        _act(stage)
    return n


os.write = _write
