"""The way to a session over HTTP: requests of the control socket as requests of the server, and answers back.

What comes out is what `control.client.Call` gives, so that everything above knows one language. A request is made in
HTTP/1.0: its answer ends with its connection, and each has one of its own.
"""

from __future__ import annotations

import io
import json
import select
import socket
import ssl
from contextlib import closing, suppress
from dataclasses import dataclass
from http.client import HTTPException, parse_headers
from typing import Any, Self
from urllib.parse import urlsplit

from splitctl.client.errors import UNREADABLE, HostIncompatible, ServerUnreachable, unreadable
from splitctl.client.web_messages import IDENTITY_HEADER, Completion, Events, Message, Translator, asked, refusal
from splitctl.control.client import MAX_ANSWER_BYTES, ControlAnswer, ControlEvent, HostGone, wait
from splitctl.control.requests import ControlRequest, SwitchRequest
from splitctl.errors import ConfigInvalid, SplitctlError

_CHUNK_BYTES = 1 << 16
_MAX_HEAD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class WebAddress:
    """Where a server is.

    Attributes:
        url: as it is shown.
        host: name or address.
        port: its port.
        prefix: of every path.
        is_secure: speak TLS.
        api_key: sent with every request; None: none.
    """

    url: str
    host: str
    port: int
    prefix: str
    is_secure: bool
    api_key: str | None


def web_address(url: str, api_key: str | None) -> WebAddress:
    """Read a URL; one that ends with /v1, as OpenAI's clients want it, is the same server.

    Raises:
        ConfigInvalid: it is none, or the key cannot be sent.
    """
    wanted = "http://HOST:PORT or https://HOST:PORT"
    try:
        parts = urlsplit(url)
        port = parts.port
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigInvalid("url", url, wanted) from error
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment or "@" in url:
        raise ConfigInvalid("url", url, wanted)
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigInvalid("url", url, f"{wanted}, in ASCII")
    if api_key is not None and not (str(api_key) == api_key and api_key.isascii() and api_key.isprintable()):
        raise ConfigInvalid("api_key", "a key that no header can hold", "printable ASCII")
    prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    is_secure = parts.scheme == "https"
    number = port if port is not None else 443 if is_secure else 80
    shown = f"{parts.scheme}://{parts.netloc}{prefix}"
    return WebAddress(shown, parts.hostname, number, prefix, is_secure, api_key)


class Exchange:
    """One request and its answer.

    Attributes:
        status: of the answer; 0 while its head is not there.
        headers: of the answer, names in lower case.
        is_over: the server has closed.

    Lifetime:
        Until `close`.

    Thread:
        One; `hang_up` may be called from any.
    """

    def __init__(self, address: WebAddress, method: str, path: str, body: Any, connect_s: float) -> None:
        """Connect and ask.

        Raises:
            ServerUnreachable: nobody answers there.
            HostGone: it takes nothing.
        """
        self._address = address
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_over = False
        self._head = bytearray()
        self._n_body = 0
        raw = b"" if body is None else json.dumps(body).encode()
        host = f"[{address.host}]" if ":" in address.host else address.host
        lines = [f"{method} {address.prefix}{path} HTTP/1.0", f"Host: {host}:{address.port}"]
        lines += [f"Authorization: Bearer {address.api_key}"] if address.api_key else []
        lines += ["Content-Type: application/json", f"Content-Length: {len(raw)}"] if body is not None else []
        try:
            self._socket = socket.create_connection((address.host, address.port), connect_s)
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ServerUnreachable(address.url, why) from error
        try:
            if address.is_secure:
                context = ssl.create_default_context()
                self._socket = context.wrap_socket(self._socket, server_hostname=address.host)
            # What it said before it hung up stands in our queue.
            with suppress(BrokenPipeError, ConnectionResetError):
                self._socket.sendall("\r\n".join([*lines, "", ""]).encode("ascii") + raw)
            self._socket.settimeout(0.0)
        except TimeoutError as error:
            self._socket.close()
            raise HostGone(address.url, f"took nothing for {connect_s:g} s") from error
        except OSError as error:
            self._socket.close()
            raise ServerUnreachable(address.url, str(error)) from error
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """Give the descriptor that becomes readable when there is something to `read`."""
        return self._socket.fileno()

    def read(self) -> bytes:
        """Read what there is of the body; it is empty before the head is whole, and at the end (`is_over`).

        Raises:
            HostGone: the server hung up in the middle.
            HostIncompatible: what answers is no such server.
        """
        chunk = bytearray()
        try:
            chunk += self._socket.recv(_CHUNK_BYTES)
            self.is_over = not chunk
            while isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
                chunk += self._socket.recv(_CHUNK_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError):
            pass
        except OSError:  # reset, or the way to it is gone
            self.is_over = True
        body = bytes(chunk) if self.status else self._read_head(chunk)
        self._n_body += len(body)
        if self.is_over:
            wanted = self.headers.get("content-length")
            if not self.status or (wanted is not None and wanted != str(self._n_body)):
                raise HostGone(self._address.url, "hung up")
        return body

    def hang_up(self) -> None:
        """End it: the next `read` finds the end."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of it."""
        self._socket.close()

    def _read_head(self, chunk: bytearray) -> bytes:
        """Collect the head; gives what follows it."""
        self._head += chunk
        head, end, rest = bytes(self._head).partition(b"\r\n\r\n")
        if not end:
            if len(head) > _MAX_HEAD_BYTES or not b"HTTP/1.".startswith(head[:7]):
                raise HostIncompatible(self._address.url, "answers in another language than HTTP")
            return b""
        first, _, lines = head.partition(b"\r\n")
        words = first.split(maxsplit=2)
        if not first.startswith(b"HTTP/1.") or len(words) < 2 or not words[1].isdigit() or len(words[1]) != 3:
            raise HostIncompatible(self._address.url, "answers in another language than HTTP")
        self.status = int(words[1])
        try:
            named = parse_headers(io.BytesIO(lines + b"\r\n\r\n"))
        except HTTPException as error:
            raise HostIncompatible(self._address.url, f"answers with a head that is none ({error})") from error
        self.headers = {name.lower(): value for name, value in named.items()}
        if "transfer-encoding" in self.headers:
            raise HostIncompatible(self._address.url, "answers a request of HTTP/1.0 in chunks")
        self._head.clear()
        return rest


