"""Lets a library write its default structs before any layout of them is assumed.

On x86-64 a large struct is returned through a hidden first pointer, so the functions can be called on patterned buffers
of ours, which shows what was written. Elsewhere they are called as what they are, functions that return a struct, with
one that is larger than any known: what lies behind the library's own part of it is chance.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

from llama_native import abi

if TYPE_CHECKING:
    from collections.abc import Callable

    import cffi

PROBE_BYTES = 1024
"""Room for a params struct: the largest known has 168 bytes. cdefs/probe_values.h says the same."""

_HIDDEN_POINTER_MACHINES = frozenset({"x86_64", "AMD64"})
_MODEL, _CONTEXT, _BATCH = "llama_model_default_params", "llama_context_default_params", "llama_batch_get_one"
_N_TOKENS = 2


def takes_hidden_pointer() -> bool:
    """Tell whether this machine returns a large struct through a first argument like any other."""
    return platform.machine() in _HIDDEN_POINTER_MACHINES


def header(*, by_value: bool) -> str:
    """Name the file of ``cdefs/`` with the declarations that :func:`observe` wants."""
    return "probe_values.h" if by_value else "probe.h"


def observe(ffi: cffi.FFI, lib: Any, exports: frozenset[str], *, by_value: bool) -> abi.Observed:
    """Call the three functions that tell the layout; nothing is told of one that is not exported.

    Args:
        ffi: an FFI with the declarations of :func:`header`.
        lib: the library.
        exports: its exported symbols.
        by_value: call them as functions that return a struct.
    """
    tokens = ffi.new("int32_t[]", _N_TOKENS)
    if by_value:
        model, context, batch = (_value(ffi, lib, name, tokens) for name in (_MODEL, _CONTEXT, _BATCH))
        return abi.Observed.from_values(model=model, context=context, batch=batch, exports=exports)
    return abi.Observed.from_fills(
        model=_fills(ffi, lib, _MODEL, lambda function, out: function(out)),
        context=_fills(ffi, lib, _CONTEXT, lambda function, out: function(out)),
        batch=_fills(ffi, lib, _BATCH, lambda function, out: function(out, tokens, _N_TOKENS)),
        exports=exports,
    )


def _fills(ffi: cffi.FFI, lib: Any, name: str, call: Callable[[Any, Any], Any]) -> tuple[bytes, bytes]:
    if not hasattr(lib, name):
        return b"", b""
    # The System V ABI for x86-64 returns a struct of more than 16 bytes through a pointer that the caller passes in the
    # register of a first argument; so the function can be called as `void *f(void *out)` on memory of ours.
    low, high = (ffi.new("uint8_t[]", bytes([fill]) * PROBE_BYTES) for fill in abi.FILLS)
    for buffer in (low, high):
        call(getattr(lib, name), buffer)
    return bytes(ffi.buffer(low, PROBE_BYTES)), bytes(ffi.buffer(high, PROBE_BYTES))


def _value(ffi: cffi.FFI, lib: Any, name: str, tokens: Any) -> bytes:
    if not hasattr(lib, name):
        return b""
    function = getattr(lib, name)
    returned = function(tokens, _N_TOKENS) if name == _BATCH else function()
    return bytes(ffi.buffer(ffi.addressof(returned), PROBE_BYTES))
