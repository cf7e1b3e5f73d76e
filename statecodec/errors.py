"""What can be wrong with state bytes: one class a kind, so that a caller can tell damage from disagreement.

The two roots are abstract: nothing raises them. Hostile bytes raise a `StateFormatError` and nothing else;
`NotRepresentable` is for sound input that the wanted form cannot hold.

An error holds no frame of this package, so it may be kept for as long as you like: the bytes that it is about can be
released (unmapped, freed) at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ClassVar, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Error = TypeVar("_Error", bound="StateCodecError")


class StateCodecError(ValueError):
    """Root of everything that this package raises on purpose."""


class StateFormatError(StateCodecError):
    """The bytes are not a state that this package (and so, probably, the library) can read.

    Args:
        offset: where in the buffer, in bytes from its start.
        field: what was being read there, with its place in the structure.
        found: what the bytes said.
        expected: what would have been accepted.
    """

    advice: ClassVar[str] = "Do not give these bytes to the library."

    def __init__(self, offset: int, field: str, found: object, expected: object) -> None:
        """Keep the four facts; the message is made from them."""
        super().__init__(offset, field, found, expected)
        self.offset = offset
        self.field = field
        self.found = found
        self.expected = expected

    def __str__(self) -> str:
        """Say what, where, found, wanted, and what to do."""
        return f"{self.field} at byte {self.offset}: found {self.found}, expected {self.expected}. {self.advice}"


class Truncated(StateFormatError):
    """The bytes end before the structure does."""

    advice = "The file or buffer was cut short: take the state again, or read the tokens again."


class LimitExceeded(StateFormatError):
    """A count or size is beyond what any real state holds, or the reading took too many steps."""

    advice = "The bytes are damaged or hostile: do not give them to the library."


class UnknownVersion(StateFormatError):
    """A magic or version word that no known layout has."""

    advice = "Read the tokens again with the build that you have, or use the build that wrote the state."


class ForeignFile(UnknownVersion):
    """Bytes that are known as something else than a state."""

    advice = "Name a file that holds a saved state."


class BadField(StateFormatError):
    """One field holds a value that its own rule forbids."""

    advice = "The bytes are damaged, or another program's format: do not give them to the library."


class Inconsistent(StateFormatError):
    """Fields that are fine one by one contradict each other or the given facts."""

    advice = "The state is damaged or belongs to another model or context: do not give it to the library."


class TrailingBytes(StateFormatError):
    """The structure ended before the bytes did."""

    advice = "The buffer is longer than the state, or the state is of an unknown form."


class Ambiguous(StateFormatError):
    """The bytes read soundly in more than one way; only the model can tell which is meant.

    `found` describes the readings; `expected` names the facts that would decide.
    """

    advice = "Give the facts of the model (parse(..., facts=ModelFacts(...)))."


class NotRepresentable(StateCodecError):
    """Sound input that the wanted form cannot hold.

    Args:
        what: the part that does not fit.
        found: what it is.
        wanted: what the target form can hold.
        action: what to do instead.
    """

    def __init__(self, what: str, found: object, wanted: object, action: str) -> None:
        """Keep the facts; the message is made from them."""
        super().__init__(what, found, wanted, action)
        self.what = what
        self.found = found
        self.wanted = wanted
        self.action = action

    def __str__(self) -> str:
        """Say what does not fit, into what, and what to do."""
        return f"{self.what}: {self.found} cannot be held by {self.wanted}. {self.action}"


def bare(error: _Error) -> _Error:
    """Take from an error what would keep buffers alive: the frames that it went through, and the errors before it."""
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


def raises_bare(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a function raise its errors without the frames inside it, which hold views of the caller's buffer."""

    @functools.wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except StateCodecError as error:
            failure = bare(error)
        # This frame stays in the traceback: it must hold neither the buffer nor, in a circle, the error itself.
        del args, kwargs
        try:
            raise failure
        finally:
            del failure

    return called
