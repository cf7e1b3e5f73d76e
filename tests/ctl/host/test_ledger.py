"""The ledger of a hosted session: what a worker reports goes in, what the next one must hold comes out."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from splitctl.carry.sampling import SamplerSpec
from splitctl.carry.sequence import common
from splitctl.host.ledger import Ledger, ReportWrong, SequenceRow, StreamJob, choose_row
from splitctl.ipc.orders import Drawn, Ended, Reading, SequenceSnapshot, Start, Step

_SAMPLER = SamplerSpec(seed=7)


def _job(number: int, *prompt: int, n_predict: int = -1) -> StreamJob:
    return StreamJob(number, prompt or (1, 2, 3), _SAMPLER, n_predict)


def _row(seq_id: int, tokens: list[int], *, stream: int | None = None, used_at: int = 0) -> SequenceRow:
    return SequenceRow(seq_id, tokens, stream=stream, used_at=used_at)


def _step(*streams: int, token: int = 9, n_draws: int = 0, is_end: bool = False, ms: float = 1.0) -> Step:
    return Step(tuple(Drawn(one, token, b"x", n_draws, is_end=is_end) for one in streams), ms)


def _running(n_seq_max: int = 2, *jobs: StreamJob) -> Ledger:
    """A ledger with jobs on its sequences, their prompts read."""
    ledger = Ledger(n_seq_max)
    for job in jobs:
        ledger.add(job)
    ledger.startable()
    for job in jobs:
        if job.seq_id is not None:
            ledger.reading(Reading(job.number, len(job.prompt), 0, 2.0))
    return ledger


# ---- which sequence ----


@pytest.mark.parametrize(
    ("rows", "prompt", "chosen"),
    [
        ([_row(0, []), _row(1, [])], [1], 0),
        ([_row(0, [1], stream=1), _row(1, [])], [1], 1),
        ([_row(0, [1], stream=1), _row(1, [1], stream=2)], [1], None),
        ([_row(0, [5, 6], used_at=1), _row(1, [], used_at=9)], [1], 1),
        ([_row(0, [5, 6], used_at=2), _row(1, [7], used_at=1)], [1], 1),
        ([_row(0, [1, 2, 3], used_at=1), _row(1, [1, 2], used_at=2)], [1, 2, 3, 4], 0),
        ([_row(0, [1, 2, 8, 9], used_at=1), _row(1, [1, 2], used_at=2)], [1, 2, 3], 1),
        ([_row(0, [1, *range(50, 60)], used_at=5), _row(1, [], used_at=0)], [1, *range(100, 120)], 1),
        ([_row(0, [1, 2, 8, 9], used_at=1), _row(1, [], used_at=2)], [1, 2, 3], 0),
        ([_row(0, [1, 2, 7, 8, 9], used_at=1), _row(1, [], used_at=2)], [1, 2, 3], 1),
        ([_row(0, [1, 2, 7, 8, 9], used_at=1), _row(1, [5], used_at=2)], [1, 2, 3], 0),
        ([_row(0, [1, 2, 3], stream=4), _row(1, [9], used_at=3), _row(2, [8], used_at=2)], [1, 2, 3], 2),
    ],
)
def test_a_prompt_goes_where_most_of_it_lies(rows: list[SequenceRow], prompt: list[int], chosen: int | None) -> None:
    """The longest common beginning wins where it is worth it, unless more is lost and one is empty; then the oldest."""
    row = choose_row(rows, prompt)
    assert (None if row is None else row.seq_id) == chosen


@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), max_size=30))
def test_the_common_beginning_is_counted(one: list[int], other: list[int]) -> None:
    """It is what a loop over both counts."""
    n = 0
    while n < min(len(one), len(other)) and one[n] == other[n]:
        n += 1
    assert common(one, other) == n


# ---- one stream ----


def test_a_stream_is_booked_from_start_to_end() -> None:
    """What a stream reads and draws is what its sequence holds, and stays when it has ended."""
    ledger = Ledger(1)
    job = _job(1, 1, 2, 3, n_predict=5)
    ledger.add(job)
    assert ledger.n_queued == 1
    assert ledger.startable() == (Start(1, 0, (1, 2, 3), _SAMPLER, 5),)
    assert ledger.snapshots() == ()
    assert ledger.reading(Reading(1, 2, 0, 4.0)) is job
    assert ledger.snapshots() == (SequenceSnapshot(0, (1, 2), sampler=_SAMPLER),)
    assert ledger.status()[0]["state"] == "reading"
    assert ledger.step(_step(1, token=8, n_draws=1)) == [(job, Drawn(1, 8, b"x", 1))]
    assert ledger.snapshots() == (SequenceSnapshot(0, (1, 2, 3, 8), is_pending=True, sampler=_SAMPLER, n_draws=1),)
    assert ledger.status()[0]["state"] == "generating"
    assert ledger.step(_step(1, token=0, n_draws=2, is_end=True))
    assert (job.n_predicted, job.is_complete, job.n_left) == (1, True, 3)
    assert ledger.ended(Ended(1, "eos")) is job
    assert (ledger.is_working, ledger.status()[0]["state"]) == (False, "idle")
    assert ledger.snapshots() == (SequenceSnapshot(0, (1, 2, 3, 8, 0), is_pending=True, sampler=_SAMPLER, n_draws=2),)


def test_a_stream_goes_on_with_what_its_sequence_holds() -> None:
    """A start keeps what both have in common booked, and no more than that."""
    ledger = _running(1, _job(1, 1, 2, 3))
    ledger.step(_step(1, token=4))
    ledger.ended(Ended(1, "length"))
    ledger.add(_job(2, 1, 2, 7))
    assert ledger.startable()[0].seq_id == 0
    assert ledger.snapshots() == (SequenceSnapshot(0, (1, 2), sampler=_SAMPLER),)
    ledger.reading(Reading(2, 3, 2, 1.0))
    assert ledger.jobs[2].n_reused == 2


@pytest.mark.parametrize(("prompt", "is_pending"), [((1, 2, 3, 4), True), ((1, 2, 3, 4, 5), True), ((1, 2, 3), False)])
def test_a_token_that_is_kept_stays_undecoded(prompt: tuple[int, ...], is_pending: bool) -> None:
    """The newest token of a sequence is undecoded for as long as it is the newest."""
    ledger = _running(1, _job(1, 1, 2, 3))
    ledger.step(_step(1, token=4))
    ledger.ended(Ended(1, "length"))
    ledger.add(_job(2, *prompt))
    ledger.startable()
    assert ledger.rows[0].is_pending is is_pending


def test_what_comes_first_starts_first() -> None:
    """Streams wait in their order, also behind one that needs no more than they do."""
    ledger = Ledger(1)
    for number in (1, 2, 3):
        ledger.add(_job(number))
    assert [start.stream for start in ledger.startable()] == [1]
    assert ledger.startable() == ()
    ledger.ended(Ended(1, "length"))
    assert [start.stream for start in ledger.startable()] == [2]
    assert not ledger.finish(3)
    assert ledger.n_queued == 0


def test_a_stream_whose_client_left_holds_its_sequence_until_it_has_ended() -> None:
    """Tokens that were on their way are booked, and passed on to nobody."""
    ledger = _running(1, _job(1), _job(2))
    assert ledger.finish(1)
    assert not ledger.finish(1)
    assert ledger.startable() == ()
    assert ledger.status()[0]["state"] == "ending"
    assert ledger.step(_step(1, token=5)) == []
    assert ledger.reading(Reading(1, 3, 0, 1.0)) is None
    assert ledger.rows[0].tokens == [1, 2, 3, 5]
    assert ledger.ended(Ended(1, "halted")) is None
    assert [start.stream for start in ledger.startable()] == [2]
    assert not ledger.finish(99)


@pytest.mark.parametrize(
    "lie",
    [
        lambda ledger: ledger.step(_step(5)),
        lambda ledger: ledger.step(_step(2)),
        lambda ledger: ledger.reading(Reading(5, 1, 0, 0.0)),
        lambda ledger: ledger.reading(Reading(1, 9, 0, 0.0)),
        lambda ledger: ledger.reading(Reading(1, 1, 2, 0.0)),
        lambda ledger: ledger.reading(Reading(1, -1, -2, 0.0)),
        lambda ledger: ledger.ended(Ended(5, "eos")),
        lambda ledger: (ledger.step(_step(1, is_end=True)), ledger.step(_step(1))),
        lambda ledger: (ledger.step(_step(1, n_draws=3)), ledger.step(_step(1, n_draws=2))),
        lambda ledger: (ledger.ended(Ended(1, "eos")), ledger.ended(Ended(1, "eos"))),
        lambda ledger: ledger.forgot(5),
        lambda ledger: ledger.replace(()),
    ],
)
def test_what_cannot_be_is_refused(lie: object) -> None:
    """A worker that reports streams that it has not, of tokens behind the end, or of draws undone has lost count."""
    assert callable(lie)
    with pytest.raises(ReportWrong, match="lost count"):
        lie(_running(1, _job(1), _job(2)))


def test_an_emptied_sequence_holds_nothing() -> None:
    """An idle one that made room is empty; one that a stream was given meanwhile is filled by it anyway."""
    ledger = _running(2, _job(1))
    ledger.ended(Ended(1, "length"))
    ledger.forgot(0)
    assert ledger.snapshots() == ()
    ledger = _running(1, _job(1))
    ledger.forgot(0)
    assert ledger.rows[0].stream == 1


# ---- a worker is lost ----


def test_a_stream_goes_on_in_the_next_worker() -> None:
    """The next worker gets what was delivered, which of it is undecoded, and how much is left to draw."""
    ledger = _running(1, _job(1, n_predict=5))
    ledger.step(_step(1, token=4, n_draws=1))
    ledger.step(_step(1, token=5, n_draws=2))
    ledger.lost()
    assert ledger.jobs[1].n_losses == 1
    assert ledger.snapshots() == (SequenceSnapshot(0, (1, 2, 3, 4, 5), is_pending=True, sampler=_SAMPLER, n_draws=2),)
    starts, complete = ledger.resume()
    assert starts == [Start(1, 0, (1, 2, 3, 4, 5), _SAMPLER, 3, 2, is_pending=True, n_delivered=2)]
    assert complete == []
    assert ledger.reading(Reading(1, 4, 4, 1.0)) is ledger.jobs[1]
    assert ledger.rows[0].tokens == [1, 2, 3, 4, 5]
    ledger.step(_step(1, token=6, n_draws=3))
    assert ledger.jobs[1].n_losses == 0


def test_a_grammar_goes_on_in_the_next_worker() -> None:
    """The next worker gets it with the number of tokens that it has accepted, also when the stream has ended."""
    ledger = _running(1, replace(_job(1), grammar="root ::= [a-z]+"))
    assert ledger.rows[0].snapshot().n_ruled == 0
    ledger.step(_step(1, token=4))
    ledger.step(_step(1, token=5))
    ledger.lost()
    held = ledger.snapshots()
    assert (held[0].tokens, held[0].grammar, held[0].n_ruled) == ((1, 2, 3, 4, 5), "root ::= [a-z]+", 2)
    ((start,), _) = ledger.resume()
    assert (start.grammar, start.n_delivered) == ("root ::= [a-z]+", 2)
    assert ledger.snapshots() == held
    ledger.ended(Ended(1, "eos"))
    assert ledger.snapshots() == held
    other = Ledger(1)
    other.replace(held)
    assert other.snapshots() == held
    other.add(_job(2, 1, 2, 3, 4))
    other.startable()
    assert (other.snapshots()[0].grammar, other.snapshots()[0].n_ruled) == ("", 0)


def test_an_encoder_decoders_sequences_are_what_its_decoder_holds() -> None:
    """The prompt is the encoder's; nothing of it is claimed before it is read, or kept for another prompt."""
    ledger = Ledger(1)
    ledger.decoder_start = 0
    ledger.add(_job(1, 4, 5, 6))
    ledger.startable()
    ledger.reading(Reading(1, 0, 0, 1.0))
    assert ledger.snapshots() == ()
    ledger.reading(Reading(1, 3, 0, 2.0))
    ledger.step(_step(1, token=8))
    ledger.ended(Ended(1, "length"))
    assert ledger.snapshots() == (SequenceSnapshot(0, (0, 8), True, _SAMPLER, 0, (4, 5, 6)),)
    ledger.add(_job(2, 0, 8, 9))
    assert [one.tokens for one in ledger.startable()] == [(0, 8, 9)]
    assert ledger.snapshots() == ()


