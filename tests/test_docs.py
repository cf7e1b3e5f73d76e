"""The documents say what the code does."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from splitctl.cli.output import ExitCode
from splitctl.switching import drawing, machine

_ROOT = Path(__file__).parent.parent
_DOCUMENTS = [_ROOT / "README.md", _ROOT / "CHANGELOG.md", *sorted((_ROOT / "docs").glob("*.md"))]


def _laws() -> str:
    text = machine.__doc__ or ""
    indented = text[text.index("Laws:") + len("Laws:") : text.index("\n\n", text.index("Laws:"))]
    laws: list[str] = []
    for line in indented.split("\n"):
        if re.match(r"\s+\d+\. ", line):
            laws.append(line.strip())
        elif laws:
            laws[-1] += " " + line.strip()
    return "\n".join(laws)


def _switching_page(old: str) -> str:
    """The page with its laws and its drawing made anew."""
    head, laws_begin, rest = old.partition("<!-- laws -->\n")
    _, laws_end, middle = rest.partition("<!-- end of laws -->\n")
    text, drawn, _ = middle.partition("<!-- drawn -->\n")
    assert laws_begin
    assert laws_end
    assert drawn
    return f"{head}{laws_begin}{_laws()}\n{laws_end}{text}{drawn}{drawing.draw()}"


def test_switching_is_drawn_from_the_machine() -> None:
    """Laws and tables in docs/switching.md are those of the machine; UPDATE_DOCS=1 writes them."""
    path = _ROOT / "docs" / "switching.md"
    wanted = _switching_page(path.read_text(encoding="utf-8"))
    if os.environ.get("UPDATE_DOCS"):
        path.write_text(wanted, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == wanted


def test_exit_codes_are_those_of_the_command_line() -> None:
    """The README's table of exit codes lists every code of the command line once."""
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", (_ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert [int(code) for code, _ in rows] == sorted(ExitCode)


def test_flags_in_the_readme_exist() -> None:
    """Every flag of the README's `splitctl run` example, and of its list, is one that the command knows."""
    text = (_ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^\$ splitctl run (.+)$", text, re.MULTILINE)
    (listed,) = re.findall(r"placement flags \(`([^`]+)`\)", text)
    flags = {word for word in (example + " " + listed).split() if word.startswith("-")}
    command = Path(sys.executable).with_name("splitctl")
    done = subprocess.run([command, "run", "--help"], capture_output=True, text=True, check=True)
    known = set(re.findall(r"(?<![\w-])-{1,2}[a-z][\w-]*", done.stdout))
    assert flags
    assert flags <= known


@pytest.mark.model
def test_python_in_the_readme_runs(smollm2: Path) -> None:
    """The README's Python example, given a real model, switches and prints a text."""
    (block,) = re.findall(r"```python\n(.*?)```", (_ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert block.count('"model.gguf"') == 1
    program = block.replace('"model.gguf"', repr(str(smollm2)))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, _, text = done.stdout.partition("\n")
    assert first.startswith("switched ")
    assert len(text.split()) > 10


def test_every_dependency_has_its_reason() -> None:
    """docs/dependencies.md names everything that setup.cfg asks for, and the lock pins it."""
    config = configparser.ConfigParser()
    config.read(_ROOT / "setup.cfg", encoding="utf-8")
    reasons = (_ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    extras = config["options.extras_require"]
    groups = {"": config["options"]["install_requires"], **{extra: extras[extra] for extra in extras}}
    lock = (_ROOT / "ci" / "lock.txt").read_text(encoding="utf-8")
    for extra, group in groups.items():
        for line in group.split():
            name = re.split(r"[\[<>=]", line)[0]
            assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", reasons), f"{name} has no reason"
            if extra in {"", "cpu", "dev"}:
                assert re.search(rf"^{re.escape(name)}==", lock, re.MULTILINE), f"{name} is not in the lock"


@pytest.mark.parametrize("path", _DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    """Every relative link of a document names a file of the checkout."""
    targets = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", path.read_text(encoding="utf-8"))
    assert [target for target in targets if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", _DOCUMENTS, ids=lambda path: path.name)
def test_paths_named_in_documents_exist(path: Path) -> None:
    """Files of the checkout that a document names in code type are there."""
    text = path.read_text(encoding="utf-8")
    named = re.findall(r"`((?:llama_native|statecodec|splitctl|tools|tests|ci|docs)/[\w/.-]+)", text)
    assert [name for name in named if not (_ROOT / name).exists()] == []


@pytest.mark.parametrize(
    "name", ["ci/setup", "ci/model", "ci/builds", "ci/test", "ci/check", "ci/demo", "ci/fuzz", ".ci/run"]
)
def test_scripts_can_be_run(name: str) -> None:
    """The scripts that the README names are executable and stop at the first error."""
    path = _ROOT / name
    assert os.access(path, os.X_OK)
    assert "set -euo pipefail" in path.read_text(encoding="utf-8")
