"""The process that holds the library: `python -m splitctl.worker.main` does one job of `ipc.jobs` and ends.

Main path: `main` reads the job, `run` answers a prompt, `serve` keeps a hosted session.
"""

from __future__ import annotations
