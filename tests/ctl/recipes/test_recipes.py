"""docs/recipes.md runs: programs with LangChain and LlamaIndex, settings for Open WebUI and llama-swap, the notebook.

Programs need packages that are large: they run where these are installed, and `ci/recipes` installs them all.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import click
import pytest

from splitctl.cli.main import cli
from splitctl.outcome import SwitchOutcome, SwitchStatus
from splitctl.session.texts import TextStream, Usage
from tests.ctl import one_kv_head
from tests.ctl.houses import GUARD_S, ROOT, house
from tests.ctl.web import Web, events, web
from tests.native.real import NEWEST, library_of

pytestmark = [pytest.mark.build, pytest.mark.model]

_PAGE = (ROOT / "docs" / "recipes.md").read_text("utf-8")
_NOTEBOOK = ROOT / "docs" / "recipes" / "switch.ipynb"
_KEY = "KEY"


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", _PAGE, re.DOTALL)


_PROGRAMS = dict(
    zip(
        ("langchain-openai", "langchain-community", "llama-index-llms-openai-like", "llama-index-llms-llama-cpp"),
        _blocks("py"),
        strict=True,
    )
)


def _need(package: str) -> None:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed: run ci/recipes")


@pytest.fixture(scope="module")
def folder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small random chat model, as the programs name it."""
    made = tmp_path_factory.mktemp("recipes")
    (made / "model.gguf").symlink_to(one_kv_head.made(smollm2))
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Web]:
    """The server that the programs ask, on two virtual devices."""
    placed = ["-m", folder / "model.gguf", "--device", "CPU,CPU", "-c", "1024", "-np", "2", "-t", "1"]
    with house() as home, web(home, *placed, key=_KEY, LLAMA_NATIVE_LIB=str(library_of(NEWEST))) as made:
        yield made


