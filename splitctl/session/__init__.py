"""An in-process session: decoding, switching, saving and restoring."""

from __future__ import annotations

from splitctl.ipc.stop_texts import Usage
from splitctl.session.session import Session
from splitctl.session.texts import Fed, TextStream

__all__ = ["Fed", "Session", "TextStream", "Usage"]
