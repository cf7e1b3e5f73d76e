"""Makes the arenas of a session larger ahead of need, beside its work.

To touch and pin a gigabyte takes as long as to copy it, and no switch shall wait for that.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from splitctl.host_memory import host_memory

if TYPE_CHECKING:
    from splitctl.carry.arena import Arenas


class Growth:
    """Grows arenas on a thread that is there only while something is wanted.

    Thread: any. Lifetime: until :meth:`close`.
    """

    def __init__(self, arenas: Arenas) -> None:
        """Grow ``arenas``; the session takes what was made (`Arenas.take_made`)."""
        self._arenas = arenas
        self._lock = threading.Lock()
        self._wanted: tuple[int, int] | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def want(self, n_bytes: int, n_arenas: int) -> None:
        """Have ``n_bytes`` soon in the first ``n_arenas`` arenas, where that leaves the host as much again.

        Returns at once. A later call takes the place of one that was not begun yet.
        """
        with self._lock:
            if self._is_closed or n_bytes <= min(map(self._arenas.n_ahead, range(n_arenas))):
                return
            self._wanted = (n_bytes, n_arenas)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="arenas", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Wait until nothing more is wanted."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def close(self) -> None:
        """End what is under way, and take no more wishes."""
        with self._lock:
            self._is_closed = True
        self.wait()

    def _next(self) -> tuple[int, int] | None:
        with self._lock:
            wanted, self._wanted = self._wanted, None
            if wanted is None or self._is_closed:
                self._thread = None
                return None
            return wanted

    def _work(self) -> None:
        try:
            while (wanted := self._next()) is not None:
                # Where it fails, the switch that needs the memory tries once more, and says what it lacks.
                with suppress(OSError):
                    self._make(*wanted)
        finally:
            with self._lock:
                if self._thread is threading.current_thread():
                    self._thread = None

    def _make(self, n_bytes: int, n_arenas: int) -> None:
        arenas = self._arenas
        small = [index for index in range(n_arenas) if arenas.n_ahead(index) < n_bytes]
        sizes = {index: max(n_bytes, arenas.both[index].n_bytes) for index in small}
        # What a memory file holds already, this process or another has taken.
        new = sum(max(size - arenas.both[index].n_file_bytes, 0) for index, size in sizes.items())
        if new and host_memory().available <= 2 * new:
            return
        for index, size in sizes.items():
            block = arenas.both[index].ahead(size, lambda: not self._is_closed)
            if block is not None:
                arenas.offer(index, block)
