"""Bad requests: random bytes, broken HTTP, sound HTTP with broken JSON, and sound JSON that says what it must not.

Every request is a function of a seed and a number, so that a finding can be sent again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

#: Requests that are taken, on every route that reads a body; a broken one has a field spoilt, left out or added.
SOUND: Mapping[str, Mapping[str, Any]] = {
    "/v1/completions": {
        "prompt": "a",
        "max_tokens": 1,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "seed": 1,
        "stop": ["x"],
        "stream": False,
        "stream_options": None,
        "repeat_penalty": 1.1,
        "repeat_last_n": 8,
        "n": 1,
        "logprobs": None,
        "model": "m",
    },
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "temperature": 0.5,
        "stream": False,
        "tools": [],
        "response_format": {"type": "text"},
        "presence_penalty": 0,
        "logit_bias": {},
    },
    "/split-mode": {
        "to": "sideways",
        "changes": {},
        "proof": "bytes",
        "convert": True,
        "force": False,
        "timeout_s": 1.0,
        "dry_run": False,
    },
    "/session/save": {"filename": "a"},
    "/session/restore": {"filename": "a"},
}

_PATHS = (*SOUND, "/", "/health", "/v1/models", "/props", "/slots", "/session", "/metrics", "/split-mode/cancel", "/x")
_METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT", "FOO", "get", "G" * 300)
_LONG = 100_000

_VALUES: tuple[Callable[[random.Random], Any], ...] = (
    lambda _: None,
    lambda _: True,
    lambda _: -1,
    lambda _: 1.5,
    lambda _: 1e308,
    lambda _: float("nan"),
    lambda _: float("-inf"),
    lambda _: 2**31,
    lambda _: -(2**63) - 1,
    lambda _: 10**300,
    lambda _: "",
    lambda _: "\ud800",
    lambda _: "\0\r\n",
    lambda r: "x" * r.choice((1, 100, 5000, _LONG)),
    lambda r: r.choice(("tensor", "none", "../../etc/passwd", "%s%n", "{{7*7}}", "\u202e", "true", "1")),
    lambda _: [],
    lambda _: {},
    lambda _: [[]],
    lambda _: [None],
    lambda r: [r.randint(-5, 300) for _ in range(r.choice((1, 10, 2000)))],
    lambda _: [{"role": "user", "content": "x"}] * 300,
    lambda _: [{"role": "user"}],
    lambda _: [{"role": 5, "content": {}}],
    lambda _: [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
    lambda _: {"mode": "tensor", "devices": ["x"] * 200},
    lambda _: {"n_ctx": -1},
    lambda _: {"type": "json_object"},
    lambda _: {"a": {"b": {"c": [1, 2, {"d": None}]}}},
)


@dataclass(frozen=True, slots=True)
class Sent:
    """A request.

    Args:
        raw: its bytes.
        is_whole: an answer must come; otherwise the client goes away in its middle.
        is_head: an answer to it has no body.
        kind: what is wrong with it, for a person.
    """

    raw: bytes
    is_whole: bool
    is_head: bool
    kind: str


def request(seed: int, number: int) -> Sent:
    """Make a request."""
    dice = random.Random(seed << 32 | number)
    kind = dice.choices((_noise, _broken_http, _odd_http, _broken_json, _spoilt, _cut), weights=(1, 2, 2, 2, 6, 1))[0]
    return kind(dice)


def _noise(dice: random.Random) -> Sent:
    """Random bytes, ended as a head is, so that they are judged at once."""
    raw = dice.randbytes(dice.choice((1, 10, 100, 1000, 50_000)))
    return Sent(raw + b"\r\n\r\n", is_whole=True, is_head=False, kind="noise")


def _broken_http(dice: random.Random) -> Sent:
    """Requests that break a rule of HTTP."""
    head = dice.choice(
        (
            b"GET\r\n",
            b"GET /\r\n",
            b"GET / HTTP/1.1\r\n",
            b"GET / FTP/1.1\r\nHost: localhost\r\n",
            b"GET / HTTP/1.1\r\nHost localhost\r\n",
            b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: b\r\n",
            b"GET / HTTP/1.1\r\nHost: localhost\r\n folded: x\r\n\0: y\r\n",
            b"GET / HTTP/1.1\r\nHost: localhost\r\nA: \xff\x00\r\n",
            b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n",
            b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1e3\r\n",
            b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n",
            b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked\r\n",
            b"GET /" + b"a" * _LONG + b" HTTP/1.1\r\nHost: localhost\r\n",
            b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 20_000,
            b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"b" * _LONG + b"\r\n",
            b"GET http://[::1 HTTP/1.1\r\nHost: [::1\r\nConnection: close\r\n",
            b"GET \xe2\x82\xac HTTP/1.1\r\nHost: localhost\r\n",
        )
    )
    return Sent(head + b"\r\n", is_whole=True, is_head=False, kind="broken HTTP")


def _odd_http(dice: random.Random) -> Sent:
    """Sound HTTP for what is not there, or not so."""
    method, path = dice.choice(_METHODS), dice.choice(_PATHS)
    path += dice.choice(("", "/", "?a=b", "/..", "%00", "%2e%2e/", "//x", "/" + "y" * 2000, "#f"))
    host = dice.choice(("localhost", "127.0.0.1", "evil.example", "[::1]", "[::1", "", "a b", "localhost:x"))
    more = dice.choice(
        (
            "",
            "Origin: http://evil.example\r\n",
            "Origin: null\r\n",
            "Sec-Fetch-Site: cross-site\r\n",
            "Authorization: Bearer \xff\r\n",
            "Upgrade: websocket\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n",
            "Expect: 100-continue\r\nContent-Length: 0\r\n",
            "Range: bytes=0-1\r\nAccept-Encoding: gzip\r\nCookie: a=b\r\n",
        )
    )
    raw = f"{method} {path} HTTP/{dice.choice(('1.1', '1.0'))}\r\nHost: {host}\r\n{more}Connection: close\r\n\r\n"
    # Only these are known to be no request for a stream of events that never ends.
    return Sent(raw.encode("latin-1"), is_whole=True, is_head=method == "HEAD", kind="odd HTTP")


def _broken_json(dice: random.Random) -> Sent:
    """A body that is no JSON object."""
    path = dice.choice(tuple(SOUND))
    sound = json.dumps(SOUND[path]).encode()
    body = dice.choice(
        (
            b"",
            b"null",
            b"[]",
            b'"x"',
            b"nothing",
            b"\xff\xfe{\0}\0",
            b"[" * dice.choice((10, 2000, _LONG)),
            b'{"a":' * 5000,
            sound[: dice.randrange(len(sound))],
            sound + b"}",
            sound.replace(b":", b"", 1),
            dice.randbytes(dice.choice((1, 100, 10_000))),
            b'{"prompt": "a", "temperature": ' + b"9" * 10_000 + b"}",
        )
    )
    return _post(dice, path, body, "broken JSON")


def _spoilt(dice: random.Random) -> Sent:
    """A body with a field or two that it must not have so."""
    path = dice.choice(tuple(SOUND))
    body: dict[str, Any] = dict(SOUND[path])
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        name = dice.choice((*body, "zzz", "kind", "n_predict", "grammar", "mirostat", "x" * 300))
        if dice.random() < 0.1:
            body.pop(name, None)
        else:
            body[name] = dice.choice(_VALUES)(dice)
    return _post(dice, path, json.dumps(body).encode(), f"spoilt {path}")


def _cut(dice: random.Random) -> Sent:
    """The beginning of a request; then the client is gone."""
    whole = dice.choice((_odd_http, _broken_json, _spoilt))(dice).raw
    return Sent(whole[: dice.randrange(len(whole))], is_whole=False, is_head=False, kind="cut")


def _post(dice: random.Random, path: str, body: bytes, kind: str) -> Sent:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: {dice.choice(_TYPES)}\r\n"
    if dice.random() < 0.8:
        raw = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        return Sent(raw, is_whole=True, is_head=False, kind=kind)
    size = dice.choice((1, 7, 4096)) if len(body) < 4096 else 4096
    chunks = [body[at : at + size] for at in range(0, len(body), size)]
    parts = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in chunks)
    end = dice.choice((b"0\r\n\r\n", b"0\r\n\r\n", b"xyz\r\n"))
    raw = f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + parts + end
    return Sent(raw, is_whole=True, is_head=False, kind=kind)


_TYPES = (
    "application/json",
    "text/plain",
    "application/x-www-form-urlencoded",
    "\t",
    "application/json; charset=utf-16",
)
