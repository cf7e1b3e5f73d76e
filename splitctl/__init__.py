"""Switches a running llama.cpp session from one split mode to another, and keeps everything it holds.

Main path: cli -> worker -> ``session.switch`` -> ``switcher.run`` -> ``machine.step`` -> command ->
``effects.perform`` -> event -> ``machine.step``.

To embed it: ``Session.open(model, Placement(...))``, ``text`` or ``chat``, ``switch("tensor")``; docs/library.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splitctl.carry.sampling import SamplerSpec, Token
    from splitctl.client import (
        AnswerBroken,
        AsyncClient,
        Client,
        HostGone,
        HostIncompatible,
        NoSuchSession,
        RequestFailed,
        ServerUnreachable,
        connect,
        connect_async,
    )
    from splitctl.engine.sampler import LogitsProcessor
    from splitctl.errors import (
        AdapterInvalid,
        BadModelFile,
        Busy,
        Cancelled,
        CannotConvert,
        CarryDamaged,
        CarryMismatch,
        CarryNotWritten,
        ConfigInvalid,
        ContextFull,
        DeadlineExceeded,
        FileChanged,
        Parked,
        Reason,
        Refused,
        SplitctlError,
        StateUnsound,
        WorkerLost,
    )
    from splitctl.model.chat_messages import ChatTemplateFailed
    from splitctl.outcome import Proof, Stage, SwitchOptions, SwitchOutcome, SwitchStatus, Via, WeightsTier
    from splitctl.placement import FlashAttn, Placement, PlacementInvalid, SplitMode
    from splitctl.session import Fed, Library, NativeError, Session, TextStream, Usage
    from splitctl.session.asynchronous import AsyncSession, AsyncTextStream
    from splitctl.session.storage import Restored
    from splitctl.switching.checking import Checked

__all__ = [
    "AdapterInvalid",
    "AnswerBroken",
    "AsyncClient",
    "AsyncSession",
    "AsyncTextStream",
    "BadModelFile",
    "Busy",
    "Cancelled",
    "CannotConvert",
    "CarryDamaged",
    "CarryMismatch",
    "CarryNotWritten",
    "ChatTemplateFailed",
    "Checked",
    "Client",
    "ConfigInvalid",
    "ContextFull",
    "DeadlineExceeded",
    "Fed",
    "FileChanged",
    "FlashAttn",
    "HostGone",
    "HostIncompatible",
    "Library",
    "LogitsProcessor",
    "NativeError",
    "NoSuchSession",
    "Parked",
    "Placement",
    "PlacementInvalid",
    "Proof",
    "Reason",
    "Refused",
    "RequestFailed",
    "Restored",
    "SamplerSpec",
    "ServerUnreachable",
    "Session",
    "SplitMode",
    "SplitctlError",
    "Stage",
    "StateUnsound",
    "SwitchOptions",
    "SwitchOutcome",
    "SwitchStatus",
    "TextStream",
    "Token",
    "Usage",
    "Via",
    "WeightsTier",
    "WorkerLost",
    "connect",
    "connect_async",
]

# Everything not named here is an error.
_HOMES = {
    "splitctl.session": ("Fed", "Library", "NativeError", "Session", "TextStream", "Usage"),
    "splitctl.session.asynchronous": ("AsyncSession", "AsyncTextStream"),
    "splitctl.session.storage": ("Restored",),
    "splitctl.switching.checking": ("Checked",),
    "splitctl.engine.sampler": ("LogitsProcessor",),
    "splitctl.model.chat_messages": ("ChatTemplateFailed",),
    "splitctl.carry.sampling": ("SamplerSpec", "Token"),
    "splitctl.client": (
        *("AnswerBroken", "AsyncClient", "Client", "HostGone", "HostIncompatible", "NoSuchSession", "RequestFailed"),
        *("ServerUnreachable", "connect", "connect_async"),
    ),
    "splitctl.outcome": ("Proof", "Stage", "SwitchOptions", "SwitchOutcome", "SwitchStatus", "Via", "WeightsTier"),
    "splitctl.placement": ("FlashAttn", "Placement", "PlacementInvalid", "SplitMode"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for: numpy and the native package cost more than most commands need."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF.get(name, "splitctl.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | set(__all__))
