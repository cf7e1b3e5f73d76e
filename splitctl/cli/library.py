"""`splitctl devices` and `splitctl doctor`: what the library is, what it can do, and what it can place a model on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from splitctl.cli.child import ask
from splitctl.cli.completions import ModelFile
from splitctl.cli.hosts import with_screen
from splitctl.cli.options import library_option, rpc_option, verbose_option
from splitctl.cli.output import ExitCode, Screen, one_line
from splitctl.ipc.jobs import DevicesRequest, DoctorRequest
from splitctl.outcome import mib


@click.command()
@library_option
@rpc_option
@verbose_option
@with_screen
def devices(*, library: Path | None, rpc: tuple[str, ...], screen: Screen) -> int:
    """List the devices of the library, with their memory."""
    answer = ask(DevicesRequest(library, rpc), screen)
    if answer.code is not ExitCode.DONE:
        return answer.code
    table = Table()
    for name in ("device", "kind", "backend", "description"):
        table.add_column(name)
    table.add_column("free", justify="right")
    table.add_column("total", justify="right")
    for one in answer.body["devices"]:
        sizes = (mib(one["memory_free"]), mib(one["memory_total"]))
        table.add_row(one["name"], one["kind"], one["backend"], one["description"], *sizes)
    return screen.answer(answer.body, table)


@click.command()
@library_option
@rpc_option
@click.option(
    "-m",
    "--model",
    type=ModelFile(),
    help="A GGUF: say what is known of the library's own call for a switch with it.",
)
@verbose_option
@with_screen
def doctor(*, library: Path | None, rpc: tuple[str, ...], model: Path | None, screen: Screen) -> int:
    """Say which libllama is used and why, its layout, what it can do, its devices, and warnings."""
    answer = ask(DoctorRequest(library, rpc, model), screen)
    # What is known is a report to a person, even if it is not all.
    if answer.code is ExitCode.DONE or (answer.body and not screen.as_json):
        screen.answer(answer.body, "\n".join(_report(answer.body)))
    return answer.code


def _report(body: dict[str, Any]) -> Iterator[str]:
    yield f"splitctl {body['splitctl']} on Python {body['python']}, {body['system']}"
    yield "libraries looked at:"
    for one in body["candidates"]:
        mark = "*" if one["path"] == (body.get("library") or {}).get("path") else " "
        yield f"  {mark} {one['path']} ({one['origin']}): {one['verdict']}"
    found = body.get("library")
    if found is not None:
        yield f"library: {found['path']}"
        yield f"  version {found['version'] or 'unknown'}, layout {found['profile']}"
        yield f"  can: {', '.join(found['capabilities'])}"
        yield f"  cannot: {', '.join(found['missing']) or '-'}"
        for name, value in found["facts"].items():
            yield f"  {name.replace('_', ' ')}: {value}"
        yield from _own_call(found, body.get("own_call"))
    if "devices" in body:
        yield "devices:"
        for one in body["devices"]:
            free, total = mib(one["memory_free"]), mib(one["memory_total"])
            yield f"    {one['name']} ({one['kind']}, {one['backend']}): {one['description']}; {free} free of {total}"
    if body.get("environment"):
        yield "environment:"
        yield from (f"    {name}={value}" for name, value in body["environment"].items())
    yield from (f"  ! {one['text']}" for one in body.get("warnings", ()))
    if found is not None and not body.get("warnings"):
        yield "no warnings"


def _own_call(library: dict[str, Any], known: list[dict[str, Any]] | None) -> Iterator[str]:
    """Say whether the library has a call of its own for a switch, and what trials of it with a model came to."""
    if "native-switch" not in library["capabilities"]:
        yield "  own call for a switch: none; switches are composed of other calls"
        return
    yield "  own call for a switch: exported; tried in a child before it is taken"
    for one in known or ():
        shares = f" {':'.join(map(str, one['tensor_split']))}" if one["tensor_split"] else ""
        why = f": {one_line(one['why'])}" if one["why"] else ""
        yield f"    to {one['mode']}{shares}, {one['trial']}, on {','.join(one['devices'])}: {one['verdict']}{why}"
    if known == []:
        yield "    not tried with this model yet"
