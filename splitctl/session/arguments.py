"""What callers give to a session, as it is used; anything else is refused by its name, with what is wanted."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from splitctl.carry.sampling import MAX_GRAMMAR, SamplerSpec
from splitctl.engine.engine import LoadedAdapter
from splitctl.engine.sampler import Constraints
from splitctl.errors import ConfigInvalid
from splitctl.placement import Placement, SplitMode, number, whole

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llama_native import Model

Row = TypeVar("Row")


def target_of(value: object, changes: Mapping[str, object], now: Placement) -> Placement:
    """Read a placement, or what is to change of the one of now: a mode or its word, and fields by name."""
    if isinstance(value, str | SplitMode):
        if "mode" in changes:
            raise ConfigInvalid("mode", changes["mode"], "one mode, first or by name")
        changes, value = {"mode": value, **changes}, None
    elif value is not None and not isinstance(value, Placement):
        wanted = "a split mode such as 'tensor', or a Placement such as session.placement.changed(mode='tensor')"
        raise ConfigInvalid("placement", value, wanted)
    elif value is None and not changes:
        raise ConfigInvalid(
            "placement", value, "a split mode such as 'tensor', a Placement, or fields such as n_ctx=8192"
        )
    place = now if value is None else value
    return place.changed(**changes) if changes else place


def messages_of(value: object) -> tuple[Mapping[str, Any], ...]:
    """Read the messages of a chat; what is in them is the template's business."""
    wanted = "messages, such as [{'role': 'user', 'content': 'Hello'}]"
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ConfigInvalid("messages", value, wanted)
    messages = tuple(value)
    if not all(isinstance(one, Mapping) for one in messages):
        raise ConfigInvalid("messages", value, wanted)
    return messages


def stops_of(value: object) -> tuple[str, ...]:
    """Read texts that end an answer, or one alone."""
    return SamplerSpec(stop=value).stop  # type: ignore[arg-type] # it refuses what is no text


def constraints_of(grammar: object, processors: object) -> Constraints:
    """Read a grammar's text, and what changes logits."""
    if not isinstance(grammar, str):
        raise ConfigInvalid("grammar", grammar, 'a grammar in GBNF, such as \'root ::= "yes" | "no"\'')
    if len(grammar) > MAX_GRAMMAR:
        raise ConfigInvalid("grammar", f"{len(grammar)} characters", f"{MAX_GRAMMAR} at most")
    given: object = (processors,) if callable(processors) else processors
    found = tuple(given) if isinstance(given, Iterable) else (None,)
    if not all(map(callable, found)):
        raise ConfigInvalid("processors", processors, "functions of tokens and a row of logits")
    return Constraints(grammar, found)


def texts_of(value: object) -> tuple[Any, ...]:
    """Read texts, each as text or as tokens; or one text alone."""
    if isinstance(value, str | bytes):
        return (value,)
    if not isinstance(value, Iterable):
        raise ConfigInvalid("texts", value, "texts, each as text or as tokens")
    return tuple(value)


def bytes_of(value: object) -> memoryview:
    """Read the bytes of a state."""
    try:
        return memoryview(value).cast("B")  # type: ignore[arg-type] # it refuses what has no bytes
    except TypeError as error:
        raise ConfigInvalid("state", type(value).__name__, "bytes, such as session.state_bytes() gives") from error


def rows_of(value: object, reader: Callable[[object], Row]) -> dict[int, Row] | None:
    """Read rows by sequence; one alone is that of sequence 0."""
    if value is None:
        return None
    rows = value if isinstance(value, Mapping) else {0: value}
    return {count_of("seq_id", seq_id): reader(row) for seq_id, row in rows.items()}


def logits_of(value: object, n_vocab: int) -> NDArray[np.float32]:
    """Read a row of logits, or rows of which the last one counts."""
    wanted = f"float32[{n_vocab}] of numbers"
    try:
        row = np.array(value, np.float32)
    except (TypeError, ValueError) as error:
        raise ConfigInvalid("logits", value, wanted) from error
    if row.ndim == 2 and len(row):
        row = row[-1]
    if row.shape != (n_vocab,) or not bool((row < np.inf).all()):
        raise ConfigInvalid("logits", f"{row.dtype}{list(row.shape)}", wanted)
    return row


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
    # A text is a sequence too, bytes would be taken for the memory of an array, and a set has no order.
    if isinstance(value, str | bytes | bytearray | AbstractSet | Mapping) or not isinstance(value, Iterable):
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


def path_of(name: str, value: object) -> Path:
    """Read the path of a file."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigInvalid(name, value, "the path of a file")
    return Path(text)


def callable_of(name: str, value: object, wanted: str) -> None:
    """Refuse what cannot be called, but None."""
    if value is not None and not callable(value):
        raise ConfigInvalid(name, value, f"None, or {wanted}")
