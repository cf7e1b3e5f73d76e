"""Measures one model on its devices for `bench`: sessions in child processes, timed in turn, of which any may die.

Laws:
    1. One child measures at a time. Rounds go over all of them, so that whatever drifts hits all alike; where they do
       not fit at once each is started anew for its turn.
    2. Nothing is begun that by what is known does not fit into the time that is left, but for the least of each mode.
    3. What a child cannot do, or dies of, is left out with its reason, and ends nothing else.
    4. A cancel ends the child under way at once, and keeps what was timed before it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from splitctl.errors import Cancelled, SplitctlError
from splitctl.ipc.jobs import BenchRequest, Failure, Fault, Progress
from splitctl.ipc.timed import Switches, Times
from splitctl.ipc.timed_child import Child, ChildFailed
from splitctl.model.facts import ModelFacts
from splitctl.outcome import SwitchStatus, Via, WeightsTier
from splitctl.placement import FlashAttn, Placement, SplitMode
from splitctl.planning.fitting import lacking, needs_of_mode
from splitctl.planning.memory import DeviceFacts, plan_mode
from splitctl.planning.profile import LeftOut, Profile, Served, Spread
from splitctl.planning.schedule import SHORT, Look, Schedule, Wish, schedule
from splitctl.planning.survey import Known

#: Of the time that is given, what is planned with; the rest is for what goes slower than it began [share].
_PLANNED = 0.9
#: Of the time that is given, what a second look at the reading may take in each mode [share].
_LOOK = 0.02
#: Of the host's memory, what sessions side by side may take [share].
_OF_MEMORY = 0.8

_NO_TIME = "no time was left for it: raise --budget"
_PAIR = (SplitMode.LAYER, SplitMode.TENSOR)

Cell = tuple[SplitMode, int]
"""A mode and a size of micro-batches."""


@dataclass(frozen=True, slots=True)
class Benching:
    """What is measured.

    Attributes:
        placement: where and how; its mode does not count.
        modes: the modes to measure.
        n_ubatches: sizes of micro-batches, the first of which is tried in every mode.
        n_seqs: sequences that generate together.
        tiers: tiers of weights to switch with.
        budget_s: how long all of it may take, seconds.
        rounds: repetitions, were there all the time.
        deadline_s: longest silence of a child, seconds.
    """

    model: Path
    facts: ModelFacts
    library: Path | None
    rpc: tuple[str, ...]
    devices: tuple[DeviceFacts, ...]
    placement: Placement
    modes: tuple[SplitMode, ...]
    n_ubatches: tuple[int, ...]
    n_seqs: tuple[int, ...]
    tiers: tuple[WeightsTier, ...]
    budget_s: float
    rounds: int
    deadline_s: float

    def placed(self, cell: Cell) -> Placement:
        """Give the placement of a cell; a split belongs to the mode that it was named with."""
        mode, n_ubatch = cell
        return replace(self.placement.changed(mode=mode), n_ubatch=n_ubatch)

    @property
    def room(self) -> int:
        """Tokens that one sequence may hold."""
        n_ctx = self.placement.n_ctx or self.facts.n_ctx_train
        return n_ctx // self.placement.n_streams


@dataclass(slots=True)
class BenchReport:
    """What was found.

    Attributes:
        profile: what was measured; None where nothing was.
        flash_attn: flash attention as the sessions had it.
        cuts: what was left out for want of time.
        left_out: what was not measured, and why.
        failure: why nothing could be measured; None otherwise.
        is_cancelled: whether it was stopped before the end.
        seconds: how long it took.
    """

    profile: Profile | None = None
    flash_attn: FlashAttn = FlashAttn.AUTO
    cuts: tuple[str, ...] = ()
    left_out: list[LeftOut] = field(default_factory=list)
    failure: Failure | None = None
    is_cancelled: bool = False
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Move:
    """One switch that is planned.

    Attributes:
        way: from where, to where.
        n_held: tokens that the session holds.
        is_first: the first of its session.
        is_more: something is known of this way of a switch without it.
    """

    way: tuple[SplitMode, SplitMode]
    n_held: int
    is_first: bool = False
    is_more: bool = False


@dataclass(frozen=True, slots=True)
class Bencher:
    """Measures.

    Attributes:
        env: the environment of the children.
        on_progress: called with what is being done, its share, and the time left as its note.
        on_output: called with every line that a child or the library prints.
        is_cancelled: asked all the while.
        beside: hosts a session, times its steps and switches it beside, as `host.timing.served_times`; None: that is
            not measured.
    """

    env: Mapping[str, str] = field(repr=False)
    on_progress: Callable[[Progress], None] = lambda _: None
    on_output: Callable[[str], None] = lambda _: None
    is_cancelled: Callable[[], bool] = lambda: False
    beside: Callable[..., None] | None = None

    def __call__(self, what: Benching) -> BenchReport:
        """Measure as much as the time allows; raises OSError where no child can be started."""
        return _Run(self, what)()


class _Run:
    """One bench under way."""

    def __init__(self, bencher: Bencher, what: Benching) -> None:
        self._bencher = bencher
        self._what = what
        self._started = time.monotonic()
        self._times: dict[Cell, Times] = {}
        self._switches: list[Switches] = []
        self._served: dict[tuple[SplitMode, int], list[float]] = {}
        self._looks: dict[SplitMode, Look] = {}
        self._report = BenchReport()
        self._left_out = self._report.left_out
        self._began_s = self._planned_s = self._done_s = 0.0
        self._ways: list[str] = []
        # Of the way of a switch that is under way: the time that those after it need, the longest until a session was
        # open, and that of a switch with the fewest tokens, by whether it was the first of its session.
        self._reserved_s = self._opened_s = 0.0
        self._switched_s: dict[bool, float] = {}
        self._failure: Failure | None = None
        self._stays = self._fit_at_once()

    def __call__(self) -> BenchReport:
        """Do it."""
        report = self._report
        try:
            with ExitStack() as stack:
                children = self._look(stack)
                if not self._looks:
                    return report
                plan = self._schedule()
                self._rounds(plan, children, stack)
            self._switch(plan)
        except Cancelled:
            report.is_cancelled = True
        modes = [mode for cell, times in self._times.items() if (mode := times.mode(cell)) is not None]
        plain = next((one for one in self._switches if one.way == WeightsTier.FILE.value), None)
        if modes:
            switches = tuple(itertools.chain.from_iterable(one.times(plain) for one in self._switches))
            served = tuple(Served(*key, Spread.of(found)) for key, found in self._served.items())
            report.profile = Profile(tuple(modes), switches, tuple(self._left_out), served)
        report.seconds = time.monotonic() - self._started
        return report

    # ---- first numbers ----

    def _look(self, stack: ExitStack) -> dict[Cell, Child]:
        """Open every mode and take first numbers; what stays open is given, and closed by `stack`."""
        what, kept = self._what, dict[Cell, Child]()
        for mode in what.modes:
            cell = (mode, what.n_ubatches[0])
            self._tell(f"a first look at {mode.value} mode", 0.0, self._left_s())
            why = self._short_of(what.placed(cell))
            if why:
                self._left_out.append(LeftOut(mode.value, why))
                continue
            with ExitStack() as own:
                self._taken(mode.value, partial(self._open_first, cell, stack if self._stays else own, kept))
        if not self._looks:
            failure = Failure(Fault.REFUSED, "NothingMeasured", "; ".join(f"{x.what}: {x.why}" for x in self._left_out))
            self._report.failure = self._failure or failure
        return kept if self._stays else {}

    def _open_first(self, cell: Cell, stack: ExitStack, kept: dict[Cell, Child]) -> None:
        child = self._child(cell, stack)
        self._first_numbers(cell[0], child)
        kept[cell] = child
        if child.placement.flash_attn is FlashAttn.OFF or self._report.flash_attn is FlashAttn.AUTO:
            self._report.flash_attn = child.placement.flash_attn

    def _first_numbers(self, mode: SplitMode, child: Child) -> None:
        first = Times()
        n_short = min(SHORT, child.placement.n_batch)
        child.measure(first.take, reads=(n_short,), n_seqs=(1,), n_steps=2)
        token_s = first.reads[n_short, 0][0] / n_short
        n = min(child.placement.n_batch, self._what.room // 2, int(_LOOK * self._what.budget_s / max(token_s, 1e-9)))
        if n > n_short:
            child.measure(first.take, reads=(n,))
            token_s = first.reads[n, 0][0] / n
        (step_s,) = next(iter(first.steps.values()))
        self._looks[mode] = Look(token_s, step_s, child.open_s, child.place_s)

    def _schedule(self) -> Schedule:
        what = self._what
        fitting = [what.n_ubatches[0]]
        for n_ubatch in what.n_ubatches[1:]:
            why = next((why for mode in self._looks if (why := self._short_of(what.placed((mode, n_ubatch))))), "")
            if why:
                self._left_out.append(LeftOut(f"-ub {n_ubatch}", why))
            else:
                fitting.append(n_ubatch)
        has_both = all(mode in self._looks for mode in _PAIR)
        tiers = [one.value for one in what.tiers if has_both and self._way_fits(one.value)]
        beside = Via.BESIDE.value
        has_beside = has_both and self._bencher.beside is not None and self._way_fits(beside)
        # A session that is served goes beside if that was measured, and one that is not with weights from the file.
        self._ways = [*tiers[:1], *([beside] if has_beside else []), *tiers[1:]]
        wish = Wish(
            n_batch=what.placement.n_batch,
            room=what.room,
            # Each of them holds a few tokens and makes a few; in one cache for all they share the room.
            n_seqs=tuple(n for n in what.n_seqs if (n if what.placement.kv_unified else 1) * 3 * SHORT <= what.room),
            n_ubatches=tuple(fitting),
            tiers=tuple(tiers),
            rounds=what.rounds,
            beside=has_beside,
            is_shared=what.placement.kv_unified and what.placement.n_seq_max > 1,
        )
        plan = schedule(wish, self._looks, self._left_s() * _PLANNED, reopened=not self._stays)
        self._report.cuts = plan.cuts
        self._began_s = time.monotonic() - self._started
        self._planned_s = plan.switches_s(self._looks)
        self._planned_s += replace(plan, rounds=what.rounds).rounds_s(self._looks, reopened=not self._stays)
        return plan

    def _way_fits(self, way: str) -> bool:
        what = self._what
        before, after = (what.placed((mode, what.n_ubatches[0])) for mode in _PAIR)
        plan = next(one for one in Known(what.facts, what.devices).tiers(before, after) if one.name == way)
        if not plan.fits:
            self._left_out.append(LeftOut(way, plan.reason))
        return plan.fits

    # ---- rounds ----

    def _rounds(self, plan: Schedule, children: dict[Cell, Child], stack: ExitStack) -> None:
        """Go over every cell, as often as the time allows: once in any case."""
        cells = [(mode, n_ubatch) for mode in self._looks for n_ubatch in plan.n_ubatches]
        dead: set[Cell] = set()
        longest_s, reserved_s = 0.0, plan.switches_s(self._looks)
        # More rounds than were planned have the time that every way of a switch leaves.
        for number in range(self._what.rounds):
            if number == plan.rounds:
                reserved_s = sum(plan.way_s(way, self._looks) for way in self._ways)
            if number and self._left_s() < longest_s + reserved_s:
                self._report.cuts += (f"repetitions: {number}, not {self._what.rounds}",)
                self._planned_s = self._done_s + reserved_s
                return
            began = time.monotonic()
            # Backwards every other time: what comes first in a round is not always the same.
            for cell in cells if number % 2 == 0 else cells[::-1]:
                if cell in dead:
                    continue
                self._tell(f"round {number + 1}: {_named(cell)}", *self._share())
                if not self._turn(plan, cell, children, stack):
                    dead.add(cell)
                self._done_s += plan.round_s(self._looks[cell[0]])
            longest_s = max(longest_s, time.monotonic() - began)

    def _turn(self, plan: Schedule, cell: Cell, children: dict[Cell, Child], stack: ExitStack) -> bool:
        """Measure one cell once; tells whether it lives on."""
        times = self._times.setdefault(cell, Times())

        def measure(child: Child) -> None:
            child.measure(
                times.take, reads=plan.lengths, n_seqs=plan.n_seqs, depths=plan.depths, chunk=plan.chunk,
                n_steps=plan.n_steps, crowd=plan.crowd,
            )  # fmt: skip

        def work() -> None:
            if not self._stays:
                with ExitStack() as own:
                    measure(self._child(cell, own))
                return
            if cell not in children:
                children[cell] = self._child(cell, stack)
            measure(children[cell])

        is_done = self._taken(_named(cell), work)
        if not is_done:
            if cell in children:
                children.pop(cell).end(is_well=False)
            why = self._left_out.pop().why
            if times.mode(cell) is not None:
                self._left_out.append(LeftOut(_named(cell), f"{why}; what came before it counts"))
            else:
                is_first = cell[1] == self._what.n_ubatches[0]
                self._left_out.append(LeftOut(cell[0].value if is_first else _named(cell), why))
        return is_done

    # ---- switches ----

    def _switch(self, plan: Schedule) -> None:
        """Switch in every way: first in those that are planned, then in what else the time is left for."""
        ways = sorted(self._ways, key=lambda way: way not in plan.ways)
        for number, way in enumerate(ways):
            begin_s = plan.begin_s(way, self._looks)
            if self._left_s() < begin_s:
                self._left_out.append(LeftOut(way, _NO_TIME))
                continue
            self._opened_s, self._switched_s, self._reserved_s = 0.0, {}, 0.0
            # Each of those after it that can be begun shall be.
            left_s = self._left_s() - begin_s - plan.switch_s(way, self._looks)
            for later_s in (plan.begin_s(later, self._looks) for later in ways[number + 1 :]):
                if self._reserved_s + later_s <= left_s:
                    self._reserved_s += later_s
            found = Switches(way)
            self._switches.append(found)
            if way == Via.BESIDE.value:
                self._switch_beside(found, plan)
            else:
                self._switch_from_each(found, plan)
        self._serve(plan)

    def _serve(self, plan: Schedule) -> None:
        """Time the steps of a session that is served, where no switch beside has had one."""
        bencher, look = self._bencher, self._looks.get(SplitMode.LAYER)
        if self._served or bencher.beside is None or look is None:
            return
        if self._left_s() < look.open_s + plan.served_s(look):
            self._left_out.append(LeftOut("serving", _NO_TIME))
            return
        self._tell("steps of a session that is served", *self._share())
        self._taken("serving", lambda: self._hosted(plan, (), lambda *_: None, lambda _: True))

    def _hosted(
        self, plan: Schedule, held: Sequence[int], take: Callable[..., None], goes_on: Callable[[int], bool]
    ) -> None:
        """Have a session hosted, its steps timed, and switched beside with so many tokens held each time."""
        bencher = self._bencher

        def n_seqs() -> Sequence[int]:
            return plan.served if self._left_s() >= plan.served_s(self._looks[SplitMode.LAYER]) else ()

        def served(mode: SplitMode, n_seq: int, seconds: float) -> None:
            self._served.setdefault((mode, n_seq), []).append(seconds)

        more = {"env": bencher.env, "is_cancelled": bencher.is_cancelled, "goes_on": goes_on}
        try:
            if bencher.beside is not None:
                bencher.beside(self._what, held, take, n_seqs=n_seqs, on_served=served, **more)
        except (Cancelled, ChildFailed):
            raise
        except (SplitctlError, OSError) as error:
            raise ChildFailed(str(error)) from error

    def _switch_from_each(self, found: Switches, plan: Schedule) -> None:
        """Switch there and back, in a session that began in either mode, with weights from a tier."""
        n_wanted = 0
        for begins in _PAIR:
            moves = self._moves(begins, plan)
            n_wanted += len(moves)
            if n_wanted > len(moves) and not self._has_time(found.way, plan, moves[0], opened_s=self._opened_s):
                break
            self._tell(f"switches from {begins.value} mode, weights from {found.way}", *self._share())
            if not self._taken(found.way, partial(self._from, begins, moves, found, plan)):
                return
            if found.way in plan.ways:
                self._done_s += plan.way_s(found.way, self._looks) / len(_PAIR)
        n_made = sum(map(len, found.outcomes.values()))
        if n_made < n_wanted:
            self._report.cuts += (f"switches with weights {found.way}: {n_made}, not {n_wanted}",)

    def _moves(self, begins: SplitMode, plan: Schedule) -> list[_Move]:
        """List the switches of a session that begins in a mode: the first, and from layer mode there and back again."""
        there = (begins, next(mode for mode in _PAIR if mode is not begins))
        back, small = there[::-1], plan.held[0]
        if begins is not SplitMode.LAYER:
            return [_Move(there, small, is_first=True, is_more=True)]
        again = itertools.product(range(plan.switch_rounds), plan.held, (there, back))
        more = [_Move(way, n_held, is_more=True) for _, n_held, way in again]
        return [_Move(there, small, is_first=True), _Move(back, small), *more]

    def _has_time(self, way: str, plan: Schedule, move: _Move, *, opened_s: float = 0.0) -> bool:
        """Tell whether a switch fits; one that tells less than any of another way leaves those their time."""
        fewest_s, this_s = (plan.switch_s(way, self._looks, n) for n in (plan.held[0], move.n_held))
        wanted_s = opened_s + self._switched_s.get(move.is_first, fewest_s) + this_s - fewest_s
        return self._left_s() >= wanted_s + (self._reserved_s if move.is_more else 0.0)

    def _took(self, plan: Schedule, move: _Move, seconds: float) -> None:
        if move.n_held == plan.held[0]:
            self._switched_s[move.is_first] = max(self._switched_s.get(move.is_first, 0.0), seconds)

    def _switch_beside(self, found: Switches, plan: Schedule) -> None:
        """Have a hosted session switched beside."""
        moves = list[_Move]()
        began = 0.0

        def goes_on(n_held: int) -> bool:
            nonlocal began
            began = time.monotonic()
            moves.append(_Move(_PAIR, n_held, is_more=len(moves) >= len(_PAIR)))
            return len(moves) == 1 or self._has_time(found.way, plan, moves[-1])

        def take(before: SplitMode, after: SplitMode, outcome: Mapping[str, Any]) -> None:
            if outcome["status"] != SwitchStatus.SWITCHED.value:
                raise ChildFailed(f"a switch to {after.value} mode: {outcome['reason']}")
            key = (before, after, not found.outcomes, outcome["n_tokens"])
            found.outcomes.setdefault(key, []).append(outcome)
            if moves:
                self._took(plan, moves[-1], time.monotonic() - began)

        self._tell("switches beside, of a session that is served", *self._share())
        is_done = self._taken(found.way, lambda: self._hosted(plan, plan.held, take, goes_on))
        if found.way in plan.ways:
            self._done_s += plan.way_s(found.way, self._looks)
        n_made = sum(map(len, found.outcomes.values()))
        if is_done and n_made < len(moves):
            self._report.cuts += (f"switches beside: {n_made}, not {2 * (1 + len(plan.held))}",)

    def _from(self, begins: SplitMode, moves: Sequence[_Move], found: Switches, plan: Schedule) -> None:
        """Switch in a session that begins in a mode, as long as there is time."""
        began = time.monotonic()
        with ExitStack() as own:
            child = self._child((begins, self._what.n_ubatches[0]), own, WeightsTier(found.way))
            self._opened_s = max(self._opened_s, time.monotonic() - began)
            for move in moves:
                if not move.is_first and not self._has_time(found.way, plan, move):
                    return
                began = time.monotonic()
                self._there(child, found, move.way, move.n_held, plan, is_first=move.is_first)
                self._took(plan, move, time.monotonic() - began)

    def _there(
        self, child: Child, found: Switches, way: tuple[SplitMode, SplitMode], n_held: int, plan: Schedule,
        *, is_first: bool = False,
    ) -> None:  # fmt: skip
        """Switch one way."""
        before, after = way
        target = self._what.placed((after, self._what.n_ubatches[0])).changed(flash_attn=child.placement.flash_attn)
        steps = found.steps.setdefault((after, n_held), [])
        outcome = child.measure(
            lambda one: steps.append(one.seconds), target=target, n_held=n_held, n_steps=plan.n_steps
        )
        if outcome is None or outcome["status"] != SwitchStatus.SWITCHED.value:
            raise ChildFailed(f"a switch to {after.value} mode: {outcome['reason'] if outcome else 'no outcome'}")
        if outcome["weights"] != found.way:
            raise ChildFailed(f"weights came from {outcome['weights']}: {outcome['weights_reason']}")
        found.outcomes.setdefault((before, after, is_first, n_held), []).append(outcome)

    # ---- children ----

    def _child(self, cell: Cell, stack: ExitStack, tier: WeightsTier = WeightsTier.FILE) -> Child:
        what = self._what
        request = BenchRequest(what.model, what.library, what.placed(cell), what.rpc, tier)
        bencher = self._bencher
        child = Child(
            request, env=bencher.env, on_output=bencher.on_output, is_cancelled=bencher.is_cancelled,
            deadline_s=what.deadline_s,
        )  # fmt: skip
        return stack.enter_context(child)

    def _taken(self, what: str, work: Callable[[], None]) -> bool:
        """Do some work of a child; tells whether it was done. Why it was not is noted."""
        try:
            work()
        except ChildFailed as error:
            self._failure = error.failure
            self._left_out.append(LeftOut(what, str(error)))
            return False
        return True

    def _fit_at_once(self) -> bool:
        """Tell whether sessions of all cells fit side by side; a server of RPC devices serves one at a time."""
        what = self._what
        wanted: dict[str, int] = {}
        free: dict[str, int | None] = {}
        for cell in itertools.product(what.modes, what.n_ubatches):
            for need in needs_of_mode(plan_mode(what.facts, what.placed(cell), what.devices), what.devices):
                wanted[need.pool] = wanted.get(need.pool, 0) + need.wanted
                free[need.pool] = need.free
        return not what.rpc and all(
            (has := free[pool]) is not None and n_bytes <= _OF_MEMORY * has for pool, n_bytes in wanted.items()
        )

    def _short_of(self, placement: Placement) -> str:
        """Say what a placement lacks; empty where it fits."""
        plan = plan_mode(self._what.facts, placement, self._what.devices)
        return "; ".join(need.text for need in lacking(needs_of_mode(plan, self._what.devices)))

    # ---- time ----

    def _left_s(self) -> float:
        return self._what.budget_s - (time.monotonic() - self._started)

    def _share(self) -> tuple[float, float]:
        """Give the share that is done and the seconds that are left, by the plan and how long its parts really took."""
        spent = time.monotonic() - self._started
        pace = (spent - self._began_s) / self._done_s if self._done_s else 1.0
        left = max(min((self._planned_s - self._done_s) * pace, self._left_s()), 0.0)
        return (spent / (spent + left) if spent + left > 0 else 0.0), left

    def _tell(self, stage: str, done: float, left_s: float) -> None:
        left = max(round(left_s), 0)
        note = f"about {left // 60}:{left % 60:02} left" if left_s > 0.0 else "takes longer than planned"
        self._bencher.on_progress(Progress(stage, done, note))


def _named(cell: Cell) -> str:
    return f"{cell[0].value} -ub {cell[1]}"
