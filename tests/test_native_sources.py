"""The programs that build the libllama of tools/native and try its hooks on a release, without compiling anything."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import tarfile
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from splitctl.switching.effects import ON_HOST
from tests.tool import run_tool
from tools.native import check

_CI = Path(__file__).parent.parent / "ci"
_STOCK = {
    "CMakeLists.txt": "project\n", "LICENSE": "MIT\n", "cmake/x": "x\n", "ggml/x": "x\n", "include/llama.h": "h\n",
    "src/llama.cpp": "one\ntwo\nthree\n", "src/other.cpp": "other\n", "vendor/x": "x\n",
}  # fmt: skip
_PATCH = """diff --git a/src/llama.cpp b/src/llama.cpp
--- a/src/llama.cpp
+++ b/src/llama.cpp
@@ -1,3 +1,3 @@
 one
-two
+2
 three
"""
_CONTEXT = """struct llama_context {
    void set(int n);
    const llama_model & model;
    struct inner {
        int nobody = 0;
    };
    inner sampling; // moved whole
    std::vector<int> embd_seq, unseen;
    mutable int64_t fresh_us = 0;
};
"""


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program, imported."""
    monkeypatch.syspath_prepend(str(_CI))
    spec = importlib.util.spec_from_file_location("ci_native", _CI / "native.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def ours(native: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small tools/native: a patch of one hook, and the files."""
    folder = tmp_path / "native"
    folder.mkdir()
    (folder / "hooks.patch").write_text(_PATCH, encoding="utf-8")
    (folder / "llama-split.h").write_text("LLAMA_API bool PyLong_Type(\n", encoding="utf-8")
    for name in ("llama-split-hooks.h", "llama-split.cpp"):
        (folder / name).write_text("", encoding="utf-8")
    monkeypatch.setattr(native, "NATIVE", folder)
    return folder


def _write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_all_that_is_missing_is_named_with_its_packages(
    native: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without cmake and a compiler the program ends at once, in one line with the Debian packages of both."""
    (tmp_path / "git").symlink_to(shutil.which("git") or "/bin/true")
    for name in ("nm", "ninja"):
        (tmp_path / name).symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native.main([]) == 1
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        "fetch: cmake, c++: not found; install what is missing (Debian: apt-get install cmake g++)"
    ]
    assert said.out == ""


def test_sources_come_from_an_archive_whose_hash_is_right(native: ModuleType, tmp_path: Path) -> None:
    """An archive gives what libllama is made of and nothing else; another file or folder is refused."""
    files = {f"x-1/vendor/llama.cpp/{name}": text for name, text in _STOCK.items()}
    tree = _write(tmp_path / "tree", files | {"x-1/vendor/llama.cpp/tests/x": "x", "x-1/setup.py": "x"})
    archive = tmp_path / "x-1.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tree / "x-1", "x-1")
    row = {"package": "x==1", "sha256": hashlib.sha256(archive.read_bytes()).hexdigest()}
    found = native.sources(row, tmp_path / "cache", archive)
    assert {str(file.relative_to(found)) for file in found.rglob("*") if file.is_file()} == set(_STOCK)
    with pytest.raises(native.FetchError, match="is another file"):
        native.sources(row | {"sha256": "0" * 64}, tmp_path / "cache", archive)
    with pytest.raises(native.FetchError, match="name the top folder"):
        native.sources(row, tmp_path / "cache", tree)
    assert native.sources(row, tmp_path / "cache", found) == found


def test_a_changed_hook_touches_its_file_alone(native: ModuleType, ours: Path, tmp_path: Path) -> None:
    """Only files whose text changes are written again, so only they are compiled; what is gone goes."""
    stock = _write(tmp_path / "stock", _STOCK)
    tree = native.with_hooks(stock, tmp_path / "cache")
    assert (tree / "src" / "llama.cpp").read_text() == "one\n2\nthree\n"
    assert (tree / "src" / "llama-split.cpp").is_file()
    for file in filter(Path.is_file, tree.rglob("*")):
        os.utime(file, (0, 0))
    (ours / "hooks.patch").write_text(_PATCH.replace("+2", "+II"), encoding="utf-8")
    (stock / "src" / "other.cpp").unlink()
    native.with_hooks(stock, tmp_path / "cache")
    written = [file.name for file in tree.rglob("*") if file.is_file() and file.stat().st_mtime]
    assert written == ["llama.cpp"]
    assert (tree / "src" / "llama.cpp").read_text() == "one\nII\nthree\n"
    assert not (tree / "src" / "other.cpp").exists()
    (stock / "src" / "llama.cpp").write_text("another\n", encoding="utf-8")
    with pytest.raises(native.FetchError, match=r"patch failed: src/llama\.cpp:1; see python -m tools\.native\.check"):
        native.with_hooks(stock, tmp_path / "cache")


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm (binutils)")
def test_a_library_without_a_call_is_refused(native: ModuleType, ours: Path) -> None:
    """What the header declares is looked for among what the library exports."""
    library = Path(importlib.util.find_spec("_cffi_backend").origin)  # type: ignore[union-attr, arg-type]
    (ours / "llama-split.h").write_text("LLAMA_API int\n  PyInit__cffi_backend(\n", encoding="utf-8")
    native.check_calls(library)
    (ours / "llama-split.h").write_text(
        "LLAMA_API int PyInit__cffi_backend(\nLLAMA_API bool nobody(\n", encoding="utf-8"
    )
    with pytest.raises(native.FetchError, match="does not export nobody"):
        native.check_calls(library)


def test_hooks_are_tried_one_by_one(tmp_path: Path) -> None:
    """A hook fits where its lines are, loosely where only the nearest is, and not where they changed."""
    (hook,) = check.hooks(_PATCH)
    assert (hook.file, hook.line, hook.adds) == ("src/llama.cpp", 1, "2")
    wide = _PATCH.replace("-1,3 +1,3", "-1,5 +1,5").replace(" one", " zero\n one") + " four\n"
    (loose,) = check.hooks(wide)
    sources = _write(tmp_path, {"src/llama.cpp": "0\none\ntwo\nthree\n4\n"})
    assert check.fit(loose, sources) == "fits loosely"
    _write(tmp_path, {"src/llama.cpp": "zero\none\ntwo\nthree\nfour\n"})
    assert check.fit(loose, sources) == "fits"
    _write(tmp_path, {"src/llama.cpp": "one\nTWO\nthree\n"})
    assert check.fit(hook, sources) == "DOES NOT FIT"


def test_the_page_names_every_hook() -> None:
    """The table of docs/native.md has each file that the patch changes, and in how many places."""
    page = (_CI.parent / "docs" / "native.md").read_text(encoding="utf-8")
    told = {file: int(n) for file, n in re.findall(r"^\| `([\w./-]+)` \| (\d+) \|", page, re.MULTILINE)}
    assert told == Counter(hook.file for hook in check.hooks(check.PATCH.read_text(encoding="utf-8")))


def test_what_is_new_in_a_context_is_named(tmp_path: Path) -> None:
    """A member that is neither moved over nor made anew would be lost in a switch; the program says so and fails."""
    assert check.unknown_members(_CONTEXT, "ctx.sampling") == ["unseen", "fresh_us"]
    sources = _write(tmp_path, {"src/llama.cpp": "", "src/llama-context.h": _CONTEXT})
    done = run_tool("native.check", sources)
    assert done.returncode == 1
    assert "IS NEW        src/llama-context.h  fresh_us" in done.stdout
    assert done.stdout.count("DOES NOT FIT") == len(list(check.hooks(check.PATCH.read_text(encoding="utf-8"))))
    assert run_tool("native.check", tmp_path / "src").returncode == 2


def test_the_sources_say_what_a_session_looks_for() -> None:
    """Where the call goes back to the host alone, an outcome can tell it by the line that the sources write."""
    assert f'"{ON_HOST}"' in check.OURS.read_text()
