"""A state as frozen views: what the bytes mean, without a copy of any tensor.

Lifetime:
    Every `memoryview` and array here borrows the buffer that was parsed. They are read-only; the buffer's owner must
    leave it unchanged (and mapped) as long as the image or anything taken from it is in use.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from statecodec.layouts import Form, Layout, SectionKind
from statecodec.tensor_types import TYPE_TABLE
from statecodec.views import Cells, Columns, Rotation, Rows, Span, merge_spans


class Content(enum.Enum):
    """How much of a memory the bytes hold."""

    FULL = "full"
    PARTIAL = "partial"
    ON_DEVICE = "on device"


@dataclass(frozen=True, slots=True, eq=False)
class KvStream:
    """One stream of an attention section.

    Args:
        offset: where the stream's cell count stands, in bytes from the start of the buffer.
        cells: its cells.
        v_trans: whether V is stored transposed (the word is written also when there is no V).
        rotation: what the bytes say about rotation; None where this layout does not say.
        keys: K by layer ordinal (layers without a cache are not counted).
        values: V by layer ordinal; empty for MLA.
    """

    offset: int
    cells: Cells
    v_trans: bool
    rotation: Rotation | None
    keys: tuple[Rows, ...]
    values: tuple[Rows, ...] | tuple[Columns, ...]

    @property
    def is_quantized(self) -> bool:
        """Whether rows of a layer are of a quantized type, which is what builds rotate."""
        return any(TYPE_TABLE[layer.kind].is_quantized for layer in (*self.keys, *self.values))

    @property
    def shape(self) -> tuple[object, ...]:
        """What every stream of a section must have in common."""
        keys = tuple((rows.kind.name, rows.row_bytes) for rows in self.keys)
        values = tuple((layer.kind.name, layer.n_values) for layer in self.values)
        return (self.v_trans, self.rotation, keys, values)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSection:
    """An attention cache: the main one, a sliding window, or an indexer (alike in bytes).

    Args:
        offset: where the section starts, in bytes from the start of the buffer.
        ext_bytes: bytes of each cell's extra record; 0 also where there is no cell to show it.
        streams: the streams by index; None for one that holds no cells.
        is_streamed: whether a count of streams is written; oldest layouts have one stream and no count.
    """

    offset: int
    ext_bytes: int
    streams: tuple[KvStream | None, ...]
    is_streamed: bool = True

    @property
    def kind(self) -> SectionKind:
        """Attention."""
        return SectionKind.ATTENTION

    def filled(self) -> Iterator[tuple[int, KvStream]]:
        """The streams that are written out, with their index; they hold cells, except in the oldest layouts."""
        for index, stream in enumerate(self.streams):
            if stream is not None:
                yield index, stream

    @property
    def n_cells(self) -> int:
        """Cells over all streams."""
        return sum(len(stream.cells) for _, stream in self.filled())

    @property
    def n_layers(self) -> int | None:
        """Layers with a cache here, or None where no stream holds a cell (nothing then says)."""
        return next((len(stream.keys) for _, stream in self.filled()), None)

    def sequences(self) -> dict[int, Span]:
        """Cell count and first and last position of every sequence in this section, by ascending id."""
        return merge_spans(stream.cells.sequences() for _, stream in self.filled())

    def positions(self) -> npt.NDArray[np.int32]:
        """Positions of the cells of all streams, one stream after the other; int32, shape [n_cells]."""
        return np.concatenate([stream.cells.pos for _, stream in self.filled()] or [np.empty(0, dtype="<i4")])


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentLayer:
    """One recurrent layer.

    Args:
        r: its R rows (convolution state or token shift).
        history: rows of the second history, or None.
        s: its S rows (state).
    """

    r: Rows
    history: Rows | None
    s: Rows


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentSection:
    """A recurrent memory: one cell a sequence.

    Args:
        offset: where the section starts, in bytes from the start of the buffer.
        cells: its cells.
        n_layer: layers of the model, those without recurrence counted too.
        layers: the layers that have a recurrent state, in order.
    """

    offset: int
    cells: Cells
    n_layer: int
    layers: tuple[RecurrentLayer, ...]

    @property
    def kind(self) -> SectionKind:
        """Recurrent."""
        return SectionKind.RECURRENT

    @property
    def n_cells(self) -> int:
        """Cells here."""
        return len(self.cells)

    @property
    def n_layers(self) -> int:
        """Layers that have a recurrent state."""
        return len(self.layers)

    def sequences(self) -> dict[int, Span]:
        """Cell count and position of every sequence here, by ascending id."""
        return self.cells.sequences()

    def positions(self) -> npt.NDArray[np.int32]:
        """Positions of the cells; int32, shape [n_cells]."""
        return self.cells.pos


@dataclass(frozen=True, slots=True, eq=False)
class OpaqueSection:
    """A memory with a format of its own, carried whole.

    Args:
        offset: where it starts, in bytes from the start of the buffer.
        name: what its magic stands for.
        data: all of it, the magic included.
    """

    offset: int
    name: str
    data: memoryview

    @property
    def kind(self) -> SectionKind:
        """Opaque."""
        return SectionKind.OPAQUE

    @property
    def n_cells(self) -> None:
        """Not known."""
        return

    @property
    def n_layers(self) -> None:
        """Not known."""
        return

    def sequences(self) -> dict[int, Span]:
        """Not known: always empty."""
        return {}


Section = AttentionSection | RecurrentSection | OpaqueSection


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """What contexts of 2025 wrote before the memory: the results of the last decode.

    Args:
        offset: where they start, in bytes from the start of the buffer.
        ids: place in the batch of each output; int32, shape [n_outputs].
        logits: float32, shape [n_outputs, n_vocab], or [0, 0] where none were kept.
        embeddings: float32, shape [n].
    """

    offset: int
    ids: npt.NDArray[np.int32]
    logits: npt.NDArray[np.float32]
    embeddings: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Media:
    """One media entry of a packed token record.

    Args:
        start: index of the first token that it stands for.
        data: the server's own record of it, opaque here.
    """

    start: int
    data: memoryview


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The token array of a file.

    Args:
        words: the array as it stands there; int32, shape [n].
        text: the tokens; -1 where a media entry stands; int32, shape [n_tokens].
        media: media entries, by ascending start; only in packed records.
        packed_version: version of the server's packed record, or None for a plain array.
    """

    words: npt.NDArray[np.int32]
    text: npt.NDArray[np.int32]
    media: tuple[Media, ...]
    packed_version: int | None


