"""A worker that serves: real children on the stub library, with the test as their supervisor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from splitctl.carry import seal as seals
from splitctl.carry.arena import Arena
from splitctl.errors import WorkerLost
from splitctl.ipc import jobs, orders
from splitctl.ipc.jobs import Failure, Fault, Result
from splitctl.ipc.orders import Check, Ended, Forgot, Halt, Open, Reading, Restore, Save, Sealed, Start, Step, Switch
from splitctl.ipc.wire import MessageInvalid, to_line
from splitctl.outcome import SwitchOptions
from splitctl.placement import FlashAttn, Placement, SplitMode
from splitctl.worker.inbox import CancelGate, Inbox
from tests.ctl.serving import Arenas, DrivenWorker, onward, placement, sampler, serving, snapshot
from tests.stublib import build, needs_compiler, write_model

pytestmark = [pytest.mark.stub, needs_compiler]

DEVICES = ("STUB0", "STUB1")
PLACE = placement(devices=DEVICES)
TENSOR = PLACE.changed(mode=SplitMode.TENSOR)
FORCED = SwitchOptions(force=True)
PROMPTS = tuple(tuple(text.encode()) for text in ("the quick brown fox jumps over", "x", "over the lazy dog " * 3))
N = 12
LONG = 60
PACE = "pace:decode=10000"
"""Each decode takes 10 ms, so that a long stream still runs when something is to happen to it."""


@pytest.fixture(scope="module")
def library() -> Path:
    return build()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def arenas() -> Iterator[Arenas]:
    held = Arenas()
    yield held
    held.close()


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """No verdicts from before, none left behind, and no parked session in the user's folder."""
    return {"XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_STATE_HOME": str(tmp_path / "state")}


@pytest.fixture
def slow(env: dict[str, str]) -> dict[str, str]:
    """The environment of a worker whose streams last."""
    return {**env, "STUB_FAULTS": PACE}


@pytest.fixture
def worker(model: Path, library: Path, arenas: Arenas, env: dict[str, str]) -> Iterator[DrivenWorker]:
    """A worker that serves with four sequences."""
    with serving(model, library, Open(PLACE), arenas, env=env) as opened:
        opened.until(orders.Opened)
        yield opened


@pytest.fixture
def slow_worker(model: Path, library: Path, arenas: Arenas, slow: dict[str, str]) -> Iterator[DrivenWorker]:
    """The same, with streams that last."""
    with serving(model, library, Open(PLACE), arenas, env=slow) as opened:
        opened.until(orders.Opened)
        yield opened


def start(number: int, *, n: int = N, prompt: tuple[int, ...] | None = None, seq_id: int | None = None) -> Start:
    """A stream on the sequence of its number."""
    tokens = PROMPTS[number % len(PROMPTS)] if prompt is None else prompt
    return Start(number, number if seq_id is None else seq_id, tokens, sampler(number), n)


@pytest.fixture(scope="module")
def alone(model: Path, library: Path) -> list[list[int]]:
    """The tokens of each prompt's long stream when nothing else happens."""
    with serving(model, library, Open(PLACE)) as opened:
        return [opened.run(start(number, n=LONG)) for number in range(len(PROMPTS))]


# ---- streams ----


def test_it_opens_and_says_where(model: Path, library: Path, env: dict[str, str]) -> None:
    """Opened has the whole placement and the model's facts; a close ends in a result."""
    with serving(model, library, Open(replace(PLACE, n_threads=0)), env=env) as worker:
        opened = worker.until(orders.Opened)
        assert opened.placement.n_threads > 0
        assert opened.recomputed is False
        assert opened.restore_ms == 0.0
        assert opened.model["architecture"] == "llama"
        assert opened.model["n_vocab"] == 260
        assert opened.model["path"] == str(model)
        assert {one["link_gb_s"] for one in opened.model["devices"]} == {None}
        assert worker.stages[0] == "loading"
        assert worker.close() == Result({})


def test_streams_share_their_steps(worker: DrivenWorker, alone: list[list[int]]) -> None:
    """Streams that generate are one batch a step, and each gets what it would get alone."""
    worker.send(*(start(number) for number in range(3)))
    for _ in range(3):
        worker.until(Ended)
    assert [worker.drawn(number) for number in range(3)] == [one[:N] for one in alone]
    assert max(len(step.tokens) for step in worker.of(Step)) == 3
    assert {(one.stream, one.why) for one in worker.of(Ended)} == {(0, "length"), (1, "length"), (2, "length")}
    assert [one.n_draws for step in worker.of(Step) for one in step.tokens if one.stream == 1] == list(range(1, N + 1))


