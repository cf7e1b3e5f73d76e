"""What can be kept of a state whose end is missing or that has bytes behind its end.

Laws:
1. Only what is whole is kept: a cell with its rows of every layer and section, a sequence with every cell before its
   end. Values never change.
2. Rows of one layer after the other means that a cut nearly always takes rows of all cells. Whole are then only: the
   streams before the one that is cut (one for each sequence), and of a stream that is cut in its very last layer the
   cells whose rows are still there (not with transposed V, which holds one value of all cells after the other).
3. Which sections a memory has is not in the bytes, so without that fact nobody can tell whether one is missing.
4. A recurrent memory, and a window that has forgotten the start, cannot be taken back to an earlier token.
5. Where other damage begins cannot be told from the bytes: nothing is kept then but the token list before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from statecodec.convert_length import cut, first_position
from statecodec.cursor import Cursor, view
from statecodec.envelope import LIST_OFFSET, Envelope, envelopes, listed_tokens, read_outputs
from statecodec.errors import (
    Ambiguous,
    NotRepresentable,
    StateFormatError,
    TrailingBytes,
    Truncated,
    bare,
    raises_bare,
)
from statecodec.facts import NO_FACTS, ModelFacts
from statecodec.image import AttentionSection, Change, Content, KvStream, Section, StateImage, Tokens
from statecodec.layouts import LAYOUTS, Grammar, Layout, SectionKind, grammars
from statecodec.limits import DEFAULT_LIMITS, Limits
from statecodec.parse import Meaning, has_word, keep, parse
from statecodec.regroup import cells_with, changed
from statecodec.sections import Attempt, Failures, read_attention
from statecodec.validate import check_facts, check_laws
from statecodec.views import Columns, Rows

if TYPE_CHECKING:
    # collections.abc.Buffer exists from Python 3.12 on; the type checker knows it under this name everywhere.
    from typing_extensions import Buffer

_NO_FACTS = (
    "which sections the memory has is not in the bytes, so nobody can tell whether one is missing: say it (facts "
    "sections, from the model's file)"
)
_NO_CUT = "the damage is no missing end, and where such damage begins cannot be told from the bytes"
_NO_CELL = "no cell has its rows of every layer any more"


@dataclass(frozen=True, slots=True, eq=False)
class Salvage:
    """What is sound of a state.

    Args:
        image: the state without its damaged tail, or the very state where nothing is damaged; None where nothing of
            the memory can be kept.
        tokens: a file's token list, or as much as there is of a plain one; to be read again where there is no image.
        damage: what is wrong; None where nothing is.
        reason: why there is no image, as one phrase; empty where there is one.
    """

    image: StateImage | None
    tokens: Tokens | None
    damage: StateFormatError | None = None
    reason: str = ""

    @property
    def has_all_tokens(self) -> bool:
        """Whether there is a token list and the damage is behind it."""
        # Damage in a list is told at its count or at its place.
        ends = 0 if self.tokens is None else LIST_OFFSET + self.tokens.words.nbytes
        return self.tokens is not None and (self.damage is None or self.damage.offset >= ends)


@raises_bare
def salvage(buffer: Buffer, *, facts: ModelFacts | None = None, limits: Limits = DEFAULT_LIMITS) -> Salvage:
    """Keep what is sound of a state whose tail is missing or damaged.

    Args:
        buffer: the bytes, as for `parse`.
        facts: what is known of the model and context; nothing of a damaged memory is kept without `sections`.
        limits: upper bounds.

    Returns:
        What can be kept, and why that is not more. An image says in `changes` what went.

    Raises:
        Ambiguous: the bytes are sound in several ways.

    Lifetime:
        Image and tokens borrow `buffer`; see `image`.
    """
    known = NO_FACTS if facts is None else facts
    data = view(buffer)
    try:
        image = parse(data, facts=known, limits=limits)
    except Ambiguous:
        raise
    except StateFormatError as error:
        damage = bare(error)
    else:
        return Salvage(image, image.tokens)
    tokens = listed_tokens(Cursor(data), limits)
    if known.sections is None:
        return Salvage(None, tokens, damage, _NO_FACTS)
    found = _without_tail(data, damage, known, limits)
    if found is None:
        found = _without_cut(data, known, limits)
    if found is not None:
        return Salvage(found, tokens, damage)
    return Salvage(None, tokens, damage, _NO_CELL if isinstance(damage, Truncated) else _NO_CUT)


def _without_tail(data: memoryview, damage: StateFormatError, facts: ModelFacts, limits: Limits) -> StateImage | None:
    """The state before the bytes that stand behind it."""
    if not isinstance(damage, TrailingBytes):
        return None
    try:
        image = parse(Cursor(data).span(damage.offset, "the state"), facts=facts, limits=limits)
    except StateFormatError:
        return None
    # What looks like a partial state is a whole one that lacks its other sections, and an empty cache is no cache that
    # was saved: those words are the beginning of something else.
    if image.content is not Content.FULL or (image.sections and not image.is_opaque and not image.sequences()):
        return None
    return changed(image, image.sections, Change(f"{len(data) - damage.offset} bytes behind the end dropped"))


def _without_cut(data: memoryview, facts: ModelFacts, limits: Limits) -> StateImage | None:
    """What is whole of a state that ends too early, where there is one such meaning."""
    kinds = tuple(SectionKind(kind) for kind in facts.sections or ())
    if set(kinds) != {SectionKind.ATTENTION}:
        return None
    found: dict[Meaning, StateImage] = {}
    try:
        for envelope in envelopes(Cursor(data), limits, Failures()):
            own = tuple(layout for layout in LAYOUTS if has_word(layout, envelope))
            ways = grammars(own, facts, envelope.form, prefixed=envelope.source_seq_id is not None)
            for grammar, members in ways.items():
                for image in _readings(grammar, members, envelope, facts, limits):
                    keep(found, image)
    except StateFormatError:
        return None
    return next(iter(found.values())) if len(found) == 1 else None


def _readings(
    grammar: Grammar, layouts: frozenset[Layout], envelope: Envelope, facts: ModelFacts, limits: Limits
) -> Iterator[StateImage]:
    """Every state that is kept under one grammar: all sections but the last must be whole."""
    kinds = tuple(SectionKind(kind) for kind in facts.sections or ())
    cursor = envelope.cursor.fork()
    attempt = Attempt(grammar, limits, (kinds,), Failures(), has_v=facts.has_v)
    try:
        outputs = read_outputs(cursor, limits) if grammar.has_outputs else None
    except StateFormatError:
        return
    for before, place in _whole_sections(attempt, cursor, kinds[:-1]):
        index = len(before)
        # Where V is cut off nothing shows that there was one, so caches without V have to be told.
        has_v = (True,) * index + (facts.has_v[index : index + 1] or (True,))
        last = replace(attempt, clips=True, has_v=has_v)
        for section, after in read_attention(last, place, kinds[:-1]):
            if after.remaining and not last.lost:
                continue
            image = envelope.around((*before, section), layouts, outputs)
            try:
                kept = _kept(image, section, last.lost)
                check_laws(kept)
                check_facts(kept, facts)
            except (NotRepresentable, StateFormatError):
                continue
            if kept.sequences():
                yield kept


def _whole_sections(
    attempt: Attempt, cursor: Cursor, kinds: tuple[SectionKind, ...], done: tuple[Section, ...] = ()
) -> Iterator[tuple[tuple[Section, ...], Cursor]]:
    """Every way to read the sections before the last one, and the place behind them."""
    if len(done) == len(kinds):
        yield done, cursor
        return
    for section, after in read_attention(attempt, cursor, kinds[: len(done)]):
        yield from _whole_sections(attempt, after, kinds, (*done, section))


def _kept(image: StateImage, last: AttentionSection, lost: range) -> StateImage:
    """The state without every cell that is not whole, and without what stands behind such a cell in its sequence.

    Args:
        image: the state, with what is left of its last section.
        last: that section; rows of its last layer may be short.
        lost: its streams that are not there.
    """
    ends: dict[int, int] = {}
    for seq_id, span in image.sequences().items():
        starts = {first_position(image, cache, seq_id) for cache in image.caches} - {None}
        broken = _first_broken(image, last, seq_id)
        if _is_missing(image, last, lost, seq_id) or (broken is not None and len(starts) > 1):
            ends[seq_id] = span.pos_min
        else:
            ends[seq_id] = span.pos_max + 1 if broken is None else broken
    whole = replace(last, streams=tuple(None if stream is None else _clipped(stream) for stream in last.streams))
    clipped = replace(image, sections=(*image.sections[:-1], whole))
    held = clipped.sequences()
    change = Change("a damaged tail dropped", warnings=tuple(_warnings(image, ends, lost)))
    return cut(clipped, {seq_id: end for seq_id, end in ends.items() if seq_id in held}, change)


def _warnings(image: StateImage, ends: Mapping[int, int], lost: range) -> Iterator[str]:
    for seq_id, span in image.sequences().items():
        if ends[seq_id] == span.pos_min:
            yield f"sequence {seq_id} is not whole and gone"
        elif ends[seq_id] <= span.pos_max:
            yield f"sequence {seq_id} ends before position {ends[seq_id]} now"
    if lost and not image.form.is_sequence:
        yield f"what streams {lost.start} to {lost.stop - 1} held is missing"


def _is_missing(image: StateImage, last: AttentionSection, lost: range, seq_id: int) -> bool:
    """Whether the last section lacks all of a sequence; other streams than its own are empty in a sequence blob."""
    if len(last.streams) == 1 or image.form.is_sequence:
        return bool(lost) and not any(last.streams)
    return seq_id in lost


def _first_broken(image: StateImage, last: AttentionSection, seq_id: int) -> int | None:
    """The first position of a sequence whose cell lacks a row, or None where all are whole."""
    broken: list[int] = []
    for _, stream in last.filled():
        cells = stream.cells
        own = np.arange(len(cells)) if image.form.is_sequence else cells_with(cells, seq_id)
        broken += cells.pos[own[own >= _n_whole(stream)]].tolist()
    return min(broken, default=None)


def _n_whole(stream: KvStream) -> int:
    """Cells, from the first on, that have their rows in the last layer, which alone can be short."""
    layers: tuple[Rows | Columns, ...] = (*stream.keys, *stream.values)
    if not layers:
        return len(stream.cells)
    layer = layers[-1]
    if isinstance(layer, Columns):
        is_whole = len(layer.data) == layer.row_bytes * len(stream.cells)
        return len(stream.cells) if is_whole else 0
    return len(layer.data) // layer.row_bytes


def _clipped(stream: KvStream) -> KvStream | None:
    """The stream with whole rows alone in its last layer; the cells are still those of all layers."""
    n_whole = _n_whole(stream)
    if n_whole == len(stream.cells):
        return stream
    if not n_whole:
        return None

    def whole(layers: tuple[Rows, ...]) -> tuple[Rows, ...]:
        *others, layer = layers
        data = Cursor(layer.data).span(n_whole * layer.row_bytes, "whole rows")
        return (*others, replace(layer, data=data))

    values = tuple(layer for layer in stream.values if isinstance(layer, Rows))
    if values:
        return replace(stream, values=whole(values))
    return replace(stream, keys=whole(stream.keys))
