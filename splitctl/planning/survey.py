"""Everything that `splitctl plan` answers, from facts that were gathered before."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from splitctl.errors import Reason
from splitctl.model.facts import ModelFacts
from splitctl.placement import Placement, SplitMode
from splitctl.planning.cells import PADDING
from splitctl.planning.fitting import (
    MIN_CHUNK,
    Chunk,
    Need,
    balanced_split,
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
    plan_mode,
    plan_switch,
)
from splitctl.planning.reservation import Reservation

#: The saved state, and what is read back of it as proof; a conversion takes one of the two places.
CARRY_COPIES = 2


@dataclass(frozen=True, slots=True)
class Known:
    """What was gathered.

    Args:
        facts: the model.
        devices: the devices, with their free memory, read once.
        reservations: what the library would take, by mode; a mode without any is planned by the formula.
    """

    facts: ModelFacts
    devices: tuple[DeviceFacts, ...]
    reservations: Mapping[SplitMode, Sequence[Reservation]] = field(default_factory=dict)

    def plan(self, placement: Placement) -> ModePlan:
        """Plan a placement."""
        return plan_mode(self.facts, placement, self.devices, self.reservations.get(placement.mode, ()))

    def switch(self, before: Placement, after: Placement) -> SwitchPlan:
        """Plan a switch with a full context."""
        carry = CARRY_COPIES * carry_bytes(self.facts, before)
        return plan_switch(self.plan(before), self.plan(after), carry)

    def limit(self, placement: Placement) -> int:
        """The largest context worth asking for: what the model was trained for, or more where more is asked."""
        return max(self.facts.n_ctx_train, placement.n_ctx, PADDING)


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
    """

    plan: SwitchPlan
    needs: tuple[Need, ...]
    largest: Largest

    @property
    def fits(self) -> bool:
        """Whether every pool has what is wanted of it."""
        return not lacking(self.needs)


def answer_mode(known: Known, placement: Placement) -> ModeAnswer:
    """Answer for one placement, the rules aside."""
    plan = known.plan(placement)

    def needs(n_ctx: int) -> tuple[Need, ...]:
        return needs_of_mode(known.plan(dataclasses.replace(placement, n_ctx=n_ctx)), known.devices)

    step = PADDING * (1 if placement.kv_unified else placement.n_seq_max)
    largest = Largest(*largest_context(known.limit(placement), needs, step=step))
    return ModeAnswer(plan, needs_of_mode(plan, known.devices), largest, balanced_split(plan, known.devices))


def answer_switch(known: Known, before: Placement, after: Placement) -> SwitchAnswer:
    """Answer for a switch from the placement of the prompt to that of the generation."""

    def needs(n_ctx: int) -> tuple[Need, ...]:
        plan = known.switch(dataclasses.replace(before, n_ctx=n_ctx), dataclasses.replace(after, n_ctx=n_ctx))
        return needs_of_switch(plan, known.devices)

    step = PADDING * (1 if after.kv_unified else after.n_seq_max)
    largest = Largest(*largest_context(known.limit(after), needs, step=step))
    plan = known.switch(before, after)
    return SwitchAnswer(plan, needs_of_switch(plan, known.devices), largest)


def with_chunk(placement: Placement, tokens: int) -> Placement:
    """Give a placement another micro-batch, and a batch that holds it."""
    return dataclasses.replace(placement, n_ubatch=tokens, n_batch=max(placement.n_batch, tokens))


def answer_chunk(known: Known, placement: Placement, limit: int) -> Chunk:
    """Find the largest chunk for a prompt in a placement, of `limit` tokens at most."""

    def needs(tokens: int) -> tuple[Need, ...]:
        return needs_of_mode(known.plan(with_chunk(placement, tokens)), known.devices)

    return largest_chunk(limit, needs)


def sizes_to_ask(
    placement: Placement, facts: ModelFacts, n_ubatches: Sequence[int]
) -> tuple[tuple[int, int, int], ...]:
    """Choose the sizes that a dry run should plan, so that all the others lie between two of them.

    Args:
        placement: with the context that is asked; 0 for the model's own.
        facts: the model.
        n_ubatches: micro-batches that will be asked about.

    Returns:
        Context, batch and micro-batch of each, tokens.
    """
    asked = placement.n_ctx or facts.n_ctx_train or PADDING
    contexts = sorted({PADDING * placement.n_seq_max, asked, max(asked, facts.n_ctx_train)})
    batches = sorted({*n_ubatches, placement.n_ubatch, MIN_CHUNK, 1})
    return tuple((n_ctx, max(placement.n_batch, batch), batch) for n_ctx in contexts for batch in batches)


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
