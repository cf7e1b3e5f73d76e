"""Real reports that need a real build and real memories: sliding window, recurrent, hybrid, none (rows S)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import statecodec
from llama_native import Library
from splitctl import Placement, SamplerSpec, Session, SplitMode, SwitchStatus
from splitctl.carry import file as carries
from splitctl.errors import CarryDamaged, CarryMismatch
from tests.real.conftest import base
from tools import make_dummies
from tools.places import default_folder

pytestmark = pytest.mark.every_build

GREEDY = SamplerSpec(temp=0.0)
PROMPT = [5, 9, 2, 7, 11, 3, 8, 1, 6, 4, 10, 12]
MEMORIES = ("llama", "gemma3", "mamba", "jamba", "lfm2")
"""Attention, sliding window, recurrent, and two hybrids."""

OpenDummy = Callable[..., Session]


@pytest.fixture
def open_dummy(library: Library) -> Iterator[OpenDummy]:
    """Opens sessions on small models with random weights, which are closed at the end of the test."""
    opened: list[Session] = []

    def opener(name: str, placement: Placement | None = None) -> Session:
        ((_, path, reason),) = make_dummies.make_many(default_folder(), [name])
        assert path is not None, reason
        session = Session.open(path, placement or base(), library=library, prober=None)
        opened.append(session)
        return session

    yield opener
    for session in opened:
        session.close()


def _split(session: Session) -> Placement:
    """Another split of the same layers over the same processors: float order is the same, so results are equal."""
    return session.placement.changed(tensor_split=(3.0, 1.0))


def _ids(session: Session, n: int) -> list[int]:
    return [token.id for token in session.generate(n=n, sampler=GREEDY)]


@pytest.mark.parametrize("name", MEMORIES)
def test_s1_a_restored_session_decodes_each_token_once(open_dummy: OpenDummy, name: str, tmp_path: Path) -> None:
    """A saved session goes on in another one where it was: the newest token once, at its place, and none before it."""
    session = open_dummy(name)
    session.prefill(PROMPT)
    _ids(session, 3)
    session.save(tmp_path / "carry")
    other = open_dummy(name)
    other.restore(tmp_path / "carry")
    assert other.tokens() == session.tokens()
    before = other.n_decodes
    assert _ids(other, 2) == _ids(session, 2)
    assert other.n_decodes - before == 2
    assert np.array_equal(other.logits(), session.logits())


@pytest.mark.parametrize("name", MEMORIES)
def test_s8_a_switch_reads_nothing_again(open_dummy: OpenDummy, name: str) -> None:
    """The first token after a switch takes one decode of one token, and is what a session without a switch gives."""
    session, straight = open_dummy(name), open_dummy(name)
    for one in (session, straight):
        one.prefill(PROMPT)
        _ids(one, 3)
    before = session.n_decodes
    outcome = session.switch(_split(session))
    assert outcome.status is SwitchStatus.SWITCHED, outcome.reason
    assert session.n_decodes == before
    assert _ids(session, 4) == _ids(straight, 4)
    assert session.n_decodes == before + 4
    assert np.array_equal(session.logits(), straight.logits())


@pytest.mark.parametrize("name", MEMORIES)
def test_s25_a_rewind_after_a_switch_never_goes_on_from_a_memory_that_was_not_cut(
    open_dummy: OpenDummy, name: str
) -> None:
    """Cut or read again, a rewound sequence is what a fresh one that read the same tokens is."""
    session, fresh = open_dummy(name), open_dummy(name)
    session.prefill(PROMPT)
    _ids(session, 2)
    session.switch(_split(session))
    n = len(PROMPT) - 4
    session.rewind(n)
    assert session.tokens() == PROMPT[:n]
    fresh.prefill(PROMPT[:n])
    # A batch of another size may differ in the last bits; a memory that still held the rest would differ in all.
    assert np.allclose(session.logits(), fresh.logits(), rtol=1e-3, atol=1e-3)


def test_s18_an_encoder_has_nothing_to_carry(open_dummy: OpenDummy) -> None:
    """A model that remembers nothing is switched without a state, and its embeddings stay what they were."""
    session = open_dummy("bert")
    session.prefill(PROMPT)
    before = session.embedding()
    outcome = session.switch(_split(session))
    assert outcome.status is SwitchStatus.SWITCHED, outcome.reason
    assert not outcome.state_bytes
    session.remove_sequence(0)
    session.prefill(PROMPT)
    after = session.embedding()
    assert before is not None
    assert after is not None
    assert np.array_equal(before, after)


def test_s31_a_state_of_another_model_is_an_error(open_dummy: OpenDummy, tmp_path: Path) -> None:
    """A carry of one model is refused by another, by name; the session goes on with what it held."""
    session = open_dummy("llama")
    session.prefill(PROMPT)
    session.save(tmp_path / "carry")
    other, same = open_dummy("gemma3"), open_dummy("gemma3")
    for one in (other, same):
        one.prefill(PROMPT[:5])
    with pytest.raises(CarryMismatch, match="architecture"):
        other.restore(tmp_path / "carry")
    assert _ids(other, 3) == _ids(same, 3)


def test_s6_a_rejected_state_poisons_nothing(open_dummy: OpenDummy, tmp_path: Path) -> None:
    """The size of the last layer's rows is damaged: refused, and a fresh prompt gives what it gives anywhere."""
    session, never = open_dummy("llama"), open_dummy("llama")
    session.prefill(PROMPT)
    session.save(tmp_path / "carry")
    read = carries.read(tmp_path / "carry").carry
    cache = statecodec.parse(read.state).sections[0]
    assert isinstance(cache, statecodec.AttentionSection)
    ((_, stream),) = cache.filled()
    data = bytearray(read.state)
    data[stream.values[-1].offset + 4] ^= 1
    bad = dataclasses.replace(read, state=memoryview(bytes(data)))
    carries.write(tmp_path / "bad", carries.seal(bad))
    with pytest.raises(CarryDamaged, match="row bytes"):
        session.restore(tmp_path / "bad")
    assert session.tokens() == PROMPT
    session.remove_sequence(0)
    for one in (session, never):
        one.prefill(PROMPT[3:])
    assert np.array_equal(session.logits(), never.logits())


def test_s8_from_one_device_to_two_and_back(open_dummy: OpenDummy) -> None:
    """A recurrent state that cannot be rewound is carried between modes whole: no token is read again."""
    session = open_dummy("mamba")
    session.prefill(PROMPT)
    _ids(session, 2)
    before = session.n_decodes
    for mode in (SplitMode.NONE, SplitMode.LAYER):
        outcome = session.switch(session.placement.changed(mode=mode))
        assert outcome.status is SwitchStatus.SWITCHED, outcome.reason
    assert session.n_decodes == before
    assert len(_ids(session, 2)) == 2
