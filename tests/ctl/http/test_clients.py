"""The clients that people bring: litellm, langchain-openai and llm, beside OpenAI's own in test_http.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ctl.houses import GUARD_S, house
from tests.ctl.http.client_programs import N_TOKENS
from tests.ctl.web import web

pytestmark = [pytest.mark.model, pytest.mark.slow]
KEY = "a-key-of-this-test"
_ROOT = Path(__file__).parents[3]

Run = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def run(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Run a client's program against a host of SmolLM2, with nothing else to talk to."""
    folder = tmp_path_factory.mktemp("client")
    placed = ["-m", smollm2, "--device", "CPU,CPU", "-c", "2048", "-t", "1", "-np", "2"]
    with house() as home, web(home, *placed, key=KEY) as server:

        def run(client: str) -> dict[str, Any]:
            kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI", "LANG", "LLM"))}
            offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "HOME": str(folder)}
            done = subprocess.run(
                [sys.executable, "-m", "tests.ctl.http.client_programs", client, f"{server.url}/v1", KEY],
                env={**kept, **offline, "LLM_USER_PATH": str(folder), "PYTHONPATH": str(_ROOT)},
                capture_output=True,
                text=True,
                timeout=GUARD_S,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            return told

        yield run


def _check_same(told: dict[str, Any]) -> None:
    assert told["text"]
    assert told["streamed"] == told["text"]
    assert all(0 < n <= N_TOKENS for n in told["usage"])
    assert len(set(told["usage"])) == 1


def test_litellm(run: Run) -> None:
    """Chats of several turns, streams with usage, stop texts; a wrong key and a full context are told as such."""
    told = run("litellm")
    _check_same(told)
    assert told["finish"] in {"stop", "length"}
    assert told["stopped"]
    assert "." not in told["stopped"]
    assert told["errors"] == {
        "key": "AuthenticationError",
        "context": "ContextWindowExceededError",
        "field": "BadRequestError",
    }


def test_langchain(run: Run) -> None:
    """Text in parts, streams with usage, two at a time, bound stop texts."""
    told = run("langchain")
    _check_same(told)
    assert told["finish"] in {"stop", "length"}
    assert len(told["batch"]) == 2
    assert all(told["batch"])
    assert "." not in told["stopped"]


def test_llm(run: Run) -> None:
    """A conversation in llm goes on with what was said before."""
    told = run("llm")
    _check_same(told)
    assert told["second"]
