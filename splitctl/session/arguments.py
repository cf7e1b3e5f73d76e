"""What callers give to a session, as it is used; anything else is refused by its name, with what is wanted."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from splitctl.carry.sampling import SamplerSpec
from splitctl.engine.engine import LoadedAdapter
from splitctl.errors import ConfigInvalid
from splitctl.outcome import Proof, Route
from splitctl.placement import Placement, number, whole

if TYPE_CHECKING:
    from llama_native import Model


def placement_of(value: object) -> Placement:
    """Refuse anything but a placement."""
    if not isinstance(value, Placement):
        wanted = "a Placement, such as session.placement.changed(mode='tensor')"
        raise ConfigInvalid("placement", value, wanted)
    return value


def adapters_of(pairs: object) -> list[LoadedAdapter]:
    """Read pairs of an adapter's file and its scale."""
    found = []
    for pair in pairs if isinstance(pairs, Iterable) else (pairs,):
        path, given = pair if isinstance(pair, tuple | list) and len(pair) == 2 else (None, None)
        scale = number(given)
        if not isinstance(path, str | os.PathLike) or scale is None:
            raise ConfigInvalid("adapters", pair, "pairs of a file and its scale, such as ('lora.gguf', 1.0)")
        found.append(LoadedAdapter(os.fspath(path), scale))
    return found


def text_of(value: object, model: Model) -> str | bytes:
    """Refuse anything but text, or its UTF-8 bytes, and a model that reads none."""
    if not model.has_tokenizer:
        raise ConfigInvalid("model", model.path, "a model with a tokenizer: this one reads numbers only")
    if not isinstance(value, str | bytes):
        raise ConfigInvalid("text", value, "text, or its UTF-8 bytes")
    try:
        return value.encode("utf-8") if isinstance(value, str) else value
    except UnicodeEncodeError as error:
        raise ConfigInvalid("text", value, "text that UTF-8 can hold (it has a lone surrogate)") from error


def tokens_of(value: object, n_vocab: int) -> list[int]:
    """Read a prompt: token ids of a vocabulary of ``n_vocab``, one at least; numpy's are as good as a list."""
    wanted = f"token ids, 0 to {n_vocab - 1} (session.tokenize makes them)"
    # A text is a sequence too, and bytes would be taken for the memory of an array.
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Iterable):
        raise ConfigInvalid("tokens", value, wanted)
    try:
        tokens = array("i", value)
    except (TypeError, OverflowError) as error:
        raise ConfigInvalid("tokens", value, wanted) from error
    if not tokens:
        raise ConfigInvalid("tokens", "none", "at least one token (the prompt is empty)")
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < n_vocab:
            raise ConfigInvalid("tokens", token, f"0 to {n_vocab - 1}, the model's vocabulary")
    return tokens.tolist()


def sampler_of(value: object) -> SamplerSpec:
    """Refuse anything but a specification of a sampler."""
    if not isinstance(value, SamplerSpec):
        raise ConfigInvalid("sampler", value, "a SamplerSpec, such as SamplerSpec(temp=0.0)")
    return value


def count_of(name: str, value: object) -> int:
    """Read a whole number; its range is the caller's business."""
    found = whole(value)
    if found is None:
        raise ConfigInvalid(name, value, "a whole number")
    return found


def sequences_of(value: object) -> Sequence[object]:
    """Read sequence ids; each of them is the caller's business."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise ConfigInvalid("seq_ids", value, "ids of sequences, such as (0,)")
    return tuple(value)


def proof_of(value: object) -> Proof:
    """Read a proof, or its word."""
    try:
        return Proof(value)
    except ValueError as error:
        raise ConfigInvalid("proof", value, "one of " + " ".join(one.value for one in Proof)) from error


def route_of(value: object) -> Route:
    """Read a route, or its word."""
    try:
        return Route(value)
    except ValueError as error:
        raise ConfigInvalid("via", value, "one of " + " ".join(one.value for one in Route)) from error


def timeout_of(value: object) -> float | None:
    """Read seconds, or None for as long as it takes."""
    found = None if value is None else number(value)
    if value is not None and (found is None or not found >= 0):
        raise ConfigInvalid("timeout_s", value, "seconds, 0 or more, or None for as long as it takes")
    return found
