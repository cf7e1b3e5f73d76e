"""Cells: a run-by-run walk over records whose length depends on their own content.

Every field of a cell is four bytes, and nearly always all cells belong to equally many sequences, so a run of such
cells is one array look-up and its laws are checked on whole arrays. Only a change of the count costs a step.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from statecodec.cursor import Cursor
from statecodec.errors import BadField, LimitExceeded
from statecodec.layouts import EXT_DTYPES
from statecodec.limits import Limits
from statecodec.views import Cells

_HEADER_BYTES = 8
_FIRST_WINDOW = 256


@dataclass(frozen=True, slots=True)
class CellRule:
    """What cells may look like.

    Args:
        ext_bytes: bytes of the extra record, 0 for none.
        n_seq_min: fewest sequences that a cell belongs to.
        n_seq_max: most.
    """

    ext_bytes: int
    n_seq_min: int
    n_seq_max: int


@functools.cache
def record_dtype(ext_bytes: int, n_seq_id: int) -> np.dtype[Any]:
    """The fixed-size record of a cell with so many sequence ids."""
    fields: list[tuple[Any, ...]] = [("pos", "<i4"), ("n_seq_id", "<u4")]
    if ext_bytes:
        fields.append(("ext", EXT_DTYPES[ext_bytes]))
    if n_seq_id:
        fields.append(("seq_id", "<i4", (n_seq_id,)))
    return np.dtype(fields)


def min_cell_bytes(rule: CellRule) -> int:
    """The fewest bytes that a cell takes under a rule."""
    return record_dtype(rule.ext_bytes, rule.n_seq_min).itemsize


def read_cells(cursor: Cursor, count: int, rule: CellRule, limits: Limits, where: str) -> Cells:
    """Read `count` cells and move behind them.

    Args:
        cursor: at the first cell; is moved.
        count: cells, already checked against what remains.
        rule: what they may look like.
        limits: upper bounds.
        where: the section and stream, for messages.

    Returns:
        Views on the buffer where one record size fits all cells; otherwise small copies of the cells' fields.

    Raises:
        StateFormatError: a cell breaks its rule or the bytes end.
    """
    start = cursor.offset
    runs: list[npt.NDArray[Any]] = []
    left = count
    while left:
        if len(runs) >= limits.n_cell_runs:
            raise LimitExceeded(cursor.offset, f"{where} cells", "more runs", f"at most {limits.n_cell_runs}")
        run = _read_run(cursor, left, rule, limits, where, first=not runs)
        runs.append(run)
        left -= len(run)
    return _assemble(start, runs, rule)


def _read_run(
    cursor: Cursor, left: int, rule: CellRule, limits: Limits, where: str, *, first: bool
) -> npt.NDArray[Any]:
    """Take the longest run of cells with as many sequences as the next one has."""
    ahead = cursor.fork()
    ahead.i32(f"{where} cell pos")
    offset = ahead.offset
    n_seq_id = ahead.u32(f"{where} cell n_seq_id")
    if not rule.n_seq_min <= n_seq_id <= rule.n_seq_max:
        raise BadField(offset, f"{where} cell n_seq_id", n_seq_id, f"{rule.n_seq_min} to {rule.n_seq_max}")
    dtype = record_dtype(rule.ext_bytes, n_seq_id)
    # All cells alike is the usual case; after a change short windows keep the whole walk linear.
    window = left if first else min(left, _FIRST_WINDOW)
    length = _alike(cursor, dtype, window, n_seq_id)
    while length == window < left:
        window = min(left, window * 4)
        length = _alike(cursor, dtype, window, n_seq_id)
    start = cursor.offset
    # Where not one whole record is left, asking for one says so.
    run = cursor.records(dtype, max(length, 1), f"{where} cells")
    _check_run(run, start, limits.n_seq, where)
    return run


def _alike(cursor: Cursor, dtype: np.dtype[Any], window: int, n_seq_id: int) -> int:
    """How many of the next `window` records have that count; one that the bytes cut off is left to the next run."""
    seen = cursor.peek_records(dtype, window)
    differs = seen["n_seq_id"] != n_seq_id
    return int(differs.argmax()) if differs.any() else len(seen)


def _check_run(run: npt.NDArray[Any], start: int, n_seq: int, where: str) -> None:
    """Refuse positions, sequence ids and tokens that no library writes."""
    size = run.dtype.itemsize
    negative = run["pos"] < 0
    if negative.any():
        index = int(negative.argmax())
        raise BadField(start + index * size, f"{where} cell pos", int(run["pos"][index]), "0 or more")
    names = run.dtype.names or ()
    if "ext" in names:
        # Places in an image count from 0; the token is the null token (-1) where an image stands.
        for number, (word, least) in enumerate(zip(run.dtype["ext"].names or (), (0, 0, -1), strict=False)):
            bad = run["ext"][word] < least
            if bad.any():
                index = int(bad.argmax())
                at = start + index * size + _HEADER_BYTES + 4 * number
                raise BadField(at, f"{where} cell {word}", int(run["ext"][word][index]), f"{least} or more")
    if "seq_id" not in names:
        return
    ids = run["seq_id"]
    # The library walks its sequences upwards, so ids of a cell ascend; that also rules out repetition.
    wrong = (ids[:, 0] < 0) | (ids[:, -1] >= n_seq)
    if ids.shape[1] > 1:
        wrong |= (ids[:, 1:] <= ids[:, :-1]).any(axis=1)
    if wrong.any():
        index = int(wrong.argmax())
        at = start + (index + 1) * size - ids.shape[1] * 4
        raise BadField(at, f"{where} cell seq_id", ids[index].tolist(), f"ascending ids from 0 to {n_seq - 1}")


def _assemble(start: int, runs: list[npt.NDArray[Any]], rule: CellRule) -> Cells:
    """One object for all runs; a single run stays a view."""
    if not runs:
        runs = [np.empty(0, dtype=record_dtype(rule.ext_bytes, rule.n_seq_min))]
    has_ids = [run for run in runs if "seq_id" in (run.dtype.names or ())]
    ids = [run["seq_id"].reshape(-1) for run in has_ids] or [np.empty(0, dtype="<i4")]
    return Cells(
        offset=start,
        pos=joined([run["pos"] for run in runs]),
        n_seq_id=joined([run["n_seq_id"] for run in runs]),
        seq_ids=joined(ids),
        ext=joined([run["ext"] for run in runs]) if rule.ext_bytes else None,
    )


def joined(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """The parts as one read-only array; a single part is not copied."""
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if whole.flags.writeable:
        whole.flags.writeable = False
    return whole


def pack_cells(cells: Cells) -> bytes:
    """The bytes of cells, as the library writes them."""
    ext_words = cells.ext_bytes // 4
    counts = cells.n_seq_id.astype(np.int64)
    lengths = 2 + ext_words + counts
    starts = np.cumsum(lengths) - lengths
    words = np.empty(int(lengths.sum()), dtype="<i4")
    is_id = np.ones(len(words), dtype=bool)
    for shift in range(2 + ext_words):
        is_id[starts + shift] = False
    words[starts] = cells.pos
    words[starts + 1] = counts
    if cells.ext is not None:
        for shift, name in enumerate(cells.ext.dtype.names or ()):
            words[starts + 2 + shift] = cells.ext[name]
    words[is_id] = cells.seq_ids
    return words.tobytes()
