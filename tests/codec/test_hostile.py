from __future__ import annotations

import random
import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statecodec import Ambiguous, LimitExceeded, Limits, ModelFacts, StateFormatError, emit, parse, salvage
from tests.codec.cases import CASES
from tests.codec.goldens import MANIFEST, golden
from tests.codec.synthetic import Attention, Cell, Recurrent, cells, context, sequence

_SEEDS = [case.data for case in CASES.values()] + [
    golden(name) for name in MANIFEST if MANIFEST[name]["n_bytes"] < 7000
]
_WORDS = [0, 1, 2, 7, 8, 30, 64, 255, 256, 257, 512, 513, 1 << 16, 1 << 31, (1 << 31) - 1, (1 << 32) - 1]


def check(data: bytes) -> None:
    """The only law: an error of the one kind, or an image that is these bytes."""
    try:
        image = parse(data)
    except StateFormatError:
        return
    assert b"".join(emit(image)) == data
    image.sequences()


@given(st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    """Bytes from nowhere are an error or an image of themselves."""
    check(data)


@given(
    st.sampled_from(_SEEDS),
    st.lists(st.tuples(st.integers(0, 1 << 20), st.sampled_from(_WORDS)), max_size=4),
    st.integers(0, 1 << 20),
    st.binary(max_size=16),
)
def test_damaged_states(seed: bytes, patches: list[tuple[int, int]], cut: int, tail: bytes) -> None:
    """Real states with words replaced, cut and extended, keep the law."""
    data = bytearray(seed)
    for at, word in patches:
        if len(data) >= 4:
            struct.pack_into("<I", data, at % (len(data) - 3), word)
    check(bytes(data[: len(data) - cut % 64 if cut % 3 == 0 else len(data)]) + tail)


_PARTS = [None, (), *(("attention",) * n for n in (1, 2, 3)), ("recurrent",), ("attention", "recurrent")]


@given(
    st.sampled_from(_SEEDS),
    st.lists(st.tuples(st.integers(0, 1 << 20), st.sampled_from(_WORDS)), max_size=2),
    st.floats(0, 1),
    st.binary(max_size=16),
    st.sampled_from(_PARTS),
    st.sampled_from([(), (True,), (False,), (True, False)]),
)
def test_what_is_kept_of_damaged_states_is_sound(
    seed: bytes,
    patches: list[tuple[int, int]],
    share: float,
    tail: bytes,
    parts: tuple[str, ...] | None,
    has_v: tuple[bool, ...],
) -> None:
    """Whatever the damage and the facts, salvage gives what reads again, or nothing and a reason."""
    data = bytearray(seed)
    for at, word in patches:
        if len(data) >= 4:
            struct.pack_into("<I", data, at % (len(data) - 3), word)
    facts = ModelFacts(sections=parts, has_v=has_v)
    try:
        found = salvage(bytes(data[: int(share * len(data))]) + tail, facts=facts)
    except Ambiguous:
        return
    assert (found.image is None) == bool(found.reason)
    if found.image is not None:
        again = parse(b"".join(emit(found.image)), facts=facts)
        assert again.sequences() == found.image.sequences()


def test_a_thousand_random_damages() -> None:
    """A bounded fuzz with a fixed seed: splices, repeats and swaps of parts of sound states."""
    chance = random.Random(20261129)
    for _ in range(1000):
        one, other = chance.choice(_SEEDS), chance.choice(_SEEDS)
        cut = chance.randrange(len(one) + 1)
        start = chance.randrange(len(other) + 1)
        data = bytearray(
            one[:cut] + other[start : start + chance.randrange(200)] + one[cut : cut + chance.randrange(300)]
        )
        for _ in range(chance.randrange(3)):
            if len(data) >= 4:
                struct.pack_into("<I", data, chance.randrange(len(data) - 3), chance.choice(_WORDS))
        check(bytes(data))


@pytest.mark.parametrize("offset", [9, 13, 21, 57, 65])
def test_a_huge_count_costs_nothing(offset: int) -> None:
    """A count of 2^32 - 1 in a small state is refused in less than a megabyte."""
    data = bytearray(CASES["plain"].data)
    struct.pack_into("<I", data, offset, 0xFFFFFFFF)
    tracemalloc.start()
    with pytest.raises(StateFormatError):
        parse(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_large_state_is_not_copied() -> None:
    """Reading eight megabytes of rows takes memory for the cells alone."""
    held = cells(1000)
    data = context(Attention((held,), keys=((1, 2048),) * 2, values=((1, 2048),) * 2))
    parse(data)
    tracemalloc.start()
    image = parse(data)
    parts = list(emit(image))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(map(len, parts)) == len(data)
    assert peak < 400_000


@pytest.mark.parametrize(
    "data",
    [
        context(bytes(4000)),
        sequence(bytes(4000)),
        context(struct.pack("<I", 1) * 1000),
        sequence(Recurrent((Cell(4, ()),), n_layer=512, n_recurrent=0), bytes(12 * 1200)),
        sequence(Recurrent((Cell(4, ()),), n_layer=512, n_recurrent=0), struct.pack("<iQQ", 0, 4, 4) * 800),
    ],
    ids=["zeros", "zeros in a sequence", "ones", "empty layers", "histories"],
)
def test_loose_bytes_do_not_make_the_search_long(data: bytes) -> None:
    """Bytes that read in very many ways are given up after a bounded number of steps."""
    with pytest.raises(StateFormatError):
        parse(data, limits=Limits(n_steps=2000))


def test_the_steps_are_counted() -> None:
    """A search that goes on is ended by the limit, and says so."""
    data = sequence(Recurrent((Cell(4, ()),), n_layer=512, n_recurrent=0), bytes(12 * 1200))
    with pytest.raises(LimitExceeded):
        parse(data, limits=Limits(n_steps=10))
