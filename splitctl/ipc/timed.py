"""What a bench has timed, repetition by repetition, and summed up for a profile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any

from splitctl.ipc.measuring import Timed
from splitctl.outcome import StageTimes, WeightsTier
from splitctl.placement import SplitMode
from splitctl.planning.profile import Crowd, MeasuredMode, Read, Spread, Step, SwitchTime


@dataclass(slots=True)
class Times:
    """What was timed, by what it was: seconds of each repetition.

    Attributes:
        reads: by tokens and depth.
        steps: by sequences and depth.
        alone: of a decode without another sequence's tokens, by the tokens that it computes.
        crowded: of the same beside those, with how many they were.
    """

    reads: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    steps: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    alone: dict[int, list[float]] = field(default_factory=dict)
    crowded: dict[int, list[tuple[int, float]]] = field(default_factory=dict)

    def take(self, one: Timed) -> None:
        """Add one."""
        if one.n_others == 0:
            self.alone.setdefault(one.n, []).append(one.seconds)
        elif one.n_others is not None:
            self.crowded.setdefault(one.n, []).append((one.n_others, one.seconds))
        else:
            (self.reads if one.is_read else self.steps).setdefault((one.n, one.depth), []).append(one.seconds)

    def mode(self, cell: tuple[SplitMode, int]) -> MeasuredMode | None:
        """Sum them up; None where that says nothing of a mode."""
        if not any(not depth for _, depth in self.reads) or not any(n == 1 for n, _ in self.steps):
            return None
        reads = [Read(n, depth, Spread.of(times)) for (n, depth), times in sorted(self.reads.items())]
        steps = [Step(n, depth, Spread.of(times)) for (n, depth), times in sorted(self.steps.items())]
        return MeasuredMode(*cell, tuple(reads), tuple(steps), tuple(self._crowds()))

    def _crowds(self) -> Iterator[Crowd]:
        for n, found in sorted(self.crowded.items()):
            n_others = round(median(others for others, _ in found))
            yield Crowd(n, n_others, Spread.of(self.alone[n]), Spread.of([seconds for _, seconds in found]))


@dataclass(slots=True)
class Switches:
    """Outcomes of switches, and the steps after them, by direction, whether it was the first, and tokens held."""

    way: str
    outcomes: dict[tuple[SplitMode, SplitMode, bool, int], list[Mapping[str, Any]]] = field(default_factory=dict)
    steps: dict[tuple[SplitMode, int], list[float]] = field(default_factory=dict)

    def times(self, plain: Switches | None) -> Iterator[SwitchTime]:
        """Sum them up.

        Args:
            plain: those with weights from the file, which add nothing to a token.
        """
        for (before, after, is_first, n_held), found in sorted(self.outcomes.items(), key=lambda one: repr(one[0])):
            pauses = [(one["total_ms"] if one["pause_ms"] is None else one["pause_ms"]) / 1e3 for one in found]
            stages = {one.name: _middle(out["stages_ms"][one.name] for out in found) for one in fields(StageTimes)}
            yield SwitchTime(
                before, after, self.way, is_first, n_held,
                pause=Spread.of(pauses),
                total=Spread.of([one["total_ms"] / 1e3 for one in found]),
                stages_ms=StageTimes(**stages),
                more_ms=self._more_ms(plain, after, n_held),
            )  # fmt: skip

    def _more_ms(self, plain: Switches | None, mode: SplitMode, n_held: int) -> float:
        """Tell what a token takes more than with weights from the file; 0 where timings differ by as much."""
        mine = self.steps.get((mode, n_held), [])
        theirs = plain.steps.get((mode, n_held), []) if plain is not None else []
        if not mine or not theirs or self.way != WeightsTier.PINNED.value:
            return 0.0
        # Apart by more than either differs from run to run.
        differ = max(max(one) - min(one) for one in (mine, theirs))
        return (median(mine) - median(theirs)) * 1e3 if min(mine) - max(theirs) > differ else 0.0


def _middle(times: Iterable[float | None]) -> float | None:
    known = [one for one in times if one is not None]
    return median(known) if known else None
