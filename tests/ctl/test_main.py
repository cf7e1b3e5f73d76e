"""The entry of the process: as the first one of a container, and before everything is imported."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.ctl.houses import house, stub_arguments
from tests.stublib import needs_compiler

ROOT = Path(__file__).parents[2]
GUARD_S = 60.0
"""How long a command may take before a test fails; no test measures it."""

_PROGRAM = """
import os, signal, sys

class Late:
    def find_spec(self, name, *_):
        if name == "click":
            sys.meta_path.remove(self)
            meanwhile()

def meanwhile():
    {meanwhile}

sys.meta_path.insert(0, Late())
from splitctl.__main__ import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def container() -> list[str]:
    """The start of a command line: what follows is the first process of its own."""
    unshare = shutil.which("unshare")
    users = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    if unshare is None:
        pytest.skip("util-linux's unshare is not there")
    command = [unshare, *users, "--pid", "--fork", "--kill-child"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("the system gives no process namespaces")
    return command


def _run(container: list[str], meanwhile: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run splitctl as a first process which does something while it is imported."""
    program = _PROGRAM.format(meanwhile=meanwhile)
    return subprocess.run(
        [*container, sys.executable, "-P", "-c", program, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=GUARD_S,
        check=False,
    )


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_during_the_imports_of_a_first_process_is_not_lost(container: list[str], name: str) -> None:
    """The kernel drops what a first process has no handler for: it ends as any other process would."""
    meanwhile = f"signal.signal(signal.SIGHUP, signal.SIG_DFL); os.kill(1, signal.{name}); signal.pause()"
    done = _run(container, meanwhile, "--version")
    assert done.returncode == 128 + signal.Signals[name], done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_an_interrupt_during_the_imports_is_no_traceback() -> None:
    """Ctrl-C in the first tenth of a second ends with status 130 and nothing else."""
    done = _run([], "os.kill(os.getpid(), signal.SIGINT)", "--version")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(("argument", "code"), [("--version", 0), ("nonsense", 2)])
def test_a_first_process_collects_the_dead_and_ends_as_its_child(
    container: list[str], argument: str, code: int
) -> None:
    """A process whose parent is gone is collected, not kept as a zombie; the exit status is the command's."""
    meanwhile = """
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        orphan = os.fork()
        if orphan:
            os.write(writer, str(orphan).encode())
        os._exit(7)
    os.waitpid(middle, 0)
    orphan = int(os.read(reader, 20))
    try:
        while True:
            os.kill(orphan, 0)
    except ProcessLookupError:
        os.write(2, b"collected\\n")
    """
    done = _run(container, meanwhile, argument)
    assert done.stderr.splitlines()[0] == "collected"
    assert done.returncode == code


@needs_compiler
@pytest.mark.stub
def test_a_session_in_a_container_is_saved_when_that_is_stopped(container: list[str], tmp_path: Path) -> None:
    """SIGTERM to the first process saves the session and ends with 0, and nothing of it is left."""
    with house() as home:
        command = [sys.executable, "-P", "-m", "splitctl", "serve", *map(str, stub_arguments(tmp_path))]
        process = subprocess.Popen(
            [*container, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=home.env(),
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith(b"ready")
            assert home.run("attach", "-p", "hello", "-n", "4", "--temp", "0").returncode == 0
            (first,) = psutil.Process(process.pid).children()
            below = first.children(recursive=True)
            first.terminate()
            _, err = process.communicate(timeout=GUARD_S)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 0, err.decode()
        assert home.saved().exists()
        assert not psutil.wait_procs(below, timeout=GUARD_S)[1]
