"""What the rules look at beside the model's facts, and what they say: plain frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from splitctl.errors import Reason
from splitctl.switching import tables


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to say about a placement.

    Args:
        code: stable name for programs.
        text: one sentence with the fact, the limit and the way out.
        blocking: whether the placement is refused for it; otherwise it is a warning.
        settled_by_probe: whether a trial in a child process can lift it.
    """

    code: str
    text: str
    blocking: bool = True
    settled_by_probe: bool = False

    @property
    def reason(self) -> Reason:
        """The finding as an outcome carries it."""
        return Reason(self.code, self.text)


@dataclass(frozen=True, slots=True)
class BuildFacts:
    """What is known about the library.

    Args:
        version: package and version, as discovery found them.
        max_devices: entries of a tensor split.
    """

    version: str
    max_devices: int = 16

    @property
    def number(self) -> int | None:
        """llama.cpp's build number, where the version tells it."""
        return tables.build_number(self.version)

    @property
    def measured(self) -> bool:
        """Whether the tables were filled by watching this build."""
        return tables.is_measured(self.version)


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What is known about the machine.

    Args:
        devices: names of the library's devices, in its order, with their kind ("cpu", "gpu", "igpu", "accel", "meta").
        mem_available: MemAvailable of the host, bytes; None when it is not known.
    """

    devices: Mapping[str, str]
    mem_available: int | None = None


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """What the session holds.

    Args:
        tokens: tokens held by each sequence in use, by sequence id.
        state_bytes: size that the library gives for the state, bytes; None before it was asked.
        pending_shift: a context shift that no decode has applied yet.
        sealed_bytes: room that is mapped for the carry already, bytes.
        n_adapters: adapters that it loads wherever it goes.
        n_encoder_tokens: tokens of all sequences that an encoder reads again wherever it goes.
    """

    tokens: Mapping[int, int]
    state_bytes: int | None = None
    pending_shift: bool = False
    sealed_bytes: int = 0
    n_adapters: int = 0
    n_encoder_tokens: int = 0

    @property
    def n_tokens(self) -> int:
        """Tokens held, over all sequences."""
        return sum(self.tokens.values())
