"""Where hosts are found: a private folder with a socket and a lock for each session that is served.

Laws:
    1. The folder, and what it lies in, belong to this user (or to root) and nobody else may write there; else it is not
       used.
    2. A host holds the lock of its name for as long as it lives, and the kernel releases it whatever happens to the
       host. A socket whose lock is free is stale.
    3. Socket and lock are removed by whoever holds the lock, and by nobody else.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from splitctl.errors import ConfigInvalid, SplitctlError

#: The session of a host that was given no name.
DEFAULT_NAME = "default"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SOCKET_SUFFIX = ".sock"
_LOCK_SUFFIX = ".lock"
#: Longest address of a unix socket [bytes].  Source: sun_path of linux/un.h, with its end.
_MAX_ADDRESS_BYTES = 107
#: Sockets lie in a folder of this name in the user's runtime folder.
_FOLDER = "splitctl"
#: Where systemd makes the runtime folders of users.
_SYSTEM = Path("/run/user")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_PRIVATE = 0o700
_BACKLOG = 64
#: A client that cleans up holds a lock for microseconds; a host waits a little for it [tries, seconds].
_CLAIM_TRIES = 100
_CLAIM_PAUSE_S = 0.02
#: pid, uid and gid.  Source: struct ucred of linux/socket.h.
_UCRED = struct.Struct("3i")


@dataclass(eq=False, repr=False)
class NoSuchSession(SplitctlError):
    """No host serves the session that is asked for, or none at all, or several and no name was given.

    Attributes:
        name: the session; None where any would do.
        names: the sessions that are served.
    """

    name: str | None
    names: tuple[str, ...]

    def __str__(self) -> str:
        served = ", ".join(self.names)
        if self.name is None and self.names:
            return f"several sessions are served ({served}); name one with --session"
        if not self.names:
            found = "no session is served" if self.name is None else f"no session {self.name} is served, nor any other"
            return f"{found}; start one with splitctl serve -m MODEL"
        return f"no session {self.name} is served; there are: {served}"


@dataclass(eq=False, repr=False)
class SessionTaken(SplitctlError):
    """Another host serves a session of that name."""

    name: str

    def __str__(self) -> str:
        return f"a session {self.name} is served already; give another name with --session, or end it: splitctl stop"


@dataclass(eq=False, repr=False)
class RuntimeFolderUnsafe(SplitctlError):
    """The folder for sockets is not this user's alone.

    Attributes:
        path: the folder, or what it lies in.
        found: what is wrong with it, as a phrase ("is a link").
    """

    path: Path
    found: str

    def __str__(self) -> str:
        advice = "set XDG_RUNTIME_DIR to a folder of yours that nobody else may write to"
        return f"{self.path} cannot hold the sockets of sessions: it {self.found}; {advice}"


@dataclass(frozen=True, slots=True)
class Address:
    """A session's name, and the socket where it is reached."""

    name: str
    path: Path


def checked_name(name: str) -> str:
    """Return a name; raises ConfigInvalid for what is none of a session."""
    if not _NAME.fullmatch(name):
        wanted = "1 to 64 letters, digits, dots, dashes and underscores, a letter or digit first"
        raise ConfigInvalid("session", name, wanted)
    return name


def runtime_folder(env: Mapping[str, str]) -> Path:
    """Give the folder of this user's sockets; nothing is made, and nothing is looked for elsewhere if it is unsafe.

    Args:
        env: XDG_RUNTIME_DIR counts; without it /run/user/UID, or runtime-UID in the folder for temporary files.

    Raises:
        RuntimeFolderUnsafe: there is no place for them.
    """
    named = env.get("XDG_RUNTIME_DIR")
    if named:
        if not Path(named).is_absolute():
            raise RuntimeFolderUnsafe(Path(named), "is no absolute path")
        return Path(named) / _FOLDER
    of_system = _SYSTEM / str(os.getuid())
    if os.path.lexists(of_system):
        return of_system / _FOLDER
    try:
        return Path(tempfile.gettempdir()) / f"runtime-{os.getuid()}" / _FOLDER
    except FileNotFoundError as error:
        raise RuntimeFolderUnsafe(of_system, "is missing, and no folder for temporary files can be written") from error


def prepared(folder: Path) -> Path:
    """Make the folder where it is missing, make sure that it is private, and return it.

    Raises:
        RuntimeFolderUnsafe: it cannot be made, or is not this user's alone.
    """
    for part in (folder.parent, folder):
        try:
            with suppress(FileExistsError):
                part.mkdir(mode=_PRIVATE)
            _refuse_unsafe(part, is_outer=part != folder)
        except OSError as error:
            raise RuntimeFolderUnsafe(part, f"cannot be made ({error.strerror})") from error
    return folder


