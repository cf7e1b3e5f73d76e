"""The streams of a hosted session, between their clients and its ledger.

A `Stream` is what a client has: its events in order, and text that is whole characters without a stop text. The
`StreamTable` holds all of them: who waits, who runs, and what becomes of them when a worker is lost.

Laws:
    1. Begun comes once and before any Delta; every token of the answer is one Delta, numbered from 0 without a gap;
       Done comes last and always, once, and says why.
    2. The texts of all Deltas, joined, are the answer: what may still become a stop text, or is half a character, is
       held back until that is known.
    3. What comes while no worker serves waits, and goes on when one does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from splitctl.control.requests import GenerateRequest
from splitctl.errors import Busy
from splitctl.host.access import AccessLog
from splitctl.host.ledger import Ledger, StreamJob
from splitctl.host.pending import OnLoss, PendingOrders
from splitctl.ipc.jobs import Fault, RequestFailed
from splitctl.ipc.orders import Ended, Forgot, Halt, Order, Reading, Step, Tokenize, Tokenized
from splitctl.ipc.stop_texts import Text

#: Streams that may wait for a sequence or for their tokens; one more gets Busy.
MAX_WAITING = 256

#: Workers that may be lost over a stream, one after the other, before it is ended.
_MAX_LOSSES = 5


class Why(Enum):
    """Why a stream ended."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"
    CONTEXT = "context"
    ERROR = "error"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Begun:
    """The stream is on a sequence, and its prompt is being read.

    Attributes:
        n_prompt: tokens of the prompt.
        n_reused: those of them that the sequence held already.
    """

    n_prompt: int
    n_reused: int


@dataclass(frozen=True, slots=True)
class Delta:
    """One token of the answer, and the text that is certain by now; or, at the end, text that was held back.

    Attributes:
        text: may be empty, and may be that of earlier tokens.
        token: its id; None for text alone.
        index: the token's number, from 0; of text alone that of the last token.
    """

    text: str
    token: int | None
    index: int


@dataclass(frozen=True, slots=True)
class Paused:
    """No token comes for a while.

    Attributes:
        why: for a person.
    """

    why: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """Tokens come again."""


@dataclass(frozen=True, slots=True)
class Done:
    """The stream is over.

    Attributes:
        why: why.
        n_prompt: tokens of the prompt.
        n_reused: those of them that the sequence held already.
        n_predicted: tokens of the answer.
        prompt_ms: time until the first token was drawn, ms.
        generate_ms: time of the steps that drew the others, ms.
        message: what went wrong, for a person; empty where nothing did.
        fault: whose fault it was; None where nothing went wrong, or nobody knows.
    """

    why: Why
    n_prompt: int = 0
    n_reused: int = 0
    n_predicted: int = 0
    prompt_ms: float = 0.0
    generate_ms: float = 0.0
    message: str = ""
    fault: Fault | None = None

    @property
    def n_drawn(self) -> int:
        """Tokens that were drawn: those of the answer, and one that ended it."""
        return self.n_predicted + (self.why is Why.EOS)


StreamEvent = Begun | Delta | Paused | Resumed | Done


class Stream:
    """A client's end of a stream: iterate over it for its events.

    Thread: the supervisor's loop. Lifetime: until Done was taken; a client that goes away earlier cancels.
    """

    def __init__(self, stop: Sequence[str], on_cancel: Callable[[], None]) -> None:
        """Begin one that `stop` texts end; `on_cancel` is called when the client cancels."""
        self._text = Text(stop)
        self._on_cancel = on_cancel
        self._events: asyncio.Queue[StreamEvent] = asyncio.Queue()
        self._n_delivered = 0
        self._has_begun = False
        self._is_paused = False
        self._is_done = False
        self._is_read = False

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> StreamEvent:
        if self._is_read:
            raise StopAsyncIteration
        event = await self._events.get()
        self._is_read = isinstance(event, Done)
        return event

    def cancel(self) -> None:
        """End the stream; Done follows at once. One that is over stays as it is."""
        if not self._is_done:
            self._on_cancel()

    # ---- for the supervisor ----

    def begin(self, n_prompt: int, n_reused: int) -> None:
        """Say that the prompt is being read; a second time says nothing."""
        if not self._has_begun:
            self._has_begun = True
            self._events.put_nowait(Begun(n_prompt, n_reused))

    def deliver(self, token: int, piece: bytes) -> bool:
        """Pass a token on; says whether a stop text has ended the answer."""
        self.resume()
        self._events.put_nowait(Delta(self._text.feed(piece), token, self._n_delivered))
        self._n_delivered += 1
        return self._text.is_stopped

    def pause(self, why: str) -> None:
        """Say that no token comes for a while; of several reasons the first is passed on."""
        if self._has_begun and not self._is_paused:
            self._is_paused = True
            self._events.put_nowait(Paused(why))

    def resume(self) -> None:
        """Say that tokens come again."""
        if self._is_paused:
            self._is_paused = False
            self._events.put_nowait(Resumed())

    def end(self, done: Done) -> None:
        """Give the last event, after the text that was held back."""
        if self._is_done:
            return
        self._is_done = True
        rest = self._text.rest()
        if rest:
            self._events.put_nowait(Delta(rest, None, max(self._n_delivered - 1, 0)))
        self._events.put_nowait(done)


