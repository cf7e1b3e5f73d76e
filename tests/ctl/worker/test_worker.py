"""The two processes: what they say to each other, and every way in which one of them can end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitctl.carry.sampling import SamplerSpec
from splitctl.errors import Cancelled, DeadlineExceeded, WorkerLost
from splitctl.ipc.jobs import (
    REQUESTS,
    DevicesRequest,
    DoctorRequest,
    Failure,
    Fault,
    HostRequest,
    JobRequest,
    Partial,
    Piece,
    ProbeRequest,
    Progress,
    ReserveRequest,
    Result,
    RunRequest,
    VerifyRequest,
)
from splitctl.ipc.orders import EVENTS, Alive, WorkerEvent
from splitctl.ipc.process import WorkerProcess
from splitctl.ipc.stop_texts import StopTexts
from splitctl.ipc.wire import MessageInvalid, from_line, to_line
from splitctl.last_words import how_it_ended, is_shortage, telling_line
from splitctl.outcome import Proof, SwitchOptions
from splitctl.placement import FlashAttn, Placement, SplitMode
from tests.stublib import build, needs_compiler, write_model

_LINE = 1 << 20
_GUARD_S = 60.0
"""How long a process may take to end before a test fails; no test measures it."""

_PLACEMENT = Placement(mode=SplitMode.TENSOR, devices=("CPU", "CPU"), tensor_split=(3.0, 1.0), flash_attn=FlashAttn.ON)

_REQUESTS: list[JobRequest] = [
    DevicesRequest(None),
    DoctorRequest(Path("/a b/lib.so"), model=Path("m.gguf")),
    ProbeRequest(Path("m.gguf"), None, _PLACEMENT),
    VerifyRequest(Path("m.gguf"), None, _PLACEMENT, (), "text\n", 8, 2, Path("/r"), None, Path("/k")),
    ReserveRequest(Path("m.gguf"), None, _PLACEMENT, ((8, 4, 2), (16, 8, 4)), ("host:1",)),
    HostRequest(Path("m.gguf"), None, ("host:1",), (5, 6)),
    RunRequest(
        model=Path("m.gguf"),
        library=None,
        prompt="line\nline \u2028 é \U0001f600 \x00",
        chat=True,
        n_predict=-1,
        placement=_PLACEMENT,
        prompt_mode=SplitMode.LAYER,
        sampler=SamplerSpec(temp=0.0, seed=7, stop=("\n\n", "é")),
        options=SwitchOptions(Proof.POSITIONS),
    ),
]

_EVENTS: list[WorkerEvent] = [
    Progress("loading", 0.5, "a note"),
    Progress("generating"),
    Piece(b"\xf0\x9f\x00\n"),
    Partial({"a": [1, None]}),
    Alive(),
    Result({"text": "x\ny"}),
    Failure(Fault.MODEL, "BadModelFile", "what; do this", {"text": "part"}),
]


@pytest.mark.parametrize("request_", _REQUESTS, ids=lambda one: type(one).__name__)
def test_a_request_crosses_the_pipe(request_: JobRequest) -> None:
    """A request is one line, and reads back as it was."""
    line = to_line(request_, REQUESTS)
    assert line.count(b"\n") == 1
    assert from_line(line, REQUESTS, max_bytes=_LINE) == request_


@pytest.mark.parametrize("event", _EVENTS, ids=lambda one: type(one).__name__)
def test_an_event_crosses_the_pipe(event: WorkerEvent) -> None:
    """An event is one line, and reads back as it was."""
    line = to_line(event, EVENTS)
    assert line.count(b"\n") == 1
    assert from_line(line, EVENTS, max_bytes=_LINE) == event


@given(
    st.one_of(st.binary(max_size=200), st.sampled_from([to_line(one, EVENTS) for one in _EVENTS]).map(lambda b: b[:-9]))
)
def test_any_other_line_is_one_known_error(line: bytes) -> None:
    """Whatever comes out of the pipe is a message or raises MessageInvalid."""
    for kinds in (EVENTS, REQUESTS):
        with pytest.raises(MessageInvalid):
            from_line(line, kinds, max_bytes=_LINE)


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind":"piece","data":"%%%"}',
        b'{"kind":"failure","fault":"nobody","name":"k","message":"m"}',
        b'{"kind":"progress","stage":"s","more":1}',
        b'{"kind":"result"}',
        b'{"kind":"bang"}',
        b"[1]",
        b"[" * 100_000,
    ],
)
def test_an_event_that_is_almost_right_is_refused(line: bytes) -> None:
    """Wrong fields, wrong values and wrong shapes raise MessageInvalid."""
    with pytest.raises(MessageInvalid):
        from_line(line, EVENTS, max_bytes=_LINE)


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind":"run","model":"m"}',
        b'{"kind":"probe","model":"m","library":null,"placement":{"mode":"sideways"}}',
        b'{"kind":"probe","model":3,"library":null,"placement":{}}',
        b'{"kind":"reserve","model":"m","library":null,"placement":{},"sizes":[[1,2]]}',
        b'{"kind":"devices","library":null,"more":1}',
        b'{"kind":"bang"}',
    ],
)
def test_a_request_that_is_almost_right_is_refused(line: bytes) -> None:
    """Missing, unknown and impossible fields raise MessageInvalid."""
    with pytest.raises(MessageInvalid):
        from_line(line, REQUESTS, max_bytes=_LINE)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((), ""),
        (("log: load", "log: done"), ""),
        (("free(): invalid pointer", "log: done"), "free(): invalid pointer"),
        (
            ("log: a", "x.cpp:1: GGML_ASSERT(y) failed", "log: b", "ptrace: Operation not permitted."),
            "x.cpp:1: GGML_ASSERT(y) failed",
        ),
        (
            ("log: llama_model_load: error loading model: no", "log: failed"),
            "llama_model_load: error loading model: no",
        ),
    ],
)
def test_the_telling_line_is_found(lines: tuple[str, ...], expected: str) -> None:
    """An assertion outweighs an error, an error outweighs the rest, and the library's log alone explains nothing."""
    assert telling_line(lines) == expected


