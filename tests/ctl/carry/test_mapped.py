"""A file as a view on its bytes: mapped while nobody can shorten it, else read without its holes."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitctl.carry.mapped import mapped
from splitctl.errors import CarryDamaged

_HOLE = 1 << 29
_BLOCK = 1 << 16


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    """Data, a hole, data and a hole."""
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.write(b"first" * 3000)
        file.seek(_HOLE)
        file.write(b"last")
        file.truncate(2 * _HOLE)
    return path


@pytest.fixture(params=["mapped", "read"])
def either(request: pytest.FixtureRequest, sparse: Path) -> Iterator[Path]:
    """A file that is nobody else's, and one that another program has open for writing."""
    if request.param == "mapped":
        yield sparse
        return
    with sparse.open("r+b"):
        yield sparse


def test_the_bytes_are_those_of_the_file_and_its_holes_cost_nothing(either: Path) -> None:
    """Whether a lease is granted or not."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with mapped(either) as data:
        assert (len(data), data.readonly) == (2 * _HOLE, True)
        assert bytes(data[:_BLOCK]) == (b"first" * 3000).ljust(_BLOCK, b"\0")
        assert bytes(data[_HOLE - 4 : _HOLE + 8]) == b"\0\0\0\0last\0\0\0\0"
        assert bytes(data[-4:]) == bytes(4)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < _HOLE // 8


def test_a_file_that_becomes_shorter_while_it_is_read_ends_there(sparse: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No zeros stand for what is gone."""
    preadv = os.preadv

    def shortened(*arguments: object) -> int:
        os.truncate(sparse, 5)
        return preadv(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", shortened)
    with sparse.open("r+b"), mapped(sparse) as data:
        assert bytes(data) == b"first"


def test_a_disk_that_fails_is_told_of(sparse: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that cannot be opened is."""

    def failed(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", failed)
    with sparse.open("r+b"), pytest.raises(CarryDamaged, match="Input/output error"), mapped(sparse):
        pass
