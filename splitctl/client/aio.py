"""The client of a hosted session for programs on an asyncio loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, Unpack
from weakref import WeakSet

from splitctl.client import asks
from splitctl.client.asks import Sampler, Stop
from splitctl.client.readers import AnswerReader, EventsReader, Plain, Reader, SwitchReader, Transcript
from splitctl.client.target import LOOK_S, NOBODY, AnyCall, Patience, Target, target_of
from splitctl.client.values import (
    Answer,
    AnswerEvent,
    Delta,
    PlacementFields,
    PolicyStatus,
    Raw,
    Restarted,
    Restored,
    Saved,
    SessionEvent,
    Status,
    Stopped,
    SwitchCheck,
    SwitchStage,
)
from splitctl.control.client import HostGone
from splitctl.control.requests import ControlRequest, EventsRequest, PolicyRequest, StatusRequest, StopRequest
from splitctl.errors import Cancelled, DeadlineExceeded, SplitctlError
from splitctl.ipc.jobs import RequestFailed
from splitctl.ipc.stop_texts import Usage
from splitctl.outcome import Proof, Route, SwitchOutcome
from splitctl.placement import Placement, SplitMode

E = TypeVar("E")
R = TypeVar("R")
W = TypeVar("W", bound="AsyncWork[Any, Any]")


class AsyncWork(Generic[E, R]):
    """A request: iterate over it for its events, or await its `result`. It is sent when the first of both is awaited.

    It reads on when the next event is asked for, so a slow reader holds its host's stream up and not its own memory.

    Lifetime:
        Until its end, or `close`; also an async context manager. A task that is cancelled in it closes it.

    Thread:
        The loop's.
    """

    def __init__(
        self, target: Target, request: ControlRequest, reader: Reader[E, R], what: str, wait_s: float | None
    ) -> None:
        """Send nothing yet; `what` is asked for, as a noun, and waited for `wait_s` seconds at most."""
        self._target = target
        self._request = request
        self._what = what
        self._patience = target.patience(request, what, wait_s)
        self._transcript = Transcript(target.name, reader)
        self._lock = asyncio.Lock()
        self._call: AnyCall | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> E:
        """Wait for the next event. Raises as `Work.__next__`."""
        return await self._next()

    async def result(self) -> R:
        """Wait for the end and give the result; events that nobody took are dropped."""
        async with self._lock:
            while not self._transcript.is_over:
                self._transcript.events.clear()
                await self._pump()
            return self._transcript.result

    async def cancel(self) -> None:
        """Ask the host to end the work early; it still says how it ended."""
        if self._call is not None:
            with suppress(OSError):
                await asyncio.to_thread(self._call.cancel)

    def close(self) -> None:
        """Hang up: a generation is cancelled at the host; a switch, a save or a restore goes on there."""
        if not self._lock.locked():
            self._end()
            return
        # Another task waits in it: that finds the end, and lets go of the connection.
        if not self._transcript.is_over:
            self._transcript.fail(Cancelled(self._what))
        if self._call is not None:
            self._call.hang_up()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_call", None) is not None:
            self._call.close()  # type: ignore[union-attr]

    async def _next(self) -> E:
        async with self._lock:
            while not self._transcript.events:
                if self._transcript.is_over:
                    self._transcript.tell()
                    raise StopAsyncIteration
                await self._pump()
            return self._transcript.events.popleft()

    async def _pump(self) -> None:
        """Wait for something to come, and read it."""
        try:
            call = self._call = self._call or await _opened(self._target, self._request, self._patience)
            if not self._transcript.is_over:
                await self._read(call)
        except DeadlineExceeded:
            self._end()
            raise
        except SplitctlError as error:
            self._transcript.fail(error)
        except BaseException:
            # The task is cancelled: nobody reads on, so the host need not go on.
            self._end()
            raise
        if self._transcript.is_over:
            self._end()

    async def _read(self, call: AnyCall) -> None:
        if await _readable(call.fileno(), self._patience.turn_s()):
            # It may have been closed meanwhile.
            if not self._transcript.is_over:
                messages = call.read()
                self._target.met(call)
                self._target.tell()
                self._transcript.take(messages)
        elif self._patience.wants_proof:
            await _prove_alive(self._target)

    def _end(self) -> None:
        """Let go of the connection; nothing more is read."""
        if not self._transcript.is_over:
            self._transcript.fail(Cancelled(self._what))
        if self._call is not None:
            self._call.close()


class AsyncGeneration(AsyncWork[AnswerEvent, Answer]):
    """An answer as it comes: iterate over it for its deltas."""

    @property
    def usage(self) -> Usage | None:
        """What it took; None before its end, and of one that broke off."""
        return self._transcript.result.usage if self._transcript.has_result else None

    async def __anext__(self) -> Delta:
        """Wait for the next delta: a token, or text that was held back."""
        while not isinstance(event := await self._next(), Delta):
            continue
        return event

    async def events(self) -> AsyncIterator[AnswerEvent]:
        """Give pauses as well, and when the prompt is being read."""
        with suppress(StopAsyncIteration):
            while True:
                yield await self._next()


class AsyncSwitch(AsyncWork["SwitchStage | SwitchOutcome", SwitchOutcome]):
    """A switch as it goes: iterate over it for its stages, and last its outcome."""

    _has_ended = False

    async def __anext__(self) -> SwitchStage | SwitchOutcome:
        """Wait for the next stage, or the outcome."""
        try:
            return await self._next()
        except StopAsyncIteration:
            if self._has_ended or not self._transcript.has_result:
                raise
            self._has_ended = True
            return self._transcript.result

    @property
    def raw(self) -> Raw:
        """The outcome object as the host sent it; empty before the end."""
        reader = self._transcript.reader
        return reader.raw if isinstance(reader, SwitchReader) else {}


class AsyncClient:
    """Speaks with a hosted session as `Client` does, with the same arguments, values and errors.

    A task that is cancelled while it reads an answer cancels that at the host.

    Lifetime:
        Until `close`, which ends what is under way; also an async context manager. Neither ends the session.

    Thread:
        That of one loop.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        url: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 10.0,
        reconnect_s: float = 10.0,
        on_restart: Callable[[Restarted], None] | None = None,
    ) -> None:
        """Say which session; nothing is opened yet. The arguments are those of `connect`."""
        self._target = target_of(
            name, url, api_key, timeout_s=timeout_s, reconnect_s=reconnect_s, on_restart=on_restart
        )
        self._under_way: WeakSet[AsyncWork[Any, Any]] = WeakSet()

    @property
    def name(self) -> str:
        """The session's name, or the URL."""
        return self._target.name

    @property
    def n_restarts(self) -> int:
        """How often another process served than before."""
        return self._target.n_restarts

    async def status(self) -> Status:
        """As `Client.status`."""
        return await self._ask(StatusRequest(), Status.read, "the status", self._target.timeout_s)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        n: int = -1,
        sampler: Sampler = None,
        stop: Stop = None,
        grammar: str = "",
        add_special: bool = True,
        parse_special: bool = False,
        wait_s: float | None = None,
    ) -> AsyncGeneration:
        """As `Client.generate`; it is sent when it is iterated or its result awaited."""
        request = asks.generation(
            prompt,
            n=n,
            sampler=sampler,
            stop=stop,
            grammar=grammar,
            add_special=add_special,
            parse_special=parse_special,
        )
        return self._begun(AsyncGeneration(self._target, request, AnswerReader(self.name), "the answer", wait_s))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        n: int = -1,
        sampler: Sampler = None,
        stop: Stop = None,
        grammar: str = "",
        template: Mapping[str, Any] | None = None,
        continues: bool = False,
        wait_s: float | None = None,
    ) -> AsyncGeneration:
        """As `Client.chat`; it is sent when it is iterated or its result awaited."""
        request = asks.chat(
            messages, n=n, sampler=sampler, stop=stop, grammar=grammar, template=template, continues=continues
        )
        return self._begun(AsyncGeneration(self._target, request, AnswerReader(self.name), "the answer", wait_s))

    def switch(
        self,
        target: SplitMode | str | Placement | None = None,
        *,
        proof: Proof | str = Proof.BYTES,
        convert: bool = True,
        force: bool = False,
        via: Route | str = Route.AUTO,
        timeout_s: float | None = None,
        wait_s: float | None = None,
        **changes: Unpack[PlacementFields],
    ) -> AsyncSwitch:
        """As `Client.switch`: ``await client.switch("tensor").result()``. A cancelled task leaves it going."""
        request = asks.switch(target, changes, proof=proof, convert=convert, force=force, via=via, timeout_s=timeout_s)
        return self._begun(AsyncSwitch(self._target, request, SwitchReader(), "the switch", wait_s))

    async def check(
        self,
        target: SplitMode | str | Placement | None = None,
        *,
        convert: bool = True,
        force: bool = False,
        via: Route | str = Route.AUTO,
        wait_s: float | None = None,
        **changes: Unpack[PlacementFields],
    ) -> SwitchCheck:
        """As `Client.check`."""
        request = asks.check(target, changes, convert=convert, force=force, via=via)
        return await self._ask(request, SwitchCheck.read, "the check", wait_s)

    async def save(self, path: str | Path, *, wait_s: float | None = None) -> Saved:
        """As `Client.save`."""
        request = asks.save(path, is_web=self._target.url is not None)
        return await self._ask(request, Saved.read, "the save", wait_s)

    async def restore(self, path: str | Path, *, wait_s: float | None = None) -> Restored:
        """As `Client.restore`."""
        request = asks.restore(path, is_web=self._target.url is not None)
        return await self._ask(request, Restored.read, "the restore", wait_s)

    async def policy(self, policy: str) -> PolicyStatus:
        """As `Client.policy`."""
        return await self._ask(PolicyRequest(policy), PolicyStatus.read, "the policy", self._target.timeout_s)

    async def stop(self, *, force: bool = False, wait_s: float | None = None) -> Stopped:
        """As `Client.stop`."""
        stopped = await self._ask(StopRequest(force=force), Stopped.read, "the end of the host", wait_s)
        self._target.forget()
        return stopped

    def events(self, *, wait_s: float | None = None) -> AsyncWork[SessionEvent, None]:
        """As `Client.events`."""
        return self._begun(AsyncWork(self._target, EventsRequest(), EventsReader(), "the events", wait_s))

    def close(self) -> None:
        """End what is under way, and ask no more; the session goes on."""
        self._target.is_closed = True
        for work in list(self._under_way):
            work.close()

    async def __aenter__(self) -> Self:
        """Reach the session; raises as `connect`."""
        await self.status()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def _ask(self, request: ControlRequest, read: Callable[[Raw], R], what: str, wait_s: float | None) -> R:
        return await self._begun(AsyncWork[None, R](self._target, request, Plain(read), what, wait_s)).result()

    def _begun(self, work: W) -> W:
        self._under_way.add(work)
        return work


