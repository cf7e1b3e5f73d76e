"""Reads the function prototypes of C text, and holds those that are bound against a release's headers.

It reads what llama.h and ggml.h are written in; functions that take a function pointer in place are left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from llama_native.declarations import IDENTIFIER, POINTER_TYPEDEFS, strip

_KEYWORDS = frozenset({"const", "volatile", "struct", "enum", "unsigned", "signed"})
_PROTOTYPE = re.compile(r"(?:^|(?<=[;{}]))\s*(?P<result>[\w\s*]+?)\b(?P<name>\w+)\s*\((?P<arguments>[^()]*)\)\s*$")


@dataclass(frozen=True, slots=True)
class CrossedType:
    """What crosses a call in one place: the base type without qualifiers, and how many pointers deep it is."""

    base: str
    depth: int


@dataclass(frozen=True, slots=True)
class Prototype:
    """One function's declaration."""

    name: str
    result: CrossedType
    arguments: tuple[CrossedType, ...]


def _undeprecate(text: str) -> str:
    """Turn ``DEPRECATED(prototype, "hint");`` into the prototype, quotes and all."""
    text = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)
    return re.sub(r"\bDEPRECATED\s*\((.*?),\s*(?:\"\"\s*)+\)\s*;", r"\1;", text, flags=re.DOTALL)


def prototypes(text: str) -> dict[str, tuple[Prototype, ...]]:
    """Read every function prototype.

    Args:
        text: C text; functions that take a function pointer in place (not by typedef) are left out.

    Returns:
        Name -> its prototypes (more than one where a text declares variants).
    """
    found: dict[str, tuple[Prototype, ...]] = {}
    plain = re.sub(r"\{[^{}]*\}", " ", _undeprecate(strip(text)))
    plain = re.sub(r"\{[^{}]*\}", " ", plain)
    for statement in plain.split(";"):
        words = " ".join(statement.split())
        match = _PROTOTYPE.search(words)
        if match is None or "typedef" in words or not match.group("result").strip(" *"):
            continue
        arguments = [part.strip() for part in match.group("arguments").split(",")]
        if arguments in (["void"], [""]):
            arguments = []
        prototype = Prototype(
            match.group("name"),
            _crossed(match.group("result"), named=False),
            tuple(_crossed(argument, named=True) for argument in arguments),
        )
        if prototype not in found.get(prototype.name, ()):
            found[prototype.name] = (*found.get(prototype.name, ()), prototype)
    return found


def _crossed(text: str, *, named: bool) -> CrossedType:
    depth = text.count("*") + text.count("[")
    words = [word for word in IDENTIFIER.findall(text.split("[", maxsplit=1)[0]) if word not in _KEYWORDS]
    if named and len(words) > 1:
        words.pop()
    return CrossedType(" ".join(words) or "int", depth)


def prototype_differences(bound: str, header: str) -> tuple[str, ...]:
    """Hold bound prototypes against a header: number of arguments and pointer depth of each place.

    Args:
        bound: our C text (``cdefs/api.h`` and the like).
        header: the text of the headers of one release; functions that it lacks are passed over.

    Returns:
        One line a difference, empty where all agree. A bound function with variants must match in one of them.
    """
    theirs = prototypes(header)
    lines = []
    for name, variants in prototypes(bound).items():
        if name not in theirs or any(_alike(ours, other) for ours in variants for other in theirs[name]):
            continue
        wanted = " or ".join(_shape(other) for other in theirs[name])
        lines.append(f"{name}: bound as {' or '.join(map(_shape, variants))}, the header says {wanted}")
    return tuple(lines)


def _alike(ours: Prototype, other: Prototype) -> bool:
    return (
        _depth(ours.result) == _depth(other.result)
        and len(ours.arguments) == len(other.arguments)
        and all(_depth(a) == _depth(b) for a, b in zip(ours.arguments, other.arguments, strict=True))
    )


def _depth(crossed: CrossedType) -> int:
    return crossed.depth + (crossed.base in POINTER_TYPEDEFS or crossed.base.endswith("_callback"))


def _shape(prototype: Prototype) -> str:
    inside = ", ".join(crossed.base + "*" * crossed.depth for crossed in prototype.arguments)
    return f"{prototype.result.base}{'*' * prototype.result.depth}({inside})"
