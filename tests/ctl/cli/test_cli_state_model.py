"""`splitctl state` with `--model`: a state is one of that model or none, whole or incomplete."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import statecodec
from splitctl.cli.state_file import NothingKept, opened, repaired
from splitctl.model.facts import ModelFacts, read_facts
from splitctl.placement import Placement
from splitctl.planning.cells import cache_tensors
from splitctl.switching.state_facts import read_state, state_facts
from statecodec import (
    AttentionSection,
    CacheFacts,
    Content,
    RecurrentSection,
    StateFormatError,
    StateImage,
    emit,
    parse,
    transcode,
)
from tests.codec.goldens import MANIFEST, golden
from tests.ctl.cli.states import facts_of, said, told
from tests.ctl.model_facts import model_facts
from tools.make_dummies import recipes

_WHOLE = [name for name, about in MANIFEST.items() if about["flags"] < 0 and about["model"] != "smollm2"]
_NEWEST = [name for name in _WHOLE if name.startswith("x11549")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelFacts]:
    """What the files of the models say that the goldens were taken from."""
    folder = tmp_path_factory.mktemp("headers")
    return {model: facts_of(model, folder) for model in {MANIFEST[name]["model"] for name in _WHOLE}}


def is_of(data: bytes, facts: ModelFacts) -> bool:
    """Whether `validate --model` would accept a state."""
    try:
        return read_state(memoryview(data), facts).content is Content.FULL
    except StateFormatError:
        return False


@pytest.mark.parametrize("name", _WHOLE)
def test_a_real_state_is_of_its_own_model(name: str, models: dict[str, ModelFacts]) -> None:
    """Whatever build wrote it, a state agrees with the header of its model, to the last layer and width."""
    data = golden(name)
    own = models[MANIFEST[name]["model"]]
    assert b"".join(emit(read_state(memoryview(data), own))) == data
    assert state_facts(own)[0].parts is not None


@pytest.mark.parametrize("name", _NEWEST)
def test_a_real_state_is_of_no_other_model(name: str, models: dict[str, ModelFacts]) -> None:
    """A state is none of any other model's, whatever its architecture is called."""
    own = state_facts(models[MANIFEST[name]["model"]])
    for model, facts in models.items():
        for known in state_facts(facts):
            if known.parts not in {one.parts for one in own}:
                assert not _is_whole(golden(name), replace(known, architecture=None)), model


def _is_whole(data: bytes, known: statecodec.ModelFacts) -> bool:
    try:
        return parse(data, facts=known).content is Content.FULL
    except StateFormatError:
        return False


def _ends(image: StateImage) -> set[int]:
    """Where a part of a state begins, in bytes: cut there, it looks like a whole one with less in it."""
    ends = set()
    for section in image.sections:
        assert isinstance(section, AttentionSection | RecurrentSection)
        ends.add(section.offset)
        if isinstance(section, RecurrentSection):
            ends |= {rows.offset for layer in section.layers for rows in (layer.r, layer.s)}
        else:
            for _, stream in section.filled():
                ends |= {stream.offset, *(rows.offset for rows in (*stream.keys, *stream.values))}
    return ends


