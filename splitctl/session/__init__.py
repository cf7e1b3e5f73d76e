"""An in-process session: decoding, switching, saving and restoring."""

from __future__ import annotations

from splitctl.session.session import Session

__all__ = ["Session"]
