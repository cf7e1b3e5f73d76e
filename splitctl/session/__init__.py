"""An in-process session: decoding, switching, saving and restoring."""

from __future__ import annotations

from splitctl.session.session import Session
from splitctl.session.texts import Fed, TextStream, Usage

__all__ = ["Fed", "Session", "TextStream", "Usage"]
