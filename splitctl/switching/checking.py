"""CHECKING: collects what the rules need, asks them and, where a trial can tell, the probe. Touches nothing.

A trial runs in a child process (`ipc.probes.Prober`), which may die of it: that is its answer. It is asked for only in
modes that a build can get wrong, and only when no rule has refused the target for good. What is known already, from
earlier trials and from `splitctl verify`, counts in every mode. Before a switch the planner is asked too: what surely
does not fit is refused, and --force tries it all the same.

All this runs while streams go on. At the token boundary :meth:`Checker.again` applies the rules once more, to the
session as it is by then; nothing slow is asked a second time.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from splitctl.engine.weights import Chosen
from splitctl.errors import FileChanged, Reason
from splitctl.host_memory import host_memory
from splitctl.outcome import DOES_NOT_FIT, PROBE_INCONCLUSIVE, Route, SwitchOptions, Via
from splitctl.placement import SplitMode
from splitctl.probing import Verdict
from splitctl.switching import rules
from splitctl.switching.own_call import OwnCall
from splitctl.switching.rules import BuildFacts, Diagnostic, HostFacts, SessionFacts
from splitctl.switching.tiers import Tiers

if TYPE_CHECKING:
    import threading

    from llama_native import Library
    from splitctl.engine.live import LiveSession
    from splitctl.model.facts import ModelFacts
    from splitctl.placement import Placement
    from splitctl.planning.fit_check import Beside
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

    def __call__(self, current: Placement, target: Placement) -> tuple[tuple[Reason, ...], bool]:
        """Return why a target surely does not fit once the current placement is freed, none where it may.

        And whether the devices were asked for it.
        """

    def beside(self, current: Placement, target: Placement, *, same_process: bool, host_bytes: int = 0) -> Beside:
        """Tell whether a target fits now while the current placement stays; asks the devices for their free memory."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found of a target before the token boundary.

    Attributes:
        target: the whole placement.
        options: how the switch would be done.
        reasons: why it would be refused; none: it would be tried.
        verdict: what a trial in a child process came to, where one counts.
        at: when the check began and ended, seconds of `time.perf_counter`.
        has_asked: whether the devices were asked for their free memory.
        weights: where the weights would come from.
        via: who would do the work of a switch in place; None while nobody has asked.
        via_reason: why not the library's own call; empty where it is, or could not have been.
    """

    target: Placement
    options: SwitchOptions
    reasons: tuple[Reason, ...] = ()
    verdict: ProbeVerdict | None = None
    at: tuple[float, float] | None = None
    has_asked: bool = False
    weights: Chosen = field(default_factory=Chosen)
    via: Via | None = None
    via_reason: str = ""


class Checker:
    """Judges targets for one model and library."""

    def __init__(
        self,
        library: Library,
        facts: ModelFacts,
        prober: Prober | None,
        planner: Planner | None = None,
        tiers: Tiers | None = None,
        own_call: OwnCall | None = None,
    ) -> None:
        """Judge by the rules, and by ``prober`` and ``planner`` where they are there; ``tiers`` choose the weights.

        ``own_call`` says whether the library's own call can do a switch; None: never.
        """
        self._tiers = tiers or Tiers(None)
        self._own_call = own_call
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
        return self._first(None, placement, session, SwitchOptions(force=force)).reasons

    def switching(self, live: LiveSession, target: Placement, options: SwitchOptions) -> Checked:
        """Check a whole target as far as that goes while streams go on; may take as long as a trial in a child process.

        With ``options.force`` only the reasons that no trial could outlive count. A target that the session serves in
        already is not checked.
        """
        if not live.placement.differs(target):
            return Checked(target, options)
        # A shift that another thread is at has been applied by the boundary, or is seen there.
        session = dataclasses.replace(_facts_of(live), pending_shift=False)
        started = perf_counter()
        if changed := _changed_files(live):
            return Checked(target, options, changed, at=(started, perf_counter()))
        is_kept = live.engine.keeps(target)
        if not is_kept:
            # What is kept is given back first: it would count as taken.
            with live.placing:
                live.engine.drop_kept()
        found = self._first(live.placement, target, session, options, placing=live.placing, is_kept=is_kept)
        if not found.reasons:
            weights, has_asked = self._tiers.choose(live, target)
            found = dataclasses.replace(found, weights=weights, has_asked=found.has_asked or has_asked)
        return dataclasses.replace(found, at=(started, perf_counter()))

    def in_place(self, live: LiveSession, found: Checked) -> Checked:
        """Choose who does the work of a checked switch that stays in this process; goes on beside streams.

        It may take as long as a trial in a child process. What is refused, or has been chosen, stays as it is. The
        library's own call is refused where it is asked for by name and cannot be.
        """
        route, options = found.options.via, found.options
        if found.reasons or found.via is not None or not live.placement.differs(found.target):
            return found
        if route is Route.COMPOSED or self._own_call is None:
            return dataclasses.replace(found, via=Via.COMPOSED)
        is_asked = route is Route.NATIVE
        started = perf_counter()
        why = self._own_call.why_not(live, found.target, found.weights.tier, is_asked=is_asked, force=options.force)
        began, ended = found.at or (started, started)
        at = (began, ended + perf_counter() - started)
        if not why:
            return dataclasses.replace(found, via=Via.NATIVE, at=at)
        if is_asked:
            reason = Reason("native-refused", f"{why}; switch by this program's calls (--via composed)")
            return dataclasses.replace(found, reasons=(reason,), via_reason=why, at=at)
        could_have_been = live.engine.library.has("native-switch")
        return dataclasses.replace(found, via=Via.COMPOSED, via_reason=why if could_have_been else "", at=at)

    def ahead(self, opening: Placement, target: Placement, options: SwitchOptions) -> tuple[Reason, ...]:
        """Return the reasons for which a session would surely not switch to a target, before it is opened elsewhere.

        They are those that neither a trial nor what the session will hold can change.
        """
        return _forced(self._judge(opening, target, SessionFacts(tokens={}), None, options))

    def again(self, live: LiveSession, earlier: Checked) -> tuple[Reason, ...]:
        """Return the reasons not to switch, for the session as it is now; the trial's verdict is the earlier one."""
        if changed := _changed_files(live):
            return changed
        found = self._judge(live.placement, earlier.target, _facts_of(live), earlier.verdict, earlier.options)
        return _forced(found) if earlier.options.force else rules.refused(found)

    def lacking_beside(self, live: LiveSession, target: Placement) -> str:
        """Say why another process cannot place a target while the session stays; "" where it can, or nobody knows.

        A carry lies in memory that both hold.
        """
        if self._planner is None:
            return ""
        with live.placing:
            return self._planner.beside(live.placement, target, same_process=False).reason

    def _host(self) -> HostFacts:
        """Read what the host has now."""
        return HostFacts(devices=self._devices, mem_available=host_memory().available)

    def _judge(
        self,
        current: Placement | None,
        target: Placement,
        session: SessionFacts,
        verdict: ProbeVerdict | None,
        options: SwitchOptions,
        host: HostFacts | None = None,
    ) -> tuple[Diagnostic, ...]:
        host = host or self._host()
        found = rules.check(current, target, self._facts, self._build, host, session, verdict)
        return tuple(
            diagnostic for diagnostic in found if not (options.convert and diagnostic.code == rules.NEEDS_CONVERSION)
        )

    def _first(
        self,
        current: Placement | None,
        target: Placement,
        session: SessionFacts,
        options: SwitchOptions,
        *,
        placing: threading.Lock | None = None,
        is_kept: bool = False,
    ) -> Checked:
        has_asked = False

        def checked(reasons: tuple[Reason, ...], verdict: ProbeVerdict | None = None) -> Checked:
            return Checked(target, options, reasons, verdict, has_asked=has_asked)

        def judged(verdict: ProbeVerdict) -> Checked:
            now = host if verdict.remembered else None  # a trial takes time
            return checked(rules.refused(self._judge(current, target, session, verdict, options, now)), verdict)

        host = self._host()
        diagnostics = self._judge(current, target, session, None, options, host)
        if options.force:
            return checked(_forced(diagnostics))
        if not rules.worth_a_try(diagnostics):
            return checked(rules.refused(diagnostics))
        if self._planner is not None and current is not None and placing is not None and not is_kept:
            # Before a trial, which would take the very memory that is short.
            with placing:
                lacking, has_asked = self._planner(current, target)
            if lacking:
                return checked(lacking)
        if self._prober is None:
            return checked(rules.refused(diagnostics))
        if target.mode not in TRIED or is_kept:
            # What failed by a return may be mended by now, and would only return again.
            known = self._prober.known(target, self._facts)
            is_bad = known is not None and known.verdict in {Verdict.DIES, Verdict.WRONG}
            return judged(known) if known is not None and is_bad else checked(rules.refused(diagnostics))
        verdict = self._prober(self._facts.path, target, self._facts)
        if verdict.verdict is Verdict.INCONCLUSIVE:
            text = (
                f"whether this build can do {target.describe()} could not be tried: {verdict.why}; free some memory, "
                "or use --force to switch without the try"
            )
            return checked((*rules.refused(diagnostics), Reason(PROBE_INCONCLUSIVE, text)))
        return judged(verdict)


def _changed_files(live: LiveSession) -> tuple[Reason, ...]:
    """Refuse what would load other bytes than the session was opened from; nothing forces that."""
    try:
        live.engine.confirm_files()
    except FileChanged as error:
        return (Reason("file-changed", str(error)),)
    return ()


def _facts_of(live: LiveSession) -> SessionFacts:
    used = live.used()
    return SessionFacts(
        tokens={slot.seq_id: slot.n_past for slot in used},
        sealed_bytes=live.arenas.both[0].n_bytes,
        pending_shift=live.pending_shift,
        n_adapters=len(live.engine.adapters),
        n_encoder_tokens=sum(int(slot.encoder_tokens.size) for slot in used),
    )


def _forced(diagnostics: tuple[Diagnostic, ...]) -> tuple[Reason, ...]:
    """Keep only the reasons that no trial could outlive."""
    return rules.refused(f for f in diagnostics if not (f.settled_by_probe or f.code == DOES_NOT_FIT))
