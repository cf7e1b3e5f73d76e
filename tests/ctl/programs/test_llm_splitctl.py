"""The plugin for LLM (tools/llm_splitctl), by the real `llm`: models of files, and models of running sessions."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import click.testing
import llm
import llm_splitctl
import pytest
from llm.cli import cli
from llm.plugins import pm

import splitctl
from tests.ctl.houses import GUARD_S, ROOT, house, served
from tests.ctl.programs.llm_program import DOG, DOGS, GREEDY

pytestmark = pytest.mark.model

_PLUGIN = ROOT / "tools" / "llm_splitctl"


@pytest.fixture(scope="module")
def ours(smollm2: Path) -> Iterator[None]:
    """Two sequences of a real model that are served as session `ours`, for an `llm` in this process with the plugin."""
    placed = ["-m", smollm2, "--device", "CPU,CPU", "-c", "1024", "-np", "2", "-t", "1"]
    pm.register(llm_splitctl, name="splitctl")
    llm_splitctl.register_commands(cli)
    with house() as home, served(home, *placed, name="ours"):
        (home.folder / "llm").mkdir()
        own = {"LLM_USER_PATH": str(home.folder / "llm"), "HF_HUB_CACHE": str(home.folder / "hub")}
        with mock.patch.dict(os.environ, home.env(**own), clear=True):
            yield
    pm.unregister(name="splitctl")


def run(*words: str) -> click.testing.Result:
    """Run `llm` as a user does, with nothing on its standard input."""
    return click.testing.CliRunner().invoke(cli, words)


def test_a_file_answers_and_is_switched_between_turns(smollm2: Path, tmp_path: Path) -> None:
    """Two turns with a switch between them, a schema, errors of one line; `llm --help` loads nothing of splitctl."""
    told = tomllib.loads((_PLUGIN / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    made = tmp_path / "site" / "llm_splitctl-1.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {told['name']}\nVersion: 1\n", encoding="utf-8")
    points = "".join(f"{name} = {value}\n" for name, value in told["entry-points"]["llm"].items())
    (made / "entry_points.txt").write_text(f"[llm]\n{points}", encoding="utf-8")
    path = os.pathsep.join(map(str, (made.parent, _PLUGIN, ROOT)))
    own = {"LLM_USER_PATH": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path), "HF_HUB_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.ctl.programs.llm_program", smollm2],
        env={**os.environ, **own, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=GUARD_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    said = json.loads(done.stdout)
    assert "splitctl" in said["help"]
    assert said["loaded"] == []
    assert len(said["pieces"]) > 1
    assert "".join(said["pieces"]) == said["text"]
    assert said["second"]
    n_prompt, n_answer, n_third, n_reused = said["usage"]
    assert 0 < n_answer <= GREEDY["n_predict"]
    assert n_prompt + n_answer < n_reused < n_third
    assert said["json"]["finish_reason"] in {"stop", "length"}
    assert said["dog"] in DOGS
    assert said["status"] == [0, ""]
    errors = said["errors"]
    assert "answers another prompt; read that to its end first" in errors["busy"]
    assert "pattern" in errors["schema"]
    assert "/no/such.gguf is missing" in errors["file"]
    assert all(error.startswith("ModelError: ") and "\n" not in error for error in errors.values()), errors


def test_a_conversation_keeps_its_sequence_over_a_switch(ours: None) -> None:
    """Two conversations take turns on two sequences; each reads only what is new, before and after `switch tensor`."""
    model = llm.get_model("splitctl")
    talks = [model.conversation(), llm.get_model("splitctl/ours").conversation()]
    for talk, question in zip(talks, ("Name a colour.", "Count to three."), strict=True):
        pieces = list(talk.prompt(question, system=f"You answer this: {question}", **GREEDY))
        assert len(pieces) > 1
    for switched in ("", "tensor"):
        if switched:
            done = run("splitctl", "switch", switched, "--session", "ours")
            assert (done.exit_code, done.stdout.count("tensor")) == (0, 1), done.output
        for talk in talks:
            last = talk.responses[-1]
            answer = talk.prompt("Another one.", **GREEDY)
            assert answer.text()
            assert answer.usage().details["reused"] > last.usage().input
    assert splitctl.Client("ours").status().effective is splitctl.SplitMode.TENSOR


def test_a_schema_is_followed_by_a_session(ours: None) -> None:
    """What comes is an object of the schema, sync and asyncio; a schema that no grammar can hold is refused by name."""
    greedy = {"temperature": 0.0}
    said = llm.get_model("splitctl").prompt("Invent a dog.", schema=DOG, **greedy).text()

    async def ask() -> str:
        return await llm.get_async_model("splitctl").prompt("Invent a dog.", schema=DOG, **greedy).text()

    assert asyncio.run(ask()) == said
    assert json.loads(said) in DOGS
    with pytest.raises(llm.ModelError, match="pattern"):
        llm.get_model("splitctl").prompt("hi", schema={"type": "string", "pattern": "a+"}).text()


def test_the_command_line_asks_and_goes_on(ours: None) -> None:
    """A prompt, then `-c` with the same model by its name, with usage; what -m may name is listed, with how it is."""
    options = [word for name, value in GREEDY.items() for word in ("-o", name, str(value))]
    first = run("-m", "splitctl/ours", "Name a colour.", *options, "-s", "You are brief.", "-u")
    assert first.exit_code == 0
    assert first.stdout.strip()
    assert "Token usage" in first.stderr
    second = run("-c", "Another one.", *options, "-o", "stop", ".", "--async")
    assert second.exit_code == 0, second.output
    assert "." not in second.stdout
    listed = run("splitctl", "models")
    assert "splitctl/ours  session, serving in" in listed.stdout
    assert "splitctl.json" in listed.stderr
    assert "ours: serving" in run("splitctl", "ps").stdout


def test_what_cannot_be_is_refused(ours: None, tmp_path: Path) -> None:
    """Options, attachments, modes and messages that are wrong are told in a line, and nothing is asked of the host."""
    picture = tmp_path / "a.png"
    picture.write_bytes(b"\x89PNG\r\n\x1a\n")
    for words, said in (
        (("-o", "top_p", "2"), "less than or equal to 1"),
        (("-o", "nope", "2"), "nope"),
        (("-o", "split_mode", "tensor"), "split_mode"),
        (("-a", str(picture)), "does not support attachments"),
    ):
        done = run("-m", "splitctl", "hi", *words)
        assert done.exit_code == 1
        assert said in done.output
    spoken = llm.user("look", llm.Attachment(path=str(picture)))
    with pytest.raises(llm.ModelError, match="takes text alone, and a message of the user holds AttachmentPart"):
        llm.get_model("splitctl").prompt(messages=[spoken]).text()
    assert run("splitctl", "switch", "sideways").exit_code == 2
    assert run("splitctl", "switch", "tensor", "--session", "other").exit_code == 6


def test_a_session_that_is_gone_is_told(ours: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of one that ended between two turns, sync and asyncio, and of the only one where none is; other models go on."""
    gone, async_gone = llm.get_model("splitctl/ours"), llm.get_async_model("splitctl")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(llm.ModelError, match=r"no session ours is served.*start one with splitctl serve"):
        gone.prompt("hi").text()

    async def ask() -> str:
        return await async_gone.prompt("hi").text()

    with pytest.raises(llm.ModelError, match="no session is served; start one with splitctl serve"):
        asyncio.run(ask())
    tmp_path.chmod(0o777)
    listed = run("models", "list")
    assert listed.exit_code == 0
    assert "splitctl: splitctl\n" in listed.stdout
    assert "set XDG_RUNTIME_DIR to a folder of yours" in listed.stderr
