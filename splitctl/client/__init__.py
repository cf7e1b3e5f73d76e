"""The clients of a hosted session, for programs: by its control socket or over HTTP, waiting or on an asyncio loop."""

from __future__ import annotations

from splitctl.client.aio import AsyncClient, AsyncGeneration, AsyncSwitch, AsyncWork, connect_async
from splitctl.client.blocking import Client, Generation, Switch, Work, connect
from splitctl.client.errors import (
    AnswerBroken,
    ClientClosed,
    HostBusy,
    HostIncompatible,
    HostParked,
    HostRefused,
    ServerUnreachable,
)
from splitctl.client.values import (
    Answer,
    AnswerEvent,
    Begun,
    Delta,
    Paused,
    PlacementFields,
    PolicyStatus,
    Restarted,
    Restored,
    Resumed,
    Saved,
    SequenceStatus,
    SessionEvent,
    Status,
    Stopped,
    SwitchCheck,
    SwitchStage,
)
from splitctl.control.client import HostGone
from splitctl.control.sockets import NoSuchSession
from splitctl.ipc.jobs import RequestFailed
from splitctl.ipc.stop_texts import Usage

__all__ = [
    "Answer",
    "AnswerBroken",
    "AnswerEvent",
    "AsyncClient",
    "AsyncGeneration",
    "AsyncSwitch",
    "AsyncWork",
    "Begun",
    "Client",
    "ClientClosed",
    "Delta",
    "Generation",
    "HostBusy",
    "HostGone",
    "HostIncompatible",
    "HostParked",
    "HostRefused",
    "NoSuchSession",
    "Paused",
    "PlacementFields",
    "PolicyStatus",
    "RequestFailed",
    "Restarted",
    "Restored",
    "Resumed",
    "Saved",
    "SequenceStatus",
    "ServerUnreachable",
    "SessionEvent",
    "Status",
    "Stopped",
    "Switch",
    "SwitchCheck",
    "SwitchStage",
    "Usage",
    "Work",
    "connect",
    "connect_async",
]
