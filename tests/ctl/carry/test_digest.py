"""The checksum of a state: the same however many threads take it, and another one for every other byte."""

from __future__ import annotations

import threading

import pytest
import xxhash

from splitctl.carry import digest as digests
from splitctl.carry.digest import Digest, digest


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "CHUNK_BYTES", 1000)


def _bytes(n: int) -> memoryview:
    return memoryview(bytes(one * 7 % 256 for one in range(n)))


@pytest.mark.parametrize("n_bytes", [0, 1, 999, 1000])
def test_of_one_chunk_it_is_the_plain_one(n_bytes: int) -> None:
    """A small state has the checksum that other tools take of it."""
    view = _bytes(n_bytes)
    assert digest(view) == Digest(view).result() == xxhash.xxh3_128_digest(view)


@pytest.mark.parametrize("n_bytes", [1001, 2000, 10_007])
@pytest.mark.parametrize("n_threads", [0, 1, 8])
def test_of_several_chunks_it_is_that_of_their_digests(n_bytes: int, n_threads: int) -> None:
    """Who seals and who takes out may have other numbers of cores."""
    view = _bytes(n_bytes)
    chunks = [view[at : at + 1000] for at in range(0, n_bytes, 1000)]
    wanted = xxhash.xxh3_128_digest(b"".join(map(xxhash.xxh3_128_digest, chunks)))
    assert digest(view) == Digest(view, n_threads=n_threads).result() == wanted


@pytest.mark.parametrize("at", [0, 999, 1000, 4999, 5000])
def test_every_byte_counts(at: int) -> None:
    """Also those at the edges of a chunk."""
    data = bytearray(_bytes(5001))
    before = digest(memoryview(data))
    data[at] ^= 1
    assert digest(memoryview(data)) != before


def test_what_a_thread_could_not_take_is_taken_by_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that ends early costs time and no byte."""
    view = _bytes(3000)
    wanted = digest(view)
    monkeypatch.setattr(Digest, "_take", lambda _self: None)
    assert Digest(view).result() == wanted


@pytest.mark.parametrize("n_there", [0, 1])
def test_where_the_system_gives_no_thread_the_caller_does_the_work(
    monkeypatch: pytest.MonkeyPatch, n_there: int
) -> None:
    """A switch that seals under a limit on threads or on memory goes on, with the threads that there are."""
    view, start, started = _bytes(3000), threading.Thread.start, list[threading.Thread]()
    wanted = digest(view)

    def begin(thread: threading.Thread) -> None:
        if len(started) == n_there:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", begin)
    assert Digest(view, n_threads=3).result() == wanted
    assert len(started) == n_there
