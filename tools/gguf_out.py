"""A small GGUF writer for tools and tests: version 3, little-endian, tensors in the order given."""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from llama_native.user_model import MetaKind, MetaValue, Scalar, TensorSlot

ALIGNMENT = 32
_ARRAY = 9
_FORMATS = {
    MetaKind.U8: "<B",
    MetaKind.I8: "<b",
    MetaKind.U16: "<H",
    MetaKind.I16: "<h",
    MetaKind.U32: "<I",
    MetaKind.I32: "<i",
    MetaKind.F32: "<f",
    MetaKind.BOOL: "<?",
    MetaKind.U64: "<Q",
    MetaKind.I64: "<q",
    MetaKind.F64: "<d",
}


def text_bytes(text: str) -> bytes:
    """Encode a string as GGUF does: u64 length [bytes], then UTF-8."""
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def value_bytes(item: MetaValue) -> bytes:
    """Encode one key-value pair.

    Args:
        item: the pair; a tuple becomes an array.

    Returns:
        Key, type, and value as they stand in the file.
    """
    head = text_bytes(item.key)
    if isinstance(item.value, tuple):
        body = b"".join(_scalar(item.kind, value) for value in item.value)
        return head + struct.pack("<IIQ", _ARRAY, item.kind.gguf_type, len(item.value)) + body
    return head + struct.pack("<I", item.kind.gguf_type) + _scalar(item.kind, item.value)


def header_bytes(metadata: Sequence[MetaValue], tensors: Sequence[TensorSlot]) -> bytes:
    """Encode everything before the tensor data.

    Args:
        metadata: the key-value pairs.
        tensors: the tensors; their data follow each other, each aligned to ``ALIGNMENT`` bytes.

    Returns:
        The header, padded to the start of the data.
    """
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    parts += [value_bytes(item) for item in metadata]
    offset = 0
    for slot in tensors:
        parts.append(text_bytes(slot.name) + struct.pack("<I", len(slot.dims)))
        parts.append(struct.pack(f"<{len(slot.dims)}QIQ", *slot.dims, slot.type_id, offset))
        offset += padded(slot.n_bytes)
    header = b"".join(parts)
    return header + b"\0" * (padded(len(header)) - len(header))


def padded(n_bytes: int) -> int:
    """Round a size up to the alignment, bytes."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def write_gguf(
    path: Path, metadata: Sequence[MetaValue], tensors: Sequence[TensorSlot], data: Iterable[bytes | memoryview]
) -> None:
    """Write a GGUF file whole or not at all.

    Args:
        path: where; replaced when everything has been written.
        metadata: the key-value pairs.
        tensors: the tensors.
        data: their data in the same order, ``n_bytes`` each.

    Raises:
        ValueError: a tensor's data has another size than its slot.
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(header_bytes(metadata, tensors))
            for slot, body in _paired(tensors, data):
                file.write(body)
                file.write(b"\0" * (padded(slot.n_bytes) - slot.n_bytes))
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _paired(
    tensors: Sequence[TensorSlot], data: Iterable[bytes | memoryview]
) -> Iterator[tuple[TensorSlot, memoryview]]:
    """Pair slots with their data and check the sizes."""
    for slot, body in zip(tensors, data, strict=True):
        view = memoryview(body).cast("B")
        if len(view) != slot.n_bytes:
            text = f"tensor {slot.name} takes {slot.n_bytes} bytes, {len(view)} were given"
            raise ValueError(text)
        yield slot, view


def _scalar(kind: MetaKind, value: Scalar) -> bytes:
    """Encode one value of a kind."""
    return text_bytes(str(value)) if kind is MetaKind.STR else struct.pack(_FORMATS[kind], value)
