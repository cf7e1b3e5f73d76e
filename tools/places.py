"""Where programs find things: the checkout, what ci/ has fetched, and a usable libllama."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from llama_native import discover

#: `python -m tools.NAME` finds the programs from here.
CHECKOUT = Path(__file__).resolve().parent.parent


def models_folder() -> Path:
    """Folder of fetched and made models."""
    return platformdirs.user_cache_path("splitctl") / "models"


def default_folder() -> Path:
    """Folder of made models when none is named."""
    return models_folder() / "dummies"


def builds_folder() -> Path:
    """Folder of unpacked builds of libllama (ci/builds)."""
    return platformdirs.user_cache_path("splitctl") / "builds"


def small_model() -> Path:
    """SmolLM2-135M-Instruct (ci/model smollm2)."""
    return models_folder() / "smollm2.gguf"


def usable_library(named: Path | None) -> Path:
    """The library that was named, or else the first usable one.

    Raises:
        SystemExit: there is none.
    """
    found = named or next((one.path for one in discover.candidates(os.environ) if one.usable), None)
    if found is None:
        raise SystemExit("no usable libllama was found; name one with --lib")
    return found
