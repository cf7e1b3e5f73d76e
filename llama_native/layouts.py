"""The known struct layouts, which are data, and how a library's answer is held against one of them."""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from llama_native import declarations
from llama_native.declarations import Field, StructLayout

STRUCTS: Mapping[str, str] = {"model": "llama_model_params", "context": "llama_context_params", "batch": "llama_batch"}
"""Kind -> struct tag."""


@dataclass(frozen=True, slots=True)
class StructAnswer:
    """What one function wrote into a caller's buffer.

    ``values``: the buffer's bytes; empty where the function is absent.
    ``written``: per byte, whether the library wrote it; None where that cannot be known.
    """

    values: bytes
    written: tuple[bool, ...] | None

    @classmethod
    def from_fills(cls, first: bytes, second: bytes) -> StructAnswer:
        """Compare buffers of one length that were filled with the bytes of ``FILLS``; what is equal was written."""
        return cls(first, tuple(a == b for a, b in zip(first, second, strict=True)))

    @property
    def extent(self) -> int | None:
        """Bytes up to the last written one; None where that cannot be known."""
        if self.written is None:
            return None
        return max((index + 1 for index, was in enumerate(self.written) if was), default=0)


@dataclass(frozen=True, slots=True)
class KnownLayout:
    """One layout of one struct, with the values that its builds answer."""

    kind: str
    name: str
    layout: StructLayout
    cdef: str
    defaults: Mapping[str, float | str | None]
    """Field -> the value it must have; None is a NULL pointer; "positive" and "given" (a pointer) are rules."""
    builds: tuple[int | None, int | None]
    """Lowest and highest llama.cpp build number that was seen with it; None where not known."""
    seen_in: tuple[str, ...]

    def differences(self, answer: StructAnswer) -> tuple[str, ...]:
        """Tell how a library's answer differs from this layout: a phrase each, offsets in bytes.

        Empty where it fits.
        """
        found: list[str] = []
        extent = answer.extent
        if extent is not None and not self.layout.end <= extent <= self.layout.size:
            found.append(f"{extent} bytes are written, not {_range(self.layout.end, self.layout.size)}")
        if extent is not None and any(answer.values[self.layout.end : min(extent, self.layout.size)]):
            found.append(f"what is written behind its last field, at offset {self.layout.end}, is not zero")
        for field in self.layout.fields:
            difference = _field_difference(field, self.defaults[field.name], answer)
            if difference:
                found.append(difference)
        return tuple(found)

    def describe(self) -> str:
        """Return one phrase that names the layout and builds that have it."""
        return f"{self.layout.name} {self.name} ({self.layout.size} bytes: {', '.join(self.seen_in)})"


@dataclass(frozen=True, slots=True)
class Combination:
    """One row of the table of profiles."""

    name: str
    layouts: Mapping[str, str]
    penalties_take_n_vocab: bool
    exports: tuple[str, ...]
    refused: str
    seen_in: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The whole table: every layout of each kind, and the combinations that were seen, oldest first."""

    layouts: Mapping[str, tuple[KnownLayout, ...]]
    combinations: tuple[Combination, ...]


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


def _field_difference(field: Field, wanted: float | str | None, answer: StructAnswer) -> str:
    where = f"{field.name} at offset {field.offset}"
    if field.end > len(answer.values):
        return f"{where} lies behind what was returned"
    if answer.written is not None and not all(answer.written[field.offset : field.end]):
        return f"{where} is not written"
    (value,) = struct.unpack_from(f"={_struct_code(field)}", answer.values, field.offset)
    shown = "NULL" if field.code == "P" and not value else hex(value) if field.code == "P" else f"{value:g}"
    if _fits(value, wanted):
        return ""
    return f"{where} is {shown}, not {'NULL' if wanted is None else wanted}"


def _struct_code(field: Field) -> str:
    if field.code in {"P", "N"}:
        return "Q" if field.size == 8 else "I"
    return "B" if field.code == "?" else field.code


def _fits(value: float, wanted: float | str | None) -> bool:
    if wanted is None:
        return value == 0
    if wanted == "positive":
        return 0 < value < 2**16
    if wanted == "given":
        return value != 0
    return not isinstance(wanted, str) and math.isfinite(value) and value == wanted


@functools.cache
def catalogue() -> Catalogue:
    """Read the table of layouts and profiles; once in a process."""
    package = resources.files("llama_native")
    data: dict[str, Any] = json.loads(package.joinpath("data", "layouts.json").read_text(encoding="utf-8"))
    layouts = {}
    for kind, struct_name in STRUCTS.items():
        known = []
        for row in data["layouts"][kind]:
            header = f"{struct_name.removeprefix('llama_')}_{row['name']}.h"
            cdef = package.joinpath("cdefs", header).read_text(encoding="utf-8")
            low, high = row["builds"]
            layout = declarations.struct_layout(cdef, struct_name, pointer_size=struct.calcsize("P"))
            known.append(
                KnownLayout(kind, row["name"], layout, cdef, row["defaults"], (low, high), tuple(row["seen_in"]))
            )
        layouts[kind] = tuple(known)
    combinations = tuple(
        Combination(
            name=row["name"],
            layouts={kind: row[kind] for kind in STRUCTS},
            penalties_take_n_vocab=row["penalties_take_n_vocab"],
            exports=tuple(row["exports"]),
            refused=row["refused"],
            seen_in=tuple(row["seen_in"]),
        )
        for row in data["profiles"]
    )
    return Catalogue(layouts, combinations)


def known_layouts(kind: str) -> tuple[KnownLayout, ...]:
    """List the known layouts of one struct ("model", "context" or "batch"), oldest first."""
    return catalogue().layouts[kind]
