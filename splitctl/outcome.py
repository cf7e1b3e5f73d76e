"""How a switch ended: one frozen object, the same in the API, on the command line and in the events.

Law 4 of the switch lives in the types: requested and effective are two placements, each mode read from its own.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splitctl.errors import Reason
from splitctl.placement import Placement, flag, word

if TYPE_CHECKING:
    from collections.abc import Mapping

    from splitctl.placement import SplitMode


class Proof(Enum):
    """How a restored state is proved before the session serves from it."""

    BYTES = "bytes"
    POSITIONS = "positions"
    OFF = "off"


class Route(Enum):
    """Where a switch builds its target, and who does the work; a session that is not hosted goes in place."""

    AUTO = "auto"
    """Beside what serves, where both fit; else in place."""
    BESIDE = "beside"
    """In a second worker, while the first one serves; refused where both do not fit."""
    IN_PLACE = "in-place"
    """In the worker that serves, which frees the old placement first: native where that can be, else composed."""
    NATIVE = "native"
    """In place by the library's own call; refused where the build, the change or the session does not allow it."""
    COMPOSED = "composed"
    """In place by this program's sequence of calls."""

    @property
    def may_be_beside(self) -> bool:
        """Whether a second worker may build the target."""
        return self in {Route.AUTO, Route.BESIDE}


@dataclass(frozen=True, slots=True)
class SwitchOptions:
    """How a switch is to be done.

    Attributes:
        proof: how the restored state is proved.
        convert: whether the carry may be converted; False refuses a target that needs it.
        force: go on even if a trial in a child process failed, or memory seems too small.
        via: where the target is built, and by whom.
    """

    proof: Proof = Proof.BYTES
    convert: bool = True
    force: bool = False
    via: Route = Route.AUTO

    def __post_init__(self) -> None:
        """Take words for enums; raises ConfigInvalid for what is neither."""
        object.__setattr__(self, "proof", word("proof", self.proof, Proof))
        object.__setattr__(self, "via", word("via", self.via, Route))
        flag("convert", self.convert)
        flag("force", self.force)


class WeightsTier(Enum):
    """Where a switch takes the weights from."""

    AUTO = "auto"
    """Whichever pays: never the tier of an outcome."""
    FILE = "file"
    """The library loads the file again."""
    PINNED = "pinned"
    """A copy in host memory that the devices read without a detour."""
    RESIDENT = "resident"
    """Both placements stay on the devices; a switch moves the state alone."""


class Stage(Enum):
    """Where a session is; in the first two of a switch, CHECKING and QUIESCING, it still serves."""

    SERVING = "serving"
    CHECKING = "checking"
    QUIESCING = "quiescing"
    SAVING = "saving"
    SEALING = "sealing"
    FREEING = "freeing"
    PLACING = "placing"
    BUILDING = "building"
    RESTORING = "restoring"
    SWITCHING_NATIVELY = "switching_natively"
    PROVING = "proving"
    TRIAL = "trial"
    RELEASING = "releasing"
    PLACING_OLD = "placing_old"
    BUILDING_OLD = "building_old"
    RESTORING_OLD = "restoring_old"
    PROVING_OLD = "proving_old"
    RECOMPUTING = "recomputing"
    PARKING = "parking"
    PARKED = "parked"
    CLOSED = "closed"


Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
"""What a JSON document can hold."""


DOES_NOT_FIT = "does-not-fit"
"""The code of reasons for want of memory, on a device or for the carry."""

PROBE_INCONCLUSIVE = "probe-inconclusive"
"""The code of the reason that a trial in a child process came to no verdict, which is not remembered."""


class SwitchStatus(Enum):
    """How a switch ended."""

    SWITCHED = "switched"
    UNCHANGED = "unchanged"
    FELL_BACK = "fell_back"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    PARKED = "parked"


