"""Errors of the session as HTTP answers them: whose fault it was decides the status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from splitctl.errors import (
    Busy,
    Cancelled,
    CarryDamaged,
    ConfigInvalid,
    ContextFull,
    DeadlineExceeded,
    Parked,
    Reason,
    Refused,
    SplitctlError,
    WorkerLost,
)
from splitctl.http.errors import ApiError, api_error
from splitctl.ipc.jobs import Fault, RequestFailed
from splitctl.ipc.wire import MessageInvalid


@pytest.mark.parametrize(
    ("error", "status", "param", "code"),
    [
        (ConfigInvalid("proof", "x", "another"), 400, "proof", None),
        (MessageInvalid("force", "5", "true or false"), 400, "force", None),
        (MessageInvalid("", "5", "an object"), 400, None, None),
        (ContextFull(5, 6, 8), 400, None, "context_length_exceeded"),
        (CarryDamaged(Path("a"), "it is cut"), 400, None, "unusable_file"),
        (Busy("a switch"), 409, None, "busy"),
        (Refused([Reason("no-row", "there is none")]), 409, None, "no-row"),
        (Cancelled("a switch"), 409, None, "cancelled"),
        (RequestFailed(Fault.CONFIG, "UnknownDevice", "no such device"), 400, None, "UnknownDevice"),
        (RequestFailed(Fault.BUSY, "Busy", "streams"), 409, None, "busy"),
        (RequestFailed(Fault.INTERNAL, "CarryDamaged", "it is cut"), 400, None, "unusable_file"),
        (RequestFailed(Fault.INTERNAL, "CarryMismatch", "of another model"), 400, None, "unusable_file"),
        (RequestFailed(Fault.INTERNAL, "KeyError", "a fault of splitctl"), 500, None, "KeyError"),
        (RequestFailed(Fault.LIBRARY, "NativeError", "it failed"), 500, None, "NativeError"),
        (Parked(None, "its device is gone"), 503, None, "parked"),
        (DeadlineExceeded("opening", 5.0), 503, None, "deadline"),
        (WorkerLost(7, "was killed", ()), 500, None, "WorkerLost"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_whose_fault_it_was_decides_the_status(
    error: SplitctlError, status: int, param: str | None, code: str | None
) -> None:
    """The client's faults are 4xx, ours and the library's 5xx, and all have a message."""
    answer = api_error(error)
    assert (answer.status, answer.param, answer.code) == (status, param, code)
    assert answer.message


def test_answers_say_when_to_come_again_and_how_to_come_in() -> None:
    """What may work later says so, a missing key names its scheme, and what was left half said ends its connection."""
    again, key, slow = (ApiError(status, "m").response() for status in (503, 401, 408))
    assert (again.headers["retry-after"], key.headers["www-authenticate"]) == ("1", "Bearer")
    assert slow.headers["connection"] == "close"
    error = json.loads(bytes(key.body))["error"]
    assert error == {"message": "m", "type": "authentication_error", "param": None, "code": None}