def test_a_prompt_that_was_read_in_part_is_read_on() -> None:
    """What was reported as read is what the next worker must hold; times of both workers add up."""
    ledger = Ledger(1)
    ledger.add(_job(1, 1, 2, 3, 4))
    ledger.startable()
    ledger.reading(Reading(1, 2, 1, 10.0))
    ledger.lost()
    assert ledger.snapshots() == (SequenceSnapshot(0, (1, 2), sampler=_SAMPLER),)
    assert ledger.resume()[0] == [Start(1, 0, (1, 2, 3, 4), _SAMPLER)]
    ledger.reading(Reading(1, 4, 2, 5.0))
    assert (ledger.jobs[1].n_reused, ledger.jobs[1].prompt_ms) == (1, 15.0)


@pytest.mark.parametrize(("n_predict", "is_end"), [(1, False), (-1, True)])
def test_a_stream_that_lacks_only_its_end_is_complete(n_predict: int, is_end: bool) -> None:
    """Where all was drawn and only Ended was lost, nothing is asked of the next worker."""
    ledger = _running(1, _job(1, n_predict=n_predict))
    ledger.step(_step(1, is_end=is_end))
    ledger.lost()
    starts, complete = ledger.resume()
    assert starts == []
    assert [job.number for job in complete] == [1]
    assert not ledger.is_working


