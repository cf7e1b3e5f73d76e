"""Clients of a session that is hosted in this process: each reads one stream and keeps what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from splitctl.control.requests import GenerateRequest
from splitctl.host.streams import Begun, Delta, Done
from splitctl.host.supervisor import Supervisor


@dataclass(slots=True)
class Text:
    """What a client got of one stream.

    Args:
        n_some: tokens after which `has_some` is set.
        tokens: in the order in which they came.
        faults: what was wrong with the stream itself.
        done: its last event.
        has_begun: set once the stream has its sequence, or has ended.
        has_some: set once the stream has `n_some` tokens, or has ended.
    """

    n_some: int
    tokens: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    done: Done | None = None
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    has_some: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, supervisor: Supervisor, request: GenerateRequest) -> None:
        """Ask for a stream and read it to its end; its tokens come behind those that are there."""
        first = len(self.tokens)
        try:
            async for event in await supervisor.generate(request):
                match event:
                    case Begun():
                        self.has_begun.set()
                    case Delta(token=int(token)):
                        if event.index != len(self.tokens) - first:
                            self.faults.append(f"token {event.index} came as number {len(self.tokens) - first}")
                        self.tokens.append(token)
                        if len(self.tokens) >= self.n_some:
                            self.has_some.set()
                    case Done():
                        self.done = event
        finally:
            self.has_begun.set()
            self.has_some.set()


async def start_streams(
    supervisor: Supervisor, requests: Iterable[GenerateRequest], n_some: int
) -> tuple[list[Text], list[asyncio.Task[None]]]:
    """Start streams one after the other, so that each has the sequence of its number.

    Args:
        supervisor: of the session.
        requests: one for each stream.
        n_some: tokens after which a text has some.

    Returns:
        The texts, and the tasks that read them.
    """
    texts, readers = [], []
    for request in requests:
        text = Text(n_some)
        texts.append(text)
        readers.append(asyncio.create_task(text.read(supervisor, request)))
        await text.has_begun.wait()
    return texts, readers
