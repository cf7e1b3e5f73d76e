"""The switch as a table: a stage and an event give the next stage and the commands to carry out. Pure.

Laws:
    1. Nothing is freed before the saved state has been parsed, checked against the session and sealed with a checksum.
    2. A placement that does not fit, aborts, hangs or fails its proof leaves the session serving in the one it had.
    3. A cancel is not a failure: it ends in the old placement and is never retried.
    4. Requested and effective are two fields; status never lies about either.
    5. Between free and place no memory question is asked of the library (some builds reset the device on it).
    6. A switch waits for the token boundary (up to its timeout). A second switch meanwhile, or a call from inside a
       callback, gets Busy. Any thread may call; one lock; a forked child may not.
    7. A fallback differs from the original placement in nothing.
    8. Until TRIAL ends the sealed original is kept, also beside a converted copy.

The machine starts at the token boundary. What needs no quiet (the rules, the trial in a child process) was asked
before, while streams went on; CHECK looks once more at what may have changed since. An event is the end of the command
under way. On the way back nothing is cancelled: those commands do not see the cancel flag. A process that dies takes
its machine with it; what follows is the job of `host.recovery`.

The tables below are the machine: ``step`` looks up and keeps the record; ``drawing`` draws them for the docs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, unique
from typing import TYPE_CHECKING

from splitctl.errors import Reason
from splitctl.outcome import Stage, SwitchStatus, Via

if TYPE_CHECKING:
    from collections.abc import Mapping

    from splitctl.placement import Placement


RESTING = frozenset({Stage.SERVING, Stage.TRIAL, Stage.PARKED, Stage.CLOSED})
"""Stages in which no command is under way."""

UNTOUCHED = frozenset({Stage.CHECKING, Stage.SAVING, Stage.SEALING})
"""Stages of a switch in which the session is as it was."""

FALLING_BACK = frozenset(
    {Stage.RELEASING, Stage.PLACING_OLD, Stage.BUILDING_OLD, Stage.RESTORING_OLD, Stage.PROVING_OLD}
)
"""Stages on the way back to the original placement with the sealed carry."""


class EventKind(Enum):
    """What can happen."""

    STARTED = "started"
    DONE = "done"
    FAILED = "failed"
    REFUSED = "refused"
    UNCHANGED = "unchanged"
    DECLINED = "declined"
    CANCELLED = "cancelled"
    CLOSED = "closed"


@unique
class Command(Enum):
    """What the effects are told to do, one at a time, in order."""

    CHECK = "judge the request by what was found before, and by the rules as the session is now"
    SAVE = "copy the state out, with what each sequence carries"
    SEAL = "parse the state, check it against the session, checksum it; convert a copy where the target needs it"
    FREE = "free the context and the model, or leave them where they are"
    PLACE = "load the model in the requested placement, or take the one that was kept"
    BUILD = "build its context"
    RESTORE = "give it the carry"
    NATIVE_SWITCH = "let the library switch its own context"
    PROVE = "check positions, and the bytes read back against what was restored"
    ENTER_TRIAL = "let decodes through; the first one is the trial; keep the sealed original"
    SERVE = "let decodes through; drop the kept carry"
    RELEASE_FAILED = "free what the failed try left"
    PLACE_OLD = "load the model in the original placement, or take the one that was kept"
    BUILD_OLD = "build the original context"
    RESTORE_OLD = "give it the sealed original"
    PROVE_OLD = "check positions, and the bytes read back against the sealed original"
    RECOMPUTE = "free what is left, build the original placement, read the tokens again"
    PARK = "put the carry, or at least the tokens, on disk"
    REPORT = "tell the outcome"
    CLOSE = "free everything, drop the kept carry"


HOUSEKEEPING = frozenset({Command.ENTER_TRIAL, Command.SERVE, Command.REPORT, Command.CLOSE})
"""Commands that cannot fail and whose end is no event; the end of every other command is the next event."""


@dataclass(frozen=True, slots=True)
class SwitchTarget:
    """What a switch is asked for.

    Args:
        target: the whole placement wanted.
        via: who is to do the work; native only when nothing but the mode and tensor_split changes.
    """

    target: Placement
    via: Via = Via.COMPOSED


_NEEDS_REASON = frozenset({EventKind.FAILED, EventKind.REFUSED, EventKind.DECLINED})


@dataclass(frozen=True, slots=True)
class SwitchEvent:
    """Something that happened.

    Args:
        kind: what.
        request: what is wanted; with STARTED and only there.
        reasons: why; wanted for everything that went wrong.
        placement: with DONE of PROVING, the placement as the library resolved it (a context size of 0 has become a
            number); None says that it is the requested one.

    Raises:
        ValueError: the fields do not belong to the kind.
    """

    kind: EventKind
    request: SwitchTarget | None = None
    reasons: tuple[Reason, ...] = ()
    placement: Placement | None = None

    def __post_init__(self) -> None:
        wrong = ""
        if (self.request is not None) != (self.kind is EventKind.STARTED):
            wrong = "a request comes with started and only there"
        elif self.kind in _NEEDS_REASON and not self.reasons:
            wrong = "what went wrong has a reason"
        elif self.placement is not None and self.kind is not EventKind.DONE:
            wrong = "only what is done resolves a placement"
        if wrong:
            raise ValueError(f"event {self.kind.value}: {wrong}")


@dataclass(frozen=True, slots=True)
class MachineState:
    """Everything the machine knows.

    Args:
        stage: where the session is.
        effective: the placement it serves in; None while none does.
        requested: what the running or last switch asked for; never overwritten by a fallback.
        original: where the running or last switch began: what a fallback builds.
        via: who does the work.
        status: how the last switch ended; None while one runs, and before the first.
        failed_at: stage of the first failure, refusal or cancel of this switch.
        reasons: why, the first cause first.
        cancelled: the first thing to go wrong was a cancel.
        recomputed: the history was read again from its tokens.
        confirmed: a decode in the requested placement has succeeded.
        suspended: the trial that a further switch has interrupted and that still keeps its sealed original.
        story: the steps of this switch, oldest first.
    """

    stage: Stage
    effective: Placement | None
    requested: Placement | None = None
    original: Placement | None = None
    via: Via = Via.COMPOSED
    status: SwitchStatus | None = None
    failed_at: Stage | None = None
    reasons: tuple[Reason, ...] = ()
    cancelled: bool = False
    recomputed: bool = False
    confirmed: bool = False
    suspended: MachineState | None = None
    story: tuple[tuple[Stage, EventKind], ...] = ()


@dataclass(eq=False, repr=False)
class IllegalTransition(Exception):
    """An event that the stage does not allow: a defect of the caller, who should have said Busy. Nothing changed.

    Attributes:
        stage: the stage.
        kind: the event that it does not allow.
        story: the steps so far, oldest first.
    """

    stage: Stage
    kind: EventKind
    story: tuple[tuple[Stage, EventKind], ...]

    def __str__(self) -> str:
        allowed = ", ".join(kind.value for kind in TABLE[self.stage]) or "nothing"
        told = " ".join(f"{stage.value} -{kind.value}->" for stage, kind in self.story)
        so_far = f"{told} {self.stage.value}".lstrip()
        return f"{self.kind.value} cannot happen while {self.stage.value} (allowed: {allowed}); so far: {so_far}"


Row = tuple[Stage, tuple[Command, ...]]
"""The next stage, and the commands on entering it."""

_BACK_TO_SERVING: Row = (Stage.SERVING, (Command.SERVE, Command.REPORT))
_ON_TRIAL: Row = (Stage.TRIAL, (Command.ENTER_TRIAL, Command.REPORT))
_RELEASE: Row = (Stage.RELEASING, (Command.RELEASE_FAILED,))
_PLACE_OLD: Row = (Stage.PLACING_OLD, (Command.PLACE_OLD,))
_RECOMPUTE: Row = (Stage.RECOMPUTING, (Command.RECOMPUTE,))
_PARK: Row = (Stage.PARKING, (Command.PARK,))
_PARKED: Row = (Stage.PARKED, (Command.REPORT,))
_CLOSED: Row = (Stage.CLOSED, (Command.CLOSE,))

_NOTHING_LOST = dict.fromkeys((EventKind.FAILED, EventKind.CANCELLED), _BACK_TO_SERVING)
_FALL_BACK = dict.fromkeys((EventKind.FAILED, EventKind.CANCELLED), _RELEASE)


def _falling_back(done: Row) -> Mapping[EventKind, Row]:
    return {EventKind.DONE: done, EventKind.FAILED: _RECOMPUTE}


TABLE: Mapping[Stage, Mapping[EventKind, Row]] = {
    Stage.SERVING: {
        EventKind.STARTED: (Stage.CHECKING, (Command.CHECK,)),
        EventKind.CLOSED: _CLOSED,
    },
    Stage.CHECKING: {
        EventKind.DONE: (Stage.SAVING, (Command.SAVE,)),
        EventKind.UNCHANGED: _BACK_TO_SERVING,
        EventKind.REFUSED: _BACK_TO_SERVING,
        **_NOTHING_LOST,
    },
    Stage.SAVING: {EventKind.DONE: (Stage.SEALING, (Command.SEAL,)), **_NOTHING_LOST},
    Stage.SEALING: {EventKind.DONE: (Stage.FREEING, (Command.FREE,)), **_NOTHING_LOST},
    Stage.FREEING: {EventKind.DONE: (Stage.PLACING, (Command.PLACE,)), **_FALL_BACK},
    Stage.PLACING: {EventKind.DONE: (Stage.BUILDING, (Command.BUILD,)), **_FALL_BACK},
    Stage.BUILDING: {EventKind.DONE: (Stage.RESTORING, (Command.RESTORE,)), **_FALL_BACK},
    Stage.RESTORING: {EventKind.DONE: (Stage.PROVING, (Command.PROVE,)), **_FALL_BACK},
    Stage.SWITCHING_NATIVELY: {
        EventKind.DONE: (Stage.PROVING, (Command.PROVE,)),
        # The library said no and its context is still the old one, sound.
        EventKind.DECLINED: _BACK_TO_SERVING,
        **_FALL_BACK,
    },
    Stage.PROVING: {EventKind.DONE: _ON_TRIAL, **_FALL_BACK},
    Stage.TRIAL: {
        EventKind.DONE: _BACK_TO_SERVING,
        EventKind.FAILED: _RELEASE,
        EventKind.STARTED: (Stage.CHECKING, (Command.CHECK,)),
        EventKind.CLOSED: _CLOSED,
    },
    Stage.RELEASING: _falling_back(_PLACE_OLD),
    Stage.PLACING_OLD: _falling_back((Stage.BUILDING_OLD, (Command.BUILD_OLD,))),
    Stage.BUILDING_OLD: _falling_back((Stage.RESTORING_OLD, (Command.RESTORE_OLD,))),
    Stage.RESTORING_OLD: _falling_back((Stage.PROVING_OLD, (Command.PROVE_OLD,))),
    Stage.PROVING_OLD: _falling_back(_BACK_TO_SERVING),
    Stage.RECOMPUTING: {EventKind.DONE: _BACK_TO_SERVING, EventKind.FAILED: _PARK},
    Stage.PARKING: {EventKind.DONE: _PARKED, EventKind.FAILED: _PARKED},
    Stage.PARKED: {EventKind.CLOSED: _CLOSED},
    Stage.CLOSED: {},
}

NATIVE: Mapping[tuple[Stage, EventKind], Row] = {
    (Stage.SEALING, EventKind.DONE): (Stage.SWITCHING_NATIVELY, (Command.NATIVE_SWITCH,)),
}
"""Where a native switch leaves the table."""

SUSPENDED: Mapping[Row, Row] = {_BACK_TO_SERVING: _ON_TRIAL}
"""Where a switch that interrupted a trial, and has touched nothing yet, leaves the table: the trial's carry is kept."""

