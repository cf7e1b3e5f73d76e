"""Streams that share one buffer of cells, turn by turn: who begins to be read, who waits, who is refused."""

from __future__ import annotations

from typing import Any

import pytest

from llama_native import Library
from splitctl.carry.sampling import SamplerSpec
from splitctl.ipc.orders import Ended, Report, Start
from splitctl.placement import FlashAttn, Placement
from splitctl.session import Session
from splitctl.worker.batching import Batcher
from tests.stublib import build, needs_compiler, run_child, write_model

pytestmark = [pytest.mark.stub, needs_compiler]

N_CTX = 256
FIRST, SECOND = tuple(range(150)), tuple(range(100, 180))


def child_ends(path: str, model: str, rounds: list[list[tuple[int, int, list[int]]]]) -> list[list[Any]]:
    """Carry rounds of streams to their ends, all of a round begun before its first turn: [stream, why, message]."""
    placement = Placement(
        devices=("STUB0", "STUB1"),
        n_ctx=N_CTX,
        n_batch=32,
        n_ubatch=16,
        n_seq_max=4,
        kv_unified=True,
        flash_attn=FlashAttn.ON,
        n_threads=1,
        n_threads_batch=1,
    )
    reports: list[Report] = []
    with Session.open(model, placement, library=Library.open(path), prober=None) as session:
        batcher = Batcher(session, reports.append)
        number = 0
        for streams in rounds:
            for seq_id, n, prompt in streams:
                batcher.start(Start(number, seq_id, tuple(prompt), SamplerSpec(temp=0.0), n))
                number += 1
            while batcher.is_busy:
                batcher.turn()
    return [[one.stream, one.why, one.message] for one in reports if isinstance(one, Ended)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The stub library and a model for it."""
    return str(build()), str(write_model(tmp_path_factory.mktemp("model") / "tiny.gguf"))


def test_streams_that_wait_do_not_keep_each_other_from_fitting(files: tuple[str, str]) -> None:
    """Prompts that fit alone are all read, one after the other, though their beginnings fill the cache together."""
    held = [(0, 1, FIRST), (1, 1, SECOND)]
    longer = [(0, 4, FIRST + FIRST[:60]), (1, 4, SECOND * 2)]
    ends = run_child(child_ends, *files, [held, longer]).value()
    assert [why for _, why, _ in ends] == ["length"] * 4


def test_a_stream_that_waits_does_not_end_one_that_runs(files: tuple[str, str]) -> None:
    """What a waiting stream holds makes room for one that generates, and is read again in its turn."""
    waiting = [(1, 60, SECOND), (0, 4, FIRST + FIRST[:60])]
    ends = run_child(child_ends, *files, [[(0, 1, FIRST)], waiting]).value()
    assert [(stream, why) for stream, why, _ in ends] == [(0, "length"), (1, "length"), (2, "length")]


def test_a_prompt_that_never_fits_ends_at_once_with_its_own_numbers(files: tuple[str, str]) -> None:
    """It waits for nobody, and its error says nothing of what others hold."""
    ends = run_child(child_ends, *files, [[(0, 1, FIRST)], [(1, 40, SECOND), (0, 4, FIRST + FIRST)]]).value()
    stream, why, message = ends[1]
    assert (stream, why) == (2, "context")
    assert "150 more make 300, and n_ctx is 256" in message
    assert str(len(SECOND)) not in message
    assert [why for _, why, _ in ends[2:]] == ["length"]


def child_to_come(path: str, model: str) -> list[int]:
    """Say before each turn of a stream of unknown length and two of known ones how many tokens are known to come."""
    placement = Placement(
        devices=("STUB0", "STUB1"), n_ctx=N_CTX, n_batch=32, n_ubatch=16, n_seq_max=4, kv_unified=True, n_threads=1
    )
    told = []
    with Session.open(model, placement, library=Library.open(path), prober=None) as session:
        batcher = Batcher(session, lambda _report: None)
        for number, n in enumerate((-1, 5, 9)):
            batcher.start(Start(number, number, (1, 2, 3), SamplerSpec(temp=0.0), n))
        while (left := session._live.engine.n_to_come()) or not told:
            told.append(left)
            batcher.turn()
    return told


def test_what_is_known_to_come_is_the_rest_of_the_longest_stream(files: tuple[str, str]) -> None:
    """Streams share their decodes; one whose length nobody knows counts for nothing."""
    told = run_child(child_to_come, *files).value()
    assert told[0] == 9
    assert told[-1] == 1
    assert told == sorted(told, reverse=True)
