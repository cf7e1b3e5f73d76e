"""A session on disk without a worker: written from the arena where it can be, and at least its tokens.

Law: a state is written only with the tokens that it was made from; where the session has gone on since, the tokens
alone are written, and whoever restores them reads them again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitctl.carry import file as carries
from splitctl.carry.arena import Arena
from splitctl.carry.file import Carry
from splitctl.carry.fingerprint import Adapter, Fingerprint, Identity, Representation
from splitctl.carry.sampling import SamplerSpec
from splitctl.carry.seal import Seal, take
from splitctl.carry.sequence import SequenceCarry, no_logits, no_tokens
from splitctl.errors import CarryDamaged, CarryNotWritten, SplitctlError
from splitctl.host.config import HostConfig
from splitctl.ipc.orders import AdapterFile, SequenceSnapshot
from splitctl.model.facts import read_facts
from splitctl.placement import Placement

_PRIVATE = 0o700


@dataclass(frozen=True, slots=True)
class Owner:
    """What a session's carry belongs to.

    Attributes:
        identity: which model, with which adapters.
        adapters: the adapters with their files.
        build: the library's build.
    """

    identity: Identity
    adapters: tuple[Adapter, ...]
    build: str


class SessionFiles:
    """Where a session is saved and parked, and what its supervisor does with these files itself.

    Attributes:
        parked_by_worker: where a worker has parked the session; None where none has, or it is not needed any more.

    Thread: the supervisor's loop.
    """

    def __init__(self, config: HostConfig, log: Callable[[str], None]) -> None:
        """Read nothing yet; `log` takes lines for a person."""
        self._config = config
        self._log = log
        self._owner: Owner | None = None
        self.parked_by_worker: Path | None = None

    def offer(self) -> None:
        """Log how to continue a saved session, if there is one."""
        found = [path for path in (self._config.park_path, self._config.save_path) if path.is_file()]
        if found:
            newest = max(found, key=lambda path: path.stat().st_mtime)
            other = " (or serve --resume)" if newest == self._config.save_path else ""
            self._log(f"a saved session is there: splitctl restore {newest}{other} goes on with it")

    async def know_owner(self, model: Mapping[str, Any]) -> Owner:
        """Read what a carry of this session belongs to; remembered, because files may be gone when it is needed.

        Raises:
            BadModelFile, OSError: one of the files cannot be read.
        """
        if self._owner is None:
            n_vocab, build = int(model.get("n_vocab", 0)), str(model.get("build", ""))
            path, adapters = self._config.model, self._config.adapters
            self._owner = await asyncio.to_thread(owner_of, path, adapters, n_vocab=n_vocab, build=build)
        return self._owner

    async def write(
        self,
        path: Path,
        sequences: Sequence[SequenceSnapshot],
        *,
        model: Mapping[str, Any],
        placement: Placement,
        sealed: Sequence[tuple[int, Seal]],
    ) -> None:
        """Park the session. Raises CarryNotWritten."""
        try:
            owner = await self.know_owner(model)
            await asyncio.to_thread(park, path, sequences, placement=placement, owner=owner, sealed=sealed)
        except CarryNotWritten:
            raise
        except (SplitctlError, OSError, ValueError) as error:
            raise CarryNotWritten(path, getattr(error, "strerror", None) or str(error)) from error

    def note_parked_by_worker(self, body: Mapping[str, Any]) -> None:
        """Note where a worker says that it has parked the session."""
        written = body.get("parked_at")
        self.parked_by_worker = Path(written) if isinstance(written, str) else None

    def forget_parked_by_worker(self) -> None:
        """Remove the file of a session that is not parked after all, or lies parked elsewhere."""
        if self.parked_by_worker is not None:
            with suppress(OSError):
                self.parked_by_worker.unlink()
        self.parked_by_worker = None


def owner_of(model: Path, adapters: Sequence[AdapterFile], *, n_vocab: int, build: str) -> Owner:
    """Read what a carry would belong to, while all files are there; vocabulary and build are the library's.

    Raises:
        BadModelFile: the model's file is not what it was.
        OSError: an adapter cannot be read.
    """
    facts = read_facts(os.fspath(model))
    loaded = tuple(Adapter.of(one.path, one.scale) for one in adapters)
    return Owner(Identity.of(facts, loaded, n_vocab), loaded, build)


def make_folder(path: Path) -> None:
    """Make the folder of a file, for this user alone; raises OSError."""
    # Something else in the folder's place is named by the write.
    with suppress(FileExistsError):
        path.parent.mkdir(mode=_PRIVATE, parents=True)


def park(
    path: Path,
    sequences: Sequence[SequenceSnapshot],
    *,
    placement: Placement,
    owner: Owner,
    sealed: Sequence[tuple[int, Seal]],
) -> bool:
    """Write a session to a file, whose folder is made; says whether the state is in it, or the tokens alone.

    Where there is no room for the state the tokens alone are written: they are small, and enough to make it again.

    `sealed` are carries that arenas still hold, with the arenas' descriptors, best first.

    Raises:
        CarryNotWritten: the disk or the path does not allow it.
        OSError: the folder cannot be made.
    """
    make_folder(path)
    whole = _with_state(sequences, sealed)
    if whole is not None:
        with suppress(CarryNotWritten):
            carries.write(path, carries.seal(whole))
            return bool(len(whole.state))
    carries.write(path, carries.seal(_tokens_alone(sequences, placement, owner)))
    return False


def _with_state(sequences: Sequence[SequenceSnapshot], sealed: Sequence[tuple[int, Seal]]) -> Carry | None:
    """Find a sealed carry that the session has not left behind."""
    for fd, seal in sealed:
        try:
            carry = take(Arena(fd), seal)
        except (CarryDamaged, OSError, ValueError):
            # Its worker died over it, or memory is short: another one, or the tokens, will do.
            continue
        held = {one.seq_id: one for one in carry.sequences}
        if held.keys() == {one.seq_id for one in sequences} and all(_is_of(held[one.seq_id], one) for one in sequences):
            return dataclasses.replace(carry, sequences=tuple(_gone_on(held[one.seq_id], one) for one in sequences))
    return None


def _is_of(sealed: SequenceCarry, now: SequenceSnapshot) -> bool:
    """Whether a sequence was sealed with the tokens that it has now, but for one that is still to be decoded."""
    n_past = len(now.tokens) - now.is_pending
    is_same_prompt = sealed.encoder_tokens.tolist() == list(now.encoder_tokens)
    return is_same_prompt and n_past == sealed.n_past and sealed.tokens[:n_past].tolist() == list(now.tokens[:n_past])


def _gone_on(sealed: SequenceCarry, now: SequenceSnapshot) -> SequenceCarry:
    """Give a sequence the token that was drawn since it was sealed."""
    tokens = _row(now.tokens)
    sampler = now.sampler or sealed.sampler
    is_same = sampler == sealed.sampler and np.array_equal(tokens, sealed.tokens)
    return dataclasses.replace(
        sealed,
        tokens=tokens,
        sampler=sampler,
        accepted=sealed.accepted if is_same else tokens,
        grammar=sealed.grammar if is_same else now.grammar,
        n_ruled=sealed.n_ruled if is_same else now.n_ruled,
        n_draws=now.n_draws if now.sampler is not None else sealed.n_draws,
    )


def _tokens_alone(sequences: Sequence[SequenceSnapshot], placement: Placement, owner: Owner) -> Carry:
    return Carry(
        state=memoryview(b""),
        sequences=tuple(_sequence(one) for one in sequences),
        adapters=owner.adapters,
        placement=placement,
        fingerprint=Fingerprint(owner.identity, Representation.of(placement, owner.build, 0)),
    )


def _sequence(one: SequenceSnapshot) -> SequenceCarry:
    tokens = _row(one.tokens)
    return SequenceCarry(
        seq_id=one.seq_id,
        tokens=tokens,
        n_past=len(one.tokens) - one.is_pending,
        logits=no_logits(),
        output_ids=no_tokens(),
        sampler=one.sampler or SamplerSpec(),
        accepted=no_tokens() if one.sampler is None else tokens,
        n_draws=one.n_draws,
        grammar=one.grammar,
        n_ruled=one.n_ruled,
        encoder_tokens=_row(one.encoder_tokens),
    )


def _row(tokens: Sequence[int]) -> NDArray[np.int32]:
    return np.array(tokens, np.int32)