def test_a_prompt_is_read_between_the_steps_of_others(worker: DrivenWorker) -> None:
    """While a stream generates, another one's prompt is read a micro-batch at a time: nobody waits for all of it."""
    worker.send(start(1, n=-1))
    worker.until_drawn(1, 2)
    worker.send(start(2, n=2, prompt=PROMPTS[2] * 3))
    worker.until(Ended, lambda one: one.stream == 2)
    at = [index for index, one in enumerate(worker.reports) if isinstance(one, Reading) and one.stream == 2]
    done = [worker.reports[index].n_done for index in at]
    assert done == [0, *range(16, 162, 16), 162]
    assert all(isinstance(worker.reports[index + 1], Step) for index in at[1:])


def test_what_a_sequence_holds_is_not_read_again(
    worker: DrivenWorker, library: Path, model: Path, env: dict[str, str]
) -> None:
    """A prompt that goes on where the sequence is, or leaves it on the way, begins with what both have in common."""
    answer = worker.run(start(0))
    longer = (*PROMPTS[0], *answer, *PROMPTS[1])
    told = [
        worker.run(start(5, prompt=longer, seq_id=0)),
        worker.run(start(6, prompt=longer[:20] + (7,) * 4, seq_id=0)),
    ]
    told.append(worker.run(start(7, prompt=longer[:22], seq_id=0)))
    reused = {one.stream: one.n_reused for one in worker.of(Reading)}
    # The newest token of the answer was drawn and not decoded.
    assert reused == {0: 0, 5: len(PROMPTS[0]) + N - 1, 6: 20, 7: 20}
    with serving(model, library, Open(PLACE), env=env) as fresh:
        wanted = [
            fresh.run(start(5, prompt=longer, seq_id=1)),
            fresh.run(start(6, prompt=longer[:20] + (7,) * 4, seq_id=2)),
            fresh.run(start(7, prompt=longer[:22], seq_id=3)),
        ]
    assert told == wanted


def test_the_same_prompt_again_gives_the_same_answer(worker: DrivenWorker, alone: list[list[int]]) -> None:
    """A stream draws from its own seed, whatever the sequence drew before."""
    assert worker.run(start(0)) == alone[0][:N]
    again = replace(start(0), stream=9)
    assert worker.run(again) == alone[0][:N]
    assert worker.of(Reading)[-1].n_reused == len(PROMPTS[0]) - 1


def test_a_memory_that_cannot_be_cut_is_read_from_the_start(
    model: Path, library: Path, arenas: Arenas, env: dict[str, str], alone: list[list[int]]
) -> None:
    """A recurrent memory goes on where it is, and nowhere else."""
    with serving(model, library, Open(PLACE), arenas, env={**env, "STUB_FAULTS": "model:recurrent=1"}) as worker:
        assert worker.run(start(0)) == alone[0][:N]
        longer = (*PROMPTS[0], *alone[0][: N - 1], 65, 66)
        worker.run(start(5, prompt=longer, seq_id=0))
        assert worker.run(start(6, prompt=PROMPTS[0], seq_id=0)) != []
    assert {one.stream: one.n_reused for one in worker.of(Reading)} == {0: 0, 5: len(longer) - 2, 6: 0}


def test_a_halted_stream_leaves_its_sequence(worker: DrivenWorker) -> None:
    """A halt ends a stream at once; what it holds is there for the next one."""
    worker.send(start(0, n=-1))
    worker.until_drawn(0, 3)
    worker.send(Halt(0), Halt(77))
    assert worker.until(Ended) == Ended(0, "halted")
    prompt = (*PROMPTS[0], *worker.drawn(0)[:2], 65)
    worker.run(start(1, n=1, prompt=prompt, seq_id=0))
    assert worker.of(Reading)[-1].n_reused >= len(prompt) - 1


def test_a_stream_that_cannot_be_is_its_own_end(worker: DrivenWorker, alone: list[list[int]]) -> None:
    """A sequence that is not there or is taken, and a token that is none, end that stream and nothing else."""
    worker.send(start(0, n=-1))
    worker.send(start(1, seq_id=9), start(2, seq_id=0), start(3, prompt=(5, 999)), start(4, prompt=(), seq_id=1))
    for _ in range(4):
        end = worker.until(Ended)
        assert (end.why, end.fault) == ("error", Fault.CONFIG)
        assert "wanted" in end.message
    assert worker.run(start(1)) == alone[1][:N]


