"""What a library would allocate for a context, as it said itself in a dry run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Reservation:
    """What one context would take, by the library itself.

    Args:
        n_ctx: context as the library padded it, tokens over all streams.
        n_batch: most tokens of a decode, as the library cut them to the context.
        n_ubatch: most tokens of a computed batch, cut too.
        compute: compute buffers, bytes by the buffer's name.
        cache_bytes: the whole cache, bytes; None where the build does not say.
    """

    n_ctx: int
    n_batch: int
    n_ubatch: int
    compute: Mapping[str, int]
    cache_bytes: int | None

    def to_json(self) -> dict[str, Any]:
        """Give it as plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Reservation:
        """Read back what `to_json` gave."""
        return cls(**plain)
