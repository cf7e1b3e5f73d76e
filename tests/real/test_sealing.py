"""A saved state is held against what the model's header says of its memory, before anything is freed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest

import statecodec
from llama_native import Library
from splitctl import Session
from splitctl.switching.sealing import other_memory
from statecodec import AttentionSection, KvStream, RecurrentSection, Section, StateImage
from tests.real.conftest import base
from tools.make_dummies import make_many
from tools.places import default_folder

PROMPT = [5, 9, 2, 7, 11, 3, 8, 1, 6, 4, 10, 12]
MEMORIES = ("llama", "gemma3", "mamba", "jamba", "deepseek2")
"""Attention, sliding window, recurrent, hybrid, and keys alone."""


@pytest.fixture
def saved(library: Library) -> Iterator[Callable[[str], tuple[Session, StateImage]]]:
    """Gives a session on a small model that has read a prompt, and its state."""
    opened: list[Session] = []

    def give(name: str) -> tuple[Session, StateImage]:
        ((_, path, why),) = make_many(default_folder(), [name])
        assert path is not None, why
        session = Session.open(path, base(), library=library, prober=None)
        opened.append(session)
        session.prefill(PROMPT)
        return session, statecodec.parse(session._effects.transfer.snapshot().view)

    yield give
    for session in opened:
        session.close()


def _without_last_layer(section: Section) -> Section:
    if isinstance(section, RecurrentSection):
        return dataclasses.replace(section, layers=section.layers[:-1])
    assert isinstance(section, AttentionSection)

    def cut(stream: KvStream) -> KvStream:
        return dataclasses.replace(stream, keys=stream.keys[:-1], values=stream.values[:-1])

    return dataclasses.replace(section, streams=tuple(one and cut(one) for one in section.streams))


@pytest.mark.every_build
@pytest.mark.parametrize("name", MEMORIES)
def test_a_state_without_one_of_its_layers_or_sections_is_told(
    saved: Callable[[str], tuple[Session, StateImage]], name: str
) -> None:
    """What a build saves is what the header says, to the layer; less of any section is not."""
    session, image = saved(name)
    sections, facts = image.sections, session.facts
    assert other_memory(image, facts) == ""
    for at, section in enumerate(sections):
        lacks = (*sections[:at], *sections[at + 1 :])
        assert "header" in other_memory(dataclasses.replace(image, sections=lacks), facts)
        short = (*sections[:at], _without_last_layer(section), *sections[at + 1 :])
        assert "header" in other_memory(dataclasses.replace(image, sections=short), facts)


@pytest.mark.every_build
def test_a_state_whose_rows_are_of_another_width_is_told(
    saved: Callable[[str], tuple[Session, StateImage]],
) -> None:
    """Both widths are in the phrase."""
    session, image = saved("llama")
    facts = dataclasses.replace(session.facts, n_embd_head_k=2 * session.facts.n_embd_head_k)
    width = facts.n_embd_head_k * facts.n_head_kv[0]
    assert f"is {width // 2}, by the model's header {width}" in other_memory(image, facts)
