"""What every test shares: the cache folder, the real model, and the rule that no skip goes unnoticed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hypothesis
import platformdirs
import pytest

from tests.skips import SkipLedger

# Without it an abort of the library starts a debugger for a backtrace and takes seconds.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")
# Thousands of child processes: compiling the packages anew takes longer than what most of them do.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

_TESTS = Path(__file__).parent

# One library a process: tests/ctl/real_builds.py runs these in a child for each build.
collect_ignore = [] if "SPLITCTL_TEST_LIBRARY" in os.environ else ["real"]

# A busy machine makes examples slowly: that is no fault of a test, and failed sound ones now and then.
_PATIENT = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("dev", _PATIENT, max_examples=50)
hypothesis.settings.register_profile("ci", _PATIENT, max_examples=50, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("deep", _PATIENT, max_examples=5000)
hypothesis.settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") == "true" else "dev")
)


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    """The cache folder of splitctl: `models` and `builds` are in it."""
    return Path(platformdirs.user_cache_dir("splitctl"))


def _model(cache: Path, name: str) -> Path:
    path = cache / "models" / f"{name}.gguf"
    if not path.is_file():
        pytest.skip(f"{path} is not there: run ci/model {name}")
    return path


@pytest.fixture(scope="session")
def smollm2(cache_dir: Path) -> Path:
    """The path of SmolLM2-135M-Instruct Q4_1 (`ci/model smollm2`)."""
    return _model(cache_dir, "smollm2")


@pytest.fixture(scope="session")
def gemma3_270m(cache_dir: Path) -> Path:
    """The path of Gemma 3 270M Q4_K_M (`ci/model gemma3-270m`)."""
    return _model(cache_dir, "gemma3-270m")


_ledger = SkipLedger((_TESTS / "allowed_skips.txt").read_text(encoding="utf-8").splitlines())


_LONGEST = (
    "real_library/test_real_builds",
    "test_faults_table",
    "test_cli_run",
    "test_cli_sessions",
    "test_supervisor",
    "codec/test_parse",
    "worker/test_serve",
    "test_probe",
    "test_soak",
    "test_streams_under_a_check",
    "test_real_shortage",
    "codec/",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the exhaustive tests unless the command line speaks of them (`-m deep`)."""
    if "deep" not in (config.getoption("markexpr") or ""):
        deep = [item for item in items if item.get_closest_marker("deep")]
        config.hook.pytest_deselected(items=deep)
        items[:] = [item for item in items if item not in deep]
    # Files are given to the cores in this order, and the longest ones must not come last.
    items.sort(key=lambda item: next((n for n, name in enumerate(_LONGEST) if name in item.nodeid), len(_LONGEST)))


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    # An expected failure is reported as skipped too, and is none.
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _ledger.add(report.nodeid, reason)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count a test that skipped."""
    _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Count a module that skipped as a whole."""
    _note(report)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a CI run that has a skip which nobody agreed to."""
    if os.environ.get("CI") == "true" and _ledger.unexpected() and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the skips that are not on the list."""
    unexpected = _ledger.unexpected()
    if unexpected:
        terminalreporter.section("skips that tests/allowed_skips.txt does not allow")
        for node, reason in unexpected:
            terminalreporter.write_line(f"{node}: {reason}")
