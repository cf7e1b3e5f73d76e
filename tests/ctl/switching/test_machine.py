"""The switch machine: its table, its laws, and a model of what its commands do with a fault at every one of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from splitctl.errors import Reason
from splitctl.outcome import Stage, SwitchStatus, Via
from splitctl.placement import Placement, SplitMode
from splitctl.switching import machine
from splitctl.switching.drawing import draw
from splitctl.switching.machine import (
    FALLING_BACK,
    HOUSEKEEPING,
    NATIVE,
    RESTING,
    TABLE,
    UNTOUCHED,
    Command,
    EventKind,
    IllegalTransition,
    MachineState,
    SwitchEvent,
    SwitchTarget,
    step,
)

LAYER = Placement(mode=SplitMode.LAYER)
TENSOR = Placement(mode=SplitMode.TENSOR, n_ctx=512)
NONE = Placement(mode=SplitMode.NONE, n_ctx=64)
BROKE = (Reason("broke", "it broke"),)
WITH_REASONS = {EventKind.FAILED, EventKind.REFUSED, EventKind.DECLINED}
NOT_OF_THE_MACHINE = {Stage.QUIESCING}
"""Stages of a switch in which the machine rests: it starts at the token boundary."""


def event(kind: EventKind, *, target: Placement = TENSOR, via: Via = Via.COMPOSED) -> SwitchEvent:
    if kind is EventKind.STARTED:
        return SwitchEvent(kind, request=SwitchTarget(target, via))
    return SwitchEvent(kind, reasons=BROKE if kind in WITH_REASONS else ())


def walk(*kinds: EventKind, via: Via = Via.COMPOSED) -> tuple[MachineState, list[Command]]:
    state = machine.serving(LAYER)
    told: list[Command] = []
    for kind in kinds:
        state, commands = step(state, event(kind, via=via))
        told += commands
    return state, told


def up_to(stage: Stage, via: Via = Via.COMPOSED) -> MachineState:
    """Reach a stage by the shortest way."""
    seen, edge = set(), [machine.serving(LAYER)]
    while edge:
        state = edge.pop(0)
        if state.stage is stage:
            return state
        for kind in TABLE[state.stage]:
            further = step(state, event(kind, via=via))[0]
            if further.stage not in seen:
                seen.add(further.stage)
                edge.append(further)
    raise AssertionError(stage)


D, F, C, S = EventKind.DONE, EventKind.FAILED, EventKind.CANCELLED, EventKind.STARTED
TO_FREEING = (S, D, D, D)
TO_TRIAL = (*TO_FREEING, D, D, D, D, D)
OUT_AND_SEAL = [Command.CHECK, Command.SAVE, Command.SEAL]
FORTH = [Command.FREE, Command.PLACE, Command.BUILD, Command.RESTORE, Command.PROVE]
BACK = [Command.PLACE_OLD, Command.BUILD_OLD, Command.RESTORE_OLD, Command.PROVE_OLD]
TRIED = [Command.ENTER_TRIAL, Command.REPORT]
SERVED = [Command.SERVE, Command.REPORT]


def test_a_switch_that_goes_well_runs_every_command_in_order() -> None:
    """Nine good events lead from serving to a trial, the tenth confirms it."""
    state, told = walk(*TO_TRIAL)
    assert told == OUT_AND_SEAL + FORTH + TRIED
    assert (state.stage, state.status, state.effective, state.confirmed) == (
        Stage.TRIAL,
        SwitchStatus.SWITCHED,
        TENSOR,
        False,
    )
    state, commands = step(state, event(D))
    assert list(commands) == SERVED
    assert (state.stage, state.status, state.effective, state.confirmed) == (
        Stage.SERVING,
        SwitchStatus.SWITCHED,
        TENSOR,
        True,
    )
    assert (state.requested, state.original, state.failed_at, state.reasons) == (TENSOR, LAYER, None, ())


def test_a_native_switch_replaces_the_four_middle_commands_by_one() -> None:
    """After SEALING the library switches its own context, and the proof is the same."""
    state, told = walk(S, D, D, D, D, D, via=Via.NATIVE)
    assert told == [*OUT_AND_SEAL, Command.NATIVE_SWITCH, Command.PROVE, *TRIED]
    assert (state.stage, state.effective, state.via) == (Stage.TRIAL, TENSOR, Via.NATIVE)


def test_a_declined_native_switch_goes_on_in_the_old_context() -> None:
    """The library that says no and keeps its context sound costs nothing."""
    state, told = walk(S, D, D, D, EventKind.DECLINED, via=Via.NATIVE)
    assert told == [*OUT_AND_SEAL, Command.NATIVE_SWITCH, *SERVED]
    assert (state.stage, state.status, state.effective, state.failed_at) == (
        Stage.SERVING,
        SwitchStatus.FELL_BACK,
        LAYER,
        Stage.SWITCHING_NATIVELY,
    )


def test_a_failed_native_switch_falls_back_by_the_composed_way() -> None:
    """A context that the native call spoiled is thrown away and the old one is built from the carry."""
    state, told = walk(S, D, D, D, F, D, D, D, D, D, via=Via.NATIVE)
    assert told == [*OUT_AND_SEAL, Command.NATIVE_SWITCH, Command.RELEASE_FAILED, *BACK, *SERVED]
    assert (state.stage, state.status, state.effective) == (Stage.SERVING, SwitchStatus.FELL_BACK, LAYER)


ENDS_UNTOUCHED = {
    EventKind.FAILED: SwitchStatus.FELL_BACK,
    EventKind.CANCELLED: SwitchStatus.CANCELLED,
    EventKind.REFUSED: SwitchStatus.REFUSED,
    EventKind.UNCHANGED: SwitchStatus.UNCHANGED,
}


@pytest.mark.parametrize(
    ("stage", "kind", "status"),
    [
        (stage, kind, ENDS_UNTOUCHED[kind])
        for stage in Stage
        if stage in UNTOUCHED
        for kind in TABLE[stage]
        if kind in ENDS_UNTOUCHED
    ],
)
def test_what_goes_wrong_before_freeing_leaves_the_session_untouched(
    stage: Stage, kind: EventKind, status: SwitchStatus
) -> None:
    """Whatever returns before FREEING: serving where it served, with the status and the reason."""
    state, commands = step(up_to(stage), event(kind))
    assert list(commands) == SERVED
    assert (state.stage, state.status, state.effective, state.requested) == (Stage.SERVING, status, LAYER, TENSOR)
    assert (state.failed_at, bool(state.reasons)) == ((None, False) if kind is EventKind.UNCHANGED else (stage, True))


TOUCHED = [Stage.FREEING, Stage.PLACING, Stage.BUILDING, Stage.RESTORING, Stage.PROVING, Stage.TRIAL]


@pytest.mark.parametrize("stage", TOUCHED)
@pytest.mark.parametrize("kind", [F, C])
def test_what_goes_wrong_after_freeing_builds_the_original_again(stage: Stage, kind: EventKind) -> None:
    """A failure or cancel from FREEING to TRIAL: the old placement from the sealed carry, the request kept."""
    if kind not in TABLE[stage]:
        assert (stage, kind) == (Stage.TRIAL, C)
        return
    state, commands = step(up_to(stage), event(kind))
    told = list(commands)
    assert state.effective is None
    while state.stage not in RESTING:
        state, commands = step(state, event(D))
        told += commands
    assert told == [Command.RELEASE_FAILED, *BACK, *SERVED]
    assert (state.stage, state.effective, state.requested, state.original) == (Stage.SERVING, LAYER, TENSOR, LAYER)
    assert state.status is (SwitchStatus.CANCELLED if kind is C else SwitchStatus.FELL_BACK)
    assert (state.failed_at, state.recomputed, state.confirmed) == (stage, False, False)


@pytest.mark.parametrize("stage", [one for one in Stage if one in FALLING_BACK])
def test_a_fallback_that_fails_re_reads_the_tokens_and_then_parks(stage: Stage) -> None:
    """Recompute comes after the fallback, the disk after that; reasons are told first cause first."""
    state = up_to(stage)
    state, commands = step(state, SwitchEvent(F, reasons=(Reason("second", "again"),)))
    assert commands == (Command.RECOMPUTE,)
    state, commands = step(state, event(F))
    assert (state.stage, commands) == (Stage.PARKING, (Command.PARK,))
    state, commands = step(state, event(D))
    assert (state.stage, commands, state.status, state.effective) == (
        Stage.PARKED,
        (Command.REPORT,),
        SwitchStatus.PARKED,
        None,
    )
    assert [one.code for one in state.reasons] == ["broke", "second", "broke"]
    assert step(state, event(EventKind.CLOSED))[1] == (Command.CLOSE,)


def test_a_park_that_fails_is_still_told() -> None:
    """A full disk does not make the machine run on: it rests parked with the reason."""
    state, commands = step(up_to(Stage.PARKING), event(F))
    assert (state.stage, state.status, commands) == (Stage.PARKED, SwitchStatus.PARKED, (Command.REPORT,))


def test_a_failure_after_a_cancel_does_not_hide_the_cancel() -> None:
    """The first thing to go wrong names the outcome: cancelled, though releasing failed as well."""
    state, _ = walk(*TO_FREEING, C, F, D)
    assert (state.status, state.recomputed) == (SwitchStatus.CANCELLED, True)
    assert [one.code for one in state.reasons] == ["cancelled", "broke"]


def test_the_placement_that_the_library_resolved_is_the_effective_one() -> None:
    """A context size of 0 is requested and stays requested; effective says the number."""
    state = up_to(Stage.PROVING)
    resolved = replace(TENSOR, n_ctx=8192)
    state, _ = step(state, SwitchEvent(D, placement=resolved))
    assert (state.requested, state.effective) == (TENSOR, resolved)
    state, _ = step(state, event(D))
    assert state.effective == resolved
    state, _ = step(state, event(S, target=LAYER))
    assert state.original == resolved


def test_a_further_switch_during_a_trial_keeps_the_trial_until_its_own_seal() -> None:
    """Refused or failed before its seal: the trial is still a trial and still falls back to where it came from."""
    trial = up_to(Stage.TRIAL)
    for kinds, status in (((EventKind.REFUSED,), SwitchStatus.REFUSED), ((D, D, C), SwitchStatus.CANCELLED)):
        state, _ = step(trial, event(S, target=NONE))
        told: list[Command] = []
        for kind in kinds:
            state, commands = step(state, event(kind))
            told += commands
        assert told[-2:] == TRIED
        assert (state.stage, state.status, state.requested, state.effective) == (Stage.TRIAL, status, NONE, TENSOR)
        confirmed, commands = step(state, event(D))
        assert list(commands) == SERVED
        assert (confirmed.status, confirmed.confirmed, confirmed.requested) == (SwitchStatus.SWITCHED, True, TENSOR)
        failed, _ = step(state, event(F))
        assert (failed.stage, failed.requested, failed.original) == (Stage.RELEASING, TENSOR, LAYER)
        again, _ = step(state, event(S, target=NONE))
        assert again.suspended == trial


def test_a_further_switch_that_sealed_supersedes_the_trial() -> None:
    """Once the new carry is sealed the fallback is the placement that served, under trial or not."""
    state, _ = step(up_to(Stage.TRIAL), event(S, target=NONE))
    for _ in range(4):
        state, _ = step(state, event(D))
    assert (state.stage, state.suspended, state.original) == (Stage.PLACING, None, TENSOR)


@pytest.mark.parametrize(("stage", "kind"), list(itertools.product(TABLE, EventKind)))
def test_every_pair_of_stage_and_event_is_in_the_table_or_raises(stage: Stage, kind: EventKind) -> None:
    """What the table does not know raises, tells the story, and leaves the state as it was."""
    state = up_to(stage, Via.NATIVE if stage is Stage.SWITCHING_NATIVELY else Via.COMPOSED)
    before = replace(state)
    if kind in TABLE[stage]:
        after, commands = step(state, event(kind))
        assert after.stage in Stage
        assert all(isinstance(one, Command) for one in commands)
    else:
        with pytest.raises(IllegalTransition) as caught:
            step(state, event(kind))
        assert (caught.value.stage, caught.value.kind, caught.value.story) == (stage, kind, state.story)
        told = str(caught.value)
        assert f"{kind.value} cannot happen while {stage.value}" in told
        assert all(f"{one.value} -{what.value}->" in told for one, what in state.story)
        assert all(one.value in told for one in TABLE[stage])
    assert state == before


def test_every_stage_is_reachable_and_every_row_is_well_formed() -> None:
    """At most one command that works, the last; none under way at rest, one under way elsewhere."""
    assert set(TABLE) == set(Stage) - NOT_OF_THE_MACHINE
    for (stage, _), (target, commands) in [
        *(((stage, kind), row) for stage, rows in TABLE.items() for kind, row in rows.items()),
        *NATIVE.items(),
        *((("", ""), row) for row in machine.SUSPENDED.values()),
    ]:
        work = [one for one in commands if one not in HOUSEKEEPING]
        if target in RESTING:
            assert work == []
            assert commands
        else:
            assert target is not stage
            assert commands == tuple(work)
            assert len(work) == 1
    used = {one for rows in TABLE.values() for _, commands in rows.values() for one in commands}
    assert used | {one for _, commands in NATIVE.values() for one in commands} == set(Command)


Taken = tuple[Stage, EventKind, Stage, tuple[Command, ...]]


def every_path() -> list[tuple[list[Taken], MachineState]]:
    """Every path from SERVING until the machine rests again, both ways."""
    finished = []
    for via in Via:
        start = step(machine.serving(LAYER), event(S, via=via))
        edge: list[tuple[list[Taken], MachineState]] = [([(Stage.SERVING, S, start[0].stage, start[1])], start[0])]
        while edge:
            path, state = edge.pop()
            for kind in TABLE[state.stage]:
                if kind is S:
                    continue
                further, commands = step(state, event(kind))
                longer = [*path, (state.stage, kind, further.stage, commands)]
                if further.stage in RESTING and further.stage is not Stage.TRIAL:
                    finished.append((longer, further))
                else:
                    edge.append((longer, further))
    return finished


ENDS = every_path()
PATHS = [path for path, _ in ENDS]


def test_every_path_ends_serving_parked_or_closed() -> None:
    """There is no way to get lost: some hundred paths, none longer than the table allows."""
    assert len(PATHS) > 100
    assert {path[-1][2] for path in PATHS} == {Stage.SERVING, Stage.PARKED, Stage.CLOSED}
    assert max(len(path) for path in PATHS) < 20


def test_law_1_nothing_is_freed_before_the_seal() -> None:
    """FREE and NATIVE_SWITCH come only after SEALING has ended well."""
    for path in PATHS:
        sealed = False
        for stage, kind, _, commands in path:
            sealed = sealed or (stage, kind) == (Stage.SEALING, D)
            assert sealed or not {Command.FREE, Command.NATIVE_SWITCH, Command.RELEASE_FAILED} & set(commands)


def test_law_2_and_7_every_unhappy_end_serves_in_the_original_or_is_parked() -> None:
    """Without a trial that succeeded the placement is the one before, the same object."""
    for path, state in ENDS:
        assert state.requested is TENSOR
        if state.stage is Stage.SERVING and not state.confirmed:
            assert state.effective is LAYER
            assert state.status is not SwitchStatus.SWITCHED
        if state.stage is Stage.PARKED:
            assert (state.effective, state.status) == (None, SwitchStatus.PARKED)
        assert state.recomputed == (state.stage is Stage.SERVING and path[-1][0] is Stage.RECOMPUTING)


def test_law_3_a_cancel_is_never_retried() -> None:
    """After a cancel the requested placement is never placed, built, restored or switched to again."""
    forth = {*OUT_AND_SEAL, *FORTH, Command.NATIVE_SWITCH, Command.ENTER_TRIAL}
    cancelled = [path for path in PATHS if any(kind is C for _, kind, _, _ in path)]
    assert cancelled
    for path in cancelled:
        at = next(at for at, (_, kind, _, _) in enumerate(path) if kind is C)
        assert not forth & {one for _, _, _, commands in path[at:] for one in commands}


def test_law_8_the_kept_carry_is_dropped_only_when_nobody_needs_it() -> None:
    """Between the seal and the end of the trial nothing drops the carry but a way back that has ended well."""
    may_drop = {Stage.TRIAL, Stage.PROVING_OLD, Stage.RECOMPUTING, Stage.SWITCHING_NATIVELY}
    for path in PATHS:
        sealed = False
        for stage, kind, _, commands in path:
            sealed = sealed or (stage, kind) == (Stage.SEALING, D)
            if sealed and Command.SERVE in commands:
                assert stage in may_drop
                assert kind in {D, EventKind.DECLINED}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: SwitchEvent(EventKind.STARTED),
        lambda: SwitchEvent(EventKind.DONE, request=SwitchTarget(TENSOR)),
        lambda: SwitchEvent(EventKind.FAILED),
        lambda: SwitchEvent(EventKind.FAILED, reasons=BROKE, placement=TENSOR),
    ],
)
def test_an_event_that_says_too_little_or_too_much_is_refused(wrong: Callable[[], SwitchEvent]) -> None:
    """A failure without a reason could not be told to anybody."""
    with pytest.raises(ValueError, match="event "):
        wrong()


def test_the_drawing_shows_every_transition_and_every_command() -> None:
    """Nothing of the table is missing in the docs' text."""
    text = draw()
    for stage, rows in TABLE.items():
        for kind, (target, _) in rows.items():
            assert f"| {stage.value} | {kind.value} | {target.value} |" in text
    assert all(f"| {one.name} | {one.value} |" in text for one in Command)
    assert "| sealing | done (native) | switching_natively | NATIVE_SWITCH |" in text
    assert text.count("```") == 2


