"""Lets a library write its default structs before any layout of them is assumed.

On x86-64 a large struct is returned through a hidden first pointer, so the functions can be called on patterned buffers
of ours, which shows what was written. Elsewhere they are called as what they are, functions that return a struct, with
one that is larger than any known: what lies behind the library's own part of it is chance.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

from llama_native import abi
from llama_native.layouts import StructAnswer

if TYPE_CHECKING:
    import cffi

PROBE_BYTES = 1024
"""Room for a params struct: the largest known has 168 bytes. cdefs/probe_values.h says the same."""

_HIDDEN_POINTER_MACHINES = frozenset({"x86_64", "AMD64"})
_N_TOKENS = 2


def takes_hidden_pointer() -> bool:
    """Tell whether this machine returns a large struct through a first argument like any other."""
    return platform.machine() in _HIDDEN_POINTER_MACHINES


def header(*, by_value: bool) -> str:
    """Name the file of ``cdefs/`` with the declarations that :func:`observe` wants."""
    return "probe_values.h" if by_value else "probe.h"


def observe(ffi: cffi.FFI, lib: Any, exports: frozenset[str], *, by_value: bool) -> abi.Observed:
    """Call the three functions that tell the layout; nothing is told of one that is not exported.

    ``ffi`` has the declarations of :func:`header`; ``by_value`` calls them as functions that return a struct.
    """
    ask = _value if by_value else _fills
    tokens = ffi.new("int32_t[]", _N_TOKENS)
    return abi.Observed(
        model=ask(ffi, lib, "llama_model_default_params"),
        context=ask(ffi, lib, "llama_context_default_params"),
        batch=ask(ffi, lib, "llama_batch_get_one", tokens, _N_TOKENS),
        exports=exports,
    )


def _fills(ffi: cffi.FFI, lib: Any, name: str, *arguments: Any) -> StructAnswer:
    if not hasattr(lib, name):
        return StructAnswer.from_fills(b"", b"")
    # The System V ABI for x86-64 returns a struct of more than 16 bytes through a pointer that the caller passes in the
    # register of a first argument; so the function can be called as `void *f(void *out)` on memory of ours.
    buffers = [ffi.new("uint8_t[]", bytes([fill]) * PROBE_BYTES) for fill in abi.FILLS]
    for buffer in buffers:
        getattr(lib, name)(buffer, *arguments)
    return StructAnswer.from_fills(*(bytes(ffi.buffer(buffer, PROBE_BYTES)) for buffer in buffers))


def _value(ffi: cffi.FFI, lib: Any, name: str, *arguments: Any) -> StructAnswer:
    if not hasattr(lib, name):
        return StructAnswer(b"", None)
    returned = getattr(lib, name)(*arguments)
    return StructAnswer(bytes(ffi.buffer(ffi.addressof(returned), PROBE_BYTES)), None)
