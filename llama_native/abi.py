"""Which struct layout a library has, found from what it writes and not from what it claims. Pure.

Laws:
    1. A layout is data: a fragment of C in ``cdefs/``, and in ``data/layouts.json`` the values that real builds answer.
    2. The library's default structs decide. Every byte of every known field must have been written, no byte behind the
       struct, and every field must hold the value that this layout's builds give it; pointers and callbacks are NULL.
       Padding may be written or not; behind the last field it must be zero.
    3. Exactly one known layout fits, or the library is refused with what was found and where the nearest one differs.
    4. The structs of one library come from one time: layouts that were never current together are refused.

How the bytes are got: on x86-64 a large struct is returned through a hidden first pointer, so the default functions can
be called as ``void *f(void *out)`` on a large buffer, filled with 0xA5 and then with 0x5A; what is equal in both was
written. Elsewhere only the values of a by-value return are at hand (``StructAnswer.written`` is None), and law 2 is
checked on values alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from llama_native.declarations import StructLayout
from llama_native.errors import UnsupportedAbi
from llama_native.layouts import STRUCTS, KnownLayout, StructAnswer, catalogue, known_layouts

FILLS = (0xA5, 0x5A)
"""The two bytes that a probing caller fills its buffers with."""

_MAX_SHOWN = 4
_OLD_FREE, _NEW_FREE = "llama_free_model", "llama_model_free"
_FORK_SYMBOLS = ("llama_set_offload_policy",)
_NEXT_ACTION = "use one of the builds named, or make a profile for this one with python -m tools.make_profile"


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything about a library that tells its layout."""

    model: StructAnswer
    """Of ``llama_model_default_params``."""
    context: StructAnswer
    """Of ``llama_context_default_params``."""
    batch: StructAnswer
    """Of ``llama_batch_get_one``, called with a non-NULL pointer and two tokens."""
    exports: frozenset[str]
    """Exported symbols; empty where they could not be listed."""


@dataclass(frozen=True, slots=True)
class Profile:
    """How to talk to a library: the layouts of the structs that cross the boundary and what its age implies."""

    name: str
    cdef: str
    """C text of the three structs; wants ``cdefs/types.h`` before it."""
    model: StructLayout
    context: StructLayout
    batch: StructLayout
    penalties_take_n_vocab: bool
    """Expectation, to be checked by a call: ``llama_sampler_init_penalties`` takes n_vocab first."""
    seen_in: tuple[str, ...]
    """Builds that have exactly these layouts; empty for a combination that lies between two known ones."""

    @property
    def model_fields(self) -> frozenset[str]:
        """Names of the fields of ``llama_model_params``."""
        return frozenset(field.name for field in self.model.fields)

    @property
    def context_fields(self) -> frozenset[str]:
        """Names of the fields of ``llama_context_params``."""
        return frozenset(field.name for field in self.context.fields)


def supported_builds() -> tuple[str, ...]:
    """List the builds that a session accepts, oldest first."""
    return tuple(build for row in catalogue().combinations if not row.refused for build in row.seen_in)


def identify(observed: Observed) -> Profile:
    """Find the layout of a library from what it wrote and what it exports.

    Raises:
        UnsupportedAbi: a fork, a layout that is not known, one that contradicts itself, or a build that is too old.
    """
    _refuse_fork(observed)
    found = {
        "model": _match("model", observed.model),
        "context": _match("context", observed.context),
        "batch": _match("batch", observed.batch),
    }
    rows = [
        row
        for row in catalogue().combinations
        if all(row.layouts[kind] == layout.name for kind, layout in found.items())
        and observed.exports.issuperset(row.exports)
    ]
    if not rows:
        return _between(found)
    row = max(rows, key=lambda candidate: len(candidate.exports))
    if row.refused:
        raise UnsupportedAbi(
            f"this is a build of the time of {', '.join(row.seen_in)} (layout {row.name}), {row.refused}",
            f"accepted are {', '.join(supported_builds())}",
            "install a newer build (pip install 'splitctl[cpu]')",
        )
    return _profile(row.name, found, row.penalties_take_n_vocab, row.seen_in)


