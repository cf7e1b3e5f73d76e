"""The client of a hosted session for programs that wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from splitctl.control.client import HostGone, wait
from splitctl.control.requests import (
    ControlRequest,
    EventsRequest,
    PolicyRequest,
    StatusRequest,
    StopRequest,
)
from splitctl.errors import Cancelled, DeadlineExceeded, SplitctlError
from splitctl.ipc.jobs import RequestFailed
from splitctl.ipc.stop_texts import Usage
from splitctl.outcome import Proof, Route, SwitchOutcome
from splitctl.placement import Placement, SplitMode

E = TypeVar("E")
R = TypeVar("R")
W = TypeVar("W", bound="Work[Any, Any]")


class Work(Generic[E, R]):
    """A request under way: iterate over it for its events, or take its `result`.

    Lifetime:
        Until its end, or `close`; also a context manager. One that is left early is closed.

    Thread:
        One at a time iterates; `cancel` and `close` may be called from any.
    """

    def __init__(
        self, target: Target, request: ControlRequest, reader: Reader[E, R], what: str, wait_s: float | None
    ) -> None:
        """Ask; `what` is asked for, as a noun, and waited for `wait_s` seconds at most. Raises as `Client.generate`."""
        self._target = target
        self._what = what
        self._patience = target.patience(request, what, wait_s)
        self._transcript = Transcript(target.name, reader)
        self._lock = threading.RLock()
        self._is_left = self._is_closed = False
        self._call: AnyCall = _opened(target, request, self._patience)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> E:
        """Wait for the next event.

        Raises:
            StopIteration: there is none; then `result` has how it ended.
            AnswerBroken, HostGone, RequestFailed: it did not end well.
            DeadlineExceeded: it took longer than ``wait_s``.
        """
        return self._next()

    def result(self) -> R:
        """Wait for the end and give the result; events that nobody took are dropped. Raises as iterating does."""
        with self._lock:
            while not self._transcript.is_over:
                self._transcript.events.clear()
                self._pump()
            return self._transcript.result

    def cancel(self) -> None:
        """Ask the host to end the work early; it still says how it ended."""
        with suppress(OSError):
            self._call.cancel()

    def close(self) -> None:
        """Hang up: a generation is cancelled at the host; a switch, a save or a restore goes on there."""
        # A thread that waits in it finds the end, and lets go of it.
        self._is_left = True
        self._call.hang_up()
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._call.close()
            if not self._transcript.is_over:
                self._transcript.fail(Cancelled(self._what))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            self._call.close()

    def _next(self) -> E:
        with self._lock:
            while not self._transcript.events:
                if self._transcript.is_over:
                    self._transcript.tell()
                    raise StopIteration
                self._pump()
            return self._transcript.events.popleft()

    def _pump(self) -> None:
        """Wait for something to come, and read it."""
        try:
            if wait([self._call.fileno()], self._patience.turn_s()):
                messages = self._call.read()
                self._target.met(self._call)
                self._target.tell()
                self._transcript.take(messages)
            elif self._patience.wants_proof:
                _prove_alive(self._target)
        except DeadlineExceeded:
            self.close()
            raise
        except SplitctlError as error:
            self._transcript.fail(Cancelled(self._what) if self._is_left else error)
        except BaseException:
            # Ctrl-C is one: nobody reads on, so the host need not go on.
            self.close()
            raise
        if self._transcript.is_over:
            self.close()


class Generation(Work[AnswerEvent, Answer]):
    """An answer as it comes: iterate over it for its deltas.

    Attributes:
        usage: what it took; None before its end.
    """

    @property
    def usage(self) -> Usage | None:
        """What it took; None before its end, and of one that broke off."""
        return self._transcript.result.usage if self._transcript.has_result else None

    def __next__(self) -> Delta:
        """Wait for the next delta: a token, or text that was held back."""
        while not isinstance(event := self._next(), Delta):
            continue
        return event

    def events(self) -> Iterator[AnswerEvent]:
        """Give pauses as well, and when the prompt is being read."""
        with suppress(StopIteration):
            while True:
                yield self._next()


class Switch(Work["SwitchStage | SwitchOutcome", SwitchOutcome]):
    """A switch as it goes: iterate over it for its stages, and last its outcome."""

    _has_ended = False

    def __next__(self) -> SwitchStage | SwitchOutcome:
        """Wait for the next stage, or the outcome."""
        try:
            return self._next()
        except StopIteration:
            if self._has_ended or not self._transcript.has_result:
                raise
            self._has_ended = True
            return self._transcript.result

    @property
    def raw(self) -> Raw:
        """The outcome object as the host sent it, as `splitctl switch --json` prints it; empty before the end."""
        reader = self._transcript.reader
        return reader.raw if isinstance(reader, SwitchReader) else {}


class Client:
    """Speaks with a hosted session, by its control socket or over HTTP.

    Each request has a connection of its own, and finds whoever serves the session by then.

    Lifetime:
        Until `close`, which ends what is under way; also a context manager. Neither ends the session.

    Thread:
        Any, several at once.
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
        self._under_way: WeakSet[Work[Any, Any]] = WeakSet()
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The session's name, or the URL."""
        return self._target.name

    @property
    def n_restarts(self) -> int:
        """How often another process served than before."""
        return self._target.n_restarts

    def status(self) -> Status:
        """Ask how the session is.

        Raises:
            NoSuchSession, ServerUnreachable: nobody serves it.
            HostGone: its host hangs, or ended meanwhile.
        """
        return self._ask(StatusRequest(), Status.read, "the status", self._target.timeout_s)

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
    ) -> Generation:
        """Generate after a prompt.

        Args:
            prompt: a text, or tokens: int32[n], n at least 1.
            n: most tokens; -1: until the model ends or the context is full.
            sampler: how tokens are drawn, a spec or its fields by name; None: llama.cpp's defaults.
            stop: texts that end the answer, and are not part of it.
            grammar: a grammar in GBNF, with a rule named root, that the answer follows; empty: none.
            add_special: put the model's first token before a text.
            parse_special: let names of special tokens in a text be those tokens.
            wait_s: longest time for the whole answer, seconds; None: any.

        Raises:
            ConfigInvalid: an argument cannot be used.
            Busy: too many requests wait.
            Parked: the session lies on disk.
            NoSuchSession, ServerUnreachable: nobody serves it.
        """
        request = asks.generation(
            prompt,
            n=n,
            sampler=sampler,
            stop=stop,
            grammar=grammar,
            add_special=add_special,
            parse_special=parse_special,
        )
        return self._begun(Generation(self._target, request, AnswerReader(self.name), "the answer", wait_s))

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
    ) -> Generation:
        """Answer a chat, whose prompt the model's own template makes.

        Args:
            messages: each with role and content, and what else the template knows.
            n: most tokens; -1: until the model ends or the context is full.
            sampler: how tokens are drawn, a spec or its fields by name; None: llama.cpp's defaults.
            stop: texts that end the answer, and are not part of it.
            grammar: a grammar in GBNF, with a rule named root, that the answer follows; empty: none.
            template: more variables of the template, such as ``{"enable_thinking": False}``.
            continues: the answer goes on with the last message.
            wait_s: longest time for the whole answer, seconds; None: any.

        Raises:
            As `generate`.
        """
        request = asks.chat(
            messages, n=n, sampler=sampler, stop=stop, grammar=grammar, template=template, continues=continues
        )
        return self._begun(Generation(self._target, request, AnswerReader(self.name), "the answer", wait_s))

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
    ) -> Switch:
        """Move the session: ``switch("tensor").result()``, or ``switch(mode="layer", n_ctx=8192)``.

        A refusal and a fallback are outcomes, not errors.

        Args:
            target: a mode, or a whole placement.
            proof: how the restored state is proved: bytes, positions or off.
            convert: whether the state may be converted.
            force: go on even if a trial failed, or memory seems too small.
            via: where the target is built: auto, beside or in-place.
            timeout_s: longest wait for the token boundary, seconds; None: as long as it takes.
            wait_s: longest time that this program waits, seconds; the switch goes on then. None: any.
            changes: fields of the placement; what is not named stays.

        Raises:
            ConfigInvalid: an argument cannot be used.
            Busy: another switch, a restore or a recovery is under way.
            Parked: the session lies on disk.
            NoSuchSession, ServerUnreachable: nobody serves it.
        """
        request = asks.switch(target, changes, proof=proof, convert=convert, force=force, via=via, timeout_s=timeout_s)
        return self._begun(Switch(self._target, request, SwitchReader(), "the switch", wait_s))

    def check(
        self,
        target: SplitMode | str | Placement | None = None,
        *,
        convert: bool = True,
        force: bool = False,
        via: Route | str = Route.AUTO,
        wait_s: float | None = None,
        **changes: Unpack[PlacementFields],
    ) -> SwitchCheck:
        """Ask what a switch would do; nothing changes. Arguments and errors are those of `switch`."""
        request = asks.check(target, changes, convert=convert, force=force, via=via)
        return self._ask(request, SwitchCheck.read, "the check", wait_s)

    def save(self, path: str | Path, *, wait_s: float | None = None) -> Saved:
        """Write the whole session to a file, at a token boundary.

        Args:
            path: the file; over HTTP a name in the server's ``--slot-save-path``.
            wait_s: longest time that this program waits, seconds; the save goes on then. None: any.

        Raises:
            RequestFailed: it could not be written; Busy and Parked are such.
            NoSuchSession, ServerUnreachable: nobody serves the session.
        """
        request = asks.save(path, is_web=self._target.url is not None)
        return self._ask(request, Saved.read, "the save", wait_s)

    def restore(self, path: str | Path, *, wait_s: float | None = None) -> Restored:
        """Replace all that the session holds with a file; a parked session serves again. As `save`.

        Raises:
            Busy: streams, a switch or a recovery are under way.
            RequestFailed: the file cannot be used; the session is as it was.
        """
        request = asks.restore(path, is_web=self._target.url is not None)
        return self._ask(request, Restored.read, "the restore", wait_s)

    def policy(self, policy: str) -> PolicyStatus:
        """Let the session switch by itself, auto, or no more, off; it was served with ``--policy auto``."""
        return self._ask(PolicyRequest(policy), PolicyStatus.read, "the policy", self._target.timeout_s)

    def stop(self, *, force: bool = False, wait_s: float | None = None) -> Stopped:
        """Save the session and end its host; not over HTTP.

        Args:
            force: end it even if it cannot be saved.
            wait_s: longest time that this program waits, seconds; None: any.

        Raises:
            Refused: it cannot be saved, and goes on.
        """
        stopped = self._ask(StopRequest(force=force), Stopped.read, "the end of the host", wait_s)
        self._target.forget()
        return stopped

    def events(self, *, wait_s: float | None = None) -> Work[SessionEvent, None]:
        """Watch what happens to the session from now on; it ends with the session.

        Args:
            wait_s: longest time to watch, seconds; None: any.
        """
        return self._begun(Work(self._target, EventsRequest(), EventsReader(), "the events", wait_s))

    def close(self) -> None:
        """End what is under way, and ask no more; the session goes on."""
        self._target.is_closed = True
        with self._lock:
            left = list(self._under_way)
        for work in left:
            work.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: ControlRequest, read: Callable[[Raw], R], what: str, wait_s: float | None) -> R:
        return self._begun(Work[None, R](self._target, request, Plain(read), what, wait_s)).result()

    def _begun(self, work: W) -> W:
        with self._lock:
            self._under_way.add(work)
        if self._target.is_closed:
            # It came between.
            work.close()
        return work


