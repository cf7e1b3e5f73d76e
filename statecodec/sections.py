"""Readers of the memory's parts: each gives every sound reading at a place, best first, one at a time.

The grammar is ambiguous by bytes, because nothing in them says
- whether an attention section holds V: its K rows may be followed by V rows, or by the next section;
- how many recurrent layers there are: `n_layer` counts those without recurrence too, and S rows look like R rows;
- whether a recurrent layer has a second history, whose size word looks like the beginning of what follows;
- how many sections there are, and of which kind: a cell count looks the same in all of them.

So nothing here is greedy: each reader yields one reading after the other, and one that leads nowhere later is followed
by the next. The order does not choose the answer, since `parse` takes every reading that consumes all bytes and refuses
to choose between different meanings. It decides which failure is reported when none is left: attempts are ranked by
what was understood (`Failures.note`), and likelier alternatives come first, so that among equals theirs is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from statecodec.cells import CellRule, min_cell_bytes, read_cells
from statecodec.cursor import Cursor
from statecodec.errors import BadField, Inconsistent, LimitExceeded, StateFormatError, TrailingBytes, Truncated, bare
from statecodec.image import AttentionSection, KvStream, OpaqueSection, RecurrentLayer, RecurrentSection, Section
from statecodec.layouts import OPAQUE_MAGICS, ROTATION_MIN_BLOCK, Grammar, SectionKind
from statecodec.limits import Limits
from statecodec.tensor_types import TYPE_TABLE, TYPES_BY_ID, TensorType
from statecodec.views import Cells, Columns, Rotation, Rows

_SECTION_MIN_BYTES = 8


@dataclass(slots=True)
class Failures:
    """Keeps the failure of the best attempt: the best guess at what is wrong when no reading survives."""

    best: StateFormatError | None = None
    _rank: tuple[int, int, int, int] = (-1, 0, 0, 0)

    def note(self, error: StateFormatError, *, stage: int, progress: int, family: int, depth: int) -> None:
        """Keep `error` if its attempt was better than the one that is kept.

        Args:
            error: the failure.
            stage: 0 while reading, 1 for a law over a reading that consumed everything.
            progress: parts that had been understood.
            family: how likely such an attempt is from the outset, 0 the likeliest; a wrong one can get further in
                bytes before it fails, so offsets are compared within a family only.
            depth: how far it got, in bytes.
        """
        rank = (stage, progress, -family, depth)
        if rank > self._rank:
            self.best = bare(error)
            self._rank = rank

    def worst(self) -> StateFormatError:
        """The failure to raise when no reading survived."""
        return self.best or TrailingBytes(0, "the state", "no reading", "a state")


@dataclass(slots=True)
class Attempt:
    """One attempt to read a state by one grammar.

    Args:
        grammar: the choices made.
        limits: upper bounds.
        patterns: orders of sections that are accepted.
        failures: where failures are noted; shared by all attempts.
        family: how likely this attempt is from the outset; see `Failures.note`.
        has_v: whether each attention section holds V, as far as that is known.
        clips: whether rows may end with the bytes, and streams may be missing then; see `salvage`.
        lost: the streams that were missing in the last section that was read so.
        n_steps: alternatives tried so far.
    """

    grammar: Grammar
    limits: Limits
    patterns: tuple[tuple[SectionKind, ...], ...]
    failures: Failures
    family: int = 0
    has_v: tuple[bool, ...] = ()
    clips: bool = False
    lost: range = range(0)
    n_steps: int = 0
    _cells: dict[tuple[int, int], tuple[Cells, int]] = field(default_factory=dict)

    def note(self, error: StateFormatError, place: Cursor, *, unlikely: int = 0, beyond: int = 0) -> None:
        """Keep a failure of this attempt.

        Args:
            error: the failure.
            place: the cursor that failed.
            unlikely: how much less likely than attention the part is that was looked for.
            beyond: bytes by which it counts as further than its own offset.
        """
        family = self.family + unlikely
        self.failures.note(error, stage=0, progress=place.progress, family=family, depth=error.offset + beyond)

    def step(self, offset: int) -> None:
        """Count one alternative.

        Raises:
            LimitExceeded: too many were tried.
        """
        self.n_steps += 1
        if self.n_steps > self.limits.n_steps:
            raise LimitExceeded(offset, "memory sections", "too many ways to read", f"{self.limits.n_steps} steps")

    def cell_rule(self, ext_bytes: int, ids: tuple[int, int | None]) -> CellRule:
        """A grammar's rule for cells, with the limit filled in."""
        fewest, most = ids
        return CellRule(ext_bytes, fewest, self.limits.n_seq if most is None else most)

    def row_span(self, cursor: Cursor, n_bytes: int, field: str) -> memoryview:
        """The bytes of rows; nothing is there when the rows stayed on the device."""
        wanted = n_bytes if self.grammar.has_tensors else 0
        return cursor.span(min(wanted, cursor.remaining) if self.clips else wanted, field)

    def cells(self, cursor: Cursor, count: int, rule: CellRule, where: str) -> Cells:
        """Read cells, once per place: the alternatives that follow share them."""
        key = (cursor.offset, rule.ext_bytes)
        known = self._cells.get(key)
        if known is None:
            cells = read_cells(cursor, count, rule, self.limits, where)
            self._cells[key] = (cells, cursor.offset)
            return cells
        cells, end = known
        cursor.skip(end - cursor.offset, where)
        return cells


