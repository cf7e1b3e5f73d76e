"""What a sealed state is, and the check that its bytes say what the session says. Reads bytes, touches no library.

A state is sealed in one piece, or sequence by sequence (`Part`); then the parts are put together for the check.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import statecodec
from splitctl.carry.digest import Digest
from splitctl.carry.seal import Segment, merged
from splitctl.engine.live import LiveSession
from splitctl.errors import CarryDamaged, StateUnsound
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
        segments: the state sequence by sequence, in place of one view.
    """

    view: memoryview
    arena: int | None
    digest: bytes
    positions: Mapping[int, tuple[int, int]]
    n_tokens: int
    n_sequences: int
    version: int = 0
    is_foreign: bool = False
    segments: tuple[Segment, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """The state of one sequence in an arena: parsed, and being checksummed.

    Args:
        seq_id: the sequence.
        offset: where it begins, bytes from the arena's start.
        n_bytes: its length.
        image: what it says; it borrows the arena.
        checksum: of its bytes, once it is done.
    """

    seq_id: int
    offset: int
    n_bytes: int
    image: statecodec.StateImage
    checksum: Digest

    def segment(self) -> Segment:
        """Say where it lies; waits for its checksum."""
        return Segment(self.seq_id, self.offset, self.n_bytes, self.checksum.result().hex())


def part(live: LiveSession, seq_id: int, offset: int, view: memoryview) -> Part:
    """Parse the state of one sequence and begin its checksum; raises StateUnsound."""
    checksum = Digest(view)
    try:
        image = statecodec.parse(view, facts=_narrow(live, _facts(live)))
    except statecodec.StateFormatError as error:
        checksum.result()
        raise StateUnsound(f"the saved state of sequence {seq_id} does not parse: {error}") from error
    return Part(seq_id, offset, len(view), image, checksum)


def agreed(live: LiveSession, parts: Mapping[int, Part], wanted: Mapping[int, int], n_bytes: int) -> int:
    """Hold the parts together against the session, as `contradictions` does a state.

    Args:
        live: the session's parts.
        parts: the states of all sequences, by id.
        wanted: as for `contradictions`.
        n_bytes: what the library says that the state of all takes: what belongs to no sequence alone is missed by it.

    Returns:
        The newest session version that they can be read as.

    Raises:
        StateUnsound: they disagree.
    """
    try:
        image = merged(
            {seq_id: one.image for seq_id, one in parts.items()}, live.facts.architecture, live.placement.n_streams
        )
    except CarryDamaged as error:
        raise StateUnsound(str(error)) from error
    wrong, version = _contradictions(live, image, wanted)
    found = sum(len(chunk) for chunk in statecodec.emit(image))
    if not wrong and found != n_bytes:
        wrong = f"the states of its sequences come to {found} bytes, that of all to {n_bytes}"
    if wrong:
        raise StateUnsound(wrong)
    return version


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
    return _contradictions(live, read(live, view), wanted)


def _contradictions(live: LiveSession, image: statecodec.StateImage, wanted: Mapping[int, int]) -> tuple[str, int]:
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
    facts = _facts(live)
    if live.state_shape is not None:
        try:
            return statecodec.parse(view, facts=_narrow(live, facts))
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


def _facts(live: LiveSession) -> statecodec.ModelFacts:
    return statecodec.ModelFacts(
        architecture=live.facts.architecture,
        n_layer=live.facts.n_layer,
        n_seq_max=live.placement.n_seq_max,
        n_ctx=live.engine.live_context.n_ctx,
    )


def _narrow(live: LiveSession, facts: statecodec.ModelFacts) -> statecodec.ModelFacts:
    """Leave the one way to read a state that the last one was read in, if there was one."""
    if live.state_shape is None:
        return facts
    versions, sections, has_ext, has_v = live.state_shape
    return replace(facts, versions=versions, sections=sections, has_ext=has_ext, has_v=has_v)


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