#: Why a worker says that a stream ended -> why it did.
_WHY = {one.value: one for one in Why} | {"halted": Why.CANCELLED}


class StreamTable:
    """All streams of one session.

    Attributes:
        ledger: what sequences hold, and the streams on them.
        had_progress: a token has come since the last worker was lost.
        held: numbers of streams that are not to be started yet.

    Thread: the supervisor's loop.
    """

    def __init__(
        self,
        pending: PendingOrders,
        send: Callable[[Order], None],
        flush: Callable[[], None],
        access: AccessLog | None = None,
    ) -> None:
        """Begin without any; `send` gives the worker an order, `flush` all that waits for it, if one serves.

        `access` is told of every stream.
        """
        self.ledger = Ledger(0)
        self.had_progress = True
        self.held: frozenset[int] = frozenset()
        self._pending = pending
        self._send = send
        self._flush = flush
        self._access = access
        self._streams: dict[int, Stream] = {}
        self._tokenizing: dict[int, GenerateRequest] = {}
        self._n_streams = 0

    @property
    def n_waiting(self) -> int:
        """Streams that wait for a sequence, or for their tokens."""
        return self.ledger.n_queued + len(self._tokenizing)

    @property
    def n_open(self) -> int:
        """Streams whose clients have not had their last event."""
        return len(self._streams)

    # ---- clients ----

    def open(self, request: GenerateRequest) -> Stream:
        """Take a stream; raises Busy where too many wait."""
        if self.n_waiting >= MAX_WAITING:
            raise Busy(f"{self.n_waiting} streams that wait")
        self._n_streams += 1
        number = self._n_streams
        if self._access is not None:
            self._access.came(number)
        stream = self._streams[number] = Stream(request.sampler.stop, lambda: self._close(number, Why.CANCELLED))
        if request.tokens is not None:
            self._queue(number, request.tokens, request)
        else:
            self._tokenizing[number] = request
            answer = self._pending.put(_tokenize(self._pending.number(), request), OnLoss.REPEAT)
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
            fault = error.fault if isinstance(error, RequestFailed) else None
            self._end(number, None, Why.ERROR, str(error), fault)
        elif not answer.result().tokens:
            self._end(number, None, Why.ERROR, "the prompt has no token; give some text", Fault.CONFIG)
        else:
            self._queue(number, answer.result().tokens, request)
            self._flush()

    def _queue(self, number: int, tokens: tuple[int, ...], request: GenerateRequest) -> None:
        self.ledger.add(StreamJob(number, tokens, request.sampler.seeded(), request.n_predict, request.grammar))

    def _close(self, number: int, why: Why, message: str = "") -> None:
        """Give a stream its last event, wherever it is, and let the worker stop."""
        self._tokenizing.pop(number, None)
        job = self.ledger.jobs.get(number)
        if self.ledger.finish(number):
            self._send(Halt(number))
        self._end(number, job, why, message)
        self._flush()

    def _end(self, number: int, job: StreamJob | None, why: Why, message: str = "", fault: Fault | None = None) -> None:
        stream = self._streams.pop(number, None)
        if stream is None:
            return
        if self._access is not None:
            self._access.ended(number, job, why.value)
        if job is None:
            stream.end(Done(why, message=message, fault=fault))
            return
        numbers = (len(job.prompt), job.n_reused or 0, job.n_predicted, job.prompt_ms, job.generate_ms)
        stream.end(Done(why, *numbers, message, fault))

    # ---- a worker's reports ----

    def take(self, report: Reading | Step | Ended | Forgot) -> None:
        """Record a report, and pass it on to clients; raises ReportWrong."""
        match report:
            case Reading():
                job = self.ledger.reading(report)
                if job is not None:
                    self._streams[job.number].begin(len(job.prompt), job.n_reused or 0)
            case Step():
                self._step(report)
            case Ended():
                ended = self.ledger.ended(report)
                if ended is not None:
                    self._end(ended.number, ended, _WHY.get(report.why, Why.ERROR), report.message, report.fault)
                self._flush()
            case Forgot():
                self.ledger.forgot(report.seq_id)

    def _step(self, report: Step) -> None:
        delivered = self.ledger.step(report)
        self.had_progress = True
        for job, drawn in delivered:
            stream = self._streams[job.number]
            stream.begin(len(job.prompt), job.n_reused or 0)
            if not drawn.is_end and stream.deliver(drawn.token, drawn.piece):
                self._close(job.number, Why.STOP)

    # ---- what stops and starts them all ----

    def start_waiting(self) -> None:
        """Start waiting streams on idle sequences, but for those that are held."""
        for start in self.ledger.startable(self.held):
            self._send(start)

    def pause(self, why: str) -> None:
        """Let clients whose streams run know that no token comes for a while."""
        for job in self.ledger.running:
            self._streams[job.number].pause(why)

    def resume(self) -> None:
        """Let them know that tokens come again."""
        for job in self.ledger.running:
            self._streams[job.number].resume()

    def resize(self, n_seq_max: int) -> None:
        """Have so many sequences from now on."""
        gone = self.ledger.resize(n_seq_max)
        self._give_up(gone, "its sequence is gone: the session was moved to a smaller number of them (-np)")

    def lost(self, reason: str) -> None:
        """Note how the worker ended, and that the streams that run wait for another."""
        self.had_progress = False
        self.ledger.lost()
        self.pause(reason)
        hopeless = [job for job in self.ledger.running if job.n_losses >= _MAX_LOSSES]
        self._give_up(hopeless, f"{_MAX_LOSSES} workers were lost over it, the last one thus: {reason}")

    def detached(self) -> None:
        """Note that the worker has let go of all streams, which wait for another one, or for it again."""
        self.ledger.detached()

    def back(self) -> None:
        """Continue every stream in a new worker where it stood."""
        starts, complete = self.ledger.resume()
        for job in complete:
            self._end(job.number, job, Why.EOS if job.is_ended else Why.LENGTH)
        for start in starts:
            self._send(start)
        self.resume()

    @property
    def has_stuck(self) -> bool:
        """Whether workers were lost over a stream without a token of it in between."""
        return bool(self._tokenizing) or any(job.n_losses for job in self.ledger.running)

    def drop_stuck(self, reason: str) -> None:
        """End the streams over which workers were lost without a token in between."""
        self._give_up([job for job in self.ledger.running if job.n_losses], f"workers were lost over it: {reason}")
        text = f"workers were lost while it waited: {reason}"
        self._pending.fail(RequestFailed(Fault.INTERNAL, "WorkerLost", text), Tokenize)

    def end_all(self, message: str) -> None:
        """End every stream with an error."""
        for number in [*self._tokenizing, *self.ledger.jobs]:
            self._close(number, Why.ERROR, message)

    def _give_up(self, jobs: Iterable[StreamJob], message: str) -> None:
        for job in list(jobs):
            self.ledger.finish(job.number)
            self._end(job.number, job, Why.ERROR, message)


def _tokenize(order: int, request: GenerateRequest) -> Tokenize:
    return Tokenize(
        order,
        text=request.prompt,
        messages=request.messages,
        add_special=request.add_special,
        parse_special=request.parse_special,
        chat_template_kwargs=request.chat_template_kwargs,
        continue_final_message=request.continue_final_message,
    )
