"""What a saved state belongs to: which model it is (identity) and how its bytes are laid out (representation)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from splitctl.errors import Difference
from splitctl.placement import FlashAttn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitctl.model.facts import ModelFacts
    from splitctl.placement import Placement


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that the session loaded from a file.

    Args:
        path: where it was loaded from; not part of the identity, files move.
        xxh3_128: checksum of the file, 32 hex digits.
        scale: the scale it is applied at.
    """

    path: Path
    xxh3_128: str
    scale: float

    @classmethod
    def of(cls, path: Path, scale: float) -> Adapter:
        """Hash the adapter's file; raises OSError where it cannot be read."""
        with path.open("rb") as file:
            return cls(path, hashlib.file_digest(file, xxhash.xxh3_128).hexdigest(), scale)


@dataclass(frozen=True, slots=True)
class Identity:
    """Which model computed the state; any difference refuses.

    Args:
        header_xxh3_128: checksum of the GGUF header (everything before the first tensor), 32 hex digits.
        header_bytes: size of that header, bytes.
        file_bytes: size of the whole file, bytes.
        architecture: the library's name for it ("llama").
        n_vocab: tokens in the vocabulary.
        rope: the rope settings in force, name and value, sorted by name: the base and scale that a user can override.
        adapters: checksum and scale of each adapter, in the order they are applied.
    """

    header_xxh3_128: str
    header_bytes: int
    file_bytes: int
    architecture: str
    n_vocab: int
    rope: tuple[tuple[str, str], ...] = ()
    adapters: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, facts: ModelFacts, adapters: Sequence[Adapter], n_vocab: int) -> Identity:
        """Identify a model; the size of its vocabulary is what the library says."""
        return cls(
            header_xxh3_128=facts.header_digest,
            header_bytes=facts.header_bytes,
            file_bytes=facts.file_bytes,
            architecture=facts.architecture,
            n_vocab=n_vocab,
            rope=rope_settings(facts),
            adapters=tuple((one.xxh3_128, one.scale) for one in adapters),
        )


@dataclass(frozen=True, slots=True)
class Representation:
    """How the bytes are laid out; a difference converts, or is refused by name.

    Args:
        build: the library's build id.
        type_k: type of the K cache ("f16").
        type_v: type of the V cache.
        v_trans: V is stored transposed (flash attention off).
        n_stream: memory streams: 1 when unified, n_seq_max otherwise.
        n_seq_max: sequences that the context can hold.
        state_version: version word of the library's session files.
    """

    build: str
    type_k: str
    type_v: str
    v_trans: bool
    n_stream: int
    n_seq_max: int
    state_version: int

    @classmethod
    def of(cls, placement: Placement, build: str, state_version: int) -> Representation:
        """Say how a build lays out the state of a placement."""
        return cls(
            build=build,
            type_k=placement.type_k,
            type_v=placement.type_v,
            v_trans=placement.flash_attn is FlashAttn.OFF,
            n_stream=1 if placement.kv_unified else placement.n_seq_max,
            n_seq_max=placement.n_seq_max,
            state_version=state_version,
        )


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Both halves.

    Args:
        identity: which model.
        representation: how the bytes are laid out.
    """

    identity: Identity
    representation: Representation

    def differences(self, session: Fingerprint) -> tuple[tuple[Difference, ...], tuple[Difference, ...]]:
        """Compare a carry's fingerprint (self) with a session's.

        Returns:
            Differences of identity, then of representation; each in the order of the fields.
        """
        return _differences(self.identity, session.identity), _differences(self.representation, session.representation)


def rope_settings(facts: ModelFacts) -> tuple[tuple[str, str], ...]:
    """Return the header's scalar rope settings as a fingerprint has them: name and value as text, sorted by name."""
    return tuple(
        sorted((key.split(".rope.", 1)[1], str(value)) for key, value in facts.rope if not isinstance(value, tuple))
    )


def _differences(carried: Identity | Representation, wanted: Identity | Representation) -> tuple[Difference, ...]:
    found: list[Difference] = []
    for one in fields(carried):
        was, now = getattr(carried, one.name), getattr(wanted, one.name)
        if one.name == "rope":
            found += _entry_differences("rope", dict(was), dict(now), absent="unset")
        elif one.name == "adapters":
            old, new = (
                {at: f"{checksum} at scale {scale!r}" for at, (checksum, scale) in enumerate(adapters)}
                for adapters in (was, now)
            )
            found += _entry_differences("adapter", old, new, absent="none")
        elif was != now:
            found.append(Difference(one.name, str(was), str(now)))
    return tuple(found)


def _entry_differences(what: str, was: dict[Any, str], now: dict[Any, str], *, absent: str) -> list[Difference]:
    return [
        Difference(f"{what} {key}", was.get(key, absent), now.get(key, absent))
        for key in sorted(was.keys() | now.keys())
        if was.get(key) != now.get(key)
    ]
