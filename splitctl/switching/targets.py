"""What a switch is asked for: the whole target, who does the work, and how the result is proved."""

from __future__ import annotations

import dataclasses

from splitctl.engine.engine import resolve_threads
from splitctl.engine.live import LiveSession
from splitctl.outcome import Via
from splitctl.placement import FlashAttn, Placement


def complete(target: Placement, now: Placement) -> Placement:
    """Fill in what a target leaves open with what the session has resolved.

    Args:
        target: the target as asked.
        now: the placement that the session serves in.

    Returns:
        The whole target: context size, flash attention and threads are numbers and choices.
    """
    target = resolve_threads(target) if target.n_threads == 0 else target
    return dataclasses.replace(
        target,
        n_ctx=target.n_ctx or now.n_ctx,
        flash_attn=now.flash_attn if target.flash_attn is FlashAttn.AUTO else target.flash_attn,
    )


def choose_via(target: Placement, live: LiveSession) -> Via:
    """Choose who does the work.

    Args:
        target: the whole target.
        live: the session's parts.

    Returns:
        NATIVE only where the build has the call, nothing but the mode and tensor_split changes, and the session has
        no adapters (the library's call refuses them).
    """
    if not live.engine.library.has("native-switch") or live.engine.adapters:
        return Via.COMPOSED
    changed = set(live.placement.differs(target))
    return Via.NATIVE if changed and changed <= {"mode", "tensor_split"} else Via.COMPOSED
