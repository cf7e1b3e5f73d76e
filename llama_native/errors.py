"""Everything that llama_native raises; the class says whose fault it was.

Laws:
    1. ``NativeError`` is the root and is never raised itself.
    2. Every message is built from the error's fields: what, where, found, wanted, next action.
    3. The fields survive pickling, because a worker process hands its errors to its parent.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

_LOG_LINES_SHOWN = 6


class NativeError(Exception):
    """The abstract root of the package's errors; a subclass is a dataclass of its fields."""

    def __init__(self) -> None:
        raise TypeError("NativeError is abstract: raise one of its subclasses")

    def __post_init__(self) -> None:
        # Pickling builds an error again from its args.
        self.args = tuple(getattr(self, one.name) for one in dataclasses.fields(cast("Any", self)))


@dataclass(eq=False, repr=False)
class LibraryNotFound(NativeError):
    """No candidate could be used, whatever the reasons were.

    Attributes:
        tried: one entry a candidate, ``str()`` of which reads "path (origin): reason".
    """

    tried: tuple[object, ...] = ()

    def __str__(self) -> str:
        looked = "".join(f"\n  {entry}" for entry in self.tried) or "\n  (no candidate at all)"
        return (
            f"no usable llama library was found; looked at:{looked}\n"
            "install one (pip install 'splitctl[cpu]'), or name one with LLAMA_NATIVE_LIB=/path/to/libllama.so"
        )


@dataclass(eq=False, repr=False)
class LibraryUnusable(NativeError):
    """One library that was asked for by name cannot be loaded or lacks what is required.

    Attributes:
        path: the library file, or the folder that was searched.
        why: the fault, with what was found and what is wanted.
        next_action: what the user can do about it; may be empty.
    """

    path: str | Path
    why: str
    next_action: str = ""

    def __str__(self) -> str:
        tail = f"; {self.next_action}" if self.next_action else ""
        return f"{self.path} cannot be used: {self.why}{tail}"


@dataclass(eq=False, repr=False)
class UnsupportedAbi(NativeError):
    """The library's structs are not ones that this package knows, or are known and refused.

    Attributes:
        found: what the library's own answers say about its layout.
        known: the nearest known layout and where it differs, or the layouts that are accepted.
        next_action: what the user can do about it; may be empty.
    """

    found: str
    known: str
    next_action: str = ""

    def __str__(self) -> str:
        tail = f"; {self.next_action}" if self.next_action else ""
        return f"unsupported library layout: {self.found}; {self.known}{tail}"


@dataclass(eq=False, repr=False)
class CapabilityMissing(NativeError):
    """The library is sound but does not export what an operation needs.

    Attributes:
        name: the capability's name.
        symbols: the exported names that are absent (of alternatives, all).
    """

    name: str
    symbols: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"this library build cannot do {self.name!r}: it does not export {', '.join(self.symbols)}; "
            "use a build that does (splitctl doctor lists what this one has)"
        )


@dataclass(eq=False, repr=False)
class CallFailed(NativeError):
    """A library call reported failure by its return value.

    Attributes:
        function: the C function's name.
        rc: its return code; None where it returned NULL or false.
        log_tail: the last lines that the library logged, oldest first.
    """

    function: str
    rc: int | None
    log_tail: tuple[str, ...] = ()

    def __str__(self) -> str:
        returned = "NULL" if self.rc is None else str(self.rc)
        lines = [line.rstrip() for line in self.log_tail[-_LOG_LINES_SHOWN:] if line.strip()]
        said = f"; the library's last words: {' | '.join(lines)}" if lines else ""
        return f"{self.function} failed (returned {returned}){said}"


@dataclass(eq=False, repr=False)
class HandleClosed(NativeError):
    """A handle was used after its close, or after the object that it stands on was closed.

    Attributes:
        handle: the kind of handle, such as "model" or "context".
    """

    handle: str

    def __str__(self) -> str:
        return f"this {self.handle} is closed; open a new one"


@dataclass(eq=False, repr=False)
class Reentered(NativeError):
    """A second call entered a handle while the first was still inside it.

    Attributes:
        handle: the kind of handle.
        function: the call that was refused.
        inside: the call that is in progress; may be empty.
    """

    handle: str
    function: str
    inside: str = ""

    def __str__(self) -> str:
        busy = f"{self.inside} is" if self.inside else "another call is"
        return f"{self.function} refused: {busy} still inside this {self.handle}; use one thread at a time for a handle"


@dataclass(eq=False, repr=False)
class ForkedProcess(NativeError):
    """A handle made before a fork was used in the child.

    Attributes:
        opened_in: process id in which the library was opened.
        used_in: process id of the caller.
    """

    opened_in: int
    used_in: int

    def __str__(self) -> str:
        return (
            f"the library was opened in process {self.opened_in} and cannot be used in its fork {self.used_in}: "
            "its threads and devices did not come along; start a new process (spawn) and open it there"
        )


@dataclass(eq=False, repr=False)
class SecondLibrary(NativeError):
    """A process has one llama library, and a second one was asked for.

    Attributes:
        open_path: the library that this process has open.
        asked: the one that was asked for.
    """

    open_path: str
    asked: str

    def __str__(self) -> str:
        return (
            f"this process already has {self.open_path} open, so {self.asked} is refused: two builds' global symbols "
            "would mix; use the other build in a process of its own"
        )


@dataclass(eq=False, repr=False)
class TensorUnknown(NativeError):
    """A build makes of a model's metadata other tensors than there are data for.

    Attributes:
        name: of the first such tensor.
        why: what is wrong with it.
    """

    name: str
    why: str

    def __str__(self) -> str:
        return f"this build wants {self.name}, {self.why}; load the file"


@dataclass(eq=False, repr=False)
class LoadCancelled(NativeError):
    """A load ended because its progress callback asked for it.

    Attributes:
        path: the model file.
    """

    path: str

    def __str__(self) -> str:
        return f"the load of {self.path} was cancelled"


@dataclass(eq=False, repr=False)
class UnknownDevice(NativeError):
    """A device was named that the library does not have.

    Attributes:
        name: what was asked for.
        known: the library's device names.
    """

    name: str
    known: tuple[str, ...]

    def __str__(self) -> str:
        return f"there is no device {self.name!r}; this library has {', '.join(self.known)} (see: splitctl devices)"


@dataclass(eq=False, repr=False)
class RpcServerUnusable(NativeError):
    """An RPC server was named that cannot be used.

    Attributes:
        endpoint: HOST:PORT, as it was given.
        why: the fault.
        next_action: what the user can do about it.
    """

    endpoint: str
    why: str
    next_action: str

    def __str__(self) -> str:
        return f"the RPC server {self.endpoint!r} cannot be used: {self.why}; {self.next_action}"
