"""A session in the terms of orders and reports: filled from snapshots, described by snapshots, checked for a switch.

Law: after :func:`bring_to` a session holds exactly what the snapshots say, whatever it held before.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from splitctl.carry.sampling import SamplerSpec
from splitctl.engine.sampler import Constraints
from splitctl.errors import Reason
from splitctl.host_memory import host_memory
from splitctl.ipc import orders
from splitctl.ipc.orders import SequenceSnapshot
from splitctl.outcome import DOES_NOT_FIT, Route, Stage, StageTimes, SwitchOutcome, SwitchStatus, Via, WeightsTier
from splitctl.switching import conversion

#: The code of the reason that a server's devices take no second worker.
RPC_SERVES_ONE = "rpc-serves-one"

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from splitctl.placement import Placement
    from splitctl.session import Session
    from splitctl.switching.checking import Checked


def bring_to(session: Session, snapshots: Sequence[SequenceSnapshot], progress: Callable[[int, int], None]) -> int:
    """Let every sequence hold what its snapshot says, and those without a snapshot nothing.

    Args:
        session: the session.
        snapshots: one a sequence.
        progress: called with the tokens read and to be read, after each batch.

    Returns:
        How many tokens had to be read.

    Raises:
        SplitctlError: a snapshot is not one of this model, or there is no room.
        llama_native.CallFailed: the library refused or failed.
    """
    # From a decoder's tokens alone a sequence cannot be made again.
    needs_prompt = session.model.has_encoder and session.model.has_decoder
    snapshots = [one for one in snapshots if one.tokens and (one.encoder_tokens or not needs_prompt)]
    for unknown in {one.seq_id for one in session.sequences()} - {one.seq_id for one in snapshots}:
        session.remove_sequence(unknown)
    todo = [
        (one, session.fill(one.seq_id, one.tokens, n_delivered=int(one.is_pending), encoder_tokens=one.encoder_tokens))
        for one in snapshots
    ]
    n, done = sum(len(filling.rest) for _, filling in todo), 0
    for one, filling in todo:
        rest = filling.rest
        while rest:
            n_read = session.read(one.seq_id, rest, draws_next=filling.pending is None)
            rest = rest[n_read:]
            done += n_read
            progress(done, n)
        session.begin(
            one.seq_id,
            one.sampler,
            n_draws=one.n_draws,
            pending=filling.pending,
            constraints=Constraints(one.grammar),
            n_ruled=one.n_ruled,
        )
    return done


def snapshots_of(session: Session) -> tuple[SequenceSnapshot, ...]:
    """Describe every sequence that holds anything."""
    return tuple(
        SequenceSnapshot(
            one.seq_id,
            tuple(one.tokens.tolist()),
            is_pending=one.n_past < one.tokens.size,
            sampler=None if one.sampler == SamplerSpec() and not one.accepted.size else one.sampler,
            n_draws=one.n_draws,
            encoder_tokens=tuple(one.encoder_tokens.tolist()),
            grammar=one.grammar,
            n_ruled=one.n_ruled,
        )
        for one in session.sequences()
    )


def why_not_beside(session: Session, checked: Checked) -> str | None:
    """Say why a second worker cannot place a checked target while this one serves; "" where it can.

    Returns:
        None where nobody wants to know: the switch goes in place, is refused, or changes nothing.
    """
    via = checked.options.via
    if not via.may_be_beside or checked.reasons or not session.placement.differs(checked.target):
        return None
    if via is Route.AUTO and checked.weights.tier is WeightsTier.RESIDENT:
        return "both placements stay on the devices, where a switch moves the state alone"
    return session.handing.why_not_beside(checked)


def in_place(session: Session, checked: Checked, why_not_beside: str | None) -> Checked:
    """Choose who does the work of a checked switch, where it stays in this process; as slow as the check.

    Its ``via_reason`` then says why it is none of the faster ways.
    """
    if why_not_beside == "" or checked.options.via is Route.BESIDE:
        return checked
    found = session.handing.choose_via(checked)
    return dataclasses.replace(found, via_reason="; ".join(filter(None, (why_not_beside, found.via_reason))))


def checking_ms(checked: Checked) -> float:
    """Return the time that a check took, ms."""
    began, ended = checked.at or (0.0, 0.0)
    return (ended - began) * 1e3


def refused(session: Session, checked: Checked, why_not_beside: str = "") -> SwitchOutcome:
    """Give the outcome of a switch that is refused for what was found, or because it cannot be beside."""
    reasons = (_not_beside(session, why_not_beside),) if why_not_beside else checked.reasons
    return SwitchOutcome(
        SwitchStatus.REFUSED,
        checked.target,
        session.placement,
        "; ".join(reason.text for reason in reasons),
        reasons,
        Stage.CHECKING,
        stages_ms=StageTimes(checking=checking_ms(checked)),
        total_ms=checking_ms(checked),
        via_reason=why_not_beside or checked.via_reason,
    )


def _not_beside(session: Session, why: str) -> Reason:
    code = RPC_SERVES_ONE if session.model.library.rpc_servers else DOES_NOT_FIT
    return Reason(code, f"{why}; switch in place (--via in-place)")


def judgement(session: Session, number: int, checked: Checked, why_not_beside: str | None) -> orders.Checked:
    """Return the answer to order ``number``: what a switch to the checked target would do."""
    now, target, reasons = session.placement, checked.target, checked.reasons
    if why_not_beside and checked.options.via is Route.BESIDE:
        reasons = (_not_beside(session, why_not_beside),)
    via = None
    if not reasons and now.differs(target):
        via = Via.BESIDE if why_not_beside == "" else checked.via
    is_in_place = via not in {None, Via.BESIDE}
    return orders.Checked(
        number,
        target,
        is_unchanged=not now.differs(target),
        reasons=tuple({"code": one.code, "text": one.text} for one in reasons),
        conversions=_conversions(now, target),
        state_bytes=session.n_state_bytes(),
        weight_bytes=session.model.size_bytes,
        mem_available=host_memory().available,
        via=via,
        via_reason=checked.via_reason if is_in_place else "",
        weights=checked.weights.tier if is_in_place else None,
        weights_reason=checked.weights.reason if is_in_place else "",
    )


def _conversions(now: Placement, target: Placement) -> tuple[str, ...]:
    plan = conversion.plan(now, target)
    if plan is None:
        return ()
    v_order = "transposed" if plan.v_trans else "in rows"
    phrases = (
        (plan.type_k, f"K from {now.type_k} to {target.type_k}"),
        (plan.type_v, f"V from {now.type_v} to {target.type_v}"),
        (plan.v_trans, f"V turned: {v_order}"),
        (plan.n_stream, f"streams from {now.n_streams} to {plan.n_stream}"),
    )
    return tuple(text for wanted, text in phrases if wanted is not None)
