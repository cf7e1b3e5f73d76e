"""What owners of a C object have in common: a pointer that is there until close, and the care that a fork takes."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Self

from llama_native.errors import HandleClosed

if TYPE_CHECKING:
    from llama_native.library import Library


class Handle(ABC):
    """Owns one C object.

    Lifetime: until :meth:`close`. Thread: any; every call holds the library's lock.
    """

    KIND: ClassVar[str]
    """What it is, for errors."""
    _pointer: Any = None

    def __init__(self, library: Library) -> None:
        self.library = library

    @property
    def pointer(self) -> Any:
        """The C pointer, for modules of this package only.

        Raises:
            HandleClosed: after close.
        """
        if self._pointer is None:
            raise HandleClosed(self.KIND)
        return self._pointer

    @property
    def closed(self) -> bool:
        """Whether it has been freed."""
        return self._pointer is None

    def close(self) -> None:
        """Free it; a second call does nothing."""
        if self._pointer is None:
            return
        pointer, self._pointer = self._pointer, None
        # In a forked child the devices and threads behind the pointer are gone: freeing would hang or abort.
        if not self.library.forked:
            with self.library.calling() as (_, lib):
                self._free(lib, pointer)

    @abstractmethod
    def _free(self, lib: Any, pointer: Any) -> None:
        """Give the object back to the library, whose lock is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _warn_unclosed(self, what: str) -> None:
        """Warn from ``__del__`` where it was not closed: its memory is not given back by the collector."""
        if self._pointer is not None and not self.library.forked:
            warnings.warn(f"{what} was not closed; its memory stays taken", ResourceWarning, stacklevel=3)
