"""Where a client's session is: by name at its control socket, or at the URL of its server; and who serves it now."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from splitctl.client.asks import limit
from splitctl.client.errors import ClientClosed, ServerUnreachable
from splitctl.client.values import Restarted
from splitctl.client.web import WebAddress, WebCall, web_address
from splitctl.control.client import Call, ControlAnswer, ControlEvent
from splitctl.control.requests import ControlRequest, StatusRequest
from splitctl.control.sockets import NoSuchSession, checked_name, find, runtime_folder
from splitctl.errors import ConfigInvalid, DeadlineExceeded
from splitctl.placement import seconds

#: What is raised while nobody serves.
NOBODY = (NoSuchSession, ServerUnreachable)

Identity = tuple[object, ...]

#: A host that was silent for so long is asked whether it lives [seconds].
_SILENCE_S = 30.0
#: Between two looks for a host that comes back [seconds].
LOOK_S = 0.05


class AnyCall(Protocol):
    """One request under way, by whichever way."""

    def fileno(self) -> int:
        """Give the descriptor that becomes readable when there is something to `read`."""

    def read(self) -> list[ControlEvent | ControlAnswer]:
        """Read what came."""

    def cancel(self) -> None:
        """Ask the host to end the work early."""

    def hang_up(self) -> None:
        """End the connection, from any thread: the next `read` finds the end."""

    def close(self) -> None:
        """Hang up and let go of it."""


class Patience:
    """How long one request is waited for."""

    def __init__(self, what: str, wait_s: float | None, silence_s: float | None) -> None:
        """Wait for `what`, a noun, up to `wait_s` seconds in all, None: any time.

        A host that is silent for `silence_s` seconds is to be asked whether it lives; None: that is what is asked.
        """
        self._what = what
        self._wait_s = seconds("wait_s", wait_s)
        self._silence_s = silence_s
        self._until: float | None = None

    def turn_s(self) -> float | None:
        """Give the longest wait for something to come now, seconds; raises DeadlineExceeded where none is left.

        The time begins with the first turn.
        """
        if self._wait_s is None:
            return self._silence_s
        self._until = self._until or time.monotonic() + self._wait_s
        left = self._until - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(self._what, self._wait_s)
        return left if self._silence_s is None else min(left, self._silence_s)

    @property
    def wants_proof(self) -> bool:
        """Whether a turn in which nothing came was silence, and not the end of all patience."""
        return self._silence_s is not None and (self._until is None or time.monotonic() < self._until)


class Target:
    """A session that a client speaks with.

    Attributes:
        reconnect_s: how long a host that was reached before may be away, seconds.
        timeout_s: longest wait for a host to take a request, and for answers that need no work, seconds.
        silence_s: a host that says nothing for so long is asked whether it lives, seconds.
        n_restarts: how often another process was found than before.
        is_closed: nothing more is asked.

    Thread: any.
    """

    def __init__(
        self,
        name: str | None,
        address: WebAddress | None,
        *,
        timeout_s: float,
        reconnect_s: float,
        on_restart: Callable[[Restarted], None] | None,
    ) -> None:
        """Take a session by name, None for the only one, or a server by its address.

        `on_restart` is called by `tell`, once for each other process that was found.
        """
        self.timeout_s = timeout_s
        self.reconnect_s = reconnect_s
        self.silence_s = _SILENCE_S
        self.n_restarts = 0
        self.is_closed = False
        self._session = name
        self._address = address
        self._on_restart = on_restart
        self._news: deque[Restarted] = deque()
        self._identity: Identity | None = None
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The session's name, or the URL."""
        return self._address.url if self._address is not None else self._session or "(the only one)"

    @property
    def url(self) -> str | None:
        """Where the server is; None at the control socket."""
        return None if self._address is None else self._address.url

    @property
    def may_be_away_s(self) -> float:
        """How long to look for a host that is not there, seconds: one that was never reached is not looked for."""
        return 0.0 if self._identity is None else self.reconnect_s

    def call(self, request: ControlRequest) -> AnyCall:
        """Ask for something.

        Raises:
            NoSuchSession, ServerUnreachable: nobody serves.
            HostGone: it hangs.
            ClientClosed: nothing more is asked.
        """
        if self.is_closed:
            raise ClientClosed(self.name)
        if self._address is not None:
            return WebCall(self._address, request, connect_s=self.timeout_s)
        # It is looked for each time: another process may serve the name by now.
        found = find(runtime_folder(os.environ), self._session)
        made = Call(found, request, connect_s=self.timeout_s)
        self._session = found.name
        self._met((made.host_pid, _made_at(found.path)))
        return made

    def patience(self, request: ControlRequest, what: str, wait_s: float | None) -> Patience:
        """Say how long a request for `what`, a noun, is waited for, `wait_s` seconds at most; raises ConfigInvalid."""
        return Patience(what, wait_s, None if isinstance(request, StatusRequest) else self.silence_s)

    def met(self, call: AnyCall) -> None:
        """Note who answers, when something has come."""
        if isinstance(call, WebCall) and call.identity is not None:
            self._met((call.identity,))

    def tell(self) -> None:
        """Tell the program of restarts that were found since the last time, in this thread."""
        while self._on_restart is not None and self._news:
            with suppress(IndexError):
                self._on_restart(self._news.popleft())

    def forget(self) -> None:
        """Expect nobody there any more."""
        self._identity = None

    def _met(self, identity: Identity) -> None:
        with self._lock:
            before, self._identity = self._identity, identity
            if before is not None and before != identity:
                self.n_restarts += 1
                self._news.append(Restarted(self.name, self.n_restarts))


def target_of(
    name: str | None,
    url: str | None,
    api_key: str | None,
    *,
    timeout_s: float,
    reconnect_s: float,
    on_restart: Callable[[Restarted], None] | None,
) -> Target:
    """Give the target of a name or of a URL; raises ConfigInvalid for both, or for what is neither."""
    if on_restart is not None and not callable(on_restart):
        raise ConfigInvalid("on_restart", on_restart, "None, or a function of a Restarted")
    times = {"timeout_s": limit("timeout_s", timeout_s), "reconnect_s": limit("reconnect_s", reconnect_s)}
    if url is None:
        if api_key is not None:
            raise ConfigInvalid("api_key", "given", "none without a url: a control socket is its user's alone")
        if name is not None and not isinstance(name, str):
            raise ConfigInvalid("session", name, "a session's name; an HTTP server is url=...")
        if name is not None and "://" in name:
            raise ConfigInvalid("session", name, f"a session's name; an HTTP server is url={name!r}")
        return Target(name if name is None else checked_name(name), None, **times, on_restart=on_restart)
    if name is not None:
        raise ConfigInvalid("session", name, "either a name or a url")
    return Target(None, web_address(url, api_key), **times, on_restart=on_restart)


def _made_at(path: Path) -> int:
    """Tell one socket from another of the same name; 0 where it is gone already."""
    try:
        return path.stat().st_ctime_ns
    except OSError:
        return 0
