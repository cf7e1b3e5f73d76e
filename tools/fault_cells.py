"""The table of faults: every stage of a switch x every way to fail x both ways x one and four streams.

A second table is of switches beside: the same at each step of the second worker, and of the first meanwhile; a third is
of those in which idle sequences go ahead. A fourth is of switches whose weights are there already: both placements
kept, or a copy in host memory.

A cell names what is asked of the library (tests/stublib, control.c has the grammar) and what the right end is. What
makes no sense is in the table too, with its reason, so that nothing is left out silently.
"""

from __future__ import annotations

import dataclasses
import enum
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from splitctl.outcome import WeightsTier

WAYS = (("layer", "tensor"), ("tensor", "layer"))
N_STREAMS = (1, 4)

STAGES = (
    *("checking", "saving", "sealing", "freeing", "placing", "building", "restoring", "proving"),
    "trial",
)
#: The stages before a carry of this switch is sealed: a worker that dies there takes its state with it.
UNSEALED = frozenset({"checking", "saving", "sealing"})


FEW_REAL = ("checking", "restoring", "trial")
"""The stages of the short table of a real library."""


class Kind(enum.Enum):
    """A way to fail."""

    KILLED = "worker-killed"
    ABORTS = "worker-aborts"
    STOPPED = "worker-stopped"
    FAILS = "call-fails"
    HANGS = "call-hangs"
    DAMAGED = "damaged-bytes"
    ABORTS_FOR_EVER = "worker-aborts-for-ever"
    FAILS_FOR_EVER = "call-fails-for-ever"
    HANGS_FOR_EVER = "call-hangs-for-ever"

    @property
    def is_for_ever(self) -> bool:
        """Whether it meets every later try too, in whichever mode."""
        return self.value.endswith("-for-ever")


#: Kinds of which the worker is lost.
LETHAL = frozenset(Kind) - {Kind.FAILS, Kind.DAMAGED, Kind.FAILS_FOR_EVER}
#: Kinds that show by silence alone.
SILENT = frozenset({Kind.STOPPED, Kind.HANGS, Kind.HANGS_FOR_EVER})
ONCE = tuple(kind for kind in Kind if not kind.is_for_ever)
FOR_EVER = tuple(kind for kind in Kind if kind.is_for_ever)
#: Kinds that need no stub: a signal from outside will do, whichever the library.
BY_SIGNAL = (Kind.KILLED, Kind.STOPPED)


class End(enum.Enum):
    """How a session ends up, rightly."""

    SWITCHED = "switched all the same"
    SERVING = "serving"
    RECOMPUTED = "serving, tokens read again"
    PARKED = "parked"


@dataclass(frozen=True, slots=True)
class Cell:
    """One fault in one switch.

    Args:
        stage: where it strikes.
        kind: how.
        start: the mode before the switch.
        target: the mode wanted.
        n_streams: sequences that generate meanwhile.
        items: what is asked of the stub; "" where the cell makes no sense.
        end: how the session ends up.
        words: what the reason must say; all of them.
        why_not: why the cell makes no sense, "" where it does.
        is_beside: the switch is made by a second worker.
        signal: what the first worker gets from outside as the switch reaches its stage; None: nothing.
        weights: where the switch takes the weights from, once it has been made both ways.
        n_idle: sequences that are idle meanwhile, each with a stream of cells.
    """

    stage: str
    kind: Kind
    start: str
    target: str
    n_streams: int
    items: str = ""
    end: End = End.SERVING
    words: tuple[str, ...] = ()
    why_not: str = ""
    is_beside: bool = False
    signal: signal.Signals | None = None
    weights: WeightsTier = WeightsTier.FILE
    n_idle: int = 0

    @property
    def failed_at(self) -> str:
        """The stage that the outcome names."""
        step = self.stage.rpartition(".")[2]
        return "trial" if step in {"warm-up", "first-step", "copying", "taking"} else step

    @property
    def may_fail_at(self) -> frozenset[str]:
        """The stages of which the outcome names one: some of what happens is noticed a little later."""
        if (self.stage, self.kind) == ("first.placing", Kind.STOPPED):
            return frozenset({"placing", "building", "trial", "quiescing"})
        # The other one may have begun by then.
        return frozenset({"sealing", "restoring", "proving"} if self.stage == "first.handed" else {self.failed_at})

    @property
    def is_worker_lost(self) -> bool:
        """Whether the worker that serves is lost, and replaced."""
        if not self.is_beside:
            return self.kind in LETHAL
        return self.stage.startswith("first.") and self.kind in LETHAL and self.end is not End.SWITCHED

    @property
    def name(self) -> str:
        """For example ``placing:worker-killed:layer>tensor:4``."""
        tier = "" if self.weights is WeightsTier.FILE else f":{self.weights.value}"
        idle = ":idle" if self.n_idle else ""
        return f"{self.stage}:{self.kind.value}:{self.start}>{self.target}:{self.n_streams}{tier}{idle}"


