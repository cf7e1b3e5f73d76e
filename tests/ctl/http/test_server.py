"""The HTTP server over a session that obeys the test: connections, streams step by step, ends, and who may come in."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import quote

import pytest

from splitctl.errors import Busy, Parked
from splitctl.host.events import SwitchStage
from splitctl.host.streams import Done, Stream, Why
from splitctl.http import HttpConfig, intake
from splitctl.http.intake import HttpLimits
from splitctl.ipc.jobs import Fault
from splitctl.outcome import Route, SwitchOptions
from tests.ctl.http_fake import WAIT_S, Site, rest, site
from tests.ctl.web import Answer, events

TEXT = "/v1/completions"
ASKS = {"prompt": "x", "max_tokens": 4}
STREAMS = {**ASKS, "stream": True}


@pytest.fixture(scope="module")
def shared() -> Iterator[Site]:
    """A server with the usual limits."""
    with site() as served:
        yield served


@pytest.fixture(autouse=True)
def as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave the shared session as it was."""
    yield
    if "shared" in request.fixturenames:
        served: Site = request.getfixturevalue("shared")
        served.session.error, served.session.state, served.session.more = None, "serving", {}
        served.session.refused = {"row": "no-row"}
        served.session.cancelled.clear()


def _limited(**limits: float) -> HttpConfig:
    return HttpConfig(port=0, limits=HttpLimits(**limits))  # type: ignore[arg-type]


def _request(body: object, *more: str, version: str = "1.1") -> bytes:
    raw = json.dumps(body).encode()
    head = (f"POST {TEXT} HTTP/{version}", "Host: localhost", f"Content-Length: {len(raw)}", *more, "", "")
    return "\r\n".join(head).encode() + raw


def _answer(raw: bytes) -> Answer:
    """Take the first answer of a connection apart."""
    head, _, body = raw.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return Answer(int(status.split(" ")[1]), headers, body)


def _feed(served: Site, stream: Stream, *pieces: bytes, why: Why = Why.LENGTH) -> None:
    """Let a stream say so much, and end."""

    def feed() -> None:
        stream.begin(3, 1)
        for piece in pieces:
            stream.deliver(7, piece)
        stream.end(Done(why, 3, 1, len(pieces)))

    served.call(feed)


def _read_until(end: socket.socket, wanted: bytes) -> bytes:
    got = b""
    while wanted not in got:
        chunk = end.recv(1 << 16)
        assert chunk, got
        got += chunk
    return got


# -- health and states -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["serving", "switching", "recovering", "parked", "stopping"])
def test_health_is_well_whenever_the_model_is_there(shared: Site, state: str) -> None:
    """Only loading is 503; every other state is answered with 200."""
    shared.session.state = state
    answer = shared.get("/health")
    assert (answer.status, answer.body) == (200, {"status": "ok" if state == "serving" else state})


def test_health_is_503_while_loading(shared: Site) -> None:
    """A server that loads answers at once that it does."""
    shared.session.state = "loading"
    answer = shared.get("/health")
    assert (answer.status, answer.headers["retry-after"], answer.body["status"]) == (503, "1", "loading")
    assert answer.error["code"] == "loading"
    assert shared.ask("HEAD", "/health").raw == b""


def test_a_session_that_is_gone_is_503(shared: Site) -> None:
    """What a parked or ending session cannot do is unavailable, not wrong."""
    shared.session.error = Parked(None, "its device is gone")
    assert shared.post(TEXT, ASKS).error["code"] == "parked"
    assert shared.post(TEXT, ASKS).status == 503
    shared.session.error = Busy("its end")
    shared.session.state = "stopping"
    assert shared.post(TEXT, ASKS).status == 503
    shared.session.state = "serving"
    assert shared.post(TEXT, ASKS).status == 429
    assert shared.post("/split-mode", {"to": "tensor"}).status == 409


