"""A file as a view on its bytes, of which memory holds what is looked at."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from splitctl.errors import CarryDamaged

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def mapped(path: Path) -> Iterator[memoryview]:
    """Map a regular file, or what a link leads to, while the block runs.

    A mapped file that becomes shorter would end the process by a signal. A lease makes other writers wait; where the
    system grants none, the file is read into memory instead, but for its holes.

    Yields:
        Its bytes, read-only; not to be used after the block.

    Raises:
        CarryDamaged: it cannot be opened or read, or is no regular file.
    """
    try:
        # Not blocking, so that a pipe with nobody behind it is refused like every other kind.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise CarryDamaged(path, error.strerror or str(error)) from error
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise CarryDamaged(path, "it is no regular file")
        if not about.st_size:
            yield memoryview(b"")
        elif _leased(fd):
            yield memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
        else:
            yield _read(path, fd, about.st_size)
    finally:
        # The mapping may outlive the block, and with it the lease.
        with suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        os.close(fd)


def _read(path: Path, fd: int, n_bytes: int) -> memoryview:
    at, data = 0, memoryview(b"")
    try:
        data = memoryview(mmap.mmap(-1, n_bytes))
        while at < n_bytes:
            start = os.lseek(fd, at, os.SEEK_DATA)
            at = min(os.lseek(fd, start, os.SEEK_HOLE), n_bytes)
            while start < at and (n := os.preadv(fd, [data[start:at]], start)):
                start += n
    except OSError as error:
        if error.errno != errno.ENXIO:  # what is left is a hole, or gone
            raise CarryDamaged(path, error.strerror or str(error)) from error
    return data[: os.fstat(fd).st_size].toreadonly()


def _leased(fd: int) -> bool:
    """Take a lease on a file; false where it is another user's, open for writing, or on a file system without leases.

    Source: fcntl(2), F_SETLEASE. The signal that a waiting writer causes is one that does nothing by default.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:
        return False
    return True
