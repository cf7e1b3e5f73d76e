"""Compares two states: the same cells with the same rows, however each of them is written.

Laws:
    1. Cells are paired by sequence and position, rows of a pair by section and layer; order, streams and form are how a
       state is written and not what it holds.
    2. Rows that are the same bytes are equal; others are compared as numbers, unrotated where the rotations differ.
    3. Rows are looked at in slices, so a state of any size takes little memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from statecodec import (
    AttentionSection,
    Cells,
    Columns,
    KvStream,
    OpaqueSection,
    RecurrentLayer,
    RecurrentSection,
    Rows,
    StateImage,
    TensorType,
    rotated,
    to_floats,
)

#: Bytes of rows that are looked at in one go.
_SLICE_BYTES = 4 << 20
_QUANTIZED = frozenset(TensorType) - {TensorType.F32, TensorType.F16, TensorType.BF16}
_KEY = np.dtype([("pos", "<i4"), ("x", "<i4"), ("y", "<i4")])

Index = npt.NDArray[np.intp]
_Layers = tuple[Rows | Columns, ...]


@dataclass(slots=True)
class RowError:
    """The difference of rows so far, as sums over all of their values.

    Attributes:
        squares: sum of the squares of the differences.
        power: sum of the squares of the first state's values.
        n_rows: rows compared.
        is_equal: whether all of them were the same bytes.
    """

    squares: float = 0.0
    power: float = 0.0
    n_rows: int = 0
    is_equal: bool = True

    @property
    def nmse(self) -> float:
        """The normalised mean square error; infinite where a value is no finite number, or all of the first are 0."""
        if not self.squares:
            return 0.0
        ratio = self.squares / self.power if self.power else np.inf
        return float(ratio) if np.isfinite(ratio) else np.inf

    def add(self, other: RowError) -> None:
        """Count another one in."""
        self.squares += other.squares
        self.power += other.power
        self.n_rows += other.n_rows
        self.is_equal = self.is_equal and other.is_equal

    def to_json(self) -> dict[str, Any]:
        """As an object; an infinite error is null."""
        return {"equal": self.is_equal, "nmse": self.nmse, "n_rows": self.n_rows}


@dataclass(slots=True)
class Comparison:
    """What two states have in common and what not.

    Attributes:
        differences: what they hold differently, as (what, first, second).
        writings: what is only written differently, in the same form.
        notes: what the reader of the result has to know.
        sections: errors of K, V, R and S by section.
    """

    differences: list[tuple[str, Any, Any]] = field(default_factory=list)
    writings: list[tuple[str, Any, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sections: list[dict[str, RowError]] = field(default_factory=list)
    n_cells: list[int] = field(default_factory=list)

    @property
    def nmse(self) -> float:
        """The largest error of any side of any section."""
        return max((error.nmse for section in self.sections for error in section.values()), default=0.0)

    def is_same(self, limit: float) -> bool:
        """Whether both hold the same, within an error of rows."""
        return not self.differences and self.nmse <= limit

    def to_json(self, limit: float) -> dict[str, Any]:
        """As an object."""
        return {
            "same": self.is_same(limit),
            "nmse": self.nmse,
            "differences": [{"what": what, "first": one, "second": two} for what, one, two in self.differences],
            "written_differently": [{"what": what, "first": one, "second": two} for what, one, two in self.writings],
            "notes": self.notes,
            "sections": [
                {"section": index, "n_cells": count, **{side: error.to_json() for side, error in sides.items()}}
                for index, (sides, count) in enumerate(zip(self.sections, self.n_cells, strict=True))
            ],
        }


def compare(one: StateImage, two: StateImage) -> Comparison:
    """Compare two states; errors are relative to the values of the first."""
    found = Comparison()
    _heads(found, one, two)
    kinds = [[section.kind.value for section in image.sections] for image in (one, two)]
    if kinds[0] != kinds[1]:
        found.differences.append(("sections", kinds[0], kinds[1]))
        return found
    pairs = _paired(found, one, two)
    for index, (first, second) in enumerate(zip(one.sections, two.sections, strict=True)):
        sides: dict[str, RowError] = {}
        found.sections.append(sides)
        found.n_cells.append(0)
        where = f"section {index}"
        if isinstance(first, OpaqueSection) or isinstance(second, OpaqueSection):
            if getattr(first, "data", None) != getattr(second, "data", None):
                found.differences.append((where, "opaque bytes", "other bytes"))
            continue
        if isinstance(first, AttentionSection) and isinstance(second, AttentionSection):
            _writings(found, where, first, second)
        for ids in pairs:
            _cells(found, where, sides, ids, _held(one, first, ids[0]), _held(two, second, ids[1]))
    return found


def _heads(found: Comparison, one: StateImage, two: StateImage) -> None:
    for what, first, second in (
        ("form", one.form.value, two.form.value),
        ("version word", one.version_word, two.version_word),
        ("layout", _names(one), _names(two)),
        ("source sequence", one.source_seq_id, two.source_seq_id),
    ):
        if first != second:
            found.writings.append((what, first, second))
    # What one form does not say is no contradiction.
    if None not in {one.architecture, two.architecture} and one.architecture != two.architecture:
        found.differences.append(("architecture", one.architecture, two.architecture))
    if one.tokens is not None and two.tokens is not None:
        mine, other = one.tokens.text, two.tokens.text
        shared = min(len(mine), len(other))
        apart = np.flatnonzero(mine[:shared] != other[:shared])
        if len(mine) != len(other) or len(apart):
            where = int(apart[0]) if len(apart) else shared
            texts = [f"{len(some)} tokens, at {where}: {some[where : where + 4].tolist()}" for some in (mine, other)]
            found.differences.append(("tokens", texts[0], texts[1]))
    if one.content is not two.content:
        found.differences.append(("content", one.content.value, two.content.value))
    if one.outputs is not None and two.outputs is not None:
        if one.outputs.ids.tolist() != two.outputs.ids.tolist():
            found.differences.append(("output ids", one.outputs.ids.tolist()[:16], two.outputs.ids.tolist()[:16]))
        if not np.array_equal(one.outputs.logits, two.outputs.logits):
            found.differences.append(("logits", one.outputs.logits.shape, two.outputs.logits.shape))


def _names(image: StateImage) -> str:
    return " or ".join(sorted(layout.name for layout in image.layouts))


def _paired(found: Comparison, one: StateImage, two: StateImage) -> list[tuple[int, int]]:
    """Sequences that belong together: those of one id; where each state has a single one, these two."""
    first, second = list(one.sequences()), list(two.sequences())
    if len(first) == len(second) == 1:
        if first != second:
            is_same = one.form.is_sequence or two.form.is_sequence
            (found.writings if is_same else found.differences).append(("sequence id", first[0], second[0]))
        return [(first[0], second[0])]
    if first != second:
        found.differences.append(("sequences", first, second))
    return [(seq_id, seq_id) for seq_id in first if seq_id in second]


def _writings(found: Comparison, where: str, one: AttentionSection, two: AttentionSection) -> None:
    shapes = []
    for section in (one, two):
        stream = next((stream for _, stream in section.filled()), None)
        shapes.append(
            {
                "streams": len(section.streams),
                "extra record": section.ext_bytes,
                "V transposed": stream.v_trans if stream and stream.values else None,
                "rotation": tuple(stream.rotation) if stream and stream.rotation is not None else None,
                "type of K": stream.keys[0].kind.name.lower() if stream and stream.keys else None,
                "type of V": stream.values[0].kind.name.lower() if stream and stream.values else None,
            }
        )
    for what, value in shapes[0].items():
        if value != shapes[1][what]:
            found.writings.append((f"{where}: {what}", value, shapes[1][what]))


@dataclass(frozen=True, slots=True)
class _Held:
    """The cells of one sequence in one part of a section: `index` into `cells`, and its layers by side."""

    cells: Cells
    index: Index
    sides: dict[str, _Layers]
    rotation: dict[str, int | None]


def _held(image: StateImage, section: AttentionSection | RecurrentSection, seq_id: int) -> list[_Held]:
    """Where the cells of one sequence are; all cells of a sequence state, whatever ids are stored."""
    parts: list[tuple[Cells, dict[str, _Layers], dict[str, int | None]]] = []
    if isinstance(section, AttentionSection):
        for _, stream in section.filled():
            parts.append((stream.cells, {"k": stream.keys, "v": stream.values}, rotation_of(stream)._asdict()))
    else:
        parts.append((section.cells, _recurrent_sides(section.layers), {}))
    found = []
    for cells, sides, rotation in parts:
        if image.form.is_sequence:
            index: Index = np.arange(len(cells))
        else:
            index = np.repeat(np.arange(len(cells)), cells.n_seq_id)[cells.seq_ids == seq_id]
        if len(index):
            found.append(_Held(cells, index, sides, rotation))
    return found


class KnownRotation(NamedTuple):
    """Hadamard blocks of K and V; None where nothing says."""

    k: int | None
    v: int | None


def rotation_of(stream: KvStream) -> KnownRotation:
    """What is known of a stream's rotation, by its words or because plain rows of a cache that holds V never are."""
    if stream.rotation is not None:
        return KnownRotation(stream.rotation.k, stream.rotation.v)
    is_quantized = [any(layer.kind in _QUANTIZED for layer in some) for some in (stream.keys, stream.values)]
    unknown_k = is_quantized[0] or not stream.values
    return KnownRotation(None if unknown_k else 0, None if is_quantized[1] else 0)


