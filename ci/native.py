"""Builds the libllama of tools/native: a release's sources with our hooks and one source file of ours.

Usage:
    ci/native.py [--sources PATH] [--cuda [ARCHITECTURES]] [--sanitize] [--jobs N]

It prints the path of libllama.so, and on stderr how long it took. The sources are those of the llama-cpp-python release
that ci/artifacts.toml names; they come by hash and are never part of this repository. A machine without a network takes
them from a file or a folder. They and the object files stay in the cache folder: a second build compiles what has
changed. It needs Python 3.11, platformdirs, git, cmake and a C++ compiler; nothing of this checkout is installed.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs
from fetch import FetchError, download, file_sha256, say, work_folder

_HERE = Path(__file__).resolve().parent
NATIVE = _HERE.parent / "tools" / "native"

_PARTS = ("CMakeLists.txt", "LICENSE", "cmake", "ggml", "include", "src", "vendor")
"""What libllama is made of; the rest of the release is not unpacked."""
_OURS = {"llama-split.h": "include", "llama-split-hooks.h": "src", "llama-split.cpp": "src"}
_TOOLS = {"git": "git", "cmake": "cmake", "c++": "g++", "nm": "binutils"}
"""What it takes to build, with the Debian package of each."""
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_RPC=ON", "-DGGML_NATIVE=OFF",
    "-DLLAMA_BUILD_COMMON=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_TOOLS=OFF",
    "-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_CURL=OFF",
    # an abort in C code becomes an exception during a switch
    "-DCMAKE_C_FLAGS=-fexceptions",
    # the libraries find each other wherever their folder is
    "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON",
)  # fmt: skip
_X86 = ("-DGGML_AVX2=ON", "-DGGML_FMA=ON", "-DGGML_F16C=ON")
_SANITIZE = "-fsanitize=address,undefined -fno-omit-frame-pointer -g -O1"


def require(tools: Mapping[str, str]) -> None:
    """Look for programs.

    Args:
        tools: name -> Debian package.

    Raises:
        FetchError: some are not there; it names them all.
    """
    missing = [name for name in tools if shutil.which(name) is None]
    if missing:
        packages = " ".join(tools[name] for name in missing)
        raise FetchError(
            ", ".join(missing), "not found", f"install what is missing (Debian: apt-get install {packages})"
        )


def sources(row: Mapping[str, str], folder: Path, given: Path | None) -> Path:
    """Give the unpacked sources, as they were released.

    Args:
        row: the `source-build` table of artifacts.toml.
        folder: what keeps them.
        given: a folder of llama.cpp, taken as it is, or the release's archive, checked by its hash; None: download.

    Raises:
        FetchError: they cannot be had, or are not what the table names.
    """
    target = folder / f"llama.cpp-{row['sha256'][:16]}"
    if given is not None and given.is_dir():
        if not (given / "src" / "llama.cpp").is_file():
            raise FetchError(str(given), "has no src/llama.cpp", "name the top folder of llama.cpp")
        return given
    if given is not None and not given.is_file():
        raise FetchError(str(given), "is not there", "name a folder of llama.cpp, or the archive of the release")
    if given is not None and file_sha256(given) != row["sha256"]:
        raise FetchError(str(given), "is another file", f"name the source archive of {row['package']}")
    if target.is_dir():
        return target
    with work_folder(folder) as work:
        name = row["package"].partition("==")[0]
        archive = given or download(row["package"], row["sha256"], work, [f"--no-binary={name}"])
        say("unpacking the sources")
        with tarfile.open(archive) as tar:
            for member in tar:
                _, _, rest = member.name.partition("/vendor/llama.cpp/")
                if rest.partition("/")[0] in _PARTS:
                    member.name = rest
                    tar.extract(member, work / "sources", filter="data")
        (work / "sources").rename(target)
    return target


def with_hooks(stock: Path, folder: Path) -> Path:
    """Give the sources with our hooks and our files; a file is written only where its text changes."""
    target = folder / "sources"
    patch = NATIVE / "hooks.patch"
    with work_folder(folder) as work:
        fresh = work / "sources"
        fresh.mkdir()
        for part in _PARTS:
            copy = shutil.copytree if (stock / part).is_dir() else shutil.copy2
            copy(stock / part, fresh / part)
        done = subprocess.run(
            ["git", "apply", "--whitespace=nowarn", str(patch)],
            cwd=fresh,
            env={**os.environ, "GIT_CEILING_DIRECTORIES": str(fresh.parent)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            why = done.stderr.strip().partition("\n")[0].removeprefix("error: ")
            raise FetchError(str(patch), why, f"see python -m tools.native.check {stock}")
        for name, where in _OURS.items():
            shutil.copy(NATIVE / name, fresh / where)
        files = {file.relative_to(fresh) for file in fresh.rglob("*") if file.is_file()}
        for old in [file for file in target.rglob("*") if file.is_file() and file.relative_to(target) not in files]:
            old.unlink()
        for file in files:
            old = target / file
            if not old.is_file() or old.read_bytes() != (fresh / file).read_bytes():
                old.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(fresh / file, old)
    return target


def build(tree: Path, folder: Path, options: Sequence[str], jobs: int) -> Path:
    """Compile, and give the folder of the libraries."""
    generator = ("-G", "Ninja") if shutil.which("ninja") else ()
    for command in (
        ["cmake", *generator, "-S", str(tree), "-B", str(folder), *_OPTIONS, *options],
        ["cmake", "--build", str(folder), "--target", "llama", "--parallel", str(jobs)],
    ):
        if subprocess.run(command, stdout=2, check=False).returncode:
            raise FetchError("the build", f"{command[0]} failed", "see its message above")
    return folder / "bin"


def check_calls(library: Path) -> None:
    """Compare what a library exports with our header.

    Raises:
        FetchError: a call is missing.
    """
    header = (NATIVE / "llama-split.h").read_text(encoding="utf-8")
    wanted = re.findall(r"^LLAMA_API\b[^(]*?(\w+)\(", header, re.MULTILINE)
    said = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=False).stdout
    there = {line.split()[-1] for line in said.splitlines()}
    missing = [name for name in wanted if name not in there]
    if missing or not wanted:
        raise FetchError(str(library), f"does not export {', '.join(missing)}", "see src/CMakeLists.txt in hooks.patch")
    say(f"exports {', '.join(wanted)}")


def nccl() -> Iterator[str]:
    """Name the NCCL that a Python package brings, where the system has none."""
    for place in map(Path, sys.path):
        folder = place / "nvidia" / "nccl"
        if (library := folder / "lib" / "libnccl.so.2").is_file() and not Path("/usr/include/nccl.h").exists():
            yield f"-DNCCL_LIBRARY={library}"
            yield f"-DNCCL_INCLUDE_DIR={folder / 'include'}"
            return


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep other builds in the same folder waiting."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def made(chosen: argparse.Namespace, row: Mapping[str, str], builds: Path) -> Path:
    """Build what was asked for, and give the path of libllama.so."""
    cuda = {"nvcc": "nvidia-cuda-toolkit"} if chosen.cuda else {}
    require(_TOOLS | cuda | ({} if shutil.which("ninja") else {"make": "make"}))
    kind = "".join(f"-{name}" for name in ("cuda", "sanitize") if getattr(chosen, name))
    options = [*(_X86 if platform.machine() == "x86_64" else ())]
    if chosen.cuda:
        options += ["-DGGML_CUDA=ON", f"-DCMAKE_CUDA_ARCHITECTURES={chosen.cuda}", *nccl()]
    if chosen.sanitize:
        options += [f"-DCMAKE_{language}_FLAGS_RELEASE={_SANITIZE}" for language in ("C", "CXX")]
    folder = builds / ".native"
    with alone(folder):
        tree = with_hooks(sources(row, folder, chosen.sources), folder)
        libraries = build(tree, folder / f"objects{kind}", options, chosen.jobs)
        check_calls(libraries / "libllama.so")
        target = builds / f"native-{row['package'].partition('==')[2]}{kind}"
        with work_folder(builds) as work:
            shutil.copytree(libraries, work / "whole" / "lib", symlinks=True)
            shutil.rmtree(target, ignore_errors=True)
            (work / "whole").rename(target)
    return target / "lib" / "libllama.so"


def main(arguments: Sequence[str]) -> int:
    """Run the program: 0 done, 1 failed."""
    parser = argparse.ArgumentParser(prog="ci/native.py", description="Build the libllama of tools/native.")
    parser.add_argument("--sources", type=Path, help="a folder of llama.cpp, or the archive of the release")
    parser.add_argument(
        "--cuda", nargs="?", const="native", metavar="ARCHITECTURES",
        help="for CUDA devices too: those of this machine, or such as 90-real",
    )  # fmt: skip
    parser.add_argument("--sanitize", action="store_true", help="with ASan and UBSan")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilers at a time")
    chosen = parser.parse_args(arguments)
    table: dict[str, Any] = tomllib.loads((_HERE / "artifacts.toml").read_text(encoding="utf-8"))
    started = time.monotonic()
    try:
        library = made(chosen, table["source-build"], Path(platformdirs.user_cache_dir("splitctl")) / "builds")
    except FetchError as error:
        say(str(error))
        return 1
    say(f"built in {time.monotonic() - started:,.0f} s")
    if chosen.sanitize:
        say("open it with LD_PRELOAD=$(c++ -print-file-name=libasan.so)")
    print(library)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
