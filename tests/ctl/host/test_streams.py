"""What a client of a stream gets, and text that is whole characters without a stop text."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitctl.host.streams import Begun, Delta, Done, Paused, Resumed, Stream, StreamEvent, Text, Why

_DONE = Done(Why.EOS)


def _events(stream: Stream) -> list[StreamEvent]:
    """Every event of a stream, to its end."""

    async def collect() -> list[StreamEvent]:
        return [event async for event in stream]

    return asyncio.run(collect())


def _stream(stop: tuple[str, ...] = ()) -> Stream:
    return Stream(stop, lambda: None)


@pytest.mark.parametrize(
    ("pieces", "texts"),
    [
        ([b"a", b"b"], ["a", "b"]),
        ([b"\xc3", b"\xa9"], ["", "é"]),
        ([b"\xf0\x9f", b"\x98", b"\x80x"], ["", "", "\U0001f600x"]),
        ([b"\xff", b"a"], ["\ufffd", "a"]),
        ([b"\xc3", b"a"], ["", "\ufffda"]),
        ([b"a\xc3"], ["a", "\ufffd"]),
        ([b"", b"a"], ["", "a"]),
    ],
)
def test_characters_are_whole(pieces: list[bytes], texts: list[str]) -> None:
    """Bytes of a character that is not whole are held back, and bytes that are none become U+FFFD."""
    text = Text(())
    out = [text.feed(piece) for piece in pieces]
    rest = text.rest()
    assert out + ([rest] if rest else []) == texts


@pytest.mark.parametrize(
    ("stop", "pieces", "whole", "is_stopped"),
    [
        (("END",), [b"xE", b"NDy"], "x", True),
        (("END",), [b"xE", b"Nx"], "xENx", False),
        (("é",), [b"a\xc3", b"\xa9b"], "a", True),
        (("é",), [b"a\xc3", b"\xa8b"], "aèb", False),
        (("x",), [b"\xc3", b"x"], "\ufffd", True),
    ],
)
def test_stop_texts_end_the_text(stop: tuple[str, ...], pieces: list[bytes], whole: str, is_stopped: bool) -> None:
    """A stop text is no part of the answer, also where characters and pieces are cut within it."""
    text = Text(stop)
    out = ""
    for piece in pieces:
        out += text.feed(piece)
        if text.is_stopped:
            break
    assert (out + text.rest(), text.is_stopped) == (whole, is_stopped)


@given(data=st.data(), answer=st.text(max_size=40))
def test_no_text_is_lost_or_doubled(data: st.DataObject, answer: str) -> None:
    """However an answer is cut into pieces, its text comes out whole."""
    raw, text, out = answer.encode(), Text(("\x00never",)), ""
    at = 0
    while at < len(raw):
        n = data.draw(st.integers(1, 5))
        out += text.feed(raw[at : at + n])
        at += n
    assert out + text.rest() == answer


def test_the_events_of_a_stream_have_their_order() -> None:
    """Begun, numbered tokens with a pause between, the rest of the text, the end, and nothing behind it."""
    stream = _stream(("END",))
    stream.pause("it has not begun: nobody needs to know")
    stream.begin(3, 1)
    stream.begin(9, 9)
    assert not stream.deliver(5, b"a")
    stream.pause("one")
    stream.pause("two")
    assert not stream.deliver(6, b"E")
    stream.resume()
    stream.end(_DONE)
    stream.end(Done(Why.ERROR))
    assert _events(stream) == [
        Begun(3, 1),
        Delta("a", 5, 0),
        Paused("one"),
        Resumed(),
        Delta("", 6, 1),
        Delta("E", None, 1),
        _DONE,
    ]
    assert _events(stream) == []


def test_a_stop_text_is_told_to_the_supervisor() -> None:
    """The token that completes a stop text is passed on, with the text before it, and says that it ends the answer."""
    stream = _stream(("yz",))
    stream.begin(1, 0)
    assert not stream.deliver(1, b"xy")
    assert stream.deliver(2, b"z")
    stream.end(Done(Why.STOP))
    assert _events(stream) == [Begun(1, 0), Delta("x", 1, 0), Delta("", 2, 1), Done(Why.STOP)]


def test_a_cancel_reaches_the_supervisor_while_the_stream_lives() -> None:
    """A cancel is passed on; a stream that is over is left alone."""
    cancelled: list[int] = []
    stream = Stream((), lambda: cancelled.append(7))
    stream.cancel()
    stream.end(Done(Why.CANCELLED))
    stream.cancel()
    assert cancelled == [7]
