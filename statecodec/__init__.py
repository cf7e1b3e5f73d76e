"""Knows the bytes of a llama.cpp state: bytes in, views or bytes out.

Main path: `parse(buffer)` finds the one sound meaning of the bytes (`layouts` says how they were written through the
years, `envelope`, `sections` and `cells` read, `cursor` alone slices) -> `StateImage`, frozen views on the buffer ->
`validate(image, facts)` -> `transcode.*(image, ...)`, images that fit another context -> `emit(image)`, bytes again.
Where no meaning is left, `salvage(buffer)` keeps what is whole.

No files, no library, no clock: whoever has a file maps it and hands the mapping in.
"""

from __future__ import annotations

from statecodec import transcode
from statecodec.emit import Chunk, emit
from statecodec.errors import (
    Ambiguous,
    BadField,
    Inconsistent,
    LimitExceeded,
    NotRepresentable,
    StateCodecError,
    StateFormatError,
    TrailingBytes,
    Truncated,
    UnknownVersion,
)
from statecodec.facts import ModelFacts
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
    "Cells",
    "Change",
    "Chunk",
    "Columns",
    "Content",
    "Finding",
    "FindingCode",
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
    "emit",
    "findings",
    "parse",
    "rotated",
    "salvage",
    "to_floats",
    "transcode",
    "validate",
]
