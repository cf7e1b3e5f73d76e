"""Build the archives, install them into fresh environments of every Python, and use what was installed.

    python -m tools.check_packages --model FILE [--python EXE]... [--dist DIR] [--tests quick|all]

Needs no package: it runs before there is an environment. Prints a line for each Python and archive; fails where
something in it did. `--dist` takes archives that were built before, instead of building them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
_OLDEST = (3, 11)
_PLUGIN = Path("tools", "llm_splitctl")
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "build", "dist", "htmlcov", "*.egg-info", "*.gguf")
#: Hidden, and needed all the same.
_HIDDEN = {".ci", ".gitignore"}

_USES = """
import pathlib, sys
import splitctl
from splitctl import Placement, Session
assert pathlib.Path(splitctl.__file__).is_relative_to(sys.prefix), splitctl.__file__
placement = Placement(mode="layer", devices=("CPU", "CPU"), n_ctx=256, n_threads=1)
with Session.open(sys.argv[1], placement) as session:
    session.prefill(session.tokenize("Once upon a time"))
    before = [token.id for token in session.generate(n=4)]
    outcome = session.switch("tensor")
    assert outcome.status.value == "switched", outcome.reason
    after = [token.id for token in session.generate(n=4)]
    assert len(before) == len(after) == 4 and outcome.effective_placement.mode.value == "tensor"
"""
#: What the source archive's tests are without a model and without a build.
_QUICK = (
    "tests/test_rooms.py",
    "tests/test_packaging.py",
    "tests/test_skips.py",
    "tests/codec/test_cursor.py",
    "tests/ctl/cli/test_completions.py",
    "tests/ctl/programs/test_make_man.py",
)


class CheckFailed(Exception):
    """A command failed; its last lines say why."""


@dataclass
class Row:
    """What came of one archive on one Python.

    Args:
        python: its version.
        archive: `wheel`, `sdist` or `plugin`.
        cells: what was tried, with `ok` or the reason.
    """

    python: str
    archive: str
    cells: dict[str, str] = field(default_factory=dict)

    def step(self, name: str, work: Callable[[], object]) -> bool:
        """Do something and keep what came of it; whether it worked."""
        print(f"  {self.archive} on {self.python}: {name}", file=sys.stderr, flush=True)
        try:
            work()
        except (CheckFailed, OSError) as error:
            self.cells[name] = str(error)
            return False
        self.cells[name] = "ok"
        return True


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Run a command to its end; gives its standard output, raises CheckFailed."""
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()
        raise CheckFailed(f"{Path(command[0]).name} ended with {done.returncode}: {' | '.join(lines[-3:])}")
    return done.stdout


def copy_checkout(to: Path, checkout: Path = CHECKOUT) -> Path:
    """Copy a checkout without what was made in it; gives the copy."""
    to.mkdir(parents=True)
    for one in checkout.iterdir():
        if one.name in _LEFT_OUT(str(checkout), [one.name]) or (one.name.startswith(".") and one.name not in _HIDDEN):
            continue
        if one.is_dir():
            shutil.copytree(one, to / one.name, ignore=_LEFT_OUT)
        else:
            shutil.copy2(one, to)
    return to


def unpack(archive: Path, to: Path) -> Path:
    """Unpack a source archive; gives its folder."""
    with tarfile.open(archive) as packed:
        packed.extractall(to, filter="data")
    return to / archive.name.removesuffix(".tar.gz")


def pythons(named: Sequence[Path], *, only: bool = False) -> Iterator[tuple[str, Path]]:
    """Find the Pythons that are new enough, each minor version once: version and file, the oldest first.

    Args:
        named: files to look at first.
        only: look at no others.
    """
    places = list(named)
    if not only:
        places += [*Path.home().glob(".pyenv/versions/3.*/bin/python3"), *Path("/usr/bin").glob("python3.??")]
        places += [Path(found) for minor in range(_OLDEST[1], 20) if (found := shutil.which(f"python3.{minor}"))]
        places.append(Path(sys.executable))
    told: dict[tuple[int, ...], tuple[str, Path]] = {}
    for place in dict.fromkeys(places):
        try:
            version = run(place, "-c", "import ensurepip, sys, venv; print(*sys.version_info[:3])", cwd=Path("/"))
        except (CheckFailed, OSError):
            continue
        parts = version.split()
        told.setdefault((int(parts[0]), int(parts[1])), (".".join(parts), place))
    yield from (told[one] for one in sorted(told) if one >= _OLDEST)


