"""Memory for saved states: touched and pinned ahead of need, and used for every switch after.

A fresh page costs as much as the copy into it, so a session reserves before it needs, and keeps what it has. Huge pages
cut the cost of touching to an eighth and of a checksum to a half (measured on 43 MiB: 31 -> 4 ms, 3.0 -> 1.5 ms). A
device copies from and into pinned memory at the speed of its link, and from other memory at a third to a thirtieth.

An arena is private to its process, or lies in a memory file (memfd) whose descriptor another process holds too: then
what is in it outlives the process that wrote it. A session has two, so that a sealed state is whole while the next one
is written.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

_PAGE = mmap.PAGESIZE
_GRAIN = 2 << 20
"""A huge page: bytes are held in such steps."""
_STEP = 32 << 20
"""Bytes that are touched at a time; other threads go on in between."""

_MAP_NORESERVE = 0x4000
"""Untouched room does not count as used. Source: Linux, asm-generic/mman-common.h; Python has no name for it."""

_MADV_POPULATE_WRITE = 23
"""Map pages writable without changing what is in them. Source: as above; Linux 5.14 and later."""


class Pinned(Protocol):
    """Memory that is pinned until it is released; it stays mapped until then."""

    @property
    def is_held(self) -> bool:
        """Whether it is still pinned."""

    def release(self) -> None:
        """Let it be ordinary memory again."""


Pinner = Callable[[memoryview], Pinned | str]
"""Pins all of a memory; returns in one sentence why not where it cannot, "" where nothing would gain."""


@dataclass(slots=True)
class Block:
    """One mapping of an arena.

    Attributes:
        mapped: the mapping.
        n_bytes: those from its start that have been touched.
        pin: what keeps all of them pinned; None: they are not.
        why: why they are not, in one sentence; empty where nothing would gain, or nobody has tried.
        is_tried: whether somebody has tried to pin them.
    """

    mapped: mmap.mmap
    n_bytes: int = 0
    pin: Pinned | None = None
    why: str = ""
    is_tried: bool = False

    def unpin(self, why: str = "") -> None:
        """Let it be ordinary memory, before it grows or goes away; no device may copy meanwhile."""
        pin, self.pin, self.why, self.is_tried = self.pin, None, why, False
        if pin is not None:
            pin.release()


class Arena:
    """A growing block of memory.

    Lifetime: views taken of it stay valid when it outgrows its mapping: they keep the old block alive. Of a shared
    arena that block is the same memory under another address.

    Attributes:
        pinner: pins what is made ahead; None: nothing would gain by it.
    """

    def __init__(self, fd: int | None = None) -> None:
        """Hold nothing yet.

        Args:
            fd: a memory file to lie in, of any size and content; it is borrowed, and only ever grown. None: memory of
                this process alone.
        """
        self._fd = fd
        self._block: Block | None = None
        self.pinner: Pinner | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes held: those that have been touched."""
        return 0 if self._block is None else self._block.n_bytes

    @property
    def n_ready(self) -> int:
        """Bytes held that are pinned, or cannot be, or need not: memory that was pinned would be no better."""
        block = self._block
        return 0 if block is None or (self.pinner is not None and not block.is_tried) else block.n_bytes

    @property
    def n_file_bytes(self) -> int:
        """Bytes of the memory file, whoever made them; 0 without one."""
        return 0 if self._fd is None else os.fstat(self._fd).st_size

    @property
    def pinned(self) -> tuple[bool | None, str]:
        """Whether what is held is pinned, None where nothing would gain; and why it is not, in one sentence."""
        block = self._block
        if block is None or self.pinner is None:
            return (None, "")
        if block.pin is None:
            return (False, block.why or "it was not ready: the memory was made before a device could gain by it")
        return (True, "") if block.pin.is_held else (False, "what was pinned was undone when the device was reset")

    def reserve(self, n_bytes: int) -> None:
        """Hold at least ``n_bytes``, every page of them touched; what has to be added is not pinned.

        What was in it is lost where the mapping moves, but for a shared arena, which keeps everything.

        Raises:
            OSError: the system has no such memory.
        """
        if n_bytes <= self.n_bytes:
            return
        size, block = _rounded(n_bytes), self._block
        why = "" if self.pinner is None else "it was not ready: the state needs more memory than was pinned ahead"
        grown = Block(self._mapped(size)) if block is None or size > len(block.mapped) else block
        if block is not None:
            block.unpin()
        grown.why = why
        self._touch(grown, size)
        self._block = grown

    def ahead(self, n_bytes: int, goes_on: Callable[[], bool] = lambda: True) -> Block | None:
        """Make a larger block for :meth:`take`, touched and pinned, beside what is held. Thread: any.

        Args:
            n_bytes: at least so many.
            goes_on: asked every now and then whether it is still wanted.

        Returns:
            The block; None where it was not wanted any more.

        Raises:
            OSError: the system has no such memory.
        """
        size = _rounded(n_bytes)
        block = Block(self._mapped(size))
        while block.n_bytes < size:
            if not goes_on():
                return None
            self._touch(block, min(size, block.n_bytes + _STEP))
        if self.pinner is not None:
            found = self.pinner(memoryview(block.mapped)[:size])
            block.pin, block.why = (None, found) if isinstance(found, str) else (found, "")
            block.is_tried = True
        return block

    def take(self, block: Block) -> Block | None:
        """Use a block from now on where it is better than what is held.

        Returns:
            The other one, if there is one, to be unpinned while no device copies, and dropped.
        """
        old = self._block
        is_better = old is None or (block.n_bytes, block.is_tried) > (old.n_bytes, old.is_tried)
        self._block, other = (block, old) if is_better else (old, block)
        return other

    def view(self, n_bytes: int) -> memoryview:
        """Return a writable view of the first ``n_bytes``; :meth:`reserve` comes first."""
        if self._block is None or n_bytes > self._block.n_bytes:
            raise ValueError(f"{n_bytes} bytes of an arena of {self.n_bytes}")
        return memoryview(self._block.mapped)[:n_bytes]

    def unpin(self) -> None:
        """Let what is held be ordinary memory; no device may copy meanwhile."""
        if self._block is not None:
            self._block.unpin()

    def _mapped(self, size: int) -> mmap.mmap:
        if self._fd is None:
            # Private, for shared memory has no huge pages on most systems. Twice the room is mapped and costs nothing
            # until it is touched: a state grows with every token.
            block = mmap.mmap(-1, 2 * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        else:
            # Where memory is short this is an error; a write to a page that cannot be had would end the process.
            os.posix_fallocate(self._fd, 0, size)
            block = mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED | _MAP_NORESERVE)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            block.madvise(mmap.MADV_HUGEPAGE)
        return block

    def _touch(self, block: Block, size: int) -> None:
        """Touch a block up to ``size``."""
        if self._fd is None:
            np.frombuffer(block.mapped, np.uint8)[block.n_bytes : size : _PAGE] = 0
        else:
            with contextlib.suppress(OSError):  # an older kernel: the first write to a page maps it
                block.mapped.madvise(_MADV_POPULATE_WRITE, block.n_bytes, size - block.n_bytes)
        block.n_bytes = size


