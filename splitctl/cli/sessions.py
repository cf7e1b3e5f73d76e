"""`splitctl ps`, `stop`, `save` and `restore`: what is served, and what becomes of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from splitctl.cli.hosts import STATUS_S, address_of, ask_host, session_option, told
from splitctl.cli.options import json_option
from splitctl.cli.output import ExitCode, Screen, mib, one_line, print_json
from splitctl.cli.switch import outcome_line
from splitctl.errors import SplitctlError
from splitctl.host.client import HostGone, RequestFailed, ask
from splitctl.host.requests import RestoreRequest, SaveRequest, StatusRequest, StopRequest
from splitctl.host.runtime import Address, NoSuchSession, runtime_folder, sessions

_FILE = click.Path(path_type=Path)


@click.command()
@session_option
@json_option
def ps(*, session: str | None, as_json: bool) -> int:
    """List the sessions that are served, and how they are."""
    with Screen(as_json=as_json) as screen:
        try:
            addresses = sessions(runtime_folder()) if session is None else [address_of(session)]
            found = [status for address in addresses if (status := _status(address)) is not None]
        except (SplitctlError, OSError) as error:
            return told(error, screen)
        if as_json:
            print_json({"sessions": found})
        elif found:
            Console(file=sys.stdout, highlight=False, soft_wrap=True).print(_table(found))
        else:
            screen.line("no session is served; start one with splitctl serve -m MODEL")
    return ExitCode.DONE


def _status(address: Address) -> dict[str, Any] | None:
    """Ask a host how its session is; None where it has ended meanwhile."""
    try:
        return ask(address, StatusRequest(), timeout_s=STATUS_S)
    except NoSuchSession:
        return None
    except (HostGone, RequestFailed) as error:
        return {"name": address.name, "state": "silent", "error": {"kind": type(error).__name__, "message": str(error)}}


def _table(found: list[dict[str, Any]]) -> Table:
    """Lay the sessions out, one a row; below each what its last switch came to."""
    table = Table()
    for name in ("session", "state", "mode", "model"):
        table.add_column(name)
    for name in ("sequences", "tokens", "waiting", "pid", "worker"):
        table.add_column(name, justify="right")
    table.add_column("last switch")
    for one in found:
        sequences = one.get("sequences") or []
        held = [sequence for sequence in sequences if sequence.get("n_tokens")]
        last = one.get("last_switch")
        note = one_line(one["error"]["message"]) if "error" in one else f"parked at {one['parked_at']}"
        table.add_row(
            str(one.get("name")),
            str(one.get("state")),
            str(one.get("effective") or "-"),
            str((one.get("model") or {}).get("name") or "-"),
            f"{len(held)} of {len(sequences)}",
            str(sum(sequence["n_tokens"] for sequence in held)),
            str(one.get("n_queued", "-")),
            str(one.get("pid") or "-"),
            str(one.get("worker_pid") or "-"),
            note if "error" in one or one.get("parked_at") else outcome_line(last) if last else "none",
        )
    return table


@click.command()
@session_option
@json_option
def stop(*, session: str | None, as_json: bool) -> int:
    """Save a session and end its host."""
    with Screen(as_json=as_json) as screen:
        try:
            name = address_of(session).name
            body = ask_host(name, StopRequest())
        except (SplitctlError, OSError) as error:
            return told(error, screen)
        where = f"saved at {body['path']}; splitctl serve --resume goes on with it" if body.get("path") else "not saved"
        return _show(body, f"session {name} has ended; {where}", as_json=as_json)


@click.command()
@click.argument("file", type=_FILE)
@session_option
@json_option
def save(*, file: Path, session: str | None, as_json: bool) -> int:
    """Write a session, with all its sequences, to a file."""
    with Screen(as_json=as_json) as screen:
        try:
            body = ask_host(session, SaveRequest(file.absolute()))
        except (SplitctlError, OSError) as error:
            return told(error, screen)
        text = (
            f"saved {body['tokens']} tokens of {body['sequences']} sequences at {body['path']} ({mib(body['bytes'])})"
        )
        return _show(body, text, as_json=as_json)


@click.command()
@click.argument("file", type=_FILE)
@session_option
@json_option
def restore(*, file: Path, session: str | None, as_json: bool) -> int:
    """Replace all that a session holds with a file; a parked session serves again.

    FILE is what save wrote, or a session or slot file of llama.cpp or llama-server.
    """
    with Screen(as_json=as_json) as screen:
        try:
            body = ask_host(session, RestoreRequest(file.absolute()))
        except (SplitctlError, OSError) as error:
            return told(error, screen)
        parts = [f"restored {body['tokens']} tokens of {body['sequences']} sequences"]
        parts += [f"converted: {one}" for one in body.get("conversions") or ()]
        parts += [f"read again from its tokens: {body.get('reason')}"] if body.get("recomputed") else []
        return _show(body, "; ".join(parts), as_json=as_json)


def _show(body: dict[str, Any], text: str, *, as_json: bool) -> ExitCode:
    """Show an answer: the object, or its line."""
    if as_json:
        print_json(body)
    else:
        click.echo(one_line(text))
    return ExitCode.DONE
