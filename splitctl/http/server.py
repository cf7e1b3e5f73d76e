"""The HTTP server within the supervisor's loop: its socket, start and end.

Laws:
    1. Signals belong to the command line: the server takes none.
    2. A server that ends takes no more requests for text, and gives answers under way a while before it ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from splitctl.client.web_messages import IDENTITY_HEADER
from splitctl.errors import ConfigInvalid
from splitctl.http.app import HttpConfig, make_app
from splitctl.http.chat import Chat
from splitctl.http.connections import connection_class
from splitctl.http.intake import MAX_HEAD_BYTES
from splitctl.http.tokens import Service

#: Longest time from an answer to the next request on its connection [seconds].
_KEEP_ALIVE_S = 15
#: Time for answers under way when the server ends [seconds].
_GRACE_S = 5
_BACKLOG = 512


class HttpServer:
    """A server of one session.

    Thread: the loop's. Lifetime: from `listen` to `close`.
    """

    def __init__(self, host: Service, config: HttpConfig, *, log: Callable[[str], None]) -> None:
        """Nothing is opened yet; `host` does the work, and `log` takes lines for the log."""
        self._host = host
        self._config = config
        self._log = log
        self._sockets: list[socket.socket] = []
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._chat: Chat | None = None

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
                # Before this, another process may still take the port.
                listening.listen(_BACKLOG)
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
        app, self._chat = make_app(self._host, config, is_loopback=is_loopback, log=self._log)
        self._server = _Server(
            uvicorn.Config(
                app,
                http=connection_class(config.limits),
                ws="none",
                lifespan="off",
                log_config=None,
                # Clients get their errors as answers; a line for each would fill the log.
                log_level="critical",
                access_log=False,
                server_header=False,
                # A client can tell by it that the server was restarted.
                headers=[(IDENTITY_HEADER, secrets.token_hex(8))],
                proxy_headers=False,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_GRACE_S,
                backlog=_BACKLOG,
            )
        )
        if not is_loopback and not config.api_keys:
            self._log("warning: other machines can reach this server, and no key is asked for; see --api-key")
        if "*" in config.origins and not config.api_keys:
            self._log("warning: every web page can use this server, and no key is asked for; see --api-key")
        self._serving = asyncio.create_task(self._server.serve(self._sockets))

    async def drain(self) -> None:
        """Take no more requests for text, and wait for a while until those under way are answered."""
        if self._chat is not None:
            await self._chat.drain(self._config.drain_s)

    async def close(self) -> None:
        """Take no more requests, let answers under way end, and close."""
        if self._server is not None:
            self._server.should_exit = True
        if self._serving is not None:
            await asyncio.wait({self._serving})
            self._serving = None
        for listening in self._sockets:
            listening.close()
        self._sockets = []


class _Server(uvicorn.Server):
    """A server that leaves signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield


def _is_loopback(address: Any) -> bool:
    try:
        return ipaddress.ip_address(str(address).partition("%")[0]).is_loopback
    except ValueError:
        return False
