"""Streams on the sequences of a session: prompts read piece by piece between steps, one step for all that generate.

Laws:
    1. A stream that was started ends in exactly one Ended, and what it holds stays with its sequence.
    2. A prompt begins to be read when all of it fits beside what the others have still to read; until then it waits,
       as long as any other stream runs. Idle sequences make room, the one that was unused for longest first.
    3. Where no idle sequence is left to make room, streams that wait give up what they hold; where none of them is
       left to make room for a step, the stream that holds most ends, with "context".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from splitctl.engine.sampler import Constraints
from splitctl.errors import ConfigInvalid, ContextFull, Parked, TrialFailed
from splitctl.ipc.orders import Drawn, Ended, Forgot, Reading, Report, Start, Step
from splitctl.session import Session
from splitctl.session.decoder import Filling
from splitctl.worker.failures import logged_failure_of


@dataclass(slots=True)
class _Stream:
    """A stream on its way.

    Attributes:
        filling: what its sequence needs before it generates.
        n_read: tokens of ``filling.rest`` that were read.
        is_admitted: there is room for all of them.
        n_made: tokens drawn.
    """

    order: Start
    filling: Filling
    n_read: int = 0
    is_admitted: bool = False
    is_generating: bool = False
    n_made: int = 0
    read_ms: float = 0.0

    @property
    def seq_id(self) -> int:
        """The sequence that it is on."""
        return self.order.seq_id

    @property
    def n_unread(self) -> int:
        """Tokens that are still to be read."""
        return len(self.filling.rest) - self.n_read


class Batcher:
    """Carries streams on. Thread: the worker's one."""

    def __init__(self, session: Session, report: Callable[[Report], None]) -> None:
        self._session = session
        self._report = report
        self._streams: dict[int, _Stream] = {}
        self._used_at: dict[int, int] = {}
        self._clock = 0
        session.expect(self._n_to_come)

    def _n_to_come(self) -> int:
        """Say how many decodes the longest of the streams is known to take; asked from another thread."""
        left = [one.order.n_predict - one.n_made for one in list(self._streams.values()) if one.order.n_predict > 0]
        return max(left, default=0)

    @property
    def is_busy(self) -> bool:
        """Whether any stream is on its way."""
        return bool(self._streams)

    @property
    def busy(self) -> frozenset[int]:
        """The sequences that streams are on."""
        return frozenset(one.seq_id for one in self._streams.values())

    def start(self, order: Start) -> None:
        """Take a stream."""
        try:
            self._refuse_taken(order)
            self._session.refuse_unreadable(order.grammar)
            filling = self._fill(order)
        except Parked:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this stream's end and nobody else's
            self._report(_ended(order.stream, error))
            return
        self._streams[order.stream] = stream = _Stream(order, filling)
        self._touch(order.seq_id)
        self._report_reading(stream)

    def _fill(self, order: Start) -> Filling:
        return self._session.fill(order.seq_id, order.tokens, n_delivered=max(order.n_delivered, order.is_pending))

    def _refuse_taken(self, order: Start) -> None:
        if order.stream in self._streams or order.seq_id in self.busy:
            taken = f"{order.stream} on sequence {order.seq_id}"
            raise ConfigInvalid("stream", taken, "a number and a sequence that no stream has")

    def detach(self) -> None:
        """Let go of every stream without an end: each goes on elsewhere, and its sequence keeps what it holds."""
        for stream in self._streams.values():
            self._touch(stream.seq_id)
        self._streams.clear()

    def halt(self, number: int) -> None:
        """End a stream; its sequence keeps what it holds."""
        if number in self._streams:
            self._end(self._streams[number], "halted")

    def turn(self) -> None:
        """Read a piece of the first prompt that can be read, and step every stream that generates.

        Raises:
            Parked, TrialFailed: the session serves no more here; no stream has ended by that.
        """
        self._admit()
        reading = next((one for one in self._streams.values() if one.is_admitted and not one.is_generating), None)
        if reading is not None:
            self._guarded([reading], lambda: self._read(reading))
        generating = [one for one in self._streams.values() if one.is_generating]
        if generating:
            self._guarded(generating, lambda: self._step(generating))

    # ---- reading ----

    def _admit(self) -> None:
        """Let the prompts that fit begin, in their order; refuse one that nothing will ever make room for."""
        for stream in [one for one in self._streams.values() if not one.is_admitted]:
            n_wanted = stream.n_unread + self._n_promised()
            full = self._make_room(stream.seq_id, n_wanted)
            n_whole = stream.filling.n_kept + stream.n_unread
            if full is not None and (n_whole > full.n_ctx or not self._session.placement.kv_unified):
                # With its own numbers: what others hold is not for its client.
                self._end(stream, ContextFull(stream.filling.n_kept, stream.n_unread, full.n_ctx))
                continue
            if full is not None and any(one.is_admitted for one in self._streams.values()):
                return
            if full is not None:
                self._make_room(stream.seq_id, n_wanted, from_waiting=True)
            stream.is_admitted = True

    def _n_promised(self) -> int:
        """Count the cells that prompts which were let begin have still to take; nothing where each has its own."""
        if not self._session.placement.kv_unified:
            return 0
        return sum(one.n_unread for one in self._streams.values() if one.is_admitted)

    def _read(self, stream: _Stream) -> None:
        """Read the next piece; small while others generate, so that they need not wait for long."""
        placement = self._session.placement
        is_alone = not any(one.is_generating for one in self._streams.values())
        n = placement.n_batch if is_alone else placement.n_ubatch
        pending, rest = stream.filling.pending, stream.filling.rest[stream.n_read :]
        started = perf_counter()
        if rest:
            stream.n_read += self._session.read(stream.seq_id, rest, n_most=n, draws_next=pending is None)
        if not stream.n_unread:
            order = stream.order
            self._session.begin(
                stream.seq_id,
                order.sampler,
                n_draws=order.n_draws,
                pending=pending,
                constraints=Constraints(order.grammar),
                n_ruled=order.n_delivered,
            )
            stream.is_generating = True
        stream.read_ms += (perf_counter() - started) * 1e3
        self._report_reading(stream)
        if stream.is_generating and stream.order.n_predict == 0:
            self._end(stream, "length")

    def _report_reading(self, stream: _Stream) -> None:
        n_whole = len(stream.order.tokens) - (stream.filling.pending is not None)
        # What an encoder reads is read as a whole, before its decoder begins.
        n_done = n_whole if stream.is_generating else min(stream.filling.n_kept + stream.n_read, n_whole)
        self._report(Reading(stream.order.stream, n_done, stream.filling.n_kept, stream.read_ms))

    # ---- generating ----

    def _step(self, streams: list[_Stream]) -> None:
        streams = self._fitting(streams)
        if not streams:
            return
        started = perf_counter()
        results = self._session.step([one.seq_id for one in streams])
        ms = (perf_counter() - started) * 1e3
        drawn: list[Drawn] = []
        ends: list[tuple[_Stream, str | Exception]] = []
        for stream in streams:
            result = results[stream.seq_id]
            if isinstance(result, Exception):
                ends.append((stream, result))
                continue
            stream.n_made += 1
            n_draws = self._session.n_draws(stream.seq_id)
            drawn.append(Drawn(stream.order.stream, result.id, result.piece, n_draws, is_end=result.is_end))
            if result.is_end or stream.n_made == stream.order.n_predict:
                ends.append((stream, "eos" if result.is_end else "length"))
        self._report(Step(tuple(drawn), ms))
        for stream, why in ends:
            self._end(stream, why)

    def _fitting(self, streams: list[_Stream]) -> list[_Stream]:
        """End streams until the others fit into one more decode."""
        if not self._session.placement.kv_unified:
            for stream in [one for one in streams if self._session.why_full(one.seq_id, self._n_next(one))]:
                self._end(stream, "context")
                streams = [one for one in streams if one is not stream]
            return streams
        while streams:
            n_wanted = sum(map(self._n_next, streams)) + self._n_promised()
            if self._make_room(streams[0].seq_id, n_wanted, from_waiting=True) is None:
                break
            largest = max(streams, key=lambda one: self._session.n_held(one.seq_id))
            self._end(largest, "context")
            streams = [one for one in streams if one is not largest]
        return streams

    def _n_next(self, stream: _Stream) -> int:
        """Count the cells that a stream's next step takes: none where its prompt has just been read."""
        return int(stream.n_made > 0 or stream.filling.pending is not None)

    # ---- room ----

    def _make_room(self, seq_id: int, n_new: int, *, from_waiting: bool = False) -> ContextFull | None:
        """Empty idle sequences, and those of other streams that wait if told to, until so many more tokens fit.

        Returns:
            The error where they do not.
        """
        session = self._session
        while (full := session.why_full(seq_id, n_new)) is not None:
            busy = self.busy
            idle = [one for one in range(session.placement.n_seq_max) if one not in busy and session.n_held(one)]
            if not session.placement.kv_unified:
                return full
            if not idle:
                if not (from_waiting and self._empty_waiting(seq_id)):
                    return full
                continue
            unused = min(idle, key=lambda one: self._used_at.get(one, 0))
            session.remove_sequence(unused)
            self._report(Forgot(unused))
        return None

    def _empty_waiting(self, seq_id: int) -> bool:
        """Empty the sequence of the last other stream that waits and holds something; say whether there was one."""
        waiting = [one for one in self._streams.values() if not one.is_admitted and one.seq_id != seq_id]
        stream = next((one for one in reversed(waiting) if self._session.n_held(one.seq_id)), None)
        if stream is None:
            return False
        self._session.remove_sequence(stream.seq_id)
        self._guarded([stream], lambda: self._refill(stream))
        return True

    def _refill(self, stream: _Stream) -> None:
        stream.filling = self._fill(stream.order)
        self._report_reading(stream)

    # ---- ends ----

    def _guarded(self, streams: list[_Stream], work: Callable[[], None]) -> None:
        """Do a piece of work; an error ends the streams that it was for, and no others."""
        try:
            work()
        except (Parked, TrialFailed):
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, others are served on
            for stream in streams:
                self._end(stream, error)

    def _end(self, stream: _Stream, why: str | Exception) -> None:
        number = stream.order.stream
        if self._streams.pop(number, None) is not None:
            self._touch(stream.seq_id)
            self._report(Ended(number, why) if isinstance(why, str) else _ended(number, why))

    def _touch(self, seq_id: int) -> None:
        self._clock += 1
        self._used_at[seq_id] = self._clock


def _ended(number: int, error: Exception) -> Ended:
    failure = logged_failure_of(error)
    why = "context" if isinstance(error, ContextFull) else "error"
    return Ended(number, why, failure.fault, failure.message)
