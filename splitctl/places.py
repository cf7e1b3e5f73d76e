"""Where the user's files lie: what outlives a session, and what only saves time."""

from __future__ import annotations

from pathlib import Path

import platformdirs


def state_folder() -> Path:
    """Name the folder of saved and parked sessions; nothing is made."""
    try:
        return platformdirs.user_state_path("splitctl")
    except RuntimeError:
        return _HOMELESS / ".local" / "state" / "splitctl"


def cache_folder() -> Path:
    """Name the folder of what can be found out again; nothing is made."""
    try:
        return platformdirs.user_cache_path("splitctl")
    except RuntimeError:
        return _HOMELESS / ".cache" / "splitctl"


#: A user without HOME and without an entry in the system's list has this home, as containers give it.
_HOMELESS = Path("/")
