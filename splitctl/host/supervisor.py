"""A session that outlives the process which holds the library: what clients may ask of it.

The supervisor never loads the library. It owns the session: the arenas, the tokens of every sequence, the streams, and
the worker of the moment (`keeper`).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from splitctl.control.requests import GenerateRequest
from splitctl.errors import Busy, Parked, SplitctlError
from splitctl.host.config import HostConfig, HostState
from splitctl.host.events import HostEvent, SessionSaved
from splitctl.host.link import End
from splitctl.host.manager import WorkerManager
from splitctl.host.pending import OnLoss, OrderFailed
from splitctl.host.streams import Stream
from splitctl.ipc.jobs import Fault
from splitctl.ipc.orders import Check, Checked, Open, Replaced, Restore, Save, Saved, Switch
from splitctl.outcome import to_plain
from splitctl.placement import Placement

#: How long a worker that was told to close may take [seconds].
_GRACE_S = 10.0


class Supervisor:
    """One hosted session.

    Thread: the loop that calls `start`. Lifetime: from `start` to `stop`.
    """

    def __init__(self, config: HostConfig, *, env: Mapping[str, str], tell: Callable[[str], None]) -> None:
        """Nothing is started yet.

        Args:
            config: what to serve.
            env: the environment of the workers; read anew for each.
            tell: takes lines for a person.
        """
        self._config = config
        self._tell = tell
        self._keeper = WorkerManager(config, env, tell)
        self._started_at = time.time()
        self._ended: asyncio.Future[dict[str, Any]] | None = None

    @property
    def state(self) -> HostState:
        """What the session is doing."""
        keeper = self._keeper
        return HostState.SWITCHING if keeper.state is HostState.SERVING and keeper.is_switching else keeper.state

    @property
    def worker_pid(self) -> int | None:
        """The worker's process id; None while there is none."""
        return None if self._keeper.life is None else self._keeper.life.pid

    def subscribe(self) -> AsyncIterator[HostEvent]:
        """Give what happens to the session from now on; the iterator ends with it."""
        return self._keeper.hub.subscribe()

    async def start(self) -> None:
        """Load the model and serve.

        Raises:
            OrderFailed: the worker says why it cannot, or the saved session cannot be used.
            WorkerLost: it died of it; nothing was at stake.
            DeadlineExceeded: it hung.
            OSError: the system gives no memory file.
        """
        keeper, config = self._keeper, self._config
        keeper.prepare()
        try:
            await self._open(Open(config.placement, config.adapters, force=config.force))
            keeper.go_on()
            await keeper.know_owner()
            if config.resume is not None:
                await self._replace(config.resume)
        except BaseException:
            await self.stop(save=False)
            raise
        if config.resume is None:
            self._offer_saved()
        if config.checkpoint_s is not None:
            keeper.spawn(self._checkpoints(config.checkpoint_s))

    async def generate(self, request: GenerateRequest) -> Stream:
        """Begin a generation.

        Raises:
            Parked: the session serves no more, until it is restored.
            Busy: it is being stopped, or too many wait.
        """
        self._refuse_gone()
        return self._keeper.traffic.open(request)

    async def switch(
        self,
        changes: Mapping[str, Any],
        *,
        proof: str = "bytes",
        convert: bool = True,
        force: bool = False,
        timeout_s: float | None = None,
        on_stage: Callable[[str, float], None] | None = None,
    ) -> dict[str, Any]:
        """Move the session; a switch goes on when its caller stops waiting.

        Args:
            changes: the named fields of the placement; what is not named stays, a tensor split within a mode alone.
            proof: bytes, positions or off.
            convert: whether the carry may be converted.
            force: go on in spite of what only a try speaks against.
            timeout_s: longest wait for the token boundary, seconds; None: as long as it takes.
            on_stage: told the stage and the share of it that is done.

        Returns:
            The outcome object of the contract; of a parked session with ``parked_at``.

        Raises:
            Busy: another switch, a restore or a recovery is under way.
            Parked: the session serves no more.
            PlacementInvalid: no placement can be so.
            OrderFailed: the worker could not take it.
        """
        target = self._target(changes)
        keeper = self._keeper
        order = Switch(keeper.desk.number(), target, proof, convert=convert, force=force)
        switch = keeper.switches.begin(order.order, target, time.monotonic())
        keeper.on_stage = on_stage
        answer = keeper.desk.put(order, OnLoss.HOLD)
        keeper.flush()
        if timeout_s is not None:
            asyncio.get_running_loop().call_later(timeout_s, keeper.miss_boundary, switch)
        outcome: dict[str, Any] = await asyncio.shield(answer)
        return outcome

    def cancel_switch(self) -> None:
        """Ask the switch under way to end in the old placement; without one nothing happens."""
        self._keeper.cancel_switch()

    async def check(self, changes: Mapping[str, Any], *, convert: bool = True, force: bool = False) -> dict[str, Any]:
        """Say what a switch would do.

        Args:
            changes: as for `switch`.
            convert: as for `switch`.
            force: as for `switch`.

        Returns:
            What the worker found (`orders.Checked`, as an object), the modes under ``requested`` and ``effective``, and
            under ``expected_s`` the seconds that such a switch has taken so far, or None.

        Raises:
            Busy, Parked, PlacementInvalid: as `switch`.
            OrderFailed: it could not be judged.
        """
        target = self._target(changes)
        keeper = self._keeper
        before, after = keeper.home.mode.value, target.mode.value
        report: Checked = await self._ask(Check(keeper.desk.number(), target, convert=convert, force=force))
        return {
            "effective": before,
            "requested": after,
            "target": report.target.to_json(),
            "is_unchanged": report.is_unchanged,
            "reasons": to_plain(report.reasons),
            "conversions": list(report.conversions),
            "state_bytes": report.state_bytes,
            "weight_bytes": report.weight_bytes,
            "mem_available": report.mem_available,
            "expected_s": keeper.switches.expected_s(before, after),
        }

    async def save(self, path: Path) -> dict[str, Any]:
        """Write the whole session to a file, at a token boundary.

        Args:
            path: where, absolute.

        Returns:
            Keys path, bytes, sequences and tokens.

        Raises:
            Parked, Busy: there is no session to save.
            OrderFailed: it could not be written.
        """
        self._refuse_gone()
        saved = await self._save(path)
        n_sequences, n_tokens = self._keeper.held
        return {"path": str(path), "bytes": saved.n_bytes, "sequences": n_sequences, "tokens": n_tokens}

    async def restore(self, path: Path) -> dict[str, Any]:
        """Replace all that the session holds with a file; a parked session serves again with it.

        Args:
            path: a carry, or a session or slot file of llama.cpp; absolute.

        Returns:
            Keys path, sequences, tokens, conversions, recomputed and reason.

        Raises:
            Busy: streams, a switch, a restore or a recovery are under way.
            OrderFailed: the file cannot be used; the session is as it was.
            WorkerLost, DeadlineExceeded: a parked session's new worker was lost; it is parked as it was.
        """
        if self._keeper.state is HostState.PARKED:
            return await self._bring_back(path)
        self._refuse_busy()
        n_streams = self._keeper.traffic.n_open
        if n_streams:
            raise Busy(f"{n_streams} streams, from which a restore would take their sequences")
        return await self._replace(path)

    async def stop(self, *, save: bool = True) -> dict[str, Any]:
        """End the session: streams are told, it is saved, the worker is closed. A second call waits for the first.

        Args:
            save: write what it holds to `HostConfig.save_path`.

        Returns:
            Key path: where it was saved, or where a parked session lies; None where nothing was.
        """
        if self._ended is None:
            self._ended = asyncio.ensure_future(self._stop(save=save))
        return dict(await asyncio.shield(self._ended))

    def status(self) -> dict[str, Any]:
        """Say how the session is, as JSON types."""
        keeper = self._keeper
        books, switches = keeper.traffic.books, keeper.switches
        asked = keeper.home if switches.under_way is None else switches.under_way.target
        is_served = self.state in {HostState.SERVING, HostState.SWITCHING}
        last = switches.last
        return {
            "name": self._config.name,
            "state": self.state.value,
            "pid": os.getpid(),
            "worker_pid": self.worker_pid,
            "model": dict(keeper.model) or {"path": str(self._config.model)},
            "placement": keeper.home.to_json(),
            "requested": asked.mode.value if last is None or switches.under_way is not None else last["requested"],
            "effective": keeper.home.mode.value if is_served else None,
            "sequences": [
                {"seq_id": row.seq_id, "n_tokens": len(row.tokens), "state": books.state_of(row)} for row in books.rows
            ],
            "streams": keeper.traffic.n_open,
            "queued": keeper.traffic.n_waiting,
            "tokens_per_second": books.tokens_per_second,
            "stage": None if switches.under_way is None else switches.under_way.stage.value,
            "on_trial": switches.trial is not None,
            "last_switch": last,
            "switches": switches.summary(),
            "started_at": self._started_at,
            "parked_at": None if keeper.parked_at is None else str(keeper.parked_at),
            "recomputed": keeper.n_recomputed,
            "worker_restarts": keeper.n_restarts,
        }

    # ---- how it is done ----

    async def _open(self, order: Open) -> None:
        """Open the session where nothing runs yet.

        Raises:
            OrderFailed, WorkerLost, DeadlineExceeded: as `start`.
        """
        opened = await self._keeper.open(order)
        if isinstance(opened, End):
            raise _error_of(opened)
        self._keeper.serve(opened)
        self._keeper.switches.serve_in(opened.placement)

    async def _ask(self, order: Check | Save | Restore) -> Any:
        answer = self._keeper.desk.put(order, OnLoss.FAIL)
        self._keeper.flush()
        return await asyncio.shield(answer)

    async def _save(self, path: Path) -> Saved:
        saved: Saved = await self._ask(Save(self._keeper.desk.number(), path))
        self._keeper.hub.tell(SessionSaved(path, saved.n_bytes))
        return saved

    async def _save_own(self) -> None:
        """Save the session in its place.

        Raises:
            OrderFailed, OSError: it could not be written.
        """
        path = self._config.save_path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        await self._save(path)

    async def _replace(self, path: Path) -> dict[str, Any]:
        """Let the worker restore a file; streams that come meanwhile wait."""
        keeper = self._keeper
        keeper.is_replacing = True
        try:
            report: Replaced = await self._ask(Restore(keeper.desk.number(), path))
        finally:
            keeper.is_replacing = False
            keeper.flush()
        return {
            "path": str(path),
            "sequences": len(report.books),
            "tokens": sum(len(book.tokens) for book in report.books),
            "conversions": list(report.conversions),
            "recomputed": report.recomputed,
            "reason": report.reason,
        }

    async def _bring_back(self, path: Path) -> dict[str, Any]:
        """Open a parked session again, where it served, and restore a file into it."""
        keeper = self._keeper
        keeper.state = HostState.LOADING
        try:
            await self._open(Open(keeper.home, self._config.adapters, force=True))
            restored = await self._replace(path)
        except BaseException as error:
            await keeper.end_worker(_GRACE_S)
            keeper.state = HostState.PARKED
            keeper.traffic.end_all(f"the session is still parked: {error}")
            raise
        keeper.parked_at, keeper.park_reason = None, ""
        keeper.go_on()
        self._tell(f"the session serves again, from {path}")
        return restored

    async def _stop(self, *, save: bool) -> dict[str, Any]:
        keeper = self._keeper
        was_parked = keeper.state is HostState.PARKED
        was_serving = keeper.state is HostState.SERVING
        self.cancel_switch()
        keeper.state = HostState.STOPPING
        await keeper.end_tasks()
        keeper.traffic.end_all("the session is being stopped")
        path = keeper.parked_at
        if save and not was_parked and keeper.held != (0, 0):
            path = await self._save_last(is_served=was_serving)
        await keeper.end_worker(_GRACE_S)
        keeper.desk.fail(Busy("its end"))
        keeper.give_back()
        keeper.hub.close()
        return {"path": None if path is None else str(path)}

    async def _save_last(self, *, is_served: bool) -> Path | None:
        """Save what the session holds, by its worker or, where that fails, without it."""
        keeper, path = self._keeper, self._config.save_path
        if is_served and keeper.life is not None:
            try:
                await self._save_own()
            except (SplitctlError, OSError) as error:
                self._tell(f"the worker could not save the session: {error}")
            else:
                return path
        return await keeper.write(path)

    async def _checkpoints(self, every_s: float) -> None:
        """Save the session again and again, while it changes."""
        keeper = self._keeper
        saved = keeper.traffic.books.version
        while True:
            await asyncio.sleep(every_s)
            version = keeper.traffic.books.version
            if self.state is not HostState.SERVING or version == saved:
                continue
            try:
                await self._save_own()
            except (SplitctlError, OSError) as error:
                self._tell(f"the session could not be saved to {self._config.save_path}: {error}")
            else:
                saved = version

    def _offer_saved(self) -> None:
        """Say that a saved session could be gone on with."""
        found = [path for path in (self._config.park_path, self._config.save_path) if path.is_file()]
        if found:
            newest = max(found, key=lambda path: path.stat().st_mtime)
            other = " (or serve --resume)" if newest == self._config.save_path else ""
            self._tell(f"a saved session is there: splitctl restore {newest}{other} goes on with it")

    def _target(self, changes: Mapping[str, Any]) -> Placement:
        """Give the whole target of a switch."""
        self._refuse_gone()
        self._refuse_busy()
        return self._keeper.home.changed(**changes)

    def _refuse_gone(self) -> None:
        keeper = self._keeper
        if keeper.state is HostState.PARKED:
            raise Parked(keeper.parked_at, keeper.park_reason)
        if keeper.state is HostState.STOPPING:
            raise Busy("its end")

    def _refuse_busy(self) -> None:
        keeper = self._keeper
        if keeper.switches.under_way is not None:
            raise Busy(f"a switch to {keeper.switches.under_way.target.mode.value}")
        if keeper.is_replacing:
            raise Busy("a restore")
        if keeper.state is not HostState.SERVING:
            raise Busy({HostState.RECOVERING: "recovering from the loss of its worker"}.get(keeper.state, "loading"))


def _error_of(end: End) -> Exception:
    """Give the error of a worker that could not open the session."""
    if end.failure is not None:
        failure = end.failure
        return OrderFailed(failure.fault, failure.kind, failure.message, failure.body)
    return end.lost or OrderFailed(Fault.INTERNAL, "WorkerLost", f"{end.reason}; splitctl doctor shows the library")
