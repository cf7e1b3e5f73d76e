"""Changes of how far sequences reach: the first tokens, what stands before a gap or before a damaged tail.

Laws:
1. Cells go with their rows, and values never change: every change here is exact.
2. What a state says beside its cells goes with them: a file's token list ends where its cells do, and results of a
   decode that is gone are not kept.
3. A memory that forgets cannot be taken back to an earlier token: a recurrent one never, a window only while it still
   holds what it looked back at then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from statecodec.errors import NotRepresentable, raises_bare
from statecodec.image import AttentionSection, Change, KvStream, Outputs, RecurrentSection, StateImage, Tokens
from statecodec.regroup import Index, cells_with, changed, require_whole, take
from statecodec.views import distinct


@raises_bare
def keep_first(image: StateImage, n_tokens: int) -> StateImage:
    """Keep what stands before a position, in every sequence.

    Args:
        image: a whole state.
        n_tokens: positions below this one stay.

    Returns:
        The state without the cells at this position and behind it; a file's token list ends there too. A warning says
        where a sliding window may lack what it looked back at.

    Raises:
        NotRepresentable: the memory has a recurrent part or a window that has forgotten what stood before the position;
            or media stand in the token list.
    """
    require_whole(image, "the first tokens")
    if any(isinstance(section, RecurrentSection) for section in image.sections):
        found, wanted = "a recurrent memory", "its own state of an earlier token"
        raise NotRepresentable("the first tokens", found, wanted, "Read the tokens again up to there.")
    ends = dict.fromkeys(image.sequences(), n_tokens)
    return cut(image, ends, Change(f"positions below {n_tokens} kept"))


@raises_bare
def cut_at_gap(image: StateImage) -> StateImage:
    """Keep of every sequence what stands before its first missing position.

    Returns:
        The very image where nothing is missing; otherwise a state that can be continued, with a warning that says
        where each sequence ends now. A file's token list ends there too.

    Raises:
        NotRepresentable: something is missing and the memory has a recurrent part or a window that has forgotten what
            stood before it; or media stand in the token list.
    """
    require_whole(image, "what stands before a gap")
    base = max(image.caches, key=lambda cache: cache.n_cells, default=None)
    held = [] if base is None else [stream for _, stream in base.filled() if len(stream.cells)]
    ends: dict[int, int] = {}
    for seq_id in image.sequences() if held else ():
        positions = distinct(np.concatenate([positions_of(image, stream, seq_id) for stream in held]))
        gaps = np.flatnonzero(np.diff(positions) > 1)
        ends[seq_id] = int(positions[gaps[0]] if len(gaps) else positions[-1]) + 1
    gone = {seq_id: end for seq_id, end in ends.items() if end <= image.sequences()[seq_id].pos_max}
    if not gone:
        return image
    if len(image.caches) < len(image.sections):
        raise NotRepresentable("a gap", f"missing positions at {gone}", "a recurrent memory", "Read the tokens again.")
    warnings = tuple(f"sequence {seq_id} ends before position {end} now" for seq_id, end in gone.items())
    return cut(image, ends, Change("cut at the first gap", warnings=warnings))


def positions_of(image: StateImage, stream: KvStream, seq_id: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Where a sequence stands in a stream; all of a sequence blob is one sequence, whatever ids are stored."""
    return stream.cells.pos if image.form.is_sequence else stream.cells.pos[cells_with(stream.cells, seq_id)]


def first_position(image: StateImage, cache: AttentionSection, seq_id: int) -> int | None:
    """The first position of a sequence in a cache, or None where it has none there."""
    held = [positions_of(image, stream, seq_id) for _, stream in cache.filled()]
    return min((int(positions.min()) for positions in held if len(positions)), default=None)


