"""`splitctl serve --resume` serves a saved session where it was, unless a flag says otherwise."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from tests.ctl.houses import house, served, stub_arguments
from tests.stublib import needs_compiler


@pytest.mark.stub
@needs_compiler
def test_a_resumed_session_serves_where_it_was_saved(tmp_path: Path) -> None:
    """Mode, devices, context and batches are those of the last switch; the one that is named is not."""
    arguments = stub_arguments(tmp_path)
    model_and_library = arguments[:4]
    with house() as home:
        with served(home, *arguments) as host:
            home.json("attach", "-p", "hello", "-n", "2", "--temp", "0")
            home.json("switch", "--to", "tensor", "-b", "64", "-ub", "32", "-ts", "3,1")
            was = home.json("ps")["sessions"][0]
            host.end()
        with served(home, *model_and_library, "--resume", "-ub", "16"):
            now = home.json("ps")["sessions"][0]
    assert (was["placement"]["mode"], was["placement"]["n_ubatch"]) == ("tensor", 32)
    assert now["placement"] == was["placement"] | {"n_ubatch": 16}
    assert now["sequences"] == was["sequences"]


@pytest.mark.stub
@needs_compiler
def test_a_saved_session_too_large_for_a_host_is_refused_by_every_door(tmp_path: Path) -> None:
    """Resume, the control socket and HTTP say what a switch says; the session that is served goes on."""
    arguments = stub_arguments(tmp_path)
    said = "holds 304 tokens and the context has room for 256; ask for -c 304 or more"
    with house() as home:
        with served(home, *arguments) as host:
            home.json("attach", "-p", "x" * 300, "-n", "4", "--temp", "0")
            host.end()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        small = ("-c", "256", "--port", str(port), "--slot-save-path", home.saved().parent)
        resumed = home.run("serve", *arguments, "--resume", "-c", "256")
        assert (resumed.returncode, said in resumed.stderr.decode()) == (4, True), resumed.stderr
        with served(home, *arguments, *small):
            home.json("attach", "-p", "hello", "-n", "2", "--temp", "0")
            (before,) = home.json("ps")["sessions"]
            restored = home.run("restore", home.saved())
            assert (restored.returncode, said in restored.stderr.decode()) == (4, True), restored.stderr
            with pytest.raises(HTTPError) as error:
                urlopen(f"http://127.0.0.1:{port}/session/restore", b'{"filename": "default.safetensors"}')
            assert (error.value.code, said in error.value.read().decode()) == (409, True)
            (after,) = home.json("ps")["sessions"]
    assert after["sequences"] == before["sequences"]
