"""What the documents say of the server runs: every curl line, and the command that llama-swap is given."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitctl.http import HttpConfig
from splitctl.http.intake import HttpLimits
from tests.ctl.houses import GUARD_S, ROOT, house
from tests.ctl.web import Web, asked, events, free_port, web

_README, _HTTP, _RECIPES = ROOT / "README.md", ROOT / "docs" / "http.md", ROOT / "docs" / "recipes.md"
_CURLS = [
    line for path in (_README, _HTTP) for line in re.findall(r"^\$ (curl .+)$", path.read_text("utf-8"), re.MULTILINE)
]


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[Web]:
    """A host of a real model on two virtual devices."""
    with house() as home, web(home, "-m", smollm2, "--device", "CPU,CPU", "-c", "4096", "-t", "1") as served:
        yield served


@pytest.mark.model
@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl (Debian: apt-get install curl)")
@pytest.mark.parametrize("line", _CURLS)
def test_a_line_of_curl_gets_what_it_asks_for(server: Web, line: str) -> None:
    """Every curl line of the documents, sent to a real host, is answered with 200 and no error."""
    assert "http://127.0.0.1:8080/" in line
    words = shlex.split(line.replace(":8080/", f":{server.port}/"))
    done = subprocess.run([*words, "--fail-with-body", "-sS"], capture_output=True, check=False, timeout=GUARD_S)
    assert done.returncode == 0, (done.stdout, done.stderr)
    if "-N" in words:
        assert events(done.stdout)[-1] == "[DONE]"
    else:
        body = json.loads(done.stdout)
        assert body
        assert body.get("status") in {None, "ok", "switched", "unchanged"}


@pytest.mark.model
def test_the_command_of_llama_swap_runs_as_it_stands(smollm2: Path) -> None:
    """It says 503 and then 200 on /health, answers on the port that it was given, and ends with 0 at SIGTERM."""
    command, *_ = re.findall(r"cmd: \|\n((?: {6}.+\n)+)", _RECIPES.read_text("utf-8"))
    port = free_port()
    filled_in = {"${PORT}": str(port), "${MODEL_ID}": "small", "/models/small.gguf": str(smollm2)}
    for name, value in filled_in.items():
        command = command.replace(name, value)
    words = shlex.split(command)
    assert words[0] == "splitctl"
    with house() as home:
        process = home.start(*words[1:], LLAMA_ARG_THREADS="1")
        try:
            seen = []
            while 200 not in seen:
                assert process.poll() is None, process.communicate()
                try:
                    seen.append(asked(port, "GET", "/health").status)
                except ConnectionRefusedError:
                    continue
            assert (seen[0], set(seen)) == (503, {503, 200})
            says = [{"role": "user", "content": "Hi."}]
            answer = asked(port, "POST", "/v1/chat/completions", {"model": "small", "messages": says, "max_tokens": 3})
            assert answer.body["model"] == "small"
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=GUARD_S)
        finally:
            process.kill()
        assert process.returncode == 0, err.decode()
        assert out.startswith(b"ready: ")
        assert out.count(b"\n") == 1
        assert home.saved("small").is_file()


def test_limits_are_those_of_the_document() -> None:
    """The numbers in docs/http.md are those of the code."""
    text = _HTTP.read_text("utf-8")
    limits, config = HttpLimits(), HttpConfig()
    bodies = (
        f"{limits.body_bytes >> 20} MiB and 2 million values for text, {limits.token_body_bytes >> 20} MiB for tokens "
        f"alone, {limits.small_body_bytes >> 10} KiB for"
    )
    for said in (
        bodies,
        f"whole within {limits.body_s:g} s; {limits.pending_bytes >> 20} MiB incomplete",
        f"{limits.held_bytes >> 20} MiB whose answers are under way",
        f"| connections | {limits.n_connections};",
        f"| an answer that is not read | {limits.write_s:g} s |",
        f"| streams that wait | {limits.n_queued} |",
        f"| clients of `/split-mode/events` | {limits.n_watchers} |",
        f"whole within {limits.head_s:g} s |",
        f"at the end; {config.drain_s:g} seconds |",
    ):
        assert said in text


def test_routes_are_those_of_the_document() -> None:
    """Every route that the server has is named in docs/http.md."""
    text = _HTTP.read_text("utf-8")
    source = (ROOT / "splitctl" / "http" / "app.py").read_text("utf-8")
    routes = re.findall(r'^ +\("(?:GET|POST)", "(/[^"]*)"', source, re.MULTILINE)
    assert len(routes) > 15
    routes = [one.replace(":path", "") for one in routes]
    spoken_of = {"/v1/health", "/models", "/models/{id}", "/chat/completions"}  # the same under another name
    assert [one for one in routes if one not in text and one not in spoken_of] == []
