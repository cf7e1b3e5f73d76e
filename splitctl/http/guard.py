"""Access control: keys, host names and origins, checked before anything else looks at a request.

Laws:
    1. A key is compared in constant time, and is in no log and no answer.
    2. A request that changes something must come from a program or from this server's own page: other pages are
       refused, whether a key is set or not.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from splitctl.errors import SplitctlError
from splitctl.http.errors import ApiError, api_error, fault_of_ours
from splitctl.http.intake import MAX_HEAD_BYTES, head_too_long

#: What anybody who reaches the port may see: whether the server is up, and a page that asks for the key itself.
OPEN_PATHS = frozenset({"/", "/health", "/v1/health", "/favicon.ico"})

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class Guard:
    """The outermost part of the app.

    Thread: the loop's.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Sequence[str],
        hosts: Sequence[str],
        origins: Sequence[str],
        is_loopback: bool,
        on_refused: Callable[[int], None],
        log: Callable[[str], None],
    ) -> None:
        """Protect an app, by the keys and origins of an `HttpConfig`.

        `hosts` are names that this server is reached by, beside addresses of this host; `on_refused` is called with the
        status of every request that does not get its answer from the app; `log` takes lines for the log.
        """
        self._app = app
        self._keys = [hashlib.sha256(key.encode()).digest() for key in api_keys]
        self._hosts = {host.lower() for host in hosts}
        self._origins = set(origins)
        self._is_loopback = is_loopback
        self._on_refused = on_refused
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            self._judge(scope)
            await self._app(scope, receive, watched)
        except ApiError as error:
            failure = error
        except SplitctlError as error:
            failure = api_error(error)
        except (ClientDisconnect, ConnectionError, TimeoutError):
            # It hung up, or does not read: nobody is left to answer.
            return
        except Exception as error:  # noqa: BLE001 - the last stand: a fault of ours must not end the host
            self._log(f"http: {scope['method']} {scope['path']!r} failed: {type(error).__name__}: {error}")
            failure = fault_of_ours()
        else:
            return
        self._on_refused(failure.status)
        if not started:
            await failure.response()(scope, receive, send)

    def _judge(self, scope: Scope) -> None:
        # h11 lets a longer head pass if it came in one piece.
        n_head = len(scope["raw_path"]) + len(scope["query_string"])
        if n_head + sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEAD_BYTES:
            raise head_too_long()
        headers = Headers(scope=scope)
        self._judge_host(headers)
        if scope["method"] not in _SAFE_METHODS or scope["path"] not in OPEN_PATHS:
            self._judge_origin(headers)
        if scope["method"] == "OPTIONS" or (scope["path"] in OPEN_PATHS and scope["method"] in _SAFE_METHODS):
            return
        self._judge_key(headers)

    def _judge_host(self, headers: Headers) -> None:
        """Refuse foreign host names: without a key, a page could reach this port under its own name."""
        host = headers.get("host")
        # Browsers always name a host; programs that speak HTTP/1.0 may not.
        if self._keys or not self._is_loopback or host is None:
            return
        name = _host_name(host)
        if name in self._hosts or _is_address(name):
            return
        raise ApiError(403, f"this server is not called {name[:60]!r}; use its address, or start it with --api-key")

    def _judge_origin(self, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin in self._origins or "*" in self._origins:
            return
        # Browsers send the second where they do not send the first: for an image or a script of another page.
        is_elsewhere = headers.get("sec-fetch-site", "none") not in {"none", "same-origin"}
        if is_elsewhere or (origin is not None and origin.partition("://")[2] != headers.get("host")):
            raise ApiError(403, "pages of other origins may not use this server; allow one with --cors ORIGIN")

    def _judge_key(self, headers: Headers) -> None:
        if not self._keys:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = headers.get("x-api-key", "")
        digest = hashlib.sha256(given.strip().encode("utf-8", "surrogateescape")).digest()
        # Every key is compared, so that the time does not show which one it was.
        fits = [hmac.compare_digest(digest, key) for key in self._keys]
        if not any(fits):
            raise ApiError(401, "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'")


def _host_name(host: str) -> str:
    """Take the port off a Host header, and the brackets off an IPv6 address."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.rpartition(":")[0].lower() if host.count(":") == 1 else host.lower()


def _is_address(name: str) -> bool:
    """Whether a name is an address: no other page can have one resolved to this port."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost"
    return True
