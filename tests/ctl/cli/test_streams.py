"""Standard streams that are closed or full: real processes, as a shell, a service or a full disk makes them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ctl.houses import House, house, served, stub_arguments
from tests.stublib import needs_compiler

_STATUS = ["ps", "--json"]


@pytest.fixture(scope="module")
def home() -> Iterator[House]:
    with house() as made:
        yield made


def _run(home: House, redirection: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command with streams as a shell redirects them."""
    shell = ["sh", "-c", f'exec "$@" {redirection}', "sh"]
    return subprocess.run(
        [*shell, *home.command(*arguments)], stdin=subprocess.DEVNULL, capture_output=True, env=home.env(), check=False
    )


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], _STATUS], ids=" ".join)
def test_a_full_stdout_is_one_line(home: House, arguments: list[str]) -> None:
    """An answer that cannot be written ends with status 1 and why, for help and objects too."""
    done = _run(home, ">/dev/full", *arguments)
    assert done.returncode == 1
    wanted = b"splitctl: standard output cannot be written: No space left on device; send it elsewhere\n"
    assert done.stderr == wanted


@pytest.mark.parametrize("redirection", [">&-", "<&- >&-", "<&- >&- 2>&-"])
def test_a_closed_stdout_is_nobodys(home: House, redirection: str) -> None:
    """A service that closes its streams gets the status of the command and no word about it."""
    done = _run(home, redirection, *_STATUS)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-"])
def test_a_stderr_that_takes_nothing_changes_no_answer(home: House, redirection: str) -> None:
    """The status is the command's, and so is what it says on stdout."""
    done = _run(home, redirection, *_STATUS)
    assert (done.returncode, json.loads(done.stdout)) == (0, {"sessions": []})
    assert _run(home, redirection, "stop", "--session", "nosuch").returncode == 6
    assert _run(home, redirection, "nosuch").returncode == 2


def test_a_closed_stdin_is_an_empty_one(home: House) -> None:
    """A prompt from a closed stdin is empty, which is told."""
    done = _run(home, "<&-", "run", "-m", "x.gguf", "-f", "-")
    assert done.returncode == 2
    assert b"the prompt is empty" in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_what_is_opened_later_takes_no_standard_descriptor(tmp_path: Path) -> None:
    """A socket or file in the place of a closed stream would get what is printed."""
    program = (
        "import os, sys; from splitctl.cli.streams import settle\n"
        "for number in range(3): os.close(number)\n"
        "settle(); file = open(sys.argv[1], 'w'); print(file.fileno(), os.get_inheritable(1), file=file, flush=True)\n"
        "print('lost'); sys.stderr.write('lost'); assert sys.stdin.read() == ''"
    )
    path = tmp_path / "told"
    done = subprocess.run([sys.executable, "-c", program, str(path)], stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0
    assert path.read_text(encoding="utf-8") == "3 True\n"


@needs_compiler
@pytest.mark.stub
def test_an_answer_that_nobody_can_take_leaves_the_session_serving(home: House, tmp_path: Path) -> None:
    """A stream into a full disk ends with one line; without stdin and stdout prompts and answers are none."""
    with served(home, *stub_arguments(tmp_path)):
        done = _run(home, ">/dev/full", "attach", "-p", "hello", "-n", "4", "--temp", "0")
        assert done.returncode == 1
        assert b"standard output cannot be written: No space left" in done.stderr.splitlines()[-1]
        assert _run(home, "<&- >&-", "attach", "-n", "4").returncode == 0
        (status,) = json.loads(_run(home, "2>&-", *_STATUS).stdout)["sessions"]
        assert status["state"] == "serving"