class Via(Enum):
    """Who did the work: our sequence of library calls, the library's own call, or a second worker beside the first."""

    COMPOSED = "composed"
    NATIVE = "native"
    BESIDE = "beside"


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Time spent in each stage, ms; None where the stage did not run, or the library's own call hides it."""

    quiescing: float | None = None
    checking: float | None = None
    saving: float | None = None
    sealing: float | None = None
    freeing: float | None = None
    placing: float | None = None
    building: float | None = None
    restoring: float | None = None
    switching_natively: float | None = None
    proving: float | None = None


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """The most memory that one device held during the switch.

    Args:
        index: position of the device in the placement, from 0.
        device: its name in the library ("CUDA0").
        n_bytes: peak over everything on the device; None where it cannot be asked, or was asked before the switch.
    """

    index: int
    device: str
    n_bytes: int | None

    def to_json(self) -> dict[str, Json]:
        """Give the object of the contract: keys index, device and bytes."""
        return {"index": self.index, "device": self.device, "bytes": self.n_bytes}


@dataclass(frozen=True, slots=True)
class SwitchOutcome:
    """How a switch ended.

    Args:
        status: how it ended.
        requested_placement: what was asked for, never overwritten.
        effective_placement: what the session serves in now; None when it is parked.
        reason: one sentence; empty only for switched and unchanged.
        reasons: each reason by itself.
        stage: where it failed or was refused or cancelled; None when nothing went wrong.
        confirmed: the first decode in the new mode has succeeded.
        recomputed: the history was read again from its tokens: same positions, not the same bytes.
        stages_ms: time of each stage, ms.
        total_ms: the whole switch, ms.
        fallback_ms: the part of it that went into falling back, ms; None when it did not.
        state_bytes: size of the saved state, bytes; None when nothing was saved.
        weight_bytes: size of the placed weights, bytes; None when nothing was placed.
        n_sequences: sequences carried.
        n_tokens: tokens carried, over all sequences.
        conversions: what was converted in the carry, one phrase each.
        via: who did the work.
        via_reason: why it was not a second worker beside the first, nor the library's own call; empty where it was, or
            nobody asked for one, or the build has no such call.
        peak_device_bytes: one entry a device.
        pause_ms: how long no token could be generated, ms; None when nothing stood still.
        weights: where the weights came from; None when nothing was placed.
        weights_reason: why it was not the tier that was asked for; empty where it was.
        carry_pinned: whether the state went through pinned memory; None without a state, or a device that gains by it.
        carry_pinned_reason: why it did not.
        ahead_bytes: bytes of the state that crossed before the streams stood still; None without a second worker.
        ahead_reason: why none of several sequences could.

    Raises:
        ValueError: the fields contradict each other.
    """

    status: SwitchStatus
    requested_placement: Placement
    effective_placement: Placement | None
    reason: str = ""
    reasons: tuple[Reason, ...] = ()
    stage: Stage | None = None
    confirmed: bool = False
    recomputed: bool = False
    stages_ms: StageTimes = StageTimes()
    total_ms: float = 0.0
    fallback_ms: float | None = None
    state_bytes: int | None = None
    weight_bytes: int | None = None
    n_sequences: int = 0
    n_tokens: int = 0
    conversions: tuple[str, ...] = ()
    via: Via = Via.COMPOSED
    via_reason: str = ""
    peak_device_bytes: tuple[DevicePeak, ...] = ()
    pause_ms: float | None = None
    weights: WeightsTier | None = None
    weights_reason: str = ""
    carry_pinned: bool | None = None
    carry_pinned_reason: str = ""
    ahead_bytes: int | None = None
    ahead_reason: str = ""

    def __post_init__(self) -> None:
        parked = self.status is SwitchStatus.PARKED
        went_well = self.status in {SwitchStatus.SWITCHED, SwitchStatus.UNCHANGED}
        wrong = ""
        if parked != (self.effective_placement is None):
            wrong = "a parked session serves in no placement, every other one serves in some"
        elif self.status is SwitchStatus.SWITCHED and self.effective is not self.requested:
            wrong = "a switch that succeeded serves in the requested mode"
        elif not went_well and not self.reason:
            wrong = "what did not succeed has a reason"
        elif went_well and self.stage is not None:
            wrong = "what succeeded failed at no stage"
        elif self.confirmed and not went_well:
            wrong = "only the requested placement can be confirmed"
        if wrong:
            raise ValueError(f"contradiction in an outcome of status {self.status.value}: {wrong}")

    @property
    def requested(self) -> SplitMode:
        """The split mode that was asked for."""
        return self.requested_placement.mode

    @property
    def effective(self) -> SplitMode | None:
        """The split mode that the session serves in; None when it is parked."""
        return None if self.effective_placement is None else self.effective_placement.mode

    def to_json(self) -> dict[str, Json]:
        """Give the object of the contract, fit for ``json.dumps``: every key, in its order."""
        return {
            "status": self.status.value,
            "requested": to_plain(self.requested),
            "effective": to_plain(self.effective),
            "requested_placement": to_plain(self.requested_placement),
            "effective_placement": to_plain(self.effective_placement),
            "confirmed": self.confirmed,
            "recomputed": self.recomputed,
            "reason": self.reason,
            "reasons": to_plain(self.reasons),
            "stage": to_plain(self.stage),
            "stages_ms": to_plain(self.stages_ms),
            "total_ms": self.total_ms,
            "fallback_ms": self.fallback_ms,
            "state_bytes": self.state_bytes,
            "weight_bytes": self.weight_bytes,
            "n_sequences": self.n_sequences,
            "n_tokens": self.n_tokens,
            "conversions": list(self.conversions),
            "via": self.via.value,
            "via_reason": self.via_reason,
            "peak_device_bytes": [one.to_json() for one in self.peak_device_bytes],
            "pause_ms": self.pause_ms,
            "weights": to_plain(self.weights),
            "weights_reason": self.weights_reason,
            "carry_pinned": self.carry_pinned,
            "carry_pinned_reason": self.carry_pinned_reason,
            "ahead_bytes": self.ahead_bytes,
            "ahead_reason": self.ahead_reason,
            "stages_gb_s": self._rates(),
        }

    def _repr_html_(self) -> str:
        """Show the outcome as a table in a notebook: how it ended, why, and where the time went."""
        from html import escape  # noqa: PLC0415 - its names of characters are loaded for nothing else

        plain = self.to_json()
        title = f"switch to {self.requested.value}: {self.status.value}"
        stages, sums = table_rows(plain)
        said = [("serves in", "nothing: it is parked" if self.effective is None else self.effective.value)]
        said += [("reason", self.reason)] if self.reason else []
        said += [("converted", one) for one in self.conversions]

        def row(*cells: str, tag: str = "td") -> str:
            return "<tr>" + "".join(f"<{tag}>{escape(one)}</{tag}>" for one in cells) + "</tr>"

        wide = "".join(
            f'<tr><td>{escape(name)}</td><td colspan="2" style="text-align: left">{escape(text)}</td></tr>'
            for name, text in said
        )
        times = "".join([row("stage", "time", "GB/s", tag="th"), *(row(*one) for one in stages)])
        whole = "".join(row(*one, "") for one in sums)
        return f"<table><caption>{escape(title)}</caption><tbody>{wide}{times}{whole}</tbody></table>"

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> SwitchOutcome:
        """Read what `to_json` gave, of another release too: what is left out has its default, what is new is left out.

        Raises:
            ValueError, TypeError, KeyError: it is no outcome.
            PlacementInvalid: a placement in it is none.
        """
        own = {one.name for one in fields(cls)} - {"requested_placement", "effective_placement"}
        given = {name: _read(name, value) for name, value in plain.items() if name in own}
        effective = plain.get("effective_placement")
        return cls(
            **given,
            requested_placement=_placement(plain["requested_placement"]),
            effective_placement=None if effective is None else _placement(effective),
        )

    def _rates(self) -> dict[str, Json]:
        """Say how fast each stage moved what it moves, GB/s (1e9 bytes); None where it moved nothing."""
        n_state = None if self.state_bytes is None else self.state_bytes - (self.ahead_bytes or 0)
        moved: dict[str, int | None] = dict.fromkeys(("saving", "sealing", "restoring", "proving"), n_state)
        moved["switching_natively"] = self.weight_bytes
        moved["placing"] = self.weight_bytes if self.weights is not WeightsTier.RESIDENT else None
        rates: dict[str, Json] = {}
        for one in fields(StageTimes):
            ms, n_bytes = getattr(self.stages_ms, one.name), moved.get(one.name)
            if one.name in moved:
                rates[one.name] = n_bytes / ms / 1e6 if ms and n_bytes else None
        return rates


