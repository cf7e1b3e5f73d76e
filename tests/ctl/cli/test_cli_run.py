"""`splitctl run`, `devices` and `doctor` as a user starts them: the real model, a library that dies."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.ctl.houses import house, run_here, served, stub_arguments
from tests.stublib import build, needs_compiler, write_model

_ROOT = Path(__file__).parents[3]
_GUARD_S = 900.0
"""How long a command may take before a test fails; no test measures it."""

# One thread: on a machine that is busy with other tests, more of them wait for each other at every barrier.
_TWO = ["--device", "CPU,CPU", "-c", "2560", "--temp", "0", "-t", "1"]


def _env(**more: str) -> dict[str, str]:
    # LLAMA_NATIVE_LIB stays: it names the build that the whole run of the tests is for.
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_ARG_", "STUB_"))}
    return clean | more


def _command(*arguments: str | Path) -> list[str]:
    return [
        sys.executable,
        "-P",
        "-c",
        "import sys; from splitctl.cli import main; sys.exit(main())",
        *map(str, arguments),
    ]


def _splitctl(*arguments: str | Path, stdin: bytes = b"", **env: str) -> subprocess.CompletedProcess[bytes]:
    done = run_here(arguments, _env(PYTHONPATH=str(_ROOT), **env), stdin)
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return done


def _json(done: subprocess.CompletedProcess[bytes]) -> Any:
    assert done.stdout.count(b"\n") == 1, done.stdout
    return json.loads(done.stdout)


def _lines(done: subprocess.CompletedProcess[bytes]) -> list[str]:
    return done.stderr.decode().splitlines()


@contextmanager
def _started(*arguments: str | Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        _command(*arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_env(PYTHONPATH=str(_ROOT), **env),
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _wait_for(process: subprocess.Popen[bytes], stage: str) -> list[psutil.Process]:
    """Read stderr until a stage begins; give the processes below this one."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(stage.encode()):
            return psutil.Process(process.pid).children(recursive=True)
    pytest.fail(f"the command ended before {stage!r}")


def _interrupt_until_it_ends(process: subprocess.Popen[bytes]) -> bytes:
    """Send interrupts, of which the kernel may merge two that come close together; give stderr."""
    while True:
        process.send_signal(signal.SIGINT)
        try:
            return process.communicate(timeout=0.5)[1]
        except subprocess.TimeoutExpired:
            continue


def _all_gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=_GUARD_S)[1]


# -- a run with the real model -----------------------------------------------------------------------------------------


@pytest.mark.model
def test_a_run_switches_and_tells_everything(smollm2: Path) -> None:
    """--json prints one object with the answer, the outcome and the timings; stages go to stderr as plain lines."""
    done = _splitctl(
        "run", "-m", smollm2, *_TWO, "-psm", "layer", "-sm", "tensor", "--chat", "-p", "Hi!", "-n", "8", "--json"
    )
    assert done.returncode == 0, done.stderr
    body = _json(done)
    assert body["text"]
    assert body["switch"]["status"] == "switched"
    assert (body["switch"]["requested"], body["switch"]["effective"]) == ("tensor", "tensor")
    assert body["switch"]["confirmed"] is True
    assert body["switch"]["n_tokens"] == body["timings"]["prompt"]["n"]
    assert body["placement"]["mode"] == "tensor"
    assert body["timings"]["switch_ms"] == body["switch"]["total_ms"] > 0
    assert body["timings"]["generate"]["n"] == len(body["tokens"]) <= 8
    assert body["model"]["architecture"] == "llama"
    stages = [line.partition(":")[0] for line in _lines(done)]
    assert stages[0] == "loading"
    assert "switch" in stages
    assert b"\x1b" not in done.stderr