def test_nothing_to_draw_is_the_end(worker: DrivenWorker) -> None:
    """A stream of no tokens reads its prompt and ends."""
    assert worker.run(start(0, n=0)) == []
    assert worker.of(Reading)[-1].n_done == len(PROMPTS[0])


# ---- room ----


def test_idle_sequences_make_room(model: Path, library: Path, env: dict[str, str]) -> None:
    """The sequence that was unused for longest is emptied first, no more of them than it takes, and it is told."""
    with serving(model, library, Open(PLACE.changed(n_ctx=256)), env=env) as worker:
        for number, n in ((0, 60), (1, 60), (2, 60), (0, 60)):
            worker.run(start(number, n=1, prompt=tuple(range(40, 40 + n)), seq_id=number))
        worker.run(start(3, n=30, prompt=tuple(range(60, 160)), seq_id=3))
        assert worker.of(Forgot) == [Forgot(1)]
        assert worker.of(Ended)[-1].why == "length"


def test_a_prompt_waits_for_room_or_is_refused(model: Path, library: Path, env: dict[str, str]) -> None:
    """A prompt that fits once another stream has ended waits for it; one that never fits ends with both numbers."""
    with serving(model, library, Open(PLACE.changed(n_ctx=256)), env=env) as worker:
        worker.send(start(0, n=20, prompt=tuple(range(150))), start(1, n=2, prompt=tuple(range(150))))
        worker.until(Ended, lambda one: one.stream == 1)
        assert [(one.stream, one.why) for one in worker.of(Ended)] == [(0, "length"), (1, "length")]
        worker.send(start(2, prompt=(65,) * 257))
        end = worker.until(Ended)
        assert (end.why, end.fault) == ("context", Fault.CONFIG)
        assert "257 more" in end.message


def test_the_stream_that_holds_most_ends_where_there_is_no_room(
    model: Path, library: Path, env: dict[str, str]
) -> None:
    """When all cells are taken by streams, one ends with "context", and the others go on with its cells."""
    with serving(model, library, Open(PLACE.changed(n_ctx=256)), env=env) as worker:
        worker.send(start(0, n=-1, prompt=tuple(range(150))), start(1, n=150, prompt=tuple(range(40))))
        first, second = worker.until(Ended), worker.until(Ended)
        assert (first.stream, first.why) == (0, "context")
        assert (second.stream, second.why) == (1, "length")
        assert worker.of(Forgot) == [Forgot(0)]
        assert len(worker.drawn(1)) == 150


def test_a_sequence_with_cells_of_its_own_ends_when_they_are_full(
    model: Path, library: Path, env: dict[str, str]
) -> None:
    """Without a common buffer nobody makes room for anybody."""
    with serving(model, library, Open(PLACE.changed(n_ctx=1024, kv_unified=False)), env=env) as worker:
        worker.send(start(0, n=-1, prompt=(65,) * 40), start(1, n=5))
        assert worker.until(Ended) == Ended(1, "length")
        end = worker.until(Ended)
        assert (end.stream, end.why) == (0, "context")
        # The last token that was drawn needs no cell.
        assert len(worker.drawn(0)) == 1024 // 4 - 40 + 1
        worker.send(start(2, prompt=(65,) * 257))
        assert worker.until(Ended).why == "context"


# ---- switches ----


def test_a_switch_comes_between_two_tokens(slow_worker: DrivenWorker, alone: list[list[int]]) -> None:
    """Streams pause, the carry is sealed before anything is freed, the trial is told, and no token is lost."""
    worker = slow_worker
    worker.send(*(start(number, n=LONG) for number in range(3)))
    worker.until_drawn(2, 3)
    worker.send(Switch(4, TENSOR, FORCED))
    for _ in range(3):
        worker.until(Ended)
    assert [worker.drawn(number) for number in range(3)] == alone
    names = [type(one).__name__ for one in worker.reports]
    stages = [one.stage for one in worker.of(orders.StageReached)]
    assert list(dict.fromkeys(stages)) == [
        *("checking", "quiescing", "saving", "sealing", "freeing", "placing", "building", "restoring", "proving")
    ]
    at_freeing = worker.reports.index(next(one for one in worker.of(orders.StageReached) if one.stage == "freeing"))
    assert names.index("Unsealed") < names.index("Sealed") < at_freeing < names.index("Switched")
    at_boundary = worker.reports.index(next(one for one in worker.of(orders.StageReached) if one.stage == "saving"))
    assert "Step" not in names[at_boundary : names.index("Switched")]
    (switched,), (trial,) = worker.of(orders.Switched), worker.of(orders.Trial)
    assert (switched.order, switched.outcome["status"], switched.outcome["confirmed"]) == (4, "switched", False)
    assert trial.outcome == {**switched.outcome, "confirmed": True}
    assert switched.outcome["n_sequences"] == 3


