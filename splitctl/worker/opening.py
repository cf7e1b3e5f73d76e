"""What `run` and `serve` need before a session opens: the model's header, trials on RPC servers, progress.

For `run` also the placement that reads the prompt: the one that generates, but for its mode and its batch sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from splitctl.errors import ConfigInvalid, Reason, Refused
from splitctl.host_memory import host_memory
from splitctl.ipc.jobs import JobEvent, Progress, RunRequest
from splitctl.ipc.probes import Prober
from splitctl.ipc.reserving import Reserved
from splitctl.model.facts import ModelFacts, read_facts
from splitctl.outcome import DOES_NOT_FIT
from splitctl.placement import Placement
from splitctl.planning.fitting import HOST_POOL, MIN_CHUNK, Chunk
from splitctl.planning.memory import DeviceFacts
from splitctl.planning.survey import Known, answer_chunk, sizes_of_chunks

#: Largest chunk that is looked for where no batch size is given [tokens].
MAX_CHUNK = 4096
#: Sizes that a dry run plans, so that those between lie on a line [tokens].
_ASKED = (1024, 2048, MAX_CHUNK)
#: Least progress that is passed on.
_SHARE_STEP = 0.01


class Steps:
    """Passes progress on where it has grown enough, or belongs to something else: callbacks come thousands a second."""

    def __init__(self, notify: Callable[[str, float], None]) -> None:
        self._notify = notify
        self._last = ("", 0.0)

    def __call__(self, what: str, share: float) -> None:
        """Take a share of something, 0 to 1."""
        was, done = self._last
        if what != was or share >= done + _SHARE_STEP or share >= 1.0 > done:
            self._last = (what, share)
            self._notify(what, share)


def read_generating(model: Path) -> ModelFacts:
    """Read the header of a model that is to generate.

    Raises:
        BadModelFile: the file is missing, no GGUF, truncated or hostile.
        ConfigInvalid: the model has no next token.
    """
    return generating(read_facts(model))


def generating(facts: ModelFacts) -> ModelFacts:
    """Refuse a model that is not to generate.

    Raises:
        ConfigInvalid: the model has no next token.
    """
    if facts.is_encoder_only or facts.is_diffusion:
        kind = "an encoder" if facts.is_encoder_only else "a diffusion model"
        raise ConfigInvalid("model", f"{facts.name} ({kind})", "a model that generates one token after another")
    return facts


def try_on_servers(prober: Prober, facts: ModelFacts, target: Placement, emit: Callable[[JobEvent], None]) -> None:
    """Try a target of a later switch on RPC servers, before a model lies on them; the verdict is remembered.

    A server serves one client at a time: once our model lies on it, a trial in a child gets no answer.
    """
    emit(Progress("trying", None, f"{target.mode.value} mode on the RPC servers, in a child process"))
    prober(facts.path, target, facts)


def reading_placement(request: RunRequest) -> Placement:
    """Give the placement that reads the prompt, with the least chunk where the largest is still to be found."""
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
        facts: what the model's header says.
        devices: with the memory that is free now, before anything is loaded; the host is added.
        reserve: asks the library what contexts of several sizes would take.

    Raises:
        Refused: less than the least chunk; both numbers and what is lacking.
    """
    reading = reading_placement(request)
    limit = min(request.prompt_batch or MAX_CHUNK, reading.n_ctx or facts.n_ctx_train or MAX_CHUNK)
    reserved = reserve(reading, sizes_of_chunks(reading, facts, _ASKED)).reservations
    host = DeviceFacts(HOST_POOL, "cpu", host_memory().available)
    chunk = answer_chunk(Known(facts, (*devices, host), {reading.mode: reserved}), reading, limit)
    if chunk.refused:
        raise Refused((Reason(DOES_NOT_FIT, _too_small(chunk, limit)),))
    return dataclasses.replace(reading, n_ubatch=chunk.n_ubatch, n_batch=max(reading.n_batch, chunk.n_ubatch))


def _too_small(chunk: Chunk, limit: int) -> str:
    why = f": {chunk.limited_by.text}" if chunk.limited_by is not None else ""
    return (
        f"a prompt chunk of {chunk.n_ubatch} tokens is the most that every device can lend and {min(MIN_CHUNK, limit)} "
        f"are wanted{why}; free memory there, shorten the context (-c), use another split, or name a size (-pub N)"
    )
