"""How states were written through the years: every difference between versions is a value in a table here.

The parser never asks for a version. It is given a `Grammar` (what this table says) and reads by it.

The answer is a set of layouts, for two reasons. A context blob carries no version word. And layouts share bytes: a cell
has an extra record only for some models, a second history exists for one architecture, a rotation is written by v11
alone, and a prefix only before sequence blobs; so v9 and v10 write equal context blobs for every model without an extra
record, and layouts that come to one `Grammar` are read once and answered together.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from statecodec.facts import ModelFacts


class SectionKind(enum.Enum):
    """What a part of the memory is."""

    ATTENTION = "attention"
    RECURRENT = "recurrent"
    OPAQUE = "opaque"


class Form(enum.Enum):
    """The outermost shape of the bytes."""

    CONTEXT = "context"
    SEQUENCE = "sequence"
    SESSION_FILE = "session file"
    SEQUENCE_FILE = "sequence file"

    @property
    def is_sequence(self) -> bool:
        """Whether it holds one sequence and no architecture name."""
        return self in {Form.SEQUENCE, Form.SEQUENCE_FILE}


@dataclass(frozen=True, slots=True)
class Layout:
    """One epoch of the format.

    Args:
        name: how this layout is called in answers.
        session_version: version word of session files of this epoch; context blobs are named by it.
        sequence_version: version word of sequence files of this epoch.
        writers: builds that write it, for a guess at the producer.
        has_outputs: a context blob holds output ids, logits and embeddings before the memory.
        has_streams: an attention section begins with a count of streams; without it there is one, written if empty too.
        sequence_cell_ids: sequence ids that each attention cell of a sequence blob has.
        prefixes: whether sequence blobs begin with a magic and the source's id; both where builds of one epoch differ.
        ext_bytes: the possible sizes of a cell's extra record in bytes; which one it is follows from the model.
        has_rotation: two words behind n_layer say how stored rows are rotated.
        has_history: recurrent layers may hold a second row (the convolution history of n-gram heads).
    """

    name: str
    session_version: int
    sequence_version: int
    writers: str
    has_outputs: bool
    has_streams: bool
    sequence_cell_ids: int
    prefixes: tuple[bool, ...]
    ext_bytes: tuple[int, ...]
    has_rotation: bool
    has_history: bool


_2025_03 = Layout(
    "v9-outputs-2025-03",
    session_version=9,
    sequence_version=2,
    writers="llama.cpp of early 2025 (xllamacpp 0.1.0)",
    has_outputs=True,
    has_streams=False,
    sequence_cell_ids=0,
    prefixes=(False,),
    ext_bytes=(0,),
    has_rotation=False,
    has_history=False,
)
# Each says what it changes of the one before it.
_2025_06 = replace(
    _2025_03,
    name="v9-outputs-2025-06",
    writers="llama.cpp of mid 2025 (xllamacpp 0.1.20)",
    sequence_cell_ids=1,
)
_V9_OUTPUTS = replace(
    _2025_06,
    name="v9-outputs",
    writers="llama.cpp of late 2025 (xllamacpp 0.2.0)",
    has_streams=True,
    ext_bytes=(0, 8),
)
_V9 = replace(
    _V9_OUTPUTS,
    name="v9",
    writers="llama.cpp of early and mid 2026 (xllamacpp 0.2.14 to 2026.8)",
    has_outputs=False,
    prefixes=(False, True),
)
_V10 = replace(
    _V9,
    name="v10",
    session_version=10,
    sequence_version=3,
    writers="llama.cpp of September 2026 (xllamacpp 2026.9, llama-cpp-python 0.3.36)",
    prefixes=(True,),
    ext_bytes=(0, 12),
    has_history=True,
)
_V11 = replace(
    _V10,
    name="v11",
    session_version=11,
    sequence_version=4,
    writers="llama.cpp of October 2026 on (xllamacpp 2026.10)",
    has_rotation=True,
)

LAYOUTS: tuple[Layout, ...] = (_2025_03, _2025_06, _V9_OUTPUTS, _V9, _V10, _V11)
"""Source: blobs that the named builds wrote (tests/golden/codec)."""

_A, _R, _O = SectionKind.ATTENTION, SectionKind.RECURRENT, SectionKind.OPAQUE

SECTION_PATTERNS: tuple[tuple[SectionKind, ...], ...] = (
    (), (_A,), (_A, _A), (_A, _A, _A), (_R,), (_A, _R), (_A, _A, _R), (_A, _R, _A), (_O,),
)  # fmt: skip
"""Orders of sections that memories write.

