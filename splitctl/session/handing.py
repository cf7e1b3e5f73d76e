"""A session on its way from one process to another, through sealed memory that both hold.

The one that serves: `why_not_beside` -> `begin_ahead` -> `copy_next`, as often as there is an idle sequence ->
`hand_over`. The other one: `warm_up` -> `take_ahead` -> `take_over`; its first decode after that is the trial. Whoever
leads the two keeps the first one until that has come.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import TYPE_CHECKING

import numpy as np

from llama_native import NativeError
from splitctl.errors import Refused, SplitctlError, StateUnsound, TrialFailed
from splitctl.outcome import Proof, Route, Stage
from splitctl.session import ahead
from splitctl.session.ahead import Incoming, Outgoing
from splitctl.session.decoder import nonsense

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from splitctl.carry.seal import Seal, Segment
    from splitctl.engine.live import LiveSession
    from splitctl.outcome import WeightsTier
    from splitctl.session.decoder import Decoder
    from splitctl.session.storage import Storage
    from splitctl.switching.checking import Checked, Checker
    from splitctl.switching.sealing import SealedState
    from splitctl.switching.transfer import Transfer

_MS = 1e3


@dataclass(frozen=True, slots=True)
class Handed:
    """What was sealed for another process.

    Attributes:
        stood_at: when the last decode was over, seconds of the system's monotonic clock.
        stages_ms: time of saving and sealing, ms.
        n_sequences: sequences that hold anything.
        n_tokens: tokens of all of them.
        pinned: whether the state lies in pinned memory, None where nothing would gain; and why it does not.
        ahead: bytes of it that were copied before, and why none were where some could have been.
    """

    stood_at: float
    stages_ms: dict[str, float]
    n_sequences: int
    n_tokens: int
    pinned: tuple[bool | None, str]
    ahead: tuple[int, str] = (0, "")


@dataclass(frozen=True, slots=True)
class Taken:
    """What a session has become.

    Attributes:
        stages_ms: time of restoring and proving, ms.
        conversions: one phrase a change that the state needed.
        weights: where the weights of this process came from, and why not from where they were asked for.
    """

    stages_ms: dict[str, float]
    conversions: tuple[str, ...]
    weights: tuple[WeightsTier, str]


class Handing:
    """Hands one session over, or takes one over. Thread: any, as the session."""

    def __init__(
        self,
        live: LiveSession,
        checker: Checker,
        storage: Storage,
        transfer: Transfer,
        decoder: Decoder,
        working: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """Work on a session's parts; ``working`` takes its turn for some work."""
        self._live = live
        self._checker = checker
        self._storage = storage
        self._transfer = transfer
        self._decoder = decoder
        self._working = working
        self._outgoing: Outgoing | None = None
        self._why_not_ahead = ""
        self._incoming = Incoming(live)

    def notify_seals(self, on_sealed: Callable[[Seal], None], on_overwrite: Callable[[int], None]) -> None:
        """Report every sealed carry from now on, which then lies in its arena as a whole.

        Args:
            on_sealed: called with where a carry lies, before anything is freed; what it raises fails the sealing.
            on_overwrite: called with the index of an arena that is about to be overwritten. Both are called with the
                turn held: they must not call back in.
        """
        self._storage.notify_seals(self._transfer, on_sealed, on_overwrite)

    # ---- the one that serves ----

    def why_not_beside(self, checked: Checked) -> str:
        """Say why another process cannot place a checked target while this one serves; "" where it can.

        The devices are asked for their free memory; other threads go on meanwhile.
        """
        live, options = self._live, checked.options
        if live.engine.library.rpc_servers:
            return "an RPC server serves one client at a time, so that a second worker gets no answer from it"
        if options.force and options.via is Route.BESIDE:
            return ""
        return self._checker.lacking_beside(live, checked.target)

    def choose_via(self, checked: Checked) -> Checked:
        """Find out who would do the work of a checked switch that stays in this process; other threads go on.

        As slow as the check. A switch asks by itself where nobody has.
        """
        return self._checker.in_place(self._live, checked)

    def begin_ahead(self, checked: Checked) -> None:
        """Begin to copy sequences for a process that has placed the checked target, where that can be."""
        with self._working("copying ahead"):
            self._outgoing, self._why_not_ahead = None, ahead.why_not(self._live, checked.target)
            # The arena of a trial's original is not to be had, and the other one holds what it was sealed as last.
            if not self._why_not_ahead and self._transfer.kept is not None:
                self._why_not_ahead = "the switch before is still on trial"

    def copy_next(self, busy: Collection[int]) -> bool:
        """Copy one sequence that is not busy; says whether there was one. Nothing is lost where it cannot be."""
        with self._working("copying ahead"):
            live = self._live
            if self._why_not_ahead or not any(one.n_past and one.seq_id not in busy for one in live.used()):
                return False
            try:
                if self._outgoing is None:
                    self._outgoing = Outgoing(live)
                return self._outgoing.copy_next(busy)
            except Exception as error:  # noqa: BLE001 - whatever it is, the session serves on, and goes in one piece
                self.end_ahead(str(error))
                return False

    def copied(self) -> tuple[int, tuple[Segment, ...]]:
        """Say in which arena the copies lie, and where in it."""
        with self._working("copying ahead"):
            one = self._outgoing
            return (0, ()) if one is None or not one.is_valid else (one.arena, one.segments())

    def end_ahead(self, why: str = "") -> None:
        """Forget the copies."""
        self._outgoing, self._why_not_ahead = None, why

    def hand_over(self, checked: Checked, reached: Callable[[Stage], None]) -> Handed:
        """Seal all that the session holds, for a process that has placed the checked target.

        The session keeps everything and may go on. ``reached`` is called as a stage begins.

        Raises:
            Refused: the target is none for the session as it is by now.
            StateUnsound: bytes, library and session disagree.
            llama_native.CallFailed: the library wrote nothing.
            OSError: there is no memory for it.
        """
        with self._working("handing over"):
            stood_at = monotonic()
            if reasons := self._checker.again(self._live, checked):
                raise Refused(reasons)
            reached(Stage.SAVING)
            began_at = sealing_at = perf_counter()
            sealed = None
            if (parts := self._copied_rest()) is not None:
                sealing_at = perf_counter()
                reached(Stage.SEALING)
                sealed = self._sealed(parts)
            n_ahead = 0
            if parts is not None and sealed is not None:
                self._transfer.report(sealed)
                n_ahead, pinned = parts.n_ahead, self._live.arenas.both[parts.arena].pinned
            else:
                self._transfer.save()
                sealing_at = perf_counter()
                reached(Stage.SEALING)
                sealed, pinned = self._transfer.seal_as_it_is(), self._transfer.pinned
            ms = {"saving": (sealing_at - began_at) * _MS, "sealing": (perf_counter() - sealing_at) * _MS}
            # Of one alone nobody expects that it goes before itself.
            went_ahead = (n_ahead, self._why_not_ahead if sealed.n_sequences > 1 else "")
            return Handed(stood_at, ms, sealed.n_sequences, sealed.n_tokens, pinned, went_ahead)

    def _copied_rest(self) -> Outgoing | None:
        """Copy what has changed since the others were copied; None where the state goes in one piece."""
        parts, self._outgoing = self._outgoing, None
        if parts is None or self._live.pending_shift:
            return None
        if not parts.is_valid:
            self._why_not_ahead = "the memory with the copies was taken for something else"
            return None
        try:
            return parts if parts.complete() else None
        except (NativeError, SplitctlError, OSError) as error:
            self._why_not_ahead = str(error)
            return None

    def _sealed(self, parts: Outgoing) -> SealedState | None:
        """Seal sequences that were copied one by one; None where they are not all of the state."""
        try:
            return parts.seal()
        except (NativeError, SplitctlError) as error:
            self._why_not_ahead = str(error)
            return None

    # ---- the other one ----

    def warm_up(self) -> None:
        """Make a first decode on an empty memory, which is cleared again: what it takes costs nobody a token.

        The state of it is read too: how this build writes one is known when the session's comes.

        Raises:
            TrialFailed: its logits are no numbers.
            llama_native.CallFailed: the library refused it.
        """
        live = self._live
        if live.is_encoder_decoder or not live.has_memory:
            return  # its decoder reads nothing before an encoder has
        with self._working("a first decode"):
            context = live.engine.live_context
            context.decode([live.decoder_start], [0], [0], [True])
            row = np.frombuffer(context.logits(0), np.float32)
            wrong = "" if live.engine.embeddings else nonsense({0: row})
            self._transfer.learn()
            context.clear()
            if wrong:
                raise TrialFailed(wrong)

    def take_ahead(self, arena: int, segments: Sequence[Segment]) -> bool:
        """Restore and prove sequences that the other process has copied; :meth:`take_over` comes next.

        Returns:
            Whether they are here; else none is, and the state has to come in one piece.

        Raises:
            SplitctlError, OSError: the memory is none.
        """
        with self._working("taking sequences ahead"):
            return self._incoming.take(arena, segments)

    def take_over(
        self,
        seal: Seal,
        *,
        proof: Proof = Proof.OFF,
        is_trial: bool = False,
        reached: Callable[[Stage], None] = lambda _stage: None,
    ) -> Taken:
        """Become what lies sealed in one of the arenas; nothing is read again.

        Args:
            seal: where it lies.
            proof: how the restored state is proved, beyond the positions.
            is_trial: the next decode is the trial: one that fails raises TrialFailed, and ends the session. What has
                come ahead counts.
            reached: called as a stage begins.

        Raises:
            SplitctlError: it is not what was sealed, this context cannot hold it, or it does not read back; in the last
                case, and where sequences have come ahead, the session is not as it was.
            llama_native.CallFailed: the library refused what was to come after those.
        """
        with self._working("taking over a sealed carry"):
            reached(Stage.RESTORING)
            restoring_at = perf_counter()
            is_read_back = proof is Proof.BYTES
            late: Sequence[Segment] | None = None
            changes: tuple[str, ...] = ()
            if is_trial and seal.segments:
                late = self._storage.complete(seal, self._incoming, is_read_back=is_read_back)
            else:
                self._incoming.drop()
                changes = self._storage.take_over(seal, self._transfer, is_read_back=is_read_back)
            proving_at = perf_counter()
            reached(Stage.PROVING)
            if is_read_back:
                wrong = self._transfer.unlike_what_was_given() if late is None else self._incoming.unlike(late)
                if wrong:
                    raise StateUnsound(wrong)
            self._decoder.must_succeed = is_trial
            ms = {"restoring": (proving_at - restoring_at) * _MS, "proving": (perf_counter() - proving_at) * _MS}
            engine = self._live.engine
            return Taken(ms, changes, (engine.came_from, engine.why))
