"""Changes of which cells are where: streams, single sequences, other ids.

Cells and rows move, values never change: every change here is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from statecodec.errors import NotRepresentable, raises_bare
from statecodec.image import (
    AttentionSection,
    Change,
    KvStream,
    OpaqueSection,
    RecurrentLayer,
    RecurrentSection,
    Section,
    StateImage,
)
from statecodec.layouts import Form
from statecodec.regroup import (
    Index,
    as_bytes,
    cells_with,
    changed,
    join,
    join_cells,
    join_rows,
    require_whole,
    take,
    take_cells,
)
from statecodec.views import Rows


@raises_bare
def to_streams(image: StateImage, n_stream: int) -> StateImage:
    """Keep attention cells in one stream for all sequences (1), or in one for each.

    Args:
        image: a whole state, of a context or of one sequence.
        n_stream: streams of the target: 1 when unified, n_seq_max otherwise.

    Returns:
        The state with its cells so. Cells that several sequences share become one for each; they are not put together
        again on the way back. In one stream, cells stand in the order of the streams.

    Raises:
        NotRepresentable: a sequence has no stream in the target.
    """
    require_whole(image, "streams")
    highest = max(image.sequences(), default=0)
    if n_stream > 1 and highest >= n_stream:
        found, wanted = f"sequence {highest}", f"{n_stream} streams"
        raise NotRepresentable("streams", found, wanted, "Renumber the sequences or ask for more streams.")
    if all(len(cache.streams) == n_stream for cache in image.caches):
        return image
    own = image.source_seq_id or 0
    sections: list[Section] = []
    for section in image.sections:
        if not isinstance(section, AttentionSection):
            sections.append(section)
            continue
        held = [stream for _, stream in section.filled() if len(stream.cells)]
        streams: tuple[KvStream | None, ...]
        if n_stream == 1:
            streams = (join(held) if held else None,)
        elif image.form.is_sequence:
            streams = tuple(join(held) if held and index == own else None for index in range(n_stream))
        else:
            streams = tuple(_of_sequence(held, seq_id) for seq_id in range(n_stream))
        sections.append(replace(section, streams=streams, is_streamed=True))
    what = "one stream for all sequences" if n_stream == 1 else f"a stream for each of {n_stream} sequences"
    return changed(image, sections, Change(what))


def _of_sequence(streams: Sequence[KvStream], seq_id: int) -> KvStream | None:
    """The cells of one sequence, from wherever they are, as its own."""
    parts = [(stream, cells_with(stream.cells, seq_id)) for stream in streams]
    found = [take(stream, index, (seq_id,)) for stream, index in parts if len(index)]
    return join(found) if found else None


def _take_recurrent(section: RecurrentSection, index: Index, seq_ids: Sequence[int] | None) -> RecurrentSection:
    """Some cells of a recurrent memory with their rows."""

    def rows(layer: Rows) -> Rows:
        return replace(layer, data=as_bytes(layer.raw()[index])) if layer.row_bytes else layer

    layers = tuple(
        RecurrentLayer(rows(layer.r), None if layer.history is None else rows(layer.history), rows(layer.s))
        for layer in section.layers
    )
    return replace(section, cells=take_cells(section.cells, index, seq_ids), layers=layers)


@raises_bare
def extract(image: StateImage, seq_id: int, *, as_id: int | None = None) -> StateImage:
    """One sequence of a context as a sequence blob.

    Args:
        image: the whole state of a context.
        seq_id: the sequence.
        as_id: the id that it gets; its own unless said.

    Returns:
        A sequence state of the same layouts; cells outside a sliding window, which the library leaves out, stay in.

    Raises:
        NotRepresentable: the state is not of a context, or has no such sequence, or no stream for the new id.
    """
    require_whole(image, "a sequence")
    own = seq_id if as_id is None else as_id
    if image.form.is_sequence:
        raise NotRepresentable("a sequence", "a sequence state", "one taken from it", "It already is one: renumber it.")
    if seq_id not in image.sequences():
        raise NotRepresentable(
            "a sequence", f"sequence {seq_id}", f"a state of {sorted(image.sequences())}", "Take one."
        )
    sections: list[Section] = []
    for section in image.sections:
        if isinstance(section, AttentionSection):
            n_stream = len(section.streams)
            if n_stream > 1 and own >= n_stream:
                raise NotRepresentable("a sequence", f"id {own}", f"{n_stream} streams", "Choose a lower id.")
            found = _of_sequence([stream for _, stream in section.filled()], seq_id)
            if found is not None:
                everything = np.arange(len(found.cells))
                found = replace(found, cells=take_cells(found.cells, everything, (own,)))
            place = own if n_stream > 1 else 0
            streams = tuple(found if index == place else None for index in range(n_stream))
            sections.append(replace(section, streams=streams))
        elif isinstance(section, RecurrentSection):  # pragma: no branch - opaque ones were refused before
            sections.append(_take_recurrent(section, cells_with(section.cells, seq_id), ()))
    named = [layout for layout in image.layouts if layout.sequence_cell_ids]
    prefixed = any(True in layout.prefixes for layout in named)
    taken = replace(
        image,
        form=Form.SEQUENCE,
        layouts=frozenset(layout for layout in named if prefixed in layout.prefixes),
        architecture=None,
        outputs=None,
        tokens=None,
        version_word=None,
        source_seq_id=own if prefixed else None,
    )
    return changed(taken, sections, Change(f"sequence {seq_id} taken out"))


@raises_bare
def merge(states: Mapping[int, StateImage], *, architecture: str, n_stream: int = 1) -> StateImage:
    """Sequence states as one context state.

    Args:
        states: sequence id in the context -> whole state of one sequence.
        architecture: the name that a context blob begins with, which sequence states do not hold.
        n_stream: streams of the context: 1 when unified, n_seq_max otherwise.

    Returns:
        The context's state, of the layouts that all of them have.

    Raises:
        NotRepresentable: there is none, they are not sequences, or of different models, types or layouts.
    """
    images = list(states.values())
    if not images or not all(image.form.is_sequence for image in images):
        raise NotRepresentable("a context", "no or other states", "a merge of sequences", "Give sequence states.")
    for image in images:
        require_whole(image, "a context")
    # Contexts with outputs need the results of a decode, which no sequence state holds.
    shared = frozenset.intersection(*(image.layouts for image in images))
    layouts = frozenset(layout for layout in shared if not layout.has_outputs)
    kinds = {tuple(section.kind for section in image.sections) for image in images}
    if not layouts or len(kinds) != 1:
        raise NotRepresentable("a context", "sequences of different layouts", "one context", "Convert versions first.")
    highest = max(states)
    if n_stream > 1 and highest >= n_stream:
        raise NotRepresentable("a context", f"sequence {highest}", f"{n_stream} streams", "Ask for more streams.")
    sections = [
        _merged_section([(seq_id, image.sections[number]) for seq_id, image in sorted(states.items())], n_stream)
        for number in range(len(images[0].sections))
    ]
    context = replace(
        images[0],
        form=Form.CONTEXT,
        architecture=architecture,
        layouts=layouts,
        tokens=None,
        version_word=None,
        source_seq_id=None,
    )
    return changed(context, sections, Change(f"{len(images)} sequences put together"))


def _merged_section(parts: Sequence[tuple[int, Section]], n_stream: int) -> Section:
    """One section of a context from the same section of each sequence."""
    first = parts[0][1]
    if isinstance(first, AttentionSection):
        by_id: dict[int, KvStream] = {}
        for seq_id, section in parts:
            held = [stream for _, stream in section.filled()] if isinstance(section, AttentionSection) else []
            if held:
                whole = join(held)
                by_id[seq_id] = replace(whole, cells=take_cells(whole.cells, np.arange(len(whole.cells)), (seq_id,)))
        if n_stream > 1:
            streams = tuple(by_id.get(seq_id) for seq_id in range(n_stream))
        else:
            streams = (join(list(by_id.values())) if by_id else None,)
        return replace(first, streams=streams, is_streamed=True)
    own = [
        _take_recurrent(section, np.arange(len(section.cells)), (seq_id,))
        for seq_id, section in parts
        if isinstance(section, RecurrentSection)
    ]
    return _joined_recurrent(own)


def _joined_recurrent(parts: Sequence[RecurrentSection]) -> RecurrentSection:
    shapes = {tuple((layer.r.row_bytes, layer.s.row_bytes) for layer in part.layers) for part in parts}
    if len(shapes) != 1:
        raise NotRepresentable("a context", "recurrent layers of different sizes", "one memory", "Use one model.")
    layers: list[RecurrentLayer] = []
    for same in zip(*(part.layers for part in parts), strict=True):
        histories = [layer.history for layer in same if layer.history is not None]
        layers.append(
            RecurrentLayer(
                join_rows([layer.r for layer in same]),
                join_rows(histories) if histories else None,
                join_rows([layer.s for layer in same]),
            )
        )
    return replace(parts[0], cells=join_cells([part.cells for part in parts]), layers=tuple(layers))


@raises_bare
def renumber(image: StateImage, ids: Mapping[int, int]) -> StateImage:
    """Give sequences other ids.

    Args:
        image: a whole state.
        ids: old id -> new id; the others keep theirs.

    Returns:
        The state with these ids; where each sequence has a stream, streams move with their ids.

    Raises:
        NotRepresentable: two sequences would get one id, or one has no stream.
    """
    require_whole(image, "sequence ids")
    new = {seq_id: ids.get(seq_id, seq_id) for seq_id in image.sequences()}
    if len(set(new.values())) != len(new) or any(not 0 <= seq_id < 256 for seq_id in new.values()):
        raise NotRepresentable("sequence ids", dict(new), "distinct ids from 0 to 255", "Choose others.")
    if image.form.is_sequence:
        own = next(iter(new.values()), 0)
        moved = [_moved(section, dict.fromkeys(range(256), own)) for section in image.sections]
        source = None if image.source_seq_id is None else own
        return changed(replace(image, source_seq_id=source), moved, Change(f"sequence renamed to {own}"))
    moved = [_moved(section, new) for section in image.sections]
    return changed(image, moved, Change(f"sequences renumbered {new}"))


def _moved(section: Section, new: Mapping[int, int]) -> Section:
    """A section with other sequence ids."""
    table = np.arange(256, dtype="<i4")
    for old, other in new.items():
        table[old] = other
    if isinstance(section, AttentionSection):
        streams: list[KvStream | None] = [None] * len(section.streams)
        for index, stream in section.filled():
            place = index if len(streams) == 1 else int(table[index])
            if place >= len(streams):
                raise NotRepresentable("sequence ids", f"id {place}", f"{len(streams)} streams", "Choose a lower id.")
            streams[place] = replace(stream, cells=replace(stream.cells, seq_ids=_ascending(stream, table)))
        return replace(section, streams=tuple(streams))
    if isinstance(section, OpaqueSection):  # pragma: no cover - refused before; it shows the type checker the rest
        return section
    return replace(section, cells=replace(section.cells, seq_ids=table[section.cells.seq_ids]))


def _ascending(
    stream: KvStream, table: np.ndarray[tuple[int], np.dtype[np.int32]]
) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """New ids of all cells, ascending inside each cell as the library writes them."""
    ids = table[stream.cells.seq_ids]
    owners = np.repeat(np.arange(len(stream.cells)), stream.cells.n_seq_id)
    return ids[np.lexsort((ids, owners))]
