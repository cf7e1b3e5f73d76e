"""What `run` and `serve` need before a session opens: the model's header, trials in child processes, progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from splitctl.errors import ConfigInvalid
from splitctl.ipc.jobs import JobEvent, Progress
from splitctl.ipc.probes import Prober, verdicts_file
from splitctl.model.facts import ModelFacts, read_facts
from splitctl.probing import VerdictCache

if TYPE_CHECKING:
    from llama_native import Library
    from splitctl.placement import Placement

_SHARE_STEP = 0.01
"""Least progress that is passed on."""


class Steps:
    """Passes progress on where it has grown enough, or belongs to something else: callbacks come thousands a second."""

    def __init__(self, notify: Callable[[str, float], None]) -> None:
        """Pass on to ``notify``."""
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
    facts = read_facts(model)
    if facts.is_encoder_only or facts.is_diffusion:
        kind = "an encoder" if facts.is_encoder_only else "a diffusion model"
        raise ConfigInvalid("model", f"{facts.name} ({kind})", "a model that generates one token after another")
    return facts


def prober_of(
    library: Library, env: Mapping[str, str], rpc: tuple[str, ...], is_cancelled: Callable[[], bool]
) -> Prober:
    """Return a prober that tries placements in child processes and keeps verdicts in the user's cache folder."""
    return Prober(
        library=library.path,
        env=env,
        cache=VerdictCache(verdicts_file()),
        device_names=tuple(device.name for device in library.devices(memory=False)),
        rpc=rpc,
        is_cancelled=is_cancelled,
    )


def try_on_servers(prober: Prober, facts: ModelFacts, target: Placement, emit: Callable[[JobEvent], None]) -> None:
    """Try a target of a later switch on RPC servers, before a model lies on them; the verdict is remembered.

    A server serves one client at a time: once our model lies on it, a trial in a child gets no answer.
    """
    emit(Progress("trying", None, f"{target.mode.value} mode on the RPC servers, in a child process"))
    prober(facts.path, target, facts)