def test_a_switch_may_name_its_route(shared: Site) -> None:
    """It reaches the session, of a dry run too; another word is refused with those that are wanted."""
    asked: list[SwitchOptions] = []
    switch, check = shared.session.switch, shared.session.check

    async def noted(changes: Any, options: SwitchOptions, **more: Any) -> dict[str, Any]:
        asked.append(options)
        return await (switch(changes, options, **more) if more else check(changes, options))

    with mock.patch.multiple(shared.session, switch=noted, check=noted):
        for more in ({"via": "in-place"}, {"via": "beside", "dry_run": True}, {"via": "native"}):
            body = {"to": "tensor", **more}
            assert shared.post("/split-mode", body).status == 200
        assert shared.post("/split-mode", {"to": "tensor", "via": None}).status == 200
    assert [one.via for one in asked] == [Route.IN_PLACE, Route.BESIDE, Route.NATIVE, Route.AUTO]
    refused = shared.post("/split-mode", {"to": "tensor", "via": "moon"})
    assert (refused.status, refused.error["param"]) == (400, "via")
    assert "auto, beside, in-place, native, composed" in refused.error["message"]


# -- connections -------------------------------------------------------------------------------------------------------

_HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
_NO_BODY = _HALF + b"Content-Length: 50\r\n\r\n"


@pytest.mark.parametrize("held", [b"", _HALF, _NO_BODY], ids=["silent", "half a head", "no body"])
def test_who_only_holds_a_place_gives_it_to_who_asks(held: bytes) -> None:
    """More half-open connections than there may be do not keep anybody out: the oldest of them go."""
    with site(_limited(n_connections=8)) as served:
        ends = [served.connect() for _ in range(30)]
        for end in ends:
            end.sendall(held) if held and end is ends[-1] else None
        for _ in range(3):
            assert served.get("/health").status == 200
        assert rest(ends[0]) == b""
        for end in ends:
            end.close()


def test_answers_under_way_are_never_given_up_for_others() -> None:
    """A stream goes on while more connections come than there may be."""
    with site(_limited(n_connections=2)) as served, served.connect() as end:
        end.sendall(_request(STREAMS, "Connection: close"))
        stream = served.stream()
        ends = [served.connect() for _ in range(10)]
        _feed(served, stream, b"a")
        assert b"[DONE]" in rest(end)
        for one in ends:
            one.close()


def test_heads_and_bodies_have_their_time() -> None:
    """Half a head is cut off, half a body gets 408, and a connection that says nothing is closed."""
    with site(_limited(head_s=0.2, body_s=0.2)) as served:
        assert served.say(b"") == served.say(_HALF) == b""
        assert _answer(served.say(_NO_BODY)).status == 408


def test_who_does_not_read_loses_its_stream() -> None:
    """A client that reads nothing is let go of by the system, and its sequence is free."""
    with site(_limited(write_s=0.3)) as served, served.connect(n_buffer=4096) as end:
        end.sendall(_request(STREAMS))
        stream = served.stream()
        served.call(lambda: stream.begin(3, 0))
        for _ in range(200):
            served.call(lambda: [stream.deliver(7, b"x" * 1000) for _ in range(200)])
            if served.session.cancelled.is_set():
                break
        assert served.session.cancelled.wait(WAIT_S)


def test_who_reads_no_answer_loses_its_connection() -> None:
    """A client that asks and asks and reads nothing is ended, without a stream."""
    with site(_limited(write_s=0.3)) as served, served.connect(n_buffer=4096) as end:
        end.setblocking(False)
        asks = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100
        poll = select.poll()
        poll.register(end, select.POLLOUT)
        while not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(WAIT_S * 1e3)):
            try:
                end.send(asks)
            except BlockingIOError:
                poll.modify(end, 0)
            except ConnectionError:
                break
        assert served.get("/health").status == 200


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"\x16\x03\x01\x02\x00" * 50 + b"\r\n\r\n", 400),
        (b"GET\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nbroken\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"A: b\r\n" * 20_000 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"A: b\r\n" * 200_000 + b"\r\n", 431),
        (b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 431),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    ],
)
def test_what_is_no_http_gets_an_answer_all_the_same(shared: Site, raw: bytes, status: int) -> None:
    """Bytes that h11 refuses are answered in the shape of every other error, and end their connection."""
    answer = _answer(shared.say(raw))
    assert answer.status == status
    assert answer.headers["connection"] == "close"
    assert len(answer.error["message"]) < 200