def test_the_newest_seal_outlives_the_saving_of_the_next(slow_worker: DrivenWorker) -> None:
    """Two switches one after the other never overwrite the seal that was told last before the next one is whole."""
    worker = slow_worker
    worker.send(start(0, n=-1))
    for order, target in ((1, TENSOR), (2, PLACE), (3, TENSOR)):
        n = len(worker.drawn(0))
        worker.until_drawn(0, n + 2)
        worker.send(Switch(order, target, FORCED))
        worker.until(orders.Switched)
    valid: set[int] = set()
    newest: int | None = None
    for report in worker.reports:
        match report:
            case Sealed():
                newest = report.seal.arena
                valid.add(newest)
            case orders.Unsealed() if newest is not None:
                assert report.arena != newest
                valid.discard(report.arena)
    assert valid


def test_a_switch_that_changes_nothing_or_is_refused_is_told(worker: DrivenWorker, alone: list[list[int]]) -> None:
    """Unchanged and refused are outcomes; nothing of them is sealed."""
    worker.run(start(1, n=1, prompt=(65,) * 300))
    worker.send(Switch(1, PLACE), Switch(2, PLACE.changed(n_ctx=256), FORCED))
    assert worker.until(orders.Switched).outcome["status"] == "unchanged"
    refused = worker.until(orders.Switched)
    assert (refused.order, refused.outcome["status"]) == (2, "refused")
    assert "300" in refused.outcome["reason"]
    assert worker.of(Sealed) == []
    assert worker.run(start(0)) == alone[0][:N]


def test_a_trial_that_fails_is_told_and_fallen_back_from(
    model: Path, library: Path, env: dict[str, str], alone: list[list[int]]
) -> None:
    """The first decode fails: the old placement decodes it again, and the stream has every token once."""
    faults = f"{PACE} decode:fail:tensor"
    with serving(model, library, Open(PLACE), env={**env, "STUB_FAULTS": faults}) as worker:
        worker.send(start(0, n=LONG))
        worker.until_drawn(0, 3)
        worker.send(Switch(1, TENSOR, FORCED))
        worker.until(Ended)
        assert worker.drawn(0) == alone[0]
        (trial,) = worker.of(orders.Trial)
        assert (trial.outcome["status"], trial.outcome["effective"]) == ("fell_back", "layer")
        assert "first decode" in trial.outcome["reason"]


def test_a_switch_that_is_refused_in_a_trial_leaves_it_its_word(worker: DrivenWorker) -> None:
    """The trial's outcome is that of the switch that was on trial, whatever was asked meanwhile."""
    worker.run(start(1, n=1, prompt=(65,) * 300))
    worker.send(Switch(1, TENSOR, FORCED), Switch(2, TENSOR.changed(n_ctx=256)))
    assert worker.until(orders.Switched).outcome["status"] == "switched"
    assert worker.until(orders.Switched).outcome["status"] == "refused"
    worker.run(start(0, n=2))
    (trial,) = worker.of(orders.Trial)
    assert (trial.outcome["status"], trial.outcome["confirmed"]) == ("switched", True)


def test_a_session_that_parks_ends_its_worker(model: Path, library: Path, env: dict[str, str]) -> None:
    """No placement can be loaded any more: the outcome says parked and where, and no stream has ended by it."""
    faults = f"{PACE} load:null:tensor load:null:layer@2+"
    with serving(model, library, Open(PLACE), env={**env, "STUB_FAULTS": faults}) as worker:
        worker.send(start(0, n=LONG))
        worker.until_drawn(0, 3)
        worker.send(Switch(1, TENSOR, FORCED))
        switched = worker.until(orders.Switched)
        last = worker.end()
    assert switched.outcome["status"] == "parked"
    assert isinstance(last, Failure)
    assert last.fault is Fault.PARKED
    assert last.body["parked_at"] == switched.outcome["parked_at"]
    assert Path(last.body["parked_at"]).is_file()
    assert worker.of(Ended) == []


