"""Whose fault an error is, and the one line that a person gets to read."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path

from llama_native import CallFailed, LibraryNotFound, LoadCancelled, NativeError, RpcServerUnusable, UnknownDevice
from splitctl.errors import Parked, Refused, SplitctlError
from splitctl.ipc.jobs import Failure, Fault, fault_of
from splitctl.last_words import is_shortage, telling_line
from splitctl.model.chat_messages import ChatTemplateFailed
from splitctl.probing.computing import ProbeCancelled

#: Errors that only a worker knows, first match first; `fault_of` knows the others.
_FAULTS: Mapping[type[Exception], Fault] = {
    LoadCancelled: Fault.CANCELLED,
    ProbeCancelled: Fault.CANCELLED,
    UnknownDevice: Fault.CONFIG,
    RpcServerUnusable: Fault.CONFIG,
    ChatTemplateFailed: Fault.CONFIG,
    CallFailed: Fault.MODEL,
    NativeError: Fault.LIBRARY,
}

#: Reasons of a refusal that lie in a flag and not in the model or the build.
_FLAG_REASONS = frozenset({"unknown-device", "tensor-split-too-long", "too-many-devices", "main-gpu-out-of-range"})

_LOAD = "llama_model_load_from_file"
_CONTEXT = "llama_init_from_model"

#: What the library logs where a model cannot be loaded, and what to do about it.
_ADVICE: tuple[tuple[str, str], ...] = (
    ("unknown model architecture", "use a newer build of llama.cpp (splitctl doctor shows this one)"),
    ("not within the file bounds", "the file is cut short: fetch it again"),
    ("missing tensor", "the file lacks a part of the model: fetch or convert it again"),
    ("wrong shape", "the file does not fit its own header: convert it again"),
    ("invalid magic", "name a GGUF file"),
    ("unsupported", "use a build of llama.cpp that supports it (splitctl doctor shows this one)"),
)


def failure_of(error: BaseException, *, model: Path | None = None) -> Failure:
    """Turn an error into the last event; ``model`` was in use, for errors that do not name it."""
    if isinstance(error, Refused) and {reason.code for reason in error.reasons} & _FLAG_REASONS:
        flags = "; ".join(reason.text for reason in error.reasons if reason.code in _FLAG_REASONS)
        return Failure(Fault.CONFIG, type(error).__name__, flags)
    if isinstance(error, SplitctlError | NativeError | ProbeCancelled):
        text = _message(error, model)
    else:
        text = f"{type(error).__name__}: {error}; this is a fault of splitctl, please report it (-v shows where)"
    fault = next((fault for kind, fault in _FAULTS.items() if isinstance(error, kind)), fault_of(error))
    return Failure(fault, type(error).__name__, text)


def logged_failure_of(error: BaseException, *, model: Path | None = None) -> Failure:
    """As `failure_of`; where the error is a fault of ours, the log says where it was raised."""
    failure = failure_of(error, model=model)
    if failure.fault is Fault.INTERNAL and not isinstance(error, SplitctlError):
        traceback.print_exception(error)
    return failure


def _message(error: Exception, model: Path | None) -> str:
    if isinstance(error, CallFailed):
        return _call_failed(error, model)
    if isinstance(error, Parked) and error.path is not None:
        return f"the session is parked at {error.path}; run again with --restore and that file to go on"
    if isinstance(error, LibraryNotFound):
        looked = "; ".join(str(entry) for entry in error.tried) or "nowhere"
        return (
            f"no usable llama library was found (looked at: {looked}); install one with pip install 'splitctl[cpu]', "
            "or name one with --lib or LLAMA_NATIVE_LIB"
        )
    return str(error)


def _call_failed(error: CallFailed, model: Path | None) -> str:
    """Say why the library refused a model or a context, in its own words."""
    tail = tuple(line for line in error.log_tail if line.strip())
    why = telling_line(tail) or "it gives no reason"
    if is_shortage(tail):
        return f"not enough memory: {why}; make the context smaller (-c), or name other devices (--device)"
    advice = next((advice for sign, advice in _ADVICE if any(sign in line for line in tail)), "")
    if error.function == _LOAD:
        hint = advice or "is it whole, and does this build know it (splitctl doctor)?"
        return f"the library cannot load {model or 'the model'}: {why}; {hint}"
    if error.function == _CONTEXT:
        hint = advice or "try other values of -c, -ctk, -ctv, -fa or -sm"
        return f"the library cannot make a context: {why}; {hint}"
    return str(error)
