from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from statecodec import AttentionSection, Inconsistent, ModelFacts, StateImage, parse, validate
from tests.codec.cases import CASES
from tests.codec.goldens import MANIFEST, golden


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_what_was_read_is_sound(case: object) -> None:
    """Every image that comes out of parse keeps the laws."""
    validate(parse(case.data))  # type: ignore[attr-defined]


def test_facts_can_be_checked_later() -> None:
    """A model's facts that become known after reading are compared in the same way."""
    image = parse(CASES["four unified"].data)
    validate(image, ModelFacts(n_seq_max=4, n_ctx=10))
    with pytest.raises(Inconsistent, match="cells"):
        validate(image, ModelFacts(n_ctx=9))
    with pytest.raises(Inconsistent, match="session version"):
        validate(image, ModelFacts(versions=frozenset({11})))
    with pytest.raises(Inconsistent, match="extra record"):
        validate(image, ModelFacts(has_ext=True))
    with pytest.raises(Inconsistent, match="sections"):
        validate(image, ModelFacts(sections=("recurrent",)))
    with pytest.raises(Inconsistent, match="cache 0 stream 0 V"):
        validate(image, ModelFacts(has_v=(False,)))


def with_positions(image: StateImage, positions: list[int]) -> StateImage:
    """The image with other positions in its first stream."""
    section = image.sections[0]
    assert isinstance(section, AttentionSection)
    stream = section.streams[0]
    assert stream is not None
    cells = replace(stream.cells, pos=np.array(positions, dtype="<i4"))
    changed = replace(section, streams=(replace(stream, cells=cells),))
    return replace(image, sections=(changed,))


def test_a_changed_image_is_checked_like_a_read_one() -> None:
    """Laws hold for images that a change made, too."""
    image = parse(CASES["plain"].data)
    validate(with_positions(image, [2, 0, 1]))
    with pytest.raises(Inconsistent, match="sequence 0 at position 2 twice"):
        validate(with_positions(image, [2, 0, 2]))


def test_recurrent_facts() -> None:
    """Layers of a recurrent memory are compared with the model's."""
    image = parse(CASES["recurrent"].data)
    validate(image, ModelFacts(n_recurrent=2, n_layer=2, n_seq_max=1))
    with pytest.raises(Inconsistent, match="recurrent layers"):
        validate(image, ModelFacts(n_recurrent=3))


def test_real_states_agree_with_their_settings() -> None:
    """Kept states of the newest build agree with what the manifest says they were made with."""
    for name, told in MANIFEST.items():
        if not name.startswith("x11549-dense") or told["form"] != "context":
            continue
        n_stream = 1 if told["unified"] else told["n_seq_max"]
        facts = ModelFacts(
            architecture="llama",
            sections=("attention",),
            n_layer=4,
            has_ext=False,
            has_v=(True,),
            n_seq_max=told["n_seq_max"],
            n_ctx=told["n_ctx"],
            n_stream=n_stream,
            versions=frozenset({11}),
            v_trans=not told["flash"],
        )
        spans = parse(golden(name), facts=facts).sequences()
        assert {seq: span.n_cells for seq, span in spans.items()} == dict(enumerate(told["n_tokens"]))


def test_an_opaque_memory_is_not_compared() -> None:
    """What is not understood cannot contradict the model."""
    validate(parse(CASES["opaque"].data), ModelFacts(n_layer=1, n_seq_max=1, architecture="deepseek4"))