def test_a_cancel_is_heard_by_its_switch_alone(
    model: Path, library: Path, slow: dict[str, str], alone: list[list[int]]
) -> None:
    """A cancel that comes while a decode runs ends the switch that waits, and not the decode; others do nothing."""
    with serving(model, library, Open(PLACE), env=slow) as worker:
        worker.until(orders.Opened)
        worker.send(start(0, n=LONG))
        worker.process.cancel()
        worker.until_drawn(0, 3)
        worker.send(Switch(1, TENSOR, FORCED))
        worker.process.cancel()
        assert worker.until(orders.Switched).outcome["status"] == "cancelled"
        worker.until_drawn(0, 6)
        worker.send(Switch(2, TENSOR, FORCED))
        assert worker.until(orders.Switched).outcome["status"] == "switched"
        worker.until(Ended)
        assert worker.drawn(0) == alone[0]


def test_a_load_can_be_cancelled(model: Path, library: Path, env: dict[str, str]) -> None:
    """A cancel that comes before the session serves ends the worker as cancelled."""
    with serving(model, library, Open(PLACE), env=env) as worker:
        worker.process.cancel()
        last = worker.end()
    assert isinstance(last, Failure)
    assert last.fault is Fault.CANCELLED


def test_a_check_says_what_a_switch_would_do(worker: DrivenWorker) -> None:
    """A check touches nothing, tries the target in a child, and names reasons, conversions and sizes."""
    worker.run(start(0))
    more = PLACE.changed(flash_attn=FlashAttn.OFF, type_v="f32")
    worker.send(Check(1, PLACE), Check(2, more), Check(3, PLACE.changed(devices=("GONE",))), Check(4, TENSOR))
    same, converted, refused, tried = (worker.until(orders.Checked) for _ in range(4))
    assert (same.is_unchanged, same.reasons, same.conversions) == (True, (), ())
    assert converted.conversions == ("V from f16 to f32", "V turned: transposed")
    assert converted.state_bytes is not None
    assert converted.state_bytes > 0
    assert converted.mem_available is not None
    assert refused.reasons[0]["code"] == "unknown-device"
    assert (tried.order, tried.is_unchanged, tried.target.mode) == (4, False, SplitMode.TENSOR)
    assert worker.of(Sealed) == []


# ---- another worker goes on ----


def _lose(worker: DrivenWorker) -> None:
    """Kill a worker as the kernel would."""
    os.kill(worker.process.pid, 9)


@pytest.mark.parametrize("call", ["load", "get_data"], ids=["placing", "proving"])
def test_a_sealed_carry_outlives_its_worker(
    model: Path, library: Path, arenas: Arenas, env: dict[str, str], alone: list[list[int]], call: str
) -> None:
    """A worker is killed after Sealed; the next takes the carry from the arena, reads nothing, and loses nothing."""
    starts = [start(number, n=LONG) for number in range(3)]
    faults = f"{PACE} {call}:kill:tensor"
    with serving(model, library, Open(PLACE), arenas, env={**env, "STUB_FAULTS": faults}) as worker:
        worker.send(*starts)
        worker.until_drawn(2, 3)
        worker.send(Switch(1, TENSOR, FORCED))
        seal = worker.until(Sealed).seal
        with pytest.raises(WorkerLost, match="SIGKILL"):
            worker.end()
    assert seal.placement == PLACE
    opening = Open(seal.placement, seal=seal, sequences=tuple(snapshot(one, worker) for one in starts))
    with serving(model, library, opening, arenas, env=env) as second:
        opened = second.until(orders.Opened)
        assert (opened.recomputed, opened.reason) == (False, "")
        assert opened.restore_ms > 0
        second.send(*(onward(one, worker) for one in starts))
        for _ in starts:
            second.until(Ended)
        assert [one.n_done for one in second.of(Reading)] == [one.n_reused for one in second.of(Reading)]
        assert [worker.drawn(number) + second.drawn(number) for number in range(3)] == alone
        counts = [one.n_draws for step in second.of(Step) for one in step.tokens if one.stream == 0]
        assert counts == list(range(len(worker.drawn(0)) + 1, LONG + 1))


def test_without_a_seal_the_tokens_are_read_again(
    model: Path, library: Path, env: dict[str, str], slow_worker: DrivenWorker, alone: list[list[int]]
) -> None:
    """The snapshots alone bring every stream back, and it is said."""
    worker = slow_worker
    starts = [start(number, n=LONG) for number in range(3)]
    worker.send(*starts)
    worker.until_drawn(2, 3)
    _lose(worker)
    with serving(
        model, library, Open(PLACE, sequences=tuple(snapshot(one, worker) for one in starts)), env=env
    ) as second:
        opened = second.until(orders.Opened)
        assert opened.recomputed is True
        assert "no sealed carry" in opened.reason
        second.send(*(onward(one, worker) for one in starts))
        for _ in starts:
            second.until(Ended)
        assert [worker.drawn(number) + second.drawn(number) for number in range(3)] == alone


