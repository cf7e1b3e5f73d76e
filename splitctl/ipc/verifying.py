"""Runs the cells of `verify`, each in a child that may die of it, and remembers the findings.

Laws:
    1. However a cell ends, that is a finding; only the reference's failure ends the whole.
    2. A finding is remembered under the same key that a session's check looks up, so the rules know it.
    3. A cancel ends the child at once, and keeps what was found before it.
"""

from __future__ import annotations

import errno
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from splitctl.errors import BadModelFile, Cancelled, DeadlineExceeded, FileChanged, WorkerLost
from splitctl.ipc.jobs import Failure, Fault, Progress, VerifyRequest
from splitctl.ipc.process import run_job
from splitctl.last_words import telling_line
from splitctl.model.facts import ModelFacts
from splitctl.model.identity import model_digest, statuses
from splitctl.outcome import to_plain
from splitctl.placement import FlashAttn, Placement
from splitctl.probing import ProbeKey, ProbeVerdict, Verdict, VerdictCache, is_of_the_target, verdict_of_death
from splitctl.probing.comparing import CONTROL_STAGE, MAX_KEPT_BYTES
from splitctl.probing.matrix import Cell

_SIGNAL = re.compile(r"signal (\d+) \((\w+)\)")
#: How the library says what it aborts for: file:line: GGML_ASSERT(...) failed, or the words of a GGML_ABORT.
_ASSERT = re.compile(r"([^\s/]+\.\w+:\d+: .+)")
_NUMBERS = ("nmse", "nmse_worst", "same_cache_nmse", "same_cache_nmse_worst", "top1_agreement", "perplexity")

_FLOAT_BYTES = 4

Found = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Verification:
    """What is verified; the other fields are as in a VerifyRequest.

    Attributes:
        cells: what is tried, in order; the first is the reference.
        deadline_s: longest silence of a child, seconds.
    """

    model: Path
    facts: ModelFacts
    library: Path | None
    rpc: tuple[str, ...]
    cells: tuple[Cell, ...]
    text: str
    n_tokens: int
    n_generate: int
    deadline_s: float


@dataclass(slots=True)
class VerifyReport:
    """What was found.

    Attributes:
        library: the library's path, version and devices, as the first child reports them; empty before.
        cells: what was found in each cell that was tried, plain values.
        failure: why nothing could be tried; None otherwise.
        is_cancelled: whether it was stopped before the end.
        remembered: how many verdicts the cache took.
    """

    library: Found = field(default_factory=dict)
    cells: list[Found] = field(default_factory=list)
    failure: Failure | None = None
    is_cancelled: bool = False
    remembered: int = 0


@dataclass(frozen=True, slots=True)
class Verifier:
    """Tries cells one after the other.

    Attributes:
        env: the environment of the children.
        cache: the file of verdicts that the rules read; None: nothing is remembered.
        on_progress: called with what is being done.
        on_cell: called with what was found in a cell.
        on_output: called with every line that a child or the library prints.
        is_cancelled: asked all the while.
    """

    env: Mapping[str, str] = field(repr=False)
    cache: VerdictCache | None = None
    on_progress: Callable[[Progress], None] = lambda _: None
    on_cell: Callable[[Found], None] = lambda _: None
    on_output: Callable[[str], None] = lambda _: None
    is_cancelled: Callable[[], bool] = lambda: False

    def __call__(self, what: Verification) -> VerifyReport:
        """Try every cell, as far as it goes; raises OSError without room for a file, or for a child."""
        report = VerifyReport()
        with tempfile.TemporaryDirectory(prefix="splitctl-verify-") as folder:
            _demand_room(what, Path(folder))
            try:
                for number, cell, files in _with_files(what.cells, Path(folder)):
                    found = self._try(what, cell, number, files, report)
                    if report.failure is not None:
                        return report
                    report.cells.append(found)
                    files.judge(found)
                    self._remember(what, cell, found, report)
                    self.on_cell(found)
                    if number == 0 and found["verdict"] != Verdict.OK.value:
                        return report
            except Cancelled:
                report.is_cancelled = True
        return report

    def _try(self, what: Verification, cell: Cell, number: int, files: _Files, report: VerifyReport) -> Found:
        """Run one cell in a child, and say how it ended."""
        found: Found = {**_described(cell), "verdict": Verdict.INCONCLUSIVE.value, "why": "", "end": None}
        stage = f"{number + 1} of {len(what.cells)}"
        self.on_progress(Progress(stage, number / len(what.cells), cell.label()))
        request = VerifyRequest(
            model=what.model, library=what.library, placement=cell.placement, rpc=what.rpc, text=what.text,
            n_tokens=what.n_tokens, n_generate=what.n_generate, reference=files.reference, twin=files.twin,
            keep=files.keep, control=files.control,
        )  # fmt: skip
        started = time.monotonic()

        def on_progress(event: Progress) -> None:
            share = (number + (event.done or 0.0)) / len(what.cells)
            self.on_progress(Progress(f"{stage}, {event.stage}", share))

        end = run_job(
            request, env=self.env, deadline_s=what.deadline_s, is_cancelled=self.is_cancelled, on_progress=on_progress,
            on_output=self.on_output,
        )  # fmt: skip
        report.library = end.body.pop("library", report.library)
        found |= end.body
        match end.error:
            case WorkerLost() | DeadlineExceeded() if end.stage == CONTROL_STAGE:
                # What was measured before it stands, and the limit stays as narrow as it is.
                found["nmse_control"] = None
            case WorkerLost() as lost:
                found |= _death(lost, end.stage)
            case DeadlineExceeded() as lost:
                found |= _hang(lost, end.stage, end.tail)
            case Failure(fault=Fault.CANCELLED):
                raise Cancelled(cell.label())
            case Failure() as failure if number == 0:
                report.failure = failure
            case Failure(_, name, message):
                # What the mode does comes as a result: this is the file, the library, the flags, or a fault of ours.
                how = {"by": "return", "function": name, "code": None, "said": message}
                found |= {"verdict": Verdict.INCONCLUSIVE.value, "why": message, "end": how}
        if statuses(what.facts.files) != tuple(header.status for header in what.facts.headers):
            why = f"the files of {what.model} changed meanwhile"
            found |= {"verdict": Verdict.INCONCLUSIVE.value, "why": why}
        found["seconds"] = time.monotonic() - started
        return found

    def _remember(self, what: Verification, cell: Cell, found: Found, report: VerifyReport) -> None:
        # Several sequences whose state does not come back can be served; a rule refuses the switches that lose it.
        loses_state = found.get("state_equal") is False and found["verdict"] == Verdict.WRONG.value
        if self.cache is None or not report.library or (loses_state and found["n_seq"] > 1):
            return
        devices = tuple(report.library["devices"])
        library = Path(report.library["path"])
        # A session that runs names the choice that was made, one that opens may leave it open.
        flash = FlashAttn(found["flash_attn"]) if "flash_attn" in found else cell.placement.flash_attn
        keys = dict.fromkeys(
            ProbeKey.of(library, what.facts, one, devices, what.rpc)
            for one in (cell.placement, cell.placement.changed(flash_attn=flash))
        )
        if cell is what.cells[0] and found["verdict"] != Verdict.OK.value:
            # What goes wrong where there is nothing to compare with may be the file's fault.
            return
        numbers = {name: float(found[name]) for name in _NUMBERS if found.get(name) is not None}
        verdict = ProbeVerdict(Verdict(found["verdict"]), found["why"], numbers)
        # With a full or read-only cache folder what was found is reported all the same, and the count says so.
        with suppress(OSError, BadModelFile, FileChanged):
            kept = [self.cache.put(key, verdict, lambda: model_digest(what.facts.files)) for key in keys]
            report.remembered += any(kept)