def _rounded(n_bytes: int) -> int:
    return -(-n_bytes // _GRAIN) * _GRAIN


class Arenas:
    """The two arenas of a session; decides which of them may be overwritten. Thread: the session's turn guards it.

    Laws:
        1. The arena of the sealed original is not overwritten until the original is dropped.
        2. While there is none, the arena of the newest carry that was reported is not overwritten.
        3. ``on_overwrite`` is called before an arena is overwritten.
        4. What was made ahead is taken with the turn held, when no device copies, and never in the place of a sealed
           original: that would be read from memory that is not pinned any more.

    Attributes:
        both: the arenas; others know them by their index here, 0 or 1.
        original: which one keeps the sealed original of a switch; None: there is none.
        reported: which one holds the newest carry that another process was told of; None: there is none.
        on_overwrite: called with the index of the arena.
        n_given: how often each has been given to be overwritten.
    """

    def __init__(self, first: Arena | None = None, second: Arena | None = None) -> None:
        """Use two arenas; None: private ones."""
        self.both = (first or Arena(), second or Arena())
        self.original: int | None = None
        self.reported: int | None = None
        self.on_overwrite: Callable[[int], None] = lambda _index: None
        self.n_given = [0, 0]
        self._mutex = threading.Lock()
        self._made: dict[int, Block] = {}
        self._left: list[Block] = []

    @property
    def n_bytes(self) -> int:
        """Bytes held by both."""
        return sum(one.n_bytes for one in self.both)

    @property
    def is_behind(self) -> bool:
        """Whether there is something to take, or to leave; see :meth:`catch_up`."""
        return bool(self._made or self._left)

    def n_ahead(self, index: int) -> int:
        """Say how many bytes of an arena are ready, or will be once what was made for it is taken. Thread: any."""
        made = self._made.get(index)
        return max(self.both[index].n_ready, 0 if made is None else made.n_bytes)

    def offer(self, index: int, block: Block) -> None:
        """Have a block that was made ahead, for the next :meth:`take_made`. Thread: any."""
        with self._mutex:
            if index in self._made:
                self._left.append(self._made[index])
            self._made[index] = block

    def take_made(self) -> None:
        """Use what was made ahead, where no sealed original lies in its place."""
        with self._mutex:
            for index in [one for one in self._made if one != self.original]:
                other = self.both[index].take(self._made.pop(index))
                if other is not None:
                    self._left.append(other)

    def catch_up(self) -> None:
        """Use what was made ahead, then unpin and drop what it replaced: that takes time, which a switch has not."""
        self.take_made()
        with self._mutex:
            left, self._left = self._left, []
        for block in left:
            block.unpin()

    def close(self) -> None:
        """Unpin everything; what is in it stays."""
        self.original = None
        self.catch_up()
        for one in self.both:
            one.unpin()

    def writable(self, n_bytes: int) -> tuple[int, memoryview]:
        """Give room in the arena that may be overwritten.

        Returns:
            Its index, and a view of ``n_bytes``. Lifetime: until the next call that gives the same arena.

        Raises:
            OSError: the system has no such memory.
        """
        self.take_made()
        kept = self.reported if self.original is None else self.original
        index = 0 if kept is None else 1 - kept
        self.on_overwrite(index)
        self.n_given[index] += 1
        if self.reported == index:
            self.reported = None
        self.both[index].reserve(n_bytes)
        return index, self.both[index].view(n_bytes)