#: The call of each stage that a fault is put into, and in whose mode: S began the switch, T is wanted.
_CALLS = {
    "saving": ("get_data", "S"),
    "freeing": ("free", "S"),
    "placing": ("load", "T"),
    "building": ("init", "T"),
    "restoring": ("set_data", "T"),
    "proving": ("get_data", "T"),
    "trial": ("decode", "T"),
}
_ACTIONS = {
    Kind.KILLED: "kill",
    Kind.ABORTS: "abort",
    Kind.STOPPED: "stop",
    Kind.HANGS: "hang",
    Kind.ABORTS_FOR_EVER: "abort",
    Kind.HANGS_FOR_EVER: "hang",
}
_FAILURES = {
    "saving": "get_data:zero",
    "placing": "load:null",
    "building": "init:null",
    "restoring": "set_data:zero",
    "proving": "get_data:zero",
    "trial": "decode:fail",
}
_DAMAGES = {
    "saving": "get_data:short:S@1",  # fewer bytes than were announced
    "sealing": "get_data:damage:S@1",  # a count inside them is wrong
    "restoring": "set_data:short:T@1",  # the library says that it read fewer
    "proving": "set_data:flip:T@1",  # it took them, and holds something else
    "trial": "decode:nan:T@1",  # logits that are no numbers
}
_SAID = {
    Kind.KILLED: ("signal 9", "SIGKILL"),
    Kind.ABORTS: ("signal 6", "SIGABRT", "GGML_ASSERT"),
    Kind.ABORTS_FOR_EVER: ("signal 6", "SIGABRT", "GGML_ASSERT"),
}
_NO_CALL = "no library call is made in this stage"
_NO_RESULT = "the calls of this stage return nothing"
_NO_BYTES = "no bytes come back in this stage"
_NO_LASTING = "what fails in the new mode alone fails once: the old one is not asked for it"


def cells() -> list[Cell]:
    """Give the whole table, what makes no sense included."""
    return [
        _cell(stage, kind, start, target, n_streams)
        for stage in STAGES
        for kind in Kind
        for start, target in WAYS
        for n_streams in N_STREAMS
    ]