@pytest.mark.model
def test_text_streams_to_stdout_and_the_stages_follow(smollm2: Path) -> None:
    """Without --json stdout holds the answer alone, stdin can be the prompt, and a table of the stages is on stderr."""
    arguments = ["run", "-m", smollm2, *_TWO, "-psm", "layer", "-sm", "tensor", "-f", "-", "-n", "12"]
    plain = _splitctl(*arguments, stdin="Der Fluß mäandert: ".encode())
    told = _json(_splitctl(*arguments, "--json", stdin="Der Fluß mäandert: ".encode()))
    assert plain.returncode == 0
    assert plain.stdout.decode() == told["text"] + "\n"
    for stage in ("sealing", "restoring", "proving", "total"):
        assert any(stage in line for line in _lines(plain))


@pytest.mark.model
def test_the_same_seed_draws_the_same_words_and_stop_texts_end_them(smollm2: Path) -> None:
    """A seed is repeatable over runs, is told when it was drawn, and a stop text is not part of the answer."""
    base = [
        "run",
        "-m",
        smollm2,
        "--device",
        "CPU,CPU",
        "-c",
        "512",
        "-t",
        "1",
        "-p",
        "Numbers: one, two,",
        "-n",
        "24",
        "--json",
    ]
    first = _json(_splitctl(*base, "--temp", "1.2"))
    again = _json(_splitctl(*base, "--temp", "1.2", "--seed", str(first["seed"])))
    assert again["tokens"] == first["tokens"]
    assert first["switch"] is None
    assert first["timings"]["switch_ms"] is None
    stop = first["text"][5:8]
    ended = _json(_splitctl(*base, "--temp", "1.2", "--seed", str(first["seed"]), "--stop", stop))
    assert ended["stopped"] == "stop"
    assert ended["text"] == first["text"][: first["text"].index(stop)]


_SAME_STATE = """
import json, os, sys, tempfile
from pathlib import Path
from llama_native import Library
from splitctl import Placement, SamplerSpec, Session, SplitMode
model, prompt, n = sys.argv[1], Path(sys.argv[2]).read_text(), int(sys.argv[3])
library = Library.open(env=os.environ)
sizes = {"n_ctx": 512, "n_batch": 128, "n_ubatch": 128, "n_threads": 1, "n_threads_batch": 1}
layer = Placement(mode=SplitMode.LAYER, devices=("CPU", "CPU"), **sizes)
with tempfile.TemporaryDirectory() as folder:
    carry = Path(folder) / "carry"
    with Session.open(model, layer, library=library, prober=None) as session:
        session.prefill(session.tokenize(prompt))
        session.save(carry)
    with Session.open(model, layer.changed(mode=SplitMode.TENSOR), library=library, prober=None) as session:
        session.restore(carry)
        tokens = [t for t in session.generate(n=n, sampler=SamplerSpec(temp=0.0)) if not t.is_end]
text = b"".join(t.piece for t in tokens).decode("utf-8", "replace")
print(json.dumps({"tokens": [t.id for t in tokens], "text": text}))
"""


