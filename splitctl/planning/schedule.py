"""What `bench` measures of a machine: as much as its time allows, by first numbers of the machine itself.

Laws:
    1. Pure: the same wish and the same first numbers give the same schedule.
    2. What is cut is said. The least that tells anything of a mode is never cut: one read, one step, once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from splitctl.model.facts import ModelFacts
from splitctl.outcome import Via, WeightsTier
from splitctl.placement import Placement, SplitMode
from splitctl.planning.fitting import lacking, needs_of_mode
from splitctl.planning.memory import DeviceFacts, plan_mode

#: Deepest place where something is measured, unless a context of its own is asked for [tokens].
MAX_DEPTH = 16384
#: Tokens of the shortest read, and of the first one.
SHORT = 32
#: Tokens of a session in a switch, where nothing larger fits the time or the context.
SMALL_STATE = 256
#: Tokens that a sequence may grow by beyond what is said: steps, warming up, padding; a quarter of a small context.
_SPARE = 256
#: Tokens that are read beside those of another sequence.
_CROWD = 4 * SHORT
#: Attention makes deep reads slower than the first numbers say, and a machine is never quite idle.
_SLOWER = 1.3
#: Steps before those that count: so many, or fewer if they take so long [seconds].
MOST_WARM_STEPS, LEAST_WARM_STEPS, WARM_S = 8, 2, 0.5
#: Steps that count as one measurement.
_MOST_STEPS = 32
#: A pinned copy is made, and tried in a child, before its first switch: so many times as long as placing the model.
_COPY = 2.0
#: Switches there and back.
_PAIR = 2
#: How often steps of a served session are timed, tokens of each prompt, and of the stream that began last.
SERVED_ROUNDS, SERVED_PROMPT, SERVED_TOKENS = 2, 8, 9
#: Of the time that there is, what a cut has to save to be worth it [share].
_WORTH = 0.04


@dataclass(frozen=True, slots=True)
class Look:
    """First numbers of one mode.

    Attributes:
        token_s: seconds of a token of a prompt.
        step_s: seconds of a step of one sequence.
        open_s: seconds until a session was open, its process started anew.
        place_s: seconds of it in which the model was placed and its context built.
    """

    token_s: float
    step_s: float
    open_s: float
    place_s: float


@dataclass(frozen=True, slots=True)
class Wish:
    """What shall be measured, were there all the time.

    Attributes:
        n_batch: most tokens of a read.
        room: tokens that one sequence may hold.
        n_seqs: sequences that generate together, ascending, from 1.
        n_ubatches: sizes of micro-batches; the first is the one that is asked for.
        tiers: tiers of weights to switch with; the first is the last to be cut.
        rounds: repetitions.
        beside: whether switches beside are measured.
        is_shared: whether several sequences lie in one cache.
    """

    n_batch: int
    room: int
    n_seqs: tuple[int, ...] = (1,)
    n_ubatches: tuple[int, ...] = (512,)
    tiers: tuple[str, ...] = ()
    rounds: int = 5
    beside: bool = False
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is measured.

    Attributes:
        lengths: of reads into an empty sequence, tokens, ascending, each shorter than `chunk`.
        chunk: of reads at each depth, tokens.
        depths: ascending, from 0.
        n_seqs: sequences that generate together.
        n_steps: steps that count as one.
        n_ubatches: sizes of micro-batches.
        rounds: repetitions of all that.
        tiers: tiers of weights to switch with.
        held: tokens that a session holds when it is switched.
        switch_rounds: times there and back for each of them.
        beside: switches beside; 0: none.
        crowd: tokens read, and then generated after, beside what another sequence holds; 0: that is not measured.
        cuts: what is less than was wished for, one phrase each; repetitions and ways of a switch aside, of which there
            may be more in the end.
    """

    lengths: tuple[int, ...]
    chunk: int
    depths: tuple[int, ...]
    n_seqs: tuple[int, ...]
    n_steps: int
    n_ubatches: tuple[int, ...]
    rounds: int
    tiers: tuple[str, ...]
    held: tuple[int, ...]
    switch_rounds: int
    beside: int = 0
    crowd: int = 0
    cuts: tuple[str, ...] = ()

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways of a switch, in their order."""
        return (*self.tiers, *([Via.BESIDE.value] if self.beside else []))

    def round_s(self, look: Look) -> float:
        """Tell how long one round takes in one mode with one size of micro-batches, seconds."""
        steps = self.n_steps * look.step_s + _warm_s(look.step_s)
        reading = sum(n + min(n, 64) for n in self.lengths) + self.depths[-1] + self.chunk + 64 + 2 * self.crowd
        together = sum(n * SHORT * look.token_s + (1 + n) / 2 * steps for n in self.n_seqs)
        n_alone = len(self.depths) + (2 if self.crowd else 0)
        return _SLOWER * (reading * look.token_s + n_alone * steps + together)

    def rounds_s(self, looks: Mapping[SplitMode, Look], *, reopened: bool = False) -> float:
        """Tell how long all rounds take, seconds.

        Args:
            looks: first numbers of every mode that is measured.
            reopened: whether a session is opened anew for each round; else once.
        """
        times = self.rounds if reopened else 1
        cells = len(self.n_ubatches)
        # The session of the first numbers is there already, where it may stay.
        opened = cells if reopened else cells - 1
        return sum(cells * self.rounds * self.round_s(look) + opened * times * look.open_s for look in looks.values())

    def switches_s(self, looks: Mapping[SplitMode, Look]) -> float:
        """Tell how long all switches take, seconds."""
        return sum(self.way_s(way, looks) for way in self.ways)

    def way_s(self, way: str, looks: Mapping[SplitMode, Look]) -> float:
        """Tell how long all switches of one way take, seconds: two sessions; beside, each opens one of its own."""
        worst = _worst(looks)
        if worst is None:
            return 0.0
        if way == Via.BESIDE.value:
            reading = 2 * self.held[-1 if self.beside > _PAIR else 0]
            opened = (1 + self.beside) * (worst.open_s + worst.place_s)
            return _SLOWER * (opened + reading * worst.token_s) + self.served_s(worst)
        n_switches = 2 + 2 * len(self.held) * self.switch_rounds
        reading = sum(self.held) + self.held[0]
        # Where both placements stay, each of two sessions places the other one once.
        n_placed = 2 if way == WeightsTier.RESIDENT.value else n_switches
        seconds = 2 * worst.open_s + n_switches * self._steps_s(worst) + reading * worst.token_s
        return _SLOWER * (seconds + n_placed * worst.place_s)

    def served_s(self, look: Look) -> float:
        """Tell how long it takes to time the steps of a session that is served, seconds."""
        rounds = (
            # Streams begin one after the other and end together; steps get slower by what each adds, all of it here.
            SERVED_PROMPT * n * look.token_s / SERVED_ROUNDS + (n + SERVED_TOKENS) * (1 + n) / 2 * look.step_s
            for n in self.served
        )
        return _SLOWER * SERVED_ROUNDS * sum(rounds)

    @property
    def served(self) -> tuple[int, ...]:
        """Numbers of streams of a served session whose steps are timed: the fewest and the most."""
        return tuple(dict.fromkeys((self.n_seqs[0], self.n_seqs[-1])))

    def begin_s(self, way: str, looks: Mapping[SplitMode, Look]) -> float:
        """Tell how long it takes to open a session and switch it once, seconds."""
        worst = _worst(looks)
        if worst is None:
            return 0.0
        made = _COPY * worst.place_s if way == WeightsTier.PINNED.value else 0.0
        if way == Via.BESIDE.value:
            # The steps of what is served there are timed as well.
            made = self.served_s(worst)
        return _SLOWER * (worst.open_s + made) + self.switch_s(way, looks)

    def switch_s(self, way: str, looks: Mapping[SplitMode, Look], n_held: int | None = None) -> float:
        """Tell how long one switch takes with so many tokens read before it, seconds; None: the fewest."""
        worst = _worst(looks)
        if worst is None:
            return 0.0
        opened = worst.open_s if way == Via.BESIDE.value else 0.0
        reading = (self.held[0] if n_held is None else n_held) * worst.token_s
        return _SLOWER * (opened + worst.place_s + self._steps_s(worst) + reading)

    def _steps_s(self, look: Look) -> float:
        return self.n_steps * look.step_s + 2 * _warm_s(look.step_s)


def _worst(looks: Mapping[SplitMode, Look]) -> Look | None:
    """Take the longer time of both modes in everything; None where one of them is not there."""
    pair = [looks[mode] for mode in (SplitMode.LAYER, SplitMode.TENSOR) if mode in looks]
    if len(pair) < _PAIR:
        return None
    return Look(*(max(getattr(one, item.name) for one in pair) for item in dataclasses.fields(Look)))


def _warm_s(step_s: float) -> float:
    return max(LEAST_WARM_STEPS * step_s, min(MOST_WARM_STEPS * step_s, WARM_S + step_s))


def schedule(wish: Wish, looks: Mapping[SplitMode, Look], left_s: float, *, reopened: bool = False) -> Schedule:
    """Choose what to measure in the time that is left, seconds; see `Schedule.rounds_s` for the other arguments."""
    full = _full(wish)
    found = full

    # Whether a switch pays is the question: switches go last, and then there is time for something else.
    def missing_s(now: Schedule) -> float:
        return now.rounds_s(looks, reopened=reopened) + now.switches_s(looks) - left_s

    for begin in (full, replace(full, tiers=(), beside=0)):
        # First without what would save next to nothing: where a model takes long to place, depth costs nothing.
        for worth in (_WORTH, 0.0):
            found = begin
            for cut in _cuts():
                if missing_s(found) <= 0.0:
                    break
                less = cut(found)
                if missing_s(found) - missing_s(less) >= worth * left_s:
                    found = less
            if missing_s(found) <= 0.0:
                return replace(found, cuts=tuple(_said(full, found)))
    return replace(found, cuts=tuple(_said(full, found)))


def _full(wish: Wish) -> Schedule:
    room = wish.room - min(_SPARE, wish.room // 4)
    chunk = max(1, min(wish.n_batch, room))
    deepest = min(room - chunk, MAX_DEPTH)
    depths, depth = [0], chunk
    while depth <= deepest:
        depths.append(depth)
        depth *= 2
    lengths = tuple(n for n in (SHORT, 4 * SHORT, 16 * SHORT) if n < chunk)
    large = min(max(depths[-1], chunk), room)
    held = tuple(sorted({min(SMALL_STATE, chunk), max(large, min(SMALL_STATE, chunk))}))
    n_steps = max(1, min(_MOST_STEPS, room // 8))
    n_seqs, n_ubatches = wish.n_seqs, wish.n_ubatches
    beside = _PAIR * (1 + len(held)) if wish.beside else 0
    # A small context has no spare room for a second sequence.
    crowd = min(_CROWD, chunk) if wish.is_shared and chunk > 1 and wish.room >= 4 * _SPARE else 0
    return Schedule(
        lengths, chunk, tuple(depths), n_seqs, n_steps, n_ubatches, wish.rounds, wish.tiers, held, 3, beside, crowd
    )


Cut = Callable[[Schedule], Schedule]


def _cuts() -> Sequence[Cut]:
    """List the cuts, what is missed least first."""

    def shallower(n: int) -> Cut:
        def cut(now: Schedule) -> Schedule:
            if now.depths[-1] <= n:
                return now
            depths = tuple(depth for depth in now.depths if depth <= n)
            # Two places say what depth adds; the chunk is read at each.
            return _fitted(replace(now, depths=(0, n) if depths == (0,) and n >= now.chunk else depths))

        return cut

    def smaller(chunk: int) -> Cut:
        def cut(now: Schedule) -> Schedule:
            if now.chunk <= chunk:
                return now
            n_ubatches = tuple(n for n in now.n_ubatches if n <= chunk) or now.n_ubatches[:1]
            lengths = tuple(n for n in now.lengths if n < chunk)
            crowd = min(now.crowd, chunk)
            return _fitted(replace(now, chunk=chunk, lengths=lengths, n_ubatches=n_ubatches, crowd=crowd))

        return cut

    def most(**limits: int) -> Cut:
        return lambda now: replace(now, **{name: min(getattr(now, name), n) for name, n in limits.items()})

    def first(name: str, n: int) -> Cut:
        return lambda now: replace(now, **{name: getattr(now, name)[:n]})

    def ends(now: Schedule) -> Schedule:
        return replace(now, n_seqs=tuple(dict.fromkeys((now.n_seqs[0], now.n_seqs[-1]))))

    return (
        most(rounds=3), most(switch_rounds=2), shallower(8192), first("n_ubatches", 2), most(n_steps=16), ends,
        most(beside=_PAIR), first("n_ubatches", 1), smaller(1024), shallower(4096), most(n_steps=8), smaller(512),
        shallower(2048), most(rounds=2), most(switch_rounds=1), first("tiers", 2), most(beside=1, n_steps=4),
        shallower(1024), smaller(256), first("held", 1), first("tiers", 1), most(beside=0), most(crowd=0),
        shallower(512), smaller(128), shallower(256), first("n_seqs", 1), smaller(64), shallower(0),
        first("lengths", 1), most(rounds=1, n_steps=2), smaller(SHORT),
    )  # fmt: skip


def _fitted(now: Schedule) -> Schedule:
    """Keep the states of switches within what is read anyway."""
    most = max(now.depths[-1], now.chunk)
    return replace(now, held=tuple(sorted({min(n, most) for n in now.held})))


def _said(full: Schedule, now: Schedule) -> list[str]:
    """Say what is less than was wished for."""
    words = {
        "chunk": "most tokens at once",
        "depths": "deepest place",
        "n_ubatches": "-ub",
        "n_seqs": "sequences together",
        "held": "tokens held at a switch",
        "crowd": "tokens read beside another sequence",
        "switch_rounds": "switches of a kind",
    }
    found = []
    for one in dataclasses.fields(Schedule):
        was, has = getattr(full, one.name), getattr(now, one.name)
        if one.name not in words or was == has:
            continue
        if one.name == "depths":
            was, has = was[-1], has[-1]
        found.append(f"{words[one.name]}: {_listed(has)}, not {_listed(was)}")
    return found


def _listed(value: object) -> str:
    if isinstance(value, tuple):
        return "/".join(_listed(one) for one in value) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def roomy(
    facts: ModelFacts, placement: Placement, devices: Sequence[DeviceFacts], modes: Sequence[SplitMode]
) -> Placement:
    """Give a placement without a context of its own one in which every depth can be measured, if that fits.

    Args:
        facts: the model.
        placement: with the context that is asked; 0 leaves it to us.
        devices: with the memory that is free.
        modes: all of them shall fit; one that never does counts for nothing.
    """
    if placement.n_ctx:
        return placement
    most = min(facts.n_ctx_train or MAX_DEPTH, MAX_DEPTH + 2 * placement.n_batch)
    n_ctx = least = 2 * SMALL_STATE
    while n_ctx < most:
        n_ctx *= 2

    def fits(mode: SplitMode, n: int) -> bool:
        one = replace(placement.changed(mode=mode), n_ctx=n * placement.n_streams)
        return not lacking(needs_of_mode(plan_mode(facts, one, devices), devices))

    possible = [mode for mode in modes if fits(mode, least)]
    n_ctx = min(n_ctx, most)
    while n_ctx > least and not all(fits(mode, n_ctx) for mode in possible):
        n_ctx //= 2
    return replace(placement, n_ctx=n_ctx * placement.n_streams)


def widths(placement: Placement) -> tuple[int, ...]:
    """Give the sizes of micro-batches worth trying: the placement's, twice and four times, up to a batch."""
    n = min(placement.n_ubatch, placement.n_batch)
    return tuple(dict.fromkeys((n, min(2 * n, placement.n_batch), min(4 * n, placement.n_batch))))


def together(n_seq_max: int) -> tuple[int, ...]:
    """Give the numbers of sequences worth trying: 1, and on by twos to the most."""
    found, n = [1], 2
    while n < n_seq_max:
        found.append(n)
        n *= 2
    return tuple(dict.fromkeys((*found, n_seq_max)))
