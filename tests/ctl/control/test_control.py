"""The control socket: what is asked arrives, what is answered comes back, and no client harms another."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from splitctl.carry.sampling import SamplerSpec
from splitctl.control import requests
from splitctl.control.client import Call, ControlAnswer, ControlEvent, HostGone, ask
from splitctl.control.requests import GenerateRequest, StatusRequest, SwitchRequest
from splitctl.control.server import ControlLimits
from splitctl.control.sockets import Address, NoSuchSession
from splitctl.errors import Busy, Cancelled, Parked, Reason, Refused
from splitctl.ipc.jobs import Fault, RequestFailed
from splitctl.ipc.wire import MessageInvalid, from_line, to_line
from splitctl.outcome import Proof, SwitchOptions
from splitctl.placement import Changes, SplitMode
from tests.ctl.control_fake import Served, served

REQUESTS = (
    requests.StatusRequest(),
    requests.SwitchRequest(
        Changes(mode=SplitMode.TENSOR, tensor_split=(3.0, 1.0)), Proof.OFF, convert=False, force=True, timeout_s=2.5
    ),
    requests.CheckRequest(Changes(), convert=False, force=True),
    requests.GenerateRequest(prompt="é\n", n_predict=5, sampler=SamplerSpec(seed=3, stop=("a",))),
    requests.GenerateRequest(messages=({"role": "user", "content": "hi"},), parse_special=True),
    requests.GenerateRequest(tokens=(1, 2), add_special=False),
    requests.SaveRequest(Path("/a/b")),
    requests.RestoreRequest(Path("/a/b")),
    requests.StopRequest(),
    requests.StopRequest(force=True),
    requests.PolicyRequest("auto"),
    requests.EventsRequest(),
    requests.GenerateRequest(
        messages=({"role": "assistant", "content": "Sure, ", "name": "é"},),
        chat_template_kwargs={"enable_thinking": False, "a": [None, 1.5]},
        continue_final_message="content",
    ),
)


def _raw(address: Address) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(60)
    made.connect(str(address.path))
    return made


def _said(raw: socket.socket) -> list[dict[str, Any]]:
    """Read all that the host says until it hangs up."""
    data = bytearray()
    while chunk := raw.recv(1 << 16):
        data += chunk
    return [json.loads(line) for line in data.splitlines()]


def _asked(here: Served, line: bytes) -> dict[str, Any]:
    with _raw(here.address) as raw:
        raw.sendall(line)
        (said,) = _said(raw)
        return said


def _next(client: Call) -> ControlEvent | ControlAnswer:
    while True:
        for message in client.read():
            return message


# -- requests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda one: type(one).__name__)
def test_requests_come_back(request_: requests.ControlRequest) -> None:
    """Every request is read as what was written."""
    line = to_line(request_, requests.REQUESTS)
    assert from_line(line, requests.REQUESTS, max_bytes=1 << 20) == request_


def test_every_request_is_tried() -> None:
    """The list above leaves out no request."""
    assert {type(one) for one in REQUESTS} == set(requests.REQUESTS.values())


BAD: list[tuple[bytes, str]] = [
    (b"", "JSON"),
    (b"null", "object"),
    (b"{}", "kind"),
    (b'{"kind":"open"}', "kind"),
    (b'{"kind":"status","more":1}', "more"),
    (b'{"kind":"policy","policy":"always"}', "auto or off"),
    (b'{"kind":"switch"}', "changes"),
    (b'{"kind":"switch","changes":[]}', "changes"),
    (b'{"kind":"switch","changes":{"mode":"sideways"}}', "mode"),
    (b'{"kind":"switch","changes":{"mode":["tensor"]}}', "mode"),
    (b'{"kind":"switch","changes":{"n_ctx":true}}', "n_ctx"),
    (b'{"kind":"switch","changes":{"n_ctx":1e9}}', "n_ctx"),
    (b'{"kind":"switch","changes":{"n_ctx":-1}}', "n_ctx"),
    (b'{"kind":"switch","changes":{"nothing":1}}', "nothing"),
    (b'{"kind":"switch","changes":{"devices":"CPU"}}', "devices"),
    (b'{"kind":"switch","changes":{"devices":["\\ud800"]}}', "devices"),
    (b'{"kind":"switch","changes":{"devices":["a\\u0000"]}}', "devices"),
    (b'{"kind":"switch","changes":{"devices":[' + b'"a",' * 200 + b'"a"]}}', "devices"),
    (b'{"kind":"switch","changes":{"tensor_split":[1' + b"0" * 400 + b"]}}", "tensor_split"),
    (b'{"kind":"switch","changes":{"tensor_split":[NaN]}}', "tensor_split"),
    (b'{"kind":"switch","changes":{},"proof":"faith"}', "proof"),
    (b'{"kind":"switch","changes":{},"timeout_s":-1}', "timeout_s"),
    (b'{"kind":"switch","changes":{},"timeout_s":1e99}', "timeout_s"),
    (b'{"kind":"generate"}', "prompt"),
    (b'{"kind":"generate","prompt":""}', "prompt"),
    (b'{"kind":"generate","prompt":"a","tokens":[1]}', "prompt"),
    (b'{"kind":"generate","prompt":"\\udfff"}', "prompt"),
    (b'{"kind":"generate","tokens":[-1]}', "tokens"),
    (b'{"kind":"generate","tokens":[9999999999]}', "tokens"),
    (b'{"kind":"generate","messages":[{"role":"user"}]}', "content"),
    (b'{"kind":"generate","messages":[{"role":7,"content":"a"}]}', "role"),
    (b'{"kind":"generate","messages":["a"]}', "messages"),
    (b'{"kind":"generate","messages":[{"role":"user","content":["a"]}]}', "content"),
    (b'{"kind":"generate","messages":[{"role":"user","content":"a","name":"\\ud800"}]}', "messages"),
    (b'{"kind":"generate","messages":[{"role":"user","content":"a","x":' + b"[" * 70 + b"]" * 70 + b"}]}", "messages"),
    (b'{"kind":"generate","messages":[{"role":"assistant","tool_calls":[{"id":"1"}]}]}', "tool_calls"),
    (b'{"kind":"generate","prompt":"a","chat_template_kwargs":[]}', "chat_template_kwargs"),
    (b'{"kind":"generate","prompt":"a","chat_template_kwargs":{"messages":[]}}', "chat_template_kwargs"),
    (b'{"kind":"generate","prompt":"a","continue_final_message":"all"}', "continue_final_message"),
    (b'{"kind":"generate","prompt":"a","n_predict":1' + b"0" * 60 + b"}", "n_predict"),
    (b'{"kind":"generate","prompt":"a","sampler":{"temp":"hot"}}', "sampler.temp"),
    (b'{"kind":"generate","prompt":"a","sampler":{"top_p":7}}', "sampler.top_p"),
    (b'{"kind":"save","path":"here"}', "path"),
    (b'{"kind":"save","path":"/a\\u0000b"}', "path"),
    (b'{"kind":"restore","path":7}', "path"),
    (b"[" * 100_000, "JSON"),
    (b"\xff\xfe{}", "JSON"),
]


@pytest.mark.parametrize(("line", "said"), BAD, ids=range(len(BAD)))
def test_bad_requests_are_named(line: bytes, said: str) -> None:
    """A request that is none is refused with the field, or with what a request is."""
    with pytest.raises(MessageInvalid, match=said):
        from_line(line, requests.REQUESTS, max_bytes=1 << 20)


# -- the socket --------------------------------------------------------------------------------------------------------


def test_everything_arrives_and_is_answered() -> None:
    """Each request reaches the host with its values, and its answer comes back."""
    with served() as here:
        assert ask(here.address, REQUESTS[0])["name"] == "fake"
        assert ask(here.address, REQUESTS[2]) == {"is_unchanged": False}
        assert ask(here.address, REQUESTS[6]) == {"n_bytes": 5}
        assert ask(here.address, REQUESTS[7]) == {}
        assert ask(here.address, REQUESTS[8]) == {"saved": None}
        assert ask(here.address, REQUESTS[9]) == {"saved": None}
        here.call(here.host.switch_end.set)
        told: list[dict[str, Any]] = []
        assert ask(here.address, REQUESTS[1], on_event=told.append) == {"status": "switched"}
        assert told == [{"kind": "stage", "stage": "saving", "share": 0.5}]
        names = [name for name, _ in here.host.calls]
        assert names == ["check", "save", "restore", "stop", "stop", "switch"]
        assert [more for name, more in here.host.calls if name == "stop"] == [{"force": False}, {"force": True}]
        assert here.host.calls[5][1] == {
            "changes": {"mode": SplitMode.TENSOR, "tensor_split": (3.0, 1.0)},
            "options": SwitchOptions(Proof.OFF, convert=False, force=True),
            "timeout_s": 2.5,
        }


def test_bad_requests_get_one_error_each_and_the_host_lives() -> None:
    """Whatever is sent gets one line with a fault, a kind and a message; the session still answers."""
    with served() as here:
        for line, said in BAD[1:]:
            error = _asked(here, line + b"\n")["error"]
            assert error["fault"] == "config", line
            assert error["kind"] == "MessageInvalid"
            assert said in error["message"]
        assert here.host.calls == []
        assert ask(here.address, StatusRequest())["state"] == "serving"


def test_a_line_may_end_with_the_stream() -> None:
    """A client that closes its sending half instead of ending the line is answered as well."""
    with served() as here, _raw(here.address) as raw:
        raw.sendall(b'{"kind":"status"}')
        raw.shutdown(socket.SHUT_WR)
        assert _said(raw)[0]["result"]["name"] == "fake"


def test_a_stream_arrives_whole() -> None:
    """A generation is told token by token, and ends with how it ended."""
    with served() as here:
        told: list[dict[str, Any]] = []
        done = ask(here.address, GenerateRequest(prompt="a", n_predict=100), on_event=told.append)
        assert done["why"] == "length"
        assert told[0] == {"kind": "begun", "n_prompt": 3, "n_reused": 1}
        assert [one["index"] for one in told[1:]] == list(range(100))


def test_a_cancel_ends_a_generation_and_it_still_answers() -> None:
    """The control line on the same connection ends an endless stream with its own reason."""
    with served() as here, Call(here.address, GenerateRequest(prompt="a")) as client:
        assert isinstance(_next(client), ControlEvent)
        client.cancel()
        while True:
            for message in client.read():
                if isinstance(message, ControlAnswer):
                    assert message.body["why"] == "cancelled"
                    return


@pytest.mark.parametrize("junk", [b"", b"what\n", b'{"control":"dance"}\n', b"x" * 5000])
def test_hanging_up_ends_a_generation(junk: bytes) -> None:
    """A client that goes away, or sends what is no control line, has its stream ended, not the host's."""
    with served() as here:
        with _raw(here.address) as raw:
            raw.sendall(to_line(GenerateRequest(prompt="a"), requests.REQUESTS) + junk)
            assert raw.recv(10)
            if junk:
                assert here.host.ended.wait(60)
        assert here.host.ended.wait(60)
        assert ask(here.address, StatusRequest())["state"] == "serving"