@pytest.mark.model
@pytest.mark.slow
def test_the_answer_is_that_of_a_fresh_tensor_session_given_the_same_state(smollm2: Path, tmp_path: Path) -> None:
    """A prompt of several batches read in layer mode, and 24 tokens in tensor: as a fresh session given the state."""
    words = [f"Item {n}: the river bends {n % 7} times before mile {n * 3}." for n in range(17)]
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(" ".join(words), encoding="utf-8")
    done = _splitctl(
        "run", "-m", smollm2, *_TWO, "-c", "512", "-b", "128", "-ub", "128",
        "-psm", "layer", "-sm", "tensor", "-f", prompt, "-n", "24", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    body = _json(done)
    assert body["switch"]["status"] == "switched"
    assert body["timings"]["prompt"]["n"] > 2 * 128
    fresh = subprocess.run(
        [sys.executable, "-c", _SAME_STATE, str(smollm2), str(prompt), "24"],
        capture_output=True,
        env=_env(PYTHONPATH=str(_ROOT)),
        check=True,
        timeout=_GUARD_S,
    )
    assert json.loads(fresh.stdout) == {"tokens": body["tokens"], "text": body["text"]}


@pytest.mark.model
def test_a_refused_switch_answers_in_the_old_mode(smollm2: Path) -> None:
    """A mode that the build cannot do is refused: the answer comes in the prompt's mode, with reasons and status 4."""
    done = _splitctl("run", "-m", smollm2, *_TWO, "-psm", "layer", "-sm", "row", "-p", "One, two,", "-n", "4", "--json")
    assert done.returncode == 4
    body = _json(done)
    assert body["switch"]["status"] == "refused"
    assert body["switch"]["effective"] == body["placement"]["mode"] == "layer"
    assert body["switch"]["reasons"]
    assert len(body["tokens"]) == 4
    assert "row" in _lines(done)[-1]


@pytest.mark.model
def test_a_mode_without_devices_is_refused_before_anything_is_loaded(smollm2: Path) -> None:
    """Tensor mode for the generation, and no device named for it: a line says what to name, and no prompt is read."""
    done = _splitctl("run", "-m", smollm2, "-psm", "layer", "-sm", "tensor", "-p", "One, two,", "-n", "4", "-v")
    assert (done.returncode, done.stdout) == (4, b"")
    assert "--device CPU,CPU" in _lines(done)[-1]
    assert b"load_tensors" not in done.stderr


@needs_compiler
@pytest.mark.stub
@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["-fa", "off"], "flash-attention-off"),
        (["-fa", "off", "--force"], "flash-attention-off"),
        (["-sm", "none", "-mg", "5"], "main device 5"),
    ],
)
def test_what_a_rule_refuses_for_the_generation_is_refused_before_loading(
    tmp_path: Path, flags: list[str], code: str
) -> None:
    """What no trial and no prompt can change about the switch is said before the model is loaded for the prompt."""
    model, calls = write_model(tmp_path / "tiny.gguf"), tmp_path / "calls"
    done = _splitctl(
        *("run", "-m", model, "--lib", build(), "-psm", "layer", "-sm", "tensor", "-p", "hi", "-n", "4", *flags),
        STUB_CALLS=str(calls),
    )
    assert done.returncode in {2, 4}
    assert (done.stdout, code in _lines(done)[-1]) == (b"", True)
    assert not calls.exists() or "llama_model_load_from_file" not in calls.read_text()


# -- bad input ---------------------------------------------------------------------------------------------------------


def _bad_models(folder: Path, good: Path) -> dict[str, Path]:
    (folder / "folder").mkdir()
    (folder / "empty").write_bytes(b"")
    (folder / "text").write_bytes(b"this is no GGUF, it is a line of text\n")
    raw = good.read_bytes()
    (folder / "header").write_bytes(raw[:1_000_000])
    (folder / "weights").write_bytes(raw[:60_000_000])
    return {name: folder / name for name in ("missing", "folder", "empty", "text", "header", "weights")}


@pytest.mark.model
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing", "missing"),
        ("folder", "directory"),
        ("empty", "0 bytes"),
        ("text", "not a GGUF"),
        ("header", "truncated"),
        ("weights", "truncated"),
    ],
)
def test_a_bad_model_file_is_one_line(name: str, said: str, smollm2: Path, tmp_path: Path) -> None:
    """A file that is no model is told in one line with its path and what to do, with status 1, and as an object."""
    path = _bad_models(tmp_path, smollm2)[name]
    done = _splitctl("run", "-m", path, "-p", "hi", "--json")
    assert done.returncode == 1
    (line,) = _lines(done)
    assert said in line
    assert str(path) in line
    assert _json(done)["error"]["message"] in line


@pytest.mark.model
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--device", "CPU,GPU77"], 2, "GPU77"),
        (["-c", "4"], 2, "-c 7 or more"),
        (["--device", "CPU,CPU", "-mg", "5", "-sm", "none"], 2, "5"),
        (["--lib", "/nonexistent/libllama.so"], 1, "/nonexistent/libllama.so"),
        (["--lib", "/etc/hostname"], 1, "/etc/hostname"),
    ],
    ids=["unknown device", "small context", "main device", "no library", "not a library"],
)
def test_what_only_the_library_can_refuse(arguments: list[str], code: int, said: str, smollm2: Path) -> None:
    """Devices, contexts and libraries that cannot be are told in one line, by whose fault it is."""
    done = _splitctl("run", "-m", smollm2, *arguments, "-p", "one two three four five six seven", "-n", "2")
    assert (done.returncode, done.stdout) == (code, b"")
    assert said in _lines(done)[-1]
    assert _lines(done)[-1].startswith("splitctl: ")


