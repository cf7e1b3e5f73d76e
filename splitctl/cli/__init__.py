"""The command line: `splitctl` and its commands, one file a family.

Main path: main -> a command (run, devices, doctor) -> child (interrupts, events) -> `splitctl.ipc.process`.
"""

from __future__ import annotations

from splitctl.cli.main import main

__all__ = ["main"]
