"""A context that another package of this process owns, reached by its address: its state and its last logits.

Ownership: none; the other package frees it. Thread: any; every call holds our library's lock, which the other package
does not: it must make no call of its own meanwhile.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_native.errors import CallFailed

if TYPE_CHECKING:
    from types import ModuleType

    from typing_extensions import Buffer

    from llama_native.library import Library

_BYTES_PER_FLOAT = 4


def library_file(bindings: ModuleType) -> Path:
    """Return the libllama that a module of ctypes bindings has opened.

    Raises:
        ValueError: the module has opened none that it tells of.
    """
    name = getattr(getattr(bindings, "_lib", None), "_name", None)
    if not isinstance(name, str) or not Path(name).is_file():
        raise ValueError(f"module {bindings.__name__} does not tell which libllama it has opened")
    return Path(name)


class ForeignContext:
    """A context by its address. Lifetime: that of its owner's context, which nobody tells us of."""

    def __init__(self, library: Library, address: int, n_vocab: int) -> None:
        """Point at a context of this very library; any other address ends the process."""
        self.library = library
        self._address = address
        self._n_vocab = n_vocab

    def _pointer(self, ffi: Any) -> Any:
        return ffi.cast("struct llama_context *", self._address)

    def state(self) -> bytes:
        """Return the state of all sequences.

        Raises:
            CallFailed: the library wrote nothing.
        """
        with self.library.calling() as (ffi, lib):
            pointer = self._pointer(ffi)
            lib.llama_synchronize(pointer)
            buffer = bytearray(int(lib.llama_state_get_size(pointer)))
            with ffi.from_buffer("uint8_t[]", buffer, require_writable=True) as view:
                n = int(self.library.call(lib.llama_state_get_data, pointer, view, len(view)))
            if n == 0:
                raise CallFailed("llama_state_get_data", 0, self.library.log.said(4))
            return bytes(buffer[:n])

    def set_state(self, state: Buffer) -> None:
        """Replace the state of all sequences.

        Raises:
            CallFailed: the library refused it; the context may be half written, and is to be cleared.
        """
        with self.library.calling() as (ffi, lib), ffi.from_buffer("uint8_t[]", state) as view:
            n = int(self.library.call(lib.llama_state_set_data, self._pointer(ffi), view, len(view)))
            if n != len(view):
                raise CallFailed("llama_state_set_data", n, self.library.log.said(4))

    def logits(self) -> bytes:
        """Copy the logits of the last decode's last output: float32[n_vocab] as native-endian bytes.

        Raises:
            CallFailed: there are none.
        """
        with self.library.calling() as (ffi, lib):
            return bytes(ffi.buffer(self._last_row(ffi, lib), self._n_vocab * _BYTES_PER_FLOAT))

    def set_logits(self, row: bytes) -> None:
        """Write float32[n_vocab] over the logits of the last decode's last output; errors as for :meth:`logits`."""
        if len(row) != self._n_vocab * _BYTES_PER_FLOAT:
            raise ValueError(f"a row of {len(row)} bytes; wanted {self._n_vocab * _BYTES_PER_FLOAT}")
        with self.library.calling() as (ffi, lib):
            ffi.memmove(self._last_row(ffi, lib), row, len(row))

    def _last_row(self, ffi: Any, lib: Any) -> Any:
        pointer = self._pointer(ffi)
        lib.llama_synchronize(pointer)
        row = lib.llama_get_logits_ith(pointer, -1)
        if not row:
            raise CallFailed("llama_get_logits_ith", None, self.library.log.said(2))
        return row
