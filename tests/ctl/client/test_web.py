"""The clients over HTTP, over a server whose session obeys the test, and over servers that are none."""

from __future__ import annotations

import asyncio
import json
import ssl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import splitctl
from splitctl.client import Delta, Paused, Restarted, Resumed, SwitchStage, web
from splitctl.errors import Busy, ConfigInvalid, Parked, Refused
from splitctl.host import events
from splitctl.host.streams import Done, Why
from splitctl.http import HttpConfig
from splitctl.ipc.jobs import Fault
from tests.ctl.client.scenes import WAIT_S, speaking
from tests.ctl.client.test_client import OUTCOME
from tests.ctl.http_fake import Site, site

STATUS = {"name": "fake", "state": "serving"}


def _client(port: int, **more: Any) -> splitctl.Client:
    return splitctl.Client(url=f"http://127.0.0.1:{port}", **{"timeout_s": WAIT_S, **more})


def _async_client(port: int) -> splitctl.AsyncClient:
    return splitctl.AsyncClient(url=f"http://127.0.0.1:{port}/v1/", timeout_s=WAIT_S)


def _answer(body: Any, status: str = "200 OK", **headers: str) -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status}", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + raw


# -- a session that obeys ----------------------------------------------------------------------------------------------


def _feed(here: Site, text: str) -> None:
    """Draw a token for each letter, with a pause before the last, and end."""
    stream = here.stream()

    def feed() -> None:
        stream.begin(3, 1)
        for letter in text[:-1]:
            stream.deliver(ord(letter), letter.encode())
        stream.pause("it is moved")
        stream.deliver(ord(text[-1]), text[-1].encode())
        stream.end(Done(Why.STOP, 3, 1, len(text), 1.5, 2.5))

    here.call(feed)


def test_an_answer_comes_as_at_the_control_socket() -> None:
    """Text, tokens, pauses, counts and times are those of the host; the request has what was asked for."""
    with site() as here, ThreadPoolExecutor(2) as pool:
        client = _client(here.port)
        answer = client.generate([5, 6], n=9, sampler={"temp": 0.5, "seed": 3}, stop=["x", "y"])
        _feed(here, "abc")
        assert list(answer.events()) == [
            Delta("a", 97, 0), Delta("b", 98, 1), Paused("it is moved"), Resumed(), Delta("c", 99, 2)
        ]  # fmt: skip
        whole = answer.result()
        assert (whole.text, whole.tokens, whole.why) == ("abc", (97, 98, 99), "stop")
        usage = whole.usage
        assert (usage.n_prompt, usage.n_reused, usage.n_generated) == (3, 1, 3)
        assert (usage.prompt_ms, usage.generate_ms, usage.finish_reason) == (1.5, 2.5, "stop")
        asked = here.session.requests[0]
        assert (asked.tokens, asked.n_predict, asked.sampler.stop) == ((5, 6), 9, ("x", "y"))
        assert (asked.sampler.temp, asked.sampler.seed) == (0.5, 3)
        says = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Sure,"}]
        chat = pool.submit(lambda: asyncio.run(_async_chat(here.port, says)))
        _feed(here, "de")
        assert chat.result(WAIT_S) == "de"
        asked = here.session.requests[1]
        assert asked.messages is not None
        assert [one["content"] for one in asked.messages] == ["hi", "Sure,"]
        assert asked.chat_template_kwargs is not None
        assert asked.chat_template_kwargs["enable_thinking"] is False
        assert asked.continue_final_message == "content"


async def _async_chat(port: int, says: list[dict[str, str]]) -> str:
    client = _async_client(port)
    answer = client.chat(says, template={"enable_thinking": False}, continues=True)
    return "".join([delta.text async for delta in answer])


def test_a_switch_tells_its_stages_and_is_cancelled() -> None:
    """Events of the session become its stages, the answer its outcome; a cancel reaches the host."""
    with site() as here:
        here.session.held = asyncio.Event()
        client = _client(here.port)
        plain = OUTCOME.to_json()

        async def switch(*_: object, **__: object) -> dict[str, Any]:
            here.session.hub.publish(events.SwitchStage("saving", 0.5))
            await here.session._work("switch")
            return plain

        here.session.switch = switch  # type: ignore[method-assign]
        moving = client.switch("tensor")
        assert next(moving) == SwitchStage("saving", 0.5)
        moving.cancel()
        assert here.session.cancelled.wait(WAIT_S)
        here.call(here.session.held.set)
        assert (list(moving), moving.raw) == ([OUTCOME], plain)