def test_garbage_behind_a_request_does_not_harm_its_answer(shared: Site) -> None:
    """A stream whose client sends nonsense after its request goes on to its end."""
    with shared.connect() as end:
        end.sendall(_request(STREAMS) + b"\0\0nonsense\r\n\r\n")
        _feed(shared, shared.stream(), b"a", b"b")
        got = rest(end)
    assert b"[DONE]" in got
    assert b"not_http" in got


def test_requests_in_a_row_are_answered_in_a_row(shared: Site) -> None:
    """Pipelined requests on one connection get their answers in their order."""
    close = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    got = shared.say(
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nHEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n" + close
    )
    assert got.count(b"HTTP/1.1 200 OK") == 3
    assert got.index(b'"ok"') < got.index(b"text/html") < got.index(b'"list"')
    assert b"<html" not in got


def test_http_1_0_is_understood(shared: Site) -> None:
    """A client of HTTP/1.0, which need not name a host, gets its stream without chunks, until the connection ends."""
    with shared.connect() as end:
        end.sendall(_request(STREAMS, version="1.0").replace(b"Host: localhost\r\n", b""))
        _feed(shared, shared.stream(), b"a")
        answer = _answer(rest(end))
    assert "transfer-encoding" not in answer.headers
    assert events(answer.raw)[-1] == "[DONE]"


def test_a_body_that_is_announced_is_waited_for(shared: Site) -> None:
    """A client that asks whether it may send its body is asked for it, and one without its key is not."""
    request = _request(ASKS, "Expect: 100-continue", "Connection: close")
    head, _, body = request.partition(b"\r\n\r\n")
    with shared.connect() as end:
        end.sendall(head + b"\r\n\r\n")
        assert _read_until(end, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        end.sendall(body)
        _feed(shared, shared.stream(), b"a")
        assert _answer(rest(end)).status == 200


def test_heads_of_everything_end(shared: Site) -> None:
    """HEAD is answered without a body, where GET would go on for ever as well."""
    for path in ("/", "/health", "/v1/models", "/metrics", "/slots", "/props", "/split-mode/events"):
        answer = shared.ask("HEAD", path)
        assert (answer.status, answer.raw) == (200, b"")
    assert shared.ask("HEAD", TEXT).status == 405


def test_an_odd_host_or_path_is_no_fault_of_ours(shared: Site) -> None:
    """A Host that is no address, and paths with slashes behind, get 4xx and never a redirect."""
    for host in ("[::1", "127.0.0.1:99999999", "localhost:x"):
        assert shared.get("/nothing", Host=host).status in {403, 404}
    for path in ("/health/", "//evil.example/", "/v1/models/", "/" + "x" * 3000, "/%00", "/..%2f..", "/?x", "/v1?a=b"):
        assert shared.get(path).status in {200, 404}
    assert shared.lines == []


# -- streams -----------------------------------------------------------------------------------------------------------


def test_an_error_in_the_middle_of_a_stream_is_in_it(shared: Site) -> None:
    """What goes wrong after the first token is an event in OpenAI's shape, without an end that looks well."""
    with shared.connect() as end:
        end.sendall(_request(STREAMS, "Connection: close"))
        _feed(shared, shared.stream(), b"a", why=Why.ERROR)
        got = rest(end)
    assert b'"error":{"message":' in got
    assert b"[DONE]" not in got
    assert got.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("done", "status", "code"),
    [
        (Done(Why.ERROR, message="no template", fault=Fault.CONFIG), 400, "invalid_prompt"),
        (Done(Why.ERROR, message="a fault", fault=Fault.INTERNAL), 500, "failed"),
        (Done(Why.CANCELLED), 503, "stopped"),
        (Done(Why.CONTEXT, n_prompt=5000), 400, "context_length_exceeded"),
        (Done(Why.CONTEXT, n_prompt=9), 429, "cache_full"),
    ],
)
def test_an_error_before_the_first_token_is_a_status(
    shared: Site, *, is_stream: bool, done: Done, status: int, code: str
) -> None:
    """What goes wrong before anything was sent is a status, whether a stream was asked for or not."""
    with shared.connect() as end:
        end.sendall(_request({**ASKS, "stream": is_stream}, "Connection: close"))
        stream = shared.stream()
        shared.call(lambda: stream.end(done))
        answer = _answer(rest(end))
    assert (answer.status, answer.error["code"]) == (status, code)


