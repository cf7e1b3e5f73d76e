"""The command line imports a command when it is called, and knows the others by a line each."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from splitctl.cli.main import COMMANDS, cli


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_line_of_the_list_is_the_first_of_the_commands_help(name: str) -> None:
    """The two are written apart, so that the list needs no import; they may not drift apart."""
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert command.name == name
    assert command.get_short_help_str(200) == COMMANDS[name][1]


#: What it takes to plan, to measure and to read states is what their flags are made of.
_HEAVY = {"bench", "plan", "verify", "state"}


@pytest.mark.parametrize("argument", ["--version", *sorted(COMMANDS.keys() - _HEAVY)])
def test_what_needs_no_session_imports_neither_numpy_nor_the_library(argument: str) -> None:
    """A shell that asks for the version or for help waits for click alone, for the help of a command too."""
    program = (
        "import sys\nfrom splitctl.cli import main\ncode = main(sys.argv[1:])\n"
        "print(*sorted({one.split('.')[0] for one in sys.modules}), file=sys.stderr)\nsys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, argument, "--help"], capture_output=True, text=True, check=True
    )
    imported = set(done.stderr.split())
    assert "splitctl" in imported
    loop = {"asyncio"} if argument == "serve" else set()
    assert not imported & {"numpy", "cffi", "asyncio", "statecodec", "llama_native", "psutil"} - loop
