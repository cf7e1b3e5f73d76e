"""What follows from a model's facts alone is worked out once: a process has one model as a rule, and asks again."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from splitctl.model.facts import ModelFacts

_Answer = TypeVar("_Answer")


def remembered(function: Callable[[ModelFacts], _Answer]) -> Callable[[ModelFacts], _Answer]:
    """Keep a function's answer for the facts that it was asked about last, by identity. Thread: any."""
    last: tuple[ModelFacts, _Answer] | None = None

    @wraps(function)
    def answer(facts: ModelFacts) -> _Answer:
        nonlocal last
        known = last
        if known is None or known[0] is not facts:
            known = last = (facts, function(facts))
        return known[1]

    return answer