def test_leaving_ends_a_generation_at_the_host() -> None:
    """A cancel keeps what came, a close hangs up; the host ends its stream at both."""
    with site() as here:
        for leave in (splitctl.client.Generation.cancel, splitctl.client.Generation.close):
            answer = _client(here.port).generate("a")
            stream = here.stream()
            here.call(lambda stream=stream: (stream.begin(1, 0), stream.deliver(97, b"a")))  # type: ignore[misc]
            assert next(answer).text == "a"
            leave(answer)
            assert here.session.cancelled.wait(WAIT_S)
            here.session.cancelled.clear()
            if leave is splitctl.client.Generation.cancel:
                assert (answer.result().text, answer.result().why) == ("a", "cancelled")


def test_refusals_are_those_of_a_session() -> None:
    """Busy, Parked and Refused are raised as in this process; others name their cause."""
    with site() as here:
        client = _client(here.port)
        for error, kind in (
            (Busy("a switch"), Busy),
            (Parked(Path("/a b")), Parked),
            (Refused([splitctl.Reason("c", "t")]), Refused),
        ):
            here.session.error = error
            with pytest.raises(kind):
                client.switch("tensor").result()
        here.session.error = None
        with pytest.raises(splitctl.RequestFailed, match="--slot-save-path"):
            client.save("x")
        with pytest.raises(splitctl.RequestFailed, match="exceeds the available context") as caught:
            client.generate([1] * 5000).result()
        assert caught.value.fault is Fault.CONFIG
        for wrong in ("a/b", "/a"):
            with pytest.raises(ConfigInvalid, match="without a folder"):
                client.restore(wrong)
        with pytest.raises(ConfigInvalid, match="True over HTTP"):
            client.generate("a", add_special=False)
        with pytest.raises(ConfigInvalid, match="no route ends a host"):
            client.stop()
        answer = client.generate("a")
        stream = here.stream()
        here.call(lambda: stream.end(Done(Why.ERROR, message="m", fault=Fault.CONFIG)))
        with pytest.raises(splitctl.RequestFailed, match="m"):
            answer.result()
    with site(HttpConfig(port=0, api_keys=("key",))) as here:
        with pytest.raises(splitctl.RequestFailed, match=r"connect\(api_key="):
            _client(here.port).status()
        assert _client(here.port, api_key="key").status().name == "fake"


def test_a_policy_and_events_are_told() -> None:
    """The policy's answer is typed; a watcher gets what happens, and the end of the session ends the watching."""
    with site() as here:
        client = _client(here.port)
        assert client.policy("off").policy == "off"
        watching = client.events()
        while not here.session.hub._watchers:
            client.status()
        here.call(lambda: here.session.hub.publish(events.SwitchEnded(OUTCOME.to_json())))
        event = next(watching)
        assert (event.kind, event.outcome) == ("switch_ended", OUTCOME)
        here.call(here.session.hub.close)
        assert list(watching) == []


# -- servers that are none ---------------------------------------------------------------------------------------------

