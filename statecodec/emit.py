"""Writing: an image as the bytes that the library writes for it, in chunks, without copying a tensor."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from statecodec.cells import pack_cells
from statecodec.envelope import SEQUENCE_FILE_MAGIC, SEQUENCE_MAGIC, SESSION_FILE_MAGIC
from statecodec.image import AttentionSection, KvStream, RecurrentSection, Section, StateImage
from statecodec.layouts import Form
from statecodec.views import Columns, Rows

Chunk = bytes | memoryview


def emit(image: StateImage) -> Iterator[Chunk]:
    """The bytes of a state.

    Args:
        image: a sound image; see `validate`.

    Returns:
        Chunks to be written one after the other: small packed headers, and views on the tensors.

    Lifetime:
        The views borrow the buffer that the image borrows.
    """
    yield from _head(image)
    for section in image.sections:
        yield from _section(section)


def _head(image: StateImage) -> Iterator[Chunk]:
    """Everything before the memory."""
    if image.tokens is not None:
        magic = SEQUENCE_FILE_MAGIC if image.form is Form.SEQUENCE_FILE else SESSION_FILE_MAGIC
        yield struct.pack("<III", magic, image.version_word, len(image.tokens.words))
        yield image.tokens.words.tobytes()
    if image.source_seq_id is not None:
        yield struct.pack("<Ii", SEQUENCE_MAGIC, image.source_seq_id)
    if image.architecture is not None:
        name = image.architecture.encode("ascii")
        yield struct.pack("<I", len(name)) + name
    if image.outputs is not None:
        yield struct.pack("<I", len(image.outputs.ids)) + image.outputs.ids.tobytes()
        for values in (image.outputs.logits, image.outputs.embeddings):
            yield struct.pack("<Q", values.size)
            yield values.reshape(-1).view(np.uint8).data


def _section(section: Section) -> Iterator[Chunk]:
    match section:
        case AttentionSection():
            if section.is_streamed:
                yield struct.pack("<I", len(section.streams))
            for stream in section.streams:
                if stream is None:
                    yield struct.pack("<I", 0)
                else:
                    yield from _stream(stream)
        case RecurrentSection():
            yield from _recurrent(section)
        case _:
            yield section.data


def _stream(stream: KvStream) -> Iterator[Chunk]:
    yield struct.pack("<I", len(stream.cells))
    yield pack_cells(stream.cells)
    yield struct.pack("<II", stream.v_trans, len(stream.keys))
    if stream.rotation is not None:
        yield struct.pack("<II", stream.rotation.k, stream.rotation.v)
    for keys in stream.keys:
        yield from _rows(keys)
    for values in stream.values:
        if isinstance(values, Columns):
            yield struct.pack("<iII", values.kind, values.element_bytes, values.n_values)
            yield values.data
        else:
            yield from _rows(values)


def _rows(rows: Rows) -> Iterator[Chunk]:
    yield struct.pack("<iQ", rows.kind, rows.row_bytes)
    yield rows.data


def _recurrent(section: RecurrentSection) -> Iterator[Chunk]:
    yield struct.pack("<I", len(section.cells))
    yield pack_cells(section.cells)
    yield struct.pack("<II", 0, section.n_layer)
    for layer in section.layers:
        yield from _rows(layer.r)
        if layer.history is not None:
            yield struct.pack("<Q", layer.history.row_bytes)
            yield layer.history.data
    for layer in section.layers:
        yield from _rows(layer.s)
