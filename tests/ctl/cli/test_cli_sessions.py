"""`splitctl serve` and the commands against it, as a user starts them: real processes and signals, the stub library."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from splitctl.carry.sampling import SamplerSpec
from splitctl.control.client import Call, ControlAnswer, ControlEvent, ask, wait
from splitctl.control.requests import EventsRequest, GenerateRequest, StatusRequest, SwitchRequest
from splitctl.placement import Changes, SplitMode
from tests.ctl.houses import GUARD_S, Host, House, house, served, stub_arguments
from tests.stublib import needs_compiler

pytestmark = [needs_compiler, pytest.mark.stub]

_GREEDY = SamplerSpec(temp=0.0)
_ENDLESS = "pace:decode=5000"
"""A device that takes 5 ms for a batch, so that a stream lasts for as long as a test needs it."""


@pytest.fixture
def home() -> Iterator[House]:
    with house() as made:
        yield made


@pytest.fixture
def host(home: House, tmp_path: Path) -> Iterator[Host]:
    with served(home, *stub_arguments(tmp_path), STUB_FAULTS=_ENDLESS) as made:
        yield made


def _lines(done: subprocess.CompletedProcess[bytes]) -> list[str]:
    return done.stderr.decode().splitlines()


def _messages(client: Call) -> Iterator[ControlEvent | ControlAnswer]:
    while True:
        assert wait([client], GUARD_S)
        for message in client.read():
            yield message
            if isinstance(message, ControlAnswer):
                return


def _gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=GUARD_S)[1]


# -- serving -----------------------------------------------------------------------------------------------------------


def test_a_session_is_served_and_shown(home: House, host: Host) -> None:
    """One line says that it is ready; ps shows it with both processes, as lines and as an object; one needs no name."""
    (status,) = home.json("ps")["sessions"]
    assert (status["name"], status["state"], status["effective"]) == ("default", "serving", "layer")
    assert status["pid"] == host.process.pid
    assert status["worker_pid"] in [one.pid for one in host.below()]
    assert len(status["sequences"]) == 4
    assert status["placement"]["kv_unified"] is True
    done = home.run("ps")
    assert done.stdout.decode().startswith(f"default: serving in layer mode (pid {host.process.pid}")
    assert _lines(done) == []


def test_an_answer_from_another_process_is_the_one_of_a_run(home: House, host: Host, tmp_path: Path) -> None:
    """attach, run --session and run give the same tokens for the same prompt; a second time the prompt is held."""
    arguments = ["-p", "the quick brown fox", "-n", "12", "--temp", "0"]
    alone = home.json("run", *stub_arguments(tmp_path), *arguments)
    attached = home.json("attach", *arguments)
    assert attached["tokens"] == alone["tokens"]
    assert attached["why"] == "length"
    again = home.json("run", "--session", "default", *arguments)
    assert again["tokens"] == alone["tokens"]
    assert again["n_reused"] > attached["n_reused"] == 0
    plain = home.run("attach", *arguments)
    assert plain.stdout.decode() == alone["text"] + "\n"
    assert "held already" in _lines(plain)[-1]
    assert host.process.poll() is None


def test_prompts_come_line_by_line(home: House, host: Host) -> None:
    """Without -p, each line of stdin is a prompt, and an answer follows each."""
    done = home.run("attach", "-n", "3", "--temp", "0", stdin=b"one\n\ntwo\n")
    assert done.returncode == 0
    assert len([line for line in _lines(done) if line.endswith("(length)")]) == 2
    done = home.run("attach", "-n", "3", stdin=b"\xff\n")
    assert (done.returncode, done.stdout) == (1, b"")
    assert "standard input is not UTF-8" in _lines(done)[-1]


# -- switching ---------------------------------------------------------------------------------------------------------


def test_a_switch_from_another_process_under_an_attached_stream(home: House, host: Host, tmp_path: Path) -> None:
    """A stream pauses, is moved and goes on with the tokens of a session that never moved; attach shows the switch."""
    arguments = ["-p", "the quick brown fox", "-n", "900", "--temp", "0"]
    still = home.json("run", *stub_arguments(tmp_path), *arguments)["tokens"]
    with home.start("attach", *arguments, "--json") as process:
        with Call(host.address, EventsRequest()) as watch:
            while "generating" not in [one["state"] for one in ask(host.address, StatusRequest())["sequences"]]:
                assert process.poll() is None
            outcome = home.json("switch", "--to", "tensor")
            assert ask(host.address, StatusRequest())["streams"] == 1
            kinds = set()
            for message in _messages(watch):
                kinds.add(message.body["kind"])
                if message.body["kind"] == "switch_ended":
                    break
        out, err = process.communicate(timeout=GUARD_S)
    assert process.returncode == 0, err
    assert outcome["status"] == "switched"
    assert (outcome["requested"], outcome["effective"]) == ("tensor", "tensor")
    assert outcome["n_sequences"] == 1
    assert json.loads(out)["tokens"] == still
    assert any(line.startswith("-- switched to tensor in ") for line in err.decode().splitlines())
    assert "switch_stage" in kinds
    assert home.json("ps")["sessions"][0]["last_switch"]["confirmed"] is True
    done = home.run("switch", "--to", "tensor")
    assert (done.returncode, done.stdout.decode().partition(":")[0]) == (0, "unchanged")


def test_a_switch_shows_its_stages_and_what_was_carried(home: House, host: Host) -> None:
    """Plain lines of stages and a table on stderr, one line on stdout; only what is named changes."""
    home.run("attach", "-p", "hello", "-n", "4", "--temp", "0")
    done = home.run("switch", "--to", "tensor", "-c", "512", LLAMA_ARG_CTX_SIZE="64")
    assert done.returncode == 0, done.stderr
    stages = [line.removeprefix("switch: ") for line in _lines(done) if line.startswith("switch: ")]
    assert stages[0] == "checking"
    assert stages[-1] == "proving"
    assert any("sealing" in line and "ms" in line for line in _lines(done))
    assert done.stdout.decode().startswith("switched to tensor in ")
    placement = home.json("ps")["sessions"][0]["placement"]
    assert (placement["mode"], placement["n_ctx"], placement["devices"]) == ("tensor", 512, ["STUB0", "STUB1"])


def test_a_dry_run_says_what_would_happen(home: House, host: Host) -> None:
    """--dry-run tells rules, conversions, memory and, once there was such a switch, seconds; nothing moves."""
    home.run("attach", "-p", "hello", "-n", "4", "--temp", "0")
    told = home.json("switch", "--to", "tensor", "--dry-run")
    assert (told["is_unchanged"], told["reasons"], told["expected_s"]) == (False, [], None)
    assert told["state_bytes"] > 0
    assert (told["via"], told["weights"]) == ("beside", None)
    in_place = home.json("switch", "--to", "tensor", "--dry-run", "--via", "in-place")
    assert (in_place["via"], in_place["via_reason"], in_place["weights"]) == ("composed", "", "file")
    lines = home.run("switch", "-sm", "layer", "-ctk", "f32", "--dry-run").stdout.decode()
    assert "conversion" in lines
    assert "not known: no such switch yet" in lines
    assert "built        beside" in lines.splitlines()
    refused = home.run("switch", "-c", "3", "--dry-run")
    assert refused.returncode == 4
    assert "refused" in refused.stdout.decode()
    assert home.json("ps")["sessions"][0]["switches"]["count"] == 0
    home.run("switch", "--to", "tensor")
    home.run("switch", "--to", "layer")
    assert home.json("switch", "--to", "tensor", "--dry-run")["expected_s"] > 0
    assert "about" in home.run("switch", "--to", "tensor", "--dry-run").stdout.decode()
    assert home.run("switch", "--to", "layer", "--dry-run").stdout.decode().splitlines()[1].endswith("in it already")


def test_exit_codes_of_a_switch(home: House, host: Host) -> None:
    """0 done or already so, 2 usage, 4 refused, 6 no such session; each error is one line that says what to do."""
    assert home.run("switch", "--to", "layer").returncode == 0
    for arguments, code, said in (
        (["switch"], 2, "name what is to change"),
        (["switch", "--to", "tensor", "-sm", "layer"], 2, "contradict"),
        (["switch", "-ts", "1,2,3", "--device", "STUB0,STUB1"], 2, "-ts"),
        (["switch", "--device", "NOSUCH"], 4, "NOSUCH"),
        (["switch", "--to", "tensor", "--session", "nosuch"], 6, "there are: default"),
        (["switch", "--to", "tensor", "--session", "../x"], 2, "letters, digits"),
        (["attach", "-p", "x", "--session", "nosuch"], 6, "there are: default"),
        (["attach", "--json"], 2, "-p TEXT"),
        (["run", "--session", "default", "-p", "x", "-c", "5"], 2, "-c is not for a session"),
        (["save", "/nonexistent/file"], 1, "/nonexistent/file"),
        (["restore", "/etc/hostname"], 1, "/etc/hostname"),
    ):
        done = home.run(*arguments)
        assert done.returncode == code, (arguments, done.stderr)
        assert said in _lines(done)[-1]
        assert done.stdout == b"" or "--json" in arguments
    refused = home.run("switch", "--device", "NOSUCH", "--json")
    assert refused.returncode == 4
    assert json.loads(refused.stdout)["status"] == "refused"


def test_a_switch_whose_worker_dies_falls_back(home: House, tmp_path: Path) -> None:
    """Status 3: the old placement serves, the reason has the signal and the assertion; the next prompt is answered."""
    faults = "init:abort:tensor"
    with served(home, *stub_arguments(tmp_path), STUB_FAULTS=faults) as host:
        before = home.json("attach", "-p", "hello", "-n", "6", "--temp", "0")["tokens"]
        done = home.run("switch", "--to", "tensor", "--via", "in-place", "--force", "--json")
        assert done.returncode == 3, done.stderr
        outcome = json.loads(done.stdout)
        assert (outcome["status"], outcome["effective"], outcome["stage"]) == ("fell_back", "layer", "building")
        assert "signal 6 (SIGABRT)" in outcome["reason"]
        assert "GGML_ASSERT" in outcome["reason"]
        assert home.json("attach", "-p", "hello", "-n", "6", "--temp", "0")["tokens"] == before
        code, log = host.end()
        assert code == 0
        assert "recovering" in log


def test_a_second_switch_is_busy_and_the_first_can_be_cancelled(home: House, tmp_path: Path) -> None:
    """Status 7 while one is under way; an interrupt cancels it where nobody can be asked, with status 130."""
    with (
        served(home, *stub_arguments(tmp_path), STUB_FAULTS="load:hang:tensor") as host,
        home.start("switch", "--to", "tensor", "--via", "in-place", "--force", "--json") as first,
    ):
        assert first.stderr is not None
        for line in first.stderr:
            if line == b"switch: placing\n":
                break
        busy = home.run("switch", "--to", "none", "--json")
        assert busy.returncode == 7, busy.stderr
        assert json.loads(busy.stdout)["error"]["kind"] == "Busy"
        first.send_signal(signal.SIGINT)
        assert first.stderr.readline() == b"cancelling\n"
        # The library hangs and hears no cancel: its process is ended, as one that makes no progress would be.
        for worker in host.below():
            worker.kill()
        out, _ = first.communicate(timeout=GUARD_S)
        assert first.returncode == 130
        assert json.loads(out)["status"] == "cancelled"
        assert home.json("ps")["sessions"][0]["effective"] == "layer"


@pytest.mark.parametrize(("answer", "code"), [("l\n", 130), ("what\nc\n", 130)])
def test_on_a_terminal_an_interrupt_asks(home: House, tmp_path: Path, answer: str, code: int) -> None:
    """Ctrl-C at a terminal asks whether to cancel the switch or to leave it running, and does that."""
    with served(home, *stub_arguments(tmp_path), STUB_FAULTS="load:hang:tensor") as host:
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            home.command("switch", "--to", "tensor", "--via", "in-place", "--force"),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=home.env(TERM="xterm"),
        )
        os.close(theirs)
        said = ""

        def wait_for(text: str) -> None:
            nonlocal said
            while text not in said:
                said += os.read(ours, 4096).decode()

        try:
            wait_for("placing")
            process.send_signal(signal.SIGINT)
            wait_for("[c/l]")
            os.write(ours, answer.encode())
            if "c" in answer:
                wait_for("cancelling")
                for worker in host.below():
                    worker.kill()
            else:
                wait_for("left running")
            assert process.wait(GUARD_S) == code
            status = ask(host.address, StatusRequest())
            assert status["state"] == ("switching" if answer == "l\n" else "serving")
        finally:
            process.kill()
            process.wait()
            os.close(ours)


def test_hanging_up_leaves_a_switch_running(home: House, host: Host) -> None:
    """A client that goes away in the middle of a switch does not end it."""
    with Call(host.address, EventsRequest()) as watch:
        with Call(host.address, SwitchRequest(Changes(mode=SplitMode.TENSOR))) as client:
            next(_messages(client))
        for message in _messages(watch):
            if message.body.get("kind") == "switch_ended":
                break
    assert ask(host.address, StatusRequest())["effective"] == "tensor"


# -- ends --------------------------------------------------------------------------------------------------------------


def test_a_signal_saves_and_resume_goes_on(home: House, tmp_path: Path) -> None:
    """SIGTERM ends a stream with a clear line, saves, exits 0; the next host offers the session, --resume takes it."""
    arguments = stub_arguments(tmp_path)
    with served(home, *arguments, STUB_FAULTS=_ENDLESS) as host:
        below = host.below()
        with Call(host.address, GenerateRequest(prompt="hello", sampler=_GREEDY)) as client:
            messages = _messages(client)
            tokens = []
            for message in messages:
                tokens += [message.body["token"]] if message.body["kind"] == "delta" else []
                if len(tokens) == 5:
                    break
            host.process.send_signal(signal.SIGTERM)
            for message in messages:
                if isinstance(message, ControlAnswer):
                    assert message.body["why"] == "error"
                    assert "being stopped" in message.body["message"]
                else:
                    tokens += [message.body["token"]] if message.body.get("token") is not None else []
        _, err = host.process.communicate(timeout=GUARD_S)
        assert host.process.returncode == 0, err
        assert f"saved at {home.saved()}" in err.decode()
        assert _gone(below)
    assert list(home.sockets.iterdir()) == []
    with served(home, *arguments) as again:
        code, log = again.end()
        assert (code, "--resume" in log) == (0, True)
    with served(home, *arguments, "--resume"):
        (status,) = home.json("ps")["sessions"]
        assert sum(one["n_tokens"] for one in status["sequences"]) >= len(tokens)
        told = home.json("attach", "-p", "hello", "-n", "3", "--temp", "0")
        assert told["tokens"] == tokens[:3]
        assert told["n_reused"] > 0


def test_stop_saves_and_ends_the_host(home: House, host: Host) -> None:
    """A stop answers with the path, and then the host is gone and its name free; there is nothing left to stop."""
    home.run("attach", "-p", "hello", "-n", "4", "--temp", "0")
    body = home.json("stop")
    assert body["path"] == str(home.saved())
    assert host.process.wait(GUARD_S) == 0
    assert home.run("stop").returncode == 6
    assert home.json("ps") == {"sessions": []}
    assert "start one" in home.run("ps").stderr.decode()


def test_a_session_that_cannot_be_saved_is_not_lost_in_silence(home: House, tmp_path: Path) -> None:
    """Without a place for it serve warns, stop is refused, and --force or a signal end it with a failing status."""
    (home.folder / "state").write_text("a file where the folder should be")
    arguments = stub_arguments(tmp_path)
    prompt = ["attach", "-p", "hello", "-n", "4", "--temp", "0"]
    why = f"{home.saved()}: Not a directory"
    with served(home, *arguments) as host:
        first = home.json(*prompt)
        refused = home.run("stop")
        assert (refused.returncode, refused.stdout) == (4, b"")
        assert why in _lines(refused)[-1]
        assert "stop --force" in _lines(refused)[-1]
        again = home.json(*prompt)
        assert (again["tokens"], again["n_reused"] > 0) == (first["tokens"], True)
        forced = home.json("stop", "--force", code=1)
        assert (forced["path"], forced["error"]["kind"]) == (None, "NotSaved")
        assert why in forced["error"]["message"]
        _, err = host.process.communicate(timeout=GUARD_S)
        assert host.process.returncode == 1
        log = err.decode().splitlines()
        assert "warning: the session will not be saved when it ends" in log[1]
        assert why in log[1]
        assert "ended; the session was NOT saved" in log[-1]
        assert why in log[-1]
    with served(home, *arguments) as host:
        assert home.run("stop").returncode == 0
        assert host.process.wait(GUARD_S) == 0
    with served(home, *arguments) as host:
        home.run(*prompt)
        code, said = host.end()
        assert code == 1
        assert "NOT saved" in said


def test_signals_that_come_together_are_one(home: House, tmp_path: Path) -> None:
    """A second one at once, as timeout(1) sends it, does not keep the session from being saved."""
    with served(home, *stub_arguments(tmp_path)) as host:
        home.run("attach", "-p", "hello", "-n", "4", "--temp", "0")
        host.process.send_signal(signal.SIGHUP)
        code, log = host.end()
        assert (code, home.saved().exists()) == (0, True), log


def test_a_host_under_nohup_outlives_its_terminal(home: House, tmp_path: Path) -> None:
    """A signal that whoever started the host has ignored is ignored."""
    command = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *home.command("serve", *stub_arguments(tmp_path))]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=home.env()
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith(b"ready")
            process.send_signal(signal.SIGHUP)
            assert home.run("attach", "-p", "hello", "-n", "4", "--temp", "0").returncode == 0
            process.terminate()
            _, err = process.communicate(timeout=GUARD_S)
        finally:
            process.kill()
        assert process.returncode == 0
        assert b"SIGHUP" not in err


def test_a_second_signal_ends_at_once(home: House, tmp_path: Path) -> None:
    """A host whose worker does not end does so at the second signal, and leaves neither socket nor worker."""
    with served(home, *stub_arguments(tmp_path)) as host:
        below = host.below()
        for worker in below:
            worker.suspend()
        host.process.send_signal(signal.SIGTERM)
        assert host.process.stderr is not None
        for line in host.process.stderr:
            if b"once more ends at once" in line:
                break
        code, log = host.end_again()
        assert code == 130
        assert "again: ending now" in log
        assert list(home.sockets.iterdir()) == []
        for worker in below:
            worker.resume()
        assert _gone(below)


def test_a_killed_host_leaves_nothing_and_its_name_is_free(home: House, tmp_path: Path) -> None:
    """After SIGKILL the worker ends by itself, the stale socket is no session, and the name can be served again."""
    arguments = stub_arguments(tmp_path)
    with served(home, *arguments) as host:
        below = host.below()
        host.process.kill()
        host.process.communicate()
        assert _gone(below)
        assert (home.sockets / "default.sock").exists()
        assert home.json("ps") == {"sessions": []}
        assert home.run("switch", "--to", "tensor").returncode == 6
    with served(home, *arguments):
        assert len(home.json("ps")["sessions"]) == 1


def test_two_sessions_need_a_name(home: House, tmp_path: Path) -> None:
    """Several sessions are told apart by name; a name that is taken is refused; stop ends the one that was named."""
    arguments = stub_arguments(tmp_path)
    with served(home, *arguments, name="a"), served(home, *arguments, name="b") as second:
        taken = home.run("serve", *arguments, "--session", "a")
        assert taken.returncode == 1
        assert "a session a is served already" in _lines(taken)[-1]
        for command in (["switch", "--to", "tensor"], ["attach", "-p", "x"], ["stop"], ["save", "x"]):
            done = home.run(*command)
            assert done.returncode == 6
            assert "several sessions are served (a, b)" in _lines(done)[-1]
        assert [one["name"] for one in home.json("ps")["sessions"]] == ["a", "b"]
        assert home.run("stop", "--session", "b").returncode == 0
        assert second.process.wait(GUARD_S) == 0
        assert home.json("switch", "--to", "tensor")["status"] == "switched"


def test_save_and_restore(home: House, host: Host, tmp_path: Path) -> None:
    """A saved session comes back whole, in the same host: its prompt is held, its tokens are the same."""
    arguments = ["attach", "-p", "hello", "-n", "6", "--temp", "0"]
    first = home.json(*arguments)
    path = tmp_path / "kept"
    saved = home.json("save", path)
    assert (saved["path"], saved["tokens"]) == (str(path), first["n_prompt"] + 6)
    home.run("attach", "-p", "quite another one", "-n", "6")
    done = home.run("restore", path)
    assert done.stdout.decode().startswith(f"restored {saved['tokens']} tokens of 1 sequence")
    again = home.json(*arguments)
    assert again["tokens"] == first["tokens"]
    assert again["n_reused"] > 0
    with Call(host.address, GenerateRequest(prompt="x")) as client:
        next(_messages(client))
        busy = home.run("restore", path)
        assert busy.returncode == 7, busy.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["-m", "/nonexistent.gguf"], 1, "/nonexistent.gguf"),
        (["--session", "a/b"], 2, "letters, digits"),
        (["--device", "NOSUCH"], 2, "NOSUCH"),
        (["--lora-scaled", "file"], 2, "FILE:SCALE"),
        (["--lora", "/nonexistent.gguf"], 1, "/nonexistent.gguf"),
        (["--checkpoint", "0"], 2, "--checkpoint"),
        (["--resume"], 1, "default.safetensors"),
    ],
)
def test_a_host_that_cannot_be_says_so(home: House, tmp_path: Path, arguments: list[str], code: int, said: str) -> None:
    """What cannot be served is one line by whose fault it is, and leaves no socket."""
    done = home.run("serve", *stub_arguments(tmp_path), *arguments)
    assert (done.returncode, done.stdout) == (code, b""), done.stderr
    assert said in _lines(done)[-1]
    assert not home.sockets.exists() or list(home.sockets.iterdir()) == []


def test_json_says_ready_in_one_object(home: House, tmp_path: Path) -> None:
    """With --json serve prints one object when it is ready, with where it is reached."""
    process = home.start("serve", *stub_arguments(tmp_path), "--json")
    try:
        assert process.stdout is not None
        body: dict[str, Any] = json.loads(process.stdout.readline())
        assert body["session"] == "default"
        assert body["pid"] == process.pid
        assert Path(body["socket"]) == home.sockets / "default.sock"
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=GUARD_S)
        assert (process.returncode, out) == (0, b"")
    finally:
        process.kill()
        process.wait()


def test_an_interrupt_ends_an_answer_and_the_session_goes_on(home: House, host: Host) -> None:
    """Ctrl-C in attach -p cancels that stream alone, with status 130."""
    with home.start("attach", "-p", "hello", "--temp", "0", "--json") as process:
        while ask(host.address, StatusRequest())["streams"] == 0:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=GUARD_S)
    assert process.returncode == 130
    assert json.loads(out)["exit_code"] == 130
    assert ask(host.address, StatusRequest())["state"] == "serving"


def test_a_parked_session_is_told_and_brought_back(home: House, tmp_path: Path) -> None:
    """When nothing can be loaded any more: status 5 and the file; restore brings the session back, tokens and all."""
    faults = tmp_path / "faults"
    arguments = ["attach", "-p", "hello", "-n", "6", "--temp", "0"]
    with served(home, *stub_arguments(tmp_path), STUB_FAULTS_FILE=str(faults)):
        before = home.json(*arguments)["tokens"]
        faults.write_text("load:abort", encoding="utf-8")
        done = home.run("switch", "--to", "tensor", "--via", "in-place", "--force", "--json")
        assert done.returncode == 5, done.stderr
        outcome = json.loads(done.stdout)
        assert (outcome["status"], outcome["effective"]) == ("parked", None)
        path = outcome["parked_at"]
        assert path in _lines(done)[-1]
        assert home.run(*arguments).returncode == 5
        assert f"restore {path}" in home.run("ps").stdout.decode()
        faults.unlink()
        assert home.json("restore", path)["sequences"] == 1
        again = home.json(*arguments)
        assert (again["tokens"], again["n_reused"] > 0) == (before, True)


def test_prompts_at_a_terminal(home: House, host: Host) -> None:
    """At a terminal there is a mark to type at; Ctrl-C ends an endless answer, and at the mark the command."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        home.command("attach", "--temp", "0"), stdin=theirs, stdout=theirs, stderr=theirs, env=home.env(TERM="xterm")
    )
    os.close(theirs)
    said = ""

    def wait_for(text: str) -> None:
        nonlocal said
        while text not in said:
            said += os.read(ours, 4096).decode("utf-8", "replace")
        said = said.partition(text)[2]

    try:
        wait_for("> ")
        os.write(ours, b"hello\n")
        while "generating" not in [one["state"] for one in ask(host.address, StatusRequest())["sequences"]]:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        wait_for("(cancelled)")
        wait_for("> ")
        process.send_signal(signal.SIGINT)
        assert process.wait(GUARD_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.model
def test_a_real_model_is_served_switched_and_asked_again(home: House, smollm2: Path) -> None:
    """The real model answers before and after a switch from another command; the chat that was read is held."""
    arguments = ["attach", "--chat", "-p", "Say hello.", "-n", "6", "--temp", "0"]
    with served(home, "-m", smollm2, "--device", "CPU,CPU", "-c", "512", "-t", "1"):
        first = home.json(*arguments)
        assert len(first["tokens"]) == 6
        assert home.json("switch", "--to", "tensor")["status"] == "switched"
        again = home.json(*arguments)
        assert again["n_reused"] == again["n_prompt"] - 1 > 0
        (status,) = home.json("ps")["sessions"]
        assert (status["effective"], status["last_switch"]["confirmed"]) == ("tensor", True)
        assert home.json("stop")["path"] == str(home.saved())
