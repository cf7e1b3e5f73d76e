"""Changes of how rows are stored: V value by value or cell by cell, and the type of K and V.

Laws:
1. A side whose type and rotation stay as they are keeps its very bytes.
2. Rotation is undone before rows are numbers and redone after, with the blocks that are stated where bytes do not say.
3. Rotation that nobody knows is refused, never assumed: rows that are wrongly rotated load and give nonsense.
"""

from __future__ import annotations

import enum
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from statecodec.errors import NotRepresentable, raises_bare
from statecodec.image import Change, KvStream, StateImage
from statecodec.quants import error_bound, from_floats, rotated, to_floats
from statecodec.regroup import (
    STATE_IT,
    Rotations,
    as_bytes,
    changed,
    each_stream,
    require_whole,
    rotation_of_section,
)
from statecodec.tensor_types import TYPE_TABLE, TensorType, row_bytes
from statecodec.views import Columns, Rotation, Rows

_TILE_ROWS = 256
_TILE_WORDS = 128
_SLICE_VALUES = 1 << 18


class VForm(enum.Enum):
    """How a state holds V."""

    PLAIN = "plain"
    TRANSPOSED = "transposed"
    ABSENT = "absent"


class Fit(enum.Enum):
    """Whether a state of one form can be given to a context of another."""

    SAME = "same"
    CONVERTIBLE = "convertible"
    REFUSED = "refused"


def v_form(image: StateImage) -> VForm | None:
    """How the main cache holds V; None where no cell or no layer shows it."""
    shown = [stream for stream in image.streams() if stream.keys]
    if not shown:
        return None
    if not shown[0].values:
        return VForm.ABSENT
    return VForm.TRANSPOSED if shown[0].v_trans else VForm.PLAIN


def v_fit(source: VForm, target: VForm) -> Fit:
    """Whether V of one form fits another: the two present ones become each other, the absent one only fits itself."""
    if source is target:
        return Fit.SAME
    return Fit.REFUSED if VForm.ABSENT in {source, target} else Fit.CONVERTIBLE


@raises_bare
def to_v_trans(image: StateImage, *, v_trans: bool) -> StateImage:
    """Store V value by value (flash attention off) or cell by cell (on).

    Args:
        image: a whole state.
        v_trans: what is wanted.

    Returns:
        The state with V so; exact, and byte-identical when taken back.

    Raises:
        NotRepresentable: V is quantized and would have to be cut into values.
    """
    require_whole(image, "V transposition")
    if all(stream.v_trans == v_trans for stream in image.streams()):
        return image
    sections = each_stream(image, lambda _, stream: _transposed(stream, v_trans=v_trans))
    return changed(image, sections, Change("V transposed" if v_trans else "V made plain"))


def _transposed(stream: KvStream, *, v_trans: bool) -> KvStream:
    if stream.v_trans == v_trans:
        return stream
    values: list[Rows | Columns] = []
    for layer in stream.values:
        if isinstance(layer, Columns):
            data = as_bytes(turned(layer.values()))
            values.append(Rows(layer.offset, layer.kind, layer.row_bytes, data))
        elif TYPE_TABLE[layer.kind].is_quantized:
            found, wanted = f"{layer.kind.name} rows", "transposed V, which holds single values"
            raise NotRepresentable("V", found, wanted, "Convert V to f16 first.")
        else:
            values.append(Columns(layer.offset, layer.kind, layer.n_values, as_bytes(turned(layer.values()))))
    return replace(stream, v_trans=v_trans, values=tuple(values))  # type: ignore[arg-type]


