"""A C object without its handle: what is needed to free it, and what stands on it.

Law: what stands on an object is freed before it, whoever frees it and in whichever order a collector ends the handles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Owned:
    """A C object that a handle owns, or owned."""

    __slots__ = ("above", "free", "keep", "pointer")

    def __init__(self, free: Callable[[Any, Any], None]) -> None:
        self.pointer: Any = None
        self.free = free
        self.keep: list[Any] = []
        """C objects that the library may read while this one lives."""
        self.above: list[Owned] = []
        """What is freed before it, in this order."""

    def all(self) -> Iterable[Owned]:
        """It and what stands on it, in the order in which they are freed."""
        for one in self.above:
            yield from one.all()
        yield self

    def release(self, lib: Any) -> None:
        """Give it and what stands on it back to the library, whose lock is held; ``lib`` None only forgets them."""
        for one in self.all():
            pointer, one.pointer = one.pointer, None
            if pointer is not None and lib is not None:
                one.free(lib, pointer)
            one.keep.clear()
