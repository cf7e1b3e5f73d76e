"""What a hosted session holds, as workers reported it: sequences, streams on them, and who waits for one. Pure.

Laws:
    1. A token is recorded once, in the order of its decode, to the stream's job and to the sequence that holds it.
    2. The ledger never claims more than was reported: what a new worker must hold can be made from it alone.
    3. A sequence has one stream at a time; it is free again when the worker said that the stream has ended, or is gone.
    4. Streams start in the order in which they came; one that is held back is passed over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from splitctl.carry.sampling import SamplerSpec
from splitctl.carry.sequence import common
from splitctl.errors import SplitctlError
from splitctl.ipc.orders import Drawn, Ended, Reading, SequenceSnapshot, Start, Step

#: A sequence is reused when it holds this share of a new prompt; below it the one that was unused for longest makes
#: room.  Source: llama-server's default (slot_prompt_similarity).
_WORTH_KEEPING = 0.1

_RECENT_STEPS = 64
"""Steps over which the rate of generation is measured."""


@dataclass(eq=False, repr=False)
class ReportWrong(SplitctlError):
    """A worker reported something impossible: it has lost count, and cannot be believed any more.

    Attributes:
        what: what it reported, and why that is impossible.
    """

    what: str

    def __str__(self) -> str:
        return f"the worker lost count: {self.what}"


@dataclass(slots=True)
class StreamJob:
    """A stream as the ledger sees it: a prompt, and tokens drawn after it.

    Attributes:
        number: the stream's number.
        prompt: the whole prompt.
        sampler: how to draw, its seed a number.
        n_predict: most tokens to draw; negative: no limit.
        grammar: what is drawn follows it, in GBNF; empty: none.
        drawn: every token drawn so far, one that ends the generation included.
        n_draws: random draws made.
        is_ended: the last token ends the generation.
        is_over: its client has its last event; the sequence is free once the worker has said so too.
        seq_id: the sequence it is on; None while it waits.
        n_reused: tokens of the prompt that the sequence held before; None until the worker said.
        prompt_ms: time until its first token was drawn, ms; all workers together.
        generate_ms: time of the steps that drew the other tokens, ms.
        n_read: tokens that this worker has read for it.
        read_ms: time that this worker took to read them, ms.
        n_losses: workers that were lost over it, one after the other, without a token of its own in between.
    """

    number: int
    prompt: tuple[int, ...]
    sampler: SamplerSpec
    n_predict: int
    grammar: str = ""
    drawn: list[int] = field(default_factory=list)
    n_draws: int = 0
    is_ended: bool = False
    is_over: bool = False
    seq_id: int | None = None
    n_reused: int | None = None
    prompt_ms: float = 0.0
    generate_ms: float = 0.0
    n_read: int = 0
    read_ms: float = 0.0
    n_losses: int = 0

    @property
    def n_predicted(self) -> int:
        """Tokens of the answer: those drawn, without one that ends the generation."""
        return len(self.drawn) - self.is_ended

    @property
    def n_left(self) -> int:
        """Most tokens that may still be drawn; negative: no limit."""
        return -1 if self.n_predict < 0 else max(0, self.n_predict - len(self.drawn))

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to draw, whatever the worker has still to say about it."""
        return self.is_ended or self.n_left == 0

    def start(self, seq_id: int) -> Start:
        """Give the order that makes a worker go on where the stream stands."""
        return Start(
            self.number,
            seq_id,
            (*self.prompt, *self.drawn),
            self.sampler,
            self.n_left,
            self.n_draws,
            is_pending=bool(self.drawn),
            n_delivered=len(self.drawn),
            grammar=self.grammar,
        )


@dataclass(slots=True)
class Totals:
    """What all workers of a session have read and drawn, whatever became of the streams that it was for.

    Attributes:
        n_read: tokens of prompts that were read; what a new worker reads again before it serves does not count.
        n_reused: tokens of prompts that a sequence held already.
        prompt_ms: time until the first tokens were drawn, ms.
        n_drawn: tokens drawn, those that end an answer included.
        generate_ms: time of the steps that drew the other tokens, ms, summed over the streams.
        n_tokens_max: most tokens that a sequence has held.
    """

    n_read: int = 0
    n_reused: int = 0
    prompt_ms: float = 0.0
    n_drawn: int = 0
    generate_ms: float = 0.0
    n_tokens_max: int = 0


