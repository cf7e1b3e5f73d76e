from __future__ import annotations

import array
import struct

import numpy as np
import pytest

from statecodec.cursor import Cursor, view
from statecodec.errors import LimitExceeded, Truncated

_DATA = struct.pack("<IiQI", 7, -2, 1 << 40, 3) + b"abcdefghijkl"


def test_words_are_little_endian_and_move_the_cursor() -> None:
    """Each reader takes its own width and leaves the cursor behind it."""
    cursor = Cursor(view(_DATA))
    assert (cursor.u32("a"), cursor.i32("b"), cursor.u64("c")) == (7, -2, 1 << 40)
    assert (cursor.offset, cursor.remaining) == (16, len(_DATA) - 16)


@pytest.mark.parametrize("reader", ["u32", "i32", "u64"])
@pytest.mark.parametrize("n_bytes", [0, 1, 3])
def test_a_word_that_is_not_whole_is_truncated(reader: str, n_bytes: int) -> None:
    """A read past the end raises and does not move."""
    cursor = Cursor(view(b"x" * n_bytes))
    with pytest.raises(Truncated) as caught:
        getattr(cursor, reader)("word")
    assert (caught.value.offset, cursor.offset) == (0, 0)


def test_a_count_is_checked_against_its_limit_and_what_remains() -> None:
    """A count passes only when it is allowed and its items could be there."""
    data = view(struct.pack("<I", 3) + b"x" * 12)
    assert Cursor(data).count("n", 3, item_bytes=4) == 3
    with pytest.raises(LimitExceeded, match="at most 2"):
        Cursor(data).count("n", 2)
    with pytest.raises(Truncated):
        Cursor(data).count("n", 3, item_bytes=5)


def test_a_count_times_a_size_cannot_overflow() -> None:
    """The product is taken with unbounded integers before anything is touched."""
    data = view(struct.pack("<I", 0xFFFFFFFF))
    with pytest.raises(Truncated, match=str(0xFFFFFFFF * (1 << 40))):
        Cursor(data).count("n", 0xFFFFFFFF, item_bytes=1 << 40)


def test_spans_are_views_on_the_callers_bytes() -> None:
    """Nothing is copied and nothing can be written through a span."""
    buffer = bytearray(_DATA)
    cursor = Cursor(view(buffer), offset=20)
    span = cursor.span(3, "text")
    buffer[20] = ord("z")
    assert bytes(span) == b"zbc"
    assert span.readonly
    with pytest.raises(Truncated):
        cursor.span(10, "text")


def test_records_are_read_only_views_also_when_unaligned() -> None:
    """An array may begin anywhere in the buffer."""
    cursor = Cursor(view(b"x" + struct.pack("<3i", 1, -2, 3)), offset=1)
    found = cursor.records(np.dtype("<i4"), 3, "words")
    assert found.tolist() == [1, -2, 3]
    assert not found.flags.writeable
    assert cursor.remaining == 0


def test_peeking_gives_whole_records_and_does_not_move() -> None:
    """A look ahead stops at the last whole record."""
    cursor = Cursor(view(_DATA))
    assert cursor.peek_records(np.dtype("<u4"), 1).tolist() == [7]
    assert len(cursor.peek_records(np.dtype("<u8"), 100)) == len(_DATA) // 8
    assert cursor.offset == 0


def test_a_fork_moves_on_its_own() -> None:
    """An alternative does not disturb the cursor that it came from."""
    cursor = Cursor(view(_DATA))
    ahead = cursor.fork()
    ahead.skip(4, "a")
    assert (cursor.offset, ahead.offset) == (0, 4)
    with pytest.raises(Truncated):
        ahead.skip(1000, "b")


def test_a_record_cannot_leave_its_own_bytes() -> None:
    """A bounded cursor ends where it was told to."""
    bounded = Cursor(view(_DATA), offset=4).until(8)
    assert bounded.i32("b") == -2
    with pytest.raises(Truncated):
        bounded.u32("c")


@pytest.mark.parametrize(
    "buffer", [b"ab", bytearray(b"ab"), memoryview(b"ab"), np.frombuffer(b"ab", np.uint8), array.array("H", [0x6261])]
)
def test_any_contiguous_buffer_will_do(buffer: bytes) -> None:
    """The caller's object may be of any kind and item size."""
    assert bytes(view(buffer)) == b"ab"
