"""Everything that `splitctl plan` answers, from facts that were gathered before."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from splitctl.errors import Reason
from splitctl.model.facts import ModelFacts
from splitctl.placement import Placement, SplitMode
from splitctl.planning import tiers
from splitctl.planning.cells import PADDING, shape_of
from splitctl.planning.compute import is_reserved
from splitctl.planning.fitting import (
    MIN_CHUNK,
    Chunk,
    Need,
    balanced_split,
    bracket,
    lacking,
    largest_chunk,
    largest_context,
    needs_of_mode,
    needs_of_switch,
)
from splitctl.planning.memory import (
    DeviceFacts,
    ModePlan,
    Share,
    SwitchPlan,
    carry_bytes,
    devices_of,
    plan_mode,
    plan_switch,
)
from splitctl.planning.reservation import Reservation
from splitctl.planning.tiers import TierPlan

Size = tuple[int, int, int]
"""Context, batch and micro-batch of a dry run, tokens."""

#: How the contexts grow among which a search for the largest begins.
_GROWTH = 4
#: Contexts around a guess that are asked about too [steps].
_NEAR = (-4, -1, 2, 5)
#: The saved state, and what is read back of it as proof; a conversion takes one of the two places.
CARRY_COPIES = 2


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest context that fits.

    Args:
        n_ctx: tokens; 0 when none does.
        lacking: what the next larger one lacks; empty when the model's own limit stopped it.
    """

    n_ctx: int
    lacking: tuple[Need, ...]


@dataclass(frozen=True, slots=True)
class Known:
    """What was gathered.

    Args:
        facts: the model.
        devices: the devices, with their free memory, read once.
        reservations: what the library would take, by mode; a mode without any is planned by the formula.
        of_search: the same for the contexts among which the largest is looked for. They do not depend on the context
            that is asked, and so neither does what is found.
    """

    facts: ModelFacts
    devices: tuple[DeviceFacts, ...]
    reservations: Mapping[SplitMode, Sequence[Reservation]] = field(default_factory=dict)
    of_search: Mapping[SplitMode, Sequence[Reservation]] = field(default_factory=dict)

    def plan(self, placement: Placement) -> ModePlan:
        """Plan a placement."""
        return plan_mode(self.facts, placement, self.devices, self.reservations.get(placement.mode, ()))

    def needs(self, *placements: Placement) -> tuple[Need, ...]:
        """Tell what a placement, or a switch from one to another with a full context, wants of every pool."""
        if len(placements) == 1:
            return needs_of_mode(self.plan(placements[0]), self.devices)
        return needs_of_switch(self.switch(*placements), self.devices)

    def switch(self, before: Placement, after: Placement) -> SwitchPlan:
        """Plan a switch with a full context."""
        carry = CARRY_COPIES * carry_bytes(self.facts, before)
        return plan_switch(self.plan(before), self.plan(after), carry)

    def tiers(self, before: Placement, after: Placement) -> tuple[TierPlan, ...]:
        """Plan a switch with a full context in every way that there is."""
        first, switch = self.plan(before), self.switch(before, after)
        context = {one.real for one in devices_of(before, self.devices)}

        def both(name: str, there: Collection[str]) -> TierPlan:
            free, said = tiers.left_by(first, self.devices), self.reservations.get(after.mode, ())
            second = plan_mode(self.facts, after, free, said, there=there)
            return tiers.of_both(name, first, second, self.devices, switch.carry)

        return (
            tiers.of_file(switch, self.devices),
            tiers.of_pinned(switch, self.devices, self.facts.weight_bytes),
            both(tiers.RESIDENT, context),
            both(tiers.BESIDE, ()),
        )

    def largest(self, *placements: Placement) -> Largest:
        """Find the largest context that fits in a placement, or in both and through the switch between them."""
        return _Search(self, placements).largest()

    def doubts(self, *placements: Placement) -> tuple[int, ...]:
        """Choose contexts that the library should reserve too, for `largest` to be exact; empty where it is."""
        return _Search(self, placements).doubts()


@dataclass(frozen=True, slots=True)
class ModeAnswer:
    """The answer for one mode.

    Args:
        plan: its bytes.
        needs: of every pool of memory.
        largest: the largest context in this mode alone.
        balanced: the tensor split that leaves every device equally full; empty with one device.
        refused: why the rules refuse the mode; empty when they do not.
        warnings: what else the rules say.
        unsaid: why the library did not say its compute buffers; empty when it did.
    """

    plan: ModePlan
    needs: tuple[Need, ...]
    largest: Largest
    balanced: tuple[float, ...]
    refused: tuple[Reason, ...] = ()
    warnings: tuple[Reason, ...] = ()
    unsaid: str = ""

    @property
    def fits(self) -> bool:
        """Whether every pool has what is wanted of it."""
        return not lacking(self.needs)


