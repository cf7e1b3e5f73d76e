"""What goes wrong between a program and a hosted session, beside what the session itself raises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitctl.errors import Busy, Parked, Reason, Refused, SplitctlError
from splitctl.ipc.jobs import Fault, RequestFailed

_PARKED_AT = "the session is parked at "


class HostBusy(RequestFailed, Busy):
    """The host does something else, or has as many requests as it takes; nothing was begun."""

    @property
    def what(self) -> str:  # type: ignore[override]
        """What it does, as a noun, or its whole sentence."""
        return self.message.removeprefix("the session is busy with ").partition(";")[0]


class HostParked(RequestFailed, Parked):
    """No worker can serve the session; it lies on disk, and a restore brings it back."""

    @property
    def path(self) -> Path | None:  # type: ignore[override]
        """Where it lies; None where it could not be saved."""
        at = self.message.removeprefix(_PARKED_AT).rpartition(";")[0]
        return Path(at) if self.message.startswith(_PARKED_AT) and at else None

    @property
    def why(self) -> str:  # type: ignore[override]
        """Why it is, as the host says it."""
        return self.message

    def __str__(self) -> str:
        path = self.path
        return self.message if path is None else f"{_PARKED_AT}{path}; restore({str(path)!r}) brings it back"


class HostRefused(RequestFailed, Refused):
    """The host has judged the request and refused it; nothing was touched."""

    def __post_init__(self) -> None:
        SplitctlError.__post_init__(self)

    @property
    def reasons(self) -> Sequence[Reason]:  # type: ignore[override]
        """Why, one reason: the host's whole sentence."""
        return (Reason(self.name, self.message),)


@dataclass(eq=False, repr=False)
class HostIncompatible(SplitctlError):
    """The host, or what answers in its place, is of another release, or no splitctl at all.

    Attributes:
        name: the session, or the URL.
        what: what it does not know, or does otherwise, as a clause.
    """

    name: str
    what: str

    def __str__(self) -> str:
        advice = "it may be of another release: serve the session with the splitctl that this program imports"
        return f"the host of session {self.name} {self.what}; {advice}"


@dataclass(eq=False, repr=False)
class ClientClosed(SplitctlError):
    """A client was closed, and asks no more.

    Attributes:
        name: the session, or the URL.
    """

    name: str

    def __str__(self) -> str:
        return f"the client of session {self.name} is closed; connect again"


@dataclass(eq=False, repr=False)
class ServerUnreachable(SplitctlError):
    """Nobody answers at a URL.

    Attributes:
        url: where.
        why: what the system says.
    """

    url: str
    why: str

    def __str__(self) -> str:
        return f"nobody answers at {self.url} ({self.why}); check the URL, or serve: splitctl serve -m MODEL --port N"


@dataclass(eq=False, repr=False)
class AnswerBroken(SplitctlError):
    """An answer ended before it was whole: its host ended or was restarted, or the session could not go on with it.

    Attributes:
        name: the session, or the URL.
        why: what happened, as a clause.
        text: what had come of the answer.
        tokens: ids of the tokens that had come.
    """

    name: str
    why: str
    text: str
    tokens: Sequence[int]

    def __post_init__(self) -> None:
        self.tokens = tuple(self.tokens)
        super().__post_init__()

    def __str__(self) -> str:
        n = len(self.tokens)
        came = f"{n} token{'' if n == 1 else 's'}"
        return (
            f"the answer of session {self.name} broke off after {came}: {self.why}; what came is in text and tokens, "
            "ask again to go on"
        )


UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What reading a message of another release raises: a field that is not there, or of another kind."""


def unreadable(name: str, error: Exception) -> HostIncompatible:
    """Give the error for a message of session or URL `name` that could not be read."""
    return HostIncompatible(name, f"says what this release does not read ({type(error).__name__}: {error})")


_OF_FAULT: Mapping[Fault, type[RequestFailed]] = {
    Fault.BUSY: HostBusy,
    Fault.PARKED: HostParked,
    Fault.REFUSED: HostRefused,
}


def typed(error: RequestFailed, name: str) -> SplitctlError:
    """Give what a host said as the error that a session in this process would raise.

    Args:
        error: as it came.
        name: the session, or the URL.
    """
    if error.name == "MessageInvalid":
        # What this side writes is right in this release.
        return HostIncompatible(name, f"does not take the request ({error.message})")
    kind: type[RequestFailed] = _OF_FAULT.get(error.fault, RequestFailed)
    more: Mapping[str, Any] = error.body
    return kind(error.fault, error.name, error.message, more)
