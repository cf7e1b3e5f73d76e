"""What the user has set, in ``splitctl.json`` of LLM's folder, and the GGUF files that follow from it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llm

from splitctl.errors import ConfigInvalid
from splitctl.placement import Placement
from splitctl.places import hub_folder, hub_snapshots

_WANTED = '{"models": ["/a/folder", "/a/file.gguf"], "placement": {"devices": "CUDA0,CUDA1", "n_ctx": 8192}}'
#: Files that come with a model and are none: later parts of a split one, and what sees and hears.
_NO_MODEL = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$|mmproj", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user has set.

    Attributes:
        models: files, and folders of them.
        placement: where the models of files are placed.
    """

    models: tuple[Path, ...] = ()
    placement: Placement = field(default_factory=Placement)


def settings_path() -> Path:
    """Name the file of the settings; it may be missing."""
    folder: Path = llm.user_dir()  # type: ignore[no-untyped-call]
    return folder / "splitctl.json"


def settings() -> Settings:
    """Read the settings; raises ConfigInvalid for what is none."""
    path = settings_path()
    try:
        plain: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Settings()
    except (OSError, ValueError) as error:
        raise ConfigInvalid(str(path), str(error), _WANTED) from error
    if not isinstance(plain, dict) or (unknown := plain.keys() - {"models", "placement"}):
        raise ConfigInvalid(str(path), plain if not isinstance(plain, dict) else min(unknown), _WANTED)
    models = plain.get("models", [])
    if not isinstance(models, list) or not all(isinstance(one, str) and one for one in models):
        raise ConfigInvalid(str(path), models, _WANTED)
    return Settings(tuple(Path(one).expanduser() for one in models), Placement.from_json(plain.get("placement", {})))


def files(named: tuple[Path, ...]) -> dict[str, Path]:
    """Give the GGUF files by name: those that were named, and those of the cache of Hugging Face's tools.

    A name is the path below the folder that was named, or OWNER/REPOSITORY/PATH. The first of a name counts.
    """
    found: dict[str, Path] = {}
    for one in named:
        if one.is_dir():
            for path in _models_below(one):
                found.setdefault(str(path.relative_to(one)), path)
        else:
            found.setdefault(one.name, one)
    for repository in sorted(hub_folder(os.environ).glob("models--*")):
        for newest in hub_snapshots(repository)[:1]:
            for path in _models_below(newest):
                owner_and_name = repository.name.removeprefix("models--").replace("--", "/")
                found.setdefault(f"{owner_and_name}/{path.relative_to(newest)}", path)
    return found


def _models_below(folder: Path) -> Iterator[Path]:
    yield from sorted(path for path in folder.rglob("*.gguf") if path.is_file() and not _NO_MODEL.search(path.name))
