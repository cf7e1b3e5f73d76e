"""Who may come in, and with how much: keys, origins, sizes and times, before anything else looks at a request.

Laws:
    1. A key is compared in constant time, and stands in no log and no answer.
    2. A request that changes something comes from a program, or from this server's own page: other pages are turned
       away, whether a key is set or not.
    3. A body is never held beyond its bound, nor waited for beyond its time.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from splitctl.errors import SplitctlError
from splitctl.http.errors import ApiError, api_error

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: What anybody who reaches the port may see: whether it lives, and a page that asks for the key itself.
OPEN_PATHS = frozenset({"/", "/health", "/v1/health", "/favicon.ico"})

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may take.

    Attributes:
        body_bytes: of one request.
        pending_bytes: of bodies that are not whole yet, over all clients.
        body_s: until a body is whole, seconds.
        write_s: until a client has read what it was sent, seconds.
        n_queued: streams that may wait for a sequence.
    """

    body_bytes: int = 16 << 20
    pending_bytes: int = 64 << 20
    body_s: float = 30.0
    write_s: float = 60.0
    n_queued: int = 240


class Guard:
    """The outermost part of the app.

    Thread: the loop's.
    """

    def __init__(
        self,
        app: App,
        *,
        api_keys: Sequence[str],
        hosts: Sequence[str],
        origins: Sequence[str],
        is_loopback: bool,
        tell: Callable[[str], None],
    ) -> None:
        """Stand before an app.

        Args:
            app: what answers those who may come in.
            api_keys: any of them opens; none: no key is asked for.
            hosts: names that this server is reached by, beside addresses of this very machine.
            origins: pages elsewhere that may use it.
            is_loopback: whether it listens to this machine alone.
            tell: takes a line for the log.
        """
        self._app = app
        self._keys = [hashlib.sha256(key.encode()).digest() for key in api_keys]
        self._hosts = {host.lower() for host in hosts}
        self._origins = set(origins)
        self._is_loopback = is_loopback
        self._tell = tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: MutableMapping[str, Any]) -> None:
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
        except (ClientDisconnect, ConnectionError):
            return
        except Exception as error:  # noqa: BLE001 - the last stand: a fault of ours must not end the host
            self._tell(f"http: {scope['method']} {scope['path']!r} failed: {type(error).__name__}: {error}")
            failure = ApiError(500, "a fault of splitctl; its log says more, please report it", code="internal")
        else:
            return
        if not started:
            await failure.response()(scope, receive, send)

    def _judge(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        self._judge_host(headers)
        if scope["method"] not in _SAFE_METHODS or scope["path"] not in OPEN_PATHS:
            self._judge_origin(headers)
        if scope["method"] == "OPTIONS" or (scope["path"] in OPEN_PATHS and scope["method"] in _SAFE_METHODS):
            return
        self._judge_key(headers)

    def _judge_host(self, headers: Headers) -> None:
        """Without a key a page elsewhere could reach this port under a name of its own that points here."""
        name = _host_name(headers.get("host", ""))
        if self._keys or not self._is_loopback or name in self._hosts or _is_address(name):
            return
        raise ApiError(403, f"this server is not called {name[:60]!r}; use its address, or start it with --api-key")

    def _judge_origin(self, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is None or origin in self._origins:
            return
        if origin.partition("://")[2] != headers.get("host"):
            raise ApiError(403, "pages of other origins may not use this server; allow one with --cors ORIGIN")

    def _judge_key(self, headers: Headers) -> None:
        if not self._keys:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = headers.get("x-api-key", "")
        digest = hashlib.sha256(given.strip().encode("utf-8", "surrogateescape")).digest()
        # Every key is compared, so that the time says nothing about which one it was.
        fits = [hmac.compare_digest(digest, key) for key in self._keys]
        if not any(fits):
            raise ApiError(401, "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'")


class Intake:
    """Reads bodies within the limits."""

    def __init__(self, limits: Limits) -> None:
        """Hold nothing yet."""
        self.limits = limits
        self._n_pending = 0

    async def body(self, request: Request) -> bytes:
        """Read a request's body.

        Raises:
            ApiError: it is too long, or does not come.
        """
        most = self.limits.body_bytes
        said = request.headers.get("content-length", "")
        if said.isdigit() and int(said[:20]) > most:
            raise _too_long(most)
        raw = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_s):
                async for chunk in request.stream():
                    raw += chunk
                    self._n_pending += len(chunk)
                    if len(raw) > most:
                        raise _too_long(most)
                    if self._n_pending > self.limits.pending_bytes:
                        raise ApiError(429, "too many long requests at once; try again", code="busy")
        except TimeoutError as error:
            raise ApiError(408, f"the body did not come within {self.limits.body_s:g} s") from error
        finally:
            self._n_pending -= len(raw)
        return bytes(raw)


def _too_long(most: int) -> ApiError:
    return ApiError(413, f"the body is too long; {most} bytes at most", code="body_too_long")


def _host_name(host: str) -> str:
    """Take the port off a Host header, and the brackets off an IPv6 address."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.rpartition(":")[0].lower() if host.count(":") == 1 else host.lower()


def _is_address(name: str) -> bool:
    """Tell whether a name is an address: no other page can have one resolved to this port."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost"
    return True


__all__ = ["OPEN_PATHS", "App", "Guard", "Intake", "Limits", "Receive", "Scope", "Send"]
