"""What a page wants to know of the past: the last switches, kept as they end."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from splitctl.control.server import SessionService
from splitctl.host.events import SwitchEnded, TrialEnded

_N_KEPT = 16


class Watch:
    """Keeps the outcomes of the last switches.

    Thread: the loop's. Lifetime: from `start` to `stop`.
    """

    def __init__(self, host: SessionService) -> None:
        """Keep nothing yet.

        Args:
            host: the session.
        """
        self._host = host
        self._outcomes: deque[dict[str, Any]] = deque(maxlen=_N_KEPT)
        self._task: asyncio.Task[None] | None = None

    @property
    def outcomes(self) -> list[dict[str, Any]]:
        """Outcome objects, oldest first."""
        return list(self._outcomes)

    def start(self) -> None:
        """Begin to watch."""
        self._task = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        """Watch no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None

    async def _follow(self) -> None:
        async for event in self._host.subscribe():
            if isinstance(event, TrialEnded) and self._outcomes:
                # The same switch, as it is now.
                self._outcomes[-1] = event.outcome
            elif isinstance(event, SwitchEnded | TrialEnded):
                self._outcomes.append(event.outcome)
