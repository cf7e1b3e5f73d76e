"""What is worth knowing about a sound state: nothing here is an error, but a restore may not do what is expected."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from statecodec.convert_length import positions_of
from statecodec.image import AttentionSection, RecurrentSection, StateImage
from statecodec.layouts import Form
from statecodec.views import distinct


class FindingCode(enum.Enum):
    """The kinds of findings."""

    GAP = "gap"
    STARTS_LATE = "starts-late"
    OUT_OF_ORDER = "out-of-order"
    WINDOW_NOT_NEWEST = "window-not-newest"
    SECTIONS_DISAGREE = "sections-disagree"
    TOKENS_DISAGREE = "tokens-disagree"
    MEDIA = "media"
    ROTATION_UNKNOWN = "rotation-unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing worth knowing.

    Args:
        code: its kind.
        seq_id: the sequence that it is about; None: the whole state.
        text: one sentence.
    """

    code: FindingCode
    seq_id: int | None
    text: str


def findings(image: StateImage) -> tuple[Finding, ...]:
    """Everything worth knowing about a state, in the order of its parts."""
    return tuple(_of_sequences(image)) + tuple(_of_rows(image)) + tuple(_of_tokens(image))


def _of_sequences(image: StateImage) -> Iterator[Finding]:
    recurrent = [section for section in image.sections if isinstance(section, RecurrentSection)]
    for seq_id in image.sequences():
        held = [_positions(image, cache, seq_id) for cache in image.caches]
        filled = [positions for positions in held if len(positions)]
        if filled:
            base = max(filled, key=len)
            yield from _of_positions(seq_id, base, has_ext=image.caches[0].ext_bytes > 0)
            for positions in filled:
                newest = np.sort(base)[len(base) - len(positions) :]
                if positions is not base and not np.array_equal(np.sort(positions), newest):
                    text = (
                        f"the smaller cache of sequence {seq_id} does not hold the newest positions of the larger one"
                    )
                    yield Finding(FindingCode.WINDOW_NOT_NEWEST, seq_id, text)
        lasts = {int(positions.max()) for positions in filled}
        lasts |= {section.sequences()[seq_id].pos_max for section in recurrent if seq_id in section.sequences()}
        if len(lasts) > 1:
            text = f"the parts of the memory end at different positions of sequence {seq_id}: {sorted(lasts)}"
            yield Finding(FindingCode.SECTIONS_DISAGREE, seq_id, text)


def _positions(image: StateImage, cache: AttentionSection, seq_id: int) -> npt.NDArray[np.int32]:
    """Positions of a sequence in a cache, in the order of its cells; all of a sequence blob is one sequence."""
    parts = [positions_of(image, stream, seq_id) for _, stream in cache.filled()]
    return np.concatenate(parts or [np.empty(0, dtype="<i4")])


def _of_positions(seq_id: int, positions: npt.NDArray[np.int32], *, has_ext: bool) -> Iterator[Finding]:
    unique = distinct(positions)
    gaps = np.flatnonzero(np.diff(unique) > 1)
    if len(gaps):
        first = int(unique[gaps[0]]) + 1
        text = f"sequence {seq_id} lacks positions, first {first}; {len(gaps)} gaps in all"
        yield Finding(FindingCode.GAP, seq_id, text)
    if int(unique[0]):
        text = f"sequence {seq_id} begins at position {int(unique[0])}: its start was dropped or shifted away"
        yield Finding(FindingCode.STARTS_LATE, seq_id, text)
    if bool(np.any(np.diff(positions) < 0)):
        text = f"cells of sequence {seq_id} are not in the order of their positions, which changes the order of sums"
        yield Finding(FindingCode.OUT_OF_ORDER, seq_id, text)
    if has_ext and len(unique) < len(positions):
        text = f"sequence {seq_id} holds media: {len(positions) - len(unique)} cells share a position with another"
        yield Finding(FindingCode.MEDIA, seq_id, text)


def _of_rows(image: StateImage) -> Iterator[Finding]:
    if any(stream.rotation is None and stream.is_quantized for stream in image.streams()):
        text = "this version does not say whether quantized rows are rotated: state it to convert them"
        yield Finding(FindingCode.ROTATION_UNKNOWN, None, text)


def _of_tokens(image: StateImage) -> Iterator[Finding]:
    if image.tokens is None:
        return
    n_tokens = len(image.tokens.text)
    if n_tokens and image.sections and image.is_empty:
        text = f"the file lists {n_tokens} tokens, the memory holds none of them"
        yield Finding(FindingCode.TOKENS_DISAGREE, None, text)
    if image.form is not Form.SEQUENCE_FILE or not image.sequences():
        return
    (seq_id, span), *_ = image.sequences().items()
    # A replay of the last token needs its row gone, so one row less than tokens is as usual as equally many.
    if n_tokens not in {span.pos_max + 1, span.pos_max + 2}:
        text = f"the file lists {n_tokens} tokens, the memory ends at position {span.pos_max}"
        yield Finding(FindingCode.TOKENS_DISAGREE, seq_id, text)
