"""The process that holds the library, and the process that watches it.

Main path: the command line starts a `Worker` (launch), sends it one request (protocol), and the child
(`python -m splitctl.host.worker`) answers in events until its result.
"""

from __future__ import annotations

from splitctl.host.launch import Worker
from splitctl.host.probes import Prober
from splitctl.host.protocol import (
    DevicesRequest,
    DoctorRequest,
    Event,
    Failure,
    Fault,
    HostRequest,
    Partial,
    Piece,
    ProbeRequest,
    Progress,
    ProtocolBroken,
    Report,
    Request,
    Result,
    RunRequest,
    VerifyRequest,
)

__all__ = [
    "DevicesRequest",
    "DoctorRequest",
    "Event",
    "Failure",
    "Fault",
    "HostRequest",
    "Partial",
    "Piece",
    "ProbeRequest",
    "Prober",
    "Progress",
    "ProtocolBroken",
    "Report",
    "Request",
    "Result",
    "RunRequest",
    "VerifyRequest",
    "Worker",
]