def test_what_was_to_end_has_ended_with_its_worker() -> None:
    """A stream whose client left before the loss is over; one that is given up during it frees its sequence at once."""
    ledger = _running(2, _job(1), _job(2))
    ledger.finish(1)
    ledger.lost()
    assert not ledger.finish(2)
    assert ledger.resume() == ([], [])
    assert (ledger.is_working, ledger.jobs) == (False, {})


def test_a_restored_file_replaces_everything() -> None:
    """What the file holds is all that it holds; a sequence that there is not is refused."""
    ledger = _running(2, _job(1))
    ledger.ended(Ended(1, "length"))
    snapshot = SequenceSnapshot(1, (7, 8), is_pending=True, sampler=_SAMPLER, n_draws=3, encoder_tokens=(4,))
    ledger.replace([snapshot])
    assert ledger.snapshots() == (snapshot,)
    with pytest.raises(ReportWrong, match="sequence 2 of 2"):
        ledger.replace([SequenceSnapshot(2, (1,))])


def test_sequences_come_and_go_with_the_placement() -> None:
    """More sequences are empty ones; with fewer, what was on those that are gone is returned."""
    ledger = _running(2, _job(1), _job(2))
    assert ledger.resize(3) == []
    assert [row.seq_id for row in ledger.rows] == [0, 1, 2]
    assert [job.number for job in ledger.resize(1)] == [2]
    assert list(ledger.jobs) == [1]


