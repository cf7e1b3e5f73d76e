"""The trial of the archives, with environments that are none: what is counted, and how it ends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import check_packages
from tools.check_packages import CheckFailed, pythons, run


class _Pretended:
    """An environment whose programs say what is wanted, or fail where `broken` says so."""

    broken = ""

    def __init__(self, python: Path, folder: Path) -> None:
        del python
        self.folder = folder
        page = folder / "share" / "man" / "man1" / "splitctl.1"
        page.parent.mkdir(parents=True)
        page.write_text(".TH SPLITCTL", encoding="utf-8")

    def install(self, *what: str | Path) -> str:
        return self.run("pip", *what)

    def run(self, program: str, *words: str | Path, cwd: Path | None = None) -> str:
        del cwd
        line = f"{program} {' '.join(map(str, words))}"
        if self.broken and self.broken in line:
            raise CheckFailed(f"{program} ended with 1: no such thing")
        return "xllamacpp splitctl"


@pytest.mark.parametrize("broken", ["", "[cpu]", "doctor", "llm prompt"])
def test_it_fails_where_one_thing_does(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table has a line for each archive, names what failed with its reason, and the status says if anything did."""
    for name in ("splitctl-1-py3-none-any.whl", "splitctl-1.tar.gz", "llm_splitctl-1-py3-none-any.whl"):
        (tmp_path / name).touch()
    monkeypatch.setattr(check_packages, "Environment", _Pretended)
    monkeypatch.setattr(_Pretended, "broken", broken)
    words = ["--model", "m.gguf", "--dist", str(tmp_path), "--tests", "none", "--only", "--python", sys.executable]
    assert check_packages.main(words) == (1 if broken else 0)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if " ok: " in line] == ["sdist", "wheel"]
    failed = [line for line in lines if "FAILED" in line]
    assert all(line.endswith("ended with 1: no such thing") for line in failed)
    assert len(failed) == {"": 0, "[cpu]": 2, "doctor": 2, "llm prompt": 1}[broken]


def test_nothing_to_try_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder without archives passes for nothing."""
    words = ["--model", "m.gguf", "--dist", str(tmp_path), "--only", "--python", sys.executable]
    assert check_packages.main(words) == 1
    assert capsys.readouterr().out.strip() == ""


def test_pythons_are_new_enough_and_each_there_once(tmp_path: Path) -> None:
    """This Python is found by its file; what is no Python is passed over."""
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    (tmp_path / "python3").chmod(0o755)
    here = Path(sys.executable)
    found = list(pythons([here, tmp_path / "python3", tmp_path / "none", here], only=True))
    assert found == [(".".join(map(str, sys.version_info[:3])), here)]


def test_a_failed_command_is_told_by_its_last_lines(tmp_path: Path) -> None:
    """What it said at its end is the reason."""
    with pytest.raises(CheckFailed, match=r"sh ended with 3: b \| c \| d$"):
        run("sh", "-c", "printf 'a\\nb\\nc\\nd\\n' >&2; exit 3", cwd=tmp_path)
