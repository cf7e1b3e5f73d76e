"""Taking cells out of streams and putting streams together: what every change of cells is made of.

Rows are gathered by cell, whatever their type, so nothing here changes a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from statecodec.cells import joined
from statecodec.errors import NotRepresentable
from statecodec.image import AttentionSection, Change, Content, KvStream, Section, StateImage
from statecodec.views import Cells, Columns, Rotation, Rows

Index = npt.NDArray[np.intp]
Rotations = Rotation | Sequence[Rotation] | None
"""Stated rotation blocks: one pair for all attention sections, or one for each."""

STATE_IT = "State it (rotation blocks of K and V, 0 for rows that are not rotated)."


def require_whole(image: StateImage, what: str) -> None:
    """Refuse to change what is not all there or not understood.

    Raises:
        NotRepresentable: the state is partial, stayed on the device, or is opaque.
    """
    if image.content is not Content.FULL:
        found = f"a state that is {image.content.value}"
        raise NotRepresentable(what, found, "a whole state", "Take the state again without flags.")
    if image.is_opaque:
        raise NotRepresentable(what, "a memory of a format of its own", "a changed state", "Read the tokens again.")


def changed(image: StateImage, sections: Sequence[Section], change: Change) -> StateImage:
    """The image with other sections and one change more."""
    return replace(image, sections=tuple(sections), changes=(*image.changes, change))


def each_stream(image: StateImage, edit: Callable[[int, KvStream], KvStream]) -> list[Section]:
    """The sections with every attention stream edited; the edit is given the number of the attention section."""
    sections: list[Section] = []
    number = 0
    for section in image.sections:
        if isinstance(section, AttentionSection):
            streams = tuple(None if stream is None else edit(number, stream) for stream in section.streams)
            sections.append(replace(section, streams=streams))
            number += 1
        else:
            sections.append(section)
    return sections


def rotation_of_section(rotations: Rotations, number: int) -> Rotation | None:
    """The rotation that was stated for one attention section."""
    if rotations is None or isinstance(rotations, Rotation):
        return rotations
    return rotations[number] if number < len(rotations) else None


def as_bytes(array: npt.NDArray[Any]) -> memoryview:
    """An array's bytes in C order, read-only."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data.toreadonly()


def cells_with(cells: Cells, seq_id: int) -> Index:
    """Indices of the cells that a sequence holds, ascending."""
    owners: Index = np.repeat(np.arange(len(cells)), cells.n_seq_id)
    held: Index = owners[cells.seq_ids == seq_id]
    return held


def take_cells(cells: Cells, index: Index, seq_ids: Sequence[int] | None = None) -> Cells:
    """Some cells, in the order of the index.

    Args:
        cells: the cells.
        index: which.
        seq_ids: the sequences that each one belongs to then; None: those that it belonged to.
    """
    if seq_ids is not None:
        counts = np.full(len(index), len(seq_ids), dtype="<u4")
        ids = np.tile(np.array(seq_ids, dtype="<i4"), len(index))
    else:
        counts = cells.n_seq_id[index]
        starts = (np.cumsum(cells.n_seq_id, dtype=np.int64) - cells.n_seq_id)[index]
        firsts = np.cumsum(counts, dtype=np.int64) - counts
        ids = cells.seq_ids[np.repeat(starts - firsts, counts) + np.arange(int(counts.sum()))]
    ext = None if cells.ext is None else joined([cells.ext[index]])
    return Cells(cells.offset, joined([cells.pos[index]]), joined([counts]), joined([ids]), ext)


def take(stream: KvStream, index: Index, seq_ids: Sequence[int] | None = None) -> KvStream:
    """Some cells of a stream with their rows, in the order of the index; see `take_cells`."""
    everything = len(index) == len(stream.cells) and bool(np.all(index == np.arange(len(index))))

    def rows(layer: Rows) -> Rows:
        return layer if everything else replace(layer, data=as_bytes(layer.raw()[index]))

    def columns(layer: Columns) -> Columns:
        return layer if everything else replace(layer, data=as_bytes(layer.values()[:, index]))

    cells = stream.cells if everything and seq_ids is None else take_cells(stream.cells, index, seq_ids)
    values = tuple(columns(layer) if isinstance(layer, Columns) else rows(layer) for layer in stream.values)
    # The tuple is of one kind throughout, as the stream's was.
    return replace(stream, cells=cells, keys=tuple(rows(layer) for layer in stream.keys), values=values)  # type: ignore[arg-type]


def join_cells(parts: Sequence[Cells]) -> Cells:
    """Cells one after the other."""
    exts = [part.ext for part in parts if part.ext is not None]
    return Cells(
        parts[0].offset,
        joined([part.pos for part in parts]),
        joined([part.n_seq_id for part in parts]),
        joined([part.seq_ids for part in parts]),
        joined(exts) if exts else None,
    )


def join_rows(parts: Sequence[Rows]) -> Rows:
    """Rows of one layer, one after the other."""
    return parts[0] if len(parts) == 1 else replace(parts[0], data=as_bytes(np.concatenate([p.raw() for p in parts])))


def join(streams: Sequence[KvStream]) -> KvStream:
    """Streams of one shape as one, cells one after the other.

    Raises:
        NotRepresentable: their layers, types or rotations differ.
    """
    first = streams[0]
    if len(streams) == 1:
        return first
    shapes = [stream.shape for stream in streams]
    for shape in shapes[1:]:
        if shape != shapes[0]:
            raise NotRepresentable("streams", f"{shapes[0]} and {shape}", "one stream", "Convert the types first.")
    values: list[Rows | Columns] = []
    for layers in zip(*(stream.values for stream in streams), strict=True):
        columns = [layer for layer in layers if isinstance(layer, Columns)]
        if columns:
            side_by_side = np.concatenate([layer.values() for layer in columns], axis=1)
            values.append(replace(columns[0], data=as_bytes(side_by_side)))
        else:
            values.append(join_rows([layer for layer in layers if isinstance(layer, Rows)]))
    keys = tuple(join_rows(layers) for layers in zip(*(stream.keys for stream in streams), strict=True))
    cells = join_cells([stream.cells for stream in streams])
    return replace(first, cells=cells, keys=keys, values=tuple(values))  # type: ignore[arg-type]
