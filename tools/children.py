"""Children of programs: processes that say what they do line by line, and whose death is a result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tools.places import CHECKOUT


@dataclass(frozen=True, slots=True)
class ChildRun:
    """What became of a child.

    Args:
        told: its JSON lines that have a status, in order.
        at: its last line, where that has none: where it was when it ended; empty otherwise.
        end: how it ended and what it said about that; empty for well.
    """

    told: list[dict[str, Any]]
    at: dict[str, Any]
    end: str


def run_child(
    program: str,
    job: Mapping[str, Any],
    timeout_s: float | None,
    *,
    words: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
) -> ChildRun:
    """Run a program to its end.

    Args:
        program: module name. It takes one JSON object as its last argument, and says on stdout where it is and what
            came of it, one JSON object a line.
        job: that object.
        timeout_s: longest time that it may take [seconds]; None: any.
        words: arguments before the object.
        env: added to this process's environment.

    Returns:
        What became of it.
    """
    command = [sys.executable, "-m", program, *words, json.dumps(job)]
    env = {**os.environ, "GGML_NO_BACKTRACE": "1", **(env or {})}
    try:
        done = subprocess.run(
            command, cwd=CHECKOUT, env=env, capture_output=True, text=True, check=False, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as late:
        # What a child said before it hung is bytes, whatever was asked for.
        out = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else ""
        return _heard(out, f"no end within {timeout_s:g} s")
    if done.returncode == 0:
        return _heard(done.stdout, "")
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
    return _heard(done.stdout, f"{how}: {last_words(done.stderr)}")


def say(**words: object) -> None:
    """Report one line to the parent."""
    print(json.dumps(words), flush=True)


def _heard(out: str, end: str) -> ChildRun:
    """Sort what a child said."""
    told: list[dict[str, Any]] = []
    at: dict[str, Any] = {}
    for line in out.splitlines():
        if not line.startswith("{"):
            continue
        words = json.loads(line)
        if "status" in words:
            told.append(words)
            at = {}
        else:
            at = words
    return ChildRun(told, at, end)


def last_words(text: str) -> str:
    """Pick the telling line of a child's stderr."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "GGML_ASSERT" in line or "GGML_ABORT" in line or "Error" in line]
    return (telling or lines or ["it said nothing"])[-1][:300]
