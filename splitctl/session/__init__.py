"""An in-process session: text, decoding, switching, saving and restoring."""

from __future__ import annotations

from llama_native import Library, NativeError
from splitctl.session.session import Session
from splitctl.session.texts import Fed, TextStream, Usage

__all__ = ["Fed", "Library", "NativeError", "Session", "TextStream", "Usage"]
