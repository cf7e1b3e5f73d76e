"""Tries a placement in a child process before a session is put into it, and remembers the result."""

from __future__ import annotations

from splitctl.probing.own_call import try_own_call
from splitctl.probing.probe import try_copy, try_placement
from splitctl.probing.reserve import can_reserve, reserve
from splitctl.probing.verdicts import (
    ProbeKey,
    ProbeVerdict,
    Verdict,
    VerdictCache,
    build_id,
    is_of_the_target,
    verdict_of_death,
)

__all__ = [
    "ProbeKey",
    "ProbeVerdict",
    "Verdict",
    "VerdictCache",
    "build_id",
    "can_reserve",
    "is_of_the_target",
    "reserve",
    "try_copy",
    "try_own_call",
    "try_placement",
    "verdict_of_death",
]
