"""What a worker is asked and what it answers: one message a line, both ways, written and read by `wire`.

Laws:
    1. The parent writes one request line to the worker's stdin, then control lines and orders of a hosted session. End
       of file there means that the parent is gone: the worker ends at once.
    2. The worker answers on a descriptor of its own, never on stdout, because libraries print there.
    3. The last event of a request is a Result or a Failure; after it the worker ends.

In every request ``model`` is the GGUF file, ``library`` the library file, or None to look for one, and ``rpc`` the RPC
servers whose devices are added, HOST:PORT each. A ``body`` is a JSON object.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from splitctl.carry.sampling import SamplerSpec
from splitctl.errors import (
    BadModelFile,
    Busy,
    Cancelled,
    ConfigInvalid,
    ContextFull,
    FileChanged,
    Parked,
    Refused,
    SplitctlError,
)
from splitctl.ipc.wire import kinds_of
from splitctl.outcome import SwitchOptions, WeightsTier
from splitctl.placement import Placement, SplitMode

#: A longer line is no message of ours [bytes].
MAX_LINE_BYTES = 256 * 1024 * 1024

#: The control line that asks a worker to stop at the next point where it can.
CANCEL = b'{"control":"cancel"}\n'


class Fault(enum.Enum):
    """Whose fault a failure is; the command line maps it to its exit code."""

    CONFIG = "config"
    MODEL = "model"
    LIBRARY = "library"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    PARKED = "parked"
    BUSY = "busy"
    INTERNAL = "internal"


_FAULTS: Mapping[type[Exception], Fault] = {
    Cancelled: Fault.CANCELLED,
    Busy: Fault.BUSY,
    Parked: Fault.PARKED,
    Refused: Fault.REFUSED,
    ConfigInvalid: Fault.CONFIG,
    ContextFull: Fault.CONFIG,
    BadModelFile: Fault.MODEL,
    FileChanged: Fault.MODEL,
}


def fault_of(error: BaseException) -> Fault:
    """Say whose fault an error is; INTERNAL for all that are not listed."""
    return next((fault for kind, fault in _FAULTS.items() if isinstance(error, kind)), Fault.INTERNAL)


@dataclass(eq=False, repr=False)
class RequestFailed(SplitctlError):
    """Another process did not do what it was asked to, or was lost over it: a worker, or the host of a session.

    Attributes:
        fault: whose fault.
        name: the error's class name there.
        message: one line for a person.
        body: what is known besides.
    """

    fault: Fault
    name: str
    message: str
    body: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class DevicesRequest:
    """List the devices that the library offers."""

    library: Path | None
    rpc: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DoctorRequest:
    """Say which library would be used, why, and what it can do.

    Attributes:
        model: of which it is said what is known of the library's own call; None: of none.
    """

    library: Path | None
    rpc: tuple[str, ...] = ()
    model: Path | None = None


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Read a prompt, switch when the prompt's mode differs from the generation's, and generate.

    Attributes:
        chat: whether the model's chat template is applied to the prompt.
        n_predict: most tokens to generate; negative means until the model ends or the context is full.
        placement: where and how to generate.
        prompt_mode: the split mode for the prompt, or None for the placement's own.
        prompt_batch: most tokens of one decode of the prompt, or None for the placement's own.
        prompt_ubatch: most tokens of one computed batch of the prompt; 0 for the largest that every device can lend,
            None for the placement's own.
        sampler: how tokens are picked, and the texts that end the generation.
        sampler_named: the fields of it that were asked for; a restored session's own count for the others.
        options: how the session switches; `force` is for its opening too.
        restore: a carry, or a session or slot file of the library, that the session begins with; None: empty.
        save: where the session is saved at the end; None: nowhere.
        weights: where the switch takes the weights from.
    """

    model: Path
    library: Path | None
    prompt: str
    chat: bool
    n_predict: int
    placement: Placement
    prompt_mode: SplitMode | None
    sampler: SamplerSpec
    rpc: tuple[str, ...] = ()
    options: SwitchOptions = field(default_factory=SwitchOptions)
    restore: Path | None = None
    save: Path | None = None
    prompt_batch: int | None = None
    prompt_ubatch: int | None = None
    sampler_named: tuple[str, ...] = ()
    weights: WeightsTier = WeightsTier.FILE


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """Try one placement on one model and compare it with layer mode.

    Attributes:
        of_copy: compare a load from a copy of the weights with one from the file instead, both in the placement.
        moved_from: let the library move a context from there to the placement and back instead, by its own call.
    """

    model: Path
    library: Path | None
    placement: Placement
    rpc: tuple[str, ...] = ()
    of_copy: bool = False
    moved_from: Placement | None = None


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """Measure what a build does with one placement: a cell of `verify`.

    Attributes:
        text: what is read.
        n_tokens: most tokens of it.
        n_generate: tokens generated greedily after it.
        reference: the logits of the reference mode: float32 rows, one a token; None for the reference itself.
        twin: those of the reference mode with the same cache types; None where there are none.
        keep: where this one's logits go; None: nowhere.
        control: how far what it is judged by is from itself in another order of floats, NMSE.
    """

    model: Path
    library: Path | None
    placement: Placement
    rpc: tuple[str, ...]
    text: str
    n_tokens: int
    n_generate: int
    reference: Path | None = None
    twin: Path | None = None
    keep: Path | None = None
    control: float = 0.0


@dataclass(frozen=True, slots=True)
class ReserveRequest:
    """Tell the library and its devices, and what contexts would take, without loading anything.

    Attributes:
        placement: the placement; the sizes of its context are replaced.
        sizes: context, batch and micro-batch of each, tokens; none: the library and its devices alone.
    """

    model: Path
    library: Path | None
    placement: Placement
    sizes: tuple[tuple[int, int, int], ...]
    rpc: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """Open a session in one placement and time what is asked: every line after this one is a Measure, or the Close.

    Attributes:
        weights: where its switches take the weights from; AUTO is no such place.
    """

    model: Path
    library: Path | None
    placement: Placement
    rpc: tuple[str, ...] = ()
    weights: WeightsTier = WeightsTier.FILE


@dataclass(frozen=True, slots=True)
class HostRequest:
    """Serve a hosted session: every line after this one is an order (`orders.ORDERS`) or a control line.

    Attributes:
        arena_fds: descriptors of the shared memory that carries are sealed in, one an arena.
        weights_fd: descriptor of the shared memory for a copy of the weights; None where none is wanted.
    """

    model: Path
    library: Path | None
    rpc: tuple[str, ...]
    arena_fds: tuple[int, ...]
    weights_fd: int | None = None


JobRequest = (
    DevicesRequest | DoctorRequest | RunRequest | ProbeRequest | VerifyRequest | ReserveRequest | BenchRequest
    | HostRequest
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the work is.

    Attributes:
        stage: what is being done: a word such as "loading", "prompt", or a stage of the switch.
        done: how much of it, 0 to 1, or None where that is not known.
        note: a line for a person; may be empty.
    """

    stage: str
    done: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of the answer, as generated: UTF-8 when joined, a character may be split over two pieces."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Partial:
    """What is known of the result so far; it stands in for the result if the worker dies."""

    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """The answer; the last event."""

    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Failure:
    """The work ended in an error; the last event.

    Attributes:
        name: the error's class name.
        message: one line for a person: what, and what to do.
        body: what is known besides, such as the part of an answer that exists; JSON object.
    """

    fault: Fault
    name: str
    message: str
    body: dict[str, Any] = field(default_factory=dict)


JobEvent = Progress | Piece | Partial | Result | Failure

REQUESTS = kinds_of(JobRequest)
