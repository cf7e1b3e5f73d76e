"""The HTTP server within the supervisor's loop: its socket, its end, and clients that do not say what they want.

Laws:
    1. Signals are the command line's: the server takes none.
    2. A connection that brings no whole request in its time is closed, as is one too many.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from splitctl.errors import ConfigInvalid
from splitctl.host.control import Hosted
from splitctl.http.app import build_app
from splitctl.http.guard import Limits
from splitctl.http.watch import Watch

#: Bytes of a request's first line and headers.
_MAX_HEADERS = 32 << 10
#: From accepting a connection, or its last answer, to a whole head of a request [seconds].
_HEAD_S = 20.0
_KEEP_ALIVE_S = 15
#: For answers under way when the server ends [seconds].
_GRACE_S = 5
_BACKLOG = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """How a server listens.

    Attributes:
        host: address or name to listen on.
        port: its port; 0: any that is free.
        api_keys: any of them opens; none: no key is asked for.
        origins: pages elsewhere that may use it.
        folder: where files are saved and restored; None: nowhere.
        limits: what one client may take.
        n_connections: at once.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    folder: Path | None = None
    limits: Limits = field(default_factory=Limits)
    n_connections: int = 512


class HttpServer:
    """A server of one session.

    Thread: the loop's. Lifetime: from `listen` to `close`.
    """

    def __init__(self, host: Hosted, config: HttpConfig, *, tell: Callable[[str], None]) -> None:
        """Nothing is opened yet.

        Args:
            host: does the work.
            config: how to listen.
            tell: takes lines for the log.
        """
        self._host = host
        self._config = config
        self._tell = tell
        self._sockets: list[socket.socket] = []
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._watch = Watch(host)

    @property
    def url(self) -> str:
        """Where it listens."""
        address = self._sockets[0].getsockname()
        name = f"[{address[0]}]" if self._sockets[0].family == socket.AF_INET6 else address[0]
        return f"http://{name}:{address[1]}"

    def listen(self) -> None:
        """Take the port, before anything that takes long.

        Raises:
            ConfigInvalid: there is no such address, or it is taken.
        """
        config = self._config
        try:
            found = socket.getaddrinfo(
                config.host or None, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            family, kind, protocol, _, address = found[0]
            listening = socket.socket(family, kind, protocol)
            try:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listening.bind(address)
            except BaseException:
                listening.close()
                raise
        except (OSError, OverflowError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ConfigInvalid(
                "--host and --port", f"{config.host}:{config.port}", f"an address that is free here ({why})"
            ) from error
        listening.setblocking(False)  # noqa: FBT003 - the standard library's own form
        self._sockets = [listening]

    async def start(self) -> None:
        """Begin to answer."""
        config = self._config
        is_loopback = _is_loopback(self._sockets[0].getsockname()[0])
        app = build_app(
            self._host,
            watch=self._watch,
            tell=self._tell,
            api_keys=config.api_keys,
            host_names=(config.host, socket.gethostname()),
            origins=config.origins,
            is_loopback=is_loopback,
            folder=config.folder,
            limits=config.limits,
        )
        self._server = _Server(
            uvicorn.Config(
                app,
                http=_patient(config.n_connections),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                h11_max_incomplete_event_size=_MAX_HEADERS,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_GRACE_S,
                backlog=_BACKLOG,
            )
        )
        if not is_loopback and not config.api_keys:
            self._tell("warning: other machines can reach this server, and no key is asked for; see --api-key")
        self._watch.start()
        self._serving = asyncio.create_task(self._server.serve(self._sockets))

    async def close(self) -> None:
        """Take no more requests, let answers under way end, and close."""
        if self._server is not None:
            self._server.should_exit = True
        if self._serving is not None:
            await asyncio.wait({self._serving})
            self._serving = None
        await self._watch.stop()
        for listening in self._sockets:
            listening.close()
        self._sockets = []


class _Server(uvicorn.Server):
    """A server that leaves signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield


def _patient(n_connections: int) -> type[H11Protocol]:
    """Make the class of connections: each brings a whole request in its time, and there are not more than so many."""

    class Patient(H11Protocol):
        """A connection."""

        _waiting: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """Take a connection, unless it is one too many."""
            super().connection_made(transport)
            if len(self.connections) > n_connections:
                transport.abort()
                return
            self._wait()

        def data_received(self, data: bytes) -> None:
            """Take bytes; time runs until they are a whole head."""
            super().data_received(data)
            if self._is_answering:
                self._wait_no_more()
            elif self._waiting is None:
                self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            """Let go."""
            self._wait_no_more()
            super().connection_lost(exc)

        @property
        def _is_answering(self) -> bool:
            cycle: Any = self.cycle  # None before the first request, whatever its type says
            return cycle is not None and not cycle.response_complete

        def _wait(self) -> None:
            self._waiting = self.loop.call_later(_HEAD_S, self._give_up)

        def _wait_no_more(self) -> None:
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None

        def _give_up(self) -> None:
            self._waiting = None
            if not self._is_answering:
                self.transport.abort()

    return Patient


def _is_loopback(address: Any) -> bool:
    try:
        return ipaddress.ip_address(str(address).partition("%")[0]).is_loopback
    except ValueError:
        return False


__all__ = ["HttpConfig", "HttpServer"]