@pytest.mark.parametrize("name", _NEWEST)
def test_no_incomplete_state_is_of_its_model(name: str, models: dict[str, ModelFacts], tmp_path: Path) -> None:
    """Cut where a layer or a section begins it is refused, and what is kept of it is a whole state of the model."""
    data, facts = golden(name), models[MANIFEST[name]["model"]]
    for end in _ends(parse(data, facts=state_facts(facts)[0])):
        assert not is_of(data[:end], facts), end
        _repair(data[:end], facts, tmp_path)
    for end in (*range(len(data) - 1, 0, -(len(data) // 12) - 1), len(data) - 2):
        assert not is_of(data[:end], facts), end
        _repair(data[:end], facts, tmp_path)
    assert _repair(data + b"junk", facts, tmp_path) == data


def _repair(data: bytes, facts: ModelFacts, folder: Path) -> bytes | None:
    """What `--drop-tail` writes; it is a state that `validate --model` accepts."""
    (folder / "cut").write_bytes(data)
    with opened(folder / "cut") as file:
        try:
            kept = b"".join(emit(repaired(file, facts)))
        except (NothingKept, StateFormatError):
            return None
    assert is_of(kept, facts)
    return kept


def _without_a_layer(image: StateImage) -> StateImage:
    """A save that lost the last layer of its first section that has any."""
    sections = list(image.sections)
    for index, section in enumerate(sections):
        if isinstance(section, RecurrentSection):
            sections[index] = replace(section, layers=section.layers[:-1])
            break
        assert isinstance(section, AttentionSection)
        if section.n_layers:
            streams = tuple(
                None if one is None else replace(one, keys=one.keys[:-1], values=one.values[:-1])
                for one in section.streams
            )
            sections[index] = replace(section, streams=streams)
            break
    return replace(image, sections=tuple(sections))


@pytest.mark.parametrize("name", _NEWEST)
def test_a_state_that_lost_a_layer_is_of_no_model(name: str, models: dict[str, ModelFacts]) -> None:
    """Sound by itself, with one layer less than the model has, it is refused."""
    facts = models[MANIFEST[name]["model"]]
    image = read_state(memoryview(golden(name)), facts)
    if image.sections:
        assert not is_of(b"".join(emit(_without_a_layer(image))), facts)


@pytest.mark.model
def test_what_does_not_agree_is_told(smollm2: Path, kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """The state of a model validates against its file; that of another model and a file that is no model do not."""
    own, other = kept("x11549-smollm2-q8"), kept("x11549-dense")
    assert said(capfd, "validate", own, "--model", smollm2)[0] == 0
    code, body, err = told(capfd, "validate", other, "--model", smollm2)
    assert (code, body["files"][0]["error"]["field"]) == (1, "section 0 stream 0 K layers")
    assert "found 4, expected 30" in err
    assert "GGUF" in said(capfd, "validate", own, "--model", own)[2]
    image = parse(golden("x11549-smollm2"))
    facts = read_facts(smollm2)
    assert state_facts(facts)[0].parts == (CacheFacts((192,) * 30, (192,) * 30),)
    assert not is_of(b"".join(emit(_without_a_layer(image))), facts)
    # What is made for a model is held against it before it is put in its place.
    code, _, err = said(capfd, "convert", other, "-o", other.with_name("out"), "--first", "2", "--model", smollm2)
    assert (code, other.with_name("out").exists()) == (1, False)


def test_an_architecture_that_was_never_seen_is_not_judged(kept: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Of its states the name is compared, and it is said that the rows are not."""
    facts = model_facts(architecture="nobody-knows")
    (known,) = state_facts(facts)
    assert (known.parts, known.sections, known.n_layer) == (None, None, 4)
    assert not is_of(golden("x11549-dense"), facts)
    renamed = b"".join(emit(replace(parse(golden("x11549-dense")), architecture="nobody-knows")))
    assert is_of(renamed, facts)


def test_a_window_of_builds_that_had_none_is_of_its_model(models: dict[str, ModelFacts]) -> None:
    """Builds of early 2025 kept the rows of a window's layers among all others: that is sound, the window alone not."""
    facts = models["gemma2-plain"]
    image = read_state(memoryview(golden("x11549-window")), facts)
    base, window = transcode.to_version(image, 10).caches
    assert [state_facts(facts)[n].sections for n in (0, 1)] == [("attention", "attention"), ("attention",)]
    one, two = base.streams[0], window.streams[0]
    assert one is not None
    assert two is not None
    layers = {
        side: tuple(rows for pair in zip(getattr(two, side), getattr(one, side), strict=True) for rows in pair)
        for side in ("keys", "values")
    }
    old = replace(image, sections=(replace(base, streams=(replace(one, rotation=None, **layers),)),))
    assert is_of(b"".join(emit(old)), facts)
    assert not is_of(b"".join(emit(replace(image, sections=(base,)))), facts)


@pytest.mark.parametrize(
    "name", ["qwen4exp", "minimax-m3", "dots3note", "lfm2", "glm5-next", "t5encoder", "mamba", "bert"]
)
def test_parts_hold_every_row_of_the_cache(name: str, tmp_path: Path) -> None:
    """What a context is planned to keep of each layer is what its states are judged by, in the library's order."""
    assert name in recipes()
    facts = facts_of(name, tmp_path)
    parts = state_facts(facts)[0].parts
    assert parts is not None
    planned = sum(one.width for one in cache_tensors(facts, Placement()) if "ple" not in one.name)
    held = sum(
        sum(one.k) + sum(one.v) if isinstance(one, CacheFacts) else one.n_layers * (one.r + one.s) for one in parts
    )
    assert held == planned