def turned(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The transposed array in C order.

    Values are moved eight bytes at a time, in tiles that stay in the cache: a tile is copied (its rows would else lie a
    power of two apart and fight for the same cache lines), turned, and its words taken apart into their values.
    """
    n_rows, n_columns = array.shape
    out: npt.NDArray[Any] = np.empty((n_columns, n_rows), dtype=array.dtype)
    group = 8 // array.itemsize
    whole = n_columns - n_columns % group
    wide = array[:, :whole].view(np.uint64)
    grouped = out[:whole].reshape(-1, group, n_rows)
    tile = np.empty((_TILE_ROWS, _TILE_WORDS + 1), dtype=np.uint64)
    flipped = np.empty((_TILE_WORDS, _TILE_ROWS), dtype=np.uint64)
    parts = flipped.view(array.dtype).reshape(_TILE_WORDS, _TILE_ROWS, group)
    for top in range(0, n_rows, _TILE_ROWS):
        bottom = min(top + _TILE_ROWS, n_rows)
        for left in range(0, wide.shape[1], _TILE_WORDS):
            right = min(left + _TILE_WORDS, wide.shape[1])
            tile[: bottom - top, : right - left] = wide[top:bottom, left:right]
            flipped[: right - left, : bottom - top] = tile[: bottom - top, : right - left].T
            for place in range(group):
                grouped[left:right, place, top:bottom] = parts[: right - left, : bottom - top, place]
    out[whole:] = array[:, whole:].T
    return out


@raises_bare
def to_types(
    image: StateImage,
    *,
    type_k: TensorType | None = None,
    type_v: TensorType | None = None,
    source_rotation: Rotations = None,
    rotation: Rotations = None,
) -> StateImage:
    """Store K and V of the attention sections as other types.

    Args:
        image: a whole state.
        type_k: wanted type of K; None: as it is.
        type_v: wanted type of V; None: as it is.
        source_rotation: blocks that the rows are rotated with, for layouts whose bytes do not say; one for all
            attention sections, or one for each.
        rotation: blocks that the result is to be rotated with; must be stated for quantized types. Unstated, plain
            results of quantized rows are not rotated, and other rows keep what they have.

    Returns:
        The state with rows of these types; its last change has the error bound.

    Raises:
        NotRepresentable: the rotation is unknown, or rows do not fit the type.
    """
    require_whole(image, "the cache type")
    bound = 0.0
    is_exact = True

    def edit(number: int, stream: KvStream) -> KvStream:
        nonlocal bound, is_exact
        told, wanted = rotation_of_section(source_rotation, number), rotation_of_section(rotation, number)
        before = stream.rotation or told or _implied(stream)
        k = _Side("K", before and before.k, wanted and wanted.k, type_k)
        v = _Side("V", before and before.v, wanted and wanted.v, type_v)
        keys = tuple(k.rows(layer) for layer in stream.keys)
        values = tuple(v.columns(layer) if isinstance(layer, Columns) else v.rows(layer) for layer in stream.values)
        bound = max(bound, k.bound, v.bound)
        is_exact = is_exact and k.is_exact and v.is_exact
        said = None if stream.rotation is None else Rotation(k.after or 0, v.after or 0)
        return replace(stream, keys=keys, values=values, rotation=said)  # type: ignore[arg-type]

    sections = each_stream(image, edit)
    names = [f"{side} to {kind.name.lower()}" for side, kind in (("K", type_k), ("V", type_v)) if kind is not None]
    return changed(image, sections, Change(" and ".join(names) or "rotation", is_exact, bound))


def _implied(stream: KvStream) -> Rotation | None:
    """No rotation, where that is certain without a word: plain rows of a cache that holds V.

    Source: llama-kv-cache.cpp rotates quantized rows, and plain ones only in indexers, which hold K alone.
    """
    return Rotation(0, 0) if stream.values and not stream.is_quantized else None


class _Side:
    """K or V of one stream on the way to another type.

    Args:
        name: K or V.
        before: block that the rows are rotated with; None: unknown.
        wanted: block that the result is to be rotated with; None: not stated.
        kind: the wanted type; None: as it is.
    """

    __slots__ = ("after", "before", "bound", "is_exact", "kind", "name", "wanted")

    def __init__(self, name: str, before: int | None, wanted: int | None, kind: TensorType | None) -> None:
        """Nothing is converted yet."""
        self.name = name
        self.before = before
        self.wanted = wanted
        self.kind = kind
        self.after = before
        self.bound = 0.0
        self.is_exact = True

    def rows(self, layer: Rows) -> Rows:
        """One layer's rows."""
        kind = layer.kind if self.kind is None else self.kind
        before, after = self._blocks(layer.kind, kind)
        if (kind, after) == (layer.kind, before):
            return layer
        raw = layer.raw()
        size = row_bytes(kind, layer.n_values)
        packed: npt.NDArray[np.uint8] = np.empty((len(raw), size), dtype=np.uint8)
        # In slices that stay in the cache: numbers of a whole layer would be written to memory and read back.
        step = max(1, _SLICE_VALUES // layer.n_values)
        for start in range(0, len(raw), step):
            values = rotated(to_floats(layer.kind, raw[start : start + step]), before)
            packed[start : start + step] = from_floats(kind, rotated(values, after))
        self._count(kind, packed, turns=before != after)
        return Rows(layer.offset, kind, size, as_bytes(packed))

    def columns(self, layer: Columns) -> Columns:
        """One layer's transposed V."""
        kind = layer.kind if self.kind is None else self.kind
        if TYPE_TABLE[kind].is_quantized:
            found, wanted = "transposed V", f"{kind.name} rows"
            raise NotRepresentable("V", found, wanted, "Make V plain first (flash attention on).")
        before, after = self._blocks(layer.kind, kind)
        if (kind, after) == (layer.kind, before):
            return layer
        raw = layer.values().view(np.uint8)
        values = to_floats(layer.kind, raw)
        if before != after:
            values = turned(rotated(rotated(turned(values), before), after))
        packed = from_floats(kind, values)
        self._count(kind, packed, turns=before != after)
        return replace(layer, kind=kind, data=as_bytes(packed))

    def _blocks(self, source: TensorType, target: TensorType) -> tuple[int, int]:
        """Rotation blocks before and after.

        Raises:
            NotRepresentable: one of them is needed and unknown.
        """
        was_quantized, will_be = TYPE_TABLE[source].is_quantized, TYPE_TABLE[target].is_quantized
        if source is target and self.wanted in {None, self.before}:
            return self.before or 0, self.before or 0
        before = self.before
        if before is None:
            raise NotRepresentable(f"{self.name} rows", "an unknown rotation", f"{target.name} rows", STATE_IT)
        after = self.wanted
        if after is None and will_be and source is not target:
            raise NotRepresentable(f"{self.name} rows", "no stated rotation", f"{target.name} rows", STATE_IT)
        if after is None:
            after = 0 if was_quantized else before
        self.after = after
        return before, after

    def _count(self, kind: TensorType, packed: npt.NDArray[np.uint8], *, turns: bool) -> None:
        """Note how exact one layer is."""
        # Numbers of every type fit into 32 bits; all else is rounded, and so is what was turned.
        if turns or kind is not TensorType.F32:
            self.bound = max(self.bound, error_bound(kind, packed))
            self.is_exact = False