def _opened(target: Target, request: ControlRequest, patience: Patience) -> AnyCall:
    """Ask whoever serves; a host that was there before may take a while to come back."""
    until = time.monotonic() + target.may_be_away_s
    while True:
        try:
            call = target.call(request)
        except NOBODY:
            if time.monotonic() >= until:
                raise
            patience.turn_s()
            time.sleep(LOOK_S)
        else:
            try:
                target.tell()
            except BaseException:  # of the program's own callback
                call.close()
                raise
            return call


def _prove_alive(target: Target) -> None:
    """Ask a host that is silent for something that needs no work; raises HostGone if it does not answer."""
    try:
        Work[None, Status](target, StatusRequest(), Plain(Status.read), "the status", target.timeout_s).result()
    except RequestFailed:
        # It refuses, so it lives.
        return
    except SplitctlError as error:
        raise HostGone(target.name, f"was silent for {target.silence_s:g} s") from error


def connect(
    name: str | None = None,
    *,
    url: str | None = None,
    api_key: str | None = None,
    timeout_s: float = 10.0,
    reconnect_s: float = 10.0,
    on_restart: Callable[[Restarted], None] | None = None,
) -> Client:
    """Reach a session that `splitctl serve` holds.

    Args:
        name: the session's; None is the only one that this user has.
        url: of its HTTP server, in place of a name.
        api_key: of that server.
        timeout_s: longest wait for a host to take a request, and for answers that need no work, seconds.
        reconnect_s: how long a host that was reached before may be away, seconds; 0: not at all.
        on_restart: called when another process serves than before, by the thread that found it.

    Raises:
        ConfigInvalid: an argument cannot be used.
        NoSuchSession, ServerUnreachable: nobody serves it.
        HostGone: its host hangs.
        HostIncompatible: what answers there is no splitctl, or of a release that this one does not read.
    """
    made = Client(name, url=url, api_key=api_key, timeout_s=timeout_s, reconnect_s=reconnect_s, on_restart=on_restart)
    made.status()
    return made
