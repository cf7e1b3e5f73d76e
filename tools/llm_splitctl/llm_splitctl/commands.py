"""`llm splitctl`: splitctl's own commands for sessions, and what there is to name after ``-m``."""

from __future__ import annotations

import sys

import click

_ALL_ARGUMENTS = {"ignore_unknown_options": True, "help_option_names": []}


@click.group()
def splitctl() -> None:
    """Sessions of splitctl: list them, and switch their split mode while they run."""


@splitctl.command(context_settings=_ALL_ARGUMENTS, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def switch(*, arguments: tuple[str, ...]) -> None:
    """Switch a running session: `switch tensor`, with any option of `splitctl switch`."""
    is_mode = bool(arguments) and not arguments[0].startswith("-")
    _run("switch", "--to", *arguments) if is_mode else _run("switch", *arguments)


@splitctl.command(context_settings=_ALL_ARGUMENTS, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def ps(*, arguments: tuple[str, ...]) -> None:
    """List the sessions that are served, and how they are; takes the options of `splitctl ps`."""
    _run("ps", *arguments)


@splitctl.command()
def models() -> None:
    """List what -m may name: sessions that are served, and GGUF files."""
    from llm_splitctl.models import found  # noqa: PLC0415 - it imports splitctl
    from llm_splitctl.settings import settings_path  # noqa: PLC0415

    for model, _ in found():
        click.echo(f"{model.model_id}  {model.what()}")
    click.echo(f"Files and folders to look into, and where their models are placed: {settings_path()}", err=True)


def _run(*arguments: str) -> None:
    """End as a command of splitctl does, with its exit status."""
    from splitctl.cli import main  # noqa: PLC0415 - it imports for a tenth of a second

    sys.exit(main(arguments))
