"""``Llama``, as programs for llama-cpp-python use it, over a session that can switch.

Main path: ``create_completion`` -> ``completion.complete`` -> ``generate`` (`core`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from splitctl.compat.llama_cpp import adopting, completion
from splitctl.compat.llama_cpp.core import LlamaCore
from splitctl.compat.llama_cpp.files import cached
from splitctl.compat.llama_cpp.llama_chat_format import Handler, Jinja2ChatFormatter, handler_of
from splitctl.compat.llama_cpp.sampling import Sampling, StoppingCriteria
from splitctl.errors import ConfigInvalid

if TYPE_CHECKING:
    from splitctl.compat.llama_cpp.llama_types import Json


class Llama(LlamaCore):
    """A model, one sequence of tokens, and what programs for llama-cpp-python call on them.

    Thread: one at a time, but for :meth:`switch`, which any may call. Lifetime: until :meth:`close`.
    """

    @classmethod
    def adopt(cls, llm: Any, **named: Any) -> Self:
        """Take over a running ``llama_cpp.Llama``: its tokens, its cache and its last logits.

        Its own object refuses calls until :meth:`release`. Its model stays loaded unless ``free`` is true.

        Args:
            llm: the object; of 0.3.x, generating text.
            named: ``free`` (free its model meanwhile, and load it again at the release), ``devices`` (names, for its
                placement), and ``prober`` as in `Session.open`.

        Raises:
            ConfigInvalid: it is no such object, or was made with what a session cannot have; it is as it was.
            Refused: its state cannot be carried exactly, or the placement is refused; likewise.
        """
        return adopting.adopt(cls, llm, **named)

    def release(self) -> Any:
        """Give what :meth:`adopt` took, and what has come since, back to its object; this one is closed.

        Returns:
            The object that was adopted.

        Raises:
            ConfigInvalid: nothing was adopted.
            ContextFull: it holds more than the object's context has room for; nothing was touched.
            Exception: what the object raised while it took it. It stays adopted: what was wrong mended, release again.
        """
        if self._adopted is None:
            raise ConfigInvalid("release", "a Llama of its own", "one that Llama.adopt made (close this one)")
        given = self._adopted.release(self)
        self._adopted = None
        self.close()
        return given

    # ---- answers ----

    def create_completion(
        self,
        prompt: str | Sequence[int],
        suffix: str | None = None,
        max_tokens: int | None = 16,
        temperature: float = 0.8,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        logprobs: int | None = None,
        echo: bool = False,  # noqa: FBT001, FBT002 - as it is called
        stop: str | Sequence[str] | None = (),
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        top_k: int = 40,
        stream: bool = False,  # noqa: FBT001, FBT002
        seed: int | None = None,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        stopping_criteria: StoppingCriteria | None = None,
        logits_processor: Any = None,
        grammar: Any = None,
        logit_bias: Mapping[Any, Any] | None = None,
    ) -> Json | Iterator[Json]:
        """Go on with a prompt, given as text or tokens.

        Returns:
            The completion; with ``stream`` its chunks.

        Raises:
            ValueError: the prompt leaves no room for an answer, or an argument cannot be followed.
        """
        if suffix is not None:
            raise ConfigInvalid("suffix", suffix, "None (write the model's own infill tokens into the prompt)")
        sampling = Sampling(
            top_k, top_p, min_p, typical_p, temperature, repeat_penalty, frequency_penalty, presence_penalty, tfs_z,
            mirostat_mode, mirostat_eta, mirostat_tau,
            logits_processor=logits_processor, grammar=grammar, stopping_criteria=stopping_criteria,
        )  # fmt: skip
        return completion.complete(
            self, prompt, sampling, max_tokens=max_tokens, logprobs=logprobs, echo=echo, stop=stop, stream=stream,
            seed=seed, model=model, logit_bias=logit_bias,
        )  # fmt: skip

    __call__ = create_completion

    def create_chat_completion(self, messages: Sequence[Json], **named: Any) -> Json | Iterator[Json]:
        """Answer a chat.

        Args:
            messages: objects with role and content, oldest first.
            named: temperature (0.2 by default), max_tokens (no limit), stream, stop, seed, response_format, tools,
                tool_choice, logprobs, top_logprobs, and the others of :meth:`create_completion`.

        Returns:
            The answer; with ``stream`` its chunks.

        Raises:
            ValueError: an argument cannot be followed.
            ChatTemplateFailed: the template refuses the messages.
        """
        named = {"temperature": 0.2, "max_tokens": None, **named}
        return self._handler()(llama=self, messages=messages, **named)  # type: ignore[no-any-return] # a handler's own

    def _handler(self) -> Handler:
        if self.chat_handler is not None:
            return self.chat_handler
        texts = {f"{name}_token": self._special(getattr(self._model, f"token_{name}")) for name in ("bos", "eos")}
        kind = self.chat_format or ""
        prefix, _, name = kind.partition(".")
        if prefix == "chat_template":
            key = "tokenizer.chat_template" if name == "default" else f"tokenizer.chat_template.{name}"
            return Jinja2ChatFormatter(self.metadata[key], texts["eos_token"], texts["bos_token"]).to_chat_handler()
        return handler_of(kind, **texts)

    def _special(self, token: int) -> str:
        return self._model.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""

    # ---- embeddings ----

    def embed(
        self,
        texts: str | Sequence[str] = (),
        /,
        normalize: bool = False,  # noqa: FBT001, FBT002 - as it is called
        truncate: bool = True,  # noqa: FBT001, FBT002
        return_count: bool = False,  # noqa: FBT001, FBT002
        **named: str | Sequence[str],
    ) -> Any:
        """Embed a text, or several; the sequence is empty afterwards.

        Args:
            texts: the text or texts; also by the name ``input``.
            normalize: divide each embedding by its length.
            truncate: leave out what of a text is more than a batch.
            return_count: return the count of tokens too.
            named: ``input``.

        Returns:
            list[float] of n_embd for one text, a list of them for several; with ``return_count`` and their tokens.

        Raises:
            ValueError: a text is longer than a batch, or it was opened without ``embedding=True``.
        """
        if not self.embedding:
            raise ConfigInvalid("embedding", self.embedding, "True, when the Llama is made (embedding=True)")
        given = _input(texts, named)
        rows = [self.tokenize(text.encode()) for text in ([given] if isinstance(given, str) else given)]
        most = min(self.n_batch, self.placement.n_ubatch)
        if truncate:
            rows = [row[:most] for row in rows]
        if longest := max([len(row) for row in rows if len(row) > most], default=0):
            raise ConfigInvalid("input", f"{longest} tokens", f"{most} at most, a batch (truncate=True cuts them)")
        self.reset()
        found = self.session.embed(rows, pooling=self.pooling, normalize=normalize).tolist()  # type: ignore[arg-type] # a word of POOLINGS
        output = found[0] if isinstance(given, str) else found
        return (output, sum(map(len, rows))) if return_count else output

    def create_embedding(
        self, texts: str | Sequence[str] = (), /, model: str | None = None, **named: str | Sequence[str]
    ) -> Json:
        """Embed a text, or several (also by the name ``input``), and answer as OpenAI's API does."""
        given = _input(texts, named)
        rows, n_tokens = self.embed([given] if isinstance(given, str) else given, return_count=True)
        return {
            "object": "list",
            "data": [{"object": "embedding", "embedding": row, "index": index} for index, row in enumerate(rows)],
            "model": model or self.model_path,
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        }

    logits_to_logprobs = staticmethod(completion.logits_to_logprobs)

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str | None,
        additional_files: Sequence[str] | None = None,
        local_dir: str | os.PathLike[str] | None = None,
        local_dir_use_symlinks: Any = "auto",  # noqa: ARG003 - nothing is downloaded
        cache_dir: str | os.PathLike[str] | None = None,
        **named: Any,
    ) -> Self:
        """Open a model that Hugging Face's tools have downloaded before; nothing is downloaded.

        Args:
            repo_id: "owner/name".
            filename: the file, or a pattern that fits one.
            additional_files: files that must be there too.
            local_dir: where it was downloaded to, if not into the cache.
            local_dir_use_symlinks: without effect.
            cache_dir: the cache.
            named: arguments of the constructor.

        Raises:
            ValueError: it is not there.
        """
        path = cached(repo_id, filename, local_dir=local_dir, cache_dir=cache_dir)
        for one in additional_files or ():
            cached(repo_id, one, local_dir=local_dir, cache_dir=cache_dir)
        return cls(path, **named)


def _input(texts: str | Sequence[str], named: dict[str, str | Sequence[str]]) -> str | Sequence[str]:
    found = named.pop("input", texts)
    if named or not found:
        raise ConfigInvalid("input", next(iter(named), found), "a text, or several")
    return found