def test_an_architecture_that_the_build_lacks(tmp_path: Path) -> None:
    """A sound GGUF of an unknown architecture names it, and says to use a newer build."""
    sizes = {"block_count": 2, "context_length": 64, "embedding_length": 64, "attention.head_count": 4}
    extra = {f"nosuch.{name}": value for name, value in sizes.items()} | {"general.architecture": "nosuch"}
    done = _splitctl("run", "-m", write_model(tmp_path / "new.gguf", extra=extra), "-p", "hi")
    assert done.returncode == 1
    assert "nosuch" in _lines(done)[-1]
    assert "newer build" in _lines(done)[-1]


# -- ends --------------------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.stub
@pytest.mark.parametrize("as_json", [False, True])
def test_an_abort_is_an_error_and_not_the_end_of_the_command(tmp_path: Path, as_json: bool) -> None:
    """A library that aborts ends the worker; the command tells its last words and what exists of the result."""
    model = write_model(tmp_path / "tiny.gguf")
    more = ["--json"] if as_json else []
    done = _splitctl(
        "run", "-m", model, "--lib", build(), *_TWO, "-psm", "layer", "-sm", "tensor", "--force", "-p", "hi", *more,
        STUB_FAULTS="init:abort:tensor",
    )  # fmt: skip
    assert done.returncode == 1
    last = _lines(done)[-1]
    for said in ("died by signal 6 (SIGABRT)", "switch: building", "GGML_ASSERT(stub_was_asked_to_abort) failed"):
        assert said in last
    if as_json:
        body = _json(done)
        assert body["error"]["kind"] == "WorkerLost"
        assert body["timings"]["prompt"]["n"] > 0


