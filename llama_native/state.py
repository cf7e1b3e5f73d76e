"""State bytes out of a context and into one. What the bytes mean is not known here.

Every function takes the caller's buffer: allocate it once and touch it early, a fresh buffer costs as much as the
copy. One size call and one get save a state. After a set that returned 0 the context may be half written: close it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llama_native.errors import CallFailed

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from llama_native.context import Context


def state_size(context: Context) -> int:
    """Return the bytes that the state of all sequences takes now. The library walks the whole cache for it."""
    with context.library.calling() as (_, lib):
        lib.llama_synchronize(context.pointer)
        return int(lib.llama_state_get_size(context.pointer))


def state_get(context: Context, buffer: Buffer) -> int:
    """Write the state of all sequences into ``buffer``.

    Args:
        context: the context.
        buffer: writable, at least :func:`state_size` bytes.

    Returns:
        The bytes written.

    Raises:
        CallFailed: the library wrote nothing.
    """
    return _get(context, "llama_state_get_data", buffer)


def state_set(context: Context, buffer: Buffer) -> int:
    """Read the state of all sequences from ``buffer``.

    Returns:
        The bytes read.

    Raises:
        CallFailed: the library refused them; the context is not to be used again.
    """
    return _set(context, "llama_state_set_data", buffer)


def sequence_state_size(context: Context, seq_id: int) -> int:
    """Return the bytes that one sequence's state takes now."""
    context.library.need("sequence-state")
    with context.library.calling() as (_, lib):
        return int(lib.llama_state_seq_get_size(context.pointer, seq_id))


def sequence_state_get(context: Context, buffer: Buffer, seq_id: int) -> int:
    """Write one sequence's state into ``buffer``; returns the bytes written; errors as for :func:`state_get`."""
    context.library.need("sequence-state")
    return _get(context, "llama_state_seq_get_data", buffer, seq_id)


def sequence_state_set(context: Context, buffer: Buffer, seq_id: int) -> int:
    """Read one sequence's state from ``buffer``; returns the bytes read; errors as for :func:`state_set`."""
    context.library.need("sequence-state")
    return _set(context, "llama_state_seq_set_data", buffer, seq_id)


def _get(context: Context, function: str, buffer: Buffer, *seq_id: int) -> int:
    with context.library.calling() as (ffi, lib):
        lib.llama_synchronize(context.pointer)
        with ffi.from_buffer("uint8_t[]", buffer, require_writable=True) as view:
            n = int(context.library.call(getattr(lib, function), context.pointer, view, len(view), *seq_id))
    return _checked(context, function, n)


def _set(context: Context, function: str, buffer: Buffer, *seq_id: int) -> int:
    context.note_change(*seq_id)
    with context.library.calling() as (ffi, lib), ffi.from_buffer("uint8_t[]", buffer) as view:
        n = int(context.library.call(getattr(lib, function), context.pointer, view, len(view), *seq_id))
    return _checked(context, function, n)


def _checked(context: Context, function: str, n: int) -> int:
    # These calls say 0 bytes where they failed, whatever the fault was; the log has the rest.
    if n == 0:
        raise CallFailed(function, 0, context.library.log.said(4))
    return n
