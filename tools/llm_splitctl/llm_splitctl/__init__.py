"""Models of splitctl for LLM: running sessions, and GGUF files. Nothing of splitctl is imported before it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import llm

if TYPE_CHECKING:
    from collections.abc import Callable

    import click


@llm.hookimpl
def register_models(register: Callable[..., None]) -> None:
    """Name the sessions that are served now, and the files that were found."""
    from llm_splitctl.models import found  # noqa: PLC0415 - `llm --help` asks for no model

    for model, async_model in found():
        register(model, async_model)


@llm.hookimpl
def register_commands(cli: Any) -> None:
    """Add `llm splitctl`."""
    from llm_splitctl.commands import splitctl  # noqa: PLC0415 - a program that asks for a model needs no command

    group: click.Group = cli
    group.add_command(splitctl)
