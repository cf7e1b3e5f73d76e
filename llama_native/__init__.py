"""Talks to a libllama through cffi; knows its calls, not what state bytes mean.

Main path: ``Library.open`` (the only dlopen; layout established by looking) -> ``Model.load`` -> ``Context`` ->
``state_get`` / ``state_set``; ``SamplerChain`` works on the caller's candidates. No cdata crosses the package's edge.
"""

from __future__ import annotations

from llama_native import capabilities, discover
from llama_native.context import Context
from llama_native.devices import Device, DeviceKind
from llama_native.errors import (
    CallFailed,
    CapabilityMissing,
    ForkedProcess,
    HandleClosed,
    LibraryNotFound,
    LibraryUnusable,
    LoadCancelled,
    NativeError,
    Reentered,
    RpcServerUnusable,
    SecondLibrary,
    TensorUnknown,
    UnknownDevice,
    UnsupportedAbi,
)
from llama_native.foreign import ForeignContext, library_file
from llama_native.library import Library
from llama_native.logs import LogTail
from llama_native.model import Adapter, Model
from llama_native.params import ContextParams, FlashAttn, KvType, LoadMode, ModelParams, SplitMode
from llama_native.pinning import Pin, link_gb_s, pin, pinnable
from llama_native.rpc import greet as greet_rpc_server
from llama_native.sampling import CANDIDATE_BYTES, ChainParams, Grammar, SamplerChain
from llama_native.state import (
    sequence_state_get,
    sequence_state_set,
    sequence_state_size,
    state_get,
    state_set,
    state_size,
)
from llama_native.user_model import Weights, load_user_model

__all__ = [
    "CANDIDATE_BYTES",
    "Adapter",
    "CallFailed",
    "CapabilityMissing",
    "ChainParams",
    "Context",
    "ContextParams",
    "Device",
    "DeviceKind",
    "FlashAttn",
    "ForeignContext",
    "ForkedProcess",
    "Grammar",
    "HandleClosed",
    "KvType",
    "Library",
    "LibraryNotFound",
    "LibraryUnusable",
    "LoadCancelled",
    "LoadMode",
    "LogTail",
    "Model",
    "ModelParams",
    "NativeError",
    "Pin",
    "Reentered",
    "RpcServerUnusable",
    "SamplerChain",
    "SecondLibrary",
    "SplitMode",
    "TensorUnknown",
    "UnknownDevice",
    "UnsupportedAbi",
    "Weights",
    "capabilities",
    "discover",
    "greet_rpc_server",
    "library_file",
    "link_gb_s",
    "load_user_model",
    "pin",
    "pinnable",
    "sequence_state_get",
    "sequence_state_set",
    "sequence_state_size",
    "state_get",
    "state_set",
    "state_size",
]
