"""Whether a switch in place is left to the library's own call, and why not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitctl.outcome import WeightsTier

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitctl.engine.live import LiveSession
    from splitctl.placement import Placement

BY_THE_CALL = frozenset({"mode", "tensor_split"})
"""What the library's own call can change of a placement."""

LONGEST_SILENCE_MS = 30_000.0
"""The call says nothing while it loads: where a load has taken longer [ms], a host could take it for one that hangs."""


class OwnCall:
    """Judges whether the library's own call can do a switch of one session. Thread: any; one at a time."""

    def __init__(
        self, why_not_right: Callable[[Placement, Placement, bool], str] = lambda _now, _to, _known: ""
    ) -> None:
        """Take what is known of the call.

        Args:
            why_not_right: tells why the call is not known to move one placement to another without a fault, "" where
                it is; may try it in a child process, unless it shall say what is known alone.
        """
        self._why_not_right = why_not_right

    def why_not(
        self, live: LiveSession, target: Placement, weights: WeightsTier, *, is_asked: bool, force: bool
    ) -> str:
        """Say why the call cannot do a switch that frees the old placement first; "" where it can.

        Args:
            live: the session.
            target: the whole placement.
            weights: where they are to come from.
            is_asked: whether this way was asked for by name; else one that a build does not have is no news.
            force: whether to go without a trial; what was asked for by name then needs no verdict.
        """
        engine, changed = live.engine, live.placement.differs(target)
        others = sorted(set(changed) - BY_THE_CALL)
        if not engine.library.has("native-switch"):
            return "the library has no call of its own for a switch"
        if others:
            return f"the library's own call changes the mode and the tensor split alone, and not {', '.join(others)}"
        if engine.adapters:
            return "the library's own call takes no adapters along"
        reads = engine.own_call_reads
        if reads is None:
            return "the library's own call moves no model that was made from metadata"
        if reads is not weights:
            return f"the library's own call would take the weights from {reads.value}, and not from {weights.value}"
        if engine.is_stale:
            return "the library's own call reads the model's file, which is not what it was"
        took_ms = engine.load_ms.get(reads, 0.0)
        if engine.on_tick is not None and took_ms > LONGEST_SILENCE_MS:
            return f"the library's own call says nothing while it loads, and a load has taken {took_ms / 1e3:,.0f} s"
        if is_asked and force:
            return ""
        # A server answers one client: while a model lies on it, a trial in a child would wait in vain.
        return self._why_not_right(live.placement, target, force or bool(engine.library.rpc_servers))
