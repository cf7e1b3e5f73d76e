"""`splitctl doctor`: which library is used and why, what it can do, and what may go wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from splitctl.cli.child import ask
from splitctl.cli.options import json_option, library_option, rpc_option, verbose_option
from splitctl.cli.output import ExitCode, Screen, mib, print_json
from splitctl.ipc.jobs import DoctorRequest


@click.command()
@library_option
@rpc_option
@verbose_option
@json_option
def doctor(*, library: Path | None, rpc: tuple[str, ...], verbose: bool, as_json: bool) -> int:
    """Say which libllama is used and why, its layout, what it can do, its devices, and warnings."""
    with Screen(as_json=as_json, verbose=verbose) as screen:
        answer = ask(DoctorRequest(library, rpc), screen)
        if not as_json and answer.body:
            sys.stdout.write("\n".join(_report(answer.body)) + "\n")
        elif as_json and answer.code is ExitCode.DONE:
            print_json(answer.body)
    return answer.code


def _report(body: dict[str, Any]) -> Iterator[str]:
    """Write the report for a person; a part that is not known is left out."""
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
