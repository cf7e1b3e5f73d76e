"""The wheel holds what the packages need, and no more."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.rooms import PACKAGES

_ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout, built from a copy so that no build folder appears in it."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(_ROOT / name, tree)
    for package in PACKAGES:
        shutil.copytree(_ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(tree / "made"), str(tree)], check=True)
    (made,) = (tree / "made").iterdir()
    return made


def test_the_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    """Modules, C declarations, tables and type markers are all there, and nothing of tests, tools or ci."""
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    wanted = {
        path.relative_to(_ROOT).as_posix()
        for package in PACKAGES
        for path in (_ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in wanted if name.endswith((".h", ".json", "py.typed"))}
    assert held == wanted


def test_the_wheel_says_what_it_needs(wheel: Path) -> None:
    """Name, version, command and requirements are those of setup.cfg."""
    config = configparser.ConfigParser()
    config.read(_ROOT / "setup.cfg", encoding="utf-8")
    with zipfile.ZipFile(wheel) as archive:
        (entry,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        (metadata,) = [name for name in archive.namelist() if name.endswith("METADATA")]
        entry_points, said = archive.read(entry).decode(), archive.read(metadata).decode()
    assert "splitctl = splitctl.__main__:main" in entry_points
    assert f"Version: {config['metadata']['version']}\n" in said
    for requirement in config["options"]["install_requires"].split():
        assert f"Requires-Dist: {requirement}\n" in said
