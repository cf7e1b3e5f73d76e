"""One model's part of the sweep: switches sessions, and compares them with a context that never switched.

Runs in a child of `sweep_switch`, which survives its death. Says on stdout, one JSON object a line, which cell it
is in and where, and what came of it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llama_native import Context, Library, Model, NativeError, state_set
from splitctl.carry import file as carries
from splitctl.carry.file import Carry
from splitctl.carry.sampling import SamplerSpec
from splitctl.engine.engine import context_params, model_params, resolve_threads
from splitctl.engine.host_copy import HostCopy
from splitctl.errors import Refused
from splitctl.ipc.probes import Prober
from splitctl.model.facts import ModelFacts, read_facts
from splitctl.outcome import Route, SwitchOutcome, SwitchStatus, Via, WeightsTier
from splitctl.placement import Placement, SplitMode
from splitctl.probing import VerdictCache
from splitctl.session import Session
from tools.children import say

Row = npt.NDArray[np.float32]

N_SEVERAL = 5
#: Longer than the sliding window of every recipe (32 tokens).
N_LONG = 40
N_SHORT = 12
DEVICES_NAME = "SPLITCTL_SWEEP_DEVICES"
"""In the environment of the children: names of the devices, with commas between them."""
_DEVICES = tuple(os.environ.get(DEVICES_NAME, "CPU,CPU").split(","))
_N_ROUNDS = 2

LAYOUTS: dict[str, dict[str, Any]] = {
    "1": {"n_seq_max": 1, "n_ctx": 256},
    "4-unified": {"n_seq_max": 4, "n_ctx": 512, "kv_unified": True},
    "4-streams": {"n_seq_max": 4, "n_ctx": 1024},
}

#: Where a session may be: the three modes, and a layer split with other shares.
PLACES: dict[str, dict[str, Any]] = {
    "none": {"mode": SplitMode.NONE},
    "layer": {"mode": SplitMode.LAYER},
    "tensor": {"mode": SplitMode.TENSOR},
    "layer-1,3": {"mode": SplitMode.LAYER, "tensor_split": (1.0, 3.0, *[1.0] * (len(_DEVICES) - 2))},
}

#: Every ordered pair of the three modes, and from one layer split to another.
PAIRS = (
    *((origin, target) for origin in ("none", "layer", "tensor") for target in ("none", "layer", "tensor")
      if origin != target),
    ("layer", "layer-1,3"),
)  # fmt: skip


class Mismatch(Exception):
    """A check that did not hold."""


def all_cells() -> list[str]:
    """Name every cell of a model: layout, origin and target."""
    return [f"{layout}:{origin}>{target}" for layout in LAYOUTS for origin, target in PAIRS]


def placement_of(place: str, layout: str) -> Placement:
    """Give a place and a layout as a placement of one thread a model, so that sums have one order."""
    plain = Placement(devices=_DEVICES, n_batch=256, n_ubatch=256, n_threads=1, n_threads_batch=1)
    return dataclasses.replace(plain, **PLACES[place], **LAYOUTS[layout])


def prompt(seq_id: int, n_vocab: int) -> list[int]:
    """Give a sequence its own prompt: the first longer than any window, the others shorter and all different."""
    n = N_LONG if seq_id == 0 else N_SHORT + 3 * seq_id
    return [(7919 * (index + 1) + 31 * seq_id + 13) % n_vocab for index in range(n)]


def need(holds: bool, what: str) -> None:  # noqa: FBT001 - reads as a sentence
    """Fail the cell unless a check holds."""
    if not holds:
        raise Mismatch(what)


def need_sound(row: Row, what: str) -> None:
    """Fail the cell for a row that would agree with anything."""
    need(bool(row.size) and bool(np.isfinite(row[row > -1e30]).all()), f"{what}: the row is empty or not finite")
    need(float(np.ptp(row)) > 0, f"{what}: the row is constant")


@dataclass(frozen=True, slots=True)
class Seen:
    """A session as it is at one moment."""

    carry: Carry
    embeddings: tuple[Row, ...]


class Sweep:
    """The cells of one model."""

    def __init__(
        self,
        library: Library,
        path: Path,
        prober: Prober,
        folder: Path,
        weights: WeightsTier = WeightsTier.FILE,
        via: Route = Route.COMPOSED,
    ) -> None:
        self.library = library
        self.weights = weights
        self.via = via
        self.refused_tier = ""
        self.copy: HostCopy | None = None
        self.path = path
        self.facts: ModelFacts = read_facts(path)
        self.prober = prober
        self.folder = folder
        self.embeds = self.facts.gives_embeddings

    def run(self, cell: str) -> None:
        """Try one cell and say what came of it."""
        layout, pair = cell.split(":")
        origin, target = pair.split(">")
        say(cell=cell, stage="opening")
        self.refused_tier = ""
        self.copy = HostCopy() if self.weights is WeightsTier.PINNED else None
        try:
            session = self._open(placement_of(origin, layout))
        except Refused as refusal:
            self._after_refused_opening(layout)
            say(cell=cell, status="refused", reasons=[[one.code, one.text] for one in refusal.reasons])
            return
        except NativeError as error:
            say(cell=cell, status="not-opened", why=str(error))
            return
        with session:
            try:
                say(cell=cell, stage="filling")
                self._fill(session)
            except NativeError as error:
                say(cell=cell, status="not-opened", why=str(error))
                return
            if self.via is Route.NATIVE and self.copy is not None:
                # The library's own call takes the bytes from where the model in use was made of.
                say(cell=cell, stage="loading from the copy")
                for place in (target, origin):
                    session.switch(placement_of(place, layout), via=Route.COMPOSED)
            say(cell=cell, stage="switching")
            reasons = self._switch_and_check(session, placement_of(target, layout), cell)
            if reasons is None and self.refused_tier:
                reasons = [["pinned-refused", self.refused_tier]]
            if reasons is None:
                say(cell=cell, status="passed")
            else:
                say(cell=cell, status="refused", reasons=reasons)

    def _open(self, placement: Placement) -> Session:
        """Open a session as a user would, with the rules and the probe."""
        session = Session.open(
            self.path,
            placement,
            library=self.library,
            embeddings=self.embeds,
            prober=self.prober,
            weights=self.weights,
            copy=self.copy,
        )
        if self.copy is not None:
            self.copy.wait()
        return session

    def _after_refused_opening(self, layout: str) -> None:
        """Check that a refused mode leaves a library that still serves another."""
        try:
            with self._open(placement_of("layer", layout)) as session:
                self._fill(session)
        except NativeError:
            # Layer mode has its own cells, and the library may be unable to run this model at all.
            return

    def _fill(self, session: Session) -> None:
        """Read a prompt into every sequence and generate from each, so that a drawn token is in flight."""
        n_vocab = session.facts.n_vocab
        sequences = range(session.placement.n_seq_max)
        for seq_id in sequences:
            session.prefill(prompt(seq_id, n_vocab), seq_id)
            self._need_sound(session, seq_id, "after the prompt")
        if self.embeds:
            return
        for seq_id in sequences:
            session.set_sampler(SamplerSpec(temp=0.8, seed=7 + seq_id), seq_id)
        for _ in range(_N_ROUNDS):
            session.advance(tuple(sequences))
        for seq_id in sequences:
            self._need_sound(session, seq_id, "after generating")

    def _need_sound(self, session: Session, seq_id: int, what: str) -> None:
        need_sound(self._row(session, seq_id), f"sequence {seq_id}, {what}")

    def _row(self, session: Session, seq_id: int) -> Row:
        """Take the newest row of a sequence: logits, or the embedding where a model has no logits."""
        row = session.embedding(seq_id) if self.embeds else session.logits(seq_id)[-1]
        need(row is not None, f"sequence {seq_id} has no row")
        return np.asarray(row, np.float32)

    def _see(self, session: Session) -> Seen:
        """Take everything that a session holds, through the file that a user would save."""
        path = self.folder / "seen.safetensors"
        session.save(path)
        carry = carries.read(path).carry
        embeddings = tuple(self._row(session, one.seq_id) for one in carry.sequences) if self.embeds else ()
        return Seen(carry, embeddings)

    def _switch_and_check(self, session: Session, target: Placement, cell: str) -> list[list[str]] | None:
        """Switch and check everything; returns the reasons of a refusal."""
        origin = session.placement
        before = self._see(session)
        self._need_content(before)
        outcome = session.switch(target, via=self.via)
        if outcome.status is SwitchStatus.REFUSED:
            need(session.placement == origin, "a refused switch changed the placement")
            self._need_equal(before, self._see(session), "after the refusal")
            if self.via is not Route.COMPOSED:
                composed = session.switch(target, via=Route.COMPOSED)
                need(composed.status is SwitchStatus.REFUSED, f"it is refused by this route alone: {outcome.reason}")
            self._go_on(session)
            return [[one.code, one.text] for one in outcome.reasons]
        self._need_switched(outcome, "the switch", self.via)
        self._need_equal(before, self._see(session), "after the switch")
        say(cell=cell, stage="returning")
        self._need_switched(session.switch(origin, via=self.via), "the way back", self.via)
        self._need_equal(before, self._see(session), "after the round trip")
        need(not session.placement.differs(origin), "the round trip ends in another placement")
        if self.via is not Route.COMPOSED:
            say(cell=cell, stage="switching by the composed route")
            for place in (target, origin):
                self._need_switched(session.switch(place, via=Route.COMPOSED), "the composed switch", Route.COMPOSED)
                self._need_equal(before, self._see(session), "after the composed switch")
        say(cell=cell, stage="switching again")
        self._need_switched(session.switch(target, via=self.via), "the second switch", self.via)
        say(cell=cell, stage="going on")
        went = self._go_on(session)
        last = session.last_switch
        need(last is not None and last.status is SwitchStatus.SWITCHED and last.confirmed, f"not confirmed: {last}")
        say(cell=cell, stage="a fresh context")
        fresh = self._go_on_fresh(session.placement, before.carry)
        need(len(went) == len(fresh) > 0, f"{len(went)} rows against {len(fresh)} fresh ones")
        for index, (mine, other) in enumerate(zip(went, fresh, strict=True)):
            need_sound(other, f"fresh row {index}")
            need(
                mine.tobytes() == other.tobytes(), f"row {index} differs from a fresh context: {distance(mine, other)}"
            )
        return None

    def _need_content(self, seen: Seen) -> None:
        """A pass over an empty state proves nothing."""
        need(len(seen.carry.sequences) > 0, "the session holds no sequence")
        if self.facts.has_memory:
            need(len(seen.carry.state) > 64 and any(seen.carry.state[64:]), "the state holds nothing")
        for one in seen.carry.sequences:
            need(one.tokens.size > 0, f"sequence {one.seq_id} holds no tokens")

    def _need_switched(self, outcome: SwitchOutcome, what: str, via: Route) -> None:
        need(
            outcome.status is SwitchStatus.SWITCHED,
            f"{what} came to {outcome.status.value} at {outcome.stage}: {outcome.reason}",
        )
        need(outcome.via is Via(via.value), f"{what} was {outcome.via.value}: {outcome.via_reason}")
        if outcome.weights is not self.weights:
            is_refused = self.weights is WeightsTier.PINNED and "is refused with this build" in outcome.weights_reason
            need(is_refused, f"{what} took the weights from {outcome.weights}: {outcome.weights_reason}")
            self.refused_tier = outcome.weights_reason

    def _need_equal(self, first: Seen, second: Seen, when: str) -> None:
        """Compare state, tokens, positions, logits and samplers, byte by byte."""
        one, two = first.carry, second.carry
        need(bytes(one.state) == bytes(two.state), f"the state differs {when}")
        need(len(one.sequences) == len(two.sequences), f"sequences are missing {when}")
        for mine, other in zip(one.sequences, two.sequences, strict=True):
            who = f"sequence {mine.seq_id}"
            need((mine.seq_id, mine.n_past) == (other.seq_id, other.n_past), f"positions of {who} differ {when}")
            need((mine.sampler, mine.n_draws) == (other.sampler, other.n_draws), f"the sampler of {who} differs {when}")
            for name in ("tokens", "logits", "output_ids", "accepted", "encoder_tokens"):
                same = getattr(mine, name).tobytes() == getattr(other, name).tobytes()
                need(same, f"{name} of {who} differ {when}")
        for mine_row, other_row in zip(first.embeddings, second.embeddings, strict=True):
            need(mine_row.tobytes() == other_row.tobytes(), f"embeddings differ {when}")

    def _several(self, seq_id: int) -> list[int]:
        """Tokens for a batch of several."""
        return [(101 * (index + 1) + seq_id) % self.facts.n_vocab for index in range(N_SEVERAL)]

    def _go_on(self, session: Session) -> list[Row]:
        """Go on by batches of one token and of several, every sequence by itself; returns the rows."""
        rows = []
        for seq_id in range(session.placement.n_seq_max):
            if self.embeds:
                session.prefill([3 % self.facts.n_vocab], seq_id)
            else:
                session.advance((seq_id,))
            rows.append(self._row(session, seq_id))
        for seq_id in range(session.placement.n_seq_max):
            session.prefill(self._several(seq_id), seq_id)
            rows.append(self._row(session, seq_id))
        for index, row in enumerate(rows):
            need_sound(row, f"going on, row {index}")
        self._went = [session.tokens(seq_id) for seq_id in range(session.placement.n_seq_max)]
        return rows

    def _go_on_fresh(self, placement: Placement, carry: Carry) -> list[Row]:
        """Do the same in a context that never knew another mode and was given the same state."""
        with (
            Model.load(self.library, os.fspath(self.path), model_params(placement)) as model,
            Context(model, context_params(placement, embeddings=self.embeds)) as context,
        ):
            encode(context, carry)
            if self.facts.has_memory:
                state_set(context, carry.state)
            held = {one.seq_id: one.n_past for one in carry.sequences}
            rows = []

            def decode(seq_id: int, tokens: Sequence[int], *, keep: bool = True) -> None:
                n, first = len(tokens), held[seq_id]
                outputs = [False] * (n - 1) + [True]
                context.decode(tokens, range(first, first + n), [seq_id] * n, outputs)
                held[seq_id] += n
                if keep:
                    rows.append(self._fresh_row(context, n - 1, seq_id))

            for one in carry.sequences:
                went = self._went[one.seq_id]
                decode(one.seq_id, went[one.n_past : one.n_past + 1])
            for one in carry.sequences:
                went = self._went[one.seq_id]
                at = len(went) - N_SEVERAL
                if held[one.seq_id] < at:
                    # The session drew one more token, and decodes it before the batch of several.
                    decode(one.seq_id, went[held[one.seq_id] : at], keep=False)
                decode(one.seq_id, went[at:])
            return rows

    def _fresh_row(self, context: Context, index: int, seq_id: int) -> Row:
        raw = context.embeddings(index, seq_id) if self.embeds else context.logits(index)
        return np.frombuffer(raw, np.float32)


def encode(context: Context, carry: Carry) -> None:
    """Run the encoder over what all sequences gave it, in one batch."""
    tokens: list[int] = []
    positions: list[int] = []
    seq_ids: list[int] = []
    for one in carry.sequences:
        n = int(one.encoder_tokens.size)
        tokens += one.encoder_tokens.tolist()
        positions += range(n)
        seq_ids += [one.seq_id] * n
    if tokens:
        context.encode(tokens, positions, seq_ids, [True] * len(tokens))


def distance(mine: Row, other: Row) -> str:
    """Say how far two rows are apart: normalised mean squared error."""
    if mine.shape != other.shape:
        return f"shapes {mine.shape} and {other.shape}"
    power = float(np.mean(np.square(other.astype(np.float64)))) or 1.0
    return f"NMSE {float(np.mean(np.square(mine.astype(np.float64) - other))) / power:.2g}"


def fill(model: Model, context: Context, *, with_rounds: bool = True) -> dict[int, int]:
    """Read a prompt into every sequence of a context and a few tokens in turns, by the library alone.

    Returns:
        Sequence id -> tokens that it holds.
    """
    reads_first = model.has_encoder and model.has_decoder
    if reads_first:
        tokens = prompt(0, model.n_vocab)
        context.encode(tokens, range(len(tokens)), [0] * len(tokens), [True] * len(tokens))
    held = {}
    for seq_id in range(context.n_seq_max):
        tokens = [max(model.decoder_start_token, 0)] if reads_first else prompt(seq_id, model.n_vocab)
        context.decode(tokens, range(len(tokens)), [seq_id] * len(tokens), [True] * len(tokens))
        held[seq_id] = len(tokens)
    for _ in range(_N_ROUNDS if with_rounds else 0):
        ids = list(held)
        context.decode([1] * len(ids), [held[one] for one in ids], ids, [True] * len(ids))
        held = {one: n + 1 for one, n in held.items()}
    return held


def control(library: Library, path: Path, place: str, layout: str) -> None:
    """Run a model in one mode without any of our session code: what the library alone does with it."""
    facts = read_facts(path)
    placement = resolve_threads(placement_of(place, layout))
    with (
        Model.load(library, os.fspath(path), model_params(placement)) as model,
        Context(model, context_params(placement, embeddings=facts.gives_embeddings)) as context,
    ):
        fill(model, context)


def guarded(run: Callable[[str], None], cell: str) -> None:
    """Try a cell; whatever goes wrong in it is its failure."""
    try:
        run(cell)
    except Mismatch as mismatch:
        say(cell=cell, status="failed", why=str(mismatch))
    except Exception as error:  # noqa: BLE001 - a cell's failure is a result
        where = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        say(cell=cell, status="failed", why=why)


def main(arguments: Sequence[str]) -> int:
    """Run cells, or a control.

    Args:
        arguments: one JSON object: library, path, verdicts, weights, via, cells; of a control library, path, place,
            layout.

    Returns:
        Exit code 0, unless the process dies.
    """
    job = json.loads(arguments[0])
    library = Library.open(job["library"], env=os.environ)
    path = Path(job["path"])
    if "place" in job:
        control(library, path, job["place"], job["layout"])
        return 0
    prober = Prober(Path(job["library"]), dict(os.environ), VerdictCache(Path(job["verdicts"])))
    shared = "/dev/shm"  # noqa: S108 - memory instead of a disk where there is one; a private folder inside
    with tempfile.TemporaryDirectory(dir=shared if Path(shared).is_dir() else None) as folder:
        sweep = Sweep(library, path, prober, Path(folder), WeightsTier(job["weights"]), Route(job["via"]))
        for cell in job["cells"]:
            guarded(sweep.run, cell)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
