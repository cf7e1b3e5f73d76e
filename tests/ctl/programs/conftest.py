"""What tests of the sweeps share: a real build, and small models that it makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.native.real import NEWEST, library_of
from tools.make_dummies import make_many
from tools.places import default_folder


@pytest.fixture(scope="module")
def library() -> Path:
    """The newest real build."""
    return library_of(NEWEST)


@pytest.fixture
def model_of(library: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes the model of a recipe with that build."""
    monkeypatch.setenv("LLAMA_NATIVE_LIB", str(library))

    def make(name: str) -> Path:
        ((_, path, reason),) = make_many(default_folder(), [name])
        assert path is not None, reason
        return path

    return make