@needs_compiler
@pytest.mark.stub
def test_what_dies_when_tried_is_refused_before_anything_is_freed(tmp_path: Path) -> None:
    """Without --force the try finds the abort: the switch is refused, and the answer comes in the old mode."""
    model = write_model(tmp_path / "tiny.gguf")
    done = _splitctl(
        "run", "-m", model, "--lib", build(), *_TWO, "-psm", "layer", "-sm", "tensor", "-p", "hi", "-n", "4", "--json",
        STUB_FAULTS="decode:abort:tensor", XDG_CACHE_HOME=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 4
    body = _json(done)
    assert body["switch"]["status"] == "refused"
    assert "GGML_ASSERT" in json.dumps(body["switch"]["reasons"])
    assert len(body["tokens"]) == 4
    remembered = json.loads((tmp_path / "splitctl" / "probes.json").read_text())["verdicts"]
    assert [one["verdict"] for one in remembered.values()] == ["dies"]


@needs_compiler
@pytest.mark.stub
def test_a_switch_that_fails_falls_back_and_answers(tmp_path: Path) -> None:
    """A context that cannot be built after the old one was freed: the old placement answers, with status 3."""
    model = write_model(tmp_path / "tiny.gguf")
    done = _splitctl(
        "run", "-m", model, "--lib", build(), *_TWO, "-psm", "layer", "-sm", "tensor", "--force", "-p", "hi", "-n", "4",
        "--json", STUB_FAULTS="init:null:tensor",
    )  # fmt: skip
    assert done.returncode == 3
    body = _json(done)
    assert body["switch"]["status"] == "fell_back"
    assert body["switch"]["stage"] == "building"
    assert body["placement"]["mode"] == "layer"
    assert len(body["tokens"]) == 4


_SWITCHED_STUB = [*_TWO, "-psm", "layer", "-sm", "tensor", "--force", "-p", "hi", "--json"]


@needs_compiler
@pytest.mark.stub
@pytest.mark.parametrize(
    ("faults", "stage", "n_before"),
    [("load:null:tensor, load:null:layer@2+", "placing", 0), ("decode:fail:tensor, load:null:layer@2+", "trial", 1)],
    ids=["at the switch", "at the trial"],
)
def test_a_parked_session_ends_with_its_own_status_and_goes_on_from_its_file(
    tmp_path: Path, faults: str, stage: str, n_before: int
) -> None:
    """Nothing can be placed any more: status 5, the file on stderr and in the object, and no token is lost."""
    model = write_model(tmp_path / "tiny.gguf")
    base = ["run", "-m", model, "--lib", build()]
    done = _splitctl(*base, *_SWITCHED_STUB, "-n", "8", STUB_FAULTS=faults, XDG_STATE_HOME=str(tmp_path))
    assert done.returncode == 5, done.stderr
    body = _json(done)
    assert body["exit_code"] == 5
    assert body["error"]["kind"] == "Parked"
    assert (body["switch"]["status"], body["switch"]["stage"]) == ("parked", stage)
    assert body["switch"]["reason"]
    assert (body["switch"]["effective"], body["placement"]) == (None, None)
    assert len(body["tokens"]) == n_before
    at = Path(body["switch"]["parked_at"])
    assert at.is_relative_to(tmp_path)
    assert at.is_file()
    assert str(at) in _lines(done)[-1]
    assert "--restore" in _lines(done)[-1]
    whole = _json(_splitctl(*base, *_TWO, "-p", "hi", "-n", "8", "--json"))["tokens"]
    rest = _json(_splitctl(*base, *_TWO, "--restore", at, "-n", str(8 - n_before), "--json"))["tokens"]
    assert body["tokens"] + rest == whole


@needs_compiler
@pytest.mark.stub
def test_a_session_that_cannot_even_be_parked_says_so(tmp_path: Path) -> None:
    """Neither a placement nor a place on disk: the status of a parked session, no path, and why."""
    model = write_model(tmp_path / "tiny.gguf")
    arguments = ["-m", model, "--lib", build(), *_SWITCHED_STUB, "-n", "8"]
    # A file where the folder should be: the state cannot be written below it.
    faults = "load:null:tensor, load:null:layer@2+"
    done = _splitctl("run", *arguments, STUB_FAULTS=faults, XDG_STATE_HOME=str(model))
    assert done.returncode == 5, done.stderr
    body = _json(done)
    assert (body["switch"]["status"], body["switch"]["parked_at"]) == ("parked", None)
    assert "could not be saved" in _lines(done)[-1]
    assert "Not a directory" in _lines(done)[-1] or "File exists" in _lines(done)[-1]


@needs_compiler
@pytest.mark.stub
def test_a_generation_that_fails_keeps_the_outcome_and_the_answer(tmp_path: Path) -> None:
    """A decode that fails after the switch was confirmed: status 1, with the outcome and the tokens so far."""
    model = write_model(tmp_path / "tiny.gguf")
    arguments = ["-m", model, "--lib", build(), *_SWITCHED_STUB, "-n", "8"]
    done = _splitctl("run", *arguments, STUB_FAULTS="decode:fail:tensor@4+")
    assert done.returncode == 1, done.stderr
    body = _json(done)
    assert body["error"]["kind"] == "CallFailed"
    assert (body["switch"]["status"], body["switch"]["confirmed"]) == ("switched", True)
    assert len(body["tokens"]) == 4
    assert body["text"]


@needs_compiler
@pytest.mark.stub
def test_a_library_that_dies_after_the_switch_keeps_the_outcome_and_the_answer(tmp_path: Path) -> None:
    """An abort in the middle of the answer: the outcome of the switch and the pieces that came are told."""
    model = write_model(tmp_path / "tiny.gguf")
    arguments = ["-m", model, "--lib", build(), *_SWITCHED_STUB, "-n", "8"]
    done = _splitctl("run", *arguments, STUB_FAULTS="decode:abort:tensor@4+")
    assert done.returncode == 1, done.stderr
    body = _json(done)
    assert body["error"]["kind"] == "WorkerLost"
    assert body["switch"]["status"] == "switched"
    assert body["text"]


@needs_compiler
@pytest.mark.stub
def test_a_place_that_cannot_be_is_refused_before_the_first_token(tmp_path: Path) -> None:
    """--save into a folder that is missing, or over a folder or a device: status 1 and why, and nothing was started."""
    for path, said in (
        (tmp_path / "missing" / "carry", "No such file or directory"),
        (tmp_path, "it is a folder"),
        (Path("/dev/full"), "not a regular file"),
    ):
        done = _splitctl("run", *stub_arguments(tmp_path), "-p", "x", "--save", path)
        assert (done.returncode, done.stdout) == (1, b"")
        (line,) = _lines(done)
        assert f"could not be saved as {path}: " in line
        assert said in line


@needs_compiler
@pytest.mark.stub
def test_a_save_that_fails_keeps_the_outcome_and_the_answer(tmp_path: Path) -> None:
    """A disk that is full by the end: status 1 and the path, with the outcome and the whole answer."""
    model = write_model(tmp_path / "tiny.gguf")
    path = tmp_path / "carry"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Room for the block that the place is tried with; the kernel refuses the rest.
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        done = _splitctl("run", "-m", model, "--lib", build(), *_SWITCHED_STUB, "-n", "4", "--save", path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert done.returncode == 1, done.stderr
    assert str(path) in _lines(done)[-1]
    assert "File too large" in _lines(done)[-1]
    body = _json(done)
    assert body["error"]["kind"] == "CarryNotWritten"
    assert body["switch"]["status"] == "switched"
    assert len(body["tokens"]) == 4
    assert not path.exists()


@pytest.mark.model
@pytest.mark.parametrize("stage", ["loading", "prompt", "switch: checking", "switch: placing", "generating"])
def test_ctrl_c_at_any_stage(stage: str, smollm2: Path, tmp_path: Path) -> None:
    """One interrupt ends the command with status 130 and one line, and nothing is left running."""
    prompt = tmp_path / "prompt.txt"
    # Long enough that it is still being read when the interrupt comes.
    prompt.write_text("the river bends and bends again " * (60 if stage == "prompt" else 2), encoding="utf-8")
    arguments = ["-m", smollm2, *_TWO, "-psm", "layer", "-sm", "tensor", "-f", prompt, "-n", "2000", "--json"]
    with _started("run", *arguments, XDG_CACHE_HOME=str(tmp_path)) as process:
        below = _wait_for(process, stage)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=_GUARD_S)
    assert process.returncode == 130, err.decode()
    assert b"Traceback" not in err
    assert json.loads(out)["exit_code"] == 130
    assert "cancel" in err.decode().splitlines()[-1]
    assert _all_gone(below)


@needs_compiler
@pytest.mark.stub
def test_a_second_ctrl_c_ends_a_library_that_hangs(tmp_path: Path) -> None:
    """Where the first interrupt is not heard, the second ends the worker."""
    model = write_model(tmp_path / "tiny.gguf")
    arguments = ["-m", model, "--lib", build(), "--device", "CPU,CPU", "-p", "hi"]
    with _started("run", *arguments, STUB_FAULTS="load:hang") as process:
        below = _wait_for(process, "loading")
        err = _interrupt_until_it_ends(process)
    assert process.returncode == 130, err.decode()
    assert _all_gone(below)


_INTERRUPTED = """
import atexit, io, os, signal, sys
from splitctl.cli import main, streams

def interrupt():
    signal.raise_signal(signal.SIGINT)

class Input:
    @property
    def buffer(self):
        interrupt()

class Errors(io.TextIOWrapper):
    def write(self, text):
        n = super().write(text)
        interrupt()
        interrupt()
        return n

class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT):
        kill(pid, number)

def settled(settle=streams.settle):
    settle()
    sys.stderr = Errors(sys.stderr.detach(), "utf-8", write_through=True)

last = Last()
atexit.register(interrupt)
sys.stdin = Input()
streams.settle = settled
code = main()
interrupt()
sys.exit(code)
"""


@needs_compiler
@pytest.mark.stub
@pytest.mark.parametrize("prompt", [("-p", "hi"), ("-f", "-")], ids=["while loading", "before a worker"])
def test_more_ctrl_c_until_the_very_end_changes_nothing(prompt: tuple[str, str], tmp_path: Path) -> None:
    """Interrupts at every line of stderr, after the command, and while Python ends: the status is 130, told once."""
    model = write_model(tmp_path / "tiny.gguf")
    arguments = ["run", "-m", model, "--lib", build(), "--device", "CPU,CPU", "--json", *prompt]
    done = subprocess.run(
        [sys.executable, "-P", "-c", _INTERRUPTED, *map(str, arguments)],
        env=_env(PYTHONPATH=str(_ROOT), STUB_FAULTS="load:hang"), capture_output=True, timeout=_GUARD_S, check=False,
    )  # fmt: skip
    assert done.returncode == 130, done.stderr.decode()
    assert b"Traceback" not in done.stderr
    assert _json(done)["exit_code"] == 130


@needs_compiler
@pytest.mark.stub
def test_more_ctrl_c_until_the_very_end_of_an_answer_changes_nothing(tmp_path: Path) -> None:
    """The same with attach: the answer of a host is cancelled, and that is told once."""
    with house() as home, served(home, *stub_arguments(tmp_path)) as host:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _INTERRUPTED, "attach", "-p", "hello", "--temp", "0", "--json"],
            env=home.env(), capture_output=True, timeout=_GUARD_S, check=False,
        )  # fmt: skip
        assert done.returncode == 130, done.stderr.decode()
        assert b"Traceback" not in done.stderr
        assert _json(done)["error"]["message"] == "the answer was ended by Ctrl-C"
        assert host.end()[0] == 0