OTHERS: list[tuple[bytes, type[Exception], str]] = [
    (b"", splitctl.HostGone, "hung up"),
    (b"HTTP/1.1 200 OK\r\n", splitctl.HostGone, "hung up"),
    (_answer(STATUS, Content_Length="99"), splitctl.HostGone, "hung up"),
    (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", splitctl.HostIncompatible, "another language"),
    (b"\x00" * 100_000, splitctl.HostIncompatible, "another language"),
    (_answer(b"<html>"), splitctl.HostIncompatible, "no JSON"),
    (_answer([1]), splitctl.HostIncompatible, "no JSON object"),
    (_answer({"ok": True}), splitctl.HostIncompatible, "'name'"),
    (
        _answer(b"", "302 Found", Location="https://a/b"),
        splitctl.HostIncompatible,
        "sends its clients on to https://a/b",
    ),
    (_answer(b"nothing", "404 Not Found"), splitctl.HostIncompatible, "status 404 as no splitctl"),
    (_answer({"error": "x"}, "404 Not Found"), splitctl.HostIncompatible, "status 404 as no splitctl"),
    (
        _answer({"error": {"message": "there is nothing at '/session'"}}, "404 Not Found"),
        splitctl.HostIncompatible,
        "does not know the request",
    ),
    (_answer(b"0\r\n\r\n", Transfer_Encoding="chunked"), splitctl.HostIncompatible, "in chunks"),
    (b"HTTP/1.1 " + b"9" * 5000 + b" OK\r\n\r\n", splitctl.HostIncompatible, "another language"),
    (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n", splitctl.HostIncompatible, "a head that is none"),
    (_answer({**STATUS, "placement": 5}), splitctl.HostIncompatible, "does not read"),
    (_answer(b"\xff\xfe"), splitctl.HostIncompatible, "no JSON"),
]

STREAMS: list[bytes] = [
    b'{"stop_type":"eos"}',
    b'{"choices":[5]}',
    b'{"choices":5}',
    b'{"choices":[{"text":5,"tokens":[7]}]}',
    b'{"choices":[{"text":"a","tokens":5}]}',
    b'{"stop_type":"eos","timings":{"prompt_n":1,"cache_n":0,"predicted_n":1e999,"prompt_ms":1,"predicted_ms":1}}',
]


@pytest.mark.parametrize("data", STREAMS, ids=range(len(STREAMS)))
def test_a_stream_of_another_release_is_told(data: bytes) -> None:
    """Whatever a field is, and wherever it is read, both clients raise the one error for it, and let go."""
    with speaking(*[_answer(b"data: " + data + b"\n\ndata: [DONE]\n\n")] * 2) as port:
        url = f"http://127.0.0.1:{port}"
        broken = pytest.raises((splitctl.HostIncompatible, splitctl.AnswerBroken), match="does not read")
        with broken:
            splitctl.Client(url=url, timeout_s=WAIT_S).generate("a").result()
        with broken:
            asyncio.run(splitctl.AsyncClient(url=url, timeout_s=WAIT_S).generate("a").result())


def test_a_refusal_without_an_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is kept for its reason, up to what any answer may take."""
    monkeypatch.setattr(web, "MAX_ANSWER_BYTES", 1000)
    said = _answer(b"x" * 5000, "500 Internal Server Error", Content_Length="9999")
    with speaking(said) as port, pytest.raises(splitctl.HostGone, match="without an end"):
        splitctl.connect(url=f"http://127.0.0.1:{port}", timeout_s=WAIT_S)


@pytest.mark.parametrize(("said", "kind", "match"), OTHERS, ids=range(len(OTHERS)))
def test_what_is_no_such_server_is_told(said: bytes, kind: type[Exception], match: str) -> None:
    """Whatever answers at the URL, the error names the URL and what is wrong there."""
    with speaking(said) as port, pytest.raises(kind, match=match) as caught:
        splitctl.connect(url=f"http://127.0.0.1:{port}", timeout_s=WAIT_S)
    assert f"http://127.0.0.1:{port}" in str(caught.value)


def test_nobody_there_is_told_with_the_url() -> None:
    """A port that nobody listens on, and a name that nobody has, are told with the system's reason."""
    with speaking() as port:
        pass
    with pytest.raises(splitctl.ServerUnreachable, match=rf"nobody answers at http://127\.0\.0\.1:{port} \(Conn"):
        splitctl.connect(url=f"http://127.0.0.1:{port}")
    with pytest.raises(splitctl.ServerUnreachable, match="nobody answers at http://no-such-host"):
        splitctl.connect(url="http://no-such-host.invalid")


def test_a_server_that_ends_in_the_middle_and_one_that_was_restarted() -> None:
    """What had come of an answer is in the error; another process at the URL is told, by its own header."""
    piece = b'data: {"choices":[{"text":"a","tokens":[7]}]}\n\n'
    failed = b'data: {"error":{"message":"the session is being stopped","code":"stopped"}}\n\n'
    told: list[Restarted] = []
    first, second = (_answer(STATUS, X_Splitctl_Host=one) for one in "ab")
    head = _answer(b": waiting: moved\n\n" + piece, X_Splitctl_Host="a")
    with speaking(first, head, head + failed, head, second, second) as port:
        client = _client(port, on_restart=told.append)
        assert client.status().name == "fake"
        for why in ("its host hung up", "the session is being stopped"):
            with pytest.raises(splitctl.AnswerBroken, match=f"after 1 token: {why}") as caught:
                client.generate("a").result()
            assert (caught.value.text, caught.value.tokens) == ("a", (7,))
        with pytest.raises(splitctl.AnswerBroken):
            asyncio.run(_async_client(port).generate("a").result())
        assert (client.n_restarts, told) == (0, [])
        client.status()
        client.status()
        assert told == [Restarted(f"http://127.0.0.1:{port}", 1)]


def test_a_server_behind_tls_is_spoken_with_if_it_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer of many records comes whole, to both clients; a certificate that nobody vouches for is refused."""
    keys = Path(__file__).with_name("localhost.pem")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(keys)
    long = {**STATUS, "model": {"name": "x" * 200_000}}
    answer = _answer(long, Content_Length=str(len(json.dumps(long))))
    with speaking(*[answer] * 4, tls=tls) as port:
        url = f"https://127.0.0.1:{port}"
        with pytest.raises(splitctl.ServerUnreachable, match="certificate verify failed"):
            splitctl.connect(url=url, timeout_s=WAIT_S)
        monkeypatch.setenv("SSL_CERT_FILE", str(keys))
        assert splitctl.connect(url=url, timeout_s=WAIT_S).status().raw == long
        assert asyncio.run(splitctl.AsyncClient(url=url, timeout_s=WAIT_S).status()).raw == long
