"""What is published holds what its users need: the wheel the packages and no more, the source archive its tests too."""

from __future__ import annotations

import configparser
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests.rooms import PACKAGES
from tools.check_packages import copy_checkout, unpack

_ROOT = Path(__file__).parent.parent
_MAN_PAGE = "share/man/man1/splitctl.1"


def _built(kind: str, tree: Path) -> Path:
    """Build an archive of a tree, in that tree, by what it says builds it."""
    program = f"from setuptools import build_meta; build_meta.build_{kind}('made')"
    subprocess.run([sys.executable, "-c", program], cwd=tree, check=True, stdout=subprocess.DEVNULL)
    (made,) = (tree / "made").iterdir()
    return made


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive of this checkout, unpacked; nothing is built in the checkout itself."""
    folder = tmp_path_factory.mktemp("packages")
    return unpack(_built("sdist", copy_checkout(folder / "tree")), folder)


@pytest.fixture(scope="module")
def wheel(sources: Path) -> Path:
    """A wheel of the unpacked source archive."""
    return _built("wheel", sources)


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    """What the wheel says of itself, and its page."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        return message_from_bytes(archive.read(name))


def _files(folder: Path, *parts: str) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for part in parts
        for path in (folder / part).rglob("*")
        if path.is_file() and not {"__pycache__", "build"} & set(path.parts) and ".egg-info" not in str(path)
    }


def test_the_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    """Modules, C declarations, tables, the page and type markers are all there, and nothing of tests, tools or ci."""
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    wanted = _files(_ROOT, *PACKAGES)
    assert {Path(name).suffix for name in wanted} >= {".py", ".h", ".json", ".html", ".typed"}
    assert {name.partition(".data/data/")[2] or name for name in held} == {*wanted, _MAN_PAGE}


def test_the_source_archive_holds_what_its_tests_need(sources: Path) -> None:
    """Every file of the packages, tests, tools, scripts and documents, and scripts that can be run."""
    parts = (*PACKAGES, "tests", "tools", "ci", ".ci", "docs")
    assert _files(sources, *parts) == _files(_ROOT, *parts)
    assert {"README.md", "CHANGELOG.md", "LICENSE", "setup.py", "ruff.toml"} <= {one.name for one in sources.iterdir()}
    assert all((sources / name).stat().st_mode & 0o111 for name in ("ci/setup", "ci/test", ".ci/run"))


def test_tests_of_the_source_archive_run_from_it(sources: Path) -> None:
    """Some that need no library pass on the unpacked sources, not this checkout's; ci/packages runs the others."""
    tests = ["tests/codec/test_cursor.py", "tests/test_rooms.py::test_rules_leave_sound_code_alone"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-n0", *tests], cwd=sources, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert f"rootdir: {sources}" in done.stdout


def test_the_wheel_says_what_it_needs(wheel: Path, metadata: Message) -> None:
    """Name, version, command and requirements are those of setup.cfg."""
    config = configparser.ConfigParser()
    config.read(_ROOT / "setup.cfg", encoding="utf-8")
    with zipfile.ZipFile(wheel) as archive:
        (entry,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert "splitctl = splitctl.__main__:main" in archive.read(entry).decode()
    assert metadata["Version"] == config["metadata"]["version"]
    assert set(config["options"]["install_requires"].split()) <= set(metadata.get_all("Requires-Dist", []))
    assert set(config["options.extras_require"]) == set(metadata.get_all("Provides-Extra", []))


def _targets(page: str) -> Iterator[str]:
    """Where the links and pictures of a Markdown text lead."""
    for block in MarkdownIt("commonmark").enable("table").parse(page):
        for token in block.children or ():
            yield from (str(target) for name, target in token.attrs.items() if name in {"href", "src"})


def test_links_of_the_index_page_lead_somewhere(metadata: Message, tmp_path: Path) -> None:
    """An index knows no files beside the page: links lead to the source where it is published, or are none."""
    page = str(metadata.get_payload())
    assert page.startswith("# splitctl\n")
    assert [target for target in _targets(page) if not target.startswith("https://")] == []
    readme = (_ROOT / "README.md").read_text(encoding="utf-8")
    (tmp_path / "README.md").write_text(f"{readme}\n![The page](docs/page.png)\n", encoding="utf-8")
    (tmp_path / "setup.py").write_bytes((_ROOT / "setup.py").read_bytes())
    named = "[metadata]\nname = any\nversion = 1\nurl = https://code.example/any\n"
    (tmp_path / "setup.cfg").write_text(named, encoding="utf-8")
    command = [sys.executable, "setup.py", "--quiet", "--long-description"]
    published = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    targets = list(_targets(published))
    assert len(targets) == len(list(_targets(readme))) + 1 > 20
    assert "https://code.example/any/blob/HEAD/docs/library.md" in targets
    assert targets[-1] == "https://code.example/any/raw/HEAD/docs/page.png"
    assert all(target.startswith("https://code.example/any/") for target in targets if "docs/" in target)
