"""Which way to load a model, from times that were measured: no way is the fast one by nature.

A switch loads the same file a second time. By a mapping or plain reads the first load can leave it in the page cache;
direct reads go around it, so their second load is as slow as the first.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class LoadPath(enum.Enum):
    """A way to load."""

    MMAP = "mmap"
    READ = "read"
    DIRECT = "direct"


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """What one way took for one file on one set of devices.

    Args:
        cold_s: with nothing of it in the page cache, seconds.
        warm_s: with all of it there, seconds; None when that was not measured.
    """

    cold_s: float
    warm_s: float | None = None


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """The way to take.

    Args:
        path: it.
        seconds: what it is expected to take.
        is_warm: whether the file is expected to be in the page cache.
    """

    path: LoadPath
    seconds: float
    is_warm: bool


def choose_load(times: Mapping[LoadPath, LoadTimes], file_bytes: int, page_cache_bytes: int) -> LoadChoice | None:
    """Choose the way to load a file for a second time.

    Args:
        times: measured, by way.
        file_bytes: all parts of the model, bytes.
        page_cache_bytes: what the page cache can hold, bytes; a file that does not fit is read cold again.

    Returns:
        The fastest; None when nothing was measured.
    """
    choices = []
    for path, one in times.items():
        warm = one.warm_s if file_bytes <= page_cache_bytes and path is not LoadPath.DIRECT else None
        choices.append(LoadChoice(path, one.cold_s if warm is None else warm, warm is not None))
    return min(choices, key=lambda choice: choice.seconds, default=None)