def _sealed(worker: DrivenWorker) -> tuple[list[Start], seals.Seal]:
    """Let two streams run into a switch, and one of them on after it."""
    starts = [start(0, n=LONG), start(1, n=LONG)]
    worker.send(*starts)
    worker.until_drawn(1, 3)
    worker.send(Switch(1, TENSOR, FORCED))
    seal = worker.until(Sealed).seal
    worker.until(orders.Switched)
    return starts, seal


def test_tokens_after_the_seal_are_read_after_it(
    model: Path, library: Path, env: dict[str, str], arenas: Arenas, slow_worker: DrivenWorker, alone: list[list[int]]
) -> None:
    """A seal is never wrong, only old: what the snapshots have beyond it is read, the rest is kept."""
    worker = slow_worker
    starts, seal = _sealed(slow_worker)
    worker.until_drawn(0, 8)
    _lose(worker)
    snapshots = tuple(snapshot(one, worker) for one in starts)
    with serving(model, library, Open(TENSOR, force=True, seal=seal, sequences=snapshots), arenas, env=env) as second:
        opened = second.until(orders.Opened)
        assert opened.recomputed is True
        assert "after the sealed carry" in opened.reason
        n_since = sum(len(one.tokens) for one in snapshots) - sum(_n_tokens(arenas, seal).values())
        assert opened.reason.startswith(f"{n_since} tokens")
        second.send(*(onward(one, worker) for one in starts))
        for _ in starts:
            second.until(Ended)
        assert [worker.drawn(number) + second.drawn(number) for number in range(2)] == alone[:2]


def _n_tokens(arenas: Arenas, seal: seals.Seal) -> dict[int, int]:
    carry = seals.take(Arena(arenas.fds[seal.arena]), seal)
    return {one.seq_id: one.tokens.size for one in carry.sequences}


