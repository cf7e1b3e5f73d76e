"""A dry run: the library plans its buffers for a placement without loading anything. Runs in a child, which may die.

A build that has `no_alloc` in its model parameters reads the header, makes tensors without memory, and reserves compute
buffers on paper; the sizes are in its log.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import closing

from llama_native import CallFailed, Context, Library, LoadMode, Model
from splitctl.engine.buffer_lines import buffer_lines, cache_sections
from splitctl.engine.engine import context_params, model_params, resolve_threads
from splitctl.placement import Placement
from splitctl.planning.reservation import Reservation


def can_reserve(library: Library) -> bool:
    """Tell whether a build can plan without allocating: its model parameters have `no_alloc`."""
    return "no_alloc" in library.profile.model_fields


def reserve(
    library: Library,
    model_path: str,
    placement: Placement,
    sizes: Sequence[tuple[int, int, int]],
    *,
    on_stage: Callable[[str], None] = lambda _: None,
) -> list[Reservation]:
    """Plan contexts of several sizes in one placement.

    Args:
        library: the open library.
        model_path: the GGUF.
        placement: the placement; the sizes of its context are replaced.
        sizes: context, batch and micro-batch of each, tokens; one that the library refuses is left out.
        on_stage: told what is being done, so that a death can be placed.

    Raises:
        CallFailed: the model cannot be placed so.
    """
    placement = resolve_threads(placement)
    params = dataclasses.replace(model_params(placement, LoadMode.READ), no_alloc=True)
    found = []
    on_stage("reading")
    with Model.load(library, model_path, params) as model:
        for n_ctx, n_batch, n_ubatch in sizes:
            on_stage(f"reserving {n_ctx} tokens by {n_ubatch}")
            wanted = dataclasses.replace(placement, n_ctx=n_ctx, n_batch=n_batch, n_ubatch=n_ubatch)
            one = _reserve_one(library, model, wanted)
            if one is not None:
                found.append(one)
    return found


def _reserve_one(library: Library, model: Model, placement: Placement) -> Reservation | None:
    """Plan one context; None when the library refuses it."""
    heard: list[str] = []
    stop = library.log.listen(lambda _, text: heard.append(text))
    try:
        with closing(Context(model, context_params(placement, embeddings=False))) as context:
            made = context.n_ctx, context.n_batch, context.n_ubatch
    except CallFailed:
        return None
    finally:
        stop()
    log = "".join(heard).splitlines()
    compute: dict[str, int] = {}
    for line in buffer_lines(log):
        if line.kind == "compute":
            # Devices that share a buffer are printed once each: it is one buffer.
            compute[line.buffer] = max(compute.get(line.buffer, 0), line.n_bytes)
    sections = list(cache_sections(log))
    return Reservation(*made, compute, sum(n_bytes for _, n_bytes in sections) if sections else None)
