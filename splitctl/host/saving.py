"""A session saved in its place: now and then while it is served, and when it ends.

Law: a session that is to end unsaved goes on, unless whoever ends it says that it may.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from splitctl.carry.durable import check_place
from splitctl.errors import CarryNotWritten, Reason, Refused, SplitctlError
from splitctl.host.ledger import Ledger
from splitctl.host.parking import make_folder

_ADVICE = "splitctl save FILE saves it elsewhere, splitctl stop --force ends it unsaved"


class Saving:
    """Saves one session. Thread: the supervisor's loop."""

    def __init__(
        self,
        path: Path,
        ledger: Ledger,
        *,
        by_worker: Callable[[Path], Awaitable[object]],
        without_worker: Callable[[Path], Awaitable[object]],
        log: Callable[[str], None],
    ) -> None:
        """Save nothing yet.

        Args:
            path: the session's place; its folder is made when it is needed.
            ledger: what the session holds.
            by_worker: saves it at a token boundary; raises RequestFailed, Parked or Busy.
            without_worker: writes what is known of it; raises CarryNotWritten.
            log: takes lines for a person.
        """
        self._path = path
        self._ledger = ledger
        self._by_worker = by_worker
        self._without_worker = without_worker
        self._log = log
        self._version: int | None = None

    async def check(self) -> None:
        """See whether a file could be put in the session's place. Raises CarryNotWritten."""
        try:
            await asyncio.to_thread(make_folder, self._path)
            await asyncio.to_thread(check_place, self._path)
        except OSError as error:
            raise CarryNotWritten(self._path, error.strerror or str(error)) from error

    async def warn(self) -> None:
        """Log it if the session could not be saved as things are now."""
        try:
            await self.check()
        except CarryNotWritten as error:
            self._log(f"warning: the session will not be saved when it ends: {error}")

    async def every(self, seconds: float, *, is_serving: Callable[[], bool]) -> None:
        """Save the session again and again, while it changes."""
        saved = self._ledger.version
        while True:
            await asyncio.sleep(seconds)
            version = self._ledger.version
            if is_serving() and version != saved:
                try:
                    await self._save(has_worker=True)
                    saved = version
                except (SplitctlError, OSError) as error:
                    self._log(f"the session could not be saved to {self._path}: {error}")

    async def before_the_end(self, *, has_worker: bool, stop_switching: Callable[[], None]) -> None:
        """Save the session while it can still go on.

        Args:
            has_worker: whether a worker serves it.
            stop_switching: ends a switch under way; called once the place is known to be good.

        Raises:
            Refused: it cannot be saved.
        """
        version = self._ledger.version
        try:
            await self.check()
            stop_switching()
            await self._save(has_worker=has_worker)
        except (SplitctlError, OSError) as error:
            raise Refused([Reason("cannot-be-saved", f"{error}; {_ADVICE}")]) from error
        self._version = version

    async def at_the_end(self, *, has_worker: bool) -> str:
        """Save what changed since, by the worker or, where that fails, without it; gives why it was not saved."""
        if self._version == self._ledger.version:
            return ""
        try:
            await self._save(has_worker=has_worker)
        except (SplitctlError, OSError) as error:
            if not has_worker:
                return str(error)
            self._log(f"the worker could not save the session: {error}")
            return await self.at_the_end(has_worker=False)
        return ""

    async def _save(self, *, has_worker: bool) -> None:
        if has_worker:
            await asyncio.to_thread(make_folder, self._path)
            await self._by_worker(self._path)
        else:
            await self._without_worker(self._path)