def test_silence_is_filled_with_comments(shared: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that waits gets its status and comments after a while, and its tokens when they come."""
    monkeypatch.setattr("splitctl.http.chat._SILENCE_S", 0.05)
    with shared.connect() as end:
        end.sendall(_request(STREAMS, "Connection: close"))
        stream = shared.stream()
        assert b"200 OK" in _read_until(end, b": waiting\n\n")
        shared.call(lambda: stream.begin(3, 1))
        shared.call(lambda: stream.pause("it is\nmoved"))
        _read_until(end, b": waiting: it is moved\n\n")
        _feed(shared, stream, b"a")
        assert b"[DONE]" in rest(end)


def test_who_hangs_up_ends_its_answer(shared: Site) -> None:
    """A client that goes while it waits, and one that goes while it reads, free their sequence."""
    for body in (ASKS, STREAMS):
        shared.session.cancelled.clear()
        with shared.connect() as end:
            end.sendall(_request(body))
            stream = shared.stream()
            if body is STREAMS:
                shared.call(lambda stream=stream: stream.begin(3, 1))  # type: ignore[misc]
                _read_until(end, b"\r\n\r\n")
        assert shared.session.cancelled.wait(WAIT_S)


@pytest.mark.parametrize(
    ("route", "body", "what", "goes_on"),
    [
        ("GET /split-mode", None, "check", False),
        ("POST /split-mode", {"to": "tensor", "dry_run": True}, "check", False),
        ("POST /split-mode", {"to": "tensor"}, "switch", True),
        ("POST /session/save", {"filename": "a"}, "save", True),
        ("POST /session/restore", {"filename": "a"}, "restore", True),
    ],
)
def test_who_hangs_up_is_let_go_of_while_the_session_works(
    tmp_path: Path, route: str, body: object, what: str, *, goes_on: bool
) -> None:
    """The request is over while its work is not: a check is given up, and what changes something ends by itself."""
    (tmp_path / "a").touch()
    raw = json.dumps(body).encode()
    with site(HttpConfig(port=0, folder=tmp_path)) as served:
        held = served.session.held = asyncio.Event()
        with served.connect() as end:
            end.sendall(f"{route} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)
            assert served.await_(served.session.at_work.get()) == f"{what} began"
        hung_up = f'splitctl_http_requests_total{{route="{route.split()[1]}",status="499"}} 1.0'
        while hung_up not in served.get("/metrics").raw.decode():
            continue
        if goes_on:
            assert served.session.at_work.empty()
            served.call(held.set)
        assert served.await_(served.session.at_work.get()) == f"{what} {'ended' if goes_on else 'was given up'}"
        served.session.held = None
        assert served.get("/split-mode").status == 200
        assert served.lines == []


def test_a_fault_of_ours_is_an_error_like_any_other() -> None:
    """Its answer has the shape of all errors and none of its words, and the log says what it was."""
    with site() as served:
        served.session.error = RuntimeError("the moon is down")
        answer = served.post("/v1/completions", {"prompt": "a"})
        assert (answer.status, answer.error["code"], answer.error["type"]) == (500, "internal", "server_error")
        assert "moon" not in answer.error["message"]
    assert ["moon" in line for line in served.lines] == [True]


def test_a_refusal_is_counted_whoever_it_comes_from() -> None:
    """Requests that are turned away before any route looks at them are counted as well."""
    with site(HttpConfig(port=0, api_keys=("k",))) as served:
        assert served.get("/session").status == 401
        assert served.get("/session", Origin="https://evil.example").status == 403
        numbers = served.get("/metrics", Authorization="Bearer k").raw.decode()
        for status in (401, 403):
            assert f'splitctl_http_requests_total{{route="other",status="{status}"}} 1.0' in numbers


def test_too_much_is_turned_away() -> None:
    """A full queue, long requests over their common bound, and bodies of too many values are refused in time."""
    with site(_limited(held_bytes=3000, n_queued=5)) as served:
        with served.connect() as end:
            end.sendall(_request({**ASKS, "prompt": "x" * 2000}))
            served.stream()
            assert served.post(TEXT, {**ASKS, "prompt": "x" * 2000}).error["code"] == "queue_full"
        served.session.cancelled.wait(WAIT_S)
        served.session.more = {"queued": 5}
        assert served.post(TEXT, ASKS).status == 429
        empty = b'{"prompt": "x", "zzz": [' + b"[]," * (1 << 20) + b"[]]}"
        assert served.post(TEXT, empty).status == 413
        assert served.post("/split-mode", b"x" * 100_000).status == 413


def test_bodies_that_wait_to_be_read_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long ones are read one after the other: those that are whole and wait for that count as well."""
    begun, go_on = threading.Event(), threading.Event()
    read_long = intake._read_long

    def slow(*given: Any) -> Any:
        begun.set()
        go_on.wait(WAIT_S)
        return read_long(*given)

    monkeypatch.setattr(intake, "_read_long", slow)
    body = {"content": "x" * 100_000}
    with site(_limited(pending_bytes=150_000)) as served, ThreadPoolExecutor(1) as pool:
        first = pool.submit(served.post, "/tokenize", body)
        assert begun.wait(WAIT_S)
        try:
            assert served.post("/tokenize", body).error["code"] == "busy"
        finally:
            go_on.set()
        assert first.result().status == 200
        assert served.post("/tokenize", body).status == 200


def test_what_no_sequence_could_hold_is_refused_before_it_is_read(shared: Site) -> None:
    """Tokens that the model has not, too many of them, and texts beyond all tokens never reach the session."""
    n = len(shared.session.requests)
    assert shared.post(TEXT, {**ASKS, "prompt": [1, 100]}).error["param"] == "prompt"
    for prompt in ([1] * 5000, "x" * (4096 * 512 + 1)):
        assert shared.post(TEXT, {**ASKS, "prompt": prompt}).error["code"] == "context_length_exceeded"
    assert len(shared.session.requests) == n


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "n", "said"),
    [([1] * 5000, 5000, "5000"), ("x" * (4096 * 512 + 1), 4097, "at least 4097"), ("x " * 5000, 5000, "5000")],
    ids=["tokens", "a text beyond all tokens", "a text that the worker counts"],
)
def test_a_prompt_that_is_too_long_gets_llama_servers_error(
    shared: Site, prompt: object, n: int, said: str, *, is_stream: bool
) -> None:
    """Its words, its type and both numbers, with OpenAI's code, and nothing of what other clients hold."""
    with shared.connect() as end:
        end.sendall(_request({**ASKS, "prompt": prompt, "stream": is_stream}, "Connection: close"))
        if prompt == "x " * 5000:
            stream = shared.stream()
            shared.call(lambda: stream.end(Done(Why.CONTEXT, n_prompt=5000, message="it holds 777 tokens")))
        answer = _answer(rest(end))
    assert (answer.status, answer.error) == (
        400,
        {
            "message": f"request ({said} tokens) exceeds the available context size (4096 tokens), try increasing it",
            "type": "exceed_context_size_error",
            "param": None,
            "code": "context_length_exceeded",
            "n_prompt_tokens": n,
            "n_ctx": 4096,
        },
    )


