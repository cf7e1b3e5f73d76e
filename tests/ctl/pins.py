"""Stands in for the driver that pins memory: knows what is pinned, by address, and refuses it twice."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class FakePin:
    """One pinned memory; holds it mapped, as the driver's does."""

    pins: FakePins
    memory: memoryview
    address: int
    is_held: bool = True

    def release(self) -> None:
        """Forget it; a second call does nothing."""
        if self.is_held:
            self.is_held = False
            del self.pins.held[self.address]
            self.memory.release()


@dataclass
class FakePins:
    """The driver.

    Attributes:
        held: bytes that are pinned, by address.
        refusal: why nothing can be pinned; empty: it can.
        refuses_twice: whether a second registration of an address is answered; else it is a fault of the test.
    """

    held: dict[int, int] = field(default_factory=dict)
    refusal: str = ""
    refuses_twice: bool = False

    def __call__(self, memory: memoryview) -> FakePin | str:
        """Pin a memory."""
        if self.refusal:
            return self.refusal
        address = int(np.frombuffer(memory, np.uint8).ctypes.data)
        if self.refuses_twice and address in self.held:
            return "registered twice"
        assert address not in self.held, "registered twice"
        self.held[address] = len(memory)
        return FakePin(self, memory, address)

    def holds(self, view: memoryview) -> bool:
        """Tell whether all of a view lies in one pinned memory."""
        start = int(np.frombuffer(view, np.uint8).ctypes.data)
        return any(at <= start and start + len(view) <= at + n for at, n in self.held.items())
