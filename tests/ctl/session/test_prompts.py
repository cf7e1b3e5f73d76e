"""Texts and chats as tokens, and tokens as texts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from splitctl.session.prompts import pieces_of


def test_a_token_is_looked_up_once() -> None:
    """A request may hold a million tokens, and each look at the library takes its time."""
    asked: list[int] = []
    alive: list[int] = []

    def piece(token: int, **_special: bool) -> bytes:
        asked.append(token)
        return bytes([token])

    session = cast("Any", SimpleNamespace(model=SimpleNamespace(has_tokenizer=True, n_vocab=256, piece=piece)))
    assert pieces_of(session, [97, 98, 97] * 1000, lambda: alive.append(len(asked))) == (b"a", b"b")
    assert asked == [97, 98]
    # It says that it lives while it looks.
    assert alive == [0, 1]
