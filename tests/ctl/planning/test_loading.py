"""Which way to load, from measured times (R8)."""

from __future__ import annotations

from splitctl.planning.loading import LoadChoice, LoadPath, LoadTimes, choose_load

_GB = 10**9


def test_the_faster_way_is_taken_whichever_it_is() -> None:
    """33.7 s by a mapping and 14.3 s by reads: reads; and the other way round."""
    times = {LoadPath.MMAP: LoadTimes(33.7), LoadPath.READ: LoadTimes(14.3)}
    assert choose_load(times, 20 * _GB, 40 * _GB) == LoadChoice(LoadPath.READ, 14.3, is_warm=False)
    swapped = {LoadPath.MMAP: LoadTimes(14.3), LoadPath.READ: LoadTimes(33.7)}
    assert choose_load(swapped, 20 * _GB, 40 * _GB) == LoadChoice(LoadPath.MMAP, 14.3, is_warm=False)


def test_a_file_that_the_page_cache_cannot_hold_is_read_cold_again() -> None:
    """A file of 40 GB with 8 GB for it."""
    times = {LoadPath.MMAP: LoadTimes(60.0, warm_s=5.2)}
    assert choose_load(times, 20 * _GB, 40 * _GB) == LoadChoice(LoadPath.MMAP, 5.2, is_warm=True)
    assert choose_load(times, 40 * _GB, 8 * _GB) == LoadChoice(LoadPath.MMAP, 60.0, is_warm=False)


def test_direct_reads_have_no_warm_second_load() -> None:
    """They go around the page cache."""
    times = {LoadPath.DIRECT: LoadTimes(9.0, warm_s=1.0), LoadPath.MMAP: LoadTimes(12.0, warm_s=5.2)}
    assert choose_load(times, _GB, 40 * _GB) == LoadChoice(LoadPath.MMAP, 5.2, is_warm=True)


def test_nothing_measured_is_no_choice() -> None:
    """Nothing is assumed."""
    assert choose_load({}, _GB, _GB) is None
