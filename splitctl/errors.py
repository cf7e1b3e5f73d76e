"""Everything that splitctl raises; the class says whose fault it was, the message is built from the fields.

A fallback is not here: it is a ``SwitchOutcome`` with a reason, because the session goes on serving.
Every error keeps its fields as ``args``, so it crosses a process boundary (pickle) whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

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
    """The root of the package's errors; abstract, only its subclasses are raised."""

    def __init__(self, *fields: object) -> None:
        """Keep the fields as ``args``.

        Args:
            fields: what the subclass was built from, in the order of its parameters.

        Raises:
            TypeError: the root itself was built.
        """
        if type(self) is SplitctlError:
            text = "SplitctlError is abstract: raise the subclass that says whose fault it was"
            raise TypeError(text)
        super().__init__(*fields)


class Refused(SplitctlError):
    """The request was judged and refused before anything was touched."""

    def __init__(self, reasons: Sequence[Reason]) -> None:
        """Build from the reasons.

        Args:
            reasons: at least one, the most important first.

        Raises:
            ValueError: a refusal without a reason.
        """
        self.reasons: tuple[Reason, ...] = tuple(reasons)
        if not self.reasons:
            text = "a refusal needs a reason"
            raise ValueError(text)
        super().__init__(self.reasons)

    def __str__(self) -> str:
        """Name every reason; nothing was touched."""
        return "refused, nothing was touched: " + "; ".join(f"{one.text} [{one.code}]" for one in self.reasons)


class Busy(SplitctlError):
    """Another call holds the session: a switch, a decode past its timeout, or a callback calling back in."""

    def __init__(self, what: str) -> None:
        """Build from what holds the session.

        Args:
            what: the work under way, as a noun ("a switch to tensor").
        """
        self.what = what
        super().__init__(what)

    def __str__(self) -> str:
        """Name what holds the session."""
        return f"the session is busy with {self.what}; try again when it has ended"


class WorkerLost(SplitctlError):
    """The process that held the model is gone, or stopped making progress and was ended."""

    def __init__(self, pid: int, how: str, log_tail: Sequence[str]) -> None:
        """Build from the process and its last words.

        Args:
            pid: process id it had.
            how: what happened to it ("killed by SIGABRT", "exit status 1", "no progress for 60 s").
            log_tail: its last lines on stderr, oldest first; may be empty.
        """
        self.pid = pid
        self.how = how
        self.log_tail: tuple[str, ...] = tuple(log_tail)
        super().__init__(pid, how, self.log_tail)

    def __str__(self) -> str:
        """Name the process, what happened, and its last lines."""
        said = " | ".join(line.strip() for line in self.log_tail[-_TAIL_LINES:])
        return f"worker {self.pid} was lost ({self.how}); " + (f"it said last: {said}" if said else "it said nothing")


class DeadlineExceeded(SplitctlError):
    """Something did not end in the time that it was given."""

    def __init__(self, what: str, timeout_s: float) -> None:
        """Build from what was waited for.

        Args:
            what: what was waited for, as a noun ("the token boundary").
            timeout_s: how long it was given, seconds.
        """
        self.what = what
        self.timeout_s = timeout_s
        super().__init__(what, timeout_s)

    def __str__(self) -> str:
        """Name what was waited for and for how long."""
        return f"{self.what} did not come within {self.timeout_s:g} s; give it a longer timeout or end what holds it"


class ConfigInvalid(SplitctlError):
    """A value that the user gave cannot be used, whatever the model and the machine."""

    def __init__(self, field: str, value: object, wanted: str) -> None:
        """Build from the field.

        Args:
            field: its name as the user knows it ("tensor_split").
            value: what was given.
            wanted: what would be accepted, as a phrase ("at least 0").
        """
        self.field = field
        self.value = value
        self.wanted = wanted
        super().__init__(field, value, wanted)

    def __str__(self) -> str:
        """Name the field, the value and what is wanted."""
        return f"{self.field} is {self.value!r}; wanted: {self.wanted}"


class Cancelled(SplitctlError):
    """Work ended because it was asked to; the session goes on from where it stood."""

    def __init__(self, what: str) -> None:
        """Build from the work.

        Args:
            what: the work that ended early, as a noun ("a decode").
        """
        self.what = what
        super().__init__(what)

    def __str__(self) -> str:
        """Name the work."""
        return f"{self.what} was cancelled"


class ContextFull(SplitctlError):
    """The cache has no room for the tokens."""

    def __init__(self, n_held: int, n_new: int, n_ctx: int) -> None:
        """Build from the numbers.

        Args:
            n_held: cells in use, tokens.
            n_new: tokens that should follow.
            n_ctx: cells there are.
        """
        self.n_held = n_held
        self.n_new = n_new
        self.n_ctx = n_ctx
        super().__init__(n_held, n_new, n_ctx)

    def __str__(self) -> str:
        """Name the three numbers and the way out."""
        n_wanted = self.n_held + self.n_new
        return (
            f"the context is too small: it holds {self.n_held} tokens, {self.n_new} more make {n_wanted}, "
            f"and n_ctx is {self.n_ctx}; give a larger one (-c {n_wanted} or more)"
        )


