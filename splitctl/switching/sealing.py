"""What a sealed state is, and the check that its bytes say what the session says. Reads bytes, touches no library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import statecodec
from splitctl.engine.live import LiveSession
from splitctl.model.facts import ModelFacts
from splitctl.switching import tables
from splitctl.switching.state_facts import state_facts


@dataclass(frozen=True, slots=True)
class SealedState:
    """A saved state that has been parsed, checked against the session and checksummed.

    Args:
        view: its bytes, in an arena.
        arena: which of the session's arenas; None for a model without a memory.
        digest: their checksum (`splitctl.carry.digest`), bytes[16].
        positions: sequence id -> first and last position when it was saved.
        n_tokens: tokens of all sequences.
        n_sequences: sequences that hold anything.
        version: newest session version that the bytes can be read as; 0 for a model without a memory.
        is_foreign: it was sealed again during a trial, in the layout of the target and not of the old placement.
    """

    view: memoryview
    arena: int | None
    digest: bytes
    positions: Mapping[int, tuple[int, int]]
    n_tokens: int
    n_sequences: int
    version: int = 0
    is_foreign: bool = False


def contradictions(live: LiveSession, view: memoryview, wanted: Mapping[int, int]) -> tuple[str, int]:
    """Say how the state of all sequences and the session disagree.

    Args:
        live: the session's parts.
        view: the state.
        wanted: sequence id -> last position, for every sequence that the memory holds.

    Returns:
        A phrase, "" where they agree; and the newest session version that the bytes can be read as.

    Raises:
        statecodec.StateFormatError: the bytes do not parse.
    """
    image = read(live, view)
    version = max(image.versions, default=0)
    if image.is_opaque:
        return "", version
    saved = {seq_id: span.pos_max for seq_id, span in image.sequences().items()}
    if saved != wanted:
        return f"the saved bytes hold last positions {saved}, the session counts {wanted}", version
    wrong = _missing_cells(image, wanted)
    number = tables.build_number(live.engine.library.version)
    is_known = tables.has_seen_memory(live.facts.architecture, number, is_plain=_is_plain(live.facts))
    if wanted and not wrong and is_known:
        wrong = other_memory(image, live.facts)
    return wrong, version


def read(live: LiveSession, view: memoryview) -> statecodec.StateImage:
    """Read a state as the one before it was read; in every way that there is where it was the first, or is not so.

    Most of a full reading's time goes into ways that one model on one build never takes.

    Raises:
        statecodec.StateFormatError: the bytes do not parse.
    """
    facts = statecodec.ModelFacts(
        architecture=live.facts.architecture,
        n_layer=live.facts.n_layer,
        n_seq_max=live.placement.n_seq_max,
        n_ctx=live.engine.live_context.n_ctx,
    )
    if live.state_shape is not None:
        versions, sections, has_ext, has_v = live.state_shape
        narrow = replace(facts, versions=versions, sections=sections, has_ext=has_ext, has_v=has_v)
        try:
            return statecodec.parse(view, facts=narrow)
        except statecodec.StateFormatError:
            live.state_shape = None
    image = statecodec.parse(view, facts=facts)
    if image.sequences():
        attention = image.caches
        live.state_shape = (
            image.versions,
            tuple(section.kind.value for section in image.sections),
            any(one.ext_bytes for one in attention) if attention and image.sections[0] is attention[0] else None,
            tuple(any(stream.values for _, stream in one.filled()) for one in attention if one.n_layers),
        )
    return image


def _missing_cells(image: statecodec.StateImage, wanted: Mapping[int, int]) -> str:
    """Hold the first section, which is the whole of a sequence (windows and indexers follow it), cell by cell."""
    first = image.sections[0] if image.sections else None
    if not isinstance(first, statecodec.AttentionSection):
        return ""
    cells = {seq_id: (span.n_cells, span.pos_min) for seq_id, span in first.sequences().items()}
    whole = {seq_id: (last + 1, 0) for seq_id, last in wanted.items()}
    return "" if cells == whole else f"the saved bytes hold (cells, first position) {cells}, the session counts {whole}"


def _is_plain(facts: ModelFacts) -> bool:
    """Tell whether the memory is one cache of keys and values."""
    return not (facts.is_recurrent or facts.is_hybrid or facts.n_swa or facts.is_mla or facts.n_embd_indexer)


def other_memory(image: statecodec.StateImage, facts: ModelFacts) -> str:
    """Hold every section, its layers and the widths of their rows against the model's header.

    Returns:
        A phrase, "" where they agree.
    """
    wrong = ""
    for known in state_facts(facts):
        try:
            statecodec.validate(image, known)
        except statecodec.StateFormatError as error:
            found = f"{error.field} is {error.found}, by the model's header {error.expected}"
            wrong = wrong or f"the saved bytes are no whole memory of the model: {found}"
        else:
            return ""
    return wrong
