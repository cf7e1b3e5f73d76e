"""An in-process session: text, decoding, switching, saving and restoring."""

from __future__ import annotations

from llama_native import Library, NativeError
from splitctl.ipc.stop_texts import Usage
from splitctl.session.session import Session
from splitctl.session.texts import Fed, TextStream

__all__ = ["Fed", "Library", "NativeError", "Session", "TextStream", "Usage"]
