from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from statecodec import (
    AttentionSection,
    CacheFacts,
    Inconsistent,
    ModelFacts,
    RecurrentFacts,
    StateImage,
    parse,
    validate,
)
from tests.codec.cases import CASES
from tests.codec.goldens import MANIFEST, golden
from tests.codec.model import parts_of
from tests.codec.synthetic import Attention, cells, context, memory, sequence_file


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


@pytest.mark.parametrize("kind", [name for name in MANIFEST if "partial" not in name])
def test_a_real_state_is_of_its_own_parts_alone(kind: str) -> None:
    """A layer more or less, another width, a part more or less, and parts in another order are other models."""
    image = parse(golden(kind))
    own = parts_of(image)
    validate(image, ModelFacts(parts=own))
    others = [(*own, CacheFacts((64,), (64,))), own[1:], own[::-1]]
    for index, part in enumerate(own):
        others += [(*own[:index], other, *own[index + 1 :]) for other in _other_parts(part)]
    for parts in others:
        if parts != own:
            with pytest.raises(Inconsistent):
                validate(image, ModelFacts(parts=parts))


def _other_parts(part: CacheFacts | RecurrentFacts) -> list[CacheFacts | RecurrentFacts]:
    """Parts that differ from one in one thing."""
    if isinstance(part, RecurrentFacts):
        n, r, s = part.n_layers, part.r, part.s
        changed = [(n + 1, r, s), (n - 1, r, s), (n, r + 1, s), (n, r, s + 1)]
        return [RecurrentFacts(*one) for one in changed]
    k, v = part.k, part.v
    if not k:
        return [CacheFacts((64,), (64,))]
    wider = (*k[:-1], k[-1] + 32)
    more_v = (*v[:-1], v[-1] + 32) if v else k
    return [CacheFacts(k[1:], v[1:]), CacheFacts((*k, k[0]), (*v, *v[:1])), CacheFacts(wider, v), CacheFacts(k, more_v)]


def test_tokens_are_in_the_vocabulary() -> None:
    """A file that lists a token which the model does not have is another model's; media have none."""
    body = memory(Attention((cells(3),)))
    for tokens in ((1, 7, 3), (-1, 1, 3, 5, 6, 7, 0)):
        image = parse(sequence_file(body, 3, tokens))
        validate(image, ModelFacts(n_vocab=8))
        with pytest.raises(Inconsistent, match="less than 7, the size of the vocabulary"):
            validate(image, ModelFacts(n_vocab=7))


def test_parts_say_the_sections() -> None:
    """The kinds of sections and which of them hold V follow from the parts; one without layers may read either way."""
    facts = ModelFacts(parts=(CacheFacts((4, 4), (6, 6)), CacheFacts((4,)), CacheFacts(()), RecurrentFacts(2, 6, 10)))
    assert facts.sections == ("attention", "attention", "attention", "recurrent")
    assert facts.has_v == (True, False, True)
    assert ModelFacts(parts=()).sections == ()
    assert ModelFacts(sections=("attention",)).parts is None


def test_what_holds_nothing_shows_no_layers() -> None:
    """A state without cells agrees with every memory of its kinds."""
    validate(parse(context(Attention(((),)))), ModelFacts(parts=(CacheFacts((4, 5), (6, 7)),)))
    with pytest.raises(Inconsistent, match="sections"):
        validate(parse(context(Attention(((),)))), ModelFacts(parts=(CacheFacts((4,)), CacheFacts((4,)))))


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