@needs_compiler
@pytest.mark.stub
@pytest.mark.parametrize("victim", ["command", "worker"])
def test_a_kill_leaves_nothing_running(victim: str, tmp_path: Path) -> None:
    """When the command is killed its worker ends; when the worker is killed the command says so."""
    model = write_model(tmp_path / "tiny.gguf")
    arguments = ["-m", model, "--lib", build(), "--device", "CPU,CPU", "-p", "hi"]
    with _started("run", *arguments, STUB_FAULTS="load:hang") as process:
        below = _wait_for(process, "loading")
        (process if victim == "command" else below[0]).send_signal(signal.SIGKILL)
        _, err = process.communicate(timeout=_GUARD_S)
    assert _all_gone(below)
    if victim == "worker":
        assert process.returncode == 1
        assert "died by signal 9 (SIGKILL) while loading" in err.decode().splitlines()[-1]


@needs_compiler
@pytest.mark.stub
def test_a_reader_that_leaves_is_no_crash(tmp_path: Path) -> None:
    """When stdout is closed the command ends without a traceback, and its worker with it."""
    model = write_model(tmp_path / "tiny.gguf")
    arguments = ["-m", model, "--lib", build(), "--device", "CPU,CPU", "-c", "512", "-p", "hi", "-n", "400"]
    with _started("run", *arguments) as process:
        below = psutil.Process(process.pid).children(recursive=True)
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        _, err = process.communicate(timeout=_GUARD_S)
    assert process.returncode == 1
    assert b"Traceback" not in err
    assert b"BrokenPipe" not in err
    assert _all_gone(below)