def test_the_docs_are_drawn_from_the_tables() -> None:
    """docs/switching.md holds exactly what draw() gives."""
    page = (Path(__file__).parents[3] / "docs" / "switching.md").read_text(encoding="utf-8")
    assert page.split("<!-- drawn -->\n")[1] == draw()


class Effects(RuleBasedStateMachine):
    """A model of the world: what is placed, what is sealed, whether a process lives; a fault at any command.

    The truth is ``history``: the tokens that were decoded. It may be held by the live context, by a sealed carry, or
    (always) by the tokens in memory; a switch must never leave it held by nothing.
    """

    def __init__(self) -> None:
        """Open a session in the layer mode."""
        super().__init__()
        self.state = machine.serving(LAYER)
        self.pending: Command | None = None
        self.context: tuple[Placement, int] | None = (LAYER, 0)
        self.sealed: int | None = None
        self.saved: int | None = None
        self.history = 0
        self.held = False
        self.parked = False
        self.reports: list[SwitchStatus | None] = []
        self.placed: Placement | None = LAYER

    def feed(self, what: SwitchEvent) -> None:
        """Take one event and begin what the machine commands."""
        before = self.state
        self.state, commands = step(before, what)
        self.pending = None
        for command in commands:
            if command in HOUSEKEEPING:
                self.keep_house(command)
            else:
                assert self.pending is None
                self.pending = command

    def keep_house(self, command: Command) -> None:
        """Carry out a command that cannot fail; a session that serves again holds the whole history."""
        if command is Command.REPORT:
            self.reports.append(self.state.status)
            assert self.state.status is not None
        elif command is Command.CLOSE:
            self.context = self.placed = self.sealed = None
        else:
            assert self.context is not None
            assert self.context[1] == self.history
            self.held = False
            if command is Command.SERVE:
                self.sealed = None

    def work(self, command: Command) -> None:
        """Do what a command does when it goes well, with the preconditions that the real library has."""
        state = self.state
        if command is Command.CHECK:
            self.held = True
        elif command is Command.SAVE:
            assert self.context is not None
            self.saved = self.context[1]
        elif command is Command.SEAL:
            assert self.saved == self.history
            self.sealed = self.saved
        elif command in {Command.FREE, Command.RELEASE_FAILED}:
            assert self.sealed == self.history
            self.context = self.placed = None
        elif command in {Command.PLACE, Command.PLACE_OLD}:
            assert self.context is None
            assert self.placed is None
            assert self.sealed == self.history
            self.placed = state.requested if command is Command.PLACE else state.original
        elif command in {Command.BUILD, Command.BUILD_OLD}:
            assert self.placed is not None
            self.context = (self.placed, -1)
        elif command in {Command.RESTORE, Command.RESTORE_OLD}:
            assert self.context is not None
            assert self.sealed is not None
            self.context = (self.context[0], self.sealed)
        elif command is Command.NATIVE_SWITCH:
            assert self.sealed == self.history
            assert self.context is not None
            assert state.requested is not None
            self.placed = state.requested
            self.context = (state.requested, self.context[1])
        elif command in {Command.PROVE, Command.PROVE_OLD}:
            assert self.context is not None
            assert self.context[1] == self.history
        elif command is Command.RECOMPUTE:
            assert state.original is not None
            self.placed = state.original
            self.context = (state.original, self.history)
        elif command is Command.PARK:
            self.parked = True

    @precondition(lambda self: self.pending is None and self.state.stage in {Stage.SERVING, Stage.TRIAL})
    @rule(wanted=st.sampled_from([LAYER, TENSOR, NONE]), via=st.sampled_from(Via))
    def start(self, wanted: Placement, via: Via) -> None:
        """Ask for a switch."""
        self.feed(event(S, target=wanted, via=via))

    @precondition(lambda self: self.pending is None and self.state.stage in {Stage.SERVING, Stage.TRIAL})
    @rule(kind=st.sampled_from([D, D, F]))
    def decode(self, kind: EventKind) -> None:
        """Decode a token; a trial's is the machine's business."""
        assert not self.held
        if kind is D:
            assert self.context is not None
            self.history += 1
            self.context = (self.context[0], self.history)
        if self.state.stage is Stage.TRIAL:
            self.feed(event(kind))

    @precondition(lambda self: self.pending is not None)
    @rule()
    def succeed(self) -> None:
        """The command under way ends well."""
        assert self.pending is not None
        self.work(self.pending)
        self.feed(event(D))

    @precondition(lambda self: self.pending is not None)
    @rule(data=st.data(), half=st.booleans())
    def fail(self, data: st.DataObject, half: bool) -> None:
        """The command under way ends badly, having done its work or not."""
        kinds = [kind for kind in TABLE[self.state.stage] if kind not in {D, S}]
        kind = data.draw(st.sampled_from(kinds))
        if half and kind in {F, C} and self.pending is not None:
            if self.pending is Command.RECOMPUTE:
                self.context = self.placed = None
            else:
                self.work(self.pending)
        self.feed(event(kind))

    @precondition(lambda self: EventKind.CLOSED in TABLE[self.state.stage])
    @rule(really=st.sampled_from([False] * 9 + [True]))
    def close(self, really: bool) -> None:
        """Close a session that rests."""
        if really:
            self.feed(event(EventKind.CLOSED))

    @rule(kind=st.sampled_from(EventKind))
    def illegal(self, kind: EventKind) -> None:
        """What the table does not know changes nothing."""
        if kind not in TABLE[self.state.stage]:
            before = self.state
            with pytest.raises(IllegalTransition):
                step(before, event(kind))
            assert self.state is before

    @invariant()
    def status_does_not_lie(self) -> None:
        """Effective is what is really served in, whenever the session rests; nothing is under way then."""
        state = self.state
        assert (state.stage in RESTING) == (self.pending is None)
        if state.stage in {Stage.SERVING, Stage.TRIAL} | UNTOUCHED:
            assert self.context == (state.effective, self.history)
        else:
            assert state.effective is None

    @invariant()
    def the_original_is_kept_until_the_trial_ends(self) -> None:
        """From FREEING to TRIAL and all the way back there is a sealed carry with the whole history."""
        if self.state.stage in FALLING_BACK | {*TOUCHED, Stage.SWITCHING_NATIVELY}:
            assert self.sealed is not None
            assert self.sealed == self.history

    @invariant()
    def a_resting_session_holds_back_no_decode(self) -> None:
        """The hold of the token boundary ends with the switch."""
        if self.state.stage in {Stage.SERVING, Stage.TRIAL} and self.pending is None:
            assert not self.held

    def teardown(self) -> None:
        """Left alone, with every further command going well, it ends at rest within a bounded number of steps."""
        steps = 0
        while self.pending is not None:
            self.succeed()
            steps += 1
            assert steps <= 12
        assert self.state.stage in RESTING


TestEffects = Effects.TestCase
