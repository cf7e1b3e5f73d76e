"""A session on its way from one process to another, through sealed memory that both hold.

The one that serves: `why_not_beside` -> `hand_over`. The other one: `warm_up` -> `take_over`; its first decode after
that is the trial. Whoever leads the two keeps the first one until that has come.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import TYPE_CHECKING

import numpy as np

from splitctl.errors import Refused, StateUnsound, TrialFailed
from splitctl.outcome import Proof, Route, Stage
from splitctl.session.decoder import nonsense

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitctl.carry.seal import Seal
    from splitctl.engine.live import LiveSession
    from splitctl.outcome import WeightsTier
    from splitctl.session.decoder import Decoder
    from splitctl.session.storage import Storage
    from splitctl.switching.checking import Checked, Checker
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
    """

    stood_at: float
    stages_ms: dict[str, float]
    n_sequences: int
    n_tokens: int
    pinned: tuple[bool | None, str]


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
            saving_at = perf_counter()
            self._transfer.save()
            sealing_at = perf_counter()
            reached(Stage.SEALING)
            sealed = self._transfer.seal_as_it_is()
            ms = {"saving": (sealing_at - saving_at) * _MS, "sealing": (perf_counter() - sealing_at) * _MS}
            return Handed(stood_at, ms, sealed.n_sequences, sealed.n_tokens, self._transfer.pinned)

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
            is_trial: the next decode is the trial: one that fails raises TrialFailed, and ends the session.
            reached: called as a stage begins.

        Raises:
            SplitctlError: it is not what was sealed, this context cannot hold it, or it does not read back; only in the
                last case the session is not as it was.
        """
        with self._working("taking over a sealed carry"):
            reached(Stage.RESTORING)
            restoring_at = perf_counter()
            is_read_back = proof is Proof.BYTES
            changes = self._storage.take_over(seal, self._transfer, is_read_back=is_read_back)
            proving_at = perf_counter()
            reached(Stage.PROVING)
            if wrong := self._transfer.unlike_what_was_given() if is_read_back else "":
                raise StateUnsound(wrong)
            self._decoder.must_succeed = is_trial
            ms = {"restoring": (proving_at - restoring_at) * _MS, "proving": (perf_counter() - proving_at) * _MS}
            engine = self._live.engine
            return Taken(ms, changes, (engine.came_from, engine.why))