def read_sections(
    attempt: Attempt, cursor: Cursor, done: tuple[SectionKind, ...] = ()
) -> Iterator[tuple[Section, ...]]:
    """Every way to read the rest of the bytes as sections.

    Args:
        attempt: the attempt.
        cursor: where the next section starts; not moved.
        done: kinds of the sections before it.

    Returns:
        The sections of each way that consumes every byte.
    """
    kinds = dict.fromkeys(pattern[len(done)] for pattern in attempt.patterns if _continues(pattern, done))
    if not cursor.remaining:
        if done in attempt.patterns:
            yield ()
        else:
            wanted = "one of: " + ", ".join(kind.value for kind in kinds)
            attempt.note(Truncated(cursor.offset, f"section {len(done)}", "the end of the bytes", wanted), cursor)
        return
    attempt.step(cursor.offset)
    if not kinds or cursor.remaining < _SECTION_MIN_BYTES:
        attempt.note(_trailing(cursor), cursor, beyond=_SECTION_MIN_BYTES)
        return
    for kind in kinds:
        for section, after in _READERS[kind](attempt, cursor, done):
            for rest in read_sections(attempt, after, (*done, kind)):
                yield (section, *rest)
    if done in attempt.patterns:
        # Junk behind a whole state fails in the first words of a section that is not there.
        attempt.note(_trailing(cursor), cursor, beyond=_SECTION_MIN_BYTES if done else 0)


def _trailing(cursor: Cursor) -> TrailingBytes:
    return TrailingBytes(cursor.offset, "end of the state", f"{cursor.remaining} bytes more", "the end")


def _continues(pattern: tuple[SectionKind, ...], done: tuple[SectionKind, ...]) -> bool:
    return len(pattern) > len(done) and pattern[: len(done)] == done


def read_attention(
    attempt: Attempt, cursor: Cursor, done: tuple[SectionKind, ...]
) -> Iterator[tuple[AttentionSection, Cursor]]:
    """Every way to read an attention section, and the place behind it."""
    index = done.count(SectionKind.ATTENTION)
    for has_v in attempt.has_v[index : index + 1] or (True, False):
        after = cursor.fork()
        try:
            section = _attention(attempt, after, f"section {len(done)}", has_v=has_v)
        except StateFormatError as error:
            attempt.note(error, after)
            continue
        if section.n_layers and not has_v:
            # Caches without V are rare: where V is damaged, that is the better guess than bytes behind the end.
            after.progress -= 1
        yield section, after
        if not section.n_layers:
            # Without layers there is no V to be there or not: the second reading would be the same.
            return


