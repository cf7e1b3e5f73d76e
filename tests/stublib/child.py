"""Run a function of a test module in a process of its own: one library per process, and it may die."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 120.0
"""A guard against a child that never ends; no test measures it."""


@dataclass(frozen=True, slots=True)
class Child:
    """How a child ended: its function's result (None where it died first), its exit and what it wrote."""

    result: Any
    returncode: int
    stdout: str
    stderr: str

    @property
    def signal(self) -> str | None:
        """The name of the signal that it died by."""
        return signal.Signals(-self.returncode).name if self.returncode < 0 else None

    def value(self) -> Any:
        """The result of a child that ended well."""
        assert self.returncode == 0, f"the child ended with {self.returncode}:\n{self.stderr}"
        return self.result


def run_child(function: Callable[..., Any], *arguments: Any, **env: str) -> Child:
    """Run ``function(*arguments)`` in a new process.

    Args:
        function: a module-level function of a file under this repository; returns something that JSON can hold.
        arguments: values that JSON can hold, or paths (which arrive as text).
        env: environment variables to add, such as ``STUB_FAULTS``.

    Returns:
        How it ended.
    """
    module = ".".join(Path(inspect.getfile(function)).resolve().relative_to(_ROOT).with_suffix("").parts)
    request = json.dumps([module, function.__name__, arguments], default=str)
    full = {key: value for key, value in os.environ.items() if key not in {"LLAMA_NATIVE_LIB", "LLAMA_CPP_LIB_PATH"}}
    full |= {"PYTHONPATH": str(_ROOT), "GGML_NO_BACKTRACE": "1", **env}
    with tempfile.TemporaryFile() as out:
        done = subprocess.run(
            [sys.executable, "-m", "tests.stublib", str(out.fileno()), request],
            pass_fds=[out.fileno()],
            cwd=_ROOT,
            env=full,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
        out.seek(0)
        text = out.read().decode()
    return Child(json.loads(text) if text else None, done.returncode, done.stdout, done.stderr)