def test_a_client_that_does_not_read_is_left() -> None:
    """A stream whose client reads nothing stops after what fits in between, and is ended after a while."""
    with served(ControlLimits(write_s=0.2)) as here, _raw(here.address) as raw:
        here.call(lambda: setattr(here.host, "piece", 10_000))
        raw.sendall(to_line(GenerateRequest(prompt="a"), requests.REQUESTS))
        assert here.host.unsubscribed.is_set() is False
        while here.host.n_cancelled == 0:
            # Another client is served all the while.
            assert ask(here.address, StatusRequest())["state"] == "serving"
        assert here.host.n_drawn < 1000


def test_a_switch_is_cancelled_by_its_client_and_outlives_a_hung_up_one() -> None:
    """The control line cancels the switch; closing the connection leaves it running."""
    request = SwitchRequest(Changes(mode=SplitMode.TENSOR))
    with served() as here:
        with Call(here.address, request) as client:
            assert here.host.switch_began.wait(60)
        assert here.host.is_switching
        here.call(here.host.switch_end.set)
        here.call(here.host.switch_end.clear)
        here.host.switch_began.clear()
        while here.host.is_switching:
            ask(here.address, StatusRequest())
        with Call(here.address, request) as client:
            assert here.host.switch_began.wait(60)
            with pytest.raises(RequestFailed) as caught:
                ask(here.address, request)
            assert caught.value.fault is Fault.BUSY
            client.cancel()
            messages: list[ControlEvent | ControlAnswer] = []
            while not messages or not isinstance(messages[-1], ControlAnswer):
                messages += client.read()
        assert messages[-1] == ControlAnswer({"status": "cancelled"})


