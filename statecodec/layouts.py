"""How states were written through the years: every difference between versions is a value in a table here.

The parser never asks for a version. It is given a `Grammar` (what this table says) and reads by it. A context blob
carries no version word, and several versions write the same bytes for many models, so the answer is a set.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from statecodec.facts import ModelFacts


class SectionKind(enum.Enum):
    """What a part of the memory is."""

    ATTENTION = "attention"
    RECURRENT = "recurrent"
    OPAQUE = "opaque"


@dataclass(frozen=True, slots=True)
class Layout:
    """One epoch of the format.

    Args:
        name: how this layout is called in answers.
        session_version: version word of session files of this epoch; context blobs are named by it.
        sequence_version: version word of sequence files of this epoch.
        ext_bytes: the possible sizes of a cell's extra record in bytes; which one it is follows from the model.
        has_rotation: two words behind n_layer say how stored rows are rotated.
        has_history: recurrent layers may hold a second row (the convolution history of n-gram heads).
    """

    name: str
    session_version: int
    sequence_version: int
    ext_bytes: tuple[int, ...]
    has_rotation: bool
    has_history: bool


LAYOUTS: tuple[Layout, ...] = (
    Layout("v9", 9, 2, ext_bytes=(0, 8), has_rotation=False, has_history=False),
    Layout("v10", 10, 3, ext_bytes=(0, 12), has_rotation=False, has_history=True),
    Layout("v11", 11, 4, ext_bytes=(0, 12), has_rotation=True, has_history=True),
)
"""Source: blobs of real builds (9: xllamacpp 0.2.14 to 2026.8, 10: 2026.9 and llama-cpp-python 0.3.36, 11: 2026.10)."""

SECTION_PATTERNS: tuple[tuple[SectionKind, ...], ...] = (
    (),
    (SectionKind.ATTENTION,),
    (SectionKind.ATTENTION, SectionKind.ATTENTION),
    (SectionKind.ATTENTION, SectionKind.ATTENTION, SectionKind.ATTENTION),
    (SectionKind.RECURRENT,),
    (SectionKind.ATTENTION, SectionKind.RECURRENT),
    (SectionKind.ATTENTION, SectionKind.ATTENTION, SectionKind.RECURRENT),
    (SectionKind.ATTENTION, SectionKind.RECURRENT, SectionKind.ATTENTION),
    (SectionKind.OPAQUE,),
)
"""Orders of sections that memories write.

None (encoder-only); plain; a window pair or an indexer; both; recurrent; hybrid; hybrid with a window pair; hybrid
with an indexer; a memory with a magic of its own. Source: the state_write functions of the library's memory classes
and a sweep over 146 architectures.
"""

OPAQUE_MAGICS: dict[int, str] = {0x34565344: "DSV4"}
"""Memories with a magic and versions of their own, carried whole and not understood."""

EXT_DTYPES: dict[int, np.dtype[np.void]] = {
    8: np.dtype([("x", "<i4"), ("y", "<i4")]),
    12: np.dtype([("x", "<i4"), ("y", "<i4"), ("token", "<i4")]),
}
"""The cell's extra record by its size. Source: llama-kv-cells.h, llama_kv_cell_ext."""

ROTATION_MIN_BLOCK = 64
"""The smallest Hadamard block. Source: measured blocks 64, 128, 256, 512."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """One way to read: a layout with its choices made.

    Args:
        ext_bytes: bytes of each attention cell's extra record, 0 for none.
        has_rotation: see `Layout`.
        has_history: see `Layout`.
        layouts: the layouts that agree on these choices.
    """

    ext_bytes: int
    has_rotation: bool
    has_history: bool
    layouts: frozenset[Layout] = field(default_factory=frozenset)


def patterns(facts: ModelFacts) -> tuple[tuple[SectionKind, ...], ...]:
    """Orders of sections that are possible under the given facts."""
    if facts.sections is None:
        return SECTION_PATTERNS
    wanted = tuple(SectionKind(kind) for kind in facts.sections)
    return (wanted,)


def grammars(layouts: Iterable[Layout], facts: ModelFacts) -> Iterator[Grammar]:
    """Every distinct way to read that the layouts and the facts leave open.

    Args:
        layouts: the candidates.
        facts: narrows versions and the extra record when it says so.

    Returns:
        Grammars without repetition; layouts that would read in exactly the same way share one.
    """
    shared: dict[tuple[int, bool, bool], set[Layout]] = {}
    for layout in layouts:
        if facts.versions is not None and layout.session_version not in facts.versions:
            continue
        for ext_bytes in layout.ext_bytes:
            if facts.has_ext is not None and facts.has_ext != (ext_bytes > 0):
                continue
            shared.setdefault((ext_bytes, layout.has_rotation, layout.has_history), set()).add(layout)
    for (ext_bytes, has_rotation, has_history), members in shared.items():
        yield Grammar(ext_bytes, has_rotation, has_history, frozenset(members))