def _recurrent_sides(layers: tuple[RecurrentLayer, ...]) -> dict[str, _Layers]:
    return {
        "r": tuple(layer.r for layer in layers),
        "history": tuple(layer.history for layer in layers if layer.history is not None),
        "s": tuple(layer.s for layer in layers),
    }


def _cells(
    found: Comparison,
    where: str,
    sides: dict[str, RowError],
    ids: tuple[int, int],
    one: list[_Held],
    two: list[_Held],
) -> None:
    both_ext = all(part.cells.ext is not None for part in (*one, *two))
    keys = [np.concatenate([_keys(p, with_ext=both_ext) for p in parts] or [np.empty(0, _KEY)]) for parts in (one, two)]
    _, first, second = np.intersect1d(keys[0], keys[1], return_indices=True)
    found.n_cells[-1] += len(first)
    name = f"{where}, sequence {ids[0]}"
    if not len(first) == len(keys[0]) == len(keys[1]):
        lacking = [np.setdiff1d(keys[0], keys[1])["pos"], np.setdiff1d(keys[1], keys[0])["pos"]]
        texts = [f"{len(k)} cells, {len(lack)} of its own{_few(lack)}" for k, lack in zip(keys, lacking, strict=True)]
        found.differences.append((f"{name}: positions", texts[0], texts[1]))
    starts = [np.cumsum([0, *(len(part.index) for part in parts)]) for parts in (one, two)]
    for i, part in enumerate(one):
        for j, other in enumerate(two):
            mine = (first >= starts[0][i]) & (first < starts[0][i + 1])
            mine &= (second >= starts[1][j]) & (second < starts[1][j + 1])
            if np.any(mine):
                here, there = part.index[first[mine] - starts[0][i]], other.index[second[mine] - starts[1][j]]
                _rows(found, name, sides, (part, here), (other, there))


