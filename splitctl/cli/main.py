"""The entry point: parse the arguments, run one command, turn every end into an exit status."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib import metadata
from types import FrameType

import click

from splitctl.cli.attach import attach
from splitctl.cli.explain import explain
from splitctl.cli.library import devices, doctor
from splitctl.cli.output import ExitCode, Screen, error_body, one_line, print_json
from splitctl.cli.plan import plan
from splitctl.cli.run import run
from splitctl.cli.serve import serve
from splitctl.cli.sessions import ps, restore, save, stop
from splitctl.cli.state import state
from splitctl.cli.switch import switch
from splitctl.cli.verify import verify


@click.group(
    commands=[run, serve, switch, attach, ps, stop, save, restore, devices, doctor, plan, explain, verify, state],
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(metadata.version("splitctl"), prog_name="splitctl")
def cli() -> None:
    """Switch a running llama.cpp session from one split mode to another and keep everything."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; None takes the process's own, which then ends with this command:
            Ctrl-C raises KeyboardInterrupt once at most, and is ignored from the command's end on.

    Returns:
        The exit status, an `ExitCode`.
    """
    if argv is not None:
        return _run(list(argv))
    try:
        signal.signal(signal.SIGINT, _interrupt_once)
        code = _run(sys.argv[1:])
        # Python gives other handlers back to the system while it ends; a signal then would decide the exit status.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:
        return ExitCode.CANCELLED
    return code


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    """End the command; what it says about that is not interrupted again."""
    del frame
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _run(arguments: list[str]) -> int:
    as_json = "--json" in arguments
    try:
        code = cli.main(arguments, prog_name="splitctl", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return ExitCode.USAGE
    except click.ClickException as error:
        return _usage_error(error, as_json=as_json)
    except (click.Abort, KeyboardInterrupt):
        # Before a worker exists; afterwards the interrupt is passed on to it (see child).
        message = "cancelled; nothing was started"
        with Screen(as_json=as_json) as screen:
            return screen.fail("Cancelled", message, ExitCode.CANCELLED)
    except BrokenPipeError:
        # The reader of our stdout is gone. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.FAILED
    return code if isinstance(code, int) else ExitCode.DONE


def _usage_error(error: click.ClickException, *, as_json: bool) -> ExitCode:
    context = error.ctx if isinstance(error, click.UsageError) else None
    command = context.command_path if context is not None else "splitctl"
    message = one_line(error.format_message()).rstrip(".")
    text = f"{command}: {message}; see {command} --help"
    click.echo(text, err=True)
    if as_json:
        print_json(error_body(type(error).__name__, text, ExitCode.USAGE))
    return ExitCode.USAGE