class Environment:
    """A fresh environment, which holds what is installed into it and nothing else."""

    def __init__(self, python: Path, folder: Path) -> None:
        """Make it in a folder that is not there yet; raises CheckFailed."""
        run(python, "-m", "venv", folder, cwd=folder.parent)
        self.folder = folder
        self._home = folder.parent
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("LLAMA_", "PYTHON", "VIRTUAL"))
        }
        path = f"{folder / 'bin'}:{os.environ.get('PATH', '')}"
        self.env = {
            **kept,
            "PATH": path,
            "XDG_CACHE_HOME": f"{folder}/cache",
            "LLM_USER_PATH": f"{folder}/llm",
            "NO_COLOR": "1",
        }

    def install(self, *what: str | Path) -> str:
        """Install packages; raises CheckFailed."""
        # What pip keeps is shared: the environment's own cache is for the programs under test.
        pip = {name: value for name, value in self.env.items() if name != "XDG_CACHE_HOME"}
        return run(self.folder / "bin" / "python", "-m", "pip", "install", "-q", *what, cwd=self._home, env=pip)

    def run(self, program: str, *words: str | Path, cwd: Path | None = None) -> str:
        """Run one of its programs; gives its standard output, raises CheckFailed."""
        return run(self.folder / "bin" / program, *words, cwd=cwd or self._home, env=self.env)


def build(folder: Path, python: Path) -> tuple[Row, Path]:
    """Build both archives and the plugin's wheel from a copy of the checkout, and have them judged.

    Returns:
        What came of it, and the folder of the archives.
    """
    row, dist = Row("-", "build"), folder / "dist"
    maker = Environment(python, folder / "maker")
    tree = copy_checkout(folder / "tree")
    if not row.step("tools", lambda: maker.install("build", "twine")):
        return row, dist
    row.step("sdist and wheel", lambda: maker.run("python", "-m", "build", "-q", "--outdir", dist, tree))
    if (tree / _PLUGIN).is_dir():
        row.step("plugin", lambda: maker.run("python", "-m", "build", "-q", "-w", "--outdir", dist, tree / _PLUGIN))
    row.step("twine", lambda: maker.run("twine", "check", "--strict", *dist.iterdir()))
    return row, dist


def use(row: Row, made: Environment, archive: Path, model: Path) -> bool:
    """Install an archive with a library for the processor, and use it; whether the rest can be tried."""
    if not row.step("install", lambda: made.install(f"{archive}[cpu]")):
        return False
    row.step("version", lambda: made.run("splitctl", "--version"))
    row.step("help", lambda: made.run("python", "-m", "splitctl", "--help"))
    row.step("doctor", lambda: _expect("xllamacpp", made.run("splitctl", "doctor")))
    words = ("-m", model, "-p", "Once upon a time", "-n", "8", "-c", "256", "-t", "1", "--device", "CPU,CPU")
    row.step("run", lambda: _expect("", made.run("splitctl", "run", *words, "-psm", "layer", "-sm", "tensor")))
    row.step("session", lambda: made.run("python", "-c", _USES, model))
    return True


def _expect(wanted: str, said: str) -> None:
    if wanted not in said or not said.strip():
        raise CheckFailed(f"{wanted or 'a text'} is not in its output: {said[-200:]!r}")


def use_wheel(row: Row, made: Environment) -> None:
    """What the wheel brings beside the program: the man page, and what each shell needs."""
    page = made.folder / "share" / "man" / "man1" / "splitctl.1"
    row.step("man page", lambda: _expect(".TH SPLITCTL", page.read_text(encoding="utf-8")))
    for shell in ("bash", "zsh", "fish"):
        row.step(shell, partial(made.run, "splitctl", "completions", shell))


