"""The server over HTTP on a real model: OpenAI's own client, the routes beside it, and who may not come in."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from splitctl.control.client import ask as ask_socket
from splitctl.control.requests import StatusRequest
from tests.ctl.houses import GUARD_S, house, stub_arguments
from tests.ctl.web import Web, events, web
from tests.stublib import FaultFile, needs_compiler

pytestmark = [pytest.mark.model, pytest.mark.stub, pytest.mark.slow, needs_compiler]
CHAT = "/v1/chat/completions"
KEY = "a-key-of-this-test"
SAYS = [{"role": "user", "content": "Name three colours."}]
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Iterator[Web]:
    """A host of SmolLM2 on two virtual devices, with a key and a folder for files."""
    with house() as home:
        folder = home.folder / "files"
        folder.mkdir()
        placed = ["-m", smollm2, "--device", "CPU,CPU", "-c", "2048", "-t", "1", "-np", "2"]
        with web(home, *placed, "--slot-save-path", folder, key=KEY) as server:
            yield server


@pytest.fixture(scope="module")
def stub() -> Iterator[Web]:
    """A host of the stub library, without a key."""
    with house() as home, web(home, *stub_arguments(home.folder)) as server:
        yield server


@pytest.fixture
def client(real: Web) -> openai.OpenAI:
    """OpenAI's client."""
    return openai.OpenAI(base_url=f"{real.url}/v1", api_key=KEY, max_retries=0)