def _few(positions: npt.NDArray[np.int32]) -> str:
    shown = ", ".join(map(str, positions[:4].tolist()))
    return f" ({shown}{', ...' if len(positions) > 4 else ''})" if len(positions) else ""


def _keys(part: _Held, *, with_ext: bool) -> npt.NDArray[Any]:
    keys = np.zeros(len(part.index), dtype=_KEY)
    keys["pos"] = part.cells.pos[part.index]
    if with_ext and part.cells.ext is not None:
        keys["x"], keys["y"] = part.cells.ext["x"][part.index], part.cells.ext["y"][part.index]
    return keys


def _rows(
    found: Comparison, name: str, sides: dict[str, RowError], one: tuple[_Held, Index], two: tuple[_Held, Index]
) -> None:
    for side, layers in one[0].sides.items():
        others = two[0].sides.get(side, ())
        widths = [[layer.n_values for layer in some] for some in (layers, others)]
        if widths[0] != widths[1]:
            shown = [f"{len(some)} layers of {sorted(set(some))} values" for some in widths]
            difference = (f"{name}: {side.upper()}", shown[0], shown[1])
            if difference not in found.differences:
                found.differences.append(difference)
            continue
        blocks = (one[0].rotation.get(side), two[0].rotation.get(side))
        if None in blocks and blocks[0] != blocks[1]:
            note = f"{name}: {side.upper()} of one state is rotated by blocks that nothing says: compared as stored"
            found.notes += [] if note in found.notes else [note]
        for first, second in zip(layers, others, strict=True):
            error = sides.setdefault(side, RowError())
            for here, there in _slices(first, one[1], two[1]):
                error.add(_error(first, here, second, there, blocks))


def _slices(layer: Rows | Columns, here: Index, there: Index) -> Iterator[tuple[Index, Index]]:
    step = max(1, _SLICE_BYTES // max(1, layer.row_bytes))
    for start in range(0, len(here), step):
        yield here[start : start + step], there[start : start + step]


def _error(
    one: Rows | Columns, here: Index, two: Rows | Columns, there: Index, blocks: tuple[int | None, int | None]
) -> RowError:
    first, second = _taken(one, here), _taken(two, there)
    is_alike = one.kind is two.kind and blocks[0] == blocks[1]
    if is_alike and np.array_equal(first, second):
        return RowError(n_rows=len(here))
    with np.errstate(all="ignore"):
        numbers = [to_floats(one.kind, first), to_floats(two.kind, second)]
        if None not in blocks and blocks[0] != blocks[1]:
            numbers = [rotated(some, block or 0) for some, block in zip(numbers, blocks, strict=True)]
        power = float(np.sum(np.square(numbers[0], dtype=np.float64)))
        squares = float(np.sum(np.square(numbers[0] - numbers[1], dtype=np.float64)))
    return RowError(squares, power, len(here), is_equal=False)


def _taken(layer: Rows | Columns, index: Index) -> npt.NDArray[np.uint8]:
    """The rows of some cells; uint8, shape [n, bytes of a row]."""
    is_run = len(index) > 0 and int(index[-1]) - int(index[0]) == len(index) - 1 and bool(np.all(np.diff(index) == 1))
    chosen = slice(int(index[0]), int(index[-1]) + 1) if is_run else index
    if isinstance(layer, Columns):
        return np.ascontiguousarray(layer.values()[:, chosen].T).view(np.uint8)
    raw = layer.raw()
    return raw[chosen] if layer.row_bytes else np.empty((len(index), 0), dtype=np.uint8)
