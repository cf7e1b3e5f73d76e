"""States written by hand from the description of the format, for comparison with what the codec reads and writes.

Nothing here uses the codec: the bytes come from `struct` alone, so an error in the codec cannot hide in both.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

SIZES = {0: 4, 1: 2, 30: 2, 8: 34, 2: 18, 3: 20, 6: 22, 7: 24, 20: 18}
"""Bytes of one block of each cache type."""


@dataclass(frozen=True)
class Cell:
    """A cell: position, sequence ids, and the words of its extra record."""

    pos: int
    ids: tuple[int, ...] = (0,)
    ext: tuple[int, ...] = ()

    def pack(self) -> bytes:
        """Its bytes."""
        words = (*self.ext, *self.ids)
        return struct.pack(f"<iI{len(words)}i", self.pos, len(self.ids), *words)


def cells(count: int, *, first: int = 0, ids: tuple[int, ...] = (0,), ext_words: int = 0) -> tuple[Cell, ...]:
    """Cells at consecutive positions."""
    return tuple(Cell(first + i, ids, tuple(range(i, i + ext_words))) for i in range(count))


def rows(kind: int, row_bytes: int, count: int, seed: int) -> bytes:
    """A layer: type, row size, and rows of a pattern that depends on the seed."""
    data = bytes((seed * 37 + i * 11 + 5) % 251 for i in range(row_bytes * count))
    return struct.pack("<iQ", kind, row_bytes) + data


@dataclass(frozen=True)
class Attention:
    """An attention section.

    Args:
        streams: the cells of each stream.
        keys: type and row bytes of each layer's K.
        values: type and row bytes of each layer's V; with v_trans, type and number of values.
        v_trans: the word.
        rotation: the two words, from version 11 on.
        streamed: whether the count of streams is written.
        on_device: whether the rows are left out.
    """

    streams: tuple[tuple[Cell, ...], ...]
    keys: tuple[tuple[int, int], ...] = ((1, 8), (1, 8))
    values: tuple[tuple[int, int], ...] = ((1, 12), (1, 12))
    v_trans: int = 0
    rotation: tuple[int, int] | None = None
    streamed: bool = True
    on_device: bool = False

    def pack(self) -> bytes:
        """Its bytes."""
        parts = [struct.pack("<I", len(self.streams))] if self.streamed else []
        for number, held in enumerate(self.streams):
            parts.append(struct.pack("<I", len(held)))
            if not held and self.streamed:
                continue
            parts += [cell.pack() for cell in held]
            parts.append(struct.pack("<II", self.v_trans, len(self.keys)))
            if self.rotation is not None:
                parts.append(struct.pack("<II", *self.rotation))
            count = 0 if self.on_device else len(held)
            parts += [rows(kind, size, count, number * 50 + i) for i, (kind, size) in enumerate(self.keys)]
            for i, (kind, size) in enumerate(self.values):
                if self.v_trans:
                    element = SIZES[kind]
                    layer = rows(kind, size * element, count, number * 50 + 20 + i)
                    parts.append(struct.pack("<iII", kind, element, size) + layer[12:])
                else:
                    parts.append(rows(kind, size, count, number * 50 + 20 + i))
        return b"".join(parts)


@dataclass(frozen=True)
class Recurrent:
    """A recurrent section: cells, layers of the model, R and S types and sizes, histories by layer."""

    held: tuple[Cell, ...]
    n_layer: int = 2
    n_recurrent: int = 2
    r: tuple[int, int] = (0, 24)
    s: tuple[int, int] = (0, 40)
    histories: dict[int, int] = field(default_factory=dict)
    on_device: bool = False

    def pack(self) -> bytes:
        """Its bytes."""
        count = 0 if self.on_device else len(self.held)
        parts = [struct.pack("<I", len(self.held)), *(cell.pack() for cell in self.held)]
        parts.append(struct.pack("<II", 0, self.n_layer))
        for layer in range(self.n_recurrent):
            parts.append(rows(*self.r, count, layer))
            if layer in self.histories:
                size = self.histories[layer]
                parts.append(struct.pack("<Q", size) + rows(0, size, count, layer + 90)[12:])
        parts += [rows(*self.s, count, layer + 30) for layer in range(self.n_recurrent)]
        return b"".join(parts)


Part = Attention | Recurrent | bytes


def memory(*parts: Part) -> bytes:
    """Sections one after the other."""
    return b"".join(part if isinstance(part, bytes) else part.pack() for part in parts)


def name(architecture: str) -> bytes:
    """The start of a context blob."""
    return struct.pack("<I", len(architecture)) + architecture.encode()


def outputs(ids: tuple[int, ...], n_vocab: int, n_embeddings: int = 0) -> bytes:
    """What contexts of 2025 wrote before the memory."""
    logits = struct.pack(f"<{len(ids) * n_vocab}f", *(i / 4 for i in range(len(ids) * n_vocab)))
    embeddings = struct.pack(f"<{n_embeddings}f", *(i / 8 for i in range(n_embeddings)))
    head = struct.pack(f"<I{len(ids)}i", len(ids), *ids)
    return head + struct.pack("<Q", len(ids) * n_vocab) + logits + struct.pack("<Q", n_embeddings) + embeddings


def context(*parts: Part, architecture: str = "llama") -> bytes:
    """A context blob."""
    return name(architecture) + memory(*parts)


def sequence(*parts: Part, seq_id: int | None = 0) -> bytes:
    """A sequence blob, with the prefix unless the id is None."""
    prefix = b"" if seq_id is None else struct.pack("<Ii", 0xAF143CD8, seq_id)
    return prefix + memory(*parts)


def session_file(body: bytes, version: int, tokens: tuple[int, ...] = (1, 2, 3)) -> bytes:
    """A session file around a context blob."""
    return b"nsgg" + struct.pack(f"<II{len(tokens)}i", version, len(tokens), *tokens) + body


def sequence_file(body: bytes, version: int, tokens: tuple[int, ...] = (1, 2, 3)) -> bytes:
    """A sequence file around a sequence payload without prefix."""
    return b"qsgg" + struct.pack(f"<II{len(tokens)}i", version, len(tokens), *tokens) + body


FOUR_UNIFIED = tuple(Cell(pos, (seq,)) for seq in range(4) for pos in range(seq + 1))
SHARED = (Cell(0, (0, 1, 2)), Cell(1, (0, 1)), Cell(2, (0,)), Cell(2, (1,)), Cell(1, (2,)))
LATE = (Cell(4, (0,)),)
NOT_ROTATED = (0, 0)