def _attention(attempt: Attempt, cursor: Cursor, where: str, *, has_v: bool) -> AttentionSection:
    start = cursor.offset
    is_streamed = attempt.grammar.has_streams
    n_streams = cursor.count(f"{where} n_stream", attempt.limits.n_streams, item_bytes=4) if is_streamed else 1
    if not n_streams:
        raise BadField(start, f"{where} n_stream", n_streams, "1 or more")
    streams: list[KvStream | None] = []
    model: KvStream | None = None
    for index in range(n_streams):
        try:
            stream = _stream(attempt, cursor, f"{where} stream {index}", has_v=has_v)
        except Truncated:
            if not attempt.clips:
                raise
            attempt.lost = range(index, n_streams)
            streams += [None] * len(attempt.lost)
            break
        if stream is not None:
            if model is None:
                model = stream
            elif stream.shape != model.shape:
                found, wanted = stream.shape, model.shape
                raise Inconsistent(stream.offset, f"{where} stream {index} shape", found, f"{wanted}, as before")
        streams.append(stream)
    ext_bytes = 0 if model is None else model.cells.ext_bytes
    return AttentionSection(start, ext_bytes, tuple(streams), is_streamed)


def _stream(attempt: Attempt, cursor: Cursor, where: str, *, has_v: bool) -> KvStream | None:
    start = cursor.offset
    limits = attempt.limits
    rule = attempt.cell_rule(attempt.grammar.ext_bytes, attempt.grammar.cell_ids)
    count = cursor.count(f"{where} cell count", limits.n_cells, item_bytes=min_cell_bytes(rule))
    if not count and attempt.grammar.has_streams:
        return None
    cells = attempt.cells(cursor, count, rule, where)
    cursor.progress += count > 0
    at = cursor.offset
    v_trans = cursor.u32(f"{where} v_trans")
    if v_trans > 1:
        raise BadField(at, f"{where} v_trans", v_trans, "0 or 1")
    n_layers = cursor.count(f"{where} n_layer", limits.n_layers)
    rotation = _rotation(cursor, where) if attempt.grammar.has_rotation else None
    keys = tuple(_rows(attempt, cursor, count, f"{where} layer {i} K") for i in range(n_layers))
    values: tuple[Rows, ...] | tuple[Columns, ...] = ()
    if has_v and v_trans:
        values = tuple(_columns(attempt, cursor, count, f"{where} layer {i} V") for i in range(n_layers))
    elif has_v:
        values = tuple(_rows(attempt, cursor, count, f"{where} layer {i} V") for i in range(n_layers))
    return KvStream(start, cells, bool(v_trans), rotation, keys, values)


def _rotation(cursor: Cursor, where: str) -> Rotation:
    def block(name: str) -> int:
        at = cursor.offset
        size = cursor.u32(f"{where} {name}")
        if size and (size < ROTATION_MIN_BLOCK or size & (size - 1)):
            raise BadField(at, f"{where} {name}", size, f"0 or a power of two from {ROTATION_MIN_BLOCK} on")
        return size

    return Rotation(block("rot_k"), block("rot_v"))


def _kind(cursor: Cursor, where: str) -> TensorType:
    at = cursor.offset
    number = cursor.i32(f"{where} type")
    kind = TYPES_BY_ID.get(number)
    if kind is None:
        raise BadField(at, f"{where} type", number, "one of " + ", ".join(str(known) for known in TYPES_BY_ID))
    return kind


def _rows(attempt: Attempt, cursor: Cursor, n_cells: int, where: str, *, may_be_empty: bool = False) -> Rows:
    start = cursor.offset
    kind = _kind(cursor, where)
    size = _row_size(cursor, where, kind, attempt.limits, may_be_empty=may_be_empty)
    return Rows(start, kind, size, attempt.row_span(cursor, n_cells * size, f"{where} rows"))