def _refuse_unsafe(path: Path, *, is_outer: bool) -> None:
    """Hold a folder against law 1; the outer one may be root's, or one like /tmp, where only owners rename."""
    found = path.lstat()
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISLNK(found.st_mode):
        raise RuntimeFolderUnsafe(path, "is a link")
    if not stat.S_ISDIR(found.st_mode):
        raise RuntimeFolderUnsafe(path, "is no folder")
    if found.st_uid != os.getuid() and not (is_outer and found.st_uid == 0):
        raise RuntimeFolderUnsafe(path, f"belongs to user {found.st_uid} and not to {os.getuid()} (mode {mode:04o})")
    if mode & _OTHERS_WRITE and not (is_outer and mode & stat.S_ISVTX):
        raise RuntimeFolderUnsafe(path, f"may be written by others (mode {mode:04o})")
    above = path.parent.stat().st_mode
    if is_outer and above & _OTHERS_WRITE and not above & stat.S_ISVTX:
        found_above = f"{path.parent}, which may be written by others (mode {stat.S_IMODE(above):04o})"
        raise RuntimeFolderUnsafe(path, f"lies in {found_above}")


class Claim:
    """A session's name, held for a host.

    Lifetime:
        Until `release`; also a context manager. The kernel releases it with the process.
    """

    def __init__(self, address: Address, lock: int) -> None:
        self.address = address
        self._lock = lock

    def listen(self) -> socket.socket:
        """Open the session's socket, for this user alone; raises OSError."""
        self.address.path.unlink(missing_ok=True)
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Linux takes the mode of the file from the socket, so it is never open to others, not for a moment.
            os.fchmod(made.fileno(), stat.S_IRUSR | stat.S_IWUSR)
            made.bind(str(self.address.path))
            made.listen(_BACKLOG)
        except OSError as error:
            made.close()
            raise OSError(error.errno, error.strerror, str(self.address.path)) from error
        return made

    def release(self) -> None:
        """Remove socket and lock; a second call does nothing."""
        if self._lock < 0:
            return
        self.address.path.unlink(missing_ok=True)
        self.address.path.with_suffix(_LOCK_SUFFIX).unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def claim(folder: Path, name: str) -> Claim:
    """Take a name for a host; what a dead host left under it is removed.

    Args:
        folder: as `prepared` gave it.
        name: the session's.

    Raises:
        ConfigInvalid: it is no name.
        SessionTaken: a living host has it.
    """
    address = Address(checked_name(name), folder / f"{name}{_SOCKET_SUFFIX}")
    if len(os.fsencode(address.path)) > _MAX_ADDRESS_BYTES:
        limit = f"a name, and a folder for it ({folder}), of {_MAX_ADDRESS_BYTES} bytes together at most"
        wanted = f"{limit}: set XDG_RUNTIME_DIR to a shorter folder"
        raise ConfigInvalid("session", name, wanted)
    for _ in range(_CLAIM_TRIES):
        lock = _locked(address)
        if lock is not None:
            address.path.unlink(missing_ok=True)
            return Claim(address, lock)
        if _answers(address):
            break
        time.sleep(_CLAIM_PAUSE_S)
    raise SessionTaken(name)


def sessions(folder: Path) -> list[Address]:
    """List the sessions whose host lives, by name; what dead hosts left is removed.

    Args:
        folder: as `runtime_folder` gives it; it may be missing.

    Raises:
        RuntimeFolderUnsafe: the folder is not this user's alone.
    """
    try:
        for part in (folder.parent, folder):
            _refuse_unsafe(part, is_outer=part != folder)
        found = sorted(one for one in folder.iterdir() if one.suffix == _SOCKET_SUFFIX and _NAME.fullmatch(one.stem))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RuntimeFolderUnsafe(folder, f"cannot be looked into ({error.strerror})") from error
    addresses = [Address(path.stem, path) for path in found]
    return [address for address in addresses if not _cleaned(address)]


def find(folder: Path, name: str | None) -> Address:
    """Find a session.

    Args:
        folder: as `runtime_folder` gives it; it may be missing.
        name: the session's; None takes the only one.

    Raises:
        ConfigInvalid: it is no name.
        NoSuchSession: it is not served; or no name was given, and none or several are.
        RuntimeFolderUnsafe: the folder is not this user's alone.
    """
    if name is not None:
        checked_name(name)
    served = sessions(folder)
    for address in served:
        if address.name == name or (name is None and len(served) == 1):
            return address
    raise NoSuchSession(name, tuple(address.name for address in served))


def peer_uid(connection: socket.socket) -> int:
    """Ask the kernel which user is at the other end of a connected unix socket."""
    return _credentials(connection)[1]


def peer_pid(connection: socket.socket) -> int:
    """Ask the kernel which process listened at the other end of a connected unix socket; 0 if it cannot be named."""
    return _credentials(connection)[0]


def _credentials(connection: socket.socket) -> tuple[int, int]:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(raw)
    return int(pid), int(uid)


def _cleaned(address: Address) -> bool:
    """Remove what a dead host left; whether one did."""
    lock = _locked(address)
    if lock is None:
        return False
    with Claim(address, lock):
        return True


def _locked(address: Address) -> int | None:
    """Take a name's lock; None where somebody has it."""
    path = address.path.with_suffix(_LOCK_SUFFIX)
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, stat.S_IRUSR | stat.S_IWUSR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        with suppress(FileNotFoundError):
            if os.fstat(lock).st_ino == path.lstat().st_ino:
                return lock
        # It was removed between the opening and the locking: another one counts now.
        os.close(lock)


def _answers(address: Address) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.0)
        try:
            probe.connect(str(address.path))
        except BlockingIOError:
            # Its queue is full: it lives.
            return True
        except OSError:
            return False
        return True
