"""What a build can do: a table from a capability's name to the symbols that give it.

A capability with alternatives is there when any one of its alternatives is exported whole.
Symbols are looked up lazily, so a name that a newer release removed harms only what needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llama_native.errors import CapabilityMissing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CAPABILITIES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "load": (("llama_model_default_params", "llama_model_load_from_file", "llama_model_free", "llama_backend_init"),),
    "context": (("llama_context_default_params", "llama_init_from_model", "llama_free", "llama_n_ctx"),),
    "decode": (("llama_decode", "llama_get_logits_ith", "llama_synchronize"),),
    "encode": (("llama_encode", "llama_model_has_encoder"),),
    "vocab": (("llama_model_get_vocab", "llama_vocab_n_tokens", "llama_tokenize", "llama_token_to_piece"),),
    "memory": (
        (
            "llama_get_memory",
            "llama_memory_clear",
            "llama_memory_seq_rm",
            "llama_memory_seq_cp",
            "llama_memory_seq_pos_min",
            "llama_memory_seq_pos_max",
        ),
        (
            "llama_kv_self_clear",
            "llama_kv_self_seq_rm",
            "llama_kv_self_seq_cp",
            "llama_kv_self_seq_pos_min",
            "llama_kv_self_seq_pos_max",
        ),
    ),
    "shift": (
        ("llama_memory_seq_add", "llama_memory_can_shift"),
        ("llama_kv_self_seq_add", "llama_kv_self_can_shift"),
    ),
    "state": (("llama_state_get_size", "llama_state_get_data", "llama_state_set_data"),),
    "sequence-state": (("llama_state_seq_get_size", "llama_state_seq_get_data", "llama_state_seq_set_data"),),
    "samplers": (
        (
            "llama_sampler_chain_init",
            "llama_sampler_chain_add",
            "llama_sampler_apply",
            "llama_sampler_accept",
            "llama_sampler_free",
            "llama_sampler_init_dist",
            "llama_sampler_init_greedy",
        ),
    ),
    "grammar": (("llama_sampler_init_grammar",),),
    "devices": (
        ("ggml_backend_dev_count", "ggml_backend_dev_get", "ggml_backend_dev_name", "ggml_backend_dev_memory"),
    ),
    "load-backends": (("ggml_backend_load_all_from_path",),),
    "adapters": (("llama_adapter_lora_init", "llama_set_adapters_lora", "llama_adapter_lora_free"),),
    "user-model": (("llama_model_init_from_user", "gguf_init_empty", "ggml_backend_tensor_set"),),
    "model-from-memory": (("llama_model_init_from_user", "gguf_init_from_file", "ggml_backend_tensor_set"),),
    "model-from-file-with": (("llama_model_load_from_file_with", "ggml_backend_tensor_set"),),
    # A build that keeps its backends in files of their own exports nothing of it: rpc.is_there looks in the registry.
    "rpc": (("ggml_backend_rpc_add_server", "ggml_backend_register"),),
    "native-switch": (("llama_context_set_split_mode", "llama_model_get_split_mode"),),
}
"""Name -> alternatives; each alternative is a tuple of symbols that are all needed."""

REQUIRED: tuple[str, ...] = ("load", "context", "decode", "vocab", "memory", "state", "samplers", "devices")
"""What a session cannot do without."""


def detect(exported: Callable[[str], bool]) -> dict[str, tuple[str, ...]]:
    """Tell which capabilities a library has: name -> the symbols of the alternative that is there."""
    found: dict[str, tuple[str, ...]] = {}
    for name, alternatives in CAPABILITIES.items():
        for symbols in alternatives:
            if all(map(exported, symbols)):
                found[name] = symbols
                break
    return found


def require(found: Mapping[str, tuple[str, ...]], exported: Callable[[str], bool]) -> None:
    """Refuse a library that lacks something a session cannot do without.

    Raises:
        CapabilityMissing: naming every missing symbol of every required capability at once.
    """
    lacking = [name for name in REQUIRED if name not in found]
    if lacking:
        missing = tuple(
            " or ".join("+".join(s for s in symbols if not exported(s)) for symbols in CAPABILITIES[name])
            for name in lacking
        )
        raise CapabilityMissing(", ".join(lacking), missing)