def _row_size(cursor: Cursor, where: str, kind: TensorType, limits: Limits, *, may_be_empty: bool) -> int:
    at = cursor.offset
    size = cursor.u64(f"{where} row bytes")
    if size > limits.row_bytes:
        raise LimitExceeded(at, f"{where} row bytes", size, f"at most {limits.row_bytes}")
    block = TYPE_TABLE[kind].block_bytes
    if size % block or not (size or may_be_empty):
        raise Inconsistent(at, f"{where} row bytes", size, f"a multiple of {block}, as the type {kind.name} has it")
    cursor.progress += 1
    return size


def _columns(attempt: Attempt, cursor: Cursor, n_cells: int, where: str) -> Columns:
    start = cursor.offset
    kind = _kind(cursor, where)
    info = TYPE_TABLE[kind]
    if info.is_quantized:
        raise Inconsistent(start, f"{where} type", kind.name, "a plain type, as transposed V has single values")
    at = cursor.offset
    element_bytes = cursor.u32(f"{where} element bytes")
    if element_bytes != info.block_bytes:
        raise Inconsistent(at, f"{where} element bytes", element_bytes, f"{info.block_bytes} for {kind.name}")
    at = cursor.offset
    n_values = cursor.count(f"{where} n_embd_v", attempt.limits.row_bytes // element_bytes)
    if not n_values:
        raise BadField(at, f"{where} n_embd_v", n_values, "1 or more")
    cursor.progress += 1
    data = attempt.row_span(cursor, n_values * n_cells * element_bytes, f"{where} values")
    return Columns(start, kind, n_values, data)


@dataclass(frozen=True, slots=True)
class _Link:
    """One entry of a chain of recurrent rows, with the place behind it."""

    rows: Rows
    history: Rows | None
    after: Cursor


def _read_recurrent(
    attempt: Attempt, cursor: Cursor, done: tuple[SectionKind, ...]
) -> Iterator[tuple[Section, Cursor]]:
    where = f"section {len(done)}"
    start = cursor.offset
    head = cursor.fork()
    try:
        limits = attempt.limits
        # A recurrent cell never has the extra record, whatever attention cells of the same model have.
        rule = attempt.cell_rule(0, attempt.grammar.recurrent_ids)
        count = head.count(f"{where} cell count", limits.n_cells, item_bytes=min_cell_bytes(rule))
        cells = attempt.cells(head, count, rule, where)
        head.progress += count > 0
        at = head.offset
        s_trans = head.u32(f"{where} s_trans")
        if s_trans:
            raise BadField(at, f"{where} s_trans", s_trans, "0, as no library writes S transposed")
        at = head.offset
        n_layer = head.count(f"{where} n_layer", limits.n_layers)
        if not n_layer:
            raise BadField(at, f"{where} n_layer", n_layer, "1 or more, as every layer of the model counts")
    except StateFormatError as error:
        attempt.note(error, head, unlikely=1)
        return
    for chain, after in _chains(attempt, head, count, n_layer, where):
        for layers, end in _split(attempt, chain, after, count, n_layer, where):
            yield RecurrentSection(start, cells, n_layer, layers), end


def _chains(
    attempt: Attempt, cursor: Cursor, count: int, n_layer: int, where: str
) -> Iterator[tuple[tuple[_Link, ...], Cursor]]:
    """Every longest chain of R rows of one type and size, with and without second histories."""
    pending: list[tuple[tuple[_Link, ...], Cursor]] = [((), cursor)]
    while pending:
        chain, place = pending.pop()
        attempt.step(place.offset)
        grown = list(_grow(attempt, chain, place, count, where)) if len(chain) < 2 * n_layer else []
        if grown:
            pending.extend(((*chain, link), link.after) for link in reversed(grown))
        else:
            yield chain, place


def _grow(attempt: Attempt, chain: tuple[_Link, ...], place: Cursor, count: int, where: str) -> Iterator[_Link]:
    """The next R rows, without and then with a second history behind them."""
    name = f"{where} recurrent layer {len(chain)}"
    after = place.fork()
    try:
        rows = _rows(attempt, after, count, f"{name} R", may_be_empty=True)
        if chain:
            _same(rows, chain[0].rows, f"{name} R")
    except StateFormatError as error:
        attempt.note(error, after, unlikely=1)
        return
    yield _Link(rows, None, after)
    if not attempt.grammar.has_history:
        return
    behind = after.fork()
    try:
        start = behind.offset
        size = _row_size(behind, f"{name} history", rows.kind, attempt.limits, may_be_empty=False)
        history = Rows(start, rows.kind, size, attempt.row_span(behind, count * size, f"{name} history"))
        first = next((link.history for link in chain if link.history is not None), None)
        if first is not None:
            _same(history, first, f"{name} history")
    except StateFormatError as error:
        attempt.note(error, behind, unlikely=1)
        return
    yield _Link(rows, history, behind)


def _same(rows: Rows, first: Rows, where: str) -> None:
    """All layers of a recurrent memory have rows of one type and size."""
    if (rows.kind, rows.row_bytes) != (first.kind, first.row_bytes):
        found = f"{rows.kind.name} rows of {rows.row_bytes} bytes"
        raise Inconsistent(rows.offset, where, found, f"{first.kind.name} rows of {first.row_bytes} bytes")


def _split(
    attempt: Attempt, chain: tuple[_Link, ...], after: Cursor, count: int, n_layer: int, where: str
) -> Iterator[tuple[tuple[RecurrentLayer, ...], Cursor]]:
    """Every way to see a chain as R rows of k layers that S rows of the same k layers follow.

    When S has another type or size than R the chain is all of R. When it has the same, the chain holds both halves,
    and perhaps one entry more that is really the start of the next section.
    """
    if len(chain) <= n_layer:
        end = after.fork()
        try:
            states: list[Rows] = []
            for index in range(len(chain)):
                rows = _rows(attempt, end, count, f"{where} recurrent layer {index} S", may_be_empty=True)
                if states:
                    _same(rows, states[0], f"{where} recurrent layer {index} S")
                states.append(rows)
        except StateFormatError as error:
            attempt.note(error, end, unlikely=1)
        else:
            yield tuple(RecurrentLayer(link.rows, link.history, s) for link, s in zip(chain, states, strict=True)), end
    for k in sorted({len(chain) // 2, (len(chain) - 1) // 2} - {len(chain), -1}, reverse=True):
        halves = chain[:k], chain[k : 2 * k]
        if k and not any(link.history for link in halves[1]):
            pairs = zip(*halves, strict=True)
            yield tuple(RecurrentLayer(r.rows, r.history, s.rows) for r, s in pairs), halves[1][-1].after.fork()


def _read_opaque(attempt: Attempt, cursor: Cursor, done: tuple[SectionKind, ...]) -> Iterator[tuple[Section, Cursor]]:
    where = f"section {len(done)}"
    after = cursor.fork()
    start = after.offset
    magic = after.u32(f"{where} magic")
    name = OPAQUE_MAGICS.get(magic)
    if name is None:
        known = ", ".join(f"{number:#x}" for number in OPAQUE_MAGICS)
        attempt.note(BadField(start, f"{where} magic", f"{magic:#x}", known), cursor, unlikely=2)
        return
    whole = cursor.fork()
    yield OpaqueSection(start, name, whole.span(whole.remaining, where)), whole


_Reader = Callable[[Attempt, Cursor, tuple[SectionKind, ...]], Iterator[tuple[Section, Cursor]]]
_READERS: dict[SectionKind, _Reader] = {
    SectionKind.ATTENTION: read_attention,
    SectionKind.RECURRENT: _read_recurrent,
    SectionKind.OPAQUE: _read_opaque,
}
