"""What a worker is asked and what it answers: one JSON object a line, both ways.

Laws:
    1. The parent writes one request line to the worker's stdin, then control lines. End of file there means that the
       parent is gone: the worker ends at once.
    2. The worker answers on a descriptor of its own, never on stdout, because libraries print there.
    3. A line that is too long, is not JSON, or is not one of these objects raises ProtocolBroken and nothing else.
    4. The last event of a request is a Result or a Failure; after it the worker ends.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitctl.carry.sequence import SamplerSpec
from splitctl.errors import ConfigInvalid, SplitctlError
from splitctl.placement import Placement, SplitMode

#: A longer line is no message of ours [bytes].
MAX_LINE_BYTES = 256 * 1024 * 1024

#: The control line that asks a worker to stop at the next point where it can.
CANCEL = b'{"control":"cancel"}\n'


class ProtocolBroken(SplitctlError):
    """A line between the two processes that is none of the messages."""

    def __init__(self, found: str, wanted: str) -> None:
        """Build from the line.

        Args:
            found: the start of the line, or what is wrong with it.
            wanted: what it should have been, as a phrase.
        """
        self.found = found
        self.wanted = wanted
        super().__init__(found, wanted)

    def __str__(self) -> str:
        """Name both."""
        return f"a message between splitctl and its worker is {self.found}; wanted: {self.wanted}; reinstall splitctl"


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


@dataclass(frozen=True, slots=True)
class DevicesRequest:
    """List the devices that the library offers.

    Attributes:
        library: the library file, or None to look for one.
        rpc: RPC servers whose devices are added, HOST:PORT each.
    """

    library: Path | None
    rpc: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DoctorRequest:
    """Say which library would be used, why, and what it can do.

    Attributes:
        library: the library file, or None to look for one.
        rpc: RPC servers whose devices are added, HOST:PORT each.
    """

    library: Path | None
    rpc: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Read a prompt, switch when the prompt's mode differs from the generation's, and generate.

    Attributes:
        model: the GGUF file.
        library: the library file, or None to look for one.
        prompt: the text to read.
        chat: whether the model's chat template is applied to it.
        n_predict: most tokens to generate; negative means until the model ends or the context is full.
        placement: where and how to generate.
        prompt_mode: the split mode for the prompt, or None for the placement's own.
        prompt_batch: most tokens of one decode of the prompt, or None for the placement's own.
        prompt_ubatch: most tokens of one computed batch of the prompt; 0 for the largest that every device can lend,
            None for the placement's own.
        sampler: how tokens are picked, and the texts that end the generation.
        proof: how the restored state is proved after a switch: bytes, positions or off.
        force: whether a switch goes on in spite of warnings that only advise against it.
        rpc: RPC servers whose devices are added, HOST:PORT each.
        convert: whether the carry may be converted for the placement that generates.
        restore: a carry, or a session or slot file of the library, that the session begins with; None: empty.
        save: where the session is saved at the end; None: nowhere.
    """

    model: Path
    library: Path | None
    prompt: str
    chat: bool
    n_predict: int
    placement: Placement
    prompt_mode: SplitMode | None
    sampler: SamplerSpec
    proof: str
    force: bool
    rpc: tuple[str, ...] = ()
    convert: bool = True
    restore: Path | None = None
    save: Path | None = None
    prompt_batch: int | None = None
    prompt_ubatch: int | None = None


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """Try one placement on one model and compare it with layer mode.

    Attributes:
        model: the GGUF file.
        library: the library file, or None to look for one.
        placement: the placement to try.
        rpc: RPC servers whose devices are added, HOST:PORT each.
    """

    model: Path
    library: Path | None
    placement: Placement
    rpc: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """Measure what a build does with one placement: a cell of `verify`.

    Attributes:
        model: the GGUF file.
        library: the library file, or None to look for one.
        placement: the placement to measure.
        rpc: RPC servers whose devices are added, HOST:PORT each.
        text: what is read.
        n_tokens: most tokens of it.
        n_generate: tokens generated greedily after it.
        reference: the logits of the reference mode: float32 rows, one a token; None for the reference itself.
        twin: those of the reference mode with the same cache types; None where there are none.
        keep: where this one's logits go; None: nowhere.
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


@dataclass(frozen=True, slots=True)
class ReserveRequest:
    """Tell the library and its devices, and what contexts would take, without loading anything.

    Attributes:
        model: the GGUF file.
        library: the library file, or None to look for one.
        placement: the placement; the sizes of its context are replaced.
        sizes: context, batch and micro-batch of each, tokens; none: the library and its devices alone.
        rpc: RPC servers whose devices are added, HOST:PORT each.
    """

    model: Path
    library: Path | None
    placement: Placement
    sizes: tuple[tuple[int, int, int], ...]
    rpc: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HostRequest:
    """Serve a hosted session: every line after this one is an order (`orders.ORDERS`) or a control line.

    Attributes:
        model: the GGUF file.
        library: the library file, or None to look for one.
        rpc: RPC servers whose devices are added, HOST:PORT each.
        arena_fds: descriptors of the shared memory that carries are sealed in, one an arena.
    """

    model: Path
    library: Path | None
    rpc: tuple[str, ...]
    arena_fds: tuple[int, ...]


JobRequest = DevicesRequest | DoctorRequest | RunRequest | ProbeRequest | VerifyRequest | ReserveRequest | HostRequest


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
    """Bytes of the answer, as generated; a character may be split over two pieces.

    Attributes:
        data: raw bytes, UTF-8 when joined.
    """

    data: bytes


@dataclass(frozen=True, slots=True)
class SessionReport:
    """What a hosted session's worker tells, one of `orders.REPORTS`.

    Attributes:
        body: JSON object, as `wire.to_object` makes it.
    """

    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Partial:
    """What is known of the result so far; it stands in for the result if the worker dies.

    Attributes:
        body: JSON object.
    """

    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """The answer; the last event.

    Attributes:
        body: JSON object.
    """

    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Failure:
    """The work ended in an error; the last event.

    Attributes:
        fault: whose fault.
        kind: the error's class name.
        message: one line for a person: what, and what to do.
        body: what is known besides, such as the part of an answer that exists; JSON object.
    """

    fault: Fault
    kind: str
    message: str
    body: dict[str, Any] = dataclasses.field(default_factory=dict)


JobEvent = Progress | Piece | Partial | SessionReport | Result | Failure

_REQUESTS: Mapping[str, type[JobRequest]] = {
    "devices": DevicesRequest,
    "doctor": DoctorRequest,
    "run": RunRequest,
    "probe": ProbeRequest,
    "verify": VerifyRequest,
    "reserve": ReserveRequest,
    "host": HostRequest,
}
_EVENTS: Mapping[str, type[JobEvent]] = {
    "progress": Progress,
    "piece": Piece,
    "partial": Partial,
    "report": SessionReport,
    "result": Result,
    "failure": Failure,
}
_REQUEST_NAMES = {kind: name for name, kind in _REQUESTS.items()}
_EVENT_NAMES = {kind: name for name, kind in _EVENTS.items()}


def encode_request(request: JobRequest) -> bytes:
    """Write a request as one line.

    Args:
        request: any of the requests.

    Returns:
        JSON and a line feed.
    """
    return _line({"job": _REQUEST_NAMES[type(request)], **_plain(request)})


def decode_request(line: bytes) -> JobRequest:
    """Read a request line.

    Args:
        line: with or without its line feed.

    Returns:
        The request.

    Raises:
        ProtocolBroken: the line is no request.
    """
    body = _object(line)
    kind = _REQUESTS.get(str(body.pop("job", None)))
    if kind is None:
        raise ProtocolBroken(_start(line), "a request with a known job")
    try:
        return kind(**{name: _request_field(name, value) for name, value in body.items()})
    except (TypeError, ValueError, ConfigInvalid) as error:
        raise ProtocolBroken(f"a request that cannot be read ({error})", f"the fields of {kind.__name__}") from error


def encode_event(event: JobEvent) -> bytes:
    """Write an event as one line.

    Args:
        event: any of the events.

    Returns:
        JSON and a line feed.
    """
    return _line({"event": _EVENT_NAMES[type(event)], **_plain(event)})


def decode_event(line: bytes) -> JobEvent:
    """Read an event line.

    Args:
        line: with or without its line feed.

    Returns:
        The event.

    Raises:
        ProtocolBroken: the line is no event.
    """
    body = _object(line)
    kind = _EVENTS.get(str(body.pop("event", None)))
    if kind is None:
        raise ProtocolBroken(_start(line), "an event of a known kind")
    try:
        if "data" in body:
            body["data"] = base64.b64decode(body["data"], validate=True)
        if "fault" in body:
            body["fault"] = Fault(body["fault"])
        return kind(**body)
    except (TypeError, ValueError, binascii.Error) as error:
        raise ProtocolBroken(f"an event that cannot be read ({error})", f"the fields of {kind.__name__}") from error


def _plain(message: JobRequest | JobEvent) -> dict[str, Any]:
    """Turn a message's own fields into values that JSON has."""
    return {field.name: _plain_value(getattr(message, field.name)) for field in dataclasses.fields(message)}


