"""The serving worker on a real build: streams in one batch, a switch under them, a worker that is lost and replaced."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_native import Library
from splitctl import SamplerSpec, Session, SplitMode
from splitctl.errors import WorkerLost
from splitctl.host.ledger import Ledger, StreamJob
from splitctl.ipc import orders
from splitctl.ipc.orders import Ended, Halt, Open, Reading, Sealed, Start, Step, Switch, Tokenize
from splitctl.placement import Placement
from tests.ctl.serving import Arenas, DrivenWorker, onward, placement, serving, snapshot
from tests.real.conftest import DEVICES, PROMPT, RPC, SEEDED
from tools.make_dummies import make_many
from tools.places import default_folder

pytestmark = pytest.mark.skipif(bool(RPC), reason="an RPC server serves one client at a time, and this is a second one")

#: More than a cache of a sliding window holds (256 cells for a window of 16 and a micro-batch of 64).
TOKENS = tuple((7919 * (index + 1) + 13) % 120 + 3 for index in range(400))
PLACE = placement(devices=DEVICES, n_ctx=2048, n_batch=64, n_ubatch=64)
GREEDY = SamplerSpec(temp=0.0)
N = 14

Opener = Callable[..., DrivenWorker]


@pytest.fixture
def arenas() -> Iterator[Arenas]:
    """Memory that outlives the workers of a test."""
    held = Arenas()
    yield held
    held.close()


@pytest.fixture
def serve(smollm2: Path, arenas: Arenas) -> Iterator[Opener]:
    """Starts workers that serve, and ends them with the test."""
    with ExitStack() as stack:

        def opener(place: Placement = PLACE, *, model: Path = smollm2, **more: Any) -> DrivenWorker:
            library = Path(os.environ["SPLITCTL_TEST_LIBRARY"])
            worker = stack.enter_context(serving(model, library, Open(place, **more), arenas))
            worker.until(orders.Opened)
            return worker

        yield opener


def _dummy(recipe: str) -> Path:
    ((_name, path, why),) = make_many(default_folder(), [recipe])
    assert isinstance(path, Path), why
    return path


def _starts(worker: DrivenWorker) -> list[Start]:
    """Two streams on two sequences."""
    worker.send(Tokenize(1, text=PROMPT), Tokenize(2, text="The capital of France is"))
    prompts = [worker.until(orders.Tokenized).tokens for _ in range(2)]
    return [Start(number, number, tokens, SEEDED, N) for number, tokens in enumerate(prompts)]


def _run(worker: DrivenWorker, starts: list[Start]) -> list[list[int]]:
    worker.send(*starts)
    for _ in starts:
        end = worker.until(Ended)
        assert end.why == "length", end
    return [worker.drawn(one.stream) for one in starts]


def test_a_session_and_a_worker_say_the_same(library: Library, smollm2: Path, serve: Opener) -> None:
    """One stream of a worker is what a session in this process generates; its text is tokenized alike."""
    worker = serve()
    (first, *_) = _starts(worker)
    (answer,) = _run(worker, [first])
    with Session.open(smollm2, PLACE, library=library, prober=None) as session:
        tokens = session.tokenize(PROMPT)
        session.prefill(tokens)
        assert (tuple(tokens), answer) == (first.tokens, [one.id for one in session.generate(n=N, sampler=SEEDED)])


def test_a_chat_goes_through_the_models_template(serve: Opener, library: Library, smollm2: Path) -> None:
    """Messages become the template's text, begun once."""
    worker = serve()
    worker.send(Tokenize(1, messages=({"role": "user", "content": "Say yes."},)))
    tokens = worker.until(orders.Tokenized).tokens
    with Session.open(smollm2, PLACE, library=library, prober=None) as session:
        text = b"".join(session.model.piece(token, special=True) for token in tokens).decode()
    assert text.count("<|im_start|>") == 3
    assert text.endswith("<|im_start|>user\nSay yes.<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.every_build
def test_streams_go_on_through_a_switch(serve: Opener, other_mode: SplitMode) -> None:
    """Two streams pause at a token, move to another mode, and go on until they are halted; the trial confirms it."""
    worker = serve()
    # They last longer than a slow machine takes to check the mode, which is done while they go on.
    samplers = (GREEDY, replace(SEEDED, repeat_penalty=1.0))
    starts = [
        replace(_starts(worker)[0], stream=number, seq_id=number, sampler=sampler, n_predict=900)
        for number, sampler in enumerate(samplers)
    ]
    worker.send(*starts)
    worker.until_drawn(1, 4)
    worker.send(Switch(1, PLACE.changed(mode=other_mode)))
    switched = worker.until(orders.Switched)
    assert switched.outcome["status"] == "switched", switched.outcome["reason"]
    n_before = [len(worker.drawn(one.stream)) for one in starts]
    for one, n in zip(starts, n_before, strict=True):
        worker.until_drawn(one.stream, n + N)
        worker.send(Halt(one.stream))
        worker.until(Ended)
    assert {end.why for end in worker.of(Ended)} == {"halted"}
    straight = serve()
    wanted = _run(straight, [replace(one, n_predict=n) for one, n in zip(starts, n_before, strict=True)])
    assert [worker.drawn(one.stream)[:n] for one, n in zip(starts, n_before, strict=True)] == wanted
    (trial,) = worker.of(orders.Trial)
    assert (trial.outcome["confirmed"], trial.outcome["effective"]) == (True, other_mode.value)


def test_a_lost_worker_is_replaced_from_the_seal(serve: Opener) -> None:
    """Killed after Sealed and before its next token, the worker leaves all that another one needs to say the same."""
    straight = serve()
    wanted = _run(straight, _starts(straight)[:1])
    worker = serve()
    (first, *_) = _starts(worker)
    worker.send(first)
    worker.until_drawn(0, 5)
    worker.send(Switch(1, PLACE.changed(tensor_split=(3.0, 1.0))))
    seal = worker.until(Sealed).seal
    worker.process.kill()
    with pytest.raises(WorkerLost, match="SIGKILL"):
        worker.end()
    before = worker.drawn(0)
    after = serve(seal.placement, seal=seal, sequences=(snapshot(first, worker),))
    (opened,) = after.of(orders.Opened)
    assert (opened.recomputed, opened.reason) == (False, "")
    after.send(onward(first, worker))
    after.until(Ended)
    assert [before + after.drawn(0)] == wanted


def test_a_lost_worker_is_replaced_from_the_tokens(serve: Opener) -> None:
    """Without a seal the snapshots are read again: the delivered tokens stay, and both streams go on to their ends."""
    worker = serve()
    starts = _starts(worker)
    worker.send(*starts)
    worker.until_drawn(1, 5)
    worker.process.kill()
    with pytest.raises(WorkerLost):
        worker.end()
    after = serve(sequences=tuple(snapshot(one, worker) for one in starts))
    assert after.of(orders.Opened)[0].recomputed is True
    after.send(*(onward(one, worker) for one in starts))
    for _ in starts:
        after.until(Ended)
    assert [len(worker.drawn(one.stream) + after.drawn(one.stream)) for one in starts] == [N, N]


def test_a_grammar_goes_on_over_a_switch_and_a_lost_worker(serve: Opener, other_mode: SplitMode) -> None:
    """What comes is the text that it allows, whichever worker draws; one that cannot be read begins nothing."""
    worker = serve()
    (first, second) = _starts(worker)
    worker.send(replace(second, grammar='root ::= "a'))
    assert "grammar" in worker.until(Ended).message
    # It lasts longer than a slow machine takes to check the mode, which is done while it goes on.
    first = replace(first, grammar='root ::= "Zero, " ("one, two, three, "){100,}', n_predict=900)
    worker.send(first)
    worker.until_drawn(0, 3)
    worker.send(Switch(1, PLACE.changed(mode=other_mode)))
    switched = worker.until(orders.Switched)
    assert switched.outcome["status"] == "switched", switched.outcome["reason"]
    worker.until_drawn(0, len(worker.drawn(0)) + 4)
    worker.process.kill()
    with pytest.raises(WorkerLost):
        worker.end()
    after = serve(sequences=(snapshot(first, worker),))
    after.send(onward(first, worker))
    after.until_drawn(0, N)
    after.send(Halt(0))
    after.until(Ended)
    pieces = [one.piece for report in (*worker.of(Step), *after.of(Step)) for one in report.tokens]
    assert ("Zero, " + "one, two, three, " * 900).startswith(b"".join(pieces).decode())


@pytest.mark.every_build
@pytest.mark.parametrize(
    ("recipe", "n_reused"),
    [("llama", 100), ("gemma3+gqa", 0), ("mamba", 0), ("jamba+gqa", 0)],
    ids=["attention", "sliding window", "recurrent", "hybrid"],
)
def test_what_a_memory_can_keep_is_kept(serve: Opener, recipe: str, n_reused: int) -> None:
    """A prompt that leaves another one on the way reuses what that memory still has, and answers as a new one does."""
    worker = serve(model=_dummy(recipe))
    other = (*TOKENS[:100], *TOKENS[40:60])
    onward_ = (*TOKENS, *TOKENS[:30])
    worker.run(Start(0, 0, TOKENS, GREEDY, 1))
    longer = worker.run(Start(1, 0, onward_, GREEDY, 8))
    shorter = worker.run(Start(2, 0, other, GREEDY, 8))
    assert longer == worker.run(Start(3, 1, onward_, GREEDY, 8))
    assert shorter == worker.run(Start(4, 2, other, GREEDY, 8))
    reused = {one.stream: one.n_reused for one in worker.of(Reading)}
    assert reused == {0: 0, 1: len(TOKENS), 2: n_reused, 3: 0, 4: 0}


def test_an_encoder_decoder_reads_every_prompt_afresh(serve: Opener) -> None:
    """Its streams share steps; a lost worker's stream is made again from its prompt and what was delivered."""
    model = _dummy("t5")
    straight, worker = serve(model=model), serve(model=model)
    starts = [Start(0, 0, TOKENS[:20], GREEDY, N), Start(1, 1, TOKENS[20:40], GREEDY, N)]
    wanted = [straight.run(one) for one in starts]
    worker.send(*starts)
    worker.until_drawn(1, 4)
    worker.process.kill()
    with pytest.raises(WorkerLost):
        worker.end()
    after = serve(model=model)
    for one in starts:
        drawn = tuple(worker.drawn(one.stream))
        after.send(
            Start(
                one.stream,
                one.seq_id,
                (*one.tokens, *drawn),
                GREEDY,
                N - len(drawn),
                is_pending=True,
                n_delivered=len(drawn),
            )
        )
    for _ in starts:
        after.until(Ended)
    told = [worker.drawn(one.stream) + after.drawn(one.stream) for one in starts]
    assert [len(one) for one in told] == [N, N]
    assert told == wanted


@pytest.mark.every_build
@pytest.mark.parametrize("recipe", ["llama", "gemma3+gqa"])
def test_a_sequence_cut_far_back_is_what_a_fresh_one_is(library: Library, recipe: str) -> None:
    """A sliding window that has moved on is read again where a session is rewound behind it."""
    place = PLACE.changed(n_seq_max=1)
    with (
        Session.open(_dummy(recipe), place, library=library, prober=None) as session,
        Session.open(_dummy(recipe), place, library=library, prober=None) as fresh,
    ):
        session.prefill(TOKENS)
        session.rewind(60)
        fresh.prefill(TOKENS[:60])
        # Batches of other sizes differ in the last bits; a window with a hole in it differs in all.
        assert np.allclose(session.logits(), fresh.logits(), rtol=0.01, atol=0.01)


def test_an_encoder_decoders_idle_sequences_are_rebuilt_after_a_loss(serve: Opener, tmp_path: Path) -> None:
    """What streams left behind is made again from what was reported of them, prompts and answers alike."""
    model = _dummy("t5")
    worker = serve(model=model)
    ledger = Ledger(PLACE.n_seq_max)
    ledger.decoder_start = worker.of(orders.Opened)[0].model["decoder_start"]
    for number in (0, 1):
        ledger.add(StreamJob(number, TOKENS[20 * number : 20 * number + 20], GREEDY.seeded(), 5))
    for start in ledger.startable():
        worker.run(start)
    for event in worker.reports:
        match event:
            case Reading():
                ledger.reading(event)
            case orders.Step():
                ledger.step(event)
            case Ended():
                ledger.ended(event)
    worker.process.kill()
    held = ledger.snapshots()
    assert [len(one.tokens) for one in held] == [6, 6]
    after = serve(model=model, sequences=held)
    after.send(orders.Save(1, tmp_path / "kept"), orders.Restore(2, tmp_path / "kept"))
    assert after.until(orders.Replaced).sequences == held


def test_an_encoder_decoders_snapshots_bring_it_back(serve: Opener, tmp_path: Path) -> None:
    """What a file gave is known with its encoder's tokens, and another worker makes it again from them."""
    model = _dummy("t5")
    worker = serve(model=model)
    first = Start(0, 0, TOKENS[:20], GREEDY, 5)
    worker.run(first)
    worker.send(orders.Save(1, tmp_path / "kept"), orders.Restore(2, tmp_path / "kept"))
    (held,) = worker.until(orders.Replaced).sequences
    assert held.encoder_tokens == first.tokens
    assert held.is_pending
    after = serve(model=model, sequences=(held,))
    assert after.of(orders.Opened)[0].recomputed
    after.send(orders.Save(3, tmp_path / "again"), orders.Restore(4, tmp_path / "again"))
    assert after.until(orders.Replaced).sequences == (held,)
