"""What a carry says in words: everything of it that is not a tensor, to JSON texts and back, strictly.

Law: ``from_texts(to_texts(d))`` says the same as ``d``, and ``to_texts`` of that gives the same texts, so that one
checksum of the texts serves in memory and on disk.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splitctl.carry.fingerprint import Adapter, Fingerprint, Identity, Representation
from splitctl.carry.sequence import SamplerSpec
from splitctl.errors import SplitctlError
from splitctl.placement import Placement

if TYPE_CHECKING:
    from collections.abc import Mapping

Kinds = dict[str, type]

_IDENTITY: Kinds = {
    "header_xxh3_128": str,
    "header_bytes": int,
    "file_bytes": int,
    "architecture": str,
    "n_vocab": int,
    "rope": list,
    "adapters": list,
}
_REPRESENTATION: Kinds = {
    "build": str,
    "type_k": str,
    "type_v": str,
    "v_trans": bool,
    "n_stream": int,
    "n_seq_max": int,
    "state_version": int,
}
_ADAPTER: Kinds = {"path": str, "xxh3_128": str, "scale": float}
_SAMPLER: Kinds = {
    "temp": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repeat_penalty": float,
    "repeat_last_n": int,
    "seed": int,
    "stop": list,
}
_SEQUENCE: Kinds = {"seq_id": int, "n_past": int, "n_draws": int, "sampler": dict}
_TEXTS = ("identity", "representation", "placement", "adapters", "sequences")


@dataclass(frozen=True, slots=True)
class SequenceWords:
    """A sequence without its tensors; the fields are those of ``SequenceCarry``.

    Args:
        seq_id: its id.
        n_past: positions in the memory.
        n_draws: random draws made.
        sampler: how the next token is chosen.
    """

    seq_id: int
    n_past: int
    n_draws: int
    sampler: SamplerSpec


@dataclass(frozen=True, slots=True)
class Words:
    """A carry without its tensors; the fields are those of ``Carry``.

    Args:
        fingerprint: what it belongs to.
        placement: where it was made.
        adapters: adapters with their files.
        sequences: one entry a sequence.
    """

    fingerprint: Fingerprint
    placement: Placement
    adapters: tuple[Adapter, ...]
    sequences: tuple[SequenceWords, ...]


def to_texts(words: Words) -> dict[str, str]:
    """Turn words into texts, always the same texts for the same words.

    Args:
        words: what is to be said.

    Returns:
        Name -> JSON text in ASCII.
    """
    identity, representation = words.fingerprint.identity, words.fingerprint.representation
    scales = [(checksum, float(scale)) for checksum, scale in identity.adapters]
    return {
        "identity": dump({**_given(_IDENTITY, identity), "adapters": scales}),
        "representation": dump(_given(_REPRESENTATION, representation)),
        # Through its own reader first: a share given as 3 comes back as 3.0.
        "placement": dump(Placement.from_json(words.placement.to_json()).to_json()),
        "adapters": dump([_given(_ADAPTER, one) for one in words.adapters]),
        "sequences": dump(
            [{**_given(_SEQUENCE, one), "sampler": _given(_SAMPLER, one.sampler)} for one in words.sequences]
        ),
    }


def from_texts(texts: Mapping[str, str]) -> Words:
    """Read texts back.

    Args:
        texts: name -> JSON text; names that are not of ``to_texts`` are not looked at.

    Returns:
        The words.

    Raises:
        ValueError: something is missing, too much, of another kind or out of its range; it says what.
    """
    try:
        identity, representation, placement, adapters, sequences = (_load(texts, name) for name in _TEXTS)
        identity = _taken("identity", _IDENTITY, identity)
        identity["rope"] = _pairs("rope", identity["rope"], str)
        identity["adapters"] = _pairs("adapters", identity["adapters"], float)
        return Words(
            Fingerprint(
                Identity(**identity), Representation(**_taken("representation", _REPRESENTATION, representation))
            ),
            Placement.from_json(_kind("placement", placement, dict)),
            tuple(_adapter(one) for one in _kind("adapters", adapters, list)),
            tuple(_sequence(one) for one in _kind("sequences", sequences, list)),
        )
    except (SplitctlError, RecursionError) as error:
        raise ValueError(str(error)) from error


def dump(value: object) -> str:
    """Give the one JSON text of a value.

    Args:
        value: what JSON can hold.

    Returns:
        ASCII, keys sorted, no spaces.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _given(kinds: Kinds, value: object) -> dict[str, Any]:
    return {name: _plain(getattr(value, name), kind) for name, kind in kinds.items()}


def _plain(value: Any, kind: type) -> Any:
    # A scale or temperature given as 1 would come back as 1.0.
    return float(value) if kind is float else str(value) if kind is str else value


def _load(texts: Mapping[str, str], name: str) -> Any:
    if name not in texts:
        text = f"{name} is missing"
        raise ValueError(text)
    return json.loads(texts[name])


def _taken(what: str, kinds: Kinds, value: object) -> dict[str, Any]:
    document = _kind(what, value, dict)
    if document.keys() != kinds.keys():
        text = f"{what} has the fields {', '.join(sorted(document))}, wanted {', '.join(sorted(kinds))}"
        raise ValueError(text)
    return {name: _kind(f"{what} {name}", document[name], kind) for name, kind in kinds.items()}


def _kind(what: str, value: Any, kind: type) -> Any:
    if kind is float and isinstance(value, float) and math.isfinite(value):
        return value
    if kind is not float and type(value) is kind:
        return value
    text = f"{what} is {value!r:.60}, wanted a {'finite ' if kind is float else ''}{kind.__name__}"
    raise ValueError(text)


def _pairs(what: str, value: list[Any], second: type) -> tuple[tuple[str, Any], ...]:
    pairs = []
    for one in value:
        pair = _kind(what, one, list)
        if len(pair) != 2:
            text = f"{what} has an entry of {len(pair)}, wanted pairs"
            raise ValueError(text)
        pairs.append((_kind(what, pair[0], str), _kind(what, pair[1], second)))
    return tuple(pairs)


def _adapter(value: object) -> Adapter:
    fields = _taken("adapter", _ADAPTER, value)
    return Adapter(Path(fields["path"]), fields["xxh3_128"], fields["scale"])


def _sequence(value: object) -> SequenceWords:
    fields = _taken("sequence", _SEQUENCE, value)
    sampler = _taken("sampler", _SAMPLER, fields["sampler"])
    sampler["stop"] = tuple(_kind("sampler stop", one, str) for one in sampler["stop"])
    return SequenceWords(fields["seq_id"], fields["n_past"], fields["n_draws"], SamplerSpec(**sampler))
