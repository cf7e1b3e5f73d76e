"""The long fuzz of `ci/fuzz`: every kept case, then new ones until the time is over or as many as were asked for.

Each job draws with a seed of its own, in batches; a broken law is shrunk by hypothesis and kept in the corpus. With
--keep, so is the smallest case of every outcome that the corpus lacks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings

from splitctl.errors import SplitctlError
from tests.ctl.houses import house, served, stub_arguments
from tests.fuzz import control
from tests.fuzz.law import CORPUS, Finding, checked_in_bounds, damaged, seeds, slug

_BATCH = 2000
#: Bad requests of --control.
_N_REQUESTS = 10_000
#: A case that is kept for its outcome alone is small.
_MAX_KEPT_BYTES = 1500


@dataclass(slots=True)
class Tally:
    """What a job did.

    Attributes:
        n_cases: cases tried.
        worst_s: processor time of the slowest.
        outcomes: the smallest case of each outcome.
        finding: how the law was broken, and by what.
    """

    n_cases: int = 0
    worst_s: float = 0.0
    outcomes: dict[str, bytes] = field(default_factory=dict)
    finding: tuple[str, bytes] | None = None


def one_batch(tally: Tally, sound: list[bytes], count: int, seed: int) -> None:
    """Draw and check; the first finding is shrunk and kept in the tally."""

    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        verbosity=hypothesis.Verbosity.quiet,
    )
    @given(damaged(sound))
    def case(data: bytes) -> None:
        tally.n_cases += 1
        try:
            outcome = checked_in_bounds(data)
        except Exception as error:
            # Whatever it is, it is not the one error that may come out; the last one told is the smallest.
            tally.finding = (f"{type(error).__name__}: {error}", data)
            raise Finding(str(error)) from error
        tally.worst_s = max(tally.worst_s, outcome.seconds)
        smallest = tally.outcomes.get(outcome.name)
        if smallest is None or len(data) < len(smallest):
            tally.outcomes[outcome.name] = data

    try:
        case()
    except Finding:
        return


def job(number: int, end: float, n_cases: int | None) -> Tally:
    """One process: batches until the clock or the count says stop, or the law is broken."""
    sound = seeds()
    tally = Tally()
    seed = number + (os.getpid() << 8)
    while tally.finding is None and time.monotonic() < end and (n_cases is None or tally.n_cases < n_cases):
        left = _BATCH if n_cases is None else min(_BATCH, n_cases - tally.n_cases)
        one_batch(tally, sound, max(1, left), seed)
        seed += 1 << 40
    return tally


def replay() -> Tally:
    """Every kept case once."""
    tally = Tally()
    for path in sorted(CORPUS.glob("*.bin")):
        data = path.read_bytes()
        tally.n_cases += 1
        try:
            outcome = checked_in_bounds(data)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is not the one error that may come out
            tally.finding = (f"{path.name}: {type(error).__name__}: {error}", data)
            return tally
        tally.worst_s = max(tally.worst_s, outcome.seconds)
        tally.outcomes[outcome.name] = data
    return tally


def keep(tally: Tally, known: set[str]) -> int:
    """Put the smallest case of every new outcome into the corpus; returns how many."""
    count = 0
    for name, data in sorted(tally.outcomes.items()):
        if name not in known and len(data) <= _MAX_KEPT_BYTES:
            (CORPUS / f"{slug(name)}.bin").write_bytes(data)
            known.add(name)
            count += 1
    return count


def main() -> int:
    """Run; 0 when the law held, 1 when it was broken."""
    parser = argparse.ArgumentParser(prog="ci/fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default 10)")
    parser.add_argument("--cases", type=int, help="as many cases instead, however long they take")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: CPUs)")
    parser.add_argument("--keep", action="store_true", help="keep the smallest case of every new outcome")
    parser.add_argument(
        "--control", action="store_true", help="bad requests to a live host instead (10,000, or as many as --cases)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    asked = parser.parse_args()
    started = time.monotonic()
    if asked.control:
        return _control(asked.cases or _N_REQUESTS, as_json=asked.json)
    old = replay()
    tallies = [old]
    if old.finding is None:
        tallies += _new_cases(asked.jobs, asked.minutes, asked.cases)
    known = set(old.outcomes)
    n_kept = sum(keep(tally, known) for tally in tallies) if asked.keep else 0
    findings = [tally.finding for tally in tallies if tally.finding is not None]
    for number, (text, data) in enumerate(findings):
        (CORPUS / f"finding-{number}-{len(data)}.bin").write_bytes(data)
        sys.stderr.write(f"fuzz: {text}\nfuzz: {data[:200].hex()}\n")
    body: dict[str, Any] = {
        "n_cases": sum(tally.n_cases for tally in tallies),
        "n_findings": len(findings),
        "n_outcomes": len(set[str]().union(*(tally.outcomes for tally in tallies))),
        "n_kept": n_kept,
        "worst_ms": round(max(tally.worst_s for tally in tallies) * 1e3, 2),
        "seconds": round(time.monotonic() - started, 1),
        "jobs": asked.jobs,
    }
    print(json.dumps(body) if asked.json else "  ".join(f"{key} {value}" for key, value in body.items()))
    return 1 if findings else 0


def _control(n_cases: int, *, as_json: bool) -> int:
    """Send bad requests to a host with the stub library; 0 when the law of `control` held."""
    started, seed, findings = time.monotonic(), os.getpid(), []
    tally = control.Tally()
    with (
        tempfile.TemporaryDirectory() as folder,
        house() as home,
        served(home, *stub_arguments(Path(folder))) as host,
    ):
        try:
            tally = control.fuzz(host.address, host.process.pid, n_cases, seed, tell=findings.append)
        except (control.Finding, SplitctlError, OSError) as error:
            findings.append(f"{type(error).__name__}: {error}")
        code, log = host.end()
    if code != 0 or "fault of splitctl" in log:
        findings.append(f"the host ended with status {code} and said: {log[-2000:]}")
    for text in findings:
        sys.stderr.write(f"fuzz: {text}\n")
    body = {
        **dataclasses.asdict(tally),
        "n_findings": len(findings),
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
    }
    print(json.dumps(body) if as_json else "  ".join(f"{key} {value}" for key, value in body.items()))
    return 1 if findings else 0


def _new_cases(jobs: int, minutes: float, n_cases: int | None) -> list[Tally]:
    end = float("inf") if n_cases is not None else time.monotonic() + 60 * minutes
    share = None if n_cases is None else -(-n_cases // jobs)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        return list(pool.map(job, range(jobs), [end] * jobs, [share] * jobs))