def _plain_value(value: Any) -> Any:
    """Turn one value into one that JSON has."""
    match value:
        case Placement():
            return value.to_json()
        case SamplerSpec():
            return dataclasses.asdict(value)
        case enum.Enum():
            return value.value
        case Path():
            return str(value)
        case bytes():
            return base64.b64encode(value).decode("ascii")
        case _:
            return value


def _request_field(name: str, value: Any) -> Any:
    """Turn one plain value of a request back into the kind its field holds."""
    if name in {"model", "library", "restore", "save", "reference", "twin", "keep"}:
        return None if value is None else Path(value)
    if name == "placement":
        return Placement.from_json(value)
    if name == "prompt_mode":
        return None if value is None else SplitMode(value)
    if name in {"rpc", "arena_fds"}:
        return tuple(value)
    if name == "sizes":
        return tuple((int(n_ctx), int(n_batch), int(n_ubatch)) for n_ctx, n_batch, n_ubatch in value)
    if name == "sampler":
        return SamplerSpec(**{**value, "stop": tuple(value.get("stop", ()))})
    return value


def _line(body: Mapping[str, Any]) -> bytes:
    """Write one object as one line; JSON escapes every line feed within."""
    return json.dumps(body, ensure_ascii=True, allow_nan=True, separators=(",", ":")).encode("ascii") + b"\n"


def _object(line: bytes) -> dict[str, Any]:
    """Read one object from a line that is not too long."""
    if len(line) > MAX_LINE_BYTES:
        raise ProtocolBroken(f"{len(line)} bytes long", f"{MAX_LINE_BYTES} bytes at most")
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolBroken(_start(line), "a JSON object") from error
    if not isinstance(body, dict):
        raise ProtocolBroken(_start(line), "a JSON object")
    return body


def _start(line: bytes) -> str:
    """Show the start of a line."""
    return repr(line[:60])