_ENDED_AS: Mapping[EventKind, SwitchStatus] = {
    EventKind.REFUSED: SwitchStatus.REFUSED,
    EventKind.UNCHANGED: SwitchStatus.UNCHANGED,
}
CANCELLED = Reason("cancelled", "the switch was cancelled")


def serving(placement: Placement) -> MachineState:
    """Give the state of a session that has just opened in ``placement``, as the library resolved it."""
    return MachineState(Stage.SERVING, effective=placement)


def step(state: MachineState, event: SwitchEvent) -> tuple[MachineState, tuple[Command, ...]]:
    """Take one event; ``state`` is not changed.

    Returns:
        The next state, and the commands to carry out in order; at most one is not HOUSEKEEPING, and its end is the next
        event.

    Raises:
        IllegalTransition: the stage does not allow the event.
    """
    if event.kind not in TABLE[state.stage]:
        raise IllegalTransition(state.stage, event.kind, state.story)
    if event.request is not None:
        return _begin(_at_rest(state), event.request), TABLE[state.stage][event.kind][1]
    noted = _note(_at_rest(state), event)
    stage, commands = _row(noted, event.kind)
    done = replace(
        noted,
        stage=stage,
        effective=_effective(noted, stage, event),
        status=_ended_as(noted, stage, event.kind) if Command.REPORT in commands else None,
        recomputed=noted.stage is Stage.RECOMPUTING and stage is Stage.SERVING,
        confirmed=noted.stage is Stage.TRIAL and stage is Stage.SERVING,
        suspended=noted.suspended if stage in UNTOUCHED | {Stage.TRIAL} else None,
    )
    return done, commands


