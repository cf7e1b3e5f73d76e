"""Programs of tools/ as a user runs them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]
GUARD_S = 900.0
"""How long a program may take before a test fails; no test measures it."""


def tool_command(name: str, *words: str | Path) -> list[str]:
    """The command line of a program."""
    return [sys.executable, "-m", f"tools.{name}", *map(str, words)]


def run_tool(
    name: str, *words: str | Path, env: Mapping[str, str] | None = None, cwd: Path = CHECKOUT, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program from a checkout to its end."""
    command = tool_command(name, *words)
    return subprocess.run(
        command,
        cwd=cwd,
        env=env,
        input=stdin,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=GUARD_S,
    )
