"""A skip that nobody agreed to fails a CI run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.skips import SkipLedger

_ROOT = Path(__file__).parent.parent


def test_a_listed_skip_is_expected() -> None:
    """Both the test id and the reason must fit one line of the list."""
    ledger = SkipLedger(["# why", "", "tests/native/* | *0.3.36* is not there*"])
    ledger.add("tests/native/test_abi.py::test_a", "Skipped: llama-cpp-python-0.3.36 is not there: run ci/builds")
    assert ledger.unexpected() == []


@pytest.mark.parametrize(
    ("node", "reason"),
    [("tests/ctl/test_x.py::test_a", "0.3.36 is not there"), ("tests/native/test_x.py::test_a", "no compiler")],
)
def test_other_skips_are_not(node: str, reason: str) -> None:
    """A skip elsewhere, or for another reason, is named."""
    ledger = SkipLedger(["tests/native/* | *0.3.36* is not there*"])
    ledger.add(node, reason)
    assert ledger.unexpected() == [(node, reason)]


def test_a_line_without_reason_is_refused() -> None:
    """The list allows no skip for whatever reason."""
    with pytest.raises(ValueError, match="line 1"):
        SkipLedger(["tests/*"])


@pytest.mark.parametrize(("ci", "status"), [("true", 1), ("", 0)])
def test_ci_fails_on_an_unlisted_skip(tmp_path: Path, ci: str, status: int) -> None:
    """With CI=true a run with one pass and one skip that is not on the list fails, and names it; else it passes."""
    test = tmp_path / "test_it.py"
    test.write_text("import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('moon is down')\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", str(test)]
    done = subprocess.run(command, cwd=_ROOT, env=dict(os.environ, CI=ci), capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    assert "1 passed, 1 skipped" in done.stdout
    assert "moon is down" in done.stdout.partition("does not allow")[2]
