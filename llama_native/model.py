"""A model that is placed on devices, its vocabulary and its adapters.

Ownership: a Model owns its ``llama_model`` pointer (freed by ``llama_model_free``) and keeps alive every C object
that the library may read while it lives: device array, tensor_split, callbacks. Contexts and adapters stand on
it, and are closed before it. Thread: any; every call holds the library's lock, but for those of the vocabulary.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from llama_native.devices import handles, text
from llama_native.errors import CallFailed, LoadCancelled
from llama_native.handle import Handle
from llama_native.params import LoadMode, ModelParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from llama_native.library import Library


def tensor_split_array(ffi: Any, lib: Any, split: Sequence[float] | None) -> Any:
    """Return the C array for a tensor_split (``llama_max_devices()`` floats), NULL for None."""
    if split is None:
        return ffi.NULL
    array = ffi.new("float[]", int(lib.llama_max_devices()))
    array[0 : len(split)] = list(split)
    return array


def fill_model_params(library: Library, ffi: Any, lib: Any, params: ModelParams) -> tuple[Any, list[Any]]:
    """Return a ``llama_model_params`` value for ``params`` and the C objects that must outlive the model.

    Raises:
        UnknownDevice: a device name that the library does not have.
        ValueError: a tensor_split longer than the library's array.
    """
    c_params = lib.llama_model_default_params()
    keep: list[Any] = []
    if params.devices:
        devices = ffi.new("ggml_backend_dev_t[]", [*handles(ffi, lib, params.devices), ffi.NULL])
        keep.append(devices)
        c_params.devices = devices
    if params.tensor_split is not None:
        n_max = int(lib.llama_max_devices())
        if len(params.tensor_split) > n_max:
            msg = f"tensor_split has {len(params.tensor_split)} entries; this library takes at most {n_max}"
            raise ValueError(msg)
        split = tensor_split_array(ffi, lib, params.tensor_split)
        keep.append(split)
        c_params.tensor_split = split
    c_params.split_mode = params.split_mode.value
    c_params.main_gpu = params.main_gpu
    c_params.n_gpu_layers = params.n_gpu_layers if params.n_gpu_layers >= 0 else _all_layers(c_params)
    c_params.check_tensors = params.check_tensors
    c_params.vocab_only = params.vocab_only
    fields = library.profile.model_fields
    if params.load_mode is not LoadMode.AUTO:
        if "load_mode" in fields:
            c_params.load_mode = params.load_mode.value
        else:
            c_params.use_mmap = params.load_mode in {LoadMode.MMAP, LoadMode.MMAP_MLOCK}
            c_params.use_mlock = params.load_mode in {LoadMode.MLOCK, LoadMode.MMAP_MLOCK}
    if "no_alloc" in fields:
        c_params.no_alloc = params.no_alloc
    return c_params, keep


def _all_layers(c_params: Any) -> int:
    """Every build takes a large number for all layers; a negative default says it takes -1 too."""
    return -1 if c_params.n_gpu_layers < 0 else 999


def _flag(lib: Any, name: str, pointer: Any) -> bool:
    """Ask a question that older builds do not have; False there."""
    return bool(getattr(lib, name)(pointer)) if hasattr(lib, name) else False


class Model(Handle):
    """A loaded model.

    Lifetime: until :meth:`close`; contexts and adapters made on it are closed with it.
    """

    KIND = "model"
    IS_LARGE = True

    def __init__(self, library: Library, pointer: Any, params: ModelParams, keep: list[Any], path: str) -> None:
        """Use :meth:`load`."""
        super().__init__(library)
        self.params = params
        self.path = path
        self._pointer = pointer
        self.owned.keep = keep
        self.refill: Callable[[], None] | None = None
        """Gives the tensors their bytes where the library itself has placed the model anew."""
        self._vocabulary = threading.RLock()
        with library.calling() as (ffi, lib):
            self._vocab = lib.llama_model_get_vocab(pointer)
            self.n_vocab = int(lib.llama_vocab_n_tokens(self._vocab))
            self.n_ctx_train = int(lib.llama_model_n_ctx_train(pointer))
            self.n_embd = int(lib.llama_model_n_embd(pointer))
            self.n_layer = int(lib.llama_model_n_layer(pointer))
            # Asked of a vocabulary alone, which has no layers, the library aborts.
            self.n_head = 0 if params.vocab_only else int(lib.llama_model_n_head(pointer))
            self.n_head_kv = 0 if params.vocab_only else int(lib.llama_model_n_head_kv(pointer))
            self.n_swa = int(lib.llama_model_n_swa(pointer))
            self.size_bytes = int(lib.llama_model_size(pointer))
            self.has_encoder = bool(lib.llama_model_has_encoder(pointer))
            self.has_decoder = bool(lib.llama_model_has_decoder(pointer))
            self.decoder_start_token = int(lib.llama_model_decoder_start_token(pointer))
            self.is_recurrent = bool(lib.llama_model_is_recurrent(pointer))
            self.is_hybrid = _flag(lib, "llama_model_is_hybrid", pointer)
            self.is_diffusion = _flag(lib, "llama_model_is_diffusion", pointer)
            self.has_tokenizer = int(lib.llama_vocab_type(self._vocab)) != 0
            self.token_bos = int(lib.llama_vocab_bos(self._vocab))
            self.token_eos = int(lib.llama_vocab_eos(self._vocab))
            self.add_bos = bool(lib.llama_vocab_get_add_bos(self._vocab))
            buffer = ffi.new("char[256]")
            lib.llama_model_desc(pointer, buffer, 256)
            self.description = text(ffi, buffer)

    @classmethod
    def load(
        cls,
        library: Library,
        path: str | os.PathLike[str],
        params: ModelParams,
        *,
        progress: Callable[[float], bool] | None = None,
        endable: bool = True,
    ) -> Model:
        """Load a GGUF file and place it.

        Args:
            library: the open library.
            path: the GGUF (the first part of a split one).
            params: the placement.
            progress: called with the loaded share 0.0 .. 1.0, at every hundredth; returning False ends the load.
            endable: whether what ``progress`` or a signal's handler raises ends the load too.

        Raises:
            CallFailed: the library returned NULL; its last log lines are in the error.
            LoadCancelled: ``progress`` returned False.
            UnknownDevice: a device name that the library does not have.
            BaseException: whatever ``progress`` or a signal's handler raised, after the load; nothing is loaded then.
        """
        cancelled = False
        next_share = 0.0

        def on_progress(share: float, _: object) -> bool:
            nonlocal cancelled, next_share
            cancelled = cancelled or (endable and library.is_unwanted)
            # The library calls for every tensor, most of which are norms and biases.
            if share < next_share or cancelled:
                return not cancelled
            next_share = min(share + 0.01, 1.0)
            cancelled = not (progress is None or progress(float(share)))
            return not cancelled

        pointer = None
        try:
            with library.calling() as (ffi, lib):
                c_params, keep = fill_model_params(library, ffi, lib, params)
                callback = library.callback("bool(float, void *)", on_progress, error=not endable)
                keep.append(callback)
                c_params.progress_callback = callback
                pointer = library.call(lib.llama_model_load_from_file, os.fsencode(path), c_params)
                # The model keeps the callback, which is to keep nothing of the caller's.
                progress = None
        except BaseException:
            if pointer:
                with library.calling() as (_, lib):
                    lib.llama_model_free(pointer)
            raise
        if not pointer:
            if cancelled:
                raise LoadCancelled(os.fspath(path))
            raise CallFailed("llama_model_load_from_file", None, library.log.said())
        return cls(library, pointer, params, keep, os.fspath(path))

    def depend(self, handle: Handle) -> None:
        """Register what stands on this model (a context, an adapter, a grammar); adapters are freed last."""
        above = [one for one in self.owned.above if one.pointer is not None]
        self.owned.above = [*above, handle.owned] if isinstance(handle, Adapter) else [handle.owned, *above]

    def _alone(self) -> AbstractContextManager[Any]:
        return self._vocabulary

    @staticmethod
    def _free(lib: Any, pointer: Any) -> None:
        lib.llama_model_free(pointer)

    def _name(self) -> str:
        return f"model {self.path}"

    @property
    def vocab(self) -> Any:
        """The C vocabulary, for modules of this package only; HandleClosed after close."""
        _ = self.pointer
        return self._vocab

    @contextmanager
    def _asking(self) -> Iterator[tuple[Any, Any]]:
        """Ask the vocabulary, which is there while the model is; other calls, a decode among them, go on meanwhile."""
        with self.library.asking() as found, self._vocabulary:
            _ = self.pointer
            yield found

    def _refuse_without_tokenizer(self) -> None:
        if not self.has_tokenizer:
            raise ValueError("this model has no tokenizer: it reads numbers only (has_tokenizer)")

    def tokenize(self, content: str | bytes, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Turn text into tokens.

        Args:
            content: text, or UTF-8 bytes.
            add_special: add BOS and the like as the model wants it.
            parse_special: read "<|...|>" and the like as special tokens.

        Raises:
            ValueError: the model has no tokenizer; the library would abort.
            CallFailed: the library refused the text.
        """
        self._refuse_without_tokenizer()
        data = content.encode("utf-8") if isinstance(content, str) else bytes(content)
        with self._asking() as (ffi, lib):
            n_room = len(data) + 8
            buffer = ffi.new("int32_t[]", n_room)
            n = lib.llama_tokenize(self._vocab, data, len(data), buffer, n_room, add_special, parse_special)
            # Too little room is said as minus the room that is wanted; INT32_MIN says that the text is too long.
            if n < 0 and n > -(2**31):
                n_room = -n
                buffer = ffi.new("int32_t[]", n_room)
                n = lib.llama_tokenize(self._vocab, data, len(data), buffer, n_room, add_special, parse_special)
            if n < 0:
                raise CallFailed("llama_tokenize", n, self.library.log.said(2))
            return [int(t) for t in ffi.unpack(buffer, n)] if n else []

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return a token's bytes, which may be a part of a UTF-8 character; ``special`` also shows control tokens.

        Raises:
            ValueError: no token of the vocabulary, or the model has no tokenizer; the library would abort.
        """
        self._refuse_without_tokenizer()
        if not 0 <= token < self.n_vocab:
            raise ValueError(f"token {token} is not in the vocabulary (0 to {self.n_vocab - 1})")
        with self._asking() as (ffi, lib):
            buffer = ffi.new("char[64]")
            n = lib.llama_token_to_piece(self._vocab, token, buffer, 64, 0, special)
            if n < 0:
                buffer = ffi.new("char[]", -n)
                n = lib.llama_token_to_piece(self._vocab, token, buffer, -n, 0, special)
            if n < 0:
                raise CallFailed("llama_token_to_piece", n, self.library.log.said(2))
            return bytes(ffi.buffer(buffer, n))

    def is_eog(self, token: int) -> bool:
        """Tell whether a token ends a generation."""
        with self._asking() as (_, lib):
            return bool(lib.llama_vocab_is_eog(self._vocab, token))

    def chat_template(self) -> str | None:
        """Return the model's own chat template (jinja text), None where it has none."""
        with self._asking() as (ffi, lib):
            pointer = lib.llama_model_chat_template(self.pointer, ffi.NULL)
            return text(ffi, pointer) if pointer else None


class Adapter(Handle):
    """A LoRA adapter on a model. Ownership: freed by ``llama_adapter_lora_free`` before its model."""

    KIND = "adapter"

    def __init__(self, model: Model, path: str | os.PathLike[str]) -> None:
        """Load the adapter file.

        Raises:
            CapabilityMissing: the build has no adapters of this kind.
            CallFailed: the file does not fit the model; the last log lines are in the error.
        """
        library = model.library
        library.need("adapters")
        super().__init__(library)
        self.path = os.fspath(path)
        with self._making() as (_, lib):
            pointer = library.call(lib.llama_adapter_lora_init, model.pointer, os.fsencode(path))
            if not pointer:
                raise CallFailed("llama_adapter_lora_init", None, library.log.said())
            self._pointer = pointer
            model.depend(self)

    @staticmethod
    def _free(lib: Any, pointer: Any) -> None:
        lib.llama_adapter_lora_free(pointer)
