"""A carry of splitctl taken apart: a safetensors file, whose tensor `state` is a context blob.

Laws:
1. No number of the header is used before it has been held against the bytes that are there.
2. The tensors cover the bytes behind the header without a gap and without two on one place; nothing is copied.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import numpy.typing as npt

from statecodec.cursor import Cursor, view
from statecodec.errors import BadField, ForeignFile, Inconsistent, UnknownVersion, raises_bare
from statecodec.limits import DEFAULT_LIMITS, Limits

if TYPE_CHECKING:
    # collections.abc.Buffer exists from Python 3.12 on; the type checker knows it under this name everywhere.
    from typing_extensions import Buffer

CARRY_FORMAT, CARRY_VERSION = "splitctl-carry", "1"
"""What `format` and `version` say in the header of a carry."""

_DTYPES: Mapping[str, np.dtype[Any]] = {"U8": np.dtype("u1"), "I32": np.dtype("<i4"), "F32": np.dtype("<f4")}
_STATE = "state"
_SIZE_BYTES, _MAX_AXES = 8, 8


@dataclass(frozen=True, slots=True, eq=False)
class Carried:
    """What a carry holds.

    Args:
        metadata: the texts of its header.
        tensors: name -> array; `state` and, for each sequence, `seq.<id>.tokens`, `.logits` and others.

    Lifetime:
        The arrays borrow the buffer.
    """

    metadata: Mapping[str, str]
    tensors: Mapping[str, npt.NDArray[Any]]

    @property
    def state(self) -> memoryview:
        """The state of all sequences, as `parse` reads it; empty without a memory, or where tokens alone were saved."""
        return self.tensors[_STATE].data

    def tokens(self, seq_id: int) -> npt.NDArray[np.int32] | None:
        """The tokens of one sequence; int32, shape [n]; None where there is no such sequence."""
        return self.tensors.get(f"seq.{seq_id}.tokens")


@raises_bare
def carried(buffer: Buffer, limits: Limits = DEFAULT_LIMITS) -> Carried | None:
    """Take a carry apart.

    Args:
        buffer: the bytes of its file, as for `parse`.
        limits: upper bounds.

    Returns:
        Its parts as views; None where the bytes are no safetensors file at all.

    Raises:
        StateFormatError: they are one, and damaged or somebody else's. Checksums are not looked at.
    """
    cursor = Cursor(view(buffer))
    if not _is_safetensors(cursor, limits):
        return None
    n_header = cursor.u64("header size")
    at = cursor.offset
    metadata, slots = _header(cursor.span(n_header, "header"), at)
    if metadata.get("format") != CARRY_FORMAT:
        found = f"a safetensors file of another kind (format {metadata.get('format', 'not said')!r:.40})"
        raise ForeignFile(at, "header", found, f"a carry, whose format is {CARRY_FORMAT!r}")
    if metadata.get("version") != CARRY_VERSION:
        found = f"a carry of version {metadata.get('version', 'not said')!r:.40}"
        raise UnknownVersion(at, "header", found, f"version {CARRY_VERSION!r}")
    tensors = {}
    for name, slot in sorted(slots.items(), key=lambda item: _start(item[1])):
        tensors[name] = _tensor(cursor, name, slot, cursor.offset - at - n_header)
    if cursor.remaining:
        raise Inconsistent(cursor.offset, "end of the tensors", f"{cursor.remaining} bytes more", "the end")
    state = tensors.get(_STATE)
    if state is None or state.dtype != np.uint8 or state.ndim != 1:
        found = "none" if state is None else f"{state.dtype}{list(state.shape)}"
        raise BadField(at, "tensor 'state'", found, "a row of bytes")
    return Carried(metadata, tensors)


def _is_safetensors(cursor: Cursor, limits: Limits) -> bool:
    """Whether the bytes begin with the size of a JSON object; no state does (its first words make a larger number)."""
    head = cursor.fork()
    if head.remaining <= _SIZE_BYTES:
        return False
    return head.u64("header size") <= limits.header_bytes and bytes(head.span(1, "header")) == b"{"


def _header(data: memoryview, at: int) -> tuple[Mapping[str, str], Mapping[str, Any]]:
    """The header's texts, and what it says of each tensor."""
    try:
        slots = json.loads(bytes(data))
    except (ValueError, RecursionError):
        slots = None
    metadata = slots.pop("__metadata__", {}) if isinstance(slots, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise BadField(at, "header", "something else", "a JSON object of tensors and texts")
    return metadata, slots


def _start(slot: Any) -> int:
    """Where a tensor says that it begins; what says so in no way is refused later."""
    try:
        first = slot["data_offsets"][0]
    except (TypeError, KeyError, IndexError):
        return 0
    return first if isinstance(first, int) else 0


def _tensor(cursor: Cursor, name: str, slot: Any, start: int) -> npt.NDArray[Any]:
    """The next tensor, which begins `start` bytes behind the header; moves behind it."""
    where = f"tensor {name!r:.60}"
    said = slot if isinstance(slot, dict) else {}
    dtype, shape, offsets = _DTYPES.get(str(said.get("dtype"))), said.get("shape"), said.get("data_offsets")
    if dtype is None or not _are_counts(shape, _MAX_AXES) or not _are_counts(offsets, 2):
        raise BadField(cursor.offset, where, f"{slot!r:.80}", f"dtype of {', '.join(_DTYPES)}, shape and data_offsets")
    count = math.prod(shape)
    wanted = [start, start + count * dtype.itemsize]
    if offsets != wanted:
        raise Inconsistent(cursor.offset, f"{where} offsets", offsets, wanted)
    cursor.require(count * dtype.itemsize, where)
    row = cursor.records(dtype, count, where)
    try:
        return row.reshape(shape)
    except ValueError as error:  # an axis of 0 makes any others small enough for the file, and not for numpy
        raise BadField(cursor.offset, f"{where} shape", f"{shape!r:.80}", "lengths that an array can have") from error


def _are_counts(value: Any, most: int) -> TypeGuard[list[int]]:
    """Whether JSON has a list of whole numbers from 0 on here, and not too long a one."""
    return isinstance(value, list) and len(value) <= most and all(type(one) is int and one >= 0 for one in value)
