"""What owners of a C object have in common: a pointer that is there until close, and the care that a fork takes."""

from __future__ import annotations

import sys
import warnings
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Self

from llama_native.errors import HandleClosed
from llama_native.owned import Owned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llama_native.library import Library


class Handle(ABC):
    """Owns one C object.

    Lifetime: until :meth:`close`; one that is dropped is closed by the collector. Thread: any; every call holds the
    library's lock.
    """

    KIND: ClassVar[str]
    """What it is, for errors."""
    IS_LARGE: ClassVar[bool] = False
    """Whether dropping it without a close deserves a warning: a collector comes late."""
    owned: Owned
    """For modules of this package only."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.owned = Owned(self._free)

    @property
    def _pointer(self) -> Any:
        return self.owned.pointer

    @_pointer.setter
    def _pointer(self, pointer: Any) -> None:
        self.owned.pointer = pointer

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
        """Free it, after what stands on it; a second call does nothing."""
        if self._pointer is None:
            return
        # In a forked child the devices and threads behind the pointer are gone: freeing would hang or abort.
        if self.library.forked:
            self.owned.release(None)
            return
        with self.library.calling() as (_, lib), self._alone():
            self.owned.release(lib)

    def _alone(self) -> AbstractContextManager[Any]:
        """Wait for whoever uses it without the library's lock, which is held."""
        return nullcontext()

    @contextmanager
    def _making(self) -> Iterator[tuple[Any, Any]]:
        """Call the library to make the object; whatever is raised, what was made by then is freed."""
        try:
            with self.library.calling() as found:
                yield found
        except BaseException:
            self.close()
            raise

    @staticmethod
    @abstractmethod
    def _free(lib: Any, pointer: Any) -> None:
        """Give the object back to the library, whose lock is held."""

    def _name(self) -> str:
        return f"a {self.KIND}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # At exit the devices and threads of the library may be gone, and the system takes the memory.
        owned = getattr(self, "owned", None)
        if owned is None or owned.pointer is None or self.library.forked or sys.is_finalizing():
            return
        if self.IS_LARGE:
            warnings.warn(f"{self._name()} was not closed; it is freed now", ResourceWarning, stacklevel=2)
        self.library.bury(owned)