def use_plugin(row: Row, made: Environment, plugin: Path, model: Path) -> None:
    """Install the plugin for LLM beside the wheel, and ask a model of a file by it."""
    if not row.step("plugin", lambda: made.install(plugin)):
        return
    placement = {"devices": "CPU,CPU", "n_ctx": 256, "n_threads": 1}
    settings = made.folder / "llm" / "splitctl.json"
    settings.parent.mkdir(exist_ok=True)
    settings.write_text(json.dumps({"models": [str(model)], "placement": placement}), encoding="utf-8")
    row.step("llm", lambda: _expect("splitctl", made.run("llm", "plugins")))
    asked = ("prompt", "--no-log", "-m", f"splitctl/{model.name}", "-o", "n_predict", "4", "-o", "split_mode", "tensor")
    row.step("prompt", lambda: _expect("", made.run("llm", *asked, "Hi")))


def use_sources(row: Row, made: Environment, archive: Path, folder: Path, tests: str) -> None:
    """Run the tests of the source archive where it was unpacked, on what it installed."""
    if not row.step("unpack", lambda: unpack(archive, folder)):
        return
    tree = folder / archive.name.removesuffix(".tar.gz")
    if row.step("extras", lambda: made.install("-r", tree / "ci" / "lock.txt")):
        chosen = () if tests == "all" else _QUICK
        row.step(
            "tests",
            lambda: made.run("python", "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *chosen, cwd=tree),
        )


def table(rows: Sequence[Row]) -> str:
    """Give the rows as lines: what worked, then each failure with its reason."""
    lines = []
    for row in rows:
        fine = [name for name, said in row.cells.items() if said == "ok"]
        lines.append(f"{row.python:8} {row.archive:6} {len(fine):2} of {len(row.cells):2} ok: {', '.join(fine)}")
        lines += [f"{'':15} FAILED {name}: {said}" for name, said in row.cells.items() if said != "ok"]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Check the packages; gives the exit status."""
    words = argparse.ArgumentParser(
        prog="python -m tools.check_packages", description=(__doc__ or "").partition("\n")[0]
    )
    words.add_argument("--model", type=Path, required=True, help="a small GGUF")
    words.add_argument("--python", type=Path, action="append", default=[], help="a Python beside those that are found")
    words.add_argument("--only", action="store_true", help="the Pythons that are named and no others")
    words.add_argument("--dist", type=Path, help="archives that were built before")
    words.add_argument("--tests", choices=["none", "quick", "all"], default="quick", help="of the source archive")
    given = words.parse_args(argv)
    rows: list[Row] = []
    found = list(pythons(given.python, only=given.only))
    if not found:
        sys.exit(f"no Python {'.'.join(map(str, _OLDEST))} or newer with venv; name one with --python")
    with tempfile.TemporaryDirectory(prefix="splitctl-packages-") as name:
        folder, dist = Path(name), given.dist
        if dist is None:
            row, dist = build(folder, found[-1][1])
            rows.append(row)
        for archive in sorted(dist.glob("splitctl-*"), reverse=True):
            kind = "wheel" if archive.suffix == ".whl" else "sdist"
            for version, python in found:
                row = Row(version, kind)
                rows.append(row)
                made = Environment(python, folder / f"{kind}-{version}")
                if not use(row, made, archive, given.model.resolve()):
                    continue
                if kind == "wheel":
                    use_wheel(row, made)
                    for plugin in dist.glob("llm_splitctl-*.whl"):
                        use_plugin(row, made, plugin, given.model.resolve())
                elif (version, python) == found[0] and given.tests != "none":
                    use_sources(row, made, archive, folder, given.tests)
                shutil.rmtree(made.folder)
    print(table(rows))
    return 0 if rows and all(said == "ok" for row in rows for said in row.cells.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
