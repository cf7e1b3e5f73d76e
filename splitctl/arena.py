"""Memory for saved states: allocated and touched once, early, and used for every switch after.

A fresh buffer costs as much as the copy into it (the kernel hands out its pages one fault at a time), so a session
reserves before it needs, and keeps what it has.
"""

from __future__ import annotations

import mmap

import numpy as np

_PAGE = mmap.PAGESIZE
_GRAIN = 1 << 20


class Arena:
    """A growing block of anonymous memory.

    Lifetime: views taken of it stay valid until :meth:`reserve` grows it (they then keep the old block alive).
    """

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._block: mmap.mmap | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes held."""
        return len(self._block) if self._block is not None else 0

    def reserve(self, n_bytes: int) -> None:
        """Hold at least ``n_bytes``, every page of it touched; what was in it is lost when it grows."""
        if n_bytes <= self.n_bytes:
            return
        size = -(-n_bytes // _GRAIN) * _GRAIN
        block = mmap.mmap(-1, size)
        np.frombuffer(block, np.uint8)[::_PAGE] = 0
        self._block = block

    def view(self, n_bytes: int) -> memoryview:
        """Return a writable view of the first ``n_bytes``; :meth:`reserve` comes first."""
        if self._block is None or n_bytes > len(self._block):
            msg = f"{n_bytes} bytes of an arena of {self.n_bytes}"
            raise ValueError(msg)
        return memoryview(self._block)[:n_bytes]

    def holds(self, view: memoryview) -> bool:
        """Tell whether a view was taken of this arena's present block."""
        return self._block is not None and view.obj is self._block


__all__ = ["Arena"]