@dataclass(frozen=True, slots=True)
class Change:
    """One change that was made to a state.

    Args:
        what: what was done, as one phrase.
        is_exact: whether every value is the one that was there before.
        error_bound: the most by which a stored value changed (in the values as stored, so rotated where they are);
            0 when exact.
        warnings: what the target form could not carry, or what had to be assumed.
    """

    what: str
    is_exact: bool = True
    error_bound: float = 0.0
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class StateImage:
    """A whole state.

    Args:
        form: the outermost shape.
        sections: the memory's parts in order; empty where the model keeps no memory (encoder-only).
        layouts: every layout that these bytes have exactly this meaning in.
        n_bytes: length of the whole state.
        architecture: the model architecture's name; None in sequence forms, which do not say.
        version_word: the version word of a file; it is reported, and never what decided the layout.
        tokens: the token array of a file.
        outputs: what contexts of 2025 wrote before the memory.
        source_seq_id: id of the sequence that a prefixed sequence blob was taken from.
        content: how much of the memory is here; partial is only seen where facts name the sections.
        changes: what was done to it since it was read, first to last.
    """

    form: Form
    sections: tuple[Section, ...]
    layouts: frozenset[Layout]
    n_bytes: int
    architecture: str | None = None
    version_word: int | None = None
    tokens: Tokens | None = None
    outputs: Outputs | None = None
    source_seq_id: int | None = None
    content: Content = Content.FULL
    changes: tuple[Change, ...] = ()

    @property
    def versions(self) -> frozenset[int]:
        """Session versions that these bytes can be of; several when the bytes do not differ."""
        return frozenset(layout.session_version for layout in self.layouts)

    @property
    def sequence_versions(self) -> frozenset[int]:
        """Sequence versions that these bytes can be of; several when the bytes do not differ."""
        return frozenset(layout.sequence_version for layout in self.layouts)

    @property
    def writers(self) -> tuple[str, ...]:
        """A guess at what wrote these bytes, oldest first."""
        ordered = sorted(self.layouts, key=lambda layout: (layout.session_version, not layout.has_outputs, layout.name))
        return tuple(layout.writers for layout in ordered)

    @property
    def caches(self) -> tuple[AttentionSection, ...]:
        """The attention sections, in order."""
        return tuple(section for section in self.sections if isinstance(section, AttentionSection))

    def streams(self) -> Iterator[KvStream]:
        """The streams of all attention sections that are written out, in order."""
        return (stream for cache in self.caches for _, stream in cache.filled())

    @property
    def is_opaque(self) -> bool:
        """Whether any part is carried without being understood."""
        return any(isinstance(section, OpaqueSection) for section in self.sections)

    @property
    def is_empty(self) -> bool:
        """Whether no sequence holds anything; never so of a memory that is not understood."""
        return all(section.n_cells == 0 for section in self.sections)

    def sequences(self) -> dict[int, Span]:
        """What every sequence holds, by ascending id: most cells of any section, first and last position of all.

        In sequence forms there is one; its id is the source's where the bytes say it, 0 where they do not.
        """
        if not self.form.is_sequence:
            return merge_spans((section.sequences() for section in self.sections), add=False)
        held = [section for section in self.sections if not isinstance(section, OpaqueSection) and section.n_cells]
        if not held:
            return {}
        positions = [section.positions() for section in held]
        first, last = min(int(p.min()) for p in positions), max(int(p.max()) for p in positions)
        return {self.source_seq_id or 0: Span(max(len(p) for p in positions), first, last)}
