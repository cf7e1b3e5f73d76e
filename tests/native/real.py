"""The real builds that the tests of the native layer open, in child processes only: one library a process."""

from __future__ import annotations

from pathlib import Path

import platformdirs
import pytest

NEWEST = "xllamacpp-2026.10.11549"
OLDER = "xllamacpp-2026.6.9713"
WITH_RPC = "llama-cpp-python-0.3.36"

_LIBRARY = {WITH_RPC: "llama_cpp/lib/libllama.so"}


def library_of(folder: str) -> Path:
    """Return the library of an unpacked build, or skip the test where it is not there."""
    builds = Path(platformdirs.user_cache_dir("splitctl")) / "builds"
    path = builds / folder / _LIBRARY.get(folder, "xllamacpp/xllamacpp.abi3.so")
    if not path.is_file():
        how = "ci/builds --llama-cpp-python" if folder == WITH_RPC else "ci/builds"
        pytest.skip(f"{folder} is not there: run {how}")
    return path
