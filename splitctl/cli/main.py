"""The entry point: parse the arguments, run one command, turn every end into an exit status."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from types import FrameType

import click
from click.shell_completion import CompletionItem

from splitctl.cli import streams
from splitctl.cli.output import ExitCode, Screen, error_body, one_line, print_json

# A command is `<name>` of its module; its line here is the first of its help.
COMMANDS = {
    "attach": ("attach", "Generate with a running session."),
    "bench": (
        "bench",
        "Measure how fast a model reads, generates and switches here, in every mode, and keep it as a profile.",
    ),
    "completions": ("completions", "Print what a shell needs to complete commands, flags and their values."),
    "devices": ("library", "List the devices of the library, with their memory."),
    "doctor": ("library", "Say which libllama is used and why, its layout, what it can do, its devices, and warnings."),
    "explain": ("explain", "Say which mode, or which switch, does some work in the least time, and by how much."),
    "plan": (
        "plan",
        "Tell what every mode, and a switch, would take on each device, and the largest context that fits.",
    ),
    "policy": ("sessions", "Let a session switch by itself, or no more."),
    "ps": ("sessions", "List the sessions that are served, and how they are."),
    "replay": ("replay", "Replay a trace of requests in simulated time, and say if switching by itself had paid."),
    "restore": ("sessions", "Replace all that a session holds with a file; a parked session serves again."),
    "run": ("run", "Read a prompt under one split mode, switch to another, and generate."),
    "save": ("sessions", "Write a session, with all its sequences, to a file."),
    "serve": ("serve", "Serve a session that survives a crash of the library."),
    "state": (
        "state",
        "Look into saved states: llama.cpp's blobs, session and sequence files, slot files, and splitctl's own carry.",
    ),
    "stop": ("sessions", "Save a session and end its host."),
    "switch": ("switch", "Switch a running session to another placement."),
    "verify": ("verify", "Try a model in every mode, in child processes that may die, and compare what they compute."),
}


class _Commands(click.Group):
    """Imports a command when it is called: all of them cost half a second, their names nothing."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"splitctl.cli.{COMMANDS[cmd_name][0]}"), cmd_name)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Complete the name of a command."""
        if incomplete.startswith("-"):
            return click.Command.shell_complete(self, ctx, incomplete)
        found = [(name, line) for name, (_, line) in COMMANDS.items() if name.startswith(incomplete)]
        return [CompletionItem(name, help=line) for name, line in found]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="splitctl", prog_name="splitctl")
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
        streams.settle()
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
    if streams.COMPLETE in os.environ:
        from splitctl.cli.completions import know_shells  # noqa: PLC0415 - for a shell that asks alone

        know_shells()
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
    except streams.OutputLost as error:
        streams.silence()
        if error.why:
            click.echo(f"splitctl: standard output cannot be written: {error.why}; send it elsewhere", err=True)
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
