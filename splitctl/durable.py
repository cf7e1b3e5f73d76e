"""Puts a file in its place whole or not at all: written beside it, synced, renamed over it, folder synced.

Laws:
    1. A reader sees the old file or the new one, never a part; a failure leaves the old one as it was.
    2. No link is followed and nothing but a regular file is replaced.
    3. What fails leaves no temporary file; the file belongs to its user alone (mode 0600).
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import TypeAlias

    Chunk: TypeAlias = bytes | bytearray | memoryview

_WRITE_BYTES = 64 << 20
"""Most bytes of one write call; the kernel takes at most 2 GiB, and a signal is seen between two calls."""


def replace_file(path: Path, chunks: Iterable[Chunk], n_bytes: int) -> None:
    """Put a file in its place.

    Args:
        path: where; its folder must exist.
        chunks: the content in order, each contiguous; written as it is, without a copy.
        n_bytes: their sum, so that a disk that is too small is found before anything is written.

    Raises:
        OSError: the file is not safely in its place; ``strerror`` says why, in words for people. What was there before
            is still there, unless it says that the folder could not be synced.
    """
    folder, name = _split(path)
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _refuse_other_kinds(folder_fd, name)
        _refuse_small_disk(folder_fd, n_bytes)
        temporary = f".splitctl-{secrets.token_hex(8)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=folder_fd)
        try:
            try:
                pour(fd, chunks)
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        except BaseException:
            # Also for Ctrl-C: nobody would ever look for a file of this name. (It may come just after the rename.)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder_fd)
            raise
        _sync_folder(folder_fd)
    finally:
        os.close(folder_fd)


def pour(fd: int, chunks: Iterable[Chunk]) -> None:
    """Write chunks to a file descriptor, all of them.

    Args:
        fd: open for writing.
        chunks: the content in order.

    Raises:
        OSError: the kernel's own; some of it may have been written.
    """
    for chunk in chunks:
        with memoryview(chunk) as view:
            at = 0
            while at < view.nbytes:
                at += os.write(fd, view[at : at + _WRITE_BYTES])


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
