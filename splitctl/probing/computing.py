"""What `probe` and `verify` both do in their children: make tokens, take the state out, put it back, name a failure."""

from __future__ import annotations

from llama_native import CallFailed, Context, Model, state_get, state_set, state_size
from splitctl.last_words import is_shortage, telling_line

#: A model this small [bytes] takes no longer with one thread, and on a busy machine half as long: no barriers.
SMALL_BYTES = 1 << 30


class ProbeCancelled(Exception):
    """The trial was asked to stop."""


class Wrong(Exception):
    """The placement computes, and what it computes is not right; with what was measured."""

    def __init__(self, why: str, numbers: dict[str, float] | None = None) -> None:
        self.why = why
        self.numbers = numbers or {}
        super().__init__(why)


def numbers_as_tokens(model: Model, n: int) -> list[int]:
    """Make a text of n tokens for a model without words."""
    return [(7919 * index + 13) % model.n_vocab for index in range(n)]


def state_of(context: Context) -> bytearray:
    """Copy the state out."""
    buffer = bytearray(state_size(context))
    n = state_get(context, buffer)
    if n != len(buffer):
        raise Wrong(f"the library announced {len(buffer)} bytes of state and wrote {n}")
    return buffer


def put_back(context: Context, state: bytearray) -> None:
    """Give a fresh context a state, and demand that it reads back the same."""
    if state_set(context, state) != len(state):
        raise Wrong("the library did not read its own state to the end")
    if state_of(context) != state:
        raise Wrong("the state reads back changed after a restore")


def why_failed(error: CallFailed) -> tuple[str, bool]:
    """Say what failed and what the library said of it; and whether memory was short."""
    said = telling_line(error.log_tail)
    return f"{error.function} failed{f': {said}' if said else ''}", is_shortage(error.log_tail)