class WebCall:
    """One request to a server, with the face of `control.client.Call`.

    Lifetime:
        Use as a context manager; leaving it hangs up.

    Thread:
        One; `cancel` and `hang_up` may be called from any.
    """

    def __init__(self, address: WebAddress, request: ControlRequest, *, connect_s: float) -> None:
        """Connect and ask.

        Raises:
            ConfigInvalid: the server has no way to ask for that.
            ServerUnreachable: nobody answers there.
            HostGone: it takes nothing.
        """
        self._address = address
        self._connect_s = connect_s
        self._is_switch = isinstance(request, SwitchRequest)
        self._is_cancelled = False
        self._failure: SplitctlError | None = None
        self._refusal = bytearray()
        method, path, body, make = asked(request)
        self._translator: Translator = make(address.url)
        self._watch: Exchange | None = None
        self._stages = Events(address.url)
        self._poll = select.epoll()
        try:
            if self._is_switch:
                # It listens before the switch begins, so that no stage is missed.
                self._watch = Exchange(address, "GET", "/split-mode/events", None, connect_s)
                self._poll.register(self._watch, select.EPOLLIN)
            self._main = Exchange(address, method, path, body, connect_s)
            self._poll.register(self._main, select.EPOLLIN)
        except BaseException:
            self._poll.close()
            if self._watch is not None:
                self._watch.close()
            raise

    @property
    def identity(self) -> str | None:
        """What names the process that answers; None while nothing has come, or from a release that does not say."""
        return self._main.headers.get(IDENTITY_HEADER)

    def fileno(self) -> int:
        """Give the descriptor that becomes readable when there is something to `read`."""
        return self._poll.fileno()

    def read(self) -> list[Message]:
        """Read what came; perhaps no whole message yet. After a ControlAnswer nothing more comes.

        Raises:
            RequestFailed: the server said so.
            HostGone: it hung up.
            HostIncompatible: what answers is no such server.
        """
        if self._failure is not None:
            raise self._failure
        messages: list[Message] = []
        try:
            self._read_stages(messages)
            self._read_main(messages)
        except UNREADABLE as error:
            told = unreadable(self._address.url, error)
            if not messages:
                raise told from error
            self._failure = told
        except SplitctlError as error:
            if not messages:
                raise
            # What came before it counts. It is raised next time: a server that said so has closed.
            self._failure = error
        return messages

    def cancel(self) -> None:
        """Ask the server to end a switch, or a generation, early."""
        self._is_cancelled = True
        if self._is_switch:
            with suppress(ServerUnreachable, HostGone, HostIncompatible):
                asking = Exchange(self._address, "POST", "/split-mode/cancel", {}, self._connect_s)
                with closing(asking):
                    while not asking.is_over and wait([asking.fileno()], self._connect_s):
                        asking.read()
        elif isinstance(self._translator, Completion):
            self._main.hang_up()

    def hang_up(self) -> None:
        """End the connection: the next `read` finds the end."""
        self._main.hang_up()

    def close(self) -> None:
        """Hang up."""
        self._poll.close()
        self._main.close()
        if self._watch is not None:
            self._watch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_stages(self, messages: list[Message]) -> None:
        watch = self._watch
        if watch is None:
            return
        try:
            chunk = watch.read()
            if watch.status == 200:
                messages += [one for one in self._stages.feed(chunk) if isinstance(one, ControlEvent)]
        except HostGone:
            watch.is_over = True
        if watch.is_over:
            # A server that lets nobody watch moves its session all the same.
            self._poll.unregister(watch)
            watch.close()
            self._watch = None

    def _read_main(self, messages: list[Message]) -> None:
        try:
            chunk = self._main.read()
        except HostGone:
            if self._is_cancelled and isinstance(self._translator, Completion):
                messages.append(self._translator.cancelled())
                return
            raise
        if self._main.status >= 300:
            self._refusal += chunk
            if len(self._refusal) > MAX_ANSWER_BYTES:
                raise HostGone(self._address.url, f"said {len(self._refusal)} bytes without an end and was left")
            if self._main.is_over:
                raise refusal(
                    self._main.status, self._main.headers.get("location", ""), bytes(self._refusal), self._address.url
                )
            return
        if not self._main.status:
            return
        # One by one: what comes before an error counts.
        messages.extend(self._translator.feed(chunk))
        if self._main.is_over and not any(isinstance(one, ControlAnswer) for one in messages):
            if self._is_cancelled and isinstance(self._translator, Completion):
                messages.append(self._translator.cancelled())
            else:
                messages += self._translator.end()
