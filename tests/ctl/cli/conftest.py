"""What tests of the command line share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.codec.goldens import golden


@pytest.fixture
def kept(tmp_path: Path) -> Callable[..., Path]:
    """Puts a golden, or other bytes, into a file of a name."""

    def put(name: str, data: bytes | None = None) -> Path:
        path = tmp_path / name
        path.write_bytes(golden(name) if data is None else data)
        return path

    return put