@pytest.mark.parametrize(
    ("request_", "end"),
    [
        (requests.CheckRequest(Changes()), "was given up"),
        (requests.SaveRequest(Path("/a/b")), "ended"),
        (requests.RestoreRequest(Path("/a/b")), "ended"),
    ],
)
def test_who_hangs_up_is_let_go_of_while_the_session_works(request_: requests.ControlRequest, end: str) -> None:
    """The connection is over at once: a check is given up, and what changes something ends by itself."""
    with served() as here:
        held = here.host.held = asyncio.Event()
        with _raw(here.address) as raw:
            raw.sendall(to_line(request_, requests.REQUESTS))
            assert here.host.at_work.get(timeout=60) == "began"
        while here.call(lambda: here.server.n_connections):
            continue
        if end == "ended":
            assert here.host.at_work.empty()
            here.call(held.set)
        assert here.host.at_work.get(timeout=60) == end


def test_who_has_no_more_to_say_gets_the_answer() -> None:
    """A client that closes its sending half and waits has not hung up."""
    with served() as here, _raw(here.address) as raw:
        held = here.host.held = asyncio.Event()
        raw.sendall(to_line(requests.SaveRequest(Path("/a/b")), requests.REQUESTS))
        raw.shutdown(socket.SHUT_WR)
        assert here.host.at_work.get(timeout=60) == "began"
        # The server has looked for the client's end by then: it answers others in the same loop.
        assert ask(here.address, StatusRequest())["state"] == "serving"
        here.call(held.set)
        assert _said(raw) == [{"result": {"n_bytes": 5}}]


