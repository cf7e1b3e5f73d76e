"""The constructor arguments of ``llama_cpp.Llama`` (0.3.36): used, ignored with a warning, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llama_native import KvType
from splitctl.errors import ConfigInvalid
from splitctl.placement import FlashAttn, Placement, SplitMode, whole
from splitctl.session import arguments as session_arguments

DEFAULT_SEED = 0xFFFFFFFF

SPLIT_MODES = (SplitMode.NONE, SplitMode.LAYER, SplitMode.ROW, SplitMode.TENSOR)
"""By llama_split_mode. Source: llama.h."""

POOLINGS: Mapping[int, str | None] = {-1: None, 1: "mean", 2: "cls", 3: "last"}
"""By enum llama_pooling_type. Source: llama.h."""

#: Have no effect here, by what they would do. The value that says nothing comes first.
IGNORED: Mapping[str, tuple[Any, str]] = {
    "use_mmap": (True, "weights are mapped wherever the build can"),
    "use_mlock": (False, "weights are not locked; the `weights` argument has a pinned copy"),
    "numa": (False, "numactl does it for the process"),
    "no_perf": (False, "the library's own timings are always off"),
    "op_offload": (None, "the library's default holds"),
    "swa_full": (None, "a window's cache is as large as the window"),
    "spm_infill": (False, "there is no infill"),
    "draft_model": (None, "the same tokens come without drafts"),
    # Of older releases; LangChain always gives -1 and True.
    "n_parts": (-1, "the file says how many parts there are"),
    "f16_kv": (True, "type_k and type_v name the types of the cache"),
}
#: Would change what the model computes, or needs what is not here: refused, but for the value that says nothing.
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "kv_overrides": ((None, {}), "None (write the keys into the file: gguf-set-metadata)"),
    "rope_scaling_type": ((-1, None), "-1, as the file says"),
    # LangChain gives 10000 and 1 where its user gives nothing.
    "rope_freq_base": ((0.0, 10000.0), "0.0, as the file says"),
    "rope_freq_scale": ((0.0, 1.0), "0.0, as the file says"),
    "yarn_ext_factor": ((-1.0, 0.0), "-1.0, as the file says"),
    "yarn_attn_factor": ((1.0, 0.0), "1.0"),
    "yarn_beta_fast": ((32.0, 0.0), "32.0"),
    "yarn_beta_slow": ((1.0, 0.0), "1.0"),
    "yarn_orig_ctx": ((0,), "0, as the file says"),
    "attention_type": ((-1,), "-1, as the file says"),
    "lora_base": ((None,), "None (lora_path alone: the adapter is applied to the model as it is)"),
}


def check(given: Mapping[str, Any]) -> None:
    """Refuse and warn by name.

    Args:
        given: arguments that are in neither list of what is used.

    Raises:
        ConfigInvalid: one would change what the model computes.
    """
    for name, value in given.items():
        if name in REFUSED:
            nothing, wanted = REFUSED[name]
            if value not in nothing:
                raise ConfigInvalid(name, value, f"{wanted}; splitctl.compat cannot set it")
        elif name in IGNORED:
            nothing, why = IGNORED[name]
            if value != nothing:
                _warn(f"{name}={value!r} is ignored: {why}")
        else:
            _warn(f"{name} is no argument of llama_cpp.Llama 0.3, and is ignored")


def _warn(text: str) -> None:
    warnings.warn(f"splitctl.compat: {text}", stacklevel=4)


def placement_of(
    *,
    n_gpu_layers: int | None,
    split_mode: int | str | SplitMode,
    tensor_split: Sequence[float] | None,
    devices: Sequence[str] | str,
    n_ctx: int,
    n_batch: int,
    n_ubatch: int,
    n_threads: int | None,
    n_threads_batch: int | None,
    flash_attn: bool | str | None,
    type_k: int | str | None,
    type_v: int | str | None,
    **same: Any,
) -> Placement:
    """Give the placement that the arguments ask for; ``same`` has those that are fields of it as they stand.

    Raises:
        ConfigInvalid: one of them is of another kind or out of range.
    """
    sizes = {"n_ctx": n_ctx, "n_batch": n_batch, "n_ubatch": n_ubatch}
    for name, size in sizes.items():
        if whole(size) is None:
            raise ConfigInvalid(name, size, "a whole number of tokens")
    if n_ctx:
        n_batch = min(n_ctx, n_batch)
    return Placement(
        mode=mode_of(split_mode),
        devices=devices or (),  # type: ignore[arg-type] # it takes a text with commas
        tensor_split=_shares(tensor_split),
        n_gpu_layers=(-1 if devices else 0) if n_gpu_layers is None else n_gpu_layers,
        n_ctx=n_ctx,
        type_k=_cache_type("type_k", type_k),
        type_v=_cache_type("type_v", type_v),
        flash_attn=FlashAttn.AUTO if flash_attn is None else flash_attn,  # type: ignore[arg-type] # it takes words
        n_batch=n_batch,
        n_ubatch=min(n_batch, n_ubatch),
        n_threads=n_threads or 0,
        n_threads_batch=n_threads_batch or 0,
        **same,
    )


def tokens_of(value: Any, n_vocab: int) -> list[int]:
    """Read token ids, of whichever type, or none; ConfigInvalid where one is not in the vocabulary."""
    return [] if hasattr(value, "__len__") and not len(value) else session_arguments.tokens_of(value, n_vocab)


def mode_of(split_mode: object) -> SplitMode:
    """Read a split mode: a number of ``llama_split_mode``, a word, or one of ours."""
    number = whole(split_mode)
    if number is not None and 0 <= number < len(SPLIT_MODES):
        return SPLIT_MODES[number]
    try:
        return SplitMode(split_mode.lower() if isinstance(split_mode, str) else split_mode)
    except ValueError as error:
        wanted = "one of none layer row tensor, or LLAMA_SPLIT_MODE_*"
        raise ConfigInvalid("split_mode", split_mode, wanted) from error


def _shares(shares: Any) -> Any:
    """Read a tensor split; zeros at the end stand for devices that are not there."""
    if shares is None or isinstance(shares, str) or not isinstance(shares, Iterable):
        return shares  # a placement reads it, or refuses it
    found = tuple(shares)
    while len(found) > 1 and found[-1] == 0:
        found = found[:-1]
    return found if any(found) else None


def _cache_type(name: str, value: int | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or "f16"
    try:
        return KvType(value).name.lower()
    except ValueError as error:
        wanted = "a ggml_type of a cache, such as 1 (f16) or 8 (q8_0), or its word"
        raise ConfigInvalid(name, value, wanted) from error
