"""What the command line tells a shell when somebody presses TAB."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from splitctl.cli import completions
from splitctl.cli.main import COMMANDS, cli, main
from splitctl.control.sockets import claim, prepared, runtime_folder
from splitctl.ipc.probes import verdicts_file
from splitctl.placement import KV_TYPES
from splitctl.probing import ProbeKey, ProbeVerdict, Verdict, VerdictCache

Asking = Callable[..., list[str]]
_SHELLS = ("bash", "zsh", "fish")


def _asked_by(shell: str, words: list[str], incomplete: str) -> dict[str, str]:
    """The variables by which a shell's script asks."""
    said = " ".join(["splitctl", *words, incomplete])
    where = incomplete if shell == "fish" else str(len(words) + 1)
    return {"_SPLITCTL_COMPLETE": f"{shell}_complete", "COMP_WORDS": said, "COMP_CWORD": where}


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Asking:
    """What a shell is offered after some words for an incomplete one; folders of sessions and trials are empty."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(completions, "_NVIDIA_GPUS", tmp_path / "none")

    def offered(*words: str, incomplete: str = "", by: str = "bash") -> list[str]:
        with monkeypatch.context() as patch:
            for name, value in _asked_by(by, list(words), incomplete).items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                main([])
        assert ended.value.code == 0
        lines = capsys.readouterr().out.strip().splitlines()
        if by == "zsh":
            assert set(lines[::3]) <= {"plain", "file"}
            return lines[1::3]
        return [line.partition(",")[2].partition("\t")[0] for line in lines]

    return offered


@pytest.mark.parametrize("shell", _SHELLS)
def test_every_shell_is_offered_commands_flags_and_values(ask: Asking, shell: str) -> None:
    """Commands, flags, modes, cache types, tiers, routes and the words beside a number, in each protocol."""
    assert ask(by=shell) == list(COMMANDS)
    assert ask(incomplete="sw", by=shell) == ["switch"]
    assert ask("state", by=shell) == ["convert", "diff", "inspect", "validate"]
    assert {"--to", "--split-mode", "--session"} <= set(ask("switch", incomplete="--", by=shell))
    assert ask("switch", "--to", by=shell) == ["none", "layer", "row", "tensor"]
    assert ask("run", "-psm", incomplete="l", by=shell) == ["layer"]
    assert ask("serve", "-ctk", by=shell) == list(KV_TYPES)
    assert ask("serve", "--weights", incomplete="r", by=shell) == ["resident"]
    assert ask("serve", "-ngl", by=shell) == ["auto", "all"]
    assert ask("switch", "--via", incomplete="b", by=shell) == ["beside"]
    assert ask("policy", by=shell) == ["auto", "off"]


def test_a_value_after_an_equals_sign_is_completed(ask: Asking) -> None:
    """Bash makes a word of the sign; the others leave the two together."""
    assert ask("switch", "--to", "=", incomplete="t") == ["tensor"]
    assert ask("switch", incomplete="--to=t", by="fish") == ["tensor"]


@pytest.mark.parametrize("shell", _SHELLS)
def test_sessions_that_are_served_are_offered(ask: Asking, shell: str) -> None:
    """The names of living hosts, wherever a session is named; none where a folder is not to be trusted."""
    folder = prepared(runtime_folder(os.environ))
    with claim(folder, "alpha") as one, claim(folder, "beta") as other, one.listen(), other.listen():
        for command in ("ps", "switch", "attach", "save", "stop", "run"):
            assert ask(command, "--session", by=shell) == ["alpha", "beta"]
        assert ask("stop", "--session", incomplete="be", by=shell) == ["beta"]
        folder.chmod(0o777)
        assert ask("stop", "--session", by=shell) == []
    folder.chmod(0o700)


@pytest.mark.parametrize("shell", _SHELLS)
def test_devices_are_offered_for_the_last_of_a_list(
    ask: Asking, shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor, the GPUs that the driver names, and devices of earlier trials whose names need no server."""
    assert ask("run", "--device", by=shell) == ["CPU"]
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / bus).mkdir(parents=True)
    monkeypatch.setattr(completions, "_NVIDIA_GPUS", tmp_path / "gpus")
    devices = ("CUDA1", "Vulkan0", "RPC0[127.0.0.1:50052]")
    tried = ProbeKey("b", "s", "tensor", devices, None, ("f16", "f16"), True, "on", False, False)
    VerdictCache(verdicts_file()).put(tried, ProbeVerdict(Verdict.OK))
    assert ask("run", "--device", by=shell) == ["CPU", "CUDA0", "CUDA1", "Vulkan0"]
    assert ask("run", "--device", incomplete="CUDA0,CU", by=shell) == ["CUDA0,CUDA0", "CUDA0,CUDA1"]


