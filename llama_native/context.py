"""A context: the KV cache, decoding, the logits of the last decode, and the memory operations.

Ownership: a Context owns its ``llama_context`` pointer (freed by ``llama_free``), stands on a Model that it keeps
alive, and keeps its abort callback. Thread: any; every call holds the library's lock.
"""

from __future__ import annotations

import weakref
from array import array
from typing import TYPE_CHECKING, Any

from llama_native.errors import CallFailed
from llama_native.handle import Handle
from llama_native.params import ContextParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llama_native.model import Adapter, Model

_BYTES_PER_FLOAT = 4
_NEW_MEMORY = "llama_memory_seq_rm"


class Context(Handle):
    """An open context.

    Lifetime: until :meth:`close`, or the close of its model. After a restore that failed it may only be closed.
    """

    KIND = "context"
    IS_LARGE = True

    def __init__(self, model: Model, params: ContextParams, *, abort: Callable[[], bool] | None = None) -> None:
        """Make a context on a model.

        ``abort`` is read by the library between the nodes of a graph; True ends the decode (processors only).

        Raises:
            CallFailed: the library returned NULL; its last log lines are in the error.
            BaseException: what a log listener or a signal's handler raised meanwhile; there is no context then.
        """
        library = model.library
        super().__init__(library)
        self.model = model
        self.params = params
        self.is_endable = False
        """Whether an interruption may end the batch that is being decoded."""
        self._n_changes = 0
        self._changed_at: dict[int, int] = {}
        self._all_changed_at = 0
        with self._making() as (_, lib):
            c_params = lib.llama_context_default_params()
            fill_context_params(c_params, params, library.profile.context_fields)
            if abort is not None:
                c_params.abort_callback = self._abort_callback(abort)
            pointer = library.call(lib.llama_init_from_model, model.pointer, c_params)
            if not pointer:
                raise CallFailed("llama_init_from_model", None, library.log.said())
            self._pointer = pointer
            model.depend(self)
            self.n_ctx = int(lib.llama_n_ctx(pointer))
            self.n_batch = int(lib.llama_n_batch(pointer))
            self.n_ubatch = int(lib.llama_n_ubatch(pointer))
            self.n_seq_max = int(lib.llama_n_seq_max(pointer))
            self.n_ctx_seq = int(lib.llama_n_ctx_seq(pointer)) if hasattr(lib, "llama_n_ctx_seq") else self.n_ctx

    def _abort_callback(self, abort: Callable[[], bool]) -> Any:
        # It must not hold this object, which it would keep from being freed when it is dropped.
        this = weakref.ref(self)

        def ask(_: object) -> bool:
            context = this()
            is_unwanted = context is not None and context.is_endable and context.library.is_unwanted
            return is_unwanted or bool(abort())

        callback = self.library.callback("bool(void *)", ask)
        self.owned.keep.append(callback)
        return callback

    @staticmethod
    def _free(lib: Any, pointer: Any) -> None:
        lib.llama_free(pointer)

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], seq_ids: Sequence[int], outputs: Sequence[bool]
    ) -> None:
        """Decode one batch.

        Args:
            tokens: int32[n], n at most n_batch.
            positions: int32[n].
            seq_ids: int32[n], one sequence a token.
            outputs: bool[n], which tokens' logits are wanted.

        Raises:
            ValueError: the sequences are not of one length, or longer than a batch (an encoder's: a micro-batch).
            CallFailed: the library's return code is not 0 (1: no room in the cache, 2: aborted by the callback,
                negative: an error); for codes above 0 and -1 the memory is as before except for 2.
            BaseException: what ``abort`` or a signal's handler raised meanwhile. A batch that wants all its outputs is
                decoded to its end first; another one is ended as by ``abort``.
        """
        self._run("llama_decode", tokens, positions, seq_ids, outputs)

    def encode(
        self, tokens: Sequence[int], positions: Sequence[int], seq_ids: Sequence[int], outputs: Sequence[bool]
    ) -> None:
        """Run the encoder over one batch; arguments and errors as for :meth:`decode`."""
        self._run("llama_encode", tokens, positions, seq_ids, outputs)

    def version(self, seq_id: int) -> int:
        """Return a number that is another one whenever a call may have changed what the memory holds of a sequence."""
        return max(self._changed_at.get(seq_id, 0), self._all_changed_at)

    def note_change(self, *seq_ids: int) -> None:
        """Note that a call is about to change sequences; none named, or -1 among them: all."""
        self._n_changes += 1
        if not seq_ids or -1 in seq_ids:
            self._all_changed_at = self._n_changes
        for seq_id in seq_ids:
            self._changed_at[seq_id] = self._n_changes

    def _run(
        self,
        function: str,
        tokens: Sequence[int],
        positions: Sequence[int],
        seq_ids: Sequence[int],
        outputs: Sequence[bool],
    ) -> None:
        n = len(tokens)
        if not n or not n == len(positions) == len(seq_ids) == len(outputs):
            msg = f"a batch of {n} tokens, {len(positions)} positions, {len(seq_ids)} sequences, {len(outputs)} outputs"
            raise ValueError(msg)
        # The library aborts where they are more.
        most = self.n_batch if function == "llama_decode" else self.n_ubatch
        if n > most:
            raise ValueError(f"a batch of {n} tokens for {function}, which takes {most} at most")
        self.note_change(*set(seq_ids))
        # seq_id is an array of pointers, one a token. Its addresses are written as numbers: an assignment for each
        # would cost more than a decode of one token.
        ids = array("i", seq_ids)
        base, _ = ids.buffer_info()
        with (
            self.library.calling() as (ffi, lib),
            ffi.from_buffer("int32_t[]", array("i", tokens)) as c_tokens,
            ffi.from_buffer("int32_t[]", array("i", positions)) as c_positions,
            ffi.from_buffer("int32_t[]", array("i", [1]) * n) as c_counts,
            ffi.from_buffer("int32_t *[]", array("Q", range(base, base + 4 * n, 4))) as c_seq_pointers,
            ffi.from_buffer("int8_t[]", array("b", [1 if o else 0 for o in outputs])) as c_outputs,
        ):
            pointer = self.pointer
            batch = ffi.new("struct llama_batch *")
            batch.n_tokens, batch.token, batch.pos = n, c_tokens, c_positions
            batch.n_seq_id, batch.seq_id, batch.logits = c_counts, c_seq_pointers, c_outputs
            # A prompt that is ended has what was read; a step of a generation would lose what cannot be read again.
            self.is_endable = not all(outputs)
            rc = int(self.library.call(getattr(lib, function), pointer, batch[0]))
            if rc == 0:
                # A decode returns before the devices are done; without this a fault would show at some later call.
                self.library.call(lib.llama_synchronize, pointer)
        if rc != 0:
            raise CallFailed(function, rc, self.library.log.said(6))

    def logits(self, index: int) -> bytes:
        """Copy the logits of one token of the last batch.

        Args:
            index: the token's place in the last batch; its output was asked for.

        Returns:
            float32[n_vocab] as native-endian bytes.

        Raises:
            CallFailed: that token has no logits.
        """
        with self.library.calling() as (ffi, lib):
            row = lib.llama_get_logits_ith(self.pointer, index)
            if not row:
                raise CallFailed("llama_get_logits_ith", None, self.library.log.said(2))
            return bytes(ffi.buffer(row, self.model.n_vocab * _BYTES_PER_FLOAT))

    @property
    def pooling(self) -> int:
        """What is made of the embeddings of a sequence, as enum llama_pooling_type; 0: each token has its own."""
        with self.library.calling() as (_, lib):
            return int(lib.llama_pooling_type(self.pointer))

    def embeddings(self, index: int, seq_id: int = 0) -> bytes:
        """Copy the embedding of a token of the last batch, or of a sequence where the model pools.

        Returns:
            float32[n_embd] as native-endian bytes.

        Raises:
            CallFailed: there is none.
        """
        with self.library.calling() as (ffi, lib):
            pooled = int(lib.llama_pooling_type(self.pointer)) != 0
            row = lib.llama_get_embeddings_seq(self.pointer, seq_id) if pooled else ffi.NULL
            row = row or lib.llama_get_embeddings_ith(self.pointer, index)
            if not row:
                raise CallFailed("llama_get_embeddings_ith", None, self.library.log.said(2))
            return bytes(ffi.buffer(row, self.model.n_embd * _BYTES_PER_FLOAT))

    def synchronize(self) -> None:
        """Wait until the devices are done with everything asked of them."""
        with self.library.calling() as (_, lib):
            lib.llama_synchronize(self.pointer)

    def set_adapters(self, adapters: Sequence[tuple[Adapter, float]]) -> None:
        """Apply adapters at their scales, in place of those that are applied.

        Raises:
            CallFailed: the library refused.
        """
        self.library.need("adapters")
        with self.library.calling() as (ffi, lib):
            pointers = ffi.new("struct llama_adapter_lora *[]", [a.pointer for a, _ in adapters] or 1)
            scales = ffi.new("float[]", [s for _, s in adapters] or 1)
            rc = int(lib.llama_set_adapters_lora(self.pointer, pointers, len(adapters), scales))
        if rc != 0:
            raise CallFailed("llama_set_adapters_lora", rc, self.library.log.said(4))

    def _memory(self, lib: Any) -> tuple[str, Any]:
        """Return the prefix of this build's memory functions and their first argument (NULL: no memory)."""
        if self.library.exports(_NEW_MEMORY):
            return "llama_memory_", lib.llama_get_memory(self.pointer)
        return "llama_kv_self_", self.pointer

    @property
    def has_memory(self) -> bool:
        """Whether the context remembers anything (encoders do not)."""
        with self.library.calling() as (_, lib):
            return bool(self._memory(lib)[1])

    def clear(self) -> None:
        """Forget every sequence."""
        # The newer function asks whether to clear the data too.
        self.note_change()
        with_data = (True,) if self.library.exports(_NEW_MEMORY) else ()
        self._memory_call("clear", *with_data, none=None)

    def seq_rm(self, seq_id: int, first: int = -1, last: int = -1) -> bool:
        """Forget positions [first, last) of a sequence (-1: open end); False: this memory cannot cut there."""
        self.note_change(seq_id)
        return bool(self._memory_call("seq_rm", seq_id, first, last, none=False))

    def seq_cp(self, source: int, target: int, first: int = -1, last: int = -1) -> None:
        """Let ``target`` share positions [first, last) of ``source``."""
        self.note_change(source, target)
        self._memory_call("seq_cp", source, target, first, last, none=None)

    def seq_add(self, seq_id: int, first: int, last: int, delta: int) -> None:
        """Move positions [first, last) by ``delta``; the keys follow at the next decode only."""
        self.library.need("shift")
        self.note_change(seq_id)
        self._memory_call("seq_add", seq_id, first, last, delta, none=None)

    def pos_min(self, seq_id: int) -> int:
        """Return the smallest position that a sequence holds, -1 where it holds none."""
        return int(self._memory_call("seq_pos_min", seq_id, none=-1))

    def pos_max(self, seq_id: int) -> int:
        """Return the largest position that a sequence holds, -1 where it holds none."""
        return int(self._memory_call("seq_pos_max", seq_id, none=-1))

    def can_shift(self) -> bool:
        """Tell whether the library says that positions can be moved."""
        return bool(self.library.has("shift") and self._memory_call("can_shift", none=False))

    def _memory_call(self, name: str, *arguments: int, none: Any) -> Any:
        with self.library.calling() as (_, lib):
            prefix, memory = self._memory(lib)
            return getattr(lib, prefix + name)(memory, *arguments) if memory else none

    def native_switch(self, mode: int, tensor_split: Sequence[float] | None) -> bool:
        """Let the library itself move the placement under this context.

        Args:
            mode: llama_split_mode.
            tensor_split: shares for the new mode, None for its default.

        Returns:
            True: the new mode is in place. False: the library put the old one back, and the context works.

        Raises:
            CapabilityMissing: the build has no such call.
            CallFailed, TensorUnknown: the bytes of a model whose weights lie in memory could not be given again; the
                model is to be freed.
        """
        from llama_native.model import tensor_split_array  # noqa: PLC0415 - model imports this module's Context for types

        self.library.need("native-switch")
        self.note_change()
        # Meanwhile there is no vocabulary to ask.
        with self.library.calling() as (ffi, lib), self.model._alone():  # noqa: SLF001 - as when the model is freed
            split = tensor_split_array(ffi, lib, tensor_split)
            moved = bool(lib.llama_context_set_split_mode(self.pointer, mode, split))
            if self.model.refill is not None:
                self.model.refill()
            return moved


def fill_context_params(c_params: Any, params: ContextParams, fields: frozenset[str]) -> None:
    """Write ``params`` into a ``llama_context_params`` whose layout has ``fields``."""
    c_params.n_ctx = params.n_ctx
    c_params.n_batch = params.n_batch
    c_params.n_ubatch = params.n_ubatch
    c_params.n_seq_max = params.n_seq_max
    if params.n_threads > 0:
        c_params.n_threads = params.n_threads
    if (params.n_threads_batch or params.n_threads) > 0:
        c_params.n_threads_batch = params.n_threads_batch or params.n_threads
    c_params.flash_attn_type = params.flash_attn.value
    c_params.type_k = params.type_k.value
    c_params.type_v = params.type_v.value
    c_params.offload_kqv = params.offload_kqv
    c_params.embeddings = params.embeddings
    c_params.no_perf = True
    if "kv_unified" in fields:
        c_params.kv_unified = params.kv_unified
    if "swa_full" in fields:
        c_params.swa_full = params.swa_full
