"""A line for each answer that has ended: when it was asked for, and its tokens, as `splitctl replay` reads them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from splitctl.host.ledger import StreamJob


class AccessLog:
    """Appends JSON objects to a file: arrival (seconds since 1970), prompt, cached, generated, max_tokens, end.

    What cannot be written is said once, and no more is. Thread: the supervisor's loop. Lifetime: until `close`.
    """

    def __init__(self, path: Path, log: Callable[[str], None], *, clock: Callable[[], float] = time.time) -> None:
        """Open the file, which may be there; OSError if it cannot be. `log` takes lines for a person."""
        # Open for as long as the session is served.
        self._file = path.open("ab", buffering=0)
        self._path = path
        self._log = log
        self._clock = clock
        self._came: dict[int, float] = {}
        self._is_lost = False

    def came(self, number: int) -> None:
        """Note when a stream was asked for."""
        self._came[number] = self._clock()

    def ended(self, number: int, job: StreamJob | None, why: str) -> None:
        """Write what became of a stream, if its prompt was begun."""
        came = self._came.pop(number, None)
        if came is None or job is None or job.n_reused is None or self._is_lost:
            return
        body = {
            "arrival": round(came, 3),
            "prompt": len(job.prompt),
            "cached": job.n_reused,
            "generated": job.n_predicted,
            "max_tokens": job.n_predict if job.n_predict >= 0 else None,
            "end": why,
        }
        try:
            self._file.write(json.dumps(body).encode() + b"\n")
        except OSError as error:
            self._is_lost = True
            self._log(f"warning: no more is written to {self._path}: {error.strerror or error}")

    def close(self) -> None:
        """Close the file; again is nothing."""
        self._is_lost = True
        self._file.close()
