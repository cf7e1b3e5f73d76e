"""Runs `splitctl state` in this process, as it runs; headers of the models that goldens were taken from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from splitctl.cli.main import main
from splitctl.model.facts import ModelFacts, read_facts
from tools.gguf_out import write_gguf
from tools.make_dummies import recipes, to_metadata
from tools.make_goldens import VARIANTS


def told(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any, str]:
    """Status, the object of --json, and stderr."""
    code = main(["state", *map(str, arguments), "--json"])
    out, err = capfd.readouterr()
    return code, json.loads(out), err


def said(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str], str]:
    """Status, the lines for people, and stderr."""
    code = main(["state", *map(str, arguments)])
    out, err = capfd.readouterr()
    return code, out.splitlines(), err


def header(model: str, folder: Path) -> Path:
    """A file with a dummy model's metadata and no tensors, which is what a state is judged by."""
    changes = VARIANTS[model].changes if model in VARIANTS else {}
    recipe = recipes()[VARIANTS[model].recipe if model in VARIANTS else model]
    entries = [(key, kind, changes.get(key.partition(".")[2], value)) for key, kind, value in recipe]
    path = folder / f"{model}.gguf"
    write_gguf(path, to_metadata(entries), (), ())
    return path


def facts_of(model: str, folder: Path) -> ModelFacts:
    """What that file says."""
    return read_facts(header(model, folder))
