"""What a session is, and the steps that who interleaves many sequences puts together, as a worker does."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Self

from llama_native import HandleClosed
from splitctl.engine.sampler import grammar_on
from splitctl.errors import ConfigInvalid
from splitctl.outcome import Proof, Stage
from splitctl.placement import flag, whole, word
from splitctl.session import arguments
from splitctl.session.decoder import Decoder, Held
from splitctl.session.handing import Handing
from splitctl.switching.effects import Effects
from splitctl.switching.switcher import Switcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from llama_native import Model
    from splitctl.carry.sampling import SamplerSpec, Token
    from splitctl.carry.sequence import SequenceCarry
    from splitctl.engine.live import LiveSession
    from splitctl.engine.sampler import Constraints
    from splitctl.engine.slot import Slot
    from splitctl.errors import ContextFull
    from splitctl.model.facts import ModelFacts
    from splitctl.model.identity import FileIdentity
    from splitctl.outcome import SwitchOutcome, WeightsTier
    from splitctl.placement import Placement
    from splitctl.session.decoder import Filling
    from splitctl.session.storage import Storage
    from splitctl.switching.checking import Checker


class SessionCore:
    """Sequences on a placed model; `Session` has what most programs use. Thread: any; one at a time works."""

    def __init__(self, live: LiveSession, checker: Checker, storage: Storage) -> None:
        """Put together what `open_parts` made."""
        self._live = live
        self._checker = checker
        self._storage = storage
        self._effects = Effects(live, self._storage.park)
        self._switcher = Switcher(self._effects, live.placement)
        self._decoder = Decoder(live, self._switcher)

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

    def tokenize(self, text: str | bytes, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Turn text into the model's tokens; ``add_special`` adds BOS. ConfigInvalid: the model has no tokenizer.

        It waits for nobody who reads or generates; while a switch has no model, it waits for its end.
        """
        model = self.model
        text = arguments.text_of(text, model)
        add_special, parse_special = flag("add_special", add_special), flag("parse_special", parse_special)
        with suppress(HandleClosed):
            return model.tokenize(text, add_special=add_special, parse_special=parse_special)
        with self._working("tokenizing"):
            return self._live.model.tokenize(text, add_special=add_special, parse_special=parse_special)

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

    def begin(
        self,
        seq_id: int,
        sampler: SamplerSpec | None,
        *,
        n_draws: int = 0,
        pending: int | None = None,
        constraints: Constraints | None = None,
        n_ruled: int = 0,
    ) -> None:
        """Make a sequence that holds its prompt ready to be stepped.

        Args:
            seq_id: the sequence.
            sampler: how to draw; None: not known yet.
            n_draws: random draws that were made before.
            pending: the token that was drawn last and is not decoded yet; None: none was.
            constraints: what is done to logits before; None: nothing.
            n_ruled: tokens of the sequence, the newest ones, that were drawn under its grammar before.
        """
        with self._working("beginning to generate"):
            slot = self._slot(seq_id)
            if pending is not None:
                slot.tokens.append(pending)
            if sampler is not None:
                self._decoder.put_sampler(slot, sampler, n_draws, constraints, n_ruled)

    def refuse_unreadable(self, grammar: str) -> None:
        """Raise ConfigInvalid for a grammar in GBNF that the library cannot read; empty is none."""
        if grammar:
            with self._working("reading a grammar"):
                grammar_on(self._live.model, grammar).close()

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

    def is_full(self, seq_id: int) -> bool:
        """Tell whether a sequence's newest token is the last that its memory has a cell for."""
        with self._live.turn.take("counting its room"):
            self._refuse_gone()
            return self._live.is_full(self._slot(seq_id).seq_id)

    def sampler(self, seq_id: int = 0) -> tuple[SamplerSpec, int] | None:
        """Return how a sequence draws, with the seed in use, and the draws that it has made; None: not said yet."""
        sampler = self._slot(seq_id).sampler
        return None if sampler is None else (sampler.spec, sampler.n_draws)

    def held(self, seq_id: int) -> Held:
        """Note what a sequence holds, for :meth:`take_back`."""
        with self._working("telling what it holds"):
            return Held.of(self._slot(seq_id))

    def take_back(self, seq_id: int, held: Held) -> None:
        """Let a sequence be again what it was, as far as a prompt that came after has left it."""
        with self._working("taking an answer back"):
            self._decoder.take_back(self._slot(seq_id), held)

    def refuse_without_room(self, tokens: Sequence[int], seq_id: int) -> None:
        """Raise ContextFull where a sequence has no room to hold ``tokens`` in place of what it holds."""
        with self._live.turn.take("counting its room"):
            self._refuse_gone()
            slot = self._slot(seq_id)
            if not self._live.is_encoder_decoder and self._live.has_memory:
                self._live.check_room(slot.seq_id, len(tokens) - slot.n_past)

    def why_full(self, seq_id: int, n_new: int) -> ContextFull | None:
        """Return the error that so many more tokens would be; None where they fit. A unified cache counts as one."""
        with self._live.turn.take("counting its room"):
            self._refuse_gone()
            return self._live.why_full(self._slot(seq_id).seq_id, n_new)

    def sequences(self) -> tuple[SequenceCarry, ...]:
        """Return what every sequence holds that holds anything; the logits are shared, the rest copied."""
        with self._working("telling what it holds"):
            return tuple(slot.carry() for slot in self._live.used())

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
            n_copies = 2 if word("proof", proof, Proof) is Proof.BYTES else 1
            return self._live.reserve(arguments.count_of("n_tokens", n_tokens), n_copies=n_copies, wait=wait)

    def n_state_bytes(self) -> int | None:
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

    def refuse_fork(self) -> None:
        """Raise llama_native.ForkedProcess in a fork of the process that opened the session."""
        self._live.turn.refuse_fork()

    def _refuse_gone(self) -> None:
        self.refuse_fork()
        if self.stage in {Stage.PARKED, Stage.CLOSED}:
            raise self._effects.gone(self._switcher.state)

    def _slot(self, seq_id: object) -> Slot:
        number = whole(seq_id)
        slot = None if number is None else self._live.slots.get(number)
        if slot is None:
            n = len(self._live.slots)
            raise ConfigInvalid("seq_id", seq_id, f"0 to {n - 1} (n_seq_max is {n})")
        return slot
