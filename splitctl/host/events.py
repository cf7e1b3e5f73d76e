"""What happens to a hosted session, for whoever watches it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class SwitchStage:
    """Where a switch is.

    Attributes:
        stage: its name.
        share: of it that is done, 0 to 1.
    """

    stage: str
    share: float


@dataclass(frozen=True, slots=True)
class SwitchEnded:
    """A switch is over, however it ended.

    Attributes:
        outcome: the outcome object of the contract.
    """

    outcome: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TrialEnded:
    """The first decode after a switch is done: the switch is confirmed, or was fallen back from.

    Attributes:
        outcome: the outcome object as it is now.
    """

    outcome: dict[str, Any]


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """The worker was lost.

    Attributes:
        pid: its process id.
        reason: how it ended, and its last words.
    """

    pid: int
    reason: str


@dataclass(frozen=True, slots=True)
class SessionRecovered:
    """A new worker serves.

    Attributes:
        pid: its process id.
        mode: the split mode that it serves in.
        recomputed: tokens were read again.
        ms: from the loss until now, ms.
    """

    pid: int
    mode: str
    recomputed: bool
    ms: float


@dataclass(frozen=True, slots=True)
class SessionParked:
    """No worker can serve the session; it lies on disk.

    Attributes:
        path: where; None where it could not be written.
        reason: why.
    """

    path: Path | None
    reason: str


@dataclass(frozen=True, slots=True)
class SessionSaved:
    """The session is in a file, and goes on.

    Attributes:
        path: the file.
        n_bytes: its size.
    """

    path: Path
    n_bytes: int


HostEvent = SwitchStage | SwitchEnded | TrialEnded | WorkerGone | SessionRecovered | SessionParked | SessionSaved

#: Events that wait for one watcher; of a slower one the oldest are dropped.
_MOST_WAITING = 1024


class Hub:
    """Passes events on to everybody who watches.

    Thread: the supervisor's loop.
    """

    def __init__(self) -> None:
        self._watchers: set[asyncio.Queue[HostEvent | None]] = set()
        self._is_closed = False

    def publish(self, event: HostEvent | None) -> None:
        """Pass an event on; None ends what every watcher gets."""
        for waiting in self._watchers:
            if waiting.full():
                waiting.get_nowait()
            waiting.put_nowait(event)

    def subscribe(self) -> AsyncIterator[HostEvent]:
        """Begin to watch, from this moment on; the iterator ends with the session."""
        waiting: asyncio.Queue[HostEvent | None] = asyncio.Queue(_MOST_WAITING)
        if self._is_closed:
            waiting.put_nowait(None)
        self._watchers.add(waiting)
        return self._events(waiting)

    def close(self) -> None:
        """Let all watchers come to their end."""
        self._is_closed = True
        self.publish(None)

    async def _events(self, waiting: asyncio.Queue[HostEvent | None]) -> AsyncIterator[HostEvent]:
        try:
            while (event := await waiting.get()) is not None:
                yield event
        finally:
            self._watchers.discard(waiting)
