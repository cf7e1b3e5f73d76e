"""Hosts with HTTP, for tests: a port of their own, and requests without a client library."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ctl.houses import GUARD_S, Host, House, served


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back.

    Args:
        status: HTTP status.
        headers: names in lower case.
        raw: the body.
    """

    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> Any:
        """The body as JSON."""
        return json.loads(self.raw)

    @property
    def error(self) -> dict[str, Any]:
        """The error of a refused request, held to OpenAI's shape."""
        assert self.status >= 400, (self.status, self.raw)
        error = self.body["error"]
        assert set(error) - {"n_prompt_tokens", "n_ctx"} == {"message", "type", "param", "code"}
        assert error["message"]
        return dict(error)


@dataclass(frozen=True, slots=True)
class Web:
    """A host that listens.

    Args:
        host: the host.
        port: its port on this machine.
        key: sent with every request, unless empty.
    """

    host: Host
    port: int
    key: str = ""

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> http.client.HTTPConnection:
        """Open a connection."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=GUARD_S)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Send one request; a body that is no bytes is sent as JSON."""
        sent = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return asked(self.port, method, path, body, **{**sent, **headers})

    def get(self, path: str, **headers: str) -> Answer:
        """Ask for something."""
        return self.ask("GET", path, **headers)

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        """Send something."""
        return self.ask("POST", path, body, **headers)


@contextmanager
def web(home: House, *arguments: str | Path, key: str = "", name: str = "default", **env: str) -> Iterator[Web]:
    """Serve on a free port until the block ends."""
    port = free_port()
    keys = ("--api-key", key) if key else ()
    with served(home, *arguments, "--port", str(port), *keys, name=name, **env) as host:
        yield Web(host, port, key)


def asked(port: int, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    """Send one request to a port of this machine; a body that is no bytes is sent as JSON."""
    raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=GUARD_S)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, raw, {"Content-Type": "application/json", **named})
        response = connection.getresponse()
        got = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, got, response.read())
    finally:
        connection.close()


def free_port() -> int:
    """Find a port that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def events(raw: bytes) -> list[Any]:
    """Take a stream of server-sent events apart; ``[DONE]`` stays a text."""
    datas = [line[6:] for line in raw.decode().split("\n") if line.startswith("data: ")]
    return [one if one == "[DONE]" else json.loads(one) for one in datas]
