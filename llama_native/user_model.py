"""Models whose tensors the library creates and the caller fills.

`create_tensors` makes one from metadata and asks a callback for each tensor's data; `load_user_model` uploads what lies
in memory by threads.

Source: llama_model_init_from_user in llama.h (builds from 2026.4 on), llama_model_load_from_file_with in
tools/native/llama-split.h (builds of it). The head of ``struct ggml_tensor`` that is read
here (type at 0, ne[4] at 16) has not moved since GGUF exists, and each tensor is checked against ``ggml_nelements``.
"""

from __future__ import annotations

import math
import os
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from llama_native.devices import DeviceKind
from llama_native.errors import CallFailed, LoadCancelled, TensorUnknown, UnsupportedAbi
from llama_native.model import Model, fill_model_params
from llama_native.params import SplitMode

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from llama_native.library import Library
    from llama_native.params import ModelParams

_NE_OFFSET = 16
_N_DIMS = 4
_N_THREADS = 8
_CONCURRENT = frozenset({"CPU", "CUDA", "ROCm", "MUSA"})
"""Backends whose buffers take tensors from several threads at once. An RPC server's socket, for one, does not.

Neither do the buffers of tensor mode, whatever is behind them: the first write of each tensor adds to one map
(ggml-backend-meta.cpp, split_state_cache), without a lock. Builds that have llama_model_load_from_file_with lock it.
"""


class MetaKind(Enum):
    """Kinds of metadata values: name of the setter's suffix, number of the GGUF type, C type of an element."""

    U8 = ("u8", 0, "uint8_t")
    I8 = ("i8", 1, "int8_t")
    U16 = ("u16", 2, "uint16_t")
    I16 = ("i16", 3, "int16_t")
    U32 = ("u32", 4, "uint32_t")
    I32 = ("i32", 5, "int32_t")
    F32 = ("f32", 6, "float")
    BOOL = ("bool", 7, "bool")
    STR = ("str", 8, "char *")
    U64 = ("u64", 10, "uint64_t")
    I64 = ("i64", 11, "int64_t")
    F64 = ("f64", 12, "double")

    def __init__(self, suffix: str, gguf_type: int, c_type: str) -> None:
        self.suffix = suffix
        self.gguf_type = gguf_type
        self.c_type = c_type

    @classmethod
    def of(cls, suffix: str) -> MetaKind:
        """Find a kind by its name in recipes, such as "u32".

        Raises:
            ValueError: no such kind.
        """
        for kind in cls:
            if kind.suffix == suffix:
                return kind
        raise ValueError(f"no metadata kind is called {suffix!r}")


Scalar = bool | int | float | str


@dataclass(frozen=True, slots=True)
class MetaValue:
    """One key-value pair of a model's metadata; a tuple is an array of its kind."""

    key: str
    kind: MetaKind
    value: Scalar | tuple[Scalar, ...]


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A tensor that the architecture wants.

    Args:
        name: its name in a GGUF file.
        dims: sizes, fastest first, without trailing ones.
        type_id: the number of its ggml type.
        n_bytes: size of its data, bytes.
    """

    name: str
    dims: tuple[int, ...]
    type_id: int
    n_bytes: int


Fill = Callable[[TensorSlot], "bytes | bytearray | memoryview | None"]
"""Gives a tensor's data, exactly ``n_bytes`` of it, C order; None leaves it as it was allocated."""


