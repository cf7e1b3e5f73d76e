"""What of a carry must be rewritten so that the target can hold it, and the rewriting. Pure: bytes in, bytes out.

Laws:
    1. The sealed original is never touched; a conversion is a copy beside it.
    2. How quantized rows are rotated is not guessed: the target shows it with a state of its own (one throw-away token
       in its empty memory), and rows whose rotation nobody knows are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import statecodec
from splitctl.errors import StateUnsound
from splitctl.placement import FlashAttn, Placement
from statecodec import Columns, KvStream, Rotation, Rows, StateImage, TensorType, transcode

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_PLAIN = frozenset({"f32", "f16", "bf16"})


@dataclass(frozen=True, slots=True)
class Plan:
    """What changes between two placements.

    Args:
        type_k: wanted type of K; None: as it is.
        type_v: wanted type of V; None: as it is.
        v_trans: wanted transposition of V; None: as it is.
        n_stream: wanted streams; None: as they are.
        is_quantized: whether quantized rows are on a side, so that their rotation must be known.
    """

    type_k: TensorType | None = None
    type_v: TensorType | None = None
    v_trans: bool | None = None
    n_stream: int | None = None
    is_quantized: bool = False


def plan(current: Placement, target: Placement) -> Plan | None:
    """Say what must be rewritten to go from one placement to another; None where the bytes go as they are."""
    sides = [(current.type_k, target.type_k), (current.type_v, target.type_v)]
    kinds = [TensorType[new.upper()] if old != new else None for old, new in sides]
    turned = current.flash_attn is not target.flash_attn
    streams = target.n_streams if current.n_streams != target.n_streams else None
    if kinds == [None, None] and not turned and streams is None:
        return None
    changed = {one for side in sides if side[0] != side[1] for one in side}
    v_trans = target.flash_attn is FlashAttn.OFF if turned else None
    return Plan(kinds[0], kinds[1], v_trans, streams, is_quantized=not changed <= _PLAIN)


def convert(state: memoryview, wanted: Plan, shown: memoryview | None) -> tuple[memoryview, tuple[str, ...]]:
    """Rewrite a sealed state.

    Args:
        state: the sealed original.
        wanted: what to change.
        shown: a state that the target itself has written, for the rotation of quantized rows; None: there are none.

    Returns:
        The rewritten state, in memory of its own; and one phrase a change, with its error bound.

    Raises:
        statecodec.NotRepresentable: the target cannot hold it, or the rotation is unknown.
        statecodec.StateFormatError: the bytes do not parse.
    """
    image = statecodec.parse(state)
    rotations = _rotations(statecodec.parse(shown)) if shown is not None else None
    moves_v = wanted.v_trans is not None or wanted.type_v is not None
    is_turned = any(stream.v_trans for stream in image.streams())
    ends_turned = is_turned if wanted.v_trans is None else wanted.v_trans
    if moves_v:
        image = transcode.to_v_trans(image, v_trans=False)
    if wanted.type_k is not None or wanted.type_v is not None:
        image = transcode.to_types(image, type_k=wanted.type_k, type_v=wanted.type_v, rotation=rotations)
    if wanted.n_stream is not None:
        image = transcode.to_streams(image, wanted.n_stream)
    if moves_v and ends_turned:
        image = transcode.to_v_trans(image, v_trans=True)
    return _written(image), tuple(_phrase(change) for change in image.changes)


def _written(image: StateImage) -> memoryview:
    return memoryview(b"".join(statecodec.emit(image)))


def fit(state: memoryview, shown: memoryview) -> tuple[memoryview, tuple[str, ...]]:
    """Rewrite any state of the model (blob or file, of one sequence or all) as a context would have written it.

    What fits says ``shown``: a state that the context itself has written, with a cell or more in it.

    Returns:
        The state as a context blob, borrowed where nothing had to change; and one phrase a change.

    Raises:
        statecodec.NotRepresentable: the context cannot hold it, or a rotation is unknown.
        statecodec.StateFormatError: the bytes do not parse.
    """
    own = statecodec.parse(shown)
    image = statecodec.parse(state)
    if image.is_opaque or own.is_opaque:
        return state, ()
    if image.form.is_sequence:
        image = transcode.merge({0: image}, architecture=own.architecture or "")
    else:
        image = transcode.as_blob(image)
    model, there = next(own.streams(), None), next(image.streams(), None)
    if model is not None and there is not None:
        image = _as_cache(image, there, own, model)
    if not image.layouts & own.layouts:
        image = transcode.to_version(image, max(own.versions), rotation=_rotations(own))
    return _written(image), tuple(_phrase(change) for change in image.changes)


def _as_cache(image: StateImage, there: KvStream, own: StateImage, model: KvStream) -> StateImage:
    """Turn, requantize and regroup rows as the model stream has them."""
    kind_k = _kind(model.keys, there.keys)
    kind_v = _kind(model.values, there.values)
    moves_v = kind_v is not None or model.v_trans != there.v_trans
    if moves_v:
        image = transcode.to_v_trans(image, v_trans=False)
    if kind_k is not None or kind_v is not None:
        image = transcode.to_types(image, type_k=kind_k, type_v=kind_v, rotation=_rotations(own))
    image = transcode.to_streams(image, len(own.caches[0].streams))
    return transcode.to_v_trans(image, v_trans=True) if moves_v and model.v_trans else image


def _kind(wanted: Sequence[Rows | Columns], found: Sequence[Rows | Columns]) -> TensorType | None:
    """Return the wanted type where it is another one."""
    return wanted[0].kind if wanted and found and wanted[0].kind != found[0].kind else None


@dataclass(frozen=True, slots=True, eq=False)
class FileContent:
    """What a file of the library's own holds.

    Args:
        tokens: its token list, int32[n]; borrowed. An image or the like among them is -1.
        rows: positions that it holds, by sequence id (0 for a file of one sequence).
        damage: what is wrong behind the tokens; empty where nothing is.
    """

    tokens: NDArray[np.int32]
    rows: Mapping[int, int]
    damage: str = ""


def look(state: memoryview) -> FileContent:
    """Read what a session or sequence file of the library, or a slot file of its server, holds.

    Raises:
        StateUnsound: the bytes do not parse, and no whole token list stands before the damage.
    """
    try:
        found = statecodec.salvage(state)
    except statecodec.StateFormatError as error:
        raise StateUnsound(str(error)) from error
    image, tokens = found.image, found.tokens
    if tokens is None or (found.damage is not None and not found.has_all_tokens):
        raise StateUnsound(str(found.damage)) from found.damage
    held = {} if image is None else image.sequences()
    rows = {0 if image is None or image.form.is_sequence else seq_id: span.pos_max + 1 for seq_id, span in held.items()}
    return FileContent(tokens.text, rows, "" if found.damage is None else str(found.damage))


def n_held(state: memoryview) -> Mapping[int, int]:
    """Count the positions that a bare context state holds, by sequence id.

    Raises:
        StateUnsound: it is none.
    """
    try:
        image = statecodec.parse(state)
    except statecodec.StateFormatError as error:
        raise StateUnsound(str(error)) from error
    if image.form.is_sequence:
        raise StateUnsound("it is the state of one sequence, wanted that of a context")
    return {seq_id: span.pos_max + 1 for seq_id, span in image.sequences().items()}


def n_cells(state: memoryview) -> int:
    """Count the cells of a state of sequences that may share some; 0 where it does not parse."""
    try:
        sections = statecodec.parse(state).sections
    except statecodec.StateFormatError:
        return 0
    return max((section.n_cells or 0 for section in sections), default=0)


def kind_of(data: memoryview) -> str:
    """Say what a file is, as a phrase, that is neither a carry nor one of the library's own."""
    if not data:
        return "an empty file"
    try:
        image = statecodec.parse(data)
    except statecodec.ForeignFile as error:
        return str(error.found)
    except statecodec.StateFormatError as error:
        return f"no saved session ({error.field} at byte {error.offset}: found {error.found})"
    held = sum(span.n_cells for span in image.sequences().values())
    return f"a bare {image.form.value} of {held} positions, without the tokens that it was made from"


def _phrase(change: statecodec.Change) -> str:
    exact = "exact" if change.is_exact else f"a stored value changes by {change.error_bound:.3g} at most"
    return "; ".join((f"{change.what} ({exact})", *change.warnings))


def _rotations(image: StateImage) -> list[Rotation] | None:
    """Read the rotation of each attention section off a state; None where its layout does not say."""
    streams = [next((stream for _, stream in cache.filled()), None) for cache in image.caches]
    found = [stream.rotation for stream in streams if stream is not None and stream.rotation is not None]
    return found if len(found) == len(streams) else None