def test_the_official_client_chats(client: openai.OpenAI) -> None:
    """A greedy chat is answered with text, a reason and counts, the same way twice; a stream gives the same text."""
    asked = {"model": "any", "messages": SAYS, "temperature": 0.0, "max_tokens": 12}
    first = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    again = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    text = first.choices[0].message.content
    assert text
    assert first.choices[0].finish_reason == "length"
    assert first.usage.completion_tokens == 12
    assert first.usage.total_tokens == first.usage.prompt_tokens + 12
    assert again.choices[0].message.content == text
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == text
    assert [one.choices[0].finish_reason for one in chunks if one.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 12


def test_an_answer_goes_on_where_it_was_cut(client: openai.OpenAI) -> None:
    """The rest of a greedy answer comes, and no new one: the last message is neither closed nor followed by a turn."""
    asked = {"model": "any", "temperature": 0.0, "max_tokens": 8}
    text = client.chat.completions.create(messages=SAYS, **asked).choices[0].message.content  # type: ignore[call-overload]
    said = text[: text.index(" ", len(text) // 2)]
    messages = [*SAYS, {"role": "assistant", "content": said}]
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    rest = client.chat.completions.create(messages=messages, **asked, extra_body=goes_on)  # type: ignore[call-overload]
    assert (said + rest.choices[0].message.content).startswith(text)


def test_messages_are_read_in_every_form(client: openai.OpenAI) -> None:
    """Parts, a developer's message and null content give the tokens of the same chat as the template writes it."""

    def n_prompt(*messages: dict[str, object]) -> int:
        answer = client.chat.completions.create(model="any", messages=messages, max_tokens=1)  # type: ignore[call-overload]
        return int(answer.usage.prompt_tokens)

    parts = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    silent, empty = {"role": "assistant", "content": None}, {"role": "assistant", "content": ""}
    plain = n_prompt({"role": "system", "content": "Be brief.\nBe kind."}, *SAYS, empty, *SAYS)
    assert n_prompt({"role": "developer", "content": parts}, *SAYS, silent, *SAYS) == plain


def test_what_the_model_would_not_see_is_refused(client: openai.OpenAI) -> None:
    """SmolLM2's template writes no calls of tools: they are not dropped in silence."""
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    with pytest.raises(openai.BadRequestError, match="template cannot be used: it leaves out tool_calls"):
        client.chat.completions.create(model="any", messages=[*SAYS, called], max_tokens=1)  # type: ignore[list-item]


def test_the_official_client_completes(client: openai.OpenAI) -> None:
    """A raw prompt goes on as text, whole and as a stream, from a text and from tokens."""
    asked = {"model": "any", "prompt": "The capital of France is", "temperature": 0.0, "max_tokens": 4}
    whole = client.completions.create(**asked)  # type: ignore[call-overload]
    parts = client.completions.create(**asked, stream=True)  # type: ignore[call-overload]
    assert "Paris" in whole.choices[0].text
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    by_tokens = client.completions.create(**{**asked, "prompt": [504, 3575, 282, 4649, 314]})  # type: ignore[call-overload]
    assert by_tokens.usage.prompt_tokens == 5


def test_seeds_and_temperatures_count(client: openai.OpenAI) -> None:
    """The same seed draws the same text, another one (over 32 bits) another text, and no seed is random."""
    asked = {"model": "any", "messages": SAYS, "temperature": 1.5, "max_tokens": 16, "extra_body": {"top_k": 0}}

    def text(**more: int) -> str | None:
        return str(client.chat.completions.create(**asked, **more).choices[0].message.content)  # type: ignore[call-overload]

    assert text(seed=7) == text(seed=7)
    assert len({text(seed=one) for one in (7, 8, 2**40)}) == 3


def test_stop_texts_end_an_answer_and_stay_out_of_it(client: openai.OpenAI) -> None:
    """A stop text, alone or in a list, ends the answer before it, in streams too."""
    asked = {"model": "any", "prompt": "1, 2, 3, 4, 5,", "temperature": 0.0, "max_tokens": 16}
    free = client.completions.create(**asked).choices[0].text  # type: ignore[call-overload]
    stop = free[4:6]
    for stops in (stop, ["never to be seen", stop]):
        ended = client.completions.create(**asked, stop=stops).choices[0]  # type: ignore[call-overload]
        assert ended.finish_reason == "stop"
        assert ended.text == free[: free.index(stop)]
    parts = client.completions.create(**asked, stop=stop, stream=True)  # type: ignore[call-overload]
    assert "".join(part.choices[0].text for part in parts) == free[: free.index(stop)]


def test_the_official_client_gets_typed_errors(real: Web, client: openai.OpenAI) -> None:
    """A wrong key, a wrong field and a prompt that is too long raise what the client has for them."""
    with pytest.raises(openai.AuthenticationError, match="API key"):
        openai.OpenAI(base_url=f"{real.url}/v1", api_key="other", max_retries=0).models.list()
    with pytest.raises(openai.BadRequestError, match="temperature") as wrong:
        client.chat.completions.create(model="any", messages=SAYS, temperature=-1.0)  # type: ignore[arg-type]
    assert wrong.value.param == "temperature"
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="exceeds the available context size") as long:
            client.completions.create(model="any", prompt="word " * 4000, max_tokens=1, stream=stream)
        assert long.value.code == "context_length_exceeded"
        assert long.value.body["n_prompt_tokens"] == 4001  # type: ignore[index]
        assert long.value.body["n_ctx"] == 1024  # type: ignore[index]
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="any", input="x")


def test_models_are_listed(client: openai.OpenAI) -> None:
    """The one model that is served is listed by its name, and found by it."""
    (model,) = client.models.list().data
    assert "smollm2" in model.id.lower()
    assert client.models.retrieve(model.id) == model
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.models.retrieve("gpt-4o")


def test_a_switch_over_http_is_seen_by_the_socket_and_by_watchers(real: Web) -> None:
    """POST /split-mode gives the outcome, its stages and its end are events, and the control socket says the same."""
    watching = real.connect()
    watching.request("GET", "/split-mode/events", headers={"Authorization": f"Bearer {KEY}"})
    seen = watching.getresponse()
    assert seen.getheader("content-type") == "text/event-stream; charset=utf-8"
    target = "tensor" if real.get("/split-mode").body["effective"] == "layer" else "layer"
    outcome = real.post("/split-mode", {"to": target, "proof": "bytes"}).body
    assert (outcome["status"], outcome["effective"]) == ("switched", target)
    stream = b""
    while b"event: switch_ended" not in stream or not stream.endswith(b"\n\n"):
        stream += seen.read1()
    seen.close()
    watching.close()
    assert b"event: switch_stage" in stream
    ended = next(one for one in events(stream) if "outcome" in one)["outcome"]
    assert ended == outcome
    status = ask_socket(real.host.address, StatusRequest())
    assert status["effective"] == target
    assert real.get("/session").body["recent_switches"][-1]["requested"] == target
    dry = real.post("/split-mode", {"to": target, "dry_run": True}).body
    assert dry["is_unchanged"] is True


def test_what_stands_beside_openais_routes(real: Web) -> None:
    """Health, properties, slots, numbers and the page say what they should."""
    assert real.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status == 200
    assert real.get("/health").body == {"status": "ok"}
    props = real.get("/props").body
    assert (props["total_slots"], props["default_generation_settings"]["n_ctx"]) == (2, 1024)
    assert "/" not in props["model_path"]
    assert [(one["name"], one["kind"], one["is_fresh"]) for one in props["devices"]] == [("CPU", "cpu", True)] * 2
    assert all(0 < one["memory_free"] < one["memory_total"] and one["description"] for one in props["devices"])
    assert "/" not in real.get("/session").body["model"]["path"]
    assert [one["id"] for one in real.get("/slots").body] == [0, 1]
    numbers = real.get("/metrics")
    assert numbers.headers["content-type"].startswith("text/plain")
    lines = dict(line.rsplit(" ", 1) for line in numbers.raw.decode().splitlines() if not line.startswith("#"))
    assert float(lines["llamacpp:tokens_predicted_total"]) > 0
    assert lines['splitctl_state{state="serving"}'] == "1.0"
    page = real.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert b"http://" not in page.raw.replace(b'"http://"', b"")
    assert "default-src 'none'" in page.headers["content-security-policy"]


def test_files_are_base_names_in_one_folder(real: Web) -> None:
    """A session is saved and restored by name, and no name leads out of the folder."""
    held = [one["n_tokens"] for one in real.get("/slots").body]
    assert real.post("/session/save", {"filename": "a.safetensors"}).body["path"] == "a.safetensors"
    assert real.post("/session/restore", {"filename": "a.safetensors"}).status == 200
    assert [one["n_tokens"] for one in real.get("/slots").body] == held
    for name in ("../a", "/etc/passwd", "a/b", "", ".", "..", ".hidden", "a\0b", "x" * 200, 5, None, ["a"]):
        assert "filename" in real.post("/session/save", {"filename": name}).error["message"]
    assert real.post("/session/restore", {"filename": "none"}).status == 404


def test_keys_open_everything_but_health_and_the_page(real: Web) -> None:
    """Without the key there is health and the page, and nothing else; X-Api-Key opens too."""
    nobody = Web(real.host, real.port)
    assert nobody.get("/health").status == nobody.get("/").status == 200
    for path in (
        "/v1/models",
        "/session",
        "/props",
        "/slots",
        "/metrics",
        "/split-mode",
        "/split-mode/events",
        "/nothing",
    ):
        assert nobody.get(path).error["type"] == "authentication_error"
    for path in (CHAT, "/split-mode", "/session/save", "/"):
        assert nobody.post(path, {}).status == 401
    assert nobody.get("/v1/models", X_Api_Key=KEY).status == 200
    assert nobody.get("/v1/models", X_Api_Key=KEY + "x").status == 401


def test_other_pages_are_turned_away(stub: Web) -> None:
    """A page of another origin, or one that reaches the port under a name of its own, gets nothing."""
    assert stub.post("/split-mode", {"to": "layer"}, Origin="http://evil.example").status == 403
    assert stub.get("/session", Origin="http://evil.example").status == 403
    assert stub.get("/session", Host="evil.example").status == 403
    assert stub.get("/health", Host=f"localhost:{stub.port}").status == 200
    same = f"http://127.0.0.1:{stub.port}"
    assert stub.get("/session", Origin=same, Host=f"127.0.0.1:{stub.port}").status == 200
    preflight = stub.ask("OPTIONS", "/split-mode", Origin="http://evil.example", Access_Control_Request_Method="POST")
    assert "access-control-allow-origin" not in preflight.headers


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"nothing", None),
        (b"[]", None),
        (b"[" * 100_000, None),
        (b'{"messages": NaN}', "messages"),
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": SAYS, "n": 2}, "n"),
        ({"messages": SAYS, "tools": [{}]}, "tools"),
        ({"messages": SAYS, "logprobs": True}, "logprobs"),
        ({"messages": SAYS, "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": SAYS, "max_tokens": -5}, "max_tokens"),
        ({"messages": SAYS, "max_tokens": 10**30}, "max_tokens"),
        ({"messages": SAYS, "max_tokens": 1.5}, "max_tokens"),
        ({"messages": SAYS, "seed": "x"}, "seed"),
        ({"messages": SAYS, "stream": 1}, "stream"),
        ({"messages": SAYS, "stop": [5]}, "stop"),
        ({"messages": SAYS, "stop": ["x"] * 99}, "stop"),
        ({"messages": SAYS, "stream_options": {}, "model": 5}, "model"),
        ({"messages": SAYS, "frequency_penalty": 1}, "frequency_penalty"),
        ({"messages": SAYS, "tempature": 0}, "tempature"),
        ({"messages": [{**SAYS[0], "refusal": "no"}]}, "messages"),
        ({"messages": SAYS, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "messages"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', "temperature"),
    ],
)
def test_bad_bodies_are_refused_by_name(stub: Web, body: object, param: str | None) -> None:
    """What is wrong with a body is said in OpenAI's shape, with the field."""
    answer = stub.post(CHAT, body)
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["param"] == param