def _demand_room(what: Verification, folder: Path) -> None:
    """Refuse where the logits of two references do not fit on the disk: a child would fail of it later."""
    wanted = 2 * min(what.n_tokens * max(what.facts.n_vocab, 1) * _FLOAT_BYTES, MAX_KEPT_BYTES)
    free = shutil.disk_usage(folder).free
    if free < wanted:
        text = f"logits want {wanted} bytes and {free} are free; set TMPDIR to a folder with room, or lower --tokens"
        raise OSError(errno.ENOSPC, text, str(folder.parent))


@dataclass(slots=True)
class _Files:
    """The files of logits that a cell reads and writes, as in a VerifyRequest.

    Attributes:
        types: of its cache.
        kept: pairs of cache types whose reference is sound, with its file.
        controls: how far each of them is from itself.
        control: that of what this one is judged by.
    """

    reference: Path | None
    twin: Path | None
    keep: Path | None
    types: tuple[str, str]
    kept: dict[tuple[str, str], Path]
    controls: dict[tuple[str, str], float]

    @property
    def control(self) -> float:
        """How far what this one is judged by is from itself, NMSE; 0 where nobody knows."""
        judged_by = self.types if self.twin is not None else next(iter(self.kept), None)
        return 0.0 if judged_by is None else self.controls.get(judged_by, 0.0)

    def judge(self, found: Found) -> None:
        """Keep a reference's logits only if it is sound."""
        if self.keep is not None and found["verdict"] == Verdict.OK.value:
            self.kept[self.types] = self.keep
            self.controls[self.types] = found.get("nmse_control") or 0.0


def _with_files(cells: Sequence[Cell], folder: Path) -> Iterator[tuple[int, Cell, _Files]]:
    """Go through the cells with their files; those of a pair of types that is done with are removed."""
    kept: dict[tuple[str, str], Path] = {}
    controls: dict[tuple[str, str], float] = {}
    first = cells[0].cache_types
    for number, cell in enumerate(cells):
        types = cell.cache_types
        if cell.is_reference:
            for old in [one for one in kept if one != first]:
                kept.pop(old).unlink()
        keep = folder / "-".join(types) if cell.is_reference else None
        twin = kept.get(types) if types != first else None
        yield number, cell, _Files(kept.get(first), twin, keep, types, kept, controls)


def _described(cell: Cell) -> Found:
    one: Placement = cell.placement
    return {
        "mode": one.mode.value,
        "tensor_split": to_plain(one.tensor_split),
        "type_k": one.type_k,
        "type_v": one.type_v,
        "cache": "devices" if one.offload_kqv else "host",
        "n_seq": one.n_seq_max,
        "kv_unified": one.kv_unified,
        "reference": cell.is_reference,
        "loads": False,
    }


def _death(error: WorkerLost, stage: str) -> Found:
    judged = verdict_of_death(error.how, stage, error.log_tail)
    signal = _SIGNAL.search(error.how)
    end: Found = {"by": "signal" if signal else "status", "stage": stage, "said": telling_line(error.log_tail)}
    if signal:
        end |= {"signal": int(signal[1]), "name": signal[2]}
    failed = _ASSERT.search(end["said"])
    end["assert"] = failed[1] if failed and signal else None
    return {"verdict": judged.verdict.value, "why": judged.why, "end": end}


def _hang(error: DeadlineExceeded, stage: str, tail: Sequence[str]) -> Found:
    end = {"by": "deadline", "stage": stage, "deadline_s": error.timeout_s, "said": telling_line(tail)}
    verdict = Verdict.DIES if is_of_the_target(stage) else Verdict.INCONCLUSIVE
    return {"verdict": verdict.value, "why": f"it hangs while {stage}: {error}", "end": end}