def test_a_prompt_is_not_measured_by_a_context_that_is_not_there(shared: Site) -> None:
    """While the model is loaded a request waits, whatever context was asked for: the library may give a larger one."""
    shared.session.more = {"state": "loading", "model": {"path": "fake.gguf"}}
    with shared.connect() as end:
        end.sendall(_request({**ASKS, "prompt": [1] * 5000}, "Connection: close"))
        _feed(shared, shared.stream(), b"a")
        assert _answer(rest(end)).status == 200


def test_watchers_are_counted_and_forgotten() -> None:
    """So many clients may watch; one that goes makes room for another."""
    with site(_limited(n_watchers=1)) as served:
        watch = b"GET /split-mode/events HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with served.connect() as end:
            end.sendall(watch)
            _read_until(end, b": events")
            assert served.get("/split-mode/events").status == 429
            served.call(lambda: served.session.hub.publish(SwitchStage("saving", 0.5)))
            assert b'data: {"stage":"saving","share":0.5}' in _read_until(end, b"event: switch_stage")
        with served.connect() as end:
            while True:
                end.sendall(watch)
                got = _read_until(end, b"\r\n\r\n")
                if b"200 OK" in got:
                    break
                # The body may have come with the head.
                if not got.endswith(b"}}"):
                    _read_until(end, b"}}")