def _profile(name: str, found: Mapping[str, KnownLayout], penalties: bool, seen_in: tuple[str, ...]) -> Profile:  # noqa: FBT001
    return Profile(
        name=name,
        cdef="".join(layout.cdef for layout in found.values()),
        model=found["model"].layout,
        context=found["context"].layout,
        batch=found["batch"].layout,
        penalties_take_n_vocab=penalties,
        seen_in=seen_in,
    )


def _refuse_fork(observed: Observed) -> None:
    exports = observed.exports
    marks = [f"exports {name}" for name in _FORK_SYMBOLS if name in exports]
    if _OLD_FREE in exports and _NEW_FREE not in exports:
        marks.append(f"exports {_OLD_FREE} without {_NEW_FREE}")
    if marks:
        (batch,) = known_layouts("batch")
        size = observed.batch.extent
        if size and not batch.layout.end <= size <= batch.layout.size:
            marks.append(f"its llama_batch has {size} bytes where llama.cpp's has {batch.layout.size}")
        raise UnsupportedAbi(
            "it looks like a fork of llama.cpp, such as ik_llama.cpp, or a build older than 2025: it "
            + " and ".join(marks),
            "a fork shares names with llama.cpp but not structs",
            f"use a llama.cpp build: {', '.join(supported_builds())}",
        )


def _match(kind: str, answer: StructAnswer) -> KnownLayout:
    struct_name = STRUCTS[kind]
    function = "llama_batch_get_one" if kind == "batch" else f"llama_{kind}_default_params"
    if not answer.values:
        raise UnsupportedAbi(f"it exports no {function}", f"without it the layout of {struct_name} cannot be seen")
    if answer.extent == len(answer.values):
        raise UnsupportedAbi(f"{function} wrote all {answer.extent} bytes of its buffer", "no known struct is so large")
    ranked = sorted(
        ((layout.differences(answer), layout) for layout in known_layouts(kind)), key=lambda pair: len(pair[0])
    )
    fitting = [layout for differences, layout in ranked if not differences]
    if fitting:
        # Where only values are known, a shorter struct also fits what a longer one wrote; the longer explains more.
        longest = max(layout.layout.end for layout in fitting)
        fitting = [layout for layout in fitting if layout.layout.end == longest]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise UnsupportedAbi(
            f"the answer of {function} fits several layouts: {', '.join(layout.describe() for layout in fitting)}",
            "the values alone do not tell them apart on this machine",
            _NEXT_ACTION,
        )
    differences, nearest = ranked[0]
    more = f", and {len(differences) - _MAX_SHOWN} more" if len(differences) > _MAX_SHOWN else ""
    size = "" if answer.extent is None else f" of {answer.extent} bytes"
    raise UnsupportedAbi(
        f"its {struct_name}{size} is not known",
        f"the nearest known is {nearest.describe()}, but {'; '.join(differences[:_MAX_SHOWN])}{more}",
        _NEXT_ACTION,
    )


def _between(found: Mapping[str, KnownLayout]) -> Profile:
    """Accept layouts that were never seen together when their times can have met, and refuse them otherwise."""
    dated = {kind: layout for kind, layout in found.items() if kind != "batch"}
    windows = [_window(layout) for layout in dated.values()]
    accepted = [row for row in catalogue().combinations if not row.refused]
    met = max(low for low, _ in windows) < min(high for _, high in windows)
    current = all(any(row.layouts[kind] == layout.name for row in accepted) for kind, layout in dated.items())
    if not (met and current):
        raise UnsupportedAbi(
            f"its structs contradict each other: {' with '.join(layout.describe() for layout in dated.values())}",
            "no llama.cpp build is known that had both",
            _NEXT_ACTION,
        )
    like = next(row for row in accepted if row.layouts["context"] == found["context"].name)
    return _profile(f"{found['model'].name}+{found['context'].name}", found, like.penalties_take_n_vocab, ())


def _window(layout: KnownLayout) -> tuple[float, float]:
    """Return the open interval of build numbers in which a layout can have been current."""
    neighbours = known_layouts(layout.kind)
    index = neighbours.index(layout)
    before = neighbours[index - 1].builds[1] if index else None
    after = neighbours[index + 1].builds[0] if index + 1 < len(neighbours) else None
    return (-math.inf if before is None else before, math.inf if after is None else after)
