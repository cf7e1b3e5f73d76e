"""Where the user's files lie: what outlives a session, what only saves time, and models of other tools."""

from __future__ import annotations

from collections.abc import Mapping
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


def hub_folder(env: Mapping[str, str]) -> Path:
    """Name the folder where Hugging Face's tools keep what they downloaded; it may be missing.

    Args:
        env: HF_HUB_CACHE, HF_HOME and XDG_CACHE_HOME count, in this order.
    """
    if named := env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE"):
        return Path(named)
    home = env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    return Path(home) / "hub"


def hub_snapshots(repository: Path) -> list[Path]:
    """List the revisions of a repository's folder there, the one that "main" names first, then the newest."""
    snapshots, main = repository / "snapshots", repository / "refs" / "main"
    if not snapshots.is_dir():
        return []
    revisions = sorted((one for one in snapshots.iterdir() if one.is_dir()), key=lambda one: -one.stat().st_mtime_ns)
    named = main.read_text(encoding="utf-8").strip() if main.is_file() else ""
    return sorted(revisions, key=lambda one: one.name != named)


#: A user without HOME and without an entry in the system's list has this home, as containers give it.
_HOMELESS = Path("/")