@dataclass(slots=True)
class SequenceRow:
    """One sequence.

    Attributes:
        seq_id: its id.
        tokens: what it holds.
        is_pending: the newest was drawn and has not been decoded.
        sampler: how its last stream drew; None: none did.
        n_draws: random draws made.
        encoder_tokens: what an encoder read for it.
        grammar: what its last stream followed; empty: nothing.
        n_ruled: tokens that it holds of that stream's answer.
        stream: the stream on it; None: it is idle.
        used_at: when it was used last, as a count; 0: never.
    """

    seq_id: int
    tokens: list[int] = field(default_factory=list)
    is_pending: bool = False
    sampler: SamplerSpec | None = None
    n_draws: int = 0
    encoder_tokens: tuple[int, ...] = ()
    grammar: str = ""
    n_ruled: int = 0
    stream: int | None = None
    used_at: int = 0

    def snapshot(self) -> SequenceSnapshot:
        """Give what a new worker must hold."""
        return SequenceSnapshot(
            self.seq_id,
            tuple(self.tokens),
            self.is_pending,
            self.sampler,
            self.n_draws,
            self.encoder_tokens,
            self.grammar,
            self.n_ruled if self.grammar else 0,
        )


class Ledger:
    """The sequences of one session, and the streams on them; an impossible report raises ReportWrong.

    Attributes:
        rows: all sequences, by id.
        jobs: all streams that have their tokens and are not over, by number.
        totals: what was read and drawn since the session began.
        decoder_start: the token with which an encoder-decoder's decoder begins, whose encoder reads the prompts; None
            for any other model.
        version: grows whenever a sequence changes.

    Thread: the supervisor's loop, alone.
    """

    def __init__(self, n_seq_max: int) -> None:
        self.rows = [SequenceRow(seq_id) for seq_id in range(n_seq_max)]
        self.jobs: dict[int, StreamJob] = {}
        self.version = 0
        self.totals = Totals()
        self.decoder_start: int | None = None
        self._has_worker = True
        self._steps: deque[tuple[int, float]] = deque(maxlen=_RECENT_STEPS)
        self._last_read = (0, 0.0)

    # ---- what there is ----

    @property
    def n_queued(self) -> int:
        """Streams that wait for a sequence."""
        return len(self.queued)

    @property
    def queued(self) -> list[StreamJob]:
        """Jobs that wait for a sequence, in the order in which they came."""
        return [job for job in self.jobs.values() if job.seq_id is None]

    @property
    def running(self) -> list[StreamJob]:
        """Jobs that are on a sequence and not over, by sequence."""
        on = [self.jobs[row.stream] for row in self.rows if row.stream is not None]
        return [job for job in on if not job.is_over]

    @property
    def is_working(self) -> bool:
        """Whether a worker has something to say about any stream."""
        return any(row.stream is not None for row in self.rows)

    @property
    def held(self) -> tuple[int, int]:
        """Sequences that hold something, and tokens over all of them."""
        held = [len(row.tokens) for row in self.rows if row.tokens or row.encoder_tokens]
        return len(held), sum(held)

    @property
    def tokens_per_second(self) -> dict[str, float | None]:
        """Recent rates: prompt of the last one read, generate over the last steps and all streams together."""
        n_drawn, ms = sum(n for n, _ in self._steps), sum(ms for _, ms in self._steps)
        return {"prompt": per_second(*self._last_read), "generate": per_second(n_drawn, ms)}

    def snapshots(self) -> tuple[SequenceSnapshot, ...]:
        """Give what every sequence that holds something must hold in a new worker."""
        return tuple(row.snapshot() for row in self.rows if row.tokens or row.encoder_tokens)

    def status(self) -> list[dict[str, Any]]:
        """Say what every sequence is doing: idle, reading, generating or ending; as JSON types."""
        return [{"seq_id": row.seq_id, "n_tokens": len(row.tokens), "state": self._state(row)} for row in self.rows]

    def _state(self, row: SequenceRow) -> str:
        job = None if row.stream is None else self.jobs[row.stream]
        return "idle" if job is None else "ending" if job.is_over else "generating" if job.drawn else "reading"

    # ---- streams come and go ----

    def add(self, job: StreamJob) -> None:
        """Take a stream that waits for a sequence."""
        self.jobs[job.number] = job

    def startable(self, held: Collection[int] = ()) -> tuple[Start, ...]:
        """Put streams that wait on idle sequences, in their order, but for those held back; gives the orders for it."""
        starts = []
        for job in self.queued:
            if job.number in held:
                continue
            row = choose_row(self.rows, job.prompt)
            if row is None:
                break
            starts.append(self._put(job, row))
        return tuple(starts)

    def finish(self, number: int) -> bool:
        """Note that a stream's client has its last event; says whether a worker is still at it and has to halt."""
        job = self.jobs.get(number)
        if job is None or job.is_over:
            return False
        if self._has_worker and job.seq_id is not None:
            job.is_over = True
            return True
        del self.jobs[number]
        if job.seq_id is not None:
            self.rows[job.seq_id].stream = None
        return False

    def _put(self, job: StreamJob, row: SequenceRow) -> Start:
        """Give a sequence to a stream; from now on it holds what both have in common, and no more is sure."""
        self._touch(row)
        row.stream, job.seq_id = job.number, row.seq_id
        whole = [*job.prompt, *job.drawn]
        n_common = 0 if self.decoder_start is not None else common(row.tokens, whole)
        row.encoder_tokens = ()
        row.is_pending = row.is_pending and n_common == len(row.tokens)
        del row.tokens[n_common:]
        row.sampler, row.n_draws = job.sampler, job.n_draws
        row.grammar, row.n_ruled = job.grammar, max(0, n_common - len(job.prompt))
        return job.start(row.seq_id)

    # ---- what a worker reports ----

    def reading(self, report: Reading) -> StreamJob | None:
        """Record how far a prompt has been read; gives the job, or None where its client is gone."""
        job, row = self._on_row(report.stream, "a prompt")
        n_whole = len(job.prompt) + len(job.drawn)
        if not 0 <= report.n_reused <= report.n_done <= n_whole:
            raise ReportWrong(f"{report.n_done} tokens read of {n_whole}, {report.n_reused} of them held before")
        ms = self._count_read(job, report)
        if job.drawn:
            # A stream that goes on: what was drawn stays, whatever of it is read again.
            return None if job.is_over else job
        self._has_read(row, job, report.n_done)
        row.is_pending = False
        self._touch(row)
        if job.n_reused is None:
            job.n_reused = report.n_reused
            self.totals.n_reused += report.n_reused
        job.prompt_ms += ms
        if job.n_read:
            # One that is refused, or held already, says nothing of how fast prompts are read.
            self._last_read = (job.n_read, report.ms)
        return None if job.is_over else job

    def _count_read(self, job: StreamJob, report: Reading) -> float:
        """Count what a worker has read for a stream since its last report; gives the time that it took, ms."""
        n_read = report.n_done - report.n_reused
        n, ms = max(n_read - job.n_read, 0), max(report.ms - job.read_ms, 0.0)
        job.n_read, job.read_ms = n_read, report.ms
        self.totals.n_read += n
        self.totals.prompt_ms += ms
        return ms

    def step(self, report: Step) -> list[tuple[StreamJob, Drawn]]:
        """Record the tokens of a decode; gives those whose clients wait for them."""
        delivered = []
        n_decoded = 0
        for drawn in report.tokens:
            job, row = self._on_row(drawn.stream, "a token")
            if job.is_ended:
                raise ReportWrong(f"a token of stream {job.number} after the one that ended it")
            if drawn.n_draws < job.n_draws:
                raise ReportWrong(f"{drawn.n_draws} random draws of stream {job.number}, and {job.n_draws} before")
            if job.drawn:
                job.generate_ms += report.ms
                self.totals.generate_ms += report.ms
                n_decoded += 1
            else:
                # Its first token proves that the prompt was read, whether that was reported or not.  It comes from the
                # last decode of the prompt, and is the end of that.
                self._has_read(row, job, len(job.prompt))
                job.prompt_ms += report.ms
                self.totals.prompt_ms += report.ms
            self.totals.n_drawn += 1
            row.tokens.append(drawn.token)
            row.is_pending = True
            row.n_draws = job.n_draws = drawn.n_draws
            job.drawn.append(drawn.token)
            row.n_ruled = len(job.drawn)
            job.is_ended = drawn.is_end
            job.n_losses = 0
            self._touch(row)
            if not job.is_over:
                delivered.append((job, drawn))
        self._steps.append((n_decoded, report.ms))
        return delivered

    def _has_read(self, row: SequenceRow, job: StreamJob, n_done: int) -> None:
        """Let a sequence hold so much of a prompt; an encoder reads one as a whole, and then its decoder begins."""
        if self.decoder_start is None:
            row.tokens[:] = job.prompt[:n_done]
        elif n_done == len(job.prompt):
            row.encoder_tokens, row.tokens[:] = job.prompt, [self.decoder_start]

    def ended(self, report: Ended) -> StreamJob | None:
        """Free the sequence of a stream that is over; gives the job, or None where its client has its end already."""
        job, row = self._on_row(report.stream, "an end")
        self._touch(row)
        row.stream = None
        del self.jobs[job.number]
        return None if job.is_over else job

    def forgot(self, seq_id: int) -> None:
        """Empty a sequence that had to make room; one that was given to a stream meanwhile is filled by it anyway."""
        if not 0 <= seq_id < len(self.rows):
            raise ReportWrong(f"sequence {seq_id} was emptied, which is not there")
        if self.rows[seq_id].stream is None:
            self.rows[seq_id] = SequenceRow(seq_id)
            self.version += 1

    # ---- a worker is gone, another one comes ----

    def lost(self) -> None:
        """Note that the worker is gone, which counts against the streams that it was at."""
        self.detached()
        for job in self.running:
            job.n_losses += 1

    def detached(self) -> None:
        """Note that no worker is at any stream: what one had to end has ended, and what it read in part is unknown."""
        self._has_worker = False
        for row in self.rows:
            if row.stream is None:
                continue
            job = self.jobs[row.stream]
            if job.is_over:
                row.stream = None
                del self.jobs[job.number]
            else:
                job.n_read, job.read_ms = 0, 0.0

    def resume(self) -> tuple[list[Start], list[StreamJob]]:
        """Let a new worker go on: gives its orders, and the jobs that lack nothing but the report of their end."""
        self._has_worker = True
        complete = [job for job in self.running if job.is_complete]
        for job in complete:
            if job.seq_id is not None:
                self.rows[job.seq_id].stream = None
            del self.jobs[job.number]
        return [self._put(job, self.rows[job.seq_id]) for job in self.running if job.seq_id is not None], complete

    def replace(self, snapshots: Sequence[SequenceSnapshot]) -> None:
        """Hold what a restored file holds, now that no stream is on a sequence."""
        if self.is_working:
            raise ReportWrong("all sequences were replaced while streams were on them")
        self.rows = [SequenceRow(row.seq_id) for row in self.rows]
        for one in snapshots:
            if not 0 <= one.seq_id < len(self.rows):
                raise ReportWrong(f"sequence {one.seq_id} of {len(self.rows)}")
            row = self.rows[one.seq_id] = SequenceRow(
                one.seq_id,
                list(one.tokens),
                one.is_pending,
                one.sampler,
                one.n_draws,
                one.encoder_tokens,
                one.grammar,
                one.n_ruled,
            )
            self._touch(row)
        self.version += 1

    def resize(self, n_seq_max: int) -> list[StreamJob]:
        """Have so many sequences from now on; gives the jobs that were on a sequence that is gone."""
        gone = [row.stream for row in self.rows[n_seq_max:] if row.stream is not None]
        del self.rows[n_seq_max:]
        self.rows += [SequenceRow(seq_id) for seq_id in range(len(self.rows), n_seq_max)]
        return [self.jobs.pop(number) for number in gone]

    def _on_row(self, number: int, what: str) -> tuple[StreamJob, SequenceRow]:
        job = self.jobs.get(number)
        row = None if job is None or job.seq_id is None else self.rows[job.seq_id]
        if job is None or row is None or row.stream != number:
            raise ReportWrong(f"{what} of stream {number}, which is on no sequence")
        return job, row

    def _touch(self, row: SequenceRow) -> None:
        self.version += 1
        row.used_at = self.version
        self.totals.n_tokens_max = max(self.totals.n_tokens_max, len(row.tokens))


def choose_row(rows: Sequence[SequenceRow], prompt: Sequence[int]) -> SequenceRow | None:
    """Choose the idle sequence for a whole prompt; None where none is idle.

    It is the one that holds the most of the prompt's beginning, where that is worth it; else the one that was unused
    for longest, empty ones first. While one is empty, none takes a prompt for which it would forget more than it keeps.
    """
    idle = [row for row in rows if row.stream is None]
    if not idle:
        return None
    held = [common(row.tokens, prompt) for row in idle]
    most = max(held)
    if most and most >= _WORTH_KEEPING * len(prompt):
        # Of equals the shortest, which loses the least.
        best = min((row for row, n in zip(idle, held, strict=True) if n == most), key=lambda row: len(row.tokens))
        # Two chats with the same system prompt each have their own sequence.
        if len(best.tokens) - most <= most or all(row.tokens for row in idle):
            return best
    return min(idle, key=lambda row: (bool(row.tokens), row.used_at, row.seq_id))


def per_second(n: int, ms: float) -> float | None:
    """Give a rate; None where nothing was measured."""
    return n / ms * 1e3 if n and ms else None
