"""Everything of a carry that is not a tensor, to JSON texts and back, strictly.

Laws:
    1. ``from_texts(to_texts(d))`` says the same as ``d``, and ``to_texts`` of that gives the same texts.
    2. A field that has a default may be absent: the carry was written before the field came. Every other difference in
       the fields is refused.
    3. A field of a sequence that has its default is not written: without it a carry is what it was before it came.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from splitctl.carry.fingerprint import Adapter, Fingerprint, Identity, Representation
from splitctl.carry.sampling import SamplerSpec
from splitctl.errors import SplitctlError
from splitctl.placement import Placement


@dataclass(frozen=True, slots=True)
class SequenceWords:
    """A sequence without its tensors; the fields are those of ``SequenceCarry``.

    Args:
        seq_id: its id.
        n_past: positions in the memory.
        n_draws: random draws made.
        sampler: how the next token is chosen.
        grammar: what it follows.
        n_ruled: tokens drawn since that began.
    """

    seq_id: int
    n_past: int
    n_draws: int
    sampler: SamplerSpec
    grammar: str = ""
    n_ruled: int = 0


@dataclass(frozen=True, slots=True)
class Words:
    """A carry without its tensors; the fields are those of ``Carry``.

    Args:
        fingerprint: what it belongs to.
        placement: where it was made.
        adapters: adapters with their files.
        sequences: one entry a sequence.
        texts: the texts that it was read from, which the checksum covers; None: it was not read.
    """

    fingerprint: Fingerprint
    placement: Placement
    adapters: tuple[Adapter, ...]
    sequences: tuple[SequenceWords, ...]
    texts: Mapping[str, str] | None = field(default=None, compare=False)


_TEXTS: Mapping[str, Any] = {
    "identity": Identity,
    "representation": Representation,
    "placement": Placement,
    "adapters": tuple[Adapter, ...],
    "sequences": tuple[SequenceWords, ...],
}
_RECORDS: Mapping[Any, Mapping[str, Any]] = {
    kind: get_type_hints(kind) for kind in (Identity, Representation, Adapter, SequenceWords, SamplerSpec)
}


def to_texts(words: Words) -> dict[str, str]:
    """Turn words into JSON texts in ASCII by name, always the same texts for the same words."""
    values = {
        "identity": words.fingerprint.identity,
        "representation": words.fingerprint.representation,
        "placement": words.placement,
        "adapters": words.adapters,
        "sequences": words.sequences,
    }
    return {name: dump(_plain(hint, values[name])) for name, hint in _TEXTS.items()}


def from_texts(texts: Mapping[str, str]) -> Words:
    """Read texts back by name; names that are not of ``to_texts`` are not looked at.

    Raises:
        ValueError: something is missing, too much, of another kind or out of its range; it says what.
    """
    if missing := [name for name in _TEXTS if name not in texts]:
        raise ValueError(f"{missing[0]} is missing")
    try:
        values = {name: _value(name, hint, json.loads(texts[name])) for name, hint in _TEXTS.items()}
    except (SplitctlError, RecursionError) as error:
        raise ValueError(str(error)) from error
    fingerprint = Fingerprint(values.pop("identity"), values.pop("representation"))
    return Words(fingerprint, **values, texts={name: texts[name] for name in _TEXTS})


def dump(value: object) -> str:
    """Give the one JSON text of a value: ASCII, keys sorted, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _entries(hint: Any, n: int) -> tuple[Any, ...]:
    """Give the type of each of ``n`` entries of a tuple."""
    inner = get_args(hint)
    return inner[:1] * n if inner[-1] is Ellipsis else inner


def _absent(value: SequenceWords) -> tuple[str, ...]:
    return tuple(one.name for one in fields(value) if getattr(value, one.name) == one.default)


def _plain(hint: Any, value: Any) -> Any:
    if hint is Placement:
        # Through its own reader first: a share given as 3 comes back as 3.0.
        return Placement.from_json(value.to_json()).to_json()
    if hint in _RECORDS:
        absent = _absent(value) if hint is SequenceWords else ()
        return {
            name: _plain(inner, getattr(value, name)) for name, inner in _RECORDS[hint].items() if name not in absent
        }
    if get_origin(hint) is tuple:
        return [_plain(inner, one) for inner, one in zip(_entries(hint, len(value)), value, strict=True)]
    # A scale or temperature given as 1 would come back as 1.0.
    return float(value) if hint is float else str(value) if hint is Path else value


def _value(what: str, hint: Any, value: Any) -> Any:
    if hint is Placement:
        return Placement.from_json(_kind(what, value, dict))
    if hint in _RECORDS:
        document, known = _kind(what, value, dict), _RECORDS[hint]
        needed = {one.name for one in fields(hint) if one.default is MISSING}
        if document.keys() - known.keys() or needed - document.keys():
            raise ValueError(f"{what} has the fields {', '.join(sorted(document))}, wanted {', '.join(sorted(known))}")
        return hint(**{name: _value(f"{what} {name}", known[name], one) for name, one in document.items()})
    if get_origin(hint) is tuple:
        entries = _kind(what, value, list)
        inner = _entries(hint, len(entries))
        if len(inner) != len(entries):
            raise ValueError(f"{what} has an entry of {len(entries)}, wanted pairs")
        return tuple(_value(what.removesuffix("s"), one, entry) for one, entry in zip(inner, entries, strict=True))
    return Path(_kind(what, value, str)) if hint is Path else _kind(what, value, hint)


def _kind(what: str, value: Any, kind: Any) -> Any:
    if type(value) is kind and (kind is not float or math.isfinite(value)):
        return value
    raise ValueError(f"{what} is {value!r:.60}, wanted a {'finite ' if kind is float else ''}{kind.__name__}")