def test_other_bad_requests_are_refused(stub: Web) -> None:
    """Unknown paths, wrong methods, huge bodies and bad switches each get their status."""
    assert stub.get("/nothing").status == 404
    assert stub.get(CHAT).status == 405
    assert stub.post("/split-mode", {"to": "sideways"}).status == 400
    assert stub.post("/split-mode", {"to": "layer", "more": 1}).status == 400
    assert stub.post("/split-mode", {"changes": {"n_ctx": "x"}}).status == 400
    assert stub.post("/session/save", {"filename": "a"}).status == 403
    assert stub.post(CHAT, b"x" * 10, Content_Length=str(1 << 40)).status == 413
    assert stub.get("/health").status == 200


def test_garbage_on_the_wire_leaves_the_server_alive(stub: Web) -> None:
    """Lines that are no HTTP, endless headers and half a request end their own connection only."""
    for garbage in (b"\x16\x03\x01" * 50, b"GET\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000):
        with socket.create_connection(("127.0.0.1", stub.port), timeout=60) as connection:
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                continue
    half_open = [socket.create_connection(("127.0.0.1", stub.port)) for _ in range(50)]
    for connection in half_open:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 50\r\n")
    assert stub.get("/health").status == 200
    for connection in half_open:
        connection.close()


def test_who_hangs_up_frees_the_sequence(stub: Web) -> None:
    """A client that goes away in the middle of its stream, or of its wait, leaves no stream behind."""
    body = json.dumps({"prompt": "x", "max_tokens": 900, "stream": True}).encode()
    streaming = stub.connect()
    streaming.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = streaming.getresponse()
    assert response.read1()
    response.close()
    streaming.close()
    waiting = stub.connect()
    waiting.request("POST", "/v1/completions", body.replace(b"true", b"false"), {"Content-Type": "application/json"})
    waiting.close()
    # The request that waits may be read only after the stream is gone, so both are looked at until both hold.
    while stub.get("/session").body["streams"] or not all(one["state"] == "idle" for one in stub.get("/slots").body):
        continue
    done = stub.post("/v1/completions", {"prompt": "x", "max_tokens": 3})
    assert done.body["usage"]["completion_tokens"] == 3


def test_what_was_read_and_drawn_is_counted_for_everybody(stub: Web) -> None:
    """A prompt that did not fit counts for nothing, and a client that left for what was drawn until then."""

    def numbers() -> dict[str, float]:
        lines = [line for line in stub.get("/metrics").raw.decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    before = numbers()
    assert stub.post(CHAT.replace("chat/", ""), {"prompt": "y" * 2000, "max_tokens": 3}).status == 400
    read = "llamacpp:prompt_tokens_total"
    assert numbers()[read] == before[read]
    leaving = stub.connect()
    body = json.dumps({"prompt": "counted", "max_tokens": 900, "stream": True, "return_tokens": True})
    leaving.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = leaving.getresponse()
    seen = b""
    while seen.count(b"data: ") < 5:
        seen += response.read1()
    response.close()
    leaving.close()
    while stub.get("/session").body["streams"] or not all(one["state"] == "idle" for one in stub.get("/slots").body):
        continue
    after = numbers()
    cached = "llamacpp:prompt_tokens_cached_total"
    n_prompt = after[read] - before[read] + after[cached] - before[cached]
    assert n_prompt == len("counted") + 1
    assert after["llamacpp:tokens_predicted_total"] - before["llamacpp:tokens_predicted_total"] >= 5
    assert after['splitctl_answers_total{why="cancelled"}'] > before.get('splitctl_answers_total{why="cancelled"}', 0)


def test_a_key_is_needed_to_change_what_others_reach() -> None:
    """A server that listens to other machines without a key switches for nobody, and says so at its start."""
    with house() as home, web(home, *stub_arguments(home.folder), "--host", "0.0.0.0") as server:  # noqa: S104
        assert server.post("/split-mode", {"to": "tensor"}).status == 403
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status == 200
        status, said = server.host.end()
        assert status == 0
        assert "--api-key" in said


def test_a_worker_killed_under_eight_streams_loses_none() -> None:
    """Eight streams over HTTP go on after their worker is killed, each complete, each as an undisturbed one."""
    with house() as home:
        faults = FaultFile(home.folder / "faults")
        file = faults.env["STUB_FAULTS_FILE"]
        with web(home, *stub_arguments(home.folder), "-np", "8", STUB_FAULTS_FILE=file) as server:
            calm, got = _disturb_eight(server, faults, _kill, pace_us=50_000)
            n_restarts = server.get("/session").body["worker_restarts"]
    assert n_restarts == 1
    for one, other in zip(got, calm, strict=True):
        assert one[-1] == "[DONE]"
        assert _text(one) == _text(other)


def test_a_switch_beside_under_eight_streams_pauses_them_once_and_loses_none() -> None:
    """Eight streams over HTTP go on in a second worker, each complete, each as one that was never moved."""
    outcomes: list[dict[str, object]] = []

    def switch(server: Web) -> None:
        outcomes.append(server.post("/split-mode", {"to": "tensor", "via": "beside"}).body)

    with house() as home:
        faults = FaultFile(home.folder / "faults")
        file = faults.env["STUB_FAULTS_FILE"]
        with web(home, *stub_arguments(home.folder), "-np", "8", STUB_FAULTS_FILE=file) as server:
            server.post("/split-mode", {"to": "tensor", "dry_run": True})
            calm, got = _disturb_eight(server, faults, switch, pace_us=150_000)
            status = server.get("/session").body
    assert [(one["status"], one["via"], one["n_sequences"]) for one in outcomes] == [("switched", "beside", 8)]
    assert (status["effective"], status["worker_restarts"], status["recomputed"]) == ("tensor", 0, 0)
    for one, other in zip(got, calm, strict=True):
        assert one[-1] == "[DONE]"
        assert _text(one) == _text(other)


def _kill(server: Web) -> None:
    for worker in server.host.below():
        worker.kill()


def _disturb_eight(
    server: Web, faults: FaultFile, disturb: Callable[[Web], None], *, pace_us: int
) -> tuple[list[list[object]], list[list[object]]]:
    """Run eight streams in peace, and again with something done to their worker; give what came of both."""
    asked = [{"prompt": f"number {n}", "max_tokens": 60, "temperature": 0, "stream": True} for n in range(8)]
    calm = [events(server.post("/v1/completions", one).raw) for one in asked]
    got: list[list[object]] = [[] for _ in asked]
    begun = threading.Barrier(9)

    def read(index: int) -> None:
        connection = server.connect()
        connection.request("POST", "/v1/completions", json.dumps(asked[index]), {"Content-Type": "application/json"})
        response = connection.getresponse()
        raw = response.read1()
        begun.wait()
        got[index] = events(raw + response.read())
        response.close()
        connection.close()

    readers = [threading.Thread(target=read, args=(index,)) for index in range(8)]
    # Slow, so that none has ended when it happens, on whatever machine.
    faults.arm(f"pace:decode={pace_us}")
    for reader in readers:
        reader.start()
    begun.wait()
    disturb(server)
    faults.clear()
    for reader in readers:
        reader.join()
    return calm, got


def test_a_signal_lets_answers_end_and_a_second_one_does_not() -> None:
    """At SIGTERM a stream under way comes whole and the host ends with 0; a second one ends it at once."""
    body = json.dumps({"prompt": "x", "max_tokens": 200, "temperature": 0, "stream": True})
    for is_twice in (False, True):
        drain = ("--drain", "1000" if is_twice else "60")
        with house() as home, web(home, *stub_arguments(home.folder), *drain, STUB_FAULTS="pace:decode=5000") as server:
            connection = server.connect()
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            raw = response.read1()
            if is_twice:
                server.host.process.send_signal(signal.SIGTERM)
                assert server.host.process.stderr is not None
                while b"once more ends at once" not in server.host.process.stderr.readline():
                    continue
                assert server.host.end_again()[0] == 130
            else:
                server.host.process.send_signal(signal.SIGTERM)
                assert events(raw + response.read())[-1] == "[DONE]"
                assert server.host.process.wait(GUARD_S) == 0
            response.close()
            connection.close()


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded(stub: Web) -> None:
    """A second server on the same port ends at once with the port in its message."""
    with house() as home:
        done = home.run("serve", *stub_arguments(home.folder), "--port", str(stub.port))
    assert done.returncode == 2
    assert str(stub.port) in done.stderr.decode()


def _text(parts: list[object]) -> str:
    return "".join(part["choices"][0]["text"] for part in parts if isinstance(part, dict) and part["choices"])