None (encoder-only); plain; a window pair or an indexer; both; recurrent; hybrid; hybrid with a window pair; hybrid
with an indexer; a memory with a magic of its own. Source: the state_write functions of the library's memory classes
and a sweep over 146 architectures.
"""

PARTIAL_PATTERNS: dict[tuple[SectionKind, ...], tuple[SectionKind, ...]] = {
    (_A, _A): (_A,),
    (_A, _A, _A): (_A,),
    (_A, _R): (_R,),
    (_A, _A, _R): (_A, _R),
    (_A, _R, _A): (_R,),
}
"""What a partial sequence blob (flag 1) holds of a memory: the window's or the recurrent part alone.

A partial blob looks like a whole one of another model, so only the facts can tell. Source: the state_write functions.
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
        has_outputs: see `Layout`; never in sequence forms.
        has_streams: see `Layout`.
        cell_ids: fewest and most sequences of an attention cell; None: up to the limit.
        recurrent_ids: the same of a recurrent cell.
        ext_bytes: bytes of each attention cell's extra record, 0 for none.
        has_rotation: see `Layout`.
        has_history: see `Layout`.
        has_tensors: False for what stayed on the device: headers without rows.
    """

    has_outputs: bool
    has_streams: bool
    cell_ids: tuple[int, int | None]
    recurrent_ids: tuple[int, int | None]
    ext_bytes: int
    has_rotation: bool
    has_history: bool
    has_tensors: bool = True


@functools.lru_cache(maxsize=64)
def patterns(facts: ModelFacts, form: Form) -> tuple[tuple[SectionKind, ...], ...]:
    """Orders of sections that are possible under the given facts, whole ones first."""
    if facts.sections is None:
        return SECTION_PATTERNS
    whole = tuple(SectionKind(kind) for kind in facts.sections)
    if form.is_sequence and whole in PARTIAL_PATTERNS:
        return (whole, PARTIAL_PATTERNS[whole])
    return (whole,)


@functools.lru_cache(maxsize=64)
def grammars(
    layouts: tuple[Layout, ...], facts: ModelFacts, form: Form, *, prefixed: bool
) -> Mapping[Grammar, frozenset[Layout]]:
    """Every distinct way to read that the layouts and the facts leave open.

    Args:
        layouts: the candidates.
        facts: narrows versions and the extra record when it says so.
        form: the outermost shape.
        prefixed: whether the bytes are a sequence blob with magic and source id.

    Returns:
        Grammars and, for each, the layouts that read in exactly this way.
    """
    shared: dict[Grammar, set[Layout]] = {}
    for layout in layouts:
        if facts.versions is not None and layout.session_version not in facts.versions:
            continue
        if form is Form.SEQUENCE and prefixed not in layout.prefixes:
            continue
        for ext_bytes in layout.ext_bytes:
            # What stays on the device is asked for by a flag that only prefixed sequence blobs have.
            for has_tensors in (True, False) if prefixed else (True,):
                grammar = Grammar(
                    has_outputs=layout.has_outputs and not form.is_sequence,
                    has_streams=layout.has_streams,
                    cell_ids=(layout.sequence_cell_ids, layout.sequence_cell_ids) if form.is_sequence else (1, None),
                    recurrent_ids=(0, 0) if form.is_sequence else (1, None),
                    ext_bytes=ext_bytes,
                    has_rotation=layout.has_rotation,
                    has_history=layout.has_history,
                    has_tensors=has_tensors,
                )
                if facts.has_ext is None or facts.has_ext == (ext_bytes > 0):
                    shared.setdefault(grammar, set()).add(layout)
    return MappingProxyType({grammar: frozenset(members) for grammar, members in shared.items()})
