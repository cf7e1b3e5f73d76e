"""The streams of a hosted session between their clients and its books: who waits, who runs, who is told what.

Laws:
    1. A stream ends once, and its client is told why.
    2. What comes while no worker serves waits, and goes on when one does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Callable, Iterable

from splitctl.carry.sequence import RANDOM_SEED, SamplerSpec
from splitctl.control.requests import GenerateRequest
from splitctl.errors import Busy
from splitctl.host.ledger import Ledger, StreamJob
from splitctl.host.pending import OnLoss, OrderFailed, PendingOrders
from splitctl.host.streams import Done, Stream, Why
from splitctl.ipc.jobs import Fault
from splitctl.ipc.orders import Ended, Forgot, Halt, Order, Reading, Step, Tokenize, Tokenized

#: Streams that may wait for a sequence or for their tokens; one more is told that the session is busy.
MAX_WAITING = 256

#: Workers that may be lost over a stream, one after the other, before it is ended: what kills five would kill six.
_MAX_LOSSES = 5

_WHY = {
    "eos": Why.EOS,
    "length": Why.LENGTH,
    "context": Why.CONTEXT,
    "halted": Why.CANCELLED,
    "error": Why.ERROR,
}


class StreamTable:
    """All streams of one session.

    Thread: the supervisor's loop.
    """

    def __init__(self, desk: PendingOrders, send: Callable[[Order], None], flush: Callable[[], None]) -> None:
        """Begin without any.

        Args:
            desk: takes orders that have an answer.
            send: gives an order to the worker.
            flush: gives the worker what lies on the desk and who waits for a sequence, if one serves.
        """
        self.books = Ledger(0)
        self.had_progress = True
        self._desk = desk
        self._send = send
        self._flush = flush
        self._streams: dict[int, Stream] = {}
        self._tokenizing: dict[int, GenerateRequest] = {}
        self._n_streams = 0

    @property
    def n_waiting(self) -> int:
        """Streams that wait for a sequence, or for their tokens."""
        return self.books.n_queued + len(self._tokenizing)

    @property
    def n_open(self) -> int:
        """Streams whose clients have not had their last event."""
        return len(self._streams)

    # ---- clients ----

    def open(self, request: GenerateRequest) -> Stream:
        """Take a stream.

        Raises:
            Busy: too many wait.
        """
        if self.n_waiting >= MAX_WAITING:
            raise Busy(f"{self.n_waiting} streams that wait")
        self._n_streams += 1
        number = self._n_streams
        stream = self._streams[number] = Stream(number, request.sampler.stop, self._cancel)
        if request.tokens is not None:
            self._queue(number, request.tokens, request)
        else:
            self._tokenizing[number] = request
            answer = self._desk.put(_tokenize(self._desk.number(), request), OnLoss.REPEAT)
            answer.add_done_callback(lambda done: self._tokenized(number, done))
        self._flush()
        return stream

    def _tokenized(self, number: int, answer: asyncio.Future[Tokenized]) -> None:
        """Go on with a stream whose prompt has become tokens."""
        request = self._tokenizing.pop(number, None)
        if request is None or answer.cancelled():
            return
        error = answer.exception()
        if error is not None:
            fault = error.fault if isinstance(error, OrderFailed) else None
            self._end(number, None, Why.ERROR, str(error), fault)
        elif not answer.result().tokens:
            self._end(number, None, Why.ERROR, "the prompt has no token; give some text", Fault.CONFIG)
        else:
            self._queue(number, answer.result().tokens, request)
            self._flush()

    def _queue(self, number: int, tokens: tuple[int, ...], request: GenerateRequest) -> None:
        self.books.add(StreamJob(number, tokens, _fixed(request.sampler), request.n_predict))

    def _cancel(self, number: int) -> None:
        """End a stream that its client does not want any more."""
        if self._tokenizing.pop(number, None) is not None:
            self._end(number, None, Why.CANCELLED)
        elif number in self.books.jobs:
            self._finish(self.books.jobs[number], Why.CANCELLED)

    def _finish(self, job: StreamJob, why: Why, message: str = "") -> None:
        """Give a stream its last event, and let the worker stop."""
        if self.books.finish(job.number):
            self._send(Halt(job.number))
        self._end(job.number, job, why, message)
        self._flush()

    def _end(self, number: int, job: StreamJob | None, why: Why, message: str = "", fault: Fault | None = None) -> None:
        stream = self._streams.pop(number, None)
        if stream is None:
            return
        if job is None:
            stream.end(Done(why, message=message, fault=fault))
            return
        numbers = (len(job.prompt), job.n_reused or 0, job.n_predicted, job.prompt_ms, job.generate_ms)
        stream.end(Done(why, *numbers, message, fault))

    # ---- a worker's reports ----

    def take(self, report: Reading | Step | Ended | Forgot) -> None:
        """Book a report, and tell clients.

        Raises:
            ReportWrong: it cannot be.
        """
        match report:
            case Reading():
                job = self.books.reading(report)
                if job is not None:
                    self._streams[job.number].begin(len(job.prompt), job.n_reused or 0)
            case Step():
                self._step(report)
            case Ended():
                ended = self.books.ended(report)
                if ended is not None:
                    self._end(ended.number, ended, _WHY.get(report.why, Why.ERROR), report.message, report.fault)
                self._flush()
            case Forgot():
                self.books.forgot(report.seq_id)

    def _step(self, report: Step) -> None:
        delivered = self.books.step(report)
        self.had_progress = True
        for job, drawn in delivered:
            stream = self._streams[job.number]
            stream.begin(len(job.prompt), job.n_reused or 0)
            if not drawn.is_end and stream.deliver(drawn.token, drawn.piece):
                self._finish(job, Why.STOP)

    # ---- what stops and starts them all ----

    def start_waiting(self) -> None:
        """Give the worker who waits, as far as sequences are idle."""
        for start in self.books.startable():
            self._send(start)

    def pause(self, why: str) -> None:
        """Tell clients whose streams run that no token comes for a while."""
        for job in self.books.running:
            self._streams[job.number].pause(why)

    def resume(self) -> None:
        """Tell them that tokens come again."""
        for job in self.books.running:
            self._streams[job.number].resume()

    def resize(self, n_seq_max: int) -> None:
        """Have so many sequences from now on."""
        gone = self.books.resize(n_seq_max)
        self._give_up(gone, "its sequence is gone: the session was moved to a smaller number of them (-np)")

    def lost(self, reason: str, *, had_started: bool) -> None:
        """Note that the worker is gone.

        Args:
            reason: how.
            had_started: it had been given the streams that run.
        """
        self.had_progress = False
        self.books.lost(had_started=had_started)
        self.pause(reason)
        hopeless = [job for job in self.books.running if job.n_losses >= _MAX_LOSSES]
        self._give_up(hopeless, f"{_MAX_LOSSES} workers were lost over it, the last one thus: {reason}")

    def back(self) -> None:
        """Go on in a new worker, each stream where it stood."""
        starts, complete = self.books.resume()
        for job in complete:
            self._end(job.number, job, Why.EOS if job.is_ended else Why.LENGTH)
        for start in starts:
            self._send(start)
        self.resume()

    @property
    def has_stuck(self) -> bool:
        """Whether workers were lost over a stream without a token of it in between."""
        return bool(self._tokenizing) or any(job.n_losses for job in self.books.running)

    def drop_stuck(self, reason: str) -> None:
        """End the streams over which workers were lost without a token in between."""
        self._give_up([job for job in self.books.running if job.n_losses], f"workers were lost over it: {reason}")
        text = f"workers were lost while it waited: {reason}"
        self._desk.fail(OrderFailed(Fault.INTERNAL, "WorkerLost", text), (Tokenize,))

    def end_all(self, message: str) -> None:
        """End every stream with an error.

        Args:
            message: the error's line.
        """
        for number in list(self._tokenizing):
            del self._tokenizing[number]
            self._end(number, None, Why.ERROR, message)
        for job in list(self.books.jobs.values()):
            if not job.is_over:
                self._finish(job, Why.ERROR, message)

    def _give_up(self, jobs: Iterable[StreamJob], message: str) -> None:
        for job in list(jobs):
            self.books.finish(job.number)
            self._end(job.number, job, Why.ERROR, message)


def _tokenize(order: int, request: GenerateRequest) -> Tokenize:
    messages = request.messages
    return Tokenize(
        order,
        text=request.prompt,
        messages=None if messages is None else tuple(dataclasses.asdict(one) for one in messages),
        add_special=request.add_special,
        parse_special=request.parse_special,
    )


def _fixed(sampler: SamplerSpec) -> SamplerSpec:
    """Give a sampler whose random seed is a number, so that a draw that was lost is made again."""
    if sampler.seed != RANDOM_SEED:
        return sampler
    return dataclasses.replace(sampler, seed=secrets.randbelow(RANDOM_SEED))
