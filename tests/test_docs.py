"""The documents say what the code does."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from splitctl.cli.main import cli
from splitctl.cli.output import ExitCode
from splitctl.switching import drawing, machine
from tests.rooms import House

_ROOT = Path(__file__).parent.parent
_README, _DOCS = _ROOT / "README.md", _ROOT / "docs"
_DOCUMENTS = [_README, _ROOT / "CHANGELOG.md", *sorted(_DOCS.glob("*.md"))]
_COLUMNS = 100
_BEGIN, _END = "<!-- imports -->\n", "<!-- end of imports -->\n"


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


def _architecture_page(old: str) -> str:
    """The page with its graph of folders made anew: what each imports, unless it reaches it through another as well."""
    house = House.read(_ROOT)
    below: dict[str, set[str]] = {}
    for module in house.modules.values():
        found = {house.modules[one.target] for one in house.imports(module) if one.target in house.modules}
        if module.folder:
            names = {one.folder or one.name.partition(".")[0] for one in found}
            below.setdefault(module.folder, set()).update(names - {module.folder, "splitctl"})

    def reached(folder: str) -> set[str]:
        return below.get(folder, set()).union(*(reached(one) for one in below.get(folder, ())))

    arrows = [
        f"    {folder} --> {one}\n"
        for folder in sorted(below)
        for one in sorted(below[folder].difference(*(reached(other) for other in below[folder])))
    ]
    head, begin, rest = old.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    assert begin
    assert end
    return f"{head}{begin}```mermaid\nflowchart TD\n{''.join(arrows)}```\n{end}{tail}"


@pytest.mark.parametrize(("name", "page"), [("switching.md", _switching_page), ("architecture.md", _architecture_page)])
def test_pages_are_drawn_from_the_code(name: str, page: Callable[[str], str]) -> None:
    """Laws and tables of the switch, and the graph of folders, are those of the code; UPDATE_DOCS=1 writes them."""
    path = _DOCS / name
    wanted = page(path.read_text(encoding="utf-8"))
    if os.environ.get("UPDATE_DOCS"):
        path.write_text(wanted, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == wanted


def test_the_readme_is_short() -> None:
    """The README has 150 lines of 100 columns at most; the rest is in docs/."""
    lines = _README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > _COLUMNS] == []


@pytest.mark.parametrize("path", _DOCUMENTS, ids=lambda path: path.name)
def test_prose_is_wrapped(path: Path) -> None:
    """Lines of prose have 100 columns at most; tables, code and what is drawn may have more."""
    text = re.sub(
        r"<!-- laws -->.*<!-- end of laws -->|<!-- drawn -->.*|```.*?```",
        "",
        path.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    assert [line for line in text.splitlines() if len(line) > _COLUMNS and not line.startswith("|")] == []


def test_exit_codes_are_those_of_the_command_line() -> None:
    """The table of exit codes in docs/commands.md lists every code of the command line once."""
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", (_DOCS / "commands.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert [int(code) for code, _ in rows] == sorted(ExitCode)


@pytest.mark.parametrize("path", _DOCUMENTS, ids=lambda path: path.name)
def test_flags_in_documents_exist(path: Path) -> None:
    """Every flag of an example, and every placement flag that is listed, is one that its command knows."""
    text = path.read_text(encoding="utf-8")
    examples = re.findall(r"^\$ splitctl (.+)$", text, re.MULTILINE)
    examples += [f"run {flags}" for flags in re.findall(r"^## Placement flags\s+`([^`]+)`", text, re.MULTILINE)]
    for example in examples:
        words = [word.strip("[]") for word in shlex.split(example, comments=True)]
        command: click.Command = cli
        while isinstance(command, click.Group):
            found = command.get_command(click.Context(command), words.pop(0))
            assert found is not None, example
            command = found
        known = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}
        assert {word for word in words if re.match("--?[a-z]", word)} <= known, example


def _builds() -> list[str]:
    """The folders of all real builds that the tests know."""
    table = tomllib.loads((_ROOT / "ci" / "artifacts.toml").read_text(encoding="utf-8"))
    return [row["package"].replace("==", "-") for row in (*table["build"], table["source-build"])]


def _examples() -> list[str]:
    texts = [path.read_text(encoding="utf-8") for path in _DOCUMENTS]
    return [block for text in texts for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]


def _ran(model: Path, folder: Path, library: Path, *, as_written: bool) -> subprocess.CompletedProcess[str]:
    """Run all examples in one process, as they are written or shortened, with a model, a cache folder and a library."""
    program = "\n".join(_examples())
    assert program.count('"model.gguf"') == len(_examples()) == 1
    program = program.replace('"model.gguf"', repr(str(model)))
    env = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    if as_written:
        env["LLAMA_NATIVE_LIB"] = str(library)
    else:
        opening = f"from llama_native import Library\nLibrary.open({str(library)!r})\n"
        program = opening + program.replace("n=64", "n=16").replace("devices=", "n_ctx=256, n_threads=1, devices=")
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=env)


@pytest.mark.build
@pytest.mark.model
@pytest.mark.parametrize("build", _builds())
def test_python_examples_run_on_every_build(build: str, smollm2: Path, cache_dir: Path, tmp_path: Path) -> None:
    """The newest build switches; where one dies in tensor mode that is refused after a trial, and the text goes on."""
    library = cache_dir / "builds" / build
    if not library.is_dir():
        pytest.skip(f"{build} is not there: run ci/builds")
    is_newest = build == _builds()[0]
    done = _ran(smollm2, tmp_path, library, as_written=is_newest)
    if not is_newest and re.search(r"(UnsupportedAbi|LibraryUnusable): ", done.stderr):
        assert done.returncode == 1
        return
    assert done.returncode == 0, done.stderr
    first, _, text = done.stdout.partition("\n")
    was_tried = first.startswith("refused ") and "tried in a child process" in first
    assert first.startswith("switched ") or (was_tried and not is_newest)
    assert len(text.split()) > (20 if is_newest else 5)


def test_every_dependency_has_its_reason() -> None:
    """docs/dependencies.md names everything that setup.cfg asks for, and the lock pins it."""
    config = configparser.ConfigParser()
    config.read(_ROOT / "setup.cfg", encoding="utf-8")
    reasons = (_DOCS / "dependencies.md").read_text(encoding="utf-8")
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


def test_names_in_extending_are_in_the_files_beside_them() -> None:
    """Every name of an item in docs/extending.md is in one of the files that the item lists."""
    page = (_DOCS / "extending.md").read_text(encoding="utf-8")
    steps = re.findall(r"^\d+\. .+\n(?:   .+\n)*", page, re.MULTILINE)
    assert len(steps) > 20
    for step in steps:
        named = re.findall(r"`([^`]+)`", step)
        files = [_ROOT / name for name in named if name.endswith((".py", ".h", ".json", ".toml")) and "/" in name]
        text = "\n".join(file.read_text(encoding="utf-8") for file in files)
        names = [name for name in named if re.fullmatch(r"\w+(\.\w+)?", name)] if files else []
        assert [name for name in names if name.rpartition(".")[2] not in text] == [], step


@pytest.mark.parametrize(
    "name", ["ci/setup", "ci/model", "ci/builds", "ci/test", "ci/check", "ci/demo", "ci/fuzz", "ci/packages", ".ci/run"]
)
def test_scripts_can_be_run(name: str) -> None:
    """The scripts that the README names are executable and stop at the first error."""
    path = _ROOT / name
    assert os.access(path, os.X_OK)
    assert "set -euo pipefail" in path.read_text(encoding="utf-8")