@pytest.mark.parametrize("part", ["state", "rest"])
def test_a_damaged_seal_is_not_believed(
    model: Path,
    library: Path,
    env: dict[str, str],
    arenas: Arenas,
    slow_worker: DrivenWorker,
    alone: list[list[int]],
    part: str,
) -> None:
    """One bit is other than it was sealed: the tokens are read again, and the reason says why."""
    worker = slow_worker
    starts, seal = _sealed(slow_worker)
    _lose(worker)
    arenas.flip(seal, seal.state_bytes // 2 if part == "state" else seal.rest_offset + seal.rest_bytes // 2)
    snapshots = tuple(snapshot(one, worker) for one in starts)
    with serving(model, library, Open(PLACE, seal=seal, sequences=snapshots), arenas, env=env) as second:
        opened = second.until(orders.Opened)
        assert opened.recomputed is True
        assert "checksum" in opened.reason
        second.send(*(onward(one, worker) for one in starts))
        for _ in starts:
            second.until(Ended)
        assert [worker.drawn(number) + second.drawn(number) for number in range(2)] == alone[:2]


@pytest.mark.parametrize(
    "target",
    [PLACE.changed(kv_unified=False, n_ctx=2048), PLACE.changed(n_ctx=2048), PLACE.changed(type_k="f32")],
    ids=["streams", "larger", "type"],
)
def test_a_seal_of_another_layout_is_converted(
    model: Path,
    library: Path,
    env: dict[str, str],
    arenas: Arenas,
    slow_worker: DrivenWorker,
    alone: list[list[int]],
    target: Placement,
) -> None:
    """A carry that was sealed in another layout is rewritten for this one, and nothing is read."""
    worker = slow_worker
    starts, seal = _sealed(slow_worker)
    drawn = [worker.drawn(one.stream) for one in starts]
    _lose(worker)
    snapshots = tuple(snapshot(one, worker) for one in starts)
    with serving(model, library, Open(target, seal=seal, sequences=snapshots), arenas, env=env) as second:
        assert second.until(orders.Opened).reason == ""
        second.send(*(onward(one, worker) for one in starts))
        for _ in starts:
            second.until(Ended)
        assert [one + second.drawn(number) for number, one in enumerate(drawn)] == alone[:2]


def test_what_is_in_no_snapshot_is_forgotten(
    model: Path, library: Path, env: dict[str, str], arenas: Arenas, slow_worker: DrivenWorker
) -> None:
    """Sequences of the seal without a snapshot are empty, and one whose snapshot is shorter is cut."""
    worker = slow_worker
    starts, seal = _sealed(slow_worker)
    _lose(worker)
    short = orders.SequenceSnapshot(0, starts[0].tokens)
    with serving(model, library, Open(PLACE, seal=seal, sequences=(short,)), arenas, env=env) as second:
        assert second.until(orders.Opened).reason.startswith("1 tokens")
        second.run(replace(start(5, prompt=starts[1].tokens), seq_id=1))
        second.run(replace(start(6, prompt=starts[0].tokens), seq_id=0))
    assert {one.stream: one.n_reused for one in second.of(Reading)} == {5: 0, 6: len(starts[0].tokens)}


def test_a_half_read_prompt_goes_on(model: Path, library: Path, env: dict[str, str], alone: list[list[int]]) -> None:
    """A snapshot of a prompt that was read in part is read as far, and the stream reads the rest."""
    half = orders.SequenceSnapshot(0, PROMPTS[0][:11])
    with serving(model, library, Open(PLACE, sequences=(half,)), env=env) as worker:
        assert worker.until(orders.Opened).recomputed is True
        assert worker.run(start(0)) == alone[0][:N]
        assert worker.of(Reading)[0].n_reused == 11


# ---- the other orders ----


def test_a_session_is_saved_and_comes_back(slow_worker: DrivenWorker, tmp_path: Path, alone: list[list[int]]) -> None:
    """A file holds all sequences, a restore gives their snapshots, and a stream goes on in them."""
    worker, first = slow_worker, start(0)
    worker.send(replace(first, n_predict=-1))
    worker.until_drawn(0, 4)
    path = tmp_path / "kept.safetensors"
    worker.send(Restore(1, path), Save(2, path))
    busy = worker.until(orders.Failed)
    assert (busy.order, busy.fault) == (1, Fault.BUSY)
    saved = worker.until(orders.Saved)
    assert (saved.order, saved.n_bytes) == (2, path.stat().st_size)
    # What was saved lies sealed in an arena as well: a later loss needs to read less again.
    assert len(worker.of(Sealed)) == 1
    n_saved = len(worker.drawn(0))
    worker.send(Halt(0))
    worker.until(Ended)
    worker.run(start(1, seq_id=0))
    worker.send(Restore(3, path))
    back = worker.until(orders.Replaced)
    (held,) = back.sequences
    assert held.tokens == (*PROMPTS[0], *worker.drawn(0)[:n_saved])
    assert (held.seq_id, held.is_pending, held.sampler, held.n_draws) == (0, True, first.sampler, n_saved)
    go_on = Start(8, 0, held.tokens, first.sampler, N - n_saved, n_draws=held.n_draws, is_pending=True)
    assert worker.drawn(0)[:n_saved] + worker.run(go_on) == alone[0][:N]


def test_orders_that_cannot_be_done_fail_and_nothing_else(
    worker: DrivenWorker, tmp_path: Path, alone: list[list[int]]
) -> None:
    """A file that is not there, a folder that is none, a text and a chat at once: Failed, and the session serves on."""
    worker.send(
        Restore(1, tmp_path / "none"),
        Save(2, tmp_path / "none" / "x"),
        orders.Tokenize(3),
        orders.Tokenize(4, messages=()),
        orders.Tokenize(5, messages=({"role": "user"},)),
        orders.Tokenize(6, messages=({"role": "user", "content": [{"type": "text", "text": "hi"}]},)),
        orders.Tokenize(7, text="ab"),
    )
    assert [worker.until(orders.Failed).order for _ in range(6)] == [1, 2, 3, 4, 5, 6]
    assert "chat template" in worker.of(orders.Failed)[-1].message
    assert worker.until(orders.Tokenized).tokens[-2:] == (97, 98)
    assert worker.run(start(0)) == alone[0][:N]
    # A refusal is no fault of ours: its worker's last words are its own, when it is lost.
    assert not any("Traceback" in line for line in worker.process.tail)


def test_streams_go_on_however_many_orders_come(slow_worker: DrivenWorker) -> None:
    """Between two orders that take time there is a decode: a client that asks without end stops no stream."""
    slow_worker.send(start(0, n=LONG))
    slow_worker.until_drawn(0, 2)
    n_before = len(slow_worker.of(Step))
    slow_worker.send(*(orders.Tokenize(number, text="ab") for number in range(20)))
    slow_worker.until(orders.Tokenized, lambda one: one.order == 19)
    assert len(slow_worker.of(Step)) - n_before >= 19


def test_texts_of_tokens_are_given_to_whom_they_are_wanted_by(worker: DrivenWorker) -> None:
    """A text's tokens come alone, or with the bytes of each different one."""
    worker.send(orders.Tokenize(1, text="aba"), orders.Tokenize(2, text="aba", with_pieces=True))
    assert worker.until(orders.Tokenized).pieces == ()
    assert worker.until(orders.Tokenized).pieces == (b"<bos>", b"a", b"b")


def test_a_decode_that_fails_ends_its_streams_alone(model: Path, library: Path, env: dict[str, str]) -> None:
    """The library refuses a decode: the streams in it end with its words, and the next one is served."""
    with serving(model, library, Open(PLACE), env={**env, "STUB_FAULTS": "decode:fail@4"}) as worker:
        worker.send(start(0))
        end = worker.until(Ended)
        assert (end.why, end.fault) == ("error", Fault.MODEL)
        assert "llama_decode" in end.message
        assert len(worker.run(start(1))) == N


def test_a_slow_decode_shows_that_it_lives(model: Path, library: Path, env: dict[str, str]) -> None:
    """The library's callbacks say that work goes on, so that silence means that it hangs."""
    with serving(model, library, Open(PLACE), env={**env, "STUB_FAULTS": "pace:decode=1100000"}) as worker:
        worker.run(start(1, n=2))
        assert orders.Alive() in worker.reports


@pytest.mark.parametrize("line", [b"{}\n", b"nonsense\n", to_line(Open(PLACE), orders.ORDERS)])
def test_what_is_no_order_ends_the_worker(worker: DrivenWorker, line: bytes) -> None:
    """A supervisor that says what cannot be is not believed any more."""
    worker.process.send_line(line)
    last = worker.end()
    assert isinstance(last, Failure)
    assert last.name == "MessageInvalid"


def test_the_first_order_opens(model: Path, library: Path, env: dict[str, str]) -> None:
    """Any other order before it ends the worker."""
    with serving(model, library, Halt(1), env=env) as worker:  # type: ignore[arg-type] # what is tested
        last = worker.end()
    assert isinstance(last, Failure)
    assert "the order to open first" in last.message


@pytest.mark.parametrize(
    ("extra", "said"),
    [({"general.architecture": "bert"}, "an encoder"), ({"general.architecture": "dream"}, "diffusion")],
)
def test_a_model_without_a_next_token_is_refused(
    tmp_path: Path, library: Path, env: dict[str, str], extra: dict[str, str], said: str
) -> None:
    """Encoders and diffusion models are refused by name before they are loaded."""
    name = extra["general.architecture"]
    keys = {"block_count": 2, "context_length": 64, "embedding_length": 64, "attention.head_count": 4}
    other = write_model(tmp_path / "other.gguf", extra={**extra, **{f"{name}.{key}": n for key, n in keys.items()}})
    with serving(other, library, Open(PLACE), env=env) as worker:
        last = worker.end()
    assert isinstance(last, Failure)
    assert last.fault is Fault.CONFIG
    assert said in last.message
    assert worker.stages == []


# ---- orders on their way ----


def test_a_cancel_without_anything_to_cancel_is_forgotten() -> None:
    """The flag is seen by what it was meant for, while that runs, and by nothing after it."""
    gate = CancelGate()
    inbox = Inbox(gate)
    gate.ask()
    assert gate.is_set()
    gate.end()
    assert not gate.is_set()
    gate.ask()
    gate.begin()
    assert not gate.is_set()
    gate.end()
    inbox.put_line(to_line(Switch(1, PLACE), orders.ORDERS))
    gate.ask()
    assert not gate.is_set()
    assert isinstance(inbox.take(waiting=True), Switch)
    gate.begin()
    assert gate.is_set()
    gate.end()
    gate.begin()
    assert not gate.is_set()


def test_the_inbox_keeps_the_order() -> None:
    """Orders come out as they came in; a line that is none is raised in its place."""
    inbox = Inbox(CancelGate())
    inbox.put_line(to_line(Halt(1), orders.ORDERS))
    inbox.put_line(jobs.CANCEL)
    inbox.put_line(to_line(Halt(2), orders.ORDERS))
    assert inbox.take(waiting=True) == Halt(1)
    with pytest.raises(MessageInvalid):
        inbox.take(waiting=False)
    assert inbox.take(waiting=False) == Halt(2)
    assert inbox.take(waiting=False) is None
