"""The kept states of real builds, with what the manifest says of each."""

from __future__ import annotations

import functools
import json
import lzma
from pathlib import Path
from typing import Any

from statecodec import StateImage, parse

FOLDER = Path(__file__).parents[1] / "golden" / "codec"
MANIFEST: dict[str, dict[str, Any]] = json.loads((FOLDER / "manifest.json").read_text(encoding="utf-8"))


@functools.cache
def golden(name: str) -> bytes:
    """The bytes of one."""
    return lzma.decompress((FOLDER / f"{name}.xz").read_bytes())


@functools.cache
def image_of(name: str) -> StateImage:
    """What the reader makes of one, without facts; an image cannot be changed, so all tests share it."""
    return parse(golden(name))