class _Broken(Exception):
    """An error that nobody foresaw."""


class _Told(Exception):
    """An error that a worker told."""

    fault = Fault.MODEL
    name = "CallFailed"
    body = {"a": 1}  # noqa: RUF012 - a stand-in for a field


@pytest.mark.parametrize(
    ("error", "fault", "kind"),
    [
        (Busy("a switch"), "busy", "Busy"),
        (Refused([Reason("c", "t")]), "refused", "Refused"),
        (Cancelled("a"), "cancelled", "Cancelled"),
        (Parked(Path("/a")), "parked", "Parked"),
        (_Told("m"), "model", "CallFailed"),
        (OSError(28, "No space left on device"), "internal", "OSError"),
        (_Broken("x"), "internal", "_Broken"),
    ],
)
def test_errors_say_whose_fault_they_are(error: Exception, fault: str, kind: str) -> None:
    """What the supervisor raises is told with its fault; what nobody foresaw is told too, and logged."""
    with served() as here:
        here.call(lambda: setattr(here.host, "error", error))
        with pytest.raises(RequestFailed) as caught:
            ask(here.address, requests.SaveRequest(Path("/a")))
        assert (caught.value.fault.value, caught.value.name) == (fault, kind)
        assert bool(here.host.lines) == (kind in {"_Broken", "OSError", "CallFailed"})
        here.call(lambda: setattr(here.host, "error", None))
        assert ask(here.address, StatusRequest())["state"] == "serving"


def test_events_are_told_until_the_client_leaves() -> None:
    """A subscriber gets what happens, and leaving ends the subscription."""
    with served() as here:
        with Call(here.address, requests.EventsRequest()) as client:
            assert here.host.subscribed.wait(60)
            here.call(lambda: here.host.events.put_nowait({"kind": "outcome", "a": 1}))
            assert _next(client) == ControlEvent({"kind": "outcome", "a": 1})
        assert here.host.unsubscribed.wait(60)
        here.host.unsubscribed.clear()
        here.host.subscribed.clear()
        with Call(here.address, requests.EventsRequest()) as client:
            assert here.host.subscribed.wait(60)
            here.call(lambda: here.host.events.put_nowait(None))
            assert _next(client) == ControlAnswer({})


# -- limits ------------------------------------------------------------------------------------------------------------


def test_a_line_that_does_not_come_is_not_waited_for() -> None:
    """A client that sends half a request, or nothing, is told so after a while."""
    with served(ControlLimits(request_s=0.2)) as here:
        for start in (b"", b'{"kind":'):
            assert "without a line feed" in _asked(here, start)["error"]["message"]


