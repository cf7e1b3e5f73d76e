"""`splitctl devices`: what the library can place a model on."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from splitctl.cli.child import ask
from splitctl.cli.options import json_option, library_option, rpc_option, verbose_option
from splitctl.cli.output import ExitCode, Screen, mib, print_json
from splitctl.ipc.jobs import DevicesRequest


@click.command()
@library_option
@rpc_option
@verbose_option
@json_option
def devices(*, library: Path | None, rpc: tuple[str, ...], verbose: bool, as_json: bool) -> int:
    """List the devices of the library, with their memory."""
    with Screen(as_json=as_json, verbose=verbose) as screen:
        answer = ask(DevicesRequest(library, rpc), screen)
        if answer.code is not ExitCode.DONE:
            return answer.code
    if as_json:
        print_json(answer.body)
        return answer.code
    table = Table()
    for name in ("device", "kind", "backend", "description"):
        table.add_column(name)
    table.add_column("free", justify="right")
    table.add_column("total", justify="right")
    for one in answer.body["devices"]:
        sizes = (mib(one["memory_free"]), mib(one["memory_total"]))
        table.add_row(one["name"], one["kind"], one["backend"], one["description"], *sizes)
    Console(file=sys.stdout, highlight=False, soft_wrap=True).print(table)
    return answer.code