def test_models_of_a_folder_are_offered(ask: Asking, tmp_path: Path) -> None:
    """GGUF files alone; the shell looks itself where there are folders too, or names that it would take apart."""
    for name in ("a.gguf", "b.gguf", "notes.txt", ".hidden.gguf"):
        (tmp_path / "plain" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "plain" / name).touch()
    folder = f"{tmp_path}/plain/"
    for command in ("run", "serve", "plan", "doctor", "explain"):
        assert ask(command, "-m", incomplete=folder) == [f"{folder}a.gguf", f"{folder}b.gguf"]
    assert ask("run", "-m", incomplete=f"{folder}.h") == [f"{folder}.hidden.gguf"]
    assert ask("run", "-m", incomplete=f"{folder}n") == [f"{folder}n"]
    assert ask("run", "-m", incomplete=f"{tmp_path}/nowhere/") == [f"{tmp_path}/nowhere/"]
    (tmp_path / "plain" / "more").mkdir()
    assert ask("run", "-m", incomplete=folder) == [folder]
    (tmp_path / "plain" / "b b.gguf").touch()
    assert ask("run", "-m", incomplete=f"{folder}b") == [f"{folder}b"]


def test_other_files_are_left_to_the_shell(ask: Asking) -> None:
    """Whatever takes a path lets the shell complete it."""
    for words in (["save"], ["restore"], ["run", "-f"], ["run", "--lib"], ["serve", "--lora"], ["state", "inspect"]):
        assert ask(*words, incomplete="x") == ["x"]


def test_an_unknown_shell_is_refused_with_those_there_are() -> None:
    """The error names the three."""
    result = CliRunner().invoke(cli, ["completions", "tcsh"])
    assert result.exit_code == click.UsageError.exit_code
    assert all(shell in result.output for shell in _SHELLS)


#: A session with each shell: its script is taken, it asks for modes and for devices, and prints what it would offer.
_SESSIONS = {
    "bash": """
        eval "$(splitctl completions bash)"
        compopt() { :; }
        COMP_WORDS=(splitctl switch --to = te) COMP_CWORD=4; _splitctl_completion splitctl
        COMP_WORDS=(splitctl run --device CPU,C) COMP_CWORD=3; _splitctl_completion splitctl
        printf '%s\\n' "${COMPREPLY[@]}" """,
    "zsh": """
        compdef() { : }
        compadd() { print -l -- ${(P)@[-1]} }
        eval "$(splitctl completions zsh)"
        words=(splitctl switch --to te) CURRENT=4; _splitctl_completion
        words=(splitctl run --device CPU,C) CURRENT=4; _splitctl_completion""",
    "fish": """
        splitctl completions fish | source
        complete -C 'splitctl switch --to te'
        complete -C 'splitctl run --device CPU,C'""",
}


@pytest.mark.parametrize("shell", _SHELLS)
def test_the_shells_themselves_complete(shell: str, tmp_path: Path) -> None:
    """Each takes the script that is printed for it, and offers what comes back, commas and all."""
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"no {shell}")
    command = tmp_path / "bin" / "splitctl"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m splitctl "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    plain = {"bash": "--norc", "zsh": "-f", "fish": "--no-config"}[shell]
    env = {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [found, plain, "-c", _SESSIONS[shell]], capture_output=True, text=True, check=False, env=env, cwd=tmp_path
    )
    assert done.stderr == ""
    assert done.stdout.split() == ["tensor", "CPU,CPU"]