def _said(program: str, folder: Path) -> list[str]:
    """Run a program as a reader would; give the lines that it printed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI", "LANG"))}
    more = {"LLAMA_NATIVE_LIB": str(library_of(NEWEST)), "PYTHONPATH": str(ROOT), "LANGSMITH_TRACING": "false"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**kept, **more},
        capture_output=True,
        text=True,
        timeout=GUARD_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("package", [name for name, text in _PROGRAMS.items() if "base" in text])
def test_a_chat_by_url_goes_on_over_a_switch(package: str, server: Web, folder: Path) -> None:
    """The second turn is answered after the switch, and what the session held before it was not read again."""
    _need(package)
    server.post("/split-mode", {"to": "layer"})
    program = _PROGRAMS[package].replace("http://127.0.0.1:8080", server.url)
    status, *answer = _said(program, folder)
    assert status == "switched"
    text, _, n_kept = "\n".join(answer).rpartition(" ")
    assert text.strip()
    assert int(n_kept) > 20


@pytest.mark.parametrize("package", [name for name, text in _PROGRAMS.items() if "compat" in text])
def test_an_answer_by_compat_goes_on_over_a_switch(package: str, folder: Path) -> None:
    """The switch comes between two pieces of it, and more pieces follow."""
    _need(package)
    pieces = _PROGRAMS[package].replace("end=", 'end="|" or ')
    text = "\n".join(_said(pieces, folder))
    answer, _, status = text.rpartition("|")
    assert status == "switched"
    assert answer.count("|") > 5


# -- Open WebUI --------------------------------------------------------------------------------------------------------


def test_the_settings_of_open_webui_reach_the_server(server: Web) -> None:
    """What its release 0.12 sends with these settings is answered: models, a streamed chat, a title, a continuation."""
    (block,) = _blocks("sh")
    settings = dict(word.split("=", 1) for word in shlex.split(block, comments=True) if "=" in word)
    assert json.loads(settings["DEFAULT_MODEL_PARAMS"]) == {"function_calling": "legacy"}
    assert json.loads(settings["DEFAULT_MODEL_METADATA"]) == {"capabilities": {"usage": True}}
    assert settings["OPENAI_API_KEY"] == server.key
    path = settings["OPENAI_API_BASE_URL"].removeprefix("http://127.0.0.1:8080")
    (model,) = server.get(f"{path}/models").body["data"]
    asked = {"role": "user", "content": "Name a colour."}

    def chat(**body: Any) -> bytes:
        answer = server.post(f"{path}/chat/completions", {"model": model["id"], **body})
        assert answer.status == 200, answer.raw
        return answer.raw

    *parts, end = events(
        chat(
            stream=True,
            stream_options={"include_usage": True},
            messages=[{"role": "system", "content": "Be short."}, asked],
            temperature=0.7,
            max_tokens=9,
        )
    )
    assert end == "[DONE]"
    assert parts[-1]["usage"]["completion_tokens"] <= 9
    text = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts if part["choices"])
    title = json.loads(
        chat(stream=False, messages=[{"role": "user", "content": "A title of it, as JSON."}], max_tokens=30)
    )
    assert title["choices"][0]["message"]["content"]
    goes_on = chat(
        stream=True,
        messages=[asked, {"role": "assistant", "content": text}],
        continue_final_message=True,
        add_generation_prompt=False,
        max_tokens=3,
    )
    assert events(goes_on)[-1] == "[DONE]"


# -- llama-swap --------------------------------------------------------------------------------------------------------


def test_the_commands_for_llama_swap_are_ours() -> None:
    """Each is one that the command line reads, with the port and the name that llama-swap fills in."""
    (block,) = _blocks("yaml")
    commands = re.findall(r"cmd: \|\n((?: {6}.+\n)+)", block)
    assert len(commands) == block.count("proxy: http://127.0.0.1:${PORT}") == 2
    serve = cli.get_command(click.Context(cli), "serve")
    assert serve is not None
    for command in commands:
        words = shlex.split(command.replace("${PORT}", "5801").replace("${MODEL_ID}", "one"))
        assert words[:2] == ["splitctl", "serve"]
        with mock.patch.dict(os.environ, clear=True):
            read = serve.make_context("serve", words[2:])
        assert (read.params["port"], read.params["session"]) == (5801, "one")


# -- the notebook ------------------------------------------------------------------------------------------------------


def _cells() -> list[str]:
    notebook = json.loads(_NOTEBOOK.read_text("utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell for cell in code if cell["outputs"] or cell["execution_count"] is not None] == []
    return ["".join(cell["source"]) for cell in code]


def test_the_cells_of_the_notebook_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, without Jupyter: it switches, its outcome is a table, and the answers after it reuse what was read."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("LLAMA_NATIVE_LIB", str(library_of(NEWEST)))
    names: dict[str, Any] = {}
    shown = []
    for cell in _cells():
        tree = ast.parse(cell)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "cell", "exec"), names)  # noqa: S102 - a notebook of ours
        shown.append(eval(ast.unparse(last), names) if last else None)  # noqa: S307
    outcome, usage = [one for one in shown if one is not None]
    assert isinstance(outcome, SwitchOutcome)
    assert outcome.status is SwitchStatus.SWITCHED, outcome.reason
    assert "switch to tensor: switched" in outcome._repr_html_()
    assert isinstance(names["answer"], TextStream)
    assert isinstance(usage, Usage)
    assert usage.n_reused > 20


def test_the_notebook_runs_in_jupyter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a valid notebook; the outcome shows itself as a table, and the bar as a widget."""
    _need("nbclient")
    import nbclient  # noqa: PLC0415 - it may be absent
    import nbformat  # noqa: PLC0415 - it may be absent

    monkeypatch.setenv("LLAMA_NATIVE_LIB", str(library_of(NEWEST)))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(_NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    client = nbclient.NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    client.execute()
    outputs = [one for cell in notebook.cells for one in cell.get("outputs", ())]
    assert [one["text"] for one in outputs if one.get("name") == "stderr"] == []
    kinds = [kind for one in outputs for kind in one.get("data", ())]
    assert "application/vnd.jupyter.widget-view+json" in kinds
    tables = [one["data"]["text/html"] for one in outputs if "text/html" in one.get("data", ())]
    assert any("switch to tensor: switched" in table for table in tables)
