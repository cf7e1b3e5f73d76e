"""What a process or a library said last, and which line of it explains the end."""

from __future__ import annotations

import signal
from collections.abc import Sequence

#: A worker puts this before a line of the library's log, which is no last word of its own.
LOG_PREFIX = "log: "

#: The first of these that any line has decides; within it the last line.  Source: seen in 2026.6 to 2026.10 builds.
_TELLING: tuple[tuple[str, ...], ...] = (
    ("GGML_ASSERT", "terminate called", "what():", "CUDA error", "Fatal Python error"),
    ("error loading model", "failed to allocate", "error:", "Error:", "refused: "),
    ("failed", "invalid", "not supported", "unsupported", "cannot"),
)

#: What a library says when memory is short.  Source: seen in 2026.10.11549 under RLIMIT_AS and in CUDA builds.
_SHORTAGE = (
    "ggml_assert(meta_buf_ctx->bufs[i])",
    "failed to allocate",
    "unable to allocate",
    "cannot allocate",
    "out of memory",
    "bad_alloc",
    "cudaerrormemoryallocation",
    "memoryerror",
)


def how_it_ended(returncode: int) -> str:
    """Say a process's end in words.

    Args:
        returncode: as subprocess gives it: negative for a signal.

    Returns:
        For example "died by signal 6 (SIGABRT)" or "ended with status 1".
    """
    if returncode >= 0:
        return f"ended with status {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = "unknown"
    return f"died by signal {-returncode} ({name})"


def telling_line(lines: Sequence[str]) -> str:
    """Pick the line that explains an end.

    Args:
        lines: last lines of an output or a log, oldest first.

    Returns:
        The last line that names a failed assertion or an error, else the last line that is no part of the library's
        log; empty when there is none.
    """
    for words in _TELLING:
        for line in reversed(lines):
            if any(word in line for word in words):
                return line.strip().removeprefix(LOG_PREFIX)
    return next((line.strip() for line in reversed(lines) if line.strip() and not line.startswith(LOG_PREFIX)), "")


def is_shortage(lines: Sequence[str]) -> bool:
    """Tell whether last words speak of missing memory.

    Args:
        lines: output or log lines.

    Returns:
        Whether one of them does.
    """
    return any(sign in line.lower() for line in lines for sign in _SHORTAGE)
