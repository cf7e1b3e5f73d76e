"""An in-process session: a model that goes on serving while its split mode changes under it.

Who drives one sequence uses ``prefill`` and ``generate``. Who interleaves many, as a worker does, uses what those are
made of: ``fill``, ``read``, ``begin``, ``step``.

Main path of a switch: ``Session.switch`` -> ``switcher.run`` -> ``machine.step`` -> command -> ``effects.perform`` ->
event -> ``machine.step``. A library that aborts takes the process along: a trial runs in a child, and a
worker can host the session.
"""

from __future__ import annotations

import dataclasses
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Literal, Self

from llama_native import HandleClosed, Library
from splitctl.errors import ConfigInvalid, Reason
from splitctl.ipc.stop_texts import StopTexts
from splitctl.outcome import Proof, Route, Stage, SwitchOptions, SwitchOutcome, WeightsTier
from splitctl.placement import Placement, whole
from splitctl.session import arguments
from splitctl.session.decoder import Decoder
from splitctl.session.handing import Handing
from splitctl.session.opening import open_parts
from splitctl.switching.checking import Checked
from splitctl.switching.effects import Effects, Run
from splitctl.switching.switcher import Switcher, complete

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from llama_native import Model
    from splitctl.carry.arena import Arenas
    from splitctl.carry.sampling import SamplerSpec, Token
    from splitctl.carry.sequence import SequenceCarry
    from splitctl.engine.host_copy import HostCopy
    from splitctl.engine.live import LiveSession
    from splitctl.engine.slot import Slot
    from splitctl.errors import ContextFull
    from splitctl.model.facts import ModelFacts
    from splitctl.model.identity import FileIdentity
    from splitctl.session.decoder import Filling
    from splitctl.session.storage import Restored, Storage
    from splitctl.switching.checking import Checker, Prober


