"""RPC servers are greeted before the library sees them: it would abort, or wait for ever."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from llama_native import Context, ContextParams, Library, Model, ModelParams, RpcServerUnusable, SplitMode
from llama_native.rpc import check_endpoint, greet
from tests.native.real import WITH_RPC, library_of
from tests.stublib import run_child
from tests.tool import CHECKOUT, tool_command
from tools.rpc_server import served


@contextmanager
def _listening(answer: Callable[[bytes], bytes | None]) -> Iterator[str]:
    """Listen on a free port and answer each greeting; None leaves the client waiting. Yields HOST:PORT."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                held.append(client)
                said = answer(client.recv(64))
                if said is not None:
                    client.sendall(said)
                    client.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join(30)
        for client in held:
            client.close()


def _reply(n_bytes: int) -> bytes:
    return n_bytes.to_bytes(8, "little") + bytes(n_bytes)


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":1", "host:0", "host:65536", "a b:1", "host:1:2", "h:-1", "h:1\n"]
)
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    """Only HOST:PORT passes, and the library never sees the rest."""
    with pytest.raises(RpcServerUnusable, match="HOST:PORT"):
        check_endpoint(text)


def test_an_endpoint_is_taken_apart() -> None:
    """Host and port."""
    assert check_endpoint("gpu-2.example_net:50052") == ("gpu-2.example_net", 50052)


def test_a_server_of_today_answers_the_first_greeting() -> None:
    """The request holds 24 bytes of capabilities."""
    heard: list[bytes] = []
    with _listening(lambda request: heard.append(request) or _reply(28)) as endpoint:
        greet(endpoint)
    assert heard == [b"\x0e" + (24).to_bytes(8, "little") + bytes(24)]


def test_a_server_of_yesterday_answers_the_second() -> None:
    """It closes on a request with a body, and answers one without."""
    with _listening(lambda request: _reply(3) if len(request) == 9 else b"") as endpoint:
        greet(endpoint)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"short", _reply(2)])
def test_something_else_that_listens_is_no_server(answer: bytes) -> None:
    """A web server, one that hangs up, half an answer, and an answer too short for a version."""
    with _listening(lambda _: answer) as endpoint, pytest.raises(RpcServerUnusable, match="no RPC server"):
        greet(endpoint)


def test_a_busy_server_is_told_from_a_dead_one() -> None:
    """One accepts and does not answer; on the other's port nobody listens."""
    with _listening(lambda _: None) as endpoint, pytest.raises(RpcServerUnusable, match="one client at a time"):
        greet(endpoint, timeout_s=0.2)
    with pytest.raises(RpcServerUnusable, match="cannot be reached"):
        greet(endpoint)
    with pytest.raises(RpcServerUnusable, match="cannot be reached"):
        greet("no-such-host.invalid:1")


def child_two_servers(path: str, model_path: str, endpoints: list[str]) -> dict[str, Any]:
    library = Library.open(path)
    added = library.add_rpc_servers(endpoints)
    again = library.add_rpc_servers(endpoints)
    refused = []
    for wrong in ([f"127.0.0.1:{port}" for port in range(1, 17)], ["127.0.0.1:1"], ["nonsense"]):
        with pytest.raises(RpcServerUnusable) as error:
            library.add_rpc_servers(wrong)
        refused.append(str(error.value))
    devices = library.devices()
    params = ModelParams(split_mode=SplitMode.LAYER, devices=added)
    with (
        Model.load(library, model_path, params) as model,
        Context(model, ContextParams(n_ctx=64, n_threads=1)) as context,
    ):
        context.decode([5, 6, 7], [0, 1, 2], [0, 0, 0], [False, False, True])
        row = context.logits(2)
        with pytest.raises(RpcServerUnusable) as busy:
            greet(endpoints[0], timeout_s=0.5)
    greet(endpoints[0])
    return {
        "added": added,
        "again": again,
        "refused": refused,
        "busy": str(busy.value),
        "devices": [(one.name, one.description) for one in devices],
        "has_logits": any(row),
    }


@pytest.mark.build
@pytest.mark.model
def test_two_servers_give_two_devices(smollm2: Path) -> None:
    """Each is a device, once, and a model runs on both; while it lies there the server is busy, and afterwards free."""
    path = library_of(WITH_RPC)
    with served(path) as (one, _), served(path) as (two, _):
        endpoints = [one, two]
        found = run_child(child_two_servers, path, smollm2, endpoints).value()
    assert found["added"] == ["RPC0", "RPC1"]
    assert found["again"] == []
    assert found["devices"][1:] == [["RPC0", endpoints[0]], ["RPC1", endpoints[1]]]
    assert found["has_logits"]
    assert "one client at a time" in found["busy"]
    too_many, unreachable, nonsense = found["refused"]
    assert "16 servers at most" in too_many
    assert "cannot be reached" in unreachable
    assert "HOST:PORT" in nonsense


@pytest.mark.build
def test_a_port_that_is_taken_is_a_clear_end() -> None:
    """The tool says which endpoint is not to be had, and ends."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = tool_command("rpc_server", "--lib", library_of(WITH_RPC), "--port", port)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, cwd=CHECKOUT, text=True, **pipes) as tool:
            assert tool.stderr is not None
            said = tool.stderr.read()
            assert tool.wait(30) == 1
    assert f"127.0.0.1:{port} is not to be had" in said
