"""An in-process session: a model that goes on serving while its split mode changes under it.

Who wants text uses ``text`` and ``chat``. Who drives one sequence of tokens uses ``prefill`` or ``feed``, and
``generate``. Who interleaves many, as a worker does, uses what those are made of (`core`): ``fill``, ``read``,
``begin``, ``step``.

Main path of a switch: ``Session.switch`` -> ``switcher.run`` -> ``machine.step`` -> command -> ``effects.perform`` ->
event -> ``machine.step``. A library that aborts takes the process along: a trial runs in a child, and a
worker can host the session.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from llama_native import Library
from splitctl.carry.sampling import SamplerSpec
from splitctl.errors import ConfigInvalid, Reason
from splitctl.ipc.stop_texts import StopTexts
from splitctl.outcome import Proof, Route, Stage, SwitchOptions, SwitchOutcome, WeightsTier
from splitctl.placement import Placement, SplitMode, flag, seconds, word
from splitctl.session import arguments, embedding, prompts
from splitctl.session.core import SessionCore
from splitctl.session.opening import open_parts
from splitctl.session.texts import Fed, TextStream
from splitctl.switching.checking import Checked
from splitctl.switching.effects import Run
from splitctl.switching.switcher import complete

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from numpy.typing import ArrayLike, NDArray
    from typing_extensions import Buffer

    from splitctl.carry.arena import Arenas
    from splitctl.carry.sampling import Token
    from splitctl.engine.host_copy import HostCopy
    from splitctl.engine.sampler import LogitsProcessor
    from splitctl.model.chat_messages import Message
    from splitctl.model.identity import FileIdentity
    from splitctl.session.storage import Restored
    from splitctl.switching.checking import Prober


class Session(SessionCore):
    """Sequences on a placed model.

    Thread: any; one at a time works, a switch goes first. Lifetime: until :meth:`close`; also a context manager.
    """

    @classmethod
    def open(
        cls,
        model_path: str | os.PathLike[str],
        placement: Placement | SplitMode | str | None = None,
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
        weights: WeightsTier | str = WeightsTier.FILE,
        copy: HostCopy | None = None,
    ) -> Self:
        """Load a model and open a context.

        Args:
            model_path: the GGUF, or the first part of a split one.
            placement: where and how, or a split mode alone; None: llama.cpp's defaults. What it leaves to the library
                is resolved and fixed.
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
        arguments.callable_of("progress", progress, "a function of the loaded share")
        arguments.callable_of("cancel", getattr(cancel, "is_set", cancel), "a threading.Event")
        if not isinstance(library, Library | None):
            raise ConfigInvalid("library", library, "a Library, such as Library.open(path) gives")
        parts = open_parts(
            str(arguments.path_of("model_path", model_path)),
            Placement() if placement is None else arguments.target_of(placement, {}, Placement()),
            library,
            arguments.adapters_of(adapters),
            embeddings=flag("embeddings", embeddings),
            prober=prober,
            cancel=cancel,
            progress=progress,
            force=flag("force", force),
            arenas=arenas,
            on_tick=on_tick,
            files=files,
            weights=word("weights", weights, WeightsTier),
            copy=copy,
        )
        return cls(*parts)

    def embedding(self, seq_id: int = 0) -> NDArray[np.float32] | None:
        """Return the embedding of the last prompt: float32[n_embd]; None where there is none."""
        return self._slot(seq_id).embedding

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
        arguments.callable_of("progress", progress, "a function of the tokens done and all")
        with self._working("reading a prompt"):
            if self._live.is_encoder_decoder and not slot.encoder_tokens.size:
                self._decoder.encode_prompt(slot, tokens)
                tokens = [self._live.decoder_start]
            self._decoder.decode_pending([slot])
            self._live.check_room(slot.seq_id, len(tokens))
        self._read_all(slot.seq_id, tokens, 0, progress)

    def _read_all(
        self, seq_id: int, tokens: Sequence[int], n_kept: int, progress: Callable[[int, int], None] | None
    ) -> None:
        done, n = 0, len(tokens)
        while done < n:
            done += self.read(seq_id, tokens[done:])
            if progress is not None:
                progress(n_kept + done, n_kept + n)

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

    def text(
        self,
        prompt: str | bytes | Sequence[int],
        *,
        n: int = -1,
        stop: str | Sequence[str] = (),
        sampler: SamplerSpec | None = None,
        seq_id: int = 0,
        grammar: str = "",
        processors: Sequence[LogitsProcessor] = (),
        add_special: bool = True,
        parse_special: bool = False,
    ) -> TextStream:
        """Answer a prompt in text: read what of it the sequence does not hold, and generate after it.

        Args:
            prompt: a text, or its tokens.
            n: most tokens of the answer; -1 goes on to the model's end, or to a full context.
            stop: texts that end the answer, besides those of the sampler; they are not part of it.
            sampler: how to draw; None goes on with the sequence's own (a new one where it has none).
            seq_id: the sequence; of what it holds it keeps as much as the prompt begins with.
            grammar: a grammar in GBNF, with a rule named root, that the answer follows; it travels with a switch.
            processors: change the logits before each draw; see :data:`splitctl.LogitsProcessor`.
            add_special: put the model's first token before a text.
            parse_special: let names of special tokens in a text be those tokens.

        Returns:
            An iterator of text in pieces; nothing is read before its first. Its ``usage`` says at the end what it took.

        Raises:
            ConfigInvalid: an argument is of another kind, the grammar cannot be read, or the model has no tokenizer.
        """
        if isinstance(prompt, str | bytes):
            prompt = self.tokenize(prompt, add_special=add_special, parse_special=parse_special)
        return self._stream(prompt, n, stop, sampler, seq_id, grammar, processors)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        n: int = -1,
        stop: str | Sequence[str] = (),
        sampler: SamplerSpec | None = None,
        seq_id: int = 0,
        grammar: str = "",
        processors: Sequence[LogitsProcessor] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: Literal["content", "reasoning_content"] | None = None,
    ) -> TextStream:
        """Answer a chat, turned into a prompt by the model's own template; the rest as :meth:`text`.

        Args:
            messages: oldest first: objects with role and content, and what else the template knows.
            n: as for :meth:`text`.
            stop: likewise.
            sampler: likewise.
            seq_id: likewise; the next turn of the same chat reads only what is new.
            grammar: likewise.
            processors: likewise.
            chat_template_kwargs: more variables of the template.
            continue_final_message: field of the last message that the answer goes on with; None: it answers.

        Raises:
            ChatTemplateFailed: no template, a broken one, or one that refuses these messages.
            ConfigInvalid: an argument is of another kind, or the model has no tokenizer.
        """
        if not isinstance(chat_template_kwargs, Mapping | None):
            raise ConfigInvalid("chat_template_kwargs", chat_template_kwargs, "variables of the template, by name")
        text = prompts.chat_text(
            self,
            arguments.messages_of(messages),
            chat_template_kwargs=chat_template_kwargs,
            continue_final_message=continue_final_message,
        )
        tokens = self.tokenize(text, parse_special=True)
        return self._stream(tokens, n, stop, sampler, seq_id, grammar, processors)

    def _stream(
        self,
        prompt: Sequence[int],
        n: int,
        stop: str | Sequence[str],
        sampler: SamplerSpec | None,
        seq_id: int,
        grammar: str,
        processors: Sequence[LogitsProcessor],
    ) -> TextStream:
        seq_id = self._slot(seq_id).seq_id
        spec, n_draws = self.sampler(seq_id) or (SamplerSpec(), 0)
        if sampler is not None:
            spec, n_draws = arguments.sampler_of(sampler), 0
        constraints = arguments.constraints_of(grammar, processors)
        self.refuse_unreadable(grammar)
        return TextStream(
            self,
            arguments.tokens_of(prompt, self._live.n_vocab),
            seq_id=seq_id,
            n=arguments.count_of("n", n),
            sampler=spec,
            n_draws=n_draws,
            stop=(*spec.stop, *arguments.stops_of(stop)),
            constraints=constraints,
        )

    def feed(
        self, tokens: Sequence[int], seq_id: int = 0, *, progress: Callable[[int, int], None] | None = None
    ) -> Fed:
        """Let a sequence hold exactly these tokens: it keeps what both begin with, and reads the rest.

        A memory that cannot be cut there (recurrent, or a window that has moved on) is read anew. The sampler stays.

        Args:
            tokens: int32[n], n at least 1.
            seq_id: the sequence.
            progress: called with the tokens done and all, after each batch.

        Raises:
            ConfigInvalid: no token, or one outside the vocabulary.
            ContextFull: there is no room; nothing was touched.
            Cancelled: the cancel flag was set; the sequence keeps what was read.
        """
        slot, tokens = self._slot(seq_id), arguments.tokens_of(tokens, self._live.n_vocab)
        arguments.callable_of("progress", progress, "a function of the tokens done and all")
        self.refuse_without_room(tokens, slot.seq_id)
        with self._working("making ready for a prompt"):
            filling = self._decoder.refill(slot, tokens)
        self._read_all(slot.seq_id, filling.rest, filling.n_kept, progress)
        return Fed(filling.n_kept, len(filling.rest))

    def embed(
        self,
        texts: str | Sequence[str | Sequence[int]],
        *,
        pooling: Literal["mean", "cls", "last"] | None = None,
        normalize: bool = False,
    ) -> NDArray[np.float32]:
        """Embed texts, on a sequence that holds nothing and is empty again afterwards.

        Args:
            texts: one text, or several, each as text or tokens.
            pooling: what makes one row of a text's tokens: their mean, the first or the last one; None: what the model
                does by itself, the mean where it does nothing.
            normalize: divide each row by its length.

        Returns:
            float32[n_texts, n_embd].

        Raises:
            ConfigInvalid: the session was not opened with ``embeddings=True``, the model pools in another way by
                itself, no sequence is empty, or a text is too long for an encoder.
            ContextFull: a text is too long for the context.
        """
        rows = [
            self.tokenize(one, parse_special=True) if isinstance(one, str | bytes) else one
            for one in arguments.texts_of(texts)
        ]
        found = []
        for row in rows:
            tokens = arguments.tokens_of(row, self._live.n_vocab)
            with self._working("embedding a text"):
                found.append(embedding.embed(self._live, self._decoder, tokens, pooling))
        return embedding.stacked(found, self._live.model.n_embd, normalize=normalize)

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

    def set_sampler(
        self,
        spec: SamplerSpec,
        seq_id: int = 0,
        *,
        grammar: str = "",
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        """Draw a sequence's next tokens by ``spec``; the same one again goes on where it is.

        Args:
            spec: how to draw.
            seq_id: the sequence.
            grammar: as for :meth:`text`; it begins here, and anew after every prompt.
            processors: as for :meth:`text`.

        Raises:
            ConfigInvalid: an argument is of another kind, or the grammar cannot be read.
        """
        constraints = arguments.constraints_of(grammar, processors)
        self.refuse_unreadable(grammar)
        with self._working("setting a sampler"):
            slot, spec = self._slot(seq_id), arguments.sampler_of(spec)
            if slot.sampler is None or (slot.sampler.spec, slot.sampler.constraints) != (spec, constraints):
                self._decoder.put_sampler(slot, spec, 0, constraints)

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

    def check(
        self, target: Placement | SplitMode | str | None = None, options: SwitchOptions | None = None, **changes: Any
    ) -> Checked:
        """Find out whether a switch would be refused; other threads go on meanwhile.

        It may take as long as a trial in a child process. A target that the session serves in is never refused.

        Args:
            target: as for :meth:`switch`.
            options: how the switch would be done; None: as :meth:`switch` does it by default.
            changes: as for :meth:`switch`.

        Raises:
            ConfigInvalid: nothing, or something else, is wanted of the placement.
            Parked: the session serves no more.
        """
        self._refuse_gone()
        target, options = self._target(target, changes), SwitchOptions() if options is None else options
        if not isinstance(options, SwitchOptions):
            raise ConfigInvalid("options", options, "SwitchOptions, such as SwitchOptions(convert=False)")
        return self._checker.switching(self._live, target, options)

    def switch(
        self,
        target: Placement | SplitMode | str | None = None,
        *,
        proof: Proof | str = Proof.BYTES,
        convert: bool = True,
        force: bool = False,
        via: Route | str = Route.AUTO,
        timeout_s: float | None = 60.0,
        progress: Callable[[Stage, float], None] | None = None,
        checked: Checked | None = None,
        **changes: Any,
    ) -> SwitchOutcome:
        """Move the session into another placement, keeping every sequence, the last logits and the samplers.

        Args:
            target: a split mode, or its word; or the whole placement wanted; None: what ``changes`` say.
            proof: how the restored state is proved, or its word.
            convert: False refuses a target that needs the carry converted.
            force: skip the rules, the probe and what the planner says does not fit; structural checks stay.
            via: who does the work, or its word: native is refused where it cannot be, auto takes it where it can.
            timeout_s: how long to wait for the token boundary, seconds; None: as long as it takes.
            progress: told the stage and the share of it that is done.
            checked: what :meth:`check` found of this very target, whose options then count; None: it is checked now.
            changes: fields of the placement (``mode="tensor", n_ctx=8192``); what is not named stays as it is, a
                tensor split only within a mode.

        Returns:
            The outcome: switched, unchanged, fell_back, refused, cancelled or parked. Never raises for those.

        Raises:
            Busy: another switch is under way, or the call comes from inside a callback.
            ConfigInvalid: an argument is of another kind, or nothing is wanted of the placement.
            Parked: the session serves no more.
        """
        live, found = self._live, checked
        wanted, timeout_s = self._target(target, changes), seconds("timeout_s", timeout_s)
        arguments.callable_of("progress", progress, "a function of the stage and its share")
        if not isinstance(checked, Checked | None):
            raise ConfigInvalid("checked", checked, "what session.check() gave")
        asked = SwitchOptions(proof, convert, force, via)  # type: ignore[arg-type] # it takes words
        options = asked if checked is None else checked.options

        def check() -> tuple[Reason, ...]:
            nonlocal found
            found = self._checker.in_place(live, found or self.check(wanted, options))
            return found.reasons

        def again() -> tuple[Reason, ...]:
            return self._checker.again(live, found) if found is not None else ()

        def enter() -> None:
            live.turn.enter_switch(timeout_s, live.cancel.is_set)
            self._refuse_gone()

        with live.turn.announce_switch(f"a switch to {wanted.mode.value}"):
            self._refuse_gone()
            run = Run(
                options,
                checked_at=None if checked is None else checked.at,
                check=again,
                found=lambda: found,
                progress=progress or (lambda _stage, _share: None),
            )
            return self._switcher.run(wanted, run, check=check, enter=enter)

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write the whole session (state, tokens, logits, samplers) to one file; returns its bytes.

        Raises:
            CarryNotWritten: what was at the path before is still there.
        """
        with self._working("saving"):
            return self._storage.save(arguments.path_of("path", path), self._effects.transfer)

    def restore(self, path: str | os.PathLike[str]) -> Restored:
        """Replace everything the session holds with what :meth:`save`, the library or its server wrote to a file.

        Returns:
            What was rewritten for this context, and whether the tokens had to be read again.

        Raises:
            CarryDamaged: the file is not what was sealed, or no state; the session is as it was.
            CarryMismatch: it belongs to another model; the session is as it was.
        """
        with self._working("restoring"):
            return self._storage.restore(arguments.path_of("path", path), self._effects.transfer)

    def _target(self, target: object, changes: Mapping[str, Any]) -> Placement:
        return complete(arguments.target_of(target, changes, self._live.placement), self._live.placement)

    def state_bytes(self, *, bare: bool = False) -> bytes:
        """Return what :meth:`save` would write, as bytes; checked against the session and sealed.

        Args:
            bare: llama.cpp's own context state alone (what ``llama_state_get_data`` writes): neither tokens, nor
                logits, nor samplers are in it.

        Raises:
            StateUnsound: library and session disagree.
        """
        with self._working("saving"):
            return self._storage.packed(self._effects.transfer, bare=bare)

    def load_state_bytes(
        self,
        state: Buffer,
        tokens: Mapping[int, Sequence[int]] | Sequence[int] | None = None,
        *,
        logits: Mapping[int, ArrayLike] | ArrayLike | None = None,
    ) -> Restored:
        """Replace everything the session holds with what :meth:`state_bytes` gave, or a state of the library's own.

        Args:
            state: those bytes; or a session or slot file of llama.cpp; or a bare context state.
            tokens: of a bare context state: what each sequence holds, by its id; of sequence 0 where it is a row.
            logits: of a bare context state: the row that each next token is drawn from, float32[n_vocab]; None: the
                last token is decoded again for it.

        Returns:
            What was rewritten for this context, and whether the tokens had to be read again.

        Raises:
            CarryDamaged: it is not what was sealed, or no state; the session is as it was.
            CarryMismatch: it belongs to another model, or to other tokens; the session is as it was.
            ConfigInvalid: a bare context state without tokens.
        """
        n_vocab, given = self._live.n_vocab, arguments.bytes_of(state)
        named = arguments.rows_of(tokens, lambda row: arguments.tokens_of(row, n_vocab))
        drawn_from = arguments.rows_of(logits, lambda row: arguments.logits_of(row, n_vocab))
        with self._working("restoring"):
            return self._storage.unpack(given, named, drawn_from, self._effects.transfer)
