"""`splitctl ps`, `stop`, `save`, `restore` and `policy`: what is served, and what becomes of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from splitctl.cli.hosts import STATUS_S, address_of, ask_host, session_option, with_screen
from splitctl.cli.output import ExitCode, Screen, one_line
from splitctl.cli.switch import outcome_line
from splitctl.control.client import HostGone, ask
from splitctl.control.requests import PolicyRequest, RestoreRequest, SaveRequest, StatusRequest, StopRequest
from splitctl.control.sockets import Address, NoSuchSession, runtime_folder, sessions
from splitctl.ipc.jobs import RequestFailed
from splitctl.outcome import mib
from splitctl.placement import Placement

_FILE = click.Path(path_type=Path)


@click.command()
@session_option
@with_screen
def ps(*, session: str | None, screen: Screen) -> int:
    """List the sessions that are served, and how they are."""
    addresses = sessions(runtime_folder(os.environ)) if session is None else [address_of(session)]
    found = [status for address in addresses if (status := _status(address)) is not None]
    if not found and not screen.as_json:
        screen.line("no session is served; start one with splitctl serve -m MODEL")
        return ExitCode.DONE
    return screen.answer({"sessions": found}, "\n".join(line for status in found for line in status_lines(status)))


def _status(address: Address) -> dict[str, Any] | None:
    """Ask a host how its session is; None where it has ended meanwhile."""
    try:
        return ask(address, StatusRequest(), timeout_s=STATUS_S)
    except NoSuchSession:
        return None
    except (HostGone, RequestFailed) as error:
        return {"name": address.name, "state": "silent", "error": {"kind": type(error).__name__, "message": str(error)}}


def status_lines(status: dict[str, Any]) -> Iterator[str]:
    """Say for people how a session is."""
    state = str(status.get("state"))
    mode = f" in {status['effective']} mode" if status.get("effective") and state != "parked" else ""
    second = f", second worker {status['standby_pid']}" if status.get("standby_pid") else ""
    yield f"{status.get('name')}: {state}{mode} (pid {status.get('pid')}, worker {status.get('worker_pid')}{second})"
    if "error" in status:
        yield f"  {one_line(status['error']['message'])}"
        return
    yield f"  model        {one_line(str(status['model'].get('name') or status['model'].get('path') or '-'))}"
    if status.get("placement"):
        yield f"  placement    {Placement.from_json(status['placement']).describe()}"
    weights = status.get("weights")
    if weights:
        copy = {None: "", "complete": ", the copy is complete"}.get(weights["copy"], f", {weights['copy']} copied")
        yield f"  weights      {weights['tier']}{copy}"
    decides = status.get("policy") or {}
    if decides.get("policy") == "auto":
        held_back = f"; {decides['held']} held" if decides["held"] else ""
        yield f"  policy       {one_line(str(decides['decision'] or 'auto'))}{held_back}; by {decides['profile']}"
    elif decides.get("fault"):
        yield f"  policy       off: {one_line(decides['fault'])}"
    held = [one["n_tokens"] for one in status["sequences"] if one["n_tokens"]]
    streams = f"{status['streams']} streams, {status['queued']} waiting"
    yield f"  sequences    {len(held)} of {len(status['sequences'])} hold {sum(held):,} tokens; {streams}"
    rates = [f"{name} {rate:,.1f}" for name, rate in status["tokens_per_second"].items() if rate is not None]
    if rates:
        yield f"  tokens/s     {', '.join(rates)}"
    if status.get("last_switch"):
        yield f"  last switch  {outcome_line(status['last_switch'])}"
    if status.get("worker_restarts"):
        yield f"  restarts     {status['worker_restarts']} of the worker"
    if status.get("parked_at"):
        yield f"  parked at    {status['parked_at']}; splitctl restore {status['parked_at']} brings it back"


@click.command()
@session_option
@click.option("--force", is_flag=True, help="End it even if it cannot be saved.")
@with_screen
def stop(*, session: str | None, force: bool, screen: Screen) -> int:
    """Save a session and end its host.

    One that cannot be saved goes on, unless --force is given.
    """
    name = address_of(session).name
    body = ask_host(name, StopRequest(force=force))
    if body.get("reason"):
        message = f"session {name} has ended and was NOT saved: {body['reason']}"
        return screen.fail("NotSaved", message, ExitCode.FAILED, body)
    where = f"saved at {body['path']}; splitctl serve --resume goes on with it" if body["path"] else "it held nothing"
    return screen.answer(body, one_line(f"session {name} has ended; {where}"))


@click.command()
@click.argument("choice", type=click.Choice(["auto", "off"]))
@session_option
@with_screen
def policy(*, choice: str, session: str | None, screen: Screen) -> int:
    """Let a session switch by itself, or no more.

    It takes a session that was served with --policy auto.
    """
    body = ask_host(session, PolicyRequest(choice))
    return screen.answer(body, f"the policy is {body['policy']}")


@click.command()
@click.argument("file", type=_FILE)
@session_option
@with_screen
def save(*, file: Path, session: str | None, screen: Screen) -> int:
    """Write a session, with all its sequences, to a file."""
    body = ask_host(session, SaveRequest(file.absolute()))
    n = body["sequences"]
    held = f"{body['tokens']:,} tokens of {n} sequence{'' if n == 1 else 's'}"
    return screen.answer(body, one_line(f"saved {held} at {body['path']} ({mib(body['bytes'])})"))


@click.command()
@click.argument("file", type=_FILE)
@session_option
@with_screen
def restore(*, file: Path, session: str | None, screen: Screen) -> int:
    """Replace all that a session holds with a file; a parked session serves again.

    FILE is what save wrote, or a session or slot file of llama.cpp or llama-server.
    """
    body = ask_host(session, RestoreRequest(file.absolute()))
    n = body["sequences"]
    parts = [f"restored {body['tokens']:,} tokens of {n} sequence{'' if n == 1 else 's'}"]
    parts += [f"converted: {one}" for one in body.get("conversions") or ()]
    parts += [f"read again from its tokens: {body.get('reason')}"] if body.get("recomputed") else []
    return screen.answer(body, one_line("; ".join(parts)))
