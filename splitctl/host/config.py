"""What a host serves, and the words for what it is doing."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path

from splitctl.ipc.orders import AdapterFile
from splitctl.outcome import WeightsTier
from splitctl.placement import Placement
from splitctl.planning.learned import Costs
from splitctl.planning.policy import Settings


class HostState(enum.Enum):
    """What a hosted session is doing."""

    LOADING = "loading"
    SERVING = "serving"
    SWITCHING = "switching"
    RECOVERING = "recovering"
    PARKED = "parked"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """When a host switches by itself.

    Attributes:
        costs: how fast the modes are; None: it never does.
        source: where that is from, for a person.
        settings: the bounds.
    """

    costs: Costs | None = None
    source: str = ""
    settings: Settings = field(default_factory=Settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConfig:
    """What a host serves.

    Attributes:
        model: the GGUF file.
        library: the library file, or None to look for one.
        placement: where and how to begin.
        adapters: LoRA files.
        rpc: RPC servers, HOST:PORT each.
        force: open even if a trial in a child process failed.
        name: the session's name.
        deadline_s: longest silence of a worker that has work, seconds; None: any.
        checkpoint_s: how often the session is saved while it changes, seconds; None: never.
        resume: a saved session to begin with; None: empty.
        weights: where switches take the weights from.
        policy: when the session switches by itself.
        access_log: the file that gets a line for each answer; None: none does.
        state_folder: where sessions are saved and parked, as NAME.safetensors and NAME.parked.safetensors.
    """

    model: Path
    library: Path | None = None
    placement: Placement = field(default_factory=Placement)
    adapters: tuple[AdapterFile, ...] = ()
    rpc: tuple[str, ...] = ()
    force: bool = False
    name: str = "default"
    deadline_s: float | None = 60.0
    checkpoint_s: float | None = None
    resume: Path | None = None
    weights: WeightsTier = WeightsTier.FILE
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    access_log: Path | None = None
    state_folder: Path

    @property
    def save_path(self) -> Path:
        """Where the session is saved when it stops, and at checkpoints."""
        return self.state_folder / f"{self.name}.safetensors"

    @property
    def park_path(self) -> Path:
        """Where it is parked."""
        return self.state_folder / f"{self.name}.parked.safetensors"