def mib(n_bytes: float | None) -> str:
    """Show a size in bytes, for example "37.5 MiB"; "-" when it is not known."""
    return "-" if n_bytes is None else f"{n_bytes / _MIB:,.1f} MiB"


def ms(value: float | None) -> str:
    """Show a duration, for example "12.3 ms"; "-" when it is not known."""
    return "-" if value is None else f"{value:,.1f} ms"


_MIB = 1024 * 1024


def table_rows(outcome: Mapping[str, Any]) -> tuple[list[tuple[str, str, str]], list[tuple[str, str]]]:
    """Lay out the outcome object of the contract for people.

    Returns:
        For each stage its name, time and rate; then names and values of the whole.
    """
    rates = outcome.get("stages_gb_s") or {}
    stages = [
        (stage, ms(value), "" if rates.get(stage) is None else f"{rates[stage]:,.2f}")
        for stage, value in (outcome.get("stages_ms") or {}).items()
        if stage != Stage.SWITCHING_NATIVELY.value or value is not None
    ]
    sums = [("total", ms(outcome.get("total_ms")))]
    if outcome.get("fallback_ms") is not None:
        sums.append(("of it falling back", ms(outcome["fallback_ms"])))
    if outcome.get("pause_ms") is not None:
        sums.append(("pause", ms(outcome["pause_ms"])))
    sums.append(("state", mib(outcome.get("state_bytes"))))
    if outcome.get("ahead_bytes"):
        sums.append(("of it before the pause", mib(outcome["ahead_bytes"])))
    if outcome.get("carry_pinned") is not None:
        sums.append(("state through", "pinned memory" if outcome["carry_pinned"] else "unpinned memory"))
    sums.append(("weights", mib(outcome.get("weight_bytes"))))
    if outcome.get("weights") is not None:
        sums.append(("weights from", str(outcome["weights"])))
    sums.append(("tokens carried", str(outcome.get("n_tokens"))))
    return stages, sums