def test_ends_are_named() -> None:
    """Statuses and signals have their words, and a shortage of memory is told from its signs."""
    assert how_it_ended(3) == "ended with status 3"
    assert how_it_ended(-6) == "died by signal 6 (SIGABRT)"
    assert how_it_ended(-63) == "died by signal 63 (unknown)"
    assert is_shortage(["GGML_ASSERT(meta_buf_ctx->bufs[i]) failed"])
    assert not is_shortage(["GGML_ASSERT(x) failed"])


@pytest.mark.parametrize(
    ("stops", "pieces", "expected", "hit"),
    [
        ((), ["a", "b"], "ab", False),
        (("END",), ["xE", "N", "Dy"], "x", True),
        (("END",), ["xE", "N", "x"], "xENx", False),
        (("END",), ["EN"], "EN", False),
        (("\n\n", "b"), ["a\n", "\nb"], "a", True),
        (("aab",), ["aa", "ab"], "a", True),
        (("é",), ["\u00e8\u00e9x"], "è", True),
    ],
)
def test_stop_texts_are_found_over_pieces(stops: tuple[str, ...], pieces: list[str], expected: str, hit: bool) -> None:
    """A stop text ends the answer before it, also when pieces cut it; what only looked like one comes out."""
    held = StopTexts(stops)
    out = b""
    for piece in pieces:
        for byte in piece.encode():
            out += held.feed(bytes([byte]))
            if held.hit:
                break
        if held.hit:
            break
    out += held.rest()
    assert (out.decode(), held.hit) == (expected, hit)


# -- real children -----------------------------------------------------------------------------------------------------


@pytest.fixture
def stub() -> Path:
    return build()


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_model(tmp_path / "tiny.gguf")


