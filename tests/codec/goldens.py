"""The kept states of real builds, with what the manifest says of each."""

from __future__ import annotations

import functools
import json
import lzma
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "golden" / "codec"
MANIFEST: dict[str, dict[str, Any]] = json.loads((FOLDER / "manifest.json").read_text(encoding="utf-8"))


@functools.cache
def golden(name: str) -> bytes:
    """The bytes of one."""
    return lzma.decompress((FOLDER / f"{name}.xz").read_bytes())