# -- the end -----------------------------------------------------------------------------------------------------------


def test_a_draining_server_ends_its_answers_and_takes_no_more() -> None:
    """Answers under way come whole, new ones are refused, and draining is over when the last has ended."""
    with site() as served, served.connect() as end:
        end.sendall(_request(STREAMS, "Connection: close"))
        stream = served.stream()
        served.call(lambda: stream.begin(3, 1))
        _read_until(end, b"\r\n\r\n")
        draining = served.call(lambda: served.loop.create_task(served.server.drain()))
        while (answer := served.post(TEXT, ASKS)).status != 503:
            continue
        assert answer.error["code"] == "stopping"
        assert not draining.done()
        _feed(served, stream, b"a")
        assert b"[DONE]" in rest(end)
        served.await_(_wait(draining))


def test_draining_has_an_end() -> None:
    """An answer that does not come to its end in time does not hold the server."""
    with site(HttpConfig(port=0, drain_s=0.05)) as served, served.connect() as end:
        end.sendall(_request(STREAMS))
        stream = served.stream()
        served.await_(served.server.drain())
        assert not served.session.cancelled.is_set()
        served.call(lambda: stream.end(Done(Why.ERROR, message="the session is being stopped")))


async def _wait(task: object) -> None:
    await task  # type: ignore[misc]


# -- who may come in ---------------------------------------------------------------------------------------------------


def test_pages_that_may_use_the_server_can_read_its_refusals() -> None:
    """With --cors an origin gets its headers on answers and refusals; other origins and their images get nothing."""
    with site(HttpConfig(port=0, api_keys=("k",), origins=("https://good.example",))) as served:
        refused = served.get("/v1/models", Origin="https://good.example")
        assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, "https://good.example")
        taken = served.get("/v1/models", Origin="https://good.example", Authorization="bearer k")
        assert taken.status == 200
        assert served.get("/v1/models", Origin="https://evil.example", Authorization="Bearer k").status == 403
        asks = {"Origin": "https://good.example", "Access_Control_Request_Method": "POST"}
        assert served.ask("OPTIONS", TEXT, **asks).status == 200
        assert served.ask("OPTIONS", TEXT).status == 405


@pytest.mark.parametrize("origin", ["null", "chrome-extension://abcdef", "app://.", "file://", "http://[::1]:3000"])
def test_pages_of_any_kind_may_be_allowed_by_name(origin: str) -> None:
    """Pages of files, frames, apps and extensions get in when they are named, and others do not."""
    asks = {
        "Origin": origin,
        "Access_Control_Request_Method": "POST",
        "Access_Control_Request_Headers": "authorization",
    }
    with site(HttpConfig(port=0, origins=(origin,))) as served:
        assert served.get("/session", Origin=origin, Sec_Fetch_Site="cross-site").status == 200
        assert served.ask("OPTIONS", TEXT, **asks).headers["access-control-allow-origin"] == origin
        assert served.get("/session", Origin="https://evil.example").status == 403
        assert served.get("/session", Sec_Fetch_Site="cross-site").status == 403


def test_every_page_may_be_allowed() -> None:
    """With * any page may use the server, one without an origin too; without a key a warning says so."""
    with site(HttpConfig(port=0, origins=("*",))) as served:
        for origin in ("null", "https://any.example", "chrome-extension://abcdef"):
            answer = served.get("/session", Origin=origin, Sec_Fetch_Site="cross-site")
            assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "*")
            assert served.post("/split-mode", {"to": "tensor"}, Origin=origin).status == 200
        assert served.get("/session", Sec_Fetch_Site="cross-site").status == 200
        assert "every web page" in served.lines[0]
    with site(HttpConfig(port=0, origins=("*",), api_keys=("k",))) as served:
        assert served.get("/session", Origin="null").status == 401
        assert served.lines == []


