"""Readers: what a host says about one request, made into typed events and one result. Pure.

Both clients, and both ways to a host, use these; a reader neither waits nor sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, Literal, Protocol, TypeVar

from splitctl.client.errors import UNREADABLE, AnswerBroken, typed, unreadable
from splitctl.client.values import (
    Answer,
    AnswerEvent,
    Begun,
    Delta,
    Paused,
    Raw,
    Resumed,
    SessionEvent,
    SwitchStage,
)
from splitctl.control.client import ControlAnswer, ControlEvent, HostGone
from splitctl.errors import SplitctlError
from splitctl.ipc.jobs import Fault, RequestFailed
from splitctl.ipc.stop_texts import Usage
from splitctl.outcome import SwitchOutcome
from splitctl.placement import whole

E_co = TypeVar("E_co", covariant=True)
R_co = TypeVar("R_co", covariant=True)
E = TypeVar("E")
R = TypeVar("R")


class Reader(Protocol[E_co, R_co]):
    """Makes typed values of the plain ones of one request."""

    def event(self, body: dict[str, Any]) -> E_co | None:
        """Read what is on the way; None for what this release does not know, or does not show."""

    def result(self, body: dict[str, Any]) -> R_co:
        """Read the last message."""

    def broken(self, error: SplitctlError) -> SplitctlError:
        """Give the error to raise for one that came in the middle."""


class Plain(Generic[R]):
    """Reads the answer to a request that has no events."""

    def __init__(self, read: Callable[[Raw], R]) -> None:
        self._read = read

    def event(self, _body: dict[str, Any]) -> None:
        """Show nothing."""

    def result(self, body: dict[str, Any]) -> R:
        """Read the answer."""
        return self._read(body)

    def broken(self, error: SplitctlError) -> SplitctlError:
        """Leave the error as it is."""
        return error


class AnswerReader:
    """Reads a generation.

    Attributes:
        text: what has come.
        tokens: ids that have come.
    """

    def __init__(self, name: str) -> None:
        """Read for a session, or a URL, of this name."""
        self._name = name
        self._pieces: list[str] = []
        self.tokens: list[int] = []

    @property
    def text(self) -> str:
        """What has come."""
        return "".join(self._pieces)

    def event(self, body: dict[str, Any]) -> AnswerEvent | None:
        """Read an event of a stream."""
        match body["kind"]:
            case "begun":
                return Begun(body["n_prompt"], body["n_reused"])
            case "delta":
                delta = Delta(body["text"], whole(body["token"]), body["index"])
                self._pieces.append("" + delta.text)
                if delta.token is not None:
                    self.tokens.append(delta.token)
                return delta
            case "paused":
                return Paused(body["why"])
            case "resumed":
                return Resumed()
        return None

    def result(self, body: dict[str, Any]) -> Answer:
        """Read how a stream ended; raises RequestFailed for an unusable prompt, AnswerBroken if it broke off."""
        why, n_generated = str(body["why"]), int(body["n_predicted"])
        if why == "error" or (why == "context" and not n_generated):
            said = str(body.get("message") or f"the context has no room for its prompt of {body['n_prompt']} tokens")
            fault = Fault.CONFIG if why == "context" else body.get("fault")
            if self.tokens or fault is None:
                raise self._broken(said)
            raise typed(RequestFailed(Fault(fault), "PromptUnusable", said), self._name)
        finish: Literal["stop", "length"] = "length" if why in {"length", "context"} else "stop"
        n_prompt, n_reused = body["n_prompt"], body["n_reused"]
        usage = Usage(n_prompt, n_reused, n_generated, finish, body["prompt_ms"], body["generate_ms"])
        return Answer(self.text, tuple(self.tokens), why, usage, body)

    def broken(self, error: SplitctlError) -> SplitctlError:
        """Say how much had come, where an answer was under way."""
        if isinstance(error, HostGone):
            return self._broken(f"its host {error.how}")
        return self._broken(str(error)) if self.tokens else error

    def _broken(self, why: str) -> AnswerBroken:
        return AnswerBroken(self._name, why, self.text, self.tokens)


class SwitchReader:
    """Reads a switch: its stages, and then its outcome.

    Attributes:
        raw: the outcome object as it came; empty before that.
    """

    def __init__(self) -> None:
        self.raw: Raw = {}

    def event(self, body: dict[str, Any]) -> SwitchStage | None:
        """Read a stage."""
        is_stage = body["kind"] in {"stage", "switch_stage"}
        return SwitchStage(str(body["stage"]), float(body["share"])) if is_stage else None

    def result(self, body: dict[str, Any]) -> SwitchOutcome:
        """Read the outcome."""
        self.raw = body
        return SwitchOutcome.from_json(body)

    def broken(self, error: SplitctlError) -> SplitctlError:
        """Leave the error as it is."""
        return error


class EventsReader:
    """Reads what happens to a session."""

    def event(self, body: dict[str, Any]) -> SessionEvent:
        """Read an event."""
        return SessionEvent(str(body["kind"]), {name: value for name, value in body.items() if name != "kind"})

    def result(self, _body: dict[str, Any]) -> None:
        """There is none: the session has ended."""

    def broken(self, error: SplitctlError) -> SplitctlError:
        """Leave the error as it is."""
        return error


class Transcript(Generic[E, R]):
    """What has come of one request, and has not been taken.

    Attributes:
        reader: makes values.
        events: not taken yet.
        is_over: nothing more comes.
    """

    def __init__(self, name: str, reader: Reader[E, R]) -> None:
        """Begin with nothing, for a session, or a URL, of this name."""
        self._name = name
        self.reader = reader
        self.events: deque[E] = deque()
        self.is_over = False
        self._results: list[R] = []
        self._failure: SplitctlError | None = None
        self._has_told = False

    def take(self, messages: Iterable[ControlEvent | ControlAnswer]) -> None:
        """Read messages of the host."""
        for message in messages:
            try:
                if isinstance(message, ControlAnswer):
                    self.is_over = True
                    self._results.append(self.reader.result(message.body))
                elif (event := self.reader.event(message.body)) is not None:
                    self.events.append(event)
            except SplitctlError as error:
                self._fail(error)
            except UNREADABLE as error:
                self._fail(unreadable(self._name, error))

    def fail(self, error: SplitctlError) -> None:
        """End with an error."""
        if isinstance(error, RequestFailed):
            error = typed(error, self._name)
        self._fail(self.reader.broken(error))

    def tell(self) -> None:
        """Raise the error that it ended with, to whoever reads events, once."""
        if self._failure is not None and not self._has_told:
            self._has_told = True
            raise self._failure

    @property
    def has_result(self) -> bool:
        """Whether it ended well."""
        return bool(self._results)

    @property
    def result(self) -> R:
        """The result of one that is over; raises its error where it has none."""
        if self._failure is not None:
            raise self._failure
        return self._results[0]

    def _fail(self, error: SplitctlError) -> None:
        self.is_over = True
        self._failure = self._failure or error
