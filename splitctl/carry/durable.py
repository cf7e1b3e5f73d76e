"""Puts a file in its place whole or not at all: written in a folder of its own beside it, synced, renamed over it.

Laws:
    1. A reader sees the old file or the new one, never a part; a failure leaves the old one as it was.
    2. No link is followed and nothing but a regular file is replaced.
    3. What fails leaves nothing behind; the file belongs to its user alone (mode 0600).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from splitctl.errors import CarryNotWritten

if TYPE_CHECKING:
    from collections.abc import Iterator

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_BLOCK_BYTES = 4096


@contextlib.contextmanager
def replacing(path: Path, n_bytes: int) -> Iterator[Path]:
    """Give a path to write a new file to; when the block ends well, that file is put in its place.

    The path lies in a folder of mode 0700 of its own, in the folder of ``path``: whoever writes may make files beside
    it, rename one over it and die halfway, and nobody else can have put anything there.

    Args:
        path: where; its folder must exist.
        n_bytes: about how large it becomes, so that a disk that is too small is found before anything is written.

    Yields:
        Where to write. Lifetime: the block.

    Raises:
        OSError: the file is not safely in its place; ``strerror`` says why, in words for people. What was there before
            is still there, unless it says that the folder could not be synced.
    """
    folder, name = _split(path)
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _refuse_other_kinds(folder_fd, name)
        _refuse_small_disk(folder_fd, n_bytes)
        with tempfile.TemporaryDirectory(prefix=".splitctl-", suffix=".tmp", dir=folder) as private:
            temporary = Path(private, "new")
            yield temporary
            _sync_file(temporary)
            os.rename(temporary, name, dst_dir_fd=folder_fd)
        _sync_folder(folder_fd)
    finally:
        os.close(folder_fd)


class _IsPossible(Exception):
    """Ends a trial before anything is put in its place."""


def check_place(path: Path) -> None:
    """See whether a carry could be put in its place now; nothing is left, and what is there stays.

    It writes one block. A disk that has room for that may still be too small; `replacing` knows the size.

    Args:
        path: where; its folder must exist.

    Raises:
        CarryNotWritten: it could not.
    """
    try:
        with contextlib.suppress(_IsPossible), replacing(path, _BLOCK_BYTES) as temporary:
            temporary.write_bytes(bytes(_BLOCK_BYTES))
            raise _IsPossible
    except (OSError, ValueError) as error:
        raise CarryNotWritten(path, getattr(error, "strerror", None) or str(error)) from error


def _sync_file(path: Path) -> None:
    """Make the content last, and private where its writer did not."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_mode & _OTHERS:
            # A file system without modes refuses; who may read is then said where it is mounted.
            with contextlib.suppress(PermissionError):
                os.fchmod(fd, 0o600)
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_folder(folder_fd: int) -> None:
    """Make the rename last. Some network file systems cannot sync a folder (EINVAL), and have nothing to sync."""
    try:
        os.fsync(folder_fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            text = f"the file is in its place, but its folder could not be synced ({error.strerror})"
            raise OSError(error.errno, text) from error


def _split(path: Path) -> tuple[Path, str]:
    """Take the last part off without following it."""
    if path.name in {"", ".."}:
        raise IsADirectoryError(errno.EISDIR, "it is a folder, name a file in it", str(path))
    return path.parent, path.name


def _refuse_other_kinds(folder_fd: int, name: str) -> None:
    try:
        mode = os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        target = os.readlink(name, dir_fd=folder_fd)
        raise OSError(errno.ELOOP, f"it is a symbolic link (to {target}), which is not followed", name)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder, name a file in it", name)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a device, pipe or socket and not a regular file", name)


def _refuse_small_disk(folder_fd: int, n_bytes: int) -> None:
    disk = os.fstatvfs(folder_fd)
    free = disk.f_bavail * disk.f_frsize
    # Some network and user-space file systems report no blocks at all; then the write itself finds out.
    if disk.f_blocks and free < n_bytes:
        raise OSError(errno.ENOSPC, f"{n_bytes} bytes wanted, {free} free on the disk")
