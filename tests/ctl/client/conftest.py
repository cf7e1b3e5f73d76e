"""What tests of the clients share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder with a short path, where the clients of this process look for hosts."""
    with tempfile.TemporaryDirectory(prefix="s") as name:
        folder = Path(name)
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        (folder / "splitctl").mkdir(mode=0o700)
        yield folder
