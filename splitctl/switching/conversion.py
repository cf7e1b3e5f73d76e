"""What of a carry must be rewritten so that the target can hold it, and the rewriting. Pure: bytes in, bytes out.

Laws:
    1. The sealed original is never touched; a conversion is a copy beside it.
    2. How quantized rows are rotated is not guessed: the target shows it with a state of its own (one throw-away token
       in its empty memory), and rows whose rotation nobody knows are refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import statecodec
from splitctl.placement import FlashAttn, Placement
from statecodec import AttentionSection, Rotation, StateImage, TensorType, transcode

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


def n_streams(placement: Placement) -> int:
    """Return the memory streams of a placement's context."""
    return 1 if placement.kv_unified else placement.n_seq_max


def plan(current: Placement, target: Placement) -> Plan | None:
    """Say what must be rewritten.

    Args:
        current: the placement that the carry was made in.
        target: the placement that it shall go to.

    Returns:
        The plan; None where the bytes go as they are.
    """
    sides = [(current.type_k, target.type_k), (current.type_v, target.type_v)]
    kinds = [TensorType[new.upper()] if old != new else None for old, new in sides]
    turned = current.flash_attn is not target.flash_attn
    streams = n_streams(target) if n_streams(current) != n_streams(target) else None
    if kinds == [None, None] and not turned and streams is None:
        return None
    changed = {one for side in sides if side[0] != side[1] for one in side}
    v_trans = target.flash_attn is FlashAttn.OFF if turned else None
    return Plan(kinds[0], kinds[1], v_trans, streams, is_quantized=not changed <= _PLAIN)


def convert(state: memoryview, wanted: Plan, shown: memoryview | None) -> tuple[memoryview, tuple[str, ...]]:
    """Rewrite a state.

    Args:
        state: the sealed original.
        wanted: what to change.
        shown: a state that the target itself has written, for the rotation of quantized rows; None where the plan has
            none.

    Returns:
        The rewritten state, in memory of its own; and one phrase a change, with its error bound.

    Raises:
        statecodec.NotRepresentable: the target cannot hold it, or the rotation is unknown.
        statecodec.StateFormatError: the bytes do not parse.
    """
    image = statecodec.parse(state)
    rotations = _rotations(statecodec.parse(shown)) if shown is not None else None
    moves_v = wanted.v_trans is not None or wanted.type_v is not None
    ends_turned = wanted.v_trans if wanted.v_trans is not None else _is_turned(image)
    if moves_v:
        image = transcode.to_v_trans(image, v_trans=False)
    if wanted.type_k is not None or wanted.type_v is not None:
        image = transcode.to_types(image, type_k=wanted.type_k, type_v=wanted.type_v, rotation=rotations)
    if wanted.n_stream is not None:
        image = transcode.to_streams(image, wanted.n_stream)
    if moves_v and ends_turned:
        image = transcode.to_v_trans(image, v_trans=True)
    chunks = [memoryview(chunk).cast("B") for chunk in statecodec.emit(image)]
    out = bytearray(sum(map(len, chunks)))
    at = 0
    for chunk in chunks:
        out[at : at + len(chunk)] = chunk
        at += len(chunk)
    return memoryview(out).toreadonly(), tuple(_phrase(change) for change in image.changes)


def _phrase(change: statecodec.Change) -> str:
    exact = "exact" if change.is_exact else f"a stored value changes by {change.error_bound:.3g} at most"
    return "; ".join((f"{change.what} ({exact})", *change.warnings))


def _is_turned(image: StateImage) -> bool:
    return any(
        stream.v_trans
        for section in image.sections
        if isinstance(section, AttentionSection)
        for _, stream in section.filled()
    )


def _rotations(image: StateImage) -> list[Rotation] | None:
    """Read the rotation of each attention section off a state; None where its layout does not say."""
    found: list[Rotation] = []
    for section in image.sections:
        if not isinstance(section, AttentionSection):
            continue
        streams = [stream for _, stream in section.filled()]
        if not streams or streams[0].rotation is None:
            return None
        found.append(streams[0].rotation)
    return found


__all__ = ["Plan", "convert", "n_streams", "plan"]