# -- two phases --------------------------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.parametrize("prompt_sizes", [["-pb", "512", "-pub", "256"], ["-pub", "auto"]], ids=["named", "auto"])
def test_the_prompts_buffers_are_given_back(smollm2: Path, prompt_sizes: list[str]) -> None:
    """Other batch sizes alone make the switch: by the library's own lines the large buffer gives way to a small one."""
    done = _splitctl(
        "run", "-m", smollm2, *_TWO, "-ub", "64", "-p", "Numbers: one, two,", "-n", "4", *prompt_sizes, "--json", "-v"
    )
    assert done.returncode == 0, done.stderr
    body = _json(done)
    assert body["switch"]["status"] == "switched"
    assert (body["switch"]["requested"], body["placement"]["n_ubatch"]) == ("layer", 64)
    assert body["payoff"] is None
    said = done.stderr.decode()
    sizes = [int(size) for size in re.findall(r"n_ubatch\s+= (\d+)", said)]
    buffers = [float(size) for size in re.findall(r"CPU compute buffer size =\s+([\d.]+) MiB", said)]
    assert sizes[-1] == 64
    assert sizes[-2] >= 256
    assert buffers[-1] < buffers[-2] / 2


@needs_compiler
@pytest.mark.stub
def test_a_chunk_that_no_device_can_lend_is_refused(tmp_path: Path) -> None:
    """Status 4 with both numbers, and nothing was loaded."""
    model = write_model(tmp_path / "m.gguf")
    done = _splitctl(
        "run", "-m", model, "--lib", build(), "--device", "STUB0,STUB1", "-p", "hi", "-n", "1",
        "-pub", "auto", "--json",
        STUB_FAULTS="budget:STUB1=100000000",
    )  # fmt: skip
    assert done.returncode == 4, done.stderr
    message = _json(done)["error"]["message"]
    assert "0 tokens is the most that every device can lend and 256 are wanted: STUB1" in message
    assert "does-not-fit" in message