async def _opened(target: Target, request: ControlRequest, patience: Patience) -> AnyCall:
    """Ask whoever serves, in a thread: a long request takes a while to send."""
    until = time.monotonic() + target.may_be_away_s
    while True:
        opening = asyncio.ensure_future(asyncio.to_thread(target.call, request))
        try:
            call = await asyncio.shield(opening)
        except NOBODY:
            if time.monotonic() >= until:
                raise
            patience.turn_s()
            await asyncio.sleep(LOOK_S)
        except asyncio.CancelledError:
            opening.add_done_callback(_hang_up)
            raise
        else:
            try:
                target.tell()
            except BaseException:  # of the program's own callback
                call.close()
                raise
            return call


async def _prove_alive(target: Target) -> None:
    """Ask a host that is silent for something that needs no work; raises HostGone if it does not answer."""
    asking = AsyncWork[None, Status](target, StatusRequest(), Plain(Status.read), "the status", target.timeout_s)
    try:
        await asking.result()
    except RequestFailed:
        # It refuses, so it lives.
        return
    except SplitctlError as error:
        raise HostGone(target.name, f"was silent for {target.silence_s:g} s") from error


def connect_async(
    name: str | None = None,
    *,
    url: str | None = None,
    api_key: str | None = None,
    timeout_s: float = 10.0,
    reconnect_s: float = 10.0,
    on_restart: Callable[[Restarted], None] | None = None,
) -> AsyncClient:
    """Give the client of a session for asyncio, which is reached when it is entered by ``async with``.

    The arguments and errors are those of `connect`.
    """
    return AsyncClient(
        name, url=url, api_key=api_key, timeout_s=timeout_s, reconnect_s=reconnect_s, on_restart=on_restart
    )


def _hang_up(opening: asyncio.Future[AnyCall]) -> None:
    """Let go of a connection that nobody waits for any more."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


async def _readable(fd: int, timeout_s: float | None) -> bool:
    """Wait until a descriptor has something to read; false when the time is over."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, _done_once, ready)
    try:
        async with asyncio.timeout(timeout_s):
            await ready
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(fd)
    return True


def _done_once(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
