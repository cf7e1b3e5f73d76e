"""Keeps what is whole of a state whose end is damaged, and says what can be done where nothing is."""

from __future__ import annotations

from pathlib import Path

import statecodec
from splitctl.cli.state_facts import codec_facts, repair_facts
from splitctl.cli.state_file import StateFile
from splitctl.errors import SplitctlError
from splitctl.model.facts import ModelFacts
from statecodec import Salvage, StateFormatError, StateImage


class NothingKept(SplitctlError):
    """A damaged state of which no cell is whole, or none that can be told."""

    def __init__(self, path: Path, damage: StateFormatError, found: Salvage) -> None:
        """Keep the path, what is wrong in the file, and what is sound: why no cell, and which tokens."""
        self.path = path
        self.damage = damage
        self.reason = found.reason
        self.tokens = [] if found.tokens is None else found.tokens.text.tolist()
        self.can_restore = found.has_all_tokens and found.tokens is not None and not found.tokens.media
        super().__init__(path, damage, found)

    def __str__(self) -> str:
        """Say what is wrong, why nothing is kept, and what can be done."""
        damage = self.damage
        place = f"{damage.field} at byte {damage.offset}: found {damage.found}, expected {damage.expected}"
        told = f"{place}. Nothing of the memory is kept: {self.reason}."
        if self.can_restore:
            return f"{told} {len(self.tokens)} tokens are whole: splitctl run --restore {self.path} reads them again."
        listed = f" The first {len(self.tokens)} tokens are there." if self.tokens else ""
        return f"{told}{listed} Read the tokens again."


def repaired(file: StateFile, facts: ModelFacts | None) -> StateImage:
    """Read a state, without its tail where that is damaged; its changes say what went.

    Args:
        file: where it is.
        facts: the model's; without them nobody can tell whether a whole part of the memory is missing.

    Raises:
        NothingKept: no cell is whole, or none that can be told.
        statecodec.StateFormatError: the state is sound in several ways, or belongs to another model.
    """
    # What a header says of sections is too strict for a few architectures, so a sound state is read without that.
    found = statecodec.salvage(file.view, facts=None if facts is None else codec_facts(facts))
    if found.damage is not None and facts is not None:
        found = statecodec.salvage(file.view, facts=repair_facts(facts))
    if found.image is not None:
        return found.image
    if found.damage is None:  # pragma: no cover - without damage there is an image
        raise AssertionError
    raise NothingKept(file.path, found.damage, found)