class Parked(SplitctlError):
    """The session serves no more: it is closed, or its carry lies on disk."""

    def __init__(self, path: Path | None, why: str = "") -> None:
        """Build from the place.

        Args:
            path: the carry's file; None where the session was closed, or could not even be saved.
            why: what went wrong; empty for a session that was closed.
        """
        self.path = path
        self.why = why
        super().__init__(path, why)

    def __str__(self) -> str:
        """Say where the session is and how to bring it back."""
        if self.path is not None:
            return f"the session is parked at {self.path}; open a session and restore it from there"
        if self.why:
            return f"the session serves no more and could not be saved: {self.why}; open a new one"
        return "the session is closed; open a new one"


class StateUnsound(SplitctlError):
    """A state that was just saved is not what the library and the session say they hold."""

    def __init__(self, why: str) -> None:
        """Build from the contradiction.

        Args:
            why: what was found and what was wanted.
        """
        self.why = why
        super().__init__(why)

    def __str__(self) -> str:
        """Name the contradiction."""
        return self.why


class CannotConvert(SplitctlError):
    """A carry that the target's layout cannot hold, or that nobody knows how to rewrite for it."""

    def __init__(self, why: str) -> None:
        """Build from the obstacle.

        Args:
            why: what cannot be held, and what to do instead.
        """
        self.why = why
        super().__init__(why)

    def __str__(self) -> str:
        """Name the obstacle."""
        return f"the carry cannot be converted for the target: {self.why}"


class CarryMismatch(SplitctlError):
    """A sound carry that belongs to another model, adapter or cache layout than the session's."""

    def __init__(self, differences: Sequence[Difference]) -> None:
        """Build from every difference.

        Args:
            differences: at least one.

        Raises:
            ValueError: a mismatch without a difference.
        """
        self.differences: tuple[Difference, ...] = tuple(differences)
        if not self.differences:
            text = "a mismatch needs a difference"
            raise ValueError(text)
        super().__init__(self.differences)

    def __str__(self) -> str:
        """Name every difference with both values."""
        told = "; ".join(f"{one.field}: carry {one.carried}, session {one.wanted}" for one in self.differences)
        return f"the carry does not fit this session: {told}; open the session as the carry was made, or start afresh"


class CarryDamaged(SplitctlError):
    """The saved state is not what was sealed: damaged, cut short, or not a carry at all."""

    def __init__(self, path: Path | None, why: str) -> None:
        """Build from the place and what was found there.

        Args:
            path: the file; None for a carry in memory.
            why: what was found and what was wanted.
        """
        self.path = path
        self.why = why
        super().__init__(path, why)

    def __str__(self) -> str:
        """Name the place and what was found."""
        where = "the carry in memory" if self.path is None else str(self.path)
        return f"{where} cannot be used as a carry: {self.why}; nothing was restored, use another copy or start afresh"


class CarryNotWritten(SplitctlError):
    """A carry could not be put on disk; what was at the path before is still there, unless ``why`` says otherwise."""

    def __init__(self, path: Path, why: str) -> None:
        """Build from the place.

        Args:
            path: where it should have gone.
            why: what stopped it ("No space left on device").
        """
        self.path = path
        self.why = why
        super().__init__(path, why)

    def __str__(self) -> str:
        """Name the place and what stopped the write."""
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


class BadModelFile(SplitctlError):
    """The model file cannot be used."""

    def __init__(self, path: Path, kind: ModelFileFault, detail: str, action: str) -> None:
        """Build from the file and what is wrong with it.

        Args:
            path: the file.
            kind: how it is wrong.
            detail: what was found and what was wanted.
            action: what to do next, as an imperative.
        """
        self.path = path
        self.kind = kind
        self.detail = detail
        self.action = action
        super().__init__(path, kind, detail, action)

    def __str__(self) -> str:
        """Name the file, the fault and the next action."""
        return f"model file {self.path} is {self.kind.value}: {self.detail}; {self.action}"


class AdapterInvalid(SplitctlError):
    """An adapter's file cannot be used with the model."""

    def __init__(self, path: Path, why: str) -> None:
        """Build from the file and what is wrong with it.

        Args:
            path: the file.
            why: what was found, as a sentence.
        """
        self.path = path
        self.why = why
        super().__init__(path, why)

    def __str__(self) -> str:
        """Name the file, the fault and the next action."""
        return f"adapter {self.path} cannot be used: {self.why}; give a LoRA file in GGUF form made for this model"
