"""Memory for saved states: mapped generously, touched as far as it is needed, and used for every switch after.

A fresh page costs as much as the copy into it, so a session reserves before it needs, and keeps what it has. Huge pages
cut the cost of touching to an eighth and of a checksum to a half (measured on 43 MiB: 31 -> 4 ms, 3.0 -> 1.5 ms).

An arena is private to its process, or lies in a memory file (memfd) whose descriptor another process holds too: then
what is in it outlives the process that wrote it. A session has two, so that a sealed state is whole while the next one
is written.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable

import numpy as np

_PAGE = mmap.PAGESIZE
_GRAIN = 2 << 20
"""A huge page: bytes are touched in such steps."""

_MAP_NORESERVE = 0x4000
"""Untouched room does not count as used. Source: Linux, asm-generic/mman-common.h; Python has no name for it."""

_MADV_POPULATE_WRITE = 23
"""Map pages writable without changing what is in them. Source: as above; Linux 5.14 and later."""


class Arena:
    """A growing block of memory.

    Lifetime: views taken of it stay valid when :meth:`reserve` outgrows its mapping: they keep the old block alive. Of
    a shared arena that block is the same memory under another address.
    """

    def __init__(self, fd: int | None = None) -> None:
        """Hold nothing yet.

        Args:
            fd: a memory file to lie in, of any size and content; it is borrowed, and only ever grown. None: memory of
                this process alone.
        """
        self._fd = fd
        self._block: mmap.mmap | None = None
        self._n_touched = 0

    @property
    def n_bytes(self) -> int:
        """Bytes held: those that have been touched."""
        return self._n_touched

    def reserve(self, n_bytes: int) -> None:
        """Hold at least ``n_bytes``, every page of them touched.

        What was in it is lost where the mapping moves, but for a shared arena, which keeps everything.

        Raises:
            OSError: the system has no such memory.
        """
        if n_bytes <= self._n_touched:
            return
        size = -(-n_bytes // _GRAIN) * _GRAIN
        if self._block is None or size > len(self._block):
            # Twice the room is mapped and costs nothing until it is touched: a state grows with every token.
            self._block = self._mapped(2 * size)
            if self._fd is None:
                self._n_touched = 0
        self._touch(self._block, size)
        self._n_touched = size

    def view(self, n_bytes: int) -> memoryview:
        """Return a writable view of the first ``n_bytes``; :meth:`reserve` comes first."""
        if self._block is None or n_bytes > self._n_touched:
            raise ValueError(f"{n_bytes} bytes of an arena of {self.n_bytes}")
        return memoryview(self._block)[:n_bytes]

    def _mapped(self, n_bytes: int) -> mmap.mmap:
        if self._fd is None:
            # Private, for shared memory has no huge pages on most systems.
            block = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        else:
            if os.fstat(self._fd).st_size < n_bytes:
                os.ftruncate(self._fd, n_bytes)
            block = mmap.mmap(self._fd, n_bytes, flags=mmap.MAP_SHARED | _MAP_NORESERVE)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            block.madvise(mmap.MADV_HUGEPAGE)
        return block

    def _touch(self, block: mmap.mmap, size: int) -> None:
        if self._fd is None:
            np.frombuffer(block, np.uint8)[self._n_touched : size : _PAGE] = 0
            return
        # Where memory is short this is an error; a write to a page that cannot be had would end the process.
        os.posix_fallocate(self._fd, 0, size)
        with contextlib.suppress(OSError):  # an older kernel: the first write to a page maps it
            block.madvise(_MADV_POPULATE_WRITE, 0, size)


class Arenas:
    """The two arenas of a session; decides which of them may be overwritten. Thread: the session's turn guards it.

    Laws:
        1. The arena of the sealed original is not overwritten until the original is dropped.
        2. While there is none, the arena of the newest carry that was reported is not overwritten.
        3. ``on_overwrite`` is called before an arena is overwritten.

    Attributes:
        both: the arenas; others know them by their index here, 0 or 1.
        original: which one keeps the sealed original of a switch; None: there is none.
        reported: which one holds the newest carry that another process was told of; None: there is none.
        on_overwrite: called with the index of the arena.
    """

    def __init__(self, first: Arena | None = None, second: Arena | None = None) -> None:
        """Use two arenas; None: private ones."""
        self.both = (first or Arena(), second or Arena())
        self.original: int | None = None
        self.reported: int | None = None
        self.on_overwrite: Callable[[int], None] = lambda _index: None

    @property
    def n_bytes(self) -> int:
        """Bytes held by both."""
        return sum(one.n_bytes for one in self.both)

    def writable(self, n_bytes: int) -> tuple[int, memoryview]:
        """Give room in the arena that may be overwritten.

        Returns:
            Its index, and a view of ``n_bytes``. Lifetime: until the next call that gives the same arena.

        Raises:
            OSError: the system has no such memory.
        """
        kept = self.reported if self.original is None else self.original
        index = 0 if kept is None else 1 - kept
        self.on_overwrite(index)
        if self.reported == index:
            self.reported = None
        self.both[index].reserve(n_bytes)
        return index, self.both[index].view(n_bytes)
