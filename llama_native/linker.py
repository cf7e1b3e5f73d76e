"""Where the dynamic linker will look for a library's own libraries, and what it will not find there.

This follows ld.so(8): libraries already in the process by name, DT_RPATH (inherited), LD_LIBRARY_PATH, DT_RUNPATH,
ld.so.cache, the folders of ld.so.conf, and the default folders. Nothing is loaded.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from llama_native.elf import ElfError, ElfFile, read_elf

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_MAX_LIBRARIES = 128
_MAX_CACHE_ENTRIES = 1 << 17
_CACHE_MAGIC = b"glibc-ld.so.cache1.1"
_CACHE_HEADER, _CACHE_ENTRY = 48, 24
_MAX_CONF_FILES = 64
_VIRTUAL = ("linux-vdso.", "ld-linux", "ld-musl", "ld64.")
"""Names that the loader provides itself."""
_DEBIAN = {
    "libgomp.so.1": "libgomp1",
    "libstdc++.so.6": "libstdc++6",
    "libcurl.so.4": "libcurl4",
    "libvulkan.so.1": "libvulkan1",
}
"""Libraries that builds take from the system, which a small one lacks: their packages in Debian."""


def default_folders() -> tuple[Path, ...]:
    """List the system's library folders, in the linker's order, those that exist only."""
    machine = platform.machine()
    names = [*_conf_folders(Path("/etc/ld.so.conf"), _MAX_CONF_FILES)]
    names += [Path(f"{root}/{machine}-linux-gnu") for root in ("/usr/local/lib", "/lib", "/usr/lib")]
    names += [Path(name) for name in ("/usr/local/lib", "/usr/local/lib64", "/lib64", "/usr/lib64", "/lib", "/usr/lib")]
    return tuple(dict.fromkeys(folder for folder in names if folder.is_dir()))


def _conf_folders(conf: Path, left: int) -> Iterable[Path]:
    try:
        lines = conf.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in (text.split("#")[0].strip() for text in lines):
        pattern = line.removeprefix("include").strip()
        if line.startswith("include") and pattern.startswith("/"):
            base = Path(pattern)
            for included in sorted(base.parent.glob(base.name))[:left]:
                yield from _conf_folders(included, left // 2)
        elif line.startswith("/"):
            yield Path(line)


@functools.cache
def _cache() -> Mapping[str, list[Path]]:
    """Read ld.so.cache: soname -> files. Source: glibc, sysdeps/generic/dl-cache.h (struct cache_file_new)."""
    try:
        data = Path("/etc/ld.so.cache").read_bytes()
    except OSError:
        return {}
    start = data.find(_CACHE_MAGIC)
    if start < 0 or len(data) < start + _CACHE_HEADER:
        return {}
    (n_entries,) = struct.unpack_from("<I", data, start + len(_CACHE_MAGIC))
    found: dict[str, list[Path]] = {}
    room = (len(data) - start - _CACHE_HEADER) // _CACHE_ENTRY
    for index in range(min(n_entries, room, _MAX_CACHE_ENTRIES)):
        _flags, key, value = struct.unpack_from("<iII", data, start + _CACHE_HEADER + index * _CACHE_ENTRY)
        name, path = (data[start + at : start + at + 4096].partition(b"\0")[0] for at in (key, value))
        if name:
            found.setdefault(os.fsdecode(name), []).append(Path(os.fsdecode(path)))
    return found


@functools.cache
def _loadable(path: Path) -> bool:
    """Tell whether a file is an ELF file for this machine (a cache holds other architectures too)."""
    try:
        return read_elf(path).machine == platform.machine()
    except (ElfError, OSError):
        return False


def mapped_libraries() -> list[Path]:
    """List the libraries that this process has mapped."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    paths = {line.split(None, 5)[-1] for line in lines if ".so" in line}
    return [Path(path) for path in paths if path.startswith("/")]


class Resolver:
    """Finds libraries as the linker of this process would.

    Args:
        env: for LD_LIBRARY_PATH.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env_folders = tuple(Path(name) for name in re.split("[:;]", env.get("LD_LIBRARY_PATH", "")) if name)
        # The linker takes those first.
        self._mapped = {path.name: path for path in mapped_libraries()}
        self._defaults = default_folders()

    def find(self, name: str, origin: Path, elf: ElfFile, inherited: tuple[str, ...]) -> Path | None:
        """Find a library by an entry of DT_NEEDED; None where the linker would find none.

        `elf`, in the folder `origin`, needs it; `inherited` are DT_RPATH folders of the files that loaded that one,
        with $ORIGIN resolved.
        """
        if "/" in name:
            return Path(name) if Path(name).is_file() else None
        if name in self._mapped:
            return self._mapped[name]
        rpath = () if elf.runpath else (*_expand(elf.rpath, origin), *map(Path, inherited))
        for folder in (*rpath, *self._env_folders, *_expand(elf.runpath, origin)):
            if _loadable(folder / name):
                return folder / name
        # A cache of a thousand libraries: only those of the name are opened.
        places = (*_cache().get(name, ()), *(folder / name for folder in self._defaults))
        return next(filter(_loadable, places), None)

    def problems(self, path: Path) -> tuple[str, ...]:
        """Tell what keeps the linker from loading a library: missing libraries and symbol versions, a phrase each."""
        found: dict[str, str] = {}
        waiting: list[tuple[Path, tuple[str, ...]]] = [(path, ())]
        seen: set[Path] = set()
        while waiting and len(seen) < _MAX_LIBRARIES:
            file, inherited = waiting.pop(0)
            real = file.resolve()
            if real in seen:
                continue
            seen.add(real)
            try:
                elf = read_elf(real)
            except (ElfError, OSError) as error:
                found[f"{file} cannot be read: {error}"] = ""
                continue
            who = "" if file == path else f" (for {file.name})"
            origin = real.parent
            where: dict[str, Path] = {}
            for name in elf.needed:
                if name.startswith(_VIRTUAL):
                    continue
                place = self.find(name, origin, elf, inherited)
                if place is None:
                    advice = f" (Debian: apt-get install {_DEBIAN[name]})" if name in _DEBIAN else ""
                    found.setdefault(f"its library {name} is missing{advice}", who)
                    continue
                where[name] = place
                if name not in self._mapped:
                    waiting.append((place, (*inherited, *map(str, _expand(elf.rpath, origin)))))
            for problem in _version_problems(elf, where):
                found.setdefault(problem, who)
        return tuple(f"{problem}{who}" for problem, who in found.items())


def _expand(folders: tuple[str, ...], origin: Path) -> tuple[Path, ...]:
    return tuple(Path(re.sub(r"\$(?:ORIGIN|\{ORIGIN\})", lambda _: str(origin), folder)) for folder in folders)


def _version_problems(elf: ElfFile, where: Mapping[str, Path]) -> Iterable[str]:
    lacking: dict[tuple[str, str], set[str]] = {}
    given: dict[str, frozenset[str]] = {}
    for need in elf.version_needs:
        if need.library not in where:
            continue
        if need.library not in given:
            try:
                given[need.library] = read_elf(where[need.library]).versions
            except (ElfError, OSError):
                given[need.library] = frozenset()
        if given[need.library] and need.version not in given[need.library]:
            prefix = need.version.partition("_")[0]
            lacking.setdefault((need.library, prefix), set()).add(need.version)
    for (library, prefix), wanted in lacking.items():
        have = max((v for v in given[library] if v.startswith(f"{prefix}_")), key=_order, default="")
        found = have.removeprefix(f"{prefix}_") or "none"
        yield f"{max(wanted, key=_order)} wanted, {found} found ({where[library]})"


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))