def test_rates_are_those_of_what_was_read_and_drawn_lately() -> None:
    """Tokens that were reused, and first ones, count for nothing; steps count with all their streams."""
    ledger = Ledger(2)
    assert ledger.tokens_per_second == {"prompt": None, "generate": None}
    ledger = _running(2, _job(1), _job(2))
    ledger.reading(Reading(1, 3, 1, 4.0))
    ledger.reading(Reading(2, 3, 3, 0.5))
    ledger.step(_step(1, 2, ms=0.001))
    assert ledger.tokens_per_second == {"prompt": 500.0, "generate": None}
    ledger.step(_step(1, 2, ms=8.0))
    assert ledger.tokens_per_second == {"prompt": 500.0, "generate": pytest.approx(250.0, rel=1e-3)}
    assert (ledger.jobs[1].prompt_ms, ledger.jobs[1].generate_ms) == (4.001, 8.0)


def test_what_was_read_and_drawn_is_counted_whatever_became_of_it() -> None:
    """A prompt read in part, tokens drawn for a client that left, and those read again in another worker all count."""
    ledger = Ledger(3)
    for job in (_job(1, 1, 2, 3, 4), _job(2, 5, 6), _job(3, 7, 8)):
        ledger.add(job)
    ledger.startable()
    ledger.reading(Reading(1, 1, 1, 0.0))
    ledger.reading(Reading(1, 3, 1, 4.0))
    ledger.finish(1)
    ledger.ended(Ended(1, "halted"))
    ledger.ended(Ended(2, "context"))
    totals = ledger.totals
    assert (totals.n_read, totals.n_reused, totals.prompt_ms, totals.n_drawn) == (2, 1, 4.0, 0)
    ledger.reading(Reading(3, 2, 0, 1.0))
    ledger.step(_step(3, ms=0.5))
    ledger.finish(3)
    ledger.step(_step(3, ms=2.0, is_end=True))
    assert (totals.n_read, totals.n_drawn, totals.prompt_ms, totals.generate_ms) == (4, 2, 5.5, 2.0)
    ledger = _running(1, _job(1, 1, 2, 3))
    ledger.step(_step(1))
    ledger.lost()
    ledger.resume()
    ledger.reading(Reading(1, 3, 0, 7.0))
    assert (ledger.totals.n_read, ledger.totals.n_reused, ledger.totals.n_tokens_max) == (6, 0, 4)


# ---- any order of events ----


class _Worker:
    """What a real worker would hold: the truth that the ledger is held against."""

    def __init__(self, held: tuple[SequenceSnapshot, ...]) -> None:
        self.held = {one.seq_id: list(one.tokens) for one in held}
        self.streams: dict[int, Start] = {}
        self.n_read: dict[int, int] = {}

    def reading(self) -> list[int]:
        """Streams of which nothing was drawn here."""
        return sorted(n for n, one in self.streams.items() if len(self.held[one.seq_id]) <= len(one.tokens))


