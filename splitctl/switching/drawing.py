"""Draws the tables of the switch machine as text, so that the docs cannot differ from the machine. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitctl.outcome import Stage
from splitctl.switching.machine import NATIVE, RESTING, SUSPENDED, TABLE, Command

if TYPE_CHECKING:
    from collections.abc import Iterator

    from splitctl.switching.machine import Row


def draw() -> str:
    """Draw the whole machine in Markdown: a mermaid diagram, the table of every transition, what each command does."""
    return "\n".join([*_diagram(), "", *_transitions(), "", *_commands(), ""])


def _diagram() -> Iterator[str]:
    """Draw each pair of stages once, with the events that lead from one to the other."""
    events: dict[tuple[Stage, Stage], list[str]] = {}
    for stage, kind, (target, _) in _rows():
        if target is not stage:
            events.setdefault((stage, target), []).append(kind)
    yield "```mermaid"
    yield "stateDiagram-v2"
    yield f"    [*] --> {Stage.SERVING.value}"
    for (stage, target), kinds in events.items():
        yield f"    {stage.value} --> {target.value}: {', '.join(kinds)}"
    yield f"    {Stage.CLOSED.value} --> [*]"
    yield "```"


def _rows() -> Iterator[tuple[Stage, str, Row]]:
    for stage, events in TABLE.items():
        for kind, row in events.items():
            yield stage, kind.value, row
            if (stage, kind) in NATIVE:
                yield stage, f"{kind.value} (native)", NATIVE[stage, kind]


def _transitions() -> Iterator[str]:
    yield "| stage | event | next stage | commands |"
    yield "|---|---|---|---|"
    for stage, kind, (target, commands) in _rows():
        yield f"| {stage.value} | {kind} | {target.value} | {_names(commands)} |"
    yield ""
    yield "A switch that interrupts a trial keeps the trial and its sealed original until it has sealed its own:"
    yield ""
    yield "| instead of | it goes to | commands |"
    yield "|---|---|---|"
    for (usual, _), (target, commands) in SUSPENDED.items():
        yield f"| {usual.value} | {target.value} | {_names(commands)} |"
    yield ""
    yield "No command is under way in " + ", ".join(stage.value for stage in Stage if stage in RESTING) + "."


def _commands() -> Iterator[str]:
    yield "| command | what is done |"
    yield "|---|---|"
    for command in Command:
        yield f"| {command.name} | {command.value} |"


def _names(commands: tuple[Command, ...]) -> str:
    return ", ".join(command.name for command in commands)
