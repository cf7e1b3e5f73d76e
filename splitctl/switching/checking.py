"""CHECKING: gathers what the rules look at, asks them, and where a try can tell, asks the probe. Touches nothing.

A try runs in a child process (``host.probes.Prober``), which may die of it: that is its answer. It is asked only for
modes that a build can get wrong, and only when no rule has refused the target for good. What is known already, from
earlier tries and from `splitctl verify`, counts in every mode. Before a switch the planner is asked too: what surely
does not fit is refused, and --force tries it all the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import psutil

from splitctl.errors import Reason
from splitctl.outcome import DOES_NOT_FIT
from splitctl.placement import SplitMode
from splitctl.probing import Verdict
from splitctl.switching import rules
from splitctl.switching.rule_inputs import BuildFacts, Finding, HostFacts, SessionFacts

if TYPE_CHECKING:
    from llama_native import Library
    from splitctl.engine.live import LiveSession
    from splitctl.model.facts import ModelFacts
    from splitctl.placement import Placement
    from splitctl.probing import ProbeVerdict

TRIED = frozenset({SplitMode.TENSOR, SplitMode.ROW})
"""Modes whose failures do not return. A load in another mode returns NULL where it cannot be."""


class Prober(Protocol):
    """Tries a placement of a model in a child process."""

    def __call__(self, model_path: Path, placement: Placement, facts: ModelFacts) -> ProbeVerdict:
        """Return what the try came to, remembered or fresh."""

    def known(self, placement: Placement, facts: ModelFacts) -> ProbeVerdict | None:
        """Return what is remembered of a placement; None where nothing is."""


class Planner(Protocol):
    """Compares a target with the memory that is free now."""

    def __call__(self, current: Placement, target: Placement) -> tuple[Reason, ...]:
        """Return why a target surely does not fit once the current placement is freed; empty where it may."""


class Checker:
    """Judges targets for one model and library."""

    def __init__(
        self, library: Library, facts: ModelFacts, prober: Prober | None, planner: Planner | None = None
    ) -> None:
        """Judge by the rules, and by ``prober`` and ``planner`` where they are there."""
        self._facts = facts
        self._prober = prober
        self._planner = planner
        self._build = BuildFacts(version=library.version, max_devices=library.max_devices)
        self._devices = {
            device.name: device.kind.name.lower() if device.kind else "" for device in library.devices(memory=False)
        }

    def opening(self, placement: Placement, *, n_adapters: int = 0, force: bool = False) -> tuple[Reason, ...]:
        """Return the reasons not to open a session with so many adapters in a placement; none: open it."""
        session = SessionFacts(tokens={}, n_adapters=n_adapters)
        return self._reasons(None, placement, session, force=force, convert=True)

    def switching(self, live: LiveSession, target: Placement, *, force: bool, convert: bool) -> tuple[Reason, ...]:
        """Return the reasons not to switch to a target; none: try it.

        Args:
            live: the session's parts, read only.
            target: the whole placement.
            force: keep only the reasons that no try could outlive.
            convert: whether the carry may be converted for the target.
        """
        used = live.used()
        held = {slot.seq_id: slot.n_past for slot in used}
        session = SessionFacts(
            tokens=held,
            sealed_bytes=live.arena.n_bytes,
            pending_shift=live.pending_shift,
            n_adapters=len(live.engine.adapters),
            n_encoder_tokens=sum(int(slot.encoder_tokens.size) for slot in used),
        )
        return self._reasons(live.placement, target, session, force=force, convert=convert)

    def _reasons(
        self, current: Placement | None, target: Placement, session: SessionFacts, *, force: bool, convert: bool
    ) -> tuple[Reason, ...]:
        host = HostFacts(devices=self._devices, mem_available=psutil.virtual_memory().available)

        def judge(probe: ProbeVerdict | None) -> tuple[Finding, ...]:
            found = rules.check(current, target, self._facts, self._build, host, session, probe)
            return tuple(finding for finding in found if not (convert and finding.code == rules.NEEDS_CONVERSION))

        findings = judge(None)
        if force:
            return rules.refused(f for f in findings if not (f.settled_by_probe or f.code == DOES_NOT_FIT))
        if self._planner is not None and current is not None and rules.worth_a_try(findings):
            # Before a try: it would take the very memory that is lacking.
            lacking = self._planner(current, target)
            if lacking:
                return lacking
        if self._prober is None or not rules.worth_a_try(findings):
            return rules.refused(findings)
        if target.mode not in TRIED:
            # What failed by a return may be mended by now, and would only return again.
            known = self._prober.known(target, self._facts)
            is_bad = known is not None and known.verdict in {Verdict.DIES, Verdict.WRONG}
            return rules.refused(judge(known) if is_bad else findings)
        verdict = self._prober(self._facts.path, target, self._facts)
        if verdict.verdict is Verdict.INCONCLUSIVE:
            text = (
                f"whether this build can do {target.describe()} could not be tried: {verdict.why}; free some memory, "
                "or use --force to switch without the try"
            )
            return (*rules.refused(findings), Reason("probe-inconclusive", text))
        return rules.refused(judge(verdict))
