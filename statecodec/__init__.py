"""Knows the bytes of a llama.cpp state: bytes in, views or bytes out.

Main path: `parse(buffer)` finds the one sound meaning of the bytes (`layouts` says how they were written through the
years, `envelope`, `sections` and `cells` read, `cursor` alone slices) -> `StateImage`, frozen views on the buffer ->
`validate(image, facts)` -> `transcode.*(image, ...)`, images that fit another context -> `emit(image)`, bytes again.
Where no meaning is left, `salvage(buffer)` keeps what is whole. `load(path)` maps a file of any form, a carry of
splitctl too (`carried`), and parses the state in it.

No library, no clock, and no file but in `load`: whoever has mapped one hands the mapping in.
"""

from __future__ import annotations

from statecodec import transcode
from statecodec.carried import Carried, carried
from statecodec.emit import Chunk, emit
from statecodec.errors import (
    Ambiguous,
    BadField,
    ForeignFile,
    Inconsistent,
    LimitExceeded,
    NotRepresentable,
    StateCodecError,
    StateFormatError,
    TrailingBytes,
    Truncated,
    UnknownVersion,
)
from statecodec.facts import CacheFacts, ModelFacts, RecurrentFacts
from statecodec.findings import Finding, FindingCode, findings
from statecodec.image import (
    AttentionSection,
    Change,
    Content,
    KvStream,
    Media,
    OpaqueSection,
    Outputs,
    RecurrentLayer,
    RecurrentSection,
    Section,
    StateImage,
    Tokens,
)
from statecodec.layouts import Form, Layout, SectionKind
from statecodec.limits import DEFAULT_LIMITS, Limits
from statecodec.load import load
from statecodec.parse import parse
from statecodec.quants import rotated, to_floats
from statecodec.salvage import Salvage, salvage
from statecodec.tensor_types import TensorType
from statecodec.validate import validate
from statecodec.views import Cells, Columns, Rotation, Rows, Span

__all__ = [
    "DEFAULT_LIMITS",
    "Ambiguous",
    "AttentionSection",
    "BadField",
    "CacheFacts",
    "Carried",
    "Cells",
    "Change",
    "Chunk",
    "Columns",
    "Content",
    "Finding",
    "FindingCode",
    "ForeignFile",
    "Form",
    "Inconsistent",
    "KvStream",
    "Layout",
    "LimitExceeded",
    "Limits",
    "Media",
    "ModelFacts",
    "NotRepresentable",
    "OpaqueSection",
    "Outputs",
    "RecurrentFacts",
    "RecurrentLayer",
    "RecurrentSection",
    "Rotation",
    "Rows",
    "Salvage",
    "Section",
    "SectionKind",
    "Span",
    "StateCodecError",
    "StateFormatError",
    "StateImage",
    "TensorType",
    "Tokens",
    "TrailingBytes",
    "Truncated",
    "UnknownVersion",
    "carried",
    "emit",
    "findings",
    "load",
    "parse",
    "rotated",
    "salvage",
    "to_floats",
    "transcode",
    "validate",
]
