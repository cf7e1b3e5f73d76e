"""What a ``Llama`` is made of: a model, and one sequence of tokens that are read, drawn, saved and dropped.

Main path: ``generate`` -> ``eval`` (`Session.read`) and a sampler. The sequence of the session is number 0; a switch
may come between any two tokens.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from llama_native import Library, Model
from splitctl.carry.sequence import common
from splitctl.compat.llama_cpp import arguments
from splitctl.compat.llama_cpp.arguments import DEFAULT_SEED
from splitctl.compat.llama_cpp.files import load_vocabulary, metadata_of
from splitctl.compat.llama_cpp.llama_cache import LlamaState
from splitctl.compat.llama_cpp.llama_chat_format import Handler
from splitctl.compat.llama_cpp.sampling import Sampling
from splitctl.errors import Busy, ConfigInvalid
from splitctl.outcome import WeightsTier
from splitctl.placement import whole
from splitctl.session import Session

if TYPE_CHECKING:
    from splitctl.engine.sampler import Sampler
    from splitctl.outcome import SwitchOutcome
    from splitctl.placement import Placement, SplitMode


class LlamaCore:
    """A model and one sequence of tokens.

    Thread: any may call; a stream ends with `Busy` when another answer has taken the sequence. Lifetime: until
    :meth:`close`; one that is dropped is freed, as a `Session` is.
    """

    _session: Session | None = None
    _vocabulary: Model | None = None
    _adopted: Any = None
    _generation: object = None

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        n_gpu_layers: int | None = None,
        split_mode: int | str | SplitMode = 1,
        main_gpu: int = 0,
        tensor_split: Sequence[float] | None = None,
        vocab_only: bool = False,
        seed: int = DEFAULT_SEED,
        n_ctx: int = 512,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        pooling_type: int = -1,
        logits_all: bool = False,
        embedding: bool = False,
        offload_kqv: bool = True,
        flash_attn: bool | str | None = None,
        last_n_tokens_size: int = 64,
        lora_path: str | None = None,
        lora_scale: float = 1.0,
        chat_format: str | None = None,
        chat_handler: Handler | None = None,
        tokenizer: Any = None,
        type_k: int | str | None = None,
        type_v: int | str | None = None,
        verbose: bool = True,
        devices: Sequence[str] | str = (),
        library: Library | str | os.PathLike[str] | None = None,
        weights: WeightsTier = WeightsTier.FILE,
        prober: Any = "auto",
        **others: Any,
    ) -> None:
        """Load a model and open a session; docs/compat.md has every argument of llama_cpp.Llama.

        Args:
            model_path: the GGUF.
            n_gpu_layers: layers on devices; -1: all; None: all where ``devices`` are named, else none.
            split_mode: a number of llama_split_mode, or its word.
            main_gpu: the device of mode none.
            tensor_split: one share a device.
            vocab_only: load the vocabulary alone: tokens and texts, and nothing else.
            seed: of the random draws; 0 and DEFAULT_SEED ask for a random one.
            n_ctx: context, tokens; 0: the model's own.
            n_batch: most tokens of one decode.
            n_ubatch: most tokens of one computed batch.
            n_threads: for one token; None: the library's.
            n_threads_batch: for more.
            pooling_type: of embeddings: -1 the model's own, 1 mean, 2 first token, 3 last token.
            logits_all: keep the logits of every token in :attr:`scores`.
            embedding: for :meth:`embed`.
            offload_kqv: keep the cache on the devices.
            flash_attn: None: wherever the build allows it.
            last_n_tokens_size: tokens that penalties look back at.
            lora_path: an adapter.
            lora_scale: its scale.
            chat_format: name of a chat format; None: the model's template.
            chat_handler: what answers chats instead.
            tokenizer: an object with tokenize and detokenize, instead of the model's.
            type_k: cache type of keys, a number of ggml_type or its word; None: f16.
            type_v: cache type of values.
            verbose: kept, and otherwise without effect: nothing is printed.
            devices: names of devices, or one text with commas; empty: all.
            library: the libllama, or its path; None: as `Session.open` finds one.
            weights: where switches take the weights from.
            prober: as in `Session.open`.
            others: arguments that are refused or ignored by name.

        Raises:
            ValueError: there is no such file, or an argument cannot be used.
            Refused, BadModelFile, llama_native.NativeError: as `Session.open` raises them.
        """
        arguments.check(others)
        if not isinstance(model_path, str | os.PathLike):
            raise ConfigInvalid("model_path", model_path, "the path of a GGUF")
        self.model_path = os.fspath(model_path)
        if not Path(self.model_path).exists():
            raise ConfigInvalid("model_path", self.model_path, "a file (Model path does not exist)")
        if whole(pooling_type) not in arguments.POOLINGS:
            wanted = "-1, 1 (mean), 2 (first token) or 3 (last token)"
            raise ConfigInvalid("pooling_type", pooling_type, wanted)
        placement = arguments.placement_of(
            n_gpu_layers=n_gpu_layers, split_mode=split_mode, main_gpu=main_gpu, tensor_split=tensor_split,
            devices=devices, n_ctx=n_ctx, n_batch=n_batch, n_ubatch=n_ubatch, n_threads=n_threads,
            n_threads_batch=n_threads_batch, offload_kqv=offload_kqv, flash_attn=flash_attn, type_k=type_k,
            type_v=type_v,
        )  # fmt: skip
        if not isinstance(library, Library | str | os.PathLike | None):
            raise ConfigInvalid("library", library, "a Library, the path of a libllama, or None")
        opened = library if isinstance(library, Library) or library is None else Library.open(Path(library))
        self._begin(
            seed=seed, logits_all=logits_all, last_n_tokens_size=last_n_tokens_size, chat_format=chat_format,
            chat_handler=chat_handler, tokenizer=tokenizer, verbose=verbose,
        )  # fmt: skip
        self.pooling = arguments.POOLINGS[pooling_type]
        self.embedding = embedding
        if vocab_only:
            self._vocabulary = load_vocabulary(self.model_path, opened)
            return
        adapters = [(lora_path, lora_scale)] if lora_path else ()
        session = Session.open(
            self.model_path, placement, library=opened, adapters=adapters, embeddings=embedding, prober=prober,
            weights=weights,
        )  # fmt: skip
        self._take(session)

    def _begin(
        self,
        *,
        seed: int,
        logits_all: bool,
        last_n_tokens_size: int,
        chat_format: str | None,
        chat_handler: Handler | None,
        tokenizer: Any,
        verbose: bool,
    ) -> None:
        self.set_seed(seed or DEFAULT_SEED)
        self.logits_all = logits_all
        if (n_last := whole(last_n_tokens_size)) is None:
            raise ConfigInvalid("last_n_tokens_size", last_n_tokens_size, "a whole number; 0: none, -1: all")
        self.last_n_tokens_size = n_last
        if not isinstance(chat_format, str | None):
            raise ConfigInvalid("chat_format", chat_format, "the name of a format, or None")
        if not (chat_handler is None or callable(chat_handler)):
            raise ConfigInvalid("chat_handler", chat_handler, "a function that answers chats, or None")
        if not (tokenizer is None or (hasattr(tokenizer, "tokenize") and hasattr(tokenizer, "detokenize"))):
            raise ConfigInvalid("tokenizer", tokenizer, "an object with tokenize and detokenize, or None")
        self.one_at_a_time = threading.RLock()
        self.chat_handler, self.tokenizer_, self.verbose = chat_handler, tokenizer, verbose
        self.cache: Any = None
        self.metadata = metadata_of(self.model_path)
        self.chat_format = chat_format
        if chat_format is None and chat_handler is None:
            # Without a template of its own a model is taken for a llama 2, as there.
            has_template = "tokenizer.chat_template" in self.metadata
            self.chat_format = "chat_template.default" if has_template else "llama-2"
        self._n_wanted: int | None = None
        self._rows: NDArray[np.float32] | None = None

    def _take(self, session: Session) -> None:
        if session.facts.is_encoder_decoder:
            session.close()
            raise ConfigInvalid("model_path", self.model_path, "no encoder-decoder (use splitctl.Session)")
        self._session = session

    # ---- the session ----

    @property
    def session(self) -> Session:
        """The session under it, for what llama-cpp-python has no name for.

        Raises:
            ConfigInvalid: it has been closed or released, or has a vocabulary alone.
        """
        if self._session is None:
            raise ConfigInvalid("Llama", "closed, or opened with vocab_only=True", "one that is open (make a new one)")
        return self._session

    def switch(self, target: Placement | SplitMode | str | None = None, **named: Any) -> SwitchOutcome:
        """Move the running model into another split mode or placement; see :meth:`splitctl.Session.switch`.

        Args:
            target: a mode, its word, or a whole placement.
            named: fields of the placement, and options of the switch.
        """
        return self.session.switch(target, **named)

    @property
    def placement(self) -> Placement:
        """The placement that it serves in."""
        return self.session.placement

    @property
    def n_batch(self) -> int:
        """Most tokens of one decode."""
        return self.session.placement.n_batch

    @classmethod
    def over(cls, session: Session, adopted: Any, model_path: str, kept: dict[str, Any]) -> Self:
        """Use :meth:`Llama.adopt`."""
        self = cls.__new__(cls)
        self.model_path, self.embedding, self.pooling = model_path, False, None
        self._begin(tokenizer=adopted.tokenizer, **kept)
        self._take(session)
        self._adopted = adopted
        if adopted.scores is not None:
            self.scores[: self.n_tokens] = adopted.scores[: self.n_tokens]
        return self

    def close(self) -> None:
        """Free model and context; a second call does nothing. What was adopted is given back as it was adopted.

        Raises:
            Exception: what the adopted object raised while it took that; call it again.
        """
        session, self._session = self._session, None
        vocabulary, self._vocabulary = self._vocabulary, None
        for one in (session, vocabulary):
            if one is not None:
                one.close()
        if self._adopted is not None:
            self._adopted.unblock()
            self._adopted = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # The collector may come within a call of the library, so nothing is called: what is dropped frees itself later.
        if self._adopted is not None:
            self._adopted.drop()

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise TypeError("a Llama holds a loaded model and cannot be pickled or copied; pickle save_state() instead")

    # ---- the model ----

    @property
    def context_params(self) -> SimpleNamespace:
        """What the context was made with, by llama.cpp's names; a copy, changed by :meth:`switch` alone."""
        now = self.placement
        names = ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_threads", "n_threads_batch", "offload_kqv")
        return SimpleNamespace(embeddings=self.embedding, **{name: getattr(now, name) for name in names})

    @property
    def model_params(self) -> SimpleNamespace:
        """What the model was placed with, by llama.cpp's names; a copy, changed by :meth:`switch` alone."""
        now = self.placement
        return SimpleNamespace(
            n_gpu_layers=now.n_gpu_layers,
            split_mode=arguments.SPLIT_MODES.index(now.mode),
            main_gpu=now.main_gpu,
            vocab_only=False,
        )

    @property
    def _model(self) -> Model:
        return self.session.model if self._vocabulary is None else self._vocabulary

    def n_ctx(self) -> int:
        """Return the size of the context, tokens."""
        return self.session.placement.n_ctx

    def n_embd(self) -> int:
        """Return the size of an embedding."""
        return self._model.n_embd

    def n_vocab(self) -> int:
        """Return the size of the vocabulary."""
        return self._model.n_vocab

    def token_eos(self) -> int:
        """Return the token that ends a text; -1: there is none."""
        return self._model.token_eos

    def token_bos(self) -> int:
        """Return the token that begins a text; -1: there is none."""
        return self._model.token_bos

    def token_nl(self) -> int:
        """Return the token of a line's end; -1: there is none."""
        found = self._model.tokenize("\n", add_special=False)
        return found[-1] if found else -1

    def is_eog(self, token: int) -> bool:
        """Tell whether a token ends an answer."""
        return self._model.is_eog(token)

    def pooling_type(self) -> int:
        """Return how embeddings are pooled, by enum llama_pooling_type; -1: as the model does."""
        return next(number for number, word in arguments.POOLINGS.items() if word == self.pooling)

    @property
    def _is_recurrent(self) -> bool:
        return self._model.is_recurrent

    @property
    def _is_hybrid(self) -> bool:
        return self._model.is_hybrid

    def tokenizer(self) -> Any:
        """Return the object that turns texts into tokens: the one that was given, or this one."""
        return self.tokenizer_ or self

    def tokenize(self, text: bytes | str, add_bos: bool = True, special: bool = False) -> list[int]:  # noqa: FBT001, FBT002
        """Turn UTF-8 text into tokens.

        Args:
            text: the text.
            add_bos: add what the model begins (and ends) a text with.
            special: read "<|...|>" and the like as special tokens.
        """
        if self.tokenizer_ is not None:
            given = text.encode() if isinstance(text, str) else text
            return list(self.tokenizer_.tokenize(given, add_bos, special))
        if self._vocabulary is not None:
            return self._vocabulary.tokenize(text, add_special=add_bos, parse_special=special)
        return self.session.tokenize(text, add_special=add_bos, parse_special=special)

    def detokenize(
        self,
        tokens: Sequence[int],
        prev_tokens: Sequence[int] | None = None,
        special: bool = False,  # noqa: FBT001, FBT002 - as it is called
    ) -> bytes:
        """Turn tokens into text; a character may be cut at either end.

        Args:
            tokens: the tokens.
            prev_tokens: what stands before them; for a tokenizer that was given.
            special: show special tokens too.
        """
        if self.tokenizer_ is not None:
            return bytes(self.tokenizer_.detokenize(list(tokens), prev_tokens=prev_tokens, special=special))
        model, tokens = self._model, arguments.tokens_of(tokens, self.n_vocab())
        text = b"".join(model.piece(token, special=special) for token in tokens)
        # Some tokenizers put a space before a text.
        starts = tokens[:1] == [model.token_bos]
        return text.removeprefix(b" ") if starts else text

    # ---- the sequence ----

    @property
    def n_tokens(self) -> int:
        """How many tokens the sequence holds; what is set lower is dropped by the next :meth:`eval`."""
        n_held = self.session.n_held(0)
        return n_held if self._n_wanted is None else min(self._n_wanted, n_held)

    @n_tokens.setter
    def n_tokens(self, n: int) -> None:
        wanted, n_held = whole(n), self.session.n_held(0)
        if wanted is None or not 0 <= wanted <= n_held:
            raise ConfigInvalid("n_tokens", n, f"0 to {n_held}, what the sequence holds")
        self._n_wanted = wanted

    @property
    def input_ids(self) -> NDArray[np.int32]:
        """The tokens of the sequence, then zeros: int32[n_ctx]; a copy."""
        ids = np.zeros(self.n_ctx(), np.int32)
        held = self.session.tokens(0)[: self.n_tokens]
        ids[: len(held)] = held
        return ids

    @property
    def _input_ids(self) -> NDArray[np.int32]:
        return np.array(self.session.tokens(0)[: self.n_tokens], np.int32)

    @property
    def eval_tokens(self) -> deque[int]:
        """The tokens of the sequence."""
        return deque(self._input_ids.tolist(), maxlen=self.n_ctx())

    @property
    def scores(self) -> NDArray[np.float32]:
        """Logits by position, float32[n_ctx, n_vocab]: of all with ``logits_all``, else of the last one, and zeros."""
        if self.logits_all:
            kept = self._rows
            if kept is None or len(kept) < self.n_ctx():
                self._rows = np.zeros((self.n_ctx(), self.n_vocab()), np.float32)
                if kept is not None:
                    self._rows[: len(kept)] = kept
            return self._rows  # type: ignore[return-value] # it is there now
        rows = np.zeros((self.n_ctx(), self.n_vocab()), np.float32)
        if self.n_tokens and self.session.logits(0).size:
            rows[self.n_tokens - 1] = self.last_logits()
        return rows

    @property
    def _scores(self) -> NDArray[np.float32]:
        return self.scores[: self.n_tokens]

    @property
    def eval_logits(self) -> deque[list[float]]:
        """The rows of :attr:`scores` that have logits."""
        return deque(self._scores.tolist() if self.logits_all else self._scores[-1:].tolist())

    def last_logits(self) -> NDArray[np.float32]:
        """Return what the next token is drawn from, float32[n_vocab]; a copy.

        Raises:
            ConfigInvalid: the sequence holds nothing, or was cut since its last decode.
        """
        rows = self.session.logits(0)
        if not rows.size or self.n_tokens < self.session.n_held(0):
            raise ConfigInvalid("n_tokens", self.n_tokens, "a sequence with logits (call eval first)")
        row: NDArray[np.float32] = rows[-1]
        return row

    def reset(self) -> None:
        """Forget the sequence."""
        self._n_wanted = None
        self.session.remove_sequence(0)

    def trim(self) -> None:
        """Forget what :attr:`n_tokens` was set to leave out."""
        n_wanted, self._n_wanted = self._n_wanted, None
        held = self.session.tokens(0)
        if n_wanted is None or n_wanted >= len(held):
            return
        if n_wanted <= 0:
            self.session.remove_sequence(0)
        else:
            self.session.rewind(n_wanted)

    def eval(self, tokens: Sequence[int]) -> None:
        """Read tokens after those that the sequence holds.

        Raises:
            ConfigInvalid: a token is not in the vocabulary.
            ContextFull: there is no room.
        """
        if not (tokens := arguments.tokens_of(tokens, self.n_vocab())):
            return
        held = self.session.tokens(0)
        if len(held) > self.n_tokens:
            # What was drawn and not decoded goes too.
            tokens = list(self.session.fill(0, [*held[: self.n_tokens], *tokens]).rest)
        self._n_wanted, session = None, self.session
        while tokens:
            # A row of logits comes with the last token of what is read.
            chunk = tokens[:1] if self.logits_all else tokens
            tokens = tokens[session.read(0, chunk) :]
            if self.logits_all:
                self.scores[session.n_held(0) - 1] = session.logits(0)[-1]

    def sample(self, *given: Any, idx: int | None = None, **named: Any) -> int:
        """Draw a token from the logits; the sequence stays as it is.

        Args:
            given: arguments of `Sampling`, in their order.
            idx: position whose logits are meant; None: the last one.
            named: arguments of `Sampling`.

        Raises:
            ConfigInvalid: there are no logits.
        """
        if idx is None or idx == self.n_tokens - 1:
            row = self.last_logits()
        elif self.logits_all and 0 <= idx < self.n_tokens:
            row = self.scores[idx]
        else:
            raise ConfigInvalid("idx", idx, "None, the last token (logits_all=True keeps the logits of the others)")
        with closing(self.sampler(Sampling(*given, **named))) as sampler:
            return sampler.sample(row, self._model, self._input_ids.tolist())

    def sampler(self, sampling: Sampling) -> Sampler:
        """Make what draws, by the seed of now; ConfigInvalid where its grammar cannot be read."""
        return sampling.sampler(self._model, seed=self.seed, last_n=self.last_n_tokens_size)

    def generate(
        self,
        tokens: Sequence[int],
        *given: Any,
        reset: bool = True,
        **named: Any,
    ) -> Generator[int, Sequence[int] | None, None]:
        """Read a prompt and draw token after token, each decoded when the next one is asked for.

        Args:
            tokens: the prompt.
            given: arguments of `Sampling`, in their order.
            reset: let the sequence hold the prompt alone, keeping what both begin with; False: it comes after.
            named: arguments of `Sampling`.

        Yields:
            Tokens; an end token too, after which it goes on. What is sent into it is read after the token.

        Raises:
            ConfigInvalid: no prompt, or an argument cannot be followed.
            ContextFull: there is no room for a further token.
        """
        # Arguments in llama-cpp-python's order have `reset` in the middle.
        if len(given) > 6:
            reset, given = given[6], (*given[:6], *given[7:])
        return self.draw(tokens, Sampling(*given, **named), reset=reset)

    def draw(
        self, tokens: Sequence[int], sampling: Sampling, *, reset: bool = True
    ) -> Generator[int, Sequence[int] | None, None]:
        """Do the work of :meth:`generate`."""
        mine = object()
        with closing(self.sampler(sampling)) as sampler:
            with self.one_at_a_time:
                self._generation, pending = mine, list(tokens)
                if reset and tokens:
                    self._n_wanted, pending = None, list(self.session.fill(0, pending).rest)
            while True:
                with self.one_at_a_time:
                    if self._generation is not mine:
                        raise Busy("another answer, which has taken the sequence")
                    self.eval(pending)
                    row, held = self.last_logits(), self.session.tokens(0)
                    token = sampler.sample(row, self._model, held)
                if sampling.ends(held, row):
                    return
                sent = yield token
                pending = [token, *(sent or ())]

    # ---- states ----

    def save_state(self) -> LlamaState:
        """Return what the sequence holds: tokens, cache, last logits; another Llama of the same model takes it."""
        self.trim()
        state = self.session.state_bytes()
        rows = self._scores.copy() if self.logits_all else np.zeros((0, self.n_vocab()), np.float32)
        return LlamaState(self._input_ids, rows, self.n_tokens, state, len(state), self.seed)

    def load_state(self, state: LlamaState) -> None:
        """Let the sequence be what was saved.

        Raises:
            CarryMismatch, CarryDamaged: it is of another model, or not what was saved; the sequence is as it was.
        """
        if not isinstance(state, LlamaState):
            raise ConfigInvalid("state", type(state).__name__, "what save_state() of a splitctl Llama gave")
        self.session.load_state_bytes(state.llama_state)
        self._n_wanted, self.seed = None, state.seed
        if self.logits_all:
            self._rows = None
            self.scores[: len(state.scores)] = state.scores

    def set_cache(self, cache: Any) -> None:
        """Keep states in a cache (`LlamaRAMCache`) after completions, and look there before; None: no more."""
        self.cache = cache

    def set_seed(self, seed: int) -> None:
        """Draw by another seed from now on: a whole number, of which 32 bits count."""
        if (found := whole(seed)) is None:
            raise ConfigInvalid("seed", seed, "a whole number")
        self.seed = found

    @staticmethod
    def longest_token_prefix(a: Sequence[int], b: Sequence[int]) -> int:
        """Count the tokens with which both begin."""
        return common(a, b)
