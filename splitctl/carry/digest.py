"""The checksum of a state in memory, by several threads: one thread reads slower than memory can be read.

It is the xxh3-128 of the bytes where they are one chunk at most, and else of the digests of their chunks, one after the
other. It stays within splitctl's processes; the checksums in a file are plain ones (`splitctl.carry.file`).
"""

from __future__ import annotations

import os
import threading

import xxhash

CHUNK_BYTES = 16 << 20
_MAX_THREADS = 16


class Digest:
    """A checksum that is taken beside other work: the hash lets other threads run.

    Lifetime: the buffer must not change, nor go away, before :meth:`result`.
    """

    def __init__(self, view: memoryview, *, n_threads: int | None = None) -> None:
        """Begin.

        Args:
            view: the bytes.
            n_threads: threads at most, beside the caller's; None: one a core, and no more than 16.
        """
        self._chunks = [view[at : at + CHUNK_BYTES] for at in range(0, len(view), CHUNK_BYTES)] or [view]
        self._digests: list[bytes] = [b""] * len(self._chunks)
        # Each thread takes the next one; that is one step of the interpreter's.
        self._next = iter(range(len(self._chunks)))
        most = min(_MAX_THREADS, len(os.sched_getaffinity(0))) if n_threads is None else n_threads
        self._threads: list[threading.Thread] = []
        for _ in range(min(most, len(self._chunks))):
            thread = threading.Thread(target=self._take, name="digest", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has none to give; those that run, and the caller, do it
                break
            self._threads.append(thread)

    def _take(self) -> None:
        for index in self._next:
            self._digests[index] = xxhash.xxh3_128_digest(self._chunks[index])

    def result(self) -> bytes:
        """Help, wait for the end and return the checksum, bytes[16]."""
        self._take()
        for thread in self._threads:
            thread.join()
        # One that a thread could not take is taken now.
        each = [one or xxhash.xxh3_128_digest(self._chunks[index]) for index, one in enumerate(self._digests)]
        return each[0] if len(each) == 1 else xxhash.xxh3_128_digest(b"".join(each))


def digest(view: memoryview) -> bytes:
    """Return the checksum of bytes, bytes[16]."""
    if len(view) <= CHUNK_BYTES:
        return xxhash.xxh3_128_digest(view)
    # The caller's thread works too.
    return Digest(view, n_threads=min(_MAX_THREADS, len(os.sched_getaffinity(0))) - 1).result()