@dataclass(frozen=True, slots=True)
class SwitchAnswer:
    """The answer for a switch.

    Args:
        plan: its peaks.
        needs: of every pool at the worst moment.
        largest: the largest context that fits in both placements and survives the switch.
        tiers: what it takes in every way that there is; the first one, from the file, is the plan above.
    """

    plan: SwitchPlan
    needs: tuple[Need, ...]
    largest: Largest
    tiers: tuple[TierPlan, ...]

    @property
    def fits(self) -> bool:
        """Whether every pool has what is wanted of it."""
        return not lacking(self.needs)


class _Search:
    """Looks for the largest context that fits in one placement, or in two and through the switch between them."""

    def __init__(self, known: Known, placements: Sequence[Placement]) -> None:
        self._known = dataclasses.replace(known, reservations=known.of_search)
        self._placements = placements
        self._limit = trained_context(known.facts)
        self._step = step_of(placements[0])
        said = [one for placement in placements for one in known.of_search.get(placement.mode, ())]
        contexts = sorted({min(one.n_ctx, self._limit) for one in said})
        self._marks = [n_ctx for n_ctx in contexts if self._is_exact(n_ctx)]

    def largest(self) -> Largest:
        """Find it."""
        return Largest(*largest_context(self._limit, self._needs, step=self._step, marks=self._marks))

    def doubts(self) -> tuple[int, ...]:
        """Choose the contexts that should be reserved, or none."""
        if not self._marks and not self._is_exact(self._limit):
            return tuple(_contexts_of_search(self._placements[0], self._known.facts))
        found = self.largest().n_ctx
        ends = {n_ctx for n_ctx in (found, min(found + self._step, self._limit)) if n_ctx}
        if all(self._is_exact(n_ctx) for n_ctx in ends):
            return ()
        low, high = bracket(self._limit, self._needs, self._marks)
        # On a straight line the guess is off by the rounding of a log line; elsewhere the middle halves what is left.
        near = {found + n * self._step for n in _NEAR} | {(low + high) // 2 // self._step * self._step}
        return tuple(sorted(ends | {n_ctx for n_ctx in near if low < n_ctx < high}))

    def _needs(self, n_ctx: int) -> tuple[Need, ...]:
        return self._known.needs(*self._sized(n_ctx))

    def _sized(self, n_ctx: int) -> list[Placement]:
        return [dataclasses.replace(placement, n_ctx=n_ctx) for placement in self._placements]

    def _is_exact(self, n_ctx: int) -> bool:
        """Tell whether the library said all of it; a mode in which it says nothing has no better answer."""
        return all(
            is_reserved(self._known.facts, placement, said)
            for placement in self._sized(n_ctx)
            if (said := self._known.of_search.get(placement.mode, ()))
        )


def searched(
    known: Known,
    goals: Sequence[tuple[Placement, ...]],
    ask: Callable[[SplitMode, Sequence[Size]], Sequence[Reservation]],
) -> Known:
    """Have the library asked until it said every largest context, and the next larger one, itself.

    Args:
        known: with what the library said of the sizes that a search begins with.
        goals: what `Known.largest` will be asked: placements, and pairs of them.
        ask: what the library would take in a mode, for each of these sizes; those that it refuses are left out.
    """
    done: dict[SplitMode, set[Size]] = {mode: set() for mode, said in known.of_search.items() if said}
    while True:
        wanted: dict[SplitMode, set[Size]] = {mode: set() for mode in done}
        for goal in goals:
            contexts = known.doubts(*goal)
            for one in goal:
                if one.mode in done:
                    wanted[one.mode] |= {size_of(one, n_ctx) for n_ctx in contexts} - done[one.mode]
        if not any(wanted.values()):
            return known
        found = dict(known.of_search)
        for mode, sizes in wanted.items():
            if sizes:
                found[mode] = (*found[mode], *ask(mode, sorted(sizes)))
                done[mode] |= sizes
        known = dataclasses.replace(known, of_search=found)


def answer_mode(known: Known, placement: Placement) -> ModeAnswer:
    """Answer for one placement, the rules aside."""
    plan = known.plan(placement)
    balanced = balanced_split(plan, known.devices)
    return ModeAnswer(plan, known.needs(placement), known.largest(placement), balanced)


def answer_switch(known: Known, before: Placement, after: Placement) -> SwitchAnswer:
    """Answer for a switch from the placement of the prompt to that of the generation."""
    plan, needs = known.switch(before, after), known.needs(before, after)
    return SwitchAnswer(plan, needs, known.largest(before, after), known.tiers(before, after))


def with_chunk(placement: Placement, tokens: int) -> Placement:
    """Give a placement another micro-batch, and a batch that holds it."""
    return dataclasses.replace(placement, n_ubatch=tokens, n_batch=max(placement.n_batch, tokens))


def answer_chunk(known: Known, placement: Placement, limit: int) -> Chunk:
    """Find the largest chunk for a prompt in a placement, of `limit` tokens at most."""

    def needs(tokens: int) -> tuple[Need, ...]:
        return known.needs(with_chunk(placement, tokens))

    return largest_chunk(limit, needs)


def sizes_of_chunks(placement: Placement, facts: ModelFacts, n_ubatches: Sequence[int]) -> tuple[Size, ...]:
    """Choose the sizes that a dry run should plan, so that all other micro-batches lie between two of them.

    Args:
        placement: with the context that is asked; 0 for the model's own.
        facts: the model.
        n_ubatches: micro-batches that will be asked about.
    """
    batches = sorted({*n_ubatches, placement.n_ubatch, MIN_CHUNK, 1})
    asked = placement.n_ctx or trained_context(facts)
    return tuple(size_of(with_chunk(placement, batch), asked) for batch in batches)


def sizes_of_search(placement: Placement, facts: ModelFacts) -> tuple[Size, ...]:
    """Choose the sizes among which a search for the largest context begins, whatever context is asked."""
    return tuple(size_of(placement, n_ctx) for n_ctx in _contexts_of_search(placement, facts))


def _contexts_of_search(placement: Placement, facts: ModelFacts) -> list[int]:
    limit, n_ctx, contexts = trained_context(facts), step_of(placement), []
    while n_ctx < limit:
        contexts.append(n_ctx)
        n_ctx *= _GROWTH
    return [*contexts, limit]


def of_sizes(
    said: Sequence[Reservation], placement: Placement, facts: ModelFacts, sizes: Sequence[Size]
) -> tuple[Reservation, ...]:
    """Pick what the library said of some sizes."""
    shapes = [shape_of(facts, sized(placement, size)) for size in sizes]
    wanted = {(shape.n_ctx, shape.n_ubatch) for shape in shapes}
    return tuple(one for one in said if (one.n_ctx, one.n_ubatch) in wanted)


def sized(placement: Placement, size: Size) -> Placement:
    """Give a placement the sizes of a dry run."""
    return dataclasses.replace(placement, n_ctx=size[0], n_batch=size[1], n_ubatch=size[2])


def size_of(placement: Placement, n_ctx: int) -> Size:
    """Give a placement's sizes with another context."""
    return (n_ctx, placement.n_batch, placement.n_ubatch)


def step_of(placement: Placement) -> int:
    """Tell by how much a placement's context grows at least, tokens."""
    return PADDING * placement.n_streams


def trained_context(facts: ModelFacts) -> int:
    """Tell the largest context worth looking for: what the model was trained for."""
    return facts.n_ctx_train or PADDING


def share_json(share: Share) -> dict[str, Any]:
    """Give a share as plain values; sizes in bytes."""
    return {**dataclasses.asdict(share), "total": share.total}


def need_json(need: Need) -> dict[str, Any]:
    """Give a need as plain values; sizes in bytes."""
    return {"pool": need.pool, "wanted": need.wanted, "free": need.free, "fits": need.fits}


def _largest_json(largest: Largest) -> dict[str, Any]:
    return {"n_ctx": largest.n_ctx, "lacking": [need_json(need) for need in largest.lacking]}


def mode_json(answer: ModeAnswer) -> dict[str, Any]:
    """Give an answer for a mode as plain values."""
    plan = answer.plan
    return {
        "placement": plan.placement.to_json(),
        "n_ctx": plan.n_ctx,
        "devices": [share_json(share) for share in plan.shares],
        "host": share_json(plan.host),
        "total": plan.total,
        "compute_by": "library" if plan.measured else "formula",
        "unsaid": answer.unsaid,
        "needs": [need_json(need) for need in answer.needs],
        "fits": answer.fits,
        "largest_context": _largest_json(answer.largest),
        "tensor_split": {
            "asked": list(plan.asked),
            "effective": list(plan.effective),
            "effective_cache": list(plan.effective_cache),
            "balanced": list(answer.balanced),
        },
        "refused": [dataclasses.asdict(one) for one in answer.refused],
        "warnings": [dataclasses.asdict(one) for one in answer.warnings],
    }


def switch_json(answer: SwitchAnswer) -> dict[str, Any]:
    """Give an answer for a switch as plain values."""
    plan = answer.plan
    return {
        "from": plan.before.placement.mode.value,
        "to": plan.after.placement.mode.value,
        "devices": [share_json(share) for share in plan.peaks],
        "host": share_json(plan.host),
        "total": plan.total,
        "carry": plan.carry,
        "needs": [need_json(need) for need in answer.needs],
        "fits": answer.fits,
        "largest_context": _largest_json(answer.largest),
    }


def tiers_json(answer: SwitchAnswer) -> dict[str, Any]:
    """Give what a switch takes in every way as plain values, by the way's name."""
    return {
        tier.name: {
            "fits": tier.fits,
            "reason": tier.reason,
            "devices": [share_json(share) for share in tier.devices],
            "host": share_json(tier.host),
            "total": sum(share.total for share in tier.devices),
            "needs": [need_json(need) for need in tier.needs],
        }
        for tier in answer.tiers
    }
