"""`splitctl switch`: move a running session to another placement, or say what that would do."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import click

from splitctl.cli.hosts import CtrlC, address_of, ask_host, session_option, with_screen
from splitctl.cli.options import MODE, changes_options, switch_options
from splitctl.cli.output import (
    EXIT_OF_STATUS,
    ExitCode,
    Screen,
    error_body,
    one_line,
    print_json,
    switch_table,
)
from splitctl.control.client import Call, ControlAnswer, wait
from splitctl.control.requests import CheckRequest, SwitchRequest
from splitctl.ipc.jobs import Progress
from splitctl.outcome import Route, SwitchOptions, Via, WeightsTier, mib
from splitctl.placement import Changes, Placement, SplitMode

_STDIN = 0
_LINE_BYTES = 4096


@click.command()
@click.option("--to", "to", type=MODE, help="The split mode to switch to; the same as -sm.")
@session_option
@switch_options
@click.option(
    "--timeout",
    "timeout_s",
    type=float,
    metavar="S",
    help="Longest wait for the token boundary; without it, as long as it takes.",
)
@click.option(
    "--via",
    type=click.Choice([one.value for one in Route]),
    default=Route.AUTO.value,
    show_default=True,
    help="Who builds the target. beside: a second process, while the first one serves. in-place: the process that "
    "serves, which frees the old placement first; native: by the library's own call; composed: by a sequence of calls. "
    "auto: beside where both fit, else native where the build does it right, else composed.",
)
@click.option("--dry-run", is_flag=True, help="Say what would happen, and change nothing.")
@changes_options
@with_screen
def switch(
    *,
    to: SplitMode | None,
    session: str | None,
    options: SwitchOptions,
    timeout_s: float | None,
    via: str,
    dry_run: bool,
    changes: Changes,
    screen: Screen,
) -> int:
    """Switch a running session to another placement. What is not named stays as it is."""
    if to is not None:
        if changes.get("mode", to) is not to:
            raise click.UsageError(f"--to {to.value} and -sm {changes['mode'].value} contradict each other")
        changes["mode"] = to
    if not changes:
        raise click.UsageError("name what is to change: --to MODE, or a placement flag such as -c or --device")
    if dry_run:
        body = ask_host(session, CheckRequest(changes, options.convert, options.force, Route(via)))
        screen.answer(body, "\n".join(_check_lines(body)))
        return ExitCode.REFUSED if body.get("reasons") else ExitCode.DONE
    request = SwitchRequest(changes, options.proof, options.convert, options.force, timeout_s, Route(via))
    asks = not screen.as_json and sys.stdin.isatty() and screen.console.is_terminal
    outcome = _switch(session, request, screen, asks=asks)
    if outcome is None:
        message = "the switch was left running; splitctl ps shows how it ends"
        return screen.fail("Cancelled", message, ExitCode.CANCELLED)
    return _show_outcome(outcome, screen)


def _switch(session: str | None, request: SwitchRequest, screen: Screen, *, asks: bool) -> dict[str, Any] | None:
    """Switch, and show the stages; None where it was left running. Ctrl-C cancels it, or asks whether to."""
    is_asking = False
    with CtrlC() as ctrl_c, Call(address_of(session), request) as client:
        while True:
            sources: list[Call | int] = [client, ctrl_c.fileno()]
            ready = wait([*sources, _STDIN] if is_asking else sources)
            if client in ready:
                for message in client.read():
                    if isinstance(message, ControlAnswer):
                        if is_asking:
                            screen.line("")
                        return message.body
                    if not is_asking:
                        screen.progress(_progress(message.body))
            elif ctrl_c.fileno() in ready:
                ctrl_c.take()
                if asks and not is_asking:
                    is_asking = True
                    screen.question("cancel the switch, or leave it running? [c/l] ")
                else:
                    is_asking = False
                    client.cancel()
                    screen.line("cancelling")
            elif is_asking:
                # The last line counts: someone who typed several has changed their mind.
                answer = os.read(_STDIN, _LINE_BYTES).strip().rpartition(b"\n")[2].strip().lower()
                if answer in {b"l", b"leave"}:
                    return None
                if answer in {b"c", b"cancel", b""}:
                    is_asking = False
                    client.cancel()
                    screen.line("cancelling")
                else:
                    screen.question("c cancels it, l leaves it running: ")


def _progress(body: dict[str, Any]) -> Progress:
    share = body.get("share")
    return Progress(f"switch: {body.get('stage')}", float(share) if isinstance(share, int | float) else None)


def _show_outcome(outcome: dict[str, Any], screen: Screen) -> ExitCode:
    code = EXIT_OF_STATUS.get(str(outcome.get("status")), ExitCode.FAILED)
    if screen.as_json:
        is_cancelled = code is ExitCode.CANCELLED
        print_json(error_body("Cancelled", str(outcome.get("reason")), code, outcome) if is_cancelled else outcome)
    elif outcome.get("status") not in {"unchanged", "refused"}:
        show_switch(outcome, screen)
    if code is not ExitCode.DONE:
        screen.line(f"splitctl: {outcome_line(outcome)}")
    elif not screen.as_json:
        click.echo(outcome_line(outcome))
    if outcome.get("parked_at"):
        at = outcome["parked_at"]
        screen.line(f"splitctl: the session is parked at {at}; splitctl restore {at} brings it back")
    return code


def show_switch(outcome: dict[str, Any], screen: Screen) -> None:
    """Lay out a switch on stderr, and say why it did not go the way that was asked for, from the outcome object."""
    screen.table(switch_table(outcome))
    for what, why in (
        ("in place", outcome.get("via_reason")),
        (f"weights from {outcome.get('weights')}", outcome.get("weights_reason")),
        ("state through unpinned memory", outcome.get("carry_pinned_reason")),
        ("state in one piece", outcome.get("ahead_reason")),
    ):
        if why:
            screen.line(f"{what}: {one_line(str(why))}")


def outcome_line(outcome: dict[str, Any]) -> str:
    """Say in one line how a switch ended, from the outcome object of the contract."""
    status = str(outcome.get("status"))
    if status == "unchanged":
        return f"unchanged: the session serves in {outcome.get('effective')} mode, placed like this already"
    if status != "switched":
        reason = one_line(str(outcome.get("reason")))
        return f"the switch to {outcome.get('requested')} ended: {status.replace('_', ' ')}: {reason}"
    parts = [f"switched to {outcome.get('effective')} in {outcome.get('total_ms') or 0.0:,.0f} ms"]
    n_sequences = outcome.get("n_sequences")
    n_tokens = outcome.get("n_tokens") or 0
    if outcome.get("weights") not in {None, WeightsTier.FILE.value}:
        parts.append(f"weights {outcome['weights']}")
    if outcome.get("via") == Via.BESIDE.value:
        parts.append(f"paused for {outcome.get('pause_ms') or 0.0:,.0f} ms")
    if outcome.get("via") == Via.NATIVE.value:
        parts.append("by the library's own call")
    parts.append(f"{n_tokens:,} tokens of {n_sequences} sequence{'' if n_sequences == 1 else 's'} carried")
    parts += [f"converted: {one}" for one in outcome.get("conversions") or ()]
    parts.append("confirmed" if outcome.get("confirmed") else "the first decode will confirm it")
    return "; ".join(parts)


def _check_lines(body: dict[str, Any]) -> Iterator[str]:
    reasons = body.get("reasons") or []
    target = Placement.from_json(body["target"])
    yield f"target       {target.describe()}"
    if body.get("is_unchanged"):
        yield "would be     unchanged: the session serves in it already"
        return
    yield f"would be     {'refused' if reasons else 'tried'}"
    for reason in reasons:
        yield f"reason       {one_line(reason['text'])} [{reason['code']}]"
    for name, words in (("via", "built"), ("weights", "weights")):
        if body.get(name):
            why = one_line(str(body.get(f"{name}_reason") or ""))
            yield f"{words:<13}{body[name]}{f': {why}' if why else ''}"
    for conversion in body.get("conversions") or ():
        yield f"conversion   {one_line(conversion)}"
    memory = (("state", "state_bytes"), ("weights placed again", "weight_bytes"), ("free host memory", "mem_available"))
    known = [f"{name} {mib(body[key])}" for name, key in memory if body.get(key) is not None]
    yield f"memory       {', '.join(known) if known else 'not known'}"
    seconds = body.get("expected_s")
    yield f"would take   {'not known: no such switch yet' if seconds is None else f'about {seconds:.2g} s, as before'}"
