"""A model's first layers as a model of their own, in memory: what a build does with them it does with all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from splitctl.engine.host_copy import raw_header
from splitctl.model.facts import read_facts
from splitctl.model.gguf_bytes import Unfit, first_layers, padded
from splitctl.probing.verdicts import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitctl.placement import Placement
    from splitctl.probing.verdicts import ProbeVerdict

_PIECE = 16 << 20


def tried_short(model_path: str, placement: Placement, tried: Callable[[str], ProbeVerdict]) -> ProbeVerdict:
    """Try a model's first layers; where there are none, or they settle nothing, all of it.

    Args:
        model_path: the GGUF.
        placement: where it is to be tried.
        tried: tries the GGUF at a path.
    """
    fd = short_model(Path(model_path), placement)
    if fd is not None:
        try:
            found = tried(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        if found.verdict is not Verdict.INCONCLUSIVE:
            return found
    return tried(model_path)


def short_model(path: Path, placement: Placement) -> int | None:
    """Write a model of the first layers into a memory file.

    Args:
        path: the GGUF, or the first part of a split one.
        placement: where it is to be tried: each device gets a layer.

    Returns:
        The memory file's descriptor, which the caller closes; None where there is no such model, or it would show less
        than the whole: layers that stay on the processor are the last to leave it.

    Raises:
        BadModelFile, OSError: the file cannot be read.
    """
    facts = read_facts(path)
    if 0 <= placement.n_gpu_layers <= facts.n_layer:
        return None
    try:
        found = first_layers(facts.headers, raw_header(facts.headers[0]), max(2, len(placement.devices)))
    except Unfit:
        return None
    if found is None:
        return None
    head, tensors = found
    fd = os.memfd_create("splitctl-short", os.MFD_CLOEXEC)
    try:
        os.pwrite(fd, head, 0)
        at = len(head)
        for header, tensor in tensors:
            _copy(header.path, header.data_offset + tensor.offset, fd, at, tensor.n_bytes or 0)
            at += padded(tensor.n_bytes or 0, facts.headers[0])
        os.ftruncate(fd, at)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _copy(path: Path, source: int, fd: int, target: int, n_bytes: int) -> None:
    with path.open("rb", buffering=0) as file:
        for done in range(0, n_bytes, _PIECE):
            piece = os.pread(file.fileno(), min(_PIECE, n_bytes - done), source + done)
            os.pwrite(fd, piece, target + done)
