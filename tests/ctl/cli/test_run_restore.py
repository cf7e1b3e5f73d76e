"""`splitctl run --restore`: it goes on as the saved session would have, and says where it could not."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ctl.houses import House, house, stub_arguments
from tests.stublib import needs_compiler

pytestmark = [pytest.mark.stub, needs_compiler]

_SAMPLED = ["--temp", "0.9", "--top-k", "20", "--repeat-penalty", "1.3", "--seed", "7"]


@pytest.fixture(scope="module")
def home() -> Iterator[House]:
    """A user with folders of their own."""
    with house() as made:
        yield made


@pytest.fixture(scope="module")
def stub(home: House) -> list[str | Path]:
    """What makes a run use the stub."""
    return stub_arguments(home.folder)


@pytest.fixture(scope="module")
def straight(home: House, stub: list[str | Path]) -> list[int]:
    """Eight sampled tokens in one run."""
    tokens: list[int] = home.json("run", *stub, "-p", "hello", "-n", "8", *_SAMPLED)["tokens"]
    return tokens


@pytest.fixture(scope="module")
def saved(home: House, stub: list[str | Path]) -> Path:
    """A session that has drawn the first four of them."""
    path = home.folder / "carry"
    home.json("run", *stub, "-p", "hello", "-n", "4", *_SAMPLED, "--save", path)
    return path


def _gone_on(home: House, stub: list[str | Path], saved: Path, *flags: str, **env: str) -> Any:
    done = home.run("run", *stub, "--restore", saved, "-n", "4", "--json", *flags, **env)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


@pytest.mark.parametrize("flags", [[], _SAMPLED])
def test_a_restored_session_draws_on_as_it_did(
    home: House, stub: list[str | Path], saved: Path, straight: list[int], flags: list[str]
) -> None:
    """Without a flag, and with the flags that it had, the next tokens are those of a run that never ended."""
    body = _gone_on(home, stub, saved, *flags)
    assert body["tokens"] == straight[4:]
    assert (body["seed"], body["sampler"]["temp"], body["sampler"]["top_k"]) == (7, 0.9, 20)


@pytest.mark.parametrize(
    ("flags", "env", "changed"),
    [
        (["--temp", "0.5"], {}, {"temp": 0.5}),
        (["--seed", "9"], {}, {"seed": 9}),
        (["--temp", "0.8"], {}, {"temp": 0.8}),
        ([], {"LLAMA_ARG_TOP_K": "3"}, {"top_k": 3}),
    ],
)
def test_a_flag_or_its_variable_wins_over_what_was_saved(
    home: House, stub: list[str | Path], saved: Path, flags: list[str], env: dict[str, str], changed: dict[str, Any]
) -> None:
    """What is named counts, a default that is named too; the rest stays as it was saved."""
    sampler = _gone_on(home, stub, saved, *flags, **env)["sampler"]
    was = {"temp": 0.9, "top_k": 20, "repeat_penalty": 1.3, "seed": 7}
    assert {name: sampler[name] for name in was} == was | changed


def test_tokens_that_are_read_again_are_told_on_stderr(home: House, stub: list[str | Path]) -> None:
    """A slot file whose cache is damaged: the one line says what was done and why."""
    path = home.folder / "slot"
    path.write_bytes(struct.pack("<4sII3i", b"qsgg", 4, 3, 104, 101, 108) + bytes(64))
    done = home.run("run", *stub, "--restore", path, "-n", "2", "--temp", "0")
    assert done.returncode == 0, done.stderr.decode()
    (line,) = [line for line in done.stderr.decode().splitlines() if line.startswith("restored:")]
    assert "the tokens were read again:" in line
    assert done.stderr.count(b"restoring: ") == 1


def test_an_empty_session_wants_a_prompt_and_begins_a_text_with_it(home: House, stub: list[str | Path]) -> None:
    """Without one the line says so; with one the tokens are those of a run that restored nothing."""
    path = home.folder / "empty"
    path.write_bytes(struct.pack("<4sIIII", b"qsgg", 4, 0, 1, 0))
    done = home.run("run", *stub, "--restore", path)
    assert (done.returncode, b"a prompt (-p or -f)" in done.stderr) == (2, True), done.stderr.decode()
    flags = ["-p", "hello", "-n", "4", "--temp", "0"]
    fresh, begun = home.json("run", *stub, *flags), home.json("run", *stub, *flags, "--restore", path)
    assert begun["tokens"] == fresh["tokens"]
    assert begun["timings"]["prompt"]["n"] == fresh["timings"]["prompt"]["n"]


def test_a_state_too_large_is_refused_and_names_the_flag(home: House, stub: list[str | Path]) -> None:
    """The status is that of a refusal, and the line has both numbers."""
    path = home.folder / "long"
    home.json("run", *stub, "-p", "x" * 300, "-n", "1", "--temp", "0", "--save", path)
    done = home.run("run", *stub, "-c", "256", "--restore", path, "-n", "1")
    assert done.returncode == 4, done.stderr.decode()
    assert b"holds 301 tokens and the context has room for 256; ask for -c 301 or more" in done.stderr