# -- devices and doctor ------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.stub
def test_devices_lists_names_and_memory() -> None:
    """Devices are listed with their memory, as a table and as one object."""
    told = _json(_splitctl("devices", "--lib", build(), "--json"))
    assert told["library"] == str(build())
    assert {"name", "kind", "memory_free", "memory_total"} <= told["devices"][0].keys()
    table = _splitctl("devices", "--lib", build())
    assert table.returncode == 0
    assert all(one["name"] in table.stdout.decode() for one in told["devices"])


def test_doctor_says_which_library_and_why() -> None:
    """The installed library is named with its origin, layout, abilities, devices, and what was passed over."""
    done = _splitctl("doctor", "--json", GGML_CUDA_DEVICES="2")
    body = _json(done)
    if done.returncode == 1:
        pytest.skip(f"no libllama is installed: {body['error']['message']}")
    assert body["library"]["path"] in [one["path"] for one in body["candidates"]]
    assert body["library"]["profile"]
    assert "decode" in body["library"]["capabilities"]
    assert body["devices"]
    assert all(one["verdict"] for one in body["candidates"])
    assert body["environment"]["GGML_CUDA_DEVICES"] == "2"
    assert any("GGML_CUDA_DEVICES" in one["text"] for one in body["warnings"])
    plain = _splitctl("doctor")
    assert body["library"]["path"] in plain.stdout.decode()
    assert ("own call for a switch: none" in plain.stdout.decode()) == ("native-switch" in body["library"]["missing"])


def test_doctor_without_a_usable_library_still_says_what_it_saw() -> None:
    """A library that cannot be used is status 1, and the report says what was looked at."""
    done = _splitctl("doctor", "--lib", "/etc/hostname", "--json")
    assert done.returncode == 1
    body = _json(done)
    assert body["candidates"][0]["path"] == "/etc/hostname"
    assert body["error"]["kind"] == "LibraryUnusable"
    assert "library" not in body


@needs_compiler
@pytest.mark.stub
def test_doctor_outlives_a_library_that_aborts() -> None:
    """A library that dies of being asked for its devices is an error with its last words, beside what was seen."""
    done = _splitctl("doctor", "--lib", build(), "--json", STUB_FAULTS="dev_memory:abort")
    assert done.returncode == 1
    body = _json(done)
    assert body["candidates"]
    assert "GGML_ASSERT" in body["error"]["message"]