def test_a_line_that_never_ends_is_refused() -> None:
    """More bytes than a request can have are refused before they are read as one."""
    with served() as here, _raw(here.address) as raw:
        with pytest.raises(BrokenPipeError):
            raw.sendall(b"x" * (2 * requests.MAX_REQUEST_BYTES))
        assert "bytes at most" in json.loads(raw.recv(1 << 16))["error"]["message"]
        assert ask(here.address, StatusRequest())["state"] == "serving"


def test_long_requests_are_read_and_half_ones_have_a_limit_together() -> None:
    """A request of megabytes arrives; unfinished ones of several clients together do not fill the memory."""
    with served(ControlLimits(n_pending_bytes=4 << 20)) as here:
        text = "a" * (3 << 20)
        ask(here.address, GenerateRequest(prompt=text, n_predict=1))
        assert here.host.calls[0][1]["request"].prompt == text
        with _raw(here.address) as first, _raw(here.address) as second:
            first.sendall(b"x" * (3 << 20))
            with suppress(BrokenPipeError):
                second.sendall(b"x" * (2 << 20))
            # It hung up while we were still sending; what it said before that is there.
            assert json.loads(second.recv(1 << 16))["error"]["fault"] == "busy"


def test_too_many_connections_are_turned_away() -> None:
    """The connection after the last is told that there are too many; one that ends makes room."""
    with served(ControlLimits(n_connections=3)) as here:
        open_ = [_raw(here.address) for _ in range(3)]
        while here.server.n_connections < 3:
            pass
        with pytest.raises(RequestFailed, match="busy with 3 connections"):
            ask(here.address, StatusRequest())
        for one in open_:
            one.close()
        while here.server.n_connections:
            pass
        assert ask(here.address, StatusRequest())["state"] == "serving"


def test_another_user_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of another user gets nothing; a client leaves a host of another user."""
    with served() as here:
        monkeypatch.setattr("splitctl.control.connection.peer_uid", lambda _: os.getuid() + 1)
        with _raw(here.address) as raw:
            assert raw.recv(100) == b""
        assert "turned away" in here.host.lines[0]
        monkeypatch.undo()
        monkeypatch.setattr("splitctl.control.client.peer_uid", lambda _: os.getuid() + 1)
        with pytest.raises(HostGone, match="is not yours"):
            ask(here.address, StatusRequest())


# -- the client --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "match"),
    [
        (b"", "hung up"),
        (b"what\n", "no answer"),
        (b'{"answer":1}\n', "no answer"),
        (b'{"error":{"fault":"x"}}\n', "no answer"),
        (b'{"event":{"kind":"a"}}\n', "hung up"),
    ],
)
def test_a_host_that_speaks_otherwise_is_told(said: bytes, match: str, tmp_path: Path) -> None:
    """A host that hangs up early, or says what is no answer, is one error that names the session."""
    os.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("s.sock")
        listening.listen()

        def answer() -> None:
            one, _ = listening.accept()
            with one:
                one.recv(1 << 16)
                one.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(HostGone, match=match) as caught:
            ask(Address("here", Path("s.sock")), StatusRequest())
        assert "session here" in str(caught.value)
        thread.join()


def test_what_came_before_an_error_is_not_lost(tmp_path: Path) -> None:
    """An error in the same breath as events is told after them, and an unknown fault is nobody's."""
    first, second = socket.socketpair()
    client = Call.__new__(Call)
    client.address = Address("a", tmp_path)
    client._pending = bytearray()
    client._failure = None
    client._socket = first
    with first, second:
        second.sendall(b'{"event":{"kind":"a"}}\n{"error":{"fault":"new","kind":"K","message":"m","body":{"b":1}}}\n')
        assert client.read() == [ControlEvent({"kind": "a"})]
        with pytest.raises(RequestFailed, match="m") as caught:
            client.read()
        assert (caught.value.fault, caught.value.body) == (Fault.INTERNAL, {"b": 1})


def test_nobody_there_and_nobody_answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that nobody listens on is no session; a host that is silent, or takes nothing, is told with the time."""
    monkeypatch.chdir(tmp_path)
    address = Address("a", Path("a.sock"))
    with pytest.raises(NoSuchSession):
        ask(address, StatusRequest())
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("a.sock")
        with pytest.raises(NoSuchSession):
            ask(address, StatusRequest())
        listening.listen()
        with pytest.raises(HostGone, match=r"was silent for 0\.05 s"):
            ask(address, StatusRequest(), timeout_s=0.05)
