"""Finds out where a switch can take its weights from, while streams go on, and chooses."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from llama_native import NativeError
from splitctl.engine.weights import Chosen, Seen, choose, saves_ms
from splitctl.errors import SplitctlError
from splitctl.outcome import WeightsTier
from splitctl.planning.cost import PINNED_MS_PER_LAYER

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitctl.engine.live import LiveSession
    from splitctl.placement import Placement


class Tiers:
    """Chooses the tiers of one session's switches. Thread: any; one at a time."""

    def __init__(
        self,
        beside: Callable[[Placement, Placement], str] | None,
        why_no_copy: Callable[[Placement, bool], str] = lambda _placement, _known_only: "",
    ) -> None:
        """Use what others know.

        Args:
            beside: tells why two placements do not fit at once, "" where they do; None: they are held not to.
            why_no_copy: tells why a placement's model cannot be made from a copy, "" where it can; may try it in a
                child process, unless it shall say what is known alone.
        """
        self._beside = beside
        self._why_no_copy = why_no_copy

    def choose(self, live: LiveSession, target: Placement) -> tuple[Chosen, bool]:
        """Choose the tier for a target, and tell whether the devices were asked for their memory.

        What goes wrong over it costs the tier and not the switch.
        """
        try:
            return self._choose(live, target)
        except (NativeError, SplitctlError, OSError) as error:
            return Chosen(WeightsTier.FILE, f"the tier could not be chosen: {error}"), True

    def _choose(self, live: LiveSession, target: Placement) -> tuple[Chosen, bool]:
        engine = live.engine
        asked, beside, has_asked = engine.weights, "", False
        if asked in {WeightsTier.RESIDENT, WeightsTier.AUTO} and not engine.keeps(target):
            beside, has_asked = "nobody can say whether both placements fit", self._beside is not None
            if self._beside is not None:
                with live.placing:
                    beside = self._beside(live.placement, target)
        if asked in {WeightsTier.FILE, WeightsTier.RESIDENT}:
            return choose(asked, Seen(beside)), has_asked
        back = self.of_copy(live, live.placement, known_only=True)
        if asked is WeightsTier.AUTO and not beside:
            return choose(asked, Seen(beside, back=back)), has_asked
        seen = Seen(
            beside,
            pinned=self.of_copy(live, target, known_only=True),
            back=back,
            n_tokens=engine.n_to_come(),
            extra_ms=PINNED_MS_PER_LAYER * live.facts.n_layer if self._adds_tensors(live, target) else 0.0,
            saves_ms=saves_ms(live.facts.weight_bytes, engine.load_ms),
        )
        if seen.pinned and (asked is WeightsTier.PINNED or seen.pays):
            seen = dataclasses.replace(seen, pinned=self.of_copy(live, target))
        return choose(asked, seen), has_asked

    def of_copy(self, live: LiveSession, placement: Placement, *, known_only: bool = False) -> str:
        """Say why a placement's model cannot be made from the copy now; "" where it can."""
        copy = live.engine.copy
        if copy is None:
            return "there is no copy of the weights"
        copy.look_again()
        return copy.why or self._why_no_copy(placement, known_only)

    @staticmethod
    def _adds_tensors(live: LiveSession, placement: Placement) -> bool:
        """Tell whether a model of the copy has tensors that its file has not, which cost time on CUDA."""
        if live.engine.library.has("model-from-file-with"):
            return False
        names = placement.devices or tuple(one.name for one in live.engine.library.devices(memory=False))
        return any(name.startswith("CUDA") for name in names)
