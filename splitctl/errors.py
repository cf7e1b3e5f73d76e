"""Everything that splitctl raises; the class says whose fault it was, the message is built from the fields.

A fallback is not here: it is a ``SwitchOutcome`` with a reason, because the session goes on serving.
Every error keeps its fields as ``args``, so it crosses a process boundary (pickle) whole.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which a carry and a session differ.

    Args:
        field: its name; an adapter by its place in the list.
        carried: value in the carry, as text.
        wanted: value in the session, as text.
    """

    field: str
    carried: str
    wanted: str


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason for a refusal or a fallback.

    Args:
        code: stable name for programs, in kebab case ("context-too-small").
        text: one sentence for people, with the numbers.
    """

    code: str
    text: str


_TAIL_LINES = 3


class SplitctlError(Exception):
    """The root of the package's errors; abstract, only its subclasses are raised.

    A subclass is a dataclass of its fields, or hands them to ``__init__`` here.
    """

    def __init__(self, *fields: object) -> None:
        if type(self) is SplitctlError:
            raise TypeError("SplitctlError is abstract: raise the subclass that says whose fault it was")
        super().__init__(*fields)

    def __post_init__(self) -> None:
        self.args = tuple(getattr(self, one.name) for one in dataclasses.fields(cast("Any", self)))


@dataclass(eq=False, repr=False)
class Refused(SplitctlError):
    """The request was judged and refused before anything was touched.

    Attributes:
        reasons: at least one, the most important first.
    """

    reasons: Sequence[Reason]

    def __post_init__(self) -> None:
        self.reasons = tuple(self.reasons)
        if not self.reasons:
            raise ValueError("a refusal needs a reason")
        super().__post_init__()

    def __str__(self) -> str:
        return "refused, nothing was touched: " + "; ".join(f"{one.text} [{one.code}]" for one in self.reasons)


@dataclass(eq=False, repr=False)
class Busy(SplitctlError):
    """Another call holds the session: a switch, a decode past its timeout, or a callback calling back in.

    Attributes:
        what: the work under way, as a noun ("a switch to tensor").
    """

    what: str

    def __str__(self) -> str:
        return f"the session is busy with {self.what}; try again when it has ended"


@dataclass(eq=False, repr=False)
class WorkerLost(SplitctlError):
    """The process that held the model is gone, or stopped making progress and was ended.

    Attributes:
        pid: process id it had.
        how: what happened to it ("killed by SIGABRT", "exit status 1", "no progress for 60 s").
        log_tail: its last lines on stderr, oldest first; may be empty.
    """

    pid: int
    how: str
    log_tail: Sequence[str]

    def __post_init__(self) -> None:
        self.log_tail = tuple(self.log_tail)
        super().__post_init__()

    def __str__(self) -> str:
        said = " | ".join(line.strip() for line in self.log_tail[-_TAIL_LINES:])
        return f"worker {self.pid} was lost ({self.how}); " + (f"it said last: {said}" if said else "it said nothing")


@dataclass(eq=False, repr=False)
class DeadlineExceeded(SplitctlError):
    """Something did not end in the time that it was given.

    Attributes:
        what: what was waited for, as a noun ("the token boundary").
        timeout_s: how long it was given, seconds.
    """

    what: str
    timeout_s: float

    def __str__(self) -> str:
        return f"{self.what} did not come within {self.timeout_s:g} s; give it a longer timeout or end what holds it"


@dataclass(eq=False, repr=False)
class ConfigInvalid(SplitctlError, ValueError):
    """A value that the user gave cannot be used, whatever the model and the machine.

    Attributes:
        field: its name as the user knows it ("tensor_split").
        value: what was given.
        wanted: what would be accepted, as a phrase ("at least 0").
    """

    field: str
    value: object
    wanted: str

    def __str__(self) -> str:
        return f"{self.field} is {self.value!r}; wanted: {self.wanted}"


@dataclass(eq=False, repr=False)
class Cancelled(SplitctlError):
    """Work ended because it was asked to; the session goes on from where it stood.

    Attributes:
        what: the work that ended early, as a noun ("a decode").
    """

    what: str

    def __str__(self) -> str:
        return f"{self.what} was cancelled"


@dataclass(eq=False, repr=False)
class ContextFull(SplitctlError):
    """The cache has no room for the tokens.

    Attributes:
        n_held: cells in use, tokens.
        n_new: tokens that should follow.
        n_ctx: cells there are.
    """

    n_held: int
    n_new: int
    n_ctx: int

    def __str__(self) -> str:
        n_wanted = self.n_held + self.n_new
        return (
            f"the context is too small: it holds {self.n_held} tokens, {self.n_new} more make {n_wanted}, "
            f"and n_ctx is {self.n_ctx}; give a larger one (-c {n_wanted} or more)"
        )


@dataclass(eq=False, repr=False)
class Parked(SplitctlError):
    """The session serves no more: it is closed, or its carry lies on disk.

    Attributes:
        path: the carry's file; None where the session was closed, or could not even be saved.
        why: what went wrong; empty for a session that was closed.
    """

    path: Path | None
    why: str = ""

    def __str__(self) -> str:
        if self.path is not None:
            return f"the session is parked at {self.path}; open a session and restore it from there"
        if self.why:
            return f"the session serves no more and could not be saved: {self.why}; open a new one"
        return "the session is closed; open a new one"


@dataclass(eq=False, repr=False)
class TrialFailed(SplitctlError):
    """The first decode of a state that another process has sealed failed: this process is no place for it.

    Attributes:
        why: what the library said, or was wrong with its logits.
    """

    why: str

    def __str__(self) -> str:
        return f"the first decode after the switch failed: {self.why}"


@dataclass(eq=False, repr=False)
class StateUnsound(SplitctlError):
    """A state that was just saved is not what the library and the session say they hold.

    Attributes:
        why: what was found and what was wanted.
    """

    why: str

    def __str__(self) -> str:
        return self.why


@dataclass(eq=False, repr=False)
class CannotConvert(SplitctlError):
    """A carry that the target's layout cannot hold, or that nobody knows how to rewrite for it.

    Attributes:
        why: what cannot be held, and what to do instead.
    """

    why: str

    def __str__(self) -> str:
        return f"the carry cannot be converted for the target: {self.why}"


@dataclass(eq=False, repr=False)
class CarryMismatch(SplitctlError):
    """A sound carry that belongs to another model, adapter or cache layout than the session's.

    Attributes:
        differences: at least one.
    """

    differences: Sequence[Difference]

    def __post_init__(self) -> None:
        self.differences = tuple(self.differences)
        if not self.differences:
            raise ValueError("a mismatch needs a difference")
        super().__post_init__()

    def __str__(self) -> str:
        told = "; ".join(f"{one.field}: carry {one.carried}, session {one.wanted}" for one in self.differences)
        return f"the carry does not fit this session: {told}; open the session as the carry was made, or start afresh"


@dataclass(eq=False, repr=False)
class CarryDamaged(SplitctlError):
    """The saved state is not what was sealed: damaged, cut short, or not a carry at all.

    Attributes:
        path: the file; None for a carry in memory.
        why: what was found and what was wanted.
    """

    path: Path | None
    why: str

    def __str__(self) -> str:
        where = "the carry in memory" if self.path is None else str(self.path)
        return f"{where} cannot be used as a carry: {self.why}; nothing was restored, use another copy or start afresh"


@dataclass(eq=False, repr=False)
class CarryNotWritten(SplitctlError):
    """A carry could not be put on disk; what was at the path before is still there, unless ``why`` says otherwise.

    Attributes:
        path: where it should have gone.
        why: what stopped it ("No space left on device").
    """

    path: Path
    why: str

    def __str__(self) -> str:
        return f"the carry could not be saved as {self.path}: {self.why}; make room or name another place"


class ModelFileFault(Enum):
    """How a model file can be wrong."""

    MISSING = "missing"
    NOT_A_FILE = "not a file"
    UNREADABLE = "unreadable"
    EMPTY = "empty"
    NOT_GGUF = "not a GGUF"
    TRUNCATED = "truncated"
    LIMIT = "over a limit"
    BAD_VALUE = "bad value"
    UNSUPPORTED = "unsupported"


@dataclass(eq=False, repr=False)
class BadModelFile(SplitctlError):
    """The model file cannot be used.

    Attributes:
        path: the file.
        kind: how it is wrong.
        detail: what was found and what was wanted.
        action: what to do next, as an imperative.
    """

    path: Path
    kind: ModelFileFault
    detail: str
    action: str

    def __str__(self) -> str:
        return f"model file {self.path} is {self.kind.value}: {self.detail}; {self.action}"


@dataclass(eq=False, repr=False)
class FileChanged(SplitctlError):
    """A file of the model or of an adapter is not the one that the session was opened from.

    Attributes:
        path: the file.
        how: how it differs, as a clause.
    """

    path: Path
    how: str

    def __str__(self) -> str:
        return (
            f"{self.path}: the file changed since the session opened: {self.how}; put the same file back, or open a "
            "new session"
        )


@dataclass(eq=False, repr=False)
class AdapterInvalid(SplitctlError):
    """An adapter's file cannot be used with the model.

    Attributes:
        path: the file.
        why: what was found, as a sentence.
    """

    path: Path
    why: str

    def __str__(self) -> str:
        return f"adapter {self.path} cannot be used: {self.why}; give a LoRA file in GGUF form made for this model"
