"""A file is the one that it was: by its status alone where that stands still, else by its header and its weights."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from splitctl.errors import FileChanged
from splitctl.model.header import read_header
from splitctl.model.identity import FileIdentity, model_digest
from tests.stublib import write_model

_WEIGHTS = bytes(range(256)) * 64


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.gguf", weights=_WEIGHTS)


def _identity(path: Path) -> FileIdentity:
    return FileIdentity.of(read_header(path))


def _patched(path: Path, at: int, *, keep_time: bool) -> None:
    """Write other bytes into the file itself, counted from its end."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-at, os.SEEK_END)
        file.write(b"other")
    if keep_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _replaced(path: Path, make: Callable[[Path], object]) -> None:
    other = path.with_name("other.gguf")
    make(other)
    other.replace(path)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (Path.unlink, "it is gone"),
    "truncated": (lambda path: os.truncate(path, path.stat().st_size - 100), "bytes now, and had"),
    "empty": (lambda path: os.truncate(path, 0), "it has 0 bytes now"),
    "longer": (lambda path: os.truncate(path, path.stat().st_size + 4096), "bytes now, and had"),
    "a directory": (lambda path: (path.unlink(), path.mkdir()), "it is a directory now"),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "it is no regular file now"),
    "another model": (
        lambda path: _replaced(path, lambda to: write_model(to, weights=_WEIGHTS, extra={"general.name": "butS"})),
        "another model is in its place",
    ),
    "other weights": (
        lambda path: _replaced(path, lambda to: write_model(to, weights=_WEIGHTS[::-1])),
        "other weights are in its place",
    ),
    "no model": (
        lambda path: _replaced(path, lambda to: to.write_bytes(b"\0" * path.stat().st_size)),
        "it is not a GGUF now",
    ),
    "other bytes in place": (lambda path: _patched(path, 50, keep_time=False), "other weights are in its place"),
    "other bytes, its time set back": (lambda path: _patched(path, 50, keep_time=True), "other weights"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_that_changed_is_told_with_how(path: Path, name: str) -> None:
    """Whatever became of a file, it is refused by name, and never taken for the one that it was."""
    change, how = CHANGES[name]
    was = _identity(path)
    change(path)
    with pytest.raises(FileChanged, match="the file changed since the session opened") as caught:
        was.confirmed()
    assert how in caught.value.how
    assert caught.value.path == path


def test_an_equal_file_is_the_same(path: Path, tmp_path: Path) -> None:
    """A copy in its place, another name's link and a new time are accepted, and the new status is kept."""
    was = _identity(path)
    assert was.confirmed() is was
    _replaced(path, lambda to: shutil.copyfile(path, to))
    now = was.confirmed()
    assert now != was
    assert (now.header_xxh3_128, now.samples_xxh3_128) == (was.header_xxh3_128, was.samples_xxh3_128)
    os.link(path, tmp_path / "link.gguf")
    os.utime(path)
    assert now.confirmed().confirmed() is not now


def test_nothing_is_read_while_its_status_stands_still(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at a file that nobody touched costs one stat."""
    was = _identity(path)
    monkeypatch.setattr("splitctl.model.identity.read_header", None)
    assert was.confirmed() is was


def test_a_file_replaced_after_its_header_was_read_is_not_identified(path: Path) -> None:
    """The header and the samples are of one file, or there is no identity."""
    header = read_header(path)
    _replaced(path, lambda to: shutil.copyfile(path, to))
    with pytest.raises(FileChanged):
        FileIdentity.of(header)
    path.unlink()
    with pytest.raises(FileChanged):
        FileIdentity.of(header)


def test_weights_are_told_apart_under_one_header(tmp_path: Path) -> None:
    """Models with equal headers have different digests where their weights differ, and only there."""
    names = {"one": _WEIGHTS, "equal": _WEIGHTS, "other": _WEIGHTS[::-1]}
    files = [write_model(tmp_path / name, weights=weights) for name, weights in names.items()]
    one, equal, other = (model_digest([path]) for path in files)
    assert one == equal != other