def _row(state: MachineState, kind: EventKind) -> Row:
    """Look up the next stage and commands, with the two places where a switch leaves the table."""
    row = TABLE[state.stage][kind]
    if state.via is Via.NATIVE:
        row = NATIVE.get((state.stage, kind), row)
    if state.suspended is not None:
        row = SUSPENDED.get(row, row)
    return row


def _at_rest(state: MachineState) -> MachineState:
    """Put a resting session back to what it rests on: its trial, or nothing but where it serves."""
    if state.stage is Stage.TRIAL and state.suspended is not None:
        return state.suspended
    if state.stage is Stage.SERVING:
        return MachineState(Stage.SERVING, state.effective, requested=state.effective, original=state.effective)
    return state


def _begin(state: MachineState, request: SwitchTarget) -> MachineState:
    """Start the record of a new switch."""
    return MachineState(
        Stage.CHECKING,
        effective=state.effective,
        requested=request.target,
        original=state.effective,
        via=request.via,
        suspended=state if state.stage is Stage.TRIAL else None,
        story=((state.stage, EventKind.STARTED),),
    )


def _note(state: MachineState, event: SwitchEvent) -> MachineState:
    """Record what went wrong, the first cause first; a failure on the way back from a cancel leaves it a cancel."""
    is_cancel = event.kind is EventKind.CANCELLED
    reasons = (CANCELLED,) if is_cancel else event.reasons
    story = (*state.story, (state.stage, event.kind))
    if not reasons:
        return replace(state, story=story)
    return replace(
        state,
        story=story,
        reasons=(*state.reasons, *reasons),
        failed_at=state.failed_at or state.stage,
        cancelled=state.cancelled or is_cancel,
    )


def _effective(state: MachineState, stage: Stage, event: SwitchEvent) -> Placement | None:
    """Say where the session serves once it is in the stage; law 4."""
    if stage in UNTOUCHED:
        return state.effective
    if stage is Stage.TRIAL:
        return state.effective if state.stage in UNTOUCHED else event.placement or state.requested
    if stage is Stage.SERVING:
        return state.effective if state.stage is Stage.TRIAL else state.original
    return None


def _ended_as(state: MachineState, stage: Stage, kind: EventKind) -> SwitchStatus:
    """Say how the switch ended."""
    if stage is Stage.PARKED:
        return SwitchStatus.PARKED
    if state.cancelled:
        return SwitchStatus.CANCELLED
    if kind in _ENDED_AS:
        return _ENDED_AS[kind]
    return SwitchStatus.SWITCHED if state.failed_at is None else SwitchStatus.FELL_BACK