def create_tensors(library: Library, metadata: Sequence[MetaValue], fill: Fill | None = None) -> tuple[TensorSlot, ...]:
    """Build a model from metadata, let each tensor be filled, and free the model again.

    Args:
        library: the open library.
        metadata: every key that the architecture reads, ``general.architecture`` among them.
        fill: gives each tensor's data; None: the tensors are only listed.

    Returns:
        Every tensor by its first creation, in the library's order.

    Raises:
        CapabilityMissing: the build cannot make models from metadata.
        CallFailed: the library made no model; its log says why.
        UnsupportedAbi: a tensor's head is not where it is known to be.
        Exception: whatever ``fill`` raised, after the model has been freed.

    Thread: holds the library's lock throughout; ``fill`` must not call the library (Reentered).
    """
    library.need("user-model")
    # Some tensors are created once for each layer under one name (rope_freqs): all are filled, one is listed.
    slots: dict[str, TensorSlot] = {}
    with library.calling() as (ffi, lib):

        def take(tensor: Any, _: object) -> None:
            if library.is_interrupted:
                return
            slot = _read_slot(ffi, lib, tensor)
            data = fill(slot) if fill is not None else None
            if data is not None:
                _put(ffi, lib, tensor, slot, data)
            slots.setdefault(slot.name, slot)

        callback = library.callback("void(struct ggml_tensor *, void *)", take)
        gguf = lib.gguf_init_empty()
        try:
            for item in metadata:
                _set_value(ffi, lib, gguf, item)
            params = lib.llama_model_default_params()
            model = library.call(lib.llama_model_init_from_user, gguf, callback, ffi.NULL, params)
            if model:
                lib.llama_model_free(model)
        finally:
            lib.gguf_free(gguf)
    if not model:
        raise CallFailed("llama_model_init_from_user", None, library.log.said())
    return tuple(slots.values())


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights in host memory.

    Args:
        metadata: a GGUF whose metadata and tensor list are read, and no data of which; its list gives each tensor's
            type, and those that it lacks are made in F32.
        data: memory that holds the data of every tensor.
        places: offset and size of each tensor's data in it, bytes, by name.
        whole: a GGUF of them, which stays there as long as a model that was made of them; "" where there is none.
    """

    metadata: str
    data: Buffer
    places: Mapping[str, tuple[int, int]]
    whole: str = ""


@dataclass(slots=True)
class _Upload:
    """One tensor that waits for its data."""

    tensor: Any
    n_bytes: int
    source: Any


def neutral_value(name: str) -> float | None:
    """Say what an optional tensor holds that changes nothing: 0 or 1; None where nobody knows."""
    if name.endswith(".bias"):
        return 0.0
    return 1.0 if name.endswith((".scale", ".input_scale", "rope_freqs.weight")) else None


def load_user_model(
    library: Library,
    weights: Weights,
    params: ModelParams,
    *,
    name: str = "",
    progress: Callable[[float], bool] | None = None,
    endable: bool = True,
    n_threads: int | None = None,
) -> Model:
    """Make a model of weights in memory and place it; threads upload the tensors, all at once.

    Where the build can, the tensors are those of ``weights.whole``, and the library's own call for another split mode
    takes their bytes from the memory too. Else the library makes every optional tensor that the architecture knows. One
    that the file lacks gets the value that changes nothing (:func:`neutral_value`); it still takes its memory and its
    time in every decode.

    Args:
        library: the open library.
        weights: where they lie; only read. The model holds them where the build may ask for their bytes again.
        params: the placement.
        name: what the model is called in errors.
        progress: called with the uploaded share, 0.0 to 1.0; returning False ends the load.
        endable: whether what ``progress`` or a signal's handler raises ends the load too.
        n_threads: threads that upload, of which tensor mode takes one in builds that only make models from metadata;
            None: 8 where the devices' backends take tensors from several at once, else 1.

    Raises:
        CapabilityMissing: the build cannot make models of memory.
        TensorUnknown: it wants a tensor that is not there, or of another size.
        CallFailed: the library made no model; its log says why.
        LoadCancelled: ``progress`` returned False.
        BaseException: whatever ``progress`` or a signal's handler raised; nothing is loaded then.
    """
    is_of_file = bool(weights.whole) and library.has("model-from-file-with")
    if not is_of_file:
        library.need("model-from-memory")
    is_locked = is_of_file or params.split_mode is not SplitMode.TENSOR
    n_threads = n_threads or _n_threads(library, params) if is_locked else 1
    pointer, done = None, False
    keep: list[Any] = []
    cancelled = [False]
    try:
        with library.calling() as (ffi, lib):
            c_params, keep = fill_model_params(library, ffi, lib, params)
            made = _Made(ffi, lib, weights, n_threads, may_lack=not is_of_file)
            # Only noted: until the library returns, it may still free what it has made.
            note = made.tensors.append
            callback = library.callback("void(struct ggml_tensor *, void *)", lambda tensor, _: note(tensor))
            keep.append(callback)
            if is_of_file:
                function, path = "llama_model_load_from_file_with", os.fsencode(weights.whole)
                pointer = library.call(lib.llama_model_load_from_file_with, path, c_params, callback, ffi.NULL)
            else:
                function = "llama_model_init_from_user"
                gguf = _metadata(library, ffi, lib, weights.metadata)
                try:
                    pointer = library.call(lib.llama_model_init_from_user, gguf, callback, ffi.NULL, c_params)
                finally:
                    lib.gguf_free(gguf)
            if not pointer:
                raise CallFailed(function, None, library.log.said())

            def go_on(share: float) -> bool:
                wanted = not (endable and library.is_unwanted) and (progress is None or progress(share))
                cancelled[0] = cancelled[0] or not wanted
                return wanted

            made.fill(go_on)
        done = not cancelled[0]
    finally:
        if pointer and not done:
            with library.calling() as (_, lib):
                lib.llama_model_free(pointer)
    if not done:
        raise LoadCancelled(name)
    model = Model(library, pointer, params, keep, name)
    if is_of_file:
        model.refill = made.fill_again
    else:
        # The library counts what a file holds, and there was none; a tied output has the embedding's data.
        model.size_bytes = sum(n_bytes for _, n_bytes in set(weights.places.values()))
    return model


def _metadata(library: Library, ffi: Any, lib: Any, path: str) -> Any:
    gguf = lib.gguf_init_from_file(os.fsencode(path), ffi.new("struct gguf_init_params *", [True])[0])
    if not gguf:
        raise CallFailed("gguf_init_from_file", None, library.log.said())
    return gguf


class _Made:
    """The tensors of a model that the library has made, and where their bytes are. The library's lock is held.

    Lifetime: of the model. Some tensors are made several times under one name (a tied output, rope_freqs).
    """

    def __init__(self, ffi: Any, lib: Any, weights: Weights, n_threads: int, *, may_lack: bool) -> None:
        """Wait for tensors; with ``may_lack`` the library makes more than ``weights`` has."""
        self._ffi = ffi
        self._lib = lib
        self._weights = weights
        self._n_threads = n_threads
        self._may_lack = may_lack
        self._placed: tuple[str, ...] = ()
        self.tensors: list[Any] = []
        """Those that the library has asked for since the last fill, in that order."""

    def fill(self, go_on: Callable[[float], bool] = lambda _: True) -> None:
        """Upload the bytes of all that were asked for, as long as ``go_on`` wants it."""
        tensors, self.tensors[:] = list(self.tensors), ()
        self._placed = self._names(tensors)
        with self._ffi.from_buffer("uint8_t[]", self._weights.data) as base:
            uploads = self._uploads(base, tensors)
            if go_on(0.0):
                _upload(self._lib, uploads, go_on, self._n_threads)

    def fill_again(self) -> None:
        """Upload them again where the library has placed the model anew, as it was asked to or as before.

        Raises:
            CallFailed: it has not asked for all of them.
        """
        if not self.tensors:
            return
        now, before = self._names(self.tensors), self._placed
        if set(now) != set(before):
            told = f"it has asked for the bytes of {len(now)} tensors, and before for those of {len(before)}"
            raise CallFailed("llama_context_set_split_mode", None, (told,))
        self.fill()

    def _names(self, tensors: Sequence[Any]) -> tuple[str, ...]:
        return tuple(self._ffi.string(self._lib.ggml_get_name(one)).decode("utf-8") for one in tensors)

    def _uploads(self, base: Any, tensors: Sequence[Any]) -> list[_Upload]:
        """Find the data of every tensor, the largest first."""
        ffi, places = self._ffi, self._weights.places
        sizes = [int(self._lib.ggml_nbytes(one)) for one in tensors]
        uploads = []
        neutral: dict[float, Any] = {}
        most = max((n for n, name in zip(sizes, self._placed, strict=True) if name not in places), default=0)
        for tensor, name, n_bytes in zip(tensors, self._placed, sizes, strict=True):
            if name in places:
                offset, there = places[name]
                if there != n_bytes:
                    raise TensorUnknown(name, f"of {n_bytes} bytes, and the file has {there}")
                uploads.append(_Upload(tensor, n_bytes, base + offset))
                continue
            value = neutral_value(name) if self._may_lack else None
            if value is None or int(ffi.cast("int32_t *", tensor)[0]) != 0:
                raise TensorUnknown(name, "which the file has not")
            if value not in neutral:
                neutral[value] = ffi.from_buffer("uint8_t[]", array("f", [value]) * (most // 4))
            uploads.append(_Upload(tensor, n_bytes, neutral[value]))
        uploads.sort(key=lambda one: -one.n_bytes)
        return uploads


def _n_threads(library: Library, params: ModelParams) -> int:
    named = {name.lower() for name in params.devices}
    used = [one for one in library.devices(memory=False) if one.name.lower() in named or not named]
    backends = {one.backend for one in used if one.kind is not DeviceKind.ACCEL}
    return _N_THREADS if backends <= _CONCURRENT else 1


def _upload(lib: Any, uploads: Sequence[_Upload], go_on: Callable[[float], bool], n_threads: int) -> None:
    """Upload by threads until all is done or not wanted any more; what one of them raises comes when all have ended."""
    stop = threading.Event()

    def put(one: _Upload) -> int:
        if not stop.is_set():
            lib.ggml_backend_tensor_set(one.tensor, one.source, 0, one.n_bytes)
        return one.n_bytes

    n_all, n_done, told = sum(one.n_bytes for one in uploads) or 1, 0, 0.0
    with ThreadPoolExecutor(max(n_threads, 1), thread_name_prefix="splitctl-upload") as threads:
        try:
            for future in as_completed([threads.submit(put, one) for one in uploads]):
                n_done += future.result()
                if n_done / n_all >= told + 0.01 or n_done == n_all:
                    told = n_done / n_all
                    if not go_on(told):
                        break
        finally:
            stop.set()


def _read_slot(ffi: Any, lib: Any, tensor: Any) -> TensorSlot:
    ne = ffi.cast("int64_t *", ffi.cast("uint8_t *", tensor) + _NE_OFFSET)
    dims = [int(ne[index]) for index in range(_N_DIMS)]
    name = ffi.string(lib.ggml_get_name(tensor)).decode("utf-8")
    n_elements = int(lib.ggml_nelements(tensor))
    if min(dims) < 1 or math.prod(dims) != n_elements:
        raise UnsupportedAbi(
            f"tensor {name} reads as {dims} for {n_elements} elements", "struct ggml_tensor with ne[4] at 16"
        )
    while len(dims) > 1 and dims[-1] == 1:
        dims.pop()
    type_id = int(ffi.cast("int32_t *", tensor)[0])
    return TensorSlot(name, tuple(dims), type_id, int(lib.ggml_nbytes(tensor)))


def _put(ffi: Any, lib: Any, tensor: Any, slot: TensorSlot, data: bytes | bytearray | memoryview) -> None:
    view = memoryview(data).cast("B")
    if len(view) != slot.n_bytes:
        raise ValueError(f"tensor {slot.name} takes {slot.n_bytes} bytes, {len(view)} were given")
    with ffi.from_buffer("uint8_t[]", view) as pointer:
        lib.ggml_backend_tensor_set(tensor, pointer, 0, slot.n_bytes)


def _set_value(ffi: Any, lib: Any, gguf: Any, item: MetaValue) -> None:
    """Put one key-value pair into a GGUF context; the library copies it."""
    key = item.key.encode("utf-8")
    if not isinstance(item.value, tuple):
        value = item.value.encode("utf-8") if isinstance(item.value, str) else item.value
        getattr(lib, f"gguf_set_val_{item.kind.suffix}")(gguf, key, value)
    elif item.kind is MetaKind.STR:
        texts = [ffi.new("char[]", str(text).encode("utf-8")) for text in item.value]
        lib.gguf_set_arr_str(gguf, key, ffi.new("const char *[]", texts), len(texts))
    else:
        elements = ffi.new(f"{item.kind.c_type}[]", list(item.value))
        lib.gguf_set_arr_data(gguf, key, item.kind.gguf_type, elements, len(item.value))