class LedgerMachine(RuleBasedStateMachine):
    """Streams come, are read, draw, end, are cancelled, and workers are lost, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(2)
        self.worker = _Worker(())
        self.delivered: dict[int, list[int]] = {}
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.n = 0

    def _take(self, starts: tuple[Start, ...] | list[Start]) -> None:
        for start in starts:
            wanted = list(start.tokens)
            n_kept = common(self.worker.held.get(start.seq_id, []), wanted)
            self.worker.streams[start.stream] = start
            self.worker.held[start.seq_id] = wanted[:n_kept]
            self.worker.n_read[start.stream] = n_kept

    @rule(prompt=st.lists(st.integers(0, 2), min_size=1, max_size=6), n_predict=st.sampled_from([-1, 1, 3]))
    def come(self, prompt: list[int], n_predict: int) -> None:
        """A client asks."""
        self.n += 1
        self.prompts[self.n] = tuple(prompt)
        self.delivered[self.n] = []
        self.ledger.add(StreamJob(self.n, tuple(prompt), _SAMPLER, n_predict))
        self._take(self.ledger.startable())

    @precondition(lambda self: self.worker.reading())
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        """A piece of a prompt is read."""
        number = data.draw(st.sampled_from(self.worker.reading()))
        start = self.worker.streams[number]
        n_whole = len(start.tokens) - start.is_pending
        n = data.draw(st.integers(min(self.worker.n_read[number], n_whole), n_whole))
        self.worker.n_read[number] = n
        self.worker.held[start.seq_id] = list(start.tokens[: max(n, len(self.worker.held[start.seq_id]))])
        self.ledger.reading(Reading(number, n, 0, 1.0))

    @precondition(lambda self: self.worker.streams)
    @rule(data=st.data(), is_end=st.booleans())
    def draw(self, data: st.DataObject, is_end: bool) -> None:
        """A decode draws a token, which may be the last."""
        number = data.draw(st.sampled_from(sorted(self.worker.streams)))
        start = self.worker.streams[number]
        held = self.worker.held[start.seq_id]
        if len(held) < len(start.tokens):
            held[:] = start.tokens
        token = data.draw(st.integers(3, 9))
        held.append(token)
        for job, drawn in self.ledger.step(_step(number, token=token, is_end=is_end)):
            self.delivered[job.number].append(drawn.token)
        n_made = len(held) - len(start.tokens)
        if is_end or n_made == start.n_predict:
            self._end(number)

    def _end(self, number: int) -> None:
        del self.worker.streams[number]
        self.ledger.ended(Ended(number, "length"))
        self._take(self.ledger.startable())

    @precondition(lambda self: self.ledger.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """A client leaves, and the worker hears of it at once."""
        number = data.draw(st.sampled_from(sorted(self.ledger.jobs)))
        if self.ledger.finish(number):
            self._end(number)

    @rule()
    def lose(self) -> None:
        """The worker is lost, and the next one opened with what was held."""
        self.ledger.lost()
        self.worker = _Worker(self.ledger.snapshots())
        starts, _ = self.ledger.resume()
        self._take(starts)
        self._take(self.ledger.startable())

    @invariant()
    def ledger_is_true(self) -> None:
        """Every sequence holds its prompt and what was delivered; the worker holds at least what is booked."""
        for row in self.ledger.rows:
            assert row.tokens == self.worker.held.get(row.seq_id, [])[: len(row.tokens)]
            if row.stream is not None:
                job = self.ledger.jobs[row.stream]
                whole = [*job.prompt, *job.drawn]
                assert row.tokens == whole[: len(row.tokens)]
                assert not job.drawn or row.tokens == whole
                assert self.delivered[job.number] == job.drawn

    @invariant()
    def nobody_waits_beside_an_idle_sequence(self) -> None:
        """A stream waits only while every sequence has one."""
        assert not self.ledger.n_queued or all(row.stream is not None for row in self.ledger.rows)


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase


@pytest.mark.parametrize(("n_rows", "n_jobs"), list(product(range(1, 4), range(1, 6))))
def test_as_many_run_as_there_are_sequences(n_rows: int, n_jobs: int) -> None:
    """Every stream is on a sequence of its own or waits."""
    ledger = Ledger(n_rows)
    for number in range(1, n_jobs + 1):
        ledger.add(_job(number))
    starts = ledger.startable()
    assert len({start.seq_id for start in starts}) == len(starts) == min(n_rows, n_jobs)
    assert ledger.n_queued == n_jobs - len(starts)
    assert len(ledger.running) == len(starts)