def cut(image: StateImage, ends: Mapping[int, int], change: Change) -> StateImage:
    """Keep of every sequence what stands before a position of its own.

    Args:
        image: a state of attention caches alone.
        ends: sequence id -> the position that it ends before; every sequence is there.
        change: what is said of it; warnings are added.

    Returns:
        The state, its token list and results cut with it.

    Raises:
        NotRepresentable: a window has forgotten what stood before an end; or media stand in the token list.
    """
    shorter = {seq_id: end for seq_id, end in ends.items() if end <= image.sequences()[seq_id].pos_max}
    warnings = [*change.warnings]
    for seq_id, end in shorter.items():
        starts = [start for cache in image.caches if (start := first_position(image, cache, seq_id)) is not None]
        late = max(starts)
        if min(starts) < end <= late:
            found, wanted = f"a window of sequence {seq_id} that begins at position {late}", f"a state of {end} tokens"
            raise NotRepresentable("what stands before a position", found, wanted, "Read the tokens again up to there.")
        if min(starts) < late < end:
            warnings.append(
                f"a window of sequence {seq_id} begins at position {late}: with position {end} next, the state is "
                f"right only for windows of {end - late} tokens or less"
            )
    sections = [_kept(cache, ends) for cache in image.caches]
    short = changed(image, sections, replace(change, warnings=tuple(warnings)))
    if shorter and image.outputs is not None and len(image.outputs.ids):
        none = np.empty(0, dtype="<f4")
        outputs = Outputs(image.outputs.offset, np.empty(0, dtype="<i4"), none.reshape(0, 0), none)
        short = replace(short, outputs=outputs)
    return _with_tokens_cut(short)


def _with_tokens_cut(image: StateImage) -> StateImage:
    """A file whose token list ends where its cells do, as its reader takes one for the other."""
    tokens = image.tokens
    end = max((span.pos_max + 1 for span in image.sequences().values()), default=0)
    if tokens is None or len(tokens.text) <= end:
        return image
    if tokens.media:
        found, wanted = f"{len(tokens.media)} media in the token list", "a list that ends before one of its tokens"
        raise NotRepresentable("a file", found, wanted, "Take the state out of the file first, as a blob.")
    text = tokens.text[:end]
    if tokens.packed_version is None:
        words = text
    else:
        # The server's record: the null token, its version, the count, the tokens, no media.
        words = np.array([-1, tokens.packed_version, end, *text.tolist(), 0], dtype="<i4")
        words.flags.writeable = False
    return replace(image, tokens=Tokens(words, text, (), tokens.packed_version))


def _kept(section: AttentionSection, ends: Mapping[int, int]) -> AttentionSection:
    """A section without what stands at or behind each sequence's end."""
    streams: list[KvStream | None] = []
    for stream in section.streams:
        if stream is None:
            streams.append(None)
            continue
        end = max(ends.values(), default=0)
        limits = np.full(256, end, dtype=np.int64)
        for seq_id, own in ends.items():
            limits[seq_id] = own
        cells = stream.cells
        owners = np.repeat(np.arange(len(cells)), cells.n_seq_id)
        stays = cells.pos[owners] < limits[cells.seq_ids]
        # A cell without ids (sequence blobs of early 2025) belongs to the one sequence.
        index: Index = distinct(owners[stays]) if len(owners) else np.flatnonzero(cells.pos < end)
        kept = take(stream, index)
        # A stream without cells is left out, except where there are no streams.
        streams.append(_without_ids(kept, limits) if len(index) or not section.is_streamed else None)
    return replace(section, streams=tuple(streams))


def _without_ids(stream: KvStream, limits: np.ndarray[tuple[int], np.dtype[np.int64]]) -> KvStream:
    """The stream whose shared cells belong only to the sequences that still reach them."""
    cells = stream.cells
    owners = np.repeat(np.arange(len(cells)), cells.n_seq_id)
    stays = cells.pos[owners] < limits[cells.seq_ids]
    if bool(np.all(stays)):
        return stream
    counts = np.bincount(owners[stays], minlength=len(cells)).astype("<u4")
    return replace(stream, cells=replace(cells, seq_ids=cells.seq_ids[stays], n_seq_id=counts))
