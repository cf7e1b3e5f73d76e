"""Writes headers of GGUF files anew: all parts in one, with a tied output, or with its first layers alone. Pure."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

from splitctl.model.header import GgufHeader, TensorInfo

_OUTPUT, _EMBEDDING = "output.weight", "token_embd.weight"
_U16, _U32 = 2, 4
_LAYER = re.compile(r"^blk\.(\d+)\.(.+)$")


class Unfit(Exception):
    """Why a header cannot be written anew, in words."""


def _entry(name: str, dims: Sequence[int], type_id: int, offset: int) -> bytes:
    """Write one entry of the tensor list."""
    raw = name.encode()
    return struct.pack(f"<Q{len(raw)}sI{len(dims)}QIQ", len(raw), raw, len(dims), *dims, type_id, offset)


def _alignment(header: GgufHeader) -> int:
    found = header.values.get("general.alignment", 32)
    return found if isinstance(found, int) else 32


def padded(n_bytes: int, header: GgufHeader) -> int:
    """Round a size up to the alignment of a file's data, bytes."""
    alignment = _alignment(header)
    return -(-n_bytes // alignment) * alignment


def _pairs_of(header: GgufHeader, raw: bytes) -> bytes:
    """Cut the metadata out of a header as it stands in the file.

    Raises:
        Unfit: the tensor list is not written as it was read.
    """
    listed = b"".join(_entry(one.name, one.dims, one.type_id, one.offset) for one in header.tensors)
    start = header.header_bytes - len(listed)
    if raw[start : header.header_bytes] != listed:
        raise Unfit("its list of tensors has names that are no text")
    return raw[24:start]


def _head(header: GgufHeader, pairs: bytes, listed: Sequence[bytes]) -> bytes:
    """Write a header, padded to the start of the data."""
    n_pairs = len({*header.values, *header.array_sizes})
    head = struct.pack("<4sIQQ", b"GGUF", header.version, len(listed), n_pairs) + pairs + b"".join(listed)
    return head + b"\0" * (padded(len(head), header) - len(head))


def joined(headers: Sequence[GgufHeader], raw: bytes) -> bytes:
    """Write the header of all parts in one file, whose data follow each other behind it.

    Args:
        headers: of every part.
        raw: that of the first one as it stands in the file, padded.

    Raises:
        Unfit: they cannot be joined.
    """
    first = headers[0]
    if any(tensor.n_bytes is None for one in headers for tensor in one.tensors):
        raise Unfit("it has tensors of a type that is not known")
    if len(headers) == 1:
        return raw + b"\0" * (first.data_offset - len(raw))
    if {_alignment(one) for one in headers} != {_alignment(first)}:
        raise Unfit("its parts are aligned differently")
    pairs = _alone(_pairs_of(first, raw))
    listed, at = [], 0
    for one in headers:
        listed += [_entry(tensor.name, tensor.dims, tensor.type_id, at + tensor.offset) for tensor in one.tensors]
        n_data = one.file_bytes - one.data_offset
        if one is not headers[-1] and n_data != padded(n_data, first):
            raise Unfit("the data of its parts do not follow each other")
        at += n_data
    return _head(first, pairs, listed)


def _alone(pairs: bytes) -> bytes:
    """Let metadata of a first part say that there is no other."""
    for key in (b"split.count", b"split.no"):
        found = struct.pack(f"<Q{len(key)}sI", len(key), key, _U16)
        at = pairs.find(found)
        if at >= 0:
            pairs = pairs[: at + len(found)] + b"\0\0" + pairs[at + len(found) + 2 :]
        elif key == b"split.count":
            raise Unfit("it says in an unknown way how many parts it has")
    return pairs


def first_layers(
    headers: Sequence[GgufHeader], raw: bytes, least: int
) -> tuple[bytes, list[tuple[GgufHeader, TensorInfo]]] | None:
    """Write the header of a model of the first layers alone: as many as have one of every kind that the model has.

    Args:
        headers: of every part.
        raw: that of the first one as it stands in the file, padded.
        least: fewer layers than these are never enough.

    Returns:
        The header, and the tensors whose data follow behind it in this order, each padded, with the part that each is
        in. None where the model is not of that form, or no smaller for it.

    Raises:
        Unfit: the header cannot be written anew.
    """
    first, architecture = headers[0], headers[0].values.get("general.architecture")
    key = f"{architecture}.block_count".encode()
    n_layer = first.values.get(key.decode())
    tensors = [(header, tensor) for header in headers for tensor in header.tensors]
    layer_of = {tensor.name: found for _, tensor in tensors if (found := _LAYER.match(tensor.name))}
    kinds: dict[int, set[tuple[str, int, tuple[int, ...]]]] = {}
    for _, tensor in tensors:
        if tensor.name in layer_of:
            number, name = layer_of[tensor.name].groups()
            kinds.setdefault(int(number), set()).add((name, tensor.type_id, tensor.dims))
    is_plain = not any(".blk." in tensor.name for _, tensor in tensors)  # an encoder's layers are counted apart
    # What is told of every layer by itself would have to be cut too.
    is_plain = is_plain and n_layer not in first.array_sizes.values()
    if not is_plain or not isinstance(n_layer, int) or sorted(kinds) != list(range(n_layer)):
        return None
    seen: dict[frozenset[tuple[str, int, tuple[int, ...]]], int] = {}
    for number in range(n_layer):
        seen.setdefault(frozenset(kinds[number]), number)
    n_kept = max(1 + max(seen.values()), least)
    if n_kept >= n_layer:
        return None
    kept = [one for one in tensors if one[1].name not in layer_of or int(layer_of[one[1].name][1]) < n_kept]
    pairs = _pairs_of(first, raw)
    before = struct.pack(f"<Q{len(key)}sI", len(key), key, _U32)
    at = pairs.find(before)
    if at < 0:
        return None
    at += len(before)
    pairs = pairs[:at] + struct.pack("<I", n_kept) + pairs[at + 4 :]
    listed, offset = [], 0
    for _, tensor in kept:
        listed.append(_entry(tensor.name, tensor.dims, tensor.type_id, offset))
        offset += padded(tensor.n_bytes or 0, first)
    return _head(first, pairs if len(headers) == 1 else _alone(pairs), listed), kept


def with_output(header: GgufHeader, raw: bytes) -> bytes:
    """Write the metadata for a model whose data the caller gives: a tied output gets the embedding's type."""
    named = {one.name: one for one in header.tensors}
    listed, at = [], 0
    tensors = list(header.tensors)
    if _OUTPUT not in named and _EMBEDDING in named:
        tensors.append(named[_EMBEDDING])
    for index, one in enumerate(tensors):
        name = _OUTPUT if index == len(header.tensors) else one.name
        listed.append(_entry(name, one.dims, one.type_id, at))
        at += padded(one.n_bytes or 0, header)
    return _head(header, _pairs_of(header, raw), listed)
