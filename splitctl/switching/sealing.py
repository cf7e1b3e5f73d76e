"""What a sealed state is, and the check that its bytes say what the session says. Reads bytes, touches no library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import statecodec
from splitctl.core import Core


@dataclass(frozen=True, slots=True)
class Sealed:
    """A saved state that has been parsed, checked against the session and checksummed.

    Args:
        view: its bytes, in the arena.
        digest: xxh3-128 of them.
        positions: sequence id -> first and last position when it was saved.
        n_tokens: tokens of all sequences.
        n_sequences: sequences that hold anything.
        version: newest session version that the bytes can be read as; 0 for a model without a memory.
    """

    view: memoryview
    digest: bytes
    positions: Mapping[int, tuple[int, int]]
    n_tokens: int
    n_sequences: int
    version: int = 0


def contradictions(core: Core, view: memoryview, wanted: Mapping[int, int]) -> tuple[str, int]:
    """Say in what bytes and books disagree.

    Args:
        core: the session's parts.
        view: the state of all sequences.
        wanted: sequence id -> last position, for every sequence that the memory holds.

    Returns:
        A phrase, "" where they agree; and the newest session version that the bytes can be read as.

    Raises:
        statecodec.StateFormatError: the bytes do not parse.
    """
    facts = statecodec.ModelFacts(
        architecture=core.facts.architecture, n_layer=core.facts.n_layer, n_seq_max=core.placement.n_seq_max
    )
    image = statecodec.parse(view, facts=facts)
    version = max(image.versions, default=0)
    if image.is_opaque:
        return "", version
    saved = {seq_id: span.pos_max for seq_id, span in image.sequences().items()}
    wrong = "" if saved == wanted else f"the saved bytes hold last positions {saved}, the session counts {wanted}"
    return wrong, version


__all__ = ["Sealed", "contradictions"]