@pytest.mark.parametrize("site_name", ["cross-site", "same-site"])
def test_images_and_scripts_of_other_pages_get_nothing(shared: Site, site_name: str) -> None:
    """What a browser loads for another page without naming its origin is turned away all the same."""
    assert shared.get("/session", Sec_Fetch_Site=site_name).status == 403
    assert shared.get("/", Sec_Fetch_Site=site_name).status == 200
    assert shared.get("/session", Sec_Fetch_Site="same-origin").status == 200


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer ", "Basic aw==", "Bearer k k", "Bearer K", "Bearer \xff", "k"])
def test_what_is_no_key_opens_nothing(given: str) -> None:
    """Only the key itself opens, whatever stands in the header."""
    with site(HttpConfig(port=0, api_keys=("k", "other"))) as served:
        assert served.get("/session", Authorization=given).error["type"] == "authentication_error"
        assert served.get("/session", Authorization="Bearer other").status == 200
        assert served.lines == []


def test_modes_are_judged_as_things_are_now(shared: Site) -> None:
    """A mode that is refused by now is not called allowed, and one is judged only where it could be switched to."""
    shared.session.error = Busy("a switch")
    assert shared.get("/split-mode").status == 409
    shared.session.error = None
    modes = shared.get("/split-mode").body["modes"]
    assert (modes["tensor"]["allowed"], modes["row"]["reasons"]) == (True, ["this build has no row mode"])
    shared.session.refused = {"tensor": "streams-lost-on-restore"}
    modes = shared.get("/split-mode").body["modes"]
    assert (modes["tensor"]["allowed"], modes["row"]["allowed"]) == (False, True)
    shared.session.state = "switching"
    assert shared.get("/split-mode").body["modes"] == {}


def test_what_could_not_be_tried_is_not_tried_for_every_question(shared: Site) -> None:
    """A trial without a verdict is remembered nowhere: it is made once for a placement, and again in another."""
    shared.session.refused = {"tensor": "probe-inconclusive"}
    assert not shared.get("/split-mode").body["modes"]["tensor"]["allowed"]
    shared.session.refused = {}
    modes = shared.get("/split-mode").body["modes"]
    assert (modes["tensor"]["allowed"], modes["row"]["allowed"]) == (False, True)
    shared.session.more = {"placement": {"mode": "layer", "devices": ["CPU"], "n_ctx": 512, "n_seq_max": 2}}
    assert shared.get("/split-mode").body["modes"]["tensor"]["allowed"]


_NAMES = ("org/model", "a b", "größe 模型", "a%2Fb?c#d&e=f+g", "../x", "/", "x" * 256)


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("is_alias", [False, True])
def test_an_id_that_was_listed_is_known_when_it_comes_back(shared: Site, name: str, *, is_alias: bool) -> None:
    """Whatever the model is called, its id describes it again, and is that of answers."""
    if is_alias:
        served_by = site(HttpConfig(port=0, aliases=(name, "other")))
    else:
        shared.session.more = {"model": {"path": "/somewhere/fake.gguf", "name": name, "n_vocab": 100}}
        served_by = nullcontext(shared)  # type: ignore[assignment]
    with served_by as served:
        (listed,) = served.get("/v1/models").body["data"]
        assert served.get("/props").body["model_alias"] == listed["id"]
        assert listed["id"] == name or (name == "/" and not is_alias)
        sent = quote(listed["id"], safe="")
        for path in ("/v1/models/", "/models/"):
            assert served.get(path + sent).body == listed
            assert served.get(path + quote(listed["id"])).body == listed
        for known in ("other", "fake.gguf") if is_alias else ("fake.gguf",):
            assert served.get(f"/v1/models/{known}").body["id"] == known
        with served.connect() as end:
            end.sendall(_request({**ASKS, "model": listed["id"]}, "Connection: close"))
            _feed(served, served.stream(), b"a")
            assert _answer(rest(end)).body["model"] == listed["id"]


@pytest.mark.parametrize("name", ["x" * 257, "", "/", "/home/somebody/fake.gguf"])
def test_a_name_that_cannot_be_one_gives_way_to_that_of_the_file(shared: Site, name: str) -> None:
    """A name in the header that is empty, a path or too long to be sent back is not the model's id."""
    shared.session.more = {"model": {"path": "/somewhere/fake.gguf", "name": name, "n_vocab": 100}}
    assert shared.get("/v1/models").body["data"][0]["id"] == "fake.gguf"


