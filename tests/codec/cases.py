"""The table of states: bytes on one side, what they are on the other. Reader, writer and damage tests share it."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from statecodec import AttentionSection, Content, Form, RecurrentSection, Section, StateImage
from tests.codec.synthetic import (
    FOUR_UNIFIED,
    LATE,
    NOT_ROTATED,
    SHARED,
    SIZES,
    Attention,
    Cell,
    Recurrent,
    cells,
    context,
    memory,
    name,
    outputs,
    sequence,
    sequence_file,
    session_file,
)


@dataclass(frozen=True)
class Case:
    """A state and what it is.

    Args:
        data: the bytes.
        layouts: names of every layout that it may be of, as one text.
        kinds: the sections, as "a", "r" and "o".
        spans: sequence -> cells, first and last position.
        form: the form.
        content: how much of the memory it holds.
    """

    data: bytes
    layouts: str
    kinds: str
    spans: dict[int, tuple[int, int, int]]
    form: Form = Form.CONTEXT
    content: Content = Content.FULL


_OLD = "v10 v9"
_ANY = "v10 v11 v9"
_UNSTREAMED = "v9-outputs-2025-03 v9-outputs-2025-06"
_BARE = "v9 v9-outputs"
_THREE = {0: (3, 0, 2)}
_FIVE = {0: (5, 0, 4)}
_LAST = {0: (1, 4, 4)}
_FOUR = {0: (1, 0, 0), 1: (2, 0, 1), 2: (3, 0, 2), 3: (4, 0, 3)}
_Q8 = ((8, 34), (8, 68))
_EVERY_TYPE = tuple((kind, size * 2) for kind, size in SIZES.items())
_MEDIA = (
    Cell(0, (0,), (0, 0, 7)),
    Cell(1, (0,), (0, 0, -1)),
    Cell(1, (0,), (1, 0, -1)),
)
_EMPTY_BASE = Attention((cells(5),), keys=(), values=())
_SEQ, _SESSION_FILE, _SEQUENCE_FILE = Form.SEQUENCE, Form.SESSION_FILE, Form.SEQUENCE_FILE
_PLAIN = context(Attention((cells(3),)))
_NEW = Attention((cells(3),), rotation=NOT_ROTATED)

CASES: dict[str, Case] = {
    # Attention, as context blobs.
    "plain": Case(_PLAIN, _OLD, "a", _THREE),
    "rotated": Case(context(Attention((cells(3),), rotation=(64, 0))), "v11", "a", _THREE),
    "not rotated": Case(context(_NEW), "v11", "a", _THREE),
    "transposed": Case(context(Attention((cells(3),), v_trans=1)), _OLD, "a", _THREE),
    "transposed f32": Case(context(Attention((cells(3),), values=((0, 5), (0, 6)), v_trans=1)), _OLD, "a", _THREE),
    "no v": Case(context(Attention((cells(3),), values=())), _OLD, "a", _THREE),
    "no v, flash off": Case(
        context(Attention((cells(3),), values=(), v_trans=1, rotation=(64, 0))), "v11", "a", _THREE
    ),
    "quantized": Case(context(Attention((cells(3),), keys=_Q8, values=_Q8)), _OLD, "a", _THREE),
    "every type": Case(context(Attention((cells(3),), keys=_EVERY_TYPE, values=_EVERY_TYPE)), _OLD, "a", _THREE),
    "ext 8": Case(context(Attention((cells(3, ext_words=2),))), "v9", "a", _THREE),
    "ext 12": Case(context(Attention((cells(3, ext_words=3),))), "v10", "a", _THREE),
    "ext 12 rotated": Case(context(Attention((cells(3, ext_words=3),), rotation=NOT_ROTATED)), "v11", "a", _THREE),
    "media share a position": Case(context(Attention((_MEDIA,))), "v10", "a", {0: (3, 0, 1)}),
    "four unified": Case(context(Attention((FOUR_UNIFIED,))), _OLD, "a", _FOUR),
    "four streams": Case(context(Attention(tuple(cells(n + 1, ids=(n,)) for n in range(4)))), _OLD, "a", _FOUR),
    "four streams rotated": Case(
        context(Attention(tuple(cells(n + 1, ids=(n,)) for n in range(4)), rotation=(64, 64))), "v11", "a", _FOUR
    ),
    "an empty stream": Case(
        context(Attention((cells(2), (), cells(1, ids=(2,))))), _OLD, "a", {0: (2, 0, 1), 2: (1, 0, 0)}
    ),
    "shared cells": Case(context(Attention((SHARED,))), _OLD, "a", {0: (3, 0, 2), 1: (3, 0, 2), 2: (2, 0, 1)}),
    "no cells": Case(context(Attention(((),))), _ANY, "a", {}),
    "no cells in streams": Case(context(Attention(((), (), (), ()))), _ANY, "a", {}),
    # Several sections.
    "window": Case(context(Attention((cells(6),)), Attention((cells(3, first=3),))), _OLD, "aa", {0: (6, 0, 5)}),
    "window rotated": Case(
        context(Attention((cells(6),), rotation=(128, 64)), Attention((cells(3, first=3),), rotation=(64, 64))),
        "v11",
        "aa",
        {0: (6, 0, 5)},
    ),
    "indexer": Case(
        context(Attention((cells(3),), values=()), Attention((cells(3),), keys=((1, 4),), values=())),
        _OLD,
        "aa",
        _THREE,
    ),
    "indexer with v": Case(
        context(Attention((cells(3),)), Attention((cells(3),), keys=((1, 4),), values=((1, 4),))), _OLD, "aa", _THREE
    ),
    "three sections": Case(
        context(*(Attention((cells(3),), values=(), rotation=(size, 0)) for size in (64, 128, 0))),
        "v11",
        "aaa",
        _THREE,
    ),
    "recurrent": Case(context(Recurrent(LATE)), _ANY, "r", _LAST),
    "recurrent, equal rows": Case(
        context(Recurrent(LATE, n_layer=4, n_recurrent=3, r=(0, 24), s=(0, 24))), _ANY, "r", _LAST
    ),
    "recurrent, four": Case(
        context(Recurrent(tuple(Cell(seq + 1, (seq,)) for seq in range(4)))),
        _ANY,
        "r",
        {seq: (1, seq + 1, seq + 1) for seq in range(4)},
    ),
    "recurrent, empty rows": Case(context(Recurrent(LATE, n_layer=3, s=(0, 0))), _ANY, "r", _LAST),
    "recurrent, no cells": Case(context(Recurrent(())), _ANY, "r", {}),
    "history": Case(context(Recurrent(LATE, 4, 3, histories={1: 20})), "v10 v11", "r", _LAST),
    "histories": Case(context(Recurrent(LATE, 4, 3, histories={0: 20, 2: 20})), "v10 v11", "r", _LAST),
    "hybrid": Case(context(Attention((cells(5),)), Recurrent(LATE, n_layer=4)), _OLD, "ar", _FIVE),
    "hybrid, no v": Case(context(Attention((cells(5),), values=()), Recurrent(LATE, n_layer=4)), _OLD, "ar", _FIVE),
    "hybrid window": Case(context(_EMPTY_BASE, Attention((cells(5),)), Recurrent(LATE, s=(0, 0))), _OLD, "aar", _FIVE),
    "hybrid window rotated": Case(
        context(
            Attention((cells(5),), keys=(), values=(), rotation=NOT_ROTATED),
            Attention((cells(5),), rotation=NOT_ROTATED),
            Recurrent(LATE, s=(0, 0)),
        ),
        "v11",
        "aar",
        _FIVE,
    ),
    "hybrid indexer": Case(
        context(
            Attention((cells(5, ext_words=3),)),
            Recurrent(LATE, n_layer=4, histories={0: 16}),
            Attention((cells(5, ext_words=3),), values=()),
        ),
        "v10",
        "ara",
        _FIVE,
    ),
    "hybrid indexer, equal rows": Case(
        context(
            Attention((cells(5),), values=()),
            Recurrent(LATE, n_layer=4, r=(0, 8), s=(0, 8)),
            Attention((cells(5),), values=()),
        ),
        _OLD,
        "ara",
        _FIVE,
    ),
    "encoder": Case(context(architecture="bert"), _ANY, "", {}),
    "opaque": Case(context(struct.pack("<III", 0x34565344, 1, 0) + b"x" * 33, architecture="deepseek4"), _ANY, "o", {}),
    # With the outputs of 2025.
    "outputs": Case(name("llama") + outputs((2,), 5) + memory(Attention((cells(3),))), "v9-outputs", "a", _THREE),
    "outputs, embeddings, ext": Case(
        name("llama") + outputs((0, 2), 4, 6) + memory(Attention((cells(3, ext_words=2),))), "v9-outputs", "a", _THREE
    ),
    "outputs, unstreamed": Case(
        name("llama") + outputs((1,), 3) + memory(Attention((cells(3),), streamed=False)), _UNSTREAMED, "a", _THREE
    ),
    "no outputs, unstreamed": Case(
        name("llama") + outputs((), 0) + memory(Attention((cells(3),), streamed=False)), _UNSTREAMED, "a", _THREE
    ),
    "outputs, hybrid": Case(
        name("llama") + outputs((1,), 3) + memory(Attention((cells(5),)), Recurrent(LATE)), "v9-outputs", "ar", _FIVE
    ),
    # Sequence blobs.
    "sequence": Case(sequence(Attention((cells(3),)), seq_id=2), _OLD, "a", {2: (3, 0, 2)}, _SEQ),
    "sequence rotated": Case(sequence(_NEW), "v11", "a", _THREE, _SEQ),
    "sequence of streams": Case(
        sequence(Attention(((), cells(3, ids=(1,)), ())), seq_id=1), _OLD, "a", {1: (3, 0, 2)}, _SEQ
    ),
    "sequence without prefix": Case(sequence(Attention((cells(3),)), seq_id=None), _BARE, "a", _THREE, _SEQ),
    "sequence without streams": Case(
        sequence(Attention((cells(3),), streamed=False), seq_id=None), "v9-outputs-2025-06", "a", _THREE, _SEQ
    ),
    "sequence without ids": Case(
        sequence(Attention((cells(3, ids=()),), streamed=False), seq_id=None), "v9-outputs-2025-03", "a", _THREE, _SEQ
    ),
    "sequence hybrid": Case(
        sequence(Attention((cells(5, ids=(3,)),)), Recurrent((Cell(4, ()),), n_layer=4), seq_id=3),
        _OLD,
        "ar",
        {3: (5, 0, 4)},
        _SEQ,
    ),
    "sequence recurrent": Case(sequence(Recurrent((Cell(4, ()),)), seq_id=1), _ANY, "r", {1: (1, 4, 4)}, _SEQ),
    "sequence without memory": Case(sequence(), _ANY, "", {}, _SEQ),
    "sequence on device": Case(
        sequence(Attention((cells(3),), on_device=True, rotation=(64, 64))),
        "v11",
        "a",
        _THREE,
        _SEQ,
        Content.ON_DEVICE,
    ),
    "sequence recurrent on device": Case(
        sequence(Recurrent((Cell(4, ()),), on_device=True)), _ANY, "r", _LAST, _SEQ, Content.ON_DEVICE
    ),
    # Files.
    "session file 9": Case(session_file(_PLAIN, 9), "v9", "a", _THREE, _SESSION_FILE),
    "session file 10": Case(session_file(_PLAIN, 10), "v10", "a", _THREE, _SESSION_FILE),
    "session file 11": Case(session_file(context(_NEW), 11), "v11", "a", _THREE, _SESSION_FILE),
    "session file, no tokens": Case(session_file(_PLAIN, 10, ()), "v10", "a", _THREE, _SESSION_FILE),
    "session file, outputs": Case(
        session_file(name("llama") + outputs((2,), 5) + memory(Attention((cells(3),))), 9),
        "v9-outputs",
        "a",
        _THREE,
        _SESSION_FILE,
    ),
    "sequence file 2": Case(
        sequence_file(memory(Attention((cells(3, ext_words=2),))), 2), _BARE, "a", _THREE, _SEQUENCE_FILE
    ),
    "sequence file 3": Case(
        sequence_file(memory(Attention((cells(3, ext_words=3),))), 3), "v10", "a", _THREE, _SEQUENCE_FILE
    ),
    "sequence file 4, packed": Case(
        sequence_file(memory(_NEW), 4, (-1, 1, 3, 5, 6, 7, 0)), "v11", "a", _THREE, _SEQUENCE_FILE
    ),
}


_STRIDE = 13


def cuts(image: StateImage, data: bytes) -> list[int]:
    """Where to cut a state: every byte of what is read, and of a layer's rows the ends and every 13th byte.

    Inside the rows nothing but their length changes; 13 bytes have no divisor in common with any row of the table.
    """
    ends = set(range(len(data)))
    for section in image.sections:
        for rows in _layers(section):
            if rows:
                start = _address(rows) - _address(data)
                inside = range(start + 2, start + len(rows) - 1)
                ends -= set(inside) - set(inside[::_STRIDE])
    return sorted(ends)


def _layers(section: Section) -> list[memoryview]:
    if isinstance(section, AttentionSection):
        return [layer.data for _, stream in section.filled() for layer in (*stream.keys, *stream.values)]
    if isinstance(section, RecurrentSection):
        return [rows.data for layer in section.layers for rows in (layer.r, layer.history, layer.s) if rows is not None]
    return []


def _address(data: bytes | memoryview) -> int:
    address: int = np.frombuffer(data, dtype=np.uint8).ctypes.data
    return address
