"""Model files: found in the cache of Hugging Face's tools, their headers as text, and their vocabularies alone."""

from __future__ import annotations

import os
from fnmatch import fnmatch
from pathlib import Path

from llama_native import Library, Model, ModelParams
from splitctl.errors import ConfigInvalid
from splitctl.model.header import read_header
from splitctl.places import hub_folder, hub_snapshots


def cached(
    repo_id: str,
    filename: str | None,
    *,
    local_dir: str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Path:
    """Find a file of a repository that was downloaded before; nothing is downloaded.

    Args:
        repo_id: "owner/name".
        filename: the file's path in the repository, or a pattern such as "*q4_k_m.gguf".
        local_dir: the folder that it was downloaded to, where it was not the cache.
        cache_dir: the cache; None: HF_HUB_CACHE, HF_HOME or the user's.

    Raises:
        ConfigInvalid: no such file is there, or the pattern fits several.
    """
    parts = repo_id.split("/")
    if len(parts) not in {1, 2} or not all(part and not part.startswith(".") for part in parts):
        raise ConfigInvalid("repo_id", repo_id, "owner/name")
    pattern = filename or "*.gguf"
    root = Path(cache_dir) if cache_dir is not None else hub_folder(os.environ)
    repository = root / f"models--{'--'.join(parts)}"
    folders = hub_snapshots(repository) if local_dir is None else [Path(local_dir)]
    for folder in folders:
        files = sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file())
        found = [one for one in files if one == pattern] or [one for one in files if fnmatch(one, pattern)]
        if len(found) > 1:
            # The first part of a split model brings the others along.
            found = [one for one in found if "-00001-of-" in one] if all("-of-" in one for one in found) else found
        if len(found) > 1:
            raise ConfigInvalid("filename", filename, f"a pattern that fits one file, not {' '.join(found)}")
        if found:
            return folder / found[0]
    searched = " ".join(map(str, folders)) or f"{repository / 'snapshots'}, which is not there"
    wanted = f"a file that was downloaded before (hf download {repo_id} {pattern}); searched: {searched}"
    raise ConfigInvalid("filename", filename, wanted)


def load_vocabulary(path: str, library: Library | None) -> Model:
    """Load the vocabulary of a GGUF alone; llama_native.NativeError where the library refuses it."""
    return Model.load(library or Library.open(env=dict(os.environ)), path, ModelParams(vocab_only=True))


def metadata_of(path: str) -> dict[str, str]:
    """Return the header's single values by key, as texts; lists are left out.

    Raises:
        BadModelFile: the file is no GGUF, or is damaged.
    """
    values = read_header(Path(path)).values
    return {key: _text(value) for key, value in values.items() if not isinstance(value, tuple | list)}


def _text(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            return f"{value:.6f}"
    return str(value)
