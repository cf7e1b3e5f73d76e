"""Raises as a signal's handler would, at every place where Python looks for signals, one after the other."""

from __future__ import annotations

import dis
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, ModuleType
from typing import Any


class Interrupted(BaseException):
    """What the handler raises."""


class Interruption:
    """Raises once in a module, at its ``n``-th place (from 1) on the way; ``where`` says where it was, "" for not.

    Python looks for signals where a function begins, after a call and at a jump back.
    """

    def __init__(self, n: int, module: ModuleType) -> None:
        self._left = n
        self._file = module.__file__
        self.where = ""

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Raise in what this thread does in the block, which swallows it."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        except Interrupted:
            pass
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename != self._file:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in _places(frame.f_code):
            self._left -= 1
            if not self._left:
                self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
                raise Interrupted
        return self._trace


@functools.cache
def _places(code: CodeType) -> frozenset[int]:
    """Where the instructions begin before which Python has looked for signals, bytes."""
    steps = list(dis.get_instructions(code))
    looks = ("CALL", "RESUME", "JUMP_BACKWARD")
    return frozenset(after.offset for one, after in itertools.pairwise(steps) if one.opname.startswith(looks))