def _env(**more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_", "STUB_"))}
    return clean | more


def _run(model: Path, library: Path, *, n: int = 8, mode: SplitMode | None = None) -> RunRequest:
    return RunRequest(
        model=model,
        library=library,
        prompt="hello",
        chat=False,
        n_predict=n,
        placement=Placement(mode=SplitMode.TENSOR, devices=("CPU", "CPU"), n_ctx=256),
        prompt_mode=mode,
        sampler=SamplerSpec(temp=0.0),
        options=SwitchOptions(force=True),
    )


def _n_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@needs_compiler
@pytest.mark.stub
def test_a_run_switches_and_answers(stub: Path, tiny: Path) -> None:
    """A run tells its stages in order, streams its pieces, and ends with a result that holds them all."""
    with WorkerProcess(_run(tiny, stub, mode=SplitMode.LAYER), env=_env()) as worker:
        events = list(worker.events())
    stages = [one.stage for one in events if isinstance(one, Progress)]
    assert [*dict.fromkeys(stages)][:2] == ["loading", "prompt"]
    assert "switch: placing" in stages
    assert stages[-1] == "generating"
    last = events[-1]
    assert isinstance(last, Result)
    assert last.body["switch"]["status"] == "switched"
    assert last.body["switch"]["confirmed"] is True
    assert (
        b"".join(one.data for one in events if isinstance(one, Piece)).decode("utf-8", "replace") == last.body["text"]
    )


@needs_compiler
@pytest.mark.stub
@pytest.mark.parametrize(
    ("faults", "how", "said", "stage"),
    [
        ("load:abort", "died by signal 6 (SIGABRT)", "GGML_ASSERT(stub_was_asked_to_abort) failed", "loading"),
        ("init:segv", "died by signal 11 (SIGSEGV)", "", "loading"),
        ("decode:kill", "died by signal 9 (SIGKILL)", "", "prompt"),
        ("init:abort:tensor", "died by signal 6 (SIGABRT)", "GGML_ASSERT(stub_was_asked_to_abort)", "switch: building"),
        ("decode:abort:tensor", "died by signal 6 (SIGABRT)", "GGML_ASSERT(stub_was_asked_to_abort)", "generating"),
    ],
)
def test_a_death_is_an_error_that_names_it(
    stub: Path, tiny: Path, faults: str, how: str, said: str, stage: str
) -> None:
    """A library that aborts, crashes or is killed ends in WorkerLost: how, while doing what, and its last words."""
    request = _run(tiny, stub, mode=SplitMode.LAYER)
    with WorkerProcess(request, env=_env(STUB_FAULTS=faults)) as worker, pytest.raises(WorkerLost) as caught:
        list(worker.events())
    assert caught.value.how == f"{how} while {stage}"
    assert said in telling_line(caught.value.log_tail)
    assert not psutil.pid_exists(worker.pid)


@needs_compiler
@pytest.mark.stub
def test_a_silent_worker_is_ended_at_its_deadline(stub: Path, tiny: Path) -> None:
    """A library that hangs is killed after the silence that is borne."""
    with WorkerProcess(_run(tiny, stub), env=_env(STUB_FAULTS="load:hang")) as worker, pytest.raises(DeadlineExceeded):
        list(worker.events(deadline_s=1.0))
    assert not psutil.pid_exists(worker.pid)


@needs_compiler
@pytest.mark.stub
def test_a_cancel_ends_at_a_token(stub: Path, tiny: Path) -> None:
    """A cancel while generating ends in a failure that keeps what exists of the answer."""
    with WorkerProcess(_run(tiny, stub, n=-1), env=_env()) as worker:
        pieces: list[bytes] = []
        last: WorkerEvent | None = None
        for event in worker.events():
            last = event
            if isinstance(event, Piece):
                pieces.append(event.data)
                worker.cancel()
    assert isinstance(last, Failure)
    assert last.fault is Fault.CANCELLED
    assert last.body["text"] == b"".join(pieces).decode("utf-8", "replace")
    assert pieces


@needs_compiler
@pytest.mark.stub
def test_a_parked_run_fails_with_its_outcome(stub: Path, tiny: Path, tmp_path: Path) -> None:
    """A switch that parks ends in a failure of its own kind, and nothing is generated after it."""
    faults = "load:null:tensor, load:null:layer@2+"
    request = _run(tiny, stub, mode=SplitMode.LAYER)
    with WorkerProcess(request, env=_env(STUB_FAULTS=faults, XDG_STATE_HOME=str(tmp_path))) as worker:
        events = list(worker.events())
    last = events[-1]
    assert isinstance(last, Failure)
    assert (last.fault, last.name) == (Fault.PARKED, "Parked")
    assert last.body["switch"]["status"] == "parked"
    assert last.body["switch"]["parked_at"] in last.message
    assert last.body["timings"]["prompt"]["n"] > 0
    assert "generating" not in [one.stage for one in events if isinstance(one, Progress)]


@needs_compiler
@pytest.mark.stub
def test_a_worker_that_hangs_ends_when_its_work_is_not_wanted(stub: Path, tiny: Path) -> None:
    """A silent child is killed at the first yes to whether it is cancelled, and nobody waits for an event of it."""
    answers: Iterator[bool] = repeat(False)
    with WorkerProcess(_run(tiny, stub), env=_env(STUB_FAULTS="load:hang")) as worker:
        events = worker.events(is_cancelled=lambda: next(answers))
        assert next(events) == Progress("loading", 0.0)
        answers = iter([False, False, True])
        with pytest.raises(Cancelled, match="loading"):
            next(events)
        assert list(answers) == []
    assert not psutil.pid_exists(worker.pid)


@needs_compiler
@pytest.mark.stub
def test_a_kill_ends_a_worker_that_hangs(stub: Path, tiny: Path) -> None:
    """A second interrupt ends a worker that does not hear the first, and says so."""
    with WorkerProcess(_run(tiny, stub), env=_env(STUB_FAULTS="load:hang")) as worker:
        events = worker.events()
        assert next(events) == Progress("loading", 0.0)
        worker.cancel()
        worker.kill()
        with pytest.raises(WorkerLost, match="killed by the second interrupt"):
            list(events)
    assert not psutil.pid_exists(worker.pid)


@needs_compiler
@pytest.mark.stub
def test_leaving_early_leaves_nothing_running(stub: Path, tiny: Path) -> None:
    """A parent that stops listening ends the worker by closing its stdin, and every descriptor is given back."""
    before = _n_descriptors()
    with WorkerProcess(_run(tiny, stub, n=-1), env=_env()) as worker:
        next(iter(worker.events()))
    assert not psutil.pid_exists(worker.pid)
    assert _n_descriptors() == before


_PARENT = """
import os, sys
from pathlib import Path
from splitctl.ipc.process import WorkerProcess
from tests.ctl.worker.test_worker import _run, _env
with WorkerProcess(_run(Path(sys.argv[1]), Path(sys.argv[2])), env=_env(STUB_FAULTS="load:hang")) as worker:
    for event in worker.events():
        print(worker.pid, flush=True)
"""


@needs_compiler
@pytest.mark.stub
def test_a_worker_ends_with_its_parent(stub: Path, tiny: Path) -> None:
    """When the parent is killed, a worker that hangs in the library ends at once."""
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(tiny), str(stub)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    ) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
    gone, alive = psutil.wait_procs([worker], timeout=_GUARD_S)
    assert (len(gone), alive) == (1, [])


def test_the_worker_is_no_command() -> None:
    """Started by hand, the worker says what to run instead, with a usage status."""
    done = subprocess.run(
        [sys.executable, "-m", "splitctl.worker.main"], capture_output=True, text=True, check=False, timeout=_GUARD_S
    )
    assert done.returncode == 2
    assert "splitctl --help" in done.stderr
    assert done.stderr.count("\n") == 1
