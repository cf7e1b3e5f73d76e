"""Everything that llama_native raises; the class says whose fault it was.

Laws:
    1. ``NativeError`` is the root and is never raised itself.
    2. Every message is built from the error's fields: what, where, found, wanted, next action.
    3. The fields survive pickling, because a worker process hands its errors to its parent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


_LOG_LINES_SHOWN = 6


class NativeError(Exception):
    """The abstract root of the package's errors."""

    def __init__(self, *fields: object) -> None:
        """Keep the subclass's own arguments as ``args``, from which ``__str__`` and pickling rebuild the error."""
        if type(self) is NativeError:
            msg = "NativeError is abstract: raise one of its subclasses"
            raise TypeError(msg)
        super().__init__(*fields)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), self.args)


class LibraryNotFound(NativeError):
    """No candidate could be used, whatever the reasons were.

    Args:
        tried: one entry a candidate, ``str()`` of which reads "path (origin): reason".
    """

    def __init__(self, tried: Iterable[object] = ()) -> None:
        self.tried = tuple(tried)
        super().__init__(self.tried)

    def __str__(self) -> str:
        looked = "".join(f"\n  {entry}" for entry in self.tried) or "\n  (no candidate at all)"
        return (
            f"no usable llama library was found; looked at:{looked}\n"
            "install one (pip install 'splitctl[cpu]'), or name one with LLAMA_NATIVE_LIB=/path/to/libllama.so"
        )


class LibraryUnusable(NativeError):
    """One library that was asked for by name cannot be loaded or lacks what is required.

    Args:
        path: the library file, or the folder that was searched.
        why: the fault, with what was found and what is wanted.
        next_action: what the user can do about it; may be empty.
    """

    def __init__(self, path: str | Path, why: str, next_action: str = "") -> None:
        self.path = str(path)
        self.why = why
        self.next_action = next_action
        super().__init__(self.path, why, next_action)

    def __str__(self) -> str:
        tail = f"; {self.next_action}" if self.next_action else ""
        return f"{self.path} cannot be used: {self.why}{tail}"


class UnsupportedAbi(NativeError):
    """The library's structs are not ones that this package knows, or are known and refused.

    Args:
        found: what the library's own answers say about its layout.
        known: the nearest known layout and where it differs, or the layouts that are accepted.
        next_action: what the user can do about it; may be empty.
    """

    def __init__(self, found: str, known: str, next_action: str = "") -> None:
        self.found = found
        self.known = known
        self.next_action = next_action
        super().__init__(found, known, next_action)

    def __str__(self) -> str:
        tail = f"; {self.next_action}" if self.next_action else ""
        return f"unsupported library layout: {self.found}; {self.known}{tail}"


class CapabilityMissing(NativeError):
    """The library is sound but does not export what an operation needs.

    Args:
        name: the capability's name.
        symbols: the exported names that are absent (of alternatives, all).
    """

    def __init__(self, name: str, symbols: Iterable[str]) -> None:
        self.name = name
        self.symbols = tuple(symbols)
        super().__init__(name, self.symbols)

    def __str__(self) -> str:
        return (
            f"this library build cannot do {self.name!r}: it does not export {', '.join(self.symbols)}; "
            "use a build that does (splitctl doctor lists what this one has)"
        )


class CallFailed(NativeError):
    """A library call reported failure by its return value.

    Args:
        function: the C function's name.
        rc: its return code; None where it returned NULL or false.
        log_tail: the last lines that the library logged, oldest first.
    """

    def __init__(self, function: str, rc: int | None, log_tail: Iterable[str] = ()) -> None:
        self.function = function
        self.rc = rc
        self.log_tail = tuple(log_tail)
        super().__init__(function, rc, self.log_tail)

    def __str__(self) -> str:
        returned = "NULL" if self.rc is None else str(self.rc)
        lines = [line.rstrip() for line in self.log_tail[-_LOG_LINES_SHOWN:] if line.strip()]
        said = f"; the library's last words: {' | '.join(lines)}" if lines else ""
        return f"{self.function} failed (returned {returned}){said}"


class HandleClosed(NativeError):
    """A handle was used after its close, or after the object that it stands on was closed.

    Args:
        handle: the kind of handle, such as "model" or "context".
    """

    def __init__(self, handle: str) -> None:
        self.handle = handle
        super().__init__(handle)

    def __str__(self) -> str:
        return f"this {self.handle} is closed; open a new one"


class Reentered(NativeError):
    """A second call entered a handle while the first was still inside it.

    Args:
        handle: the kind of handle.
        function: the call that was refused.
        inside: the call that is in progress; may be empty.
    """

    def __init__(self, handle: str, function: str, inside: str = "") -> None:
        self.handle = handle
        self.function = function
        self.inside = inside
        super().__init__(handle, function, inside)

    def __str__(self) -> str:
        busy = f"{self.inside} is" if self.inside else "another call is"
        return f"{self.function} refused: {busy} still inside this {self.handle}; use one thread at a time for a handle"


class ForkedProcess(NativeError):
    """A handle made before a fork was used in the child.

    Args:
        opened_in: process id in which the library was opened.
        used_in: process id of the caller.
    """

    def __init__(self, opened_in: int, used_in: int) -> None:
        self.opened_in = opened_in
        self.used_in = used_in
        super().__init__(opened_in, used_in)

    def __str__(self) -> str:
        return (
            f"the library was opened in process {self.opened_in} and cannot be used in its fork {self.used_in}: "
            "its threads and devices did not come along; start a new process (spawn) and open it there"
        )


class SecondLibrary(NativeError):
    """A process has one llama library, and a second one was asked for.

    Args:
        open_path: the library that this process has open.
        asked: the one that was asked for.
    """

    def __init__(self, open_path: str | Path, asked: str | Path) -> None:
        self.open_path = str(open_path)
        self.asked = str(asked)
        super().__init__(self.open_path, self.asked)

    def __str__(self) -> str:
        return (
            f"this process already has {self.open_path} open, so {self.asked} is refused: two builds' global symbols "
            "would mix; use the other build in a process of its own"
        )


class LoadCancelled(NativeError):
    """A load ended because its progress callback asked for it.

    Args:
        path: the model file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(path)

    def __str__(self) -> str:
        return f"the load of {self.path} was cancelled"


class UnknownDevice(NativeError):
    """A device was named that the library does not have.

    Args:
        name: what was asked for.
        known: the library's device names.
    """

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        self.known = tuple(known)
        super().__init__(name, self.known)

    def __str__(self) -> str:
        return f"there is no device {self.name!r}; this library has {', '.join(self.known)} (see: splitctl devices)"


class RpcServerUnusable(NativeError):
    """An RPC server was named that cannot be used.

    Args:
        endpoint: HOST:PORT, as it was given.
        why: the fault.
        next_action: what the user can do about it.
    """

    def __init__(self, endpoint: str, why: str, next_action: str) -> None:
        self.endpoint = endpoint
        self.why = why
        self.next_action = next_action
        super().__init__(endpoint, why, next_action)

    def __str__(self) -> str:
        return f"the RPC server {self.endpoint!r} cannot be used: {self.why}; {self.next_action}"
