"""A session on disk: writing what it holds as a carry, reading one back, parking one that can serve no more."""

from __future__ import annotations

import os
import re
from array import array
from pathlib import Path
from time import time_ns
from typing import TYPE_CHECKING

import platformdirs
import xxhash

from splitctl import carry as carries
from splitctl.carry import Carry
from splitctl.errors import CarryMismatch
from splitctl.fingerprint import Adapter, Fingerprint, Identity, Representation
from splitctl.placement import FlashAttn
from splitctl.sampler import Sampler
from splitctl.sequence import SamplerSpec
from splitctl.slot import Slot

if TYPE_CHECKING:
    from splitctl.core import Core
    from splitctl.facts import ModelFacts
    from splitctl.sequence import SequenceCarry
    from splitctl.switching.effects import Effects
    from splitctl.switching.sealing import Sealed

_HARMLESS = frozenset({"build", "n_seq_max"})
"""Differences of representation that the library's own reader judges: the bytes decide, not the name of the build."""

_HASH_CHUNK = 1 << 20


class Storage:
    """Carries of one session. Thread: the session's turn guards it."""

    def __init__(self, core: Core) -> None:
        """Work on a session's parts."""
        self._core = core
        self._adapter_hashes: dict[str, str] = {}

    def save(self, path: str | os.PathLike[str], effects: Effects) -> int:
        """Write the session to a file; returns its size in bytes.

        Raises:
            CarryNotWritten: what was at the path before is still there.
        """
        target = Path(path)
        carries.write(target, carries.seal(self._carry(effects.transfer.snapshot())))
        return target.stat().st_size

    def park(self, sealed: Sealed | None) -> Path:
        """Write what is left (without a state: the tokens) to the user's state folder; returns the file.

        Raises:
            CarryNotWritten: it could not be written.
        """
        folder = platformdirs.user_state_path("splitctl") / "parked"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        stem = re.sub(r"[^A-Za-z0-9._-]", "_", Path(self._core.engine.model_path).stem)[:60]
        target = folder / f"{stem}-{os.getpid()}-{time_ns()}.safetensors"
        carries.write(target, carries.seal(self._carry(sealed)))
        return target

    def restore(self, path: str | os.PathLike[str], effects: Effects) -> None:
        """Replace what the session holds with a carry from disk.

        A carry that a session without a context left (tokens only) is read again from its tokens.

        Raises:
            CarryDamaged: it is not what was sealed.
            CarryMismatch: it belongs to another model, adapter or layout.
            ConfigInvalid: it holds more prompt than the encoder reads at once here.
            Refused: the library would not take its state; the session is as it was.
        """
        core = self._core
        read = carries.read(Path(path)).carry
        version = read.fingerprint.representation.state_version
        mine = self._fingerprint(version)
        blocking = [d for d in carries.check_fits(read, mine) if d.field not in _HARMLESS]
        if blocking:
            raise CarryMismatch(blocking)
        slots = {seq_id: Slot(seq_id) for seq_id in core.slots}
        for sequence in read.sequences:
            self._fill(slots[sequence.seq_id], sequence)
        core.check_encoder(sum(int(slot.encoder_tokens.size) for slot in slots.values()))
        effects.transfer.replace(read.state, slots)
        for slot in slots.values():
            slot.sampler = self._sampler(next((s for s in read.sequences if s.seq_id == slot.seq_id), None))

    def _carry(self, sealed: Sealed | None) -> Carry:
        core = self._core
        adapters = self._adapters()
        return Carry(
            state=sealed.view if sealed is not None else memoryview(b""),
            sequences=tuple(slot.carry() for slot in core.used()),
            adapters=adapters,
            placement=core.placement,
            fingerprint=self._fingerprint(sealed.version if sealed is not None else 0),
        )

    def _fingerprint(self, version: int) -> Fingerprint:
        core = self._core
        facts, placement = core.facts, core.placement
        return Fingerprint(
            Identity(
                header_xxh3_128=facts.header_digest,
                header_bytes=facts.header_bytes,
                file_bytes=facts.file_bytes,
                architecture=facts.architecture,
                n_vocab=core.n_vocab,
                rope=rope_settings(facts),
                adapters=tuple((one.xxh3_128, one.scale) for one in self._adapters()),
            ),
            Representation(
                build=core.engine.library.build,
                type_k=placement.type_k,
                type_v=placement.type_v,
                v_trans=placement.flash_attn is FlashAttn.OFF,
                n_stream=1 if placement.kv_unified else placement.n_seq_max,
                n_seq_max=placement.n_seq_max,
                state_version=version,
            ),
        )

    def _adapters(self) -> tuple[Adapter, ...]:
        return tuple(Adapter(Path(one.path), self._hash(one.path), one.scale) for one in self._core.engine.adapters)

    def _hash(self, path: str) -> str:
        """Return the xxh3-128 of an adapter's file, read once."""
        if path not in self._adapter_hashes:
            digest = xxhash.xxh3_128()
            with Path(path).open("rb") as file:
                while chunk := file.read(_HASH_CHUNK):
                    digest.update(chunk)
            self._adapter_hashes[path] = digest.hexdigest()
        return self._adapter_hashes[path]

    def _fill(self, slot: Slot, sequence: SequenceCarry) -> None:
        slot.tokens = array("i", sequence.tokens.tolist())
        slot.n_past = sequence.n_past
        slot.encoder_tokens = sequence.encoder_tokens
        slot.take_rows(sequence.logits, sequence.output_ids)

    def _sampler(self, sequence: SequenceCarry | None) -> Sampler | None:
        if sequence is None or (not sequence.accepted.size and sequence.sampler == SamplerSpec()):
            return None
        sampler = Sampler(self._core.engine.library, sequence.sampler, self._core.n_vocab)
        sampler.replay(sequence.accepted.tolist(), sequence.n_draws)
        return sampler


def rope_settings(facts: ModelFacts) -> tuple[tuple[str, str], ...]:
    """Return the header's scalar rope settings as a fingerprint has them: name and value as text, sorted by name."""
    return tuple(
        sorted((key.split(".rope.", 1)[1], str(value)) for key, value in facts.rope if not isinstance(value, tuple))
    )


__all__ = ["Storage", "rope_settings"]