def test_a_model_that_is_not_there_is_told(shared: Site) -> None:
    """An id that is none of the model's names gets 404 with the name that is, in OpenAI's shape."""
    for path in ("/v1/models/gpt-4o", "/v1/models/fake/", "/models/fak%65/x"):
        answer = shared.get(path)
        assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
        assert answer.error["type"] == "not_found_error"
        assert "'fake'" in answer.error["message"]
    assert shared.ask("DELETE", "/v1/models/fake").status == 405


def test_slots_fail_where_none_is_idle_if_asked_to(shared: Site) -> None:
    """As in llama-server a client may have 503 for an answer when all sequences are busy."""
    busy = [{"seq_id": 0, "n_tokens": 5, "state": "reading"}]
    for sequences, status in ((busy, 503), ([*busy, {"seq_id": 1, "n_tokens": 0, "state": "idle"}], 200)):
        shared.session.more = {"sequences": sequences}
        assert shared.get("/slots?fail_on_no_slot=1").status == status
        assert shared.get("/slots").status == shared.get("/slots?fail_on_no_slot=").status == 200


def test_properties_say_how_tokens_are_drawn(shared: Site) -> None:
    """The defaults are llama.cpp's, under the names that a request has for them, and the context is a sequence's."""
    props = shared.get("/props").body
    found = props["default_generation_settings"]
    assert found["n_ctx"] == 4096
    assert {name: found["params"][name] for name in ("temperature", "top_k", "n_predict", "stop")} == {
        "temperature": 0.8,
        "top_k": 40,
        "n_predict": -1,
        "stop": [],
    }
    assert props["modalities"] == {"vision": False, "audio": False}


def test_numbers_say_since_when_they_count(shared: Site) -> None:
    """The start of the process is a header, as in llama-server."""
    shared.session.more = {"started_at": 1234.5}
    assert shared.get("/metrics").headers["process-start-time-unix"] == "1234"


def test_numbers_name_the_tier_and_the_pause_of_the_last_switch(shared: Site) -> None:
    """The tier as a label; no pause before there was a switch."""
    shared.session.more = {"weights": {"tier": "pinned", "copy": "complete"}}
    numbers = shared.get("/metrics").raw.decode()
    assert 'splitctl_weights_tier{tier="pinned"} 1.0' in numbers
    assert 'splitctl_weights_tier{tier="file"} 0.0' in numbers
    assert "splitctl_switch_pause_seconds" not in numbers
    assert shared.get("/props").body["weights"] == {"tier": "pinned", "copy": "complete"}
    shared.session.more = {"last_switch": {"pause_ms": 80.0}}
    assert "splitctl_switch_pause_seconds 0.08\n" in shared.get("/metrics").raw.decode()


def test_numbers_say_what_the_policy_does(shared: Site) -> None:
    """Its decisions by what they do, prompts that it holds, and how long it held others; nothing where it is off."""
    shared.session.more = {
        "policy": {
            "policy": "auto",
            "held": 3,
            "decisions": {"hold": 2, "switch": 1},
            "waits": {"count": 4, "sum_s": 1.5, "longest_s": 1.0},
        }
    }
    numbers = shared.get("/metrics").raw.decode()
    for line in (
        'splitctl_policy_decisions_total{action="hold"} 2.0',
        'splitctl_policy_decisions_total{action="switch"} 1.0',
        "splitctl_policy_held 3.0",
        "splitctl_policy_wait_seconds_count 4.0",
        "splitctl_policy_wait_seconds_sum 1.5",
    ):
        assert f"{line}\n" in numbers
    shared.session.more = {"policy": {"policy": "off"}}
    assert "splitctl_policy" not in shared.get("/metrics").raw.decode()


def test_the_policy_is_turned_on_and_off(shared: Site) -> None:
    """The route passes on what the body names; anything else is refused by name."""
    assert shared.post("/policy", {"policy": "off"}).body == {"policy": "off"}
    for body in ({"policy": "always"}, {"policy": True}, {}, {"policy": "off", "more": 1}):
        assert shared.post("/policy", body).status == 400


def test_numbers_have_no_created_series(shared: Site) -> None:
    """Counters say what they count, and not when they began."""
    assert b"_created" not in shared.get("/metrics").raw
