"""What a model's file says about the states of its contexts: only what every build agrees on."""

from __future__ import annotations

from dataclasses import replace

import statecodec
from splitctl.model.facts import ModelFacts

#: Its n-gram heads give every cell an extra record, though a position is one number.
_WITH_RECORD = frozenset({"qwen4exp"})
#: It has no memory to speak of, but the library gives it a cache, whose cells a state then lists.
_WITH_IDLE_CACHE = frozenset({"t5encoder"})


def codec_facts(facts: ModelFacts) -> statecodec.ModelFacts:
    """Say in the codec's terms what a model's header promises of every state, to read it by and to check it against.

    What builds differ in (which layers a sliding window has, whether M-RoPE cells carry a record) is left open.
    """
    sections: tuple[str, ...] | None = None
    if not facts.has_memory:
        sections = None if facts.architecture in _WITH_IDLE_CACHE else ()
    elif facts.is_recurrent:
        sections = ("recurrent",)
    has_sections_of_rope = any(key.endswith(".rope.dimension_sections") for key, _ in facts.rope)
    is_plain = not has_sections_of_rope and facts.architecture not in _WITH_RECORD
    return statecodec.ModelFacts(
        architecture=facts.architecture,
        sections=sections,
        # The file of an encoder-decoder counts the layers of its encoder.
        n_layer=None if facts.is_encoder_decoder else facts.n_layer,
        has_ext=False if is_plain else None,
        n_recurrent=facts.recurrence.n_layers if facts.is_recurrent and facts.recurrence else None,
        n_vocab=facts.n_vocab or None,
    )


def repair_facts(facts: ModelFacts) -> statecodec.ModelFacts:
    """Add which parts the memory has, where the header tells, so that a missing one is not overlooked.

    A sliding window counts as a part of its own, though builds of early 2025 had none and a few architectures do not
    use theirs: of their damaged states then nothing is kept, which is never wrong.
    """
    known = codec_facts(facts)
    if known.sections is not None or facts.is_mla or facts.n_embd_indexer or facts.is_encoder_decoder:
        return known
    if facts.is_hybrid:
        # Which of a hybrid's attention layers have a window is not in every header.
        return known if facts.n_swa else replace(known, sections=("attention", "recurrent"))
    sections = ("attention", "attention") if facts.n_swa else ("attention",)
    return replace(known, sections=sections, has_v=(True,) * len(sections))


def facts_of_rows(facts: ModelFacts, image: statecodec.StateImage) -> statecodec.ModelFacts:
    """Add the widths of K and V rows, where the state has one plain cache of every layer that the header describes."""
    known = codec_facts(facts)
    heads = [count for count in facts.n_head_kv if count]
    special = facts.is_mla or facts.n_embd_indexer or facts.n_swa or facts.is_hybrid or facts.is_encoder_decoder
    is_extended = any(".nextn." in tensor.name for tensor in facts.tensors)
    if special or is_extended or len(image.sections) != 1 or not image.caches or not image.caches[0].n_cells:
        return known
    return replace(
        known,
        n_embd_k=tuple(count * facts.n_embd_head_k for count in heads),
        n_embd_v=tuple(count * facts.n_embd_head_v for count in heads),
    )
