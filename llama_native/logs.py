"""The library's log: kept as a bounded tail so that an error can show what the library said last."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

LEVEL_DEBUG = 1
"""Source: ggml.h, GGML_LOG_LEVEL_DEBUG."""
LEVEL_INFO = 2
"""Source: ggml.h, GGML_LOG_LEVEL_INFO."""
LEVEL_CONTINUES = 5
"""Source: ggml.h, GGML_LOG_LEVEL_CONT: the text continues the line before."""


class LogTail:
    """The last lines that the library logged; debug lines do not get here, and info lines while somebody listens.

    Thread: safe; the library logs from threads of its own.
    """

    def __init__(self, n_lines: int = 400) -> None:
        """Keep at most ``n_lines`` lines."""
        self._lines: deque[str] = deque(maxlen=n_lines)
        self._open = ""
        self._lock = threading.RLock()  # a collector may run while it is held, and free what logs its end
        self._listeners: list[Callable[[int, str], None]] = []
        self._n_lines = 0
        self._n_lines_before_call = 0

    def feed(self, level: int, text: str) -> None:
        """Take one message of the library, with or without its end of line, at a log level of ggml's."""
        with self._lock:
            whole = self._open + text
            *done, self._open = whole.split("\n")
            lines = [line for line in done if line.strip()]
            self._lines.extend(lines)
            self._n_lines += len(lines)
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener(level, text)

    def tail(self, n_lines: int = 12) -> tuple[str, ...]:
        """Return the last ``n_lines`` lines, oldest first, an unfinished one included."""
        with self._lock:
            lines = list(self._lines)
            if self._open.strip():
                lines.append(self._open)
        return tuple(lines[-n_lines:])

    def begin_call(self) -> None:
        """Note that a call into the library begins, for :meth:`said`."""
        self._n_lines_before_call = self._n_lines

    def said(self, n_lines: int = 12) -> tuple[str, ...]:
        """Return at most ``n_lines`` of what the library logged since the last call into it began, oldest first."""
        n_new = self._n_lines - self._n_lines_before_call
        tail = self.tail(n_new + bool(self._open.strip())) if n_new or self._open.strip() else ()
        return tail[-n_lines:]

    @property
    def is_heard(self) -> bool:
        """Whether anybody listens now."""
        return bool(self._listeners)

    def listen(self, listener: Callable[[int, str], None]) -> Callable[[], None]:
        """Call ``listener(level, text)`` for every message from now on; returns a function that ends it."""
        with self._lock:
            self._listeners.append(listener)

        def stop() -> None:
            with self._lock:
                if listener in self._listeners:
                    self._listeners.remove(listener)

        return stop