_ENUMS: dict[str, type[Enum]] = {"status": SwitchStatus, "stage": Stage, "via": Via, "weights": WeightsTier}


def _read(name: str, value: Any) -> Any:
    """Read a field of an outcome as `SwitchOutcome.to_json` writes it."""
    if name in _ENUMS:
        return None if value is None else _ENUMS[name](value)
    match name:
        case "reasons":
            return tuple(Reason(one["code"], one["text"]) for one in value)
        case "stages_ms":
            return StageTimes(**_known(StageTimes, value))
        case "peak_device_bytes":
            return tuple(DevicePeak(one["index"], one["device"], one["bytes"]) for one in value)
        case "conversions":
            return tuple(value)
    return value


def _placement(plain: Mapping[str, Any]) -> Placement:
    return Placement.from_json(_known(Placement, plain))


def _known(kind: type, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what a later release has added."""
    return {one.name: plain[one.name] for one in fields(kind) if one.name in plain}


def to_plain(value: object) -> Json:
    """Turn a value made of dataclasses, enums and tuples into what JSON can hold.

    An enum gives its value, a dataclass an object of its fields, a path its text; containers are fresh.

    Raises:
        TypeError: something in it has no JSON form.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Enum):
        return to_plain(value.value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [to_plain(one) for one in value]
    if isinstance(value, dict):
        return {str(key): to_plain(one) for key, one in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: to_plain(getattr(value, one.name)) for one in fields(value)}
    raise TypeError(f"{type(value).__name__} has no JSON form")
