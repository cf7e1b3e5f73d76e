"""Switches a running llama.cpp session from one split mode to another, and keeps everything it holds.

Main path: cli -> worker -> ``session.switch`` -> ``switcher.run`` -> ``machine.step`` -> command ->
``effects.perform`` -> event -> ``machine.step``.

To embed it: ``Session.open(model, Placement(...))``, ``prefill``, ``generate``, ``switch``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from splitctl.carry.sequence import SamplerSpec, Token
from splitctl.errors import (
    AdapterInvalid,
    BadModelFile,
    Busy,
    Cancelled,
    CarryDamaged,
    CarryMismatch,
    CarryNotWritten,
    ConfigInvalid,
    ContextFull,
    DeadlineExceeded,
    Parked,
    Reason,
    Refused,
    SplitctlError,
    WorkerLost,
)
from splitctl.outcome import Proof, Stage, SwitchOutcome, SwitchStatus, Via
from splitctl.placement import FlashAttn, Placement, PlacementInvalid, SplitMode

if TYPE_CHECKING:
    from splitctl.session import Session

__all__ = [
    "AdapterInvalid",
    "BadModelFile",
    "Busy",
    "Cancelled",
    "CarryDamaged",
    "CarryMismatch",
    "CarryNotWritten",
    "ConfigInvalid",
    "ContextFull",
    "DeadlineExceeded",
    "FlashAttn",
    "Parked",
    "Placement",
    "PlacementInvalid",
    "Proof",
    "Reason",
    "Refused",
    "SamplerSpec",
    "Session",
    "SplitMode",
    "SplitctlError",
    "Stage",
    "SwitchOutcome",
    "SwitchStatus",
    "Token",
    "Via",
    "WorkerLost",
]


def __getattr__(name: str) -> Any:
    """Import `Session` when it is asked for: it brings the native package, which command line and host do without."""
    if name != "Session":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from splitctl.session import Session  # noqa: PLC0415 - that is the point

    return Session