def few_cells() -> list[Cell]:
    """Give a short table: every stage and every kind comes, ways and streams in turn, what lasts once an end."""
    once: list[Cell] = []
    lasting: dict[tuple[End, bool], Cell] = {}
    for cell in cells():
        turn = STAGES.index(cell.stage) + ONCE.index(cell.kind) if cell.kind in ONCE else STAGES.index(cell.stage)
        if cell.why_not or (cell.start, cell.target) != WAYS[turn % 2] or cell.n_streams != N_STREAMS[turn // 2 % 2]:
            continue
        if cell.kind in ONCE and turn % 3 == 0:
            once.append(cell)
        elif cell.kind not in ONCE:
            lasting.setdefault((cell.end, cell.kind in LETHAL), cell)
    return [*once, *lasting.values()]


def real_cells() -> Iterator[Cell]:
    """Give the cells that any library can be put through: the worker gets a signal as it reaches a stage."""
    for stage in STAGES:
        for kind in BY_SIGNAL:
            for start, target in WAYS:
                for n_streams in N_STREAMS:
                    end = End.RECOMPUTED if stage in UNSEALED else End.SERVING
                    item = f"at-{stage}:{_ACTIONS[kind]}@1"
                    yield Cell(stage, kind, start, target, n_streams, item, end, _SAID.get(kind, ()))


def few_real_cells() -> list[Cell]:
    """Give one of them before the seal, one after it and one on trial, with kinds, ways and streams in turn."""
    found: dict[str, dict[Kind, Cell]] = {}
    for cell in real_cells():
        turn = STAGES.index(cell.stage)
        if (cell.start, cell.target) == WAYS[turn % 3 == 0] and cell.n_streams == N_STREAMS[(turn + 1) // 2 % 2]:
            found.setdefault(cell.stage, {})[cell.kind] = cell
    return [found[stage][BY_SIGNAL[STAGES.index(stage) // 2 % 2]] for stage in FEW_REAL]


def _cell(stage: str, kind: Kind, start: str, target: str, n_streams: int) -> Cell:
    def cell(items: str, end: End = End.SERVING, why_not: str = "") -> Cell:
        asked = items.replace(":S", f":{start}").replace(":T", f":{target}")
        words = () if why_not else _SAID.get(kind, ())
        return Cell(stage, kind, start, target, n_streams, asked, end, words, why_not)

    if kind.is_for_ever:
        return cell(*_lasting(stage, kind))
    lost = End.RECOMPUTED if stage in UNSEALED else End.SERVING
    if kind is Kind.FAILS:
        if stage not in _FAILURES:
            return cell("", why_not=_NO_RESULT if stage in _CALLS else _NO_CALL)
        return cell(f"{_FAILURES[stage]}:{_CALLS[stage][1]}@1")
    if kind is Kind.DAMAGED:
        return cell(_DAMAGES[stage]) if stage in _DAMAGES else cell("", why_not=_NO_BYTES)
    if stage in _CALLS:
        call, mode = _CALLS[stage]
        return cell(f"{call}:{_ACTIONS[kind]}:{mode}@1", lost)
    if kind is Kind.HANGS:
        return cell("", why_not=_NO_CALL)
    return cell(f"at-{stage}:{_ACTIONS[kind]}@1", lost)


def _lasting(stage: str, kind: Kind) -> tuple[str, End, str]:
    """What a fault that stays in the library comes to: items, end, why not."""
    if stage not in _CALLS:
        return "", End.SERVING, _NO_CALL
    if stage in {"freeing", "proving"}:
        return "", End.SERVING, _NO_LASTING
    if kind is Kind.FAILS_FOR_EVER:
        if stage == "trial":
            return (
                "",
                End.SERVING,
                "no placement can generate any more, and none of them dies: streams end in its error",
            )
        item = _FAILURES[stage]
    else:
        item = f"{_CALLS[stage][0]}:{_ACTIONS[kind]}"
    if stage == "saving":
        return item, End.RECOMPUTED if kind in LETHAL else End.SERVING, ""
    return item, End.RECOMPUTED if stage == "restoring" else End.PARKED, ""


# ---- weights that are there already ----

#: Stages of which both placements kept, or a copy, make something else.
_TIER_STAGES = ("freeing", "placing", "building", "restoring", "proving")


def resident_cells() -> list[Cell]:
    """Give the table of switches between two kept placements: the worker dies, or a call fails that is still made."""
    return [
        dataclasses.replace(cell, items=items, weights=WeightsTier.RESIDENT)
        for cell in cells()
        if cell.stage in _TIER_STAGES and not cell.why_not
        for items in [f"at-{cell.stage}:kill@1" if cell.kind is Kind.KILLED else cell.items]
        if cell.kind is Kind.KILLED or (cell.kind in {Kind.FAILS, Kind.DAMAGED} and cell.stage in _TIER_STAGES[-2:])
    ]


def few_resident_cells() -> list[Cell]:
    """Give one that dies while it places nothing, and one whose kept context does not take the state."""
    wanted = {("placing", Kind.KILLED, 4, "layer"), ("restoring", Kind.FAILS, 1, "tensor")}
    return [cell for cell in resident_cells() if (cell.stage, cell.kind, cell.n_streams, cell.start) in wanted]


def pinned_cells() -> list[Cell]:
    """Give the table of switches that upload a copy, on any library: the worker gets a signal as it reaches a stage."""
    return [
        dataclasses.replace(cell, weights=WeightsTier.PINNED) for cell in real_cells() if cell.stage in _TIER_STAGES
    ]


def few_pinned_cells() -> list[Cell]:
    """Give the one that is back from the copy after it died while it placed."""
    wanted = ("placing", Kind.KILLED, 4, "layer")
    return [cell for cell in pinned_cells() if (cell.stage, cell.kind, cell.n_streams, cell.start) == wanted]


# ---- beside ----

BESIDE_STAGES = (
    *("second.placing", "second.building", "second.warm-up", "second.restoring", "second.proving", "second.first-step"),
    *("first.placing", "first.saving", "first.sealing", "first.handed", "first.swapped"),
)
"""Who it strikes, and at which step of the switch: the first worker meets what the second is at, too."""

#: As `_CALLS`: the second worker saves an empty memory before it restores, and makes a first decode ahead.
_CALLS_BESIDE = {
    "second.placing": ("load", "T", 1),
    "second.building": ("init", "T", 1),
    "second.warm-up": ("decode", "T", 1),
    "second.restoring": ("set_data", "T", 1),
    "second.proving": ("get_data", "T", 3),  # the warm-up and what it held before come first
    "second.first-step": ("decode", "T", 2),
    "first.saving": ("get_data", "S", 1),
}
_FAILURES_BESIDE = {
    "second.placing": "load:null",
    "second.building": "init:null",
    "second.warm-up": "decode:fail",
    "second.restoring": "set_data:zero",
    "second.proving": "get_data:zero",
    "second.first-step": "decode:fail",
    "first.saving": "get_data:zero",
}
_DAMAGES_BESIDE = {
    "second.warm-up": "decode:nan:T@1",
    "second.restoring": "set_data:short:T@1",
    "second.proving": "set_data:flip:T@1",
    "second.first-step": "decode:nan:T@2",
    "first.saving": "get_data:short:S@1",
    "first.sealing": "get_data:damage:S@1",
}
_SIGNALS = {Kind.KILLED: signal.SIGKILL, Kind.STOPPED: signal.SIGSTOP, Kind.ABORTS: signal.SIGABRT}
_FROM_OUTSIDE = "the worker that does nothing then calls no library"


def beside_cells() -> list[Cell]:
    """Give the table of switches beside; what lasts is left to the one in place, to whose worker it comes back."""
    return [
        _beside_cell(stage, kind, start, target, n_streams)
        for stage in BESIDE_STAGES
        for kind in ONCE
        for start, target in WAYS
        for n_streams in N_STREAMS
    ]


def few_beside_cells() -> list[Cell]:
    """Give a short table of them: every step and every kind comes, ways and streams in turn."""
    found = []
    for index, stage in enumerate(BESIDE_STAGES):
        here = [cell for cell in beside_cells() if cell.stage == stage and not cell.why_not]
        kinds = sorted({cell.kind for cell in here}, key=ONCE.index)
        kind, way, n_streams = kinds[index % len(kinds)], WAYS[index % 2], N_STREAMS[index // 2 % 2]
        found += [c for c in here if (c.kind, (c.start, c.target), c.n_streams) == (kind, way, n_streams)]
    return found


def real_beside_cells() -> list[Cell]:
    """Give those that any library can be put through: a worker gets a signal as it tells of a stage."""
    told = {"second.warm-up": "trial"}
    cells = []
    for cell in beside_cells():
        step = told.get(cell.stage, cell.failed_at)
        if cell.kind in BY_SIGNAL and cell.stage not in {"second.first-step", "first.swapped"}:
            items = cell.items and f"at-{step}:{_ACTIONS[cell.kind]}@1"
            cells.append(dataclasses.replace(cell, items=items))
    return cells


def few_real_beside_cells() -> list[Cell]:
    """Give two of them: the second worker while it restores, the first when it has sealed."""
    wanted = {("second.restoring", Kind.KILLED, 1), ("first.handed", Kind.KILLED, 1)}
    return [
        cell
        for cell in real_beside_cells()
        if (cell.stage, cell.kind, cell.n_streams) in wanted and cell.start == "layer"
    ]


def _beside_cell(stage: str, kind: Kind, start: str, target: str, n_streams: int) -> Cell:
    def cell(items: str, end: End = End.SERVING, why_not: str = "", by: signal.Signals | None = None) -> Cell:
        asked = items.replace(":S", f":{start}").replace(":T", f":{target}")
        words = _SAID.get(kind, ()) if end is not End.SWITCHED and not why_not else ()
        words = tuple(word for word in words if by is None or word != "GGML_ASSERT")
        return Cell(stage, kind, start, target, n_streams, asked, end, words, why_not, is_beside=True, signal=by)

    if kind is Kind.FAILS:
        if stage not in _FAILURES_BESIDE:
            return cell("", why_not=_NO_RESULT if stage in _CALLS_BESIDE else _NO_CALL)
        _, mode, turn = _CALLS_BESIDE[stage]
        return cell(f"{_FAILURES_BESIDE[stage]}:{mode}@{turn}")
    if kind is Kind.DAMAGED:
        return cell(_DAMAGES_BESIDE[stage]) if stage in _DAMAGES_BESIDE else cell("", why_not=_NO_BYTES)
    lost = End.RECOMPUTED if stage in {"first.placing", "first.saving", "first.sealing"} else End.SERVING
    if stage in _CALLS_BESIDE:
        call, mode, turn = _CALLS_BESIDE[stage]
        return cell(f"{call}:{_ACTIONS[kind]}:{mode}@{turn}", lost)
    if kind is Kind.HANGS:
        return cell("", why_not=_NO_CALL if stage == "first.sealing" else _FROM_OUTSIDE)
    # Of a worker that has given all that it had nobody waits for a word.
    is_unseen = stage == "first.swapped" or (stage == "first.handed" and kind is Kind.STOPPED)
    end = End.SWITCHED if is_unseen else lost
    if stage in {"first.sealing", "first.handed"}:
        return cell(f"at-{stage.partition('.')[2]}:{_ACTIONS[kind]}@1", end)
    return cell("", end, by=_SIGNALS[kind])


# ---- idle sequences ahead ----

N_IDLE = 2
_CALLS_AHEAD = {
    "first.copying": ("seq_get_data", "S", 1),
    "second.taking": ("seq_set_data", "T", 1),
    "first.saving": ("seq_get_data", "S", N_IDLE + 1),
    "second.restoring": ("seq_set_data", "T", N_IDLE + 1),
    "second.proving": ("seq_get_data", "T", N_IDLE + 1),
}
AHEAD_STAGES = (*_CALLS_AHEAD, "first.handed")
"""Two steps that there are for idle sequences alone, and those in which what had not gone ahead follows."""
_DAMAGES_AHEAD = {
    "first.copying": "seq_get_data:damage:S@1",
    "second.taking": "seq_set_data:flip:T@1",
    "first.saving": f"seq_get_data:short:S@{N_IDLE + 1}",
    "second.restoring": f"seq_set_data:short:T@{N_IDLE + 1}",
    "second.proving": f"seq_set_data:flip:T@{N_IDLE + 1}",
}
#: Where a call that fails costs no more than that the state goes in one piece.
_IN_ONE_PIECE = frozenset({"first.copying", "second.taking", "first.saving"})


def ahead_cells() -> list[Cell]:
    """Give the table of switches beside in which idle sequences go ahead of one that generates."""
    return [_ahead_cell(stage, kind, *way) for stage in AHEAD_STAGES for kind in ONCE for way in WAYS]


def few_ahead_cells() -> list[Cell]:
    """Give three of them: a loss over the copies, one that does not come through, and a loss when all lies sealed."""
    wanted = {("first.copying", Kind.KILLED), ("second.taking", Kind.FAILS), ("first.handed", Kind.KILLED)}
    found = [cell for cell in ahead_cells() if (cell.stage, cell.kind) in wanted]
    return [cell for index, cell in enumerate(found) if index % 4 in {0, 3}]


def _ahead_cell(stage: str, kind: Kind, start: str, target: str) -> Cell:
    if stage not in _CALLS_AHEAD:
        return dataclasses.replace(_beside_cell(stage, kind, start, target, 1), n_idle=N_IDLE)
    call, mode, turn = _CALLS_AHEAD[stage]
    end = End.RECOMPUTED if stage.startswith("first.") else End.SERVING
    if kind is Kind.FAILS:
        items = f"{call}:zero:{mode}@{turn}"
    elif kind is Kind.DAMAGED:
        items = _DAMAGES_AHEAD[stage]
    else:
        items = f"{call}:{_ACTIONS[kind]}:{mode}@{turn}"
    if kind not in LETHAL:
        end = End.SWITCHED if stage in _IN_ONE_PIECE else End.SERVING
    items = items.replace(":S", f":{start}").replace(":T", f":{target}")
    words = () if end is End.SWITCHED else _SAID.get(kind, ())
    return Cell(stage, kind, start, target, 1, items, end, words, is_beside=True, n_idle=N_IDLE)