class Session:
    """Sequences on a placed model.

    Thread: any; one at a time works, a switch goes first. Lifetime: until :meth:`close`; also a context manager.
    """

    def __init__(self, live: LiveSession, checker: Checker, storage: Storage) -> None:
        """Use :meth:`open`."""
        self._live = live
        self._checker = checker
        self._storage = storage
        self._effects = Effects(live, self._storage.park)
        self._switcher = Switcher(self._effects, live.placement)
        self._decoder = Decoder(live, self._switcher)

    @classmethod
    def open(
        cls,
        model_path: str | os.PathLike[str],
        placement: Placement | None = None,
        *,
        library: Library | None = None,
        adapters: Sequence[tuple[str | os.PathLike[str], float]] = (),
        embeddings: bool = False,
        prober: Prober | Literal["auto"] | None = "auto",
        cancel: threading.Event | None = None,
        progress: Callable[[float], None] | None = None,
        force: bool = False,
        arenas: Arenas | None = None,
        on_tick: Callable[[], None] | None = None,
        files: Sequence[FileIdentity] = (),
        weights: WeightsTier = WeightsTier.FILE,
        copy: HostCopy | None = None,
    ) -> Self:
        """Load a model and open a context.

        Args:
            model_path: the GGUF, or the first part of a split one.
            placement: where and how; None: llama.cpp's defaults. What it leaves to the library is resolved and fixed.
            library: the open library; None: the one that is open, else the first usable one (LLAMA_NATIVE_LIB counts).
            adapters: LoRA files and their scales, applied in this order; they travel with every switch.
            embeddings: also compute embeddings (models without logits need it).
            prober: tries a placement in a child process, because some builds abort; "auto": as the command line does,
                verdicts are kept in the user's cache folder; None: the rules alone decide.
            cancel: set it to end a load, a prompt or a switch early.
            progress: called with the loaded share, 0.0 to 1.0.
            force: open it even if a trial in a child process failed.
            arenas: memory for saved states that outlives the process; None: memory of its own.
            on_tick: called while the library works, as often as it calls back: a sign that it does not hang.
            files: what another session of this model and these adapters was opened from; none: whatever lies there.
            weights: where switches take the weights from.
            copy: memory for a copy of the weights that outlives the process; None: memory of its own, where needed.

        Raises:
            FileChanged: a file is not what ``files`` say, or was written to meanwhile.
            Refused: a rule or the probe refuses the placement; nothing was loaded.
            BadModelFile: the file is missing, no GGUF, truncated or hostile.
            AdapterInvalid: the same of an adapter's file, or it does not fit the model.
            ConfigInvalid: the placement cannot be for this model and library.
            llama_native.NativeError: no library, or it refused the model or the context.
        """
        parts = open_parts(
            os.fspath(model_path),
            Placement() if placement is None else arguments.placement_of(placement),
            library,
            arguments.adapters_of(adapters),
            embeddings=embeddings,
            prober=prober,
            cancel=cancel,
            progress=progress,
            force=force,
            arenas=arenas,
            on_tick=on_tick,
            files=files,
            weights=weights,
            copy=copy,
        )
        return cls(*parts)

    @property
    def handing(self) -> Handing:
        """What hands the session to another process, or takes one over. It holds the session, so nobody keeps it."""
        transfer = self._effects.transfer
        return Handing(self._live, self._checker, self._storage, transfer, self._decoder, self._working)

    @property
    def placement(self) -> Placement:
        """The placement that the session serves in, with what the library resolved."""
        return self._live.placement

    @property
    def facts(self) -> ModelFacts:
        """What the model's header says."""
        return self._live.facts

    @property
    def files(self) -> tuple[FileIdentity, ...]:
        """What the model and then the adapters were loaded from: every file, and every part of a split one."""
        return self._live.engine.files

    @property
    def model(self) -> Model:
        """The placed model, for its vocabulary and chat template; another object after every switch.

        Raises:
            Parked: the session serves no more.
            Busy: the call comes from inside a callback of a switch that has no model now.
        """
        self._refuse_gone()
        if (model := self._live.engine.model) is not None:
            return model
        with self._working("waiting for its model"):
            return self._live.model

    @property
    def stage(self) -> Stage:
        """Where the session is."""
        return self._switcher.state.stage

    @property
    def last_switch(self) -> SwitchOutcome | None:
        """The last switch as it stands now: its trial may have confirmed it, or fallen back from it."""
        return self._switcher.last

    @property
    def weights_from(self) -> WeightsTier:
        """Where the weights of the placed model came from."""
        return self._live.engine.came_from

    def expect(self, n_to_come: Callable[[], int]) -> None:
        """Let a choice of weights ask how many tokens are known to be generated before the next switch. Any thread."""
        self._live.engine.n_to_come = n_to_come

    @property
    def n_decodes(self) -> int:
        """Decodes done since the session opened."""
        return self._live.n_decodes

    @property
    def parked_at(self) -> Path | None:
        """Where a parked session's carry lies."""
        return self._effects.parked_at

    def tokens(self, seq_id: int = 0) -> list[int]:
        """Return a sequence's tokens, the newest of which may not have been decoded yet."""
        return list(self._slot(seq_id).tokens)

    def logits(self, seq_id: int = 0) -> NDArray[np.float32]:
        """Return the rows of the sequence's last decode: float32[n_outputs, n_vocab]; a copy."""
        return self._slot(seq_id).logits.copy()

    def embedding(self, seq_id: int = 0) -> NDArray[np.float32] | None:
        """Return the embedding of the last prompt: float32[n_embd]; None where there is none."""
        return self._slot(seq_id).embedding

    def tokenize(self, text: str | bytes, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Turn text into the model's tokens; ``add_special`` adds BOS. ConfigInvalid: the model has no tokenizer.

        It waits for nobody who reads or generates; while a switch has no model, it waits for its end.
        """
        model = self.model
        text = arguments.text_of(text, model)
        with suppress(HandleClosed):
            return model.tokenize(text, add_special=add_special, parse_special=parse_special)
        with self._working("tokenizing"):
            return self._live.model.tokenize(text, add_special=add_special, parse_special=parse_special)

    def prefill(
        self, tokens: Sequence[int], seq_id: int = 0, *, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Read tokens into a sequence, after what it holds.

        Args:
            tokens: int32[n], n at least 1.
            seq_id: the sequence.
            progress: called with the tokens done and all, after each batch.

        Raises:
            ConfigInvalid: no token, or one outside the vocabulary.
            ContextFull: there is no room; nothing was decoded.
            Cancelled: the cancel flag was set; the sequence keeps what was read.
        """
        slot, tokens = self._slot(seq_id), arguments.tokens_of(tokens, self._live.n_vocab)
        with self._working("reading a prompt"):
            if self._live.is_encoder_decoder and not slot.encoder_tokens.size:
                self._decoder.encode_prompt(slot, tokens)
                tokens = [self._live.decoder_start]
            self._decoder.decode_pending([slot])
            self._live.check_room(seq_id, len(tokens))
        done, n = 0, len(tokens)
        while done < n:
            done += self.read(seq_id, tokens[done:])
            if progress is not None:
                progress(done, n)

    def generate(self, seq_id: int = 0, *, n: int = -1, sampler: SamplerSpec | None = None) -> Iterator[Token]:
        """Generate, one token a step; a switch may come between any two.

        Args:
            seq_id: a sequence that holds a prompt.
            n: most tokens; -1 goes on to an end token or a full context.
            sampler: how to draw; None goes on with the sequence's own (a new one where it has none).

        Yields:
            Tokens; the last one may be an end token, or complete a stop text of the sampler. A piece that may begin one
            comes with a later token, so together the pieces are the text before it.

        Raises:
            ConfigInvalid: the sequence holds nothing to go on from.
            ContextFull: there is no room for a further token, and ``n`` asked for it.
        """
        if sampler is not None:
            self.set_sampler(sampler, seq_id)
        own = self._slot(seq_id).sampler
        held = StopTexts(own.spec.stop if own is not None else ())
        made, n = 0, arguments.count_of("n", n)
        while n < 0 or made < n:
            with self._working("generating"):
                token = self._decoder.advance([self._slot(seq_id)])[seq_id]
                is_full = self._live.is_full(seq_id)
            made += 1
            piece = held.feed(token.piece)
            if token.is_end or is_full or made == n:
                piece += held.rest()
            yield dataclasses.replace(token, piece=piece, is_stop=held.hit)
            if token.is_end or held.hit or (n < 0 and is_full):
                return

    def advance(self, seq_ids: Sequence[int]) -> dict[int, Token]:
        """Generate one token for each of several sequences, in one decode.

        Args:
            seq_ids: sequences that hold a prompt, each once.

        Returns:
            Sequence id -> its next token, whatever the sampler's stop texts are; it is decoded by the next call.

        Raises:
            ConfigInvalid: a sequence holds nothing to go on from.
            ContextFull: there is no room.
        """
        with self._working("generating"):
            return self._decoder.advance([self._slot(seq_id) for seq_id in arguments.sequences_of(seq_ids)])

    def fill(
        self,
        seq_id: int,
        tokens: Sequence[int],
        *,
        n_delivered: int = 0,
        encoder_tokens: Sequence[int] | None = None,
    ) -> Filling:
        """Let a sequence keep of what it holds as much as ``tokens`` begin with, and say what is left to read.

        Args:
            seq_id: the sequence; its sampler is dropped.
            tokens: what it shall hold.
            n_delivered: how many of them were drawn and delivered before; the newest of those is not read.
            encoder_tokens: of an encoder-decoder: what its encoder reads, ``tokens`` being the decoder's. None: the
                encoder reads those of ``tokens`` that were not delivered.

        Raises:
            ConfigInvalid: no token, one outside the vocabulary, or more than an encoder reads at once.
        """
        slot, tokens = self._slot(seq_id), arguments.tokens_of(tokens, self._live.n_vocab)
        with self._working("making ready for a prompt"):
            return self._decoder.fill(slot, tokens, n_delivered=n_delivered, encoder_tokens=encoder_tokens)

    def read(self, seq_id: int, tokens: Sequence[int], *, n_most: int | None = None, draws_next: bool = True) -> int:
        """Read the beginning of ``tokens`` into a sequence, in one decode.

        Args:
            seq_id: the sequence.
            tokens: int32[n], n at least 1.
            n_most: most tokens to read; None, and at most: a batch of the placement.
            draws_next: whether the next token is drawn after the last of them.

        Returns:
            Tokens read.

        Raises:
            ContextFull: there is no room; nothing was decoded.
            Cancelled, llama_native.CallFailed: the decode ended early; the sequence keeps what was read.
        """
        with self._working("reading a prompt"):
            return self._decoder.read(self._slot(seq_id), tokens, n_most=n_most, draws_next=draws_next)

    def begin(self, seq_id: int, sampler: SamplerSpec | None, *, n_draws: int = 0, pending: int | None = None) -> None:
        """Make a sequence that holds its prompt ready to be stepped.

        Args:
            seq_id: the sequence.
            sampler: how to draw; None: not known yet.
            n_draws: random draws that were made before.
            pending: the token that was drawn last and is not decoded yet; None: none was.
        """
        with self._working("beginning to generate"):
            slot = self._slot(seq_id)
            if pending is not None:
                slot.tokens.append(pending)
            if sampler is not None:
                self._decoder.put_sampler(slot, sampler, n_draws)

    def step(self, seq_ids: Sequence[int]) -> dict[int, Token | Exception]:
        """Generate one token for each of several sequences, in one decode; one that cannot draw stops no other.

        Args:
            seq_ids: sequences that hold a prompt, each once.

        Returns:
            Sequence id -> its next token, or why it could not be drawn.

        Raises:
            ContextFull: there is no room; nothing was decoded.
            Parked: it was the trial of a switch, which could not be fallen back from.
            llama_native.CallFailed: the library refused or failed; nothing was drawn.
        """
        with self._working("generating"):
            return self._decoder.step([self._slot(seq_id) for seq_id in seq_ids])

    def n_draws(self, seq_id: int) -> int:
        """Return the random draws that a sequence's sampler has made."""
        sampler = self._slot(seq_id).sampler
        return 0 if sampler is None else sampler.n_draws

    def n_held(self, seq_id: int) -> int:
        """Return how many tokens the memory holds of a sequence."""
        return self._slot(seq_id).n_past

    def why_full(self, seq_id: int, n_new: int) -> ContextFull | None:
        """Return the error that so many more tokens would be; None where they fit. A unified cache counts as one."""
        with self._live.turn.take("counting its room"):
            self._refuse_gone()
            return self._live.why_full(self._slot(seq_id).seq_id, n_new)

    def sequences(self) -> tuple[SequenceCarry, ...]:
        """Return what every sequence holds that holds anything; the logits are shared, the rest copied."""
        with self._working("telling what it holds"):
            return tuple(slot.carry() for slot in self._live.used())

    def set_sampler(self, spec: SamplerSpec, seq_id: int = 0) -> None:
        """Draw a sequence's next tokens by ``spec``; the same one again goes on where it is."""
        with self._working("setting a sampler"):
            slot, spec = self._slot(seq_id), arguments.sampler_of(spec)
            if slot.sampler is None or slot.sampler.spec != spec:
                self._decoder.put_sampler(slot, spec, 0)

    def copy_sequence(self, source: int, target: int) -> None:
        """Let an empty sequence start as a copy of another; it is whole at once, with nothing left for a later decode.

        Raises:
            ConfigInvalid: the target is not empty, or is the source.
        """
        with self._working("copying a sequence"):
            src, dst = self._slot(source), self._slot(target)
            if src is dst or not dst.is_empty:
                raise ConfigInvalid("target", target, "an empty sequence, other than the source")
            self._decoder.copy(src, dst)

    def remove_sequence(self, seq_id: int) -> None:
        """Forget a sequence."""
        with self._working("removing a sequence"):
            self._decoder.empty(self._slot(seq_id))

    def rewind(self, n_tokens: int, seq_id: int = 0) -> None:
        """Cut a sequence to its first ``n_tokens``; where this memory cannot be cut, they are read again.

        Raises:
            ConfigInvalid: more tokens than the sequence holds, or none.
        """
        with self._working("rewinding"):
            slot, n_tokens = self._slot(seq_id), arguments.count_of("n_tokens", n_tokens)
            if not 0 < n_tokens <= slot.n_past:
                raise ConfigInvalid("n_tokens", n_tokens, f"1 to {slot.n_past}")
            self._decoder.cut(slot, n_tokens)

    def shift(self, n_keep: int, n_discard: int, seq_id: int = 0) -> None:
        """Drop ``n_discard`` tokens after the first ``n_keep`` and move the rest down; applied at once.

        Raises:
            Refused: in tensor mode (the next decode would abort), or where the memory cannot shift.
            ConfigInvalid: the numbers do not fit the sequence.
        """
        with self._working("shifting a context"):
            slot = self._slot(seq_id)
            n_keep, n_discard = arguments.count_of("n_keep", n_keep), arguments.count_of("n_discard", n_discard)
            self._decoder.refuse_shift()
            self._decoder.decode_pending([slot])
            if n_keep < 0 or n_discard <= 0 or n_keep + n_discard >= slot.n_past:
                raise ConfigInvalid("n_discard", n_discard, f"1 to {max(slot.n_past - n_keep - 1, 0)}")
            self._decoder.shift(slot, n_keep, n_discard)

    def check(self, target: Placement, options: SwitchOptions | None = None) -> Checked:
        """Find out whether a switch would be refused; other threads go on meanwhile.

        It may take as long as a trial in a child process. A target that the session serves in is never refused.

        Args:
            target: the placement wanted.
            options: how the switch would be done; None: as :meth:`switch` does it by default.

        Raises:
            Parked: the session serves no more.
        """
        self._refuse_gone()
        target, options = complete(arguments.placement_of(target), self._live.placement), options or SwitchOptions()
        return self._checker.switching(self._live, target, options)

    def switch(
        self,
        target: Placement,
        *,
        proof: Proof = Proof.BYTES,
        convert: bool = True,
        force: bool = False,
        via: Route = Route.AUTO,
        timeout_s: float | None = 60.0,
        progress: Callable[[Stage, float], None] | None = None,
        checked: Checked | None = None,
    ) -> SwitchOutcome:
        """Move the session into another placement, keeping every sequence, the last logits and the samplers.

        Args:
            target: the whole placement wanted (``session.placement.changed(mode=...)`` makes one).
            proof: how the restored state is proved, or its word.
            convert: False refuses a target that needs the carry converted.
            force: skip the rules, the probe and what the planner says does not fit; structural checks stay.
            via: who does the work, or its word: native is refused where it cannot be, auto takes it where it can.
            timeout_s: how long to wait for the token boundary, seconds; None: as long as it takes.
            progress: told the stage and the share of it that is done.
            checked: what :meth:`check` found of this very target, whose options then count; None: it is checked now.

        Returns:
            The outcome: switched, unchanged, fell_back, refused, cancelled or parked. Never raises for those.

        Raises:
            Busy: another switch is under way, or the call comes from inside a callback.
            ConfigInvalid: an argument is of another kind.
            Parked: the session serves no more.
        """
        live, found = self._live, checked
        target, timeout_s = complete(arguments.placement_of(target), live.placement), arguments.timeout_of(timeout_s)
        asked = SwitchOptions(arguments.proof_of(proof), convert, force, arguments.route_of(via))
        options = asked if checked is None else checked.options

        def check() -> tuple[Reason, ...]:
            nonlocal found
            found = self._checker.in_place(live, found or self.check(target, options))
            return found.reasons

        def again() -> tuple[Reason, ...]:
            return self._checker.again(live, found) if found is not None else ()

        def enter() -> None:
            live.turn.enter_switch(timeout_s, live.cancel.is_set)
            self._refuse_gone()

        with live.turn.announce_switch(f"a switch to {target.mode.value}"):
            self._refuse_gone()
            run = Run(
                options,
                checked_at=None if checked is None else checked.at,
                check=again,
                found=lambda: found,
                progress=progress or (lambda _stage, _share: None),
            )
            return self._switcher.run(target, run, check=check, enter=enter)

    def reserve(self, n_tokens: int, *, proof: Proof = Proof.BYTES, wait: bool = True) -> int:
        """Take the memory that a switch will need, touch and pin it, so that the switch itself does not wait for it.

        From then on it grows, beside the work of the session, before what the sequences hold needs it.

        Args:
            n_tokens: tokens that all sequences will hold by then.
            proof: the proof that the switch will use; reading back takes a second copy.
            wait: whether to wait for it; False: it is made beside what the session does next.

        Returns:
            Bytes held for carries now; what would not leave the host as much again stays unreserved.
        """
        with self._working("reserving memory"):
            n_copies = 2 if arguments.proof_of(proof) is Proof.BYTES else 1
            return self._live.reserve(arguments.count_of("n_tokens", n_tokens), n_copies=n_copies, wait=wait)

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write the whole session (state, tokens, logits, samplers) to one file; returns its bytes.

        Raises:
            CarryNotWritten: what was at the path before is still there.
        """
        with self._working("saving"):
            return self._storage.save(path, self._effects.transfer)

    def restore(self, path: str | os.PathLike[str]) -> Restored:
        """Replace everything the session holds with what :meth:`save`, the library or its server wrote to a file.

        Returns:
            What was rewritten for this context, and whether the tokens had to be read again.

        Raises:
            CarryDamaged: the file is not what was sealed, or no state; the session is as it was.
            CarryMismatch: it belongs to another model; the session is as it was.
        """
        with self._working("restoring"):
            return self._storage.restore(path, self._effects.transfer)

    def state_bytes(self) -> int | None:
        """Return how many bytes a state would take now; None for a model without a memory."""
        with self._working("sizing the state"):
            return self._effects.transfer.state_bytes()

    def close(self) -> None:
        """Free samplers, context and model; a second call does nothing."""
        if self.stage is Stage.CLOSED:
            return
        with self._live.turn.take("closing"), self._live.engine.library.holding(everything=True):
            for slot in self._live.slots.values():
                slot.clear()
            self._switcher.close()
            self._live.close_arenas()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _working(self, what: str) -> Iterator[None]:
        with self._live.turn.take(what):
            self._refuse_gone()
            with self._live.engine.library.holding(everything=True):
                yield

    def _refuse_gone(self) -> None:
        self._live.turn.refuse_fork()
        if self.stage in {Stage.PARKED, Stage.CLOSED}:
            raise self._effects.gone(self._switcher.state)

    def _slot(self, seq_id: object) -> Slot:
        number = whole(seq_id)
        slot = None if number is None else self._live.slots.get(number)
        if slot is None:
            n = len(self._live.slots)
            raise ConfigInvalid("seq_id", seq_id, f"0 to {n - 1} (n_seq_max is {n})")
        return slot
