"""Taking over a running ``llama_cpp.Llama``, and giving it back.

Its context cannot be moved in place, so what it holds is carried: tokens, state and last logits, through the libllama
that it has opened itself. Main path: ``adopt`` -> a session with that state -> ``Adopted.release``.

Laws:
    1. Its object is changed by nothing but a release; an adoption that fails leaves it as it was, and so does a release
       that fails: the adopted session then goes on.
    2. Both ways the bytes are the same, but for how values lie in memory (V transposed without flash attention).
    3. While it is adopted its object refuses every call, so that the two cannot part unseen.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from llama_native import ForeignContext, Library, library_file
from splitctl.compat.llama_cpp import arguments
from splitctl.errors import ConfigInvalid, ContextFull, Reason, Refused
from splitctl.session import Session
from splitctl.switching import conversion

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from splitctl.compat.llama_cpp.core import LlamaCore

L = TypeVar("L", bound="LlamaCore")
_ALL_LAYERS = 0x7FFFFFFF
#: Constructor arguments that a session has under the same names.
_PLACED = (
    "n_gpu_layers", "split_mode", "main_gpu", "tensor_split", "n_batch", "n_ubatch", "n_threads", "n_threads_batch",
    "offload_kqv", "type_k", "type_v",
)  # fmt: skip
_KEPT = ("seed", "logits_all", "last_n_tokens_size", "chat_format", "chat_handler", "verbose")


@dataclasses.dataclass(slots=True)
class _Held:
    """What goes back: tokens, the library's state, and a row of logits, float32[n_vocab] (None: of no tokens).

    ``scores``: float32[n, n_vocab], of the tokens; None: as they are.
    """

    tokens: list[int]
    state: bytes = b""
    logits: bytes | None = None
    scores: NDArray[np.float32] | None = None


def adopt(kind: type[L], llm: Any, *, free: bool = False, devices: Sequence[str] | str = (), prober: Any = "auto") -> L:
    """Make a ``Llama`` of ours of a running one; see `Llama.adopt`."""
    given = _given(llm)
    root = type(llm).__module__.partition(".")[0]
    try:
        library = Library.open(library_file(sys.modules[f"{root}.llama_cpp"]))
    except (KeyError, ValueError) as error:
        raise ConfigInvalid("llm", type(llm).__name__, f"a running llama_cpp.Llama ({error})") from error
    placement = arguments.placement_of(
        **{name: given[name] for name in _PLACED}, n_ctx=llm.n_ctx(), flash_attn=None, devices=devices
    )
    adopted = Adopted(llm, library, given if free else None)
    try:
        adopted.block()
        session = Session.open(
            given["model_path"],
            placement,
            library=library,
            adapters=[(given["lora_path"], given["lora_scale"])] if given["lora_path"] else (),
            prober=prober,
        )
        try:
            _fill(session, adopted.original)
            return kind.over(session, adopted, given["model_path"], {name: given[name] for name in _KEPT})
        except BaseException:
            session.close()
            raise
    except BaseException:
        adopted.unblock()
        raise


def _given(llm: Any) -> dict[str, Any]:
    """Return the constructor arguments of a ``llama_cpp.Llama``, and refuse what a session cannot have.

    Raises:
        ConfigInvalid: it is none, or was made with such.
    """
    wanted = "a running llama_cpp.Llama of llama-cpp-python 0.3"
    try:
        given: dict[str, Any] = dict(llm.__getstate__())
        is_one = {"model_path", *_PLACED, *_KEPT} <= given.keys() and isinstance(llm.ctx, int)
    except (AttributeError, TypeError) as error:
        raise ConfigInvalid("llm", type(llm).__name__, f"{wanted} ({error})") from error
    if not is_one:
        raise ConfigInvalid("llm", type(llm).__name__, wanted)
    for name in ("embedding", "vocab_only"):
        if given.get(name):
            raise ConfigInvalid(name, given[name], f"False: a Llama with {name} has no tokens to go on with")
    arguments.check({name: value for name, value in given.items() if name in arguments.REFUSED})
    if given["n_gpu_layers"] == _ALL_LAYERS:
        given["n_gpu_layers"] = -1
    return given


def _fill(session: Session, held: _Held) -> None:
    if not held.tokens:
        return
    row = None if held.logits is None else np.frombuffer(held.logits, np.float32)
    restored = session.load_state_bytes(held.state, held.tokens, logits=row)
    if restored.recomputed:
        raise Refused((Reason("not-exact", f"its state cannot be carried exactly: {restored.reason}"),))


def _taken(session: Session) -> _Held:
    """Return what a session holds, every token of it decoded."""
    tokens = session.tokens(0)
    if not tokens:
        return _Held([])
    if session.n_held(0) < len(tokens):
        session.feed(tokens)
    rows = session.logits(0)
    return _Held(tokens, session.state_bytes(bare=True), rows[-1].tobytes() if rows.size else None)


class Adopted:
    """A ``llama_cpp.Llama`` that is adopted. Thread: one at a time.

    Attributes:
        original: what it held then.
        scores: float32[n_ctx, n_vocab], its own array, where it keeps the logits of every token; else None.
    """

    def __init__(self, llm: Any, library: Library, given: dict[str, Any] | None) -> None:
        """Take what it holds; with ``given``, its constructor arguments, its model is freed while it is blocked."""
        self._llm, self._library, self._given = llm, library, given
        self._kind = type(llm)
        self._blocked = _blocked(self._kind)  # type: ignore[arg-type] # a class can be hashed
        self._n_ctx, self._n_vocab = llm.n_ctx(), llm.n_vocab()
        self._is_freed = self._is_touched = False
        self._back: _Held | None = None
        llm.eval([])  # forgets what lies behind its tokens
        self._kept = {name: getattr(llm, name, None) for name in ("cache", "tokenizer_")}
        own = self._kept["tokenizer_"]
        # Its plain tokenizer goes through the object itself, which refuses.
        self.tokenizer = None if type(own).__name__ == "LlamaTokenizer" else own
        self.scores: NDArray[np.float32] | None = llm.scores if getattr(llm, "_logits_all", False) else None
        self.original = _Held([int(one) for one in llm.input_ids[: llm.n_tokens]])
        if self.original.tokens:
            context = self._context()
            self.original.state = context.state()
            # What was loaded into it has no logits yet: it decodes its last token again.
            self.original.logits = None if getattr(llm, "_requires_eval", False) else context.logits()

    def _context(self) -> ForeignContext:
        return ForeignContext(self._library, self._llm.ctx, self._n_vocab)

    def block(self) -> None:
        """Let its object refuse every call."""
        if self._given is not None:
            # Before it: one that fails half way has freed something, too.
            self._is_freed = True
            self._llm.close()
        object.__setattr__(self._llm, "__class__", self._blocked)

    def unblock(self) -> None:
        """Let its object answer again, with what it held when it was adopted."""
        self._return(self.original)

    def drop(self) -> None:
        """Let its object answer again where that takes no call of the library."""
        if self._is_freed or self._is_touched:
            text = "a Llama that had adopted one was dropped: that one refuses calls for good; close() or release() it"
            warnings.warn(text, ResourceWarning, stacklevel=3)
        else:
            object.__setattr__(self._llm, "__class__", self._kind)

    def release(self, llama: LlamaCore) -> Any:
        """Give back what a ``Llama`` of ours holds now; see `Llama.release`."""
        if self._back is None:
            llama.trim()
            found = _taken(llama.session)
            if len(found.tokens) > self._n_ctx:
                raise ContextFull(0, len(found.tokens), self._n_ctx)
            if self.scores is not None:
                found.scores = llama.scores[: len(found.tokens)].copy()
                found.scores[-1:] = llama.session.logits(0)[-1:]
            if self._is_freed:
                # Both need not fit. From here on the session is what is held here, until it has been given.
                self._back = found
                llama.session.close()
        else:
            found = self._back
        self._return(found)
        return self._llm

    def _return(self, held: _Held) -> None:
        object.__setattr__(self._llm, "__class__", self._kind)
        try:
            if self._is_freed:
                self._llm.__setstate__(self._given)
                self._is_freed, self._is_touched = False, True
                for name, value in self._kept.items():
                    setattr(self._llm, name, value)
                if self.scores is not None:
                    self._llm.scores = self.scores
            if self._is_touched or held is not self.original:
                self._give(held)
        except BaseException:
            object.__setattr__(self._llm, "__class__", self._blocked)
            raise

    def _give(self, held: _Held) -> None:
        llm = self._llm
        self._is_touched = True
        first = None if self.scores is None else self.scores[0].copy()
        llm.reset()
        if not held.tokens:
            llm.eval([])
            return
        # It shows how this context writes a state, and makes the row of logits that is written over.
        llm.eval(held.tokens[-1:])
        context = self._context()
        state, _ = conversion.fit(memoryview(held.state), memoryview(context.state()))
        context.set_state(state)
        if held.logits is not None:
            context.set_logits(held.logits)
        if self.scores is not None:
            self.scores[0] = first
            if held.scores is not None:
                self.scores[: len(held.scores)] = held.scores
        n = len(held.tokens)
        llm.input_ids[:n] = held.tokens
        llm.n_tokens = n
        if hasattr(llm, "_requires_eval"):
            llm._requires_eval = held.logits is None  # noqa: SLF001 - says whether its logits are those of its tokens


@cache
def _blocked(kind: type) -> type:
    """Return a class whose objects refuse everything."""

    def refuse(*_: object, **__: object) -> NoReturn:
        text = "this llama_cpp.Llama is adopted; call release() on the splitctl Llama that has it"
        raise Refused((Reason("adopted", text),))

    def get(self: object, name: str) -> object:
        # isinstance() asks for it.
        return type(self) if name == "__class__" else refuse()

    names = {"__getattribute__": get, "__setattr__": refuse, "__call__": refuse, "__del__": lambda _: None}
    return type(f"Adopted{kind.__name__}", (kind,), names)
