"""Switches a running llama.cpp session from one split mode to another, and keeps everything it holds.

Main path: cli -> worker -> ``session.switch`` -> ``switcher.run`` -> ``machine.step`` -> command ->
``effects.perform`` -> event -> ``machine.step``.

To embed it: ``Session.open(model, Placement(...))``, ``prefill``, ``generate``, ``switch``.
"""

from __future__ import annotations

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
