"""Finds out where a switch can take its weights from, while streams go on, and chooses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitctl.engine.weights import Chosen, Seen, choose
from splitctl.outcome import WeightsTier

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitctl.engine.live import LiveSession
    from splitctl.placement import Placement


class Tiers:
    """Chooses the tiers of one session's switches. Thread: any; one at a time."""

    def __init__(self, beside: Callable[[Placement, Placement], str] | None) -> None:
        """Use what tells why two placements do not fit at once, "" where they do; None: they are held not to."""
        self._beside = beside

    def choose(self, live: LiveSession, target: Placement) -> tuple[Chosen, bool]:
        """Choose the tier for a target, and tell whether the devices were asked for their memory."""
        asked = live.engine.weights
        if asked is WeightsTier.FILE:
            return Chosen(), False
        beside, has_asked = "", False
        if asked in {WeightsTier.RESIDENT, WeightsTier.AUTO} and not live.engine.keeps(target):
            beside, has_asked = "nobody can say whether both placements fit", self._beside is not None
            if self._beside is not None:
                with live.placing:
                    beside = self._beside(live.placement, target)
        return choose(asked, Seen(beside=beside, pinned="there is no copy of the weights")), has_asked
