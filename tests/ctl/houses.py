"""Hosts as a user starts them: `splitctl serve` in a process, and commands against it, in folders of their own."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from splitctl.cli.main import main
from splitctl.control.sockets import Address
from tests.stublib import build, write_model

ROOT = Path(__file__).parents[2]
GUARD_S = 600.0
"""How long a command may take before a test fails; no test measures it."""


@dataclass(slots=True)
class House:
    """A user with folders of their own.

    Args:
        folder: a short path, because addresses of sockets are short.
        more: further variables of every command.
    """

    folder: Path
    more: dict[str, str] = field(default_factory=dict)

    def env(self, **more: str) -> dict[str, str]:
        """The environment of commands."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_ARG_", "STUB_"))}
        own = {"XDG_RUNTIME_DIR": str(self.folder / "run"), "XDG_STATE_HOME": str(self.folder / "state")}
        return {**clean, **own, "PYTHONPATH": str(ROOT), **self.more, **more}

    @property
    def sockets(self) -> Path:
        """Where hosts are found."""
        return self.folder / "run" / "splitctl"

    def saved(self, name: str = "default") -> Path:
        """Where a session is saved at its end."""
        return self.folder / "state" / "splitctl" / "sessions" / f"{name}.safetensors"

    def command(self, *arguments: str | Path) -> list[str]:
        """A command line."""
        program = "import sys; from splitctl.cli import main; sys.exit(main())"
        return [sys.executable, "-P", "-c", program, *map(str, arguments)]

    def run(self, *arguments: str | Path, stdin: bytes = b"", **env: str) -> subprocess.CompletedProcess[bytes]:
        """Run a command to its end, in this process."""
        return run_here(arguments, self.env(**env), stdin)

    def json(self, *arguments: str | Path, code: int = 0) -> Any:
        """Run a command with --json; give its object."""
        done = self.run(*arguments, "--json")
        assert done.returncode == code, (done.returncode, done.stderr.decode(), done.stdout.decode())
        assert done.stdout.count(b"\n") == 1
        return json.loads(done.stdout)

    def start(self, *arguments: str | Path, stdin: int = subprocess.DEVNULL, **env: str) -> subprocess.Popen[bytes]:
        """Start a command in a process of its own."""
        return subprocess.Popen(
            self.command(*arguments), stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self.env(**env)
        )


@dataclass(frozen=True, slots=True)
class Host:
    """A host that serves.

    Args:
        house: whose.
        process: the host.
        address: where it is reached.
    """

    house: House
    process: subprocess.Popen[bytes]
    address: Address

    def below(self) -> list[psutil.Process]:
        """Its worker, and what that started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal; give its status and the rest of its stderr."""
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=GUARD_S)
        assert b"Traceback" not in err, err.decode()
        return self.process.returncode, err.decode()

    def end_again(self) -> tuple[int, str]:
        """Send signals until one is late enough to be a second wish; give its status and the rest of its stderr."""
        while True:
            self.process.send_signal(signal.SIGTERM)
            try:
                _, err = self.process.communicate(timeout=0.5)
            except subprocess.TimeoutExpired:
                continue
            return self.process.returncode, err.decode()


def run_here(
    arguments: Sequence[str | Path], env: Mapping[str, str], stdin: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end in this process: a Python that starts takes longer than most commands."""
    out, err = io.BytesIO(), io.BytesIO()
    with (
        mock.patch.dict(os.environ, env, clear=True),
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8")),
        mock.patch.object(sys, "stdout", io.TextIOWrapper(out, "utf-8", write_through=True)),
        mock.patch.object(sys, "stderr", io.TextIOWrapper(err, "utf-8", write_through=True)),
    ):
        code = main([str(one) for one in arguments])
        return subprocess.CompletedProcess(list(arguments), code, out.getvalue(), err.getvalue())


@contextmanager
def house() -> Iterator[House]:
    """Make a user's folders."""
    with tempfile.TemporaryDirectory(prefix="s") as name:
        folder = Path(name)
        (folder / "run").mkdir(mode=0o700)
        yield House(folder)


@contextmanager
def served(home: House, *arguments: str | Path, name: str = "default", **env: str) -> Iterator[Host]:
    """Serve until the block ends; the first line on stdout says that it is ready."""
    process = home.start("serve", *arguments, "--session", name, stdin=subprocess.DEVNULL, **env)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith(b"ready"):
            _, err = process.communicate(timeout=GUARD_S)
            raise AssertionError(err.decode())
        yield Host(home, process, Address(name, home.sockets / f"{name}.sock"))
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def stub_arguments(folder: Path) -> list[str | Path]:
    """What makes a host, or a run, use the stub."""
    model = write_model(folder / "tiny.gguf")
    return ["-m", model, "--lib", build(), "--device", "STUB0,STUB1", "-c", "1024", "-fa", "on", "-t", "1"]
