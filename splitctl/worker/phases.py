"""The placement that reads a prompt: the one that generates, but for its mode and its batch sizes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import psutil

from splitctl.errors import Reason, Refused
from splitctl.outcome import DOES_NOT_FIT
from splitctl.planning.fitting import HOST_POOL, MIN_CHUNK, Chunk
from splitctl.planning.memory import DeviceFacts
from splitctl.planning.survey import Known, answer_chunk, sizes_to_ask

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from splitctl.ipc.jobs import RunRequest
    from splitctl.ipc.reserving import Reserved
    from splitctl.model.facts import ModelFacts
    from splitctl.placement import Placement

#: Largest chunk that is looked for where no batch size is given [tokens].
MAX_CHUNK = 4096
#: Sizes that a dry run plans, so that those between lie on a line [tokens].
_ASKED = (1024, 2048, MAX_CHUNK)


def reading_placement(request: RunRequest) -> Placement:
    """Give the placement that reads the prompt, with the least chunk where the largest is still to be found.

    Args:
        request: the run.

    Returns:
        The placement; its batch holds its micro-batch.
    """
    wanted = request.placement
    n_ubatch = wanted.n_ubatch if request.prompt_ubatch is None else request.prompt_ubatch or MIN_CHUNK
    # A batch that nobody named grows with its micro-batch; one that is named limits it, as in the library.
    n_batch = request.prompt_batch or max(wanted.n_batch, request.prompt_ubatch or 0)
    return dataclasses.replace(
        wanted, mode=request.prompt_mode or wanted.mode, n_batch=n_batch, n_ubatch=min(n_ubatch, n_batch)
    )


def with_largest_chunk(
    request: RunRequest,
    facts: ModelFacts,
    devices: Sequence[DeviceFacts],
    reserve: Callable[[Placement, Sequence[tuple[int, int, int]]], Reserved],
) -> Placement:
    """Give the placement that reads the prompt the largest chunk that every device can lend.

    Args:
        request: the run.
        facts: the model.
        devices: with the memory that is free now, before anything is loaded; the host is added.
        reserve: asks the library what contexts of several sizes would take.

    Returns:
        The placement.

    Raises:
        Refused: less than the least chunk; both numbers and what is lacking.
    """
    reading = reading_placement(request)
    limit = min(request.prompt_batch or MAX_CHUNK, reading.n_ctx or facts.n_ctx_train or MAX_CHUNK)
    reserved = reserve(reading, sizes_to_ask(reading, facts, _ASKED)).reservations
    host = DeviceFacts(HOST_POOL, "cpu", psutil.virtual_memory().available)
    chunk = answer_chunk(Known(facts, (*devices, host), {reading.mode: reserved}), reading, limit)
    if chunk.refused:
        raise Refused((Reason(DOES_NOT_FIT, _too_small(chunk, limit)),))
    return dataclasses.replace(reading, n_ubatch=chunk.n_ubatch, n_batch=max(reading.n_batch, chunk.n_ubatch))


def _too_small(chunk: Chunk, limit: int) -> str:
    """Say what can be lent and what is wanted."""
    why = f": {chunk.limited_by.text}" if chunk.limited_by is not None else ""
    return (
        f"a prompt chunk of {chunk.n_ubatch} tokens is the most that every device can lend and {min(MIN_CHUNK, limit)} "
        f"are wanted{why}; free memory there, shorten the context (-c), use another split, or name a size (-pub N)"
    )
